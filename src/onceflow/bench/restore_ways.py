"""Restores of local copies from Kafka, in every way in which it is done: records a second, and processor time a record.

Each restore runs in a process of its own, as it does in a driver or in a worker of Spark, but without Spark. What the
processes import is not measured. Every store is compared with what is in the topics: its checksum, and how many rows of
each kind it has.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.bench.environment import PARTITIONS, Bench
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.errors import EnvironmentUnusableError
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.record_columns import HEADERS
from onceflow.state.format import rows, stamps
from onceflow.state.joins.copies import open_copy
from onceflow.state.joins.spec import JoinSpec
from onceflow.state.local.format import Goal
from onceflow.state.local.opening import open_partition
from onceflow.state.stores.base import Store
from onceflow.state.stores.choice import check_installed, store_class

FLOW = "bench-restore"
_NOBODY = ProducerIdAndEpoch(-1, -1, transactional=False)
_SECONDS = 600.0
_BATCH_ROWS = 20_000
_FAR_MS = 4_000_000_000_000


@dataclass(frozen=True)
class Choices:
    """What to measure.

    Args:
        keys: how many rows each table has. rounds: how often each way is run; medians are reported.
        servers: of a running cluster; None: a broker is started.
    """

    keys: int
    rounds: int
    servers: str | None = None


@dataclass(frozen=True)
class Way:
    """One way in which a copy is restored.

    Args:
        records: which of `RECORDS` are restored. run: restores some partitions, and returns the stores.
        kinds: how many rows of each kind there are for a record, by letter.
    """

    name: str
    records: str
    run: Callable[[Order], list[Store]]
    kinds: Mapping[str, int] = field(default_factory=lambda: {"v": 1})
    processes: int = 1
    store: str = "lmdb"


@dataclass(frozen=True)
class Order:
    """What one process restores. ``ends`` are the offsets by partition."""

    servers: str
    topic: str
    ends: Mapping[int, int]
    folder: Path
    way: str

    @property
    def store(self) -> type[Store]:
        return store_class(WAYS[self.way].store)


@dataclass(frozen=True)
class _Spent:
    """What one process says: when it has begun and ended (monotonic seconds), its processor time, and its rows."""

    began: float
    ended: float
    cpu_s: float
    kinds: Mapping[str, int]
    problem: str


def run(choices: Choices, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure all ways; yields one result (a JSON object) after the other. ``correct`` is what a check found."""
    from onceflow.broker.local import LocalBroker

    with tempfile.TemporaryDirectory(prefix="onceflow-") as folder, ExitStack() as stack:
        servers = choices.servers
        if servers is None:
            say("starting a broker")
            servers = stack.enter_context(LocalBroker(Path(folder) / "broker")).bootstrap_servers
        bench = Bench(None, servers, (), Path(folder) / "state", say)
        topics: dict[str, str] = {}
        try:
            for name in WAYS:
                way = WAYS[name]
                if way.records not in topics:
                    say(f"writing {choices.keys:,} records of {way.records}")
                    topics[way.records] = topic = f"{FLOW}-{uuid.uuid4().hex[:8]}"
                    fill(bench, topic, way.records, choices.keys)
                say(name)
                try:
                    runs = [_measured(bench, way, topics[way.records]) for _ in range(choices.rounds)]
                except EnvironmentUnusableError as lacking:
                    say(f"{name} is left out: {lacking.what}")
                    continue
                yield _summary(way, runs, choices.keys)
        finally:
            bench.delete(*topics.values(), *[f"{topic}{INTERNAL_SUFFIX}" for topic in topics.values()])


def _summary(way: Way, runs: list[list[_Spent]], keys: int) -> dict[str, Any]:
    seconds = [max(each.ended for each in spent) - min(each.began for each in spent) for spent in runs]
    cpu_s = [sum(each.cpu_s for each in spent) for spent in runs]
    want = {kind: keys * count for kind, count in way.kinds.items()}
    problems = [each.problem for spent in runs for each in spent if each.problem]
    for spent in runs:
        found = {kind: sum(each.kinds.get(kind, 0) for each in spent) for kind in want}
        if found != want:
            problems.append(f"rows by kind are {found}, expected {want}")
    return {
        "bench": "restore",
        "way": way.name,
        "processes": way.processes,
        "records": keys,
        "records_per_s": round(keys / statistics.median(seconds)),
        "records_per_s_of_cpu": round(keys / max(statistics.median(cpu_s), 1e-6)),
        "cpu_us_per_record": round(statistics.median(cpu_s) / keys * 1e6, 2),
        "correct": problems[0] if problems else "yes",
    }


def _measured(bench: Bench, way: Way, topic: str) -> list[_Spent]:
    """Restore once, from nothing."""
    shutil.rmtree(bench.folder, ignore_errors=True)
    check_installed(way.store)
    cluster = Cluster(ClientSettings(bench.servers))
    try:
        deadline = Deadline(60, f"connecting to {bench.servers}")
        cluster.connect(deadline)
        reader = CommittedReader(cluster)
        read = _topic_read(topic, way.records)
        ends = {partition: reader.end(read, partition) for partition in range(PARTITIONS)}
    finally:
        cluster.close()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(way.processes)
    answers = context.SimpleQueue()
    parts = [{n: ends[n] for n in ends if n % way.processes == at} for at in range(way.processes)]
    orders = [Order(bench.servers, topic, part, bench.folder, way.name) for part in parts]
    started = [context.Process(target=_restore, args=(order, barrier, answers), daemon=True) for order in orders]
    for process in started:
        process.start()
    for process in started:
        process.join(_SECONDS)
        if process.exitcode != 0:
            raise EnvironmentUnusableError(
                "A process of the benchmark has ended without a result",
                detail=f"{way.name}: exit code {process.exitcode}",
                next_step="run `onceflow doctor`, which checks this machine",
            )
    return [answers.get() for _ in started]


def _restore(order: Order, barrier: Any, answers: Any) -> None:
    """What a process does."""
    way = WAYS[order.way]
    barrier.wait(_SECONDS)
    began, cpu_s = time.monotonic(), time.process_time()
    stores = way.run(order)
    ended, cpu_s = time.monotonic(), time.process_time() - cpu_s
    kinds: dict[str, int] = {}
    problem = ""
    for store in stores:
        for kind, count in store.rows_by_kind().items():
            kinds[kind] = kinds.get(kind, 0) + count
        if not store.checksum_holds():
            problem = "a checksum does not match"
        store.close()
    answers.put(_Spent(began, ended, cpu_s, kinds, problem))


# ---- ways --------------------------------------------------------------------------------------------


def _of_flow(order: Order, *, stamped: bool = False) -> list[Store]:
    cluster = Cluster(ClientSettings(order.servers))
    reader = CommittedReader(cluster)
    internal = _topic_read(order.topic, WAYS[order.way].records) != order.topic
    try:
        return [
            open_partition(
                order.folder / str(partition),
                order.store,
                Goal(
                    FLOW,
                    order.topic,
                    partition,
                    "",
                    "",
                    table_end=0 if internal else end,
                    internal_end=end if internal else 0,
                ),
                reader,
                verify=True,
                now_ms=clock_ms(),
                stamped=stamped,
            ).store
            for partition, end in order.ends.items()
        ]
    finally:
        cluster.close()


def _of_ids(order: Order) -> list[Store]:
    return _of_flow(order, stamped=True)


def _of_join(order: Order) -> list[Store]:
    cluster = Cluster(ClientSettings(order.servers))
    reader = CommittedReader(cluster)
    spec = JoinSpec(
        "table", order.topic, "", PARTITIONS, None, None, True, order.store, FLOW, "run", order.folder, 86_400_000
    )
    try:
        return [open_copy(spec, partition, end, reader) for partition, end in order.ends.items()]
    finally:
        cluster.close()


def _of_table(order: Order) -> list[Store]:
    from onceflow import Table

    with Table(order.topic, bootstrap_servers=order.servers, state_dir=order.folder):
        pass
    found = sorted({file.parent for file in order.folder.rglob("data.mdb")})
    return [order.store.open(folder, read_only=True) for folder in found]


def _only_read(order: Order) -> list[Store]:
    cluster = Cluster(ClientSettings(order.servers))
    reader = CommittedReader(cluster)
    try:
        for partition, end in order.ends.items():
            for _ in reader.read(order.topic, partition, 0, end):
                pass
    finally:
        cluster.close()
    return []


ROWS, EXPIRING, ENTRIES, TIMERS, IDS = "values", "values that expire", "map entries", "timers", "ids"

WAYS = {
    way.name: way
    for way in (
        Way("a flow, by one process", ROWS, _of_flow),
        Way("a flow, by two processes", ROWS, _of_flow, processes=2),
        Way("a table (Table, table serve)", ROWS, _of_table),
        Way("a joined table", ROWS, _of_join),
        Way("a flow, store='memory'", ROWS, _of_flow, store="memory"),
        Way("a flow, store='rocksdb'", ROWS, _of_flow, store="rocksdb"),
        Way("a flow, values that expire", EXPIRING, _of_flow, {"v": 1, "X": 1}),
        Way("a flow, map entries", ENTRIES, _of_flow, {"m": 1}),
        Way("a flow, timers", TIMERS, _of_flow, {"t": 1, "T": 1}),
        Way("ids of Flow.deduplicate", IDS, _of_ids, {"S": 1}),
        Way("only read, nothing written", ROWS, _only_read, {}),
    )
}


# ---- topics ------------------------------------------------------------------------------------------


def _topic_read(topic: str, records: str) -> str:
    return topic + INTERNAL_SUFFIX if records in (ENTRIES, TIMERS) else topic


def fill(bench: Bench, topic: str, records: str, keys: int) -> None:
    """Create the two topics of a table, and write its rows, in no order."""
    from onceflow.testing.broker import create_topic

    for name in (topic, topic + INTERNAL_SUFFIX):
        create_topic(bench.servers, name, PARTITIONS, {"cleanup.policy": "compact"})
    ids = list(range(keys))
    random.Random(1).shuffle(ids)
    cluster = Cluster(ClientSettings(bench.servers))
    try:
        producer = Producer(cluster, transactional_id=None, deadline=Deadline(_SECONDS, f"writing to {topic}"))
        for partition in range(PARTITIONS):
            part = ids[partition::PARTITIONS]
            for at in range(0, len(part), _BATCH_ROWS):
                found = [_record(records, each) for each in part[at : at + _BATCH_ROWS]]
                headers = [(rows.EXPIRES_HEADER, b"%d" % _FAR_MS)] if records == EXPIRING else []
                for batch in encode_batches(
                    pa.array([key for key, _ in found], pa.binary()),
                    pa.array([value for _, value in found], pa.binary()),
                    pa.array([headers] * len(found), HEADERS) if headers else None,
                    None,
                    identity=_NOBODY,
                    base_sequence=-1,
                    compression="none",
                    max_batch_bytes=900_000,
                    default_timestamp_ms=clock_ms(),
                ):
                    producer.send(_topic_read(topic, records), partition, batch)
        producer.flush()
    finally:
        cluster.close()


def _record(records: str, number: int) -> tuple[bytes, bytes]:
    key = b"acc-%07d" % number
    if records == ENTRIES:
        return rows.map_key(key, b"open", b"1"), rows.pack(b"%d" % number)
    if records == TIMERS:
        return rows.timer_key(key, b"expiry"), rows.pack(rows.timer_payload(b"e", _FAR_MS + number))
    if records == IDS:
        return key, stamps.row_of(number)[1:]
    return key, b'{"balance":%d,"count":1}' % (number % 100)

"""Both engines do the same: the same source ranges and the same records, from all that a source can contain."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import DataFrame

from onceflow import DataLossError, Flow
from onceflow.protocol.progress import PROGRESS_TOPIC, decode
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

ENGINES = ("direct", "spark")
TIME_MS = 1_700_000_000_000
COLUMNS = ("key", "value", "headers", "timestamp")
MakeTopic = Callable[..., str]
_times = itertools.count(TIME_MS)


class Source:
    """Writes everything that a log can contain. Every record has a timestamp of its own, which tells it apart."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, compression: str = "zstd") -> None:
        self.topic, self._partitions = topic, partitions
        settings = {"bootstrap.servers": bootstrap, "linger.ms": 2, "compression.type": compression}
        self._plain = confluent_kafka.Producer(settings)
        self._transactional = confluent_kafka.Producer({**settings, "transactional.id": f"writer-of-{topic}"})
        self._transactional.init_transactions(30)
        self.partition_of: dict[int, int] = {}

    def fill(self) -> None:
        """Committed, aborted, empty and no transactions in turn; the last offset is that of a marker."""
        self._write(self._plain, "plain")
        for name, count, commit in (("a", 40, True), ("b", 60, False), ("none", 0, True), ("c", 25, True)):
            self._transaction(name, count, commit=commit)
        self._write(self._plain, "between", 7)
        self._transaction("d", 30, commit=True)
        self._transaction("e", 9, commit=False)

    def _transaction(self, name: str, count: int, *, commit: bool) -> None:
        self._transactional.begin_transaction()
        self._write(self._transactional, name, count)
        if commit:
            self._transactional.commit_transaction(30)
        else:
            self._transactional.abort_transaction(30)

    def _write(self, producer: Any, name: str, count: int = 50) -> None:
        for n, partition in itertools.product(range(count), range(self._partitions)):
            time_ms = next(_times)
            key = None if n % 11 == 5 else b"" if n % 11 == 6 else b"key-%d" % (n % 13)
            value = None if n % 10 == 3 else b"" if n % 10 == 4 else f"ä {name} {partition} {n}".encode() + b"\xff" * n
            headers = [[], [("h", b"\xff"), ("h", None), ("ü", b"")], [("n", b"%d" % n)]][n % 3]
            producer.produce(self.topic, value, key, partition, timestamp=time_ms, headers=headers)
            self.partition_of[time_ms] = partition
        assert producer.flush(30) == 0


@dataclass(frozen=True)
class Result:
    """What one flow has left behind.

    Args:
        read: offsets of each source that its batches have read.
        covered: where the first batch has begun and the last one has ended, from its progress records.
    """

    query: Any
    read: Mapping[str, int]
    covered: tuple[Any, Any]
    records: list[independent.Seen]


class Engines:
    """Runs the same flow with each engine.

    Args:
        by_tasks: whether tasks read the records of the direct engine, not the driver.
    """

    def __init__(self, bootstrap: str, spark: Any, make_topic: MakeTopic, *, by_tasks: bool) -> None:
        self.bootstrap, self.spark, self.make_topic, self.by_tasks = bootstrap, spark, make_topic, by_tasks

    def run(
        self, engine: str, build: Callable[[Flow], DataFrame], *, target: str = "", partitions: int = 3, **write: Any
    ) -> Result:
        target = target or self.make_topic("out", partitions)
        if self.by_tasks and engine == "direct":
            write["small_batch_rows"] = 0
        flow = Flow(f"{engine}-{target}", self.spark, bootstrap_servers=self.bootstrap)
        try:
            query = flow.write(build(flow), topic=target, once=True, engine=engine, **write).start()
            try:
                assert query.awaitTermination(60)
            finally:
                query.stop()
        finally:
            flow.close()
        assert query.engine == engine
        read: Counter[str] = Counter()
        if engine == "direct" and query.batches:
            assert any("task" in batch.path for batch in query.batches) == self.by_tasks
        for batch in query.batches:
            read.update(batch.read)
        progress = self.progress(flow.name)
        records = independent.read_topic(self.bootstrap, target, decided=True)
        return Result(query, dict(read), (progress[0].offsets, progress[-1].offsets), records)

    def both(self, build: Callable[[Flow], DataFrame], **options: Any) -> tuple[Result, Result]:
        direct, spark = (self.run(engine, build, **options) for engine in ENGINES)
        assert direct.read == spark.read
        assert direct.covered == spark.covered, "where the first batch begins, and where the last one ends"
        assert direct.records, "a comparison of nothing"
        return direct, spark

    def progress(self, flow: str) -> list[Any]:
        seen = independent.read_topic(self.bootstrap, PROGRESS_TOPIC, decided=True)
        return [decode(each.key, each.value) for each in seen if each.key == flow.encode() and each.value is not None]


@pytest.fixture(params=["driver", "tasks"])
def engines(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic, request: Any) -> Engines:
    return Engines(onceflow_broker, onceflow_spark, make_topic, by_tasks=request.param == "tasks")


def filled(engines: Engines, partitions: int = 1, **options: Any) -> Source:
    source = Source(engines.bootstrap, engines.make_topic("in", partitions), partitions, **options)
    source.fill()
    return source


def content(seen: independent.Seen, *, timestamp: bool = True) -> tuple[Any, ...]:
    return seen.key, seen.value, seen.headers, seen.timestamp_ms if timestamp else None


def by_partition(result: Result, **options: Any) -> dict[int, list[Any]]:
    """The records of each output partition in order, without those whose missing key allows any partition."""
    found = defaultdict(list)
    for seen in sorted(result.records, key=lambda each: (each.partition, each.offset)):
        if seen.key is not None:
            found[seen.partition].append(content(seen, **options))
    return dict(found)


def by_both_partitions(result: Result, *sources: Source) -> dict[Any, list[Any]]:
    """The records that went from one source partition to one output partition, in order."""
    place = {at: (source.topic, n) for source in sources for at, n in source.partition_of.items()}
    found = defaultdict(list)
    for seen in sorted(result.records, key=lambda each: (each.partition, each.offset)):
        found[place[seen.timestamp_ms], seen.partition].append(content(seen))
    return dict(found)


def whole(result: Result, **options: Any) -> Counter[Any]:
    return Counter(content(seen, **options) for seen in result.records)


# ---- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_every_kind_of_record_of_one_partition(engines: Engines, compression: str) -> None:
    source = filled(engines, compression=compression)
    direct, spark = engines.both(
        lambda flow: flow.read(source.topic, include_headers=True).select(*COLUMNS), compression=compression
    )
    assert whole(direct) == whole(spark)
    assert by_partition(direct) == by_partition(spark), "in this order, byte by byte"
    assert len(direct.records) == 152, "committed records only"
    for seen in (direct.records, spark.records):
        assert any(each.key is None for each in seen)
        assert any(each.value is None for each in seen)
        assert any(each.headers for each in seen)


def test_values_alone(engines: Engines) -> None:
    """Without headers and timestamps: what is not selected is not written."""
    source = filled(engines)
    direct, spark = engines.both(lambda flow: flow.read(source.topic).select("key", "value"))
    assert by_partition(direct, timestamp=False) == by_partition(spark, timestamp=False)
    assert whole(direct, timestamp=False) == whole(spark, timestamp=False)
    assert not any(each.headers for each in direct.records)


@pytest.mark.parametrize("partitioner, guarantee", [("key", "at_least_once"), ("round_robin", "at_most_once")])
def test_two_sources_with_many_partitions(engines: Engines, partitioner: str, guarantee: str) -> None:
    one, other = filled(engines, 4), filled(engines, 3)

    def build(flow: Flow) -> DataFrame:
        first, second = (flow.read(each.topic, include_headers=True).select(*COLUMNS) for each in (one, other))
        return first.union(second)

    direct, spark = engines.both(build, partitions=4, partitioner=partitioner, guarantee=guarantee)
    assert whole(direct) == whole(spark)
    if partitioner == "key":
        keyed = [by_both_partitions(without_null_keys(each), one, other) for each in (direct, spark)]
        assert keyed[0] == keyed[1]


def test_records_stay_in_their_partition(engines: Engines) -> None:
    source = filled(engines, 4)
    direct, spark = engines.both(
        lambda flow: flow.read(source.topic, include_headers=True).select(*COLUMNS), partitions=4, partitioner="source"
    )
    places = by_both_partitions(direct, source)
    assert places == by_both_partitions(spark, source), "also those without a key, in this order"
    assert sorted(places) == [((source.topic, n), n) for n in range(4)]


def without_null_keys(result: Result) -> Result:
    """A record without a key may go to any partition."""
    return replace(result, records=[each for each in result.records if each.key is not None])


@pytest.mark.parametrize("fail", [True, False])
def test_records_that_have_expired_before_the_start(engines: Engines, fail: bool) -> None:
    """The log starts within a batch, after it was read for the first time."""
    source = filled(engines)
    targets = {engine: engines.make_topic("out", 3) for engine in ENGINES}

    def build(flow: Flow) -> DataFrame:
        return flow.read(source.topic, include_headers=True, fail_on_data_loss=fail).select(*COLUMNS)

    before = [engines.run(engine, build, target=targets[engine]) for engine in ENGINES]
    source.fill()
    start = before[0].covered[1][source.topic][0]
    delete_before(engines.bootstrap, source.topic, start + 20)
    if fail:
        lost = [refused(engines, engine, build, targets[engine]) for engine in ENGINES]
        assert lost[0] == lost[1]
        return
    direct, spark = (engines.run(engine, build, target=targets[engine]) for engine in ENGINES)
    assert direct.covered == spark.covered
    assert by_partition(direct) == by_partition(spark)
    assert whole(direct) == whole(spark)
    assert len(direct.records) == 2 * 152 - 20


def refused(engines: Engines, engine: str, build: Callable[[Flow], DataFrame], target: str) -> tuple[str, Any]:
    """How a run was refused, and where the flow is then."""
    with pytest.raises(DataLossError) as caught:
        engines.run(engine, build, target=target)
    return str(caught.value.topic), engines.progress(f"{engine}-{target}")[-1].offsets


def delete_before(bootstrap: str, topic: str, offset: int) -> None:
    admin, place = AdminClient({"bootstrap.servers": bootstrap}), TopicPartition(topic, 0, offset)
    admin.delete_records([place])[place].result(30)


# ---- with a process step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_process_step(engines: Engines, ledger: Any, tmp_path: Path, guarantee: str) -> None:
    """Outputs and the table topic, record by record."""
    source = engines.make_topic("in", 3)
    independent.fill(engines.bootstrap, source, ledger.inputs(0, 900))
    tables = {engine: engines.make_topic("table", 3, cleanup_policy="compact") for engine in ENGINES}
    results = []
    for engine in ENGINES:

        def build(flow: Flow, engine: str = engine) -> DataFrame:
            folder = tmp_path / engine
            return flow.process(flow.read(source), ledger.Ledger(), table=tables[engine], state_dir=folder)

        results.append(engines.run(engine, build, guarantee=guarantee))
    direct, spark = results
    assert direct.read[source] == spark.read[source]
    assert direct.covered == spark.covered
    assert by_key(direct.records) == by_key(spark.records), "outputs of each key in order"
    latest = [last_rows(engines.bootstrap, table) for table in tables.values()]
    assert latest[0] == latest[1]
    assert len(latest[0]) > 30


def by_key(records: list[independent.Seen]) -> dict[Any, list[Any]]:
    found = defaultdict(list)
    for seen in sorted(records, key=lambda each: (each.partition, each.offset)):
        found[seen.partition, seen.key].append((seen.value, seen.headers))
    return dict(found)


def last_rows(bootstrap: str, topic: str) -> dict[Any, Any]:
    rows = {}
    for seen in independent.read_topic(bootstrap, topic, decided=True):
        rows[seen.partition, seen.key] = (seen.value, seen.headers)
    return rows


# ---- one flow, from engine to engine -----------------------------------------------------------------------


def other_than(engine: str) -> str:
    return ENGINES[1 - ENGINES.index(engine)]


def test_a_flow_alternates(make_pipe: Any, inject: Any) -> None:
    """From start to start, every second one after an injected fault."""
    pipe = make_pipe()
    for n, engine in enumerate(("direct", "spark", "direct", "spark", "direct")):
        pipe.fill(700)
        if n % 2:
            done = pipe.committed_progress()[-1].batch_id
            inject(("write", "progress")[n // 2 % 2], "raise", batch=done + 1)
            with pytest.raises(Exception, match="injected at"):
                pipe.run(engine=other_than(engine))
            inject("init", "raise", flow="nobody")
        query = pipe.run(engine=engine)
        assert query.engine == engine
    pipe.check()
    assert [each.batch_id for each in pipe.committed_progress()] == list(range(len(pipe.committed_progress())))


def test_a_flow_with_state_alternates(make_state_pipe: Any, inject: Any) -> None:
    pipe = make_state_pipe()
    for n, engine in enumerate(("direct", "spark", "direct", "spark")):
        pipe.fill(500)
        if n:
            done = pipe.committed_progress()[-1].batch_id
            inject(("progress", "write", "audit")[n - 1], "raise", batch=done + 1)
            with pytest.raises(Exception, match="injected at"):
                pipe.run(engine=other_than(engine))
            inject("init", "raise", flow="nobody")
        pipe.run(engine=engine)
    pipe.check()


# ---- while it runs -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_partitions_that_are_added_while_the_direct_engine_runs(make_pipe: Any) -> None:
    """They are read from their first record."""
    pipe = make_pipe(partitions=1, target_partitions=3)
    pipe.fill(200)
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target, engine="direct").start()
    try:
        query.processAllAvailable()
        admin = AdminClient({"bootstrap.servers": pipe.bootstrap})
        admin.create_partitions([NewPartitions(pipe.source, 3)])[pipe.source].result(30)
        first = len(pipe.sent)
        more = [(f"new-{n}".encode(), f"{n:09d}".encode()) for n in range(first, first + 300)]
        independent.fill(pipe.bootstrap, pipe.source, more)
        pipe.sent += more
        wait_until(lambda: len(pipe.committed_progress()[-1].offsets[pipe.source]) == 3, 30, lambda: repr(query))
        query.processAllAvailable()
    finally:
        query.stop()
    pipe.check()

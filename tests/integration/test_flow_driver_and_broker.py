"""``FlowDriver`` and a real broker: the same flows over the same records write the same, in every partition.

On the broker the flows are real ones, each in its thread, in as many batches as it takes. So what is compared does not
depend on batches: for each partition and key the records in their order, without times and without the place of a dead
letter in a topic that a transaction has written to, where markers take offsets.
"""

from __future__ import annotations

import functools
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

import onceflow
from onceflow import Record, serdes, windows
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.flow_driver import FlowDriver

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
START_MS = 1_750_000_000_000
UNSTEADY = ("onceflow.error.stack", "onceflow.error.offset", "onceflow.origin.offset")

Contents = dict[str, dict[int, dict[bytes | None, list[Any]]]]


@dataclass(frozen=True)
class Sent:
    """One record for a source."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = START_MS


@dataclass(frozen=True)
class Case:
    """Flows, and what is sent to them.

    Args:
        flows: each is called with a flow and a suffix of names.
        topics: with their numbers of partitions, without the suffix. tables: of flows; each has one rows only.
        steps: each is sent when the one before was processed.
        compacted: topics that are.
    """

    flows: Sequence[Callable[..., Any]]
    topics: Mapping[str, int]
    steps: Sequence[Sequence[Sent]]
    tables: Sequence[str] = ()
    compacted: Sequence[str] = ()
    steady: Sequence[str] = field(default_factory=tuple)


def sent(topic: str, partitions: int, key: Any, value: Any, **more: Any) -> Sent:
    """A record where Kafka's default partitioner puts it; without a key, in the first partition."""
    raw_key = key.encode() if isinstance(key, str) else key
    raw = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    place = 0 if raw_key is None else int(key_partitions(pa.array([raw_key], pa.binary()), partitions)[0])
    return Sent(topic, raw_key, raw, place, **more)


# ---- both sides ----------------------------------------------------------------------------------------


def check(case: Case, servers: str, spark: Any, tmp_path: Path) -> None:
    """Run a case on both sides, and compare."""
    suffix = f"-{uuid.uuid4().hex[:8]}"
    on_broker = _on_broker(case, suffix, servers, spark, tmp_path)
    in_memory = _in_memory(case, suffix)
    for topic in {**on_broker, **in_memory}:
        assert in_memory.get(topic) == on_broker.get(topic), topic
    written = {*on_broker} - {each.topic for step in case.steps for each in step}
    assert written, "nothing was compared"


def _on_broker(case: Case, suffix: str, servers: str, spark: Any, tmp_path: Path) -> Contents:
    for topic, partitions in case.topics.items():
        policy = "compact" if topic in case.compacted else "delete"
        create_topic(servers, f"{topic}{suffix}", partitions, {"cleanup.policy": policy})
    with ExitStack() as stack:
        queries = []
        for number, build in enumerate(case.flows):
            flow = onceflow.Flow(f"flow-{number}{suffix}", spark, bootstrap_servers=servers)
            stack.callback(flow.close)
            queries.append(build(flow, suffix, state_dir=str(tmp_path)).start())
        for step in case.steps:
            _produce(servers, step, suffix)
            for query in queries * len(queries):  # what the last one writes, the first one may read
                query.processAllAvailable()
    found: Contents = {}
    for topic in [*case.topics, *case.tables]:
        for each in independent.read_topic(servers, f"{topic}{suffix}", decided=True):
            record = Record(each.key, each.value, None, each.headers, None, each.partition)
            _add(found.setdefault(topic, {}), record, case, topic)
    return found


def _produce(servers: str, step: Sequence[Sent], suffix: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    for each in step:
        producer.produce(
            f"{each.topic}{suffix}", each.value, each.key, each.partition,
            timestamp=each.timestamp_ms, headers=list(each.headers),
        )  # fmt: skip
    assert producer.flush(30) == 0


def _in_memory(case: Case, suffix: str) -> Contents:
    topics = {f"{topic}{suffix}": count for topic, count in case.topics.items()}
    flows = [
        _named(functools.partial(_built, build, suffix), f"flow_{number}{suffix.replace('-', '_')}")
        for number, build in enumerate(case.flows)
    ]
    with FlowDriver(
        *flows,
        topics=topics,
        compacted=[f"{topic}{suffix}" for topic in case.compacted],
        now_ms=time.time_ns() // 1_000_000,
        key=serdes.BYTES,
        value=serdes.BYTES,
    ) as driver:
        for step in case.steps:
            for each in step:
                driver.send(
                    f"{each.topic}{suffix}", each.key, each.value, run=False,
                    partition=each.partition, headers=each.headers, timestamp_ms=each.timestamp_ms,
                )  # fmt: skip
            driver.run()
        found: Contents = {}
        for topic in [*case.topics, *case.tables]:
            for record in driver.read(f"{topic}{suffix}", places=True):
                _add(found.setdefault(topic, {}), record, case, topic)
        return found


def _built(build: Callable[..., Any], suffix: str, flow: onceflow.Flow) -> Any:
    return build(flow, suffix)


def _named(function: Any, name: str) -> Callable[..., Any]:
    def named(flow: onceflow.Flow) -> Any:
        return function(flow)

    named.__name__ = name
    return named


def _add(found: dict[int, dict[bytes | None, list[Any]]], record: Record, case: Case, topic: str) -> None:
    headers = [each for each in record.headers if topic in case.steady or each[0] not in UNSTEADY]
    by_key = found.setdefault(record.partition or 0, {})
    one = (record.value, headers)
    if topic in case.tables:
        by_key[record.key] = [one]  # only the last one counts, and batches decide how many there are
    else:
        by_key.setdefault(record.key, []).append(one)


# ---- generated -----------------------------------------------------------------------------------------


class Sums(onceflow.Processor):
    key = serdes.STRING
    value = state = output = serdes.JSON

    def __init__(self, large: str) -> None:
        self.large = large

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        total = state.get(0)
        for record in records:
            if record.value["n"] % 13 == 0:
                raise ValueError(f"{record.value['n']} is unlucky")
            total += record.value["n"]
            rate = state.table("rates").get(key)
            topic = self.large if record.value["n"] > 90 else None
            yield Record(key, {"total": total, "rate": rate}, topic, record.headers)
            if total % 7 == 0:
                total = 0
        if total:
            state.put(total)
        else:
            state.delete()


def rates_of(suffix: str, state_dir: str | None) -> onceflow.JoinTable:
    return onceflow.JoinTable(f"rates{suffix}", key=serdes.STRING, value=serdes.JSON, state_dir=state_dir)


def sums_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.read(f"in{suffix}", include_headers=True).unionByName(flow.read(f"more{suffix}", include_headers=True))
    rows = rows.where("coalesce(from_json(CAST(value AS STRING), 'n bigint').n, 0) <> 50")
    step = flow.process(
        rows,
        Sums(f"large{suffix}"),
        table=f"sums{suffix}",
        on_error="dead-letter",
        dead_letter_topic=f"failed{suffix}",
        state_dir=state_dir,
        tables={"rates": rates_of(suffix, state_dir)},
    )
    return flow.write(step, topic=f"out{suffix}")


def sums(seed: int) -> Case:
    rng = random.Random(seed)
    topics = {"in": 3, "more": 2, "rates": 2, "out": 4, "failed": 1, "large": 2}

    def one() -> Sent:
        topic = rng.choice(["in", "in", "more"])
        value: Any = {"n": rng.randrange(100)}
        value = rng.choice([value] * 12 + [b"no JSON", None, {"other": 1}])
        headers = rng.choice([(), (("trace", b"%d" % rng.randrange(9)),)])
        return sent(topic, topics[topic], f"{topic}-{rng.randrange(9)}", value, headers=headers)

    rates = [sent("rates", 2, f"in-{n}", {"rate": n / 2}) for n in range(6)]
    steps: list[list[Sent]] = [rates]
    for _ in range(4):
        steps.append([one() for _ in range(rng.choice([1, 5, 40]))])
    steps.insert(3, [sent("rates", 2, "in-1", None), sent("rates", 2, "in-2", {"rate": 99})])
    return Case([sums_flow], topics, steps, ["sums"], ["rates"])


class Minutes(windows.WindowProcessor):
    key = serdes.STRING
    value = serdes.JSON
    window = windows.Hopping("1 minute", every="20 seconds")
    allowed_lateness = "10 seconds"
    aggregates = {"n": windows.Sum("n"), "count": windows.Count()}  # noqa: RUF012


def minutes_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.process(
        flow.read(f"in{suffix}"), Minutes(), table=f"minutes{suffix}", late_topic=f"late{suffix}", state_dir=state_dir
    )
    return flow.write(rows, topic=f"out{suffix}")


def minutes(seed: int) -> Case:
    """Records of a step are at most as late as they may be, so it does not matter in which batches they come; then some
    that are too late for all windows of the step before."""
    rng = random.Random(seed)
    steps = []
    for step in range(5):
        at = START_MS + step * 300_000
        records = [
            Sent(
                "in",
                f"key-{n % 5}".encode(),
                json.dumps({"n": n}).encode(),
                n % 2,
                timestamp_ms=at + rng.randrange(9_000),
            )
            for n in range(rng.choice([4, 30]))
        ]
        # Both partitions reach the same time in the end.
        steps.append([*records, *(Sent("in", b"end", b'{"n": 0}', p, timestamp_ms=at + 9_000) for p in (0, 1))])
        if step:
            old = at - 290_000 - 60_000
            steps.append([Sent("in", b"key-1", b'{"n": 1000}', rng.randrange(2), timestamp_ms=old) for _ in range(3)])
    return Case([minutes_flow], {"in": 2, "out": 3, "late": 1}, steps, ["minutes"], steady=["late"])


def first_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rows = flow.read(f"in{suffix}", include_headers=True)
    rows = flow.deduplicate(
        rows, id="key", within="1 hour", table=f"ids{suffix}", duplicates_topic=f"again{suffix}", late=f"late{suffix}",
        state_dir=state_dir,
    )  # fmt: skip
    return flow.write(rows, topic=f"middle{suffix}")


def ask(record: Record) -> Any:
    if record.value["n"] % 10 == 3:
        raise ValueError("three")
    return None if record.value["n"] % 10 == 4 else {"asked": record.value["n"]}


def asked_flow(flow: onceflow.Flow, suffix: str, state_dir: str | None = None) -> Any:
    rates = rates_of(suffix, state_dir)
    rows = flow.join_table(flow.read(f"middle{suffix}"), rates, on="key", columns={"rate": "double"}, how="left")
    rows = rows.selectExpr(
        "key", "CAST(to_json(struct(get_json_object(CAST(value AS STRING), '$.n') AS n, rate)) AS BINARY) AS value"
    ).where("value IS NOT NULL")
    numbers = rows.selectExpr(
        "key", "to_json(struct(CAST(get_json_object(CAST(value AS STRING), '$.n') AS INT) AS n)) AS value"
    )
    calls = onceflow.concurrently(ask, limit=4, retries=0)
    asked = flow.enrich(
        numbers,
        calls,
        topic=f"asked{suffix}",
        dead_letter_topic=f"failed{suffix}",
        value=serdes.JSON,
        output=serdes.JSON,
    )
    return flow.write(asked)


def chained(seed: int) -> Case:
    rng = random.Random(seed)
    topics = {"in": 2, "middle": 3, "again": 1, "late": 1, "rates": 1, "asked": 2, "failed": 1}
    steps = [[sent("rates", 1, f"id-{n}", {"rate": n}) for n in range(0, 40, 2)]]
    for _ in range(3):
        steps.append([sent("in", 2, f"id-{rng.randrange(40)}", {"n": rng.randrange(40)}) for _ in range(25)])
    return Case([first_flow, asked_flow], topics, steps, ["ids"], ["rates"])


GENERATED = {"sums": sums, "minutes": minutes, "chained": chained}


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_generated(name: str, seed: int, onceflow_broker: str, onceflow_spark: Any, tmp_path: Path) -> None:
    check(GENERATED[name](seed), onceflow_broker, onceflow_spark, tmp_path)

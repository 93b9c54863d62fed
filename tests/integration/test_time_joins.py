"""``Flow.join_interval`` and ``Flow.join_as_of`` on a real broker, compared with pandas over the whole input."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import pytest
from confluent_kafka import Producer

import onceflow
from onceflow import serdes
from onceflow.errors import OptionError, ProgressConflictError, SchemaError
from onceflow.planning import placement
from onceflow.testing import independent
from onceflow.testing.flow_driver import FlowDriver

pytestmark = pytest.mark.integration

START_MS = 1_700_000_000_000
LATENESS_MS = 400
NAMES = ("key", "left", "left_ms", "right", "right_ms")
AS_JSON = (
    "key",
    (
        "to_json(struct(string(key) AS key, string(left_value) AS left, unix_millis(left_timestamp) AS left_ms, "
        "string(right_value) AS right, unix_millis(right_timestamp) AS right_ms)) AS value"
    ),
)


class Sent(NamedTuple):
    right: bool
    key: str
    value: str | None
    ms: int


class Streams:
    """Two topics, a flow that joins them, and what was sent."""

    def __init__(self, pipe: Any, right: str, late: str, state_dir: Any) -> None:
        self.pipe, self.right, self.late, self.state_dir = pipe, right, late, state_dir
        self.sent: list[Sent] = []

    def send(self, records: list[Sent], *, partitions: tuple[int, int] = (3, 2)) -> None:
        """Keys are in their partitions as Kafka's default partitioner puts them, so their records have an order."""
        producer = Producer({"bootstrap.servers": self.pipe.bootstrap, "partitioner": "murmur2_random"})
        for each in records:
            topic = self.right if each.right else self.pipe.source
            value = None if each.value is None else each.value.encode()
            producer.produce(topic, value, each.key.encode(), timestamp=each.ms)
        assert producer.flush(30) == 0
        self.sent += records

    def finish(self, ms: int) -> None:
        """A record in each partition, which moves the watermark beyond everything."""
        producer = Producer({"bootstrap.servers": self.pipe.bootstrap})
        for topic, count in ((self.pipe.source, 3), (self.right, 2)):
            for partition in range(count):
                producer.produce(topic, b"", b"end", partition, timestamp=ms)
        assert producer.flush(30) == 0

    def run(self, join: Callable[..., Any], *, select: Any = AS_JSON, engine: str = "auto", **read: Any) -> Any:
        pipe = self.pipe
        with onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=pipe.bootstrap) as flow:
            left, right = (flow.read(topic, **read) for topic in (pipe.source, self.right))
            joined = join(
                flow, left, right, table=f"{pipe.flow}-waiting", late_topic=self.late, state_dir=self.state_dir
            )
            query = flow.write(joined.selectExpr(*select), topic=pipe.target, once=True, engine=engine).start()
            query.awaitTermination()
        return query

    @property
    def taken(self) -> list[Sent]:
        """What was sent, without what is in the late topic."""
        late = Counter(
            (dict(seen.headers)["onceflow.error.topic"] == self.right.encode(), seen.key, seen.value, seen.timestamp_ms)
            for seen in independent.read_topic(self.pipe.bootstrap, self.late, decided=True)
        )
        found = []
        for each in self.sent:
            record = (each.right, each.key.encode(), None if each.value is None else each.value.encode(), each.ms)
            if late[record]:
                late[record] -= 1
            else:
                found.append(each)
        assert not +late
        return found

    def results(self) -> Counter[tuple[Any, ...]]:
        found = Counter[tuple[Any, ...]]()
        for seen in independent.read_topic(self.pipe.bootstrap, self.pipe.target, decided=True):
            row = json.loads(seen.value or b"")
            found[tuple(row.get(name) for name in NAMES)] += 1
        return Counter({row: count for row, count in found.items() if row[0] != "end"})


@pytest.fixture
def streams(make_pipe: Any, make_topic: Any, tmp_path: Any) -> Streams:
    pipe = make_pipe(partitions=3, target_partitions=4)
    return Streams(pipe, make_topic("right", 2), make_topic("late", 1), tmp_path / "state")


def frames(sent: list[Sent]) -> tuple[pd.DataFrame, pd.DataFrame]:
    sides = []
    for name, is_right in (("left", False), ("right", True)):
        rows = [(each.key, each.value, each.ms) for each in sent if each.right == is_right]
        side = pd.DataFrame(rows, columns=["key", name, f"{name}_ms"]).astype({f"{name}_ms": "int64"})
        side[f"{name}_at"] = range(len(side))
        sides.append(side)
    return sides[0], sides[1]


def rows_of(joined: pd.DataFrame) -> Counter[tuple[Any, ...]]:
    rows = joined.reindex(columns=list(NAMES)).astype(object)
    rows = rows.where(rows.notna(), None)
    return Counter(tuple(int(x) if isinstance(x, float) else x for x in row) for row in rows.itertuples(index=False))


def by_interval(sent: list[Sent], before_ms: int, after_ms: int, how: str) -> Counter[tuple[Any, ...]]:
    left, right = frames(sent)
    pairs = left.merge(right, on="key")
    near = pairs.right_ms.between(pairs.left_ms - before_ms, pairs.left_ms + after_ms)
    pairs = pairs[near]
    parts = [pairs]
    if how in ("left", "full"):
        parts.append(left[~left.left_at.isin(pairs.left_at)])
    if how in ("right", "full"):
        parts.append(right[~right.right_at.isin(pairs.right_at)])
    return sum((rows_of(part) for part in parts), Counter())


def by_as_of(sent: list[Sent], how: str, tolerance: int | None) -> Counter[tuple[Any, ...]]:
    left, right = frames(sent)
    joined = pd.merge_asof(
        left.sort_values("left_ms"),
        right.sort_values("right_ms", kind="stable").assign(time=lambda df: df.right_ms),
        left_on="left_ms",
        right_on="time",
        by="key",
        tolerance=tolerance,
    )
    gone = joined.right.isna()
    joined.loc[gone, "right_ms"] = None
    return rows_of(joined if how == "left" else joined[~gone])


def history(seed: int, count: int = 400) -> list[Sent]:
    """Records of few keys: out of order, some of them late, some of them twice."""
    picked = random.Random(seed)
    sent: list[Sent] = []
    for n in range(count):
        ms = START_MS + n * 20 - picked.randrange(0, LATENESS_MS)
        if picked.random() < 0.03:
            ms -= 5 * LATENESS_MS
        right = picked.random() < 0.5
        value = None if picked.random() < 0.1 else f"{'r' if right else 'l'}{n}"
        sent.append(Sent(right, f"k{picked.randrange(12)}", value, ms))
        if picked.random() < 0.05:
            sent.append(sent[-1])
    return sent


def in_pieces(streams: Streams, join: Callable[..., Any], seed: int, engine: str) -> None:
    """Several runs, each of several batches; in between, the local copies get lost."""
    sent = history(seed)
    for number, at in enumerate(range(0, len(sent), 140)):
        streams.send(sent[at : at + 140])
        streams.run(join, engine=engine, max_records_per_batch=30)
        if number == 1:
            shutil.rmtree(streams.state_dir)
    streams.finish(START_MS + 10_000_000)
    streams.run(join, engine=engine)
    streams.finish(START_MS + 10_000_001)
    streams.run(join, engine=engine)


@pytest.mark.parametrize(
    "how, engine",
    [
        pytest.param("full", "driver", id="full-driver", marks=pytest.mark.long),
        pytest.param("full", "tasks", id="full-tasks"),
        *[pytest.param(how, "auto", id=f"{how}-auto", marks=pytest.mark.long) for how in ("inner", "left", "right")],
    ],
)
def test_intervals_are_those_of_pandas(
    streams: Streams, how: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    bounds = {"before": "250 ms", "after": "600 ms", "how": how, "allowed_lateness": LATENESS_MS / 1000}
    in_pieces(streams, lambda flow, *sides, **given: flow.join_interval(*sides, **bounds, **given), len(how), engine)
    taken = streams.taken
    assert 0 < len(streams.sent) - len(taken) < 100, "some are late"
    expected = by_interval(taken, 250, 600, how)
    assert streams.results() == expected
    assert len(expected) > 100


@pytest.mark.parametrize(
    "how, tolerance, engine",
    [
        pytest.param("left", None, "driver", id="left-driver"),
        pytest.param("left", 300, "tasks", id="tolerance-tasks", marks=pytest.mark.long),
        pytest.param("inner", None, "tasks", id="inner-tasks", marks=pytest.mark.long),
        pytest.param("inner", 300, "driver", id="inner-tolerance", marks=pytest.mark.long),
    ],
)
def test_as_of_is_that_of_pandas(
    streams: Streams, how: str, tolerance: int | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 4)
    given = {
        "how": how,
        "tolerance": None if tolerance is None else f"{tolerance} ms",
        "allowed_lateness": LATENESS_MS / 1000,
    }
    in_pieces(streams, lambda flow, *sides, **rest: flow.join_as_of(*sides, **given, **rest), 7, engine)
    taken = streams.taken
    assert 0 < len(streams.sent) - len(taken) < 100, "some are late"
    expected = by_as_of(taken, how, tolerance)
    assert streams.results() == expected
    assert len(expected) > 100


class Counts(onceflow.Processor):
    def process(self, key: Any, records: Any, state: Any) -> None:
        state.put(b"1")


def test_a_table_is_of_one_join() -> None:
    """Rows that another join would need may be gone. What another step has kept is of no use to a join."""

    def flow_of(join: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        def flow(flow: Any) -> Any:
            rows = join(flow, [flow.read(topic) for topic in ("left", "right")])
            return flow.write(rows.selectExpr("key", "left_value AS value"), topic="out")

        return flow

    def interval(before: str) -> Callable[[Any], Any]:
        return flow_of(
            lambda flow, sides: flow.join_interval(*sides, table="t", before=before, after=0, late_topic="late")
        )

    swapped = flow_of(
        lambda flow, sides: flow.join_interval(*sides[::-1], table="t", before="1 second", after=0, late_topic="late")
    )
    as_of = flow_of(lambda flow, sides: flow.join_as_of(*sides, table="t", late_topic="late"))

    def counts(flow: Any) -> Any:
        return flow.write(flow.process(flow.read("left"), Counts(), table="t"), topic="out")

    for first, second, what in (
        (interval("1 second"), interval("2 seconds"), "an inner join with the interval from -2000 to 0 ms"),
        (interval("1 second"), swapped, "an inner join with the interval from -1000 to 0 ms of right and left"),
        (interval("1 second"), as_of, "an inner as-of join with no tolerance of left and right"),
        (interval("1 second"), counts, "another step"),
        (counts, interval("1 second"), "an inner join with the interval from -1000 to 0 ms"),
    ):
        driver = FlowDriver(first)
        driver.send("left", "k", "v")
        with pytest.raises(ProgressConflictError, match=f"this is {re.escape(what)}"):
            driver.restart(second)


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"how": "outer"}, OptionError, "use one of inner, left, right, full"),
        ({"before": "-5 minutes"}, OptionError, "before='-5 minutes'"),
        ({"after": 1e300}, OptionError, "after=1e[+]300"),
        ({"after": "30000000 weeks"}, OptionError, "longer than any time"),
        ({"columns": ["key", "value", "topic", "partition"]}, SchemaError, "the left stream has none"),
        ({"columns": ["key", "value", "timestamp"]}, SchemaError, "the left stream has no column 'topic'"),
        ({"columns": ["key", "value", "timestamp", "topic"]}, SchemaError, "the left stream has no column 'partition'"),
        (
            {"columns": ["key", "value", "string(timestamp) AS timestamp", "topic", "partition"]},
            SchemaError,
            "as timestamp; it is string",
        ),
        (
            {"columns": ["1 AS key", "value", "timestamp", "topic", "partition"]},
            SchemaError,
            "'key' as string or binary; it is int",
        ),
    ],
    ids=lambda each: str(each)[:30] if isinstance(each, dict) else "",
)
def test_what_cannot_be_joined(given: dict[str, Any], error: type[Exception], said: str) -> None:
    def flow(flow: Any) -> Any:
        options = {"table": "t", "before": 0, "after": 0, "late_topic": "late", **given}
        left = flow.read("left").selectExpr(*options.pop("columns", ["*"]))
        rows = flow.join_interval(left, flow.read("right"), **options)
        return flow.write(rows.selectExpr("key", "left_value AS value"), topic="out")

    with pytest.raises(error, match=said):
        FlowDriver(flow)


def test_joins_behind_steps_and_joins_of_parts_of_one_topic() -> None:
    def flow(flow: Any) -> Any:
        rows = flow.read("in")
        parts = [flow.deduplicate(rows, id="key", table="ids", records=100), rows.where("string(value) LIKE 'r%'")]
        pairs = flow.join_interval(*parts, table="pairs", before="1 second", after="1 second", late_topic="late")
        left = pairs.selectExpr("key", "concat_ws('+', string(left_value), string(right_value)) AS value", "timestamp")
        joined = flow.join_as_of(left, flow.read("rows"), table="versions", how="left", late_topic="late")
        value = "concat_ws('/', string(left_value), string(right_value)) AS value"
        return flow.write(joined.selectExpr("key", value), topic="out")

    driver = FlowDriver(flow)
    at = driver.now_ms
    driver.send("rows", "k", b"row", timestamp_ms=at)
    driver.send("in", "k", b"left", timestamp_ms=at + 10)
    driver.send("in", "k", b"right", timestamp_ms=at + 20)
    driver.send("rows", "end", b"end", timestamp_ms=at + 50_000)
    for value in (b"left", b"right"):  # a later pair: event time of the second join is that of the first one's results
        driver.send("in", "later", value, timestamp_ms=at + 50_000)
    assert [(record.key, record.value) for record in driver.read("out", value=serdes.STRING)] == [
        ("k", "left+right/row")
    ]

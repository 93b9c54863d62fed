"""A flow whose step has side outputs of every kind, with any operator behind it, and what must be in its topics.

Drivers (``side_outputs_driver.py``) and tests use it. Pickled by value into tasks, which cannot import test modules.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import onceflow
from onceflow.testing import independent

KEYS = 40
#: From here on records may be late: all partitions have brought some by then, and the watermark is known.
LATE_FROM = 4_000

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Topics:
    """All topics of the flow. ``beside`` is a second source; ``named`` is where records go that name their topic."""

    source: str
    beside: str
    target: str
    dead: str
    late: str
    named: str
    table: str
    second_table: str


def make_topics(make_topic: Callable[..., str]) -> Topics:
    """The topic of dead letters cannot be divided among tasks, that of late records can."""
    source = make_topic("in", 4)
    return Topics(
        source=source,
        beside=make_topic("beside", 2),
        target=make_topic("out", 4),
        dead=make_topic("dead", 1),
        late=make_topic("late", 4),
        named=make_topic("named", 3),
        table=source.replace("in-", "sums-", 1),
        second_table=source.replace("in-", "again-", 1),
    )


class Sorter(onceflow.Processor):
    """Counts the records of each key; every 50th goes to another topic as well."""

    value = state = output = onceflow.serdes.JSON
    allowed_lateness = "1 second"

    def __init__(self, named: str) -> None:
        self.named = named

    def event_time(self, record: onceflow.Record) -> int:
        return int(record.value["at"])

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        count = state.get(0)
        for record in records:
            n = record.value["n"]
            count += 1
            yield onceflow.Record(key, {"n": n, "count": count})
            if n % 50 == 7:
                yield onceflow.Record(key, {"named": n}, topic=self.named)
        state.put(count)


class Again(onceflow.Processor):
    """A second step: counts once more, and refuses every 97th number."""

    value = state = output = onceflow.serdes.JSON

    def process(self, key: bytes, records: Sequence[onceflow.Record], state: Any) -> Iterator[onceflow.Record]:
        count = state.get(0)
        for record in records:
            if record.value["n"] % 97 == 3:
                raise ValueError("refused by the second step")
            count += 1
            yield onceflow.Record(key, {"n": record.value["n"], "again": count})
        state.put(count)


def inputs(first: int, count: int) -> list[Pair]:
    """Records ``first`` and on: one in a hundred is no JSON, one in two hundred is late."""
    found = []
    for n in range(first, first + count):
        key = f"key-{n * 7919 % KEYS:03d}".encode()
        if n % 100 == 13:
            found.append((key, f"no JSON {n}".encode()))
        else:
            at = 0 if _is_late(n) else 1_000_000 + n * 10
            found.append((key, json.dumps({"n": n, "at": at}).encode()))
    return found


def beside(first: int, count: int) -> list[Pair]:
    """Records of the second source."""
    return [(f"key-{n % KEYS:03d}".encode(), f"beside {n}".encode()) for n in range(first, first + count)]


def _is_late(n: int) -> bool:
    return n >= LATE_FROM and n % 200 == 50


@dataclass
class Expected:
    """What must be in each topic, as a bag of keys and values."""

    target: Counter[Pair]
    dead: Counter[Pair]
    late: Counter[Pair]
    named: Counter[Pair]


def expected(operator: str, sent: Iterable[Pair], sent_beside: Iterable[Pair]) -> Expected:
    """By an independent fold over what was sent."""
    found = Expected(Counter(), Counter(), Counter(), Counter())
    counts: Counter[bytes] = Counter()
    again: Counter[bytes] = Counter()
    for key, raw in sent:
        if raw.startswith(b"no JSON"):
            found.dead[key, raw] += 1
            continue
        n = json.loads(raw)["n"]
        if _is_late(n):
            found.late[key, raw] += 1
            continue
        counts[key] += 1
        if n % 50 == 7:
            found.named[key, _json({"named": n})] += 1
        value = _json({"n": n, "count": counts[key]})
        if operator == "second step":
            if n % 97 == 3:
                found.dead[key, value] += 1
                continue
            again[key] += 1
            value = _json({"n": n, "again": again[key]})
        found.target.update((key, each) for each in OPERATORS[operator].values(n, value))
    if operator == "union":
        found.target.update(sent_beside)
    return found


def _json(value: Any) -> bytes:
    return onceflow.serdes.JSON.encode(value)


@dataclass(frozen=True)
class Operator:
    """What stands behind the step, and what it makes of a value."""

    frame: Callable[[Any, DataFrame, Topics, dict[str, Any]], DataFrame]
    values: Callable[[int, bytes], list[bytes]] = lambda n, value: [value]


def _tagged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        values = [value + b" arrow" for value in batch.column("value").to_pylist()]
        yield pa.RecordBatch.from_arrays([batch.column("key"), pa.array(values, pa.binary())], names=["key", "value"])


def _tagged_pandas(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        yield frame.assign(value=frame["value"].map(lambda value: bytes(value) + b" pandas"))


def _number(frame: DataFrame) -> Any:
    return F.get_json_object(F.col("value").cast("string"), "$.n").cast("long")


def _joined(flow: Any, frame: DataFrame, topics: Topics, options: dict[str, Any]) -> DataFrame:
    labels = frame.sparkSession.createDataFrame([(i, f" label {i}") for i in range(5)], "id long, label string")
    joined = frame.withColumn("id", _number(frame) % 5).join(labels, "id")
    return joined.select("key", F.concat(F.col("value").cast("string"), F.col("label")).alias("value"))


def _second_step(flow: Any, frame: DataFrame, topics: Topics, options: dict[str, Any]) -> DataFrame:
    return flow.process(  # type: ignore[no-any-return]
        frame.select("key", "value"),
        Again(),
        table=topics.second_table,
        on_error="dead-letter",
        dead_letter_topic=topics.dead,
        **options,
    )


OPERATORS: dict[str, Operator] = {
    "as it is": Operator(lambda flow, frame, topics, options: frame),
    "select": Operator(lambda flow, frame, topics, options: frame.select("key", "value")),
    "where": Operator(
        lambda flow, frame, topics, options: frame.where(_number(frame) % 2 == 0),
        lambda n, value: [value] if n % 2 == 0 else [],
    ),
    "where false": Operator(
        lambda flow, frame, topics, options: frame.where(F.lit(False)),
        lambda n, value: [],
    ),
    "withColumn": Operator(
        lambda flow, frame, topics, options: frame.withColumn("value", F.concat("value", F.lit(b"!"))),
        lambda n, value: [value + b"!"],
    ),
    # Written without topic=: every row names its topic.
    "own topic": Operator(
        lambda flow, frame, topics, options: frame.withColumn("topic", F.lit(topics.target)),
    ),
    # Written with topic=, which is for all rows: the column is only a column.
    "column named topic": Operator(
        lambda flow, frame, topics, options: frame.withColumn("topic", F.lit(topics.source)),
    ),
    "union": Operator(
        lambda flow, frame, topics, options: frame.select("key", "value").union(
            flow.read(topics.beside).select("key", "value")
        ),
    ),
    "mapInArrow": Operator(
        lambda flow, frame, topics, options: frame.mapInArrow(_tagged, "key binary, value binary"),
        lambda n, value: [value + b" arrow"],
    ),
    "mapInPandas": Operator(
        lambda flow, frame, topics, options: frame.select("key", "value").mapInPandas(
            _tagged_pandas, "key binary, value binary"
        ),
        lambda n, value: [value + b" pandas"],
    ),
    "static join": Operator(_joined, lambda n, value: [value + f" label {n % 5}".encode()]),
    "explode": Operator(
        lambda flow, frame, topics, options: frame.select(
            "key", F.explode(F.array(F.col("value"), F.concat("value", F.lit(b" twice")))).alias("value")
        ),
        lambda n, value: [value, value + b" twice"],
    ),
    "repartition": Operator(lambda flow, frame, topics, options: frame.repartition(3)),
    "repartition by key": Operator(lambda flow, frame, topics, options: frame.repartition(3, "key")),
    "coalesce": Operator(lambda flow, frame, topics, options: frame.coalesce(1)),
    "second step": Operator(_second_step),
}


def frame_of(flow: Any, operator: str, topics: Topics, *, records_per_batch: int, state_dir: str) -> DataFrame:
    """The DataFrame to write."""
    options = {"state_dir": state_dir}
    output = flow.process(
        flow.read(topics.source, max_records_per_batch=records_per_batch),
        Sorter(topics.named),
        table=topics.table,
        on_error="dead-letter",
        dead_letter_topic=topics.dead,
        late_topic=topics.late,
        **options,
    )
    return OPERATORS[operator].frame(flow, output, topics, options)


def check(bootstrap: str, topics: Topics, wanted: Expected) -> None:
    """Every topic has just what it must have, by an independent consumer."""
    for name in ("target", "dead", "late", "named"):
        seen = independent.read_topic(bootstrap, getattr(topics, name), decided=True)
        got, expected = Counter((record.key, record.value) for record in seen), getattr(wanted, name)
        lost, more = expected - got, got - expected
        assert not lost, f"{name}: {lost.total()} lost, for example {list(lost)[:3]}"
        assert not more, f"{name}: {more.total()} too many, for example {list(more)[:3]}"


def use() -> None:
    """Make tasks get this module's classes with their code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

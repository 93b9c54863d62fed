"""Rows that cannot be written, made by a function of ``Flow.map``: the direct engine stops with an error that names the
flow and the batch, and writes nothing. `test_bad_input.py` has such rows made by Spark."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow.driver.batch import blame
from onceflow.planning.ownership import HEADERS
from onceflow.testing import independent

pytestmark = pytest.mark.integration

LONG = pytest.mark.long
#: What the last row of a batch has in place of something that can be written, the error, and its words.
BAD: dict[str, tuple[str, Any, type[onceflow.OnceflowError], str]] = {
    "no topic": ("topic", None, onceflow.BadRecordError, "null topic"),
    "unknown topic": ("topic", "no-such-topic", onceflow.UnknownTopicError, "'no-such-topic' does not exist"),
    "partition": ("partition", 9, onceflow.BadRecordError, "partition 9"),
    "size": ("value", b"x" * 2_000_000, onceflow.BadRecordError, "more than the limit of 1048588"),
    "header": ("headers", [{"key": None, "value": b"v"}], onceflow.BadRecordError, "header"),
}
SCHEMA = f"key binary, value binary, topic string, partition int, headers {HEADERS}, timestamp timestamp"
TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    "timestamp": pa.timestamp("us", "UTC"),
}


def spoiled(batch: pa.RecordBatch, *, column: str, last: Any, target: str) -> pa.RecordBatch:
    count = batch.num_rows
    columns: dict[str, list[Any]] = {
        "key": batch.column("key").to_pylist(),
        "value": batch.column("value").to_pylist(),
        "topic": [target] * count,
        "partition": [0] * count,
        "headers": [None] * count,
        "timestamp": [1_700_000_000_000_000] * count,
    }
    columns[column][-1] = last
    return pa.RecordBatch.from_arrays([pa.array(columns[n], k) for n, k in TYPES.items()], names=list(TYPES))


@pytest.mark.parametrize(
    "kind, engine",
    # In short, test_bad_input.py has the others.
    [pytest.param(kind, "driver", id=f"{kind}-driver", marks=LONG) for kind in BAD]
    + [
        pytest.param(kind, "tasks", id=f"{kind}-tasks", marks=() if kind in ("no topic", "header") else LONG)
        for kind in BAD
    ],
)
def test_a_row_that_cannot_be_written(
    make_pipe: Callable[..., Any], kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broker may not know a topic yet that was just made, so it is asked again for some seconds; by tasks for ten.
    monkeypatch.setattr("onceflow.client.cluster.UNKNOWN_TOPIC_S", 1.0)
    column, last, error, words = BAD[kind]
    pipe = make_pipe()
    pipe.fill(60)
    target = pipe.target

    def spoil(batch: pa.RecordBatch) -> pa.RecordBatch:
        return spoiled(batch, column=column, last=last, target=target)

    flow = pipe.open()
    rows = flow.map(flow.read(pipe.source), spoil, schema=SCHEMA)
    query = flow.write(rows, engine=engine).start()
    with pytest.raises(error, match=words) as caught:
        query.awaitTermination(90)
    assert (caught.value.flow, caught.value.batch) == (flow.name, 1)
    assert caught.value.next_step
    assert ("the row with the key b'" in caught.value.detail) == (kind in ("size", "header"))
    assert ("rows, the first with the key b'" in caught.value.detail) == (kind == "unknown topic")
    made_of = f"made of record {pipe.source}-"
    assert (made_of in caught.value.detail) == (engine == "driver" and error is onceflow.BadRecordError)
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []


@pytest.mark.long_but("expression-driver", "size-tasks")
@pytest.mark.parametrize(
    "what, engine",
    [
        *((what, "driver") for what in ("expression", "function", "size")),
        ("expression", "tasks"),
        pytest.param("function", "tasks", marks=LONG),
        ("size", "tasks"),
    ],
)
def test_the_record_that_is_at_fault_is_named(
    make_pipe: Callable[..., Any],
    engine: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of thousands, in a query of SQL. In tasks, a row that is too large is named by its key alone.

    A function may have failed by chance, so it gets a second attempt.
    """
    monkeypatch.setattr(blame, "_SECONDS", 60.0)  # of the search: a slow machine finds it, too
    pipe = make_pipe(partitions=2)
    records = [(b"k%d" % n, b"%d" % (n % 1000)) for n in range(4_000)]
    records[2_345] = (b"the bad one", b"-7")
    independent.fill(pipe.bootstrap, pipe.source, records)
    sources = independent.read_topic(pipe.bootstrap, pipe.source, decided=True)
    (bad,) = [f"{seen.topic}-{seen.partition}@{seen.offset}" for seen in sources if seen.key == b"the bad one"]
    flow = pipe.open()
    rows = flow.read(pipe.source).withColumn("n", F.expr("int(string(value))"))
    if what == "expression":
        rows = rows.selectExpr("key", "string(100 / (n + 7)) AS value")
    elif what == "function":
        rows = rows.select("key", F.udf(lambda n: str(100 // (n + 7)))("n").alias("value"))
    else:
        rows = rows.selectExpr("key", "if(n < 0, uuid() || repeat(uuid(), 60000), string(value)) AS value")
    query = flow.write(rows, topic=pipe.target, engine=engine).start()
    with pytest.raises(onceflow.OnceflowError) as caught:
        query.awaitTermination(90)
    assert len(re.findall(r"attempt \d of \d", caplog.text)) == (what == "function")
    if what == "function":
        assert "ZeroDivisionError" in caught.value.detail
        assert "correct the function" in caught.value.next_step
    if what != "size" or engine == "driver":
        # In tasks it is looked for by jobs, for a limited time: there may be some records left.
        place, _, offset = bad.partition("@")
        found = re.search(rf"record {place}@(\d+)(?: to (\d+))?", caught.value.detail)
        assert found, caught.value.detail
        first, last = int(found[1]), int(found[2] or found[1])
        assert first <= int(offset) <= last < first + (100 if engine == "tasks" else 1)
    if what == "size":
        assert "the row with the key b'the bad one'" in caught.value.detail
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []

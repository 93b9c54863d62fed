"""``Flow.map`` in tasks: what a function gets, what it may return, and how its errors read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from onceflow.driver.batch.errors import of_task
from onceflow.errors import (
    BadRecordError,
    OnceflowError,
    ProcessorError,
    SchemaError,
    StorageUnavailableError,
    data_loss,
)
from onceflow.spark import function_names
from onceflow.task.map_rows import RowsMap

SCHEMA = pa.schema([("key", pa.binary()), ("n", pa.int64())])
GIVEN = pa.RecordBatch.from_pydict(
    {"key": [b"a", b"b"], "n": [1, 2], "topic": ["in", "in"], "partition": [3, 1], "offset": [7, 5]}
)


def rows_map(function: Callable[[pa.RecordBatch], Any], schema: pa.Schema = SCHEMA) -> RowsMap:
    return RowsMap(function, "clean", 1, schema, "flow")


def returned(**columns: Any) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    made = pa.RecordBatch.from_arrays([pa.array(column) for column in columns.values()], names=list(columns))
    return lambda batch: made


def test_names_in_plans() -> None:
    name = rows_map(lambda batch: batch).__name__
    assert name == function_names.map_name(1, "clean")
    assert function_names.is_map(name)
    assert function_names.function_of_map(name) == "clean"
    assert not function_names.is_ours(name), (
        "its code is the user's: its imports are checked, and it may make many rows"
    )
    assert function_names.function_of_map(function_names.map_name(12, "<lambda>")) == "<lambda>"
    assert function_names.function_of_map("my_function") == "my_function"
    assert not function_names.is_map(function_names.step_name("map_1"))
    assert not function_names.is_step(name)


def test_columns_may_come_in_another_order_and_rows_in_any_number() -> None:
    made = rows_map(returned(n=[1, 2, 3], key=[b"x", None, b"z"])).apply(GIVEN)
    assert made.schema == SCHEMA
    assert made.to_pydict() == {"key": [b"x", None, b"z"], "n": [1, 2, 3]}
    assert rows_map(lambda batch: batch.select(["key", "n"]).slice(0, 0)).apply(GIVEN).num_rows == 0


def test_a_table_may_be_returned() -> None:
    half = GIVEN.select(["key", "n"])
    made = rows_map(lambda batch: pa.Table.from_batches([half, half.slice(1)])).apply(GIVEN)
    assert isinstance(made, pa.RecordBatch)
    assert made.to_pydict() == {"key": [b"a", b"b", b"b"], "n": [1, 2, 2]}
    assert rows_map(lambda batch: pa.Table.from_batches([], half.schema)).apply(GIVEN).num_rows == 0


def test_without_rows_the_function_is_not_called() -> None:
    def never(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise AssertionError

    assert rows_map(never).apply(GIVEN.slice(0, 0)) == pa.RecordBatch.from_pylist([], schema=SCHEMA)


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array([1, 2], pa.int8()), pa.int64()),
        (pa.array([1, 2], pa.uint64()), pa.int32()),
        (pa.array([1.0, 2.0]), pa.int32()),
        (pa.array([1, 2]), pa.float64()),
        (pa.array([None, None]), pa.binary()),
        (pa.array([None, None]), HEADERS),
        (pa.array(["ä", None]), pa.binary()),
        (pa.array([b"a", None]), pa.string()),
        (pa.array(["a", "b"], pa.large_string()), pa.string()),
        (pa.array(["a", "b"], pa.string_view()), pa.string()),
        (pa.array(["a", "b"]).dictionary_encode(), pa.binary()),
        (pa.DictionaryArray.from_arrays([0, None], pa.array(["a"], pa.string_view())), pa.string()),
        (pa.array([["a"], []], pa.list_(pa.dictionary(pa.int32(), pa.string()))), pa.list_(pa.string())),
        (pa.array([1, 2], pa.timestamp("ms", "Europe/Berlin")), pa.timestamp("us", "UTC")),
        (pa.array([[], [{"key": "h", "value": "text"}]]), HEADERS),
        (pa.array([[{"value": b"v", "key": "h"}], None]), HEADERS),
    ],
)
def test_types_that_are_cast(column: pa.Array, kind: pa.DataType) -> None:
    made = rows_map(returned(c=column), pa.schema([("c", kind)])).apply(GIVEN)
    assert made.column("c").type == kind
    plain = [value for value in column.to_pylist() if value]
    if not pa.types.is_nested(kind) and not isinstance(plain[:1] and plain[0], str | bytes):
        assert made.column("c").to_pylist() == column.to_pylist()
    assert made.column("c").null_count == column.null_count


@pytest.mark.parametrize(
    "column, kind, words",
    [
        (pa.array([1, 2]), pa.string(), "as int64, which cannot become string"),
        (pa.array(["1", "2"]), pa.int64(), "as string, which cannot become int64"),
        (pa.array([1, 2**40]), pa.int32(), r".*cannot become int32 \(Integer value 1099511627776 not in range"),
        (pa.array([1.5, 2.0]), pa.int64(), r".*cannot become int64 \(Float value 1.50* was truncated"),
        (pa.array([b"\xff", b""]), pa.string(), r"as binary, which cannot become string \(Invalid UTF8"),
        (pa.array([True, False]), pa.int64(), "as bool, which cannot become int64"),
        (pa.array([1, 2], pa.timestamp("us")), pa.timestamp("us", "UTC"), r"as timestamp\[us\], which cannot become"),
        (pa.array([1, 2], pa.timestamp("ns", "UTC")), pa.timestamp("us", "UTC"), ".*would lose data"),
        (pa.array([[{"key": "k", "val": b"v"}]]), HEADERS, "with the fields key, val"),
        (
            pa.array([{"a": {"b": 1, "c": 2}}]),
            pa.struct([("a", pa.struct([("b", pa.int64())]))]),
            "with the fields b, c",
        ),
        (pa.array([["h"], []]), HEADERS, "as list<.*: string>, which cannot become list<.*struct"),
    ],
)
def test_types_that_are_not_cast(column: pa.Array, kind: pa.DataType, words: str) -> None:
    with pytest.raises(SchemaError, match=f"Flow.map: clean returned the column 'c' {words}") as caught:
        rows_map(returned(c=column), pa.schema([("c", kind)])).apply(GIVEN)
    assert caught.value.next_step == f"return these columns, or give Flow.map another schema=: c: {kind}"


@pytest.mark.parametrize(
    "function, words",
    [
        (returned(key=[b"a"]), "returned a batch without the column 'n'"),
        (returned(key=[b"a"], n=[1], more=[1]), "returned a batch with the further column 'more'"),
        (
            lambda batch: pa.RecordBatch.from_arrays([pa.array([1]), pa.array([1])], names=["key", "key"]),
            "returned a batch with several columns 'key'",
        ),
        (lambda batch: [{"key": b"a", "n": 1}], "returned list, not a pyarrow.RecordBatch"),
        (lambda batch: None, "returned NoneType, not a pyarrow.RecordBatch"),
    ],
)
def test_what_is_not_a_batch_of_the_schema(function: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=f"Flow.map: clean {words}") as caught:
        rows_map(function).apply(GIVEN)
    error = caught.value
    assert (error.flow, error.topic) == ("flow", "in")
    assert error.detail == "rows of partition 1, 3, offsets 5 to 7"
    assert error.next_step


def test_a_function_that_fails() -> None:
    def divide(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ProcessorError) as caught:
        rows_map(divide).apply(GIVEN)
    error = caught.value
    assert error.what == "Flow.map: clean failed for a batch of 2 rows: ZeroDivisionError: by zero"
    assert (error.flow, error.topic) == ("flow", "in")
    assert "rows of partition 1, 3, offsets 5 to 7; raised in divide, test_map_rows.py:" in error.detail
    with pytest.raises(ProcessorError) as caught:
        rows_map(divide).apply(GIVEN.select(["topic"]))
    assert caught.value.topic is None, "without an offset, the topic may be that of an output"
    assert caught.value.detail.startswith("raised in divide")


def test_errors_of_onceflow_stay_what_they_are() -> None:
    def load(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise StorageUnavailableError("the bucket does not answer", next_step="wait")

    with pytest.raises(StorageUnavailableError) as caught:
        rows_map(load).apply(GIVEN)
    assert caught.value.flow == "flow"


@pytest.mark.parametrize("function", [lambda batch: batch.column("no"), lambda batch: 5])
def test_the_driver_gets_the_error_of_a_task(function: Any) -> None:
    with pytest.raises(OnceflowError) as caught:
        list(rows_map(function)(iter([GIVEN])))
    error = caught.value
    kind = f"{type(error).__module__}.{type(error).__name__}"
    found = of_task(RuntimeError(f"Traceback (most recent call last):\n  File\n{kind}: {error}\n\n\tat org.apache"))
    assert type(found) is type(error)
    assert found is not None
    assert (found.what, found.topic, found.detail, found.next_step) == (
        error.what, error.topic, error.detail, error.next_step,
    )  # fmt: skip
    assert of_task(error) is None, "it has its class"
    other = f"onceflow.errors.BatchAbortedError: score failed\n  detail: {error.detail}\n  next step: none\n"
    assert of_task(RuntimeError(other)) is None, "another attempt may help"


def test_times_are_in_utc_whatever_time_zone_the_session_has() -> None:
    times = pa.array([0, None], pa.timestamp("us", "Europe/Berlin"))
    seen = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema)
        return batch

    schema = pa.schema([("t", pa.timestamp("us", "Europe/Berlin"))])
    made = rows_map(look, schema).apply(pa.RecordBatch.from_arrays([times], names=["t"]))
    assert seen == [pa.schema([("t", pa.timestamp("us", "UTC"))])]
    assert made.schema == schema
    assert made.column("t").equals(times)


@pytest.mark.parametrize("make", [
    lambda time: pa.list_(time),
    lambda time: pa.map_(pa.string(), pa.list_(time)),
    lambda time: pa.struct([("t", time), ("naive", pa.timestamp("us"))]),
    lambda time: pa.list_(pa.struct([("t", time)])),
])  # fmt: skip
def test_times_inside_of_other_columns_are_in_utc_too(make: Callable[[Any], Any]) -> None:
    """What a function makes of them must not depend on the engine, nor on the time zone of the session."""
    berlin, utc = make(pa.timestamp("us", "Europe/Berlin")), make(pa.timestamp("us", "UTC"))
    moment = datetime(2025, 10, 26, 1, 30, tzinfo=timezone.utc)  # this hour of the day is there twice in Berlin
    values: Any = {
        "list": [[moment, None], None],
        "map": [[("a", [moment])], None],
        "struct": [{"t": moment, "naive": datetime(2025, 1, 1)}, None],
    }["map" if pa.types.is_map(berlin) else "struct" if pa.types.is_struct(berlin) else "list"]
    if pa.types.is_list(berlin) and pa.types.is_struct(berlin.value_type):
        values = [[{"t": moment}, None], None]
    seen = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema.field("c").type)
        return batch

    given = pa.RecordBatch.from_arrays([pa.array(values, berlin)], names=["c"])
    made = rows_map(look, pa.schema([("c", berlin)])).apply(given)
    assert seen == [utc]
    assert made.equals(given)


def test_it_is_sent_to_tasks() -> None:
    copy = pickle.loads(pickle.dumps(rows_map(len)))
    assert (copy.name, copy.schema, copy.flow, copy.__name__) == ("clean", SCHEMA, "flow", "onceflow_map_1_clean")


@pytest.mark.parametrize(
    "error",
    [
        data_loss("in-0", "offsets 3 to 5 have expired before they were read", "flow"),
        BadRecordError("It is too old", flow="flow", topic="in-0", detail="offset 5", next_step="leave it out"),
    ],
)
def test_the_driver_gets_what_a_task_has_found_when_it_read(error: OnceflowError) -> None:
    """No attempt helps."""
    kind = type(error).__name__
    found = of_task(
        RuntimeError(f"Traceback (most recent call last):\n  File\nonceflow.errors.{kind}: {error}\n\n\tat")
    )
    assert isinstance(found, type(error))
    assert (found.what, found.topic, found.detail, found.next_step) == (
        error.what, error.topic, error.detail, error.next_step,
    )  # fmt: skip

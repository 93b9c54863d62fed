"""Plans of the direct engine: which columns of a source they need, and what they make of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from onceflow import SchemaError
from onceflow.driver.batch.driver_program import DriverProgram, Functions, driver_program
from onceflow.planning.direct_plan import DirectPlan, DirectSource
from onceflow.planning.ownership import check_columns
from onceflow.protocol.record_columns import RecordColumns
from onceflow.protocol.timestamps import LATEST_MS
from onceflow.task.row_operators import SOURCE_TYPES, Attribute, Constant, MapRows, Select, reinterpreted
from onceflow.task.sink_form import SinkForm
from onceflow.task.source_rows import QueryRows, joined
from onceflow.task.state_tasks import engine_rows
from onceflow.task.task_program import TaskProgram, TopicProgram, TopicRead

NAMES = tuple(SOURCE_TYPES)
#: Bytes that are no text in UTF-8.
NO_TEXT = b"\xff\xc3\x28"


def source(*operators: Select | MapRows, topic: str = "in", headers: bool = False) -> TopicProgram:
    return TopicProgram(TopicRead(topic, headers, True, None), operators)


def records(count: int = 3, *, only: tuple[str, ...] = NAMES) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {
        "key": [None if n == 1 else b"k%d" % n for n in range(count)],
        "value": [NO_TEXT if n == 0 else b"v%d" % n for n in range(count)],
        "topic": ["in"] * count,
        "partition": list(range(count)),
        "offset": [10 + n for n in range(count)],
        "timestamp": [(n - 1) * 1_000 for n in range(count)],
        "timestampType": [0] * count,
        "headers": [None if n == 1 else [{"key": "h", "value": b"%d" % n}] for n in range(count)],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[n], SOURCE_TYPES[n]) for n in only], names=list(only))


def applied(plan: TopicProgram, rows: pa.RecordBatch) -> pa.RecordBatch:
    (made,) = plan.apply(dict(zip(rows.schema.names, rows.columns, strict=True)), rows.num_rows)
    return made


def select(**columns: Any) -> Select:
    """``name="value"``: that column; ``name=("value", "string")``: cast; ``name=[3, pa.int32()]``: a constant."""
    found: list[Attribute | Constant] = []
    for name, given in columns.items():
        if isinstance(given, list):
            found.append(Constant(name, *given))
        else:
            taken, cast = (given, None) if isinstance(given, str) else given
            found.append(Attribute(name, NAMES.index(taken), cast))
    return Select(tuple(found))


def test_a_source_as_it_is() -> None:
    assert applied(source(headers=True), records()) == records()
    without = source()
    assert without.columns == without.needed == NAMES[:-1]
    assert applied(without, records()) == records(only=NAMES[:-1])


def test_only_what_is_used_is_needed() -> None:
    plan = source(select(value="value", k="key", n=[3, pa.int32()]), Select((Attribute("x", 0), Attribute("n", 2))))
    assert plan.needed == ("value",)
    assert plan.columns == ("x", "n")
    made = applied(plan, records(only=("value",)))
    assert made.schema.names == ["x", "n"]
    assert made.column("x").to_pylist() == records().column("value").to_pylist()
    assert made.column("n").to_pylist() == [3] * 3
    assert applied(plan, records()) == made, "columns that are not needed may be there"


def test_a_column_that_nobody_needs_is_not_cast() -> None:
    plan = source(select(value="value", text=("partition", "string")), Select((Attribute("value", 0),)))
    assert plan.needed == ("value",)
    assert applied(plan, records()).schema.names == ["value"]


def test_columns_that_a_query_needs_of_a_plan() -> None:
    reads = [TopicRead(topic, False, True, None) for topic in ("in", "other")]
    plan = DirectPlan(tuple(map(DirectSource, reads)), NAMES[:-1])
    less = plan.only(["value", "key"])
    assert less.columns == ("value", "key")
    program = driver_program(less, None, Functions({}, {}, None), None)
    assert isinstance(program, DriverProgram)
    assert [each.needed for each in program.query.program.topics] == [("key", "value")] * 2
    (_, other) = program.query.program.topics
    assert applied(other, records(only=("key", "value"))) == records(only=("value", "key"))
    assert plan.only(NAMES[:-1]) is plan


def test_constants() -> None:
    columns = select(
        t=["out", pa.string()], b=[b"\xff", pa.binary()], nothing=[None, pa.null()], none=[None, pa.string()]
    )
    made = applied(source(columns), records())
    assert source(columns).needed == ()
    assert made.schema.types == [pa.string(), pa.binary(), pa.null(), pa.string()]
    assert made.to_pylist() == [{"t": "out", "b": b"\xff", "nothing": None, "none": None}] * 3
    assert applied(source(columns), records(0)).num_rows == 0


@pytest.mark.parametrize("operators", [0, 1], ids=["constants", "a function of constants"])
@pytest.mark.parametrize("form", [None, SinkForm(("key", "value"), ("key",), by_source=True)], ids=["rows", "sink"])
def test_a_query_that_needs_no_column_makes_a_row_of_each_record(form: SinkForm | None, operators: int) -> None:
    constants = select(key=["all", pa.string()], value=[b"1", pa.binary()])
    function = MapRows(("key", "value"), ("key", "value"), lambda batch: batch)
    plan = TaskProgram((source(constants, *[function] * operators),), ("key", "value"))
    assert plan.needed("in") == ()
    values, stamps = pa.array([b"a", None, b"c"]), np.arange(3)
    given = RecordColumns(values, values, stamps, stamps, np.zeros(3, np.int32))
    (rows,) = QueryRows(plan, form).of([(("in", 7), given)])
    assert (
        rows.select(["key", "value"]).cast(pa.schema([("key", pa.string()), ("value", pa.binary())])).to_pylist()
        == [{"key": "all", "value": b"1"}] * 3
    )
    (kept,) = joined([rows])
    assert kept.num_rows == 3


def test_columns_of_a_function_have_the_types_of_the_others() -> None:
    """Settings of Spark give them large types, and times the time zone of the session."""
    times = pa.array([5], pa.timestamp("us", tz="Europe/Berlin"))
    large = pa.array(["x"], pa.large_string()), pa.array([b"x"], pa.large_binary())
    made_by = pa.RecordBatch.from_arrays([times, *large], names=["t", "s", "b"])
    function = MapRows(NAMES[:-1], ("t", "s", "b"), lambda batch: made_by)
    made = applied(source(function), records(1, only=NAMES[:-1]))
    assert made.schema.types == [SOURCE_TYPES["timestamp"], pa.string(), pa.binary()]
    assert made.column("t").cast(pa.int64()).to_pylist() == [5]


def test_a_time_that_no_row_can_have_is_the_latest_that_it_can_have() -> None:
    """So a record whose client has counted in other units, or has no time, stops no flow."""
    plan, values = TaskProgram((source(),), NAMES[:-1]), pa.array([b"a"] * 5)
    stamps = np.array([5, 20_000_000_000_000_000, 2**63 - 1, -1, -(2**63)])
    given = RecordColumns(values, values, np.arange(5), stamps, np.zeros(5, np.int32))
    (made,) = QueryRows(plan).of([(("in", 3), given)])
    assert made.column("timestamp").cast(pa.int64()).to_pylist() == [5000, *[LATEST_MS * 1000] * 2, -1000, -1000]
    assert engine_rows(made).column("timestamp").to_pylist() == [5, LATEST_MS, LATEST_MS, -1, -1]
    form = SinkForm(("key", "value", "timestamp"), ())
    (sunk,) = QueryRows(plan, form).of([(("in", 3), given)])
    assert sunk.column("timestamp").to_pylist() == [5, LATEST_MS, LATEST_MS, -1, -1]


def test_names_that_differ_in_case_alone_are_refused() -> None:
    both = ("value", T.BinaryType()), ("Key", T.BinaryType()), ("key", T.BinaryType())
    with pytest.raises(SchemaError, match="column 'Key' and column 'key' are the same for Spark"):
        columns_of(*both)
    schema = T.StructType([T.StructField(*field) for field in both])
    assert check_columns(schema, topic="out", flow="f", case_sensitive=True).ignored == ("Key",)
    ignored = ("Topic", T.StringType()), ("topic", T.StringType()), ("KEYS", T.BinaryType())
    assert columns_of(("value", T.BinaryType()), *ignored).ignored == ("Topic", "KEYS"), "the sink takes none"


@pytest.mark.parametrize("start", [0, 1, 2])
def test_bytes_are_taken_as_text_and_back_without_a_look(start: int) -> None:
    given = pa.array([b"", NO_TEXT, None, "ä".encode(), b"x" * 100])[start:]
    text = reinterpreted(given, "string")
    assert text.type == pa.string()
    assert text.null_count == given.null_count
    assert text.buffers()[2].address == given.buffers()[2].address, "without a copy"
    assert reinterpreted(text, "binary") == given
    assert reinterpreted(given, "binary") is given
    assert reinterpreted(text, "string") is text
    with pytest.raises(TypeError, match="int64 cannot be taken as string"):
        reinterpreted(pa.array([1]), "string")


def test_a_function_gets_all_columns_and_may_return_other_rows() -> None:
    seen = []

    def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema.names)
        values = [value for value in batch.column("v").to_pylist()[1:] for _ in range(2)]
        return pa.RecordBatch.from_pydict({"value": values, "n": list(range(len(values)))})

    function = MapRows(("v", "offset"), ("value", "n"), twice)
    plan = source(select(v="value", offset="offset"), function, Select((Attribute("n", 1),)))
    assert plan.needed == ("value", "offset"), "a function may use every column that it gets"
    assert applied(plan, records()).to_pydict() == {"n": [0, 1, 2, 3]}
    assert seen == [["v", "offset"]]


def test_columns_of_one_name_are_told_apart_by_their_place() -> None:
    both = select(key="key", value="value")
    plan = source(Select((Attribute("c", 0), Attribute("c", 1))), Select((Attribute("value", 1),)))
    assert plan.needed == ("value",)
    assert applied(source(both), records(only=("key", "value"))) == records(only=("key", "value"))


def columns_of(*fields: tuple[str, T.DataType], topic: str | None = "out") -> Any:
    return check_columns(T.StructType([T.StructField(*field) for field in fields]), topic=topic, flow="f")


def test_rows_of_the_sink() -> None:
    columns = columns_of(
        ("timestamp", T.TimestampType()), ("extra", T.LongType()), ("value", T.StringType()), ("key", T.BinaryType())
    )
    times = pa.array([-1, 1_999, None], pa.timestamp("us", tz="UTC"))
    rows = pa.RecordBatch.from_arrays(
        [times, pa.array([1, 2, 3]), reinterpreted(records().column("value"), "string"), records().column("key")],
        names=["timestamp", "extra", "value", "key"],
    )
    made = SinkForm(columns.taken, columns.cast).rows(rows, 0)
    assert made.schema.names == ["timestamp", "value", "key"]
    assert made.schema.types == [pa.int64(), pa.binary(), pa.binary()]
    assert made.column("timestamp").to_pylist() == [-1, 1, None], "rounded down, also before 1970"
    assert made.column("value") == records().column("value")


def test_rows_of_the_sink_that_keep_the_partition_of_the_source() -> None:
    columns = columns_of(("value", T.BinaryType()))
    made = SinkForm(columns.taken, columns.cast, by_source=True).rows(records(), 7)
    assert made.schema.names == ["value", "partition"]
    assert made.column("partition").to_pylist() == [7] * 3
    assert made.column("partition").type == pa.int32()
    given = columns_of(("partition", T.IntegerType()), ("value", T.BinaryType()))
    made = SinkForm(given.taken, given.cast, by_source=True).rows(records(), 7)
    assert made.schema.names == ["partition", "value"]
    assert made.column("partition").to_pylist() == [7] * 3, "as with Spark, it replaces a column of that name"

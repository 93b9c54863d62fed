"""Names of columns: those that are almost the ones that onceflow looks for, and those of any characters."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

import onceflow
from onceflow import Flow, OnceflowError, OptionError, SchemaError, windows
from onceflow.claim_check.columns import with_column
from onceflow.options.column_names import check_reserved, did_you_mean, plain, twice
from onceflow.planning.deduplicate import DedupOptions, dedup_columns
from onceflow.planning.join_columns import columns_of_join
from onceflow.planning.maps import map_of
from onceflow.planning.ownership import SINK_COLUMNS, check_columns
from onceflow.planning.step_frames import state_columns
from onceflow.session import session
from onceflow.spark import queries
from onceflow.state.api import serdes
from onceflow.state.api.processor import ColumnProcessor
from onceflow.state.engine.retry import Retry
from onceflow.state.engine.shapes import declared_fields
from onceflow.state.windows.processor import check_windows

BYTES = T.BinaryType()
TYPES: dict[str, T.DataType] = {
    "key": BYTES,
    "value": BYTES,
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
    "headers": T.ArrayType(T.StructType([T.StructField("key", T.StringType()), T.StructField("value", BYTES)])),
    "source_topic": T.StringType(),
    "source_partition": T.IntegerType(),
    "source_offset": T.LongType(),
}


@dataclass
class Session:
    """What is asked of a session."""

    settings: dict[str, str] = field(default_factory=dict)

    @property
    def conf(self) -> dict[str, str]:
        return self.settings


class Frame:
    """What is asked of a DataFrame before Spark does anything with it."""

    def __init__(self, *fields: tuple[str, T.DataType], exact: bool = False) -> None:
        self.schema = T.StructType([T.StructField(*each) for each in fields])
        self.columns = self.schema.names
        self.sparkSession = Session({"spark.sql.caseSensitive": "true"} if exact else {})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the DataFrame is used: the names are not checked in front of that")


def frame(names: list[str], *, exact: bool = False) -> Any:
    return Frame(*[(name, TYPES.get(plain(name), BYTES)) for name in names], exact=exact)


# Cyrillic and Greek letters, small and capital.
LOOK_ALIKE = {
    "a": "\u0430\u0410\u0391", "c": "\u0441\u0421", "e": "\u0435\u0415\u0395", "h": "\u041d\u0397",
    "i": "\u0456\u0406\u0399", "k": "\u043a\u041a\u039a", "m": "\u041c\u039c", "n": "\u039d", "o": "\u043e\u041e\u039f",
    "p": "\u0440\u0420\u03a1", "s": "\u0455\u0405", "t": "\u0422\u03a4", "v": "\u03bd\u0474", "y": "\u0443\u0423\u03a5",
}  # fmt: skip
UNSEEN = ["\ufe0f", "\u034f", "\u3164", "\u2800", "\uffa0", "\U000e0101"]


@st.composite
def almost(draw: Any, name: str) -> str:
    """Another spelling of a name."""
    letters = "".join(draw(st.sampled_from([each, each.upper(), *LOOK_ALIKE.get(each, []), chr(ord(each) + 0xFEE0)]))
                      if each != "_" else each for each in name)  # fmt: skip
    around = st.sampled_from(["", "", " ", "\t", "\ufeff", "\u200b", "\u00a0", *UNSEEN])
    found: str = draw(around) + letters + draw(around)
    assume(found != name)
    return found


CALLERS: dict[str, Any] = {
    "Flow.write": lambda df: check_columns(df.schema, topic=None, flow="f"),
    "Flow.process": lambda df: state_columns(df, "f", one_topic=False),
    "Flow.deduplicate": lambda df: dedup_columns(
        df, DedupOptions("key", "1 hour", None, "drop", None, None), "f", one_topic=True
    ),
    "Retry.by_origin": Retry.by_origin,
}


@pytest.mark.parametrize("caller", CALLERS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_column_that_is_almost_a_reserved_one_is_refused_with_the_right_spelling(caller: str, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(SINK_COLUMNS if caller == "Flow.write" else TYPES)))
    spelled = data.draw(almost(name))
    others = [each for each in ("key", "value", "topic") if each != name]
    names = data.draw(st.permutations([*others, "a.b`c", spelled]))
    exact = data.draw(st.booleans()) and caller != "Flow.write"
    with pytest.raises(SchemaError) as caught:
        CALLERS[caller](frame(names, exact=exact))
    assert f"{caller} would ignore the column {spelled!r}: it looks for {name!r}" in caught.value.what
    assert f".withColumnRenamed({spelled!r}, {name!r})" in caught.value.next_step


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_twin_of_a_reserved_column_is_refused_where_spark_takes_both_for_one(name: str) -> None:
    def check(names: list[str], *, exact: bool) -> None:
        check_reserved(names, set(TYPES), caller="Flow.process", flow="f", case_sensitive=exact)

    with pytest.raises(SchemaError, match=f"column '{name.upper()}' and column '{name}' are the same for Spark"):
        check([name.upper(), name], exact=False)
    check([name.upper(), name], exact=True)
    check([f" {name}", name], exact=False)  # another column for Spark
    with pytest.raises(SchemaError, match="two columns"):
        check([name, name], exact=True)


@given(st.lists(st.text(), unique=True))
@example(["timestampType", "keys", "values", "key_", "k.ey", "`key`", "header", "", "offsets", "source"])
def test_other_names_are_no_matter(names: list[str]) -> None:
    assume(not {plain(name) for name in names} & {*TYPES})
    check_reserved(["key", "value", *names], set(TYPES), caller="Flow.process", flow="f", case_sensitive=False)


def test_a_topic_column_that_is_not_looked_for_may_have_any_name() -> None:
    schema = frame(["value", "Topic"]).schema
    assert check_columns(schema, topic="out", flow="f").ignored == ("Topic",)
    with pytest.raises(SchemaError, match="it looks for 'topic'"):
        check_columns(schema, topic=None, flow="f")


def test_columns_that_arguments_name() -> None:
    def dedup(names: list[str], **given: Any) -> None:
        options = {"within": "1 hour", "records": None, "late": "drop", "duplicates_topic": None, "event_time": None}
        dedup_columns(frame(names), DedupOptions(**{**options, **given}), "f", one_topic=True)

    rows = ["key", "value", "timestamp"]
    for names, arguments, message in (
        ([*rows, "order_id"], {"id": "Order_Id"}, "did you mean 'order_id'?"),
        ([*rows, "order_id"], {"id": "KEY"}, "did you mean 'key'?"),
        ([*rows, "order_id"], {"id": "oder_id"}, "did you mean 'order_id'?"),
        ([*rows, "id", "ID"], {"id": "id"}, "there are 2 columns of this name"),
        ([*rows, "id", "id"], {"id": "id"}, "there are 2 columns of this name"),
    ):
        with pytest.raises(SchemaError) as caught:
            dedup(names, **arguments)
        assert message in str(caught.value)

    spec: Any = type("Spec", (), {"key": None, "value": serdes.struct(name="string"), "topic": "t"})()

    def join(names: list[str], on: str, columns: Any) -> Any:
        return columns_of_join(frame(names), spec, on=on, how="inner", columns=columns, flow="f")

    odd = ["key", "a.b", "`", " blank ", "ä", ""]
    for name in odd:
        assert join(odd, name, {"name": "string"})[0].names == [*odd, "name"]
    for on, columns, message in (
        ("KEY", "x", "did you mean 'key'?"),
        ("A.B", "x", "did you mean 'a.b'?"),
        ("key", {"Name": "string"}, "did you mean 'name'?"),
        ("key", "KEY", "has a column 'key' already"),
    ):
        with pytest.raises(OnceflowError) as failed:
            join(odd, on, columns)
        assert message in str(failed.value)
    spec.value = serdes.JSON
    with pytest.raises(OptionError, match="two columns 'NAME'"):
        join(odd, "key", {"name": "string", "NAME": "string"})
    for names, message in ((["Value"], "did you mean 'Value'?"), (["value", "value"], "several columns 'value'")):
        with pytest.raises(SchemaError) as refused:
            with_column(frame(names), "value", bytes, "store")
        assert message in str(refused.value)


def test_columns_of_map() -> None:
    rows: Any = Frame(("a", BYTES), ("A", BYTES))
    with pytest.raises(SchemaError, match="two columns 'A'"):
        map_of(rows, lambda batch: batch, None, number=1, flow="f")
    with pytest.raises(SchemaError, match="two columns 'A'"):
        map_of(rows, lambda batch: batch, rows.schema, number=1, flow="f")


def test_options_of_read_that_are_almost_known() -> None:
    for name, message in (
        ("starting_offsets", "did you mean startingoffsets? use starting_offsets of Flow.read"),
        ("min.Partitions", "did you mean minpartitions?"),
        ("subscribePatern", "did you mean subscribepattern? Flow.read takes one topic"),
        ("colour", "known: "),
    ):
        with pytest.raises(OptionError) as caught:
            queries.reader_options({name: "1"}, "f")
        assert message in caught.value.next_step


@pytest.mark.parametrize(
    "call, given, said",
    [
        ("write", {"Topic": "out"}, "did you mean 'topic'?"),
        ("write", {"checkpoints": "/x"}, "did you mean 'checkpoint'?"),
        ("read", {"startingOffsets": "latest"}, "did you mean 'starting_offsets'?"),
        ("process", {"onError": "fail"}, "did you mean 'on_error'?"),
        ("map", {"scheme": "a int"}, "did you mean 'schema'?"),
        ("deduplicate", {"ID": "id"}, "did you mean 'id'?"),
        ("join_table", {"columms": "x"}, "did you mean 'columns'?"),
        ("enrich", {"colour": "red"}, "Its arguments are df, calls"),
    ],
)
def test_arguments_that_are_almost_known(call: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=f"Named.{call} has no argument '{next(iter(given))}'") as caught:
        getattr(Flow, call)(type("Named", (), {"name": "f"})(), **given)
    assert said in caught.value.next_step
    assert caught.value.flow == "f"


def test_arguments_of_a_flow() -> None:
    with pytest.raises(OptionError, match="Flow has no argument 'bootstrap_server'") as caught:
        Flow("f", None, bootstrap_server="localhost:9092")  # type: ignore[call-arg, arg-type]
    assert "did you mean 'bootstrap_servers'?" in caught.value.next_step


MADE_BY_USERS = [
    *(onceflow.Breaker, onceflow.ClaimCheck, onceflow.DeltaSink, onceflow.JoinTable, onceflow.PostgresSink),
    *(onceflow.Retry, onceflow.Table, onceflow.concurrently, onceflow.peek, onceflow.serve, onceflow.serve_metrics),
    *(session, windows.Count, windows.Hopping, windows.Max, windows.Mean, windows.Min, windows.Session),
    *(windows.Sliding, windows.Sum, windows.Tumbling),
]


@pytest.mark.parametrize("call", MADE_BY_USERS, ids=lambda call: call.__name__)
def test_every_call_names_its_arguments(call: Any) -> None:
    last = [*inspect.signature(call).parameters][-1]
    with pytest.raises(OptionError, match=f"{call.__name__} has no argument '{last}x'") as caught:
        call(**{f"{last}x": 1})
    assert f"did you mean {last!r}?" in caught.value.next_step


def test_names_that_windows_and_states_have_themselves() -> None:
    class Counts(windows.WindowProcessor):
        window = windows.Tumbling("1 minute")

    for name in ("start_ms", "end_ms", 5):
        Counts.aggregates = {name: windows.Count()}  # type: ignore[dict-item]
        with pytest.raises(OptionError, match="aggregates: the name"):
            check_windows(Counts(), "f")
    Counts.aggregates = {"Start_ms": windows.Count(), "": windows.Count(), 'a.b`"': windows.Count()}
    check_windows(Counts(), "f")

    class States(ColumnProcessor):
        state_fields: ClassVar = {"exists": "int64"}

    with pytest.raises(ValueError, match="cannot be named exists"):
        declared_fields(States())


@given(st.lists(st.text(max_size=4), max_size=6))
def test_what_is_there_twice(names: list[str]) -> None:
    assert (twice(names, case_sensitive=True) is None) == (len(set(names)) == len(names))
    assert (twice(names, case_sensitive=False) is None) == (len({each.lower() for each in names}) == len(names))
    for name in names:
        assert did_you_mean(name, [name]) == "", "not the same name again"

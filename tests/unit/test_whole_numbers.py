"""Integers beyond 2^53 through pandas, in which integers that are missing used to make floats of the others."""

from __future__ import annotations

import contextlib
import json
import tempfile
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import serdes
from onceflow.errors import OnceflowError, SchemaError
from onceflow.state.api.json_columns import format_json, parse_json
from onceflow.state.api.processor import ColumnProcessor
from onceflow.state.api.whole_numbers import cast, changed, rounded
from onceflow.state.format import rows
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.tables.lookups import Lookups
from onceflow.task.map_rows import RowsMap
from onceflow.testing.processor_driver import ProcessorDriver

BIG = 9007199254740993
AMOUNTS = pa.schema([("n", pa.decimal128(20, 2))])
KINDS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


def batch_of(columns: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


@st.composite
def batches(draw: Any) -> pa.RecordBatch:
    columns = {}
    for at, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))):
        low, high = (
            (0, 2**kind.bit_width) if str(kind)[0] == "u" else (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))
        )
        values = draw(st.lists(st.none() | st.integers(low, high - 1), min_size=3, max_size=3))
        columns[f"c{at}"] = pa.array(values, kind)
    return batch_of({**columns, "text": pa.array(["a", None, "b"])})


@settings(deadline=None)
@given(batches())
def test_flow_map_through_pandas_keeps_every_integer(batch: pa.RecordBatch) -> None:
    for back in (lambda df: pa.RecordBatch.from_pandas(df, preserve_index=False), pa.Table.from_pandas):
        made = RowsMap(lambda given, back=back: back(given.to_pandas()), "f", 1, batch.schema, "flow").apply(batch)
        assert made.to_pydict() == batch.to_pydict()


class ThroughPandas(ColumnProcessor):
    """Stores what it is sent, and later what it got from pandas."""

    state_fields = {"n": "int64", "u": "uint64"}  # noqa: RUF012

    def __init__(self, change: Any = lambda df: df) -> None:
        self.change = change

    def process(self, records: Any, states: Any, context: Any) -> Any:
        kept = states.to_pandas()
        first = [json.loads(value) for value in records["value"].to_pylist()]
        if any(first):
            new = pa.table({"key": states["key"], "n": pa.array(first, pa.int64()), "u": pa.array(first, pa.uint64())})
        else:
            new = self.change(kept[["key", "n", "u"]])
        return pd.DataFrame({"key": kept["key"], "value": [str(each).encode() for each in kept["n"]]}), new


def test_states_through_pandas_beside_a_new_key() -> None:
    driver = ProcessorDriver(ThroughPandas())
    driver.send("a", BIG)
    outputs = driver.send_many([("a", 0), ("b", 0)])
    assert sorted((each.key, each.value) for each in outputs) == [(b"a", b"%d" % BIG), (b"b", b"<NA>")]
    assert driver.state("a") == {"n": BIG, "u": BIG}
    assert driver.state("b") == {"n": None, "u": None}


def test_a_state_that_has_been_a_float_is_refused() -> None:
    driver = ProcessorDriver(ThroughPandas(lambda df: df.astype({"n": "float64"})))
    driver.send("a", BIG)
    with pytest.raises(OnceflowError, match=r"state field n is int64, got the float 9007199254740992\.0.*Int64"):
        driver.send_many([("a", 0), ("b", 0)])
    assert driver.state("a") == {"n": BIG, "u": BIG}


def test_smaller_floats_become_integers() -> None:
    driver = ProcessorDriver(ThroughPandas(lambda df: df.astype({"n": "float64"})))
    driver.send("a", 2**53 - 1)
    driver.send("a", 0)
    assert driver.state("a")["n"] == 2**53 - 1


LARGE = [float(BIG), -1e18]


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array(LARGE), pa.int64()),
        (pa.array([None, *LARGE]), pa.uint64()),
        (pa.array(LARGE, pa.float32()), pa.int64()),
        (pa.array(LARGE), pa.decimal128(38, 2)),
        (pa.array(LARGE).dictionary_encode(), pa.int64()),
        (pa.array([LARGE, None]), pa.list_(pa.int64())),
        (pa.array([[[1.0]], [LARGE]]), pa.large_list(pa.list_(pa.int64()))),
        (pa.array([{"a": 1, "b": LARGE[0]}]), pa.struct([("b", pa.int64()), ("a", pa.int64())])),
        (pa.array([[("k", LARGE[0])]], pa.map_(pa.string(), pa.float64())), pa.map_(pa.string(), pa.int64())),
    ],
)
def test_flow_map_refuses_floats_that_may_be_rounded_integers(column: pa.Array, kind: pa.DataType) -> None:
    assert rounded(column, kind) is not None
    made = RowsMap(lambda given: batch_of({"n": column}), "f", 1, pa.schema([("n", kind)]), "flow")
    with pytest.raises(SchemaError, match="another number, rounded") as refused:
        made.apply(batch_of({"n": pa.array([1])}))
    assert "Int64" in str(refused.value)


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array([2.0**53 - 1, None]), pa.int64()),
        (pa.array([float("inf"), 1e30]), pa.float32()),
        (pa.array([[1.0], None]), pa.list_(pa.int32())),
        (pa.array([1e300]), pa.float64()),
    ],
)
def test_other_floats_are_not_refused_for_that(column: pa.Array, kind: pa.DataType) -> None:
    assert rounded(column, kind) is None
    assert changed(column, kind) is None


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array([0.5, 0.125]), pa.decimal128(10, 2)),
        (pa.array([float("nan"), 1e10, 0.125]), pa.decimal128(10, 2)),
        (pa.array([[0.5], [None, 0.125]]), pa.list_(pa.decimal128(10, 2))),
        (pa.array([0.5, 0.125], pa.float32()), pa.decimal128(10, 2)),
        (pa.array([float("inf"), None, 1e300]), pa.float32()),
        (pa.array([{"a": 1, "b": 1e300}]), pa.struct([("b", pa.float32()), ("a", pa.int64())])),
    ],
)
def test_floats_that_a_cast_would_make_other_numbers_are_refused(column: pa.Array, kind: pa.DataType) -> None:
    made = RowsMap(lambda given: batch_of({"n": column}), "f", 1, pa.schema([("n", kind)]), "flow")
    with pytest.raises(SchemaError, match=r"(0\.125|1e\+300) would be another number"):
        made.apply(batch_of({"n": pa.array([1])}))


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(-1e6, 1e6).map(lambda real: round(real, 2)), min_size=1))
def test_floats_of_two_digits_become_decimals_of_two_digits(values: list[float | None]) -> None:
    made = RowsMap(lambda given: batch_of({"n": pa.array(values, pa.float64())}), "f", 1, AMOUNTS, "flow")
    found = made.apply(batch_of({"n": pa.array([1])})).column("n").to_pylist()
    assert found == [None if value is None else round(Decimal(repr(value)), 2) for value in values]


D = Decimal
DECIMALS = pa.decimal128(38, 0)


@pytest.mark.parametrize(
    "column, kind",
    [
        (pa.array([D(5), D(BIG)], DECIMALS), pa.float64()),
        (pa.array([D("0.5"), None, D(BIG)], pa.decimal128(38, 10)), pa.float64()),
        (pa.array([-D(BIG)], pa.decimal256(60, 0)), pa.float64()),
        (pa.array([D(2**24 + 1)], DECIMALS), pa.float32()),
        (pa.array([D(10**40)], pa.decimal256(45, 0)), pa.float32()),
        (pa.array([D("12345678901234567890")]).dictionary_encode(), pa.float64()),
        (pa.array([[D(5)], None, [None, D(BIG)]], pa.list_(DECIMALS)), pa.large_list(pa.float64())),
        (pa.array([[D(BIG)]], pa.list_(DECIMALS, 1)), pa.list_(pa.float64())),
        (pa.array([{"a": 1, "b": D(BIG)}]), pa.struct([("b", pa.float64()), ("a", pa.int64())])),
        (pa.array([[("k", D(BIG))]], pa.map_(pa.string(), DECIMALS)), pa.map_(pa.string(), pa.float64())),
    ],
)
def test_decimals_that_a_cast_would_make_other_numbers_are_refused(column: pa.Array, kind: pa.DataType) -> None:
    made = RowsMap(lambda given: batch_of({"n": column}), "f", 1, pa.schema([("n", kind)]), "flow")
    with pytest.raises(SchemaError, match=r"Decimal\('.*'\) would be another number"):
        made.apply(batch_of({"n": pa.array([1])}))


@settings(deadline=None)
@given(
    st.sampled_from([(pa.decimal128(10, 2), 2), (pa.decimal128(38, 0), 0), (pa.decimal256(60, 20), 20)]),
    st.sampled_from([pa.float64(), pa.float32()]),
    st.data(),
)
def test_decimals_become_the_nearest_floats(given_type: Any, floats: pa.DataType, data: st.DataObject) -> None:
    kind, places = given_type
    numbers = st.integers(-(10**9), 10**9) | st.integers(-(10**kind.precision) + 1, 10**kind.precision - 1)
    values = data.draw(st.lists(st.none() | numbers.map(lambda n: D(n).scaleb(-places, Context(prec=99))), min_size=1))
    nearest = [None if value is None else _nearest(value, floats.to_pandas_dtype()) for value in values]
    wrong = [
        value
        for value, real in zip(values, nearest, strict=True)
        if value is not None and value != real and (value == value.to_integral_value() or np.isinf(real or 0))
    ]
    for column, wanted in [
        (pa.array(values, kind), floats),
        (pa.array([values], pa.list_(kind)), pa.list_(floats)),
        (pa.array([{"n": value} for value in values], pa.struct([("n", kind)])), pa.struct([("n", floats)])),
        (pa.array([[(1, value)] for value in values], pa.map_(pa.int8(), kind)), pa.map_(pa.int8(), floats)),
    ]:
        assert changed(column, wanted) == (wrong[0] if wrong else None)
        if not wrong:
            assert cast(column, wanted).equals(pa.array(_with(column.to_pylist(), values, nearest), wanted))


def _nearest(value: Decimal, kind: Any) -> float:
    with np.errstate(over="ignore"):
        real = kind(float(value))  # of float32, it is rounded twice
        others = [real, np.nextafter(real, kind("-inf")), np.nextafter(real, kind("inf"))]
    if np.isinf(real):
        return float(real)
    return float(min(others, key=lambda each: abs(Context(prec=999).subtract(Decimal(float(each)), value))))


def _with(rows: Any, values: list[Any], nearest: list[Any]) -> Any:
    """The rows with floats in place of the decimals."""
    if isinstance(rows, dict):
        return {name: _with(each, values, nearest) for name, each in rows.items()}
    if isinstance(rows, list | tuple):
        return type(rows)(_with(each, values, nearest) for each in rows)
    return nearest[values.index(rows)] if isinstance(rows, Decimal) else rows


class SmallFloats(ColumnProcessor):
    state_fields = {"n": "float32"}  # noqa: RUF012

    def process(self, records: Any, states: Any, context: Any) -> Any:
        return None, pa.table({"key": states["key"], "n": pa.array([float(v) for v in records["value"].to_pylist()])})


def test_a_state_that_would_become_infinity_is_refused() -> None:
    driver = ProcessorDriver(SmallFloats(), on_error="dead-letter")
    driver.send("a", b"0.1")
    driver.send("a", b"1e300")
    assert driver.state("a") == {"n": pytest.approx(0.1)}
    (letter,) = driver.dead_letters
    assert b"1e+300 would be another number" in (dict(letter.headers)["onceflow.error.message"] or b"")


class Reals(ColumnProcessor):
    state_fields = {"n": "float64"}  # noqa: RUF012

    def process(self, records: Any, states: Any, context: Any) -> Any:
        numbers = pa.array([Decimal(value.decode()) for value in records["value"].to_pylist()])
        return None, pa.table({"key": states["key"], "n": numbers})


def test_a_decimal_that_a_state_would_round_is_refused() -> None:
    driver = ProcessorDriver(Reals(), on_error="dead-letter")
    driver.send("a", b"62.19")
    driver.send("a", str(BIG).encode())
    assert driver.state("a") == {"n": 62.19}
    (letter,) = driver.dead_letters
    message = dict(letter.headers)["onceflow.error.message"] or b""
    assert f"Decimal('{BIG}') would be another number".encode() in message


class Columns(ColumnProcessor):
    state_fields = {"flag": "bool", "n": "int64", "text": "string"}  # noqa: RUF012

    def __init__(self, **columns: pa.Array) -> None:
        self.columns = columns

    def process(self, records: Any, states: Any, context: Any) -> Any:
        nothing = {name: pa.nulls(1) for name in ("flag", "n", "text")}
        return None, pa.table({"key": states["key"], **nothing, **self.columns})


@pytest.mark.parametrize(
    "column",
    [
        {"flag": pa.array([2])},
        {"flag": pa.array([float("nan")])},
        {"flag": pa.array(["no"])},
        {"n": pa.array([True])},
        {"n": pa.array(["7"])},
        {"n": pa.array([7], pa.timestamp("us"))},
        {"text": pa.array([7])},
    ],
)
def test_a_state_of_another_kind_is_refused_as_of_a_processor_of_records(column: dict[str, pa.Array]) -> None:
    driver = ProcessorDriver(Columns(**column))
    with pytest.raises(OnceflowError, match=r"state field \w+ is \w+, got a column of"):
        driver.send("a", b"")
    fits = Columns(flag=pa.array([True]), n=pa.array([7], pa.uint8()), text=pa.array([b"x"]))
    driver.processor = fits
    driver.send("a", b"")
    assert driver.state("a") == {"flag": True, "n": 7, "text": "x"}


class Rows(Lookups):
    """A table of these rows."""

    topic = "t"

    def __init__(self, value: Any, rows_: dict[bytes, bytes]) -> None:
        super().__init__(serdes.STRING, value)
        self.store = MemoryStore.open(Path(tempfile.mkdtemp()))
        self.store.write({rows.value_key(key): rows.pack(raw) for key, raw in rows_.items()}, index=True)

    def _readable(self) -> StoredRows:
        return StoredRows(lambda: contextlib.nullcontext({0: self.store}), partitions=1)


ONE = serdes.struct(n="int64")


@pytest.mark.parametrize(
    "value, one, other, expected",
    [
        (serdes.JSON, b"%d" % BIG, b"null", BIG),
        (serdes.JSON, b'{"id":%d}' % BIG, b"{}", {"id": BIG}),
        (serdes.JSON, b'{"ids":[%d,null]}' % BIG, b"{}", {"ids": [BIG, None]}),
        (serdes.JSON, b"[%d,null]" % BIG, b"[]", [BIG, None]),
        (ONE, ONE.encode({"n": BIG}), ONE.encode({}), {"n": BIG}),
    ],
)
def test_a_table_in_pandas_keeps_integers_beside_missing_ones(
    value: Any, one: bytes, other: bytes, expected: Any
) -> None:
    found = Rows(value, {b"a": one, b"b": other}).to_pandas()["value"][0]
    found = found.tolist() if isinstance(found, np.ndarray) else found
    if isinstance(found, dict):
        found = {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in found.items()}
    assert found == expected


def test_parsed_json_through_pandas() -> None:
    parsed = parse_json(pa.array([b'{"n": %d}' % BIG, b"{}"]), pa.schema([("n", pa.int64())]))
    frame = parsed.to_pandas()
    assert frame["n"][0] == BIG
    assert format_json(pa.Table.from_pandas(frame, preserve_index=False)).to_pylist() == [
        b'{"n":%d}' % BIG,
        b'{"n":null}',
    ]


def test_decimals_of_json_columns_keep_their_digits() -> None:
    raw = [b'{"n":123456789012345678901234567890}', b'{"n":-7}', b'{"n":null}']
    parsed = parse_json(pa.array(raw), pa.schema([("n", pa.decimal128(38, 0))]))
    assert format_json(parsed).to_pylist() == raw

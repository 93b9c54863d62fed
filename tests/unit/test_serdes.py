"""Serdes: what goes in comes out, in bytes that other clients know."""

from __future__ import annotations

import contextlib
import pickle
import struct as packing
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.options.durations import duration_ms
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, DOUBLE, JSON, LONG, STRING, Serde, struct

ALL = {
    "flag": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f32": "float32",
    "f64": "double",
    "text": "string",
    "raw": "binary",
    "more": "string",
}
VALUES: dict[str, Any] = {
    "flag": st.booleans(),
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
    "text": st.text(st.characters(exclude_categories=["Cs"])),
    "raw": st.binary(),
    "more": st.text("ab\0é", max_size=3),
    **{f"i{bits}": st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"u{bits}": st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
structs = st.fixed_dictionaries({name: st.none() | VALUES[name] for name in ALL})
documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # JSON's text is Unicode without lone surrogates.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary())
def test_bytes(value: bytes) -> None:
    assert BYTES.decode(BYTES.encode(value)) == value
    assert BYTES.encode(bytearray(value)) == BYTES.encode(memoryview(value)) == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_string(value: str) -> None:
    assert STRING.decode(STRING.encode(value)) == value


@given(documents)
def test_json(value: Any) -> None:
    assert JSON.decode(JSON.encode(value)) == value


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats())
def test_long_and_double_are_big_endian_as_in_java(number: int, real: float) -> None:
    assert LONG.encode(number) == packing.pack(">q", number)
    assert LONG.decode(LONG.encode(number)) == number
    assert DOUBLE.encode(real) == packing.pack(">d", real)
    assert DOUBLE.encode(DOUBLE.decode(DOUBLE.encode(real))) == DOUBLE.encode(real)


@pytest.mark.parametrize(
    "call, value",
    [
        (BYTES.encode, "text"),
        (STRING.encode, b"bytes"),
        (STRING.decode, b"\xff"),
        (JSON.decode, b"{"),
        (LONG.encode, 1 << 63),
        (LONG.encode, "1"),
        (LONG.decode, b"1"),
        (DOUBLE.encode, "1"),
        (DOUBLE.encode, 2**53 + 1),
        (DOUBLE.encode, np.int64(-(2**53) - 1)),
        (DOUBLE.encode, 10**400),
        (DOUBLE.encode, Decimal(2**53 + 1)),
        (DOUBLE.encode, Decimal("1e400")),
        (DOUBLE.encode, Decimal("sNaN")),
        (DOUBLE.encode, Fraction(2**53 + 1)),
        (DOUBLE.decode, b"123456789"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        call(value)


def test_own_serdes_and_names() -> None:
    upper = Serde(lambda text: text.upper().encode(), bytes.decode, "upper")
    assert upper.decode(upper.encode("a")) == "A"
    assert (repr(upper), repr(JSON)) == ("<serde upper>", "<serde json>")
    assert pickle.loads(pickle.dumps(JSON)) == JSON


# ---- structs -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(structs, max_size=5), st.binary(max_size=9))
def test_structs_one_by_one_and_in_columns(values: list[dict[str, Any]], prefix: bytes) -> None:
    serde = struct(**ALL)
    encoded = [serde.encode(value) for value in values]
    assert [serde.decode(raw) for raw in encoded] == values
    columns = {field.name: pa.array([value[field.name] for value in values], field.type) for field in serde.schema}
    assert serde.encode_columns(columns, len(values), prefix) == [prefix + raw for raw in encoded]
    decoded = serde.decode_columns([prefix + raw for raw in encoded], len(prefix))
    assert {name: column.to_pylist() for name, column in decoded.items()} == {
        name: column.to_pylist() for name, column in columns.items()
    }
    assert all(column.type == serde.schema.field(name).type for name, column in decoded.items())


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1))
def test_structs_of_fixed_width(values: list[tuple[int, bool]]) -> None:
    serde = struct(n="int64", flag="bool")
    encoded = [serde.encode({"n": n, "flag": flag}) for n, flag in values]
    assert {len(raw) for raw in encoded} == {10}
    columns = {"n": pa.array([n for n, _ in values]), "flag": pa.array([flag for _, flag in values])}
    assert serde.encode_columns(columns, len(values)) == encoded
    assert serde.decode_columns(encoded)["flag"].to_pylist() == [flag for _, flag in values]


def test_layout_of_a_struct_is_fixed() -> None:
    serde = struct(balance="int64", owner="string", count="int16")
    raw = serde.encode({"balance": 1, "owner": "é", "count": None})
    assert raw == b"\x04" + b"\x01" + bytes(7) + b"\x02\0\0\0" + b"\0\0" + "é".encode()
    assert serde.encode({}) == b"\x07" + bytes(14)
    assert serde.decode(raw) == {"balance": 1, "owner": "é", "count": None}
    assert pickle.loads(pickle.dumps(serde)).schema == serde.schema
    assert repr(serde) == "<serde struct(balance=int64, owner=string, count=int16)>"


@pytest.mark.parametrize(
    "value",
    [
        {"n": 128},
        {"n": 1.5},
        {"n": "1"},
        {"flag": 1},
        {"text": b"bytes"},
        {"text": "\ud800"},
        {"raw": "text"},
        {"unknown": 1},
        {"real": 2**53 + 1},
        {"real": np.uint64(2**64 - 1)},
        {"real": Decimal(2**53 + 1)},
        {"real": Decimal("-1e400")},
        {"real": 10**400},
        {"small": Decimal(2**24 + 1)},
        {"small": Decimal("1e39")},
        {"small": Fraction(2**24 + 1)},
        {"small": 2**24 + 1},
        {"small": 1e300},
    ],
)
def test_structs_refuse_what_their_fields_cannot_hold(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hold|unknown|field|surrogates"):
        struct(n="int8", flag="bool", text="string", raw="binary", real="double", small="float").encode(value)


@given(st.integers(-(2**80), 2**80) | st.integers(-(2**25), 2**25), st.sampled_from(["float", "double"]))
def test_whole_numbers_in_fields_of_floats_are_kept_or_refused(number: int, kind: str) -> None:
    serde = struct(n="int8", real=kind)
    try:
        raw = serde.encode({"real": number, "n": 1})
    except ValueError:
        assert int(np.dtype(kind.replace("float", "float32")).type(number)) != number
    else:
        assert serde.decode(raw) == {"real": number, "n": 1}


@given(st.decimals(allow_nan=False), st.sampled_from(["float", "double", "DOUBLE"]))
def test_decimals_in_fields_of_floats_are_whole_or_rounded_fractions(number: Decimal, kind: str) -> None:
    form = "f" if kind == "float" else "d"
    try:
        if kind == "DOUBLE":
            found = DOUBLE.decode(DOUBLE.encode(number))
        else:
            serde = struct(n="int8", real=kind)
            found = serde.decode(serde.encode({"real": number, "n": 1}))["real"]
    except ValueError:
        whole = number.is_finite() and number == number.to_integral_value()
        with contextlib.suppress(OverflowError):
            assert np.isinf(float(number)) or (whole and packing.unpack(form, packing.pack(form, number))[0] != number)
    else:
        assert found == packing.unpack(form, packing.pack(form, number))[0]
        assert found == number or (number != number.to_integral_value() and abs(found) < float("inf"))


def test_structs_refuse_bytes_of_others() -> None:
    serde = struct(n="int64", text="string")
    good = serde.encode({"n": 1, "text": "abc"})
    for raw in (b"", good[:-1], good + b"x", good[:9] + b"\xff" * 4 + good[13:]):
        with pytest.raises(ValueError, match="bytes are not of"):
            serde.decode(raw)
        with pytest.raises(ValueError, match="bytes are not of"):
            serde.decode_columns([good, raw])
    with pytest.raises(ValueError, match=r"UTF-?8|Invalid"):
        serde.decode_columns([good[:-1] + b"\xff"])
    for fields in ({}, {"n": "integer"}):
        with pytest.raises(ValueError, match="field"):
            struct(**fields)


# ---- records and durations ---------------------------------------------------------------------------


def test_records() -> None:
    record = Record("k", "v", "topic", [("h", b"x")], 1, 2, 3)
    assert record == Record("k", "v", topic="topic", headers=(("h", b"x"),), timestamp_ms=1, partition=2, offset=3)
    assert record != Record("k", "v")
    assert record != "record"
    assert pickle.loads(pickle.dumps(record)) == record
    assert repr(Record("k")) == "Record(key='k', value=None)"
    assert repr(record).endswith("headers=[('h', b'x')], timestamp_ms=1, partition=2, offset=3)")


@pytest.mark.parametrize(
    "text, ms",
    [
        ("250 ms", 250),
        ("1 second", 1000),
        ("1.5 Minutes", 90_000),
        ("2h", 7_200_000),
        ("7 days", 604_800_000),
        (3, 3000),
        (0.5, 500),
    ],
)
def test_durations(text: Any, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", "5 parsecs", "-1 s", -1, float("nan"), float("inf"), True, None])
def test_no_durations(text: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_ms(text)

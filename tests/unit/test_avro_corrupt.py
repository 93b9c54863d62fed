"""Bytes that are no Avro value are refused, whatever is wrong with them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onceflow.schema_registry.avro_columns import AvroColumn
from onceflow.schema_registry.avro_schema import AvroSchema

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import record, registry, schemas_with_values, serde
finally:
    sys.path.pop(0)

COLOR = {"type": "enum", "name": "Color", "symbols": ["RED", "GREEN"]}
LONGS = {"type": "array", "items": "long"}


@pytest.mark.parametrize(
    "kind, raw, said",
    [
        ("boolean", b"\5", "a boolean is 5"),
        (COLOR, b"\1", "an enum has no symbol -1"),
        (COLOR, b"\4", "an enum has no symbol 2"),
        (["null", "int"], b"\1\2", "a union has no type -1"),
        (["null", "int"], b"\4\2", "a union has no type 2"),
        ("int", b"\xff\xff\xff\xff\x1f", "a number is beyond 32 bits"),
        ("int", b"\xff\xff\xff\xff\xff\x01", "a number has more than 5 bytes"),
        ("int", b"\x80\x00", "a number has more bytes than it needs"),
        ("long", b"\xff" * 9 + b"\x02", "a number is beyond 64 bits"),
        ("long", b"\xff" * 10 + b"\x01", "a number has more than 10 bytes"),
        ("long", b"\x80" * 8 + b"\x00", "a number has more bytes than it needs"),
        ("string", b"\1x", "a length is -1"),
        ("string", b"\x02\xff", "codec can't decode"),
        ("bytes", b"\xfe\xff\xff\xff\x0fx", "ends too early"),
        (LONGS, b"\x03\x04\x02\x02\x00", None),  # a block with its size
        (LONGS, b"\x03\x06\x02\x02\x00", "a block of items ends at byte"),
        (LONGS, b"\xfe\xff\xff\xff\x0f\x02", "ends too early"),
        (LONGS, b"\x02\x02", "ends too early"),
        ({"type": "map", "values": "boolean"}, b"\x02\x02k\x02\x00", "a boolean is 2"),
        ({"type": "fixed", "name": "F", "size": 3}, b"ab", "ends too early"),
        ("double", b"1234567", "ends too early"),
        ("null", b"\0", "1 bytes follow the value"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(kind: Any, raw: bytes, said: str | None) -> None:
    """By itself, in a field, and in a record in a union."""
    inside = record(("n", "null"), ("f", ["string", record(("f", kind), name="S")]))
    for schema, begin in ((kind, b""), (record(("f", kind), name="R"), b""), (inside, b"\2")):
        ours = serde(schema)
        whole = ours.head() + begin + raw
        column, bad = AvroColumn(ours).decode(pa.array([whole]))
        if said is None:
            assert ours.decode(whole) is not None
            assert not bad
            continue
        with pytest.raises(ValueError, match=said):
            ours.decode(whole)
        assert said in bad[0]
        assert column.null_count == 1


@given(schemas_with_values(), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_corrupt_bytes_are_refused_or_are_another_value(case: tuple[Any, list[Any]], data: st.DataObject) -> None:
    """What is read has the bytes that are written for it, but for the blocks of arrays and maps."""
    schema, values = case
    ours = serde(schema)
    good = ours.encode(values[0])
    raw = bytearray(good[5:])
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["change", "insert", "remove"]))
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        byte = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 2, 0x7F, 0x80, 0x81, 0xFF]))
        if how == "insert" or not raw:
            raw.insert(at, byte)
        elif how == "change":
            raw[at] = byte
        else:
            del raw[at]
    whole = good[:5] + bytes(raw)
    try:
        found = ours.decode(whole)
    except ValueError:
        return
    if found == found:  # else it has a NaN
        assert ours.decode(ours.encode(found)) == found
    if not ({"array", "map"} & {*str(schema).replace("'", " ").split()}):
        assert ours.encode(found) == whole or not is_exact(schema)


def is_exact(schema: Any) -> bool:
    """Whether a value has one form only: decimals may have zeros in front, UUIDs capitals, and NaN has many forms."""
    return not any(each in str(schema) for each in ("decimal", "uuid", "float", "double"))


@given(schemas_with_values(), st.binary(max_size=12), st.integers(0, 30))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_columns_are_read_as_fastavro_reads_what_was_checked(
    case: tuple[Any, list[Any]], garbage: bytes, cut: int
) -> None:
    """Whatever the bytes are: the same value, or an error of both."""
    schema, values = case
    ours = serde(schema)
    own = ours.own_schema()
    raws = [ours.encode(value) for value in values]
    again = AvroSchema(ours.own())
    again.plain_of = lambda _: None  # type: ignore[method-assign]
    for raw in [*raws, raws[0][: 5 + cut] + garbage, ours.head() + garbage]:
        found = []
        for reader in (own, again):
            try:
                found.append(repr(ours.read(raw, reader, plain=True)))
            except ValueError:
                found.append("an error")
        assert found[0] == found[1]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_columns_of_older_values_are_as_fastavro_resolves_them(data: st.DataObject) -> None:
    schema, values = data.draw(schemas_with_values())
    assume(isinstance(schema, dict) and schema["type"] == "record")
    kept = [field for field in schema["fields"] if data.draw(st.booleans())]
    added = [
        {"name": "new", "type": ["null", LONGS, "string"], "default": None},
        {"name": "n", "type": LONGS, "default": [7]},
    ]
    there = registry()
    old = there.avro("s", json.dumps(schema), register=True)
    new = there.avro(
        "s",
        json.dumps({**schema, "doc": "new", "fields": [*added[: data.draw(st.integers(0, 2))], *kept]}),
        register=True,
    )
    reader, again = new.own_schema(), AvroSchema(new.own())
    again.plain_of = lambda _: None  # type: ignore[method-assign]
    for value in values:
        raw = old.encode(value)
        assert repr(new.read(raw, reader, plain=True)) == repr(new.read(raw, again, plain=True))


@given(schemas_with_values())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_fastavro_writes_is_accepted(case: tuple[Any, list[Any]]) -> None:
    schema, values = case
    ours = serde(schema)
    parsed = fastavro.parse_schema(schema)
    for value in values:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, parsed, value)
        assert ours.decode(ours.head() + buffer.getvalue()) == value

"""What of a schema cannot be read with another one: said of schemas, it holds for all of their values."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onceflow.schema_registry.avro_changes import unreadable
from onceflow.schema_registry.avro_schema import AvroSchema
from onceflow.schema_registry.client import RegisteredSchema
from onceflow.schema_registry.json_changes import unreadable as unreadable_json
from onceflow.schema_registry.wire_format import prefix

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import record, registry, schemas_with_values
    from test_protobuf_serde import F, classes, field
finally:
    sys.path.pop(0)

MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": [*symbols], **more}


def avro(schema: Any) -> AvroSchema:
    return AvroSchema(RegisteredSchema(json.dumps(schema), "AVRO"))


@pytest.mark.parametrize(
    "writer, reader, said",
    [
        (record(("a", "int")), record(("a", "string")), ["a: int has become string"]),
        (record(("a", "int")), record(("a", "int"), ("b", "int")), ["b: it is new, and has no default"]),
        (record(("a", "long")), record(("a", "int")), ["a: long has become int"]),
        (record(("a", "int")), record(("a", ["null", "long"])), []),
        (record(("a", ["null", "int"])), record(("a", "int")), ["a: null has become int"]),
        (record(("a", ["null", "int"])), record(("a", ["null", "string"])), ["a: int is none of null, string"]),
        (record(("a", enum("A", "B"))), record(("a", enum("A"))), ["a: the enum shop.E lacks B"]),
        (record(("a", enum("A", "B"))), record(("a", enum("A", default="A"))), []),
        (record(("a", MONEY)), record(("a", {**MONEY, "scale": 4})), []),
        (record(("a", MONEY)), record(("a", "long")), ["a: bytes has become long"]),
        (record(("a", {"type": "array", "items": "int"})), record(("a", {"type": "array", "items": "string"})),
         ["a: array of int has become array of string"]),
        (record(("a", {"type": "map", "values": record(("x", "int"), name="X")})),
         record(("a", {"type": "map", "values": record(("x", "boolean"), name="X")})),
         ["a{}.x: int has become boolean"]),
        (record(("next", ["null", "shop.Payment"]), ("v", "int")),
         record(("next", ["null", "shop.Payment"]), ("v", "string")), ["v: int has become string"]),
        (record(("x", "int"), name="Old"), {**record(("x", "int"), name="New"), "aliases": ["shop.Old"]}, []),
        (record(("x", "int"), name="Old"), record(("x", "int"), name="New"),
         ["record shop.Old has become record shop.New"]),
        ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8},
         ["fixed F of 4 bytes has become fixed F of 8 bytes"]),
        ("bytes", "string", ["bytes have become string: bytes that are no UTF-8 cannot be read"]),
        (record(("was", "int")),
         {**record(), "fields": [{"name": "now", "aliases": ["was"], "type": "long"}]}, []),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_changed_in_avro(writer: Any, reader: Any, said: list[str]) -> None:
    assert unreadable(avro(writer), avro(reader)) == said
    assert unreadable(avro(writer), avro(writer)) == []


@st.composite
def changed(draw: st.DrawFn, schema: Any) -> Any:
    """A schema that is a little different, anywhere."""
    if isinstance(schema, list):
        return [draw(changed(each)) for each in schema]
    how = draw(st.sampled_from(["same"] * 6 + ["other", "optional"]))
    if how == "other":
        return draw(st.sampled_from(["long", "double", "string", "bytes", "boolean", enum("GREEN")]))
    if how == "optional" and schema != "null":
        return ["null", schema]
    if not isinstance(schema, dict):
        return schema
    found = {**schema, **{key: draw(changed(schema[key])) for key in ("items", "values") if key in schema}}
    if "fields" in schema:
        kept = [each for each in schema["fields"] if draw(st.integers(0, 7))]
        found["fields"] = [{**each, "type": draw(changed(each["type"]))} for each in kept]
        if not draw(st.integers(0, 4)):
            default = draw(st.sampled_from([{}, {"default": 7}]))
            found["fields"].append({"name": "new", "type": "int", **default})
    return found


@given(st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_what_is_not_said_to_be_unreadable_can_be_read(data: st.DataObject) -> None:
    """And for every value that cannot be read, something is said."""
    schema, values = data.draw(schemas_with_values())
    other = data.draw(changed(schema))
    there = registry()
    writer = there.avro("s", json.dumps(schema), register=True)
    try:
        avro(other)
    except ValueError:  # a name twice, or an array of what needs no bytes
        assume(False)
    reader = there.avro("t", json.dumps(other), register=True)
    said = unreadable(writer.own_schema(), reader.own_schema())
    failed = []
    for value in values:
        raw = writer.encode(value)
        try:
            reader.decode(raw)
        except ValueError as error:
            failed.append((value, str(error)))
    assert said or not failed
    assert bool(reader.unreadable([writer.writes_with()])) is bool(said)


def test_what_is_said_of_the_schemas_of_a_state() -> None:
    there = registry()
    old = there.avro("balances-value", json.dumps(record(("a", "int"), ("b", "string"))), register=True)
    new = there.avro("balances-value", json.dumps(record(("a", "string"))), register=True)
    ids = [old.writes_with(), new.writes_with(), 999]
    missing = f"the registry {there.client.name} has no schema with id 999"
    assert new.unreadable(ids) == {
        prefix(ids[0]): f"schema with id {ids[0]} (version 1 of balances-value): a: int has become string",
        prefix(999): f"schema with id 999: {missing}",
    }
    assert new.subject_ids() == ids[:2]
    assert there.avro("other", '"string"', register=True).subject_ids() != ids[:2]
    assert there.client.ids_of("nothing") == []
    with pytest.raises(ValueError, match="cannot be read with that of balances-value: a: int has become string"):
        new.decode(old.encode({"a": 1, "b": "x"}))


# ---- Protobuf ----------------------------------------------------------------------------------------

KINDS = {
    F.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    F.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    F.TYPE_UINT32: st.integers(0, 2**32 - 1),
    F.TYPE_UINT64: st.integers(0, 2**64 - 1),
    F.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
    F.TYPE_SINT64: st.integers(-(2**63), 2**63 - 1),
    F.TYPE_FIXED32: st.integers(0, 2**32 - 1),
    F.TYPE_SFIXED64: st.integers(-(2**63), 2**63 - 1),
    F.TYPE_FLOAT: st.floats(width=32),
    F.TYPE_DOUBLE: st.floats(),
    F.TYPE_BOOL: st.booleans(),
    F.TYPE_STRING: st.text(st.characters(codec="utf-8"), max_size=5),
    F.TYPE_BYTES: st.binary(max_size=5),
}


@given(
    st.data(), st.sampled_from([*KINDS]), st.sampled_from([*KINDS]), st.booleans(), st.booleans()
)  # fmt: skip
def test_a_field_whose_type_has_changed_is_read_as_the_same_value_or_refused(
    data: st.DataObject, before: Any, now: Any, was_list: bool, is_list: bool
) -> None:
    there = registry()
    old, new = (
        there.protobuf("s", classes(field("x", 17, kind, repeated=repeated))["Order"], register=True)
        for kind, repeated in ((before, was_list), (now, is_list))
    )
    values = data.draw(st.lists(KINDS[before], min_size=1, max_size=3 if was_list else 1))
    raw = old.encode(old._message(x=values if was_list else values[0]))
    try:
        got = new.decode(raw).x
    except ValueError:
        assert new.unreadable([old.writes_with()])
        return
    found = [*got] if is_list else [got]
    if not was_list and not is_list and not values[0]:  # it needs no bytes
        assert not got
    elif not was_list and not values[0]:
        assert found in ([], values)
    else:
        assert [*map(in_bytes, found)] == [*map(in_bytes, values)]


def in_bytes(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    return value.encode() if isinstance(value, str) else int(value) if isinstance(value, int) else value


def test_what_has_changed_in_protobuf() -> None:
    there = registry()
    old = there.protobuf(
        "s", classes(field("x", 17, F.TYPE_INT64), field("n", 18, F.TYPE_STRING))["Order"], register=True
    )
    new = there.protobuf("s", classes(field("x", 17, F.TYPE_STRING))["Order"], register=True)
    assert [*new.unreadable([old.writes_with()]).values()] == [
        f"schema with id {old.writes_with()} (version 1 of s): x = 17: int64 has become string"
    ]
    assert not new.decode(old.encode(old._message(n="kept"))).x
    with pytest.raises(ValueError, match="cannot be read with that of the class: x = 17: int64 has become string"):
        new.decode(old.encode(old._message(x=5)))
    less = there.protobuf("s", classes()["Order"], register=True)
    assert less.unreadable([old.writes_with()]) == {}


# ---- JSON Schema -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "writer, reader, said",
    [
        ({"type": "object"}, {"type": "array"}, ['$: type was "object" and is "array"']),
        ({"type": "integer"}, {"type": ["number", "null"]}, []),
        ({"minimum": 5}, {"minimum": 3, "title": "t"}, []),
        ({"minimum": 5}, {"minimum": 7}, ["$: minimum was 5 and is 7"]),
        ({}, {"minimum": 7}, ["$: minimum is new, 7"]),
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "number"}}, "required": ["a"]},
         ["$.a: it is required now", '$.a: type was "string" and is "number"']),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"additionalProperties": False},
         ["$.a: it is not allowed any more"]),
        ({"enum": ["a", "b"]}, {"enum": ["b"]}, ['$: enum was ["a","b"] and is ["b"]']),
        ({"items": {"type": "string"}}, {"items": {"type": "null"}}, ['$[]: type was "string" and is "null"']),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
         {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ['$.$defs.a: type was "string" and is "null"']),
        (True, {"type": "null"}, ['$: true has become {"type":"null"}']),
        ({"type": "null"}, True, []),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_changed_in_a_json_schema(writer: Any, reader: Any, said: list[str]) -> None:
    assert unreadable_json(writer, reader) == said
    there = registry()
    old = there.json_schema("s", json.dumps(writer), register=True)
    new = there.json_schema(f"{uuid.uuid4()}", json.dumps(reader), register=True)
    assert bool(new.unreadable([old.writes_with()])) is bool(said)

"""Columns of Protobuf and of JSON with a schema have what the serdes decode."""

from __future__ import annotations

import datetime
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference
from google.protobuf import (
    any_pb2,
    descriptor_pool,
    empty_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from onceflow.errors import EnvironmentUnusableError
from onceflow.schema_registry.json_columns import JsonSchemaColumn
from onceflow.schema_registry.protobuf_columns import ProtobufColumn

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import UTC, registry
    from test_protobuf_serde import OLD, F, field
    from test_schema_changes import KINDS
finally:
    sys.path.pop(0)


# ---- Protobuf ----------------------------------------------------------------------------------------


def kinds_file() -> FileDescriptorProto:
    """A message with fields of all kinds: `one_5` is a single one of type 5, `many_5` a list, `maybe_5` optional."""
    file = FileDescriptorProto(name="kinds.proto", package="shop", syntax="proto3")
    for name in ("any", "empty", "struct", "timestamp", "wrappers"):
        file.dependency.append(f"google/protobuf/{name}.proto")
    color = file.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="GREEN", number=1)
    kinds = file.message_type.add(name="Kinds")
    inner = kinds.nested_type.add(name="Inner")
    inner.field.append(field("x", 1, F.TYPE_INT32))
    entry = kinds.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.extend([field("key", 1, F.TYPE_STRING), field("value", 2, F.TYPE_MESSAGE, ".shop.Kinds.Inner")])
    kinds.oneof_decl.add(name="choice")
    number = iter(range(1, 200))
    for kind in KINDS:
        kinds.field.append(field(f"one_{kind}", next(number), kind))
        kinds.field.append(field(f"many_{kind}", next(number), kind, repeated=True))
        maybe = field(f"maybe_{kind}", next(number), kind)
        maybe.oneof_index, maybe.proto3_optional = len(kinds.oneof_decl), True
        kinds.oneof_decl.add(name=f"_maybe_{kind}")
        kinds.field.append(maybe)
    kinds.field.append(field("color", next(number), F.TYPE_ENUM, ".shop.Color"))
    kinds.field.append(field("inners", next(number), F.TYPE_MESSAGE, ".shop.Kinds.Inner", repeated=True))
    kinds.field.append(field("counts", next(number), F.TYPE_MESSAGE, ".shop.Kinds.CountsEntry", repeated=True))
    for name, of in (("card", ".shop.Kinds.Inner"), ("cash", "")):
        one = field(name, next(number), F.TYPE_MESSAGE if of else F.TYPE_STRING, of)
        one.oneof_index = 0
        kinds.field.append(one)
    for name, of in (
        ("at", "Timestamp"), ("any", "Any"), ("empty", "Empty"), ("document", "Struct"), ("wrapped", "UInt64Value"),
    ):  # fmt: skip
        kinds.field.append(field(name, next(number), F.TYPE_MESSAGE, f".google.protobuf.{of}"))
    return file


def kinds_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for module in (any_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.Add(kinds_file())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Kinds"))


Kinds = kinds_class()
SERDE = registry().protobuf("kinds-value", Kinds, register=True)


@given(st.data())
def test_a_column_of_protobuf_has_what_was_written(data: st.DataObject) -> None:
    message, wanted = Kinds(), {}
    for kind, values in KINDS.items():
        one, many, maybe = data.draw(values), data.draw(st.lists(values, max_size=2)), data.draw(st.none() | values)
        setattr(message, f"one_{kind}", one)
        getattr(message, f"many_{kind}").extend(many)
        if maybe is not None:
            setattr(message, f"maybe_{kind}", maybe)
        wanted |= {f"one_{kind}": one, f"many_{kind}": many, f"maybe_{kind}": maybe}
    column = pickle.loads(pickle.dumps(ProtobufColumn(SERDE)))
    got, bad = column.decode(pa.array([SERDE.encode(message), None, b"bad"], pa.binary()))
    assert (got.type, [*bad]) == (column.type, [2])
    row = got.to_pylist()[0]
    for name, value in wanted.items():
        assert repr(row[name]) == repr(value) or row[name] == value, name
    assert got.to_pylist()[1:] == [None, None]


def test_messages_within_messages() -> None:
    message = Kinds(color=1, cash="yes", inners=[{"x": 1}, {}], counts={"a": {"x": 2}})
    message.at.FromDatetime(datetime.datetime(2026, 12, 1, 8, 30, 0, 5))
    message.any.Pack(timestamp_pb2.Timestamp(seconds=5))
    message.empty.SetInParent()
    message.document.update({"a": [1, None]})
    message.wrapped.value = 2**64 - 1
    got, bad = ProtobufColumn(SERDE).decode(pa.array([SERDE.encode(message), SERDE.encode(Kinds(color=7))]))
    assert not bad
    row, bare = got.to_pylist()
    assert (row["color"], bare["color"]) == ("GREEN", "7")
    assert (row["inners"], bare["inners"], row["counts"]) == ([{"x": 1}, {"x": 0}], [], [("a", {"x": 2})])
    assert (row["card"], row["cash"], bare["cash"]) == (None, "yes", None)
    assert row["at"] == datetime.datetime(2026, 12, 1, 8, 30, 0, 5, UTC)
    assert row["any"]["type_url"] == "type.googleapis.com/google.protobuf.Timestamp"
    assert timestamp_pb2.Timestamp.FromString(row["any"]["value"]).seconds == 5
    assert (row["empty"], bare["empty"]) == (True, None)
    assert json.loads(row["document"]) == {"a": [1, None]}
    assert (row["wrapped"], bare["wrapped"]) == (Decimal(2**64 - 1), None)


def test_what_columns_of_protobuf_cannot_have() -> None:
    with pytest.raises(EnvironmentUnusableError, match=r"shop\.Order, which refers to itself"):
        _ = ProtobufColumn(registry().protobuf("orders", OLD["Order"], register=True)).type
    far = Kinds()
    far.at.seconds = 2**60
    nan = Kinds()
    nan.document.update({"a": float("nan")})
    got, bad = ProtobufColumn(SERDE).decode(pa.array([SERDE.encode(far), SERDE.encode(nan), SERDE.encode(Kinds())]))
    assert got.null_count == 2
    assert "a column cannot have it" in bad[0]
    assert "JSON lacks" in bad[1]


# ---- JSON Schema -------------------------------------------------------------------------------------

JSON_LEAVES: list[tuple[Any, pa.DataType, st.SearchStrategy[Any]]] = [
    ({"type": "string"}, pa.string(), st.text(st.characters(codec="utf-8"), max_size=5)),
    ({"type": "integer"}, pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ({"type": "number"}, pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    ({"type": "boolean"}, pa.bool_(), st.booleans()),
    ({"enum": ["a", "b"]}, pa.string(), st.sampled_from("ab")),
    ({"type": ["null", "integer"]}, pa.int64(), st.none() | st.integers(-5, 5)),
    ({"oneOf": [{"type": "null"}, {"type": "string"}]}, pa.string(), st.none() | st.text("abc", max_size=3)),
    ({"type": ["integer", "number"]}, pa.float64(), st.integers(-5, 5) | st.just(0.5)),
]


@st.composite
def json_typed(draw: st.DrawFn, depth: int = 2) -> tuple[Any, pa.DataType, st.SearchStrategy[Any]]:
    """A schema, the type of its column, and values."""
    kind = draw(st.sampled_from(["leaf", "array", "map", "object"] if depth else ["leaf"]))
    if kind == "leaf":
        return draw(st.sampled_from(JSON_LEAVES))
    if kind == "object":
        fields = draw(st.lists(json_typed(depth - 1), min_size=1, max_size=3))
        named = {f"f{at}": each for at, each in enumerate(fields)}
        optional = {name: values for name, (_, _, values) in named.items()}
        return (
            {"type": "object", "properties": {name: schema for name, (schema, _, _) in named.items()}},
            pa.struct([pa.field(name, of) for name, (_, of, _) in named.items()]),
            st.fixed_dictionaries({}, optional=optional),
        )
    schema, of, values = draw(json_typed(depth - 1))
    if kind == "array":
        return {"type": "array", "items": schema}, pa.list_(of), st.lists(values, max_size=3)
    more = {"type": "object", "additionalProperties": schema}
    return more, pa.map_(pa.string(), of), st.dictionaries(st.text("abc", max_size=2), values, max_size=3)


def same(got: Any, schema: Any, value: Any) -> bool:
    if value is None or got is None:
        return got is value
    if schema.get("type") == "array":
        return len(got) == len(value) and all(
            same(one, schema["items"], other) for one, other in zip(got, value, strict=True)
        )
    if "additionalProperties" in schema:
        pairs = dict(got)
        return pairs.keys() == value.keys() and all(
            same(pairs[key], schema["additionalProperties"], each) for key, each in value.items()
        )
    if "properties" in schema:
        return all(same(got[name], each, value.get(name)) for name, each in schema["properties"].items())
    return bool(got == value)


@given(json_typed(), st.data())
def test_a_column_of_json_has_what_was_written(case: Any, data: st.DataObject) -> None:
    schema, of, strategy = case
    values = data.draw(st.lists(strategy, min_size=1, max_size=3))
    serde = registry().json_schema("j", json.dumps(schema), register=True)
    column = pickle.loads(pickle.dumps(JsonSchemaColumn(serde)))
    assert column.type == of
    got, bad = column.decode(pa.array([*map(serde.encode, values), None, b"bad"], pa.binary()))
    assert [*bad] == [len(values) + 1]
    for one, value in zip(got.to_pylist(), values, strict=False):
        assert same(one, schema, value), (one, value)


@pytest.mark.parametrize(
    "schema, value, text",
    [
        (True, {"a": 1}, '{"a":1}'),
        ({}, "x", '"x"'),
        ({"type": ["string", "integer"]}, 5, "5"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"a": None}, '{"a":null}'),
        ({"type": "object"}, {"a": 1}, '{"a":1}'),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, {"a": Decimal("1.50")}, '{"a":1.5}'),
    ],
    ids=str,
)
def test_what_has_no_one_type_is_json(schema: Any, value: Any, text: str) -> None:
    serde = registry().json_schema("j", json.dumps(schema), register=True)
    got, bad = JsonSchemaColumn(serde).decode(pa.array([serde.encode(value)]))
    assert (got.type, got.to_pylist(), bad) == (pa.string(), [text], {})


def test_references_of_json_schemas_and_values_beyond_a_column() -> None:
    there = registry()
    money = {"$defs": {"cents": {"type": "integer"}}, "type": "object", "properties": {"c": {"$ref": "#/$defs/cents"}}}
    there.client.library.register_schema("money", Schema(json.dumps(money), "JSON"))
    order = {"type": "object", "properties": {"price": {"$ref": "money.json"}, "n": {"type": "number"}}}
    there.client.library.register_schema(
        "orders", Schema(json.dumps(order), "JSON", [SchemaReference("money.json", "money", 1)])
    )
    serde = there.json_schema("orders")
    got, bad = JsonSchemaColumn(serde).decode(
        pa.array([*map(serde.encode, [{"price": {"c": 5.0}}, {"price": {"c": 2**70}}, {"n": 10**308}, {"n": 0}])])
    )
    assert got.to_pylist()[0] == {"price": {"c": 5}, "n": None}
    assert [*bad] == [1]
    endless = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}, "type": "object"}},
    }
    with pytest.raises(EnvironmentUnusableError, match=r"#/\$defs/node, which refers to itself"):
        _ = JsonSchemaColumn(there.json_schema("e", json.dumps(endless), register=True)).type

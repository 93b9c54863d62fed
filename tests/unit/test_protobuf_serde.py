"""Protobuf with files in a registry: exact both ways, and what Confluent's own serializers read and write."""

from __future__ import annotations

import base64
import contextlib
import pickle
import uuid
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import any_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.schema_registry import proto_text, wire_format
from onceflow.schema_registry.json_input import json_encoder
from onceflow.schema_registry.json_view import JsonView
from onceflow.schema_registry.registry import SchemaRegistry

F = FieldDescriptorProto


def field(name: str, number: int, kind: Any, of: str = "", *, repeated: bool = False) -> FieldDescriptorProto:
    label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
    return F(name=name, number=number, type=kind, label=label, type_name=of or None)


def shop_file(*more: FieldDescriptorProto) -> FileDescriptorProto:
    """Messages of all kinds: nested, recursive, with a oneof, with an import, and with Any."""
    file = FileDescriptorProto(name="shop/order.proto", package="shop", syntax="proto3")
    file.dependency.extend(["shop/money.proto", "google/protobuf/any.proto", "google/protobuf/timestamp.proto"])
    other = file.message_type.add(name="Other")
    other.field.append(field("id", 1, F.TYPE_INT64))
    order = file.message_type.add(name="Order")
    order.field.extend(
        [
            field("id", 1, F.TYPE_INT64),
            field("note", 2, F.TYPE_STRING),
            field("price", 3, F.TYPE_MESSAGE, ".shop.Money"),
            field("lines", 4, F.TYPE_MESSAGE, ".shop.Order.Line", repeated=True),
            field("parent", 5, F.TYPE_MESSAGE, ".shop.Order"),
            field("extra", 6, F.TYPE_MESSAGE, ".google.protobuf.Any"),
            field("at", 7, F.TYPE_MESSAGE, ".google.protobuf.Timestamp"),
            *more,
        ]
    )
    line = order.nested_type.add(name="Line")
    line.field.extend([field("sku", 1, F.TYPE_STRING), field("count", 2, F.TYPE_UINT32)])
    line.oneof_decl.add(name="paid")
    for name, number in (("card", 3), ("cash", 4)):
        one = field(name, number, F.TYPE_STRING)
        one.oneof_index = 0
        line.field.append(one)
    return file


def money_file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="shop/money.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Money").field.append(field("cents", 1, F.TYPE_INT64))
    return file


def classes(*more: FieldDescriptorProto) -> dict[str, Any]:
    """The classes of a file with more fields in its Order."""
    pool = descriptor_pool.DescriptorPool()
    for module in (any_pb2, timestamp_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    for file in (money_file(), shop_file(*more)):
        pool.Add(file)
    names = ("Order", "Order.Line", "Other", "Money")
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}")) for name in names}


OLD, NEW = classes(), classes(field("coupon", 8, F.TYPE_STRING))


def registry() -> SchemaRegistry:
    """A new one, in memory."""
    return SchemaRegistry(f"mock://{uuid.uuid4()}")


def order(made_of: dict[str, Any] = OLD, **more: Any) -> Any:
    Order, Line = made_of["Order"], made_of["Order.Line"]
    found = Order(id=7, note="é", price=made_of["Money"](cents=5), lines=[Line(sku="a", count=2, cash="yes")], **more)
    found.parent.CopyFrom(Order(id=6))
    found.extra.Pack(timestamp_pb2.Timestamp(seconds=5))
    found.at.seconds = 1_700_000_000
    return found


def test_messages_of_all_kinds_come_back() -> None:
    for name in ("Order", "Order.Line", "Other"):
        ours = registry().protobuf("orders-value", OLD[name], register=True)
        there = pickle.loads(pickle.dumps(ours))
        value = order() if name == "Order" else OLD[name]()
        assert there.decode(ours.encode(value)).SerializeToString() == value.SerializeToString()
        assert there.encode(value) == ours.encode(value)


def test_a_field_that_the_class_lacks_is_kept() -> None:
    there = registry()
    new = there.protobuf("orders-value", NEW["Order"], register=True)
    old = there.protobuf("orders-value", OLD["Order"])
    raw = new.encode(order(NEW, coupon="free"))
    assert new.decode(old.encode(old.decode(raw))).coupon == "free"
    assert new.decode(old.encode(order())).coupon == ""


def test_another_message_is_refused_both_ways() -> None:
    there = registry()
    orders = there.protobuf("orders-value", OLD["Order"], register=True)
    others = there.protobuf("orders-value", OLD["Other"], register=True)
    with pytest.raises(ValueError, match=r"it is a shop.Other, and this serde is for shop.Order"):
        orders.decode(others.encode(OLD["Other"](id=1)))
    with pytest.raises(ValueError, match=r"it is shop.Other, and this serde is for shop.Order"):
        orders.encode(OLD["Other"](id=1))
    with pytest.raises(ValueError, match="it is dict, and"):
        orders.encode({"id": 1})
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)has no message shop.Money.*shop.Order.Line"):
        there.protobuf("orders-value", OLD["Money"]).encode(OLD["Money"]())
    with pytest.raises(OptionError, match="is no class of Protobuf messages"):
        there.protobuf("orders-value", dict)


@given(st.binary(max_size=20))
def test_any_bytes_are_a_message_or_a_value_error(garbage: bytes) -> None:
    for raw in (garbage, SHARED.encode(OLD["Order"]())[:5] + garbage, SHARED.encode(order()) + garbage):
        with contextlib.suppress(ValueError):
            SHARED.decode(raw)


SHARED = registry().protobuf("orders-value", OLD["Order"], register=True)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_paths_to_messages_come_back(path: list[int]) -> None:
    raw = b"ab" + wire_format.path_bytes(tuple(path))
    assert wire_format.message_path(raw + b"rest", 2) == (tuple(path), len(raw))
    for end in range(2, len(raw)):
        with pytest.raises(ValueError, match="is not complete"):
            wire_format.message_path(raw[:end], 2)


def test_confluents_serializers_read_and_write_the_same() -> None:
    there = registry()
    context = SerializationContext("orders", MessageField.VALUE)
    for name in ("Order", "Order.Line"):
        message = order() if name == "Order" else OLD[name](sku="x")
        serializer = ProtobufSerializer(OLD[name], there.client.library, conf={"auto.register.schemas": True})
        theirs = serializer(message, context)
        ours = there.protobuf("orders-value", OLD[name], register=True)
        raw = ours.encode(message)
        assert theirs is not None
        assert theirs[:5] == raw[:5], "the same file, registered once"
        assert ours.decode(theirs) == message
        read = ProtobufDeserializer(OLD[name], schema_registry_client=there.client.library)(raw, context)
        assert read == message


def nested(depth: int) -> Any:
    """A message in so many others."""
    message = found = OLD["Order"]()
    for _ in range(depth):
        message.note = "x" * 200
        message = message.parent
    message.id = 7
    return found


@pytest.mark.parametrize("depth", [50, 98, 99, 100, 101, 150])
def test_what_is_written_can_be_read(depth: int) -> None:
    """Protobuf writes messages that are nested more deeply than it reads them."""
    message = nested(depth)
    refused = pytest.raises(ValueError, match="nested too deeply") if depth > 100 else contextlib.nullcontext()
    with refused:
        raw = SHARED.encode(message)
        assert SHARED.decode(raw).SerializeToString() == message.SerializeToString()


def test_files_that_no_registry_has_are_those_of_this_host() -> None:
    there = registry()
    text = FileDescriptorProto(name="trip.proto", package="shop", syntax="proto3")
    text.dependency.extend(["google/type/date.proto", "confluent/meta.proto", "google/protobuf/timestamp.proto"])
    trip = text.message_type.add(name="Trip")
    trip.field.append(field("on", 1, F.TYPE_MESSAGE, ".google.type.Date"))
    trip.field.append(field("at", 2, F.TYPE_MESSAGE, ".google.protobuf.Timestamp"))
    schema = Schema(base64.b64encode(text.SerializeToString()).decode(), "PROTOBUF")
    there.client.library.register_schema("trips-value", schema)
    encode = json_encoder(there.client, "trips-value")
    document = {"on": {"year": 2026, "month": 12, "day": 1}, "at": "1970-01-01T00:00:05Z"}
    assert JsonView(there.client).read(encode(document))[0] == document
    text.dependency.append("google/type/nothing.proto")
    schema = Schema(base64.b64encode(text.SerializeToString()).decode(), "PROTOBUF")
    there.client.library.register_schema("lost-value", schema)
    raw = there.client.library.get_latest_version("lost-value").schema_id
    with pytest.raises(ValueError, match=r"it imports google/type/nothing.proto, which this host does not have"):
        JsonView(there.client).read(wire_format.prefix(raw) + b"\0")


TEXT = """
// package wrong; message Wrong {}
syntax = "proto3"; /* message Wrong { */
package shop.v1;
import "money.proto";
option java_package = "message Wrong {";
extend google.protobuf.FieldOptions { optional string note = 50000; }
message First {
  map<string, int32> item_counts = 1 [(note) = "}", deprecated = true];
  message Inner { enum Kind { A = 0; } message Deep {} Kind kind = 1; }
  oneof choice { string a = 2 [json_name = "{"]; group Picked = 3 { map<string, Inner> x = 1; } }
  optional group Result = 4 { int32 message = 1; }
  reserved 5, 6;
  message Last {}
  string message = 7; int32 group = 8; string map = 9;
}
service Shop { rpc Get (First) returns (Second) { option (x) = { a: 1 }; } }
enum message_like { message = 0; }
message Second { option (y) = { name: "Inner" value { z: 2 } }; }
"""


def test_messages_of_a_text_are_numbered_as_protobuf_does() -> None:
    found = proto_text.messages(TEXT)
    assert found == {
        (0,): "shop.v1.First",
        (0, 0): "shop.v1.First.ItemCountsEntry",
        (0, 1): "shop.v1.First.Inner",
        (0, 1, 0): "shop.v1.First.Inner.Deep",
        (0, 2): "shop.v1.First.Picked",
        (0, 2, 0): "shop.v1.First.Picked.XEntry",
        (0, 3): "shop.v1.First.Result",
        (0, 4): "shop.v1.First.Last",
        (1,): "shop.v1.Second",
    }
    assert proto_text.messages("message A {}") == {(0,): "A"}
    text = """edition = "2024"; import option "o.proto";
    extend B { optional group Extra = 7 { int32 x = 1; } int32 y = 8; }
    export message A { extend B { repeated group More = 9 { map<string, int32> z = 1; } } local message In {} }
    local message C {}
    """
    assert proto_text.messages(text) == {
        (0,): "Extra", (1,): "A", (1, 0): "A.More", (1, 0, 0): "A.More.ZEntry", (1, 1): "A.In", (2,): "C",
    }  # fmt: skip


@given(st.text("message A{}oneof;map<,>group\"'/*[]", max_size=60))
def test_any_text_has_messages_or_is_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(proto_text.messages(text), dict)

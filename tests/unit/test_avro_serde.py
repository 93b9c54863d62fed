"""Avro with schemas in a registry: exact both ways, and what Confluent's own serializers read and write."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import pickle
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceflow.errors import EnvironmentUnusableError, OptionError, RegistryUnavailableError
from onceflow.schema_registry.avro_columns import AvroColumn
from onceflow.schema_registry.registry import SchemaRegistry

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import UTC, record, registry, schemas_with_values, serde
finally:
    sys.path.pop(0)


@given(schemas_with_values())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_every_value_comes_back_as_it_was(case: tuple[Any, list[Any]]) -> None:
    schema, values = case
    ours = serde(schema)
    there = pickle.loads(pickle.dumps(ours))  # as it travels to tasks
    for value in values:
        raw = ours.encode(value)
        assert there.decode(raw) == value
        assert there.encode(value) == raw


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, value",
    [
        ("int", 2**31),
        ("int", True),
        ("int", 1.5),
        ("long", 2**63),
        ("float", 1e300),
        ("float", 2**24 + 1),
        ("double", 2**53 + 1),
        ("boolean", 1),
        ("null", 0),
        ("string", b"x"),
        ("string", "\ud800"),
        ("bytes", "x"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B"),
        ({"type": "fixed", "name": "F", "size": 2}, b"abc"),
        ({"type": "map", "values": "int"}, {1: 2}),
        ({"type": "array", "items": "int"}, "ab"),
        ({"type": "array", "items": "float"}, [1e300]),
        ({"type": "map", "values": "float"}, {"a": 1e300}),
        (["null", "float"], 1e300),
        ({"type": "int", "logicalType": "date"}, datetime.datetime(2026, 12, 1, 8, 30)),
        ({"type": "long", "logicalType": "timestamp-millis"}, datetime.datetime(2026, 12, 1)),
        ({"type": "long", "logicalType": "timestamp-millis"}, datetime.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        ({"type": "long", "logicalType": "timestamp-micros"}, datetime.datetime(2026, 12, 1)),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, datetime.datetime(2026, 12, 1, tzinfo=UTC)),
        ({"type": "int", "logicalType": "time-millis"}, datetime.time(1, 2, 3, 4)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, decimal.Decimal("1.234")),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, decimal.Decimal("123.45")),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, decimal.Decimal("NaN")),
        ({"type": "string", "logicalType": "uuid"}, "no UUID"),
        (record(("id", "int")), {"id": 1, "amuont": 2}),
        (record(("id", "int")), {}),
        (record(("id", "int")), [1]),
        (record(("id", record(("x", "float"), name="Inner"))), {"id": {"x": 1e39}}),
        ([record(("x", "float"), name="A"), record(("y", "int"), name="B")], {"x": 1e39}),
        ([record(("x", "float"), name="A"), record(("x", "int"), name="B")], ("shop.A", {"x": 1e39})),
    ],
    ids=str,
)
def test_a_value_that_would_not_come_back_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="does not fit the schema"):
        serde(kind).encode(value)


@pytest.mark.parametrize(
    "kind, value, back",
    [
        (["float", "double"], 1e300, 1e300),
        (["int", "long"], 2**40, 2**40),
        ("double", 2**53, float(2**53)),
        (record(("id", "int"), ("next", ["null", "shop.Payment"])), {"id": 1, "next": {"id": 2, "next": None}}, None),
        ([record(("x", "int"), name="A"), record(("x", "int"), name="B")], ("shop.B", {"x": 1}), ("shop.B", {"x": 1})),
        (["string", {"type": "enum", "name": "E", "symbols": ["A"]}], "A", "A"),
        ({"type": "long", "logicalType": "timestamp-millis"}, datetime.datetime(2026, 12, 1, tzinfo=UTC), None),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 2**60 + 1, 2**60 + 1),
        ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, b"x" * 12, b"x" * 12),
    ],
    ids=str,
)
def test_values_of_special_types(kind: Any, value: Any, back: Any) -> None:
    ours = serde(kind)
    assert ours.decode(ours.encode(value)) == (value if back is None else back)


# ---- other schemas -----------------------------------------------------------------------------------

OLD = record(("id", "int"), ("note", "string"))
NEW = {
    **record(("id", "long")),
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "amount", "type": ["null", "double"], "default": None},
    ],
}


def test_a_value_of_an_older_schema_gets_the_fields_of_this_one() -> None:
    there = registry()
    raw = there.avro("payments-value", json.dumps(OLD), register=True).encode({"id": 7, "note": "x"})
    new = there.avro("payments-value", json.dumps(NEW), register=True)
    assert new.decode(raw) == {"id": 7, "amount": None}
    assert there.avro("payments-value").decode(raw) == {"id": 7, "amount": None}
    # What was found stays: tasks of one run have one schema, also if another version comes.
    newest = pickle.loads(pickle.dumps(there.avro("payments-value")))
    there.avro("payments-value", json.dumps({**NEW, "doc": "another version"}), register=True).own()
    assert newest.own().text == new.own().text


def test_a_schema_that_cannot_be_read_with_this_one_is_named() -> None:
    there = registry()
    raw = there.avro("a-value", json.dumps(record(("id", "string"))), register=True).encode({"id": "x"})
    with pytest.raises(ValueError, match=r"schema with id 1 cannot be read with that of b-value"):
        there.avro("b-value", json.dumps(record(("id", "int"))), register=True).decode(raw)


def test_references_are_read() -> None:
    there = registry()
    client = there.client.library
    client.register_schema("money", Schema(json.dumps(record(("cents", "long"), name="Money")), "AVRO"))
    text = json.dumps(record(("price", "shop.Money"), ("tip", ["null", "shop.Money"])))
    client.register_schema("payments-value", Schema(text, "AVRO", [SchemaReference("shop.Money", "money", 1)]))
    ours = pickle.loads(pickle.dumps(there.avro("payments-value")))
    value = {"price": {"cents": 5}, "tip": {"cents": 6}}
    assert ours.decode(ours.encode(value)) == value


# ---- Confluent's own serializers ---------------------------------------------------------------------


def test_confluents_serializers_read_and_write_the_same() -> None:
    there = registry()
    text = json.dumps(NEW)
    client: SchemaRegistryClient = there.client.library
    context = SerializationContext("payments", MessageField.VALUE)
    ours = there.avro("payments-value", text, register=True)
    ours.own()
    value = {"id": 7, "amount": 1.5}
    theirs = AvroSerializer(client, text, conf={"auto.register.schemas": False})(value, context)
    assert theirs == ours.encode(value)
    assert AvroDeserializer(client)(ours.encode(value), context) == value
    assert ours.decode(theirs) == value


def test_a_guid_in_front_of_the_value_is_read() -> None:
    there = registry()
    ours = there.avro("payments-value", json.dumps(OLD), register=True)
    own = ours.own()
    found = there.client.library.register_schema_full_response("payments-value", Schema(own.text, "AVRO"))
    assert found.guid is not None
    raw = ours.encode({"id": 7, "note": "x"})
    assert ours.decode(b"\x01" + uuid.UUID(found.guid).bytes + raw[5:]) == {"id": 7, "note": "x"}


# ---- bad bytes, and registries that fail ---------------------------------------------------------------


@given(st.binary(max_size=30), st.integers(0, 30))
def test_any_bytes_are_a_value_or_a_value_error(garbage: bytes, cut: int) -> None:
    with contextlib.suppress(ValueError):
        SHARED.decode(garbage)
    whole = SHARED.encode({"id": 7, "note": "hello", "many": [1, 2, 3]})
    for raw in (whole[: min(cut, len(whole) - 1)], whole + b"x", whole[:5] + garbage):
        if raw in (whole[: len(raw)], whole + b"x"):
            with pytest.raises(ValueError, match=r"."):
                SHARED.decode(raw)
        else:
            with contextlib.suppress(ValueError):
                SHARED.decode(raw)


SHARED = registry().avro(
    "shared-value",
    json.dumps(record(("id", "int"), ("note", "string"), ("many", {"type": "array", "items": "long"}))),
    register=True,
)


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"", "it is empty"),
        (b'{"id": 1}', "first byte is 123"),
        (b"\0\0\0", "ends within the id of its schema: 3 bytes"),
        (b"\0\0\0\x30\x39x", "has no schema with id 12345"),
        (b"\0\0\0\0\x01", "ends too early for its schema with id 1: 5 bytes"),
    ],
)
def test_what_is_said_of_bad_bytes(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SHARED.decode(raw)


def test_a_subject_that_is_missing_or_of_another_kind() -> None:
    there = registry()
    there.avro("payments-value", json.dumps(OLD), register=True).own()
    with pytest.raises(EnvironmentUnusableError, match=r"no subject 'paymets-value'[\s\S]*payments-value"):
        there.avro("paymets-value").own()
    with pytest.raises(EnvironmentUnusableError, match="does not have this schema"):
        there.avro("payments-value", json.dumps(NEW)).own()
    there.client.library.register_schema("json-value", Schema('{"type": "object"}', "JSON"))
    with pytest.raises(EnvironmentUnusableError, match="is JSON, and this serde is for AVRO"):
        there.avro("json-value").own()
    with pytest.raises(EnvironmentUnusableError, match="is no Avro schema"):
        there.avro("bad-value", '{"type": "recrod"}', register=True).encode({})


def test_a_registry_that_does_not_answer_is_no_fault_of_a_record() -> None:
    nobody = SchemaRegistry("http://user:secret@127.0.0.1:9", wait=0)
    with pytest.raises(RegistryUnavailableError, match=r"http://127.0.0.1:9 was asked") as error:
        nobody.avro("payments-value", json.dumps(OLD)).decode(b"\0\0\0\0\x01xx")
    assert "secret" not in str(error.value) + repr(nobody)


# ---- found with public bug reports of other systems ---------------------------------------------------


NODE = record(("v", "int"), ("next", ["null", "shop.Node"]), name="Node")


@pytest.mark.parametrize("depth", [100, 8_000, 100_000])
def test_values_that_are_nested_deeply(depth: int) -> None:
    """The compiled code of fastavro would end the process."""
    ours = serde(NODE)
    raw = ours.encode({"v": 1, "next": None})[:5] + b"\2\2" * depth + b"\2\0"
    if depth == 100:
        assert ours.encode(ours.decode(raw)) == raw
        return
    with pytest.raises(ValueError, match="does not fit its schema"):
        ours.decode(raw)
    endless: dict[str, Any] = {"v": 1}
    endless["next"] = endless
    with pytest.raises(ValueError, match="nested too deeply"):
        ours.encode(endless)
    there = registry()
    more = record(("v", "int"), ("next", ["null", NODE]), name="Root")
    raw = there.avro("a", json.dumps(more), register=True).encode({"v": 1, "next": None})[:6]
    less = there.avro("a", json.dumps(record(("v", "int"), name="Root")), register=True)
    with pytest.raises(ValueError, match="does not fit its schema"):  # what is skipped is nested, too
        less.decode(raw + b"\2" * depth)


@pytest.mark.parametrize("items", ["null", record(name="Empty"), {"type": "fixed", "name": "F", "size": 0}])
def test_arrays_of_what_needs_no_bytes_are_refused(items: Any) -> None:
    with pytest.raises(EnvironmentUnusableError, match="an array whose items need no bytes"):
        serde({"type": "array", "items": items}).prepare()


PLACE = record(("f", "float"), ("at", {"type": "long", "logicalType": "timestamp-millis"}), name="Place")
SECOND = {"type": "enum", "name": "Color", "namespace": "shop", "symbols": ["RED"]}


@pytest.mark.parametrize(
    "root, value",
    [
        (record(("here", "shop.Place")), {"here": 0}),
        (["null", "shop.Place"], 0),
        (["shop.Place", "shop.Color"], 0),
        ({"type": "array", "items": "shop.Place"}, [0, 0]),
        ({"type": "map", "values": ["null", "shop.Place"]}, {"a": 0}),
        ("shop.Place", 0),
        (record(("a", ["null", "shop.Place"]), ("b", {"type": "array", "items": "shop.Place"})), {"a": 0, "b": [0]}),
    ],
    ids=str,
)
def test_referenced_types_are_as_those_inside(root: Any, value: Any) -> None:
    there = registry()
    for subject, schema in (("place", PLACE), ("color", SECOND)):
        there.client.library.register_schema(subject, Schema(json.dumps(schema), "AVRO"))
    references = [SchemaReference("shop.Place", "place", 1), SchemaReference("shop.Color", "color", 1)]
    there.client.library.register_schema("root", Schema(json.dumps(root), "AVRO", references))
    ours = there.avro("root")

    def with_place(found: Any, place: Any) -> Any:
        if isinstance(found, dict):
            return {key: with_place(each, place) for key, each in found.items()}
        return [with_place(each, place) for each in found] if isinstance(found, list) else place

    good: Any = {"f": 0.5, "at": datetime.datetime(2026, 12, 1, tzinfo=UTC)}
    good = ("shop.Place", good) if "Color" in str(root) else good
    assert ours.decode(ours.encode(with_place(value, good))) == with_place(value, good)
    for bad in ({"f": 1e39, "at": datetime.datetime(2026, 12, 1, tzinfo=UTC)}, {"f": 1.0, "at": datetime.datetime.min}):
        with pytest.raises(ValueError, match="does not fit the schema"):
            ours.encode(with_place(value, bad))
    column = AvroColumn(ours)
    got, wrong = column.decode(pa.array([ours.encode(with_place(value, good)), None]))
    assert got.null_count == 1
    assert not wrong


@pytest.mark.parametrize(
    "kind, default, value",
    [
        ({"type": "long", "logicalType": "timestamp-millis"}, 0, datetime.datetime(1970, 1, 1, tzinfo=UTC)),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1)),
        ({"type": "int", "logicalType": "date"}, -1, datetime.date(1969, 12, 31)),
        ({"type": "long", "logicalType": "time-micros"}, 1, datetime.time(0, 0, 0, 1)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "\1\0", decimal.Decimal("2.56")),
        ("bytes", "\u00ff", b"\xff"),
        ({"type": "fixed", "name": "F", "size": 1}, "\u00ff", b"\xff"),
        ({"type": "map", "values": "bytes"}, {"k": "\u00ff"}, {"k": b"\xff"}),
        ({"type": "string", "logicalType": "uuid"}, str(uuid.UUID(int=5)), uuid.UUID(int=5)),
        ("double", 1, 1.0),
        ({"type": "array", "items": "string"}, [], []),
        (["bytes", "string"], "\u00ff", b"\xff"),
        ([record(("x", "int"), name="A"), record(("x", "int"), name="B")], {"x": 1}, ("shop.A", {"x": 1})),
        ({**record(("x", "int"), name="A"), "fields": [{"name": "x", "type": "int", "default": 7}]}, {}, {"x": 7}),
        (["null", "int"], None, None),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
    ],
    ids=str,
)
def test_defaults_of_fields_are_values_of_their_types(kind: Any, default: Any, value: Any) -> None:
    there = registry()
    new = {
        **record(("a", "int")),
        "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": kind, "default": default}],
    }
    raw = there.avro("s", json.dumps(record(("a", "int"))), register=True).encode({"a": 1})
    ours = there.avro("s", json.dumps(new), register=True)
    first = ours.decode(raw)
    assert first == {"a": 1, "b": value}
    assert type(first["b"]) is type(value)
    if isinstance(first["b"], list):
        first["b"].append("changed")
    if isinstance(first["b"], dict):
        first["b"]["changed"] = True
    assert ours.decode(raw) == {"a": 1, "b": value}, "each record has its own"
    assert ours.decode(ours.encode({"a": 1})) == {"a": 1, "b": value}
    one_by_one = AvroColumn(ours).decode(pa.array([raw, ours.encode({"a": 1})]))
    assert not one_by_one[1]
    assert one_by_one[0][0] == one_by_one[0][1]


@pytest.mark.parametrize(
    "kind, value",
    [
        (["null", {"type": "enum", "name": "E1", "symbols": ["A", "B"]},
          {"type": "enum", "name": "E2", "symbols": ["B", "C"]}], ("E2", "B")),
        ([{"type": "fixed", "name": "F1", "size": 1}, {"type": "fixed", "name": "F2", "size": 1}], ("F2", b"x")),
        ([{"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-millis"}],
         datetime.datetime(2026, 12, 1, tzinfo=UTC)),
        ([{"type": "int", "logicalType": "time-millis"}, {"type": "long", "logicalType": "time-micros"}],
         datetime.time(1, 2, 3, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_each_value_of_a_union_has_its_own_type(kind: Any, value: Any) -> None:
    ours = serde(kind)
    assert ours.decode(ours.encode(value)) == value
    assert ours.encode(ours.decode(ours.encode(value))) == ours.encode(value)


def test_a_decimal_is_not_rounded_to_the_digits_of_its_schema() -> None:
    ours = serde({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2})
    assert ours.decode(ours.encode(decimal.Decimal("1"))[:5] + b"\x06\x01\xe2\x40") == decimal.Decimal("1234.56")


@pytest.mark.parametrize(
    "kind, value",
    [
        ({"type": "int", "logicalType": "time-millis"}, datetime.time(1, tzinfo=UTC)),
        ({"type": "long", "logicalType": "time-micros"}, datetime.time(1, tzinfo=UTC)),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            datetime.datetime.min.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        ),
        ({"type": "long", "logicalType": "timestamp-micros"}, 2**62),
        ("float", 1e-50),
    ],
    ids=str,
)
def test_more_values_that_would_not_come_back(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="does not fit the schema"):
        serde(kind).encode(value)


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "bytes", "logicalType": "decimal"},
        {"type": "bytes", "logicalType": "decimal", "precision": 0},
        {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3},
        {"type": "bytes", "logicalType": ["x"]},
        {"type": "bytes", "logicalType": "of another program"},
    ],
)
def test_a_logical_type_that_is_none_is_left_out(kind: Any) -> None:
    ours = serde(kind)
    assert ours.decode(ours.encode(b"x")) == b"x"
    assert AvroColumn(ours).type == pa.binary()


@pytest.mark.parametrize("url", ["", [], "localhost:8081", ["http://al:p,w@host"], "http://al:p,w@host", 5])
def test_urls_that_cannot_be_used(url: Any) -> None:
    with pytest.raises(OptionError) as error:
        SchemaRegistry(url)
    assert "p,w" not in str(error.value)

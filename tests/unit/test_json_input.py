"""JSON documents as values with a schema: what `JsonView` shows comes back as the same bytes."""

from __future__ import annotations

import base64
import datetime
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from onceflow.admin.records import record_lines
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.schema_registry.json_input import json_encoder
from onceflow.schema_registry.json_view import JsonView
from onceflow.schema_registry.registry import SchemaRegistry
from onceflow.state.api.record import Record
from onceflow.state.format import exact_json

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import ONE, UTC, record, registry, schemas_with_values, serde
    from test_protobuf_serde import OLD, order
finally:
    sys.path.pop(0)


def shown(there: SchemaRegistry, raw: bytes) -> str:
    """As `onceflow consume` prints it."""
    return exact_json.written(JsonView(there.client).read(raw)[0], ensure_ascii=False)


@given(schemas_with_values())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_shown_is_written_as_the_same_bytes(case: tuple[Any, list[Any]]) -> None:
    schema, values = case
    ours = serde(schema)
    encode = json_encoder(ONE.client, ours.subject) if ours.own() else None
    assert encode is not None
    for value in values:
        raw = ours.encode(value)
        assert encode(record_lines.load_json(shown(ONE, raw))) == raw


@pytest.mark.parametrize(
    "kind, document, value",
    [
        ({"type": "long", "logicalType": "timestamp-millis"}, "2026-12-01T08:30:00Z",
         datetime.datetime(2026, 12, 1, 8, 30, tzinfo=UTC)),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, "2026-12-01T08:30:00",
         datetime.datetime(2026, 12, 1, 8, 30)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}, Decimal("12345678901234567890.12"),
         Decimal("12345678901234567890.12")),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, 5, Decimal(5)),
        (["null", "string", {"type": "map", "values": "bytes"}], {"a": "/w=="}, {"a": b"\xff"}),
        ([record(("x", "int"), name="A"), record(("x", "int"), name="B")], ["shop.B", {"x": 1}], ("shop.B", {"x": 1})),
        (record(("v", "int"), ("next", ["null", "shop.Node"]), name="Node"),
         {"v": 1, "next": {"v": 2, "next": None}}, {"v": 1, "next": {"v": 2, "next": None}}),
        ("double", "inf", float("inf")),
    ],
    ids=str,
)  # fmt: skip
def test_documents_of_avro(kind: Any, document: Any, value: Any) -> None:
    ours = serde(kind)
    ours.own()
    assert json_encoder(ONE.client, ours.subject)(document) == ours.encode(value)


@pytest.mark.parametrize(
    "kind, document, said",
    [
        (record(("at", {"type": "int", "logicalType": "date"})), {"at": "2026-13-01"}, "at: '2026-13-01' is no date"),
        (record(("raw", "bytes")), {"raw": "ü"}, "raw: 'ü' is no Base64"),
        (record(("n", "int")), {"n": "5"}, "n: '5' is str, and not an int"),
        (record(("n", "int")), {"m": 5}, "n: it is missing"),
        (record(("n", "int")), [5], "is list, and not a dict"),
        (record(("n", ["null", "int"])), {"n": "x"}, "int: 'x' is str"),
        (record(("at", {"type": "long", "logicalType": "timestamp-millis"})), {"at": 5}, "at: 5 is int, and not a dat"),
    ],
    ids=str,
)
def test_documents_that_do_not_fit(kind: Any, document: Any, said: str) -> None:
    ours = serde(kind)
    ours.own()
    with pytest.raises(ValueError, match=said):
        json_encoder(ONE.client, ours.subject)(document)


def test_documents_of_protobuf_and_json_schema() -> None:
    there = registry()
    orders = there.protobuf("orders-value", OLD["Order"], register=True)
    raw = orders.encode(order())
    document = record_lines.load_json(shown(there, raw))
    assert json_encoder(there.client, "orders-value", "shop.Order")(document) == raw
    first = json_encoder(there.client, "orders-value")({"id": "5"})
    assert first == there.protobuf("orders-value", OLD["Other"]).encode(OLD["Other"](id=5))
    for bad, said in (({"id": "x"}, "does not fit shop.Order"), ({"ids": 5}, "no field named"), ([5], "does not fit")):
        with pytest.raises(ValueError, match=said):
            json_encoder(there.client, "orders-value", "shop.Order")(bad)
    with pytest.raises(OptionError, match=r"has no message 'shop.Ordr' that can be made, but .*shop.Order"):
        json_encoder(there.client, "orders-value", "shop.Ordr")
    documents = there.json_schema("j-value", json.dumps({"type": "object", "required": ["a"]}), register=True)
    documents.own()
    assert json_encoder(there.client, "j-value")({"a": Decimal("1.50")}) == documents.encode({"a": Decimal("1.50")})
    with pytest.raises(ValueError, match="'a' is a required property"):
        json_encoder(there.client, "j-value")({})
    with pytest.raises(OptionError, match="is JSON, which has no messages"):
        json_encoder(there.client, "j-value", "shop.Order")
    with pytest.raises(EnvironmentUnusableError, match="has no subject 'k-value'"):
        json_encoder(there.client, "k-value")


def test_lines_with_documents() -> None:
    ours = serde("string")
    ours.own()
    encode = json_encoder(ONE.client, ours.subject)
    raw = ours.encode("v")
    assert record_lines.document_only(encode)(b' "v" ') == Record(None, raw)
    assert record_lines.document_only(encode)(b"  ") is None
    pairs = record_lines.with_documents(record_lines.key_and_value(":"), None, encode)
    assert pairs(b'k:"v"') == Record(b"k", raw)
    both = record_lines.with_documents(record_lines.key_and_value("|"), encode, encode)
    assert both(b'"v"|"v"') == Record(raw, raw)
    line = json.dumps({"key": "k", "value": "v", "headers": {"h": "x"}}).encode()
    found = record_lines.json_object(line, value=encode)
    assert found is not None
    assert (found.key, found.value, list(found.headers)) == (b"k", raw, [("h", b"x")])
    tombstone = record_lines.json_object(b'{"key": "v", "value": null}', encode, encode)
    assert tombstone == Record(raw, None)
    as_bytes = record_lines.json_object(b'{"value_base64": "%s"}' % base64.b64encode(raw), encode, encode)
    assert as_bytes == Record(None, raw)
    for bad in (b"v", b'{"value": 5}'):
        with pytest.raises(ValueError, match=r"."):
            record_lines.document_only(encode)(bad)

"""Values of all kinds of schemas as JSON, as commands show them."""

from __future__ import annotations

import datetime
import json
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from onceflow.cli.registry import with_schemas
from onceflow.schema_registry.json_view import JsonView, plain
from onceflow.schema_registry.registry import SchemaRegistry
from onceflow.state.api.record import Record
from onceflow.state.format import exact_json

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import ONE, UTC, record, schemas_with_values, serde
    from test_protobuf_serde import OLD, order
finally:
    sys.path.pop(0)


@given(schemas_with_values())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_value_of_avro_is_json(case: tuple[Any, list[Any]]) -> None:
    schema, values = case
    ours, view = serde(schema), JsonView(ONE.client)
    for value in values:
        found, schema_id = view.read(ours.encode(value))
        assert schema_id.key == ours.own().schema_id
        assert found == plain(value)
        assert json.loads(exact_json.written(found)) is not Ellipsis


def test_each_kind_of_value() -> None:
    registry = SchemaRegistry(f"mock://{uuid.uuid4()}")
    view = JsonView(registry.client)
    times = {"type": "long", "logicalType": "timestamp-micros"}
    money = {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}
    text = json.dumps(record(("at", times), ("raw", "bytes"), ("price", money), ("far", "double")))
    avro = registry.avro("a-value", text, register=True)
    value = {
        "at": datetime.datetime(2026, 12, 1, tzinfo=UTC),
        "raw": b"\xff",
        "price": Decimal("123456789012345678.25"),
        "far": float("inf"),
    }
    assert view.read(avro.encode(value))[0] == {
        "at": "2026-12-01T00:00:00+00:00",
        "raw": "/w==",
        "price": Decimal("123456789012345678.25"),
        "far": "inf",
    }
    document = registry.json_schema("j-value", '{"type": "object"}', register=True).encode({"x": 1})
    assert view.read(document)[0] == {"x": 1}
    orders = registry.protobuf("p-value", OLD["Order"], register=True)
    found = view.read(orders.encode(order()))[0]
    assert found["lines"] == [{"sku": "a", "count": 2, "cash": "yes"}]
    assert found["extra"]["@type"].endswith("google.protobuf.Timestamp")
    line = registry.protobuf("p-value", OLD["Order.Line"], register=True)
    assert view.read(line.encode(OLD["Order.Line"](sku="x")))[0] == {"sku": "x"}


def test_what_has_no_schema_stays_as_it_is() -> None:
    ours = serde("string")
    given_record = Record(
        ours.encode("k"), b"plain", topic="t", headers=[("h", b"v")], timestamp_ms=5, partition=1, offset=7
    )
    shown = with_schemas(JsonView(ONE.client), given_record)
    assert (shown.key, shown.value, shown.topic, shown.partition, shown.offset) == (b'"k"', b"plain", "t", 1, 7)
    assert with_schemas(None, given_record) is given_record
    with pytest.raises(ValueError, match="no schema with id 999999"):
        JsonView(ONE.client).read(b"\0\x00\x0f\x42\x3f")

"""A column of Avro values has what the serde decodes, and says which values it cannot have."""

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
from hypothesis import HealthCheck, given, settings

from onceflow.errors import EnvironmentUnusableError
from onceflow.schema_registry.avro_columns import AvroColumn

sys.path.insert(0, str(Path(__file__).parent))
try:
    from avro_values import UTC, record, schemas_with_values, serde
finally:
    sys.path.pop(0)


def same(got: Any, schema: Any, value: Any) -> bool:
    """Whether a value of a column is what was written."""
    if value is None:
        return got is None
    if isinstance(schema, list):
        return same(got, next(each for each in schema if each != "null"), value)
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind == "record":
        return all(same(got[field["name"]], field["type"], value[field["name"]]) for field in schema["fields"])
    if kind == "array":
        return len(got) == len(value) and all(
            same(*each) for each in zip(got, [schema["items"]] * len(got), value, strict=True)
        )
    if kind == "map":
        pairs = dict(got)
        return pairs.keys() == value.keys() and all(same(pairs[key], schema["values"], value[key]) for key in value)
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if logical == "uuid":
        return got == str(value)
    if logical == "time-micros":
        return got == ((value.hour * 60 + value.minute) * 60 + value.second) * 10**6 + value.microsecond
    return got == value


@given(schemas_with_values())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_column_has_what_was_written(case: tuple[Any, list[Any]]) -> None:
    schema, values = case
    ours = serde(schema)
    column = AvroColumn(ours)
    if '"fields": []' in json.dumps(schema):
        with pytest.raises(EnvironmentUnusableError, match="which has no fields"):
            _ = column.type
        return
    kind = column.type
    raws = [ours.encode(value) for value in values]
    got, bad = pickle.loads(pickle.dumps(column)).decode(pa.array([*raws, None, b"bad"], pa.binary()))
    assert got.type == kind
    assert [*bad] == [len(values) + 1]
    found = got.to_pylist()
    assert found[len(values) :] == [None, None]
    for got_one, value in zip(found[: len(values)], values, strict=True):
        assert same(got_one, schema, value), (got_one, value)


def test_unions_of_several_types() -> None:
    a, b = record(("x", "int"), name="A"), record(("x", "int"), name="B")
    schema = record(("u", ["null", "int", "long", "string", a, b, {"type": "map", "values": "int"}]))
    ours = serde(schema)
    column = AvroColumn(ours)
    values = [None, 5, 2**40, "t", ("shop.A", {"x": 1}), ("shop.B", {"x": 2}), {"k": 3}]
    got, bad = column.decode(pa.array([ours.encode({"u": value}) for value in values], pa.binary()))
    assert not bad
    found = [{k: v for k, v in (row["u"] or {}).items() if v is not None} for row in got.to_pylist()]
    assert found == [
        {},
        {"long": 5},
        {"long": 2**40},
        {"string": "t"},
        {"A": {"x": 1}},
        {"B": {"x": 2}},
        {"map": [("k", 3)]},
    ]


def test_what_a_column_cannot_have_is_named() -> None:
    kind = {"type": "long", "logicalType": "timestamp-millis"}
    raw = serde("long").encode(2**60)
    ours = serde(kind)
    ours.own()
    good = ours.encode(datetime.datetime(2026, 12, 1, tzinfo=UTC))
    got, bad = AvroColumn(ours).decode(pa.array([good, raw], pa.binary()))
    assert got.to_pylist() == [datetime.datetime(2026, 12, 1, tzinfo=UTC), None]
    assert "a column cannot have it" in bad[1]
    for schema, said in [
        (record(("next", ["null", "shop.Payment"])), "shop.Payment, which refers to itself"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2}, "a decimal with 50 digits"),
    ]:
        with pytest.raises(EnvironmentUnusableError, match=said):
            _ = AvroColumn(serde(schema)).type
    money = {"type": "fixed", "name": "M", "size": 8, "logicalType": "decimal", "precision": 18, "scale": 2}
    ours = serde(["null", money])
    got, _ = AvroColumn(ours).decode(pa.array([ours.encode(Decimal("1.25"))], pa.binary()))
    assert got.to_pylist() == [Decimal("1.25")]
    assert json.dumps(str(got.type)) == '"decimal128(18, 2)"'

"""Generated Avro schemas with their values, and registries in memory."""

from __future__ import annotations

import datetime
import itertools
import json
import uuid
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.registry import SchemaRegistry

UTC = datetime.timezone.utc


def registry() -> SchemaRegistry:
    """A new one, in memory."""
    return SchemaRegistry(f"mock://{uuid.uuid4()}")


ONE = registry()


def serde(schema: Any) -> AvroSerde:
    """Of a subject of its own."""
    return ONE.avro(f"{uuid.uuid4()}-value", json.dumps(schema), register=True)


def record(*fields: tuple[str, Any], name: str = "Payment") -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": "shop", "fields": [{"name": n, "type": t} for n, t in fields]}


# ---- generated schemas with their values -------------------------------------------------------------

LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=20)),
    ("string", st.text(st.characters(codec="utf-8"), max_size=20)),
    ({"type": "string", "logicalType": "uuid"}, st.uuids()),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "timestamp-micros"}, st.datetimes(timezones=st.just(UTC))),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3},
        st.decimals(-(10**8), 10**8, places=3, allow_nan=False, allow_infinity=False),
    ),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 3) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema, and its values."""
    kind = draw(st.sampled_from(["leaf", "array", "map", "record", "optional", "enum", "fixed"] if depth else ["leaf"]))
    name = "?"  # see `_with_names`
    if kind == "enum":
        return {"type": "enum", "name": name, "symbols": ["RED", "GREEN"]}, st.sampled_from(["RED", "GREEN"])
    if kind == "fixed":
        return {"type": "fixed", "name": name, "size": 4}, st.binary(min_size=4, max_size=4)
    if kind == "leaf":
        return draw(st.sampled_from(LEAVES))
    if kind == "record":
        fields = draw(st.lists(typed(depth - 1), max_size=4))
        named = {f"f{at}": field for at, field in enumerate(fields)}
        return (
            record(*((n, f[0]) for n, f in named.items()), name=name),
            st.fixed_dictionaries({n: f[1] for n, f in named.items()}),
        )
    inner, values = draw(typed(depth - 1))
    if kind == "array" and not _needs_no_bytes(inner):
        return {"type": "array", "items": inner}, st.lists(values, max_size=4)
    if kind == "map":
        return {"type": "map", "values": inner}, st.dictionaries(st.text("abc", max_size=3), values, max_size=4)
    if inner == "null" or isinstance(inner, list):
        return inner, values
    return ["null", inner], st.none() | values


def _needs_no_bytes(schema: Any) -> bool:
    """Arrays of such items are refused."""
    if isinstance(schema, dict) and schema["type"] == "record":
        return all(_needs_no_bytes(field["type"]) for field in schema["fields"])
    return bool(schema == "null")


def _with_names(schema: Any, numbers: Iterator[int]) -> Any:
    """The same with a name of its own for each type."""
    if isinstance(schema, list):
        return [_with_names(each, numbers) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_names(value, numbers) for key, value in schema.items()}
    return {**found, "name": f"N{next(numbers)}"} if found.get("name") == "?" else found


@st.composite
def schemas_with_values(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    schema, values = draw(typed())
    return _with_names(schema, itertools.count()), draw(st.lists(values, min_size=1, max_size=4))

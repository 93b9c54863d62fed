"""What the types of a parsed Avro schema are called."""

from __future__ import annotations

from typing import Any

NAMED = ("record", "error", "enum", "fixed")
#: Decimals that fastavro would round to the digits of the schema: see `avro_schema.py`.
EXACT_DECIMAL = "onceflow-decimal"
_LOGICAL = frozenset(
    (
        ("int", "date"), ("int", "time-millis"), ("long", "time-micros"), ("long", "timestamp-millis"),
        ("long", "timestamp-micros"), ("long", "local-timestamp-millis"), ("long", "local-timestamp-micros"),
        ("string", "uuid"),
    )
)  # fmt: skip


def branch_name(branch: Any) -> str:
    """What a type of a union is called: by its own name, or by that of its kind."""
    if isinstance(branch, str):
        return branch
    kind = branch["type"]
    return str(branch["name"]) if kind in NAMED else branch_name(kind)


def logical_of(schema: Any) -> str:
    """The logical type of a type that has one and may have it; otherwise empty, as the specification wants it."""
    if not isinstance(schema, dict):
        return ""
    kind, logical = schema["type"], schema.get("logicalType")
    if logical in ("decimal", EXACT_DECIMAL) and kind in ("bytes", "fixed"):
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        fits = type(precision) is int and type(scale) is int and 0 <= scale <= precision and precision > 0
        return "decimal" if fits else ""
    return logical if isinstance(logical, str) and isinstance(kind, str) and (kind, logical) in _LOGICAL else ""

"""Whether a value surely fits a JSON Schema: most values do, and jsonschema takes long to say so.

It knows the commonest keywords. With any other one in a schema there is no such function, and jsonschema checks all
values; it also says what is wrong with those that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from onceflow.schema_registry.json_rules import same_document

#: Whether a value fits for sure.
Fits = Callable[[Any], bool]

#: What says nothing about values. jsonschema is not asked to check formats.
_NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "format", "readOnly", "writeOnly",
     "deprecated", "definitions", "$defs")
)  # fmt: skip
_TYPES: dict[str, Fits] = {
    "null": lambda value: value is None,
    "boolean": lambda value: value is True or value is False,
    "string": lambda value: type(value) is str,
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float, Decimal),
    "array": lambda value: type(value) is list,
    "object": lambda value: type(value) is dict,
}
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", *_LENGTHS, *_BOUNDS}


def quick_check(schema: Any) -> Fits | None:
    """The function of a schema; None: it has keywords that are not known here."""
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, dict) or not schema.keys() <= _KNOWN | _NOTES:
        return None
    checks = [_type(schema.get("type")), _choices(schema), _numbers(schema), _lengths(schema), *_inside(schema)]
    if None in checks:
        return None
    found = [each for each in checks if each is not _anything]
    if len(found) == 1:
        return found[0]
    return lambda value: all(each(value) for each in found)  # type: ignore[misc]


def _anything(value: Any) -> bool:
    return True


def _type(given: Any) -> Fits | None:
    if given is None:
        return _anything
    if isinstance(given, str):
        return _TYPES.get(given)
    kinds = [_TYPES.get(each) for each in given]
    return None if None in kinds else lambda value: any(kind(value) for kind in kinds)  # type: ignore[misc]


def _choices(schema: dict[str, Any]) -> Fits | None:
    options = [*schema.get("enum", ())]
    if "enum" in schema and "const" in schema:
        return None
    if "const" in schema:
        options = [schema["const"]]
    elif "enum" not in schema:
        return _anything
    return lambda value: any(same_document(each, value) for each in options)


def _numbers(schema: dict[str, Any]) -> Fits | None:
    """Bounds that are integers: a number of any kind is compared with them by its value."""
    bounds = {name: schema[name] for name in _BOUNDS if name in schema}
    if not bounds:
        return _anything
    if not all(type(bound) is int for bound in bounds.values()):
        return None
    low, high = bounds.get("minimum"), bounds.get("maximum")
    above, below = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")

    def numbers(value: Any) -> bool:
        if type(value) not in (int, float, Decimal):
            return type(value) is not bool and not isinstance(value, (int, float, Decimal))
        return (
            (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
            and (below is None or value < below)
        )

    return numbers


def _lengths(schema: dict[str, Any]) -> Fits | None:
    given = {name: schema[name] for name in _LENGTHS if name in schema}
    if not given:
        return _anything
    if not all(type(length) is int for length in given.values()):
        return None
    limits: dict[type, tuple[int, int | None]] = {
        str: (given.get("minLength", 0), given.get("maxLength")),
        list: (given.get("minItems", 0), given.get("maxItems")),
    }

    def lengths(value: Any) -> bool:
        low, high = limits.get(type(value), (0, None))
        return type(value) not in limits or (len(value) >= low and (high is None or len(value) <= high))

    return lengths


def _inside(schema: dict[str, Any]) -> list[Fits | None]:
    """What is within objects and lists."""
    found: list[Fits | None] = []
    if "items" in schema:
        items = quick_check(schema["items"])
        found.append(None if items is None else _each(items))
    named, required = schema.get("properties", {}), schema.get("required", [])
    more = quick_check(schema.get("additionalProperties", True))
    properties = {name: quick_check(each) for name, each in named.items()} if isinstance(named, dict) else {"": None}
    if named or required or "additionalProperties" in schema:
        known = isinstance(required, list) and more is not None and None not in properties.values()
        found.append(_object(properties, required, more) if known and more is not None else None)
    return found


def _each(items: Fits) -> Fits:
    return lambda value: type(value) is not list or all(map(items, value))


def _object(properties: dict[str, Any], required: list[str], more: Fits) -> Fits:
    def fits(value: Any) -> bool:
        if type(value) is not dict:
            return True
        if not all(name in value for name in required):
            return False
        return all(properties.get(name, more)(each) for name, each in value.items())

    return fits

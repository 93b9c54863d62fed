"""A column of JSON with a schema as a column with types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from onceflow.schema_registry.columns import Column, unusable
from onceflow.schema_registry.json_schema import JsonSchemaSerde
from onceflow.state.format import exact_json

_Convert = Callable[[Any], Any]
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
#: With one of these, a value has no one type.
_CHOICES = ("allOf", "if", "not", "$dynamicRef", "$recursiveRef")


class JsonSchemaColumn(Column):
    """Makes columns of JSON with a schema.

    An object with properties is a struct, one with ``additionalProperties`` alone is a map, ``integer`` is a bigint and
    ``number`` is a double. A type or null is that type. What has no one type is a text with its JSON.
    """

    serde: JsonSchemaSerde

    def _made(self) -> tuple[Any, Callable[[bytes], Any]]:
        self.serde.prepare()
        kind, convert = _Types(self.serde.resolver()).of(self.serde.document())
        decode = self.serde.decode
        return kind, decode if convert is None else lambda raw: convert(decode(raw))


class _Types:
    """Makes the types of schemas, and what makes their values.

    Args:
        resolver: of ``referencing``, at the root of the schema.
    """

    def __init__(self, resolver: Any) -> None:
        self._resolver = resolver
        self._open: list[int] = []

    def of(self, schema: Any) -> tuple[Any, _Convert | None]:
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            return self._referenced(schema["$ref"])
        if not isinstance(schema, Mapping) or any(name in schema for name in _CHOICES):
            return pa.string(), _text
        for name in ("anyOf", "oneOf"):
            if name in schema:
                branches = [each for each in schema[name] if each not in ({"type": "null"}, {"const": None})]
                is_one = len(branches) == 1 and "properties" not in schema
                return self._optional(*self.of(branches[0])) if is_one else (pa.string(), _text)
        kinds = _kinds(schema)
        if len(kinds) == 1:
            return self._optional(*self._single(kinds[0], schema))
        return (pa.float64(), _optional(_double)) if {*kinds} == {"integer", "number"} else (pa.string(), _text)

    def _referenced(self, name: str) -> tuple[Any, _Convert | None]:
        found = self._resolver.lookup(name)
        if id(found.contents) in self._open:
            raise unusable(f"{name}, which refers to itself")
        self._open.append(id(found.contents))
        outer, self._resolver = self._resolver, found.resolver
        try:
            return self.of(found.contents)
        finally:
            self._resolver = outer
            self._open.pop()

    def _single(self, kind: str, schema: Mapping[str, Any]) -> tuple[Any, _Convert | None]:
        if kind == "array":
            inner, convert = self.of(True if "prefixItems" in schema else schema.get("items", True))
            return pa.list_(inner), None if convert is None else _each(convert)
        if kind == "object":
            return self._object(schema)
        if kind == "integer":
            return pa.int64(), _whole
        if kind == "number":
            return pa.float64(), _double
        return (pa.bool_() if kind == "boolean" else pa.string()), None

    def _object(self, schema: Mapping[str, Any]) -> tuple[Any, _Convert | None]:
        properties = schema.get("properties")
        if properties:
            made = {name: self.of(each) for name, each in properties.items()}
            return pa.struct([pa.field(name, kind) for name, (kind, _) in made.items()]), _fields(made)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping) and "patternProperties" not in schema:
            inner, convert = self.of(more)
            return pa.map_(pa.string(), inner), _pairs(convert)
        return pa.string(), _text

    @staticmethod
    def _optional(kind: Any, convert: _Convert | None) -> tuple[Any, _Convert | None]:
        return kind, None if convert is None else _optional(convert)


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that values may have, without null."""
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else [*given] if isinstance(given, list) else []
    if not kinds and isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        kinds = ["string"] if values and all(each is None or isinstance(each, str) for each in values) else []
    found = [each for each in kinds if each != "null" and each in _TYPES]
    return found or (["null"] if kinds else [*_TYPES])


def _optional(convert: _Convert) -> _Convert:
    return convert if convert is _text else lambda found: None if found is None else convert(found)


def _text(found: Any) -> str:
    return exact_json.dumps(found).decode()


def _whole(found: Any) -> Any:
    return int(found) if not isinstance(found, int) else found


def _double(found: Any) -> float:
    try:
        return float(found)
    except OverflowError:
        raise ValueError(f"a column cannot have it: {str(found)[:40]}... is too large for a double") from None


def _each(convert: _Convert) -> _Convert:
    return lambda found: [convert(each) for each in found]


def _pairs(convert: _Convert | None) -> _Convert:
    def pairs(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [*found.items()] if convert is None else [(key, convert(value)) for key, value in found.items()]

    return pairs


def _fields(made: Mapping[str, tuple[Any, _Convert | None]]) -> _Convert:
    converts = [(name, convert) for name, (_, convert) in made.items()]

    def record(found: Mapping[str, Any]) -> dict[str, Any]:
        there = ((name, found[name], convert) for name, convert in converts if name in found)
        return {name: value if convert is None else convert(value) for name, value, convert in there}

    return record

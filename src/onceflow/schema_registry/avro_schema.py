"""``AvroSchema``: a schema with all that it refers to, as it is read and written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from onceflow.schema_registry.avro_check import check_of
from onceflow.schema_registry.avro_defaults import Default
from onceflow.schema_registry.avro_fit import fit_of
from onceflow.schema_registry.avro_names import EXACT_DECIMAL, NAMED, logical_of
from onceflow.schema_registry.avro_plain import plain_reader, resolved_reader
from onceflow.schema_registry.client import RegisteredSchema

_MOST_SHOWN = 300
#: Around the schema, because fastavro keeps what it has parsed only of a record. The bytes of a record are those of its
#: fields, so nothing changes.
_ROOT, _VALUE = "OnceflowRoot", "value"


class AvroSchema:
    """A schema as it is read and written.

    Args:
        schema: of the registry.

    Attributes:
        root: the type, with full names, each type with a name at its first use.
        named: the types with a name.
        is_recursive: whether a type refers to itself.
        fit: see `fit_of`. check: see `check_of`.
        read_plain: see `plain_reader`; None: a type refers to itself.

    Raises:
        ValueError: it is no Avro schema, or its values need no bytes and so may be without end.
    """

    def __init__(self, schema: RegisteredSchema) -> None:
        from fastavro import parse_schema

        self.named: dict[str, Any] = {}
        try:
            known = _parsed(schema)
            self.is_recursive = False
            self.root = self._expanded(known.pop(""), known, ())
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no Avro schema: {error}"[:_MOST_SHOWN]) from None
        _check_sizes(self.root, self.named)
        _exact_decimals()
        self.fit = fit_of(self.root, self.named)
        self.check = check_of(self.root, self.named)
        self._plain_of: dict[int, tuple[AvroSchema, Callable[[bytes, int], Any] | None]] = {}
        self.read_plain = None if self.is_recursive else plain_reader(self.root, self.named)
        self._written = parse_schema(_around(_without_logical(self.root)))
        self.reading = self._reading(plain=False)
        self.reading_plain = self._reading(plain=True)

    def plain_of(self, writer: AvroSchema) -> Callable[[bytes, int], Any] | None:
        """What reads values of another schema with the fields of this one; None: fastavro has to."""
        if writer is self:
            return self.read_plain
        if id(writer) not in self._plain_of:
            self._plain_of[id(writer)] = writer, resolved_reader(writer, self)
        return self._plain_of[id(writer)][1]

    def write(self, buffer: io.BytesIO, value: Any) -> None:
        """Write a value. Raises: ValueError: it does not fit."""
        from fastavro import schemaless_writer

        try:
            schemaless_writer(buffer, self._written, {_VALUE: self.fit(value)})
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def _reading(self, *, plain: bool) -> Any:
        from fastavro import parse_schema

        parsed = parse_schema(_around(_for_reading(self.root, plain=plain)))
        for record in _records(parsed):
            for field in record["fields"]:
                if "default" in field:
                    field["default"] = Default(field["type"], field["default"], self.named, plain=plain)
        return parsed

    def _expanded(self, schema: Any, known: dict[str, Any], above: tuple[str, ...]) -> Any:
        """The schema with each type of other schemas in the place of its first name."""
        if isinstance(schema, list):
            if any(isinstance(each, list) for each in schema):
                raise ValueError("a union is directly in another one")
            return [self._expanded(each, known, above) for each in schema]
        if isinstance(schema, str):
            self.is_recursive = self.is_recursive or schema in above
            return (
                self._expanded(known[schema], known, above) if schema in known and schema not in self.named else schema
            )
        made = {key: value for key, value in schema.items() if not key.startswith("__")}
        kind = made["type"]
        if kind in NAMED:
            if made["name"] in self.named:
                raise ValueError(f"{made['name']} has two definitions")
            self.named[made["name"]] = made
            above = (*above, made["name"])
        for key in ("items", "values"):
            if key in made:
                made[key] = self._expanded(made[key], known, above)
        if "fields" in made:
            made["fields"] = [
                {**field, "type": self._expanded(field["type"], known, above)} for field in made["fields"]
            ]
        elif not isinstance(kind, str):
            made["type"] = self._expanded(kind, known, above)
        return made


def value_of(found: Any) -> Any:
    """The value in what fastavro has read."""
    return found[_VALUE]


def _exact_decimals() -> None:
    """Have fastavro read the decimals of `AvroSchema.reading` as they are: it would round them."""
    from fastavro import read

    for kind in ("bytes", "fixed"):
        read.LOGICAL_READERS[f"{kind}-{EXACT_DECIMAL}"] = _read_decimal


def _read_decimal(raw: bytes, writer: Any = None, _: Any = None) -> Decimal:
    digits = tuple(map(int, str(abs(number := int.from_bytes(raw, "big", signed=True)))))
    return Decimal((number < 0, digits, -writer.get("scale", 0)))


def _parsed(schema: RegisteredSchema) -> dict[str, Any]:
    """The parsed root (under an empty name), and the types of all schemas that it refers to, with full names."""
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException

    named: dict[str, Any] = {}
    seen: dict[str, str] = {}

    def read(each: RegisteredSchema) -> Any:
        for name, referenced in each.references:
            if name not in seen:
                seen[name] = referenced.text
                read(referenced)
            elif seen[name] != referenced.text:
                raise ValueError(f"it refers to two versions of {name}")
        return parse_schema(_changed(json.loads(each.text), _leave_out), named_schemas=named)

    try:
        root = read(schema)
    except SchemaParseException as error:
        raise ValueError(str(error)) from None
    return {**named, "": root}


def _around(schema: Any) -> Any:
    return {"type": "record", "name": _ROOT, "fields": [{"name": _VALUE, "type": schema}]}


def _records(schema: Any) -> Iterator[Any]:
    if isinstance(schema, list):
        for each in schema:
            yield from _records(each)
    elif isinstance(schema, dict):
        if "fields" in schema:
            yield schema
            for field in schema["fields"]:
                yield from _records(field["type"])
        for key in ("items", "values", "type"):
            yield from _records(schema.get(key))


def _changed(schema: Any, change: Any) -> Any:
    """A copy of a schema, with each type changed."""
    if isinstance(schema, list):
        return [_changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in ("items", "values", "type"):
        if key in made:
            made[key] = _changed(made[key], change)
    if "fields" in made:
        made["fields"] = [{**field, "type": _changed(field["type"], change)} for field in made["fields"]]
    change(made)
    return made


def _without_logical(schema: Any) -> Any:
    """For writing: `fit_of` has made plain values. No field is missing, so defaults have no use."""

    def change(made: dict[str, Any]) -> None:
        made.pop("logicalType", None)
        for field in made.get("fields", ()):
            field.pop("default", None)

    return _changed(schema, change)


def _leave_out(made: dict[str, Any]) -> None:
    """A decimal that is none is bytes, by the specification; fastavro refuses the schema."""
    if made.get("logicalType") == "decimal" and not logical_of(made):
        del made["logicalType"]


def _for_reading(schema: Any, *, plain: bool) -> Any:
    def change(made: dict[str, Any]) -> None:
        logical = logical_of(made)
        made.pop("logicalType", None)
        if logical == "decimal":
            made["logicalType"] = EXACT_DECIMAL
        elif logical and not plain:
            made["logicalType"] = logical

    return _changed(schema, change)


def _check_sizes(schema: Any, named: dict[str, Any]) -> None:
    """Refuse arrays of what needs no bytes: a few bytes would have items without end."""

    def is_empty(each: Any, above: tuple[str, ...]) -> bool:
        if isinstance(each, list):
            return False
        kind = each if isinstance(each, str) else each["type"]
        if not isinstance(kind, str):
            return is_empty(kind, above)
        found = named.get(kind, each)
        name = found.get("name", "") if isinstance(found, dict) else ""
        if kind == "null" or (isinstance(found, dict) and found.get("size") == 0):
            return True
        fields = found.get("fields") if isinstance(found, dict) else None
        if fields is None or name in above:
            return False
        return all(is_empty(field["type"], (*above, name)) for field in fields)

    def look(each: Any) -> None:
        if isinstance(each, list):
            for branch in each:
                look(branch)
        elif isinstance(each, dict):
            if each.get("type") == "array" and is_empty(each["items"], ()):
                raise ValueError("it has an array whose items need no bytes")
            for key in ("items", "values", "type"):
                look(each.get(key))
            for field in each.get("fields", ()):
                look(field["type"])

    look(schema)

"""Defaults of fields as values: a schema has them as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

from onceflow.schema_registry.avro_names import branch_name, logical_of

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
DAY_0 = date(1970, 1, 1).toordinal()
_UNITS = {"millis": 1000, "micros": 1}


class Default:
    """Stands for the default of a field in the schema that fastavro reads with.

    fastavro puts this object into each record that lacks the field. `filled` puts a value there, each time a new one.

    Args:
        plain: as `default_of`.
    """

    def __init__(self, schema: Any, given: Any, named: Mapping[str, Any], *, plain: bool) -> None:
        self._schema, self._given, self._named, self._plain = schema, given, named, plain

    def value(self) -> Any:
        """The value."""
        return default_of(self._schema, self._given, self._named, plain=self._plain)


def filled(found: Any) -> Any:
    """What fastavro has read, with values in the place of defaults."""
    if type(found) is dict:
        for name, each in found.items():
            found[name] = filled(each)
        return found
    if type(found) is list:
        return [filled(each) for each in found]
    if type(found) is tuple:
        return tuple(filled(each) for each in found)
    return found.value() if type(found) is Default else found


def default_of(schema: Any, given: Any, named: Mapping[str, Any], *, plain: bool = False) -> Any:
    """The value of a default, as a reader returns it.

    Args:
        given: the default in the schema. named: the types of the schema by their full names.
        plain: numbers in place of times, and the name of its type with each value of a union that has one.

    Raises:
        ValueError: it is no value of its type.
    """
    if type(given) is Default:  # of a field inside, in a schema that is read with
        return given.value()
    if isinstance(schema, list):
        value = default_of(schema[0], given, named, plain=plain)
        name = branch_name(schema[0])
        several = sum(branch_name(each) in named for each in schema) > 1
        return (name, value) if name in named and (several or plain) else value
    kind = schema if isinstance(schema, str) else schema["type"]
    if not isinstance(kind, str):
        return default_of(kind, given, named, plain=plain)
    if kind in named:
        return default_of(named[kind], given, named, plain=plain)
    try:
        return _value(schema, kind, given, named, plain)
    except (TypeError, AttributeError, LookupError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"the default {given!r:.80} is no {kind}: {error}") from None


def _value(schema: Any, kind: str, given: Any, named: Mapping[str, Any], plain: bool) -> Any:
    if kind in ("record", "error"):
        fields = ((field, given.get(field["name"], field.get("default"))) for field in schema["fields"])
        return {field["name"]: default_of(field["type"], each, named, plain=plain) for field, each in fields}
    if kind == "array":
        return [default_of(schema["items"], each, named, plain=plain) for each in given]
    if kind == "map":
        return {key: default_of(schema["values"], each, named, plain=plain) for key, each in given.items()}
    logical = logical_of(schema)
    if kind in ("bytes", "fixed"):
        raw = given.encode("latin-1")
        return Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-schema.get("scale", 0)) if logical else raw
    if kind in ("float", "double"):
        return float(given)
    if plain or not logical:
        return given
    if logical == "date":
        return date.fromordinal(given + DAY_0)
    if logical == "uuid":
        return UUID(given)
    moment = EPOCH + timedelta(microseconds=given * _UNITS[logical.rpartition("-")[2]])
    if logical.startswith("time-"):
        return time(moment.hour, moment.minute, moment.second, moment.microsecond)
    return moment.replace(tzinfo=None) if logical.startswith("local") else moment

"""A column of Avro values as a column with types: for queries, which have no serdes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.avro_names import branch_name, logical_of
from onceflow.schema_registry.avro_schema import AvroSchema
from onceflow.schema_registry.columns import Column, unusable

_Convert = Callable[[Any], Any]

_PRIMITIVES = {
    "null": pa.string(),  # Spark has no column without a type in every place
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
#: Those that Arrow makes of the number itself. Others stay numbers and texts: ``uuid``, ``time-millis``, durations.
_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", tz="UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
_WIDER = {"int": "long", "float": "double"}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}
_MOST_DIGITS = 38
#: Which type of a union a value of Python has, for types without a name.
_OF_PYTHON = {
    bool: "boolean", int: "long", float: "double", bytes: "bytes", Decimal: "bytes", str: "string", list: "array",
    dict: "map",
}  # fmt: skip


class ColumnSchema:
    """What Arrow makes of an Avro schema.

    - A record is a struct, an enum is a text, a fixed value is binary. A union of null and another type is that type.
    - A union of several types is a struct with a field for each: only that of the value is not null. ``int`` and
      ``long`` are one, and so are ``float`` and ``double``.

    Args:
        schema: its values are read in their plain form.

    Attributes:
        type: of the column while it is made. convert: what makes its values; None: nothing has to be done.

    Raises:
        EnvironmentUnusableError: a type refers to itself, or a decimal has more digits than Spark has.
    """

    def __init__(self, schema: AvroSchema) -> None:
        self._named = schema.named
        self._open: list[str] = []
        self.type, self.convert = self._made(schema.root)

    def _made(self, schema: Any) -> tuple[Any, _Convert | None]:
        if isinstance(schema, list):
            return self._union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self._made(kind)
        if kind in self._named:
            return self._made(self._named[kind])
        if kind in ("record", "error"):
            return self._record(schema)
        if kind == "array":
            inner, convert = self._made(schema["items"])
            return pa.list_(inner), None if convert is None else _each(convert)
        if kind == "map":
            inner, convert = self._made(schema["values"])
            return pa.map_(pa.string(), inner), _pairs(convert)
        logical = logical_of(schema)
        if logical == "decimal":
            if schema["precision"] > _MOST_DIGITS:
                raise unusable(f"a decimal with {schema['precision']} digits; Spark has {_MOST_DIGITS}")
            return pa.decimal128(schema["precision"], schema.get("scale", 0)), None
        if kind == "enum":
            return pa.string(), None
        if kind == "fixed":
            return pa.binary(), None
        return _LOGICAL.get((kind, logical), _PRIMITIVES[kind]), None

    def _record(self, schema: Any) -> tuple[Any, _Convert | None]:
        name = schema["name"]
        if name in self._open:
            raise unusable(f"{name}, which refers to itself")
        self._open.append(name)
        fields, converts = [], dict[str, _Convert]()
        for field in schema["fields"]:
            kind, convert = self._made(field["type"])
            fields.append(pa.field(field["name"], kind))
            if convert is not None:
                converts[field["name"]] = convert
        self._open.pop()
        if not fields:
            raise unusable(f"the record {name}, which has no fields")
        return pa.struct(fields), _fields(converts) if converts else None

    def _union(self, branches: list[Any]) -> tuple[Any, _Convert | None]:
        kinds = {branch_name(branch): branch for branch in branches}
        kinds.pop("null", None)
        for narrow, wide in _WIDER.items():
            if narrow in branches and wide in branches:  # a logical type would make another value of it
                kinds.pop(narrow)
        if not kinds:
            return _PRIMITIVES["null"], None
        made = {name: self._made(branch) for name, branch in kinds.items()}
        if len(made) == 1:
            ((name, (kind, convert)),) = made.items()
            return kind, None if convert is None and name not in self._named else _optional(convert)
        if "int" in made and "long" in made:
            raise unusable("a union of an int and a long of which one is a time or a date")
        short = {name: name.rpartition(".")[2] for name in made}
        if len({each.lower() for each in short.values()}) < len(short):
            short = {name: f"{name.replace('.', '_')}_{at}" for at, name in enumerate(made)}
        return pa.struct([pa.field(short[name], kind) for name, (kind, _) in made.items()]), _member(made, short)


def _each(convert: _Convert) -> _Convert:
    return lambda found: [convert(each) for each in found]


def _pairs(convert: _Convert | None) -> _Convert:
    def pairs(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [*found.items()] if convert is None else [(key, convert(value)) for key, value in found.items()]

    return pairs


def _fields(converts: Mapping[str, _Convert]) -> _Convert:
    def record(found: dict[str, Any]) -> dict[str, Any]:
        for name, convert in converts.items():
            found[name] = convert(found[name])
        return found

    return record


def _optional(convert: _Convert | None) -> _Convert:
    """Of null and one other type: a value of a type with a name comes with it."""

    def optional(value: Any) -> Any:
        found = value[1] if type(value) is tuple else value
        return found if convert is None or found is None else convert(found)

    return optional


def _member(made: Mapping[str, tuple[Any, _Convert | None]], short: Mapping[str, str]) -> _Convert:
    """The field of a union that a value has: one with its name, or one of its type in Python."""

    def member(value: Any) -> Any:
        if value is None:
            return None
        name, found = value if type(value) is tuple else (_OF_PYTHON[type(value)], value)
        name = name if name in made else _NARROWER[name]
        convert = made[name][1]
        return {short[name]: found if convert is None else convert(found)}

    return member


class AvroColumn(Column):
    """Makes columns of Avro values; see `ColumnSchema`."""

    serde: AvroSerde

    def _made(self) -> tuple[Any, Callable[[bytes], Any]]:
        own = self.serde.own_schema()
        schema = ColumnSchema(own)
        read, convert = self.serde.read, schema.convert
        if convert is None:
            return schema.type, lambda raw: read(raw, own, plain=True)
        return schema.type, lambda raw: convert(read(raw, own, plain=True))

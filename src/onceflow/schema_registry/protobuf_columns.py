"""A column of Protobuf messages as a column with types."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from onceflow.schema_registry.columns import Column, unusable
from onceflow.schema_registry.protobuf import ProtobufSerde

_Convert = Callable[[Any], Any]

_SCALARS = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "sint32": pa.int32(),
    "sfixed32": pa.int32(),
    "uint32": pa.int64(),
    "fixed32": pa.int64(),
    "int64": pa.int64(),
    "sint64": pa.int64(),
    "sfixed64": pa.int64(),
    "uint64": pa.decimal128(20, 0),
    "fixed64": pa.decimal128(20, 0),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "enum": pa.string(),
}
_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Int32", "UInt32", "Int64", "UInt64", "Float", "Double", "String", "Bytes")
)
#: They refer to themselves, and are JSON.
_DOCUMENTS = frozenset(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue"))
_US = 1_000_000


class ProtobufColumn(Column):
    """Makes columns of Protobuf messages.

    A message is a struct, null if it is not set. A field that may be unset, as those of a ``oneof``, is null then;
    other fields have the default of their type. Enums are texts, ``Timestamp`` is a timestamp, wrappers are the values
    in them, ``Struct`` and ``Value`` are texts with JSON. A message without fields is a boolean: whether it is set.
    """

    serde: ProtobufSerde

    def _made(self) -> tuple[Any, Callable[[bytes], Any]]:
        self.serde.prepare()
        kind, convert = _Types().message(self.serde.descriptor)
        decode = self.serde.decode
        return kind, lambda raw: convert(decode(raw))


class _Types:
    """Makes the types of messages, and what makes their values."""

    def __init__(self) -> None:
        self._open: list[str] = []

    def message(self, descriptor: Any) -> tuple[Any, _Convert]:
        name = descriptor.full_name
        if name == "google.protobuf.Timestamp":
            return pa.timestamp("us", tz="UTC"), lambda found: found.seconds * _US + found.nanos // 1000
        if name in _DOCUMENTS:
            return pa.string(), _json
        if name in _WRAPPERS:
            kind, convert = self._single(descriptor.fields_by_name["value"])
            return kind, _value if convert is None else lambda found: convert(found.value)
        if name in self._open:
            raise unusable(f"{name}, which refers to itself")
        self._open.append(name)
        fields = [self._field(field) for field in descriptor.fields]
        self._open.pop()
        if not fields:
            return pa.bool_(), lambda found: True
        readers = [(field, read) for field, _, read in fields]
        return pa.struct([pa.field(field, kind) for field, kind, _ in fields]), _struct(readers)

    def _field(self, field: Any) -> tuple[str, Any, _Convert]:
        """Its name, its type, and what reads it of a message."""
        from onceflow.schema_registry.protobuf_changes import is_map, is_repeated

        name = field.name
        if is_map(field):
            key, _ = self._single(field.message_type.fields_by_name["key"])
            value, convert = self._single(field.message_type.fields_by_name["value"])
            return name, pa.map_(key, value), _map_reader(name, convert, _numbers_of(key))
        kind, convert = self._single(field)
        if is_repeated(field):
            return name, pa.list_(kind), _list_reader(name, convert)
        return name, kind, _reader(name, convert, may_lack=field.has_presence)

    def _single(self, field: Any) -> tuple[Any, _Convert | None]:
        """The type of one value of a field; what converts it, None: nothing has to be done."""
        from onceflow.schema_registry.protobuf_changes import kind_name

        if field.message_type is not None:
            return self.message(field.message_type)
        kind = _SCALARS[kind_name(field)]
        if field.enum_type is not None:
            names = {value.number: value.name for value in reversed(field.enum_type.values)}  # the first of its aliases
            return kind, lambda number: names.get(number) or str(number)
        return kind, _numbers_of(kind)


def _numbers_of(kind: Any) -> _Convert | None:
    return Decimal if pa.types.is_decimal(kind) else None


def _value(found: Any) -> Any:
    return found.value


def _json(found: Any) -> str:
    from google.protobuf import json_format

    try:
        return str(json_format.MessageToJson(found, indent=None))
    except (json_format.Error, ValueError) as error:
        raise ValueError(f"it has a value that JSON lacks: {error}") from None


def _struct(readers: list[tuple[str, _Convert]]) -> _Convert:
    return lambda found: {name: read(found) for name, read in readers}


def _reader(name: str, convert: _Convert | None, *, may_lack: bool) -> _Convert:
    if may_lack and convert is None:
        return lambda found: getattr(found, name) if found.HasField(name) else None
    if may_lack:
        assert convert is not None
        return lambda found: convert(getattr(found, name)) if found.HasField(name) else None
    return (lambda found: getattr(found, name)) if convert is None else lambda found: convert(getattr(found, name))


def _list_reader(name: str, convert: _Convert | None) -> _Convert:
    if convert is None:
        return lambda found: [*getattr(found, name)]
    return lambda found: [convert(each) for each in getattr(found, name)]


def _map_reader(name: str, convert: _Convert | None, key: _Convert | None) -> _Convert:
    def read(found: Any) -> list[tuple[Any, Any]]:
        entries = getattr(found, name)
        return [
            (each if key is None else key(each), entries[each] if convert is None else convert(entries[each]))
            for each in entries
        ]

    return read

"""JSON documents as values with a schema: for commands that write. It is the way back of `JsonView`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from onceflow.errors import OptionError
from onceflow.schema_registry.avro import AvroSerde
from onceflow.schema_registry.avro_fit import fit_of
from onceflow.schema_registry.avro_names import branch_name, logical_of
from onceflow.schema_registry.client import RegistryClient
from onceflow.schema_registry.json_schema import JsonSchemaSerde
from onceflow.schema_registry.protobuf import ProtobufFile, ProtobufSerde

_Convert = Callable[[Any], Any]
_MOST_SHOWN = 300


def json_encoder(client: RegistryClient, subject: str, message: str = "") -> Callable[[Any], bytes]:
    """A function that makes the bytes of a value from a JSON document. It raises ValueError.

    Args:
        subject: its newest schema is used. message: the full name of a Protobuf message; empty: the first one.

    Raises:
        EnvironmentUnusableError: there is no such subject, or its schema cannot be used.
        RegistryUnavailableError: the registry does not answer.
        OptionError: there is no such message, or the schema has none.
    """
    found = client.newest(subject, ProtobufSerde.form)
    if found.kind == "PROTOBUF":
        return _protobuf(client, subject, message)
    if message:
        raise OptionError(f"The schema of {subject!r} is {found.kind}, which has no messages", next_step="name none")
    if found.kind == "JSON":
        documents = JsonSchemaSerde(client, subject, None, register=False)
        documents.prepare()
        return documents.encode
    serde = AvroSerde(client, subject, None, register=False)
    schema = serde.own_schema()
    convert = _Converts(schema.named).of(schema.root)
    return lambda document: serde.encode(convert(document))


def _protobuf(client: RegistryClient, subject: str, message: str) -> Callable[[Any], bytes]:
    from google.protobuf import json_format

    schema = client.newest(subject, ProtobufSerde.form)
    try:
        file = ProtobufFile.of(schema)
    except ValueError as error:
        raise OptionError(f"The schema of {subject!r} cannot be used: {error}", next_step="correct it") from None
    name = message or next(iter(file.messages.values()), "")
    made = file.message(name)
    if made is None:
        known = ", ".join(file.messages.values()) or "none"
        what = "which the registry gives only as a text" if name in file.messages.values() else f"but {known}"
        raise OptionError(
            f"The schema of {subject!r} has no message {name!r} that can be made, {what}"[:_MOST_SHOWN],
            next_step="give the full name of a message; a registry has to know the form 'serialized' of files",
        )
    serde = ProtobufSerde(client, subject, made, register=False)
    serde.prepare()

    def encode(document: Any) -> bytes:
        try:
            return serde.encode(json_format.ParseDict(_floats(document), made()))
        except (json_format.ParseError, TypeError, AttributeError) as error:  # those of what is no object
            raise ValueError(f"it does not fit {name}: {error}"[:_MOST_SHOWN]) from None

    return encode


def _floats(document: Any) -> Any:
    """A document as Protobuf takes it: it has no decimals."""
    if isinstance(document, Mapping):
        return {key: _floats(each) for key, each in document.items()}
    if isinstance(document, list):
        return [_floats(each) for each in document]
    return float(document) if isinstance(document, Decimal) else document


# ---- Avro --------------------------------------------------------------------------------------------


class _Converts:
    """Makes functions that turn documents into values of a schema. What is wrong with a value, the serde says."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._made: dict[str, list[_Convert]] = {}

    def of(self, schema: Any) -> _Convert:
        if isinstance(schema, list):
            return self._union(schema)
        kind = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind in self._named and schema is not self._named[kind]:
            return self.of(self._named[kind])
        if kind in ("record", "error"):
            return self._record(schema)
        if kind == "array":
            items = self.of(schema["items"])
            return lambda found: [items(each) for each in found] if isinstance(found, list) else found
        if kind == "map":
            values = self.of(schema["values"])
            return lambda found: {k: values(v) for k, v in found.items()} if isinstance(found, Mapping) else found
        logical = logical_of(schema)
        if logical == "decimal":
            return _decimal
        return _TIMES.get(logical.removeprefix("local-").partition("-")[0]) or _LEAVES.get(kind, _same)

    def _record(self, schema: Any) -> _Convert:
        name = schema["name"]
        if name in self._made:  # it refers to itself
            holder = self._made[name]
            return lambda found: holder[0](found)
        holder = self._made[name] = []
        fields = {field["name"]: self.of(field["type"]) for field in schema["fields"]}

        def record(found: Any) -> Any:
            if not isinstance(found, Mapping):
                return found
            made = {}
            for key, each in found.items():
                try:
                    made[key] = fields.get(key, _same)(each)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
            return made

        holder.append(record)
        return record

    def _union(self, branches: list[Any]) -> _Convert:
        made = [(branch_name(each), self.of(each), fit_of(each, self._named)) for each in branches]
        names = {name for name, _, _ in made if name in self._named}

        def union(found: Any) -> Any:
            """The first type that fits. `JsonView` shows the name of a type with a value if there are several."""
            named = found[0] if isinstance(found, list) and len(found) == 2 and found[0] in names else None
            problems = []
            for name, convert, fit in made:
                if named is not None and name != named:
                    continue
                try:
                    value = convert(found if named is None else found[1])
                    fit(value)
                    return name, value
                except ValueError as error:
                    problems.append(f"{name}: {error}")
            raise ValueError("; ".join(problems)[:_MOST_SHOWN])

        return union


def _same(found: Any) -> Any:
    return found


def _decimal(found: Any) -> Any:
    return Decimal(str(found)) if isinstance(found, (int, float)) and not isinstance(found, bool) else found


def _bytes(found: Any) -> Any:
    try:
        return base64.b64decode(found, validate=True) if isinstance(found, str) else found
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{found!r:.80} is no Base64: {error}") from None


def _real(found: Any) -> Any:
    """Numbers that JSON lacks are texts. A decimal with more digits than a double has is the nearest double."""
    if isinstance(found, str) and found in ("inf", "-inf", "nan"):
        return float(found)
    return float(found) if isinstance(found, Decimal) else found


def _of_iso(kind: Any) -> _Convert:
    def of_iso(found: Any) -> Any:
        if not isinstance(found, str):
            return found
        try:
            return kind.fromisoformat(f"{found[:-1]}+00:00" if found.endswith("Z") else found)
        except ValueError as error:
            raise ValueError(f"{found!r:.80} is no {kind.__name__}: {error}") from None

    return of_iso


_TIMES: dict[str, _Convert] = {"timestamp": _of_iso(datetime), "date": _of_iso(date), "time": _of_iso(time)}
_LEAVES: dict[str, _Convert] = {"bytes": _bytes, "fixed": _bytes, "float": _real, "double": _real}

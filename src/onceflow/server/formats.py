"""Keys and values of a table as clients write and read them: text, JSON, base64, numbers."""

from __future__ import annotations

import base64
import binascii
import re
import reprlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson

from onceflow.errors import OptionError
from onceflow.server.problems import Problem
from onceflow.server.schema_values import SchemaValues
from onceflow.state.format import exact_json

_LONG = struct.Struct(">q")
_DIGITS = re.compile(r"-?[0-9]+")
_DIGITS_MAX = 20  # with the sign
_KINDS = {
    int: "a number",
    float: "a number",
    Decimal: "a number",
    bool: "a boolean",
    type(None): "null",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class KeyFormat:
    """How keys are written.

    Args:
        parse: bytes of a key from its text. Raises ValueError.
        show: a JSON value from the bytes. Raises ValueError.
        written: how clients write such keys, for errors.
    """

    name: str
    parse: Callable[[str], bytes]
    show: Callable[[bytes], Any]
    written: str

    def key(self, text: Any, what: str = "key") -> bytes:
        """The bytes of a key in a request.

        Raises:
            Problem: 400, it is no such key.
        """
        try:
            if not isinstance(text, str) and not (self.numbers and type(text) is int):
                raise ValueError("it is no 64-bit integer" if self.numbers else f"it is {_KINDS[type(text)]}")
            key = self.parse(str(text))
        except ValueError as wrong:
            detail = f"The {what} {_in_json(text)} is not {self.name}: {wrong}"
            raise Problem(400, detail, next_step=self.written) from wrong
        return key

    def prefix(self, text: str) -> bytes:
        """The bytes with which keys begin.

        Raises:
            Problem: 400, as `key`, or these keys are numbers.
        """
        if self.numbers:
            raise Problem(
                400,
                f"Keys that are {self.name} have no prefixes: they are numbers",
                next_step="give start and end; or the first bytes as base64url, with key_encoding=base64url",
            )
        return self.key(text, "prefix")

    @property
    def numbers(self) -> bool:
        """Whether keys are numbers. The order of their bytes is another one than that of the numbers."""
        return self.name == "long"


@dataclass(frozen=True)
class ValueFormat:
    """How values are written.

    Args:
        show: a JSON value from the bytes, ready for orjson. Raises ValueError.
        schemas: what has to be asked before values are shown; None: nothing.
    """

    name: str
    show: Callable[[bytes], Any]
    schemas: SchemaValues | None = None


def from_base64(text: str) -> bytes:
    """Bytes of base64 or base64url, with or without padding. Raises ValueError."""
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error as wrong:
        raise ValueError(str(wrong)) from wrong


def to_base64url(raw: bytes) -> str:
    """base64url without padding: legal in paths."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _to_base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _in_json(value: Any) -> str:
    """As it stands in a JSON document, at most the beginning."""
    try:
        return exact_json.dumps(value).decode()[:100]
    except (TypeError, ValueError):  # what can be read, but not written: it is nested deeply, or has a huge integer
        return reprlib.repr(value)


def _parse_long(text: str) -> bytes:
    if not _DIGITS.fullmatch(text):
        raise ValueError("it is no integer in decimal digits")
    if len(text) > _DIGITS_MAX or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError("it is beyond the 64-bit integers")
    return _LONG.pack(int(text))


def _show_long(raw: bytes) -> int:
    if len(raw) != _LONG.size:
        raise ValueError(f"a 64-bit integer has 8 bytes, this one has {len(raw)}")
    return int(_LONG.unpack(raw)[0])


def _show_json(raw: bytes) -> orjson.Fragment:
    orjson.loads(raw)
    # Unchanged, so that numbers keep their digits. Line breaks can only be between its parts.
    if b"\n" in raw or b"\r" in raw:
        raw = raw.replace(b"\r", b" ").replace(b"\n", b" ")
    return orjson.Fragment(raw)


_BASE64URL = KeyFormat("base64url", from_base64, to_base64url, 'give keys as texts in base64url, for example "YWRh"')
KEYS = {
    "text": KeyFormat("text", str.encode, bytes.decode, 'give keys as texts, in JSON with quotes: "ada", "7"'),
    "long": KeyFormat("long", _parse_long, _show_long, 'give 64-bit integers, for example 7 or -7, or "7" in JSON'),
    "base64": _BASE64URL,
    "base64url": _BASE64URL,
}
#: The values of this format have schemas in a registry, and are shown as JSON.
SCHEMA = "schema"
VALUES = {
    "json": ValueFormat("json", _show_json),
    "text": ValueFormat("text", bytes.decode),
    "base64": ValueFormat("base64", _to_base64),
}


@dataclass(frozen=True)
class Format:
    """Keys and values of one table, or of one request."""

    keys: KeyFormat = KEYS["text"]
    values: ValueFormat = VALUES["json"]

    @classmethod
    def of(cls, key: str, value: str, schemas: SchemaValues | None = None) -> Format:
        """The formats with these names.

        Args:
            schemas: what ``schema`` means; None: there is no registry.

        Raises:
            OptionError: a name is unknown.
        """
        if key not in KEYS:
            raise OptionError(f"--key {key} is unknown", next_step=f"use one of {', '.join(KEYS)}")
        if value == SCHEMA and schemas is not None:
            return cls(KEYS[key], ValueFormat(SCHEMA, schemas.show, schemas))
        if value == SCHEMA:
            raise OptionError(f"--value {SCHEMA} needs a registry", next_step="give its URL with --registry")
        if value not in VALUES:
            raise OptionError(f"--value {value} is unknown", next_step=f"use one of {', '.join([*VALUES, SCHEMA])}")
        return cls(KEYS[key], VALUES[value])

    async def learn(self, raws: Iterable[bytes | None]) -> None:
        """Find out what is needed to show values. Raises: Problem: 503, the schema registry does not answer."""
        if self.values.schemas is not None:
            await self.values.schemas.learn(raws)

    def learn_now(self, raws: Iterable[bytes | None]) -> None:
        """As `learn`, in a thread."""
        if self.values.schemas is not None:
            self.values.schemas.learn_now(raws)

    def with_encodings(self, key: str | None, value: str | None) -> Format:
        """This one, or what a request asks for."""
        if key is None and value is None:
            return self
        return Format(self.keys if key is None else KEYS[key], self.values if value is None else VALUES[value])

    def value(self, raw: bytes) -> tuple[Any, str]:
        """A value for JSON, or None and what is wrong with it."""
        try:
            return self.values.show(raw), ""
        except ValueError as wrong:
            plain = self.values.schemas is None
            return None, f"The value {f'is not {self.values.name}' if plain else 'cannot be shown'}: {wrong}"

    def item(self, key: bytes, raw: bytes | None) -> dict[str, Any]:
        """A row for JSON; raw None: a tombstone. What does not fit the formats is described in ``error``."""
        found: dict[str, Any] = {}
        errors = []
        try:
            found["key"] = self.keys.show(key)
        except ValueError as wrong:
            found["key"], found["key_base64"] = None, to_base64url(key)
            errors.append(f"The key is not {self.keys.name}: {wrong}")
        if raw is None:
            found["value"], found["deleted"] = None, True
        else:
            found["value"], error = self.value(raw)
            if error:
                errors.append(error)
        if errors:
            found["error"] = "; ".join(errors)
        return found

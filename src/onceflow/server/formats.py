"""Keys and values of a table as clients write and read them: text, JSON, base64, numbers."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from onceflow.errors import OptionError
from onceflow.server.problems import Problem
from onceflow.state import rows

KEY_BYTES_MAX = rows.ROW_KEY_BYTES_MAX - 1

_LONG = struct.Struct(">q")
_DIGITS = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True)
class KeyFormat:
    """How keys are written.

    Args:
        parse: bytes of a key from its text. Raises ValueError.
        show: a JSON value from the bytes. Raises ValueError.
    """

    name: str
    parse: Callable[[str], bytes]
    show: Callable[[bytes], Any]

    def key(self, text: Any, what: str = "key") -> bytes:
        """The bytes of a key in a request.

        Raises:
            Problem: 400, it is no such key, or longer than a table can keep.
        """
        try:
            if self.name == "long" and isinstance(text, int) and not isinstance(text, bool):
                text = str(text)
            if not isinstance(text, str):
                raise Problem(400, f"The {what} {str(text)[:100]} is not a text", next_step='write it in quotes: "7"')
            key = self.parse(text)
        except ValueError as wrong:
            raise Problem(
                400,
                f"The {what} {str(text)[:100]!r} is not {self.name}: {wrong}",
                next_step="keys of bytes can be given as base64url, with key_encoding=base64url",
            ) from wrong
        if len(key) > KEY_BYTES_MAX:
            raise Problem(
                400, f"The {what} has {len(key):,} bytes", next_step=f"tables keep keys of up to {KEY_BYTES_MAX} bytes"
            )
        return key


@dataclass(frozen=True)
class ValueFormat:
    """How values are written.

    Args:
        show: a JSON value from the bytes, ready for orjson. Raises ValueError.
    """

    name: str
    show: Callable[[bytes], Any]


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


def _parse_long(text: str) -> bytes:
    if not _DIGITS.fullmatch(text):
        raise ValueError("write it in decimal digits")
    try:
        return _LONG.pack(int(text))
    except struct.error as wrong:
        raise ValueError("it has more than 64 bits") from wrong


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


_BASE64URL = KeyFormat("base64url", from_base64, to_base64url)
KEYS = {
    "text": KeyFormat("text", str.encode, bytes.decode),
    "long": KeyFormat("long", _parse_long, _show_long),
    "base64": _BASE64URL,
    "base64url": _BASE64URL,
}
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
    def of(cls, key: str, value: str) -> Format:
        if key not in KEYS:
            raise OptionError(f"--key {key} is unknown", next_step=f"use one of {', '.join(KEYS)}")
        if value not in VALUES:
            raise OptionError(f"--value {value} is unknown", next_step=f"use one of {', '.join(VALUES)}")
        return cls(KEYS[key], VALUES[value])

    def wished(self, key: str | None, value: str | None) -> Format:
        """This one, or what a request wishes instead."""
        if key is None and value is None:
            return self
        return Format(self.keys if key is None else KEYS[key], self.values if value is None else VALUES[value])

    def value(self, raw: bytes) -> tuple[Any, str]:
        """A value for JSON, or None and what is wrong with it."""
        try:
            return self.values.show(raw), ""
        except ValueError as wrong:
            return None, f"The value is not {self.values.name}: {wrong}"

    def item(self, key: bytes, raw: bytes | None) -> dict[str, Any]:
        """A row for JSON. What does not fit the formats is described in ``error``."""
        found: dict[str, Any] = {}
        errors = []
        try:
            found["key"] = self.keys.show(key)
        except ValueError as wrong:
            found["key"], found["key_base64"] = None, to_base64url(key)
            errors.append(f"The key is not {self.keys.name}: {wrong}")
        if raw is None:
            found["value"] = None
        else:
            found["value"], error = self.value(raw)
            if error:
                errors.append(error)
        if errors:
            found["error"] = "; ".join(errors)
        return found

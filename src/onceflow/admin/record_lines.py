"""Records as lines of text: what ``onceflow produce`` reads, and the JSON that ``onceflow consume`` writes.

A line of JSON that was written here can be read here: the record is the same, byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Any

from onceflow.state.api.record import Header, Record

_BASE64 = "_base64"
# Where a record was read from. A record that is written goes where its key belongs.
_PLACE = frozenset({"topic", "partition", "offset"})
_KNOWN = frozenset({"key", "key_base64", "value", "value_base64", "headers", "timestamp_ms"}) | _PLACE
_MAX_TIMESTAMP_MS = 2**63 - 1

Parser = Callable[[bytes], "Record | None"]
"""Makes a record of a line without its end; None for a line that is none. Raises ValueError: what is wrong."""


def value_only(line: bytes) -> Record:
    """The line is the value; there is no key."""
    return Record(None, line)


def key_and_value(separator: str) -> Parser:
    """The key goes to the first separator, the value is all behind it."""
    mark = separator.encode()

    def parse(line: bytes) -> Record:
        key, found, value = line.partition(mark)
        if not found:
            raise ValueError(f"there is no {separator!r} between a key and a value")
        return Record(key, value)

    return parse


def json_object(line: bytes) -> Record | None:
    """An object with ``value``, and optionally ``key``, ``headers`` and ``timestamp_ms``. Empty lines are none.

    Text is written as UTF-8, null as null (a tombstone, as a value), everything else as JSON. ``key_base64`` and
    ``value_base64`` are bytes. Headers are an object, or a list of objects with ``name`` and ``value`` or
    ``value_base64``.
    """
    if not line.strip():
        return None
    try:
        found = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('it is JSON, but not an object such as {"key": "k", "value": "v"}')
    unknown = found.keys() - _KNOWN
    if unknown:
        raise ValueError(f"it has an unknown field {min(unknown)!r}; known are {', '.join(sorted(_KNOWN))}")
    if "value" not in found and "value_base64" not in found:
        raise ValueError('it has no field "value"; for a tombstone give "value": null')
    return Record(
        _content(found, "key"),
        _content(found, "value"),
        headers=_headers(found.get("headers")),
        timestamp_ms=_timestamp(found.get("timestamp_ms")),
    )


def to_json(record: Record) -> str:
    """A line with all of a record, with bytes as keys and values. Control characters are escaped."""
    found = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        # Old producers gave none.
        "timestamp_ms": None if record.timestamp_ms is None or record.timestamp_ms < 0 else record.timestamp_ms,
        **field("key", record.key),
        **field("value", record.value),
        "headers": headers_as_json(record.headers),
    }
    return json.dumps(found).replace("\x7f", "\\u007f")  # JSON may have it, a terminal acts on it


def field(name: str, content: bytes | None) -> dict[str, Any]:
    """A field with the text; where the bytes are no UTF-8, a field ``<name>_base64``."""
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {name + _BASE64: base64.b64encode(content).decode()}


def headers_as_json(headers: Iterable[Header]) -> list[dict[str, Any]]:
    """An object for each header, with ``name``, and its value as of `field`."""
    return [{"name": name, **field("value", content)} for name, content in headers]


def _content(found: dict[str, Any], name: str) -> bytes | None:
    if name + _BASE64 not in found:
        return _bytes(found.get(name))
    if name in found:
        raise ValueError(f'it has both "{name}" and "{name + _BASE64}"')
    try:
        return base64.b64decode(found[name + _BASE64], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f'"{name + _BASE64}" is not base64: {error}') from None


def _bytes(content: Any) -> bytes | None:
    if content is None:
        return None
    try:
        text = content if isinstance(content, str) else _as_json(content)
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text") from None


def _as_json(content: Any) -> str:
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise ValueError("it holds a number that is too large for a double") from None


def _headers(found: Any) -> list[Header]:
    if found is None:
        return []
    if isinstance(found, dict):
        found = [{"name": name, "value": content} for name, content in found.items()]
    if not isinstance(found, list):
        raise ValueError('"headers" is neither an object nor a list')
    return [_header(each) for each in found]


def _header(found: Any) -> Header:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not found.keys() <= {"name", "value", "value_base64"}:
        raise ValueError('a header is an object such as {"name": "n", "value": "v"}')
    _bytes(name)  # it must be text, too
    return name, _content(found, "value")


def _timestamp(found: Any) -> int | None:
    # Not isinstance: to Python, True is an int.
    if found is not None and (type(found) is not int or not 0 <= found <= _MAX_TIMESTAMP_MS):
        raise ValueError('"timestamp_ms" is not a number of milliseconds since 1970')
    at_ms: int | None = found
    return at_ms


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")

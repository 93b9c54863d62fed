"""Records as lines of text: the formats that ``onceflow produce`` reads, and the JSON that ``onceflow consume`` writes.

JSON that ``to_json`` has written can be read back: key, value, headers and timestamp are the same, byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Any

from onceflow.protocol.headers import Header
from onceflow.state.api.record import Record
from onceflow.state.format import exact_json

_BASE64 = "_base64"
# Where a record was read from. These are ignored when a record is written: its key decides its partition.
_PLACE = frozenset({"topic", "partition", "offset"})
_KNOWN = frozenset({"key", "key_base64", "value", "value_base64", "headers", "timestamp_ms"}) | _PLACE
_MAX_TIMESTAMP_MS = 2**63 - 1

Parser = Callable[[bytes], "Record | None"]
"""Parses a line, without its line end, into a record; None for a line without a record. Raises ValueError."""
Encoder = Callable[[Any], "bytes | None"]
"""Makes the bytes of a key or of a value from a JSON document. Raises ValueError."""


class JsonText(bytes):
    """JSON that `to_json` shows as a document, and not as a text."""


def value_only(line: bytes) -> Record:
    """A record with the line as its value, and without a key."""
    return Record(None, line)


def document_only(value: Encoder) -> Parser:
    """A parser for lines of JSON, whose records have no keys. Empty lines are skipped."""
    return lambda line: Record(None, value(load_json(line))) if line.strip() else None


def with_documents(parser: Parser, key: Encoder | None, value: Encoder | None) -> Parser:
    """A parser whose keys and values are JSON documents. None: they stay as they are."""

    def parse(line: bytes) -> Record | None:
        found = parser(line)
        if found is None:
            return None
        encoded = [
            raw if encode is None or raw is None else encode(load_json(raw))
            for encode, raw in ((key, found.key), (value, found.value))
        ]
        return Record(encoded[0], encoded[1])

    return parse


def key_and_value(separator: str) -> Parser:
    """A parser for lines of key, separator and value. The first separator of a line counts."""
    mark = separator.encode(errors="surrogateescape")  # arguments may have bytes that are no text

    def parse(line: bytes) -> Record:
        key, found, value = line.partition(mark)
        if not found:
            raise ValueError(f"there is no {separator!r} between a key and a value")
        return Record(key, value)

    return parse


def json_object(line: bytes, key: Encoder | None = None, value: Encoder | None = None) -> Record | None:
    """Parse an object with ``value``, and optionally ``key``, ``headers``, ``timestamp_ms``. Empty lines are skipped.

    In a record, text becomes UTF-8, null becomes null (as a value: a tombstone), everything else becomes JSON.
    ``key_base64`` and ``value_base64`` are bytes. ``headers`` is an object, or a list of objects with ``name`` and
    ``value`` or ``value_base64``.

    Args:
        key, value: make the bytes in place of that, but for null and for bytes.
    """
    if not line.strip():
        return None
    found = load_json(line)
    if not isinstance(found, dict):
        raise ValueError('it is JSON, but not an object such as {"key": "k", "value": "v"}')
    unknown = found.keys() - _KNOWN
    if unknown:
        raise ValueError(f"it has an unknown field {min(unknown)!r}; known are {', '.join(sorted(_KNOWN))}")
    if "value" not in found and "value_base64" not in found:
        raise ValueError('it has no field "value"; for a tombstone give "value": null')
    return Record(
        _content(found, "key", key),
        _content(found, "value", value),
        headers=_headers(found.get("headers")),
        timestamp_ms=_timestamp(found.get("timestamp_ms")),
    )


def to_json(record: Record) -> str:
    """A record, with keys and values as bytes, as one line of JSON. Control characters are escaped."""
    found = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        # Very old producers set no timestamp.
        "timestamp_ms": None if record.timestamp_ms is None or record.timestamp_ms < 0 else record.timestamp_ms,
        **field("key", record.key),
        **field("value", record.value),
        "headers": headers_as_json(record.headers),
    }
    return as_line(found)


def as_line(found: Any) -> str:
    """A document as one line of JSON in ASCII. Control characters are escaped.

    Raises:
        ValueError: it is nested too deeply.
    """
    text = exact_json.written(found, ", ", ": ")
    return text.replace("\x7f", "\\u007f")  # legal in JSON, but a terminal would interpret it


def load_json(text: str | bytes) -> Any:
    """The document in a text.

    Raises:
        ValueError: the text is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=exact_json.number)
    except RecursionError:
        raise ValueError("it is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # also raised for invalid UTF-8
        raise ValueError(f"it is not JSON: {error}") from None


def compact_json(content: Any) -> str:
    """A document as JSON without spaces.

    Raises:
        ValueError: it has a number that JSON does not know, or is nested too deeply.
    """
    return exact_json.written(content, ensure_ascii=False, allow_nan=False)


def field(name: str, content: bytes | None) -> dict[str, Any]:
    """A field with the bytes as text. If they are not valid UTF-8: a field ``<name>_base64``."""
    if content is None:
        return {name: None}
    if isinstance(content, JsonText):
        return {name: load_json(content)}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {name + _BASE64: base64.b64encode(content).decode()}


def headers_as_json(headers: Iterable[Header]) -> list[dict[str, Any]]:
    """An object for each header, with ``name`` and its value as in `field`."""
    return [{"name": name, **field("value", content)} for name, content in headers]


def _content(found: dict[str, Any], name: str, encode: Encoder | None = None) -> bytes | None:
    if name + _BASE64 not in found:
        content = found.get(name)
        return _bytes(content) if encode is None or content is None else encode(content)
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
        text = content if isinstance(content, str) else compact_json(content)
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no text") from None


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
    # Not isinstance: in Python, True is an int, too.
    if found is not None and (type(found) is not int or not 0 <= found <= _MAX_TIMESTAMP_MS):
        raise ValueError('"timestamp_ms" is not a number of milliseconds since 1970')
    at_ms: int | None = found
    return at_ms


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")

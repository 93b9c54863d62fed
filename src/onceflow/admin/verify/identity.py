"""What makes a record the same in a source and in an output: a field of its value, a header, its key, or all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from onceflow.admin.verify.tally import digest_of
from onceflow.client.committed import Chunk
from onceflow.errors import OptionError
from onceflow.protocol.headers import Header
from onceflow.state.format import exact_json

Identity = Callable[["bytes | None", "bytes | None", Sequence[Header]], bytes]
"""Key, value and headers of a record -> 16 bytes. A record whose id is missing or null is identified by its key and
value: many may have no id, and they are not the same."""

_PATH = re.compile(r"\$(\.[^.\[\]*?]+)+")
_NO_FIELD = (ValueError, KeyError, TypeError, IndexError)


def identity_of(text: str, read: Callable[[bytes], Any] | None = None) -> Identity:
    """The identity that a user names: ``$.a.b``, ``key``, ``header:NAME`` or ``record``.

    Args:
        read: makes a JSON document of a value with a schema. It raises ValueError for others. None: all are JSON.

    Raises:
        OptionError: it is none of these.
    """
    if text == "record":
        return lambda key, value, headers: digest_of(key, value)
    if text == "key":
        return lambda key, value, headers: digest_of(key, value) if key is None else digest_of(key)
    if text.startswith("header:") and len(text) > len("header:"):
        return _of_header(text.removeprefix("header:"))
    if (names := field_path(text)) is not None:
        return _of_field(names, read)
    raise OptionError(
        f"--id {text!r} is not a place in a record",
        next_step="give $.field or $.field.field of a JSON value, key, header:NAME, or record (key and value)",
    )


def field_path(text: str) -> list[str] | None:
    """The names of the fields on the way to one in a JSON value, of ``$.a.b``; None: it is no such path."""
    return text.split(".")[1:] if _PATH.fullmatch(text) else None


def kind_of(text: str) -> Callable[[bytes | None], str | None]:
    """What an id in a value is, as text: a number, a text or something else. None: the value has none, or ids are not
    in values."""
    names = field_path(text)

    def found(value: bytes | None) -> str | None:
        if names is None:
            return None
        try:
            at = _field(value, names)
        except _NO_FIELD:
            return None
        if isinstance(at, str):
            return "texts"
        return "numbers" if isinstance(at, int | float | Decimal) and not isinstance(at, bool) else "other values"

    return found


def _of_header(name: str) -> Identity:
    def found(key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> bytes:
        for given, content in headers:
            if given == name and content is not None:
                return digest_of(b"h", content)
        return digest_of(key, value)

    return found


def _field(value: bytes | None, names: Sequence[str], read: Callable[[bytes], Any] | None = None) -> Any:
    """A field of a JSON value. One of `_NO_FIELD` is raised if there is none, or if it is null."""
    at: Any = None
    if read is not None and value is not None:
        with suppress(ValueError):
            at = read(value)
    at = exact_json.loads(value or b"") if at is None else at
    for name in names:
        at = at[name]
    if at is None:
        raise KeyError(names[-1])
    return at


def _of_field(names: Sequence[str], read: Callable[[bytes], Any] | None) -> Identity:
    def found(key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> bytes:
        try:
            # In one form: 1, 1.0 and 1e0 are one number. What is nested deeply can be read, but not written.
            return digest_of(b"f", exact_json.canonical(exact_json.dumps(_field(value, names, read))))
        except _NO_FIELD:
            return digest_of(key, value)

    return found


def has_ids(chunk: Chunk, identity: Identity) -> bool:
    """Whether one of some records has an id, and not only itself."""
    return any(
        identity(key, value, chunk.headers.get(row, ())) != digest_of(key, value)
        for row, (key, value) in enumerate(zip(chunk.keys, chunk.values, strict=True))
    )

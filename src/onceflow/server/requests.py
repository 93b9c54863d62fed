"""Parameters of requests: what a client asks of keys, values, ranges and the age of answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal, get_args
from urllib.parse import parse_qsl, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Scope

from onceflow.errors import OptionError
from onceflow.options.durations import duration_ms
from onceflow.protocol.position import Position
from onceflow.server.formats import Format, from_base64, to_base64url
from onceflow.server.options import Limits
from onceflow.server.problems import Problem
from onceflow.server.staleness import Freshness
from onceflow.state.format import rows

_STALENESS_MAX = 1 << 53
_NEGATIVE = b"\x80"  # where the bytes of negative numbers begin
_DURATION_TEXT_MAX = 100
_CURSOR = "k."  # so that the cursor after an empty key is not empty, which would look like the end

KeyEncoding = Literal["text", "long", "base64", "base64url"]
ValueEncoding = Literal["json", "text", "base64"]
#: None: as the table was started.
KEY_ENCODINGS: tuple[str | None, ...] = (None, *get_args(KeyEncoding))
VALUE_ENCODINGS: tuple[str | None, ...] = (None, *get_args(ValueEncoding))


class Parameters(BaseModel):
    """Others are refused: a misspelled ``min_position`` must not be a request that demands nothing."""

    model_config = ConfigDict(extra="forbid")


class AgeParameters(Parameters):
    """How old an answer may be."""

    min_position: str | None = Field(
        default=None,
        description="The answer must contain everything up to this position, for example the header "
        "`Onceflow-Position` of an earlier answer, or `query.position` of a flow.",
    )
    max_staleness: str | None = Field(
        default=None,
        description="The answer must have been current at most this long ago, for example `2s` or `500 ms`.",
    )
    wait: str | None = Field(
        default=None,
        description="How long to wait for `min_position` or `max_staleness` before 503 is answered.",
    )

    def freshness(self, topic: str, limits: Limits) -> Freshness:
        """As `freshness_of`."""
        return freshness_of(topic, limits, self.min_position, self.max_staleness, self.wait)


class EncodingParameters(Parameters):
    """How keys and values are written."""

    key_encoding: KeyEncoding | None = Field(
        default=None,
        description="How keys are written in this request and its answer. Default: as the table was started.",
    )
    value_encoding: ValueEncoding | None = Field(
        default=None,
        description="How values are written in the answer. Default: as the table was started.",
    )

    def format(self, usual: Format) -> Format:
        """The usual format of the table, or what the client asks for."""
        return usual.with_encodings(self.key_encoding, self.value_encoding)


class LookupParameters(AgeParameters, EncodingParameters):
    """Of a look-up of keys."""


class RangeParameters(LookupParameters):
    """Of a range."""

    start: str | None = Field(
        default=None,
        description="The first key, in the order of the keys' bytes: negative numbers come last. "
        "Default: that of the table.",
    )
    end: str | None = Field(default=None, description="The key before which the range ends.")
    prefix: str | None = Field(default=None, description="Only keys that begin with this. Not for numbers.")
    reverse: bool = Field(default=False, description="The last key first.")
    limit: int | None = Field(default=None, ge=1, description="Rows. Default: 100, or all if streamed.")
    cursor: str | None = Field(default=None, description="Continue the same request after this.")

    def bounds(self, written: Format) -> tuple[bytes, bytes | None]:
        """The first key, and the one before which the range ends.

        Raises:
            Problem: 400, a parameter is invalid.
        """
        low = b"" if self.start is None else written.keys.key(self.start, "start")
        high = None if self.end is None else written.keys.key(self.end, "end")
        if written.keys.numbers and high is not None and low > high:
            raise Problem(
                400,
                f"start={self.start} comes after end={self.end} in the order of the keys' bytes, in which negative "
                "numbers come after positive ones",
                next_step="ask once with this start and no end, and once with this end and no start"
                if low >= _NEGATIVE > high
                else "start comes first, also with reverse=true",
            )
        if self.prefix is not None:
            begin = written.keys.prefix(self.prefix)
            low, high = max(low, begin), _lesser(high, rows.after(begin))
        if self.cursor is not None:
            last = cursor_of(self.cursor)
            low, high = (low, _lesser(high, last)) if self.reverse else (max(low, last + b"\0"), high)
        return low, high


class ChangesParameters(EncodingParameters):
    """Of a stream of changes."""

    since: str | None = Field(
        default=None, description="Begin at this position. Default: with what is committed from now on."
    )
    prefix: str | None = Field(default=None, description="Only keys that begin with this. Not for numbers.")


def freshness_of(
    topic: str, limits: Limits, min_position: str | None, max_staleness: str | None, wait: str | None
) -> Freshness:
    """What a request demands.

    Raises:
        Problem: 400, a parameter is invalid.
    """
    wait_s = limits.wait_s if wait is None else min(_duration_ms("wait", wait) / 1000, limits.request_s)
    # The position of an answer that asked for nothing is empty.
    least, topic_id = position_of("min_position", min_position, topic) if min_position else ({}, "")
    staleness_ms = None if max_staleness is None else min(_duration_ms("max_staleness", max_staleness), _STALENESS_MAX)
    return Freshness(least, staleness_ms, time.monotonic() + wait_s, topic_id)


def unknown_parameter(name: str, known: Iterable[str]) -> Problem:
    """The answer to a request with a parameter that it does not have."""
    known = sorted(known)
    similar = get_close_matches(name, known, 1)
    next_step = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(known)}"
    return Problem(400, f"This request has no parameter {name[:100]!r}", next_step=next_step)


def check_query(scope: Scope) -> None:
    """Refuse parameters that are not UTF-8: frameworks replace such bytes, which would ask for something else.

    Raises:
        Problem: 400, one is not.
    """
    query: bytes = scope["query_string"]
    if not query.isascii():
        next_step = "write them like %C3%BC; curl does so with -G --data-urlencode"
        raise Problem(400, "The query has bytes that must be percent-encoded", next_step=next_step)
    # A byte that is not UTF-8 becomes a surrogate, which no UTF-8 has.
    for name, value in parse_qsl(query.decode(), keep_blank_values=True, errors="surrogateescape"):
        try:
            value.encode()
        except UnicodeEncodeError as wrong:
            raise _no_text(f"The parameter {name.encode('ascii', 'replace').decode()[:100]}") from wrong


def position_of(name: str, text: str, topic: str) -> tuple[dict[int, int], str]:
    """The offsets of a topic in a position, and the topic's id; empty: the position does not say it.

    Raises:
        Problem: 400, it is not a position, or says nothing about the topic.
    """
    try:
        position = Position.parse(text)
    except OptionError as wrong:
        raise Problem(400, f"{name}: {wrong.what}", next_step=wrong.next_step) from wrong
    found = position.offsets.get(topic)
    if found is None:
        raise Problem(
            400,
            f"{name} says nothing about table {topic}",
            next_step="take the position of the flow that writes this table, or of an earlier answer",
        )
    return dict(found), position.ids.get(topic, "")


def key_in_path(scope: Scope) -> bytes:
    """What stands after ``/keys/``, as it was sent: frameworks decode paths, and may take dots away.

    Raises:
        Problem: 404, one of the slashes before it was encoded.
    """
    parts = scope["raw_path"].split(b"/", 4)
    if len(parts) < 5 or parts[3] != b"keys":
        raise Problem(404, "There is nothing at this path", next_step="look at /docs")
    return unquote_to_bytes(parts[4])


def text_key(raw: bytes) -> str:
    """A key of a path as text.

    Raises:
        Problem: 400, it is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        raise _no_text("The key in the path") from wrong


def cursor_after(key: bytes) -> str:
    """The cursor with which a range continues after a key. It is never empty."""
    return _CURSOR + to_base64url(key)


def cursor_of(text: str) -> bytes:
    """The key after which a range continues.

    Raises:
        Problem: 400, it is not a cursor.
    """
    try:
        if not text.startswith(_CURSOR):
            raise ValueError("it begins in another way")
        return from_base64(text.removeprefix(_CURSOR))
    except ValueError as wrong:
        raise Problem(
            400, f"{text[:100]!r} is not a cursor", next_step="give the cursor of an earlier answer"
        ) from wrong


def _duration_ms(name: str, text: str) -> int:
    try:
        if len(text) > _DURATION_TEXT_MAX:
            raise ValueError("it is too long")
        try:
            return duration_ms(float(text))
        except ValueError:
            return duration_ms(text)
    except (ValueError, OverflowError) as wrong:
        raise Problem(400, f"{name}={text[:100]!r} is not a duration", next_step="for example 2s, or 500 ms") from wrong


def _no_text(what: str) -> Problem:
    return Problem(400, f"{what} is not UTF-8", next_step="give it as base64url, with key_encoding=base64url")


def _lesser(one: bytes | None, other: bytes | None) -> bytes | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)

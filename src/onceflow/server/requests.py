"""Parameters of requests: what is wished of keys, values, ranges and the age of answers."""

from __future__ import annotations

import time
from typing import Annotated, Literal
from urllib.parse import unquote_to_bytes

from fastapi import Query
from starlette.types import Scope

from onceflow.durations import duration_ms
from onceflow.errors import OptionError
from onceflow.protocol.position import Position
from onceflow.server.formats import from_base64
from onceflow.server.options import Limits
from onceflow.server.problems import Problem
from onceflow.server.seen import Wish

_STALENESS_MAX = 1 << 53

KeyEncoding = Annotated[
    Literal["text", "long", "base64", "base64url"] | None,
    Query(description="How keys are written in this request and its answer. Default: as the table was started."),
]
ValueEncoding = Annotated[
    Literal["json", "text", "base64"] | None,
    Query(description="How values are written in the answer. Default: as the table was started."),
]
MinPosition = Annotated[
    str | None,
    Query(
        description="The answer must contain everything up to this position, for example the header "
        "`Onceflow-Position` of an earlier answer, or `query.position` of a flow."
    ),
]
MaxStaleness = Annotated[
    str | None,
    Query(description="The answer must have been current at most this long ago, for example `2s` or `500 ms`."),
]
Wait = Annotated[
    str | None,
    Query(description="How long to wait for `min_position` or `max_staleness` before 503 is answered."),
]


def wish_of(topic: str, limits: Limits, min_position: str | None, max_staleness: str | None, wait: str | None) -> Wish:
    """What a request demands.

    Raises:
        Problem: 400, a parameter is invalid.
    """
    wait_s = limits.wait_s if wait is None else min(_duration_ms("wait", wait) / 1000, limits.request_s)
    least = {} if min_position is None else _offsets("min_position", min_position, topic)
    staleness_ms = None if max_staleness is None else min(_duration_ms("max_staleness", max_staleness), _STALENESS_MAX)
    return Wish(least, staleness_ms, time.monotonic() + wait_s)


def position_of(name: str, text: str, topic: str) -> dict[int, int]:
    """The offsets of a topic in a position.

    Raises:
        Problem: 400, it is not a position, or says nothing about the topic.
    """
    return _offsets(name, text, topic)


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
        raise Problem(
            400, "The key in the path is not UTF-8", next_step="give it as base64url, with key_encoding=base64url"
        ) from wrong


def cursor_of(text: str) -> bytes:
    """The key after which a range continues.

    Raises:
        Problem: 400, it is not a cursor.
    """
    try:
        return from_base64(text)
    except ValueError as wrong:
        raise Problem(
            400, f"{text[:100]!r} is not a cursor", next_step="give the cursor of an earlier answer"
        ) from wrong


def _offsets(name: str, text: str, topic: str) -> dict[int, int]:
    try:
        found = Position.parse(text).offsets.get(topic)
    except OptionError as wrong:
        raise Problem(400, f"{name}: {wrong.what}", next_step=wrong.next_step) from wrong
    if found is None:
        raise Problem(
            400,
            f"{name} says nothing about table {topic}",
            next_step="take the position of the flow that writes this table, or of an earlier answer",
        )
    return dict(found)


def _duration_ms(name: str, text: str) -> int:
    try:
        try:
            return duration_ms(float(text))
        except ValueError:
            return duration_ms(text)
    except (ValueError, OverflowError) as wrong:
        raise Problem(400, f"{name}={text[:100]!r} is not a duration", next_step="for example 2s, or 500 ms") from wrong

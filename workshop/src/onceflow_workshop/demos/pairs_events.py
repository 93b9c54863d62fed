"""The events of the demo ``pairs``, and the ways to write their timestamps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

#: Event time begins here. It is fixed, so that a seed always makes the same records.
START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
#: An event comes up to this long after it has happened.
DISORDER_MS = 120_000
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Event(NamedTuple):
    """One event as it should be.

    Args:
        copies: how often it is sent.
        spelling: of its timestamp, one of ``SPELLINGS``; but for the first, it does not tell its id.
    """

    id: str
    type: str
    at_ms: int
    value: int
    copies: int = 1
    spelling: int = 0

    @property
    def encoded(self) -> bytes:
        name = "" if self.spelling else f'"id":"{self.id}",'
        at = SPELLINGS[self.spelling](self.at_ms)
        return f'{{{name}"type":"{self.type}","timestamp":"{at}","value":{self.value}}}'.encode()


class Moment(NamedTuple):
    """What happened at one time: two events, or one."""

    at_ms: int
    a: Event | None
    b: Event | None


def timestamp(at_ms: int) -> str:
    """As outputs write it, and most events."""
    return _text(at_ms) + "Z"


def _text(at_ms: int) -> str:
    seconds, ms = divmod(at_ms, 1000)
    return f"{EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{ms:03d}"


def _at_offset(sign: str, minutes: int) -> Callable[[int], str]:
    """As a clock writes it that is so much ahead of UTC, or behind."""
    ahead_ms = (minutes if sign == "+" else -minutes) * 60_000
    return lambda at_ms: f"{_text(at_ms + ahead_ms)}{sign}{minutes // 60:02d}:{minutes % 60:02d}"


#: Ways to write a timestamp that mean the same.
SPELLINGS: tuple[Callable[[int], str], ...] = (
    timestamp,
    lambda at_ms: _text(at_ms).replace("T", " "),
    lambda at_ms: f"{_text(at_ms)}000",
    _at_offset("+", 330),
    _at_offset("-", 720),
)

"""The time of day. Code that measures how long something takes uses ``time.monotonic`` instead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_told: ContextVar[Callable[[], int] | None] = ContextVar("onceflow_clock", default=None)


def clock_ms() -> int:
    """The time in epoch milliseconds."""
    told = _told.get()
    return time.time_ns() // 1_000_000 if told is None else told()


def passing_s() -> float:
    """Seconds that pass with the time of day, and never go back: for how long a source is silent.

    They pass in a test as the test says. A deadline for an answer uses ``time.monotonic``.
    """
    told = _told.get()
    return time.monotonic() if told is None else told() / 1000


@contextlib.contextmanager
def told_by(now_ms: Callable[[], int]) -> Iterator[None]:
    """In this thread, the time is what a function returns. Only tests use it."""
    token = _told.set(now_ms)
    try:
        yield
    finally:
        _told.reset(token)

"""Timers of a key, as user code sets them."""

from __future__ import annotations

from operator import index
from typing import Literal, NamedTuple

from onceflow.state import rows
from onceflow.state.api.scope import Scope

Clock = Literal["event", "processing"]

_CODES: dict[str, bytes] = {"event": b"e", "processing": b"p"}
CLOCKS: dict[bytes, Clock] = {b"e": "event", b"p": "processing"}
MS_MIN, MS_MAX = -(1 << 63), (1 << 63) - 1


class Timer(NamedTuple):
    """A timer of a key.

    Args:
        name: unique for the key.
        at_ms: epoch milliseconds.
        clock: ``event`` (due when the watermark gets there) or ``processing`` (wall-clock time).
    """

    name: str
    at_ms: int
    clock: Clock


class Timers:
    """Timers of one key; get it as ``state.timers``.

    A timer fires once, in a batch after the one that registered it.
    """

    __slots__ = ("_key", "_scope")

    def __init__(self, scope: Scope, key: bytes) -> None:
        self._scope = scope
        self._key = key

    def register(self, name: str, at_ms: int, clock: Clock = "event") -> None:
        """Have ``on_timer`` called; an earlier timer of this name (on either clock) is replaced.

        Args:
            name: unique for the key.
            at_ms: epoch milliseconds; a time that is past fires in the next batch.
            clock: ``event`` needs the processor's ``allowed_lateness``: without it there is no watermark.

        Raises:
            ValueError: an unknown clock, a time beyond 64 bits, or a name that is too long.
        """
        code = _CODES.get(clock)
        if code is None:
            raise ValueError(f"clock {clock!r}: use 'event' or 'processing'")
        at_ms = index(at_ms)
        if not MS_MIN <= at_ms <= MS_MAX:
            raise ValueError(f"timer {name!r} at {at_ms}: not a time in milliseconds")
        self._scope.overlay.put(self._row_key(name), rows.pack(rows.timer_payload(code, at_ms)))

    def cancel(self, name: str) -> None:
        """Forget a timer; nothing happens when there is none."""
        row_key = self._row_key(name)
        if self._scope.overlay.get(row_key) is not None:
            self._scope.overlay.put(row_key, None)

    def get(self, name: str) -> Timer | None:
        """The timer of this name, if one is registered."""
        row = self._scope.overlay.get(self._row_key(name))
        return None if row is None else Timer(name, *timer_of(row))

    def _row_key(self, name: str) -> bytes:
        return self._scope.checked(rows.timer_key(self._key, name.encode()))


def timer_of(row: bytes) -> tuple[int, Clock]:
    """Time and clock of a ``t`` row."""
    payload = rows.unpack(row).payload
    return rows.time_of(payload[1:9]), CLOCKS[payload[:1]]

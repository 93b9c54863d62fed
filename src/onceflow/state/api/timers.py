"""``Timers``: registers and cancels the timers of a key."""

from __future__ import annotations

from typing import Literal, NamedTuple

from onceflow.protocol.timestamps import whole_ms
from onceflow.state.api.scope import Scope
from onceflow.state.format import rows

Clock = Literal["event", "processing"]

_CODES: dict[str, bytes] = {"event": b"e", "processing": b"p"}
CLOCKS: dict[bytes, Clock] = {b"e": "event", b"p": "processing"}
MS_MIN, MS_MAX = -(1 << 63), (1 << 63) - 1


class Timer(NamedTuple):
    """A timer of a key.

    Args:
        name: unique for the key.
        at_ms: when it is due, in epoch milliseconds.
        clock: ``event`` (due when the watermark reaches ``at_ms``) or ``processing`` (wall-clock time).
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
        """Register a timer, which later calls ``on_timer``. It replaces a timer of the same name, on either clock.

        Args:
            name: unique for the key.
            at_ms: epoch milliseconds. A timer for a time in the past fires in the next batch.
            clock: ``event`` or ``processing``. ``event`` needs ``allowed_lateness`` of the processor, because without
                it there is no watermark.

        Raises:
            ValueError, TypeError: an unknown clock, a time beyond 64 bits, or no whole number.
            ProcessorError: the processor does not use event time, so the timer would never fire; or it does not define
                on_timer().
        """
        code = _CODES.get(clock)
        if code is None:
            raise ValueError(f"clock {clock!r}: use 'event' or 'processing'")
        at_ms = whole_ms(at_ms)
        if not MS_MIN <= at_ms <= MS_MAX:
            raise ValueError(f"timer {name!r} at {at_ms}: not a time in milliseconds")
        if clock == "processing":
            self._scope.uses_clock = True
        elif not self._scope.has_event_time:
            raise self._scope.without_event_time(name)
        if not self._scope.handles_timers:
            raise self._scope.without_on_timer()
        self._scope.overlay.put(self._row_key(name), rows.pack(rows.timer_payload(code, at_ms)))

    def register_rest(self, name: str, at_ms: int) -> None:
        """Register a timer that is due already, for the rest of the work of the one that fires. It fires at once.

        `register` does the same, but without records the next batch may be a second away.
        """
        self.register(name, at_ms)
        self._scope.timers_left = True

    def cancel(self, name: str) -> None:
        """Delete a timer, if it is registered."""
        row_key = self._row_key(name)
        if self._scope.overlay.get(row_key) is not None:
            self._scope.overlay.put(row_key, None)

    def get(self, name: str) -> Timer | None:
        """The timer of this name, or None."""
        row = self._scope.overlay.get(self._row_key(name))
        return None if row is None else Timer(name, *timer_of(row))

    def _row_key(self, name: str) -> bytes:
        return rows.timer_key(self._key, name.encode())


def timer_of(row: bytes) -> tuple[int, Clock]:
    """Time and clock of a ``t`` row."""
    payload = rows.unpack(row).payload
    return rows.time_of(payload[1:9]), CLOCKS[payload[:1]]

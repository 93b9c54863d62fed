"""Timers, and what else of the state is due by time: expired rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple

from onceflow.state import rows
from onceflow.state.stores.overlay import Overlay

if TYPE_CHECKING:
    from onceflow.state.api.handle import Scope

Clock = Literal["event", "processing"]

_LETTERS: dict[str, bytes] = {"event": b"e", "processing": b"p"}
_CLOCKS: dict[bytes, Clock] = {b"e": "event", b"p": "processing"}
_MS_MIN, _MS_MAX = -(1 << 63), (1 << 63) - 1


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
        letter = _LETTERS.get(clock)
        if letter is None:
            raise ValueError(f"clock {clock!r}: use 'event' or 'processing'")
        at_ms = index(at_ms)
        if not _MS_MIN <= at_ms <= _MS_MAX:
            raise ValueError(f"timer {name!r} at {at_ms}: not a time in milliseconds")
        self._scope.overlay.put(self._row_key(name), rows.pack(rows.timer_payload(letter, at_ms)))

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
    return rows.time_of(payload[1:9]), _CLOCKS[payload[:1]]


def due(overlay: Overlay, now_ms: int, watermark_ms: int | None) -> Iterator[tuple[bytes, Timer]]:
    """Keys and timers that are due, in the order of their times; `take` out those that fire.

    Only timers of earlier batches: those that are registered meanwhile wait for the next one.
    """
    store = overlay.store

    def scan(clock: bytes, until_ms: int | None) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        if until_ms is None:
            return
        start = rows.TIMER_INDEX + clock
        for index_key, _ in store.scan(start, _from_ms(start, until_ms + 1)):
            _, at_ms, key, name = rows.timer_index_parts(index_key)
            yield at_ms, key, name, clock

    for at_ms, key, name, clock in heapq.merge(scan(b"e", watermark_ms), scan(b"p", now_ms)):
        row_key = rows.timer_key(key, name)
        row = overlay.get(row_key)
        # on_timer of an earlier one may have cancelled or moved it.
        if row is not None and timer_of(row) == (at_ms, _CLOCKS[clock]):
            yield key, Timer(name.decode(), at_ms, _CLOCKS[clock])


def take(overlay: Overlay, key: bytes, timer: Timer) -> None:
    """Forget a timer that fires."""
    overlay.put(rows.timer_key(key, timer.name.encode()), None)


def expire(overlay: Overlay, now_ms: int, limit: int) -> int:
    """Delete rows whose time is over.

    Args:
        limit: rows at most; what is left reads as absent anyway and goes with the next batch.

    Returns:
        how many were deleted.
    """
    count = 0
    for index_key, _ in overlay.store.scan(rows.EXPIRY_INDEX, _from_ms(rows.EXPIRY_INDEX, now_ms + 1)):
        if count == limit:
            break
        _, row_key = rows.expiry_index_parts(index_key)
        row = overlay.get(row_key)
        if row is not None:
            expires_ms = rows.expiry_of(row)
            if expires_ms is not None and expires_ms <= now_ms:
                overlay.put(row_key, None)
                count += 1
    return count


def earliest(overlay: Overlay) -> dict[str, int | None]:
    """The time of the next timer on each clock once the changes are applied; expiry counts as processing time."""
    event, processing = _Least(), _Least()
    for row_key, row in overlay.changes():
        if row is None:
            continue
        if row_key[:1] == rows.TIMER:
            at_ms, clock = timer_of(row)
            (event if clock == "event" else processing).see(at_ms)
        else:
            expires_ms = rows.expiry_of(row)
            if expires_ms is not None:
                processing.see(expires_ms)
    for letter, least in ((b"e", event), (b"p", processing)):
        start = rows.TIMER_INDEX + letter
        for index_key, _ in overlay.store.scan(start, rows.after(start)):
            _, at_ms, key, name = rows.timer_index_parts(index_key)
            row = overlay.get(rows.timer_key(key, name))
            if row is not None and timer_of(row) == (at_ms, _CLOCKS[letter]):
                least.see(at_ms)
                break
    for index_key, _ in overlay.store.scan(rows.EXPIRY_INDEX, rows.after(rows.EXPIRY_INDEX)):
        at_ms, row_key = rows.expiry_index_parts(index_key)
        row = overlay.get(row_key)
        if row is not None and rows.expiry_of(row) == at_ms:
            processing.see(at_ms)
            break
    return {"event": event.ms, "processing": processing.ms}


class _Least:
    def __init__(self) -> None:
        self.ms: int | None = None

    def see(self, ms: int) -> None:
        if self.ms is None or ms < self.ms:
            self.ms = ms


def _from_ms(prefix: bytes, ms: int) -> bytes:
    """The least index key of a time; beyond all of the prefix where the time does not fit."""
    return prefix + rows.time_bytes(ms) if ms <= _MS_MAX else prefix + b"\xff" * 9

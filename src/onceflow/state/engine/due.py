"""What is due in a batch: timers that fire, and rows that have expired."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onceflow.protocol.versions import TimerId
from onceflow.state.api.timers import CLOCKS, MS_MAX, Timer, timer_of
from onceflow.state.format import rows
from onceflow.state.stores.overlay import Overlay


def due_timers(overlay: Overlay, now_ms: int | None, watermark_ms: int | None) -> Iterator[tuple[bytes, Timer]]:
    """Keys and timers that are due, in the order of their times. The caller must `take` those that fire.

    Without a time, none of that clock are due.

    Only timers of earlier batches are returned. Timers that are registered meanwhile wait for the next batch.
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
        # on_timer of an earlier timer may have cancelled or moved this one.
        if row is not None and timer_of(row) == (at_ms, CLOCKS[clock]):
            yield key, Timer(name.decode(), at_ms, CLOCKS[clock])


class Unfired:
    """Timers that an earlier version of a flow has left, although they are due. The others have fired there.

    A timer that is due later than the one of its name there was registered after it, or in its place. So it has not
    fired there either.
    """

    def __init__(self, ids: Iterable[TimerId]) -> None:
        self._at_ms = {(each.key, each.name, each.clock): each.at_ms for each in ids}

    def has(self, key: bytes, timer: Timer) -> bool:
        """Whether a timer has not fired there."""
        if not self._at_ms:
            return False
        known_ms = self._at_ms.get((key.hex(), timer.name, timer.clock))
        return known_ms is not None and known_ms <= timer.at_ms


def are_left(overlay: Overlay, now_ms: int | None, watermark_ms: int | None, unfired: Unfired) -> bool:
    """Whether timers are due after the changes, also those that this batch has registered.

    Args:
        unfired: timers that do not count.
    """
    until = {"processing": now_ms, "event": watermark_ms}
    for row_key, row in overlay.changes():
        if row is None or row_key[:1] != rows.TIMER:
            continue
        key, name = rows.timer_parts(row_key)
        timer = Timer(name.decode(), *timer_of(row))
        limit = until[timer.clock]
        if limit is not None and timer.at_ms <= limit and not unfired.has(key, timer):
            return True
    return any(not unfired.has(key, timer) for key, timer in due_timers(overlay, now_ms, watermark_ms))


def take(overlay: Overlay, key: bytes, timer: Timer) -> None:
    """Delete a timer that fires."""
    overlay.put(rows.timer_key(key, timer.name.encode()), None)


def expire(overlay: Overlay, now_ms: int, limit: int) -> int:
    """Delete rows that have expired.

    Args:
        limit: maximum number of rows. Other expired rows are deleted in the next batches. Reads ignore them already.

    Returns:
        How many were deleted.
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


class Due(NamedTuple):
    """When something is due next, epoch milliseconds; None: nothing is.

    Args:
        event, processing: timers of these clocks.
        expiry: rows that expire, in processing time.
    """

    event: int | None = None
    processing: int | None = None
    expiry: int | None = None

    @property
    def by_clock(self) -> dict[str, int | None]:
        """By clock; expiry belongs to ``processing``."""
        known = [ms for ms in (self.processing, self.expiry) if ms is not None]
        return {"event": self.event, "processing": min(known, default=None)}


def earliest(overlay: Overlay) -> Due:
    """What is due next after the changes."""
    event, processing, expiry = _Earliest(), _Earliest(), _Earliest()
    for row_key, row in overlay.changes():
        if row is None:
            continue
        if row_key[:1] == rows.TIMER:
            at_ms, clock = timer_of(row)
            (event if clock == "event" else processing).see(at_ms)
        else:
            expires_ms = rows.expiry_of(row)
            if expires_ms is not None:
                expiry.see(expires_ms)
    for code, soonest in ((b"e", event), (b"p", processing)):
        start = rows.TIMER_INDEX + code
        for index_key, _ in overlay.store.scan(start, rows.after(start)):
            _, at_ms, key, name = rows.timer_index_parts(index_key)
            row = overlay.get(rows.timer_key(key, name))
            if row is not None and timer_of(row) == (at_ms, CLOCKS[code]):
                soonest.see(at_ms)
                break
    for index_key, _ in overlay.store.scan(rows.EXPIRY_INDEX, rows.after(rows.EXPIRY_INDEX)):
        at_ms, row_key = rows.expiry_index_parts(index_key)
        row = overlay.get(row_key)
        if row is not None and rows.expiry_of(row) == at_ms:
            expiry.see(at_ms)
            break
    return Due(event.ms, processing.ms, expiry.ms)


class _Earliest:
    def __init__(self) -> None:
        self.ms: int | None = None

    def see(self, ms: int) -> None:
        if self.ms is None or ms < self.ms:
            self.ms = ms


def _from_ms(prefix: bytes, ms: int) -> bytes:
    """The first index key of a time. If the time does not fit into 64 bits: a key after all keys of the prefix."""
    return prefix + rows.time_bytes(ms) if ms <= MS_MAX else prefix + b"\xff" * 9

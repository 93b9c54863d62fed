"""``Sessions``: the sessions of a key that are not closed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onceflow.state.api.record import Record
from onceflow.state.api.serdes import Serde
from onceflow.state.api.timers import MS_MIN
from onceflow.state.format import rows
from onceflow.state.windows.kinds import Session, Window
from onceflow.state.windows.panes import CLOSED_AT_ONCE, MAP, TIMER, Accumulation, Closed, added

if TYPE_CHECKING:
    from onceflow.state.api.handle import State


def _bounds_bytes(bounds: Window) -> bytes:
    return b"".join(map(rows.time_bytes, bounds))


def _bounds_of(raw: bytes) -> Window:
    return Window(rows.time_of(raw[:8]), rows.time_of(raw[8:]))


# Start and end are both in the key: the value is the user's accumulator alone, which migrate() gets.
_BOUNDS = Serde(_bounds_bytes, _bounds_of, "session")


class Sessions:
    """The sessions of a key that are not closed, for one call of ``process`` or ``on_timer``. They never touch."""

    def __init__(self, processor: Accumulation, kind: Session, state: State) -> None:
        self._processor, self._gap_ms, self._state = processor, kind.gap_ms, state
        self._map = state.map(MAP, key=_BOUNDS)
        self.replaced: list[Window] = []
        """The sessions that ``add`` has extended, or merged with others."""

    def add(self, records: Sequence[Record], times: Sequence[int]) -> Iterator[tuple[Window, Any]]:
        """Add records, and register the timer. Returns the sessions that have changed."""
        found = self._near(min(times), max(times))
        windows = [window for window, _ in found]
        accumulators = [accumulator for _, accumulator in found]
        before = set(windows)
        changed: set[Window] = set()
        for record, at_ms in zip(records, times, strict=True):
            first = bisect_left(windows, at_ms, key=lambda window: window.end_ms)
            last = bisect_right(windows, at_ms + self._gap_ms, key=lambda window: window.start_ms)
            joined = windows[first:last]
            merged = accumulators[first] if joined else self._processor.initial()
            for accumulator in accumulators[first + 1 : last]:
                merged = self._processor.merge(merged, accumulator)
            bounds = [*joined, Window(at_ms, at_ms + self._gap_ms)]
            window = Window(min(each.start_ms for each in bounds), max(each.end_ms for each in bounds))
            windows[first:last] = [window]
            accumulators[first:last] = [added(self._processor, merged, record)]
            changed.difference_update(joined)
            changed.add(window)
        self.replaced = sorted(before.difference(windows))
        for gone in self.replaced:
            self._map.delete(gone)
        results = [pair for pair in zip(windows, accumulators, strict=True) if pair[0] in changed]
        for window, accumulator in results:
            self._map.put(window, accumulator, ttl="never")
        timer = self._state.timers.get(TIMER)
        due_ms = results[0][0].end_ms + 1
        if timer is None or due_ms < timer.at_ms:
            self._state.timers.register(TIMER, due_ms)
        return iter(results)

    def close(self, from_ms: int, until_ms: int) -> Iterator[Closed]:
        """The sessions that end before ``until_ms``, which are deleted. Afterwards, the timer moves.

        A record at the end of a session would still extend it, so it is closed one millisecond later. The timer of a
        session that was extended since is due too early: it only moves on.
        """
        for closed, (window, accumulator) in enumerate(self._map.items()):
            if window.end_ms >= until_ms:
                self._state.timers.register(TIMER, window.end_ms + 1)
                return
            if closed == CLOSED_AT_ONCE:
                self._state.timers.register_rest(TIMER, window.end_ms + 1)
                return
            yield Closed(window, [accumulator], self._processor.merge)
            self._map.delete(window)

    def _near(self, first_ms: int, last_ms: int) -> list[tuple[Window, Any]]:
        """The sessions that times from the first to the last one may be in, or extend."""
        since, until = Window(first_ms, MS_MIN), Window(last_ms + self._gap_ms + 1, MS_MIN)
        before = next(self._map.items(None, since, reverse=True), None)
        found = [] if before is None or before[0].end_ms < first_ms else [before]
        return found + list(self._map.items(since, until))

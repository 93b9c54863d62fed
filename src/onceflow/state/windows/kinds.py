"""``Tumbling``, ``Hopping``, ``Sliding``, ``Session``: which windows there are, and which of them a time belongs to.

The records of a key are kept in panes. A pane is the largest stretch of time that lies as a whole inside or outside of
every window: so a record is added once, however many windows overlap. A window is merged from its panes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import duration_ms


class Window(NamedTuple):
    """A stretch of event time: ``start_ms <= time < end_ms``.

    Args:
        start_ms, end_ms: epoch milliseconds. The end is exclusive.
    """

    start_ms: int
    end_ms: int


class Hopping:
    """Windows of one size, a new one every so often; a record belongs to each that its time is in.

    They are those of Spark's ``window(time, size, every, start_time)``, aligned to 1970-01-01 00:00:00 UTC.

    Args:
        size: the length of a window, for example ``"5 minutes"``, or seconds.
        every: the time from the start of a window to that of the next one; at most ``size``.
        start_time: by how much the starts are shifted.

    Raises:
        ValueError: these are no such durations.
    """

    @checked_arguments
    def __init__(self, size: str | float, *, every: str | float, start_time: str | float = 0) -> None:
        self.size_ms, self.every_ms = _positive("size", size), _positive("every", every)
        if self.every_ms > self.size_ms:
            raise ValueError(f"every={every!r} is longer than size={size!r}: records in between would have no window")
        self._shift_ms = duration_ms(start_time) % self.every_ms
        self._pane_ms = math.gcd(self.size_ms, self.every_ms)
        self.merges = self._pane_ms < self.size_ms

    def __repr__(self) -> str:
        return f"Hopping({self.size_ms} ms, every {self.every_ms} ms, start_time {self._shift_ms} ms)"

    def late_before_ms(self, watermark_ms: int) -> int:
        """The end of the last closed window. A record before it belongs to a closed window."""
        return self._floor(watermark_ms - self.size_ms, self.every_ms) + self.size_ms

    def pane(self, time_ms: int) -> int:
        """The start of the pane that a time belongs to."""
        return self._floor(time_ms, self._pane_ms)

    def next_end(self, panes: Sequence[int], done_ms: int | None = None) -> int:
        """The earliest end, after ``done_ms``, of a window with one of the panes.

        Args:
            panes: their starts in ascending order; those of `forgotten` are no longer among them.
        """
        return self._end_after(panes[0] if done_ms is None else max(panes[0], done_ms))

    def closed(self, panes: Sequence[int], from_ms: int, until_ms: int) -> Iterator[Window]:
        """The windows with panes that end from ``from_ms`` to ``until_ms`` (inclusive), in the order of their ends."""
        end, at = self._end_after(from_ms - 1), 0
        while True:
            at = bisect_left(panes, end - self.size_ms, at)
            if at == len(panes):
                return
            end = max(end, self._end_after(panes[at]))
            if end > until_ms:
                return
            yield Window(end - self.size_ms, end)
            end += self.every_ms

    def forgotten(self, panes: Sequence[int], done_ms: int) -> int:
        """How many of the panes are needed no more when the windows up to this end have been emitted."""
        return bisect_left(panes, done_ms - self.size_ms + 1, key=lambda pane: self._floor(pane, self.every_ms))

    def changed(self, panes: Sequence[int], touched: Collection[int]) -> Iterator[Window]:
        """The windows whose content changes when these panes do, in the order of their ends."""
        ends: set[int] = set()
        for pane in touched:
            first = self._end_after(pane)
            ends.update(range(first, self._floor(pane, self.every_ms) + self.size_ms + 1, self.every_ms))
        return (Window(end - self.size_ms, end) for end in sorted(ends))

    @property
    def reach_ms(self) -> int:
        """How far from a pane others may be that share a window with it."""
        return self.size_ms

    def _floor(self, time_ms: int, step_ms: int) -> int:
        return (time_ms - self._shift_ms) // step_ms * step_ms + self._shift_ms

    def _end_after(self, time_ms: int) -> int:
        """The earliest end of a window after a time."""
        return self._floor(time_ms - self.size_ms, self.every_ms) + self.every_ms + self.size_ms


class Tumbling(Hopping):
    """Windows of one size, one after the other; a record belongs to exactly one.

    They are those of Spark's ``window(time, size)``, aligned to 1970-01-01 00:00:00 UTC.

    Args:
        size: the length of a window, for example ``"1 minute"``, or seconds.
        start_time: by how much the starts are shifted.

    Raises:
        ValueError: these are no such durations.
    """

    @checked_arguments
    def __init__(self, size: str | float, *, start_time: str | float = 0) -> None:
        super().__init__(size, every=size, start_time=start_time)


class Sliding:
    """A window for each different set of records of a key that are at most ``size`` apart.

    They are those of Kafka Streams' ``SlidingWindows``: for each time with a record, the window that ends with it, and
    the one that begins one millisecond after it, if there are records in that. A window contains its first and its
    last millisecond, ``size`` apart; so ``end_ms`` is ``start_ms`` plus size plus 1.

    Args:
        size: the largest difference between the times of two records of a window, for example ``"5 minutes"``.

    Raises:
        ValueError: this is no such duration.
    """

    merges = True

    @checked_arguments
    def __init__(self, size: str | float) -> None:
        self.size_ms = _positive("size", size)

    def __repr__(self) -> str:
        return f"Sliding({self.size_ms} ms)"

    def late_before_ms(self, watermark_ms: int) -> int:
        return watermark_ms

    def pane(self, time_ms: int) -> int:
        return time_ms

    def next_end(self, panes: Sequence[int], done_ms: int | None = None) -> int:
        first = 0 if done_ms is None else bisect_left(panes, done_ms)
        ends = [panes[0] + self.size_ms + 2] if first else []
        return min([*ends, *(pane + 1 for pane in panes[first : first + 1])])

    def closed(self, panes: Sequence[int], from_ms: int, until_ms: int) -> Iterator[Window]:
        return (window for window in self._all(panes) if from_ms <= window.end_ms <= until_ms)

    def forgotten(self, panes: Sequence[int], done_ms: int) -> int:
        # A pane is not in the window that begins after it, but without the pane it would be unknown.
        return bisect_left(panes, done_ms - self.size_ms - 1)

    def changed(self, panes: Sequence[int], touched: Collection[int]) -> Iterator[Window]:
        times = sorted(touched)
        for window in self._all(panes):
            at = bisect_left(times, window.start_ms - 1)  # of the window after a new pane, the records are not new
            if at < len(times) and times[at] < window.end_ms:
                yield window

    @property
    def reach_ms(self) -> int:
        return self.size_ms + 1

    def _all(self, panes: Sequence[int]) -> Iterator[Window]:
        """In the order of their ends."""
        size_ms = self.size_ms
        ending = (Window(pane - size_ms, pane + 1) for pane in panes)
        after = (
            Window(pane + 1, pane + size_ms + 2)
            for pane, following in pairwise(panes)
            if following <= pane + size_ms + 1
        )
        last = None
        for window in heapq.merge(ending, after, key=lambda window: window.end_ms):
            if window != last:  # the window that begins after one pane may end with another
                yield window
            last = window


class Session:
    """Windows that end when a key had no record for a while; each key has its own.

    They are those of Spark's ``session_window(time, gap)``: a session begins with its first record and ends ``gap``
    after its last one. Two records that are exactly ``gap`` apart are in one session.

    Args:
        gap: how long there must be no record, for example ``"30 seconds"``.

    Raises:
        ValueError: this is no such duration.
    """

    merges = True

    @checked_arguments
    def __init__(self, gap: str | float) -> None:
        self.gap_ms = _positive("gap", gap)

    def __repr__(self) -> str:
        return f"Session({self.gap_ms} ms)"

    def late_before_ms(self, watermark_ms: int) -> int:
        """The watermark: an earlier record could extend a session that is closed."""
        return watermark_ms


Kind = Hopping | Sliding | Session


def _positive(name: str, duration: str | float) -> int:
    milliseconds = duration_ms(duration)
    if milliseconds < 1:
        raise ValueError(f"{name}={duration!r} is too short: a window has at least a millisecond")
    return milliseconds

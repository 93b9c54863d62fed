"""Over how many partitions the rows of a table are spread, as marks in its topic say (`state.local.move_marks`)."""

from __future__ import annotations

import threading

#: A partition that is current so long after the mark of another one, and has none, had one: it is compacted away. A
#: transaction that is committed becomes visible in all partitions within milliseconds, unless a broker is down.
_EXPECTED_MS = 60_000


class Layout:
    """What is known of a topic, for all of its copies together. Any thread may use it.

    Attributes:
        partitions: the rows are spread over so many since they were moved; 0: nothing says so.
        since_ms: when they were moved, epoch milliseconds on the clock of who moved them.
    """

    def __init__(self) -> None:
        self.partitions = self.since_ms = 0
        self._lock = threading.Lock()

    def hear(self, partitions: int, since_ms: int) -> bool:
        """Somebody has seen a mark. Returns whether it is news."""
        with self._lock:
            if partitions <= self.partitions:
                return False
            self.since_ms = since_ms
            self.partitions = partitions
            return True

    def is_complete(self, moved: int, current_ms: int | None) -> bool:
        """Whether a copy has all of its rows.

        Args:
            moved: the number of partitions in the last mark that it has read to the end.
            current_ms: when it last contained everything that was committed; None: never.
        """
        return moved >= self.partitions or (current_ms is not None and current_ms > self.since_ms + _EXPECTED_MS)

"""Merges a range from several instances, in the order of keys, with at most a page of each in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

Rows = list[tuple[bytes, bytes]]


@dataclass
class Part:
    """The rest of a range in partitions that one instance is asked for together.

    Args:
        low, high: the range that was not read yet.
        rows: what was read, and not returned yet, in the order of the range.
        done: whether nothing is left to read.
    """

    partitions: tuple[int, ...]
    low: bytes
    high: bytes | None
    rows: Rows = field(default_factory=list)
    done: bool = False

    def filled(self, rows: Rows, done: bool, *, reverse: bool) -> Part:
        """The same part after its next rows were read."""
        if done or not rows:
            return replace(self, rows=rows, done=True)
        last = rows[-1][0]
        if reverse:
            return replace(self, rows=rows, high=last)
        return replace(self, rows=rows, low=last + b"\0")


async def merged(
    parts: Sequence[Part], refill: Callable[[Part], Awaitable[list[Part]]], *, reverse: bool
) -> AsyncIterator[Rows]:
    """Pages of rows in the order of keys. A key that several parts have is returned several times.

    Args:
        refill: reads the next rows of a part that has none; the answer may be several parts.
    """
    left = list(parts)
    while left:
        ready: list[Part] = []
        for part in left:
            ready += [part] if part.rows or part.done else await refill(part)
        left = [part for part in ready if part.rows]
        open_ends = [part.rows[-1][0] for part in left if not part.done]
        page: Rows = []
        for part in left:
            # Up to here no part can have a row that was not read yet.
            bound = (max if reverse else min)(open_ends) if open_ends else None
            cut = len(part.rows) if bound is None else _cut(part.rows, bound, reverse)
            page += part.rows[:cut]
            part.rows = part.rows[cut:]
        if len(left) > 1:
            page.sort(key=itemgetter(0), reverse=reverse)
        left = [part for part in left if part.rows or not part.done]
        if page:
            yield page


def _cut(rows: Rows, bound: bytes, reverse: bool) -> int:
    """How many of the rows come before a key, or are of this key."""
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        key = rows[middle][0]
        if (key >= bound) if reverse else (key <= bound):
            low = middle + 1
        else:
            high = middle
    return low

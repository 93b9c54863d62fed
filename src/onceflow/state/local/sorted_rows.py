"""Row columns in the order of their keys: sorted, and merged from several parts.

A store that is written in the order of its keys takes a part of the time, and its file is half as large: each page is
written once, and is full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.local.row_columns import RowColumns


def sorted_rows(parts: Sequence[RowColumns]) -> RowColumns:
    """The rows of all parts in the order of their keys. Of several rows of a key, the last one is left."""
    keys, rows = (pa.concat_arrays(column) for column in list(zip(*parts, strict=True))[:2])
    order = pc.array_sort_indices(keys)  # equal keys stay in their order
    keys = keys.take(order)
    last = pc.not_equal(keys[1:], keys[:-1])
    if pc.all(last, min_count=0).as_py():
        return RowColumns(keys, rows.take(order))
    last = pa.concat_arrays([last, pa.array([True])])
    return RowColumns(keys.filter(last), rows.take(order.filter(last)))


def merged(parts: Iterable[Iterator[RowColumns]]) -> Iterator[RowColumns]:
    """The rows of all parts in the order of their keys, block by block, so that few blocks are in memory.

    Args:
        parts: blocks with rows, sorted by `sorted_rows`. Of several rows of a key, that of the last part is left.
    """
    heads = {at: _Head(blocks) for at, blocks in enumerate(parts)}
    while heads := {at: head for at, head in heads.items() if head.block is not None}:
        # What the next blocks have is behind the last keys of these.
        bound = min(head.last for head in heads.values())
        taken = [found for head in heads.values() if (found := head.take(bound)) is not None]
        yield taken[0] if len(taken) == 1 else sorted_rows(taken)


class _Head:
    """The next block of a part."""

    def __init__(self, blocks: Iterator[RowColumns]) -> None:
        self._blocks = blocks
        self._follow(next(blocks, None))

    def take(self, bound: bytes) -> RowColumns | None:
        """Remove and return the rows whose keys are not behind this one; None: there are none."""
        assert self.block is not None
        keys, rows, _ = self.block
        count = len(keys) if self.last <= bound else bisect_right(keys, bound, key=lambda each: each.as_py())
        self._follow(next(self._blocks, None) if count == len(keys) else RowColumns(keys[count:], rows[count:]))
        return RowColumns(keys[:count], rows[:count]) if count else None

    def _follow(self, block: RowColumns | None) -> None:
        self.block = block
        self.last: bytes = b"" if block is None else block.keys[-1].as_py()

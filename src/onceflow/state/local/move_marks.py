"""Marks in the topic of a table, around the rows that a repartitioning moves.

``onceflow table repartition`` moves rows in one transaction, but a reader sees each partition by itself: for a moment
it may have the tombstone of a row in the old partition, and not yet the row in the new one. So in every partition the
first and the last record of that transaction say so. Between them, nothing is a change of a value.

A mark is a tombstone of a key that no row has, so other readers pass over it. Compaction keeps marks as long
as tombstones (``delete.retention.ms``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.local.format import Chunk, Columns

if TYPE_CHECKING:
    from onceflow.protocol.record_columns import RecordColumns

MARK_KEY = b"onceflow.repartition"
MARK_HEADER = "onceflow.repartition"
_BEGIN, _END = b"begin", b"end"
_KEY = pa.scalar(MARK_KEY, pa.binary())


class Mark(NamedTuple):
    """One mark.

    Args:
        row: of the record in its chunk.
        partitions: how many partitions the rows are spread over afterwards.
        ended: whether all rows of this partition have moved that move.
        moved_ms: when they moved, epoch milliseconds.
    """

    row: int
    partitions: int
    ended: bool
    moved_ms: int


class Moves(NamedTuple):
    """Which records of a partition only move rows, so that they change no value.

    Args:
        moving: whether those that follow do.
        still: rows of the last chunk that do.
    """

    moving: bool = False
    still: Collection[int] = ()

    def after(self, count: int, marks: Sequence[Mark]) -> Moves:
        """The same after the next chunk.

        Args:
            count: of its records. marks: among them.
        """
        if not marks:
            return Moves(self.moving, range(count) if self.moving else ())
        found: set[int] = set()
        since = 0 if self.moving else None
        for mark in marks:
            found.add(mark.row)
            if not mark.ended:
                since = mark.row if since is None else since
            elif since is not None:
                found.update(range(since, mark.row))
                since = None
        return Moves(since is not None, found if since is None else found.union(range(since, count)))


def mark_headers(partitions: int, moved_ms: int, *, ended: bool) -> list[tuple[str, bytes | None]]:
    """The headers of a mark."""
    return [(MARK_HEADER, b"%s %d %d" % (_END if ended else _BEGIN, partitions, moved_ms))]


def marks_of(chunk: Chunk | Columns) -> list[Mark]:
    """The marks among some records, in their order. Columns were read with their headers."""
    records: RecordColumns | None = getattr(chunk, "records", None)
    return _in_lists(cast(Chunk, chunk)) if records is None else _in_columns(records)


def _in_lists(chunk: Chunk) -> list[Mark]:
    if not chunk.headers or MARK_KEY not in chunk.keys:
        return []
    found = ((row, chunk.headers[row]) for row in sorted(chunk.headers) if chunk.keys[row] == MARK_KEY)
    return [mark for row, headers in found if (mark := _read(row, headers)) is not None]


def _in_columns(records: RecordColumns) -> list[Mark]:
    headers = records.headers
    if headers is None or headers.null_count == len(headers):
        return []
    found = pc.indices_nonzero(pc.fill_null(pc.equal(records.keys, _KEY), False)).to_pylist()
    pairs = ((row, [(each["key"], each["value"]) for each in headers[row].as_py() or ()]) for row in found)
    return [mark for row, each in pairs if (mark := _read(row, each)) is not None]


def _read(row: int, headers: Iterable[tuple[str, Any]]) -> Mark | None:
    """The mark that headers make; None: they make none."""
    for name, value in headers:
        if name == MARK_HEADER and value is not None:
            what, *numbers = value.split(b" ")
            if what in (_BEGIN, _END) and len(numbers) == 2 and all(each.isdigit() for each in numbers):
                return Mark(row, int(numbers[0]), what == _END, int(numbers[1]))
    return None

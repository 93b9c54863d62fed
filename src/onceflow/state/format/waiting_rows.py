"""Waiting rows: records of a join by time that wait for their partners.

Each is an entry of one of two maps of its key (``m`` rows), which has no other state. The entry's key begins with the
record's event time, so that a range of times is a range of row keys. The row is due when the watermark reaches the time
from which on no partner can come; see ``rows.py``. Its payload is a byte of marks and the record's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onceflow.state.format import rows
from onceflow.state.format.stamps import SIGN, time_cells

LEFT, RIGHT = b"onceflow.left", b"onceflow.right"
"""Names of the maps."""

MATCHED, TOMBSTONE = 1, 2
"""Marks: a partner was found; the record's value is null."""

ENTRY_BYTES = 24

_DUE_BYTES = 1 + 8  # flags and time, in front of the marks of a row that is due


class Waiting(NamedTuple):
    """Waiting rows of one side, as columns.

    Args:
        codes: for each row the number of its key.
        times: event times in epoch milliseconds.
        keys, rows: as they are in the store.
    """

    codes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    keys: list[bytes]
    rows: list[bytes]

    @property
    def values(self) -> list[bytes | None]:
        """The records' values."""
        return [value_of(row) for row in self.rows]

    def take(self, at: Sequence[int]) -> Waiting:
        """Some of the rows."""
        keys, found = ([column[each] for each in at] for column in (self.keys, self.rows))
        return Waiting(self.codes[at], self.times[at], keys, found)


def prefix(key: bytes, *, right: bool) -> bytes:
    """What the row keys of one side of a key begin with."""
    return rows.map_key(key, RIGHT if right else LEFT)


def entries(times: npt.NDArray[np.int64], now_ms: int, batch: int, first: int) -> list[bytes]:
    """Entry keys of records: their times, and numbers that make them unique.

    Args:
        now_ms: processing time of the batch. Its number alone is not enough: another flow that takes over the table
            begins to count anew.
        batch: the number of the batch. first: how many records this batch had in the partition before.
    """
    raw = np.empty((len(times), ENTRY_BYTES), np.uint8)
    raw[:, :8] = time_cells(times)
    raw[:, 8:16] = np.frombuffer(rows.time_bytes(now_ms), np.uint8)
    raw[:, 16:20] = np.frombuffer((batch & 0xFFFF_FFFF).to_bytes(4, "big"), np.uint8)
    raw[:, 20:] = np.arange(first, first + len(times), dtype=">u4").view(np.uint8).reshape(-1, 4)
    return _cut(raw)


def time_entries(times: npt.NDArray[np.int64]) -> list[bytes]:
    """Entry keys of records of which only the last one of each time is kept."""
    return _cut(time_cells(times))


def times_of(entry_keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """The event times in entry keys."""
    raw = np.frombuffer(b"".join([key[:8] for key in entry_keys]), ">u8")
    return (raw.astype(np.uint64) ^ SIGN).view(np.int64)


def packed(
    due_ms: npt.NDArray[np.int64] | None, marks: npt.NDArray[np.uint8], values: Sequence[bytes | None]
) -> list[bytes]:
    """Rows of records.

    Args:
        due_ms: when they are due; None: never.
        marks: `MATCHED`; `TOMBSTONE` is added where a value is null.
    """
    beginning = 1 if due_ms is None else _DUE_BYTES
    raw = np.zeros((len(values), beginning + 1), np.uint8)
    if due_ms is not None:
        raw[:, 0] = rows.IS_DUE
        raw[:, 1:9] = time_cells(due_ms)
    raw[:, beginning] = marks
    found = []
    for begin, value in zip(_cut(raw), values, strict=True):
        found.append(begin[:-1] + bytes((begin[-1] | TOMBSTONE,)) if value is None else begin + value)
    return found


def marks_of(row: bytes) -> int:
    """The marks of a row."""
    return row[_marks_at(row)]


def value_of(row: bytes) -> bytes | None:
    """The record's value."""
    at = _marks_at(row)
    return None if row[at] & TOMBSTONE else row[at + 1 :]


def matched(row: bytes) -> bytes:
    """The row, with the mark that a partner was found."""
    at = _marks_at(row)
    return row[:at] + bytes((row[at] | MATCHED,)) + row[at + 1 :]


def due_at(row: bytes, due_ms: int) -> bytes:
    """The row, due at another time."""
    return bytes((rows.IS_DUE,)) + rows.time_bytes(due_ms) + row[_marks_at(row) :]


def _marks_at(row: bytes) -> int:
    """Where the payload begins."""
    return _DUE_BYTES if row[0] & rows.IS_DUE else 1


def _cut(raw: npt.NDArray[np.uint8]) -> list[bytes]:
    width, whole = raw.shape[1], raw.tobytes()
    return [whole[at : at + width] for at in range(0, len(whole), width)]

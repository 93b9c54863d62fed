"""Rows of a store as columns.

Columns are sorted before they become Python objects (``sorted_rows.py``). Otherwise a restore would spend most of its
time on objects that are all over the memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

NOTHING = pa.scalar(b"", pa.binary())
TO_THE_END = (1 << 31) - 1  # Arrow cuts binary values to their end only if it is given (26.0)


class RowColumns(NamedTuple):
    """Row keys and rows, both binary; a null row deletes what the key has.

    Args:
        ignored: how many more records there were that no processor has written.
    """

    keys: pa.BinaryArray
    rows: pa.BinaryArray
    ignored: int = 0

    @property
    def nbytes(self) -> int:
        """What they take in memory, about."""
        return int(self.keys.nbytes + self.rows.nbytes)


def first_bytes(column: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The first byte of each payload, none of which is null or empty."""
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column)]
    return np.frombuffer(data, np.uint8)[starts]

"""Stamped rows: ids with a number each, which is a time or a place in a sequence.

A stamped row is a ``v`` row with the flag ``STAMPED``. Its payload is the stamp, as `serdes.LONG` writes it. A local
store keeps these rows in segments (``segments.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onceflow.state.format import rows

FLAGS = bytes((rows.STAMPED,))
ROW_BYTES = 9
SIGN = np.uint64(1 << 63)
_LOWEST = FLAGS + bytes(8)


def row_of(stamp: int) -> bytes:
    """The row of an id. Stamps are not negative, so that the order of their bytes is their own."""
    return FLAGS + stamp.to_bytes(8, "big")


def rows_of(stamps: npt.NDArray[np.int64]) -> list[bytes]:
    """The rows of many ids."""
    raw = np.full((len(stamps), ROW_BYTES), rows.STAMPED, dtype=np.uint8)
    raw[:, 1:] = stamps.astype(">i8").view(np.uint8).reshape(len(stamps), 8)
    whole = raw.tobytes()
    return [whole[at : at + ROW_BYTES] for at in range(0, len(whole), ROW_BYTES)]


def stamps_of(found: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """The stamps of rows; -1 where there is no row."""
    raw = b"".join([_MISSING if row is None else row for row in found])
    cells = np.frombuffer(raw, dtype=np.uint8).reshape(len(found), ROW_BYTES)
    stamps: npt.NDArray[np.int64] = np.ascontiguousarray(cells[:, 1:]).view(">i8").reshape(len(found)).astype(np.int64)
    return stamps


_MISSING = FLAGS + (-1).to_bytes(8, "big", signed=True)


def time_cells(times: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Signed times in eight bytes each, as `rows.time_bytes`: a row of the result for each."""
    return (times.view(np.uint64) ^ SIGN).astype(">u8").view(np.uint8).reshape(len(times), 8)


def from_value(value: bytes) -> bytes:
    """The row of a record of the table topic. One that this program has not written gets the lowest stamp, with which
    an id is soon deleted."""
    return FLAGS + value if len(value) == 8 and value[0] < 0x80 else _LOWEST

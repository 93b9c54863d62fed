"""Stamped rows: ids with a number each, which is a time or a place in a sequence, and can be found in its order.

A stamped row is a ``v`` row with the flag ``STAMPED``. Its payload is the stamp, as `serdes.LONG` writes it. Its index
has one row for up to `CHUNK_IDS` ids, not one for each: the ids of a write with similar stamps, under the greatest of
these stamps. So the index costs little to write. When an id is deleted or gets another stamp, its chunks do not change.
Whoever reads a chunk compares the stamps of its ids with those in the table, and then deletes the chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from zlib import adler32, crc32

import numpy as np
import numpy.typing as npt

from onceflow.state import rows

FLAGS = bytes((rows.STAMPED,))
ROW_BYTES = 9
CHUNK_IDS = 1_000
_LOWEST = FLAGS + bytes(8)
# It begins with a zero byte, as no row does that has an index row itself.
_HEAD = struct.Struct("<BI")
_CHECKSUM = struct.Struct(">II")


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


def from_value(value: bytes) -> bytes:
    """The row of a record of the table topic. One that this program has not written gets the lowest stamp, with which
    an id is soon deleted."""
    return FLAGS + value if len(value) == 8 and value[0] < 0x80 else _LOWEST


def index_of(changes: Iterable[tuple[bytes, bytes | None]]) -> dict[bytes, bytes]:
    """The index rows of the stamped rows among these changes."""
    stamped = [(row[1:], key) for key, row in changes if row is not None and row[:1] == FLAGS]
    stamped.sort(key=itemgetter(0))
    index = {}
    for start in range(0, len(stamped), CHUNK_IDS):
        part = stamped[start : start + CHUNK_IDS]
        keys = [key for _, key in part]
        chunk = b"".join((_HEAD.pack(0, len(keys)), np.fromiter(map(len, keys), "<u2").tobytes(), *keys))
        # Other ids with the same greatest stamp have another chunk, which must not take the place of this one.
        index[rows.STAMP_INDEX + part[-1][0] + _CHECKSUM.pack(crc32(chunk), adler32(chunk))] = chunk
    return index


def keys_of(chunk: bytes) -> list[bytes]:
    """The row keys in an index row."""
    _, count = _HEAD.unpack_from(chunk)
    at = _HEAD.size + 2 * count
    lengths = np.frombuffer(chunk, "<u2", count, _HEAD.size).tolist()
    return [chunk[start:end] for start, end in pairwise(accumulate(lengths, initial=at))]


def before(stamp: int) -> tuple[bytes, bytes]:
    """The range of index keys whose ids all have smaller stamps."""
    return rows.STAMP_INDEX, rows.STAMP_INDEX + max(0, stamp).to_bytes(8, "big")


def greatest(scan: Iterator[tuple[bytes, bytes]]) -> int | None:
    """The greatest stamp, from a scan of the index in reverse order; None: there are no ids."""
    for key, _ in scan:
        return int.from_bytes(key[1:9], "big")
    return None

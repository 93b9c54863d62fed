"""Reads the numbers and payloads in the records of a batch, one field of all records at a time.

Only one Python loop runs over the records: it follows the lengths, because only they show where the next record begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.protocol.varints import VARLONG_BYTES_MAX

Int64s = npt.NDArray[np.int64]


def follow(data: bytes, position: int, end: int, count: int, begins: list[int]) -> None:
    """Append the position of each record, found by the loop over the lengths.

    Raises:
        ValueError: the last record does not end at ``end``. Whether the others end where the next one begins, the
            caller has to check: it is cheaper for all records at once.
    """
    add = begins.append
    for _ in range(count):
        add(position)
        byte = data[position]
        if byte < 0x80:
            position += (byte >> 1) + 1
            continue
        second = data[position + 1]
        if second < 0x80:
            position += ((byte & 0x7F) >> 1) + (second << 6) + 2
        else:
            length, position = varint(data, position)
            position += length
    if position != end:
        raise ValueError("the lengths of the records do not add up")


def varints(view: npt.NDArray[np.uint8], at: Int64s) -> tuple[Int64s, Int64s]:
    """The signed numbers at these positions, and the positions after them."""
    byte = view.take(at)
    after = at + 1
    bits = int(np.bitwise_or.reduce(byte))
    if bits < 0x80:  # numbers of one byte
        value = (byte >> 1).astype(np.int64)
        if bits & 1:
            value ^= -(byte & 1).astype(np.int64)
        return value, after
    code = (byte & 0x7F).astype(np.uint64)
    more = np.flatnonzero(byte >= 0x80)
    shift = 7
    while len(more):
        if shift >= 7 * VARLONG_BYTES_MAX:
            raise ValueError("a number has too many bytes")
        # Usually the number has another byte in all records or in none. Then no rows have to be selected.
        rows: Any = slice(None) if len(more) == len(at) else more
        byte = view.take(after[rows])
        code[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        after[rows] += 1
        more = more[byte >= 0x80]
        shift += 7
    sign = code & np.uint64(1)
    code >>= np.uint64(1)
    value = code.view(np.int64)
    if bits & 1:
        value ^= -sign.view(np.int64)
    return value, after


def spans(view: npt.NDArray[np.uint8], at: Int64s) -> tuple[Int64s, Int64s, Any]:
    """Begin and end of the payloads whose lengths are at these positions, and which of them are null (None: none)."""
    length, start = varints(view, at)
    nulls = None
    if length.min() < 0:
        nulls = length == -1
        length[nulls] = 0
    if length.min() < 0 or length.max() > len(view):
        raise ValueError("a payload has an impossible length")
    return start, start + length, nulls


def cut(buffer: pa.Buffer, starts: Int64s, ends: Int64s, nulls: Any) -> pa.BinaryArray:
    """A copy of ``buffer[start:end]`` for every row. The buffer becomes a binary column of payload, gap, payload, gap,
    ..., from which the payloads are taken. It must be smaller than 2 GiB."""
    bounds = np.empty(2 * len(starts), dtype=np.int32)
    bounds[::2] = starts
    bounds[1::2] = ends
    column = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), buffer])
    rows = np.arange(0, len(bounds), 2)
    return column.take(pa.array(rows, mask=nulls))


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The signed number at this position, and the position after it."""
    byte = data[position]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position + 1
    code = byte & 0x7F
    shift = 7
    while True:
        position += 1
        byte = data[position]
        code |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (code >> 1) ^ -(code & 1), position + 1
        shift += 7
        if shift >= 7 * VARLONG_BYTES_MAX:
            raise ValueError("a number has too many bytes")

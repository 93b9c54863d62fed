"""Encodes whole columns of numbers as varints, as Kafka's record format requires.

A Kafka record consists of zigzag varints with the payload bytes between them (KIP-98, "Message Format"). This
module encodes numpy columns of such numbers without a Python loop over the records.
Varints are always minimal. Readers accept padded ones, but log compaction encodes records again, which would change
their sizes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints: TypeAlias = "npt.NDArray[np.integer[Any]]"
Field: TypeAlias = "Ints | int"
"""One number per record, already zigzag encoded: a column, or a single number for all records."""

VARINT_BYTES_MAX = 5
VARLONG_BYTES_MAX = 10


def zigzag(value: int) -> int:
    """Zigzag code of one signed number: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return -2 * value - 1 if value < 0 else 2 * value


def zigzag_column(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Zigzag codes of a column of signed 64-bit numbers."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def width(code: int) -> int:
    """Bytes that the varint of a zigzag code takes."""
    return max(1, (code.bit_length() + 6) // 7)


def encode(value: int) -> bytes:
    """Zigzag varint of one signed number."""
    code = zigzag(value)
    out = bytearray()
    while code >= 0x80:
        out.append(code & 0x7F | 0x80)
        code >>= 7
    out.append(code)
    return bytes(out)


def widths(codes: Field) -> Field:
    """Bytes that each varint takes; a single number if all take the same."""
    if isinstance(codes, int):
        return width(codes)
    if len(codes) == 0:
        return 1
    widest, narrowest = width(int(codes.max())), width(int(codes.min()))
    if widest == narrowest:
        return widest
    out = np.full(len(codes), narrowest, dtype=np.int64)
    for extra in range(narrowest, widest):
        # A column of 32-bit codes is never compared with 2**35, which would overflow: its widest varint has 5 bytes,
        # so the last step is 2**28.
        out += codes >= codes.dtype.type(1 << (7 * extra))
    return out


def interleave(fields: list[Field], count: int) -> Any:
    """A binary scalar, or a column of ``count`` rows. Each row has the varints of all ``fields``, in order.

    Args:
        fields: zigzag codes: unsigned columns, or single numbers for all rows.
        count: number of rows.

    Returns:
        ``pa.BinaryScalar`` if all rows are equal, else ``pa.BinaryArray``.
    """
    if all(isinstance(codes, int) for codes in fields):
        return pa.scalar(b"".join(_shared(codes) for codes in fields if isinstance(codes, int)), pa.binary())
    field_widths = [widths(codes) for codes in fields]
    spans = [wide if isinstance(wide, int) else int(wide.max()) for wide in field_widths]
    matrix = np.empty((count, sum(spans)), dtype=np.uint8)
    ragged = any(not isinstance(wide, int) for wide in field_widths)
    used = np.ones(matrix.shape, dtype=np.bool_) if ragged else None
    column = 0
    for codes, wide, span in zip(fields, field_widths, spans, strict=True):
        if isinstance(codes, int):
            matrix[:, column : column + span] = np.frombuffer(_shared(codes), dtype=np.uint8)
        else:
            _write(matrix, column, codes, wide, span, used)
        column += span
    if used is None:
        return fixed_column(matrix.reshape(-1), matrix.shape[1], count)
    total = np.zeros(count, dtype=np.int32)
    for wide in field_widths:
        total += wide
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(total, out=offsets[1:])
    return binary_column(matrix[used], offsets)


def _shared(code: int) -> bytes:
    return encode(-(code + 1) // 2 if code & 1 else code // 2)


def _write(matrix: Any, column: int, codes: Ints, wide: Field, span: int, used: Any) -> None:
    """Write one field of every row into the columns ``[column, column + span)`` of the byte matrix."""
    for step in range(span):
        # The cast to uint8 keeps the low eight bits. The highest of these is replaced by the continuation bit.
        part = (codes >> codes.dtype.type(7 * step)).astype(np.uint8)
        if isinstance(wide, int):
            matrix[:, column + step] = part & 0x7F if step == span - 1 else part | 0x80
        else:
            matrix[:, column + step] = (part & 0x7F) | ((wide > step + 1).astype(np.uint8) << 7)
            if used is not None and step:
                used[:, column + step] = wide > step


def fixed_column(data: npt.NDArray[np.uint8], row_bytes: int, count: int) -> Any:
    """A binary column whose rows all take ``row_bytes``."""
    return binary_column(data, np.arange(0, (count + 1) * row_bytes, row_bytes, dtype=np.int32))


def binary_column(data: Any, offsets: npt.NDArray[np.int32]) -> Any:
    """A binary column over existing memory, without a copy: row i is ``data[offsets[i]:offsets[i + 1]]``."""
    body = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), body])

"""The rows of a store that records of a changelog become, as columns in the order of the log.

Columns are sorted before they become Python objects (``sorted_rows.py``). Otherwise a restore would spend most of its
time on objects that are all over the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state import rows, stamps
from onceflow.state.local.format import TIMER_ROW_BYTES, Chunk, is_internal_row, packed_values

_NOTHING = pa.scalar(b"", pa.binary())
_VALUE, _PLAIN, _STAMPED = (pa.scalar(each, pa.binary()) for each in (rows.VALUE, b"\0", stamps.FLAGS))


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


def table_rows(chunk: Chunk) -> RowColumns:
    """The rows of records of the table topic."""
    if chunk.headers:
        return _value_rows(chunk, _binary(packed_values(chunk)))
    return _value_rows(chunk, _with_prefix(_PLAIN, _binary(chunk.values)))


def stamped_rows(chunk: Chunk) -> RowColumns:
    """As `table_rows`, for a table of stamped rows."""
    values = _binary(chunk.values)
    if pc.all(pc.equal(pc.binary_length(values), 8), min_count=0).as_py():
        first = np.frombuffer(values.buffers()[2] or b"", np.uint8)[: 8 * len(values) : 8]
        if not (first & 0x80).any():
            return _value_rows(chunk, _with_prefix(_STAMPED, values))
    return _value_rows(chunk, _binary([None if each is None else stamps.from_value(each) for each in chunk.values]))


def internal_rows(chunk: Chunk) -> RowColumns:
    """As `table_rows`, for the internal topic."""
    keys, found = _binary(chunk.keys), _binary(chunk.values)
    if _are_internal(keys, found):
        return RowColumns(keys, found)
    fit = [
        (key, row)
        for key, row in zip(chunk.keys, chunk.values, strict=True)
        if key is not None and is_internal_row(key, row)
    ]
    keys, found = _binary([key for key, _ in fit]), _binary([row for _, row in fit])
    return RowColumns(keys, found, len(chunk.keys) - len(fit))


def _are_internal(keys: pa.BinaryArray, found: pa.BinaryArray) -> bool:
    """Whether all of these are rows of a processor, without expiry and version: as `is_internal_row`, for most."""
    if not len(keys) or keys.null_count or found.null_count:
        return False
    key_bytes, row_bytes = (pc.binary_length(each).to_numpy() for each in (keys, found))
    if not key_bytes.all() or key_bytes.max() > rows.ROW_KEY_BYTES_MAX or not row_bytes.all() or _first(found).any():
        return False
    kinds = _first(keys)
    fits = (kinds == rows.MAP[0]) | ((kinds == rows.TIMER[0]) & (row_bytes == TIMER_ROW_BYTES))
    return bool(fits.all())


def _first(column: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The first byte of each payload, none of which is null or empty. The column is no slice."""
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int32)[: len(column)]
    return np.frombuffer(data, np.uint8)[starts]


def _value_rows(chunk: Chunk, found: pa.BinaryArray) -> RowColumns:
    keys = _binary(chunk.keys)
    fits = pc.fill_null(pc.less(pc.binary_length(keys), rows.ROW_KEY_BYTES_MAX), False)
    ignored = len(keys) - int(pc.sum(fits, min_count=0).as_py())
    if ignored:
        keys, found = keys.filter(fits), found.filter(fits)
    return RowColumns(_with_prefix(_VALUE, keys), found, ignored)


def _with_prefix(prefix: pa.Scalar, column: pa.BinaryArray) -> pa.BinaryArray:
    return pc.binary_join_element_wise(prefix, column, _NOTHING)


def _binary(payloads: Sequence[bytes | None]) -> pa.BinaryArray:
    return pa.array(payloads, pa.binary())

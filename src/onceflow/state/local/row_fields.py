"""What rows of a store begin with (flags, expiry, version), and the index rows that follow from it, in columns.

``rows.py`` has the same for one row: `rows.from_record` and `rows.new_index`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.format import rows
from onceflow.state.format.stamps import time_cells
from onceflow.state.local.row_columns import NOTHING, TO_THE_END, RowColumns, first_bytes

_JSON_BEGINS = pa.array(rows.JSON_BEGINS, pa.binary())
_TIMED = ((rows.EXPIRY_INDEX, rows.HAS_EXPIRY), (rows.DUE_INDEX, rows.IS_DUE))
_FIELDS = 1 + 8 + 4  # the most that a row begins with: flags, expiry, version


def fields_of(headers: pa.ListArray) -> pa.BinaryArray:
    """What the rows of records with these headers begin with: flags, and what they say that there is.

    Args:
        headers: of type `protocol.record_columns.HEADERS`.
    """
    count = len(headers)
    expiry, expires = _numbers(headers, rows.EXPIRES_HEADER, lambda number: True)
    version, _ = _numbers(headers, rows.VERSION_HEADER, rows.is_version)
    versioned = version != 0
    fields = np.empty((count, _FIELDS), np.uint8)
    fields[:, 0] = expires * rows.HAS_EXPIRY + versioned * rows.HAS_VERSION
    fields[:, 1:9] = time_cells(expiry)
    fields[:, 9:] = version.astype(">u4").view(np.uint8).reshape(count, 4)
    used = np.ones((count, _FIELDS), np.bool_)
    used[:, 1:9], used[:, 9:] = expires[:, None], versioned[:, None]
    bounds = np.zeros(count + 1, np.int32)
    np.cumsum(1 + 8 * expires + 4 * versioned, out=bounds[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(fields[used])])


def _numbers(
    headers: pa.ListArray, name: str, fits: Callable[[int], bool]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The number in the last valid header of this name, and whether there is one. Numbers that do not fit are 0."""
    numbers, found = np.zeros(len(headers), np.int64), np.zeros(len(headers), np.bool_)
    names, values = headers.flatten().flatten()
    at = pc.equal(names, name)
    # Many records have the same value, so each value is read once.
    distinct = values.filter(at).dictionary_encode()
    parsed = [rows.number_in(raw) for raw in distinct.dictionary.to_pylist()]
    if parsed:
        valid = np.array([number is not None for number in parsed] + [False])
        as_read = np.array([number if number is not None and fits(number) else 0 for number in parsed] + [0])
        code = pc.fill_null(distinct.indices, len(parsed)).to_numpy()
        parents = pc.list_parent_indices(headers).filter(at).to_numpy()[valid[code]]
        numbers[parents], found[parents] = as_read[code[valid[code]]], True  # of equal places, the last one is kept
    return numbers, found


def index_of(block: RowColumns) -> RowColumns | None:
    """The index rows of ``v``, ``m`` and ``t`` rows that are all new, in no order. None: they have none."""
    if not len(block.keys):
        return None
    kinds, flags = first_bytes(block.keys), first_bytes(block.rows)
    timers = kinds == rows.TIMER[0]
    timed = [(kind, (flags & flag).astype(np.bool_) & ~timers) for kind, flag in _TIMED]
    found = []
    if timers.any():
        keys, found_rows = _chosen(block, timers)
        if (flags[timers] != 0).any():  # no processor writes such timers
            items = list(rows.new_index(zip(keys.to_pylist(), found_rows.to_pylist(), strict=True)))
            found.append(pa.array([key for key, _ in items], pa.binary()))
        else:
            names = pc.binary_slice(keys, 1, TO_THE_END)
            found.append(_joined(rows.TIMER_INDEX, pc.binary_slice(found_rows, 1, 10), names))
    for kind, chosen in timed:
        if chosen.any():
            keys, found_rows = _chosen(block, chosen)
            found.append(_joined(kind, pc.binary_slice(found_rows, 1, 9), keys))
    found += _json_index(block, kinds == rows.VALUE[0])
    if not found:
        return None
    keys = pa.concat_arrays(found)
    return RowColumns(keys, pa.repeat(NOTHING, len(keys)))


def _json_index(block: RowColumns, of_values: npt.NDArray[np.bool_]) -> list[pa.BinaryArray]:
    """The keys of `rows.json_index`, if there are any."""
    if not of_values.any():
        return []
    begins = pc.is_in(pc.binary_slice(block.keys, 1, 2), value_set=_JSON_BEGINS).to_numpy(zero_copy_only=False)
    keys = block.keys.filter(pa.array(begins & of_values)).to_pylist()
    index = [each for each in map(rows.json_index, keys) if each is not None]
    return [pa.array(index, pa.binary())] if index else []


def _chosen(block: RowColumns, which: npt.NDArray[np.bool_]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    if which.all():
        return block.keys, block.rows
    chosen = pa.array(which)
    return block.keys.filter(chosen), block.rows.filter(chosen)


def _joined(kind: bytes, *parts: pa.BinaryArray) -> pa.BinaryArray:
    return pc.binary_join_element_wise(pa.scalar(kind, pa.binary()), *parts, NOTHING)

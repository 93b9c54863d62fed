"""The rows of a store that records of a changelog become, as columns in the order of the log."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.format import rows, stamps
from onceflow.state.local.format import TIMER_ROW_BYTES, is_internal_row
from onceflow.state.local.row_columns import NOTHING, RowColumns, first_bytes
from onceflow.state.local.row_fields import fields_of

_VALUE, _PLAIN, _STAMPED = (pa.scalar(each, pa.binary()) for each in (rows.VALUE, b"\0", stamps.FLAGS))


def table_rows(records: RecordColumns) -> RowColumns:
    """The rows of records of the table topic, which were read with their headers."""
    headers = records.headers
    if headers is None or headers.null_count == len(headers):
        return _value_rows(records, _with_prefix(_PLAIN, records.values))
    return _value_rows(records, pc.binary_join_element_wise(fields_of(headers), records.values, NOTHING))


def stamped_rows(records: RecordColumns) -> RowColumns:
    """As `table_rows`, for a table of stamped rows."""
    values = records.values
    present = values.drop_null()
    if pc.all(pc.equal(pc.binary_length(present), 8), min_count=0).as_py() and not (first_bytes(present) & 0x80).any():
        return _value_rows(records, _with_prefix(_STAMPED, values))
    return _value_rows(
        records, _binary([None if each is None else stamps.from_value(each) for each in values.to_pylist()])
    )


def internal_rows(records: RecordColumns) -> RowColumns:
    """As `table_rows`, for the internal topic."""
    keys, found = records.keys, records.values
    if _are_internal(keys, found):
        return RowColumns(keys, found)
    fit = [
        (key, row)
        for key, row in zip(keys.to_pylist(), found.to_pylist(), strict=True)
        if key is not None and is_internal_row(key, row)
    ]
    keys, found = _binary([key for key, _ in fit]), _binary([row for _, row in fit])
    return RowColumns(keys, found, len(records) - len(fit))


def _are_internal(keys: pa.BinaryArray, found: pa.BinaryArray) -> bool:
    """Whether all of these are rows of a processor, without expiry and version: as `is_internal_row`, for most."""
    if not len(keys) or keys.null_count or found.null_count:
        return False
    key_bytes, row_bytes = (pc.binary_length(each).to_numpy() for each in (keys, found))
    if not key_bytes.all() or not row_bytes.all() or first_bytes(found).any():
        return False
    kinds = first_bytes(keys)
    fits = (kinds == rows.MAP[0]) | ((kinds == rows.TIMER[0]) & (row_bytes == TIMER_ROW_BYTES))
    return bool(fits.all())


def _value_rows(records: RecordColumns, found: pa.BinaryArray) -> RowColumns:
    keys = records.keys
    ignored = keys.null_count
    if ignored:
        fits = keys.is_valid()
        keys, found = keys.filter(fits), found.filter(fits)
    return RowColumns(_with_prefix(_VALUE, keys), found, ignored)


def _with_prefix(prefix: pa.Scalar, column: pa.BinaryArray) -> pa.BinaryArray:
    return pc.binary_join_element_wise(prefix, column, NOTHING)


def _binary(payloads: Sequence[bytes | None]) -> pa.BinaryArray:
    return pa.array(payloads, pa.binary())

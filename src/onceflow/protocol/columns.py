"""The Arrow columns of one call of the encoder, with the sizes that the record format needs.

Arrow columns may be slices, may have nulls, and have 32- or 64-bit offsets. The classes here hide these differences.
Nothing in this module copies payload bytes, except for 64-bit columns with nulls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import BadRecordError, SchemaError
from onceflow.protocol import varints
from onceflow.protocol.varints import binary_column

NULL_LENGTH = varints.zigzag(-1)
"""The encoded length of a null key or value."""
_NOTHING = pa.scalar(b"", pa.binary())


class Payload:
    """A binary or string column, with the length of every row."""

    def __init__(self, array: Any) -> None:
        kind = array.type
        if pa.types.is_string(kind):
            array = array.cast(pa.binary())
        elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)):
            array = _as_binary(array)
        self.array = array
        self.large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        length = pc.binary_length(array)
        self.nulls = array.null_count > 0
        if self.nulls:
            length = length.fill_null(0)
        self.lengths: npt.NDArray[np.int64] = length.to_numpy().astype(np.int64)
        self.codes: npt.NDArray[np.uint32] = (2 * self.lengths).astype(np.uint32)
        if self.nulls:
            self.codes[array.is_null().to_numpy(zero_copy_only=False)] = NULL_LENGTH

    def slice(self, start: int, stop: int) -> Any:
        """The rows ``[start, stop)`` as a ``pa.BinaryArray`` with 32-bit offsets that shares the data."""
        part = self.array.slice(start, stop - start)
        if not self.large:
            return part
        # A cast fails for rows beyond the first 2 GiB of the column, so the offsets are shifted instead.
        _validity, raw, data = part.buffers()
        where = np.frombuffer(raw, dtype=np.int64)[part.offset : part.offset + len(part) + 1]
        shifted = (where - where[0]).astype(np.int32)
        view = binary_column((data or pa.py_buffer(b"")).slice(int(where[0])), shifted)
        if not part.null_count:
            return view
        return pc.if_else(part.is_valid(), view, pa.scalar(None, pa.binary()))


def _as_binary(array: Any) -> Any:
    """Convert fixed-size, view and dictionary columns to binary. Raise for a column that is neither bytes nor text."""
    try:
        return array.cast(pa.large_binary())
    except pa.ArrowException:
        raise SchemaError(
            f"a column of type {array.type} cannot be a Kafka key, value or header",
            next_step="cast it to string or binary, for example with to_json or to_avro.",
        ) from None


class Headers:
    """The header column: the number of headers of each record, and the encoded bytes of all headers."""

    def __init__(self, headers: Any, count: int) -> None:
        counts = pc.list_value_length(headers).fill_null(0).to_numpy().astype(np.int64)
        self.counts = (2 * counts).astype(np.uint32)
        self.first = np.zeros(count + 1, dtype=np.int64)  # index of each record's first header
        np.cumsum(counts, out=self.first[1:])
        flat = headers.flatten()  # leaves out the entries of null lists
        names, contents = pc.struct_field(flat, 0), pc.struct_field(flat, 1)
        if flat.null_count or names.null_count:
            bad = pc.index(names.is_null(), True).as_py()
            record = int(np.searchsorted(self.first, bad, side="right")) - 1
            refused = BadRecordError(
                "a header has a null key",
                next_step="give every header a key, or filter the null ones out of the headers column.",
                detail=f"record {record} of the rows given",
            )
            refused.row = record
            raise refused
        self.names, self.contents = Payload(names), Payload(contents)
        each = self.names.lengths + self.contents.lengths
        each = each + varints.widths(self.names.codes) + varints.widths(self.contents.codes)
        run = np.zeros(len(each) + 1, dtype=np.int64)
        np.cumsum(each, out=run[1:])
        self.lengths: npt.NDArray[np.int64] = np.diff(run[self.first])

    def slice(self, start: int, stop: int) -> Any:
        """The encoded headers of each record, without their count, as a ``pa.BinaryArray``."""
        low, high = int(self.first[start]), int(self.first[stop])
        if low == high:
            return binary_column(b"", np.zeros(stop - start + 1, dtype=np.int32))
        names, contents = self.names.codes[low:high], self.contents.codes[low:high]
        data, offsets = join(
            [
                varints.interleave([names], high - low),
                self.names.slice(low, high),
                varints.interleave([contents], high - low),
                self.contents.slice(low, high),
            ]
        )
        # The headers of one record are adjacent already, so only the row boundaries change.
        return binary_column(data, offsets[self.first[start : stop + 1] - low])


class Columns:
    """Key, value and header columns of one call, with the sizes that the record format needs."""

    def __init__(self, keys: Any, values: Any, headers: Any, count: int) -> None:
        self.count = count
        self.keys = None if keys is None else Payload(keys)
        self.values = None if values is None else Payload(values)
        self.headers = None if headers is None or headers.null_count == count else Headers(headers, count)

    def payload_bytes(self) -> npt.NDArray[np.int64]:
        """Exact bytes of each record from the key length on."""
        total = np.zeros(self.count, dtype=np.int64)
        for payload in (self.keys, self.values):
            total += 1 if payload is None else payload.lengths + varints.widths(payload.codes)
        total += 1 if self.headers is None else self.headers.lengths + varints.widths(self.headers.counts)
        return total


def join(columns: list[Any]) -> tuple[Any, npt.NDArray[np.int32]]:
    """Join binary columns row by row. Returns data and offsets of the result. A null counts as empty."""
    array = pc.binary_join_element_wise(*columns, _NOTHING, null_handling="replace", null_replacement="")
    _, raw, data = array.buffers()
    offsets = np.frombuffer(raw, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    return data.slice(low, high - low), offsets - low if low else offsets

"""Decodes record batches into Arrow columns, without a Python object for each record.

Producers with a short linger write batches of a few records, and a response has such batches of many partitions. So the
records of many batches are decoded together: what a call of numpy or Arrow costs is paid once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.protocol.decode import DECODING_ERRORS, HeaderList, Rows, Section
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.record_fields import Int64s, cut, follow, spans, varints

"""The type of the headers, as Spark's Kafka source has them."""

CREATE_TIME, LOG_APPEND_TIME = 0, 1
"""Timestamp types, by the numbers that Kafka's Java client and Spark give them."""

_FEW_RECORDS = 60  # below this number, the loop over the records is faster
_JOINED_BYTES = 1_000_000  # sections of different buffers are copied into one, up to this size
_PASS_BYTES = 2**31 - 1  # Arrow's offsets are int32
_MANY_HEADERS = 32  # records with more headers are decoded by the loop


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records as columns; row ``i`` of each belongs to the same record.

    Args:
        keys, values: binary, with nulls. They may be slices of larger arrays.
        offsets: of the records in their partition.
        timestamps_ms: epoch milliseconds; the broker's time if the topic has ``LogAppendTime``.
        timestamp_types: `CREATE_TIME` or `LOG_APPEND_TIME`, int32.
        headers: of type `HEADERS`; null for a record without headers. None: they were not asked for.
    """

    keys: pa.BinaryArray
    values: pa.BinaryArray
    offsets: Int64s
    timestamps_ms: Int64s
    timestamp_types: npt.NDArray[np.int32]
    headers: pa.ListArray | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def slice(self, low: int, high: int) -> RecordColumns:
        """The rows from ``low`` to before ``high``, without copying them."""
        if low == 0 and high == len(self.offsets):
            return self
        return RecordColumns(
            self.keys.slice(low, high - low),
            self.values.slice(low, high - low),
            self.offsets[low:high],
            self.timestamps_ms[low:high],
            self.timestamp_types[low:high],
            None if self.headers is None else self.headers.slice(low, high - low),
        )

    @classmethod
    def joined(cls, parts: Sequence[RecordColumns], *, headers: bool) -> RecordColumns:
        """The rows of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return _no_records(headers)
        return cls(
            pa.concat_arrays([part.keys for part in parts]),
            pa.concat_arrays([part.values for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.timestamps_ms for part in parts]),
            np.concatenate([part.timestamp_types for part in parts]),
            pa.concat_arrays([part.headers for part in parts]) if headers else None,
        )


def decode_columns(groups: Sequence[Sequence[Section]], *, headers: bool = False) -> list[RecordColumns]:
    """Decode the records of each group of sections. All groups are decoded together, so many small ones cost little.

    Args:
        headers: whether the headers are wanted. If not, they are still checked.

    Raises:
        ProtocolError: records do not follow the format.
    """
    parts: list[list[RecordColumns]] = [[] for _ in groups]
    places = [(at, section) for at, group in enumerate(groups) for section in group if section.batch.count]
    for together in _passes(places):
        columns = _decode([section for _, section in together], headers=headers)
        low = high = 0
        group = together[0][0]
        for at, section in together:
            if at != group:
                parts[group].append(columns.slice(low, high))
                group, low = at, high
            high += section.batch.count
        parts[group].append(columns.slice(low, high))
    return [RecordColumns.joined(each, headers=headers) for each in parts]


def _passes(places: list[tuple[int, Section]]) -> Iterator[list[tuple[int, Section]]]:
    """Consecutive sections to be decoded at once: those of one buffer, or small ones of several."""
    together: list[tuple[int, Section]] = []
    size, joined = 0, False
    for place in places:
        section = place[1]
        nbytes = section.end - section.start
        joins = joined or (bool(together) and section.data is not together[-1][1].data)
        if together and size + nbytes > (_JOINED_BYTES if joins else _PASS_BYTES):
            yield together
            together, size, joins = [], 0, False
        together.append(place)
        size, joined = size + nbytes, joins
    if together:
        yield together


def _decode(sections: list[Section], *, headers: bool) -> RecordColumns:
    """Decode sections with records in them. If that fails, one by one: so the error names the batch that is broken."""
    try:
        if sum(section.batch.count for section in sections) >= _FEW_RECORDS:
            columns = _by_column(sections, headers=headers)
            if columns is not None:
                return columns
        return _by_loop(sections, headers=headers)
    except DECODING_ERRORS as error:
        if len(sections) == 1:
            raise sections[0].batch.broken(str(error)) from error
    return RecordColumns.joined([_decode([section], headers=headers) for section in sections], headers=headers)


# ---- by column -----------------------------------------------------------------------------------------


def _by_column(sections: list[Section], *, headers: bool) -> RecordColumns | None:
    """None: some records have very many headers."""
    data, bounds = _one_buffer(sections)
    view = np.frombuffer(data, dtype=np.uint8)
    positions: list[int] = []
    for section, (start, end) in zip(sections, bounds, strict=True):
        follow(data, start, end, section.batch.count, positions)
    begins = np.array(positions, dtype=np.int64)
    counts = np.array([section.batch.count for section in sections])
    stops = np.empty_like(begins)
    stops[:-1] = begins[1:]
    stops[np.cumsum(counts) - 1] = [end for _, end in bounds]
    length, at = varints(view, begins)
    if (at + length != stops).any():
        raise ValueError("the lengths of the records do not add up")
    stamps, at = varints(view, at + 1)  # skips the attributes, which are not used
    deltas, at = varints(view, at)
    key_start, key_end, no_key = spans(view, at)
    value_start, value_end, no_value = spans(view, key_end)
    header_counts, at = varints(view, value_end)
    listed = None
    if header_counts.any():
        if header_counts.max() > _MANY_HEADERS:
            return None
        found = _Headers(view, header_counts, at, stops)
        listed = found.listed(data) if headers else None
    elif (at != stops).any():
        raise ValueError("a record does not end where its length says")
    elif headers:
        listed = pa.nulls(len(begins), HEADERS)
    buffer = pa.py_buffer(data)
    keys = cut(buffer, key_start, key_end, no_key)
    values = cut(buffer, value_start, value_end, no_value)
    return _placed(sections, counts, deltas, stamps, keys, values, listed)


def _one_buffer(sections: list[Section]) -> tuple[bytes, list[tuple[int, int]]]:
    """A buffer that has all sections, and where they begin and end in it."""
    data = sections[0].data
    if all(section.data is data for section in sections):
        return data, [(section.start, section.end) for section in sections]
    bounds, end = [], 0
    for section in sections:
        start, end = end, end + section.end - section.start
        bounds.append((start, end))
    return b"".join([memoryview(section.data)[section.start : section.end] for section in sections]), bounds


class _Headers:
    """Where the headers of the records are: first the first header of every record that has one, then the second ones,
    and so on.

    Raises:
        ValueError: headers do not follow the format, or a record does not end behind its last one.
    """

    def __init__(self, view: npt.NDArray[np.uint8], counts: Int64s, at: Int64s, stops: Int64s) -> None:
        if counts.min() < 0:
            raise ValueError("a record has an impossible number of headers")
        self._counts = counts
        self._ends = np.cumsum(counts)
        total = int(self._ends[-1])
        self._names = np.empty(total, np.int64), np.empty(total, np.int64)
        self._contents = np.empty(total, np.int64), np.empty(total, np.int64)
        self._nulls = np.zeros(total, np.bool_)
        at = at.copy()
        rows, index = np.flatnonzero(counts), 0
        while len(rows):
            slots = self._ends[rows] - counts[rows] + index
            start, end, nulls = spans(view, at[rows])
            if nulls is not None and nulls.any():
                raise ValueError("a header has a null key")
            self._names[0][slots], self._names[1][slots] = start, end
            start, end, nulls = spans(view, end)
            self._contents[0][slots], self._contents[1][slots] = start, end
            if nulls is not None:
                self._nulls[slots] = nulls
            at[rows] = end
            index += 1
            rows = rows[counts[rows] > index]
        if (at != stops).any():
            raise ValueError("a record does not end where its length says")

    def listed(self, data: bytes) -> pa.ListArray:
        """The headers as a column."""
        buffer = pa.py_buffer(data)
        names = _text(cut(buffer, *self._names, None))
        contents = cut(buffer, *self._contents, self._nulls)
        return _lists(self._counts, self._ends, names, contents)


def _text(names: pa.BinaryArray) -> pa.StringArray:
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:  # as other clients do
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())


def _lists(counts: Any, ends: Any, names: pa.StringArray, contents: pa.BinaryArray) -> pa.ListArray:
    """Lists of these numbers of headers. An empty one becomes null, as in Spark's Kafka source."""
    bounds = np.zeros(len(counts) + 1, np.int32)
    bounds[1:] = ends
    offsets = pa.array(bounds, mask=np.append(counts == 0, False))
    structs = pa.StructArray.from_arrays([names, contents], fields=list(HEADERS.value_type))
    return pa.ListArray.from_arrays(offsets, structs)


def _placed(
    sections: list[Section],
    counts: npt.NDArray[np.int64],
    deltas: Int64s,
    stamps: Int64s,
    keys: pa.BinaryArray,
    values: pa.BinaryArray,
    headers: pa.ListArray | None,
) -> RecordColumns:
    """Offsets and times from what the records have, relative to their batches."""
    batches = [section.batch for section in sections]
    if len(batches) == 1:
        deltas += batches[0].base_offset
        stamps += batches[0].base_timestamp_ms
    else:
        deltas += np.repeat([batch.base_offset for batch in batches], counts)
        stamps += np.repeat([batch.base_timestamp_ms for batch in batches], counts)
    types = np.zeros(len(deltas), np.int32)
    if any(batch.append_time for batch in batches):
        types = np.repeat(np.array([batch.append_time for batch in batches], np.int32), counts)
        appended = np.repeat([batch.max_timestamp_ms for batch in batches], counts)
        stamps = np.where(types == LOG_APPEND_TIME, appended, stamps)
    return RecordColumns(keys, values, deltas, stamps, types, headers)


# ---- by loop -------------------------------------------------------------------------------------------


def _by_loop(sections: list[Section], *, headers: bool) -> RecordColumns:
    rows = Rows()
    for batch, data, start, end in sections:
        rows.add(data, start, end, batch.count)
    return _placed(
        sections,
        np.array([section.batch.count for section in sections]),
        np.array(rows.deltas, np.int64),
        np.array(rows.stamps, np.int64),
        pa.array(rows.keys, pa.binary()),
        pa.array(rows.values, pa.binary()),
        _header_column(rows.headers, len(rows.deltas)) if headers else None,
    )


def _header_column(found: dict[int, HeaderList], count: int) -> pa.ListArray:
    if not found:
        return pa.nulls(count, HEADERS)
    counts = np.zeros(count, np.int64)
    for row, listed in found.items():
        counts[row] = len(listed)
    headers = [header for listed in found.values() for header in listed]  # rows are in order
    names = pa.array([name for name, _ in headers], pa.string())
    contents = pa.array([content for _, content in headers], pa.binary())
    return _lists(counts, np.cumsum(counts), names, contents)


def _no_records(headers: bool) -> RecordColumns:
    none, nothing = np.zeros(0, np.int64), pa.array([], pa.binary())
    listed = pa.array([], HEADERS) if headers else None
    return RecordColumns(nothing, nothing, none, none, np.zeros(0, np.int32), listed)

"""Decodes record batches (version 2) into keys and values: the reverse of ``batches.py``.

For speed, the fields of all records are read one at a time (``record_fields.py``), and Arrow copies keys and values out
of the records section. For batches with few records this would be slower, so these are decoded by a plain loop.

Keys and values are copies, so they do not keep the buffer alive that they were read from. ``record_columns.py`` decodes
into Arrow columns instead of lists.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from onceflow.errors import ProtocolError, counted
from onceflow.protocol.batches import HEADER_BYTES
from onceflow.protocol.compression import decompress
from onceflow.protocol.record_fields import Int64s, cut, follow, spans, varint, varints

Payloads = list[bytes | None]
HeaderList = list[tuple[str, bytes | None]]

COMMIT, ABORT = "commit", "abort"
"""The outcome that a transaction marker states."""

# baseOffset int64, batchLength int32, partitionLeaderEpoch int32, magic int8, crc uint32, attributes int16,
# lastOffsetDelta int32, baseTimestamp int64, maxTimestamp int64, producerId int64, producerEpoch int16,
# baseSequence int32, record count int32.
_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH = struct.Struct(">i")
_LENGTH_AT, _LENGTH_FROM, _MAGIC_AT, _COVERED_FROM = 8, 12, 16, 21
_COMPRESSION, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
_MARKERS = {0: ABORT, 1: COMMIT}
_RECORD_BYTES_MIN = 7
_SECTION_BYTES_MAX = 2**31 - 1  # Arrow's offsets are int32
_FEW_RECORDS = 80  # below this number, the loop is faster than dozens of numpy calls
DECODING_ERRORS = (IndexError, ValueError, OverflowError, pa.ArrowException)
"""What the functions raise that decode records, if these do not follow the format."""
_BROKEN = "a record batch does not follow the format"
_REPORT = "read the records with another client; if it can, report this to onceflow with the broker's version."


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """One batch as columns; row ``i`` of each belongs to the same record.

    Args:
        base_offset: the offset to which offset deltas are added. Compaction may have removed its record.
        last_offset: last offset of the batch as it was written. Compaction may have removed its record, too.
        producer_id: -1 for a batch of a producer that is neither idempotent nor transactional.
        producer_epoch: epoch of that producer.
        transactional: whether the records are part of a transaction.
        control: whether this is a control batch, with a transaction marker instead of data.
        marker: ``COMMIT`` or ``ABORT``; None if it is no control batch, or one of another type.
        offsets: ascending.
        timestamps_ms: epoch milliseconds; the broker's time if the topic has ``LogAppendTime``.
        keys, values: payloads; None for null.
        headers: by row, only for records that have headers. Records may share one list, so do not change it.
        nbytes: size of the records after decompression.
    """

    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    transactional: bool
    control: bool
    marker: str | None
    offsets: Int64s
    timestamps_ms: Int64s
    keys: Payloads
    values: Payloads
    headers: dict[int, HeaderList]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch whose header was read and whose checksum was verified, but whose records were not decoded.

    Args:
        leader_epoch: of the leader that has appended it.
    """

    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    count: int
    data: bytes = field(repr=False)  # the whole buffer
    start: int  # start and end of the records section in ``data``
    end: int
    leader_epoch: int = -1

    @property
    def transactional(self) -> bool:
        """Whether the records are part of a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def control(self) -> bool:
        """Whether it is a control batch: a transaction marker or other control record instead of data."""
        return bool(self.attributes & _CONTROL)

    @property
    def append_time(self) -> bool:
        """Whether the time of all records is `max_timestamp_ms`, when the broker appended them (``LogAppendTime``)."""
        return bool(self.attributes & _APPEND_TIME)

    def section(self) -> Section:
        """Decompress the records.

        Raises:
            ProtocolError: they cannot be decompressed, or are too few bytes for so many records.
        """
        data, start, end = self.data, self.start, self.end
        code = self.attributes & _COMPRESSION
        if code and self.count:
            data = decompress(code, memoryview(data)[start:end])
            start, end = 0, len(data)
        if not 0 <= self.count <= (end - start) // _RECORD_BYTES_MIN or end - start > _SECTION_BYTES_MAX:
            raise self.broken(f"{counted(self.count, 'record')} in {end - start} bytes")
        return Section(self, data, start, end)

    def decode(self) -> DecodedBatch:
        """Decode the records.

        Raises:
            ProtocolError: they do not follow the format, or cannot be decompressed.
        """
        _, data, start, end = self.section()
        try:
            columns = (_few if self.count < _FEW_RECORDS else _many)(data, start, end, self.count)
        except DECODING_ERRORS as error:
            raise self.broken(str(error)) from error
        deltas, stamps, keys, values, headers = columns
        if self.append_time:
            stamps = np.full(self.count, self.max_timestamp_ms, dtype=np.int64)
        else:
            stamps += self.base_timestamp_ms
        deltas += self.base_offset
        marker = None
        if self.control and keys and keys[0] is not None and len(keys[0]) >= 4:
            marker = _MARKERS.get(int.from_bytes(keys[0][2:4], "big"))  # version int16, type int16
        who = (self.producer_id, self.producer_epoch, self.transactional, self.control, marker)
        columns = (deltas, stamps, keys, values, headers)
        return DecodedBatch(self.base_offset, self.last_offset, *who, *columns, nbytes=end - start)

    def broken(self, detail: str) -> ProtocolError:
        """The error for records that do not follow the format."""
        return ProtocolError(_BROKEN, detail=f"base offset {self.base_offset}: {detail}", next_step=_REPORT)


class Section(NamedTuple):
    """The records of a batch, decompressed but not decoded: ``data[start:end]``."""

    batch: RawBatch
    data: bytes
    start: int
    end: int


def decode_batches(buffer: Any) -> Iterator[DecodedBatch]:
    """Decode the batches of a Fetch response or of a segment file, one at a time.

    Args:
        buffer: any object that supports the buffer protocol; ``bytes`` are not copied as a whole. Brokers truncate
            the last batch at the requested size, so an incomplete batch at the end is left out.

    Raises:
        ProtocolError: a batch fails its checksum, does not follow the format, or has an older one (magic 0 or 1).
    """
    for raw in split_batches(buffer):
        yield raw.decode()


def split_batches(buffer: Any) -> Iterator[RawBatch]:
    """As `decode_batches`, but the records are not decoded. Checksums are verified."""
    data = buffer if isinstance(buffer, bytes) else bytes(buffer)
    whole = pa.py_buffer(data)  # the checksum function does not accept a memoryview
    position = 0
    while len(data) - position > _MAGIC_AT:
        magic = data[position + _MAGIC_AT]
        if magic != 2:
            raise ProtocolError(
                f"records are in message format {magic}; onceflow reads format 2, that of Kafka 0.11 and later",
                detail=f"at byte {position} of {len(data)}",
                next_step="copy the records to a new topic, with a newer client and broker.",
            )
        (length,) = _LENGTH.unpack_from(data, position + _LENGTH_AT)
        end = position + _LENGTH_FROM + length
        if length < HEADER_BYTES - _LENGTH_FROM:
            raise ProtocolError(_BROKEN, detail=f"length {length} at byte {position} of {len(data)}", next_step=_REPORT)
        if end > len(data):
            return
        base, _, leader_epoch, _, crc, attributes, last_delta, first_ms, max_ms, producer_id, epoch, _, count = (
            _HEADER.unpack_from(data, position)
        )
        found = google_crc32c.value(whole.slice(position + _COVERED_FROM, end - position - _COVERED_FROM))
        if found != crc:
            raise ProtocolError(
                "a record batch fails its checksum: it was damaged in the network or on the broker's disk",
                detail=f"base offset {base}, {length} bytes, checksum {found:#010x} instead of {crc:#010x}",
                next_step="read again; if it fails at the same offset, check the broker's log and disk.",
            )
        yield RawBatch(
            base,
            base + last_delta,
            producer_id,
            epoch,
            attributes,
            first_ms,
            max_ms,
            count,
            data,
            position + HEADER_BYTES,
            end,
            leader_epoch,
        )
        position = end


# ---- many records: by column -------------------------------------------------------------------------


def _many(
    data: bytes, start: int, end: int, count: int
) -> tuple[Int64s, Int64s, Payloads, Payloads, dict[int, HeaderList]]:
    """Offset deltas, timestamp deltas, keys, values and headers of a records section."""
    view = np.frombuffer(data, dtype=np.uint8)
    buffer = pa.py_buffer(data)
    positions: list[int] = []
    follow(data, start, end, count, positions)
    begins = np.array(positions, dtype=np.int64)
    length, at = varints(view, begins)
    stops = at + length
    if stops[-1] != end or (stops[:-1] != begins[1:]).any():
        raise ValueError("the lengths of the records do not add up")
    stamps, at = varints(view, at + 1)  # skips the attributes, which are not used
    deltas, at = varints(view, at)
    key_start, key_end, no_key = spans(view, at)
    value_start, value_end, no_value = spans(view, key_end)
    header_count, at = varints(view, value_end)
    with_headers = np.flatnonzero(header_count)
    if (at > stops).any() or int(np.count_nonzero(at != stops)) > len(with_headers):
        raise ValueError("a record does not end where its length says")
    keys = _listed(cut(buffer, key_start, key_end, no_key))
    values = _listed(cut(buffer, value_start, value_end, no_value))
    headers: dict[int, HeaderList] = {}
    if len(with_headers):
        counts = header_count[with_headers].tolist()
        raw = _listed(cut(buffer, at[with_headers], stops[with_headers], None))
        headers = _headers(with_headers.tolist(), counts, raw)
    return deltas, stamps, keys, values, headers


def _listed(payloads: pa.BinaryArray) -> Payloads:
    listed: Payloads = payloads.to_numpy(zero_copy_only=False).tolist()
    return listed


def _headers(rows: list[int], counts: list[int], raw: Payloads) -> dict[int, HeaderList]:
    """Decode headers. All records of a batch often have the same headers, so equal bytes are decoded only once."""
    known: dict[tuple[int, bytes | None], HeaderList] = {}
    found = {}
    for row, count, section in zip(rows, counts, raw, strict=True):
        listed = known.get((count, section))
        if listed is None:
            data = section or b""
            listed, end = _header_list(data, 0, len(data), count)
            if end != len(data):
                raise ValueError("a record does not end where its length says")
            known[count, section] = listed
        found[row] = listed
    return found


# ---- few records: one by one -------------------------------------------------------------------------


def _few(
    data: bytes, position: int, end: int, count: int
) -> tuple[Int64s, Int64s, Payloads, Payloads, dict[int, HeaderList]]:
    """As `_many`, record by record."""
    rows = Rows()
    rows.add(data, position, end, count)
    deltas, stamps = np.array(rows.deltas, dtype=np.int64), np.array(rows.stamps, dtype=np.int64)
    return deltas, stamps, rows.keys, rows.values, rows.headers


class Rows:
    """Records that are decoded one by one: offset deltas, timestamp deltas, keys, values and headers."""

    __slots__ = ("deltas", "headers", "keys", "stamps", "values")

    def __init__(self) -> None:
        self.deltas: list[int] = []
        self.stamps: list[int] = []
        self.keys: Payloads = []
        self.values: Payloads = []
        self.headers: dict[int, HeaderList] = {}

    def add(self, data: bytes, position: int, end: int, count: int) -> None:
        """Append the records of a section."""
        deltas, stamps, keys, values, headers = self.deltas, self.stamps, self.keys, self.values, self.headers
        for row in range(len(deltas), len(deltas) + count):
            length, position = varint(data, position)
            stop = position + length
            if length < 0 or stop > end:
                raise ValueError("the lengths of the records do not add up")
            stamp, position = varint(data, position + 1)
            delta, position = varint(data, position)
            stamps.append(stamp)
            deltas.append(delta)
            key, position = _payload(data, position, stop)
            keys.append(key)
            value, position = _payload(data, position, stop)
            values.append(value)
            header_count, position = varint(data, position)
            if header_count:
                headers[row], position = _header_list(data, position, stop, header_count)
            if position != stop:
                raise ValueError("a record does not end where its length says")
        if position != end:
            raise ValueError("the lengths of the records do not add up")


def _header_list(data: bytes, position: int, end: int, count: int) -> tuple[HeaderList, int]:
    if not 0 <= count <= end - position:
        raise ValueError(f"{count} headers in {end - position} bytes")
    listed: HeaderList = []
    for _ in range(count):
        name, position = _payload(data, position, end)
        content, position = _payload(data, position, end)
        if name is None:
            raise ValueError("a header has a null key")
        listed.append((name.decode(errors="replace"), content))
    return listed, position


def _payload(data: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    length, position = varint(data, position)
    if length < 0:
        if length < -1:
            raise ValueError("a payload has an impossible length")
        return None, position
    stop = position + length
    if stop > end:
        raise ValueError("a record does not end where its length says")
    return data[position:stop], stop

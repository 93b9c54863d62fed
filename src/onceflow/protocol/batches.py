"""Encodes Arrow columns as Kafka record batches (version 2).

Layout (KIP-98, "Message Format"): a header of 61 bytes, then the records. A record is

    length | attributes 0 | timestamp delta | offset delta | key length | key | value length | value | headers

with zigzag varints for every number. Adjacent numbers between two payloads are encoded as one small binary column.
Arrow joins ``numbers + key + number + value + number + headers`` row by row in C++. The data buffer of the joined
column *is* the records section: the CRC is computed over it and the socket sends it, without another copy.

A batch is about 1 MB, because brokers accept no more by default. Much smaller batches are slow (each has a fixed
cost of about 0.1 ms). Much larger ones no longer fit in the CPU caches and in the memory that Arrow's allocator keeps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import BadRecordError, OptionError
from onceflow.protocol import varints
from onceflow.protocol.columns import NULL_LENGTH, Columns, join
from onceflow.protocol.compression import CODES, PRODUCER, UNCOMPRESSED, compress, compression_code
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.varints import Field

HEADER_BYTES = 61
TARGET_BATCH_BYTES = 1_000_000
_TRANSACTIONAL = 0x10
# baseOffset int64, batchLength int32, partitionLeaderEpoch int32, magic int8, crc uint32.
_BEFORE_CRC = struct.Struct(">qiibI")
# attributes int16, lastOffsetDelta int32, baseTimestamp int64, maxTimestamp int64, producerId int64,
# producerEpoch int16, baseSequence int32, record count int32.
_AFTER_CRC = struct.Struct(">hiqqqhii")
_BATCH_LENGTH_FROM = 12  # batchLength counts what follows itself.
_FEW_RECORDS = 80  # up to here, a loop over the records is faster
# More than all numbers of a record take: its length, its attributes, and six more, of which one is a timestamp.
_NUMBERS_MAX = 1 + 6 * varints.VARINT_BYTES_MAX + varints.VARLONG_BYTES_MAX
_number = lru_cache(maxsize=1 << 14)(varints.encode)


@dataclass(frozen=True, slots=True)
class ProducerIdAndEpoch:
    """The producer of a batch.

    Args:
        producer_id: from InitProducerId; -1 for a plain batch, which the broker does not deduplicate.
        producer_epoch: from InitProducerId; ignored in a plain batch.
        transactional: whether the batch belongs to a transaction; ignored in a plain batch.
    """

    producer_id: int
    producer_epoch: int
    transactional: bool = True

    @property
    def idempotent(self) -> bool:
        """Whether batches have a producer id, an epoch and sequence numbers."""
        return self.producer_id >= 0


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One batch, ready to be sent as ``head`` then ``body`` without joining them."""

    head: bytes
    body: memoryview
    count: int

    @property
    def nbytes(self) -> int:
        """Encoded size in bytes."""
        return len(self.head) + len(self.body)


def next_sequence(sequence: int, count: int) -> int:
    """The next sequence number after ``count`` records that begin at ``sequence``. It wraps from 2**31 - 1 to 0, as
    in Kafka's ``DefaultRecordBatch.incrementSequence``."""
    return (sequence + count) & 0x7FFF_FFFF


def sizes(keys: Any, values: Any, headers: Any) -> npt.NDArray[np.int64]:
    """Upper bound of the encoded size of each record, for any timestamp and any position in a batch.

    Args:
        keys, values, headers: as for `encode_batches`; if all are None the result is empty.
    """
    count = _row_count(keys, values, headers)
    if not count:
        return np.zeros(0, dtype=np.int64)
    max_head = 1 + varints.VARLONG_BYTES_MAX + varints.VARINT_BYTES_MAX
    payload: npt.NDArray[np.int64] = Columns(keys, values, headers, count).payload_bytes()
    return payload + (max_head + varints.VARINT_BYTES_MAX)


def encode_batches(
    keys: Any,
    values: Any,
    headers: Any,
    timestamps_ms: Any,
    *,
    identity: ProducerIdAndEpoch,
    base_sequence: int,
    compression: str = "none",
    max_batch_bytes: int,
    default_timestamp_ms: int,
    target_batch_bytes: int = TARGET_BATCH_BYTES,
    stored: str = PRODUCER,
    large_with: Sequence[str] = (),
) -> Iterator[EncodedBatch]:
    """Encode rows of Arrow columns as record batches, in order. Each batch is encoded when the iterator reaches it.

    All arguments and records are checked before the first batch, so an unusable record means that nothing is yielded.

    Args:
        keys, values: binary or string arrays of equal length, nulls allowed; None for all null.
        headers: list array of ``struct<key: string, value: binary>``; a null list, or None, means no headers.
        timestamps_ms: int64 array of epoch milliseconds; ``default_timestamp_ms`` is used for null, None and
            negative ones.
        identity: the transaction's producer id and epoch.
        base_sequence: sequence number of the first record; the following batches continue it.
        compression: none, gzip, snappy, lz4 or zstd. A batch that would not become smaller is left uncompressed.
        max_batch_bytes: the topic's ``max.message.bytes``; no batch exceeds it. A record that exceeds it before
            compression is compressed in a batch of its own, as brokers judge what they store.
        stored: how brokers compress what they store (``compression.type`` of the topic). ``uncompressed``: the size
            before compression counts. Another codec: the size with that codec, too, as far as it is the same here.
        large_with: without ``compression``: codecs that are tried for a record that is too large.
        default_timestamp_ms: epoch milliseconds for rows without timestamp.
        target_batch_bytes: size at which a batch ends, before compression.

    Raises:
        BadRecordError: a record exceeds ``max_batch_bytes``, also when it is compressed, has a null header key or a
            negative timestamp.
        OptionError: unknown compression, or columns of different length.
    """
    code = compression_code(compression)
    count = _row_count(keys, values, headers, timestamps_ms)
    limit = min(target_batch_bytes, max_batch_bytes) - HEADER_BYTES
    if 0 < count <= _FEW_RECORDS and not code and _are_plain(keys, values, headers, limit - count * _NUMBERS_MAX):
        body, *stamps = _few(keys, values, _timestamps(timestamps_ms, default_timestamp_ms, count), count)
        return iter((_finish(pa.py_buffer(body), 0, identity, base_sequence, count, *stamps),))
    columns = Columns(keys, values, headers, count)
    times = _timestamps(timestamps_ms, default_timestamp_ms, count)
    codecs = [compression] if code else large_with
    large = _large_records(columns, times, codecs, max_batch_bytes, stored)
    bound = columns.payload_bytes() + _number_bytes_max(times, count)
    ends = np.cumsum(bound)

    def batches() -> Iterator[EncodedBatch]:
        start, sequence = 0, base_sequence
        while start < count:
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
            if start in large:  # it is too large to be in a batch with others
                body, first_ms, codec = large.pop(start)
                yield _finish(body, CODES[codec], identity, sequence, 1, first_ms, first_ms)
            else:
                records, first_ms, max_ms = _records(columns, times, start, stop)
                body, attributes = records, 0
                if code:
                    packed = compress(compression, records)
                    if packed.size < records.size:
                        body, attributes = packed, code
                yield _finish(body, attributes, identity, sequence, stop - start, first_ms, max_ms)
            sequence = next_sequence(sequence, stop - start)
            start = stop

    return batches()


def encode_single(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    *,
    timestamp_ms: int,
    identity: ProducerIdAndEpoch,
    base_sequence: int,
) -> EncodedBatch:
    """Encode a batch of one record, without Arrow. Used for the progress record."""
    number = varints.encode
    fields = [b"\x00", number(0), number(0)]
    for payload in (key, value):
        fields += [number(-1)] if payload is None else [number(len(payload)), payload]
    listed = list(headers)
    fields.append(number(len(listed)))
    for name, payload in listed:
        raw = name.encode()
        fields += [number(len(raw)), raw]
        fields += [number(-1)] if payload is None else [number(len(payload)), payload]
    record = b"".join(fields)
    body = pa.py_buffer(number(len(record)) + record)
    return _finish(body, 0, identity, base_sequence, 1, timestamp_ms, timestamp_ms)


def _finish(
    body: Any, attributes: int, identity: ProducerIdAndEpoch, sequence: int, count: int, first_ms: int, max_ms: int
) -> EncodedBatch:
    """Add the batch header of 61 bytes to a records section (``pa.Buffer``)."""
    producer_id, epoch = (identity.producer_id, identity.producer_epoch) if identity.idempotent else (-1, -1)
    if identity.idempotent and identity.transactional:
        attributes |= _TRANSACTIONAL
    after = _AFTER_CRC.pack(
        attributes,
        count - 1,
        first_ms,
        max_ms,
        producer_id,
        epoch,
        sequence if identity.idempotent else -1,
        count,
    )
    crc = google_crc32c.extend(google_crc32c.value(after), body)
    before = _BEFORE_CRC.pack(0, HEADER_BYTES - _BATCH_LENGTH_FROM + body.size, -1, 2, crc)
    return EncodedBatch(before + after, memoryview(body).cast("B"), count)


def _are_plain(keys: Any, values: Any, headers: Any, most_bytes: int) -> bool:
    """Whether the records have no headers, and binary keys and values, and not too many bytes."""
    if headers is not None and headers.null_count != len(headers):
        return False
    columns = [column for column in (keys, values) if column is not None]
    return all(pa.types.is_binary(each.type) for each in columns) and sum(each.nbytes for each in columns) <= most_bytes


def _few(keys: Any, values: Any, times: npt.NDArray[np.int64] | int, count: int) -> tuple[bytes, int, int]:
    """As `_records`, by a loop over the records. For a few records, the many calls of numpy and Arrow take longer."""
    stamps = [times] * count if isinstance(times, int) else times.tolist()
    first_ms, none = stamps[0], [None] * count
    parts: list[bytes] = []
    columns = (none if column is None else column.to_pylist() for column in (keys, values))
    for at, (stamp, key, value) in enumerate(zip(stamps, *columns, strict=True)):
        record = b"".join(
            (
                b"\0",  # the attributes
                _number(stamp - first_ms),
                _number(at),
                *((_number(-1),) if key is None else (_number(len(key)), key)),
                *((_number(-1),) if value is None else (_number(len(value)), value)),
                b"\0",  # no headers
            )
        )
        parts += (_number(len(record)), record)
    return b"".join(parts), first_ms, max(stamps)


def _records(columns: Columns, times: npt.NDArray[np.int64] | int, start: int, stop: int) -> tuple[Any, int, int]:
    """The records section of the rows ``[start, stop)``, with the first and the highest timestamp."""
    count = stop - start
    stamps: Field = 0
    if isinstance(times, int):
        first_ms = max_ms = times
    else:
        mine = times[start:stop]
        first_ms, max_ms = int(mine[0]), int(mine.max())
        if max_ms != first_ms or int(mine.min()) != first_ms:
            stamps = varints.zigzag_column(mine - first_ms)
    offsets: Field = np.arange(0, 2 * count, 2, dtype=np.uint32)
    no_length: Field = NULL_LENGTH
    key = no_length if columns.keys is None else columns.keys.codes[start:stop]
    value = no_length if columns.values is None else columns.values.codes[start:stop]
    header_counts: Field = 0 if columns.headers is None else columns.headers.counts[start:stop]

    length: Any = np.ones(count, dtype=np.int64)  # the attributes
    for codes in (stamps, offsets, key, value, header_counts):
        length += varints.widths(codes)
    for part in (columns.keys, columns.values, columns.headers):
        if part is not None:
            length += part.lengths[start:stop]
    length_codes = (2 * length).astype(np.uint32)

    # Numbers with no payload between them share a column: each joined column costs time for every row.
    joined: list[Any] = []
    fields: list[Field] = []
    before: list[list[Field]] = [[length_codes, 0, stamps, offsets, key], [value], [header_counts]]
    for numbers, payload in zip(before, (columns.keys, columns.values, columns.headers), strict=True):
        fields += numbers
        if payload is not None:
            joined += [varints.interleave(fields, count), payload.slice(start, stop)]
            fields = []
    if fields:
        joined.append(varints.interleave(fields, count))
    return join(joined)[0], first_ms, max_ms


def _row_count(*columns: Any) -> int:
    lengths = {len(column) for column in columns if column is not None}
    if len(lengths) > 1:
        raise OptionError(
            f"columns of one batch have different lengths: {sorted(lengths)}",
            next_step="pass arrays taken from the same record batch.",
        )
    return lengths.pop() if lengths else 0


def _timestamps(timestamps_ms: Any, default_ms: int, count: int) -> npt.NDArray[np.int64] | int:
    if timestamps_ms is None or timestamps_ms.null_count == count:
        return default_ms
    times: npt.NDArray[np.int64] = pc.fill_null(timestamps_ms, default_ms).to_numpy()
    if count and int(times.min()) < 0:  # unknown, see timestamps.py
        times = np.where(times < 0, np.int64(default_ms), times)
    return times


def _number_bytes_max(times: npt.NDArray[np.int64] | int, count: int) -> int:
    """Upper bound of the bytes for length, attributes, timestamp delta and offset delta of any record of this call."""
    spread = 0 if isinstance(times, int) or not count else int(times.max()) - int(times.min())
    return (
        varints.VARINT_BYTES_MAX + 1 + varints.width(varints.zigzag(-spread - 1)) + varints.width(varints.zigzag(count))
    )


def _large_records(
    columns: Columns, times: npt.NDArray[np.int64] | int, codecs: Sequence[str], max_batch_bytes: int, stored: str
) -> dict[int, tuple[Any, int, str]]:
    """The records that fit into a batch only if they are compressed: their position, records section, timestamp, and
    the first of the codecs with which they fit.

    Raises:
        BadRecordError: a record does not even fit in a batch alone, where both deltas are 0 and take one byte each.
    """
    if not columns.count:
        return {}
    record = columns.payload_bytes() + 3
    candidates = np.flatnonzero(record > max_batch_bytes - HEADER_BYTES - varints.VARINT_BYTES_MAX)
    found: dict[int, tuple[Any, int, str]] = {}
    for at in candidates[np.argsort(-record[candidates], kind="stable")].tolist():
        plain = HEADER_BYTES + int(record[at]) + varints.width(2 * int(record[at]))
        if plain <= max_batch_bytes:
            continue
        size, packed = plain, ""
        for codec in () if stored == UNCOMPRESSED else codecs:
            records, first_ms, _ = _records(columns, times, at, at + 1)
            body = compress(codec, records)
            size, packed = HEADER_BYTES + body.size, f" (compressed with {codec})"
            found[at] = body, first_ms, codec
            if size <= max_batch_bytes and stored in CODES and stored != codec:  # brokers compress it again
                size, packed = HEADER_BYTES + compress(stored, records).size, f" (compressed with {stored})"
            if size <= max_batch_bytes:
                break
        if size > max_batch_bytes:
            smaller = "" if packed else "compress it (compression= of Flow.write), "
            refused = BadRecordError(
                f"a record takes {size} bytes{packed} in a batch of its own, more than the limit of {max_batch_bytes}",
                next_step=f"make the record smaller, {smaller}or raise the topic's max.message.bytes.",
                detail=f"record {at} of the rows given, {plain} bytes, limit {max_batch_bytes} bytes",
            )
            refused.row = at
            raise refused
    return found


def too_large(
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
    *,
    compression: str,
    max_batch_bytes: int,
    stored: str = PRODUCER,
) -> str:
    """Why a record does not fit into a batch of its own, in words; empty: it does.

    Args: as of `encode_batches`.
    """
    raw = len(key or b"") + len(value or b"") + sum(len(name) * 4 + len(each or b"") for name, each in headers)
    if raw + HEADER_BYTES + _NUMBERS_MAX + 2 * varints.VARINT_BYTES_MAX * len(headers) <= max_batch_bytes:
        return ""  # sooner said than counted
    given = pa.array([[{"key": name, "value": each} for name, each in headers]], HEADERS) if headers else None
    columns = Columns(pa.array([key], pa.large_binary()), pa.array([value], pa.large_binary()), given, 1)
    try:
        _large_records(columns, 0, [] if compression == "none" else [compression], max_batch_bytes, stored)
    except BadRecordError as error:
        return error.what
    return ""

"""Record batches for the tests of decoding: from the encoder, or put together byte by byte from the format."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import pyarrow as pa
from hypothesis import strategies as st

from onceflow.protocol import varints
from onceflow.protocol.batches import EncodedBatch, ProducerIdAndEpoch, encode_batches

IDENTITY = ProducerIdAndEpoch(producer_id=12, producer_epoch=3)
DEFAULT_MS = 1_700_000_000_000
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

payloads = st.one_of(st.none(), st.binary(max_size=12), st.sampled_from([60, 64, 300, 9000]).map(lambda n: b"p" * n))
header_lists = st.lists(
    st.tuples(st.text(max_size=4), st.one_of(st.none(), st.binary(max_size=2), st.just(b"h" * 70))), max_size=3
)
stamps = st.one_of(st.integers(0, 2**62), st.integers(DEFAULT_MS - 100, DEFAULT_MS + 100))
rows = st.tuples(payloads, payloads, st.one_of(st.just([]), header_lists), stamps)


def wire(batches: Any) -> bytes:
    return b"".join(batch.head + bytes(batch.body) for batch in batches)


def encode(given_rows: list[Any], **changed: Any) -> Iterator[EncodedBatch]:
    keys, values, headers, times = zip(*given_rows, strict=True) if given_rows else ((), (), (), ())
    arguments: Any = {
        "identity": IDENTITY,
        "base_sequence": 0,
        "max_batch_bytes": 1_000_000,
        "default_timestamp_ms": DEFAULT_MS,
    }
    return encode_batches(
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array([[{"key": k, "value": v} for k, v in listed] for listed in headers], HEADERS),
        pa.array(times, pa.int64()),
        **(arguments | changed),
    )


def number(value: int) -> bytes:
    return varints.encode(value)


def payload(content: bytes | None) -> bytes:
    return number(-1) if content is None else number(len(content)) + content


def record(delta: int, key: bytes | None, value: bytes | None, stamp: int = 0, tail: bytes = b"\x00") -> bytes:
    body = b"\x00" + number(stamp) + number(delta) + payload(key) + payload(value) + tail
    return number(len(body)) + body


def batch_of(
    records: bytes,
    count: int,
    *,
    base_offset: int = 0,
    attributes: int = 0,
    last_delta: int | None = None,
    max_ms: int = DEFAULT_MS,
    magic: int = 2,
) -> bytes:
    """A batch put together from the format, not by our encoder."""
    last = count - 1 if last_delta is None else last_delta
    after = struct.pack(">hiqqqhii", attributes, last, DEFAULT_MS, max_ms, 12, 3, 0, count) + records
    return struct.pack(">qiibI", base_offset, 9 + len(after), -1, magic, google_crc32c.value(after)) + after

"""Reading record batches: what our encoder, other clients, compaction and damage make of them."""

from __future__ import annotations

import gzip
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka import codec
from kafka.record.memory_records import MemoryRecords

from onceflow.errors import OptionError, ProtocolError
from onceflow.protocol import decode
from onceflow.protocol.batches import (
    encode_single,
)
from onceflow.protocol.compression import CODES, compress, decompress
from onceflow.protocol.decode import (
    ABORT,
    COMMIT,
    DecodedBatch,
    decode_batches,
    split_batches,
)

sys.path.insert(0, str(Path(__file__).parent))
try:
    from raw_batches import (
        DEFAULT_MS,
        IDENTITY,
        batch_of,
        encode,
        header_lists,
        number,
        payload,
        payloads,
        record,
        rows,
        stamps,
        wire,
    )
finally:
    sys.path.pop(0)

# kafka-python decompresses the others only with packages that are not installed.
READABLE = ["none", *(name for name in CODES if getattr(codec, f"has_{name}", lambda: False)())]
BY_LOOP, BY_COLUMN = 10**9, 1  # batches with fewer records than this go through the loop

Row = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


@pytest.fixture(params=[BY_LOOP, BY_COLUMN], ids=["loop", "columns"])
def _way(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_FEW_RECORDS", request.param)


def rows_of(batch: DecodedBatch) -> list[Row]:
    assert len(batch.offsets) == len(batch.timestamps_ms) == len(batch.keys) == len(batch.values)
    assert all(batch.headers.values())
    return [
        (offset, stamp, key, value, batch.headers.get(index, []))
        for index, (offset, stamp, key, value) in enumerate(
            zip(batch.offsets.tolist(), batch.timestamps_ms.tolist(), batch.keys, batch.values, strict=True)
        )
    ]


def one(data: bytes) -> DecodedBatch:
    (batch,) = decode_batches(data)
    return batch


# ---- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.long)])
def test_what_the_encoder_writes_is_read_back(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        given_rows=st.lists(rows, max_size=120),
        compression=st.sampled_from(list(CODES)),
        target=st.sampled_from([300, 3000, 1_000_000]),
        few=st.sampled_from([BY_LOOP, BY_COLUMN, decode._FEW_RECORDS]),
    )
    def check(given_rows: list[Any], compression: str, target: int, few: int) -> None:
        encoded = list(encode(given_rows, compression=compression, target_batch_bytes=target))
        with mock.patch.object(decode, "_FEW_RECORDS", few):
            batches = list(decode_batches(wire(encoded)))
        assert [len(batch.keys) for batch in batches] == [batch.count for batch in encoded]
        got = [row for batch in batches for row in rows_of(batch)]
        offsets = [offset for batch in encoded for offset in range(batch.count)]
        expected = [
            (offset, stamp, key, value, listed)
            for offset, (key, value, listed, stamp) in zip(offsets, given_rows, strict=True)
        ]
        assert got == expected
        for batch in batches:
            assert (batch.base_offset, batch.last_offset) == (0, len(batch.keys) - 1)
            assert (batch.producer_id, batch.producer_epoch) == (12, 3)
            assert (batch.transactional, batch.control, batch.marker) == (True, False, None)
        if compression in READABLE:
            assert got == list(kafka_python(wire(encoded)))

    check()


def kafka_python(data: bytes) -> Iterator[Row]:
    """The same bytes as another implementation reads them."""
    records = MemoryRecords(data)
    while (batch := records.next_batch()) is not None:
        for item in batch:
            yield item.offset, item.timestamp, item.key, item.value, [*item.headers]


@pytest.fixture(scope="module")
def many_rows() -> list[Any]:
    """Rows for more than one batch of the usual size."""
    rng = np.random.default_rng(5)
    return [
        (b"key-%d" % n, rng.bytes(size) * 3, [("n", b"%d" % (n % 3))] if n % 7 == 0 else [], DEFAULT_MS + n // 50)
        for n, size in enumerate(rng.integers(0, 40, 20_000).tolist())
    ]


@pytest.mark.parametrize("compression", list(CODES))
def test_full_batches(many_rows: list[Any], compression: str) -> None:
    given_rows = many_rows
    encoded = list(encode(given_rows, compression=compression))
    assert len(encoded) > 1
    assert encoded[0].head[22] & 7 == CODES[compression]
    got = [row[1:] for batch in decode_batches(wire(encoded)) for row in rows_of(batch)]
    assert got == [(stamp, key, value, listed) for key, value, listed, stamp in given_rows]


def test_any_buffer_is_read_and_nothing_keeps_it() -> None:
    data = wire([encode_single(b"k", b"v", timestamp_ms=5, identity=IDENTITY, base_sequence=0)] * 2)
    for buffer in (data, bytearray(data), memoryview(data), pa.py_buffer(data)):
        assert [rows_of(batch) for batch in decode_batches(buffer)] == [[(0, 5, b"k", b"v", [])]] * 2
    assert list(decode_batches(b"")) == []


# ---- byte by byte ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_way")
def test_golden_records() -> None:
    records = bytes.fromhex(
        "10 00 00 00 02 6b 02 76 00"  # key "k", value "v"
        "0c 00 01 02 01 01 00"  # a millisecond earlier, offset delta 1, null and null
        "0c 00 00 06 00 00 00"  # offset delta 3 (2 was compacted away), empty and empty
        "22 00 00 08 02 6b 02 76 04 02 68 01 04 68 32 04 61 62"  # headers "h": null, "h2": "ab"
        "9001 00 8001 0a 01 8001" + "63" * 64 + "00"  # 64 ms later, two bytes for it and for the value's length
    )
    batch = one(batch_of(records, 5, base_offset=1000, last_delta=9))
    assert (batch.base_offset, batch.last_offset) == (1000, 1009)
    assert rows_of(batch) == [
        (1000, DEFAULT_MS, b"k", b"v", []),
        (1001, DEFAULT_MS - 1, None, None, []),
        (1003, DEFAULT_MS, b"", b"", []),
        (1004, DEFAULT_MS, b"k", b"v", [("h", None), ("h2", b"ab")]),
        (1005, DEFAULT_MS + 64, None, b"c" * 64, []),
    ]
    assert batch.headers.keys() == {3}
    assert batch.nbytes == len(records)


def test_complete_golden_batch() -> None:
    golden = bytes.fromhex(
        "0000000000000000 0000003a ffffffff 02 227e6ca4"
        "0010 00000000 0000018bcfe56800 0000018bcfe56800 0000000000000001 0002 00000003 00000001"
        "1000000002 6b 02 76 00"
    )
    batch = one(golden)
    assert (batch.producer_id, batch.producer_epoch, batch.transactional) == (1, 2, True)
    assert rows_of(batch) == [(0, 0x018BCFE56800, b"k", b"v", [])]


def test_markers() -> None:
    for kind, marker in ((0, ABORT), (1, COMMIT), (2, None)):
        key, value = struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 7)
        batch = one(batch_of(record(0, key, value), 1, attributes=0x30))
        assert (batch.control, batch.transactional, batch.marker) == (True, True, marker)
    assert one(batch_of(record(0, None, None), 1, attributes=0x20)).marker is None
    data = one(batch_of(record(0, struct.pack(">hh", 0, 1), None), 1, attributes=0x10))
    assert (data.control, data.marker) == (False, None)


@pytest.mark.usefixtures("_way")
def test_timestamps_of_appending_are_the_brokers() -> None:
    records = record(0, None, b"a", stamp=-7) + record(1, None, b"b", stamp=9)
    assert one(batch_of(records, 2, max_ms=4711)).timestamps_ms.tolist() == [DEFAULT_MS - 7, DEFAULT_MS + 9]
    assert one(batch_of(records, 2, max_ms=4711, attributes=8)).timestamps_ms.tolist() == [4711, 4711]


@pytest.mark.usefixtures("_way")
def test_compacted_batches() -> None:
    kept = [(3, b"a"), (700, b"b"), (100_000, b"c"), (2**31 - 1, b"d")]
    sparse = b"".join(record(delta, key, b"v") for delta, key in kept)
    first = batch_of(sparse, 4, base_offset=2**40, last_delta=2**31 - 1)
    empty = batch_of(b"", 0, base_offset=2**41, last_delta=99)
    last = batch_of(record(5, b"e", None), 1, base_offset=2**42, last_delta=10)
    batches = list(decode_batches(first + empty + last))
    assert batches[0].offsets.tolist() == [2**40 + delta for delta, _ in kept]
    assert batches[0].keys == [b"a", b"b", b"c", b"d"]
    assert rows_of(batches[1]) == []
    assert batches[1].last_offset == 2**41 + 99
    assert (batches[2].offsets.tolist(), batches[2].last_offset) == ([2**42 + 5], 2**42 + 10)


def test_a_header_key_that_is_not_text_does_not_stop_a_reader() -> None:
    tail = number(1) + payload(b"\xff") + payload(b"v")
    assert one(batch_of(record(0, None, None, tail=tail), 1)).headers == {0: [("\ufffd", b"v")]}


# ---- incomplete, damaged, foreign ------------------------------------------------------------------------


def test_an_incomplete_batch_at_the_end_is_left_out() -> None:
    first = batch_of(record(0, b"a", b"b" * 30), 1)
    whole = first + batch_of(record(0, b"c", b"d"), 1, base_offset=1)
    for size in range(len(whole)):
        assert len(list(decode_batches(whole[:size]))) == (size >= len(first)), size
    assert len(list(decode_batches(whole))) == 2


def test_every_flipped_bit_behind_the_checksum_is_noticed() -> None:
    whole = bytearray(batch_of(record(0, b"key", b"value"), 1))
    for at in range(17, len(whole)):
        whole[at] ^= 1 << at % 8
        with pytest.raises(ProtocolError, match="checksum") as caught:
            list(split_batches(whole))
        assert "base offset 0" in caught.value.detail
        whole[at] ^= 1 << at % 8
    assert one(bytes(whole)).values == [b"value"]


@pytest.mark.parametrize("magic", [0, 1])
def test_older_formats_are_refused(magic: int) -> None:
    with pytest.raises(ProtocolError, match=f"message format {magic}"):
        list(decode_batches(batch_of(record(0, b"k", b"v"), 1, magic=magic)))


def test_a_length_that_no_batch_has() -> None:
    data = bytearray(batch_of(b"", 0))
    for length in (-1, 0, 48):
        data[8:12] = struct.pack(">i", length)
        with pytest.raises(ProtocolError, match="format"):
            list(decode_batches(data))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    "records, count",
    [
        (record(0, b"k", b"v"), 2),  # fewer than announced
        (record(0, b"k", b"v") * 2, 1),  # more
        (record(0, b"k", b"v"), -1),
        (record(0, b"k", b"v"), 2**31 - 1),
        (number(60) + record(0, b"k", b"v"), 1),  # a length that is too large
        (number(-3) + record(0, b"k", b"v"), 1),
        (record(0, b"k", b"v", tail=b"\x00\x00"), 1),  # something behind the headers
        (record(0, b"k", b"v", tail=b"\x01"), 1),  # -1 headers
        (record(0, b"k", b"v", tail=b"\x02"), 1),  # a header that is not there
        (record(0, b"k", b"v", tail=number(1) + payload(None) + payload(b"v")), 1),
        (record(0, b"k", b"v", tail=number(2**31 - 1) + b"\x00" * 8), 1),
        (b"\x12\x00\x00\x00\x02k\x7fv\x00\x00", 1),  # a value of -64 bytes
        (b"\x14\x00\x00\x00\x02k\xfe\xffv\x00\x00", 1),  # a value that leaves the record
        (b"\x30" + b"\x00" * 3 + b"\xff" * 21, 1),  # a number that does not end
        (b"\xff" * 12, 1),
    ],
)
def test_records_that_break_the_format_under_a_right_checksum(records: bytes, count: int) -> None:
    # Whole batches of them, too: the way by columns must not be led astray by what follows.
    for data in (batch_of(records, count), batch_of(records * 100, count * 100 if count < 1000 else count)):
        with pytest.raises(ProtocolError, match="does not follow the format") as caught:
            list(decode_batches(data))
        assert "base offset 0" in caught.value.detail


@pytest.mark.parametrize("examples", [120, pytest.param(400, marks=pytest.mark.long)])
def test_both_ways_agree_on_whatever_comes(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        given_rows=st.lists(st.tuples(payloads, payloads, header_lists, stamps), min_size=1, max_size=6),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
    )
    @example(given_rows=[(b"k", b"v" * 70, [], 0)], changes=[(0, 255), (1, 255)])
    def check(given_rows: list[Any], changes: list[tuple[int, int]]) -> None:
        records = bytearray(b"".join(bytes(batch.body) for batch in encode(given_rows)))
        for at, byte in changes:
            # Mostly near the front of the section, where the numbers are.
            records[at % min(len(records), 40 + at % 50)] = byte
        data = batch_of(bytes(records), len(given_rows))
        outcomes = []
        for few in (BY_LOOP, BY_COLUMN):
            with mock.patch.object(decode, "_FEW_RECORDS", few):
                try:
                    outcomes.append(rows_of(one(data)))
                except ProtocolError:
                    outcomes.append(None)
        assert outcomes[0] == outcomes[1]

    check()


# ---- compression ---------------------------------------------------------------------------------------


def xxh32(data: bytes) -> int:
    """xxHash of less than 16 bytes or more, seed 0; lz4 frames are checked with it."""
    p1, p2, p3, p4, p5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393
    mask = 0xFFFF_FFFF

    def turn(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & mask

    position = 0
    if len(data) >= 16:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        while position + 16 <= len(data):
            for lane, word in enumerate(struct.unpack_from("<4I", data, position)):
                lanes[lane] = turn((lanes[lane] + word * p2) & mask, 13) * p1 & mask
            position += 16
        total = sum(turn(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
    else:
        total = p5
    total = (total + len(data)) & mask
    while position + 4 <= len(data):
        total = turn((total + struct.unpack_from("<I", data, position)[0] * p3) & mask, 17) * p4 & mask
        position += 4
    for byte in data[position:]:
        total = turn((total + byte * p5) & mask, 11) * p1 & mask
    total = (total ^ total >> 15) * p2 & mask
    total = (total ^ total >> 13) * p3 & mask
    return total ^ total >> 16


def lz4_frame(data: bytes, flags: int, block_bytes: int = 64 * 1024) -> bytes:
    """A frame with the parts that the flags announce: 0x10 block checksums, 0x08 size, 0x04 checksum of all."""
    head = bytes([0x60 | flags, 0x40]) + (struct.pack("<Q", len(data)) if flags & 8 else b"")
    out = b"\x04\x22\x4d\x18" + head + bytes([xxh32(head) >> 8 & 0xFF])
    for start in range(0, len(data), block_bytes):
        raw = data[start : start + block_bytes]
        block = pa.Codec("lz4_raw").compress(raw, asbytes=True)
        size = len(block)
        if size >= len(raw):
            block, size = raw, len(raw) | 0x8000_0000
        out += struct.pack("<I", size) + block + (struct.pack("<I", xxh32(block)) if flags & 0x10 else b"")
    return out + b"\x00" * 4 + (struct.pack("<I", xxh32(data)) if flags & 4 else b"")


CONTENT = b"".join(b"%d,%d;" % (n, n * n) for n in range(12_000)) + np.random.default_rng(3).bytes(70_000)


def written_by_others() -> dict[str, tuple[str, bytes]]:
    gzipped = zlib.compressobj(9, zlib.DEFLATED, 31)
    half = len(CONTENT) // 2
    frames = {f"lz4-{flags:#x}": ("lz4", lz4_frame(CONTENT, flags)) for flags in (0, 0x04, 0x08, 0x10, 0x1C)}
    xerial = compress("snappy", pa.py_buffer(CONTENT)).to_pybytes()
    return {
        **frames,
        "lz4-linked": ("lz4", pa.Codec("lz4").compress(CONTENT, asbytes=True)),
        "gzip": ("gzip", gzipped.compress(CONTENT) + gzipped.flush()),
        "gzip-two-members": ("gzip", gzip.compress(CONTENT[:half]) + gzip.compress(CONTENT[half:])),
        "snappy-plain": ("snappy", pa.Codec("snappy").compress(CONTENT, asbytes=True)),
        "snappy-xerial": ("snappy", xerial),
        "snappy-other-version": ("snappy", xerial[:8] + struct.pack(">ii", 3, 1) + xerial[16:]),
        "snappy-one-stream-after-the-other": (
            "snappy",
            compress("snappy", pa.py_buffer(CONTENT[:half])).to_pybytes()
            + compress("snappy", pa.py_buffer(CONTENT[half:])).to_pybytes(),
        ),
        "zstd-size-unknown": ("zstd", _zstd_stream(CONTENT)),
        "zstd-size-known": ("zstd", pa.Codec("zstd").compress(CONTENT, asbytes=True)),
    }


def _zstd_stream(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


WRITTEN_BY_OTHERS = written_by_others()


@pytest.mark.parametrize("name", WRITTEN_BY_OTHERS)
def test_compressed_by_other_writers(name: str) -> None:
    method, packed = WRITTEN_BY_OTHERS[name]
    assert decompress(method, packed) == CONTENT
    assert decompress(CODES[method], pa.py_buffer(packed)) == CONTENT
    for damaged in (packed[:-1], packed[: len(packed) // 2], packed[:3], b""):
        with pytest.raises(ProtocolError, match=f"compressed with {method}"):
            decompress(method, damaged)


@pytest.mark.parametrize("name", list(CODES))
def test_compress_and_decompress(name: str) -> None:
    for content in (b"", b"a", CONTENT):
        assert decompress(name, compress(name, pa.py_buffer(content))) == content


def test_snappy_that_claims_to_be_huge_allocates_nothing() -> None:
    with pytest.raises(ProtocolError, match="snappy"):
        decompress("snappy", b"\xff\xff\xff\xff\x0f" + b"\x00" * 20)


def test_unknown_compressions() -> None:
    with pytest.raises(OptionError, match="none, gzip, snappy, lz4, zstd"):
        decompress("brotli", b"")
    with pytest.raises(ProtocolError, match="method 5"):
        list(decode_batches(batch_of(b"xxxxxxx", 1, attributes=5)))


def test_a_compressed_section_that_is_damaged_under_a_right_checksum() -> None:
    with pytest.raises(ProtocolError, match="compressed with zstd"):
        list(decode_batches(batch_of(b"\x28\xb5\x2f\xfd damaged", 1, attributes=4)))

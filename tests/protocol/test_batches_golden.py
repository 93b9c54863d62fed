"""Record batches byte by byte, written out by hand from the record format (KIP-98), not from our encoder."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from onceflow.protocol.batches import (
    EncodedBatch,
    ProducerIdAndEpoch,
    encode_batches,
    encode_single,
)

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
IDENTITY = ProducerIdAndEpoch(producer_id=1, producer_epoch=2)
DEFAULT_MS = 1_700_000_000_000  # 0x018bcfe56800


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit (reflected polynomial 0x82f63b78), not by the package that the encoder uses."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def test_crc32c_of_the_test_itself() -> None:
    assert crc32c(b"123456789") == 0xE306_9283


def whole(batch: EncodedBatch) -> bytes:
    return batch.head + bytes(batch.body)


def expected(*, length: str, after_crc: str, records: str) -> bytes:
    """A batch from its parts in hex: base offset 0, leader epoch -1, magic 2, checksum of what follows."""
    covered = bytes.fromhex(after_crc) + bytes.fromhex(records)
    before = bytes.fromhex("0000000000000000" + length + "ffffffff" + "02")
    return before + struct.pack(">I", crc32c(covered)) + covered


# What follows the checksum in the header.
ONE_RECORD = (
    "0010"  # attributes: no compression, create time, transactional
    "00000000"  # last offset delta
    "0000018bcfe56800"  # base timestamp
    "0000018bcfe56800"  # max timestamp
    "0000000000000001"  # producer id
    "0002"  # producer epoch
    "00000003"  # base sequence
    "00000001"  # records
)
SIMPLE = "10 00 00 00 02 6b 02 76 00"  # length 8, attributes, deltas 0 and 0, key "k", value "v", no headers
NULLS = "0c 00 00 00 01 01 00"  # length 6, then a key and a value of length -1
WITH_HEADERS = (
    "22 00 00 00 02 6b 02 76"  # length 17
    "04"  # two headers
    "02 68 01"  # "h": null
    "04 68 32 04 61 62"  # "h2": "ab"
)


def encode(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]] | None,
    identity: ProducerIdAndEpoch = IDENTITY,
) -> EncodedBatch:
    listed = None if headers is None else [{"key": name, "value": content} for name, content in headers]
    (batch,) = encode_batches(
        pa.array([key], pa.binary()),
        pa.array([value], pa.binary()),
        pa.array([listed], HEADERS),
        None,
        identity=identity,
        base_sequence=3,
        max_batch_bytes=1000,
        default_timestamp_ms=DEFAULT_MS,
    )
    return batch


@pytest.mark.parametrize(
    "key, value, headers, length, records",
    [
        (b"k", b"v", None, "0000003a", SIMPLE),  # 49 bytes of header after the length, 9 of records
        (None, None, None, "00000038", NULLS),
        (b"k", b"v", [("h", None), ("h2", b"ab")], "00000043", WITH_HEADERS),
        (b"", b"", [], "00000038", "0c 00 00 00 00 00 00"),
    ],
)
def test_single_records(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]] | None,
    length: str,
    records: str,
) -> None:
    golden = expected(length=length, after_crc=ONE_RECORD, records=records)
    assert whole(encode(key, value, headers)).hex() == golden.hex()
    single = encode_single(key, value, headers or (), timestamp_ms=DEFAULT_MS, identity=IDENTITY, base_sequence=3)
    assert whole(single).hex() == golden.hex()


def test_single_record_complete_with_its_checksum() -> None:
    golden = bytes.fromhex(
        "0000000000000000 0000003a ffffffff 02 227e6ca4"
        "0010 00000000 0000018bcfe56800 0000018bcfe56800 0000000000000001 0002 00000003 00000001"
        "1000000002 6b 02 76 00"
    )
    assert whole(encode(b"k", b"v", None)).hex() == golden.hex()


def test_deltas_and_widths_of_several_records() -> None:
    stamps = [DEFAULT_MS, DEFAULT_MS - 1, DEFAULT_MS + 64, None]
    (batch,) = encode_batches(
        None,
        pa.array([b"a", None, b"c" * 64, b""], pa.binary()),
        None,
        pa.array(stamps, pa.int64()),
        identity=IDENTITY,
        base_sequence=3,
        max_batch_bytes=1000,
        default_timestamp_ms=DEFAULT_MS + 1,
    )
    golden = expected(
        length="00000091",  # 49 + 96
        after_crc="0010 00000003 0000018bcfe56800 0000018bcfe56840 0000000000000001 0002 00000003 00000004",
        records=(
            "0e 00 00 00 01 02 61 00"
            "0c 00 01 02 01 01 00"  # timestamp one earlier, offset delta 1, null value
            # Timestamp 64 later (zigzag 128), value of 64 bytes: two bytes each; length 72 (zigzag 144).
            "9001 00 8001 04 01 8001" + "63" * 64 + "00"
            "0c 00 02 06 01 00 00"  # the default timestamp, an empty value
        ),
    )
    assert whole(batch).hex() == golden.hex()
    assert batch.count == 4


def test_plain_batch_has_no_identity() -> None:
    after = ONE_RECORD.replace("0010", "0000", 1).replace("0000000000000001000200000003", "f" * 28)
    golden = expected(length="0000003a", after_crc=after, records=SIMPLE)
    assert whole(encode(b"k", b"v", None, ProducerIdAndEpoch(-1, 9))).hex() == golden.hex()


def test_idempotent_batch_without_transaction() -> None:
    golden = expected(length="0000003a", after_crc=ONE_RECORD.replace("0010", "0000", 1), records=SIMPLE)
    assert whole(encode(b"k", b"v", None, ProducerIdAndEpoch(1, 2, transactional=False))).hex() == golden.hex()

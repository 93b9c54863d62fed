"""Whatever the rows, kafka-python's parser reads them back, batches stay in bounds, sequences continue."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka import codec
from kafka.record.memory_records import MemoryRecords

from onceflow.errors import BadRecordError, OptionError, SchemaError
from onceflow.protocol import batches, varints
from onceflow.protocol.batches import EncodedBatch, ProducerIdAndEpoch, encode_batches
from onceflow.protocol.compression import CODES, compress, decompress

IDENTITY = ProducerIdAndEpoch(producer_id=12, producer_epoch=3)
DEFAULT_MS = 1_700_000_000_000
# kafka-python decompresses the others only with packages that are not installed; the Java test reads them.
READABLE = [
    "none",
    *(name for name in CODES if name != "none" and getattr(codec, f"has_{name}", lambda: False)()),
]

payloads = st.one_of(st.none(), st.binary(max_size=12), st.integers(60, 300).map(lambda size: bytes(range(256)) * 2))
texts = st.one_of(st.none(), st.text(max_size=12))
header_lists = st.one_of(
    st.none(),
    st.lists(st.tuples(st.text(max_size=4), st.one_of(st.none(), st.binary(max_size=70))), max_size=3),
)
stamps = st.one_of(st.none(), st.integers(0, 2**62), st.integers(DEFAULT_MS - 100, DEFAULT_MS + 100))
rows = st.tuples(texts, payloads, header_lists, stamps)


def arrow_columns(given_rows: list[Any], large: bool, view: bool) -> tuple[Any, Any, Any, Any]:
    """Columns as they may be handed over: 32- or 64-bit offsets, sliced out of something longer."""
    text, binary = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    struct = pa.struct([("key", text), ("value", binary)])
    list_type = pa.large_list(struct) if large else pa.list_(struct)
    padding: list[Any] = [("pad", b"padding", [("p", b"q")], 5), (None, None, None, None)] if view else []
    padded = padding + given_rows + padding
    columns = [
        pa.array([row[0] for row in padded], text),
        pa.array([row[1] for row in padded], binary),
        pa.array(
            [
                None if row[2] is None else [{"key": name, "value": content} for name, content in row[2]]
                for row in padded
            ],
            list_type,
        ),
        pa.array([row[3] for row in padded], pa.int64()),
    ]
    keys, values, headers, times = (column.slice(len(padding), len(given_rows)) for column in columns)
    return keys, values, headers, times


def read(encoded: EncodedBatch) -> Any:
    """The one batch in the bytes, as kafka-python parses it."""
    records = MemoryRecords(encoded.head + bytes(encoded.body))
    assert records.size_in_bytes() == encoded.nbytes
    batch = records.next_batch()
    assert not records.has_next()
    return batch


@pytest.mark.parametrize("examples", [30, pytest.param(120, marks=pytest.mark.long)])
def test_round_trip(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        given_rows=st.lists(rows, max_size=90),
        large=st.booleans(),
        view=st.booleans(),
        compression=st.sampled_from(READABLE),
        target=st.sampled_from([1, 300, 3000, batches.TARGET_BATCH_BYTES]),
        limit=st.integers(1200, 5000),
        base_sequence=st.sampled_from([0, 17, 2**31 - 2]),
    )
    def check(
        given_rows: list[Any], large: bool, view: bool, compression: str, target: int, limit: int, base_sequence: int
    ) -> None:
        keys, values, headers, times = arrow_columns(given_rows, large, view)
        encoded = list(
            encode_batches(
                keys,
                values,
                headers,
                times,
                identity=IDENTITY,
                base_sequence=base_sequence,
                compression=compression,
                max_batch_bytes=limit,
                default_timestamp_ms=DEFAULT_MS,
                target_batch_bytes=target,
            )
        )
        expected = iter(given_rows)
        sequence = base_sequence
        bound = batches.sizes(keys, values, headers)
        start = 0
        for one in encoded:
            assert one.nbytes <= limit
            batch = read(one)
            assert batch.validate_crc()
            assert (batch.producer_id, batch.producer_epoch, batch.is_transactional) == (12, 3, True)
            assert batch.base_sequence == sequence
            records = list(batch)
            assert len(records) == one.count == batch.last_offset_delta + 1
            sequence = (sequence + one.count) % 2**31
            if compression == "none":
                assert len(one.body) <= int(bound[start : start + one.count].sum())
            start += one.count
            for offset, (record, row) in enumerate(zip(records, itertools.islice(expected, one.count), strict=True)):
                key, value, header_list, stamp = row
                assert record.offset == offset
                assert record.key == (None if key is None else key.encode())
                assert record.value == value
                assert record.headers == (header_list or [])
                assert record.timestamp == (DEFAULT_MS if stamp is None else stamp)
            assert batch.max_timestamp == max(record.timestamp for record in records)
        assert start == len(given_rows)

    check()


@settings(max_examples=60, deadline=None, derandomize="CI" in os.environ)
@given(
    count=st.integers(1, 200),
    size=st.integers(0, 300),
    key_size=st.integers(0, 70),
    limit=st.integers(500, 20_000),
)
def test_bound_is_on_what_is_there_before_compression(count: int, size: int, key_size: int, limit: int) -> None:
    arguments: Any = {
        "identity": IDENTITY,
        "base_sequence": 0,
        "max_batch_bytes": limit,
        "default_timestamp_ms": DEFAULT_MS,
    }
    keys, values = pa.array([b"k" * key_size] * count), pa.array([b"v" * size] * count)
    plain = list(encode_batches(keys, values, None, None, **arguments))
    packed = list(encode_batches(keys, values, None, None, compression="zstd", **arguments))
    assert [batch.count for batch in plain] == [batch.count for batch in packed]
    assert all(small.nbytes <= large.nbytes <= limit for small, large in zip(packed, plain, strict=True))


def encode(*columns: Any, **changed: Any) -> list[EncodedBatch]:
    arguments: Any = {
        "identity": IDENTITY,
        "base_sequence": 0,
        "max_batch_bytes": 1000,
        "default_timestamp_ms": DEFAULT_MS,
    }
    return list(encode_batches(*columns, **(arguments | changed)))


def test_a_record_may_be_exactly_as_large_as_the_limit() -> None:
    fits = pa.array([b"x", b"v" * (1000 - 61 - 2 - 4 - 2 - 1)])  # length, 3 numbers and key length, value length, tail
    encoded = encode(None, fits, None, None)
    assert [batch.nbytes for batch in encoded] == [61 + 8, 1000]
    too_large = pa.array([b"x", fits[1].as_py() + b"v"])
    with pytest.raises(BadRecordError, match="takes 1001 bytes") as caught:
        encode(None, too_large, None, None)
    assert "record 1 " in caught.value.detail
    assert "limit 1000 bytes" in caught.value.detail


@settings(max_examples=60, deadline=None, derandomize="CI" in os.environ)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6000), st.booleans()), min_size=1, max_size=12),
    compression=st.sampled_from(READABLE),
    limit=st.integers(500, 2000),
    stored=st.sampled_from(["producer", "uncompressed", *READABLE[1:]]),
)
@example(lengths=[(5000, True), (10, True), (5000, True)], compression="gzip", limit=500, stored="producer")
def test_the_size_of_what_is_stored_counts(
    lengths: list[tuple[int, bool]], compression: str, limit: int, stored: str
) -> None:
    """A record is refused if, and only if, no batch with it alone is small enough."""
    noise = random.Random(5)
    rows = [b"v" * length if plain else noise.randbytes(length) for length, plain in lengths]

    def alone(value: bytes) -> int:
        plain = batches.encode_single(None, value, timestamp_ms=0, identity=IDENTITY, base_sequence=0)
        if plain.nbytes <= limit or stored == "uncompressed" or compression == "none":
            return plain.nbytes
        codecs = {compression, stored} - {"producer"}
        return max(batches.HEADER_BYTES + compress(each, pa.py_buffer(plain.body)).size for each in codecs)

    fit = [value for value in rows if alone(value) <= limit]
    given_to = {"compression": compression, "max_batch_bytes": limit, "stored": stored}
    for value in rows:
        assert (batches.too_large(None, value, (), **given_to) == "") == (alone(value) <= limit)
    if len(fit) < len(rows):
        with pytest.raises(BadRecordError, match="more than the limit of"):
            encode(None, pa.array(rows), None, None, **given_to)
    encoded = encode(None, pa.array(fit, pa.binary()), None, None, **given_to)
    assert all(one.nbytes <= limit for one in encoded)
    assert [record.value for one in encoded for record in read(one)] == fit
    assert [read(one).base_sequence for one in encoded] == list(
        itertools.accumulate([0, *(one.count for one in encoded)])
    )[:-1]


@pytest.mark.parametrize("headers", [[("h", b"x" * 2000)], [("h" * 2000, None)], [("ä" * 900, b"")]])
def test_keys_and_headers_count_too(headers: Any) -> None:
    given_to: Any = {"compression": "none", "max_batch_bytes": 1000}
    assert "more than the limit of 1000" in batches.too_large(b"k", b"v", headers, **given_to)
    assert batches.too_large(b"k", b"v", headers, compression="gzip", max_batch_bytes=1000) == ""
    with pytest.raises(BadRecordError) as caught:
        encode(None, pa.array([b"v" * 2000]), None, None)
    assert "compress it (compression= of Flow.write)" in caught.value.next_step
    assert batches.too_large(b"k" * 930, b"", [], **given_to) == ""
    assert batches.too_large(b"k" * 940, b"", [], **given_to)


def test_commands_compress_what_is_too_large_with_any_codec_with_which_it_fits() -> None:
    """The flow that has written it may have used that codec."""
    of_two = "".join(random.Random(1).choices("ab", k=2_000)).encode()  # lz4 finds little in it
    values = [b"v" * 5_000, b"small", of_two]
    encoded = encode(None, pa.array(values), None, None, large_with=["lz4", "gzip"], max_batch_bytes=500)
    assert [read(one).compression_type for one in encoded] == [CODES["lz4"], 0, CODES["gzip"]]
    assert all(one.nbytes <= 500 for one in encoded)
    for one, value in zip(encoded, values, strict=True):
        assert value in decompress(read(one).compression_type, one.body)
    with pytest.raises(BadRecordError, match="compressed with lz4"):
        encode(None, pa.array(values), None, None, large_with=["lz4"], max_batch_bytes=500)


def test_unusable_records_are_refused_before_anything_is_yielded() -> None:
    values = pa.array([b"v", b"v" * 2000])
    with pytest.raises(BadRecordError):  # Not at the first next(): at the call.
        encode_batches(
            None,
            values,
            None,
            None,
            identity=IDENTITY,
            base_sequence=0,
            max_batch_bytes=1000,
            default_timestamp_ms=0,
        )


def test_null_header_key_names_the_record() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([None, [{"key": "a", "value": None}], [], [{"key": "b"}, {"key": None}]], kind)
    with pytest.raises(BadRecordError, match="null key") as caught:
        encode(None, pa.array([b"v"] * 4), headers, None)
    assert "record 3 " in caught.value.detail


def test_a_record_without_a_time_gets_the_time_of_writing() -> None:
    stamps = pa.array([5, -1, None, -(2**63)], pa.int64())
    (encoded,) = encode(None, pa.array([b"v"] * 4), None, stamps, default_timestamp_ms=77)
    assert [record.timestamp for record in read(encoded)] == [5, 77, 77, 77]


def test_unknown_compression_names_the_five() -> None:
    with pytest.raises(OptionError, match="none, gzip, snappy, lz4, zstd"):
        encode(None, pa.array([b"v"]), None, None, compression="brotli")


def test_columns_of_different_length_or_wrong_type() -> None:
    with pytest.raises(OptionError, match="different lengths"):
        encode(pa.array([b"k"]), pa.array([b"v", b"w"]), None, None)
    with pytest.raises(SchemaError, match="int64"):
        encode(None, pa.array([1, 2]), None, None)


def test_no_rows_no_batches() -> None:
    empty = pa.array([], pa.binary())
    assert encode(empty, empty, None, None) == []
    assert encode(None, None, None, None) == []
    assert batches.sizes(None, empty, None).tolist() == []


def test_all_null_columns_need_not_exist() -> None:
    nothing = pa.nulls(3, pa.binary())
    given_ = encode(nothing, nothing, None, pa.array([1, 2, 3]))
    absent = encode(None, None, None, pa.array([1, 2, 3]))
    assert [bytes(batch.body) for batch in given_] == [bytes(batch.body) for batch in absent]


def test_other_binary_types_are_accepted() -> None:
    values = pa.array([b"ab", None, b"cd"], pa.binary(2))
    words = pa.array(["ab", None, "cd"]).dictionary_encode()
    plain = encode(None, pa.array([b"ab", None, b"cd"]), None, None)
    assert encode(None, values, None, None) == plain
    assert encode(None, words, None, None) == plain


def test_columns_beyond_two_gigabytes() -> None:
    # Zeroed memory is not touched, hence not used, before it is written.
    data = np.zeros(2**31 + 10, dtype=np.uint8)
    data[2**31 :] = np.frombuffer(b"0123456789", dtype=np.uint8)
    offsets = np.array([2**31, 2**31 + 4, 2**31 + 4, 2**31 + 10], dtype=np.int64)
    whole = [pa.py_buffer(offsets), pa.py_buffer(data)]
    values = pa.Array.from_buffers(pa.large_binary(), 3, [None, *whole])
    (batch,) = encode(None, values, None, None)
    assert [record.value for record in read(batch)] == [b"0123", b"", b"456789"]
    nulls = pa.Array.from_buffers(pa.large_binary(), 3, [pa.py_buffer(b"\x05"), *whole])
    (batch,) = encode(None, nulls.slice(1), None, None)
    assert [record.value for record in read(batch)] == [None, b"456789"]


def test_sequences_wrap_as_kafka_increments_them() -> None:
    # DefaultRecordBatch.incrementSequence: the number after 2**31 - 1 is 0.
    assert batches.next_sequence(2**31 - 1, 1) == 0
    assert batches.next_sequence(2**31 - 10, 30) == 20
    assert batches.next_sequence(5, 0) == 5
    encoded = encode(None, pa.array([b"v" * 100] * 40), None, None, base_sequence=2**31 - 8)
    bases = [int.from_bytes(batch.head[53:57], "big") for batch in encoded]
    assert bases[:3] == [2**31 - 8, 0, 8]


def test_batches_are_encoded_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = batches._records
    monkeypatch.setattr(batches, "_records", lambda *args: made.append(args[2]) or real(*args))
    run = encode_batches(
        None,
        pa.array([b"v" * 100] * 40),
        None,
        None,
        identity=IDENTITY,
        base_sequence=0,
        max_batch_bytes=1000,
        default_timestamp_ms=0,
    )
    assert made == []
    next(run)
    assert made == [0]


def test_what_does_not_shrink_is_left_alone() -> None:
    noise = np.random.default_rng(1).bytes(700)
    for compression in CODES:
        (batch,) = encode(None, pa.array([noise]), None, None, compression=compression)
        assert batch.head[22] & 7 == 0
        assert batch.nbytes <= 1000


def test_snappy_is_framed_in_xerial_blocks() -> None:
    packed = compress("snappy", pa.py_buffer(b"a" * 70_000)).to_pybytes()
    assert packed[:16] == b"\x82SNAPPY\x00" + b"\x00\x00\x00\x01" * 2
    position = 16
    for raw_bytes in (32 * 1024, 32 * 1024, 70_000 - 64 * 1024):
        size = int.from_bytes(packed[position : position + 4], "big")
        block = packed[position + 4 : position + 4 + size]
        assert pa.Codec("snappy").decompress(block, raw_bytes).to_pybytes() == b"a" * raw_bytes
        position += 4 + size
    assert position == len(packed)


@given(st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=200, deadline=None, derandomize="CI" in os.environ)
def test_varints_in_columns_are_those_of_single_numbers(value: int) -> None:
    codes = varints.zigzag_column(np.array([0, value, 1], dtype=np.int64))
    column = varints.interleave([codes], 3)
    assert column.to_pylist() == [varints.encode(number) for number in (0, value, 1)]
    assert varints.width(varints.zigzag(value)) == len(varints.encode(value))


@settings(max_examples=60, deadline=None, derandomize="CI" in os.environ)
@given(
    given_rows=st.lists(st.tuples(payloads, payloads, stamps), min_size=1, max_size=90),
    with_times=st.booleans(),
    missing=st.sampled_from(["", "key", "value"]),
    base_sequence=st.sampled_from([0, 17, 2**31 - 2]),
)
def test_a_few_records_have_the_same_bytes_as_many(
    given_rows: list[Any], with_times: bool, missing: str, base_sequence: int
) -> None:
    """A few records are encoded by a loop, many by columns."""

    def encoded() -> list[bytes]:
        columns = [pa.array([row[at] for row in given_rows], pa.binary()) for at in (0, 1)]
        found = encode_batches(
            None if missing == "key" else columns[0],
            None if missing == "value" else columns[1],
            None,
            pa.array([row[2] for row in given_rows], pa.int64()) if with_times else None,
            identity=IDENTITY,
            base_sequence=base_sequence,
            max_batch_bytes=1_000_000,
            default_timestamp_ms=DEFAULT_MS,
        )
        return [one.head + bytes(one.body) for one in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_FEW_RECORDS", 1000)
        by_loop = encoded()
        patch.setattr(batches, "_FEW_RECORDS", 0)
        assert encoded() == by_loop

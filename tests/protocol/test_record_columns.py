"""Record batches as Arrow columns: the same records as the decoder into lists returns, and the same refusals."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onceflow.errors import ProtocolError
from onceflow.protocol import record_columns
from onceflow.protocol.compression import CODES
from onceflow.protocol.decode import decode_batches, split_batches
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.record_columns import CREATE_TIME, LOG_APPEND_TIME, RecordColumns, decode_columns

sys.path.insert(0, str(Path(__file__).parent))
try:
    from raw_batches import DEFAULT_MS, batch_of, encode, number, payload, payloads, record, rows, stamps, wire
finally:
    sys.path.pop(0)

BY_LOOP, BY_COLUMN = 10**9, 1  # with fewer records than this, the loop is taken
WAYS = pytest.mark.parametrize("few", [BY_LOOP, BY_COLUMN], ids=["loop", "columns"])
HEADER = payload(b"h") + payload(b"v")
Row = tuple[int, int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


def columns_of(parts: Sequence[bytes], few: int = 60, *, headers: bool = True) -> list[RecordColumns]:
    """What is decoded at once: the batches of each part are a group."""
    with mock.patch.object(record_columns, "_FEW_RECORDS", few):
        groups = [[raw.section() for raw in split_batches(part)] for part in parts]
        found = decode_columns(groups, headers=headers)
    for columns in found:
        for column in (columns.keys, columns.values, *([columns.headers] if columns.headers is not None else [])):
            column.validate(full=True)
        assert columns.keys.type == columns.values.type == pa.binary()
        assert columns.timestamp_types.dtype == np.int32
    return found


def rows_of(columns: RecordColumns) -> list[Row]:
    headers = [None] * len(columns) if columns.headers is None else columns.headers.to_pylist()
    return [
        (offset, stamp, kind, key, value, None if listed is None else [(h["key"], h["value"]) for h in listed])
        for offset, stamp, kind, key, value, listed in zip(
            columns.offsets.tolist(),
            columns.timestamps_ms.tolist(),
            columns.timestamp_types.tolist(),
            columns.keys.to_pylist(),
            columns.values.to_pylist(),
            headers,
            strict=True,
        )
    ]


def listed_rows(data: bytes) -> list[Row]:
    """The same from the decoder into lists. It does not tell the timestamp type: byte 22 of a batch does."""
    return [
        (offset, stamp, raw.attributes >> 3 & 1, key, value, batch.headers.get(row))
        for raw, batch in zip(split_batches(data), decode_batches(data), strict=True)
        for row, (offset, stamp, key, value) in enumerate(
            zip(batch.offsets.tolist(), batch.timestamps_ms.tolist(), batch.keys, batch.values, strict=True)
        )
    ]


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """A batch of the encoder, or one with holes, other times or without records."""
    if draw(st.booleans()):
        given_rows = draw(st.lists(rows, min_size=1, max_size=12))
        return wire(encode(given_rows, compression=draw(st.sampled_from(list(CODES)))))
    deltas = sorted(draw(st.sets(st.integers(0, 300), max_size=12)))
    records = b"".join(
        record(delta, draw(payloads), draw(payloads), draw(st.integers(-(2**40), 2**40))) for delta in deltas
    )
    attributes = draw(st.sampled_from([0, 8, 16, 24]))
    base = draw(st.sampled_from([0, 7, 2**40]))
    return batch_of(records, len(deltas), base_offset=base, attributes=attributes, last_delta=300, max_ms=4711)


@pytest.mark.parametrize("examples", [40, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.slow
def test_columns_have_what_the_lists_have(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        parts=st.lists(st.lists(batches(), max_size=4).map(b"".join), max_size=4),
        few=st.sampled_from([BY_LOOP, BY_COLUMN, 10]),
        joined_bytes=st.sampled_from([0, 200, 1_000_000]),
        headers=st.booleans(),
    )
    def check(parts: list[bytes], few: int, joined_bytes: int, headers: bool) -> None:
        with mock.patch.object(record_columns, "_JOINED_BYTES", joined_bytes):
            found = columns_of(parts, few, headers=headers)
        expected = [[row if headers else (*row[:5], None) for row in listed_rows(part)] for part in parts]
        assert [rows_of(columns) for columns in found] == expected
        assert [columns.headers is None for columns in found] == [not headers] * len(parts)

    check()


@WAYS
def test_golden_records(few: int) -> None:
    records = bytes.fromhex(
        "10 00 00 00 02 6b 02 76 00"  # key "k", value "v"
        "0c 00 01 02 01 01 00"  # a millisecond earlier, offset delta 1, null and null
        "22 00 00 08 02 6b 02 76 04 02 68 01 04 68 32 04 61 62"  # headers "h": null, "h2": "ab"
    )
    appended = batch_of(record(5, b"", b""), 1, base_offset=2000, attributes=8, last_delta=9, max_ms=4711)
    data = batch_of(records, 3, base_offset=1000, last_delta=4) + appended
    (columns,) = columns_of([data], few)
    assert rows_of(columns) == [
        (1000, DEFAULT_MS, CREATE_TIME, b"k", b"v", None),
        (1001, DEFAULT_MS - 1, CREATE_TIME, None, None, None),
        (1004, DEFAULT_MS, CREATE_TIME, b"k", b"v", [("h", None), ("h2", b"ab")]),
        (2005, 4711, LOG_APPEND_TIME, b"", b"", None),
    ]
    assert rows_of(columns.slice(1, 3)) == rows_of(columns)[1:3]


@WAYS
def test_nothing(few: int) -> None:
    assert columns_of([], few) == []
    for headers in (True, False):
        nothing, one, empty = columns_of(
            [b"", batch_of(record(0, b"k", b"v"), 1), batch_of(b"", 0)], few, headers=headers
        )
        assert [len(nothing), len(one), len(empty)] == [0, 1, 0]
        assert (nothing.headers is None, empty.headers is None) == (not headers, not headers)
    assert columns_of([b""])[0].headers.type == HEADERS  # type: ignore[union-attr]


@WAYS
def test_headers_of_all_kinds(few: int) -> None:
    many = [(f"h{n}", b"%d" % n) for n in range(100)]  # more than are decoded by column
    not_text = number(1) + payload(b"\xff") + payload(b"v")
    for tail, expected in (
        (number(100) + b"".join(payload(key.encode()) + payload(value) for key, value in many), many),
        (not_text, [("\ufffd", b"v")]),
    ):
        data = batch_of(record(0, None, b"v", tail=tail) + record(1, None, None), 2)
        (columns,) = columns_of([data], few)
        assert [row[5] for row in rows_of(columns)] == [expected, None]


@WAYS
@pytest.mark.parametrize(
    "records, count",
    [
        (record(0, b"k", b"v"), 2),
        (record(0, b"k", b"v") * 2, 1),
        (number(60) + record(0, b"k", b"v"), 1),
        (number(-3) + record(0, b"k", b"v"), 1),
        (record(0, b"k", b"v", tail=b"\x00\x00"), 1),  # something behind the headers
        (record(0, b"k", b"v", tail=b"\x01"), 1),  # -1 headers
        (record(0, b"k", b"v", tail=b"\x02"), 1),  # a header that is not there
        (record(0, b"k", b"v", tail=number(1) + payload(None) + payload(b"v")), 1),
        (record(0, b"k", b"v", tail=number(1) + payload(b"h") + payload(b"v") + b"\x00"), 1),
        (record(0, b"k", b"v", tail=number(2**31 - 1) + b"\x00" * 8), 1),
        (b"\x12\x00\x00\x00\x02k\x7fv\x00\x00", 1),  # a value of -64 bytes
        (b"\x14\x00\x00\x00\x02k\xfe\xffv\x00\x00", 1),  # a value that leaves the record
        (b"\x30" + b"\x00" * 3 + b"\xff" * 21, 1),  # a number that does not end
        (b"\xff" * 12, 1),
        (b"\x11" + record(0, b"k", b"v")[1:], 1),  # minus the right length
        (record(0, b"k", b"v", tail=number(-1) + HEADER) + record(1, b"k", b"v", tail=number(2) + HEADER * 2), 2),
    ],
)
def test_broken_records_among_good_ones_name_their_batch(few: int, records: bytes, count: int) -> None:
    good = [batch_of(record(0, b"k", b"v") + record(1, None, b"w"), 2, base_offset=at) for at in (0, 44)]
    broken = batch_of(records, count, base_offset=7)
    for headers in (True, False):
        for parts in ([broken], [good[0] + broken + good[1]], [good[0], broken, good[1]]):
            with pytest.raises(ProtocolError, match="does not follow the format") as caught:
                columns_of(parts, few, headers=headers)
            assert "base offset 7" in caught.value.detail


@pytest.mark.parametrize("examples", [80, pytest.param(250, marks=pytest.mark.long)])
def test_all_ways_agree_on_whatever_comes(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    @given(
        given_rows=st.lists(
            st.tuples(payloads, payloads, st.just([]) | rows.map(lambda row: row[2]), stamps), min_size=1, max_size=6
        ),
        changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
        headers=st.booleans(),
    )
    @example(given_rows=[(b"k", b"v" * 70, [], 0)], changes=[(0, 255), (1, 255)], headers=True)
    def check(given_rows: list[Any], changes: list[tuple[int, int]], headers: bool) -> None:
        records = bytearray(b"".join(bytes(batch.body) for batch in encode(given_rows)))
        for at, byte in changes:
            # Mostly near the front of the section, where the numbers are.
            records[at % min(len(records), 40 + at % 50)] = byte
        good = batch_of(record(0, b"k", b"v"), 1, base_offset=100)
        data = good + batch_of(bytes(records), len(given_rows)) + good

        def outcome(few: int) -> list[Row] | None:
            try:
                return rows_of(columns_of([data], few, headers=headers)[0])
            except ProtocolError:
                return None

        try:
            expected = [row if headers else (*row[:5], None) for row in listed_rows(data)]
        except ProtocolError:
            expected = None
        assert outcome(BY_LOOP) == outcome(BY_COLUMN) == expected

    check()


def test_columns_do_not_keep_the_buffer() -> None:
    """They are copies of the payloads alone, also if there is much between them."""
    tail = number(1) + payload(b"h") + payload(b"x" * 10_000)
    data = batch_of(b"".join(record(n, b"key", b"value", tail=tail) for n in range(100)), 100)
    (columns,) = columns_of([data], headers=False)
    for column in (columns.keys, columns.values):
        assert sum(buffer.size for buffer in column.buffers() if buffer is not None) < 5_000

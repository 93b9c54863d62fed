"""Rows of state: keys keep their order whatever bytes they hold, and index rows follow from the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.state.format import rows

PARTS = st.binary(max_size=12) | st.lists(st.sampled_from([b"\0", b"\1", b"\xff", b"a"]), max_size=8).map(b"".join)
TIMES = st.integers(-(1 << 62), 1 << 62)


# ---- keys --------------------------------------------------------------------------------------------


@given(PARTS, PARTS)
def test_escaped_parts_keep_their_order(one: bytes, other: bytes) -> None:
    assert (rows.escape(one) < rows.escape(other)) == (one < other)


@given(PARTS, PARTS)
def test_no_escaped_part_begins_with_another(one: bytes, other: bytes) -> None:
    assert one == other or not rows.escape(one).startswith(rows.escape(other))


@given(PARTS, PARTS)
def test_escaped_parts_are_found_again_whatever_follows(part: bytes, rest: bytes) -> None:
    assert rows.split(rows.escape(part) + rest) == (part, rest)


@given(PARTS, PARTS, PARTS)
def test_parts_of_map_keys(key: bytes, name: bytes, entry: bytes) -> None:
    row_key = rows.map_key(key, name, entry)
    assert rows.map_parts(row_key) == (key, name, entry)
    assert row_key.startswith(rows.map_key(key, name))
    assert rows.is_internal(row_key)


@given(st.tuples(PARTS, PARTS, PARTS), st.tuples(PARTS, PARTS, PARTS))
def test_map_keys_are_in_order_of_their_parts(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    assert (rows.map_key(*one) < rows.map_key(*other)) == (one < other)


@given(PARTS, PARTS, TIMES, st.sampled_from([b"e", b"p"]))
def test_parts_of_timer_keys(key: bytes, name: bytes, at_ms: int, clock: bytes) -> None:
    assert rows.timer_parts(rows.timer_key(key, name)) == (key, name)
    assert rows.timer_index_parts(rows.timer_index(clock, at_ms, key, name)) == (clock, at_ms, key, name)


@given(TIMES, TIMES)
def test_times_keep_their_order(one: int, other: int) -> None:
    assert (rows.time_bytes(one) < rows.time_bytes(other)) == (one < other)
    assert rows.time_of(rows.time_bytes(one)) == one


@given(TIMES, PARTS)
def test_parts_of_expiry_keys(at_ms: int, row_key: bytes) -> None:
    assert rows.expiry_index_parts(rows.expiry_index(at_ms, row_key)) == (at_ms, row_key)


@given(PARTS, PARTS)
def test_after_a_prefix(prefix: bytes, key: bytes) -> None:
    end = rows.after(prefix)
    assert key.startswith(prefix) == (prefix <= key and (end is None or key < end))


# ---- rows --------------------------------------------------------------------------------------------


@given(st.binary(max_size=20), st.none() | TIMES, st.integers(0, (1 << 32) - 1))
def test_rows_are_taken_apart_as_they_were_packed(payload: bytes, expires_ms: int | None, version: int) -> None:
    row = rows.pack(payload, expires_ms, version)
    assert rows.unpack(row) == (payload, expires_ms, version)
    assert rows.expiry_of(row) == expires_ms


@given(st.binary(max_size=20), st.none() | TIMES, st.integers(0, (1 << 32) - 1))
def test_flags_travel_in_the_headers(payload: bytes, expires_ms: int | None, version: int) -> None:
    row = rows.pack(payload, expires_ms, version)
    assert rows.from_record(payload, rows.record_headers(rows.unpack(row))) == row


@pytest.mark.parametrize("raw", [None, b"", b"soon", b"1" * 30, b"\xff", b"-1", b"4294967296"])
def test_headers_that_make_no_sense_do_not_stop_a_restore(raw: bytes | None) -> None:
    assert rows.unpack(rows.from_record(b"x", [("other", b"1"), (rows.VERSION_HEADER, raw)])) == (b"x", None, 0)


# ---- index -------------------------------------------------------------------------------------------

TIMER, KEY, ENTRY = rows.timer_key(b"k", b"t"), rows.value_key(b"k"), rows.map_key(b"k", b"m", b"e")


def timer(at_ms: int, clock: bytes = b"e") -> bytes:
    return rows.pack(rows.timer_payload(clock, at_ms))


@given(PARTS, PARTS, PARTS, TIMES, st.none() | TIMES, st.integers(0, 3))
def test_index_rows_of_new_rows(
    key: bytes, name: bytes, entry: bytes, at_ms: int, expires_ms: int | None, version: int
) -> None:
    changes: dict[bytes, bytes | None] = {
        rows.value_key(key): rows.pack(entry, expires_ms, version),
        rows.map_key(key, name, entry): rows.pack(b"", expires_ms, version),
        rows.timer_key(key, name): rows.pack(rows.timer_payload(b"p", at_ms), None, version),
        rows.timer_key(key, name + b"gone"): None,
        rows.value_key(key + b"gone"): None,
    }
    want = {index: row for index, row in rows.with_index(changes.items(), {}.get) if index not in changes}
    assert dict(rows.new_index(changes.items())) == want


def test_a_moved_timer_moves_its_index_row() -> None:
    old = {TIMER: timer(5)}
    assert dict(rows.with_index([(TIMER, timer(9, b"p"))], old.get)) == {
        TIMER: timer(9, b"p"),
        rows.timer_index(b"e", 5, b"k", b"t"): None,
        rows.timer_index(b"p", 9, b"k", b"t"): b"",
    }


def test_a_timer_that_is_set_to_the_same_time_keeps_its_index_row() -> None:
    assert dict(rows.with_index([(TIMER, timer(5))], {TIMER: timer(5)}.get))[rows.timer_index(b"e", 5, b"k", b"t")] == (
        b""
    )


def test_a_cancelled_timer_takes_its_index_row_along() -> None:
    assert dict(rows.with_index([(TIMER, None)], {TIMER: timer(5)}.get)) == {
        TIMER: None,
        rows.timer_index(b"e", 5, b"k", b"t"): None,
    }
    assert dict(rows.with_index([(TIMER, None)], {}.get)) == {TIMER: None}


@pytest.mark.parametrize("row_key", [KEY, ENTRY])
def test_expiry_is_indexed(row_key: bytes) -> None:
    first, later, never = rows.pack(b"1", 5), rows.pack(b"2", 9), rows.pack(b"3")
    assert dict(rows.with_index([(row_key, first)], {}.get)) == {row_key: first, rows.expiry_index(5, row_key): b""}
    assert dict(rows.with_index([(row_key, later)], {row_key: first}.get)) == {
        row_key: later,
        rows.expiry_index(5, row_key): None,
        rows.expiry_index(9, row_key): b"",
    }
    for row in (never, None):
        changed = dict(rows.with_index([(row_key, row)], {row_key: first}.get))
        assert changed == {row_key: row, rows.expiry_index(5, row_key): None}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([KEY, ENTRY, rows.value_key(b"\0"), TIMER, rows.timer_key(b"k", b"")]),
            st.none() | st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_the_index_follows_any_changes(changes: list[tuple[bytes, int | None]]) -> None:
    """Applied one by one, the index is the one of the rows that are left."""
    held: dict[bytes, bytes] = {}
    for row_key, at_ms in changes:
        if at_ms is None:
            row = None
        else:
            row = timer(at_ms) if row_key[:1] == rows.TIMER else rows.pack(b"", at_ms or None)
        for key, changed in rows.with_index([(row_key, row)], dict(held).get):
            if changed is None:
                held.pop(key, None)
            else:
                held[key] = changed
    plain = {key: row for key, row in held.items() if key[:1] in (rows.VALUE, rows.MAP, rows.TIMER)}
    assert dict(rows.with_index(plain.items(), {}.get)) == held

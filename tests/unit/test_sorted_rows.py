"""Rows of a changelog as columns, sorted and merged: the same as when each record is applied to a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from onceflow.protocol.headers import HEADERS
from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.format import rows, stamps
from onceflow.state.local import spool
from onceflow.state.local.catch_up import internal_rows, stamped_rows, table_rows
from onceflow.state.local.format import is_internal_row
from onceflow.state.local.row_columns import RowColumns
from onceflow.state.local.row_fields import index_of
from onceflow.state.local.sorted_rows import sorted_rows
from onceflow.state.local.spool import Spool

Pairs = list[tuple[bytes, bytes | None]]
Headers = dict[int, list[tuple[str, bytes | None]]]
KEYS = [
    b"",
    b"\0",
    b"\0\0",
    b"a",
    b"a\0",
    b"ab",
    b"b" * 300,
    b"\xff",
    b"\xff\xff",
    b'{"a": 1}',
    b"[ 1]",
    *(b"key-%d" % n for n in range(40)),
]


def columns(pairs: Pairs) -> RowColumns:
    keys, values = [key for key, _ in pairs], [row for _, row in pairs]
    return RowColumns(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))


def pairs_of(blocks: Sequence[RowColumns]) -> Pairs:
    return [pair for each in blocks for pair in zip(each.keys.to_pylist(), each.rows.to_pylist(), strict=True)]


def some_pairs(dice: random.Random, count: int) -> Pairs:
    return [(dice.choice(KEYS), None if dice.random() < 0.3 else dice.randbytes(3)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_last_row_of_each_key_is_left(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(spool, "_BLOCK_ROWS", dice.choice([1, 2, 7, 1000]))
    parts = [some_pairs(dice, dice.randrange(1, 60)) for _ in range(dice.randrange(1, 6))]
    with Spool[int](tmp_path) as waiting:
        for _ in range(2):  # it can be used again
            for mark, pairs in enumerate(parts):
                cut = dice.randrange(len(pairs))
                waiting.add(mark, sorted_rows([columns(pairs[:cut]), columns(pairs[cut:])]))
            found = waiting.take_merged()
            assert found is not None
            assert found[0] == len(parts) - 1
            assert pairs_of(list(found[1])) == sorted(dict(pair for pairs in parts for pair in pairs).items())
            assert waiting.rows == waiting.nbytes == 0
            assert waiting.take_merged() is None


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_taken_in_their_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(spool, "_BLOCK_ROWS", 3)
    parts = [some_pairs(dice, 20) for _ in range(4)]
    with Spool[int](tmp_path) as waiting:
        for mark, pairs in enumerate(parts):
            waiting.add(mark, sorted_rows([columns(pairs)]))
        taken = [(mark, pairs_of(list(blocks))) for mark, blocks in waiting.take()]
    assert taken == [(mark, sorted(dict(pairs).items())) for mark, pairs in enumerate(parts)]


def records(
    keys: Sequence[bytes | None], values: Sequence[bytes | None], headers: Headers | None = None
) -> RecordColumns:
    nothing = np.zeros(len(keys), np.int64)
    listed = pa.array([(headers or {}).get(at) for at in range(len(keys))], HEADERS)
    columns = pa.array(keys, pa.binary()), pa.array(values, pa.binary())
    return RecordColumns(*columns, nothing, nothing, nothing.astype(np.int32), listed)


LONG_KEYS: list[bytes | None] = [None, b"k" * 501, b"k" * 5000]


@pytest.mark.parametrize("make", [table_rows, stamped_rows, internal_rows])
def test_no_record_gives_no_row(make: Callable[[RecordColumns], RowColumns]) -> None:
    found = make(records([], []))
    assert (pairs_of([found]), found.ignored) == ([], 0)


@pytest.mark.parametrize("headers", [False, True])
def test_rows_of_a_table(headers: bool) -> None:
    keys = [*LONG_KEYS, b"", b"a", b"a", b"b"]
    values = [b"1", b"2", b"3", b"", None, b"4", b"\0\1"]
    found = table_rows(
        records(keys, values, {5: [(rows.EXPIRES_HEADER, b"77")], 4: [("other", None)]} if headers else {})
    )
    want: Pairs = [
        (b"v" + b"k" * 501, b"\0002"),
        (b"v" + b"k" * 5000, b"\0003"),
        (b"v", b"\0"),
        (b"va", None),
        (b"va", b"\0004"),
        (b"vb", b"\0\0\1"),
    ]
    if headers:
        want[4] = (b"va", rows.pack(b"4", 77))
    assert (pairs_of([found]), found.ignored) == (want, 1)


@pytest.mark.parametrize("odd", [[], [None], [b"short"], [b"\x80" + bytes(7)], [b"", b"longer than 8"]])
def test_stamped_rows_of_a_table(odd: list[bytes | None]) -> None:
    values = [stamps.row_of(stamp)[1:] for stamp in (0, 5, 2**62)] + odd
    keys = [b"id-%d" % at for at in range(len(values))]
    found = stamped_rows(records([*keys, None], [*values, bytes(8)]))
    want = [
        (b"v" + key, None if each is None else stamps.from_value(each)) for key, each in zip(keys, values, strict=True)
    ]
    assert (pairs_of([found]), found.ignored) == (want, 1)


def test_rows_of_an_internal_topic() -> None:
    pairs: list[tuple[bytes | None, bytes | None]] = [
        (rows.map_key(b"k", b"m", b"e"), rows.pack(b"1", 7)),
        (rows.timer_key(b"k", b"t"), rows.pack(rows.timer_payload(b"e", 5))),
        (rows.timer_key(b"k", b"t"), b"of another program"),
        (rows.map_key(b"k", b"m", b"e"), None),
        (b"v", b"\0"),
        (None, None),
    ]
    found = internal_rows(records([key for key, _ in pairs], [row for _, row in pairs]))
    want = [(key, row) for key, row in pairs if key is not None and is_internal_row(key, row)]
    assert (pairs_of([found]), found.ignored, len(want)) == (want, 3, 3)


ENTRY: tuple[bytes | None, bytes | None] = rows.map_key(b"k", b"m", b"e"), rows.pack(b"1")
TIMER: tuple[bytes | None, bytes | None] = rows.timer_key(b"k", b"t"), rows.pack(rows.timer_payload(b"e", 5))


@pytest.mark.parametrize(
    "odd",
    [
        [],
        [(ENTRY[0], None)],
        [(ENTRY[0], b"")],
        [(ENTRY[0], b"\1")],
        [(ENTRY[0], rows.pack(b"", 5))],
        [(TIMER[0], b"\0short")],
        [(TIMER[0], None)],
        [(TIMER[0], b"\1" + (TIMER[1] or b"")[1:])],
        [(b"x", b"\0")],
        [(b"", b"\0")],
        [(None, b"\0")],
        [(b"m" * 5000, b"\0")],
    ],
)
def test_rows_of_an_internal_topic_one_by_one(odd: list[tuple[bytes | None, bytes | None]]) -> None:
    """Most chunks have only plain rows, which are looked at together."""
    pairs = [ENTRY, TIMER, *odd, ENTRY]
    found = internal_rows(records([key for key, _ in pairs], [row for _, row in pairs]))
    want = [(key, row) for key, row in pairs if key is not None and is_internal_row(key, row)]
    assert (pairs_of([found]), found.ignored) == (want, len(pairs) - len(want))


NUMBERS: list[bytes | None] = [
    b"0",
    b"-5",
    b"7",
    b"77",
    b"9" * 18,
    b"9" * 19,
    b"x",
    b"",
    b"+3",
    b" 4",
    None,
    b"4294967296",
]


@pytest.mark.parametrize("seed", range(20))
def test_headers_become_the_same_fields_as_one_by_one(seed: int) -> None:
    """Headers may be there twice, or may be of another program."""
    dice = random.Random(seed)
    names = [rows.EXPIRES_HEADER, rows.VERSION_HEADER, "other"][: dice.choice([1, 2, 3])]
    numbers = dice.sample(NUMBERS, dice.randrange(1, len(NUMBERS)))
    keys = [b"k%d" % at for at in range(50)]
    values = [None if dice.random() < 0.1 else dice.randbytes(dice.randrange(5)) for _ in keys]
    headers: Headers = {
        at: [(dice.choice(names), dice.choice(numbers)) for _ in range(dice.randrange(4))]
        for at in range(len(keys))
        if dice.random() < 0.9
    }
    low, high = sorted(dice.sample(range(len(keys) + 1), 2))  # chunks are slices
    found = table_rows(records(keys, values, headers).slice(low, high))
    want = [
        (b"v" + keys[at], None if (value := values[at]) is None else rows.from_record(value, headers.get(at, ())))
        for at in range(low, high)
    ]
    assert pairs_of([found]) == want


@pytest.mark.parametrize("seed", range(20))
def test_index_rows_are_the_same_as_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    kinds = dice.choice(["v", "m", "t", "vm", "vmt"])
    pairs: list[tuple[bytes, bytes]] = []
    for at in range(60):
        key, expires_ms = b"key-%d\0" % at, dice.choice([None, -1, 5 + at])
        if (kind := dice.choice(kinds)) == "t":
            payload = rows.timer_payload(dice.choice([b"e", b"p"]), dice.randrange(-3, 3))
            pairs.append(
                (rows.timer_key(key, b"n" * dice.randrange(3)), rows.pack(payload, dice.choice([None] * 40 + [9])))
            )
        else:
            row_key = rows.value_key(key) if kind == "v" else rows.map_key(key, b"map", b"entry")
            pairs.append((row_key, rows.pack(dice.randbytes(dice.randrange(3)), expires_ms, dice.choice([0, 2]))))
    low, high = sorted(dice.sample(range(len(pairs) + 1), 2))
    whole = columns([*pairs])
    found = index_of(RowColumns(whole.keys[low:high], whole.rows[low:high]))
    want = sorted(rows.new_index(pairs[low:high]))
    assert ([] if found is None else sorted(pairs_of([found]))) == want


def test_no_row_has_no_index_row() -> None:
    assert index_of(columns([])) is None

"""Rows of a changelog as columns, sorted and merged: the same as when each record is applied to a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow.state import rows, stamps
from onceflow.state.local import spool
from onceflow.state.local.changelog_rows import RowColumns, internal_rows, stamped_rows, table_rows
from onceflow.state.local.format import is_internal_row
from onceflow.state.local.sorted_rows import sorted_rows
from onceflow.state.local.spool import Spool

Pairs = list[tuple[bytes, bytes | None]]
KEYS = [b"", b"\0", b"\0\0", b"a", b"a\0", b"ab", b"b" * 300, b"\xff", b"\xff\xff", *(b"key-%d" % n for n in range(40))]


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


@dataclass
class Chunk:
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: dict[int, list[tuple[str, bytes | None]]] = field(default_factory=dict)
    next_offset: int = 0
    whole: bool = True


LONG_KEYS: list[bytes | None] = [None, b"k" * (rows.ROW_KEY_BYTES_MAX - 1), b"k" * rows.ROW_KEY_BYTES_MAX]


@pytest.mark.parametrize("make", [table_rows, stamped_rows, internal_rows])
def test_no_record_gives_no_row(make: Callable[[Chunk], RowColumns]) -> None:
    found = make(Chunk([], []))
    assert (pairs_of([found]), found.ignored) == ([], 0)


@pytest.mark.parametrize("headers", [False, True])
def test_rows_of_a_table(headers: bool) -> None:
    keys = [*LONG_KEYS, b"", b"a", b"a", b"b"]
    values = [b"1", b"2", b"3", b"", None, b"4", b"\0\1"]
    chunk = Chunk(keys, values, {5: [(rows.EXPIRES_HEADER, b"77")], 4: [("other", None)]} if headers else {})
    found = table_rows(chunk)
    want: Pairs = [(b"v" + b"k" * 501, b"\0002"), (b"v", b"\0"), (b"va", None), (b"va", b"\0004"), (b"vb", b"\0\0\1")]
    if headers:
        want[3] = (b"va", rows.pack(b"4", 77))
    assert (pairs_of([found]), found.ignored) == (want, 2)


@pytest.mark.parametrize("odd", [[], [None], [b"short"], [b"\x80" + bytes(7)], [b"", b"longer than 8"]])
def test_stamped_rows_of_a_table(odd: list[bytes | None]) -> None:
    values = [stamps.row_of(stamp)[1:] for stamp in (0, 5, 2**62)] + odd
    keys = [b"id-%d" % at for at in range(len(values))]
    found = stamped_rows(Chunk([*keys, None], [*values, bytes(8)]))
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
    found = internal_rows(Chunk([key for key, _ in pairs], [row for _, row in pairs]))
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
        [(b"m" * (rows.ROW_KEY_BYTES_MAX + 1), b"\0")],
        [(b"m" * rows.ROW_KEY_BYTES_MAX, b"\0")],
    ],
)
def test_rows_of_an_internal_topic_one_by_one(odd: list[tuple[bytes | None, bytes | None]]) -> None:
    """Most chunks have only plain rows, which are looked at together."""
    pairs = [ENTRY, TIMER, *odd, ENTRY]
    found = internal_rows(Chunk([key for key, _ in pairs], [row for _, row in pairs]))
    want = [(key, row) for key, row in pairs if key is not None and is_internal_row(key, row)]
    assert (pairs_of([found]), found.ignored) == (want, len(pairs) - len(want))

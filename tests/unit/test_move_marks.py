"""Marks around rows that a repartitioning moves, as lists and as columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.client.committed import Chunk
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.local.move_marks import MARK_HEADER, MARK_KEY, Mark, Moves, mark_headers, marks_of
from onceflow.tables.layout import Layout

Given = list[tuple[bytes | None, list[tuple[str, bytes | None]]]]


def as_lists(records: Given) -> Chunk:
    headers = {at: headers for at, (_, headers) in enumerate(records) if headers}
    return Chunk([key for key, _ in records], [None] * len(records), headers)


def as_columns(records: Given) -> Any:
    listed = [[{"key": name, "value": value} for name, value in headers] or None for _, headers in records]
    count = len(records)
    numbers, kinds = np.zeros(count, np.int64), np.zeros(count, np.int32)
    keys, values = (pa.array(each, pa.binary()) for each in ([key for key, _ in records], [None] * count))
    return SimpleNamespace(records=RecordColumns(keys, values, numbers, numbers, kinds, pa.array(listed, HEADERS)))


BEGIN, END = mark_headers(12, 5, ended=False), mark_headers(12, 5, ended=True)


@pytest.mark.parametrize("chunk_of", [as_lists, as_columns])
def test_marks_are_found(chunk_of: Any) -> None:
    records: Given = [(b"a", []), (MARK_KEY, BEGIN), (b"b", [("onceflow.expires", b"1")]), (None, []), (MARK_KEY, END)]
    assert marks_of(chunk_of(records)) == [Mark(1, 12, False, 5), Mark(4, 12, True, 5)]
    assert marks_of(chunk_of([])) == []
    # What only looks like one: the headers of another key, the key alone, other headers.
    others: Given = [(b"a", BEGIN), (MARK_KEY, [])]
    wrong = (
        None,
        b"",
        b"begin",
        b"begin 12",
        b"begin x 5",
        b"begin 12 5 6",
        b"other 12 5",
        b"begin -1 5",
        b"begin 12 ",
    )
    others += [(MARK_KEY, [(MARK_HEADER, each)]) for each in wrong]
    assert marks_of(chunk_of(others)) == []


@given(st.lists(st.sampled_from(["row", "begin", "end"]), max_size=30), st.integers(1, 5))
def test_what_moves_does_not_depend_on_chunks(kinds: list[str], size: int) -> None:
    """Everything from a begin to its end, and the marks themselves."""
    wanted, moving = [], False
    for kind in kinds:
        moving = kind == "begin" or (moving and kind == "row")
        wanted.append(moving or kind != "row")
    found: list[bool] = []
    moves = Moves()
    for start in range(0, len(kinds), size):
        part = kinds[start : start + size]
        marks = [Mark(at, 2, kind == "end", 0) for at, kind in enumerate(part) if kind != "row"]
        moves = moves.after(len(part), marks)
        found += [at in moves.still for at in range(len(part))]
    assert found == wanted
    assert moves.moving == moving


def test_when_a_copy_has_all_of_its_rows() -> None:
    layout = Layout()
    assert layout.is_complete(0, None)
    assert layout.hear(4, 1_000)
    assert not layout.hear(4, 9_000)
    assert not layout.hear(3, 9_000)
    assert (layout.partitions, layout.since_ms) == (4, 1_000)
    assert layout.is_complete(4, None)
    assert not layout.is_complete(2, 1_500)
    assert not layout.is_complete(0, None)
    # Its mark was compacted away long ago.
    assert layout.is_complete(0, 61_001)
    assert layout.hear(8, 100_000)
    assert not layout.is_complete(4, 100_500)

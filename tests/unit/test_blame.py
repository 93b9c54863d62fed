"""The record that a query fails for is found among many, or none is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.driver.batch import blame
from onceflow.driver.batch.blame import culprit
from onceflow.protocol.record_columns import RecordColumns
from onceflow.spark import jvm


def records(keys: Sequence[str], first: int = 100) -> RecordColumns:
    count = len(keys)
    return RecordColumns(
        keys=pa.array([key.encode() for key in keys], pa.binary()),
        values=pa.array([b"v"] * count, pa.binary()),
        headers=pa.nulls(count),
        offsets=np.arange(first, first + count),
        timestamps_ms=np.zeros(count, np.int64),
        timestamp_types=np.zeros(count, np.int32),
    )


class Query:
    """It fails for the records with some keys, after it has made rows of those before."""

    def __init__(self, *bad: str) -> None:
        self.bad, self.calls = set(bad), 0

    def of(self, parts: Any) -> Iterator[pa.RecordBatch]:
        self.calls += 1
        for _, found in parts:
            for key in found.keys.to_pylist():
                if key.decode() in self.bad:
                    raise ZeroDivisionError(key)
                yield pa.RecordBatch.from_pylist([{"key": key}])


def named(query: Any, *parts: RecordColumns, **options: Any) -> str:
    return culprit([query], [(("in", n), part) for n, part in enumerate(parts)], **options)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(count=st.integers(1, 300), bad=st.sets(st.integers(0, 299), max_size=4), parts=st.integers(1, 3))
def test_the_first_record_that_fails(count: int, bad: set[int], parts: int) -> None:
    query = Query(*map(str, bad))
    found = named(query, *(records([str(n) for n in range(at, count, parts)]) for at in range(parts)))
    there = [(n % parts, n // parts) for n in bad if n < count]
    if not there:
        assert found == ""
    else:
        partition, at = min(there)
        key = str(at * parts + partition).encode()
        assert found == f"in-{partition}@{100 + at}, key {key!r}"
    assert query.calls <= parts + 2 * 9


def test_records_that_fail_together_only() -> None:
    class Together(Query):
        def of(self, parts: Any) -> Iterator[pa.RecordBatch]:
            if sum(len(found) for _, found in parts) > 1:
                raise ZeroDivisionError
            yield from ()

    assert named(Together(), records(["a", "b"])) == ""


@given(
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=3), bad=st.integers(0, 260)
)
def test_a_record_that_tasks_have_read(ranges: list[tuple[int, int]], bad: int) -> None:
    """Offsets without records are passed over."""
    calls = 0

    def fails(topic: str, partition: int, start: int, end: int) -> bool:
        nonlocal calls
        calls += 1
        return start <= bad < end

    places = [("in", number, start, start + count) for number, (start, count) in enumerate(ranges)]
    found = blame.culprit_of_range(places, fails)
    there = [number for _, number, start, end in places if start <= bad < end]
    assert found == (f"in-{there[0]}@{bad}" if there else "")
    assert calls <= len(places) + 10
    ticks = itertools.count(0, blame._SECONDS / 2.5)
    in_part = blame.culprit_of_range([("in", 0, 0, 261)], fails, clock=lambda: next(ticks))
    first, last = map(int, in_part.removeprefix("in-0@").split(" to "))
    assert first <= bad <= last


@pytest.mark.parametrize("at_least", [2, 3, 10])
def test_tasks_name_no_record_that_does_not_fail_by_itself(at_least: int) -> None:
    found = blame.culprit_of_range([("in", 0, 0, 100)], lambda topic, partition, start, end: end - start >= at_least)
    assert found == ""


def test_it_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query("7")
    ticks = itertools.count(0, blame._SECONDS / 3)
    assert named(query, records([str(n) for n in range(200)]), clock=lambda: next(ticks)) == ""
    assert query.calls <= 4


class Spark(Exception):
    pass


@pytest.mark.parametrize(
    "text, expression",
    [
        ("[X] y. SQLSTATE: 22012\n== SQL (line 1, position 1) ==\nprice / (id - 515)\n^^^^", "price / (id - 515)"),
        ("[X] y\n== SQL(line 1, position 8) ==\nSELECT 1 / id FROM t\n       ^^^^^^", "SELECT 1 / id FROM t"),
        ('[X] y\n== DataFrame ==\n"divide" was called from\n/a/service.py:12\n', '"divide" /a/service.py:12'),
        ("[X] y", ""),
        ("== SQL (line 1, position 1) ==", ""),
    ],
)
def test_the_expression_that_an_error_quotes(text: str, expression: str) -> None:
    assert jvm.expression(Spark(text)) == expression

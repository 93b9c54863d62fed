"""`peek` without Kafka: its arguments, how partitions are merged, reading backwards over holes, and read-only flows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest

from onceflow.admin.records import topic_excerpt
from onceflow.admin.records.topic_excerpt import MAX_RECORDS, Excerpt, newest_of, oldest_of, take
from onceflow.client.committed import Chunk
from onceflow.errors import OptionError
from onceflow.state.api.record import Record
from onceflow.topic_frame import _excerpt, _row, peek

NONE: dict[str, Any] = {"last": None, "first": None, "since": None, "partitions": None}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"last": 1, "first": 1}, "Both last= and first="),
        ({"last": 0}, "last=0 is not a number of records"),
        ({"first": True}, "first=True is not a number of records"),
        ({"last": "9"}, "last='9' is not a number of records"),
        ({"since": "an hour"}, "since='an hour' is neither a duration nor a datetime"),
        ({"since": datetime(2025, 1, 1)}, "has no time zone"),
        ({"partitions": []}, "is not a list of partitions"),
        ({"partitions": "01"}, "is not a list of partitions"),
        ({"partitions": 3}, "partitions=3 is not a list of partitions"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        _excerpt("t", **{**NONE, **given})
    assert raised.value.next_step


def test_what_is_taken_by_default() -> None:
    assert _excerpt("t", **NONE) == Excerpt(1000)
    assert _excerpt("t", **{**NONE, "first": 3}) == Excerpt(3, newest=False)
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    assert _excerpt("t", **{**NONE, "since": at}) == Excerpt(MAX_RECORDS, since_ms=1000, fails_beyond=True)
    assert _excerpt("t", **{**NONE, "since": at, "last": 2}) == Excerpt(2, since_ms=1000)


def test_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEFLOW_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(OptionError, match="No bootstrap servers"):
        peek(None, "t")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "at, year", [(0, 1970), (4_070_908_800_000, 2099), (-1, None), (None, None), (1_795_000_000_000_000, None)]
)
def test_times_that_python_cannot_have(at: int | None, year: int | None) -> None:
    stamp = _row(Record(b"k", b"v", "t", (), at, 0, 1), 0)[5]
    assert (None if stamp is None else stamp.year) == year


def records(partition: int, *stamps: int) -> list[Record]:
    return [Record(topic="t", timestamp_ms=at, partition=partition, offset=n) for n, at in enumerate(stamps)]


def test_partitions_keep_their_order() -> None:
    one, other = records(0, 1, 9, 5), records(1, 2, 6)
    assert newest_of(one, other, 3) == [one[1], one[2], other[1]], "9 is before 5 in its partition"
    assert newest_of(one, [], 9) == one
    assert oldest_of(one, other, 3) == [one[0], other[0], other[1]]


class Log:
    """Partitions of a log in which only some offsets have visible records; their timestamps are their offsets."""

    def __init__(self, *visible: list[int], end: int) -> None:
        self.visible = visible
        self.end = end
        self.ranges: list[tuple[int, int]] = []

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        self.ranges.append((start, end))
        there = [offset for offset in self.visible[partition] if start <= offset < end]
        values = [str(offset).encode() for offset in there]
        stamps = np.array(there, dtype=np.int64)
        yield Chunk([None] * len(there), [*values], next_offset=end, stamps=[stamps], places=[stamps])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    world = Log([7, 8, 9, 9_990], [5], [], end=10_000)
    ends = dict.fromkeys(range(3), world.end)
    monkeypatch.setattr(topic_excerpt, "CommittedReader", lambda *_, **__: world)
    monkeypatch.setattr(topic_excerpt.topic_records, "stable_offsets", lambda *_: ends)
    monkeypatch.setattr(
        topic_excerpt,
        "list_offsets",
        lambda _, __, at, ___: {"t": dict.fromkeys(ends, 0) if at < 0 else world.since(at)},
    )
    return world


def taken(wanted: Excerpt) -> list[int | None]:
    return [record.offset for record in take(None, "t", wanted)]  # type: ignore[arg-type]


def test_ranges_grow_backwards_over_holes(log: Log) -> None:
    assert taken(Excerpt(3)) == [8, 9, 9_990]
    assert log.ranges[:2] == [(9_900, 10_000), (9_500, 9_900)]
    assert taken(Excerpt(99)) == [5, 7, 8, 9, 9_990], "more are asked for than there are"
    assert taken(Excerpt(2, newest=False)) == [5, 7]


def test_a_time_that_has_too_much_after_it(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "since", lambda at: {0: 8, 1: -1, 2: -1}, raising=False)
    assert taken(Excerpt(3, since_ms=8, fails_beyond=True)) == [8, 9, 9_990]
    with pytest.raises(OptionError, match="more than 2 records"):
        taken(Excerpt(2, since_ms=8, fails_beyond=True))

"""What waits for the batches of the direct engine: every batch takes a range without gaps, whatever limits it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pytest

from onceflow.client.column_chunks import ColumnChunk
from onceflow.direct.arrivals import Arrivals, Limits, Taken
from onceflow.direct.fetched import FetchedPart
from onceflow.protocol.record_columns import RecordColumns
from onceflow.task.source_rows import QueryRows
from onceflow.task.task_program import TaskProgram, TopicProgram, TopicRead

QUERY = QueryRows(
    TaskProgram(
        tuple(
            TopicProgram(TopicRead(name, include_headers=False, fail_on_data_loss=True, max_records=None))
            for name in ("in", "other")
        ),
        ("key", "value"),
    )
)
NO_LIMITS = Limits({}, 10**9, 10**12)


def part(start: int, end: int, *, partition: int = 0, topic: str = "in", without: tuple[int, ...] = ()) -> FetchedPart:
    """Records with these offsets, apart from some that were aborted. The value of a record is its offset."""
    offsets = [offset for offset in range(start, end) if offset not in without]
    values = pa.array([b"%d" % offset for offset in offsets], pa.binary())
    stamps = np.array(offsets, np.int64)
    records = RecordColumns(values, values, stamps, stamps, np.zeros(len(offsets), np.int32))
    chunk = ColumnChunk(records, end, True, None, 10 * len(offsets))
    return FetchedPart((topic, partition), start, end, chunk)


def offsets_of(taken: Taken) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for each in taken.parts:
        found.setdefault(each.topic_partition, []).extend(
            int(v) for rows in each.rows(QUERY) for v in rows.column("value").to_pylist()
        )
    return found


def test_everything_without_limits() -> None:
    arrivals = Arrivals({"in": {0: 5, 1: 0}})
    arrivals.add(part(5, 9, without=(7,)))
    arrivals.add(part(0, 2, partition=1))
    arrivals.add(part(9, 10))
    assert (arrivals.offsets, arrivals.nbytes) == ({"in": 7}, 60)
    taken = arrivals.take(NO_LIMITS)
    assert (taken.source.start, taken.source.end) == ({"in": {0: 5, 1: 0}}, {"in": {0: 10, 1: 2}})
    assert offsets_of(taken) == {("in", 0): [5, 6, 8, 9], ("in", 1): [0, 1]}
    assert not arrivals.has_offsets
    assert arrivals.take(NO_LIMITS).source == arrivals.nothing()


def test_offsets_without_records() -> None:
    """A marker, or records that were aborted."""
    arrivals = Arrivals({"in": {0: 0}})
    arrivals.add(part(0, 3, without=(0, 1, 2)))
    assert arrivals.has_offsets
    assert not arrivals.has_records
    taken = arrivals.take(NO_LIMITS)
    assert taken.source.max_rows == 3
    assert offsets_of(taken) == {("in", 0): []} or not offsets_of(taken)


def test_a_part_is_divided_at_the_limit_of_its_topic() -> None:
    arrivals = Arrivals({"in": {0: 0}, "other": {0: 0}})
    arrivals.add(part(0, 10))
    arrivals.add(part(0, 10, topic="other"))
    assert [arrivals.takeable(most) for most in ({}, {"in": 4}, {"in": 4, "other": 40})] == [20, 14, 14]
    taken = arrivals.take(Limits({"in": 4}, 100, 10**9))
    assert taken.source.end == {"in": {0: 4}, "other": {0: 10}}
    assert arrivals.offsets == {"in": 6, "other": 0}
    assert offsets_of(taken)["in", 0] == [0, 1, 2, 3]
    assert offsets_of(arrivals.take(Limits({"in": 4}, 100, 10**9))) == {("in", 0): [4, 5, 6, 7]}


def test_a_later_part_never_overtakes_one_that_waits() -> None:
    arrivals = Arrivals({"in": {0: 0, 1: 0}})
    arrivals.add(part(0, 10))
    arrivals.add(part(10, 12))
    arrivals.add(part(0, 5, partition=1))
    taken = arrivals.take(NO_LIMITS, {"in": {0: 3, 1: 5}})
    assert taken.source.end == {"in": {0: 3, 1: 5}}
    assert arrivals.take(NO_LIMITS, {"in": {0: 3, 1: 5}}).source.max_rows == 0
    assert offsets_of(arrivals.take(NO_LIMITS)) == {("in", 0): [3, 4, 5, 6, 7, 8, 9, 10, 11]}


def test_nothing_of_a_partition_without_a_bound() -> None:
    """It was added after the end of the read was fixed."""
    arrivals = Arrivals({"in": {0: 0}})
    arrivals.begin("in", 1, 0)
    arrivals.add(part(0, 2, partition=1))
    arrivals.add(part(0, 2))
    assert arrivals.take(NO_LIMITS, {"in": {0: 2}}).source.end == {"in": {0: 2, 1: 0}}


def test_the_batch_ends_with_the_response_that_reaches_the_bytes() -> None:
    arrivals = Arrivals({"in": {0: 0}})
    for n in range(4):
        arrivals.add(part(10 * n, 10 * n + 10))
    assert arrivals.take(Limits({}, 1000, 150)).source.end == {"in": {0: 20}}
    assert arrivals.nbytes == 200


def test_what_is_dropped_is_not_taken() -> None:
    """It is read again, from where batches are."""
    arrivals = Arrivals({"in": {0: 0}})
    arrivals.add(part(0, 4))
    arrivals.drop()
    assert (arrivals.has_offsets, arrivals.nbytes, arrivals.offsets) == (False, 0, {"in": 0})
    assert arrivals.nothing().end == {"in": {0: 0}}
    arrivals.add(part(0, 2))
    assert offsets_of(arrivals.take(NO_LIMITS)) == {("in", 0): [0, 1]}


def test_a_range_that_others_read() -> None:
    """The next one begins at its end, and partitions of which nothing is read stay where they are."""
    starts = {"in": {0: 5, 1: 7}, "other": {0: 1}}
    arrivals = Arrivals(starts)
    there = arrivals.nothing()
    ranges = [arrivals.take_unread({"in": {0: 9}}), arrivals.take_unread({"in": {1: 8}, "other": {0: 3}})]
    arrivals.add(part(9, 10))
    ranges.append(arrivals.take(NO_LIMITS).source)
    assert there.start == there.end == ranges[0].start == starts == {"in": {0: 5, 1: 7}, "other": {0: 1}}
    assert ranges[0].end == ranges[1].start == {"in": {0: 9, 1: 7}, "other": {0: 1}}
    assert ranges[1].end == ranges[2].start == {"in": {0: 9, 1: 8}, "other": {0: 3}}
    assert ranges[2].end == {"in": {0: 10, 1: 8}, "other": {0: 3}}


def test_others_read_nothing_that_waits() -> None:
    arrivals = Arrivals({"in": {0: 0}})
    arrivals.add(part(0, 2))
    with pytest.raises(AssertionError, match="read twice"):
        arrivals.take_unread({"in": {0: 2}})


def test_a_partition_that_was_added() -> None:
    """The first records of it have expired already."""
    arrivals = Arrivals({"in": {0: 0}})
    arrivals.begin("in", 1, 3)
    arrivals.add(part(3, 5, partition=1))
    taken = arrivals.take(NO_LIMITS)
    assert (taken.source.start, taken.source.end) == ({"in": {0: 0, 1: 3}}, {"in": {0: 0, 1: 5}})


def test_rows_know_their_place() -> None:
    (rows,) = part(4, 6, topic="other", partition=3).rows(QUERY)
    places = rows.select(["topic", "partition", "offset"]).to_pylist()
    assert [tuple(each.values()) for each in places] == [("other", 3, 4), ("other", 3, 5)]


def pieces(rng: random.Random, partitions: int) -> Iterator[FetchedPart]:
    ends = dict.fromkeys(range(partitions), 0)
    for _ in range(rng.randrange(1, 25)):
        partition = rng.randrange(partitions)
        start = ends[partition]
        ends[partition] = end = start + rng.randrange(1, 9)
        yield part(start, end, partition=partition, without=tuple(n for n in range(start, end) if rng.random() < 0.2))


@pytest.mark.parametrize("seed", range(60))
def test_ranges_are_contiguous_and_records_are_taken_once_in_order(seed: int) -> None:
    """Invariant I2, with random arrivals, limits and bounds."""
    rng = random.Random(seed)
    partitions = rng.randrange(1, 4)
    arrivals = Arrivals({"in": dict.fromkeys(range(partitions), 0)})
    waiting = list(pieces(rng, partitions))
    wanted: Mapping[tuple[str, int], list[int]] = {
        ("in", p): [
            o for each in waiting if each.topic_partition == ("in", p) for o in each.chunk.records.offsets.tolist()
        ]
        for p in range(partitions)
    }
    got: dict[tuple[str, int], list[int]] = {topic_partition: [] for topic_partition in wanted}
    before = arrivals.nothing().end
    while waiting or arrivals.has_offsets:
        for _ in range(rng.randrange(3)):
            if waiting:
                arrivals.add(waiting.pop(0))
        every = rng.randrange(1, 12)
        limit = {"in": rng.randrange(1, 10)} if rng.random() < 0.5 else {}
        bounds = {"in": {p: rng.randrange(60) for p in range(partitions)}} if rng.random() < 0.2 else None
        taken = arrivals.take(Limits(limit, every, rng.randrange(1, 200)), bounds)
        assert taken.source.start == before
        assert taken.source.max_rows <= min(every, limit.get("in", every))
        before = taken.source.end
        for topic_partition, offsets in offsets_of(taken).items():
            start, end = taken.source.start["in"][topic_partition[1]], taken.source.end["in"][topic_partition[1]]
            assert all(start <= offset < end for offset in offsets)
            got[topic_partition] += offsets
    assert got == wanted
    assert (arrivals.nbytes, arrivals.offsets) == (0, {"in": 0})

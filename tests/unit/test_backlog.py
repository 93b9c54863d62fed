"""Who reads the next batch of the direct engine, and what tasks read when they do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from onceflow.direct import backlog as module
from onceflow.direct.backlog import BEHIND_S, CAUGHT_UP_S, Backlog
from onceflow.direct.run import stays_in_memory
from onceflow.direct.shares import Shares, spread
from onceflow.planning.engine import AUTO, DRIVER, TASKS
from onceflow.planning.range_tasks import dealt, reading_tasks
from onceflow.state.table_facts import TableFacts

DRIVER_PER_S = 1000


def known(**options: Any) -> Backlog:
    """The driver is known to read 1,000 records/s."""
    backlog = Backlog("deposits", AUTO, **options)
    for _ in range(10):
        backlog.ran(DRIVER_PER_S, 1.0, now=0.0)
    return backlog


def test_tasks_take_over_when_the_driver_would_need_long_and_give_back_later() -> None:
    backlog = known()
    enter, leave = int(BEHIND_S * DRIVER_PER_S), int(CAUGHT_UP_S * DRIVER_PER_S)
    seen = []
    for left in (0, enter, enter + 1, enter - 1, leave, leave - 1, enter, enter + 1):
        backlog.looked(left, now=0.0)
        seen.append(backlog.by_tasks)
    assert seen == [False, False, True, True, True, False, False, True], "with hysteresis"


def test_nothing_is_handed_over_before_the_driver_is_known() -> None:
    backlog = Backlog("deposits", AUTO)
    backlog.looked(10**12, now=0.0)
    backlog.ran(10, 1.0, now=0.0)
    backlog.looked(10**12, now=0.0)
    assert not backlog.by_tasks


def test_a_batch_of_tasks_fits_into_its_transaction() -> None:
    """However much a record costs: tasks were given 100,000 of them at once, and more than a minute of work."""
    assert Backlog("deposits", TASKS, batch_s=15.0).records_max() == 4_000, "nobody knows yet"
    backlog = known(batch_s=15.0)
    assert backlog.records_max() == 15 * DRIVER_PER_S
    backlog.looked(10**6, now=0.0)
    for _ in range(2):  # the first one starts processes
        backlog.ran(20_000, 4.0, now=0.0)
    assert backlog.records_max() == 15 * 5_000
    slow = Backlog("deposits", TASKS, batch_s=15.0)
    slow.ran(4_000, 400.0, now=0.0)
    assert slow.records_max() == 500


def test_tasks_that_are_not_faster_are_given_up_for_a_while() -> None:
    backlog = known()
    backlog.looked(10**6, now=0.0)
    batches = 0
    while backlog.by_tasks:
        backlog.ran(int(1.1 * DRIVER_PER_S), 1.0, now=50.0)
        batches += 1
    assert 1 < batches < 10
    backlog.looked(10**6, now=50.0 + module._PAUSE_S - 1)
    assert not backlog.by_tasks
    backlog.looked(10**6, now=50.0 + module._PAUSE_S)
    assert backlog.by_tasks, "the cluster may have grown"


def test_faster_tasks_stay() -> None:
    backlog = known()
    backlog.looked(10**6, now=0.0)
    for _ in range(50):
        backlog.ran(4 * DRIVER_PER_S, 1.0, now=1.0)
        backlog.looked(10**6, now=1.0)
    assert backlog.by_tasks


def test_too_few_cores() -> None:
    backlog = known(may_help=lambda: False)
    backlog.looked(int(100 * BEHIND_S * DRIVER_PER_S), now=0.0)
    assert not backlog.by_tasks


@pytest.mark.parametrize(
    "place, lefts, by_tasks",
    [(TASKS, [1, 0, 5, 0], [True, False, True, False]), (DRIVER, [10**9, 0, 10**9], [False, False, False])],
)
def test_a_choice_of_the_user(place: str, lefts: list[int], by_tasks: list[bool]) -> None:
    backlog = Backlog("deposits", place, may_help=lambda: False)
    seen = []
    for left in lefts:
        backlog.looked(left, now=0.0)
        seen.append(backlog.by_tasks)
    assert seen == by_tasks
    for _ in range(20):  # how fast tasks are does not matter
        backlog.ran(1, 1.0, now=0.0)
    assert backlog.by_tasks == by_tasks[-1]


def test_the_log_says_who_reads_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onceflow")
    backlog = known()
    backlog.looked(123_456, now=0.0)
    backlog.looked(10, now=0.0)
    taken, given = [record.getMessage() for record in caplog.records]
    assert "deposits: 123,456 records are left to read, about 123 s for the driver" in taken
    assert "deposits: the driver reads again: 10 records left" in given


def test_state_in_the_memory_of_the_driver_stays_there() -> None:
    on_disk = TableFacts("t", 4, 4, {"rows": 600_000, "timers": 600_000}, nbytes=10)
    assert not stays_in_memory([on_disk])
    assert not stays_in_memory([])
    assert stays_in_memory([on_disk, TableFacts("t", 4, 4, {"rows": 1})])


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_takes_of_each_partition_the_same_part(seed: int) -> None:
    rng = random.Random(seed)
    left = {t: {p: rng.choice((0, 1, 5, 10_000)) for p in range(rng.randrange(1, 9))} for t in ("a", "b")}
    total = sum(count for offsets in left.values() for count in offsets.values())
    for records in (0, 1, 7, total // 3, total, total + 1):
        shares = spread(left, records)
        assert sum(count for offsets in shares.values() for count in offsets.values()) == min(records, total)
        for topic, offsets in left.items():
            assert shares[topic].keys() == offsets.keys()
            for partition, count in offsets.items():
                assert 0 <= shares[topic][partition] <= count
                if total and records >= sum(map(len, left.values())):
                    assert abs(shares[topic][partition] - count * min(records, total) / total) <= 1


def test_a_batch_takes_long_ranges_of_the_partitions_that_are_behind() -> None:
    left = {"a": {0: 10_000, 1: 90_000, 2: 50_000}, "b": {0: 50_000}}
    assert spread(left, 30_000, 10_000) == {"a": {0: 0, 1: 14211, 2: 7895}, "b": {0: 7894}}
    assert spread(left, 5_000, 10_000) == {"a": {0: 0, 1: 5_000, 2: 0}, "b": {0: 0}}
    assert spread(left, 10**9, 10_000) == left
    assert spread({"a": {0: 0}}, 100, 10) == {"a": {0: 0}}


@pytest.mark.parametrize("most", [{}, {"a": 15_000}], ids=["any number", "few of one topic"])
def test_no_partition_is_passed_over_for_ever(most: dict[str, int]) -> None:
    """Five partitions get as many new records as batches take; others have little, and nothing new."""
    shares = Shares(most)
    left = {"a": dict.fromkeys(range(5), 10**6) | dict.fromkeys(range(5, 12), 100), "b": {0: 5}}
    for _ in range(12):
        taken = shares.next(left, 20_000)
        assert sum(taken["a"].values()) <= most.get("a", 20_000)
        assert sum(count for offsets in taken.values() for count in offsets.values()) <= 20_000
        for topic, offsets in taken.items():
            for n, count in offsets.items():
                assert 0 <= count <= left[topic][n]
                left[topic][n] -= 0 if left[topic][n] > 1000 else count
    assert left == {"a": dict.fromkeys(range(5), 10**6) | dict.fromkeys(range(5, 12), 0), "b": {0: 0}}


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_is_taken_evenly(seed: int) -> None:
    """Of random partitions with a backlog, in whatever order responses have their records: all are read at the same
    pace, and none takes more than waits. A topic without a limit is taken whole."""
    rng = random.Random(seed)
    partitions, most = rng.randrange(1, 9), rng.randrange(1, 400)
    whole = {n: rng.choice((0, 3, 5_000, 20_000)) for n in range(partitions)}
    shares, read = Shares({"a": most}), dict.fromkeys(range(partitions), 0)
    waiting = dict.fromkeys(range(partitions), 0)
    while sum(read.values()) < sum(whole.values()):
        for n, count in whole.items():
            if waiting[n] < most:  # the next response has all that is left of one, and some records of another
                waiting[n] = min(count - read[n], waiting[n] + rng.choice((most, 20_000)))
        left = {n: count - read[n] for n, count in whole.items()}
        taken = shares.of_waiting({"a": waiting, "b": {0: 7}}, {"a": left}, 10**6)
        assert taken["b"] == {0: 7}
        assert sum(taken["a"].values()) == min(most, sum(waiting.values()))
        for n, count in taken["a"].items():
            assert 0 <= count <= waiting[n]
            waiting[n] -= count
            read[n] += count
        paces = [read[n] / count for n, count in whole.items() if count >= 5_000]
        assert not paces or max(paces) - min(paces) <= 0.1


def test_a_topic_with_a_small_limit_is_not_held_back_by_others() -> None:
    """A part of its limit in proportion to what is left of others would be next to nothing."""
    left = {"a": dict.fromkeys(range(4), 10**7), "b": dict.fromkeys(range(64), 10**6)}
    shares = Shares({"a": 500, "b": 200_000})
    for _ in range(20):
        taken = shares.next(left, 100_000)
        assert taken["a"] == dict.fromkeys(range(4), 125)
        assert sum(taken["b"].values()) == 99_500


def test_a_batch_that_is_smaller_than_the_limit_is_divided_evenly_too() -> None:
    waiting = {"a": {0: 50_000, 1: 100, 2: 20_000}, "b": {0: 700}}
    left = {"a": {0: 50_000, 1: 50_000, 2: 50_000}, "b": {0: 700}}
    taken = Shares({"a": 10_000}).of_waiting(waiting, left, 1_070)
    assert taken == {"a": {0: 501, 1: 100, 2: 399}, "b": {0: 70}}


@pytest.mark.parametrize("limit, records, wanted", [(50, 5_000, 50), (500, 5_000, 500), (500, 500, 1), (20, 3, 1)])
def test_of_what_waits_a_small_topic_has_its_part(limit: int, records: int, wanted: int) -> None:
    shares = Shares({"a": limit, "b": 200_000})
    for _ in range(5):
        taken = shares.of_waiting({"a": {0: 620, 1: 620}, "b": {0: 300_000}}, {}, records)
        assert sum(taken["a"].values()) == wanted
        assert records - 1 <= wanted + taken["b"][0] <= records + 1


def test_what_has_not_arrived_leaves_its_share_to_others() -> None:
    """A batch is as large as it may be, although most of what is left to read is on a broker that is slow."""
    left = {"a": {0: 100_000, 1: 300, 2: 100}}
    assert Shares({"a": 200}).of_waiting({"a": {0: 20, 1: 300, 2: 100}}, left, 999)["a"] == {0: 20, 1: 135, 2: 45}
    assert Shares({"a": 200}).of_waiting({"a": {0: 0, 1: 300, 2: 100}}, left, 999)["a"] == {0: 0, 1: 150, 2: 50}
    assert Shares({"a": 200}).of_waiting({"a": {0: 5, 1: 3, 2: 0}}, {}, 999)["a"] == {0: 5, 1: 3, 2: 0}


def test_tasks_take_something_of_every_partition_of_a_topic_with_a_small_limit() -> None:
    """However many records a batch of other topics may have."""
    shares = Shares({"a": 500}).next({"a": {0: 2_500, 1: 2_500, 2: 1_000, 3: 0}, "b": {0: 29_000}}, 30_000)
    assert shares["a"] == {0: 209, 1: 208, 2: 83, 3: 0}


def test_partitions_that_have_the_same_left_take_turns() -> None:
    shares = Shares({})
    left = {"a": dict.fromkeys(range(20), 10**6)}
    turns = [[n for n, count in shares.next(left, 20_000)["a"].items() if count] for _ in range(8)]
    assert all(len(turn) == 5 for turn in turns)
    for round_ in (turns[:4], turns[4:]):
        assert sorted(n for turn in round_ for n in turn) == list(range(20))


@pytest.mark.parametrize(
    "partitions, cores, tasks",
    [
        ([64, 64], 2, 2),
        ([64, 64], 7, 4),
        ([64, 64], 1000, 64),
        ([6, 4], 8, 2),
        ([4, 3], 8, 1),  # no number divides both: the rows have to be moved
        ([7, 7], 2, 7),
        ([7, 7], 1, 1),
        ([101, 101], 2, 1),  # 101 tasks for two cores are too many
        ([9], 4, 3),
        ([1, 64], 8, 1),
    ],
)
def test_how_many_tasks_read(partitions: list[int], cores: int, tasks: int) -> None:
    assert reading_tasks(partitions, cores) == tasks
    assert all(count % tasks == 0 for count in partitions)


def test_the_parts_of_tasks() -> None:
    places = [("a", 0, 5, 9), ("a", 1, 0, 2), ("b", 3, 0, 1), ("b", 4, 7, 8)]
    assert dealt(places, 2) == ({("a", 0): (5, 9), ("b", 4): (7, 8)}, {("a", 1): (0, 2), ("b", 3): (0, 1)})
    assert dealt([], 3) == ({}, {}, {})

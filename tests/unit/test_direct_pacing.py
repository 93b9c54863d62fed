"""How much a batch of the direct engine takes: what fits the interval of its trigger, found out from batch to batch."""

from __future__ import annotations

import random
import statistics

import pytest

from onceflow.direct.pacing import BatchSize


def settled(size: BatchSize, *, per_second: float, fixed_s: float, batches: int = 40) -> float:
    """Seconds that the last of many full batches takes, on a machine that handles so many records a second."""
    seconds = 0.0
    for _ in range(batches):
        seconds = fixed_s + size.records / per_second
        size.ran(size.records, seconds)
    return seconds


@pytest.mark.parametrize("trigger_s, wanted", [(0.1, 0.1), (0.025, 0.05), (10.0, 1.0), (0.0, 0.25)])
@pytest.mark.parametrize("per_second", [20_000, 400_000])
def test_a_full_batch_takes_about_one_interval(trigger_s: float, wanted: float, per_second: float) -> None:
    size = BatchSize(trigger_s)
    assert settled(size, per_second=per_second, fixed_s=0.01) == pytest.approx(wanted, rel=0.3)


def test_a_batch_that_is_not_full_says_nothing_of_the_size() -> None:
    size = BatchSize(0.1)
    before = size.records
    size.ran(10, 0.02)
    size.ran(0, 5.0)
    assert size.records == before


def test_a_slow_batch_makes_the_next_one_smaller() -> None:
    """Also if it was not full: user code may be slow."""
    size = BatchSize(0.1)
    before = size.records
    size.ran(50, 3.0)
    assert before / 2 <= size.records < before


def test_it_has_a_least_and_a_greatest_size() -> None:
    slow, fast = BatchSize(0.1), BatchSize(1.0)
    settled(slow, per_second=1.0, fixed_s=0.0)
    settled(fast, per_second=1e9, fixed_s=0.0)
    assert (slow.records, fast.records) == (500, 500_000)


@pytest.mark.parametrize("trigger_s", [0.0, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("fixed_s", [0.15, 0.4, 2.0])
@pytest.mark.parametrize("per_second", [20_000, 200_000])
def test_what_a_batch_costs_without_records_is_a_part_of_its_time(
    trigger_s: float, fixed_s: float, per_second: float
) -> None:
    """A trigger that is shorter than this cost does not make batches ever smaller."""
    size = BatchSize(trigger_s)
    seconds = settled(size, per_second=per_second, fixed_s=fixed_s)
    assert seconds >= 1.9 * fixed_s, "at least about half of the speed that is possible"
    assert seconds <= max(1.3 * trigger_s, 5 * fixed_s)


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_vary_do_not_lead_astray(seed: int) -> None:
    noise = random.Random(seed)
    size = BatchSize(0.1)
    settled(size, per_second=200_000, fixed_s=0.01)  # then every batch begins to call a service
    rates = []
    for _ in range(60):
        records = size.records
        seconds = (0.3 + records / 200_000) * noise.uniform(0.7, 1.6)
        size.ran(records, seconds)
        rates.append(records / seconds)
    assert statistics.median(rates[20:]) > 40_000, "of 170,000, at most"


@pytest.mark.parametrize("trigger_s", [0.1, 0.25, 1.0])
def test_a_slow_begin_does_not_make_batches_too_large(trigger_s: float) -> None:
    """The first batches are slow, whatever they have in them: nothing is compiled or connected yet."""
    size = BatchSize(trigger_s)
    took = []
    for extra_s in (0.5, 0.1, 0.03, 0.02, *[0.0] * 30):
        took.append(0.005 + size.records / 400_000)
        size.ran(size.records, took[-1] + extra_s)
    assert max(took) < 1.5 * trigger_s
    assert took[-1] == pytest.approx(trigger_s, rel=0.3)


@pytest.mark.parametrize("trigger_s", [0.1, 0.0])
def test_with_a_backlog_batches_are_larger_until_it_is_nearly_gone(trigger_s: float) -> None:
    per_second, fixed_s, left = 50_000, 0.02, 1_000_000
    size, seconds = BatchSize(trigger_s), []
    interval = trigger_s or 0.25
    while left:
        size.looked(left)
        taken = min(left, size.records)
        seconds.append(fixed_s + taken / per_second)
        assert seconds[-1] <= 0.8, "records are visible within about half a second"
        assert seconds[-1] <= max(2 * interval, left / per_second / 2), "the last ones wait for one interval only"
        size.ran(taken, seconds[-1])
        left -= taken
    assert statistics.median(seconds[8:-8]) == pytest.approx(0.5, rel=0.2)
    for _ in range(8):  # it has caught up, and then there is just too much for one interval
        size.looked(size.records + 1)
        size.ran(size.records, fixed_s + size.records / per_second)
    assert fixed_s + size.records / per_second == pytest.approx(interval, rel=0.3)


def test_sparse_batches_leave_the_size_alone() -> None:
    """They take long for their few records, because brokers are waited for."""
    size, rng = BatchSize(0.1), random.Random(3)
    before = size.records
    for _ in range(200):
        size.looked(rng.randrange(100))
        size.ran(rng.randrange(1, 60), 0.1)
    assert size.records == before
    settled(size, per_second=50_000, fixed_s=0.01)
    before = size.records
    for left in (10**6, 0, 10**6, 0, 0):
        size.looked(left)
    assert size.records == before, "it was not larger with the backlog"


def test_a_long_interval_stays_as_it_is_with_a_backlog() -> None:
    size = BatchSize(1.0)
    size.ran(size.records, 0.1)
    before = size.records
    size.looked(10**9)
    size.looked(0)
    assert size.records == before

"""One deadline bounds an operation: it waits a little longer each time, and never past its end (I8)."""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.client.deadline import Deadline
from onceflow.errors import DeadlineExceededError


class Clock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def make(clock: Clock, seconds: float = 10.0, seed: int = 1) -> Deadline:
    return Deadline(seconds, "reading progress", clock=clock, sleep=clock.sleep, rng=random.Random(seed))


def test_remaining_and_expired() -> None:
    clock = Clock()
    deadline = make(clock)
    assert (deadline.remaining, deadline.expired) == (10.0, False)
    clock.now += 4
    assert (deadline.remaining, deadline.expired) == (6.0, False)
    clock.now += 6
    assert (deadline.remaining, deadline.expired) == (0.0, True)
    clock.now += 100
    assert (deadline.remaining, deadline.expired) == (0.0, True)


def test_capped() -> None:
    clock = Clock()
    deadline = make(clock)
    assert deadline.capped(3.0) == 3.0
    clock.now += 8
    assert deadline.capped(3.0) == 2.0
    clock.now += 8
    assert deadline.capped(3.0) == 0.0


@settings(max_examples=200, deadline=None, derandomize="CI" in os.environ)
@given(attempt=st.integers(0, 10_000), seed=st.integers(0, 99))
def test_backoff_bounds(attempt: int, seed: int) -> None:
    wait = make(Clock(), seed=seed).backoff_s(attempt)
    ceiling = min(0.5, 0.005 * 2 ** min(attempt, 50))
    assert ceiling / 2 <= wait <= ceiling


def test_backoff_bounds_can_be_given() -> None:
    deadline = make(Clock())
    for attempt in range(20):
        wait = deadline.backoff_s(attempt, min_s=0.1, max_s=3.0)
        assert min(3.0, 0.1 * 2**attempt) / 2 <= wait <= min(3.0, 0.1 * 2**attempt)


def test_backoff_is_jittered_and_a_seed_repeats_it() -> None:
    """Tasks that collided once must not collide again in step."""

    def waits(seed: int) -> list[float]:
        deadline = make(Clock(), seed=seed)
        return [deadline.backoff_s(8) for _ in range(50)]

    assert len(set(waits(1))) == 50
    assert waits(1) == waits(1)
    assert waits(1) != waits(2)


def test_without_a_generator_two_deadlines_differ() -> None:
    first, second = Deadline(10, "a"), Deadline(10, "a")
    assert [first.backoff_s(8) for _ in range(5)] != [second.backoff_s(8) for _ in range(5)]


def test_pause_waits_the_backoff() -> None:
    clock = Clock()
    deadline = make(clock, seed=5)
    expected = make(Clock(), seed=5).backoff_s(3)
    deadline.pause(3, "no answer")
    assert clock.slept == [expected]


def test_pause_does_not_sleep_past_the_end() -> None:
    clock = Clock()
    deadline = make(clock)
    clock.now += 9.999
    deadline.pause(10, "no answer")
    assert clock.slept == [pytest.approx(0.001)]
    assert deadline.expired


def test_pause_after_the_end_raises_with_a_next_step_and_does_not_sleep() -> None:
    clock = Clock()
    deadline = make(clock, 2.5)
    clock.now += 2.5
    with pytest.raises(DeadlineExceededError) as caught:
        deadline.pause(0, "NOT_COORDINATOR")
    assert clock.slept == []
    assert caught.value.what == "Gave up after 2.5 s: reading progress"
    assert caught.value.detail == "NOT_COORDINATOR"
    assert caught.value.next_step


def test_a_loop_of_pauses_ends() -> None:
    clock = Clock()
    deadline = make(clock)

    def loop() -> None:
        for attempt in itertools.count():
            deadline.pause(attempt, "no answer")

    with pytest.raises(DeadlineExceededError):
        loop()
    assert clock.now == pytest.approx(1010.0)
    assert 20 <= len(clock.slept) <= 60, "waits are too short or too long"


def test_no_time_at_all() -> None:
    deadline = make(Clock(), 0.0)
    assert deadline.expired
    with pytest.raises(DeadlineExceededError):
        deadline.pause(0, "")


def test_defaults_use_the_monotonic_clock() -> None:
    before = time.monotonic()
    deadline = Deadline(100.0, "a")
    remaining = deadline.remaining
    assert 100.0 - (time.monotonic() - before) <= remaining <= 100.0

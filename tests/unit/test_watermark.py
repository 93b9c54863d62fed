"""Event time over several partitions: the least of the latest, never back, without waiting for silent ones."""

from __future__ import annotations

import math

from onceflow.state.watermark import Origin, Watermark

A: Origin = ("in", 0)
B: Origin = ("in", 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock, value_ms: int | None = None, *, lateness_ms: int = 100) -> Watermark:
    return Watermark([A, B], lateness_ms=lateness_ms, idle_s=30, value_ms=value_ms, clock=clock)


def batch(watermark: Watermark, **latest: int) -> int | None:
    seen = {("in", int(name[1])): ms for name, ms in latest.items()}
    watermark.planned(seen)
    value = watermark.after(seen)
    watermark.on_commit(seen, value)
    return value


def test_the_least_of_the_latest() -> None:
    watermark = made(Clock())
    assert batch(watermark, p0=1000) is None  # the other one may bring anything
    assert batch(watermark, p1=500) == 400
    assert batch(watermark, p1=5000) == 900
    assert batch(watermark, p0=2000, p1=100) == 1900


def test_never_back() -> None:
    watermark = made(Clock())
    assert batch(watermark, p0=1000, p1=1000) == 900
    assert batch(watermark, p0=10, p1=20) == 900
    late: Origin = ("in", 2)
    value = watermark.after({late: 5})
    assert value == 900


def test_silent_partitions_are_not_waited_for() -> None:
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000) is None
    clock.now = 29
    assert batch(watermark, p0=2000) is None
    clock.now = 31
    watermark.planned(())
    assert watermark.advance() == 1900  # without a batch, too
    assert batch(watermark, p1=50) == 1900
    clock.now = 200
    assert watermark.after({}) == 1900  # all are silent: nobody knows more


def test_partitions_that_are_found_silent_together_are_so_one_after_the_other() -> None:
    """After a restart nothing is known of B but the watermark. A has brought a record a moment later, and then nobody
    has looked until both were silent for long enough: timers up to the record of A would never fire."""
    clock = Clock()
    watermark = made(clock, value_ms=900)
    clock.now = 0.2
    assert batch(watermark, p0=5000) == 900
    clock.now = 31
    watermark.planned(())
    assert watermark.advance() == 4900


def test_partitions_that_have_fallen_silent_together_move_nothing() -> None:
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000, p1=5000) == 900
    clock.now = 31
    watermark.planned(())
    assert watermark.advance() == 900


def test_a_long_batch_makes_no_partition_silent() -> None:
    """What arrives meanwhile is seen when the next batch is planned."""
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000, p1=1000) == 900
    clock.now = 1
    watermark.planned([B])
    clock.now = 36  # the batch has taken 35 seconds
    assert watermark.after({B: 300_000}) == 900
    watermark.on_commit({B: 300_000}, 900)
    watermark.planned([A, B])
    assert watermark.advance() == 900
    assert watermark.after({A: 2000, B: 301_000}) == 1900
    watermark.planned([B])
    clock.now = 80
    watermark.planned([B])
    assert watermark.after({B: 302_000}) == 301_900, "it was silent from one plan to another"


def test_a_partition_with_records_that_wait_is_not_silent() -> None:
    """The engine reads others first."""
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000, p1=1000) == 900
    for now in (40, 80):
        clock.now = now
        watermark.planned([A], {B: -math.inf})
        assert watermark.after({A: 5000 + now}) == 900
        watermark.on_commit({A: 5000 + now}, 900)
        assert watermark.advance() == 900
    watermark.planned([B])
    assert watermark.after({B: 2000}) == 1900


def test_silence_is_as_long_as_it_is_known() -> None:
    """A leader has answered last some time ago: records may have come since."""
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000, p1=1000) == 900
    clock.now = 32
    for known, expected in ((29, 900), (math.inf, 4900), (31, 4900)):
        watermark.planned([A], {B: known})
        assert watermark.after({A: 5000}) == expected
    clock.now = 1000
    watermark.planned([], {A: 999.0, B: 20.0})
    assert watermark.advance() == 900, "not known to be silent for so long, however late it is"
    watermark.planned([A], {A: 999.0, B: 990.0})
    assert watermark.after({A: 5000}) == 4900


def test_a_partition_whose_records_are_all_filtered_out_is_silent() -> None:
    clock = Clock()
    watermark = made(clock)
    assert batch(watermark, p0=1000, p1=1000) == 900
    clock.now = 31
    watermark.planned([A, B])
    assert watermark.advance() == 900
    assert watermark.after({B: 5000}) == 4900


def test_nothing_is_remembered_before_it_is_committed() -> None:
    watermark = made(Clock())
    assert watermark.after({A: 1000, B: 1000}) == 900
    assert watermark.after({A: 1000}) is None
    assert watermark.value_ms is None


def test_goes_on_after_a_restart() -> None:
    watermark = made(Clock(), value_ms=900)
    assert watermark.after({}) == 900
    assert batch(watermark, p0=2000) == 900  # the other partition has come to 1000, for all that is known
    assert batch(watermark, p1=1500) == 1400

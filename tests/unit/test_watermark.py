"""Event time over several partitions: the least of the latest, never back, without waiting for silent ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.driver.step import table_state
from onceflow.protocol.progress import EventTime, Progress, TableProgress, decode, encode
from onceflow.state.engine.watermark import Origin, Watermark

A: Origin = ("in", 0)
B: Origin = ("in", 1)
CHAINED: list[Origin] = [(None, 0), (None, 1), (None, 2)]


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


def test_nobody_is_idle_before_a_batch_is_planned() -> None:
    """A batch that only owes timers runs before anybody has looked what has come since the run before."""
    since = EventTime(latest_ms=100_000, since_ms=0), EventTime(latest_ms=5_000, since_ms=0)
    watermark = Watermark(
        [A, B],
        lateness_ms=1_000,
        idle_s=30,
        value_ms=4_000,
        known=dict(zip([A, B], since, strict=True)),
        clock=Clock(),
        wall_ms=lambda: 3_600_000,
    )
    assert watermark.advance() == 4_000
    watermark.planned([B])
    assert watermark.advance() == 4_000
    watermark.planned([A])
    assert watermark.advance() == 99_000, "B has been silent for an hour"


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


class Runs:
    """A flow that is started again and again, as by cron. Its clocks are those of one machine, but the monotonic one
    begins anew with every run."""

    def __init__(self, idle_s: float = 30.0) -> None:
        self.wall_s = 1_795_000_000.0
        self.idle_s = idle_s
        self.value_ms: int | None = None
        self.known: dict[Origin, EventTime] = {}
        self.clock = Clock()

    def start(self) -> Watermark:
        self.clock = Clock()
        self.clock.now = 5.0
        return Watermark(
            [A, B],
            lateness_ms=100,
            idle_s=self.idle_s,
            value_ms=self.value_ms,
            known=self.known,
            clock=self.clock,
            wall_ms=lambda: round(self.wall_s * 1000),
        )

    def batch(
        self,
        watermark: Watermark,
        *arriving: Origin,
        untimed: Any = (),
        latest: Any = MappingProxyType({}),
        **of_source: int,
    ) -> None:
        of_sources: dict[Origin, int] = {("in", int(name[1])): ms for name, ms in of_source.items()}
        seen = {**latest, **of_sources}
        watermark.planned([*of_sources, *([A] if latest else []), *arriving])
        watermark.advance()
        value = watermark.after(seen, untimed)
        self.known, _ = watermark.kept(seen)
        watermark.on_commit(seen, value, untimed)
        self.value_ms = value

    def later(self, seconds: float) -> None:
        self.wall_s += seconds
        self.clock.now += seconds


def test_an_empty_partition_does_not_hold_short_runs_for_ever() -> None:
    runs = Runs()
    runs.batch(runs.start(), p0=1_000)
    assert runs.value_ms is None, "the other partition may bring anything"
    runs.later(29)
    runs.batch(runs.start(), p0=2_000)
    assert runs.value_ms is None
    runs.later(31)
    watermark = runs.start()
    watermark.planned([A])
    assert watermark.advance() == 1_900, "before the records of this run"
    runs.batch(watermark, p0=3_000)
    assert runs.value_ms == 2_900


def test_a_partition_that_was_drained_first_does_not_hold_it_after_a_restart() -> None:
    runs = Runs()
    runs.batch(runs.start(), p0=9_000, p1=1_000)
    assert runs.value_ms == 900
    runs.later(31)
    runs.batch(runs.start(), p0=10_000)
    assert runs.value_ms == 9_900


def test_all_partitions_were_silent_between_the_runs() -> None:
    """Timers up to the last record fire, also if the run finds nothing new."""
    runs = Runs()
    watermark = runs.start()
    runs.batch(watermark, p1=1_000)
    runs.later(1)
    runs.batch(watermark, p0=9_000)
    assert runs.value_ms == 900
    runs.later(3600)
    watermark = runs.start()
    watermark.planned([])
    assert watermark.advance() == 8_900


def test_records_that_have_come_while_nothing_ran_are_waited_for() -> None:
    runs = Runs()
    runs.batch(runs.start(), p0=1_000, p1=1_000)
    runs.later(3600)
    watermark = runs.start()
    watermark.planned([A], {B: -math.inf})
    assert watermark.advance() == 900
    assert watermark.after({A: 50_000}) == 900, "the engine has read the other partition first"
    watermark.planned([A, B])
    assert watermark.advance() == 900


def test_a_clock_that_was_set_back_makes_nothing_idle() -> None:
    runs = Runs()
    runs.batch(runs.start(), p0=1_000, p1=1_000)
    runs.wall_s -= 86_400
    runs.batch(runs.start(), p0=5_000)
    assert runs.value_ms == 900


def test_progress_of_an_older_version_says_nothing_about_partitions() -> None:
    runs = Runs()
    runs.value_ms = 900
    runs.later(3600)
    runs.batch(runs.start(), p0=5_000)
    assert runs.value_ms == 900
    runs.later(31)
    runs.batch(runs.start(), p0=6_000)
    assert runs.value_ms == 5_900


@pytest.mark.parametrize("known", [False, True])
def test_a_partition_whose_records_have_no_time_is_not_waited_for(known: bool) -> None:
    runs = Runs()
    for n in range(3):
        watermark = runs.start()
        latest = {"p1": 1_010} if known and not n else {}
        runs.batch(watermark, B, untimed=[B], p0=1_000 * (n + 1), **latest)
        runs.later(1)
    assert runs.value_ms == (910 if known else 2_900), "one that had a time before is waited for until it is idle"
    if known:
        runs.value_ms = None
        runs.later(31)
        runs.batch(runs.start(), B, untimed=[B], p0=5_000)
        assert runs.value_ms == 4_900


def test_records_without_a_time_before_others_of_the_same_partition() -> None:
    """The partition has more records. They may have times."""
    watermark = made(Clock())
    watermark.planned([A, B], {B: -math.inf})
    assert watermark.after({A: 1000}, {B}) is None
    watermark.on_commit({A: 1000}, None, {B})
    watermark.planned([B])
    assert watermark.after({B: 500}) == 400


@given(
    st.lists(
        st.tuples(
            st.booleans(),  # a new run
            st.sampled_from([0.0, 1.0, 29.0, 31.0, 3600.0, -10.0]),
            st.dictionaries(st.sampled_from(["p0", "p1"]), st.integers(0, 100_000), max_size=2),
            st.sets(st.sampled_from([A, B])),
        ),
        max_size=12,
    )
)
def test_it_never_goes_back_nor_beyond_the_latest_event(steps: list[Any]) -> None:
    runs, watermark, highest = Runs(), None, -1
    for is_new, seconds, latest, untimed in steps:
        before = runs.value_ms
        if is_new or watermark is None:
            watermark = runs.start()
        runs.batch(watermark, untimed=untimed, **latest)
        highest = max([highest, *latest.values()])
        assert before is None or (runs.value_ms is not None and runs.value_ms >= before)
        assert runs.value_ms is None or runs.value_ms <= highest - 100
        if {*latest} == {"p0", "p1"}:
            assert runs.value_ms is not None
        runs.later(seconds)


class ChainedRuns:
    """A step behind another step, whose flow is started again and again. It learns where its rows come from as they
    come."""

    def __init__(self) -> None:
        self.wall_s = 1_795_000_000.0
        self.value_ms: int | None = None
        self.progress = Progress("flow", 0, {}, {}, self.now_ms(), tables={"table": TableProgress()})
        self.start()

    def now_ms(self) -> int:
        return round(self.wall_s * 1000)

    def start(self) -> None:
        self.clock = Clock()
        known = decode(*encode(self.progress)).tables["table"]
        clocks = partial(Watermark, clock=self.clock, wall_ms=self.now_ms)
        with mock.patch.object(table_state, "Watermark", clocks):
            self.watermark = table_state._watermark([], known, lateness_ms=100, idle_s=30)

    def batch(self, latest: dict[Origin, int], caught_up: Any = MappingProxyType({})) -> tuple[int | None, int | None]:
        """The watermark that the batch sees, and that behind it. The source has records."""
        self.watermark.planned([A], caught_up)
        began = self.watermark.advance()
        self.value_ms = self.watermark.after(latest)
        times, times_ms = self.watermark.kept(latest)
        table = TableProgress(0, self.value_ms, None, event_times=times, event_times_ms=times_ms)
        self.progress = replace(self.progress, time_ms=self.now_ms(), tables={"table": table})
        self.watermark.on_commit(latest, self.value_ms)
        return began, self.value_ms

    def commit(self) -> None:
        """A start that reads another topic, or a command, commits progress. It knows nothing new of event time."""
        self.progress = replace(self.progress, offsets={"new": {0: 0}}, time_ms=self.now_ms())

    def later(self, seconds: float) -> None:
        self.wall_s += seconds
        self.clock.now += seconds

    def stopped(self, *seconds: float) -> None:
        """Nothing runs for so long. Between two of these times, progress is committed."""
        for number, each in enumerate(seconds):
            if number:
                self.commit()
            self.wall_s += each
        self.start()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(CHAINED), st.integers(0, 100_000), max_size=3),
            st.sampled_from([0.0, 1.0, 14.0, 29.0, 31.0]),
            st.lists(st.sampled_from([0.0, 31.0, 86_400.0, -10.0]), max_size=3),  # stopped, and started again
            st.booleans(),  # the source has more records behind the batch
        ),
        max_size=12,
    )
)
def test_a_restart_changes_nothing_of_a_step_behind_another_one(history: list[Any]) -> None:
    """Nothing can come from the step before while nothing runs: that time makes none of its partitions silent."""
    one, several = ChainedRuns(), ChainedRuns()
    for latest, seconds, stopped, more in history:
        caught_up = {A: -math.inf} if more else {}
        assert one.batch(latest, caught_up) == several.batch(latest, caught_up)
        if stopped:
            several.stopped(*stopped)
        one.later(seconds)
        several.later(seconds)


@pytest.mark.parametrize("stopped", [(3600,), (3600, 0), (1800, 1800), (0, 3600)])
def test_partitions_of_the_step_before_are_waited_for_after_a_restart(stopped: tuple[float, ...]) -> None:
    runs = ChainedRuns()
    assert runs.batch({(None, 0): 9_000}) == (None, 8_900)
    assert runs.batch({(None, 1): 9_500}) == (8_900, 8_900)
    runs.stopped(*stopped)
    assert runs.batch({(None, 1): 20_000}) == (8_900, 8_900)
    assert runs.batch({(None, 0): 9_100}) == (8_900, 9_000)
    runs.later(31)
    assert runs.batch({(None, 1): 20_000}) == (9_000, 19_900), "silent for so long while the flow ran"


@pytest.mark.parametrize("stopped", [1, 29, 3600])
@pytest.mark.parametrize("own", [("in", 3), (None, 0)])
def test_rows_that_do_not_tell_their_partition_are_waited_for_after_a_restart(own: Origin, stopped: int) -> None:
    """They count for the partition of the step's table, of which there may be more than of the source. What waits in
    the source after a while may be theirs."""
    runs = Runs()
    watermark = runs.start()
    runs.batch(watermark, p0=9_500, p1=9_500)
    runs.batch(watermark, latest={own: 9_000}, p0=9_600, p1=9_600)
    assert runs.value_ms == 9_400, "nobody knew of it before"
    runs.later(stopped)
    watermark = runs.start()
    runs.batch(watermark, p0=20_000, p1=20_000)
    assert runs.value_ms == 9_400, "its records may come behind those"
    runs.batch(watermark, latest={own: 9_700})
    assert runs.value_ms == 9_600
    runs.later(31)
    runs.batch(watermark, p0=20_000, p1=20_000)
    assert runs.value_ms == 19_900, "silent for so long while the flow ran"


def test_runs_that_end_soon_do_not_wait_for_ever_for_a_partition_of_the_step_before() -> None:
    runs = ChainedRuns()
    runs.batch({(None, 0): 1_000, (None, 1): 1_000})
    for _ in range(10):
        runs.stopped(3600)
        runs.later(4)
        runs.batch({(None, 1): 20_000})
    assert runs.value_ms == 19_900


def test_what_the_step_before_has_brought_last_ends_when_nothing_has_come_since() -> None:
    """Also in runs that end soon: the last timers fire in the next run."""
    runs = ChainedRuns()
    runs.batch({(None, 0): 1_000})
    runs.later(1)
    runs.batch({(None, 1): 9_000})
    assert runs.value_ms == 900
    runs.stopped(28)
    runs.watermark.planned([])
    assert runs.watermark.advance() == 900
    runs.stopped(3600)
    runs.watermark.planned([], {A: -math.inf})
    assert runs.watermark.advance() == 900, "there is more to read"
    runs.stopped(3600)
    runs.watermark.planned([])
    assert runs.watermark.advance() == 8_900


def test_while_the_source_has_more_records_no_partition_of_the_step_before_is_silent() -> None:
    runs = ChainedRuns()
    runs.batch({(None, 0): 1_000, (None, 1): 1_000})
    runs.later(31)
    assert runs.batch({(None, 1): 20_000}, {A: -math.inf}) == (900, 900)
    assert runs.batch({(None, 1): 21_000}) == (900, 20_900)


# ---- by the clock ----------------------------------------------------------------------------------------------


def by_clock(clock: Clock, *, wall_ms: int = 10_000_000, clock_s: float = 60.0, **options: Any) -> Watermark:
    start = clock.now
    return Watermark(
        [A, B],
        lateness_ms=100,
        idle_s=30,
        clock_s=clock_s,
        clock=clock,
        wall_ms=lambda: wall_ms + round(1000 * (clock.now - start)),
        **{"value_ms": None, **options},
    )


def test_event_time_goes_on_by_the_clock_when_nothing_comes() -> None:
    """The last windows stayed open for ever: they closed only when new records came."""
    clock = Clock()
    watermark = by_clock(clock)
    assert batch(watermark, p0=1000, p1=5000) == 900
    seen = []
    for clock.now in (31, 60, 61, 75, 3600):
        watermark.planned(())
        seen.append(watermark.advance())
        assert watermark.after({}) == seen[-1], "a batch without records says the same"
    assert seen == [900, 900, 900 + 1_000, 900 + 15_000, 900 + 3_540_000]
    # What comes then is late, or goes on from there.
    watermark.planned([A])
    assert watermark.advance() == seen[-1]
    assert batch(watermark, p0=2_000) == seen[-1]
    assert batch(watermark, p0=4_000_000) == 3_999_900


def test_it_does_not_pass_the_time_of_day() -> None:
    clock = Clock()
    watermark = by_clock(clock, wall_ms=2_000)
    assert batch(watermark, p0=1_500, p1=1_500) == 1_400
    clock.now = 3600
    watermark.planned(())
    assert watermark.advance() == 1_400 + 3_540_000
    clock = Clock()
    watermark = by_clock(clock, wall_ms=2_000)
    assert batch(watermark, p0=9_000_000, p1=9_000_000) == 8_999_900, "a clock that is ahead"
    clock.now = 3600
    watermark.planned(())
    assert watermark.advance() == 8_999_900


def test_no_clock_while_records_wait_or_it_is_not_known() -> None:
    clock = Clock()
    watermark = by_clock(clock)
    assert batch(watermark, p0=1000, p1=1000) == 900
    clock.now = 500
    watermark.planned((), {A: -math.inf, B: clock.now})
    assert watermark.advance() == 900, "A has more"
    watermark.planned((), {A: 20.0, B: clock.now})
    assert watermark.advance() == 900, "nobody has heard of A since"
    watermark.planned((), {A: 100.0, B: clock.now})
    assert watermark.advance() == 900 + 40_000


def test_it_waits_at_least_until_partitions_are_idle() -> None:
    clock = Clock()
    watermark = by_clock(clock, clock_s=1)
    assert batch(watermark, p0=1000, p1=1000) == 900
    for clock.now, expected in ((20, 900), (31, 1_900)):
        watermark.planned(())
        assert watermark.advance() == expected

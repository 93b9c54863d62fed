"""What a batch with process steps asks of Spark before it runs, and what it remembers for the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.driver import state_step
from onceflow.driver.state_step import StateStep
from onceflow.messages import NotColocatedError, NotCopartitionedError, TaskReport
from onceflow.planning.placement import Learnt, QueryShape, StepShape

ONE = StepShape("t", 4, co_partitionable=True)
DF: Any = object()
ORDER: Any = SimpleNamespace(flow="f")


class Asked:
    """Counts what Spark is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, read: tuple[int, ...] | None) -> None:
        self.cores = self.plans = 0
        self.read = read
        monkeypatch.setattr(state_step, "read_partitions", self.read_partitions)

    def current_cores(self) -> int:
        self.cores += 1
        return 2

    def read_partitions(self, df: Any) -> tuple[int, ...] | None:
        assert df is DF
        self.plans += 1
        return self.read


def made(asked: Asked, *, written_as_is: bool = True, clock: bool = False) -> StateStep:
    query: Any = SimpleNamespace(written_as_is=written_as_is)
    return StateStep(query, QueryShape((ONE,), written_as_is, clock=clock), {}, cores=asked.current_cores)


def test_small_batches_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, (0, 1, 2, 3))
    step = made(asked)
    assert step.place(DF, rows=100, driver_may=True).way == "driver"
    assert (asked.cores, asked.plans, step.co_partitioned) == (0, 0, None)


def test_the_plan_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, (0, 1, 2, 3))
    step = made(asked)
    for _ in range(3):
        assert step.place(DF, rows=100_000, driver_may=True).steps["t"].move == "co-partitioned"
    assert (asked.cores, asked.plans, step.co_partitioned) == (3, 1, True)


@pytest.mark.parametrize("clock, looks", [(False, 1), (True, 3)])
def test_a_plan_that_mixes_partitions(monkeypatch: pytest.MonkeyPatch, clock: bool, looks: int) -> None:
    """With the clock's rows another batch's plan may be without them."""
    asked = Asked(monkeypatch, None)
    step = made(asked, clock=clock)
    for _ in range(3):
        assert step.place(DF, rows=100_000, driver_may=True).steps["t"].move == "shuffle"
    assert (asked.plans, step.co_partitioned) == (looks, None if clock else False)


def test_failed_attempts_change_the_next_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, (0, 1, 2, 3))
    step = made(asked)
    assert step.place(DF, rows=100_000, driver_may=True).way == "fused"
    assert step.failed(NotCopartitionedError("keys", next_step="none")) is False
    assert step.co_partitioned is False
    again = step.place(DF, rows=100_000, driver_may=False)
    assert (again.way, again.steps["t"].move) == ("fused", "shuffle")
    step.failed(NotColocatedError("outputs", next_step="none"))
    assert step.place(DF, rows=100, driver_may=True).way == "two-stage"


class FakeStages:
    """Stands for `Stages`."""

    made: list[Any]
    found: dict[str, TaskReport]

    def __init__(self, query: Any, placement: Any, df: Any, order: Any) -> None:
        self.made.append(placement)
        self.tasks = {"t": 2}

    def outgoing(self, flow: str) -> Any:
        return SimpleNamespace(df=len(self.made))

    def reports(self) -> dict[str, TaskReport]:
        return self.found


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> type[FakeStages]:
    monkeypatch.setattr(FakeStages, "made", [], raising=False)
    monkeypatch.setattr(FakeStages, "found", {"t": TaskReport(())}, raising=False)
    monkeypatch.setattr(state_step, "Stages", FakeStages)
    return FakeStages


def test_a_step_that_the_optimizer_leaves_out_is_run_behind_a_shuffle(
    monkeypatch: pytest.MonkeyPatch, stages: type[FakeStages]
) -> None:
    asked = Asked(monkeypatch, (0, 1, 2, 3))
    step = made(asked, written_as_is=False)
    monkeypatch.setattr(state_step, "runs_step_once", lambda df: df != 1)
    place = step.place(DF, rows=100_000, driver_may=True)
    assert (place.exchanged, place.writes) == (False, "side outputs")
    assert step.outgoing(DF, place, ORDER).df == 2
    assert [(each.exchanged, each.writes) for each in stages.made] == [(False, "side outputs"), (True, "nothing")]
    assert asked.cores == 1
    assert step.place(DF, rows=100_000, driver_may=True).exchanged


def test_the_optimized_plan_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, stages: type[FakeStages]) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(state_step, "runs_step_once", lambda df: bool(looked.append(df) or True))
    step = made(Asked(monkeypatch, (0, 1, 2, 3)), written_as_is=False)
    for _ in range(3):
        step.outgoing(DF, step.place(DF, rows=100_000, driver_may=True), ORDER)
    assert looked == [1]


def test_a_batch_in_which_no_task_of_the_step_ran(monkeypatch: pytest.MonkeyPatch, stages: type[FakeStages]) -> None:
    """A filter that compares with the time: it lets nothing through any more, and the optimizer leaves the step out."""
    step = made(Asked(monkeypatch, (0, 1, 2, 3)), written_as_is=False)
    step.learnt = Learnt(step_seen=True)
    step.outgoing(DF, step.place(DF, rows=100_000, driver_may=True), ORDER)
    cluster: Any = None
    step._by_name = {"t": SimpleNamespace(prepared=lambda found: False)}  # type: ignore[dict-item]
    (part,) = step.gather(ORDER, cluster)
    assert (part.tasks, part.reports) == (2, ())
    step.failed(RuntimeError("tasks should have reported"))
    assert step.place(DF, rows=100_000, driver_may=True).exchanged

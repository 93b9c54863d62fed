"""What a batch with process steps asks of Spark before it runs, and what it remembers for the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.driver.step import state_step
from onceflow.driver.step.state_step import StateStep
from onceflow.messages import NotColocatedError, NotCopartitionedError, TaskReport
from onceflow.planning.placement import Learnt, QueryShape, StepShape

ONE = StepShape("t", 4)
DF: Any = object()
ORDER: Any = SimpleNamespace(flow="f")


class Asked:
    """Counts how often Spark is asked for its cores."""

    def __init__(self) -> None:
        self.cores = 0

    def current_cores(self) -> int:
        self.cores += 1
        return 2


def made(asked: Asked, *, written_as_is: bool = True) -> StateStep:
    query: Any = SimpleNamespace(written_as_is=written_as_is)
    return StateStep(query, QueryShape((ONE,), written_as_is), {}, cores=asked.current_cores)


def test_failed_attempts_change_the_next_placement() -> None:
    step = made(Asked())
    assert step.place(100_000).way == "fused"
    assert step.failed(NotCopartitionedError("keys", next_step="none")) is False
    again = step.place(100_000)
    assert (again.way, again.steps["t"].move) == ("fused", "shuffle")
    step.failed(NotColocatedError("outputs", next_step="none"))
    assert step.place(100).way == "two-stage"


class FakeStages:
    """Stands for `Stages`."""

    made: list[Any]
    found: dict[str, TaskReport]

    def __init__(self, query: Any, placement: Any, df: Any, order: Any, jobs: Any) -> None:
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
    asked = Asked()
    step = made(asked, written_as_is=False)
    monkeypatch.setattr(state_step, "runs_step_once", lambda df: df != 1)
    place = step.place(100_000)
    assert (place.exchanged, place.writes) == (False, "side outputs")
    assert step.outgoing(DF, place, ORDER).df == 2
    assert [(each.exchanged, each.writes) for each in stages.made] == [(False, "side outputs"), (True, "nothing")]
    assert asked.cores == 1
    assert step.place(100_000).exchanged


def test_the_optimized_plan_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, stages: type[FakeStages]) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(state_step, "runs_step_once", lambda df: bool(looked.append(df) or True))
    step = made(Asked(), written_as_is=False)
    for _ in range(3):
        step.outgoing(DF, step.place(100_000), ORDER)
    assert looked == [1]


def test_a_batch_in_which_no_task_of_the_step_ran(monkeypatch: pytest.MonkeyPatch, stages: type[FakeStages]) -> None:
    """A filter that compares with the time: it lets nothing through any more, and the optimizer leaves the step out."""
    step = made(Asked(), written_as_is=False)
    step.learnt = Learnt(step_seen=True)
    step.outgoing(DF, step.place(100_000), ORDER)
    cluster: Any = None
    step._by_name = {"t": SimpleNamespace(prepared=lambda found: False)}  # type: ignore[dict-item]
    (part,) = step.gather(ORDER, cluster)
    assert (part.tasks, part.reports) == (2, ())
    step.failed(RuntimeError("tasks should have reported"))
    assert step.place(100_000).exchanged

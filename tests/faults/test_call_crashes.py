"""Drivers and workers are killed while they make calls of other services: calls may repeat, results must not.

An independent reader compares outputs and state with a fold of what was sent: ``StatePipe.check``, ``call_flow.check``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onceflow import flow as flow_module
from onceflow import hooks
from onceflow.calls.runner import CallRunner
from onceflow.driver.kafka import output_writer
from onceflow.planning import placement
from onceflow.state.engine.output_collector import OutputCollector
from onceflow.state.stores.overlay import Overlay
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BATCH = 2
TASKS = {"engine": "tasks"}


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data is processed and written by as many tasks as large data would be."""
    monkeypatch.setattr(placement, "TASK_ROWS", 200)
    monkeypatch.setattr(output_writer, "_TASK_BYTES", 100_000)


def charged(pipe: Any, trap: dict[str, Any] | None = None, order: str | None = "key") -> dict[str, Any]:
    return {"processor": pipe.ledger.Charged(trap, order)}


@pytest.mark.long
def test_driver_killed(
    make_state_pipe: Any, make_pipe: Any, make_topic: Any, killed_together: Any, call_flow: Any, tmp_path: Path
) -> None:
    """One SIGKILL meets a processor whose tasks wait for an answer, and two flows with ``Flow.enrich``."""
    pipes = {"call": make_state_pipe(), "write": make_pipe(), "end": make_pipe()}
    failed = {step: make_topic("failed", 1) for step in ("write", "end")}
    for pipe in pipes.values():
        pipe.fill(1200)
    trap = {"at": 700, "once": str(tmp_path / "asked")}
    options = {
        "call": {"processor": "Charged", "arguments": {"trap": trap}, "write": TASKS, "task_rows": 200},
        "write": {"failed": failed["write"], "write": TASKS, "task_bytes": 100_000},
        "end": {"failed": failed["end"]},
    }
    options = {step: {**given, "records_per_batch": 400} for step, given in options.items()}
    killed_together(pipes, options, {"call": tmp_path / "asked"})

    def recover(step: str) -> None:
        pipe = pipes[step]
        pipe.fill(300)
        if step == "call":
            pipe.run(process=charged(pipe), **TASKS)
            pipe.check()
        else:
            call_flow.run(pipe.arguments(failed=failed[step]), pipe.spark)
            call_flow.check(pipe, failed[step])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(recover, pipes))


@pytest.mark.long
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_with_calling_tasks_kills_itself(make_state_pipe: Any, step: str) -> None:
    """In turn: written as it is or inside of a query, calls in order or ahead."""
    pipe = make_state_pipe()
    pipe.fill(2000)
    turn = hooks.STEPS.index(step)
    order = "key" if turn % 4 < 2 else None
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(
        rule, processor="Charged", arguments={"order": order}, write=TASKS, inside=bool(turn % 2),
        records_per_batch=500, task_rows=200,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        pipe.fill(300)
        pipe.run(process=charged(pipe, order=order), inside=bool(turn % 2), **TASKS)
    finally:
        pipe.end_driver(process)
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("step", ["write", "progress", "end"])
@pytest.mark.parametrize("tasks", [False, True])
def test_driver_that_enriches_kills_itself(
    make_pipe: Any, make_topic: Any, call_flow: Any, driver_process: Any, small_tasks: None, step: str, tasks: bool
) -> None:
    pipe, failed = make_pipe(), make_topic("failed", 1)
    pipe.fill(2000)
    options = {"failed": failed, "write": TASKS if tasks else {}}
    rule = faults.fault(step, "kill", batch=BATCH)
    drivers = Path(call_flow.__file__).with_name("drivers.py")
    process = driver_process(drivers, rule, [pipe.arguments(**options, task_bytes=100_000)])
    output = process.communicate(timeout=120)[0]
    assert process.returncode == -signal.SIGKILL, output
    pipe.fill(300)
    call_flow.run(pipe.arguments(**options), pipe.spark)
    call_flow.check(pipe, failed)


@pytest.mark.parametrize(
    "order, inside",
    [
        pytest.param("key", False, marks=pytest.mark.long),
        pytest.param("key", True, marks=pytest.mark.long),
        pytest.param(None, False, marks=pytest.mark.long),
        pytest.param(None, True, marks=pytest.mark.long),
    ],
)
def test_worker_killed_in_a_call_of_a_processor(
    make_state_pipe: Any, small_tasks: None, tmp_path: Path, order: str | None, inside: bool
) -> None:
    pipe = make_state_pipe()
    pipe.fill(1000)
    trap = {"at": 600, "once": str(tmp_path / "killed"), "kill": True}
    query = pipe.run(read={"max_records_per_batch": 400}, process=charged(pipe, trap, order), inside=inside, **TASKS)
    assert (tmp_path / "killed").exists()
    assert sum(batch.attempts - 1 for batch in query.batches) >= 1
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("shuffled", [True, False])
def test_worker_killed_in_a_call_for_a_row(
    make_pipe: Any, make_topic: Any, call_flow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffled: bool
) -> None:
    """Spark runs the calls of a task in front of a shuffle again; without one, the batch runs again."""
    monkeypatch.setattr(output_writer, "_TASK_BYTES", 100_000 if shuffled else 16_000_000)
    pipe, failed = make_pipe(), make_topic("failed", 1)
    pipe.fill(1000)
    trap = {"at": 600, "once": str(tmp_path / "killed"), "kill": True}
    given = {"trap": trap, "failed": failed, "write": TASKS}
    query = call_flow.run(pipe.arguments(**given), pipe.spark)
    assert (tmp_path / "killed").exists()
    assert sum(batch.dead_letters for batch in query.batches) == 100, "what a killed worker has counted does not count"
    call_flow.check(pipe, failed)


# ---- what the checks must notice -----------------------------------------------------------------------


def keeps_outputs(patch: pytest.MonkeyPatch) -> None:
    """Outputs of a run that ended at a call are kept, and made again by the next run."""
    patch.setattr(OutputCollector, "truncate", lambda self, mark: None)


def keeps_changes(patch: pytest.MonkeyPatch) -> None:
    """Changes of state of a run that ended at a call are kept, and made again by the next run."""
    patch.setattr(Overlay, "roll_back", lambda self: None)


def swaps_results(patch: pytest.MonkeyPatch) -> None:
    """Every call gets the result of the call that was done before it."""
    original = CallRunner._attempts
    last: list[Any] = []

    async def attempts(self: Any, call: Any, lane: Any) -> Any:
        last.append(await original(self, call, lane))
        return last[max(0, len(last) - 2)]

    patch.setattr(CallRunner, "_attempts", attempts)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(keeps_outputs, marks=pytest.mark.long),
        pytest.param(swaps_results, marks=pytest.mark.long),
        pytest.param(keeps_changes, marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
def test_the_check_notices(
    make_state_pipe: Any, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    pipe = make_state_pipe(1)
    pipe.fill(200)
    if mutant is None:
        pipe.run(process=charged(pipe))
        pipe.check()
        return
    mutant(monkeypatch)
    pipe.run(process=charged(pipe))
    with pytest.raises(AssertionError, match=r"doubled|lost|=="):
        pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("mutant", ["Shifted", "Unordered"])
def test_the_check_of_rows_notices(
    make_pipe: Any, make_topic: Any, call_flow: Any, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    monkeypatch.setattr(flow_module, "CallRows", getattr(call_flow, mutant))
    pipe, failed = make_pipe(1), make_topic("failed", 1)
    pipe.fill(200)
    call_flow.run(pipe.arguments(failed=failed), pipe.spark)
    with pytest.raises(AssertionError, match=r"lost" if mutant == "Shifted" else r"out of order"):
        call_flow.check(pipe, failed)

"""Every step x {driver SIGKILL, worker SIGKILL, exception, rerun}: state in the topic = in the local store = computed.

After recovery an independent fold over the input says what the outputs, the table topic and the local stores hold.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from onceflow import hooks
from onceflow.planning import placement
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BATCH = 2
#: For a driver process: what reads and processes all batches.
BY_DRIVER: dict[str, Any] = {"write": {"engine": "driver"}}
BY_TASKS: dict[str, Any] = {"write": {"engine": "tasks"}}


@pytest.fixture
def by_tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small data is processed by as many tasks as large data would be."""
    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    return {"engine": "tasks"}


def options_of(step: str, by_tasks: dict[str, Any]) -> dict[str, Any]:
    """Steps take the ways in which tasks can run a step in turn: alone, and inside a query."""
    return {"inside": True, **by_tasks} if hooks.STEPS.index(step) % 2 else by_tasks


def driver_options(step: str) -> dict[str, Any]:
    """For a driver process: inside a query, by tasks and by the driver in turn."""
    return {**(BY_TASKS if hooks.STEPS.index(step) % 2 else BY_DRIVER), "inside": True}


def test_driver_killed(make_state_pipe: Any, killed_together: Any) -> None:
    """One SIGKILL meets flows of one driver at different steps: at the others it is as without state
    (test_crashes.py), or as at the next one. Each goes on in another way."""
    steps = ("write", "progress", "end", "settle")
    options: dict[str, dict[str, Any]] = {f"{step} by driver": BY_DRIVER for step in steps}
    options |= {f"{step} inside": driver_options(step) for step in ("settle",)}
    options |= {f"{step} by tasks": BY_TASKS for step in ("end",)}
    pipes = {name: make_state_pipe() for name in options}
    for pipe in pipes.values():
        pipe.fill(1500)
    killed_together(pipes, {name: {**options[name], "records_per_batch": 500} for name in pipes})

    def recover(name: str) -> None:
        pipes[name].fill(500)
        way = name.partition(" ")[2]
        pipes[name].run(**(BY_TASKS if way == "by driver" else BY_DRIVER)["write"])
        pipes[name].check()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(recover, pipes))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", "tasks", "inside"])
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_kills_itself(make_state_pipe: Any, step: str, engine: str) -> None:
    """At every step, each flow in a driver of its own."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, **({"driver": BY_DRIVER, "tasks": BY_TASKS}.get(engine) or driver_options(step)))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        pipe.fill(500)
        pipe.run()
    finally:
        pipe.end_driver(process)
    pipe.check()


@pytest.mark.long
def test_exception(make_state_pipe: Any, inject: Any, by_tasks: dict[str, Any]) -> None:
    """In one flow: what follows a failed batch fails itself, at the next step."""
    pipe = make_state_pipe()
    for step, options in [(s, each) for s in hooks.STEPS for each in (BY_DRIVER["write"], options_of(s, by_tasks))]:
        history = pipe.committed_progress()
        done = history[-1].batch_id if history else 0
        pipe.fill(1500)
        inject(step, "raise", **({} if step == "init" else {"batch": done + BATCH}))
        with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
            pipe.run(read={"max_records_per_batch": 500}, **options)
    pipe.run(**by_tasks)
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_python_workers_killed(make_state_pipe: Any, inject_at_every_step: Any, by_tasks: Any, inside: bool) -> None:
    """Between jobs nobody needs them: what they held in memory is in the stores and in Kafka."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    inject_at_every_step("kill-workers")
    query = pipe.run(read={"max_records_per_batch": 300}, inside=inside, **by_tasks)
    assert len(query.batches) > len(hooks.STEPS)
    pipe.check()


@pytest.mark.long_but("settle-kill")
@pytest.mark.parametrize(
    "step, action", [("begin", "raise"), ("settle", "kill"), pytest.param("write", "raise", marks=pytest.mark.long)]
)
def test_task_dies(make_state_pipe: Any, inject: Any, by_tasks: Any, step: str, action: str) -> None:
    """I3: before its store is up to date, after, or when all its records are acknowledged: the batch runs again,
    under a new epoch, and what the first attempt left pending is dropped."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    once = pipe.tmp_path / "fired"
    inject(step, action, where="task", batch_from=BATCH, task=0, once_file=str(once))
    query = pipe.run(inside=True, **by_tasks)
    assert once.exists()
    assert sorted(b.attempts for b in query.batches)[-2:] == [1, 2]
    pipe.check()


@pytest.mark.parametrize(
    "step, action",
    [
        ("settle", "kill"),
        pytest.param("begin", "raise", marks=pytest.mark.long),
        pytest.param("write", "kill", marks=pytest.mark.long),
    ],
)
def test_task_that_reads_by_itself_dies(make_state_pipe: Any, inject: Any, step: str, action: str) -> None:
    """As ``test_task_dies``, for a step that is written as it is: the tasks that read also process and write. Not every
    batch has something for the first one."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    once = pipe.tmp_path / "fired"
    inject(step, action, where="task", batch_from=BATCH, task=0, once_file=str(once))
    query = pipe.run(**BY_TASKS["write"])
    assert once.exists()
    assert sorted(b.attempts for b in query.batches)[-2:] == [1, 2]
    assert {b.path for b in query.batches} == {"2 reading tasks"}
    pipe.check()


@pytest.mark.long
def test_second_driver_takes_over(make_state_pipe: Any) -> None:
    """I6 with one folder of local stores for both: the older is fenced, the state stays right."""
    pipe = make_state_pipe()
    pipe.fill(2000)
    process = pipe.driver(forever=True, write={"trigger": "50 milliseconds"})
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("started") for line in lines)
        pipe.run()
        pipe.fill(1500)
        pipe.run()
        process.wait(timeout=60)
        rest = "".join(lines)
        assert "FencedError" in rest, rest[-2000:]
    finally:
        pipe.end_driver(process)
    pipe.check()


def test_aborted_state_is_not_visible(make_state_pipe: Any, inject: Any) -> None:
    """I7: a batch that fails after its changes were produced leaves nothing: not in the topic, not in the store."""
    pipe = make_state_pipe()
    pipe.fill(1000)
    pipe.run()
    before = pipe.table_rows()
    pipe.fill(900)
    inject("progress", "raise")
    with pytest.raises(StreamingQueryException, match="injected at"):
        pipe.run()
    assert pipe.table_rows() == before
    from onceflow import Table

    assert {key for key, _ in Table.of_flow(pipe.folder).range()} == set(before)
    everything = independent.read_topic(pipe.bootstrap, pipe.table, isolation="read_uncommitted")
    assert len(everything) > len(independent.read_topic(pipe.bootstrap, pipe.table))
    pipe.run()
    pipe.check()

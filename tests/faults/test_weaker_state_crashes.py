"""Crashes of flows whose state is not exactly-once: each keeps what it promises, and loses nothing more."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from onceflow import hooks
from onceflow.driver.kafka import delivery
from onceflow.driver.step.state_step import StateStep
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BATCH = 2
LOCAL = {"changelog": False}
LOCAL_FLOW: dict[str, Any] = {"process": LOCAL}
AT_LEAST_ONCE: dict[str, Any] = {"write": {"guarantee": "at_least_once"}}


def merged(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**options, **more, "write": {**options.get("write", {}), **more.get("write", {})}}


def driver_options(step: str, engine: str) -> dict[str, Any]:
    """With tasks, steps run alone and inside a query in turn."""
    return {"write": {"engine": engine}, "inside": engine == "tasks" and hooks.STEPS.index(step) % 2 == 1}


#: Steps, and what kind of flow is killed there.
KINDS = {"write": LOCAL_FLOW, "audit": AT_LEAST_ONCE, "progress": AT_LEAST_ONCE, "end": LOCAL_FLOW}
#: With the local stores gone or not; for the driver, which opens them as tasks do, steps take turns.
CRASHES = [(step, "tasks", lost) for step in hooks.STEPS for lost in (False, True)] + [
    (step, "driver", bool(n % 2)) for n, step in enumerate(hooks.STEPS)
]


@pytest.mark.long
def test_driver_killed(make_state_pipe: Any, killed_together: Any) -> None:
    """One SIGKILL meets eight flows at different steps, two of each kind by the driver and by tasks. Their local stores
    survive it, and the other one goes on."""
    engines = {f"{step} {engine}": engine for step in KINDS for engine in ("driver", "tasks")}
    kinds = {name: KINDS[name.partition(" ")[0]] for name in engines}
    pipes = {name: make_state_pipe(partitions=3) for name in engines}
    options = {name: merged(driver_options(name.partition(" ")[0], engines[name]), kinds[name]) for name in engines}
    for pipe in pipes.values():
        pipe.fill(900)
    killed_together(pipes, {name: {**options[name], "records_per_batch": 300} for name in pipes})
    for pipe in pipes.values():
        pipe.fill(200)

    def recover(name: str) -> None:
        pipe, kind = pipes[name], kinds[name]
        engine = "tasks" if engines[name] == "driver" else "driver"
        query = pipe.run(process=kind.get("process"), engine=engine, **kind.get("write", {}))
        assert sum(batch.state_lost for batch in query.batches) == 0
        if kind is LOCAL_FLOW:
            pipe.check(topic=False)
        else:
            assert (pipe.check_at_least_once() > 0) == name.startswith("audit")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(recover, pipes))


@pytest.mark.long
@pytest.mark.parametrize("step, engine, lost", CRASHES)
def test_a_driver_kills_itself(make_state_pipe: Any, step: str, engine: str, lost: bool) -> None:
    """At every step, with and without the local stores: outputs are exactly-once in either case."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, process=LOCAL, **driver_options(step, engine))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        committed = pipe.committed_progress()
        if lost:
            shutil.rmtree(pipe.state_dir, ignore_errors=True)
        pipe.fill(500)
        query = pipe.run(process=LOCAL, engine=engine)
    finally:
        pipe.end_driver(process)
    known = committed[-1].tables.get(pipe.table) if committed else None
    had_state = 0 if known is None or known.local is None else len(known.local.last)
    assert sum(batch.state_lost for batch in query.batches) == (had_state if lost else 0)
    if lost:
        wanted, _, _ = pipe.ledger.expected(pipe.sent)
        assert Counter(value["n"] for value in pipe.outputs()) == Counter(wanted.keys())
    else:
        pipe.check(topic=False)


@pytest.mark.long
def test_a_task_that_dies(make_state_pipe: Any, inject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is aborted, and what it has left pending is dropped."""
    from onceflow.planning import placement

    monkeypatch.setattr(placement, "TASK_ROWS", 400)
    pipe = make_state_pipe()
    pipe.fill(3000)
    once = pipe.tmp_path / "fired"
    inject("write", "kill", where="task", batch=BATCH, task=0, once_file=str(once))
    query = pipe.run(process=LOCAL, engine="tasks")
    assert once.exists()
    assert {b.batch: b.attempts for b in query.batches}[BATCH] == 2
    pipe.check(topic=False)


# ---- at least once -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("step, engine, lost", CRASHES)
def test_at_least_once_a_driver_kills_itself(make_state_pipe: Any, step: str, engine: str, lost: bool) -> None:
    """At every step, with and without the local stores: every record is processed at least once."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, **merged(driver_options(step, engine), AT_LEAST_ONCE))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        if lost:
            shutil.rmtree(pipe.state_dir, ignore_errors=True)
        pipe.fill(500)
        pipe.run(guarantee="at_least_once", engine=engine)
    finally:
        pipe.end_driver(process)
    doubled = pipe.check_at_least_once()
    assert (doubled > 0) == (step in ("write", "audit"))
    if not doubled:
        pipe.check()


@pytest.mark.long
def test_a_second_driver_takes_over(make_state_pipe: Any) -> None:
    """Both with one folder of local stores: the older one is fenced though there is no transaction."""
    pipe = make_state_pipe()
    pipe.fill(2000)
    write = {"trigger": "50 milliseconds", "guarantee": "at_least_once"}
    process = pipe.driver(forever=True, write=write)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("started") for line in lines)
        pipe.run(guarantee="at_least_once")
        pipe.fill(1500)
        pipe.run(guarantee="at_least_once")
        process.wait(timeout=60)
        rest = "".join(lines)
        assert "FencedError" in rest, rest[-2000:]
    finally:
        pipe.end_driver(process)
    pipe.check_at_least_once()


def progress_first(patch: pytest.MonkeyPatch) -> None:
    """Progress is written before the rows and the changes of state."""
    patch.setattr(
        delivery,
        "AtLeastOnceWithState",
        lambda session, progress: delivery.WithoutTransactions(session.cluster, session.names, progress_first=True),
    )
    # The direct engine looks for timers before the first records are there. Progress must not move then.
    patch.setattr(StateStep, "due", lambda self, now_ms: False)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", "tasks"])
@pytest.mark.parametrize("mutant", [None, progress_first])
def test_a_broken_build_is_found_out(
    make_state_pipe: Any, inject: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any, engine: str
) -> None:
    pipe = make_state_pipe()
    pipe.fill(3000)
    if mutant is not None:
        mutant(monkeypatch)
    fired = pipe.tmp_path / "fired"
    # Of the broken build, progress has moved then, and nothing is written.
    if engine == "driver":
        inject("progress", "raise", batch=BATCH, once_file=str(fired))
    else:
        inject("begin", "raise", where="task", batch=BATCH, task=0, once_file=str(fired))
    with contextlib.suppress(StreamingQueryException):
        pipe.run(guarantee="at_least_once", engine=engine)
    assert fired.exists()
    inject("init", "raise", flow="nobody")
    pipe.run(guarantee="at_least_once")
    if mutant is None:
        pipe.check_at_least_once()
    else:
        with pytest.raises(AssertionError, match="lost"):
            pipe.check_at_least_once()

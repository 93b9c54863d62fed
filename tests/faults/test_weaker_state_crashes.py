"""Crashes of flows whose state is not exactly-once: each keeps what it promises, and loses nothing more."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onceflow import hooks
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BATCH = 2
LOCAL = {"changelog": False}


def driver_options(step: str) -> dict[str, Any]:
    """Steps take the three ways a step can run in turn: driver, tasks, inside a query."""
    turn = hooks.STEPS.index(step) % 3
    return {"write": {"small_batch_rows": 0 if turn else 4000}, "inside": turn == 2}


def test_driver_killed(make_state_pipe: Any, killed_together: Any) -> None:
    """One SIGKILL meets flows without a changelog at different steps. Their stores survive it: nothing is lost."""
    pipes = {step: make_state_pipe(partitions=3) for step in ("write", "progress", "end")}
    for pipe in pipes.values():
        pipe.fill(1200)
    killed_together(
        pipes, {step: {**driver_options(step), "records_per_batch": 400, "process": LOCAL} for step in pipes}
    )
    for pipe in pipes.values():
        pipe.fill(300)

    def recover(pipe: Any) -> None:
        query = pipe.run(process=LOCAL)
        assert sum(batch.state_lost for batch in query.batches) == 0
        pipe.check(topic=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(recover, pipes.values()))


@pytest.mark.long
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("step", hooks.STEPS)
def test_a_driver_kills_itself(make_state_pipe: Any, step: str, lost: bool) -> None:
    """At every step, with and without the local stores: outputs are exactly-once in either case."""
    pipe = make_state_pipe()
    pipe.fill(3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, process=LOCAL, **driver_options(step))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        committed = pipe.committed_progress()
        if lost:
            shutil.rmtree(pipe.state_dir, ignore_errors=True)
        pipe.fill(500)
        query = pipe.run(process=LOCAL)
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
    query = pipe.run(process=LOCAL, small_batch_rows=0)
    assert once.exists()
    assert {b.batch: b.attempts for b in query.batches}[BATCH] == 2
    pipe.check(topic=False)

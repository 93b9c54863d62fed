"""Joins by time are exact under kills: the results are those of a join over all records that are not late."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.planning import placement
from onceflow.state.engine.interval_engine import IntervalEngine
from onceflow.state.format import waiting_rows
from onceflow.task import state_run
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]

sys.path.insert(0, str(Path(__file__).parent))
try:
    join_ledger = importlib.import_module("join_ledger")
finally:
    sys.path.pop(0)

BATCH, RECORDS_PER_BATCH = 2, 500


def options(turn: int, kind: str, late: str) -> dict[str, Any]:
    """In turn by the driver and by tasks."""
    return {
        "joined": {"kind": kind, "late_topic": late},
        "write": {"engine": "tasks" if turn % 2 else "driver"},
        "records_per_batch": RECORDS_PER_BATCH,
    }


def run(pipe: Any, turn: int, kind: str, late: str) -> Any:
    given = options(turn, kind, late)
    return pipe.run(read={"max_records_per_batch": RECORDS_PER_BATCH}, joined=given["joined"], **given["write"])


def finish(pipe: Any, turn: int, kind: str, late: str) -> None:
    for number in range(2):  # the second one makes due what the first one has let wait
        join_ledger.end(pipe, number)
        run(pipe, turn, kind, late)
    join_ledger.check(pipe, kind, late)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["interval", "as-of"])
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_kills_itself(make_state_pipe: Any, make_topic: Any, step: str, kind: str) -> None:
    turn = hooks.STEPS.index(step)
    pipe, late = make_state_pipe(), make_topic("late", 1)
    join_ledger.fill(pipe, 3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, **options(turn, kind, late))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        join_ledger.fill(pipe, 500)
        finish(pipe, turn + 1, kind, late)
    finally:
        pipe.end_driver(process)


@pytest.mark.long
@pytest.mark.parametrize("step, action", [("settle", "kill"), ("write", "kill"), ("begin", "kill"), ("write", "raise")])
def test_task_dies(
    make_state_pipe: Any, make_topic: Any, inject: Any, monkeypatch: pytest.MonkeyPatch, step: str, action: str
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 200)
    pipe, late = make_state_pipe(), make_topic("late", 1)
    join_ledger.fill(pipe, 3000)
    once = pipe.tmp_path / "fired"
    inject(step, action, where="task", batch_from=BATCH, task=0, once_file=str(once))
    run(pipe, 1, "interval", late)
    assert once.exists()
    finish(pipe, 1, "interval", late)


# ---- what the check must notice ------------------------------------------------------------------------


def written_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Local copies get the waiting rows when they are written, not when they are committed."""

    def too_early(store: Any, _goal: Any, _commit: Any, changes: Any, *_: int, **__: Any) -> None:
        store.write(changes, index=True)

    patch.setattr(state_run, "set_pending", too_early)


def forgets_marks(patch: pytest.MonkeyPatch) -> None:
    """Waiting rows are not marked when a later batch finds their partner."""
    patch.setattr(waiting_rows, "matched", lambda row: row)


def due_too_early(patch: pytest.MonkeyPatch) -> None:
    """Rows are due before their last partner can come."""
    original = waiting_rows.packed

    def packed(due_ms: Any, *arguments: Any) -> Any:
        return original(due_ms - join_ledger.AFTER_MS, *arguments)

    patch.setattr(waiting_rows, "packed", packed)


def never_due(patch: pytest.MonkeyPatch) -> None:
    """Nothing is ever due."""
    patch.setattr(IntervalEngine, "_fire_until", lambda self: None)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(written_before_the_commit, marks=pytest.mark.long),
        forgets_marks,
        pytest.param(due_too_early, marks=pytest.mark.long),
        pytest.param(never_due, marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
def test_the_check_notices(
    make_state_pipe: Any,
    make_topic: Any,
    inject: Any,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """A batch fails when its rows are written. Each mutant then loses or doubles results; the sound build does not."""
    pipe, late = make_state_pipe(), make_topic("late", 1)
    join_ledger.fill(pipe, 3000)
    if mutant is not None:
        mutant(monkeypatch)
    inject("audit", "raise", batch=BATCH, once_file=str(pipe.tmp_path / "fired"))
    with pytest.raises(Exception, match="injected at"):
        run(pipe, 0, "interval", late)
    if mutant is None:
        finish(pipe, 0, "interval", late)
        return
    with pytest.raises(AssertionError, match=r"lost: |too many: "):
        finish(pipe, 0, "interval", late)

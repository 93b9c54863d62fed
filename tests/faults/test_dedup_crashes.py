"""``Flow.deduplicate`` is exact under kills: outputs and ids are those of an independent fold of the source topic."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onceflow import hooks
from onceflow.planning import placement
from onceflow.state.engine.dedup_engine import DedupEngine
from onceflow.task import state_run as state_run
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]

sys.path.insert(0, str(Path(__file__).parent))
try:
    dedup_ledger = importlib.import_module("dedup_ledger")
finally:
    sys.path.pop(0)

BATCH = 2


def options(turn: int) -> dict[str, Any]:
    """In turn: by the driver, by tasks, by tasks inside of a query."""
    write = {"engine": "tasks" if turn % 3 else "driver"}
    return {"deduplicate": dedup_ledger.OPTIONS, "write": write, "inside": turn % 3 == 2, "records_per_batch": 500}


def run(pipe: Any, turn: int = 0) -> Any:
    given = options(turn)
    read = {"max_records_per_batch": given["records_per_batch"]}
    return pipe.run(read=read, deduplicate=given["deduplicate"], inside=given["inside"], **given["write"])


@pytest.mark.long
def test_driver_killed(make_state_pipe: Any, killed_together: Any) -> None:
    """One SIGKILL meets flows at different steps."""
    pipes = {step: make_state_pipe() for step in ("write", "end")}
    for pipe in pipes.values():
        dedup_ledger.fill(pipe, 3000)
    killed_together(pipes, {step: options(turn) for turn, step in enumerate(pipes, 1)})

    def recover(turn_and_pipe: tuple[int, Any]) -> None:
        turn, pipe = turn_and_pipe
        dedup_ledger.fill(pipe, 500)
        run(pipe, turn)
        dedup_ledger.check(pipe)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(recover, enumerate(pipes.values())))


@pytest.mark.long
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_kills_itself(make_state_pipe: Any, step: str) -> None:
    turn = hooks.STEPS.index(step)
    pipe = make_state_pipe()
    dedup_ledger.fill(pipe, 3000)
    rule = faults.fault(step, "kill", **({} if step == "init" else {"batch": BATCH}))
    process = pipe.driver(rule, **options(turn))
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        dedup_ledger.fill(pipe, 500)
        run(pipe, turn + 1)
    finally:
        pipe.end_driver(process)
    dedup_ledger.check(pipe)


@pytest.mark.long
@pytest.mark.parametrize("step, action", [("settle", "kill"), ("write", "kill"), ("begin", "kill"), ("write", "raise")])
@pytest.mark.parametrize("turn", [1, 2], ids=["fused", "inside"])
def test_task_dies(
    make_state_pipe: Any, inject: Any, monkeypatch: pytest.MonkeyPatch, step: str, action: str, turn: int
) -> None:
    monkeypatch.setattr(placement, "TASK_ROWS", 200)
    pipe = make_state_pipe()
    dedup_ledger.fill(pipe, 3000)
    once = pipe.tmp_path / "fired"
    inject(step, action, where="task", batch=BATCH, task=0, once_file=str(once))
    query = run(pipe, turn)
    assert once.exists()
    assert {b.batch: b.attempts for b in query.batches}[BATCH] >= 2
    dedup_ledger.check(pipe)


# ---- what the check must notice ------------------------------------------------------------------------


def written_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Local copies get the ids when they are written, not when they are committed."""

    def too_early(store: Any, _goal: Any, _commit: Any, changes: Any, *_: int, **__: Any) -> None:
        store.write(changes, index=True)

    patch.setattr(state_run, "set_pending", too_early)


def forgets(patch: pytest.MonkeyPatch) -> None:
    """Some ids are not kept."""
    original = DedupEngine._written
    patch.setattr(DedupEngine, "_written", lambda self: (c for c in original(self) if c[0][-1:] != b"7"))


def never_forgets(patch: pytest.MonkeyPatch) -> None:
    """Ids that are not deleted yet count as remembered."""
    original = DedupEngine._found

    def found(self: Any, row_keys: Any, **how: Any) -> Any:
        self._floor, floor = 0, self._floor
        rows = original(self, row_keys, **how)
        self._floor = floor
        return rows

    patch.setattr(DedupEngine, "_found", found)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(written_before_the_commit, marks=pytest.mark.long),
        pytest.param(forgets, marks=pytest.mark.long),
        pytest.param(never_forgets, marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
def test_the_check_notices(
    make_state_pipe: Any,
    inject: Any,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """A batch fails when its ids are written. Each mutant then loses or doubles records; the sound build does not."""
    pipe = make_state_pipe()
    dedup_ledger.fill(pipe, 3000)
    if mutant is not None:
        mutant(monkeypatch)
    once = pipe.tmp_path / "fired"
    inject("audit", "raise", batch=BATCH, once_file=str(once))
    with pytest.raises(Exception, match="injected at"):
        run(pipe)
    run(pipe)
    if mutant is None:
        dedup_ledger.check(pipe)
        return
    with pytest.raises(AssertionError, match=r"lost or doubled|repeats|of no batch|deleted twice"):
        dedup_ledger.check(pipe)

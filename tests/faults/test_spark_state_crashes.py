"""Queries with state in Spark, killed at every step, their checkpoint kept: outputs equal a batch query's (I5).

The kill that matters is the one at ``end``: Kafka has committed, Spark's commit log does not know it yet. Fault
injection puts it exactly there, every time.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from onceflow import hooks
from onceflow.spark.checkpoint_files import LocalFolder, look_at
from onceflow.testing import faults

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.mark.timeout(420)  # eight drivers
@pytest.mark.parametrize(
    "query, steps",
    [
        # Each of them everywhere is left to `make test-long`.
        ("aggregation", ("end",)),
        pytest.param("aggregation", hooks.STEPS, marks=pytest.mark.long),
        pytest.param("outer_join", hooks.STEPS, marks=pytest.mark.long),
    ],
    ids=["aggregation", "aggregation-all", "outer_join-all"],
)
def test_killed_at_every_step(make_spark_state_pipe: Any, query: str, steps: tuple[str, ...]) -> None:
    """One flow, killed at one step after the other, each in a batch in the middle of a run, then finished."""
    pipe = make_spark_state_pipe(query)
    for step in steps:
        pipe.fill(220)
        before = pipe.progress()
        # The second new batch of this start: there is state already, and a batch that was committed in this process.
        batch = {} if step == "init" else {"batch_from": (0 if before is None else before.batch_id) + 2}
        process = pipe.driver(faults.fault(step, "kill", **batch))
        try:
            output = process.communicate(timeout=120)[0]
            assert process.returncode == -signal.SIGKILL, output
        finally:
            pipe.end_driver(process)
        after = pipe.progress()
        if step == "end":
            state = look_at(LocalFolder(pipe.checkpoint))
            assert after is not None
            assert after.checkpoint is not None
            assert state.planned == state.committed + 1 == after.checkpoint.batch
    pipe.close_windows()
    pipe.run()
    expected, written = pipe.expected(), pipe.written()
    assert not expected - written, f"lost: {list((expected - written).items())[:5]}"
    assert not written - expected, f"doubled or foreign: {list((written - expected).items())[:5]}"
    assert sum(expected.values()) >= 2 * len(steps)


@pytest.mark.long
@pytest.mark.parametrize("completed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_user_code_that_is_not_deterministic(
    make_spark_state_pipe: Any, monkeypatch: pytest.MonkeyPatch, completed: bool
) -> None:
    """A batch that Kafka has committed and Spark's commit log lacks, of a query whose state holds a random token.

    With the commit log completed, the state is that of the committed output. Drained, it is that of the second run,
    and later outputs contradict the committed one: why the log is completed, and what is left where it cannot be.
    """
    pipe = make_spark_state_pipe("tokens")
    pipe.fill(70)
    pipe.run(output_mode="update")
    first = pipe.tokens()
    pipe.forget_last_commit()
    monkeypatch.setattr("onceflow.driver.start.checkpoint_location.COMPLETE_COMMIT_LOG", completed)
    pipe.fill(70)
    query = pipe.run(output_mode="update")
    assert query.drained == ([] if completed else [query.batches[0].batch - 1])
    assert set(first) == {f"key-{n}" for n in range(7)}
    assert {key for key, tokens in pipe.tokens().items() if tokens != first[key]} == (
        set() if completed else set(first)
    )

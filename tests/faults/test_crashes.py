"""Every step x {driver SIGKILL, Python workers SIGKILLed, exception}: invariants I1, I2 and I5 hold.

Before recovery the topics are looked at as the crash left them: what a read_committed consumer sees is exactly
what the progress record says (I1). After recovery everything is there once (I5), in contiguous batches (I2).
"""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from onceflow import hooks
from onceflow.driver.record import progress_log
from onceflow.spark import versions
from onceflow.testing import faults, independent

pytestmark = [pytest.mark.integration, pytest.mark.faults]

# The batch a step is reached in: batch 2 is neither the first of a start nor the last.
BATCH = 2


def rule_of(step: str, action: str, **fields: Any) -> str:
    if step != "init":
        fields.setdefault("batch", BATCH)
    return faults.fault(step, action, **fields)


def check_visible_iff_progress(pipe: Any) -> None:
    """I1, on whatever state the crash left: records visible = records covered by progress."""
    history = pipe.committed_progress()
    covered = sum(history[-1].offsets[pipe.source].values()) if history else 0
    assert len(independent.read_topic(pipe.bootstrap, pipe.target)) == covered


def check_contiguous(pipe: Any) -> None:
    """I2: batch numbers without gap, offsets that only grow."""
    history = pipe.committed_progress()
    batches = [p.batch_id for p in history]
    assert batches == list(range(len(batches)))
    for before, after in itertools.pairwise(history):
        for partition, offset in before.offsets[pipe.source].items():
            assert after.offsets[pipe.source][partition] >= offset


def check_recovered(pipe: Any) -> None:
    pipe.check()
    check_contiguous(pipe)


BY_DRIVER, BY_TASKS = {"engine": "driver"}, {"engine": "tasks"}
#: Columns that Spark has to compute, with the values as they are.
SQL = ["key", "unbase64(base64(value)) AS value"]


def test_driver_killed(make_pipe: Any, killed_together: Any) -> None:
    """One SIGKILL meets the flows of one driver: at every step one that the driver reads, and at some also one that
    tasks read, and one whose values Spark computes. Each goes on in another way. All steps of all ways, and that the
    same one goes on, are tested by ``test_driver_kills_itself``."""
    options: dict[str, dict[str, Any]] = {f"{step} by driver": BY_DRIVER for step in hooks.STEPS}
    options |= {"progress by tasks": BY_TASKS}
    options |= {"end sql": BY_DRIVER, "write sql by tasks": BY_TASKS}
    pipes = {name: make_pipe() for name in options}
    # A read_committed reader stops in front of the record of a flow that is at `progress`, or that its driver has sent
    # with the rows: no other may be behind it.
    undecided = ("progress by driver", "progress by tasks", "write by driver", "audit by driver")
    apart = {name: partition for partition, name in enumerate(undecided)}
    for name, pipe in pipes.items():
        names = (f"{pipe.flow}-{n}" for n in itertools.count())
        wanted = [apart[name]] if name in apart else range(len(apart), progress_log.PROGRESS_PARTITIONS)
        pipes[name] = replace(pipe, flow=next(n for n in names if progress_log.partition_of(n) in wanted))
    for pipe in pipes.values():
        pipe.fill(1500)
    given = {name: {"write": write, "records_per_batch": 500} for name, write in options.items()}
    killed_together(pipes, {name: {**each, "columns": SQL} if "sql" in name else each for name, each in given.items()})
    for pipe in pipes.values():
        check_visible_iff_progress(pipe)

    def recover(name: str) -> None:
        pipes[name].fill(500)
        pipes[name].run(**(BY_TASKS if name.endswith("by driver") else BY_DRIVER))
        check_recovered(pipes[name])

    with ThreadPoolExecutor(3) as pool:  # side by side: a start waits for Kafka and Spark most of the time
        list(pool.map(recover, pipes))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["driver", "tasks", "sql", "sql by tasks"])
@pytest.mark.parametrize("step", hooks.STEPS)
def test_driver_kills_itself(make_pipe: Any, step: str, engine: str) -> None:
    """As ``test_driver_killed``, each flow in a driver of its own."""
    options = BY_TASKS if "tasks" in engine else BY_DRIVER
    pipe = make_pipe()
    pipe.fill(3000)
    columns = {"columns": SQL} if "sql" in engine else {}
    process = pipe.driver(rule_of(step, "kill"), write=options, **columns)
    try:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == -signal.SIGKILL, output
        check_visible_iff_progress(pipe)
        pipe.fill(500)
        pipe.run(**options)
    finally:
        pipe.end_driver(process)
    check_recovered(pipe)


@pytest.mark.long
@pytest.mark.parametrize("each", [True, False], ids=["each way", "in turn"])
def test_exception(make_pipe: Any, inject: Any, each: bool) -> None:
    """In one flow: what follows a failed batch fails itself, at the next step; by the driver and by tasks."""
    pipe = make_pipe()
    ways = [(step, options) for step in hooks.STEPS for options in (BY_DRIVER, BY_TASKS)]
    if not each:  # they take the steps in turn
        ways = [ways[2 * n + n % 2] for n in range(len(hooks.STEPS))]
    for step, options in ways:
        history = pipe.committed_progress()
        done = history[-1].batch_id if history else 0
        pipe.fill(1500)
        # Not in the first batch of a start, nor in its last one.
        inject(step, "raise", **({} if step == "init" else {"batch": done + BATCH}))
        with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
            pipe.run(read={"max_records_per_batch": 500}, **options)
        check_visible_iff_progress(pipe)
    pipe.run()
    check_recovered(pipe)


@pytest.mark.long
def test_python_workers_killed(make_pipe: Any, inject_at_every_step: Any) -> None:
    """Workers are idle at most steps: the next job starts new ones, or meets a dead one and is run again."""
    pipe = make_pipe()
    pipe.fill(3000)
    inject_at_every_step("kill-workers")
    query = pipe.run(read={"max_records_per_batch": 300}, engine="tasks")
    check_recovered(pipe)
    assert len(query.batches) > len(hooks.STEPS)
    # Spark 3.5 does not see that an idle worker has died: each attempt may meet one of those of the two cores.
    failed = 1 if versions.current() >= (4, 0) else 2
    assert max(b.attempts for b in query.batches) <= failed + 1


@pytest.mark.parametrize(
    "action", [pytest.param("kill", marks=pytest.mark.short_form), pytest.param("raise", marks=pytest.mark.long)]
)
def test_task_dies_after_producing(make_pipe: Any, inject: Any, action: str) -> None:
    """I3: all of a task's records are acknowledged, then its worker dies: the whole batch runs again."""
    pipe = make_pipe()
    pipe.fill(3000)
    once = pipe.tmp_path / "fired"
    inject("write", action, where="task", batch=BATCH, task=0, once_file=str(once))
    query = pipe.run(engine="tasks", partitioner="source")
    assert once.exists()
    assert {b.batch: b.attempts for b in query.batches}[BATCH] == 2
    check_recovered(pipe)
    # The first attempt's records are in the log, aborted: a reader that ignores transactions sees them.
    everything = independent.read_topic(pipe.bootstrap, pipe.target, isolation="read_uncommitted")
    assert len(everything) > len(pipe.sent)


@pytest.mark.long
def test_a_batch_that_always_fails_is_given_up_clearly(make_pipe: Any, inject: Any) -> None:
    from onceflow import BatchAbortedError

    pipe = make_pipe()
    pipe.fill(1500)
    inject("write", "raise", where="task", batch=BATCH, task=0, times=1000)
    flow = pipe.open()
    df = flow.read(pipe.source, max_records_per_batch=1000).select("key", "value")
    query = flow.write(df, topic=pipe.target, engine="tasks", partitioner="source").start()
    with pytest.raises(BatchAbortedError, match=r"aborted 4 times(.|\n)*injected at write(.|\n)*next step"):
        query.awaitTermination(120)
    check_visible_iff_progress(pipe)
    os.environ.pop(hooks.VARIABLE)
    pipe.run()
    check_recovered(pipe)

"""Who may write: one driver of a flow (I6), one attempt of a batch (I3), one task per partition (I4)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from onceflow import BatchAbortedError, FencedError, ProgressConflictError, TransactionTimeoutError, hooks
from onceflow.testing import faults, independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def finish(pipe: Any, process: Any, seconds: float) -> str:
    """What a driver printed until it ended by itself."""
    try:
        output: str = process.communicate(timeout=seconds)[0]
    finally:
        pipe.end_driver(process)
    return output


def start(pipe: Any, **write: Any) -> Any:
    flow = pipe.open()
    df = flow.read(pipe.source, max_records_per_batch=1000).select("key", "value")
    return flow.write(df, topic=pipe.target, **write).start()


@pytest.mark.parametrize("engine", ["tasks", "driver"])
def test_the_older_of_two_drivers_is_fenced(make_pipe: Any, engine: str) -> None:
    pipe = make_pipe()
    pipe.fill(500)
    older = start(pipe, engine=engine)
    older.processAllAvailable()
    newer = start(pipe)  # reads progress after it has fenced the older one
    try:
        pipe.fill(500)
        with pytest.raises(FencedError, match=rf"newer driver of flow '{pipe.flow}'(.|\n)*next step"):
            older.awaitTermination(60)
        newer.processAllAvailable()
    finally:
        newer.stop()
    pipe.check()


def test_a_driver_fenced_in_mid_batch(make_pipe: Any, inject: Any) -> None:
    """The older driver sleeps (a long garbage collection) between its writes and its commit."""
    pipe = make_pipe()
    pipe.fill(1500)
    ready, go_on = pipe.tmp_path / "paused", pipe.tmp_path / "go-on"
    inject("audit", "pause", batch=1, seconds=60, once_file=str(ready), until=str(go_on))
    older = start(pipe)
    try:
        wait_until(ready.exists, 60, "the older driver reaches its pause")
        pipe.run()
        pipe.fill(200)
        go_on.touch()
        with pytest.raises(FencedError):
            older.awaitTermination(60)
    finally:
        older.stop()
    pipe.run()
    pipe.check()


def test_a_second_write_of_one_flow_is_refused(make_pipe: Any) -> None:
    from onceflow import OptionError

    pipe = make_pipe()
    flow = pipe.open()
    df = flow.read(pipe.source).select("key", "value")
    query = flow.write(df, topic=pipe.target).start()
    try:
        with pytest.raises(OptionError, match="already has a running query"):
            flow.write(df, topic=pipe.target).start()
    finally:
        query.stop()


def test_two_tasks_on_one_partition_are_refused_before_commit(make_pipe: Any, monkeypatch: Any) -> None:
    """I4. The planner is made to send every row to partition 0 from two tasks."""
    from pyspark.sql import functions as F

    from onceflow.driver.kafka import output_writer
    from onceflow.messages import Routing
    from onceflow.planning import ownership

    def broken(df: Any, columns: Any, **_: Any) -> Any:
        rows = df.select("key", "value", F.lit(0).alias("partition")).repartition(2)
        return ownership.Prepared(rows, Routing("key", 2, hash_key=False), shuffled=True)

    pipe = make_pipe()
    pipe.fill(400)
    with monkeypatch.context() as patched:
        patched.setattr(output_writer, "prepare", broken)
        query = start(pipe, engine="tasks", checkpoint=pipe.tmp_path / "checkpoint")
        with pytest.raises(ProgressConflictError, match="Two tasks wrote to"):
            query.awaitTermination(60)
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []
    pipe.run()
    pipe.check()


@pytest.mark.long
def test_extra_attempts(make_pipe: Any) -> None:
    """I3. In batch 1 a task fails after producing, and Spark retries it. In batch 2 shuffle files are lost while the
    write stage runs: Spark attempts the rest of the stage again, with task attempts counted from 0 anew. Four tasks on
    two cores: the first two finish, the last two find the files gone.
    """
    pipe = make_pipe()
    pipe.fill(2000)
    failed, lost, local = (pipe.tmp_path / name for name in ("failed", "lost", "spark-local"))
    fails = faults.fault("write", "raise", where="task", task=0, batch=1, once_file=str(failed))
    loses = faults.fault("begin", "lose-shuffle", where="task", task=0, batch=2, folder=str(local), once_file=str(lost))
    process = pipe.driver(
        faults.value_of(*faults.parsed(fails), *faults.parsed(loses)),
        master="local[2,2]",
        spark={"spark.local.dir": str(local), "spark.default.parallelism": "4"},
        task_bytes=1,
        columns=["key", "unhex(hex(value)) AS value"],  # Spark evaluates it, so Spark moves the rows
        write={"engine": "tasks"},
    )
    output = finish(pipe, process, 120)
    assert process.returncode == 0, output
    assert failed.exists()
    assert "Extra attempt: task 0 is at attempt 1" in output, output
    assert lost.exists()
    assert "shuffle files were lost" in output, output
    pipe.check()


@pytest.mark.long
@pytest.mark.parametrize("step, action", [("write", "raise"), ("begin", "orphan")])
def test_extra_attempts_on_executors(make_pipe: Any, step: str, action: str) -> None:
    """I3. Spark retries a task that failed after producing; or one whose executor is gone while the task
    itself is only slow: it wakes up and writes while the second attempt runs, and after.

    The second needs executors, so a local-cluster. (Speculation would do the same, but a flow refuses it, and
    Spark starts no speculative copy on the same host.)
    """
    pipe = make_pipe()
    pipe.fill(2000)
    once = pipe.tmp_path / "fired"
    rule = faults.fault(step, action, where="task", task=0, seconds=8, once_file=str(once))
    process = pipe.driver(
        rule,
        master="local-cluster[2,1,600]",
        spark={"spark.executor.memory": "600m"},
        write={"engine": "tasks", "partitioner": "source"},
    )
    output = finish(pipe, process, 150)
    assert process.returncode == 0, output
    assert once.exists()
    assert "Extra attempt: task 0 is at attempt 1" in output
    pipe.check()


def test_speculation_is_refused(make_pipe: Any) -> None:
    from onceflow import UnsupportedQueryError

    pipe = make_pipe()
    spark = pipe.spark

    class Speculating:
        """The session, as one with speculation on would answer."""

        def __getattr__(self, name: str) -> Any:
            return getattr(spark, name)

        class conf:
            @staticmethod
            def get(name: str, default: str | None = None) -> str | None:
                return "true" if name == "spark.speculation" else default

    from onceflow import Flow

    with pytest.raises(UnsupportedQueryError, match=r"spark\.speculation is on"):
        Flow(pipe.flow, Speculating(), bootstrap_servers=pipe.bootstrap)  # type: ignore[arg-type]


def test_a_transaction_that_timed_out_is_run_again(make_pipe: Any, inject: Any) -> None:
    """The broker aborts in mid-batch; the batch runs again under a new epoch, nothing is lost."""
    pipe = make_pipe()
    pipe.fill(1500)
    inject("audit", "pause", batch=1, seconds=2.5)
    query = pipe.run(transaction_timeout="1 second")
    assert {b.batch: b.attempts for b in query.batches}[1] == 2
    pipe.check()


@pytest.mark.long
def test_a_transaction_that_always_times_out_says_what_to_do(make_pipe: Any, inject: Any) -> None:
    pipe = make_pipe()
    pipe.fill(500)
    inject("audit", "pause", seconds=3, times=1000)
    query = start(pipe, transaction_timeout="1 second")
    with pytest.raises((TransactionTimeoutError, BatchAbortedError), match=r"(?s)max_records_per_batch"):
        query.awaitTermination(120)
    os.environ.pop(hooks.VARIABLE)
    pipe.run()
    pipe.check()

"""Executors that come late and leave: every batch takes the cluster as it is then.

No batch is aborted for an executor that comes, nor for one that ends its tasks and leaves. With dynamic allocation,
tasks wait for executors, or Spark would not add any. Those that have not begun when their executor leaves cannot run
elsewhere, where no copy of their state is: that one batch is run again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceflow.testing import independent
from onceflow.testing.faults import python_workers
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos.spark_cluster import SparkCluster

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(600)]

FIRST_WORK_S = 60.0
BACKLOG = 10_000  # records: on a slow machine, more of them would take minutes at the end
# An executor that leaves ends its tasks first, and hands on what it has shuffled.
LEAVES_IN_ORDER = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "3",
    # A new executor gets its partitions when they are restored there, so not before the next batch but one.
    "spark.dynamicAllocation.executorIdleTimeout": "30s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}


class Service:
    """The running service, and what it has printed."""

    def __init__(self, pipe: Any, process: subprocess.Popen[str]) -> None:
        self.pipe = pipe
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def batches(self) -> list[dict[str, Any]]:
        # A line of Spark's log may follow in the same line.
        told = [json.JSONDecoder().raw_decode(line)[0] for line in self.lines if line.startswith("{")]
        return [each for each in told if "batch" in each]

    def feed_until(
        self, done: Callable[[], bool], what: str, seconds: float = FIRST_WORK_S, *, feed: bool = True
    ) -> None:
        """Records keep coming until something has happened."""

        def holds() -> bool:
            if done():
                return True
            if feed and len(self.pipe.sent) - sum(each["records"] for each in self.batches()) < BACKLOG:
                self.pipe.fill(600)  # six tasks, so that some of them wait for a core
            return False

        def ended() -> str:
            return "" if self.process.poll() is None else "".join(self.lines)[-5000:] or "the driver has ended"

        wait_until(holds, seconds, lambda: f"{what}; {''.join(self.lines[-3:])}", useless=ended, poll_s=0.2)

    def feed_batches(self, count: int) -> None:
        wanted = len(self.batches()) + count
        self.feed_until(lambda: len(self.batches()) >= wanted, f"{count} more batches", 90)


def has_worked(cluster: SparkCluster, worker: str) -> bool:
    """Whether Python tasks have run in an executor of a worker."""
    return any(python_workers(pid) for pid in cluster.executors(worker))


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic allocation"])
def test_executors_come_late_and_leave(
    make_state_pipe: Any, driver_process: Any, tmp_path: Path, dynamic: bool
) -> None:
    """No worker at Flow.process, one before start(), two more while the flow runs, and one that leaves."""
    pipe = make_state_pipe(partitions=6)
    pipe.fill(1000)
    decommissioned = ["-Dspark.decommission.enabled=true"]
    with SparkCluster(tmp_path / "cluster", workers=0, java_options=decommissioned, own_hosts=True) as cluster:
        arguments = {
            "flow": pipe.flow,
            "bootstrap": pipe.bootstrap,
            "source": pipe.source,
            "target": pipe.target,
            "table": pipe.table,
            "folder": str(tmp_path),
            "master": cluster.master,
            "task_rows": 100,
            "partition_s": 0.4 if dynamic else 0.0,  # executors are added when tasks have waited for a second
            "config": {**cluster.settings, **LEAVES_IN_ORDER, **(DYNAMIC if dynamic else {})},
        }
        process = driver_process(Path(__file__).with_name("growing_service.py"), None, arguments)
        service = Service(pipe, process)
        service.feed_until(lambda: "processed\n" in service.lines, "Flow.process", 60)
        first = cluster.add_worker()
        (tmp_path / "start").touch()
        service.feed_batches(3)
        assert has_worked(cluster, first)
        late = [cluster.add_worker(), cluster.add_worker()]
        service.feed_until(lambda: all(has_worked(cluster, worker) for worker in late), "work for the late workers")
        service.feed_batches(5)
        os.kill(cluster.pid(late[0]), signal.SIGPWR)  # the worker is told to leave, and its executors with it
        service.feed_until(lambda: not cluster.executors(late[0]), "the executor that leaves", 90)
        service.feed_batches(5)
        attempts = {n: tries for told in service.batches() for n, tries in told["attempts"].items()}
        ends = independent.end_offsets(pipe.bootstrap, pipe.source)
        service.feed_until(lambda: _has_read(pipe, ends), "all records", 240, feed=False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(service.lines)[-5000:]
    aborted = [line for line in service.lines if "aborted" in line]
    # One batch may have had a task that waited for the core of the executor that leaves: it is planned again.
    assert len(aborted) == sum(attempts.values()) - len(attempts) <= 1, aborted
    assert all("An executor is gone before a task has begun" in line for line in aborted), aborted
    sent, seen = len(pipe.sent), len(independent.read_topic(pipe.bootstrap, pipe.target, decided=True))
    if seen < sent:  # what came after the last batch
        pipe.run()
    pipe.check(local=False)


def _has_read(pipe: Any, ends: Any) -> bool:
    committed = independent.committed_offsets(pipe.bootstrap, pipe.flow)
    return all(committed.get(partition, 0) >= end for partition, end in ends.items())

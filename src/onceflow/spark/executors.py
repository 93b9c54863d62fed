"""The executors of a cluster, as Spark's driver knows them at this moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

_LISTENERS_MS = 5_000
# How long a task waits for the executor that it prefers, while that is busy and others are free. Spark's default is
# three seconds; but elsewhere, a task of ours would only fail. Spark reads the setting for each job.
_WAIT, _WAIT_S = "spark.locality.wait.process", "60s"
_TASKS_MAX = 100_000


@dataclass(frozen=True)
class Executor:
    """An executor.

    Args:
        id: by which Spark knows it.
        host: the name of its machine, as Spark knows it.
        cores: how many tasks it runs at once.
        leaving: whether Spark decommissions it. It gets no new tasks.
    """

    id: str
    host: str
    cores: int
    leaving: bool = False

    @property
    def preference(self) -> str:
        """How a partition of an RDD prefers it (Spark: ``ExecutorCacheTaskLocation``)."""
        return f"executor_{self.host}_{self.id}"


class Executors:
    """Asks Spark for its executors.

    Spark's scheduler itself is asked, not a listener: events reach listeners later, after a queue, and a listener in
    Python would be called for every task.
    """

    def __init__(self, spark: SparkSession) -> None:
        context: Any = spark.sparkContext._jsc.sc()
        self._context = context
        self._backend = context.schedulerBackend()
        context.conf().setIfMissing(_WAIT, _WAIT_S)
        self._cores_per_task = max(1, int(context.conf().get("spark.task.cpus", "1")))
        self._known: dict[str, tuple[str, int]] = {}

    def registered(self) -> frozenset[str]:
        """The ids of the registered executors. This is one call of the JVM."""
        return frozenset(str(self._backend.getExecutorIds().mkString("\n")).split())

    def ids(self) -> dict[str, bool]:
        """The registered executors, and whether each takes new tasks."""
        return {name: bool(self._backend.isExecutorActive(name)) for name in self.registered()}

    def of(self, ids: dict[str, bool]) -> list[Executor]:
        """What is known of these executors, which `ids` has returned. One that has just come or left may be missing."""
        if ids.keys() - self._known.keys():
            self._look()
        return [Executor(name, *self._known[name], not ids[name]) for name in sorted(ids) if name in self._known]

    def ran_in(self, stage: int) -> dict[int, str]:
        """The id of the executor in which each task of a stage has run, by the numbers of the tasks."""
        self._await_listeners()
        tasks = _items(self._context.statusStore().taskList(stage, 0, _TASKS_MAX))
        return {int(each.index()): str(each.executorId()) for each in tasks if str(each.status()) == "SUCCESS"}

    def begun(self) -> list[tuple[int, frozenset[int]]]:
        """Of each stage that runs: how many tasks it has, and the numbers of those that run or are done."""
        self._await_listeners()
        tracker, store = self._context.statusTracker(), self._context.statusStore()
        found = []
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info.isDefined():
                tasks = _items(store.taskList(stage, info.get().currentAttemptId(), _TASKS_MAX))
                begun = frozenset(int(each.index()) for each in tasks if str(each.status()) in ("RUNNING", "SUCCESS"))
                found.append((int(info.get().numTasks()), begun))
        return found

    def _look(self) -> None:
        self._await_listeners()
        for each in _items(self._context.statusStore().executorList(True)):
            host, _, _ = str(each.hostPort()).rpartition(":")
            if host:  # else it has only just registered
                self._known[str(each.id())] = host, max(1, int(each.totalCores()) // self._cores_per_task)

    def _await_listeners(self) -> None:
        """The status store gets its news from the listener bus."""
        with contextlib.suppress(Py4JError):  # it did not become empty: what is missing comes with the next look
            self._context.listenerBus().waitUntilEmpty(_LISTENERS_MS)


def _items(seq: Any) -> Iterable[Any]:
    return (seq.apply(at) for at in range(seq.size()))

"""Ends jobs of which a task waits for an executor that is gone.

A task waits for the executor that it prefers for ``spark.locality.wait.process``, which onceflow sets to a minute. It
waits for one that is gone, too, as long as another task of its stage has wanted one that is there
(``TaskSetManager.computeValidLocalityLevels``). The job is cancelled then, and whoever has started it plans it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from onceflow.spark.executors import Executors
from onceflow.spark.jvm import SPARK_GONE

log = logging.getLogger("onceflow.state")

_LOOK_EVERY_S = 0.5


class AwaitedExecutors:
    """Watches jobs. Each thread says which executors its jobs want.

    Args:
        name: of the flow.
    """

    def __init__(self, spark: SparkSession, executors: Executors, name: str) -> None:
        self._context = spark.sparkContext
        self._executors = executors
        self._name = name
        self._lock = threading.Lock()
        self._wanted: dict[str, list[tuple[str, ...]]] = {}  # by tag: ids of the executors of each job, task by task
        self._given_up: set[str] = set()  # tags
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, preferences: Sequence[str]) -> None:
        """A job of this thread will have a task for each of these executors, see `Executor.preference`."""
        tag = self._tag()
        self._context.addJobTag(tag)
        with self._lock:
            self._wanted.setdefault(tag, []).append(tuple(each.rpartition("_")[2] for each in preferences))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=f"executors of {self._name}", daemon=True)
                self._thread.start()

    @property
    def has_given_up(self) -> bool:
        """Whether a job of this thread was cancelled since `begin`."""
        return self._tag() in self._given_up

    def end(self) -> None:
        """The jobs of this thread are over."""
        tag = self._tag()
        with self._lock:
            known = self._wanted.pop(tag, None)
            self._given_up.discard(tag)
        if known is not None and not self._closed.is_set():
            with suppress(*SPARK_GONE):  # whoever needs Spark notices
                self._context.removeJobTag(tag)

    @contextmanager
    def during(self, preferences: Sequence[str]) -> Iterator[None]:
        """The same for one job."""
        self.begin(preferences)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _tag(self) -> str:
        return f"onceflow-{self._name}-{threading.get_ident()}"

    def _watch(self) -> None:
        gone_before: frozenset[str] = frozenset()
        while not self._closed.wait(_LOOK_EVERY_S):
            try:
                gone_before = self._look(gone_before)
            except Py4JError as error:  # Spark is being stopped, say
                if not self._closed.is_set():
                    log.info("flow %s: executors that jobs wait for could not be looked up: %s", self._name, error)

    def _look(self, gone_before: frozenset[str]) -> frozenset[str]:
        """Cancel what waits for executors that were gone at the last look, too: what has run there has failed by now.
        Returns those that are gone."""
        with self._lock:
            wanted = {tag: list(jobs) for tag, jobs in self._wanted.items() if tag not in self._given_up}
        if not wanted:
            return frozenset()
        there = self._executors.registered()
        gone = frozenset(each for jobs in wanted.values() for job in jobs for each in job if each not in there)
        if surely := gone & gone_before:
            begun = self._executors.begun()
            for tag, jobs in wanted.items():
                if any(_waits(job, surely, stage) for job in jobs for stage in begun):
                    self._give_up(tag)
        return gone

    def _give_up(self, tag: str) -> None:
        with self._lock:
            if tag not in self._wanted:
                return
            self._given_up.add(tag)
            log.info("flow %s: tasks wait for an executor that is gone; their job is cancelled", self._name)
            self._context.cancelJobsWithTag(tag)


def _waits(job: Sequence[str], gone: frozenset[str], stage: tuple[int, frozenset[int]]) -> bool:
    """Whether a task of a job waits for an executor that is gone.

    Args:
        stage: one that may be of this job: how many tasks it has, and the numbers of those that have begun.
    """
    count, begun = stage
    return count == len(job) and any(each in gone and number not in begun for number, each in enumerate(job))

"""Homes of tables on a real cluster: Spark's executors, and jobs in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from pyspark.sql import SparkSession

from onceflow.driver.step.homes import Homes
from onceflow.driver.step.table_homes import TableHomes, group_count
from onceflow.driver.step.table_state import TableState
from onceflow.planning.process import Step
from onceflow.spark.awaited_executors import AwaitedExecutors
from onceflow.spark.executors import Executor, Executors
from onceflow.spark.jvm import SPARK_ERRORS, SPARK_GONE
from onceflow.spark.placed_jobs import PlacedJobs

_T = TypeVar("_T")


@dataclass(frozen=True)
class ClusterHomes:
    """The homes, and what makes jobs whose tasks run there."""

    homes: Homes
    jobs: PlacedJobs


class SparkCluster:
    """See `homes.Cluster`."""

    def __init__(self, spark: SparkSession, jobs: PlacedJobs, flow: str) -> None:
        self._spark = spark
        self._jobs = jobs
        self._executors = Executors(spark)
        self._awaited = AwaitedExecutors(spark, self._executors, flow)
        self._group = f"onceflow-copies-{flow}"
        self._requesting: threading.Thread | None = None

    def ids(self) -> dict[str, bool]:
        return self._executors.ids()

    def of(self, ids: dict[str, bool]) -> list[Executor]:
        return self._executors.of(ids)

    def run(self, executors: Sequence[str], task: Callable[[Iterable[int]], Iterable[_T]]) -> list[_T]:
        with self._awaited.during(executors):
            return self._jobs.run(executors, task)

    def ran_in(self, stage: int) -> dict[int, str]:
        return self._executors.ran_in(stage)

    def request_executor(self) -> None:
        # Spark has a job wait for as long as there is no executor.
        if self._requesting is None or not self._requesting.is_alive():
            self._requesting = threading.Thread(target=self._run_anywhere, name="requests an executor", daemon=True)
            self._requesting.start()

    def _run_anywhere(self) -> None:
        with suppress(*SPARK_ERRORS):  # whoever has asked looks whether there is an executor
            self.described("Requests an executor")
            self._spark.sparkContext.parallelize(range(1), 1).count()

    def described(self, text: str) -> None:
        self._spark.sparkContext.setJobGroup(self._group, text)

    def begin(self, executors: Sequence[str]) -> None:
        self._awaited.begin(executors)

    @property
    def has_given_up(self) -> bool:
        return self._awaited.has_given_up

    def end(self) -> None:
        self._awaited.end()

    def close(self) -> None:
        self._awaited.close()

    def cancel(self) -> None:
        with suppress(*SPARK_GONE):  # then there are no jobs
            self._spark.sparkContext.cancelJobGroup(self._group)


def homes_of(
    spark: SparkSession,
    tables: Mapping[str, TableState],
    steps: Mapping[str, Step],
    *,
    sources: Iterable[int],
    output: int | None,
    flow: str,
) -> ClusterHomes | None:
    """The homes of the tables of a query that runs on a cluster. None: their copies are in the memory of processes.

    Args:
        tables, steps: by table.
        sources: partition counts of the topics that are read. output: that of the output topic; None: rows name theirs.
    """
    on_disk = {name: table for name, table in tables.items() if table.spec.store.on_disk}
    if not on_disk:
        return None
    jobs = PlacedJobs(spark)
    cluster = SparkCluster(spark, jobs, flow)
    hosts = len(cluster.ids())
    read, written = list(sources), [] if output is None else [output]
    found = {
        name: TableHomes(
            table, group_count(table.partitions, read, written, hosts), steps[name].copies, steps[name].waits
        )
        for name, table in on_disk.items()
    }
    return ClusterHomes(Homes(found, cluster, flow=flow), jobs)

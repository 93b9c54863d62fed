"""Jobs whose tasks wait for executors that are gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.spark.awaited_executors import AwaitedExecutors


class Spark:
    """A context with job tags, and executors that come and go. One of its stages runs."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.there = {"1", "2"}
        self.stages: list[tuple[int, frozenset[int]]] = []
        self.tags: set[str] = set()
        self.cancelled: list[str] = []

    def addJobTag(self, tag: str) -> None:
        self.tags.add(tag)

    def removeJobTag(self, tag: str) -> None:
        self.tags.discard(tag)

    def cancelJobsWithTag(self, tag: str) -> None:
        self.cancelled.append(tag)

    def registered(self) -> frozenset[str]:
        return frozenset(self.there)

    def begun(self) -> list[tuple[int, frozenset[int]]]:
        return self.stages


@pytest.fixture
def spark() -> Spark:
    return Spark()


@pytest.fixture
def awaited(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> AwaitedExecutors:
    monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    made: Any = AwaitedExecutors(spark, spark, "flow")  # type: ignore[arg-type]
    return made


def looks(awaited: AwaitedExecutors, times: int = 2) -> None:
    gone: frozenset[str] = frozenset()
    for _ in range(times):
        gone = awaited._look(gone)


@pytest.mark.parametrize(
    "count, begun, waits",
    [
        (2, {0}, True),
        (2, set(), True),
        (2, {0, 1}, False),  # the task has run there, or runs elsewhere: it fails by itself
        (2, {1}, False),  # another one waits, for an executor that is busy
        (3, {0}, False),  # a stage of another job
    ],
)
def test_a_job_is_cancelled_if_a_task_waits_for_an_executor_that_is_gone(
    spark: Spark, awaited: AwaitedExecutors, count: int, begun: set[int], waits: bool
) -> None:
    awaited.begin(["executor_host-a_1", "executor_host-b_2"])
    spark.stages = [(count, frozenset(begun))]
    looks(awaited)
    assert spark.cancelled == []
    spark.there.remove("2")
    looks(awaited, 1)
    assert spark.cancelled == [], "it has only just gone"
    looks(awaited)
    assert (spark.cancelled == [*spark.tags]) is waits
    assert awaited.has_given_up is waits
    looks(awaited)
    assert len(spark.cancelled) == waits, "once"
    awaited.end()
    assert not awaited.has_given_up
    assert spark.tags == set()


def test_jobs_that_are_over_are_left_alone(spark: Spark, awaited: AwaitedExecutors) -> None:
    with awaited.during(["executor_host-a_1", "executor_host-b_2"]):
        spark.there.remove("2")
        spark.stages = [(2, frozenset())]
    looks(awaited)
    assert spark.cancelled == []

"""Dead letters, late records and records that name a topic reach their topics, whatever stands behind the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow.driver.step import stages
from onceflow.planning import placement
from onceflow.spark import plans
from onceflow.testing import independent

pytestmark = pytest.mark.integration

COUNT = 6_000


# The others are left to `make test-long`: each way a batch can be put together is here once.
SHORT = ("second step",)
LONG = (
    "union",
    "select",
    "where false",
    "as it is",
    "where",
    "withColumn",
    "own topic",
    "column named topic",
    "mapInArrow",
    "mapInPandas",
    "static join",
    "explode",
    "repartition",
    "repartition by key",
    "coalesce",
)


class Trial:
    """A flow with an operator behind its step, and what its topics must hold."""

    def __init__(self, bootstrap: str, spark: Any, side_outputs: Any, topics: Any, state_dir: Path) -> None:
        self.bootstrap, self.spark, self.topics = bootstrap, spark, topics
        self._outputs, self._state_dir = side_outputs, state_dir
        self._sent: list[Any] = []
        self._beside: list[Any] = []

    def fill(self, count: int, beside: int = 0) -> None:
        more, others = self._outputs.inputs(len(self._sent), count), self._outputs.beside(len(self._beside), beside)
        independent.fill(self.bootstrap, self.topics.source, more)
        independent.fill(self.bootstrap, self.topics.beside, others)
        self._sent += more
        self._beside += others

    def flow(self) -> onceflow.Flow:
        return onceflow.Flow(f"flow-{self.topics.source}", self.spark, bootstrap_servers=self.bootstrap)

    def frame(self, flow: onceflow.Flow, operator: str) -> Any:
        return self._outputs.frame_of(
            flow, operator, self.topics, records_per_batch=1500, state_dir=str(self._state_dir)
        )

    def run(self, operator: str) -> Any:
        """The query, when it has processed everything or failed."""
        with self.flow() as flow:
            topic = None if operator == "own topic" else self.topics.target
            writer = flow.write(self.frame(flow, operator), topic=topic, engine="tasks", once=True)
            query = writer.start()
            query.awaitTermination()
            return query

    def expected(self, operator: str) -> Any:
        return self._outputs.expected(operator, self._sent, self._beside)

    def check(self, expected: Any) -> None:
        self._outputs.check(self.bootstrap, self.topics, expected)


@pytest.fixture
def trial(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Trial:
    monkeypatch.setattr(placement, "TASK_ROWS", 800)
    return Trial(
        onceflow_broker, onceflow_spark, side_outputs, side_outputs.make_topics(make_topic), tmp_path / "state"
    )


@pytest.mark.parametrize("operator", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_operators_behind_a_step(trial: Trial, operator: str) -> None:
    trial.fill(COUNT, beside=300)
    query = trial.run(operator)
    assert {batch.attempts for batch in query.batches} == {1}
    trial.check(trial.expected(operator))


@pytest.mark.long
def test_many_side_outputs_that_belong_to_other_tasks(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than tasks may return to the driver: the batch runs again, and they go to the write tasks."""

    class Few(stages.RowsTask):
        def __call__(self, batches: Any) -> Any:
            from onceflow.task import step_outputs

            usual, step_outputs.RETURNED_ROWS_MAX = step_outputs.RETURNED_ROWS_MAX, 5
            try:
                yield from super().__call__(batches)
            finally:
                step_outputs.RETURNED_ROWS_MAX = usual

    monkeypatch.setattr(stages, "RowsTask", Few)
    trial.fill(3000)
    first, *others = [batch.attempts for batch in trial.run("select").batches]
    assert (first, set(others)) == (2, {1})
    trial.check(trial.expected("select"))


@pytest.mark.long
def test_a_filter_on_the_time(trial: Trial) -> None:
    """Each batch has its own time. When the filter lets nothing through any more, the optimizer leaves the step out."""
    trial.fill(3000)
    target = trial.expected("select").target
    with trial.flow() as flow:
        until = time.time() + 10
        frame = trial.frame(flow, "select").where(F.current_timestamp() < F.timestamp_seconds(F.lit(until)))
        query = flow.write(frame, topic=trial.topics.target, engine="tasks").start()
        try:
            query.processAllAvailable()
            assert time.time() < until
            while time.time() < until:
                time.sleep(0.1)
            trial.fill(3000)
            query.processAllAvailable()
        finally:
            query.stop()
    trial.check(replace(trial.expected("select"), target=target))


@pytest.mark.long
def test_a_build_whose_side_outputs_are_rows_is_found_out(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(stages.RowsTask):
        def __call__(self, batches: Any) -> Any:
            for rows in super().__call__(batches):
                nothing = pa.nulls(rows.num_rows, pa.string())
                yield rows.set_column(rows.schema.get_field_index("topic"), "topic", nothing)

    monkeypatch.setattr(stages, "RowsTask", Mixed)
    trial.fill(3000)
    trial.run("repartition")
    with pytest.raises(AssertionError, match=r"target: \d+ too many"):
        trial.check(trial.expected("repartition"))


@pytest.mark.long
def test_a_build_that_runs_a_step_twice_commits_nothing(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shuffle that both readers share, Spark computes the step for each of them."""
    monkeypatch.setattr(plans, "exchanged", lambda df, tasks: df)
    trial.fill(3000)
    with pytest.raises(onceflow.OnceflowError):
        trial.run("repartition")
    assert independent.read_topic(trial.bootstrap, trial.topics.target, decided=True) == []

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
from onceflow.sink import plans, state_step
from onceflow.testing import independent

pytestmark = pytest.mark.integration

COUNT = 6_000


# The others are left to `make test-long`: each way a batch can be put together is here once.
SHORT = ("select", "where false", "union", "second step")
LONG = (
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


@pytest.mark.parametrize("operator", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_operators_behind_a_step(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    operator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_step, "_TASK_ROWS", 800)
    topics = side_outputs.make_topics(make_topic)
    sent, sent_beside = side_outputs.inputs(0, COUNT), side_outputs.beside(0, 300)
    independent.fill(onceflow_broker, topics.source, sent)
    independent.fill(onceflow_broker, topics.beside, sent_beside)
    with onceflow.Flow(f"flow-{topics.source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        frame = side_outputs.frame_of(flow, operator, topics, records_per_batch=1500, state_dir=str(tmp_path / "state"))
        topic = None if operator == "own topic" else topics.target
        query = flow.write(frame, topic=topic, small_batch_rows=0, once=True).start()
        query.awaitTermination()
        assert {batch.attempts for batch in query.batches} == {1}
    side_outputs.check(onceflow_broker, topics, side_outputs.expected(operator, sent, sent_beside))


def run_flow(bootstrap: str, spark: Any, side_outputs: Any, topics: Any, operator: str, tmp_path: Path) -> Any:
    """The query, when it has processed everything or failed."""
    independent.fill(bootstrap, topics.source, side_outputs.inputs(0, 3000))
    with onceflow.Flow(f"flow-{topics.source}", spark, bootstrap_servers=bootstrap) as flow:
        frame = side_outputs.frame_of(flow, operator, topics, records_per_batch=1500, state_dir=str(tmp_path / "state"))
        query = flow.write(frame, topic=topics.target, small_batch_rows=0, once=True).start()
        query.awaitTermination()
        return query


def test_many_side_outputs_that_belong_to_other_tasks(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than tasks may return to the driver: the batch runs again, and they go to the write tasks."""

    class Few(state_step.RowsTask):
        def __call__(self, batches: Any) -> Any:
            from onceflow.sink import step_outputs

            usual, step_outputs.RETURNED_ROWS_MAX = step_outputs.RETURNED_ROWS_MAX, 5
            try:
                yield from super().__call__(batches)
            finally:
                step_outputs.RETURNED_ROWS_MAX = usual

    monkeypatch.setattr(state_step, "RowsTask", Few)
    monkeypatch.setattr(state_step, "_TASK_ROWS", 800)
    topics = side_outputs.make_topics(make_topic)
    query = run_flow(onceflow_broker, onceflow_spark, side_outputs, topics, "select", tmp_path)
    first, *others = [batch.attempts for batch in query.batches]
    assert (first, set(others)) == (2, {1})
    side_outputs.check(onceflow_broker, topics, side_outputs.expected("select", side_outputs.inputs(0, 3000), []))


@pytest.mark.long
def test_a_filter_on_the_time(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch has its own time. When the filter lets nothing through any more, the optimizer leaves the step out."""
    monkeypatch.setattr(state_step, "_TASK_ROWS", 800)
    topics = side_outputs.make_topics(make_topic)
    independent.fill(onceflow_broker, topics.source, side_outputs.inputs(0, 3000))
    with onceflow.Flow(f"flow-{topics.source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        frame = side_outputs.frame_of(flow, "select", topics, records_per_batch=1500, state_dir=str(tmp_path / "state"))
        until = time.time() + 10
        frame = frame.where(F.current_timestamp() < F.timestamp_seconds(F.lit(until)))
        query = flow.write(frame, topic=topics.target, small_batch_rows=0).start()
        try:
            query.processAllAvailable()
            assert time.time() < until
            while time.time() < until:
                time.sleep(0.1)
            independent.fill(onceflow_broker, topics.source, side_outputs.inputs(3000, 3000))
            query.processAllAvailable()
        finally:
            query.stop()
    first = side_outputs.expected("select", side_outputs.inputs(0, 3000), [])
    everything = side_outputs.expected("select", side_outputs.inputs(0, 6000), [])
    side_outputs.check(onceflow_broker, topics, replace(everything, target=first.target))


def test_a_build_whose_side_outputs_are_rows_is_found_out(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mixed(state_step.RowsTask):
        def __call__(self, batches: Any) -> Any:
            for rows in super().__call__(batches):
                nothing = pa.nulls(rows.num_rows, pa.string())
                yield rows.set_column(rows.schema.get_field_index("topic"), "topic", nothing)

    monkeypatch.setattr(state_step, "RowsTask", Mixed)
    topics = side_outputs.make_topics(make_topic)
    run_flow(onceflow_broker, onceflow_spark, side_outputs, topics, "repartition", tmp_path)
    with pytest.raises(AssertionError, match=r"target: \d+ too many"):
        side_outputs.check(
            onceflow_broker, topics, side_outputs.expected("repartition", side_outputs.inputs(0, 3000), [])
        )


def test_a_build_that_runs_a_step_twice_commits_nothing(
    onceflow_broker: str,
    onceflow_spark: Any,
    make_topic: Callable[..., str],
    side_outputs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the shuffle that both readers share, Spark computes the step for each of them."""
    monkeypatch.setattr(plans, "exchanged", lambda df, tasks: df)
    topics = side_outputs.make_topics(make_topic)
    with pytest.raises(onceflow.OnceflowError):
        run_flow(onceflow_broker, onceflow_spark, side_outputs, topics, "repartition", tmp_path)
    assert independent.read_topic(onceflow_broker, topics.target, decided=True) == []

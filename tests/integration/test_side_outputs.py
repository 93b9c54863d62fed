"""Dead letters, late records and records that name a topic reach their topics, whatever stands behind the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.sink import state_step
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
        query = flow.write(frame, topic=topics.target, small_batch_rows=0, once=True).start()
        query.awaitTermination()
        print(operator, [(batch.attempts, batch.path) for batch in query.batches])
    side_outputs.check(onceflow_broker, topics, side_outputs.expected(operator, sent, sent_beside))

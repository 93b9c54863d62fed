"""Dead letters, late records and records that name a topic reach their topics, whatever stands behind the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onceflow
from onceflow.sink import state_step
from onceflow.testing import independent

pytestmark = pytest.mark.integration

COUNT = 6_000


@pytest.fixture
def topics(make_topic: Callable[..., str], side_outputs: Any) -> Any:
    """The dead letters' topic cannot be divided among tasks, that of late records can."""
    return side_outputs.Topics(
        source=make_topic("in", 4),
        beside=make_topic("beside", 2),
        target=make_topic("out", 4),
        dead=make_topic("dead", 1),
        late=make_topic("late", 4),
        named=make_topic("named", 3),
        table=make_topic("table", 4).replace("table-", "sums-"),
        second_table=make_topic("table", 4).replace("table-", "again-"),
    )


def check(bootstrap: str, topics: Any, wanted: Any) -> None:
    for name in ("target", "dead", "late", "named"):
        seen = independent.read_topic(bootstrap, getattr(topics, name), decided=True)
        got, expected = Counter((record.key, record.value) for record in seen), getattr(wanted, name)
        lost, more = expected - got, got - expected
        assert not lost, f"{name}: {lost.total()} lost, for example {list(lost)[:3]}"
        assert not more, f"{name}: {more.total()} too many, for example {list(more)[:3]}"


OPERATORS = [
    "as it is",
    "select",
    "where",
    "where false",
    "withColumn",
    "own topic",
    "union",
    "mapInArrow",
    "mapInPandas",
    "static join",
    "explode",
    "repartition",
    "repartition by key",
    "coalesce",
    "second step",
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_behind_a_step(
    onceflow_broker: str,
    onceflow_spark: Any,
    topics: Any,
    side_outputs: Any,
    operator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_step, "_TASK_ROWS", 800)
    sent, sent_beside = side_outputs.inputs(0, COUNT), side_outputs.beside(0, 300)
    independent.fill(onceflow_broker, topics.source, sent)
    independent.fill(onceflow_broker, topics.beside, sent_beside)
    with onceflow.Flow(f"flow-{topics.source}", onceflow_spark, bootstrap_servers=onceflow_broker) as flow:
        frame = side_outputs.frame_of(flow, operator, topics, records_per_batch=1500, state_dir=str(tmp_path / "state"))
        query = flow.write(frame, topic=topics.target, small_batch_rows=0, once=True).start()
        query.awaitTermination()
        print(operator, [(batch.attempts, batch.path) for batch in query.batches])
    check(onceflow_broker, topics, side_outputs.expected(operator, sent, sent_beside))

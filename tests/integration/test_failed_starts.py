"""A start that fails leaves nothing behind: no record of progress, and no table that a later start stumbles over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import AnalysisException

import onceflow
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent

pytestmark = pytest.mark.integration


class Count(onceflow.Processor):
    value, state, output = onceflow.serdes.BYTES, onceflow.serdes.JSON, onceflow.serdes.JSON

    def process(self, key: Any, records: Any, state: Any) -> Any:
        for _ in records:
            state.put((state.get() or 0) + 1)
        yield onceflow.Record(key, state.get())


class Starts:
    """A flow that is started again and again."""

    def __init__(self, servers: str, spark: Any, make_topic: Callable[..., str], tmp_path: Any) -> None:
        self.servers, self.spark, self.tmp_path = servers, spark, tmp_path
        self.source, self.second, self.out = make_topic("in", 2), make_topic("second", 1), make_topic("out", 2)
        self.name = f"flow-{self.source}"
        self.fill(20)

    def fill(self, count: int, topic: str = "") -> None:
        independent.fill(self.servers, topic or self.source, [(b"k%d" % (n % 3), b"%d" % n) for n in range(count)])

    def flow(self, name: str = "") -> Any:
        return onceflow.Flow(name or self.name, self.spark, bootstrap_servers=self.servers)

    def run(self, flow: Any, df: Any) -> None:
        query = flow.write(df, topic=self.out, once=True).start()
        assert query.awaitTermination(60)

    def records(self) -> list[independent.Seen]:
        """Progress records of this flow."""
        found = independent.read_topic(self.servers, PROGRESS_TOPIC, decided=True)
        return [seen for seen in found if seen.key == self.name.encode()]

    def written(self) -> int:
        return len(independent.read_topic(self.servers, self.out, decided=True))


@pytest.fixture
def starts(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Any) -> Starts:
    return Starts(onceflow_broker, onceflow_spark, make_topic, tmp_path)


def test_a_typo_leaves_no_progress(starts: Starts) -> None:
    flow = starts.flow()
    rows = flow.read(starts.source)
    with pytest.raises(AnalysisException):
        rows.selectExpr("kye AS key", "value")
    with pytest.raises(onceflow.SchemaError):
        flow.write(rows.selectExpr("key"), topic=starts.out).start()
    with pytest.raises(onceflow.UnknownTopicError):
        flow.write(rows, topic="no-such-topic-at-all").start()
    assert starts.records() == []
    flow.close()
    another = starts.flow()
    starts.run(another, another.read(starts.source))
    assert starts.written() == 20
    assert [seen.value is not None for seen in starts.records()][:1] == [True]


def test_a_table_of_a_failed_start_is_used_by_the_next_one(starts: Starts) -> None:
    def rows(flow: Any) -> Any:
        table = f"table-{starts.source}"
        return flow.process(flow.read(starts.source), Count(), table=table, state_dir=starts.tmp_path)

    flow = starts.flow()
    with pytest.raises(onceflow.UnknownTopicError):
        flow.write(rows(flow), topic="no-such-topic-at-all").start()
    assert starts.records() == []
    flow.close()
    flow = starts.flow()
    starts.run(flow, rows(flow))
    assert starts.written() == 3


def test_reads_before_one_that_fails_count(starts: Starts) -> None:
    """As in a notebook, cell by cell."""
    starts.fill(5, starts.second)
    flow = starts.flow()
    first = flow.read(starts.source)
    with pytest.raises(onceflow.UnknownTopicError):
        flow.read("no-such-topic-at-all")
    second = flow.read(starts.second)
    starts.run(flow, first.union(second))
    assert starts.written() == 25


def test_latest_is_the_end_at_the_read(starts: Starts) -> None:
    flow = starts.flow()
    rows = flow.read(starts.source, starting_offsets="latest")
    starts.fill(7)
    starts.run(flow, rows)
    assert starts.written() == 7


def test_another_driver_has_started_meanwhile(starts: Starts) -> None:
    """What was read before holds no more. It is said, and nothing is doubled."""
    flow = starts.flow()
    rows = flow.read(starts.source)
    other = starts.flow()
    starts.run(other, other.read(starts.source))
    with pytest.raises(onceflow.OnceflowError) as told:
        starts.run(flow, rows)
    assert isinstance(told.value, (onceflow.FencedError, onceflow.ProgressConflictError))
    assert starts.written() == 20
    flow.close()
    another = starts.flow()
    starts.run(another, another.read(starts.source))
    assert starts.written() == 20


def test_a_copy_that_was_not_made_is_noticed(starts: Starts, caplog: pytest.LogCaptureFixture) -> None:
    """``onceflow fork`` was not confirmed; its program starts nevertheless, as a new flow."""
    flow = starts.flow()
    starts.run(flow, flow.read(starts.source))
    with caplog.at_level(logging.WARNING, logger="onceflow"):
        copy = starts.flow(f"{starts.name}-v2")
        starts.run(copy, copy.read(starts.source))
        other = starts.flow(f"{starts.source}-by-others")
        starts.run(other, other.read(starts.second))
    warned = [each.getMessage() for each in caplog.records if "begins as a new flow" in each.getMessage()]
    (warning,) = warned
    assert f"flow {starts.name}-v2: it has no progress" in warning
    assert f"Flow {starts.name} reads {starts.source}, too, and is at batch 1" in warning
    assert f"`onceflow fork {starts.name} {starts.name}-v2`" in warning

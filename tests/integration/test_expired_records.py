"""Records that expire while a flow runs, before it has read them: with both engines."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow import DataLossError
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.task.range_reader import RangeReader, ReadOrder
from onceflow.task.source_rows import QueryRows
from onceflow.task.task_program import TaskProgram, TopicProgram, TopicRead
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

LEFT = 40  # of the records that arrive while the flow is held


def delete_before(bootstrap: str, topic: str, offset: int) -> None:
    admin, place = AdminClient({"bootstrap.servers": bootstrap}), TopicPartition(topic, 0, offset)
    admin.delete_records([place])[place].result(30)


@pytest.fixture
def held(inject: Any, tmp_path: Path) -> Callable[..., Any]:
    """Starts a query, whose first batch is held while the next records arrive, and while older ones expire."""

    def start(pipe: Any, *, read: dict[str, Any], **write: Any) -> Any:
        go_on, reached = tmp_path / "go-on", tmp_path / "reached"
        pipe.fill(300)
        inject("write", "pause", batch=1, until=str(go_on), once_file=str(reached))
        flow = pipe.open()
        rows = flow.read(pipe.source, **read).select("key", "value")
        query = flow.write(rows, topic=pipe.target, **write).start()
        try:
            wait_until(reached.exists, 30, lambda: repr(query))
            pipe.fill(100 + LEFT)
            delete_before(pipe.bootstrap, pipe.source, 400)
        finally:
            go_on.touch()
        return query

    return start


def values(pipe: Any) -> list[int]:
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    return sorted(int(each.value or b"") for each in seen)


def places(pipe: Any) -> list[int]:
    """Where each batch has ended."""
    return [progress.offsets[pipe.source][0] for progress in pipe.committed_progress()]


@dataclass(frozen=True)
class Way:
    """How a flow reads.

    Args:
        write: arguments of ``Flow.write``.
        kept: how many records have been fetched before they expire: all that were there, or those of the first batch.
    """

    write: dict[str, Any]
    kept: int


DRIVER = Way({"engine": "driver"}, 300)
TASKS = Way({"engine": "tasks"}, 100)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(DRIVER, id="driver"),
        pytest.param(TASKS, id="tasks", marks=pytest.mark.long),
    ],
)
def test_a_flow_that_may_lose_records_goes_on(
    make_pipe: Any, held: Any, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    """What had been fetched before it expired is not lost, and what follows the gap is written once."""
    pipe = make_pipe(partitions=1)
    query = held(pipe, **way.write, read={"max_records_per_batch": 100, "fail_on_data_loss": False})
    try:
        query.processAllAvailable()
        pipe.fill(10)
        query.processAllAvailable()
    finally:
        query.stop()
    assert values(pipe) == [*range(way.kept), *range(400, 450)]
    assert places(pipe) == [0, 100, 200, 300, 400, 440, 450], "a gap is divided like records"
    if way == DRIVER:  # tasks write it to theirs
        lost = f"{pipe.source}-0: offsets 300 to 399 have expired before they were read; skipped, because"
        assert [text for text in caplog.messages if "expired" in text] == [
            f"flow {pipe.flow}: {lost} fail_on_data_loss=False"
        ]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(DRIVER, id="driver"),
        pytest.param(TASKS, id="tasks", marks=pytest.mark.long),
    ],
)
def test_a_flow_that_may_lose_nothing_ends(make_pipe: Any, held: Any, way: Way) -> None:
    """Nothing behind the gap is committed, until somebody accepts the loss."""
    pipe = make_pipe(partitions=1)
    query = held(pipe, **way.write, read={"max_records_per_batch": 100})
    try:
        with pytest.raises(DataLossError) as caught:
            query.processAllAvailable()
    finally:
        query.stop()
    before = [0, 100, 200, 300] if way.kept == 300 else [0, 100]
    error = caught.value
    assert (error.flow, error.topic) == (pipe.flow, f"{pipe.source}-0")
    assert re.match(f"offsets? {way.kept}\\b", error.detail)
    assert "fail_on_data_loss=False" in error.next_step
    assert isinstance(query.failure, DataLossError)
    assert values(pipe) == list(range(way.kept))
    assert places(pipe) == before
    with pytest.raises(DataLossError, match=f"offsets {way.kept} to 399 have expired"):
        pipe.run(**way.write)
    assert places(pipe) == before
    pipe.run(**way.write, read={"fail_on_data_loss": False})
    assert values(pipe) == [*range(way.kept), *range(400, 440)]
    assert places(pipe)[-1] == 440


@pytest.mark.parametrize("fail", [True, False])
def test_a_task_says_what_has_expired(
    onceflow_broker: str, make_topic: Any, caplog: pytest.LogCaptureFixture, fail: bool
) -> None:
    """Each task names the part of the gap that is in its range."""
    topic = make_topic("in", 1)
    independent.fill(onceflow_broker, topic, [(b"k", b"%d" % n) for n in range(50)])
    delete_before(onceflow_broker, topic, 30)
    settings = ClientSettings(onceflow_broker)
    read = TopicRead(topic, include_headers=False, fail_on_data_loss=fail, max_records=None)
    query = QueryRows(TaskProgram((TopicProgram(read),), ("key", "value")))
    found = []
    with contextlib.closing(Cluster(settings)) as cluster:
        ids = {topic: cluster.topics([topic], Deadline(30, "the test"))[topic].topic_id}
        for ends in ((10, 20), (20, 40)):
            order = ReadOrder("flow", settings, ({(topic, 0): ends},), ids, query, 30)
            if fail:
                last = min(ends[1], 30) - 1
                with pytest.raises(DataLossError, match=f"offsets {ends[0]} to {last} have expired") as caught:
                    list(RangeReader(order, 0, cluster).rows())
                assert (caught.value.flow, caught.value.topic) == ("flow", f"{topic}-0")
            else:
                found += [v for rows in RangeReader(order, 0, cluster).rows() for v in rows.column("value").to_pylist()]
    if not fail:
        assert found == [b"%d" % n for n in range(30, 40)]
        why = "have expired before they were read; skipped, because fail_on_data_loss=False"
        assert caplog.messages == [f"flow flow: {topic}-0: offsets {span} {why}" for span in ("10 to 19", "20 to 29")]

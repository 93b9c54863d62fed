"""Records that expire while a flow runs, before it has read them: with both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow import BatchAbortedError, DataLossError
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


@pytest.mark.parametrize("engine", ["direct", "spark"])
def test_a_flow_that_may_lose_records_goes_on(
    make_pipe: Any, held: Any, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    """What had been fetched before it expired is not lost, and what follows the gap is written once."""
    pipe = make_pipe(partitions=1)
    query = held(pipe, engine=engine, read={"max_records_per_batch": 100, "fail_on_data_loss": False})
    try:
        query.processAllAvailable()
        pipe.fill(10)
        query.processAllAvailable()
    finally:
        query.stop()
    assert query.engine == engine
    assert values(pipe) == [*range(300), *range(400, 450)]
    assert places(pipe) == [0, 100, 200, 300, 400, 440, 450], "the gap counts as one batch of the largest size"
    if engine == "direct":  # Spark writes it to its own log
        lost = f"{pipe.source}-0: offsets 300 to 399 have expired before they were read; skipped, because"
        assert [text for text in caplog.messages if "expired" in text] == [
            f"flow {pipe.flow}: {lost} fail_on_data_loss=False"
        ]


@pytest.mark.parametrize("engine", ["direct", pytest.param("spark", marks=pytest.mark.long)])
def test_a_flow_that_may_lose_nothing_ends(make_pipe: Any, held: Any, engine: str) -> None:
    """Nothing behind the gap is committed, until somebody accepts the loss."""
    pipe = make_pipe(partitions=1)
    query = held(pipe, engine=engine, read={"max_records_per_batch": 100})
    try:
        with pytest.raises(DataLossError if engine == "direct" else BatchAbortedError) as caught:
            query.processAllAvailable()
    finally:
        query.stop()
    if engine == "direct":
        error = caught.value
        assert (error.flow, error.topic) == (pipe.flow, f"{pipe.source}-0")
        assert "offsets 300 to 399 have expired" in error.detail
        assert "fail_on_data_loss=False" in error.next_step
        assert isinstance(query.failure, DataLossError)
    assert values(pipe) == list(range(300))
    assert places(pipe) == [0, 100, 200, 300]
    with pytest.raises(DataLossError, match="offsets 300 to 399 have expired"):
        pipe.run(engine=engine)
    assert places(pipe) == [0, 100, 200, 300]
    pipe.run(engine=engine, read={"fail_on_data_loss": False})
    assert values(pipe) == [*range(300), *range(400, 440)]
    assert places(pipe)[-1] == 440

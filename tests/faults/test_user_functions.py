"""User functions in a query of the direct engine that fail, hang, or end their process: nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import onceflow
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def once(marker: str, how: str) -> Any:
    """A Python function for SQL that passes values on, but for the first one that it ever gets."""

    def work(value):  # type: ignore[no-untyped-def]  # Spark would take hints for those of an Arrow function
        if not Path(marker).exists():
            Path(marker).touch()
            if how == "fails":
                raise ValueError("no such order")
            if how == "ends its process":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return value

    return F.udf(work, "binary")


def started(pipe: Any, marker: Path, how: str, **write: Any) -> Any:
    flow = pipe.open()
    rows = flow.read(pipe.source, max_records_per_batch=1000).select(
        "key", once(str(marker), how)("value").alias("value")
    )
    return flow.write(rows, topic=pipe.target, **write).start()


WAYS = [{}, pytest.param({"engine": "tasks"}, marks=pytest.mark.long)]


@pytest.mark.parametrize("write", WAYS, ids=["driver", "tasks"])
@pytest.mark.parametrize("how", ["fails", pytest.param("ends its process", marks=pytest.mark.long)])
def test_a_function_that_fails_once(make_pipe: Any, tmp_path: Path, how: str, write: dict[str, Any]) -> None:
    """The batch runs again."""
    pipe = make_pipe()
    pipe.fill(600)
    query = started(pipe, tmp_path / "was called", how, **write)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert query.engine == "direct"
    assert max(batch.attempts for batch in query.batches) == 2
    pipe.check()


def test_a_function_that_always_fails(make_pipe: Any, tmp_path: Path) -> None:
    """The error says what it was, in which batch. Nothing of the batch is visible."""
    pipe = make_pipe()
    pipe.fill(100)
    flow = pipe.open()

    def work(value):  # type: ignore[no-untyped-def]
        raise ValueError("no such order")

    rows = flow.read(pipe.source).select("key", F.udf(work, "binary")("value").alias("value"))
    query = flow.write(rows, topic=pipe.target, once=True).start()
    with pytest.raises(onceflow.BatchAbortedError) as caught:
        query.awaitTermination(120)
    query.stop()
    assert "no such order" in str(caught.value)
    assert (caught.value.flow, caught.value.batch) == (pipe.flow, 1)
    assert independent.read_topic(pipe.bootstrap, pipe.target, decided=True) == []


@pytest.mark.parametrize("write", WAYS, ids=["driver", "tasks"])
def test_a_function_that_hangs_does_not_hold_up_a_stop(make_pipe: Any, tmp_path: Path, write: dict[str, Any]) -> None:
    pipe, marker = make_pipe(), tmp_path / "was called"
    pipe.fill(600)
    query = started(pipe, marker, "hangs", **write)
    wait_until(marker.exists, 60, "the function is called")
    begun = time.monotonic()
    query.stop()
    assert time.monotonic() - begun < 30
    assert query.engine == "direct"
    pipe.run()
    pipe.check()

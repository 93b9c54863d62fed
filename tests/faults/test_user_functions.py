"""User functions in a query of the direct engine that fail, hang, or end their process: nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

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


@pytest.mark.long
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

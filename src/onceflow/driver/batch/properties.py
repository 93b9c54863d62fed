"""Tells the functions of a query, wherever they run, what they have to know of an attempt of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.messages import set_driver_property


def set_property(rows: Rows, name: str, value: str | None) -> None:
    """Set a property for the attempt that this thread runs; see `messages.batch_property`.

    Args:
        value: None: nothing is known.
    """
    if isinstance(rows, FetchedRows):
        set_driver_property(name, value)
        return
    context: Any = rows.sparkSession.sparkContext
    context.setLocalProperty(name, value)


@contextlib.contextmanager
def described_jobs(rows: Rows, flow: str, batch: int) -> Iterator[None]:
    """Let Spark's UI show the flow and the batch of the jobs that this thread starts. Spark itself does it for its
    micro-batches."""
    if isinstance(rows, DataFrame) or (isinstance(rows, FetchedRows) and not rows.program.job):
        yield  # there are none, and a call of the JVM would cost more than nothing
        return
    context: Any = rows.sparkSession.sparkContext
    with contextlib.suppress(Exception):  # Spark may have ended: the batch says so
        context.setJobDescription(f"flow {flow}, batch {batch}")
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # Spark may have ended; then there are no jobs either
            context.setJobDescription(None)

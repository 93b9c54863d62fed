"""The session of a query: a clone of the user's, with the settings that its batches need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from onceflow.spark import versions

#: Spark's setting for adaptive execution.
ADAPTIVE = "spark.sql.adaptive.enabled"
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_starting = threading.Lock()


@contextlib.contextmanager
def without_adaptive_execution(spark: SparkSession) -> Iterator[None]:
    """Switch adaptive execution off for a query that is started in the block.

    A query gets a clone of the session as it is at its start. Spark requests the RDD of a batch before it calls the
    sink (``ForeachBatchSink.addBatch``), and adaptive execution would then run the stages before a shuffle at once: too
    early, and a second time within the batch.
    """
    with _starting:
        before = spark.conf.get(ADAPTIVE, None)
        spark.conf.set(ADAPTIVE, "false")
        try:
            yield
        finally:
            if before is None:
                spark.conf.unset(ADAPTIVE)
            else:
                spark.conf.set(ADAPTIVE, before)


def clone_of(spark: SparkSession) -> SparkSession:
    """A clone of the session, as Spark makes one for a streaming query (StreamExecution.sparkSessionForStream)."""
    session: Any = spark
    clone = SparkSession(spark.sparkContext, session._jsparkSession.cloneSession())
    set_up_clone(clone)
    return clone


@contextlib.contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Generated code takes settings from the active session of the thread that makes it (Spark: ``SQLConf.get``)."""
    sessions = versions.sql_class(spark, "SparkSession")
    before = sessions.getActiveSession()
    session: Any = spark
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def set_up_clone(session: SparkSession) -> None:
    """Change settings in a query's own clone of the session.

    Adaptive execution is switched off, as it was when the query was started (`without_adaptive_execution`). It runs
    every stage before a shuffle as a job of its own as soon as the RDD of a plan is requested, so rows would be read
    and shuffled twice. It also drops tasks without rows, but every task has something to report. A batch is one job,
    whose tasks are known before it runs.

    Arrow batches are limited to 4 MiB, so that workers need little memory even for large rows. This is not slower. A
    value that the user has set is kept.
    """
    session.conf.set(ADAPTIVE, "false")
    if session.conf.get(_ARROW_BYTES, None) is None:
        session.conf.set(_ARROW_BYTES, str(4 * 1024 * 1024))

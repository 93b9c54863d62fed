"""Listens to Spark's query events. A warning is logged for a query on a DataFrame of ``Flow.read`` that ``Flow.write``
has not started, and an error for a query of a flow that Spark has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from onceflow.spark import jvm, query_facts

log = logging.getLogger("onceflow")


class QueryOfFlow(Protocol):
    """What is known of a query that ``Flow.write`` has started (`onceflow.spark.streaming_query.SparkQuery`)."""

    @property
    def runId(self) -> Any:
        """Spark's id of this run of the query."""
        ...

    def terminated(self) -> None:
        """Called when the query has ended."""
        ...


_lock = threading.Lock()
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_starting: list[str] = []
_of_flows: weakref.WeakValueDictionary[str, QueryOfFlow] = weakref.WeakValueDictionary()  # by their run ids


@contextlib.contextmanager
def by_flow(flow: str) -> Iterator[None]:
    """Queries of this flow that start within this context are started by ``Flow.write``."""
    _starting.append(flow)
    try:
        yield
    finally:
        _starting.remove(flow)


def started(query: QueryOfFlow) -> None:
    """A query of a flow runs. Its failure will be logged, unless the program waits for its end."""
    _of_flows[str(query.runId)] = query


def watch(spark: SparkSession) -> None:
    """From now on check every query that starts in this session. Only the first call does something."""
    with _lock:
        if spark in _watched:
            return
        _watched.add(spark)
    java: Any = spark._jvm
    try:
        ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
        listener = java.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(_Listener(spark))
        spark._jsparkSession.streams().addListener(listener)
    except (Py4JError, TypeError) as error:
        log.debug("queries outside of flows will not be noticed: %s", error)


class _Listener:
    """Called by Spark; at the start of a query on the thread that starts it.

    It is not PySpark's ``StreamingQueryListener``, which converts every event, also the progress of each batch.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def onQueryStarted(self, event: Any) -> None:
        try:
            flow = _flow_of(self._spark, event.id())
        except (Py4JError, AttributeError) as error:
            log.debug("a query that starts could not be checked: %s", error)
            return
        if flow is not None and flow not in _starting:
            log.warning(
                "a query reads the topics of flow %s and is not written by Flow.write: it commits no progress, and "
                "what it writes may be lost or written twice. Write it with flow.write(...).start(), or read the topic "
                "with spark.readStream",
                flow,
            )

    def onQueryProgress(self, event: Any) -> None:
        pass

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        query = _of_flows.pop(str(event.runId()), None)
        if query is not None:
            query.terminated()

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)


def _flow_of(spark: SparkSession, query_id: Any) -> str | None:
    """The flow whose topics a query reads, if it does."""
    query = jvm.running_query(spark, str(query_id))
    for node in jvm.nodes(query.analyzedPlan()):
        if jvm.kind(node) == "StreamingRelationV2":
            mark = node.extraOptions().get(query_facts.MARK)
            if mark is not None:
                return str(mark)
    return None

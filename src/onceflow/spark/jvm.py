"""Calls to Spark's JVM beyond PySpark's API: about plans, tasks, running queries and failures."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from onceflow import user_code
from onceflow.errors import BatchAbortedError, OptionError
from onceflow.host.jars import spark_connector_coordinates
from onceflow.spark import versions

#: The errors by which PySpark reports a failure of Spark.
SPARK_ERRORS: tuple[type[Exception], ...] = (PySparkException, Py4JError)
#: What a call of a SparkContext raises when it was stopped, here (pyspark forgets its Java object) or by the master, or
#: when the JVM has ended.
SPARK_GONE: tuple[type[Exception], ...] = (*SPARK_ERRORS, ConnectionError, AttributeError)
#: Version of the state store's checkpoints; from 2 on, state files have unique ids that Spark's commit log names.
STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# How a job ends that was cancelled (a query that is stopped, the UI, SparkContext.cancelJobGroup).
_JOB_CANCELLED = "SPARK_JOB_CANCELLED"
_INTERRUPTIONS = frozenset(
    {
        "java.lang.InterruptedException",
        "java.nio.channels.ClosedByInterruptException",
        "org.apache.kafka.common.errors.InterruptException",
    }
)
# Before Spark 4 a cancelled job has no error condition, but this text. No text of user code begins like this, because
# Spark puts its own text in front of it.
_CANCELLED_TEXT = re.compile(r"Job \d+ cancelled\b")
_SPARK_EXCEPTION = "org.apache.spark.SparkException"
_WAITED = "Exception thrown in awaitResult"
_KAFKA_TIMEOUT = "org.apache.kafka.common.errors.TimeoutException"
_MAX_CAUSES = 20
# Classes of SQLSTATE: cardinality violation and data exception (error-states.json of Spark). The rows have caused them.
# A table that is not there (42) may be there again.
_REPEATED = ("21", "22")
_QUERY_ID = "sql.streaming.queryId"  # local property of the thread that runs a query's batches
# One class of each jar that the Kafka connector needs. Without these jars Spark finds the connector, and fails later.
_CONNECTOR_NEEDS = (
    "org.apache.kafka.clients.consumer.KafkaConsumer",
    "org.apache.spark.kafka010.KafkaConfigUpdater",
    "org.apache.commons.pool2.PooledObjectFactory",
)


# How an error quotes the query (SQLQueryContext.summary and DataFrameQueryContext.summary of Spark).
_IN_SQL = re.compile(r"^== SQL ?\(.*?\) ==\n(.+?)\n *\^", re.MULTILINE | re.DOTALL)
_IN_FRAME = re.compile(r"^== DataFrame ==\n(.+?) was called from(\n[^\n]+)?", re.MULTILINE)


# Gateways of JVMs that have the connector. Classes do not go away.
_connected: weakref.WeakSet[Any] = weakref.WeakSet()


def why_no_connector(spark: SparkSession) -> str:
    """Why Spark cannot read topics, in one line; empty when it can."""
    gateway: Any = spark.sparkContext._gateway
    if gateway in _connected:
        return ""
    problem = _look_for_connector(spark)
    if not problem:
        _connected.add(gateway)
    return problem


def _look_for_connector(spark: SparkSession) -> str:
    sources: Any = spark._jvm.org.apache.spark.sql.execution.datasources.DataSource  # type: ignore[union-attr]
    try:
        # As in load(), with the class loader of this thread: it finds jars whichever way they were given.
        sources.lookupDataSource("kafka", spark._jsparkSession.sessionState().conf())
    except (Py4JError, PySparkException) as error:
        return str(error).splitlines()[0]
    missing = [name for name in _CONNECTOR_NEEDS if not has_class(spark._jvm, name)]
    return f"the connector lacks jars that it needs: there is no class {missing[0]}" if missing else ""


def java_version(spark: SparkSession) -> int:
    """The major version of the driver's Java."""
    java: Any = spark._jvm
    return int(str(java.java.lang.System.getProperty("java.specification.version")).split(".")[-1])


def connector_package(spark: SparkSession) -> str:
    """Maven coordinates of the Kafka connector for this Spark."""
    java: Any = spark._jvm
    scala = str(java.scala.util.Properties.versionNumberString())
    return str(spark_connector_coordinates(spark.version, ".".join(scala.split(".")[:2]))[0])


def has_class(java: Any, name: str) -> bool:
    """Whether the driver's JVM can load a class."""
    loader = java.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        java.java.lang.Class.forName(name, False, loader)
    except Py4JJavaError:
        return False
    return True


def kind(node: Any) -> str:
    """Class of a plan's node, without its package. If Spark has renamed it, the newest name."""
    name = str(node.getClass().getSimpleName())
    return versions.RENAMED_OPERATORS.get(name, name)


def nodes(tree: Any, mark: Any = None) -> Iterator[Any]:
    """Every node of a plan, logical or physical, or of an expression.

    Args:
        mark: one of Catalyst's tree patterns. Only nodes that have it, themselves or below them, are returned.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if mark is not None and not node.containsPattern(mark):
            continue
        yield node
        children = node.children()
        waiting.extend(children.apply(i) for i in range(children.size()))


def has_shuffle(df: DataFrame) -> bool:
    """Whether tasks of a batch read shuffle files: only then can Spark run a whole stage again."""
    waiting = [df._jdf.queryExecution().toRdd()]
    seen: set[int] = set()
    while waiting:
        rdd = waiting.pop()
        if int(rdd.id()) in seen:
            continue
        seen.add(int(rdd.id()))
        dependencies = rdd.dependencies()
        for i in range(dependencies.size()):
            dependency = dependencies.apply(i)
            if "Shuffle" in str(dependency.getClass().getSimpleName()):
                return True
            waiting.append(dependency.rdd())
    return False


def stage_attempts(spark: SparkSession, stages: Iterable[int], timeout_s: float = 20.0) -> dict[int, int]:
    """Number of the last attempt of each stage.

    Python's TaskContext does not know the attempt of its stage, and attempt numbers of tasks start at 0 again in each
    attempt of a stage. Spark's status store knows it, a little later. So this waits until the listener bus is empty.

    Raises:
        BatchAbortedError: Spark does not say.
    """
    tracker: Any = spark.sparkContext._jsc.statusTracker()
    found: dict[int, int] = {}
    try:
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(int(timeout_s * 1000))
        for stage in stages:
            info = tracker.getStageInfo(stage)
            if info is None:
                raise LookupError(f"Spark's status store has forgotten stage {stage}")
            found[stage] = int(info.currentAttemptId())
    except (Py4JError, LookupError) as error:
        raise BatchAbortedError(
            "It is not known whether Spark ran a stage twice",
            detail=first_line(error),
            next_step="none: the batch is run again under a new epoch; if it repeats, check the listeners of the "
            "session (they must process all events within 20 s) and spark.ui.retainedStages",
        ) from error
    return found


def running_query(spark: SparkSession, query_id: str) -> Any:
    """The ``StreamExecution`` of a query that runs in this Spark, in any session; None when it does not run.

    A batch has a session of its own, whose ``streams()`` knows no query. The shared state of all sessions knows them.
    """
    java: Any = spark._jvm
    running = spark._jsparkSession.sharedState().activeStreamingQueries()
    return running.get(java.java.util.UUID.fromString(query_id))


def last_execution(query: Any) -> Any:
    """The ``IncrementalExecution`` of the current or last batch of a query that `running_query` has returned."""
    if versions.has("execution context"):
        return query.getLatestExecutionContext().executionPlan()
    return query.lastExecution()


def state_rows(spark: SparkSession, query_id: str) -> float:
    """How many rows the state of a running query has, after its last batch; infinite when that is not known."""
    try:
        progress = running_query(spark, query_id).lastProgress()
        return math.inf if progress is None else float(sum(o.numRowsTotal() for o in progress.stateOperators()))
    except (Py4JError, AttributeError, TypeError):
        return math.inf


def rows_dropped(spark: SparkSession, query_id: str) -> int:
    """How many rows operators with state have dropped as late, in the current batch of a query.

    The number is for all its attempts together, because the plan keeps its metrics.
    """
    metrics = [node.metrics().get("numRowsDroppedByWatermark") for node in _state_store_writers(spark, query_id)]
    return sum(int(metric.get().value()) for metric in metrics if metric.isDefined())


def _state_store_writers(spark: SparkSession, query_id: str) -> Iterator[Any]:
    """The operators that keep state, in the current batch of a query."""
    java: Any = spark._jvm
    loader = java.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
    writer = java.java.lang.Class.forName(versions.streaming_class("StateStoreWriter"), False, loader)
    for node in nodes(last_execution(running_query(spark, query_id)).executedPlan()):
        if writer.isInstance(node):
            yield node


def forget_state_ids(spark: SparkSession, query_id: str) -> None:
    """To be called before a batch is run again: Spark must use the state of the last attempt, not of the first.

    With ``stateStore.checkpointFormatVersion`` 2 every attempt of a task writes state files under an id of its own,
    and Spark's commit log names the first id that was reported (``StateStoreWriter.getStateStoreCheckpointInfo``).
    That is the id of the aborted attempt, whose state may be different if user code is not deterministic.

    Before Spark 4.2 this is not possible for the first batch: a store that begins again with version 0 writes the id
    of the aborted attempt into its changelog, and a later start may load that attempt's snapshot
    (``RocksDB.loadWithCheckpointId``: ``currVersionLineage``). After another start of the flow the stores are new.

    Raises:
        BatchAbortedError: Spark does not allow it; then the batch must not be run again.
    """
    if not versions.has("state ids"):
        return
    try:
        for node in _state_store_writers(spark, query_id):
            if not versions.has("clean lineage") and not node.stateInfo().get().storeVersion():
                raise BatchAbortedError(
                    "The first batch of a query with state of format 2 cannot be run again in the same driver: Spark "
                    "before 4.2 would mix the state of both attempts",
                    next_step="start the flow again: it continues at this batch",
                )
            node.checkpointInfoAccumulator().reset()
    except (Py4JError, AttributeError, TypeError) as error:
        raise BatchAbortedError(
            "The batch cannot be run again: what its first attempt did to Spark's state cannot be undone",
            detail=first_line(error),
            next_step="start the flow again: it continues at this batch",
        ) from error


def failed_task_message(spark: SparkSession, stages: Iterable[int]) -> str:
    """Why a task of these stages failed, according to Spark's status store; empty when it does not say."""
    try:
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(5_000)
        store: Any = spark.sparkContext._jsc.sc().statusStore()
        for stage in stages:
            tasks = store.taskList(stage, 0, 10_000)
            for i in range(tasks.size()):
                message = tasks.apply(i).errorMessage()
                if message.isDefined():
                    return f"the first attempt failed: {blamed_line(str(message.get()))}"
    except Py4JError:
        pass  # only the explanation is missing: the batch is aborted in any case
    return ""


def source_partitions(df: DataFrame) -> list[tuple[str, int]]:
    """Topic and partition that each task of a batch reads, in task order.

    Follows the batch's RDD through one-to-one dependencies down to the Kafka source.

    Raises:
        OptionError: something in between (a shuffle, a union) mixes partitions.
    """
    rdd = _followed(df._jdf.queryExecution().toRdd(), "DataSourceRDD")
    found: list[tuple[str, int]] = []
    for partition in rdd.partitions():
        offset_range = _input_of(partition).offsetRange()
        found.append((str(offset_range.topic()), int(offset_range.partition())))
    if len(set(found)) != len(found):
        raise _not_source_partitioned(
            "a source partition is divided among tasks (minPartitions or maxRecordsPerPartition)"
        )
    return found


def _input_of(partition: Any) -> Any:
    """What a partition of a ``DataSourceRDD`` reads."""
    if versions.has("one input partition"):
        inputs = partition.inputPartition()
        found = None if inputs.isEmpty() else inputs.get()
    else:
        inputs = partition.inputPartitions()
        found = inputs.head() if inputs.size() == 1 else None
    if found is None:
        raise _not_source_partitioned("a task reads nothing, or several partitions")
    return found


def task_total(df: DataFrame) -> int:
    """How many tasks compute a DataFrame. This runs no job: adaptive execution is off (``query_session.py``)."""
    return int(df._jdf.queryExecution().toRdd().getNumPartitions())


def _followed(rdd: Any, kind: str) -> Any:
    """The RDD of this class from which an RDD is made, through one-to-one dependencies only."""
    while rdd.getClass().getSimpleName() != kind:
        dependencies = rdd.dependencies()
        if dependencies.size() != 1 or dependencies.head().getClass().getSimpleName() != "OneToOneDependency":
            raise _not_source_partitioned(f"it goes through {rdd.getClass().getSimpleName()}")
        rdd = dependencies.head().rdd()
    return rdd


def _not_source_partitioned(why: str) -> OptionError:
    return OptionError(
        'partitioner="source" needs a query that keeps every source partition in one task',
        detail=why,
        next_step='use partitioner="key", or drop the shuffle, join or union from the query',
    )


def was_cancelled(error: BaseException) -> bool:
    """Whether Spark has cancelled the job or interrupted the query, according to its classes and error conditions.

    Messages are not used for this, because they may come from user code.
    """
    try:
        return any(
            str(each.getClass().getName()) in _INTERRUPTIONS or _is_cancellation(each) for each in _thrown(error)
        )
    except Py4JError:
        return False


def _is_cancellation(thrown: Any) -> bool:
    if versions.has("cancel condition"):
        return _condition(thrown) == _JOB_CANCELLED
    is_sparks = str(thrown.getClass().getName()) == _SPARK_EXCEPTION
    return is_sparks and _CANCELLED_TEXT.match(str(thrown.getMessage())) is not None


def will_repeat(error: BaseException) -> bool:
    """Whether Spark cannot evaluate the query over these rows, so that another attempt would fail in the same way.

    Errors of user functions are not among them: what these call may be well again. See `of_wrong_code`.
    """
    try:
        return any(_sql_state(each).startswith(_REPEATED) for each in _thrown(error))
    except Py4JError:  # the JVM is gone
        return False


def of_wrong_code(error: BaseException) -> bool:
    """Whether a user function of the query has raised an error that it will raise again, as far as its class tells."""
    return isinstance(error, PySparkException) and user_code.repeats_in_worker(_message(error))


def raised_by_function(error: BaseException) -> str:
    """The class of the error that a user function of the query has raised; empty: none has."""
    return user_code.raised_in_worker(_message(error)) if isinstance(error, PySparkException) else ""


def expression(error: BaseException) -> str:
    """The expression that has failed, as Spark's error quotes it; empty: it quotes none."""
    found = _IN_SQL.search(_message(error)) or _IN_FRAME.search(_message(error))
    return "" if found is None else " ".join("".join(filter(None, found.groups())).split())[:200]


def _sql_state(thrown: Any) -> str:
    try:
        return str(thrown.getSqlState() or "")
    except (Py4JError, AttributeError, TypeError):
        return ""  # no SparkThrowable


def kafka_timeout(error: BaseException) -> str:
    """The message of a timeout in a Kafka client of Spark, if that has ended the query; otherwise empty."""
    try:
        for each in _thrown(error):
            if str(each.getClass().getName()) == _KAFKA_TIMEOUT:
                return str(each.getMessage())
    except Py4JError:
        pass  # the JVM is gone
    return ""


def _thrown(error: BaseException) -> Iterator[Any]:
    """The Java exception of an error of PySpark, and its causes."""
    thrown = getattr(error, "_origin", None)
    if thrown is None:
        thrown = getattr(error, "java_exception", None)
    for _ in range(_MAX_CAUSES):
        if thrown is None:
            return
        yield thrown
        thrown = thrown.getCause()


def _condition(thrown: Any) -> str | None:
    try:
        return str(thrown.getCondition())
    except (Py4JError, AttributeError):
        return None  # no SparkThrowable


def is_being_stopped(spark: SparkSession) -> bool:
    """Whether the query whose batch runs on this thread is being stopped, or Spark is."""
    try:
        context: Any = spark.sparkContext._jsc
        if context is None or context.sc().isStopped():
            return True
        query_id = spark.sparkContext.getLocalProperty(_QUERY_ID)
        if query_id is None:
            return False
        query = running_query(spark, query_id)
        return query is not None and not query.isActive()
    except (Py4JError, AttributeError, OSError):  # its JVM has ended
        return False


def is_stopped(spark: SparkSession) -> bool:
    """Whether ``spark.stop()`` was called. The JVM is not asked."""
    return spark.sparkContext._jsc is None


def first_line(error: BaseException) -> str:
    """A short text of a Spark job's failure, see `blamed_line`."""
    return blamed_line(_message(error)) or type(error).__name__


def _message(error: BaseException) -> str:
    if getattr(error, "java_exception", None) is not None:
        for thrown in _thrown(error):
            message = thrown.getMessage()
            # The message of a thread that waited for another one does not help. Spark 3.5 ignores the cause.
            if message and not str(message).startswith(_WAITED):
                return str(message)
    return user_code.said(error)


def blamed_line(text: str) -> str:
    """The line that says what happened. From a Python traceback: the exception and the line of the user's code that
    raised it. Otherwise the last line that names an error, or the first line."""
    said = user_code.blamed(text)
    if said:
        return said
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    blamed = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (blamed or lines or [""])[-1 if blamed else 0][:500]

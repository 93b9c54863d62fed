"""What onceflow uses of Spark beyond its public API, name by name: where one is gone, its test says what breaks.

Run with every supported version by ``make test-spark SPARK=...``. Which of two names is expected is decided by
``onceflow.spark.versions``, so these tests also tell when a feature has come earlier or later than it says.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import onceflow.spark
from onceflow.host.jars import installed_spark_version
from onceflow.protocol.partitioners import murmur2
from onceflow.spark import expressions, jvm, plans, versions
from onceflow.spark.placed_jobs import PlacedJobs
from onceflow.spark.query_facts import facts_of
from onceflow.spark.task_shuffle import key_of_task, repartition_by_task

pytestmark = [pytest.mark.integration, pytest.mark.short_form]

PACKAGE = Path(onceflow.spark.__file__).parent
_SQL = "org.apache.spark.sql"
_CLASSIC = f"{_SQL}.classic" if versions.has("classic") else _SQL
_RUNTIME = f"{_SQL}.execution.streaming" + (".runtime" if versions.has("streaming packages") else "")
_CATALYST = f"{_SQL}.catalyst"


def _where(feature: str, *, without: bool = False) -> bool:
    return versions.has(feature) != without


@dataclass(frozen=True)
class Member:
    """A method (or a constructor, ``<init>``) of a class in Spark's jars.

    Args:
        parameters: how many it takes.
        breaks: what does not work without it.
        used: in some version only. file: where it is named, in the package ``spark``.
    """

    owner: str
    name: str
    parameters: int
    file: str
    breaks: str
    used: bool = True

    def __str__(self) -> str:
        return f"{self.owner.rpartition('.')[2]}.{self.name}({self.parameters})"


_LOST = "no flow can be written"
_CRASH = "after a crash, batches of queries with Spark's state are drained instead of completed from Kafka"
_TWICE = "a stage that Spark attempted twice goes unnoticed, so batches are refused"
_SOURCE = 'partitioner="source" is refused with checkpoint='
_MOVED = "rows are not sent to the task that owns their partition"
_STEP = "a process step inside a query cannot be run"
_OFFSETS = "a batch may have rows that were joined at other offsets than its progress record says"
_SAME = "operators that change nothing are not told from others"
_SQL_HERE = "SQL needs a Spark job for every batch"
_TIME = "batches have no time of their own"
_CORE = "org.apache.spark"
_ARROW = f"{_SQL}.execution.arrow.ArrowConverters$"
_MORE_ARROW = 0 if not versions.has("classic") else 1  # largeVarTypes

MEMBERS = [
    Member(_ARROW, "fromBatchIterator", 5 + _MORE_ARROW, "row_plan.py", _SQL_HERE),
    Member(_ARROW, "toBatchWithSchemaIterator", 6 + _MORE_ARROW, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContextImpl", "<init>", 12, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContextImpl", "markTaskCompleted", 1, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContextImpl", "markInterrupted", 1, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContextImpl", "taskMemoryManager", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContext$", "setTaskContext", 1, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContext$", "unset", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.TaskContext$", "empty", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.memory.TaskMemoryManager", "<init>", 2, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.memory.TaskMemoryManager", "cleanUpAllAllocatedMemory", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.SparkEnv", "memoryManager", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.SparkEnv", "metricsSystem", 0, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.rdd.RDD", "iterator", 2, "driver_task.py", _SQL_HERE),
    Member(f"{_CORE}.rdd.RDD", "isBarrier", 0, "row_program.py", _SQL_HERE),
    Member(
        f"{_CORE}.rdd.MapPartitionsRDD", "<init>", 8 if versions.current() >= (4, 2) else 7, "row_plan.py", _SQL_HERE
    ),
    Member(f"{_SQL}.execution.SparkPlan", "execute", 0, "row_program.py", _SQL_HERE),
    Member(f"{_CATALYST}.plans.QueryPlan", "subqueries", 0, "row_plan.py", _SQL_HERE),
    Member(f"{_CATALYST}.plans.QueryPlan", "mapExpressions", 1, "plans.py", _SQL_HERE),
    Member(f"{_CATALYST}.optimizer.InlineCTE", "apply", 1, "batch_plan.py", "WITH needs micro-batches"),
    Member(f"{_CATALYST}.expressions.objects.Invoke", "<init>", 8, "batch_plan.py", _TIME),
    Member(f"{_CATALYST}.expressions.Literal", "<init>", 2, "batch_plan.py", _TIME),
    Member(f"{_CATALYST}.expressions.Cast", "<init>", 4, "batch_plan.py", _TIME),
    Member(
        f"{_CATALYST}.expressions.ExpressionWithRandomSeed",
        "withNewSeed",
        1,
        "batch_plan.py",
        "random numbers are the same in all batches of a backlog",
    ),
    Member(
        f"{_SQL}.api.python.PythonSQLUtils", "readArrowStreamFromFile", 1, "row_program.py", "joins need micro-batches"
    ),
    Member(f"{_SQL}.api.python.PythonSQLUtils", "toDataFrame", 3, "row_program.py", "joins need micro-batches"),
    Member(f"{_CLASSIC}.Dataset", "ofRows", 2, "plans.py", _STEP),
    Member("org.apache.spark.SparkContext", "env", 0, "shuffles.py", _OFFSETS),
    Member("org.apache.spark.SparkEnv", "mapOutputTracker", 0, "shuffles.py", _OFFSETS),
    Member("org.apache.spark.MapOutputTrackerMaster", "containsShuffle", 1, "shuffles.py", _OFFSETS),
    Member("org.apache.spark.MapOutputTrackerMaster", "unregisterAllMapAndMergeOutput", 1, "shuffles.py", _OFFSETS),
    Member("org.apache.spark.ShuffleDependency", "shuffleId", 0, "shuffles.py", _OFFSETS),
    Member(f"{_CLASSIC}.Dataset", "queryExecution", 0, "jvm.py", _LOST),
    Member(f"{_CLASSIC}.Dataset", "collectAsArrowToPython", 0, "collect.py", "the driver cannot write small batches"),
    Member(f"{_CLASSIC}.SparkSession", "internalCreateDataFrame", 3, "plans.py", "two steps in a row cannot be run"),
    Member(f"{_CLASSIC}.SparkSession", "sharedState", 0, "jvm.py", "no query is found by its id"),
    Member(f"{_CLASSIC}.SparkSession", "sessionState", 0, "jvm.py", "a missing connector is not told at the start"),
    Member(f"{_SQL}.internal.SharedState", "activeStreamingQueries", 0, "jvm.py", "no query is found by its id"),
    Member(f"{_SQL}.execution.QueryExecution", "analyzed", 0, "plans.py", _LOST),
    Member(f"{_SQL}.execution.QueryExecution", "optimizedPlan", 0, "plans.py", _STEP),
    Member(f"{_SQL}.execution.QueryExecution", "executedPlan", 0, "jvm.py", "late rows are not counted"),
    Member(f"{_SQL}.execution.QueryExecution", "toRdd", 0, "jvm.py", _LOST),
    Member(f"{_RUNTIME}.StreamExecution", "analyzedPlan", 0, "query_listener.py", "queries past the flow go untold"),
    Member(f"{_RUNTIME}.StreamExecution", "lastProgress", 0, "jvm.py", "Spark's state is taken for large"),
    Member(f"{_RUNTIME}.StreamExecution", "isActive", 0, "jvm.py", "a stopped query looks like a failed one"),
    Member(f"{_RUNTIME}.StreamExecution", "commitLog", 0, "commit_log.py", _CRASH),
    Member(
        f"{_RUNTIME}.StreamExecution",
        "getLatestExecutionContext",
        0,
        "jvm.py",
        _CRASH,
        used=_where("execution context"),
    ),
    Member(
        f"{_RUNTIME}.StreamExecution",
        "lastExecution",
        0,
        "jvm.py",
        _CRASH,
        used=_where("execution context", without=True),
    ),
    Member(f"{_RUNTIME}.MicroBatchExecution", "watermarkTracker", 0, "commit_log.py", _CRASH),
    Member(
        f"{_RUNTIME}.MicroBatchExecution", "currentStateStoreCkptId", 0, "commit_log.py", _CRASH, _where("state ids")
    ),
    Member(
        f"{_RUNTIME}.MicroBatchExecution", "updateStateStoreCkptId", 2, "commit_log.py", _CRASH, _where("state ids")
    ),
    Member(f"{_RUNTIME}.WatermarkTracker", "updateWatermark", 1, "commit_log.py", _CRASH),
    Member(f"{_RUNTIME}.WatermarkTracker", "currentWatermark", 0, "commit_log.py", _CRASH),
    Member(
        versions.streaming_class("CommitLog"),
        "createMetadata",
        4,
        "commit_log.py",
        _CRASH,
        used=_where("commit metadata factory"),
    ),
    Member(
        versions.streaming_class("CommitLog"),
        "<init>",
        3 if versions.has("commit metadata factory") else 2,
        "commit_log.py",
        _CRASH,
    ),
    Member(
        versions.streaming_class("CommitMetadata"),
        "<init>",
        2 if versions.has("state ids") else 1,
        "commit_log.py",
        _CRASH,
        used=_where("commit metadata factory", without=True),
    ),
    Member(versions.streaming_class("CommitLog"), "serialize", 2, "commit_log.py", _CRASH),
    Member(versions.streaming_class("CommitLog"), "deserialize", 1, "commit_log.py", _CRASH),
    Member(versions.streaming_class("CommitLog"), "add", 2, "commit_log.py", _CRASH),
    Member(
        versions.streaming_class("StateStoreWriter"),
        "checkpointInfoAccumulator",
        0,
        "jvm.py",
        "a batch whose state has ids cannot be run again",
        used=_where("state ids"),
    ),
    Member(
        versions.streaming_class("StatefulOperatorStateInfo"),
        "storeVersion",
        0,
        "jvm.py",
        "a batch whose state has ids cannot be run again",
        used=_where("state ids") and _where("clean lineage", without=True),
    ),
    Member(f"{_SQL}.execution.SparkPlan", "metrics", 0, "jvm.py", "late rows are not counted"),
    Member(
        f"{_CATALYST}.expressions.objects.StaticInvoke",
        "<init>",
        9 if versions.has("scalar function") else 8,
        "expressions.py",
        _MOVED,
    ),
    Member(
        f"{_CLASSIC}.ExpressionUtils" if versions.has("classic") else f"{_SQL}.Column",
        "expression" if versions.has("classic") else "expr",
        1 if versions.has("classic") else 0,
        "expressions.py",
        _MOVED,
    ),
    Member(f"{_CATALYST}.expressions.Alias", "<init>", 6, "plans.py", _STEP),
    Member(f"{_CATALYST}.plans.logical.Project", "<init>", 2, "plans.py", _STEP),
    Member(f"{_CATALYST}.plans.logical.Project", "projectList", 0, "plan_columns.py", _SAME),
    Member(f"{_CATALYST}.plans.logical.Filter", "condition", 0, "plans.py", _SAME),
    Member(f"{_CATALYST}.expressions.Expression", "foldable", 0, "plans.py", _SAME),
    Member(f"{_CATALYST}.expressions.Expression", "deterministic", 0, "plans.py", _SAME),
    Member(f"{_CATALYST}.expressions.Expression", "eval", 1, "plans.py", _SAME),
    Member(f"{_CATALYST}.trees.TreePattern", "CURRENT_LIKE", 0, "plans.py", _SAME),
    Member(f"{_CATALYST}.plans.logical.LogicalPlan", "withNewChildren", 1, "plans.py", _STEP),
    Member(f"{_CATALYST}.plans.logical.LogicalPlan", "containsPattern", 1, "jvm.py", "user functions are not checked"),
    Member(f"{_CATALYST}.trees.TreePattern", "PYTHON_UDF", 0, "imports.py", "user functions are not checked"),
    Member(f"{_CATALYST}.analysis.UnsupportedOperationChecker", "checkForStreaming", 2, "plans.py", _STEP),
    Member(
        f"{_SQL}.execution.datasources.DataSource", "lookupDataSource", 2, "jvm.py", "a missing connector is not told"
    ),
    Member(
        f"{_SQL}.execution.datasources.v2.DataSourceRDDPartition",
        "inputPartition" if versions.has("one input partition") else "inputPartitions",
        0,
        "jvm.py",
        _SOURCE,
    ),
    Member(f"{_SQL}.kafka010.KafkaBatchInputPartition", "offsetRange", 0, "jvm.py", _SOURCE),
    Member("org.apache.spark.api.java.JavaSparkStatusTracker", "getStageInfo", 1, "jvm.py", _TWICE),
    Member("org.apache.spark.scheduler.LiveListenerBus", "waitUntilEmpty", 1, "jvm.py", _TWICE),
    Member("org.apache.spark.status.AppStatusStore", "taskList", 3, "jvm.py", "errors do not say why a task failed"),
    Member(
        f"{_SQL}.streaming.PythonStreamingQueryListenerWrapper",
        "<init>",
        1,
        "query_listener.py",
        "queries past the flow go untold",
    ),
    Member(
        "org.apache.spark.util.Utils",
        "classForName",
        3,
        "expressions.py",
        "rows are not sent to their partition's task",
    ),
    Member("org.apache.spark.util.Utils", "getContextOrSparkClassLoader", 0, "jvm.py", "late rows are not counted"),
    Member("org.apache.spark.api.python.PythonUtils", "toSeq", 1, "plans.py", _STEP),
    Member(
        "org.apache.kafka.common.utils.Utils",
        "murmur2",
        1,
        "expressions.py",
        "keys go to other partitions than Kafka's",
    ),
    Member(
        "org.apache.spark.SparkThrowable",
        "getCondition",
        0,
        "jvm.py",
        "a cancelled job is run again",
        used=_where("cancel condition"),
    ),
]


def members_of(java: Any, owner: str) -> Iterator[tuple[str, int]]:
    """Methods and constructors of a class, with how many parameters they take, inherited and private ones, too."""
    loader = java.java.lang.Thread.currentThread().getContextClassLoader()
    found = java.java.lang.Class.forName(owner, False, loader)
    for constructor in found.getDeclaredConstructors():
        yield "<init>", int(constructor.getParameterCount())
    for methods in (found.getMethods(), found.getDeclaredMethods()):
        for method in methods:
            yield str(method.getName()), int(method.getParameterCount())


@pytest.mark.parametrize("member", [each for each in MEMBERS if each.used], ids=str)
def test_member_of_sparks_classes(onceflow_spark: Any, member: Member) -> None:
    try:
        found = set(members_of(onceflow_spark._jvm, member.owner))
    except Exception as error:
        pytest.fail(f"Spark {onceflow_spark.version} has no class {member.owner}: {member.breaks} ({error})")
    assert (member.name, member.parameters) in found, (
        f"Spark {onceflow_spark.version} has no {member}, which {member.file} uses: {member.breaks}"
    )


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_member_is_still_used(member: Member) -> None:
    name = member.owner.rpartition(".")[2] if member.name == "<init>" else member.name
    assert name in (PACKAGE / member.file).read_text(), f"{member} is not used in {member.file} any more"


# Private names of PySpark, and what breaks without them.
PYTHON_NAMES = {
    "pyspark.SparkContext._active_spark_context": "session() does not know whether Spark runs",
    "pyspark.SparkContext._ensure_initialized": "session() does not connect to the JVM of spark-submit",
    "pyspark.SparkContext._gateway": "nothing of the JVM can be called",
    "pyspark.SparkContext._jvm": "nothing of the JVM can be called",
    "pyspark.errors.exceptions.captured.convert_exception": "why Spark has ended a query is not told",
    "pyspark.errors.exceptions.captured.unwrap_spark_exception": "the driver cannot write small batches",
    "pyspark.find_spark_home._find_spark_home": "spark-defaults.conf is not read",
    "pyspark.cloudpickle.Pickler": "what is sent to tasks is not checked",
    "pyspark.cloudpickle.dumps": "what is sent to tasks is not checked",
    "pyspark.cloudpickle.cloudpickle._should_pickle_by_reference": "what is sent to tasks is not checked",
    "pyspark.java_gateway.ensure_callback_server_started": "queries past the flow go untold",
    "pyspark.sql.pandas.serializers.ArrowCollectSerializer": "the driver cannot write small batches",
    (
        "pyspark.util.local_connect_and_auth"
        if versions.has("socket in util")
        else "pyspark.java_gateway.local_connect_and_auth"
    ): "the driver cannot write small batches",
}
if versions.has("classic"):
    PYTHON_NAMES["pyspark.sql.classic.column.Column"] = "rows are not sent to the task that owns their partition"


@pytest.mark.parametrize("name", PYTHON_NAMES)
def test_name_of_pyspark(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    owner: Any
    try:
        owner = importlib.import_module(module)
    except ImportError:
        package, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(package), kind, None)
    assert hasattr(owner, attribute), f"pyspark {installed_spark_version()} has no {name}: {PYTHON_NAMES[name]}"


# Attributes of PySpark's objects, and what breaks without them; `_jsq` is tried by every test of a flow.
OBJECT_ATTRIBUTES = {
    "_jvm": (lambda spark: spark, "nothing of the JVM can be called"),
    "_jsparkSession": (lambda spark: spark, _LOST),
    "_jsc": (lambda spark: spark.sparkContext, _TWICE),
    "_gateway": (lambda spark: spark.sparkContext, "queries past the flow go untold"),
    "_jdf": (lambda spark: spark.range(1), _LOST),
    "_jrdd": (lambda spark: spark.sparkContext.parallelize([0], 1), _SQL_HERE),
    "_gateway_client": (lambda spark: spark.sparkContext._gateway, _SQL_HERE),
    "_jc": (lambda spark: F.col("key"), "rows are not sent to the task that owns their partition"),
}


@pytest.mark.parametrize("name", OBJECT_ATTRIBUTES)
def test_attribute_of_pysparks_objects(onceflow_spark: Any, name: str) -> None:
    owner, breaks = OBJECT_ATTRIBUTES[name]
    assert getattr(owner(onceflow_spark), name, None) is not None, (
        f"pyspark {installed_spark_version()} has no {name}: {breaks}"
    )


def test_no_private_name_of_pyspark_is_used_without_a_contract() -> None:
    """By the sources of the package: every attribute with an underscore that is not of the object itself."""
    known = {name.rpartition(".")[2] for name in PYTHON_NAMES} | set(OBJECT_ATTRIBUTES)
    known |= {"_jsq", "_origin"}  # of queries and of errors: tried by every test of a flow and of its failures
    known |= {"_1", "_2"}  # of Scala's tuples
    used: dict[str, str] = {}
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")):
                used[node.attr] = path.name
    assert {name: file for name, file in used.items() if name not in known} == {}


# ---- what is used behaves as expected ----------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 7, 64])
def test_rows_go_to_the_task_that_the_column_names(onceflow_spark: Any, tasks: int) -> None:
    rows = onceflow_spark.range(0, 1000, 1, 3).withColumn("task", (F.col("id") * 5 % tasks).cast("int"))
    moved = repartition_by_task(rows, tasks, F.col("task"))
    assert moved.rdd.getNumPartitions() == tasks
    seen = moved.select("task", F.spark_partition_id().alias("at")).distinct().collect()
    assert {(row["task"], row["at"]) for row in seen} == {(task, task) for task in range(tasks)}


def test_spark_hashes_the_keys_of_tasks_to_their_numbers(onceflow_spark: Any) -> None:
    """In every version, also where it is not needed: Spark 4.1 and later have ``repartitionById``."""
    keys = onceflow_spark.createDataFrame([(task, key_of_task(task)) for task in range(300)], "task int, key int")
    assert keys.where(F.hash("key") != F.col("task")).collect() == []


def _copied(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def test_tasks_prefer_the_executors_that_are_named_for_them(onceflow_spark: Any) -> None:
    """Also behind a shuffle, and through what follows without another one."""
    jobs = PlacedJobs(onceflow_spark)
    names = ["executor_a_0", "executor_b_1", "executor_a_2"]

    def preferred(rdd: Any) -> list[list[str]]:
        """As Spark's scheduler asks, which looks through what does not shuffle."""
        context = onceflow_spark.sparkContext._jsc.sc()
        found = [context.getPreferredLocs(rdd, n) for n in range(rdd.getNumPartitions())]
        return [[str(each.apply(n).toString()) for n in range(each.size())] for each in found]

    numbered = jobs.numbered(names).mapPartitions(lambda numbers: numbers)
    assert preferred(numbered._jrdd.rdd()) == [[name] for name in names]
    assert numbered.collect() == [0, 1, 2]
    assert jobs.run(names, lambda numbers: [number * 10 for number in numbers]) == [0, 10, 20]
    df = repartition_by_task(onceflow_spark.range(30), 3, (F.col("id") % 3).cast("int"))
    moved = jobs.moved(df, names).where("id < 20").withColumn("task", F.spark_partition_id())
    assert preferred(moved._jdf.queryExecution().toRdd()) == [[name] for name in names]
    assert {row.task for row in moved.collect()} == {0, 1, 2}
    assert all(row.id % 3 == row.task for row in moved.collect())
    with pytest.raises(ValueError, match="3 partitions for 2 executors"):
        jobs.moved(df, names[:2])


def test_operators_have_the_names_that_queries_are_checked_by(onceflow_spark: Any) -> None:
    stream = onceflow_spark.readStream.format("rate").load()
    copied = stream.select("value").mapInArrow(_copied, "value long")
    assert "MapInArrow" in {jvm.kind(node) for node in jvm.nodes(plans.analyzed(copied))}
    assert facts_of(copied).may_make_many
    for df, name in [
        (stream.groupBy("value").count(), "Aggregate"),
        (stream.withWatermark("timestamp", "1 minute"), "EventTimeWatermark"),
        (stream.dropDuplicates(["value"]), "Deduplicate"),
        (stream.repartition(2), "Repartition"),
        (stream, "StreamingRelationV2"),
    ]:
        assert name in {jvm.kind(node) for node in jvm.nodes(plans.analyzed(df))}


def test_queries_whose_source_partitions_may_share_a_task(onceflow_spark: Any) -> None:
    stream = onceflow_spark.readStream.format("rate").load()
    stream.createOrReplaceTempView("rates")
    named = "WITH few AS (SELECT * FROM rates WHERE value > 3) SELECT f.value, upper('x') AS name FROM few AS f"
    for df in (stream.where("value > 3").select("value"), stream.union(stream), onceflow_spark.sql(named)):
        assert facts_of(df).may_merge_tasks
    for df in (stream.repartition(2), stream.coalesce(2), stream.groupBy("value").count(), stream.dropDuplicates()):
        assert not facts_of(df).may_merge_tasks
    assert not facts_of(stream.select("value").mapInArrow(_copied, "value long")).may_merge_tasks


def test_partition_of_a_key_is_kafkas(onceflow_spark: Any) -> None:
    keys = [b"key-%d" % n for n in range(40)]
    rows = onceflow_spark.createDataFrame([(bytearray(key),) for key in keys], "key binary").coalesce(1)
    found = [
        row["hash"] for row in rows.select(expressions.murmur2(onceflow_spark, F.col("key")).alias("hash")).collect()
    ]
    assert found == murmur2(pa.array(keys, pa.binary())).tolist()

"""The few things asked of Spark's JVM beyond PySpark's own API, all in one place.

Expressions: Catalyst can call a public Java method in generated code (``StaticInvoke``, ``Invoke``; the same
expressions Spark's encoders use). So the partition of a key is computed by Kafka's own
``Utils.murmur2`` at JVM speed, without a round trip through Python, and a task learns the attempt number
of its stage, which Python's TaskContext does not have.
"""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession

from onceflow.errors import EnvironmentUnusableError, OptionError

_MURMUR2_CLASS = "org.apache.kafka.common.utils.Utils"


def _column(java_expression: Any, spark: SparkSession) -> Column:
    from pyspark.sql.classic.column import Column as ClassicColumn

    utils = spark._jvm.org.apache.spark.sql.classic.ExpressionUtils  # type: ignore[union-attr]
    return ClassicColumn(utils.column(java_expression))


def _sequence(spark: SparkSession, *items: Any) -> Any:
    return spark._jvm.PythonUtils.toSeq(list(items))  # type: ignore[union-attr]


def _static_invoke(spark: SparkSession, class_name: str, data_type: Any, method: str, *arguments: Any) -> Any:
    jvm: Any = spark._jvm
    target = jvm.org.apache.spark.util.Utils.classForName(class_name, True, False)
    expressions = jvm.org.apache.spark.sql.catalyst.expressions.objects
    # propagateNull, returnNullable, isDeterministic, no scalar function
    return expressions.StaticInvoke(
        target,
        data_type,
        method,
        _sequence(spark, *arguments),
        _sequence(spark),
        True,
        True,
        True,
        jvm.scala.Option.empty(),
    )


def _integer_type(spark: SparkSession) -> Any:
    types: Any = spark._jvm.org.apache.spark.sql.types  # type: ignore[union-attr]
    return getattr(getattr(types, "IntegerType$"), "MODULE$")


def murmur2(spark: SparkSession, key: Column) -> Column:
    """Kafka's murmur2 of a binary column, as a signed integer; null for a null key."""
    try:
        java_key = spark._jvm.org.apache.spark.sql.classic.ExpressionUtils.expression(key._jc)  # type: ignore[union-attr]
        call = _static_invoke(spark, _MURMUR2_CLASS, _integer_type(spark), "murmur2", java_key)
    except Py4JError as error:
        raise EnvironmentUnusableError(
            "Spark's JVM cannot call Kafka's murmur2",
            detail=str(error).splitlines()[0],
            next_step="use a session made by onceflow.session(), which puts kafka-clients on the class path",
        ) from error
    return _column(call, spark)


def stage_attempt(spark: SparkSession) -> Column:
    """``TaskContext.stageAttemptNumber`` of the task that evaluates the column."""
    jvm: Any = spark._jvm
    context_class = "org.apache.spark.TaskContext"
    runtime_class = jvm.org.apache.spark.util.Utils.classForName(context_class, True, False)
    object_type = jvm.org.apache.spark.sql.types.ObjectType(runtime_class)
    context = _static_invoke(spark, context_class, object_type, "get")
    invoke = jvm.org.apache.spark.sql.catalyst.expressions.objects.Invoke(
        context, "stageAttemptNumber", _integer_type(spark), _sequence(spark), _sequence(spark), True, True, True
    )
    return _column(invoke, spark)


def source_partitions(df: DataFrame) -> list[tuple[str, int]]:
    """Topic and partition that each task of a batch reads, in task order.

    Follows the batch's RDD through one-to-one dependencies down to the Kafka source.

    Raises:
        OptionError: something in between (a shuffle, a union) mixes partitions.
    """
    rdd = df._jdf.queryExecution().toRdd()
    while rdd.getClass().getSimpleName() != "DataSourceRDD":
        dependencies = rdd.dependencies()
        if dependencies.size() != 1 or dependencies.head().getClass().getSimpleName() != "OneToOneDependency":
            raise _not_source_partitioned(f"it goes through {rdd.getClass().getSimpleName()}")
        rdd = dependencies.head().rdd()
    found: list[tuple[str, int]] = []
    for partition in rdd.partitions():
        inputs = partition.inputPartition()
        if inputs.isEmpty():
            raise _not_source_partitioned("a task reads nothing")
        offset_range = inputs.get().offsetRange()
        found.append((str(offset_range.topic()), int(offset_range.partition())))
    if len(set(found)) != len(found):
        raise _not_source_partitioned(
            "a source partition is split over tasks (minPartitions or maxRecordsPerPartition)"
        )
    return found


def _not_source_partitioned(why: str) -> OptionError:
    return OptionError(
        'partitioner="source" needs a query that keeps every source partition in one task',
        detail=why,
        next_step='use partitioner="key", or drop the shuffle, join or union from the query',
    )


def first_line(error: BaseException) -> str:
    """A short text of a Spark job's failure: the last line of a Python traceback, else the first line."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage()) if java is not None and java.getMessage() else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    blamed = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (blamed or lines or [type(error).__name__])[-1 if blamed else 0][:500]

"""Expressions of Spark that PySpark has no function for.

Catalyst can call a public Java method in generated code (``StaticInvoke``, one of the expressions that Spark's encoders
use). So Kafka's own ``Utils.murmur2`` computes the partition of a key in the JVM, and no data go through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import Column, SparkSession

from onceflow.errors import EnvironmentUnusableError
from onceflow.spark import versions

_MURMUR2_CLASS = "org.apache.kafka.common.utils.Utils"


def _expression(column: Column, spark: SparkSession) -> Any:
    """Catalyst's expression of a column."""
    if versions.has("classic"):
        return versions.sql_class(spark, "ExpressionUtils").expression(column._jc)
    java_column: Any = column._jc
    return java_column.expr()


def _column(java_expression: Any, spark: SparkSession) -> Column:
    if versions.has("classic"):
        from pyspark.sql.classic.column import Column as ClassicColumn

        return ClassicColumn(versions.sql_class(spark, "ExpressionUtils").column(java_expression))
    concrete: Callable[[Any], Column] = Column  # abstract since Spark 4
    return concrete(versions.sql_class(spark, "Column")(java_expression))


def _sequence(spark: SparkSession, *items: Any) -> Any:
    return spark._jvm.PythonUtils.toSeq(list(items))  # type: ignore[union-attr]


def _static_invoke(spark: SparkSession, class_name: str, data_type: Any, method: str, *arguments: Any) -> Any:
    jvm: Any = spark._jvm
    target = jvm.org.apache.spark.util.Utils.classForName(class_name, True, False)
    expressions = jvm.org.apache.spark.sql.catalyst.expressions.objects
    # propagateNull, returnNullable, isDeterministic, no scalar function
    rest = [True, True, True, *([jvm.scala.Option.empty()] if versions.has("scalar function") else [])]
    return expressions.StaticInvoke(target, data_type, method, _sequence(spark, *arguments), _sequence(spark), *rest)


def _integer_type(spark: SparkSession) -> Any:
    types: Any = spark._jvm.org.apache.spark.sql.types  # type: ignore[union-attr]
    return getattr(getattr(types, "IntegerType$"), "MODULE$")


def murmur2(spark: SparkSession, key: Column) -> Column:
    """Kafka's murmur2 of a binary column, as a signed integer; null for a null key."""
    try:
        call = _static_invoke(spark, _MURMUR2_CLASS, _integer_type(spark), "murmur2", _expression(key, spark))
    except Py4JError as error:
        raise EnvironmentUnusableError(
            "Spark's JVM cannot call Kafka's murmur2",
            detail=str(error).splitlines()[0],
            next_step="use a session made by onceflow.session(), which puts kafka-clients on the class path",
        ) from error
    return _column(call, spark)

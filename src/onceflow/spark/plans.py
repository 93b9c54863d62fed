"""Logical plans of Spark: they are divided at process steps, and put together again for each batch.

The operators after a process step are ordinary Spark: ``select``, ``where``, a join with a static DataFrame. The
streaming query itself only supplies the rows that go into the steps. In a batch the step runs with a number of tasks
that suits the batch, and the operators after it are applied to its rows: the same nodes of the analyzed plan, with
another child. Nodes are found by their *path*, the numbers of the children from the root.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import UnsupportedQueryError
from onceflow.spark import jvm, versions
from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.task_shuffle import repartition_by_task

Path = tuple[int, ...]


def analyzed(df: DataFrame) -> Any:
    """The analyzed plan of a DataFrame."""
    return df._jdf.queryExecution().analyzed()


def children(plan: Any) -> list[Any]:
    found = plan.children()
    return [found.apply(i) for i in range(found.size())]


def optimized(df: DataFrame) -> Any:
    """The optimized plan of a DataFrame."""
    return df._jdf.queryExecution().optimizedPlan()


def at(plan: Any, path: Path) -> Any:
    """The node at a path."""
    for number in path:
        plan = plan.children().apply(number)
    return plan


def arrow_functions(plan: Any) -> Iterator[str]:
    """The names of the functions of ``mapInArrow`` in a plan."""
    for node in jvm.nodes(plan):
        if jvm.kind(node) == "MapInArrow":
            yield str(node.functionExpr().name())


def struct_of(node: Any) -> T.StructType:
    """The columns of a node. Several may have one name."""
    return T.StructType.fromJson(json.loads(node.schema().json()))


def frame(spark: SparkSession, plan: Any) -> DataFrame:
    """A DataFrame of a plan. New parts of the plan are analyzed."""
    dataset = versions.sql_class(spark, "Dataset")
    return DataFrame(dataset.ofRows(spark._jsparkSession, plan), spark)


def named_as(df: DataFrame, plan: Any) -> Any:
    """The plan of a DataFrame, with the column names and expression ids of another plan, which it can then replace.

    Args:
        plan: the other plan. It has equally many columns, with the same types in the same order.
    """
    return renamed(df.sparkSession, analyzed(df), items(plan.output()))


def renamed(spark: SparkSession, plan: Any, wanted: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    """The first columns of a plan with the names and expression ids of other ones.

    Args:
        wanted: the other ones, with the same types in the same order.
        more: further columns of the plan, which keep their names and ids.
    """
    java: Any = spark._jvm
    alias = java.org.apache.spark.sql.catalyst.expressions.Alias
    none, nothing = java.scala.Option.empty(), sequence(spark, ())
    columns = [
        alias(own, each.name(), each.exprId(), each.qualifier(), none, nothing)
        for own, each in zip(items(plan.output()), wanted, strict=False)
    ]
    return projected(spark, [*columns, *more], plan)


def projected(spark: SparkSession, columns: Iterable[Any], child: Any) -> Any:
    """A projection of a plan."""
    java: Any = spark._jvm
    return java.org.apache.spark.sql.catalyst.plans.logical.Project(sequence(spark, columns), child)


def mapped(spark: SparkSession, plan: Any, pattern: Any, change: Callable[[Any], Any]) -> Any:
    """The plan with other expressions, also in its subqueries.

    Args:
        pattern: one of Catalyst's tree patterns. Only expressions that have it, themselves or below, are looked at.
        change: returns what an expression becomes; None: it stays, and its children are looked at.
    """
    if not plan.containsPattern(pattern):
        return plan
    java: Any = spark._jvm
    make = JavaFunctions(spark)
    has_subquery = bool(plan.containsPattern(make.tree_pattern("PLAN_EXPRESSION")))

    def anew(expression: Any) -> Any:
        if not expression.containsPattern(pattern):
            return expression
        found = change(expression)
        if found is not None:
            return found
        made = expression.withNewChildren(sequence(spark, [anew(each) for each in children(expression)]))
        query = subquery(make, made) if has_subquery else None
        return made if query is None else made.withNewPlan(mapped(spark, query, pattern, change))

    plan = plan.withNewChildren(sequence(spark, [mapped(spark, each, pattern, change) for each in children(plan)]))
    changed = java.java.util.IdentityHashMap()
    for expression in items(plan.expressions()):
        changed.put(expression, anew(expression))
    look_up = make.method("java.util.Map", "get(java.lang.Object) -> java.lang.Object", of=changed)
    return plan.mapExpressions(make.as_interface(look_up, "scala.Function1"))


def expressions(make: JavaFunctions, plan: Any, pattern: Any) -> Iterator[Any]:
    """The expressions of a plan and of its subqueries that have a tree pattern of Catalyst, themselves or below."""
    has_subquery = bool(plan.containsPattern(make.tree_pattern("PLAN_EXPRESSION")))
    for node in jvm.nodes(plan, pattern):
        for each in (each for root in items(node.expressions()) for each in jvm.nodes(root, pattern)):
            yield each
            query = subquery(make, each) if has_subquery else None
            if query is not None:
                yield from expressions(make, query, pattern)


def subquery(make: JavaFunctions, expression: Any) -> Any:
    """The plan of an expression that is a subquery; None: it is none."""
    kind = make.java_class("org.apache.spark.sql.catalyst.expressions.PlanExpression")
    return expression.plan() if kind.isInstance(expression) else None


def grafted(spark: SparkSession, plan: Any, new: Mapping[Path, Any]) -> Any:
    """The plan with other nodes at these paths. No path may begin with another one."""
    if () in new:
        return new[()]
    by_child: dict[int, dict[Path, Any]] = {}
    for path, node in new.items():
        by_child.setdefault(path[0], {})[path[1:]] = node
    changed = [grafted(spark, child, by_child[i]) if i in by_child else child for i, child in enumerate(children(plan))]
    return plan.withNewChildren(sequence(spark, changed))


def exchanged(df: DataFrame, tasks: int) -> DataFrame:
    """The same rows after a shuffle, so that what is before the shuffle runs only once.

    Each task's rows stay together and in their order. The new DataFrame is made from the shuffled RDD itself (as in
    Spark's own ForeachBatchSink). So the optimizer cannot move anything across the shuffle, and Spark computes the
    stage before it once, however many operators and jobs read it.

    Args:
        tasks: how many tasks the shuffle has. Each takes the rows of one task of the DataFrame, or of several if the
            DataFrame has more tasks.
    """
    spark = df.sparkSession
    moved = repartition_by_task(df, tasks, F.pmod(F.spark_partition_id(), F.lit(tasks)))
    rdd = moved._jdf.queryExecution().toRdd()
    session: Any = spark._jsparkSession
    return DataFrame(session.internalCreateDataFrame(rdd, moved._jdf.schema(), False), spark)


def check_streaming(df: DataFrame, flow: str) -> None:
    """Refuse what Spark refuses in a stream. Spark itself never sees the operators after a process step.

    Raises:
        UnsupportedQueryError: with Spark's reason (Spark: ``UnsupportedOperationChecker``).
    """
    java: Any = df.sparkSession._jvm
    append = java.org.apache.spark.sql.streaming.OutputMode.Append()
    checker = java.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(analyzed(df), append)
    except AnalysisException as error:
        raise UnsupportedQueryError(
            "Spark refuses the query",
            flow=flow,
            detail=str(error).splitlines()[0],
            next_step="see Spark's Structured Streaming guide for what a stream without state can do",
        ) from error


def is_always_true(spark: SparkSession, condition: Any) -> bool:
    """Whether a condition is true for every row and in every batch."""
    java: Any = spark._jvm
    time = (
        java.org.apache.spark.sql.catalyst.trees.TreePattern.CURRENT_LIKE()
    )  # foldable, but not the same in each batch
    if not (condition.foldable() and condition.deterministic()) or condition.containsPattern(time):
        return False
    try:
        return bool(condition.eval(None))
    except jvm.SPARK_ERRORS:
        return False  # it fails for every row: a batch with rows will raise the error


def items(found: Any) -> list[Any]:
    """A sequence of Scala as a list."""
    return [found.apply(i) for i in range(found.size())]


def sequence(spark: SparkSession, found: Iterable[Any]) -> Any:
    """A list as a sequence of Scala."""
    java: Any = spark._jvm
    return java.PythonUtils.toSeq(list(found))

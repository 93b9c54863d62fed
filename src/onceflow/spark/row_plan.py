"""Operators of a query over rows that the driver supplies: Spark's physical plan for them, made once.

The analyzed plan of the query gets another leaf: an RDD that reads an Arrow batch from a file whenever it is computed.
Spark then optimizes and plans it as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.arrow_types import nullable
from onceflow.spark import batch_plan, jvm, plan_columns, plans
from onceflow.spark.collect import arrow_schema_of
from onceflow.spark.java_functions import JavaFunctions
from onceflow.spark.master import is_local
from onceflow.spark.operators import operator

#: Physical operators that need nothing but the rows of their own partition.
_NARROW = frozenset(
    {
        "WholeStageCodegenExec", "InputAdapter", "ProjectExec", "FilterExec", "ExpandExec", "GenerateExec",
        "RDDScanExec", "LocalTableScanExec", "EmptyRelationExec",
        "MapInArrowExec", "PythonMapInArrowExec", "MapInPandasExec",
        "ArrowEvalPythonExec", "BatchEvalPythonExec", "ArrowEvalPythonUDTFExec", "BatchEvalPythonUDTFExec",
    }
)  # fmt: skip
_ROW = "__onceflow_row"
_ARROW = "org.apache.spark.sql.execution.arrow.ArrowConverters"
_OBJECT, _ITERATOR = "java.lang.Object", "scala.collection.Iterator"


class NoProgramError(Exception):
    """Why operators need a Spark job: a text such as ``BroadcastHashJoin``."""


@dataclass(frozen=True)
class RowPlan:
    """What Spark has planned.

    Args:
        df: of the rows that the operators make; in the end there may be the number of the row that each was made from.
        input: what the leaf reads: the columns of the rows that are given, and the number of each row.
        used: the places of the columns of ``input`` that the operators use. The others may be null.
        passed: for each column that is wanted, the place of the given column that it is; None: the next one of ``df``.
        timed: whether the time of the batch is needed.
    """

    df: DataFrame
    input: pa.Schema
    used: frozenset[int]
    passed: tuple[int | None, ...]
    timed: bool


def planned(make: JavaFunctions, spark: SparkSession, node: Any, base: plans.Path, file: str, clock: Any) -> RowPlan:
    """Plan operators.

    Args:
        make: functions of the JVM.
        spark: the session of the query. Its settings are those of this moment.
        node: the operator of an analyzed plan whose rows are wanted.
        base: the path from it to the node whose rows are given. There is one operator after the other in between.
        file: the path of one that has the rows as one Arrow batch, without its schema.
        clock: an AtomicReference, which has the time of the batch in microseconds of the epoch.

    Raises:
        NoProgramError: they need a job.
    """
    leaf = plans.at(node, base)
    # Each may be null, because those that are not used are. Spark would read a null as the value it cannot be.
    fields = [T.StructField(each.name, each.dataType) for each in plans.struct_of(leaf)]
    struct = T.StructType([*fields, T.StructField(_ROW, T.LongType())])
    given = _leaf(make, spark, struct, file)
    passed = _passed_on(node, base)
    carries = any(at is not None for at in passed)
    # Without columns that are passed on nobody needs the number, and functions over whole rows must not see it.
    row = plans.items(plans.analyzed(given).output())[-1:] if carries else []
    named = plans.renamed(spark, plans.analyzed(given), plans.items(leaf.output()), row)
    if carries:
        made = [each for each, at in zip(plans.items(node.output()), passed, strict=True) if at is None]
        whole = plans.projected(spark, [*made, *row], _carried(spark, node, base, named, row))
    else:
        whole = plans.grafted(spark, node, {base: named})
    if batch_plan.is_random(spark, whole):
        raise NoProgramError("random numbers")  # each batch needs new seeds
    if batch_plan.has_other_times(spark, whole):
        raise NoProgramError("a time such as current_time() or CAST('now' AS TIMESTAMP)")
    whole, timed = batch_plan.with_variable_time(spark, whole, clock)
    df = plans.frame(spark, whole)
    _check(df._jdf.queryExecution().executedPlan(), local=is_local(spark))
    schema = nullable(arrow_schema_of(spark, struct, "which rows cannot have outside of a job", large=False))
    return RowPlan(df, schema, _used(plans.optimized(df), given), tuple(passed), timed)


def _leaf(make: JavaFunctions, spark: SparkSession, struct: T.StructType, file: str) -> DataFrame:
    """The rows of the Arrow batch that is in the file whenever they are computed."""
    session: Any = spark._jsparkSession
    schema = session.parseDataType(struct.json())
    path = make.function("java.nio.file.Paths", "get")(file, make.array([], "java.lang.String"))
    read = make.method("java.nio.file.Files", "static readAllBytes(java.nio.file.Path) -> [B", of=path)
    batches = make.then(
        read, make.method(f"{_ITERATOR}$", f"single({_OBJECT}) -> {_ITERATOR}", of=make.object(_ITERATOR))
    )
    rows = make.method(f"{_ARROW}$", "fromBatchIterator", of=make.object(_ARROW))
    flags = [False] * (make.parameters(rows) - 4)
    rows = make.bound(rows, 1, schema, str(spark.conf.get("spark.sql.session.timeZone")), *flags)
    rows = make.ignoring(make.fed(rows, 0, batches), 1, _OBJECT, _OBJECT)  # takes the TaskContext alone
    function = make.as_interface(make.typed(rows, _OBJECT, _OBJECT, _OBJECT, _OBJECT), "scala.Function3")
    tag = make.function("scala.reflect.ClassTag", "apply")(make.java_class("org.apache.spark.sql.catalyst.InternalRow"))
    kind = "org.apache.spark.rdd.MapPartitionsRDD"
    flags = [False] * (make.parameters(make.constructor(kind)) - 4)
    one = spark.sparkContext.parallelize([0], 1)._jrdd.rdd()
    rdd = make.static(kind)(one, function, *flags, tag, tag)
    return DataFrame(session.internalCreateDataFrame(rdd, schema, False), spark)


def _passed_on(node: Any, base: plans.Path) -> list[int | None]:
    """For each column the place of the column of ``base`` that it is; None: it comes out of the JVM."""
    output, ids = plan_columns.output_ids(node), plan_columns.output_ids(plans.at(node, base))
    if not all(operator(jvm.kind(plans.at(node, base[:depth]))).passes_numbers for depth in range(len(base))):
        return [None] * len(output)
    return [ids.index(each) if each in ids else None for each in output]


def _carried(spark: SparkSession, node: Any, path: plans.Path, leaf: Any, row: list[Any]) -> Any:
    """The plan, in which each operator also has the number of the row."""
    if not path:
        return leaf
    child = _carried(spark, plans.children(node)[path[0]], path[1:], leaf, row)
    if jvm.kind(node) == "Project":
        return plans.projected(spark, [*plans.items(node.projectList()), *row], child)
    return plans.grafted(spark, node, {path[:1]: child})


def _check(plan: Any, *, local: bool) -> None:
    for node in jvm.nodes(plan):
        name = str(node.getClass().getSimpleName())
        if not local and ("Python" in name or name.startswith("MapIn")):
            raise NoProgramError("a Python function")  # executors have the Python and the packages for it
        if name not in _NARROW:
            raise NoProgramError(name.removesuffix("Exec"))
        if not node.subqueries().isEmpty():
            raise NoProgramError("a subquery")


def _used(plan: Any, given: DataFrame) -> frozenset[int]:
    """The places of the columns of a leaf that the optimized plan over it uses."""
    used = set(plan_columns.output_ids(plan))
    for node in jvm.nodes(plan):
        if jvm.kind(node) != "LogicalRDD":
            used |= {int(each.exprId().id()) for each in plans.items(node.references().toSeq())}
    return frozenset(at for at, each in enumerate(plan_columns.output_ids(plans.analyzed(given))) if each in used)

"""Which queries the direct engine can run: reads its plan from Spark's, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from onceflow.spark import jvm, plan_columns, plans, queries
from onceflow.spark.plan_columns import ConstantColumn, TakenColumn
from onceflow.task.direct_plan import (
    SOURCE_TYPES,
    ArrowFunction,
    ArrowRows,
    Attribute,
    Constant,
    DirectPlan,
    DirectSource,
    MapRows,
    Operator,
    Program,
    Select,
    SparkRows,
    StepSource,
)

#: Functions of ``Flow.map``, by their names in plans.
Maps = Mapping[str, Callable[[pa.RecordBatch], pa.RecordBatch]]


class Evaluate(Protocol):
    """Makes the program for operators of Spark."""

    def __call__(self, node: Any, base: plans.Path) -> Program | str:
        """The program for a node and those down to the one at a path, which is not part of it; or why there is none."""
        ...


# Operators that leave the rows as they are. A watermark alone has no effect, and tasks are not chosen by the query.
_SAME_ROWS = (
    "SubqueryAlias",
    "View",
    "EventTimeWatermark",
    "ResolvedHint",
    "Repartition",
    "RepartitionByExpression",
    "RebalancePartitions",
)
# Options that decide what is in a batch, or which tasks read it.
_OF_BATCHES = {
    "minpartitions": "minPartitions",
    "maxrecordsperpartition": "maxRecordsPerPartition",
    "minoffsetspertrigger": "minOffsetsPerTrigger",
    "maxtriggerdelay": "maxTriggerDelay",
}
_CONSTANT_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "void": pa.null(),
}
# Types of which only null can be a constant here.
_NULL_TYPES = {
    "timestamp": SOURCE_TYPES["timestamp"],
    "array<struct<key:string,value:binary>>": SOURCE_TYPES["headers"],
}
# Operators of Spark that need nothing but the rows of this batch, and rows that are not from a stream.
_EVALUATED = ("Project", "Filter", "Generate", "SubqueryAlias", "View", "MapInPandas", "MapInArrow", "Join")
# What users call the operators of a plan.
_OPERATORS = {
    "Sort": "a sort",
    "Window": "a window function",
    "Sample": "a sample",
    "Expand": "several groupings",
    **dict(queries.STATEFUL.items()),
}


class _NotDirectError(Exception):
    """Why a query is not direct."""


@dataclass(frozen=True)
class _Rows:
    """What a node of a plan yields.

    Args:
        sources: with the operators up to this node.
        steps: as ``sources``.
        ids: Spark's ids of its columns.
    """

    sources: tuple[DirectSource, ...]
    steps: tuple[StepSource, ...]
    ids: list[int]

    @classmethod
    def of(cls, below: _Rows, node: Any, operator: Operator | None = None) -> _Rows:
        """What the node yields, if it does this with the rows of its child; None: nothing."""
        ids = plan_columns.output_ids(node)
        if operator is None:
            return cls(below.sources, below.steps, ids)
        sources = tuple(source.then(operator) for source in below.sources)
        return cls(sources, tuple(step.then(operator) for step in below.steps), ids)


@dataclass(frozen=True)
class Functions:
    """What a run of a flow has for the operators of its query.

    Args:
        flow: the flow's name.
        maps: its functions of ``Flow.map``.
        arrow: those of ``Flow.join_table`` and ``Flow.enrich``, by their names in plans.
        evaluate: for operators of Spark.
    """

    flow: str
    maps: Maps
    arrow: Mapping[str, ArrowFunction]
    evaluate: Evaluate


def direct_plan(node: Any, functions: Functions) -> DirectPlan | str:
    """The plan by which the direct engine runs a query, or a part of one.

    Args:
        node: the root of the part, of Spark's analyzed plan. For a query with a process step: the child of the step.

    Returns:
        The plan; or a text that says why there is none, such as ``the query has a join of two streams``.
    """
    try:
        return _plan(node, functions)
    except _NotDirectError as reason:
        return str(reason)


def _plan(node: Any, functions: Functions) -> DirectPlan:
    rows = _rows(node, functions)
    return DirectPlan(rows.sources, plan_columns.output_names(node), rows.steps)


def _rows(node: Any, functions: Functions) -> _Rows:
    kind = jvm.kind(node)
    if kind == "StreamingRelationV2":
        return _Rows((_source(node, functions.flow),), (), plan_columns.output_ids(node))
    if kind in _SAME_ROWS:
        return _Rows.of(_rows(node.child(), functions), node)
    if kind == "Project" and not _needs_spark(node) and (columns := _taken(node)) is not None:
        return _selected(node, columns, _rows(node.child(), functions))
    if _is_of_spark(node):
        return _evaluated(node, functions)
    if kind == "Union":
        return _united(node, functions)
    if kind == "MapInArrow":
        table = queries.step_table(node)
        return _mapped(node, functions) if table is None else _step(node, table, functions)
    if kind == "Filter":  # where a read with until= ends: batches end there, too
        return _rows(node.child(), functions)
    if not node.isStreaming() and not plans.children(node):
        raise _NotDirectError("the query has rows that are not from a stream")
    raise _NotDirectError(f"the query has {_OPERATORS.get(kind, f'the operator {kind}')}")


def _source(node: Any, flow: str) -> DirectSource:
    source = plan_columns.source_node(node)
    if source.flow != flow or source.topic is None:
        raise _NotDirectError("the query reads a source that is not a topic of this flow")
    for name, shown in _OF_BATCHES.items():
        if name in source.options:
            raise _NotDirectError(f"topic {source.topic} is read with {shown}")
    most = source.options.get("maxoffsetspertrigger")
    found = DirectSource(
        source.topic,
        include_headers=source.options.get("includeheaders", "false").lower() == "true",
        fail_on_data_loss=source.options.get("failondataloss", "true").lower() == "true",
        max_records=None if most is None else int(most),
    )
    if plan_columns.output_names(node) != found.source_columns:
        raise _NotDirectError(f"Spark's source of topic {source.topic} has other columns than this version knows")
    return found


def _united(node: Any, functions: Functions) -> _Rows:
    """The columns of a union are taken by their places, and the first side names them."""
    names = plan_columns.output_names(node)
    same = Select(tuple(Attribute(name, at) for at, name in enumerate(names)))
    sources: list[DirectSource] = []
    steps: list[StepSource] = []
    for child in plans.children(node):
        below = _rows(child, functions)
        sources += [each if each.columns == names else each.then(same) for each in below.sources]
        steps += [each if each.columns == names else each.then(same) for each in below.steps]
    return _Rows(tuple(sources), tuple(steps), plan_columns.output_ids(node))


def _step(node: Any, table: str, functions: Functions) -> _Rows:
    step = StepSource(table, _plan(node.child(), functions), plan_columns.output_names(node))
    return _Rows((), (step,), plan_columns.output_ids(node))


def _taken(project: Any) -> list[TakenColumn | Constant] | None:
    """The columns of a projection, if each is one of its input or a constant that needs no Spark."""
    columns: list[TakenColumn | Constant] = []
    for column in plan_columns.projected(project):
        if isinstance(column, ConstantColumn):
            constant = _constant(column)
            if constant is None:
                return None
            columns.append(constant)
        elif isinstance(column, TakenColumn):
            columns.append(column)
        else:
            return None
    return columns


def _selected(node: Any, columns: list[TakenColumn | Constant], below: _Rows) -> _Rows:
    ids = below.ids
    select = Select(
        tuple(
            each if isinstance(each, Constant) else Attribute(each.name, ids.index(each.expression), each.cast)
            for each in columns
        )
    )
    return _Rows.of(below, node, select)


def _is_of_spark(node: Any) -> bool:
    """Whether Spark can evaluate an operator for one row after the other, and it is none of onceflow's own."""
    kind = jvm.kind(node)
    if kind == "MapInArrow":
        name = str(node.functionExpr().name())
        return not (queries.is_ours(name) or queries.is_map(name) or queries.is_calls(name))
    return kind in _EVALUATED and not (kind == "Filter" and plan_columns.end_of_read(node) is not None)


def _needs_spark(node: Any) -> bool:
    """Whether Spark has to evaluate the node, or those below that would be one program with it. Then it also knows
    which of their columns are wanted."""
    while _is_of_spark(node):
        kind = jvm.kind(node)
        if kind not in ("Project", *_SAME_ROWS) or (kind == "Project" and _taken(node) is None):
            return True
        (node,) = plans.children(node)
    return False


def _evaluated(node: Any, functions: Functions) -> _Rows:
    base = node
    path: plans.Path = ()
    while _is_of_spark(base):
        number, base = _streaming_child(base)
        path = (*path, number)
    below = _rows(base, functions)
    program = functions.evaluate(node, path)
    if isinstance(program, str):
        raise _NotDirectError(program)
    operator = SparkRows(plan_columns.output_names(node), program)
    return _Rows.of(below, node, operator)


def _streaming_child(node: Any) -> tuple[int, Any]:
    """The child whose rows are those of the batch. The others are not from a stream."""
    found = [(number, child) for number, child in enumerate(plans.children(node)) if child.isStreaming()]
    if len(found) != 1:
        raise _NotDirectError("the query has a join of two streams" if found else "the query has rows without a stream")
    return found[0]


def _constant(column: ConstantColumn) -> Constant | None:
    kind = _CONSTANT_TYPES.get(column.kind)
    if kind is None and column.value is None:
        kind = _NULL_TYPES.get(column.kind)
    return None if kind is None else Constant(column.name, column.value, kind)


def _mapped(node: Any, functions: Functions) -> _Rows:
    name = str(node.functionExpr().name())
    columns = plan_columns.output_names(node.child()), plan_columns.output_names(node)
    operator: Operator
    if name in functions.maps:
        operator = MapRows(*columns, functions.maps[name])
    elif name in functions.arrow:
        operator = ArrowRows(*columns, functions.arrow[name])
    else:
        raise _NotDirectError(f"the query has {_of_function(name)}, which was made before an earlier run of the flow")
    below = _rows(node.child(), functions)
    return _Rows.of(below, node, operator)


def _of_function(name: str) -> str:
    """What a user calls a function over Arrow batches that is not from ``Flow.map``."""
    if queries.is_join(name):
        return "a join with a table (Flow.join_table)"
    if queries.is_calls(name):
        return "calls of another service (Flow.enrich)"
    if queries.is_map(name):
        return f"Flow.map with {queries.function_of_map(name)}"
    return f"the function {name}"

"""Which queries the direct engine can run: makes its plan from the facts of the query, or says why it cannot."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa

from onceflow.planning.direct_plan import (
    DirectPlan,
    DirectSource,
    Function,
    PlanOperator,
    SparkOperators,
    StepSource,
)
from onceflow.spark import function_names
from onceflow.spark.plan_columns import ComputedColumn, ConstantColumn, TakenColumn
from onceflow.spark.query_facts import Node
from onceflow.task.row_operators import SOURCE_TYPES, Attribute, Constant, Select
from onceflow.task.task_program import TopicRead

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
    ids: tuple[int, ...]

    def then(self, node: Node, operator: PlanOperator | None = None) -> _Rows:
        """What the node above yields, if it does this with the rows; None: nothing."""
        if operator is None:
            return _Rows(self.sources, self.steps, node.ids)
        sources = tuple(source.then(operator) for source in self.sources)
        return _Rows(sources, tuple(step.then(operator) for step in self.steps), node.ids)


def direct_plan(node: Node, flow: str, functions: Collection[str]) -> DirectPlan | str:
    """The plan by which the direct engine runs a query, or a part of one.

    Args:
        node: the root of the part. For a query with a process step that writes what it yields: the child of the step.
        functions: names in plans of the functions that this run of the flow has: of ``Flow.map``, ``Flow.join_table``
            and ``Flow.enrich``.

    Returns:
        The plan; or a text that says why there is none, such as ``the query has a join of two streams``.
    """
    try:
        return _Planner(flow, functions).plan(node)
    except _NotDirectError as reason:
        return str(reason)


class _Planner:
    def __init__(self, flow: str, functions: Collection[str]) -> None:
        self._flow = flow
        self._functions = functions

    def plan(self, node: Node) -> DirectPlan:
        rows = self._rows(node)
        return DirectPlan(rows.sources, node.names, rows.steps)

    def _rows(self, node: Node) -> _Rows:
        if node.kind == "StreamingRelationV2":
            return _Rows((self._source(node),), (), node.ids)
        if node.operator.same_rows:
            return self._rows(node.children[0]).then(node)
        if node.kind == "Project" and not _needs_spark(node) and (columns := _taken(node)) is not None:
            return _selected(node, columns, self._rows(node.children[0]))
        if _is_of_spark(node):
            return self._evaluated(node)
        if node.kind == "Union":
            return self._united(node)
        if node.kind == "MapInArrow":
            table = node.table
            return self._called(node) if table is None else self._step(node, table)
        if node.kind == "Filter":  # where a read with until= ends: batches end there, too
            return self._rows(node.children[0])
        if not node.streaming and not node.children:
            raise _NotDirectError("the query has rows that are not from a stream")
        raise _NotDirectError(f"the query has {node.operator.word or f'the operator {node.kind}'}")

    def _source(self, node: Node) -> DirectSource:
        source = node.source
        if source is None or source.flow != self._flow or source.topic is None:
            raise _NotDirectError("the query reads a source that is not a topic of this flow")
        for name, shown in _OF_BATCHES.items():
            if name in source.options:
                raise _NotDirectError(f"topic {source.topic} is read with {shown}")
        most = source.options.get("maxoffsetspertrigger")
        read = TopicRead(
            source.topic,
            include_headers=source.options.get("includeheaders", "false").lower() == "true",
            fail_on_data_loss=source.options.get("failondataloss", "true").lower() == "true",
            max_records=None if most is None else int(most),
        )
        if node.names != read.columns:
            raise _NotDirectError(f"Spark's source of topic {source.topic} has other columns than this version knows")
        return DirectSource(read)

    def _united(self, node: Node) -> _Rows:
        """The columns of a union are taken by their places, and the first side names them."""
        names = node.names
        same = Select(tuple(Attribute(name, at) for at, name in enumerate(names)))
        sources: list[DirectSource] = []
        steps: list[StepSource] = []
        for child in node.children:
            below = self._rows(child)
            sources += [each if each.columns == names else each.then(same) for each in below.sources]
            steps += [each if each.columns == names else each.then(same) for each in below.steps]
        return _Rows(tuple(sources), tuple(steps), node.ids)

    def _step(self, node: Node, table: str) -> _Rows:
        return _Rows((), (StepSource(table, self.plan(node.children[0]), node.names),), node.ids)

    def _evaluated(self, node: Node) -> _Rows:
        base = node
        while _is_of_spark(base):
            base = _streaming_child(base)
        operator = SparkOperators(node.names, node.path, node.path_to(base))
        return self._rows(base).then(node, operator)

    def _called(self, node: Node) -> _Rows:
        (child,) = node.children
        if node.function not in self._functions:
            what = _of_function(node.function)
            raise _NotDirectError(f"the query has {what}, which was made before an earlier run of the flow")
        return self._rows(child).then(node, Function(node.function, child.names, node.names))


def _taken(project: Node) -> list[TakenColumn | Constant] | None:
    """The columns of a projection, if each is one of its input or a constant that needs no Spark."""
    columns: list[TakenColumn | Constant] = []
    for column in project.projected:
        if isinstance(column, ComputedColumn):
            return None
        if isinstance(column, ConstantColumn):
            constant = _constant(column)
            if constant is None:
                return None
            columns.append(constant)
        else:
            columns.append(column)
    return columns


def _selected(node: Node, columns: list[TakenColumn | Constant], below: _Rows) -> _Rows:
    ids = below.ids
    select = Select(
        tuple(
            each if isinstance(each, Constant) else Attribute(each.name, ids.index(each.expression), each.cast)
            for each in columns
        )
    )
    return below.then(node, select)


def _is_of_spark(node: Node) -> bool:
    """Whether Spark can evaluate an operator for one row after the other, and it is none of onceflow's own."""
    if node.kind == "MapInArrow":
        name = node.function
        return not (function_names.is_ours(name) or function_names.is_map(name) or function_names.is_calls(name))
    return node.operator.per_batch and node.ends is None


def _needs_spark(node: Node) -> bool:
    """Whether Spark has to evaluate the node, or those below that would be one program with it. Then it also knows
    which of their columns are wanted."""
    while _is_of_spark(node):
        if node.kind == "Project":
            if _taken(node) is None:
                return True
        elif not node.operator.same_rows:
            return True
        (node,) = node.children
    return False


def _streaming_child(node: Node) -> Node:
    """The child whose rows are those of the batch. The others are not from a stream."""
    found = [child for child in node.children if child.streaming]
    if len(found) != 1:
        raise _NotDirectError("the query has a join of two streams" if found else "the query has rows without a stream")
    return found[0]


def _constant(column: ConstantColumn) -> Constant | None:
    kind = _CONSTANT_TYPES.get(column.kind)
    if kind is None and column.value is None:
        kind = _NULL_TYPES.get(column.kind)
    return None if kind is None else Constant(column.name, column.value, kind)


def _of_function(name: str) -> str:
    """What a user calls a function over Arrow batches that is not from ``Flow.map``."""
    if function_names.is_join(name):
        return "a join with a table (Flow.join_table)"
    if function_names.is_calls(name):
        return "calls of another service (Flow.enrich)"
    if function_names.is_map(name):
        return f"Flow.map with {function_names.function_of_map(name)}"
    return f"the function {name}"

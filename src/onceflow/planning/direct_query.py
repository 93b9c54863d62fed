"""Which queries the direct engine can run: reads its plan from Spark's, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.spark import jvm, plan_columns, plans, queries
from onceflow.spark.plan_columns import ComputedColumn, ConstantColumn
from onceflow.task.direct_plan import (
    SOURCE_TYPES,
    Attribute,
    Constant,
    DirectPlan,
    DirectSource,
    MapRows,
    Select,
)

#: Functions of ``Flow.map``, by their names in plans.
Maps = Mapping[str, Callable[[pa.RecordBatch], pa.RecordBatch]]

_NAMES_ONLY = ("SubqueryAlias", "View")
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
# What users call the operators of a plan.
_OPERATORS = {
    "Filter": "a filter (where)",
    "Generate": "explode or another function that makes several rows of one",
    "Join": "a join",
    "EventTimeWatermark": "a watermark (withWatermark)",
    "MapInPandas": "mapInPandas",
    "Repartition": "repartition or coalesce",
    "RepartitionByExpression": "a repartition by columns",
    "Sort": "a sort",
    "Window": "a window function",
    "Sample": "a sample",
    "Expand": "several groupings",
    "WithCTE": "a WITH clause",
    **dict(queries.STATEFUL.items()),
}


class _NotDirectError(Exception):
    """Why a query is not direct."""


@dataclass(frozen=True)
class _Rows:
    """What a node of a plan yields.

    Args:
        sources: with the operators up to this node.
        ids: Spark's ids of its columns.
    """

    sources: tuple[DirectSource, ...]
    ids: list[int]


def direct_plan(node: Any, *, flow: str, maps: Maps) -> DirectPlan | str:
    """The plan by which the direct engine runs a query, or a part of one.

    Args:
        node: the root of the part, of Spark's analyzed plan. For a query with a process step: the child of the step.
        flow: the flow's name.
        maps: functions of the flow.

    Returns:
        The plan; or a text that says why there is none, such as ``the query has a filter (where)``.
    """
    try:
        rows = _rows(node, flow, maps)
        _check_topics(rows.sources)
    except _NotDirectError as reason:
        return str(reason)
    return DirectPlan(rows.sources, plan_columns.output_names(node))


def _rows(node: Any, flow: str, maps: Maps) -> _Rows:
    kind = jvm.kind(node)
    if kind == "StreamingRelationV2":
        return _Rows((_source(node, flow),), plan_columns.output_ids(node))
    if kind in _NAMES_ONLY:
        return _Rows(_rows(node.child(), flow, maps).sources, plan_columns.output_ids(node))
    if kind == "Project":
        return _selected(node, _rows(node.child(), flow, maps))
    if kind == "Union":
        names = tuple(plan_columns.output_names(node))
        children = [_rows(child, flow, maps) for child in plans.children(node)]
        sources = tuple(_named(source, names) for child in children for source in child.sources)
        return _Rows(sources, plan_columns.output_ids(node))
    if kind == "MapInArrow":
        return _mapped(node, flow, maps)
    if kind == "Filter" and plan_columns.end_of_read(node) is not None:
        raise _NotDirectError(f"topic {_source(node.child(), flow).topic} is read with until=")
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


def _named(source: DirectSource, names: tuple[str, ...]) -> DirectSource:
    """A side of a union: its columns are taken by their places, and the first side names them."""
    if source.columns == names:
        return source
    return source.then(Select(tuple(Attribute(name, at) for at, name in enumerate(names))))


def _selected(node: Any, below: _Rows) -> _Rows:
    columns: list[Attribute | Constant] = []
    for column in plan_columns.projected(node):
        if isinstance(column, ComputedColumn):
            raise _NotDirectError(f"column {column.name} is computed: {column.text}")
        if isinstance(column, ConstantColumn):
            columns.append(_constant(column))
        elif column.expression not in below.ids:
            raise _NotDirectError(f"column {column.name} is not a column of a topic")
        else:
            columns.append(Attribute(column.name, below.ids.index(column.expression), column.cast))
    select = Select(tuple(columns))
    return _Rows(tuple(source.then(select) for source in below.sources), plan_columns.output_ids(node))


def _constant(column: ConstantColumn) -> Constant:
    kind = _CONSTANT_TYPES.get(column.kind)
    if kind is None and column.value is None:
        kind = _NULL_TYPES.get(column.kind)
    if kind is None:
        raise _NotDirectError(f"column {column.name} is a constant of type {column.kind}")
    return Constant(column.name, column.value, kind)


def _mapped(node: Any, flow: str, maps: Maps) -> _Rows:
    name = str(node.functionExpr().name())
    if name not in maps:
        raise _NotDirectError(f"the query has {_of_function(name)}")
    below = _rows(node.child(), flow, maps)
    operator = MapRows(plan_columns.output_names(node.child()), plan_columns.output_names(node), maps[name])
    return _Rows(tuple(source.then(operator) for source in below.sources), plan_columns.output_ids(node))


def _of_function(name: str) -> str:
    """What a user calls a function over Arrow batches that is not from ``Flow.map``."""
    if queries.is_step(name):
        return "a process step whose outputs go through operators, or several process steps"
    if queries.is_join(name):
        return "a join with a table (Flow.join_table)"
    if queries.is_calls(name):
        return "calls of another service (Flow.enrich)"
    if queries.is_map(name):
        return f"Flow.map with {queries.function_of_map(name)}, which was made before an earlier run of the flow"
    return f"mapInArrow with {name}, which is not from Flow.map"


def _check_topics(sources: tuple[DirectSource, ...]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.topic in seen:
            raise _NotDirectError(f"the query reads topic {source.topic} twice")
        seen.add(source.topic)

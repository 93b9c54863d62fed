"""Spark's logical operators, and the properties of each that decide how a query is run: one table.

An operator that is not in the table has none of the properties.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """What is known of an operator.

    Args:
        word: what users call it, with an article.
        stateful: whether it keeps state between micro-batches when its input is a stream (Spark:
            ``UnsupportedOperationChecker``, and the stateful operators of ``IncrementalExecution``).
        narrow: whether its tasks are those of its child, one to one and each run once (Spark: the physical operators
            that return ``child.execute().mapPartitions...``). Below it a process step can tell its partitions from its
            task.
        row_by_row: whether it looks at one row at a time, and does the same in whichever task it runs. Of a name for a
            part of a query, only what is in that part counts.
        same_rows: whether rows go through as they are, where tasks are not chosen by the query. A watermark alone has
            no effect.
        names_only: whether it is nothing but another name for the rows.
        per_batch: whether it needs nothing but the rows of one batch, and rows that are not from a stream. Then Spark
            can evaluate it for the rows that the driver has.
        passes_numbers: whether it can have one more column of its child, such as the number of a row.
        python: whether its rows are what a Python function makes of batches.
    """

    word: str = ""
    stateful: bool = False
    narrow: bool = False
    row_by_row: bool = False
    same_rows: bool = False
    names_only: bool = False
    per_batch: bool = False
    passes_numbers: bool = False
    python: bool = False


_ROWS = {"narrow": True, "row_by_row": True, "per_batch": True, "passes_numbers": True}
_PYTHON = {"narrow": True, "per_batch": True, "python": True}

#: By the name of the class, the newest one if Spark has renamed it.
OPERATORS: dict[str, Operator] = {
    "StreamingRelationV2": Operator("a source", row_by_row=True),
    "Project": Operator("a projection", **_ROWS),
    "Filter": Operator("a filter", **_ROWS),
    "Generate": Operator("a generator", **_ROWS),
    "SubqueryAlias": Operator("an alias", **_ROWS, same_rows=True, names_only=True),
    "View": Operator("a view", row_by_row=True, per_batch=True, same_rows=True, names_only=True),
    "EventTimeWatermark": Operator("a watermark", narrow=True, same_rows=True),
    "ResolvedHint": Operator("a hint", same_rows=True),
    "Repartition": Operator("repartition", same_rows=True),
    "RepartitionByExpression": Operator("repartition", same_rows=True),
    "RebalancePartitions": Operator("rebalance", same_rows=True),
    "MapInArrow": Operator("mapInArrow", **_PYTHON),
    "MapInPandas": Operator("mapInPandas", **_PYTHON),
    "Union": Operator("a union", row_by_row=True),
    "Join": Operator("a join", per_batch=True),
    "LateralJoin": Operator("a lateral join", per_batch=True),
    "WithCTE": Operator("a WITH clause", row_by_row=True),
    "CTERelationDef": Operator("a WITH clause", row_by_row=True),
    "CTERelationRef": Operator("a WITH clause", row_by_row=True),
    "Sort": Operator("a sort"),
    "Window": Operator("a window function"),
    "Sample": Operator("a sample"),
    "Expand": Operator("several groupings", narrow=True, row_by_row=True, per_batch=True),
    "CollectMetrics": Operator("observe"),
    "Aggregate": Operator("an aggregation", stateful=True),
    "Deduplicate": Operator("dropDuplicates", stateful=True),
    "DeduplicateWithinWatermark": Operator("dropDuplicatesWithinWatermark", stateful=True),
    "Distinct": Operator("distinct", stateful=True),
    "Except": Operator("subtract", stateful=True),
    "Intersect": Operator("intersect", stateful=True),
    "FlatMapGroupsWithState": Operator("flatMapGroupsWithState", stateful=True),
    "FlatMapGroupsInPandasWithState": Operator("applyInPandasWithState", stateful=True),
    "TransformWithState": Operator("transformWithState", stateful=True),
    "TransformWithStateInPySpark": Operator("transformWithState", stateful=True),
    "TransformWithStateInPandas": Operator("transformWithStateInPandas", stateful=True),
    "GlobalLimit": Operator("limit", stateful=True),
    "Limit": Operator("limit", stateful=True),
    "Tail": Operator("tail", stateful=True),
}
_UNKNOWN = Operator()


def operator(kind: str) -> Operator:
    """The properties of an operator, by the name of its class."""
    return OPERATORS.get(kind, _UNKNOWN)

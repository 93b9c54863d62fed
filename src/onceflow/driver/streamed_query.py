"""A query, divided into its process steps with what follows them, and what goes into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.state_step import StateStep
from onceflow.errors import OptionError
from onceflow.planning.direct_query import Functions, direct_plan
from onceflow.planning.options import EXACTLY_ONCE, SinkOptions
from onceflow.planning.ownership import Columns
from onceflow.planning.placement import QueryShape, StepShape
from onceflow.planning.process import Step
from onceflow.planning.step_tree import StepQuery, Tree, source_frame, stripped, tree_of
from onceflow.protocol.progress import Progress
from onceflow.spark import batch_plan, plans, queries
from onceflow.spark.master import current_cores, is_local
from onceflow.state.table_state import TableState
from onceflow.task.direct_plan import DirectPlan
from onceflow.task.state_tasks import Collected


@dataclass(frozen=True)
class StreamedQuery:
    """A query as the sink runs it.

    Args:
        df: its rows that are written, or that go into the process steps.
        state: the process steps and the operators behind them, if there are any.
        direct: the query as the direct engine runs it, without a step that writes what it yields; or why it cannot.
        node: the root of the analyzed plan of the rows that are written, or that go into the steps.
    """

    df: DataFrame
    options: SinkOptions
    state: StateStep | None
    direct: DirectPlan | str
    node: Any


def divide(
    df: DataFrame,
    options: SinkOptions,
    columns: Columns,
    steps: Mapping[str, Step],
    progress: Progress,
    *,
    flow: str,
    source_partitions: Mapping[str, list[int]],
    functions: Functions,
) -> StreamedQuery:
    """Divide a query.

    In every batch whose records tasks read, the driver runs the steps with a number of tasks that suits the batch, and
    then the operators that follow them.

    Args:
        steps: the flow's, by their tables. The query may use some of them only.
        progress: the flow's, as committed.
        functions: for the direct engine.

    Raises:
        UnsupportedQueryError: the query cannot be divided in this way.
        OptionError: the partitioner cannot be used for the outputs of a step.
    """
    found = tree_of(df, steps, flow)
    if found is None:
        return _without_steps(df, options, columns, functions)
    tree, branches = found
    plans.check_streaming(df, flow)
    tree = _without_needless(df.sparkSession, tree, options.partitioner, flow)
    used = {node.table: steps[node.table] for node in tree.all_steps()}
    streamed = source_frame(df.sparkSession, branches)
    query = StepQuery(
        tree=tree,
        branches=branches,
        written_as_is=tree.step is not None and len(used) == 1,
        topic=options.topic,
        topic_has_side_outputs=any(options.topic in step.spec.side_topics for step in used.values()),
        columns=columns,
        collected={table: df.sparkSession.sparkContext.accumulator([], Collected()) for table in used},
    )
    shape = QueryShape(
        steps=tuple(
            StepShape(node.table, used[node.table].spec.topics.partitions, node.input.branch is not None)
            for node in tree.all_steps()
        ),
        written_as_is=query.written_as_is,
        needs_exchange=_needs_exchange(query),
        local=is_local(df.sparkSession),
    )
    transactions = options.guarantee == EXACTLY_ONCE
    tables = _tables(tree, used, progress, source_partitions, transactions=transactions)
    state = StateStep(query, shape, tables, cores=current_cores(df.sparkSession))
    direct = _with_steps(query, functions)
    return StreamedQuery(streamed, options, state, direct, plans.analyzed(streamed))


def _without_steps(df: DataFrame, options: SinkOptions, columns: Columns, functions: Functions) -> StreamedQuery:
    # Other columns may have types that only Spark has.
    query = whole(df, options, functions, df if columns.whole else df.select(*[f"`{name}`" for name in columns.taken]))
    if isinstance(query.direct, DirectPlan) and query.direct.needs_frame and options.partitioner == "source":
        why = (
            'partitioner="source" goes with columns as they were read. Select the column partition, and leave '
            "partitioner out: then rows of any query go to the partition that they were read from"
        )
        return replace(query, direct=why)
    return query


def whole(df: DataFrame, options: SinkOptions, functions: Functions, written: DataFrame | None = None) -> StreamedQuery:
    """A query without process steps.

    Args:
        written: those columns of it that are written; None: all.
    """
    node = batch_plan.inlined(df.sparkSession, plans.analyzed(df if written is None else written))
    direct = direct_plan(node, functions)
    if isinstance(direct, DirectPlan) and direct.needs_frame:
        plans.check_streaming(df, functions.flow)  # Spark itself never sees a stream
    return StreamedQuery(df, options, None, direct, node)


def _with_steps(query: StepQuery, functions: Functions) -> DirectPlan | str:
    """What goes into the only step, if that writes what it yields; else the query with its steps."""
    step = query.tree.step
    node = step.input.plan if query.written_as_is and step is not None else query.tree.plan
    return direct_plan(node, functions)


def _without_needless(spark: SparkSession, tree: Tree, partitioner: str, flow: str) -> Tree:
    """The tree without operators that change nothing.

    With another partitioner than ``key`` they stay: it can place rows of operators, but not the outputs of a step.
    """
    if partitioner == "key":
        return stripped(spark, tree)
    if tree.step is None:
        return tree
    raise OptionError(
        f"partitioner={partitioner!r} cannot be used for the outputs of Flow.process",
        flow=flow,
        next_step='leave it out: outputs are placed by their keys, partitioner="key"',
    )


def _tables(
    tree: Tree,
    steps: Mapping[str, Step],
    progress: Progress,
    source_partitions: Mapping[str, list[int]],
    *,
    transactions: bool,
) -> dict[str, TableState]:
    """What the driver knows of each step's table, at the start."""
    found = {}
    for node in tree.all_steps():
        # The watermark depends only on the sources that reach the step: rows of another step have no event time.
        topics = set() if node.input.steps else queries.topics_read(node.input.plan) & source_partitions.keys()
        step = steps[node.table]
        found[node.table] = TableState(
            step.spec,
            progress,
            source_partitions=[(topic, number) for topic in sorted(topics) for number in source_partitions[topic]],
            lateness_ms=step.lateness_ms,
            idle_s=step.idle_s,
            transactions=transactions,
        )
    return found


def _needs_exchange(query: StepQuery) -> bool:
    """See `QueryShape`."""
    (narrow, *others) = [node.narrow for node in query.tree.all_steps()]
    own_topic = query.columns.topic and not _is_topic_of_step(query.tree)
    return bool(others) or not narrow or own_topic or query.topic_has_side_outputs


def _is_topic_of_step(tree: Tree) -> bool:
    """Whether the query's ``topic`` column is that of a step, unchanged: then it is null in every row."""
    own = {queries.attribute(plans.at(tree.plan, node.path), "topic") for node in tree.steps}
    return queries.attribute(tree.plan, "topic") in own

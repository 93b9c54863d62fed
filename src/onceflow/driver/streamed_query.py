"""A query, divided into what Spark streams and what the driver adds to that in every batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.state_step import StateStep
from onceflow.errors import OptionError
from onceflow.planning.direct_query import Functions, direct_plan
from onceflow.planning.options import AT_MOST_ONCE, EXACTLY_ONCE, SinkOptions
from onceflow.planning.ownership import Columns
from onceflow.planning.placement import SMALL_BATCH_ROWS, QueryShape, StepShape
from onceflow.planning.process import Step, needs_clock
from onceflow.planning.step_frames import with_clock
from onceflow.planning.step_tree import StepNode, StepQuery, Tree, source_frame, stripped, tree_of
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
        df: what Spark streams.
        columns: those of the rows that are written.
        state: the process steps and the operators behind them, if there are any.
        direct: the query as the direct engine runs it, without a step that writes what it yields; or why it cannot.
        node: the root of the analyzed plan of the rows that are written, or that go into the steps.
    """

    df: DataFrame
    options: SinkOptions
    columns: Columns
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
    clock: bool,
    functions: Functions,
) -> StreamedQuery:
    """Divide a query.

    Without process steps Spark streams all of it. With steps it streams the rows that go into them. In every batch, the
    driver runs the steps with a number of tasks that suits the batch, and then the operators that follow them.

    Args:
        steps: the flow's, by their tables. The query may use some of them only.
        progress: the flow's, as committed.
        clock: whether a flow with timers also gets batches when there are no data.
        functions: for the direct engine.

    Raises:
        UnsupportedQueryError: the query cannot be divided in this way.
        OptionError: the partitioner cannot be used for the outputs of a step.
    """
    found = tree_of(df, steps, flow)
    options = _driver_rows(df, options)
    if found is None:
        return _without_steps(df, options, columns, functions)
    tree, branches = found
    plans.check_streaming(df, flow)
    tree = _without_needless(df.sparkSession, tree, options.partitioner, flow)
    used = {node.table: steps[node.table] for node in tree.all_steps()}
    streamed = source_frame(df.sparkSession, branches)
    source_keys = len(branches) == 1 and (
        queries.has_source_keys(streamed) or all(step.source_keys for step in used.values())
    )
    clock = clock and any(needs_clock(step.spec) for step in used.values())
    if clock:
        streamed = with_clock(streamed, flow)
    query = StepQuery(
        tree=tree,
        branches=branches,
        written_as_is=tree.step is not None and len(used) == 1,
        topic=options.topic,
        topic_has_side_outputs=any(options.topic in step.spec.side_topics for step in used.values()),
        columns=columns,
        collected={table: df.sparkSession.sparkContext.accumulator([], Collected()) for table in used},
    )
    placed = source_keys and "partition" in streamed.columns
    shape = QueryShape(
        steps=tuple(_shape(node, used[node.table], source_partitions, placed) for node in tree.all_steps()),
        written_as_is=query.written_as_is,
        needs_exchange=_needs_exchange(query),
        local=is_local(df.sparkSession),
        small_batch_rows=SMALL_BATCH_ROWS if options.small_batch_rows is None else options.small_batch_rows,
        clock=clock,
    )
    transactions = options.guarantee == EXACTLY_ONCE
    tables = _tables(tree, used, progress, source_partitions, transactions=transactions)
    state = StateStep(query, shape, tables, cores=current_cores(df.sparkSession))
    direct = _with_steps(query, options, functions)
    return StreamedQuery(streamed, options, columns, state, direct, plans.analyzed(streamed))


def _without_steps(df: DataFrame, options: SinkOptions, columns: Columns, functions: Functions) -> StreamedQuery:
    # Other columns may have types that only Spark has.
    written = df if columns.whole else df.select(*[f"`{name}`" for name in columns.taken])
    node = batch_plan.inlined(df.sparkSession, plans.analyzed(written))
    direct = _planned(node, options, functions)
    if isinstance(direct, DirectPlan) and direct.needs_frame:
        plans.check_streaming(df, functions.flow)  # Spark itself never sees a stream
        if options.partitioner == "source":
            direct = "rows that Spark makes stay in their partitions with its own Kafka source alone"
    return StreamedQuery(df, options, columns, None, direct, node)


def _planned(node: Any, options: SinkOptions, functions: Functions) -> DirectPlan | str:
    joins = any(queries.is_join(name) for name in functions.arrow)
    if joins and options.guarantee == AT_MOST_ONCE:
        return "with at_most_once, the copies of a joined table are prepared where tasks run"
    return direct_plan(node, functions)


def _with_steps(query: StepQuery, options: SinkOptions, functions: Functions) -> DirectPlan | str:
    """What goes into the only step, if that writes what it yields; else the query with its steps."""
    step = query.tree.step
    node = step.input.plan if query.written_as_is and step is not None else query.tree.plan
    return _planned(node, options, functions)


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


def _shape(node: StepNode, step: Step, source_partitions: Mapping[str, list[int]], source_keys: bool) -> StepShape:
    """A step, for its placement.

    Args:
        source_partitions: of each source topic.
        source_keys: whether rows of the stream have the keys and the partitions of their source.
    """
    partitions = step.spec.topics.partitions
    from_stream = node.input.branch is not None
    source_counts = [len(numbers) for numbers in source_partitions.values()]
    co_partitionable = from_stream and source_keys and source_counts == [partitions]
    return StepShape(node.table, partitions, from_stream, co_partitionable)


def _needs_exchange(query: StepQuery) -> bool:
    """See `QueryShape`."""
    (narrow, *others) = [node.narrow for node in query.tree.all_steps()]
    own_topic = query.columns.topic and not _is_topic_of_step(query.tree)
    return bool(others) or not narrow or own_topic or query.topic_has_side_outputs


def _driver_rows(df: DataFrame, options: SinkOptions) -> SinkOptions:
    """The options. If few rows may become any number of rows, no batch counts as small."""
    if options.small_batch_rows is None and queries.may_make_many(df):
        return replace(options, small_batch_rows=0)
    return options


def _is_topic_of_step(tree: Tree) -> bool:
    """Whether the query's ``topic`` column is that of a step, unchanged: then it is null in every row."""
    own = {queries.attribute(plans.at(tree.plan, node.path), "topic") for node in tree.steps}
    return queries.attribute(tree.plan, "topic") in own

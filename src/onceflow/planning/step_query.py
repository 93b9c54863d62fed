"""A query with process steps, made ready to run: what Spark streams, and what every batch puts on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from onceflow.driver.delivery import EXACTLY_ONCE
from onceflow.driver.state_step import StateStep, StepQuery
from onceflow.errors import OptionError, UnsupportedQueryError
from onceflow.planning.options import SinkOptions
from onceflow.planning.ownership import Columns
from onceflow.planning.process import Step, needs_clock
from onceflow.planning.step_frames import with_clock
from onceflow.planning.step_tree import Tree, source_frame, tree_of
from onceflow.protocol.progress import Progress
from onceflow.spark import plans, queries
from onceflow.spark.master import is_local
from onceflow.state.table_state import TableState
from onceflow.task.state_tasks import Collected, StepPlaceholder
from onceflow.task.step_outputs import OUTPUT_SPARK_SCHEMA

# What dynamic allocation may add to the cores that are there: without tasks that wait it would never add any.
_GROWTH = 4


@dataclass(frozen=True)
class Query:
    """A query as the sink runs it.

    Args:
        df: what Spark streams.
    """

    df: DataFrame
    options: SinkOptions
    columns: Columns
    state: StateStep | None


def step_frame(rows: DataFrame, table: str) -> DataFrame:
    """What ``Flow.process`` returns: the place of its step in the plan, with the columns of its outputs."""
    return rows.mapInArrow(StepPlaceholder(table), OUTPUT_SPARK_SCHEMA)


def current_cores(spark: SparkSession) -> Callable[[], int]:
    """Asks how many tasks Spark runs at once: at this moment, for executors come and go."""
    context = spark.sparkContext
    # Not by SparkContext.getConf, which copies every setting from the JVM, one by one.
    grows = str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"

    def cores() -> int:
        return context.defaultParallelism * (_GROWTH if grows else 1)

    return cores


def wire(
    df: DataFrame,
    options: SinkOptions,
    columns: Columns,
    steps: Mapping[str, Step],
    progress: Progress,
    *,
    flow: str,
    source_partitions: Mapping[str, list[int]],
    clock: bool,
) -> Query:
    """Divide a query into what Spark streams and what is done in every batch.

    Without process steps Spark streams all of it. Else it streams the rows that go into the steps; the sink runs these
    in every batch, with as many tasks as it is worth, and puts the operators behind them on top.

    Args:
        clock: whether a flow with timers is woken up when there are no data.

    Raises:
        UnsupportedQueryError: the query cannot be run so.
        OptionError: the partitioner does not go with the outputs of a step.
    """
    found = tree_of(df, steps, flow)
    options = _driver_rows(df, options)
    if found is None:
        return Query(df, options, columns, None)
    tree, branches = found
    plans.check_streaming(df, flow)
    nodes = {node.table: node for node in tree.all_steps()}
    used = {table: steps[table] for table in nodes}
    if tree.step is not None and options.partitioner != "key":
        raise OptionError(
            f"partitioner={options.partitioner!r} does not go with the outputs of Flow.process",
            flow=flow,
            next_step='leave it out: outputs are placed by their keys, partitioner="key"',
        )
    streamed = source_frame(df.sparkSession, branches)
    source_keys = len(branches) == 1 and queries.has_source_keys(streamed)
    clock = clock and any(needs_clock(step.spec) for step in used.values())
    if clock:
        streamed = with_clock(streamed, flow)
    context = df.sparkSession.sparkContext
    query = StepQuery(
        tree=tree,
        branches=branches,
        topic=options.topic,
        columns=columns,
        own_topic=columns.topic and not _is_topic_of_step(tree),
        collected={table: context.accumulator([], Collected()) for table in used},
    )

    def table(name: str, step: Step) -> TableState:
        # Event time waits for the sources that reach the step, and for no other. What another step yields has no place.
        below = nodes[name].input
        topics = set() if below.steps else queries.topics_read(below.plan) & source_partitions.keys()
        places = [(topic, partition) for topic in sorted(topics) for partition in source_partitions[topic]]
        return TableState(
            step.spec, progress, source_partitions=places, lateness_ms=step.lateness_ms, idle_s=step.idle_s
        )

    state = StateStep(
        query,
        {name: table(name, step) for name, step in used.items()},
        cores=current_cores(df.sparkSession),
        local=is_local(df.sparkSession),
        small_batch_rows=options.small_batch_rows,
        source_partitions={name: len(partitions) for name, partitions in source_partitions.items()},
        source_keys=source_keys,
        clock=clock,
    )
    return Query(streamed, options, columns, state)


def _driver_rows(df: DataFrame, options: SinkOptions) -> SinkOptions:
    """The bound of batches that the driver writes, where few rows may become any number of them."""
    if options.small_batch_rows is None and queries.may_make_many(df):
        return replace(options, small_batch_rows=0)
    return options


def _is_topic_of_step(tree: Tree) -> bool:
    """Whether the query's ``topic`` column is that of a step, handed on: then it is null in every row."""
    own = {queries.attribute(plans.at(tree.plan, node.path), "topic") for node in tree.steps}
    return queries.attribute(tree.plan, "topic") in own


def check_goes_with(
    df: DataFrame, steps: Mapping[str, Step], guarantee: str, checkpoint: str | None, *, flow: str
) -> None:
    """Refuse process steps where they could not keep what they promise.

    Raises:
        UnsupportedQueryError: with a weaker guarantee, or beside Spark's own state.
    """
    if not steps or tree_of(df, steps, flow) is None:
        return
    if guarantee != EXACTLY_ONCE:
        raise UnsupportedQueryError(
            f"Flow.process does not go with guarantee={guarantee!r}",
            flow=flow,
            detail="its state and its outputs are committed together, or not at all",
            next_step="leave guarantee out; only queries without Flow.process have a choice",
        )
    if checkpoint is not None:
        raise UnsupportedQueryError(
            "Flow.process does not go with checkpoint=: its state is in Kafka, Spark's in the checkpoint",
            flow=flow,
            next_step="divide the query into two flows: one writes a topic that the other one reads",
        )

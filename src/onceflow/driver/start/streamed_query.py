"""A query, divided into its process steps with what follows them, and what goes into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from onceflow.driver.batch.driver_program import DriverProgram, Functions, driver_program
from onceflow.driver.step.cluster_homes import homes_of
from onceflow.driver.step.state_step import StateStep
from onceflow.driver.step.table_state import TableState
from onceflow.errors import OptionError
from onceflow.planning.direct_plan import DirectPlan
from onceflow.planning.direct_query import direct_plan
from onceflow.planning.engine import DRIVER
from onceflow.planning.options import EXACTLY_ONCE, SinkOptions
from onceflow.planning.placement import QueryShape, StepShape
from onceflow.planning.process import Step
from onceflow.planning.step_tree import StepQuery, Tree, source_frame, stripped, tree_of
from onceflow.planning.write_options import CheckedWrite
from onceflow.protocol.progress import Progress
from onceflow.spark import batch_plan, plans
from onceflow.spark.master import current_cores, is_local
from onceflow.spark.query_facts import QueryFacts, node_of, topics_read
from onceflow.task.sink_form import Form, SinkForm
from onceflow.task.state_tasks import Collected

_Bound = tuple[DirectPlan | str, DriverProgram | None]


@dataclass(frozen=True)
class StreamedQuery:
    """A query as the sink runs it.

    Args:
        df: its rows that are written, or that go into the process steps.
        state: the process steps and the operators behind them, if there are any.
        node: the root of the analyzed plan of the rows that are written, or that go into the steps.
        plan: the query as the direct engine runs it, without a step that writes what it yields; or why it cannot.
        program: makes the rows in the driver; None: Spark's micro-batches run the query.
    """

    df: DataFrame
    options: SinkOptions
    state: StateStep | None
    node: Any
    plan: DirectPlan | str
    program: DriverProgram | None

    def planned(self) -> tuple[DirectPlan, DriverProgram]:
        """The plan and the program of the direct engine, which has been chosen for the query."""
        if isinstance(self.plan, str) or self.program is None:
            raise RuntimeError("the query has no program for the direct engine")
        return self.plan, self.program


def divide(
    write: CheckedWrite,
    steps: Mapping[str, Step],
    progress: Progress,
    *,
    flow: str,
    source_partitions: Mapping[str, list[int]],
    functions: Functions,
    output_partitions: int | None = None,
) -> StreamedQuery:
    """Divide a query.

    In every batch whose records tasks read, the driver runs the steps with a number of tasks that suits the batch, and
    then the operators that follow them.

    Args:
        steps: the flow's, by their tables. The query may use some of them only.
        progress: the flow's, as committed.
        functions: for the direct engine.
        output_partitions: partition count of the output topic; None: rows name theirs.

    Raises:
        UnsupportedQueryError: the query cannot be divided in this way.
        OptionError: the partitioner cannot be used for the outputs of a step.
    """
    df, facts, options, columns = write.df, write.facts, write.sink, write.columns
    form = SinkForm(columns.taken, columns.cast, options.partitioner == "source")
    found = tree_of(facts, steps, flow)
    if found is None:
        # Other columns may have types that only Spark has.
        taken = None if columns.whole else columns.taken
        return _without_steps(df, facts, options, form, functions, flow, taken)
    tree, branches = found
    plans.check_streaming(df, flow)
    tree = _without_needless(tree, options.partitioner, flow)
    used = {node.table: steps[node.table] for node in tree.all_steps()}
    plan = plans.analyzed(df)
    query = StepQuery(
        plan=plan,
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
    homes = None
    if not shape.local and options.engine != DRIVER:  # else the state is where the driver is
        counts = [len(partitions) for partitions in source_partitions.values()]
        homes = homes_of(df.sparkSession, tables, used, sources=counts, output=output_partitions, flow=flow)
    state = StateStep(query, shape, tables, cores=current_cores(df.sparkSession), homes=homes)
    streamed = source_frame(df.sparkSession, plan, branches)
    return StreamedQuery(streamed, options, state, plans.analyzed(streamed), *_with_steps(query, form, functions, flow))


def _without_steps(
    df: DataFrame,
    facts: QueryFacts,
    options: SinkOptions,
    form: SinkForm,
    functions: Functions,
    flow: str,
    taken: tuple[str, ...] | None,
) -> StreamedQuery:
    query = whole(df, facts, options, form, functions, flow, taken)
    if isinstance(query.plan, DirectPlan) and query.plan.needs_frame and options.partitioner == "source":
        why = (
            'partitioner="source" goes with columns as they were read. Select the column partition, and leave '
            "partitioner out: then rows of any query go to the partition that they were read from"
        )
        return replace(query, plan=why)
    return query


def whole(
    df: DataFrame,
    facts: QueryFacts,
    options: SinkOptions,
    form: Form,
    functions: Functions,
    flow: str,
    taken: tuple[str, ...] | None = None,
) -> StreamedQuery:
    """A query without process steps.

    Args:
        form: of the rows.
        taken: those columns that are written; None: all.
    """
    spark, root = df.sparkSession, facts.root
    node = plans.analyzed(df if taken is None else df.select(*[f"`{name}`" for name in taken]))
    if facts.has_with:
        node = batch_plan.inlined(spark, node)
        root = node_of(spark, node)
    elif taken is not None:
        root = root.selected(taken)
    plan = direct_plan(root, flow, functions.names)
    if isinstance(plan, DirectPlan) and plan.needs_frame:
        plans.check_streaming(df, flow)  # Spark itself never sees a stream
    return StreamedQuery(df, options, None, node, *_bound(plan, node, functions, form))


def _bound(plan: DirectPlan | str, node: Any, functions: Functions, form: Form | None) -> _Bound:
    """The plan, or why it cannot be run; and its program."""
    if isinstance(plan, str) or functions.evaluate is None:
        return plan, None
    program = driver_program(plan, node, functions, form)
    return (program, None) if isinstance(program, str) else (plan, program)


def _with_steps(query: StepQuery, form: SinkForm, functions: Functions, flow: str) -> _Bound:
    """What goes into the only step, if that writes what it yields; else the query with its steps."""
    step = query.tree.step
    if query.written_as_is and step is not None:
        return _bound(direct_plan(step.input.root, flow, functions.names), query.plan, functions, None)
    plan = direct_plan(query.tree.root, flow, functions.names)
    written = plan.only(form.taken) if isinstance(plan, DirectPlan) else plan
    return _bound(written, query.plan, functions, form)


def _without_needless(tree: Tree, partitioner: str, flow: str) -> Tree:
    """The tree without operators that change nothing.

    With another partitioner than ``key`` they stay: it can place rows of operators, but not the outputs of a step.
    """
    if partitioner == "key":
        return stripped(tree)
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
        topics = set() if node.input.steps else topics_read(node.input.root) & source_partitions.keys()
        step = steps[node.table]
        found[node.table] = TableState(
            step.spec,
            progress,
            source_partitions=[(topic, number) for topic in sorted(topics) for number in source_partitions[topic]],
            lateness_ms=step.lateness_ms,
            idle_s=step.idle_s,
            clock_s=step.clock_s,
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
    own = {step.node.id_of("topic") for step in tree.steps}
    return tree.root.id_of("topic") in own

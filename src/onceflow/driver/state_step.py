"""The driver's part of ``Flow.process`` in a batch: what tasks are told, where they run, what comes back.

A step runs in one of three ways, chosen anew for every batch:

- *by the driver*, when the batch is small and the master local;
- *fused*: state tasks write their outputs themselves, when the step's outputs are written as they are and are
  co-partitioned with the table;
- *in stages*: the outputs are rows again, other operators may follow, and write tasks write them.

Dead letters, late records and records that name a topic of their own are side outputs: no operator behind the step ever
sees them. State tasks write them when they are co-partitioned, the driver when they are few. Else they go round the
operators, to the write tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from onceflow.client.cluster import Cluster
from onceflow.client.settings import ClientSettings
from onceflow.driver.offset_log import SourceRange
from onceflow.driver.preparing import prepare
from onceflow.errors import OptionError
from onceflow.messages import (
    DRIVER,
    REPORT_SPARK_SCHEMA,
    NotColocatedError,
    NotCopartitionedError,
    PrepareOrder,
    Report,
    Routing,
    StateOrder,
    TaskReport,
    WriteOrder,
    Writes,
    decoded,
    from_rows,
)
from onceflow.planning.ownership import Columns, check_columns
from onceflow.planning.step_frames import (
    partition_of_key,
    sink_columns,
    task_count,
    with_default_topic,
)
from onceflow.planning.step_tree import StepNode, Tree, branch_frames
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.progress import Progress
from onceflow.spark import jvm, plans, queries
from onceflow.spark.collect import collect
from onceflow.spark.task_shuffle import repartition_by_task
from onceflow.state.dead_letter_limit import counted
from onceflow.state.local.format import Commit
from onceflow.state.local.opening import settle
from onceflow.state.local.prepare import Prepared
from onceflow.state.spec import Moment, ProcessSpec, StateReport
from onceflow.state.table_state import TableState
from onceflow.task.row_writer import write_rows
from onceflow.task.state_tasks import FusedTask, RowsTask, run_fused
from onceflow.task.step_outputs import OUTPUT_SPARK_SCHEMA, unpacked, written_rows

log = logging.getLogger("onceflow.state")

_TASK_ROWS = 10_000
# Two Python tasks cost more than the driver needs for so many rows (more than for a plain write: opening stores).
_SMALL_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Part:
    """Reports of the tasks of one stage, or of the driver.

    Args:
        tasks: how many there must be; None: the driver wrote.
        shuffled: whether Spark may have attempted the stage again.
    """

    reports: Sequence[Report]
    tasks: int | None
    shuffled: bool


@dataclass(frozen=True)
class Outgoing:
    """The rows that the sink is to write, with what it has to know of them.

    Args:
        topic: for all of them; None: each names its own.
        tasks: of the state stages in front, for people.
    """

    df: DataFrame
    columns: Columns
    topic: str | None
    tasks: str


@dataclass
class StepQuery:
    """The process steps of one query, as they stand in its plan.

    Args:
        tree, branches: see ``step_tree.tree_of``.
        topic: where outputs go that name no topic.
        columns: of the query's DataFrame.
        own_topic: whether the query sets its ``topic`` column behind the step.
        collected: per table, where the reports of staged tasks arrive.
    """

    tree: Tree
    branches: list[Any]
    topic: str | None
    columns: Columns
    own_topic: bool
    collected: Mapping[str, Any]


class StateStep:
    """The process steps of one query.

    Args:
        tables: of all steps, by name.
        cores: how many tasks Spark runs at once, now.
        local: whether tasks run on this machine, so that the driver may process small batches itself.
        source_keys: whether the keys of the first step's input are those of the source: else they are not in its
            partitions.
        source_partitions: partition count of every source topic.
        clock: whether the query is woken up for timers: then some batches have the clock's rows (none) in their plan.
    """

    def __init__(
        self,
        query: StepQuery,
        tables: Mapping[str, TableState],
        *,
        cores: Callable[[], int],
        local: bool,
        small_batch_rows: int | None,
        source_partitions: Mapping[str, int],
        source_keys: bool,
        clock: bool,
    ) -> None:
        self._query = query
        self._by_name = dict(tables)
        self.tables = list(tables.values())
        self._cores = cores
        self._local = local
        self._small_batch_rows = _SMALL_BATCH_ROWS if small_batch_rows is None else small_batch_rows
        self._source_partitions = dict(source_partitions)
        self._clock = clock
        # The only step, when its outputs are written as they are.
        self._whole = query.tree.step if len(tables) == 1 else None
        self._fused = self._whole is not None
        self._by_source: bool | None = None if source_keys and len(query.branches) == 1 else False
        self._exchanged = self._whole is None and self._needs_exchange()
        self._looked_at_plan = self._left_out = False
        self._moments: dict[str, Moment] = {}
        self._reports: dict[str, Sequence[StateReport]] = {}
        self._brought_up: dict[str, Sequence[Prepared]] = {}
        self._due: dict[str, frozenset[int]] = {}
        self._staged: dict[str, int] = {}  # tables whose tasks report by an accumulator, and how many tasks

    def _needs_exchange(self) -> bool:
        """Whether side outputs have to go through the write tasks, because these may write the same topics; or
        operators that run a task of the step more than once, or several of them as one, need a shuffle in front."""
        query = self._query
        (narrow, *others) = [node.narrow for node in query.tree.all_steps()]
        return bool(others) or not narrow or query.own_topic or self._default_is_letters()

    def _default_is_letters(self) -> bool:
        specs = [table.spec for table in self.tables]
        return self._query.topic in {topic for spec in specs for topic in spec.side_topics}

    @property
    def fused(self) -> bool:
        """Whether `write` does all of a batch; else the sink writes what `outgoing` gives it."""
        return self._fused

    @property
    def topics(self) -> set[str]:
        """All topics of the tables."""
        return {name for table in self.tables for name in table.spec.topics.ids}

    @property
    def written_topics(self) -> dict[str, str]:
        """Those, and the ones that dead letters and late records go to; with what each is for."""
        letters = {topic: role for table in self.tables for topic, role in table.spec.side_topics.items()}
        return {**dict.fromkeys(self.topics, "table"), **letters}

    def are_timers_left(self) -> bool:
        """Whether more timers were due than the last batch was allowed to fire."""
        return any(table.timers_left for table in self.tables)

    def due(self, now_ms: int) -> bool:
        """Whether a batch without rows would do anything."""
        return any(table.due(now_ms) for table in self.tables)

    # ---- steps of a batch ----------------------------------------------------------------------------

    def planned(self, source: SourceRange) -> None:
        """The source range of the next batch is known."""
        news = source.news()
        for table in self.tables:
            table.planned(news)

    def prepare(
        self, df: DataFrame, settings: ClientSettings, owner: tuple[str, ProducerIdAndEpoch], *, again: bool
    ) -> None:
        """Bring large local copies up to date while nothing is written yet, see ``preparing``.

        Args:
            owner: transactional id, and the identity that it has as long as no newer driver has taken the flow over.
        """
        if not self._local:
            return
        for table in self.tables:
            moment = table.moment(-1, Commit(-1, -1, -1), 0)
            prepare(
                table, PrepareOrder(table.spec, moment, settings, *owner), df.sparkSession.sparkContext, again=again
            )

    def begin(self, batch: int, identity: ProducerIdAndEpoch, now_ms: int) -> None:
        """What this attempt is."""
        commit = Commit(batch, identity.producer_id, identity.producer_epoch)
        self._reports = {}
        self._brought_up = {}
        self._staged = {}
        for name, table in self._by_name.items():
            moment = table.moment(batch, commit, now_ms)
            self._moments[name] = moment
            self._due[name] = frozenset(table.due(moment.now_ms))

    def write(
        self,
        df: DataFrame,
        *,
        max_rows: int,
        order: WriteOrder,
        cluster: Cluster,
        on_driver: bool,
        reads_little: bool = False,
    ) -> tuple[str, list[Part]]:
        """Process the batch and write what comes out. Returns how, in words, and the reports.

        Args:
            on_driver: whether the driver may do it, if there are few rows.
            reads_little: see ``queries.reads_little``.
        """
        if self._whole is None:
            raise RuntimeError("the outputs of this query are written by the sink")
        name = self._whole.table
        base = self._order(name, order, "everything")
        if self._local and on_driver and max_rows <= self._small_batch_rows:
            rows = collect(df, interpreted=reads_little) if max_rows else []
            done = run_fused(base, DRIVER, rows, cluster)
            self._tasks_did(name, done)
            return "driver", [Part(done.written, None, False)]
        moved, tasks, base = self._moved(df, base, max_rows)
        done = from_rows(moved.mapInArrow(FusedTask(base), REPORT_SPARK_SCHEMA).collect())
        self._tasks_did(name, done)
        parts = [Part(done.written, tasks, not base.co_partitioned or jvm.has_shuffle(df))]
        if done.returned and not done.failed:
            parts.append(self._by_driver(done.returned, order, cluster))
        return f"{tasks} tasks", parts

    def outgoing(self, df: DataFrame, *, max_rows: int, order: WriteOrder) -> Outgoing:
        """The rows to be written, when operators follow a step or its outputs are not co-partitioned."""
        query = self._query
        self._staged = {}
        inputs = branch_frames(df, query.branches, max(1, self._cores()))
        stages = _Stages(self, inputs, max_rows, order)
        rows = stages.frame(query.tree)
        tasks = " + ".join(str(n) for n in self._staged.values())
        if self._whole is not None:
            outputs = with_default_topic(rows, query.topic)
            return Outgoing(outputs, check_columns(outputs.schema, topic=None, flow=order.flow), None, tasks)
        if not self._exchanged:
            if self._looked_at_plan or _runs_once(rows):
                self._looked_at_plan = True
                return Outgoing(rows, query.columns, query.topic, tasks)
            # The optimizer has left the step out: nothing it yields is wanted. Its state and its side outputs are.
            self._exchanged = True
            return self.outgoing(df, max_rows=max_rows, order=order)
        outputs = sink_columns(rows, query.columns, query.topic)
        for side in stages.sides:
            outputs = outputs.unionByName(side, allowMissingColumns=True)
        return Outgoing(outputs, check_columns(outputs.schema, topic=None, flow=order.flow), None, tasks)

    def gather(self, order: WriteOrder, cluster: Cluster) -> list[Part]:
        """What the stages in front of the sink have done; side outputs that they have returned are written."""
        parts: list[Part] = []
        returned: list[bytes] = []
        failed = False
        for table, tasks in self._staged.items():
            collected = self._query.collected[table]
            done = decoded(collected.value)
            collected.value = []
            self._left_out = self._left_out or not done.written
            self._tasks_did(table, done)
            parts.append(Part(done.written, tasks, True))
            returned += done.returned
            failed = failed or done.failed
        if returned and not failed:
            parts.append(self._by_driver(returned, order, cluster))
        return parts

    def audit(self) -> None:
        """Every partition of every table in one task, of this attempt; and no more dead letters than allowed."""
        for name, table in self._by_name.items():
            table.check(self._reports.get(name, ()), self._moments[name])

    def counted(self, what: str) -> int:
        """How many records of this attempt became ``dead_letters`` or were ``late``."""
        return sum(counted(reports, what) for reports in self._reports.values())

    def progress(self, progress: Progress) -> Progress:
        """The batch's progress, with what it says of the tables."""
        changelogs = {name: dict(ends) for name, ends in progress.changelogs.items()}
        known = dict(progress.tables)
        for name, table in self._by_name.items():
            ends, more = table.progress_after(self._reports.get(name, ()))
            changelogs |= ends
            known[name] = more
        return replace(progress, changelogs=changelogs, tables=known)

    def adopt(self) -> None:
        """The batch is committed."""
        for name, table in self._by_name.items():
            table.adopt(self._reports.get(name, ()), self._moments[name])

    def on_noop(self) -> None:
        """The batch had no effect, and was not committed."""
        for name, table in self._by_name.items():
            table.on_noop(self._reports.get(name, ()))

    def failed(self, problem: BaseException) -> bool:
        """Learn from an attempt that has to be done again, maybe in another way.

        Returns:
            Whether it has brought up copies that are good for the next attempt. This can be so only once for every
            host and partition.
        """
        if isinstance(problem, NotColocatedError):
            self._fused = False
            self._exchanged = self._whole is None
            log.info("%s; from now on in two stages", problem.what)
        elif isinstance(problem, NotCopartitionedError):
            self._by_source = False
            log.info("%s; from now on with a shuffle", problem.what)
        if self._left_out:
            # No task of the step has run: in this batch the optimizer wants nothing of what it yields, as when a filter
            # behind it compares with the time.
            self._exchanged, self._left_out = self._whole is None, False
        news = [self._by_name[name].prepared(found) for name, found in self._brought_up.items()]
        self._brought_up = {}
        return any(news)

    def settle(self) -> None:
        """Apply what the last batch left pending, when the stores are on this machine and the flow ends."""
        if not self._local:
            return
        for table in self.tables:
            spec = table.spec
            for partition, commit in table.last.items():
                try:
                    settle(spec.folder(partition), spec.store, commit)
                except Exception as error:  # only a head start for readers and for the next run
                    log.warning("the local state of %s-%d was not settled: %s", spec.table, partition, error)

    # ---- for the stages ------------------------------------------------------------------------------

    def rows_of(self, node: StepNode, df: DataFrame, max_rows: int, order: WriteOrder) -> tuple[DataFrame, int]:
        """What a step yields as rows, and the number of its tasks. They report to the step's accumulator."""
        direct = self._whole is None and not self._exchanged
        base = self._order(node.table, order, "side outputs" if direct else "nothing")
        if self._default_is_letters():
            base = replace(base, topic=None)  # a record that names it may be a dead letter
        moved, tasks, base = self._moved(df, base, max_rows, of_source=node.input.branch is not None)
        collected = self._query.collected[node.table]
        collected.value = []
        self._staged[node.table] = tasks
        return moved.mapInArrow(RowsTask(base, collected), OUTPUT_SPARK_SCHEMA), tasks

    @property
    def exchanged(self) -> bool:
        """Whether the rows of every step go through a shuffle before anything else sees them."""
        return self._exchanged

    # ---- inside --------------------------------------------------------------------------------------

    def _tasks_did(self, table: str, done: TaskReport) -> None:
        self._reports[table] = done.states
        self._brought_up[table] = done.prepared

    def _order(self, table: str, write: WriteOrder, writes: Writes) -> StateOrder:
        return StateOrder(
            spec=self._by_name[table].spec,
            moment=self._moments[table],
            write=replace(write, topic=None, routing=Routing("key", 1, True)),
            writes=writes,
            topic=self._query.topic,
            modulus=1,
            due=self._due[table],
        )

    def _by_driver(self, returned: Sequence[bytes], order: WriteOrder, cluster: Cluster) -> Part:
        write = replace(order, topic=None, routing=Routing("key", 1, True))
        rows = [written_rows(batch) for stream in returned for batch in unpacked(stream).to_batches()]
        return Part(write_rows(write, DRIVER, rows, cluster).written, None, False)

    def _moved(
        self, df: DataFrame, order: StateOrder, max_rows: int, *, of_source: bool = True
    ) -> tuple[DataFrame, int, StateOrder]:
        """The rows where their partition of the table is, the number of tasks, and what these are told.

        Args:
            of_source: whether the rows are those of the streaming query, and no other step has made them.
        """
        spec = order.spec
        wanted = max(1, min(self._cores(), round(max_rows / _TASK_ROWS + 0.5)))
        if of_source and max_rows and self._may_take_source_partitions(df, spec, order.due):
            moved = df.coalesce(wanted)
            order = replace(order, modulus=spec.topics.partitions, co_partitioned=True)
            if not order.due:
                return moved, jvm.task_total(moved), order
            read = [partition for _, partition in jvm.source_partitions(df)]
            taken = {task: tuple(read[i] for i in merged) for task, merged in enumerate(jvm.coalesced_tasks(moved))}
            return moved, len(taken), replace(order, taken=taken)
        tasks = task_count(spec.topics.partitions, wanted)
        order = replace(order, modulus=tasks)
        if tasks == 1 and max_rows and of_source:  # without rows there may be no task to coalesce to
            return df.coalesce(1), 1, order
        place: Column = partition_of_key(df, spec.topics.partitions) % F.lit(tasks)
        return repartition_by_task(df, tasks, place.cast("int")), tasks, order

    def _may_take_source_partitions(self, df: DataFrame, spec: ProcessSpec, due: frozenset[int]) -> bool:
        """Whether source partitions can be taken as they are, without a shuffle."""
        if self._by_source is None and not (
            list(self._source_partitions.values()) == [spec.topics.partitions] and "partition" in df.columns
        ):
            self._by_source = False
        if self._by_source is False:
            return False
        if self._by_source and not due:
            return True
        try:
            read = {partition for _, partition in jvm.source_partitions(df)}
        except OptionError:
            # Another plan may have no union with the clock's rows.
            if self._by_source is None and not self._clock:
                self._by_source = False
            return False
        self._by_source = True
        # What is due in partitions that the batch does not read needs a task, too: only a shuffle has one for each.
        return due <= read


class _Stages:
    """Puts the plan of a query together for one attempt of a batch."""

    def __init__(self, step: StateStep, inputs: list[DataFrame], max_rows: int, order: WriteOrder) -> None:
        self._step = step
        self._inputs = inputs
        self._max_rows = max_rows
        self._order = order
        self.sides: list[DataFrame] = []  # side outputs that no task has written

    def frame(self, tree: Tree) -> DataFrame:
        """The rows of a tree."""
        if tree.branch is not None:
            return self._inputs[tree.branch]
        if tree.step is not None:
            return self._rows(tree.step)
        spark = self._inputs[0].sparkSession
        new = {node.path: plans.named_as(self._rows(node), plans.at(tree.plan, node.path)) for node in tree.steps}
        for path, branch in tree.branches:
            new[path] = plans.named_as(self._inputs[branch], plans.at(tree.plan, path))
        return plans.frame(spark, plans.grafted(spark, tree.plan, new))

    def _rows(self, node: StepNode) -> DataFrame:
        rows, tasks = self._step.rows_of(node, self.frame(node.input), self._max_rows, self._order)
        if not self._step.exchanged:
            return rows
        rows = plans.exchanged(rows, tasks)
        self.sides.append(rows.where("topic IS NOT NULL"))
        return rows.where("topic IS NULL")


def _runs_once(df: DataFrame) -> bool:
    """Whether the optimizer has left the one process step of a DataFrame in its plan."""
    return sum(queries.step_table(node) is not None for node in jvm.nodes(plans.optimized(df))) == 1

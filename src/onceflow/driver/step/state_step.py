"""The driver's part of ``Flow.process`` in a batch: the orders of tasks, their reports, and what is learnt from them.

The driver runs a step on rows that it has fetched (``in_driver.py``).
Where steps run whose records tasks read, ``planning/placement.py`` decides (``stages.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import DataFrame

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.settings import ClientSettings
from onceflow.clock import clock_ms
from onceflow.driver.batch.audit import Part, in_tasks
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.driver.record import handover
from onceflow.driver.record.offset_log import SourceRange
from onceflow.driver.step import in_driver
from onceflow.driver.step.cluster_homes import ClusterHomes
from onceflow.driver.step.homes import Owner
from onceflow.driver.step.in_driver import BY_KEY
from onceflow.driver.step.stages import Stages, run_fused, runs_step_once
from onceflow.driver.step.table_state import TableState
from onceflow.errors import OnceflowError
from onceflow.messages import (
    NotColocatedError,
    NotCopartitionedError,
    Owners,
    PrepareOrder,
    StateOrder,
    TaskReport,
    WriteOrder,
    Writes,
)
from onceflow.planning import placement
from onceflow.planning.dead_letter_limit import counted
from onceflow.planning.options import BatchSummary
from onceflow.planning.ownership import Outgoing
from onceflow.planning.placement import BatchFacts, HomeTasks, Learnt, Placement, QueryShape
from onceflow.planning.range_tasks import reading_tasks
from onceflow.planning.step_tree import StepQuery
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Progress, TableProgress
from onceflow.spark.placed_jobs import PlacedJobs
from onceflow.state.joins.spec import Ends
from onceflow.state.local.format import CommitId
from onceflow.state.local.opening import settle
from onceflow.state.prepare import Prepared, is_verified, lacks
from onceflow.state.spec import AttemptContext, StateReport
from onceflow.state.table_facts import TableFacts
from onceflow.task.preparing import PrepareTask
from onceflow.task.row_writer import Companion

log = logging.getLogger("onceflow.state")

_NOTHING = TaskReport(())

_ONE = Owners.by_number(1)
_MIN_RECORDS, _MIN_BYTES = 200_000, 64 << 20  # smaller copies are left to the batch


class StateStep:
    """The process steps of one query.

    Args:
        tables: of all steps, by name.
        cores: returns how many tasks Spark can run at once.
        homes: where the copies are on a cluster; None: on this machine, or in the memory of processes.
    """

    def __init__(
        self,
        query: StepQuery,
        shape: QueryShape,
        tables: Mapping[str, TableState],
        *,
        cores: Callable[[], int],
        homes: ClusterHomes | None = None,
    ) -> None:
        self._query = query
        self._shape = shape
        self._by_name = dict(tables)
        self.tables = list(tables.values())
        self._cores = cores
        self._homes = homes
        self.learnt = Learnt()
        # Of the current attempt:
        self._batch = BatchFacts(0)
        self._moments: dict[str, AttemptContext] = {}
        self._due: dict[str, frozenset[int]] = {}
        self._owner = ""
        self._stages: Stages | None = None
        self._done: dict[str, TaskReport] = {}

    @property
    def topics(self) -> set[str]:
        """All topics of the tables."""
        return {name for table in self.tables for name in table.spec.topics.ids}

    @property
    def topic_roles(self) -> dict[str, str]:
        """Topics of the tables, of dead letters and of late records, and what each topic is for."""
        sides = {topic: role for table in self.tables for topic, role in table.spec.side_topics.items()}
        return {**dict.fromkeys(self.topics, "table"), **sides}

    def opened(self, progress: Progress) -> Progress:
        """Progress with which a run begins: rows of its tables may follow that no batch has committed."""
        known = dict(progress.tables)
        for name, table in self._by_name.items():
            known[name] = replace(known.get(name, TableProgress()), open_ended=table.open_ended)
        return replace(progress, tables=known)

    def believe(self, found: Collection[str]) -> None:
        """What attempts have found, also those of earlier drivers: see `Learnt.believing`."""
        self.learnt = self.learnt.believing(found)

    def facts(self) -> list[TableFacts]:
        """What is known of the tables now. It may be called in any thread."""
        found = [table.facts() for table in self.tables]
        if self._homes is None:
            return found
        homes = self._homes.homes
        return [
            replace(facts, copies=homes.facts(facts.table)) if facts.table in homes.tables else facts for facts in found
        ]

    def are_timers_left(self) -> bool:
        """Whether more timers were due than the last batch was allowed to fire."""
        return any(table.timers_left for table in self.tables)

    def due(self, now_ms: int) -> bool:
        """Whether a batch without rows would do anything."""
        return any(self._due_now(table, now_ms) for table in self.tables)

    # ---- steps of a batch ----------------------------------------------------------------------------

    def planned(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> None:
        """The source range of the next batch is known. ``caught_up``: see `Watermark.planned`."""
        news = source.news()
        for table in self.tables:
            table.planned(news, caught_up)

    def prepare(
        self, rows: Rows, settings: ClientSettings, owner: tuple[str, ProducerIdAndEpoch], *, again: bool
    ) -> None:
        """Bring large local copies up to date before anything is written, see ``preparing``.

        Args:
            owner: transactional id, and its producer id and epoch. They change when a newer driver takes the flow over.
        """
        self._owner = owner[0]
        if not self._shape.local:
            if self._homes is not None and isinstance(rows, RangeRows):
                self._homes.homes.start()
                self._homes.homes.ready(Owner(settings, *owner), self._touched(rows))
            return
        for table in self.tables:
            moment = table.moment(-1, CommitId(-1, -1, -1), 0)
            prepare(
                table,
                PrepareOrder(table.spec.without_code(), moment, settings, *owner, hooks.configured()),
                rows.sparkSession.sparkContext,
                again=again,
            )

    def held_back(self) -> Callable[[int], bool] | None:
        """Tells of each source partition whether the next batch leaves it out, because the part of the table that
        belongs to it is being restored. None: it takes all.

        Call this only if tasks process records where they have read them (`range_tasks`).
        """
        if self._homes is None or len(self.tables) != 1:
            return None
        (at,) = self._homes.homes.tables.values()
        waiting = frozenset[int]() if at.waits else self._homes.homes.waiting(at.name)
        return (lambda partition: partition % at.groups in waiting) if waiting else None

    def _touched(self, rows: RangeRows) -> dict[str, set[int]] | None:
        """The groups of the table that a batch needs; None: all of all tables."""
        if self._homes is None or len(self.tables) != 1 or rows.needs_frame or not self._stays(rows):
            return None
        (at,) = self._homes.homes.tables.values()
        if at.waits:
            return None
        groups = {partition % at.groups for _, partition, start, end in rows.range.ranges() if start < end}
        return {at.name: groups | {partition % at.groups for partition in self._due_now(at.table, clock_ms())}}

    def _stays(self, rows: RangeRows) -> bool:
        """Whether tasks process the records of a batch where they have read them."""
        counts = [len(partitions) for partitions in rows.range.end.values()]
        return self.range_tasks(counts, self._cores()) is not None

    def _due_now(self, table: TableState, now_ms: int) -> set[int]:
        """Partitions with something that is due, but for those that are being restored while others go on."""
        due = table.due(now_ms)
        at = None if self._homes is None else self._homes.homes.tables.get(table.spec.table)
        if at is None or at.waits or not at.plan.waiting:
            return due
        return {partition for partition in due if partition % at.groups not in at.plan.waiting}

    def begin(self, batch: int, producer: ProducerIdAndEpoch, now_ms: int, joined: Ends, progress: Progress) -> None:
        """An attempt begins, under this producer id and epoch.

        Args:
            joined: at which offsets it sees the tables that the flow joins with.
            progress: what is committed.
        """
        commit = CommitId(batch, producer.producer_id, producer.producer_epoch)
        self._stages, self._done = None, {}
        for name, table in self._by_name.items():
            until = handover.timers_until(progress, name)
            if until is not None and handover.owes_timers(progress):
                table.not_before(until)
            moment = replace(table.moment(batch, commit, now_ms), joined=joined)
            if until is not None:
                moment = moment.limited(until, handover.unfired(progress, name))
            self._moments[name] = moment
            due = self._due_now(table, moment.now_ms) if until is None else range(table.partitions)
            self._due[name] = frozenset(due)

    def place(self, rows: int) -> Placement:
        """Where the steps of this attempt run, if tasks read its records.

        Args:
            rows: most source records that it can have.
        """
        self._batch = BatchFacts(rows, self._cores())
        return self._at_homes(placement.place(self._shape, self.learnt, self._batch))

    def _at_homes(self, place: Placement) -> Placement:
        """The same, but tasks run where the copies are."""
        if self._homes is None:
            return place
        facts, homes = self._batch, self._homes.homes
        steps = {
            name: step.at_homes(homes.tasks(name, (), facts.rows, facts.cores)) if name in homes.tables else step
            for name, step in place.steps.items()
        }
        return replace(place, steps=steps)

    def write(self, df: DataFrame, place: Placement, order: WriteOrder, cluster: Cluster) -> tuple[str, list[Part]]:
        """Process rows that tasks have read, and write what comes out, fused. Returns how, as a text, and the
        reports."""
        (table,) = self._by_name
        done, parts, tasks = run_fused(
            df, self._order(table, place.writes, order), place.steps[table], cluster, self._jobs
        )
        self._done = {table: done}
        return in_tasks(tasks), parts

    @property
    def written_as_is(self) -> bool:
        """Whether the only step writes what it yields."""
        return self._query.written_as_is

    def write_fetched(
        self, rows: FetchedRows, order: WriteOrder, cluster: Cluster, companion: Companion | None = None
    ) -> list[Part]:
        """Process rows of the direct engine, and write what comes out, by the driver.

        Args:
            order: of the sink. companion: what is sent beside the rows.
        """
        if not self.written_as_is:

            def order_of(table: str) -> StateOrder:
                state = self._order(table, "side outputs", order)
                # With side outputs in the topic of the query, a record that names it may be a dead letter.
                return replace(state, topic=None) if self._query.topic_has_side_outputs else state

            self._done, part = in_driver.run_chain(rows, order_of, order, cluster, companion)
            return [part]
        (table,) = self._by_name
        state = self._order(table, "everything", order)
        with closing(rows.batches()) as batches:
            done, part = in_driver.run_step(batches, state, cluster, companion)
        self._done = {table: done}
        return [part]

    def range_tasks(self, source_partitions: Iterable[int], cores: int) -> int | None:
        """How many tasks read, process and write a batch without moving its rows; None: they have to be moved.

        Args:
            source_partitions: partition count of every source. cores: how many tasks can run at once.
        """
        if self.learnt.keys_elsewhere or self.learnt.outputs_elsewhere:
            return None
        if self._homes is not None and len(self.tables) == 1 and self.tables[0].spec.table in self._homes.homes.tables:
            groups = self._homes.homes.tables[self.tables[0].spec.table].groups
            return None if any(count % groups for count in source_partitions) else groups
        return reading_tasks([*source_partitions, *(table.partitions for table in self.tables)], cores)

    def write_ranges(self, rows: RangeRows, tasks: int, order: WriteOrder, cluster: Cluster) -> tuple[str, list[Part]]:
        """Tasks read rows, process them, and write what comes out. Returns how, as a text, and the reports.

        Args:
            tasks: as `range_tasks` has returned.
        """
        (table,) = self._by_name
        state = replace(self._order(table, "everything", order), unmoved=True)
        at = self._home_tasks(table, rows, state)
        if at is None:
            done = rows.run(replace(state, owners=Owners.by_number(tasks)), tasks)
        else:
            tasks = len(at.executors)
            done = rows.run_at(replace(state, owners=at.owners, locations=at.locations), at, self._jobs)
        self._done = {table: done}
        path = f"{tasks} reading tasks" if tasks > 1 else "1 reading task"
        return path, in_driver.parts_of(done, tasks, order, cluster, shuffled=False)

    def _home_tasks(self, table: str, rows: RangeRows, order: StateOrder) -> HomeTasks | None:
        """The tasks for the partitions of a table that a batch touches; None: they run anywhere."""
        if self._homes is None or table not in self._homes.homes.tables:
            return None
        homes = self._homes.homes
        groups = homes.tables[table].groups
        touched = {partition % groups for _, partition, start, end in rows.range.ranges() if start < end}
        touched |= {partition % groups for partition in order.due}
        return homes.tasks(table, touched, rows.range.max_rows, self._cores())

    @property
    def _jobs(self) -> PlacedJobs | None:
        return None if self._homes is None else self._homes.jobs

    def outgoing(self, df: DataFrame, place: Placement, order: WriteOrder) -> Outgoing:
        """The rows that the sink is to write, in two stages."""
        stages = self._stages = Stages(
            self._query, place, df, lambda table: self._order(table, place.writes, order), self._jobs
        )
        outgoing = stages.outgoing(order.flow)
        if self._query.written_as_is or place.exchanged or self.learnt.step_seen:
            return outgoing
        if runs_step_once(outgoing.df):
            self.learnt = replace(self.learnt, step_seen=True)
            return outgoing
        # The optimizer has removed the step, because the query needs none of its rows. Its state and its side outputs
        # are needed.
        self.learnt = replace(self.learnt, step_left_out=True)
        return self.outgoing(df, self._at_homes(placement.place(self._shape, self.learnt, self._batch)), order)

    def gather(self, order: WriteOrder, cluster: Cluster) -> list[Part]:
        """Collect the reports of the stages before the sink, and write the side outputs that they have returned."""
        if self._stages is None:
            raise RuntimeError("no stages were put in front of the sink")
        self._done = self._stages.reports()
        parts = [Part(done.written, self._stages.tasks[table], True) for table, done in self._done.items()]
        returned = [stream for done in self._done.values() for stream in done.returned]
        if returned and not any(done.failed for done in self._done.values()):
            parts.append(in_driver.write_returned(returned, order, cluster))
        return parts

    def audit(self) -> None:
        """Check that one task of this attempt had each partition of each table, and the limit of dead letters."""
        for name, table in self._by_name.items():
            table.check(self._reports(name), self._moments[name])

    def changed(self) -> bool:
        """Whether this attempt has changed state. Without a changelog, nothing in Kafka shows it."""
        return any(report.changed for done in self._done.values() for report in done.states)

    def leaves_timers(self) -> bool:
        """Whether more timers are due than this attempt was allowed to fire."""
        return any(report.timers_left for done in self._done.values() for report in done.states)

    def progress(self, progress: Progress) -> Progress:
        """The progress of the batch, completed with that of the tables."""
        changelogs = {name: dict(ends) for name, ends in progress.changelogs.items()}
        known = dict(progress.tables)
        for name, table in self._by_name.items():
            ends, more = table.progress_after(self._reports(name), self._moments[name])
            changelogs |= ends
            known[name] = more
        return replace(progress, changelogs=changelogs, tables=known)

    def on_commit(self, summary: BatchSummary) -> None:
        """The batch is committed. Its summary is completed."""
        for name, table in self._by_name.items():
            table.on_commit(self._reports(name), self._moments[name])
        self._note_homes()
        summary.dead_letters, summary.late = self._counted("dead_letters"), self._counted("late")
        summary.duplicates = self._counted("duplicates")
        summary.timers_fired, summary.expired = self._counted("timers_fired"), self._counted("expired")
        # Of a batch without outputs, nothing was written.
        summary.records = max(0, summary.records - self._counted("aside"))
        summary.state_lost = sum(table.take_lost() for table in self.tables)

    def on_noop(self) -> None:
        """The batch had no effect, and was not committed."""
        for name, table in self._by_name.items():
            table.on_noop(self._reports(name))
        self._note_homes()

    def _note_homes(self) -> None:
        if self._homes is None:
            return
        for name in self._homes.homes.tables:
            self._homes.homes.on_commit(name, self._reports(name))
        self._homes.homes.ended()

    def failed(self, problem: BaseException) -> bool:
        """Learn from an attempt that has to be repeated, maybe in another way.

        Returns:
            Whether it has brought local copies up to date that the next attempt can use, or Spark has run its tasks
            elsewhere than where their copies are. This can happen only so often.
        """
        self.learnt = self.learnt.after(problem)
        if isinstance(problem, NotColocatedError):
            log.info("%s; from now on in two stages", problem.what)
        elif isinstance(problem, NotCopartitionedError):
            log.info("%s; from now on with a shuffle", problem.what)
        if self._stages is not None and any(not done.written for done in self._done.values()):
            # No task of the step has run: the optimizer has removed the step in this batch. This can happen when a
            # filter after the step compares with the current time.
            self.learnt = replace(self.learnt, step_left_out=True)
        news = [self._by_name[name].prepared(done.prepared) for name, done in self._done.items()]
        self._stages, self._done = None, {}
        misplaced = self._homes is not None and self._homes.homes.failed(problem)
        return any(news) or misplaced

    def placed(self) -> AbstractContextManager[None]:
        """The tasks of an attempt run in here, see `Homes.placed`."""
        return nullcontext() if self._homes is None else self._homes.homes.placed()

    def settle(self, *, changed: bool = False) -> None:
        """Apply pending changes of committed batches, if the stores are on this machine: when the flow ends, or when
        there is time for it.

        Args:
            changed: only where the last batch has left some.
        """
        if not self._shape.local:
            return
        for name, table in self._by_name.items():
            settle_copies(table, [each.partition for each in self._reports(name) if each.changed] if changed else None)

    def close(self) -> None:
        """The run is over."""
        self.settle()
        if self._homes is not None:
            self._homes.homes.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _counted(self, what: str) -> int:
        """How many records of this attempt became ``dead_letters``, were ``late``, and so on."""
        return sum(counted(done.states, what) for done in self._done.values())

    def _reports(self, table: str) -> Sequence[StateReport]:
        return self._done.get(table, _NOTHING).states

    def _order(self, table: str, writes: Writes, write: WriteOrder) -> StateOrder:
        """The order of a step's tasks; how they get their rows is filled in when that is known."""
        return StateOrder(
            spec=self._by_name[table].spec,
            moment=self._moments[table],
            write=replace(write, topic=None, routing=BY_KEY),
            writes=writes,
            topic=self._query.topic,
            owners=_ONE,
            due=self._due[table],
            owner=self._owner,
            as_is=self._query.written_as_is,
        )


def prepare(table: TableState, order: PrepareOrder, context: SparkContext, *, again: bool) -> None:
    """Bring large copies of a table on this machine up to date before a batch writes anything.

    The timeout of a transaction starts with the first that is written, records or source offsets, so this cannot make
    it time out. The work is done in tasks: they use all cores, and a damaged copy can only kill a Python worker. Small
    copies are left to the batch, because they take it little time. All of this needs a local master: on a cluster it is
    not known on which host a task will run.

    Args:
        again: check all copies, not only those that this run has not checked yet, because an attempt has failed.

    Raises:
        OnceflowError: see `prepare_partition`.
    """
    spec, moment = order.spec, order.moment
    if not spec.store.on_disk:
        return  # the store is in the memory of one process, and it is not known which process will run the batch
    records, size = 0, 0
    wanted = []
    for partition in range(spec.topics.partitions):
        if again or not is_verified(spec, moment, partition):
            lacking = lacks(spec, moment, partition)
            size += _bytes_of(spec.folder(partition)) if lacking is None else 0
            records += lacking or 0
            if lacking != 0:
                wanted.append(partition)
    if records < _MIN_RECORDS and size < _MIN_BYTES:
        return
    log.info(
        "table %s: %d local copies are prepared: up to %d records to read, %d MiB to verify",
        spec.table,
        len(wanted),
        records,
        size >> 20,
    )
    found = context.parallelize(wanted, len(wanted)).map(PrepareTask(order)).collect()
    for problem in found:
        if isinstance(problem, OnceflowError):
            raise problem
    table.prepared([each for each in found if isinstance(each, Prepared)])


def settle_copies(table: TableState, partitions: Iterable[int] | None = None) -> None:
    """Settle the copies on this machine: apply the pending changes of the last batch.

    Args:
        partitions: None: all that are known.
    """
    spec = table.spec
    for partition in [*table.last] if partitions is None else partitions:
        commit = table.last[partition]
        try:
            settle(spec.folder(partition), spec.store, commit)
        except Exception as error:  # no harm: readers or the next run settle it
            log.warning("the local state of %s-%d was not settled: %s", spec.table, partition, error)


def _bytes_of(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # a reader or an engine may delete a file just now
        for file in folder.rglob("*"):
            size += file.stat().st_size
    return size

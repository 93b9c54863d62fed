"""A start of a flow: the takeover in Kafka, and the query that is being put together.

A query gets its process steps, joins, calls and functions one by one, as the program names them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from onceflow.calls.concurrently import calls_of
from onceflow.client.brokers import warn_of_settings
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topics
from onceflow.driver.kafka.targets import check_side_topics_writable, load_targets
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.driver.standby.standby import Standby
from onceflow.driver.start.kept_schemas import check_kept_schemas
from onceflow.driver.start.takeover import Takeover
from onceflow.driver.step.joins import find_joined
from onceflow.errors import ProgressConflictError, UnknownTopicError, located
from onceflow.logs import log_context
from onceflow.options.durations import duration_ms
from onceflow.planning import process, table_plan
from onceflow.planning.calls import check_times
from onceflow.planning.joins import check_co_partitioned, join_spec
from onceflow.planning.options import SinkOptions
from onceflow.planning.process import Step, StepOptions
from onceflow.protocol.names import Names, OwnTopics
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, writer_of
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.changelog.topics import TableTopics, check_readable, committed_ends, ensure_topics
from onceflow.state.joins.spec import JoinSpec, JoinTable
from onceflow.task.call_rows import CallOrder
from onceflow.task.map_rows import RowsMap
from onceflow.task.row_operators import ArrowFunction

log = logging.getLogger("onceflow")


class Startup:
    """One start of a flow, from its first connection until its query has ended or the flow is closed.

    Args:
        refused_s, standby: see `Takeover`.

    Attributes:
        takeover: of the flow, in Kafka.
        steps: process steps by their tables.
        calls: of ``Flow.enrich``. joins: tables that are joined with.
        maps: functions of ``Flow.map``, by their names in plans.
        functions: of ``Flow.join_table`` and ``Flow.enrich``, by name.
        output_partitions: partition count of the output topic, when `prepare_outputs` has found it; None: rows name
            their topics.
    """

    def __init__(
        self, names: Names, settings: ClientSettings, *, refused_s: float, standby: Standby | None = None
    ) -> None:
        self.takeover = Takeover(names, settings, refused_s=refused_s, standby=standby)
        self.steps: dict[str, Step] = {}
        self.calls: list[CallOrder] = []
        self.maps: dict[str, RowsMap] = {}
        self.functions: dict[str, ArrowFunction] = {}
        self.joins: list[JoinSpec] = []
        self.output_partitions: int | None = None
        self._beside: set[str] = set()  # tables that would begin empty beside those of another flow
        self._run = uuid4().hex

    @property
    def flow(self) -> str:
        return self.takeover.flow

    @property
    def own_topics(self) -> OwnTopics:
        """Topics that outputs must not go to."""
        tables = frozenset(name for step in self.steps.values() for name in step.spec.topics.ids)
        return OwnTopics(frozenset(self.takeover.sources), tables)

    @property
    def table_names(self) -> frozenset[str]:
        """Names of the flow's tables and their topics. A table without a changelog has no topics."""
        return self.own_topics.tables | frozenset(self.steps)

    def find_join(self, name: str, table: JoinTable, *, local: bool, state_dir: str | Path | None = None) -> JoinSpec:
        """Look up a table that the flow joins with.

        Args:
            name: by which user code asks for it.
            local: whether tasks run on this machine.
            state_dir: folder of its local copies, if the table itself names none.

        Raises:
            UnknownTopicError, PermissionDeniedError: the topic does not exist, or may not be read.
            OptionError: it is not compacted.
        """
        with located(flow=self.flow, topic=table.topic):
            found = find_joined(self.takeover.session.cluster, table.topic, self.takeover.deadline())
        key = self.takeover.names.progress_key
        return join_spec(name, table, found, flow_key=key, run=self._run, local=local, state_dir=state_dir)

    def add_step(
        self,
        options: StepOptions,
        processor: Processor | ColumnProcessor,
        *,
        source_topic: str | None,
        local: bool,
        joins: Sequence[JoinSpec] = (),
    ) -> None:
        """Prepare the table of a process step. Progress knows its topics before anything is written to them (`commit`).

        Args:
            source_topic: the topic that all records come from, when there is only one.
            local: whether tasks run on this machine.
            joins: tables that the processor looks up rows in.

        Raises:
            ProgressConflictError, PermissionDeniedError, UnknownTopicError, OptionError: see `ensure_table`.
        """
        takeover = self.takeover
        deadline = takeover.deadline(f"preparing table {options.table} of flow {self.flow}")
        with located(flow=self.flow, topic=options.table), log_context.within(flow=self.flow):
            before = takeover.known_progress()
            counts = {name: len(source.earliest) for name, source in takeover.sources.items()}
            topics, progress = ensure_table(
                takeover.session.cluster, options, processor, joins, before, counts, deadline, flow=self.flow
            )
            if progress is not before:
                takeover.decide(progress)
        if table_plan.is_beside(options, takeover.found or before):
            self._beside.add(options.table)
        if not options.changelog and not local:
            log.warning("flow %s: %s", self.flow, process.MOVES.format(table=options.table))
        spec = process.make_spec(
            options,
            processor,
            topics,
            flow=self.flow,
            flow_key=takeover.names.progress_key,
            source_topic=source_topic,
            local=local,
            joins=tuple(joins),
        )
        lateness = processor.allowed_lateness
        self.steps[options.table] = Step(
            spec=spec,
            lateness_ms=None if lateness is None else duration_ms(lateness),
            idle_s=duration_ms(options.idle_timeout) / 1000,
            clock_s=None if options.clock_after is None else duration_ms(options.clock_after) / 1000,
            copies=options.copies,
            waits=options.wait_for_restores,
        )

    def prepare_run(self, deadline: Deadline) -> Progress:
        """Connect and fence, if no source has done so. Returns the progress that the run begins with.

        Raises:
            ProgressConflictError: see `table_plan.check_inherited`. Only here all steps are known. Progress forgets the
                tables that no batch has used.
        """
        takeover = self.takeover
        takeover.connect(deadline)
        progress = takeover.fence({}, deadline) or takeover.first_progress()
        try:
            table_plan.check_inherited(takeover.found or progress, self.steps, self._beside, flow=self.flow)
        except ProgressConflictError:
            takeover.forget_tables(progress, self._beside)
            for table in self._beside:
                del self.steps[table]
            self._beside.clear()
            raise
        return progress

    def prepare_outputs(self, options: SinkOptions, deadline: Deadline) -> list[str]:
        """Check the topics that are written, and decide what the last batch has left undecided in them.

        Returns:
            Names of the topics that are written, as far as they are known at a start: outputs, topics of dead letters
            and late records, tables.

        Raises:
            UnknownTopicError: a topic that is named does not exist.
            OptionError: the brokers do not allow such a long transaction timeout, or calls may take longer than it.
        """
        session = self.takeover.session
        of_steps = [calls for step in self.steps.values() for calls in calls_of(step.spec.processor)]
        calls = [*(order.calls for order in self.calls), *of_steps]
        check_times(calls, options.transaction_timeout_s, self.takeover.max_records.values(), self.flow)
        side_topics = process.side_topics(self.steps)
        targets = load_targets(session.cluster, options.topic, deadline, more=side_topics)
        of_calls = {each.dead_letter_topic: "dead letter" for each in self.calls if each.dead_letter_topic}
        check_side_topics_writable(session.cluster, {**of_calls, **side_topics}, targets, deadline, flow=self.flow)
        self.output_partitions = None if options.topic is None else targets[options.topic].partitions
        outputs = [topic for topic in (options.topic, *side_topics) if topic is not None]
        written = [*outputs, *(topic for step in self.steps.values() for topic in step.spec.topics.ids)]
        warn_of_settings(session.cluster, [*written, PROGRESS_TOPIC], deadline, flow=self.flow)
        session.decide(written, self.takeover.progress_now, deadline)
        session.transactions.timeout_ms = int(options.transaction_timeout_s * 1000)
        session.transactions.renew(deadline)
        return written


def ensure_table(
    cluster: Cluster,
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    joins: Sequence[JoinSpec],
    progress: Progress,
    sources: Mapping[str, int],
    deadline: Deadline,
    *,
    flow: str,
) -> tuple[TableTopics, Progress]:
    """The table's topics, and progress that knows them. Topics are created when nothing else is missing.

    Args:
        joins: tables that the processor looks up rows in.
        progress: the flow's, as committed.
        sources: partition count of every source topic.

    Returns:
        The topics, and what `table_plan.plan_table` returns.

    Raises:
        ProgressConflictError: the topics or their state are not what progress says.
        PermissionDeniedError: a topic is missing and may not be created, or may not be read.
        UnknownTopicError: there is no topic for dead letters or late records.
        OptionError: a table of ``joins`` has another number of partitions, although it is co-partitioned.
        EnvironmentUnusableError: a registry of schemas does not answer.
    """
    table_plan.check_not_replaced(options.table, progress)
    table_plan.check_kind(options, progress)
    known = progress.tables.get(options.table)
    if known is not None:
        table_plan.check_migration(processor, known.version, table=options.table, flow=flow)
    if side_topics := options.side_topics:
        find_topics(cluster, side_topics, deadline)
    partitions = options.partitions or max(sources.values())
    if not options.changelog:
        topics, planned = table_plan.plan_local_table(options, processor, partitions, progress)
        check_kept_schemas(cluster, topics, processor, progress)
        check_co_partitioned(joins, options.table, topics.partitions, flow)
        return topics, planned
    if any(spec.co_partitioned for spec in joins):
        with suppress(UnknownTopicError):
            partitions = cluster.topics([options.table], deadline, once=True)[options.table].partitions
        check_co_partitioned(joins, options.table, partitions, flow)
    topics = ensure_topics(cluster, options.table, partitions, deadline)
    ends = committed_ends(cluster, topics, deadline)
    check_readable(cluster, ends, deadline)
    if options.table not in progress.changelogs and any(end for each in ends.values() for end in each.values()):
        writer = writer_of(topics.table, topics.table_id, CommittedProgress().decoded(cluster, deadline))
        table_plan.check_not_written(options.table, writer, progress)
    planned = table_plan.plan_table(options, processor, topics, ends, progress)
    check_kept_schemas(cluster, topics, processor, planned)
    return topics, planned

"""A start of a flow: what is read from Kafka and committed there before a query runs.

The first call fences older drivers, and reads progress afterwards. From then on the flow's committed offsets cannot
change, unless this driver changes them (I6).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from onceflow import hooks, interactive
from onceflow.calls.concurrently import calls_of
from onceflow.client.brokers import warn_of_settings
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import REFUSED_S
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topics
from onceflow.clock import clock_ms
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.kafka.targets import check_letter_topics, load_targets
from onceflow.driver.record import handover, progress_log
from onceflow.driver.record.offset_log import Sources
from onceflow.driver.record.session import DriverSession
from onceflow.driver.start.new_flow import warn_of_similar
from onceflow.driver.start.source_offsets import end_of_read, look_at
from onceflow.driver.start.step_tables import ensure_table
from onceflow.driver.step.joins import find_joined
from onceflow.errors import OnceflowError, OptionError, ProgressConflictError, located
from onceflow.logs import log_context
from onceflow.options.durations import duration_ms
from onceflow.planning import process, source_starts, table_plan
from onceflow.planning.calls import check_times
from onceflow.planning.joins import join_spec
from onceflow.planning.options import SinkOptions
from onceflow.planning.process import Step, StepOptions
from onceflow.planning.read_options import ReadOptions
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names, OwnTopics
from onceflow.protocol.progress import PROGRESS_TOPIC, DriverProcess, Progress
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.joins.spec import JoinSpec, JoinTable
from onceflow.task.call_rows import CallOrder
from onceflow.task.map_rows import RowsMap
from onceflow.task.row_operators import ArrowFunction

log = logging.getLogger("onceflow")

#: How long a start may take, in seconds.
START_SECONDS = 60.0


class Startup:
    """One start of a flow, from its first connection until its query has ended or the flow is closed.

    Args:
        refused_s: how long the first connection waits while all bootstrap servers refuse, in seconds.
    """

    def __init__(self, names: Names, settings: ClientSettings, *, refused_s: float) -> None:
        self.names = names
        self.settings = settings
        self.sources: dict[str, SourceTopic] = {}
        self.until: dict[str, dict[int, int]] = {}  # where the reads of topics end, if they do
        self.steps: dict[str, Step] = {}
        self.calls: list[CallOrder] = []  # of Flow.enrich
        self.maps: dict[str, RowsMap] = {}  # functions of Flow.map, by their names in plans
        self.functions: dict[str, ArrowFunction] = {}  # of Flow.join_table and Flow.enrich, by name
        self._records: dict[str, int | None] = {}  # most of one batch, by source
        self.joins: list[JoinSpec] = []
        self._beside: set[str] = set()  # tables that would begin empty beside those of another flow
        self._run = uuid4().hex
        self.refused_s = refused_s
        self._session: DriverSession | None = None
        self._progress: Progress | None = None
        self._is_pending = False  # progress has more than what is committed
        self.found: Progress | None = None  # the progress that this start has found
        self.driver: DriverProcess | None = None  # this process, since it has fenced older drivers
        self._is_used = False

    @property
    def flow(self) -> str:
        return self.names.flow

    @property
    def is_fenced(self) -> bool:
        """Whether progress is known and only this start can change it: older drivers are fenced, and progress was read
        after that. False after an error of a start, and after a query was made: then the query moves progress."""
        return not self._is_used and self._session is not None and self._session.knows_progress

    @property
    def session(self) -> DriverSession:
        """The connection to Kafka, and the transactional id.

        Raises:
            OptionError: there is none yet.
        """
        if self._session is None:
            raise OptionError("Nothing was read yet", flow=self.flow, next_step="call Flow.read first")
        return self._session

    @property
    def progress_now(self) -> Progress | None:
        """Progress with what this start has committed."""
        return self._progress

    @property
    def source_partitions(self) -> dict[str, list[int]]:
        return {name: sorted(source.earliest) for name, source in self.sources.items()}

    @property
    def sources_read(self) -> Sources:
        """The topics that are read, for the batches of a query."""
        starts = {name: dict(source.earliest) for name, source in self.sources.items()}
        return Sources(starts, {name: len(offsets) for name, offsets in starts.items()})

    @property
    def own_topics(self) -> OwnTopics:
        """Topics that outputs must not go to."""
        tables = frozenset(name for step in self.steps.values() for name in step.spec.topics.ids)
        return OwnTopics(frozenset(self.sources), tables)

    @property
    def table_names(self) -> frozenset[str]:
        """Names of the flow's tables and their topics. A table without a changelog has no topics."""
        return self.own_topics.tables | frozenset(self.steps)

    def deadline(self) -> Deadline:
        """Of a start. It is extended if the first connection may wait longer for the brokers."""
        seconds = START_SECONDS + max(0.0, self.refused_s - REFUSED_S)
        return Deadline(seconds, f"starting flow {self.flow}")

    def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._session.cluster.close()

    # ---- connect and fence ---------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> None:
        """Connect to the brokers, unless there is a connection.

        Raises:
            BrokerUnreachableError, BrokerUnsupportedError: no broker can be used.
        """
        if self._session is not None:
            return
        session = DriverSession(Cluster(self.settings, refused_s=self.refused_s), self.names)
        try:
            session.transactions.check_supported(deadline)
        except BaseException:
            session.cluster.close()
            raise
        self._session = session

    def fence(self, sources: Mapping[str, list[int]], deadline: Deadline) -> Progress | None:
        """Step ``init``: fence older drivers, and then read progress, unless both are done.

        Args:
            sources: partitions of the topics that are read, whose committed offsets hint at the progress record.

        Returns:
            The flow's progress; None: it has none yet.
        """
        if self.is_fenced:
            return self._progress
        session = self.session
        interactive.stop_earlier(self.settings.bootstrap_servers, self.names.transactional_id)
        started = time.monotonic()
        progress_log.ensure_topic(session.cluster, deadline)
        session.init(deadline)
        self.driver = DriverProcess(socket.gethostname(), os.getpid(), clock_ms())
        try:
            found = session.progress(sources, deadline)
            handover.check_exists(found, flow=self.flow)
            self._check_not_moved(found)
        except BaseException:
            session.give_up()  # progress may have been read, but the transactions it names are not decided
            raise
        self.found = found
        if not self._is_pending:
            self._progress = found
        hooks.at("init", where="driver", flow=self.flow, seconds=time.monotonic() - started)
        return self._progress

    def _check_not_moved(self, found: Progress | None) -> None:
        """Check that what this start has decided still holds, after older drivers were fenced again.

        Raises:
            ProgressConflictError: another driver has moved progress meanwhile.
        """
        if self._is_pending and found != self.found:
            self._is_pending, self._progress = False, None
            self.sources.clear()
            raise ProgressConflictError(
                f"Another driver has moved flow {self.flow!r} while this start was prepared",
                flow=self.flow,
                detail="at batch " + ("none" if found is None else str(found.batch_id)),
                next_step="call Flow.read and what follows again. If it comes again, find out who starts this flow",
            )

    # ---- sources -------------------------------------------------------------------------------------

    def check_source(self, topic: str) -> None:
        """Check that a topic exists, on the existing connection.

        Raises:
            UnknownTopicError: it does not.
        """
        find_topics(self.session.cluster, {topic: "source"}, self.deadline())

    def add_source(self, options: ReadOptions) -> dict[int, int]:
        """Decide where a topic is read from. `commit` makes it hold, before anything is read.

        Returns:
            The offset that each partition is read from.

        Raises:
            OnceflowError: see ``Flow.read``.
        """
        with located(flow=self.flow, topic=options.topic), log_context.within(flow=self.flow):
            try:
                return self._add_source(options)
            except OnceflowError:
                if self._session is not None:
                    self._session.give_up()  # a transaction may be open: the next call fences again, which aborts it
                raise

    def _add_source(self, options: ReadOptions) -> dict[int, int]:
        deadline = self.deadline()
        self.connect(deadline)
        info = find_topics(self.session.cluster, {options.topic: "source"}, deadline)[options.topic]
        self.fence({options.topic: sorted(info.leaders)}, deadline)
        # Looked at after the fence: an older driver cannot move progress past these offsets any more.
        source = self.sources[options.topic] = look_at(
            self.session.cluster, info, deadline, self._epochs(options.topic, info.topic_id)
        )
        self._records[options.topic] = options.max_records_per_batch
        start = source_starts.plan(
            source,
            self._progress,
            starting_offsets=options.starting_offsets,
            fail_on_data_loss=options.fail_on_data_loss,
            flow=self.flow,
        )
        for warning in start.warnings:
            log.warning("flow %s: %s", self.flow, warning)
        self.until.pop(options.topic, None)
        if options.bound is not None:
            end = end_of_read(self.session.cluster, source, start.offsets, options.bound, deadline, flow=self.flow)
            self.until[options.topic] = end
        if start.must_commit:
            self._note_starting_offsets(source, start.offsets)
        return start.offsets

    def _epochs(self, topic: str, topic_id: str) -> Mapping[int, tuple[int, int]]:
        """What progress knows of the leaders of a topic. Of another topic of this name it knows nothing."""
        progress = self._progress
        same = progress is not None and progress.topic_ids.get(topic) == topic_id
        return progress.epochs.get(topic, {}) if progress is not None and same else {}

    def _note_starting_offsets(self, source: SourceTopic, offsets: dict[int, int]) -> None:
        before = self._progress or self._first_progress()
        self._progress = replace(
            before,
            offsets={**before.offsets, source.name: offsets},
            topic_ids={**before.topic_ids, source.name: source.topic_id},
            handover=handover.of_same_topic(before, source.name, source.topic_id),
            time_ms=clock_ms(),
        )
        self._is_pending = True

    def _first_progress(self) -> Progress:
        return Progress(self.names.progress_key, 0, {}, {}, clock_ms())

    # ---- process steps -------------------------------------------------------------------------------

    def known_progress(self) -> Progress:
        """Progress of a flow that has read a topic.

        Raises:
            OptionError: no topic was read since the last run.
        """
        if not self.is_fenced or self._progress is None:
            raise OptionError("Nothing was read yet", flow=self.flow, next_step="call Flow.read first")
        return self._progress

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
            found = find_joined(self.session.cluster, table.topic, self.deadline())
        key = self.names.progress_key
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
        deadline = Deadline(START_SECONDS, f"preparing table {options.table} of flow {self.flow}")
        with located(flow=self.flow, topic=options.table), log_context.within(flow=self.flow):
            before = self.known_progress()
            counts = {name: len(source.earliest) for name, source in self.sources.items()}
            topics, progress = ensure_table(
                self.session.cluster, options, processor, joins, before, counts, deadline, flow=self.flow
            )
            if progress is not before:
                self._progress, self._is_pending = progress, True
        if table_plan.is_beside(options, self.found or before):
            self._beside.add(options.table)
        if not options.changelog and not local:
            log.warning("flow %s: %s", self.flow, process.MOVES.format(table=options.table))
        spec = process.make_spec(
            options,
            processor,
            topics,
            flow=self.flow,
            flow_key=self.names.progress_key,
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
        )

    # ---- commit --------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit what this start has decided, in a transaction of its own. The record names this driver.

        To be called when the query is checked, before it runs: a start that fails leaves nothing behind.
        """
        if not self._is_pending or self._progress is None:
            return
        with located(flow=self.flow), log_context.within(flow=self.flow):
            progress = replace(self._progress, driver=self.driver)
            commit_progress(self.session, progress, self.sources, self.deadline())
            self._progress, self._is_pending = progress, False
            if self.found is None:
                warn_of_similar(self.session.cluster, progress, self.names)

    # ---- run -----------------------------------------------------------------------------------------

    def prepare_run(self, deadline: Deadline) -> Progress:
        """Connect and fence, if no source has done so. Returns the progress that the run begins with.

        Raises:
            ProgressConflictError: see `table_plan.check_inherited`. Only here all steps are known. Progress forgets the
                tables that no batch has used.
        """
        self.connect(deadline)
        progress = self.fence({}, deadline) or self._first_progress()
        try:
            table_plan.check_inherited(self.found or progress, self.steps, self._beside, flow=self.flow)
        except ProgressConflictError:
            self._forget_beside(progress)
            raise
        return progress

    def _forget_beside(self, progress: Progress) -> None:
        """Progress forgets tables that no batch has used."""
        self._progress = table_plan.without_tables(progress, self._beside)
        for table in self._beside:
            del self.steps[table]
        self._beside.clear()

    def prepare_outputs(self, options: SinkOptions, deadline: Deadline) -> list[str]:
        """Check the topics that are written, and decide what the last batch has left undecided in them.

        Returns:
            Names of the topics that are written, as far as they are known at a start: outputs, topics of dead letters
            and late records, tables.

        Raises:
            UnknownTopicError: a topic that is named does not exist.
            OptionError: the brokers do not allow such a long transaction timeout, or calls may take longer than it.
        """
        session = self.session
        of_steps = [calls for step in self.steps.values() for calls in calls_of(step.spec.processor)]
        calls = [*(order.calls for order in self.calls), *of_steps]
        check_times(calls, options.transaction_timeout_s, self._records.values(), self.flow)
        side_topics = process.side_topics(self.steps)
        targets = load_targets(session.cluster, options.topic, deadline, more=side_topics)
        of_calls = {each.dead_letter_topic: "dead letter" for each in self.calls if each.dead_letter_topic}
        check_letter_topics(session.cluster, {**of_calls, **side_topics}, targets, deadline, flow=self.flow)
        outputs = [topic for topic in (options.topic, *side_topics) if topic is not None]
        written = [*outputs, *(topic for step in self.steps.values() for topic in step.spec.topics.ids)]
        warn_of_settings(session.cluster, [*written, PROGRESS_TOPIC], deadline, flow=self.flow)
        session.decide(written, self._progress, deadline)
        session.transactions.timeout_ms = int(options.transaction_timeout_s * 1000)
        session.transactions.renew(deadline)
        return written

    def used(self) -> None:
        """To be called when a query was made: from now on the query moves progress."""
        self._is_used = True

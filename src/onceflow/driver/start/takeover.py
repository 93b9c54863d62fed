"""The takeover of a flow in Kafka: older drivers are fenced, progress is read, and the starts of sources are decided.

From the fence on, the flow's committed offsets cannot change, unless this driver changes them (I6).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from onceflow import hooks, interactive
from onceflow.client.cluster import GROUP, Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import REFUSED_S
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import find_topics
from onceflow.clock import clock_ms
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.record import handover, progress_log
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.driver.record.offset_log import Sources
from onceflow.driver.record.session import DriverSession
from onceflow.driver.standby.heartbeats import heard_lately
from onceflow.driver.standby.standby import Standby
from onceflow.driver.standby.wait import Rehearsed
from onceflow.driver.start.source_offsets import end_of_read, look_at
from onceflow.errors import FencedError, OnceflowError, OptionError, ProgressConflictError, located
from onceflow.logs import log_context
from onceflow.planning import source_starts, table_plan
from onceflow.planning.read_options import ReadOptions
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import DriverProcess, Progress, decode

log = logging.getLogger("onceflow")

#: How long a start may take, in seconds.
START_SECONDS = 60.0

_HEARTBEATS_S = 2.0
_SIMILAR_S = 3.0  # how long a start looks for flows of a similar name
#: What names of versions end with.
_VERSION = re.compile(r"[-_.]?(v?\d+|next|new|copy|fork|test|beta|green|blue)$")


class Takeover:
    """A driver takes a flow over, and holds it from its first connection until it is closed.

    Args:
        refused_s: how long the first connection waits while all bootstrap servers refuse, in seconds.
        standby: this driver as one of several that stand by for each other; None: it fences at once.

    Attributes:
        sources: the topics that are read. until: where their reads end, if they do.
        max_records: most records of one batch, by source; None: no limit.
        found: the progress that the takeover has found.
        driver: this process, since it has fenced older drivers.
    """

    def __init__(
        self, names: Names, settings: ClientSettings, *, refused_s: float, standby: Standby | None = None
    ) -> None:
        self.names = names
        self.standby = standby
        self.settings = settings
        self.refused_s = refused_s
        self.sources: dict[str, SourceTopic] = {}
        self.until: dict[str, dict[int, int]] = {}
        self.max_records: dict[str, int | None] = {}
        self.found: Progress | None = None
        self.driver: DriverProcess | None = None
        self._session: DriverSession | None = None
        self._progress: Progress | None = None
        self._is_pending = False  # progress has more than what is committed
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

    def deadline(self, what: str = "") -> Deadline:
        """Of a start. It is extended if the first connection may wait longer for the brokers.

        Args:
            what: is being done; empty: the flow is started.
        """
        seconds = START_SECONDS + max(0.0, self.refused_s - REFUSED_S)
        return Deadline(seconds, what or f"starting flow {self.flow}")

    def close(self) -> None:
        """Close the connections. A standby may take over then."""
        self.stand_down()
        if self._session is not None:
            self._session.cluster.close()

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

    def await_turn(self, source: str | None = None, rehearsal: Rehearsed | None = None) -> None:
        """Wait until no other driver of the flow is active, if this one is one of several. It has no limit.

        Args:
            source: a topic that it will read; None: not known. A standby that cannot read it would take nothing over.
            rehearsal: of what follows in this start; begun if it has to wait.

        Raises:
            OnceflowError: see `Standby.await_turn`; or there is no such topic.
        """
        if self.standby is None:
            return

        with located(flow=self.flow), log_context.within(flow=self.flow):
            self.connect(self.deadline())
            if source is not None:
                find_topics(self.session.cluster, {source: "source"}, self.deadline())
            interactive.stop_earlier(self.settings.bootstrap_servers, self.names.transactional_id)
            self.standby.await_turn(self.deadline, self._warm, rehearsal, reads=source or "")

    def when_taken_over(self, call: Callable[[FencedError], None]) -> None:
        """Call this, in any thread, when a standby is found to be active in place of this driver."""
        if self.standby is not None:
            self.standby.when_taken_over(call)

    def standbys(self) -> int | None:
        """How many other drivers stand by; None: not known, or this one is not one of several."""
        return None if self.standby is None else self.standby.others

    def stand_down(self) -> None:
        """The query has ended, for whatever reason: a standby may take over, although this process may live on."""
        if self.standby is not None:
            self.standby.close()

    def _warm(self, deadline: Deadline) -> None:
        """Ask for what a start asks first, so that its connections are there, and stay."""
        session = self.session
        progress_log.ensure_topic(session.cluster, deadline)
        session.described(deadline)
        session.cluster.coordinator(GROUP, self.names.group_id, deadline)

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
        if self.standby is None:
            self._warn_of_standbys(deadline)
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

    def _warn_of_standbys(self, deadline: Deadline) -> None:
        soon = Deadline(deadline.capped(_HEARTBEATS_S), f"reading heartbeats of flow {self.flow}")
        others = heard_lately(self.session.cluster, self.names.progress_key, soon)
        if others:
            log.warning(
                "flow %s: %s runs it or stands by, with standby=True, and this driver is without it: it takes over "
                "now, and they will take over from it. Stop one kind of them, or give standby=True to all",
                *(self.flow, ", ".join(each.process for each in others)),
            )

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
        self.max_records[options.topic] = options.max_records_per_batch
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
        before = self._progress or self.first_progress()
        self._progress = replace(
            before,
            offsets={**before.offsets, source.name: offsets},
            topic_ids={**before.topic_ids, source.name: source.topic_id},
            handover=handover.of_same_topic(before, source.name, source.topic_id),
            time_ms=clock_ms(),
        )
        self._is_pending = True

    def first_progress(self) -> Progress:
        """Of a flow that has none yet."""
        return Progress(self.names.progress_key, 0, {}, {}, clock_ms())

    def known_progress(self) -> Progress:
        """Progress of a flow that has read a topic.

        Raises:
            OptionError: no topic was read since the last run.
        """
        if not self.is_fenced or self._progress is None:
            raise OptionError("Nothing was read yet", flow=self.flow, next_step="call Flow.read first")
        return self._progress

    def decide(self, progress: Progress) -> None:
        """What `commit` commits from now on."""
        self._progress, self._is_pending = progress, True

    def forget_tables(self, progress: Progress, tables: set[str]) -> None:
        """Leave tables that no batch has used out of what `commit` commits."""
        self._progress = table_plan.without_tables(progress, tables)

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

    def used(self) -> None:
        """To be called when a query was made: from now on the query moves progress."""
        self._is_used = True


def warn_of_similar(cluster: Cluster, progress: Progress, names: Names) -> None:
    """Log a warning if a flow of a similar name reads the same topics.

    The program may have been meant as a copy of that flow, which `onceflow fork` was to make: it was not confirmed, or
    has failed. As a new flow it would read everything again, and write it again.

    Args:
        progress: with which the new flow begins.
    """
    try:
        found = CommittedProgress().read(cluster, Deadline(_SIMILAR_S, "looking for flows of a similar name"))
    except OnceflowError as problem:
        log.debug("flow %s: no flows of a similar name: %s", names.flow, problem)
        return
    alike = {}
    for key, (_, record) in found.items():
        other = key.decode(errors="replace")
        if other != progress.flow and _is_alike(other, progress.flow) and record.value is not None:
            try:
                alike[other] = decode(key, record.value)
            except OnceflowError:  # of a later version
                continue
    if (warning := warning_of(progress, alike, names.flow)) is not None:
        log.warning("flow %s: %s", names.flow, warning)


def warning_of(progress: Progress, others: Mapping[str, Progress], flow: str) -> str | None:
    """The warning about a new flow; None: there is no reason for one.

    Args:
        others: progress of flows of a similar name.
    """
    for name, other in sorted(others.items()):
        same = sorted(topic for topic in progress.offsets if topic in other.offsets)
        if same and other.became is None and other.batch_id > 0:
            return (
                f"it has no progress, so it begins as a new flow. Flow {name} reads {', '.join(same)}, too, and is at "
                f"batch {other.batch_id}. If {flow} is to be a copy of it that continues there: stop it, run "
                f"`onceflow reset {flow}`, delete its tables and outputs, and run `onceflow fork {name} {flow}`"
            )
    return None


def _is_alike(one: str, other: str) -> bool:
    """Whether both may be versions of one flow by their names: ``orders``, ``orders-v2``, ``orders-next``."""
    names = {one, _VERSION.sub("", one)}
    return other in names or _VERSION.sub("", other) in names

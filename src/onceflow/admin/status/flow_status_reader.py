"""Reads where flows are from Kafka. Everything is read-only: nobody is fenced, and no consumer group is joined."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from onceflow.admin.status.flow_status import (
    FlowStatus,
    LetterTopic,
    PartitionStatus,
    SourceStatus,
    TableStatus,
    TransactionStatus,
    expired,
    places,
    unknown_flow,
    unknown_partitions,
)
from onceflow.admin.status.standby_status import standby_drivers, standby_warnings
from onceflow.admin.status.status_answers import answered, gone, permitted
from onceflow.admin.transactions.open_transactions import PENDING
from onceflow.client.brokers import Held, held_back_warning, oldest_transaction, read_safety, settings_warnings
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord
from onceflow.client.nodes import silent_nodes
from onceflow.client.offsets import EARLIEST, LATEST, fetch_committed, list_offsets
from onceflow.client.producers import open_transactions
from onceflow.client.transaction_requests import describe_transaction
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.driver.record.progress_log import offset_of_hint, partition_of
from onceflow.errors import DeadlineExceededError, OnceflowError, OptionError, PermissionDeniedError, counted
from onceflow.protocol import acls, timestamps
from onceflow.protocol import progress as records
from onceflow.protocol.heartbeats import HEARTBEATS_TOPIC
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress

log = logging.getLogger("onceflow.admin")

#: A transaction that is open for so long, in seconds, is worth a warning.
HELD_AFTER_S = 60.0
#: A partition without a record for so long, in seconds, is worth a note.
IDLE_S = 3600.0
# How long a coordinator may take to answer.
_COORDINATOR_S = 5.0
_SMALL_FETCH_BYTES = 16 * 1024


class StatusReader:
    """Reads the status of flows, once or repeatedly.

    Args:
        transactional_id_prefix, group_id_prefix: as the flows have them.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id_prefix: str = "",
        group_id_prefix: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._prefixes = transactional_id_prefix, group_id_prefix
        self._clock = clock
        self._progress = CommittedProgress()
        self._silent: set[int] = set()
        #: Partitions of the progress topic that could not be asked in the last look, each with the reason.
        self.unseen: dict[int, str] = {}

    def read(self, flows: Sequence[str], deadline: Deadline) -> list[FlowStatus]:
        """The status of the named flows, or of all flows of the cluster.

        What a broker leads that does not answer is left out, and named. One that fails meanwhile is noticed at a second
        look, for which half of the time is kept.

        Raises:
            OptionError: there is no flow of this name.
            PermissionDeniedError: the progress topic may not be read, and no flow is named.
            DeadlineExceededError: no broker answers, or brokers fail again and again.
        """
        self._cluster.connect(deadline)
        try:
            return self._look(flows, Deadline(deadline.remaining / 2, deadline.what))
        except DeadlineExceededError as late:
            log.debug("looking again: %s", late)
        return self._look(flows, deadline)

    def _look(self, flows: Sequence[str], deadline: Deadline) -> list[FlowStatus]:
        prefix = self._prefixes[0]
        there = self._cluster.topics(None, deadline)
        leaders = {leader for info in there.values() for leader in info.leaders.values() if leader >= 0}
        self._silent = silent_nodes(self._cluster, leaders, deadline)
        self.unseen = self._unseen(there[PROGRESS_TOPIC]) if PROGRESS_TOPIC in there else {}
        try:
            found = self._progress.read(self._cluster, deadline, self.unseen)
        except PermissionDeniedError as refused:
            if not flows:
                raise PermissionDeniedError(
                    "The flows of this cluster are not known: their progress may not be read",
                    topic=PROGRESS_TOPIC,
                    detail=refused.detail,
                    next_step=f"{acls.grant('READ', acls.TOPIC, PROGRESS_TOPIC)}, or name a flow to see the rest",
                ) from refused
            statuses = [FlowStatus(name, missing=[f"READ on topic {PROGRESS_TOPIC}"]) for name in flows]
            for status in statuses:
                self._transaction(status, deadline)
            return statuses
        known = {key.decode(errors="replace"): (key, *place) for key, place in found.items()}
        hidden = {name: self.unseen.get(partition_of(prefix + name.removeprefix(prefix)), "") for name in flows}
        uncommitted: dict[str, FlowStatus] = {}
        for name in flows:
            if name not in known and prefix + name not in known and not hidden[name]:
                starting = self._starting(prefix + name.removeprefix(prefix), there, deadline)
                if starting is None:
                    raise unknown_flow(name, known)
                uncommitted[starting.flow] = starting
        chosen = [name if name in known else prefix + name for name in flows] or sorted(
            name for name, (key, _, record) in known.items() if name.startswith(prefix) and not _is_over(key, record)
        )
        settings = self._settings(deadline) if chosen else []
        statuses = [
            self._flow(name, *known[name], there, settings, deadline) if name in known else self.hidden(name, deadline)
            for name in dict.fromkeys(chosen)
            if name not in uncommitted
        ]
        for status in statuses if flows else ():
            self._standbys(status, there, deadline)
        return [*statuses, *uncommitted.values()]

    def _starting(self, name: str, there: Mapping[str, TopicInfo], deadline: Deadline) -> FlowStatus | None:
        """A flow that has no progress, but drivers with standby=True that are heard."""
        status = FlowStatus(name)
        self._standbys(status, there, deadline)
        status.warnings.insert(0, "nothing is committed yet: it is being started for the first time")
        return status if status.standbys else None

    def _standbys(self, status: FlowStatus, there: Mapping[str, TopicInfo], deadline: Deadline) -> None:
        soon = Deadline(deadline.capped(_COORDINATOR_S), f"reading heartbeats of {status.flow}")
        try:
            found = answered(
                status,
                f"topic {HEARTBEATS_TOPIC}",
                lambda: permitted(
                    status,
                    f"READ on topic {HEARTBEATS_TOPIC}",
                    lambda: standby_drivers(self._cluster, there, status.flow, self._clock(), soon),
                ),
            )
        except OnceflowError as problem:  # the flow may have no standby at all
            status.warnings.append(f"its standbys are not known: {problem.what}. {problem.next_step}")
            return
        status.standbys = found or []
        status.warnings += standby_warnings(status.standbys)

    def is_hidden(self, name: str) -> bool:
        """Whether the progress of a flow would be in a partition that could not be asked in the last look."""
        return partition_of(name) in self.unseen

    def hidden(self, name: str, deadline: Deadline) -> FlowStatus:
        """A flow whose progress is in a partition that could not be asked in the last look."""
        partition = partition_of(name)
        status = FlowStatus(name, unseen=[f"{PROGRESS_TOPIC}-{partition}, with its progress: {self.unseen[partition]}"])
        self._transaction(status, deadline)
        return status

    def _unseen(self, info: TopicInfo) -> dict[int, str]:
        """The partitions of a topic that cannot be asked, each with the reason."""
        found = {}
        for partition, leader in sorted(info.leaders.items()):
            if leader < 0:
                found[partition] = "it has no leader"
            elif leader in self._silent:
                found[partition] = f"its leader, broker {leader}, does not answer"
        return found

    def _settings(self, deadline: Deadline) -> list[str]:
        """Warnings about settings of the progress topic with which it can be lost."""
        topics, brokers = read_safety(self._cluster, [PROGRESS_TOPIC], deadline)
        return settings_warnings([each for each in topics if each.topic == PROGRESS_TOPIC], brokers)

    def _flow(
        self,
        name: str,
        key: bytes,
        partition: int,
        record: LogRecord,
        there: Mapping[str, TopicInfo],
        settings: Sequence[str],
        deadline: Deadline,
    ) -> FlowStatus:
        status = FlowStatus(name, warnings=[*settings])
        self._transaction(status, deadline)
        try:
            progress = records.decode(key, record.value or b"")
        except OnceflowError as unreadable:
            status.warnings.append(unreadable.what)
            return status
        if progress.became is not None:
            status.notes.append(
                f"it has taken the place of flow {progress.became}, and does not exist under its own name any more: "
                "`onceflow reset` makes the name free"
            )
        if progress.batch_id == 0 and progress.became is None:
            status.notes.append(
                "it has started, and has committed no batch yet; if it is not to run, `onceflow reset` forgets it"
            )
        status.batch, status.last_commit_ms = progress.batch_id, progress.time_ms
        status.age_s = self._age_s(progress.time_ms)
        status.producer_id, status.producer_epoch = progress.producer_id, progress.producer_epoch
        status.committed_by = progress.driver
        read = self._topics_read(status, progress, record.offset, deadline)
        for topic, offsets in sorted(progress.offsets.items()):
            if topic in read:
                status.sources.append(self._source(status, progress, topic, offsets, there, deadline))
            else:
                status.notes.append(f"{topic} is not read any more; its offsets are kept")
        for topic, offsets in sorted(progress.changelogs.items()):
            found = self._table(status, progress, topic, offsets, there, deadline)
            table = progress.tables.get(topic)
            status.tables.append(found if table is None else replace(found, watermark_ms=table.watermark_ms))
        for topic, table in sorted(progress.tables.items()):
            if table.local is not None:
                status.tables.append(TableStatus(topic, {}, None, table.watermark_ms))
        for topic, ends in sorted(progress.joined.items()):
            self._joined(status, progress, topic, ends, there, deadline)
        for topic, role in sorted(progress.side_topics.items()):
            status.letters.append(self._letters(status, topic, role, there, deadline))
        return status

    def _age_s(self, epoch_ms: int) -> float:
        return max(0.0, self._clock() - epoch_ms / 1000)

    def _names(self, flow: str) -> Names:
        prefix, group_prefix = self._prefixes
        return Names(flow.removeprefix(prefix), prefix, group_prefix)

    def _transaction(self, status: FlowStatus, deadline: Deadline) -> None:
        try:
            name = self._names(status.flow).transactional_id
        except OptionError:
            return  # a record that no flow of ours has written
        soon = Deadline(deadline.capped(_COORDINATOR_S), f"asking the coordinator of {name}")
        found = answered(
            status,
            f"transactional id {name}",
            lambda: permitted(
                status,
                f"DESCRIBE on transactional id {name}",
                lambda: describe_transaction(self._cluster, name, soon),
            ),
        )
        if found is not None:
            started_ms = int(found.get("started_ms", -1))
            status.transaction = TransactionStatus(
                name,
                str(found["state"]),
                int(found["producer_id"]),
                int(found["producer_epoch"]),
                self._age_s(started_ms) if found["state"] in PENDING and started_ms >= 0 else None,
            )

    def _topics_read(self, status: FlowStatus, progress: Progress, at: int, deadline: Deadline) -> set[str]:
        """The sources without those that the last batch has not read: their offsets in the group point elsewhere."""
        if len(progress.offsets) < 2:
            return set(progress.offsets)
        group = self._names(status.flow).group_id
        soon = Deadline(deadline.capped(_COORDINATOR_S), f"asking the coordinator of group {group}")
        committed = answered(
            status,
            f"group {group}",
            lambda: permitted(
                status,
                f"DESCRIBE on group {group} (so topics that are not read any more are counted as sources)",
                lambda: fetch_committed(self._cluster, group, None, soon, stable=False),
            ),
        )
        left = {
            topic
            for topic, partitions in (committed or {}).items()
            if all(offset_of_hint(metadata, progress.flow) != at for _, metadata in partitions.values())
        }
        return set(progress.offsets) - left or set(progress.offsets)

    def _source(
        self,
        status: FlowStatus,
        progress: Progress,
        topic: str,
        offsets: Mapping[int, int],
        there: Mapping[str, TopicInfo],
        deadline: Deadline,
    ) -> SourceStatus:
        known = progress.topic_ids.get(topic)
        info = self._same(
            status, topic, known, there, deadline, role="source", so="; the flow's offsets are of the old"
        )
        if info is None:
            return SourceStatus(topic, offsets, None)
        unseen = self._told_unseen(status, topic, info)
        numbers = sorted(info.leaders.keys() - unseen.keys())
        ends = permitted(status, f"DESCRIBE on topic {topic}", lambda: self._ends(topic, numbers, deadline))
        if ends is None:
            return SourceStatus(topic, offsets, None)
        parts = [
            self._partition(status, topic, number, offsets.get(number), *ends[number], deadline)
            for number in sorted(ends)
        ]
        status.warnings += expired(topic, parts)
        held = answered(status, f"transactions of {topic}", lambda: self._held(status, topic, parts, deadline))
        status.warnings += held or []
        unknown_partitions(status, topic, parts)
        idle = self._idle(topic, [n for n, (_, _, end) in ends.items() if end], deadline)  # others never had a record
        if idle:
            status.notes.append(f"no record for {IDLE_S / 3600:g} h: {places(topic, idle)}")
        return SourceStatus(topic, offsets, parts, unseen, held or [])

    def _told_unseen(self, status: FlowStatus, topic: str, info: TopicInfo) -> dict[int, str]:
        """As `_unseen`. The status names these partitions."""
        unseen = self._unseen(info)
        status.unseen += [f"{topic}-{number}: {reason}" for number, reason in unseen.items()]
        return unseen

    def _same(
        self,
        status: FlowStatus,
        topic: str,
        known: str | None,
        there: Mapping[str, TopicInfo],
        deadline: Deadline,
        *,
        role: str,
        so: str,
    ) -> TopicInfo | None:
        """The topic, if it is the one that the flow knows; None: it is gone, and the status says so.

        Args:
            known: its id, as progress has it.
            so: what it means that it was created anew, for the warning.
        """
        info = there.get(topic)
        if info is None:
            gone(self._cluster, status, topic, deadline, role=role)
        elif known not in (None, info.topic_id):
            status.warnings.append(f"{role} topic {topic} was deleted and created anew{so}")
            return None
        return info

    def _ends(self, topic: str, numbers: Sequence[int], deadline: Deadline) -> dict[int, tuple[int, int, int]]:
        """First offset, last stable offset and high watermark."""
        span = {topic: numbers}
        first = list_offsets(self._cluster, span, EARLIEST, deadline)[topic]
        stable = list_offsets(self._cluster, span, LATEST, deadline)[topic]
        high = list_offsets(self._cluster, span, LATEST, deadline, committed=False)[topic]
        return {number: (first[number], stable[number], high[number]) for number in numbers}

    def _partition(
        self,
        status: FlowStatus,
        topic: str,
        number: int,
        offset: int | None,
        first: int,
        stable: int,
        high: int,
        deadline: Deadline,
    ) -> PartitionStatus:
        begin = first if offset is None else offset
        lag = max(0, stable - begin)
        seconds: float | None = 0.0
        if lag:
            permission = f"READ on topic {topic}"
            if permission in status.missing:
                seconds = None
            else:
                seconds = permitted(
                    status, permission, lambda: self._first_age_s(topic, number, begin, stable, deadline)
                )
        return PartitionStatus(number, offset, first, stable, high, lag, seconds, max(0, high - stable))

    def _first_age_s(self, topic: str, number: int, begin: int, stable: int, deadline: Deadline) -> float | None:
        """Age of the first committed record; 0 if there are only markers and records of aborted transactions."""
        reader = CommittedReader(self._cluster, deadline.remaining, fetch_bytes=_SMALL_FETCH_BYTES)
        for chunk in reader.read(topic, number, begin, stable):
            if chunk.keys:
                age_ms = timestamps.age_ms(int(chunk.timestamps_ms[0]), int(self._clock() * 1000))
                return None if age_ms is None else age_ms / 1000
        return 0.0

    def _held(self, status: FlowStatus, topic: str, parts: Iterable[PartitionStatus], deadline: Deadline) -> list[str]:
        """Warnings about transactions of others that have been open for long."""
        found = []
        for part in parts:
            if not part.held_back:
                continue
            if not self._may_see(status, topic, part.partition, deadline):
                continue
            held = Held(topic, part.partition, part.stable, part.end, 0.0)
            soon = Deadline(deadline.capped(_COORDINATOR_S), f"asking whose transaction is open in {topic}")
            transaction = oldest_transaction(self._cluster, held, soon)
            if transaction is None:
                continue  # it has ended meanwhile, or may not be seen; the count is shown in any case
            begun_ms = transaction.started_ms if transaction.started_ms >= 0 else transaction.last_write_ms
            age_ms = timestamps.age_ms(begun_ms, int(self._clock() * 1000))
            if age_ms is None or age_ms >= HELD_AFTER_S * 1000:  # if nobody knows, it may be old
                held = Held(topic, part.partition, part.stable, part.end, (age_ms or 0) / 1000)
                found.append(held_back_warning(held, transaction))
        return found

    def _may_see(self, status: FlowStatus, topic: str, number: int, deadline: Deadline) -> bool:
        """Whether this principal may see the transactions of a partition."""
        look = functools.partial(open_transactions, self._cluster, [(topic, number)], deadline)
        return permitted(status, f"READ on topic {topic}", look) is not None

    def _idle(self, topic: str, numbers: Sequence[int], deadline: Deadline) -> list[int]:
        if not numbers:
            return []
        since_ms = int((self._clock() - IDLE_S) * 1000)
        later = list_offsets(self._cluster, {topic: numbers}, since_ms, deadline, committed=False)[topic]
        return sorted(number for number, offset in later.items() if offset < 0)

    def _table(
        self,
        status: FlowStatus,
        progress: Progress,
        topic: str,
        offsets: Mapping[int, int],
        there: Mapping[str, TopicInfo],
        deadline: Deadline,
    ) -> TableStatus:
        known = progress.topic_ids.get(topic)
        info = self._same(status, topic, known, there, deadline, role="table", so="; its rows are gone")
        if info is None:
            return TableStatus(topic, offsets, None)
        if info.partitions > len(offsets) and not topic.endswith(INTERNAL_SUFFIX):
            status.warnings.append(
                f"table topic {topic} has {info.partitions} partitions, and its rows are in the first {len(offsets)}: "
                f"`onceflow table repartition {self._names(status.flow).flow} {topic} --partitions {info.partitions}` "
                "moves the rows; without it, the flow does not start"
            )
        unseen = self._told_unseen(status, topic, info)
        numbers = sorted(number for number in offsets if number in info.leaders and number not in unseen)
        first = permitted(
            status,
            f"DESCRIBE on topic {topic}",
            lambda: list_offsets(self._cluster, {topic: numbers}, EARLIEST, deadline)[topic],
        )
        if first is None or len(numbers) < len(offsets):
            return TableStatus(topic, offsets, None)
        return TableStatus(topic, offsets, sum(max(0, offsets[number] - first[number]) for number in numbers))

    def _joined(
        self,
        status: FlowStatus,
        progress: Progress,
        topic: str,
        ends: Mapping[int, int],
        there: Mapping[str, TopicInfo],
        deadline: Deadline,
    ) -> None:
        """Warn if a table that the flow joins with is not what it was."""
        # Of a topic that is read as a source, too, the id belongs to its offsets.
        known = None if topic in progress.offsets else progress.topic_ids.get(topic)
        info = self._same(status, topic, known, there, deadline, role="joined table", so=": start the flow again")
        if info is not None and info.partitions != len(ends):
            status.warnings.append(
                f"joined table {topic} has {counted(info.partitions, 'partition')}, and the last batch saw "
                f"{len(ends)}: start the "
                "flow again when its rows have moved (`onceflow table repartition`)"
            )

    def _letters(
        self, status: FlowStatus, topic: str, role: str, there: Mapping[str, TopicInfo], deadline: Deadline
    ) -> LetterTopic:
        info = there.get(topic)
        if info is None:
            gone(self._cluster, status, topic, deadline, role=role)
            return LetterTopic(topic, role)
        unseen = self._told_unseen(status, topic, info)
        numbers = sorted(info.leaders.keys() - unseen.keys())
        ends = permitted(status, f"DESCRIBE on topic {topic}", lambda: self._ends(topic, numbers, deadline))
        if ends is None or unseen:
            return LetterTopic(topic, role)
        most = sum(stable - first for first, stable, _ in ends.values())
        return LetterTopic(topic, role, {number: stable for number, (_, stable, _) in ends.items()}, most)


def _is_over(key: bytes, record: LogRecord) -> bool:
    """Whether the flow has taken another one's place."""
    try:
        return records.decode(key, record.value or b"").became is not None
    except OnceflowError:
        return False  # its status says what is wrong with the record

"""Copies a running flow under a new name: its tables and its progress at one position, in one transaction.

The flow that is copied is not disturbed: only the transactional id of the new one is initialised. The topics of the new
tables are created before the transaction. After a crash there may be such topics without rows; the same command, run
again, completes the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onceflow.admin.change.flow_transaction import FlowTransaction, Wording, Written
from onceflow.admin.change.move import committed, known
from onceflow.admin.change.settled_progress import SettledProgress
from onceflow.admin.records.writer import Writer
from onceflow.admin.versions.fork_plan import check_can_fork, check_fresh, forked_progress, plan_tables, topics_of
from onceflow.admin.versions.output_ends import OutputEnds
from onceflow.admin.versions.table_copy import TableCopy, Tell
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.topics import create_own_topic, find_topics, own_settings
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.errors import ProgressConflictError, UnknownTopicError, counted, located
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import Offsets, Progress
from onceflow.state.changelog.compacted_topic import tombstones_kept_ms
from onceflow.state.changelog.topics import TableTopics, check_known, check_readable, ensure_topics

_SECONDS = 60.0

Ends = dict[str, dict[int, int]]

_NOT_COPIED = ("cleanup.policy", "min.insync.replicas")  # create_own_topic sets them


@dataclass(frozen=True)
class Forked:
    """What is copied, or was.

    Args:
        flow: the name of the flow that is copied. new: that of the copy.
        origin: progress of the flow that is copied: as it is now, or, after the copy, the record that was copied.
        tables: by table, the name of its copy.
        progress: of the copy; None: nothing was copied yet.
        records: how many records were copied.
        offsets: how many offsets the table topics span.
        rounds: how often the end of the log was read until nothing was missing there.
        already: whether the copy was made before.
    """

    flow: str
    new: str
    origin: Progress
    tables: Mapping[str, str]
    progress: Progress | None = None
    records: int = 0
    offsets: int = 0
    rounds: int = 0
    already: bool = False


def preview(cluster: Cluster, names: Names, new: Names, wanted: Mapping[str, str]) -> Forked:
    """What `fork` would do now. Nothing is changed. Errors as of `fork`.

    If the copy exists already and has not run yet, it is described, with its progress.
    """
    deadline = Deadline(_SECONDS, f"looking at flow {names.flow}")
    there = committed(cluster, new, deadline)
    if check_fresh(there, new, names) is not None:
        return _existing(names, new, there)
    origin = known(committed(cluster, names, deadline), names, cluster)
    tables = plan_tables(origin, names, new, wanted)
    with located(flow=new.flow):
        for table, name in tables.items():
            check_copied_topics(cluster, origin, table, name, deadline)
    stable = _stable(cluster, topics_of(tables), origin, deadline)
    return Forked(names.flow, new.flow, origin, tables, offsets=_total(stable))


def fork(cluster: Cluster, names: Names, new: Names, wanted: Mapping[str, str], tell: Tell) -> Forked:
    """Copy a flow. Drivers of the flow that is copied are not fenced; those of the new name are.

    Args:
        wanted: names for the copies of tables, by table.

    Raises:
        OptionError, ProgressConflictError: it cannot be copied.
        OnceflowError: see `TableCopy.run` and `FlowTransaction.commit`. Nothing was copied, but for new topics without
            rows.
    """
    wording = Wording(
        doing=f"copying flow {names.flow} to {new.flow}",
        too_slow="The tables were not copied",
        undone="nothing was copied; the brokers' limit is transaction.max.timeout.ms. A table that is too large for "
        "one transaction cannot be copied: start the new version from the source instead",
    )
    deadline = Deadline(_SECONDS, f"preparing the copy of flow {names.flow}")
    transaction = FlowTransaction(cluster, new, wording)
    transaction.session.transactions.check_supported(deadline)
    progress_log.ensure_topic(cluster, deadline)
    plan_tables(known(committed(cluster, names, deadline), names), names, new, wanted)  # before anybody is fenced
    settled = SettledProgress(cluster, names)
    with located(flow=new.flow):
        # An earlier try, which was killed, may have a transaction open in the partition that is read next.
        transaction.take_over(deadline)
    origin = known(settled.read(deadline), names)
    tables = plan_tables(origin, names, new, wanted)
    with located(flow=new.flow):
        there = transaction.session.progress({}, deadline, missing_is_fine=True)
        if check_fresh(there, new, names) is not None:
            return _existing(names, new, there)
        return _Fork(cluster, names, new, origin, tables, settled).run(transaction, tell, deadline)


class _Fork:
    """One copy of a flow, when the new name is taken over."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        new: Names,
        origin: Progress,
        tables: Mapping[str, str],
        settled: SettledProgress,
    ) -> None:
        self._cluster, self._names, self._new = cluster, names, new
        self._origin, self._tables, self._topics = origin, tables, topics_of(tables)
        self._settled = settled
        self._outputs = OutputEnds(cluster)

    def run(self, transaction: FlowTransaction, tell: Tell, deadline: Deadline) -> Forked:
        """Make the topics, and copy everything in one transaction."""
        made = {
            name: ensure_copied_topics(self._cluster, self._origin, table, name, deadline)
            for table, name in self._tables.items()
        }
        ends = ends_of_empty(self._cluster, made, deadline)
        copy = TableCopy(
            CommittedReader(self._cluster),
            lambda: _stable(
                self._cluster, self._topics, self._origin, Deadline(_SECONDS, "reading the ends of tables")
            ),
            self._last_progress,
            self._names,
            self._topics,
            tombstone_ms=tombstones_kept_ms(self._cluster, self._topics, deadline),
            tell=tell,
        )
        found = self._origin

        def write(writer: Writer, until: Deadline) -> None:
            nonlocal found
            found = copy.run(writer, self._origin, until)
            check_can_fork(found, self._names)

        def after(written: Written) -> Progress:
            for (topic, partition), acknowledged in written.items():
                ends[topic][partition] = acknowledged.end_offset
            identity = transaction.session.transactions.identity
            return self._progress(found, made, ends, (identity.producer_id, identity.producer_epoch))

        progress = transaction.commit(self._topics.values(), write, after)
        return Forked(
            self._names.flow,
            self._new.flow,
            found,
            self._tables,
            progress,
            copy.records,
            _total(found.changelogs),
            copy.rounds,
        )

    def _progress(
        self, found: Progress, made: Mapping[str, TableTopics], ends: Offsets, producer: tuple[int, int]
    ) -> Progress:
        deadline = Deadline(_SECONDS, "reading the ends of outputs")
        return forked_progress(
            found,
            self._new,
            self._tables,
            ends=ends,
            topic_ids={name: topic_id for each in made.values() for name, topic_id in each.ids.items()},
            outputs=self._outputs.behind(found, self._settled.outputs, deadline),
            time_ms=clock_ms(),
            producer=producer,
        )

    def _last_progress(self) -> Progress | None:
        """The last committed progress. Before it is read, it is noted where the outputs stand."""
        deadline = Deadline(_SECONDS, f"reading the progress of flow {self._names.flow}")
        self._outputs.note(self._settled.outputs, deadline)
        return self._settled.read(deadline)


def _existing(names: Names, new: Names, progress: Progress | None) -> Forked:
    """A copy that was made before."""
    if progress is None or progress.forked is None:
        raise ValueError("there is no copy")
    forked = progress.forked
    origin = Progress(forked.flow, forked.batch_id, forked.offsets, {}, forked.time_ms)
    return Forked(names.flow, new.flow, origin, {}, progress, already=True)


def _stable(cluster: Cluster, topics: Mapping[str, str], origin: Progress, deadline: Deadline) -> Ends:
    """Last stable offsets of the table topics."""
    if not topics:
        return {}
    return list_offsets(cluster, {topic: sorted(origin.changelogs[topic]) for topic in topics}, LATEST, deadline)


def _total(ends: Offsets) -> int:
    return sum(sum(by_partition.values()) for by_partition in ends.values())


def check_copied_topics(cluster: Cluster, origin: Progress, table: str, name: str, deadline: Deadline) -> None:
    """Check the topics of a table's copy, as far as they exist.

    Raises:
        ProgressConflictError: they have rows, or another number of partitions.
    """
    found = find_topics(cluster, {table: "table", table + INTERNAL_SUFFIX: "table"}, deadline)
    ids = {each: info.topic_id for each, info in found.items()}
    known_topics = TableTopics(
        table, table + INTERNAL_SUFFIX, ids[table], ids[table + INTERNAL_SUFFIX], found[table].partitions, 0, 0
    )
    check_known(known_topics, origin.changelogs, origin.topic_ids, flow=origin.flow)
    for topic in (name, name + INTERNAL_SUFFIX):
        try:
            info = cluster.topics([topic], deadline, once=True)[topic]
        except UnknownTopicError:
            continue
        _check_count(topic, info.partitions, table, len(origin.changelogs[table]))
        stable = list_offsets(cluster, {topic: sorted(info.leaders)}, LATEST, deadline)[topic]
        _check_empty(cluster, topic, stable)


def ensure_copied_topics(cluster: Cluster, origin: Progress, table: str, name: str, deadline: Deadline) -> TableTopics:
    """The topics of a table's copy, created if they are missing, with the settings of the table's own topics."""
    check_copied_topics(cluster, origin, table, name, deadline)
    partitions = len(origin.changelogs[table])
    for suffix in ("", INTERNAL_SUFFIX):
        try:
            cluster.topics([name + suffix], deadline, once=True)
            continue
        except UnknownTopicError:
            settings = own_settings(cluster, table + suffix, deadline)
        if settings is not None:
            configs = {key: value for key, value in settings.items() if value is not None and key not in _NOT_COPIED}
            create_own_topic(
                cluster, name + suffix, "table topic", partitions=partitions, configs=configs, deadline=deadline
            )
    topics = ensure_topics(cluster, name, partitions, deadline)
    _check_count(name, topics.partitions, table, partitions)
    return topics


def _check_count(topic: str, found: int, table: str, wanted: int) -> None:
    if found != wanted:
        raise ProgressConflictError(
            f"Topic {topic} has {counted(found, 'partition')}, table {table} has {wanted}",
            topic=topic,
            next_step=f"delete the topic, or give another name: --table {table}=NAME",
        )


def _check_empty(cluster: Cluster, topic: str, ends: Mapping[int, int]) -> None:
    """Check that a topic has no rows. Records of aborted transactions and tombstones are allowed."""
    reader = CommittedReader(cluster, _SECONDS)
    for partition, end in ends.items():
        last: dict[bytes | None, bytes | None] = {}
        for chunk in reader.read(topic, partition, 0, end):
            last.update(zip(chunk.keys, chunk.values, strict=True))
        if any(value is not None for value in last.values()):
            raise ProgressConflictError(
                f"Topic {topic} holds rows already: they would become state of the new flow",
                topic=f"{topic}-{partition}",
                next_step=f"delete {topic.removesuffix(INTERNAL_SUFFIX)} and its companion, or give another name with "
                "--table",
            )


def ends_of_empty(cluster: Cluster, made: Mapping[str, TableTopics], deadline: Deadline) -> dict[str, dict[int, int]]:
    """The ends of the new topics, which have no rows. Nobody else writes them any more."""
    spans = {topic: list(range(each.partitions)) for each in made.values() for topic in each.ids}
    if not spans:
        return {}
    found = list_offsets(cluster, spans, LATEST, deadline)
    check_readable(cluster, found, deadline)
    for topic, ends in found.items():
        _check_empty(cluster, topic, ends)
    return found

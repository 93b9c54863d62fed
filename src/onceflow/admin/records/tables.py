"""Tables as Kafka knows them: which topics can be tables, how large they are, and which flow writes each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.decided import ends_of
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.topics import find_topic, find_topics, topic_configs
from onceflow.errors import OnceflowError, PermissionDeniedError
from onceflow.protocol import progress as records
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.state.changelog.compacted_topic import check_policy

log = logging.getLogger("onceflow.tables")

SETTINGS = ("cleanup.policy", "delete.retention.ms", "min.compaction.lag.ms")


@dataclass(frozen=True)
class Owner:
    """The flow that writes a table, as its progress says.

    Args:
        flow: its name, after its prefix of transactional ids if it has one.
        batch: the number of the committed batch.
        offsets: end offsets of the table's partitions in this batch.
        topic_id: Kafka's id of the topic, as the flow knows it; empty: it does not.
    """

    flow: str
    batch: int
    offsets: Mapping[int, int]
    topic_id: str


@dataclass(frozen=True)
class PartitionOffsets:
    """Where a partition of a table begins and ends.

    Args:
        leader: node id of the leader; -1 while there is none.
        first, stable, end: the first offset, the last stable offset, and the end offset.
    """

    partition: int
    leader: int
    first: int
    stable: int
    end: int


@dataclass(frozen=True)
class TableTopic:
    """A compacted topic.

    Args:
        companion: the companion topic, if it has one; then it is the table of a flow.
        companion_records: an upper bound of its records: entries of maps and lists, and timers.
        owner: the flow; None: no progress record that can be read mentions the table.
    """

    name: str
    partitions: list[PartitionOffsets]
    companion: str | None
    companion_records: int
    owner: Owner | None

    @property
    def records_at_most(self) -> int:
        """An upper bound of the number of records. Compaction, aborted records and markers make it smaller."""
        return sum(each.end - each.first for each in self.partitions)


def find_tables(cluster: Cluster, deadline: Deadline) -> list[TableTopic]:
    """All topics that can be tables, in order of names: compacted ones, without internal and companion topics.

    Where the settings may not be read, a topic that has a companion topic is taken for a table.
    """
    there = cluster.topics(None, deadline)
    named = {
        name: info
        for name, info in sorted(there.items())
        if not (info.internal or name.startswith("__"))
        and not (name.endswith(INTERNAL_SUFFIX) and name.removesuffix(INTERNAL_SUFFIX) in there)
    }
    found = {}
    unreadable = 0
    policies = topic_configs(cluster, named, ["cleanup.policy"], deadline) if named else {}
    for name, info in named.items():
        policy = policies[name]["cleanup.policy"]
        unreadable += policy is None
        if (name + INTERNAL_SUFFIX in there) if policy is None else ("compact" in policy):
            found[name] = info
    if unreadable:
        log.warning("no permission to read the settings of %d topics: compacted ones may be missing here", unreadable)
    return _completed(cluster, found, there, deadline)


def describe_table(cluster: Cluster, name: str, deadline: Deadline) -> tuple[TableTopic, dict[str, str | None]]:
    """One table, and its `SETTINGS`, which are None if this principal may not read them.

    Raises:
        UnknownTopicError: there is no such topic.
        OptionError: it is not compacted.
    """
    info = find_topics(cluster, {name: "table"}, deadline, needs="DESCRIBE")[name]
    settings = topic_configs(cluster, [name], SETTINGS, deadline)[name]
    check_policy(name, settings["cleanup.policy"])
    (table,) = _completed(cluster, {name: info}, cluster.topics(None, deadline), deadline)
    return table, settings


def companion_records(cluster: Cluster, name: str, deadline: Deadline) -> int:
    """How many records the companion topic of a table has at most; 0: there is none that this principal may see."""
    companion = name + INTERNAL_SUFFIX
    info = cluster.topics(None, deadline).get(companion)
    if info is None:
        return 0
    span = {companion: sorted(info.leaders)}
    first, end = (list_offsets(cluster, span, place, deadline)[companion] for place in (EARLIEST, LATEST))
    return _between(first, end)


def _between(first: Mapping[int, int], end: Mapping[int, int]) -> int:
    """How many offsets are between these, over all partitions."""
    return sum(end[each] - at for each, at in first.items())


def _completed(
    cluster: Cluster, tables: Mapping[str, TopicInfo], there: Mapping[str, TopicInfo], deadline: Deadline
) -> list[TableTopic]:
    """Tables with their offsets and owners."""
    if not tables:
        return []
    companions = {name: name + INTERNAL_SUFFIX for name in tables if name + INTERNAL_SUFFIX in there}
    spans = {name: sorted(info.leaders) for name, info in tables.items()}
    spans |= {name: sorted(there[name].leaders) for name in companions.values()}
    first = list_offsets(cluster, spans, EARLIEST, deadline)
    stable = list_offsets(cluster, spans, LATEST, deadline)
    end = list_offsets(cluster, spans, LATEST, deadline, committed=False)
    progress = list(all_progress(cluster, deadline))
    return [
        TableTopic(
            name,
            [
                PartitionOffsets(each, info.leaders[each], first[name][each], stable[name][each], end[name][each])
                for each in spans[name]
            ],
            companions.get(name),
            _between(first[companions[name]], end[companions[name]]) if name in companions else 0,
            _owner(info, progress),
        )
        for name, info in tables.items()
    ]


def _owner(info: TopicInfo, progress: list[Progress]) -> Owner | None:
    """The flow whose progress has the table; the latest one, if the table has gone from one flow to another."""
    last = records.writer_of(info.name, info.topic_id, progress)
    if last is None:
        return None
    return Owner(last.flow, last.batch_id, last.changelogs[info.name], last.topic_ids.get(info.name, ""))


def all_progress(
    cluster: Cluster,
    deadline: Deadline,
    *,
    strict: bool = False,
    unreadable: Callable[[str, OnceflowError], None] | None = None,
) -> Iterator[Progress]:
    """The committed progress of each flow. Open transactions of others may hide the newest ones.

    Args:
        strict: raise an error if the progress topic may not be read. Otherwise it is logged.
        unreadable: is called with the progress key and the error of a record that this version cannot read, and may
            raise it. Such a record is left out otherwise: in most cases it is not its flow that is asked for.
    """
    last: dict[bytes, bytes | None] = {}
    try:
        info = find_topic(cluster, PROGRESS_TOPIC, "READ", deadline)
        if info is None:
            return  # no flow has run here
        ends = list_offsets(cluster, {PROGRESS_TOPIC: sorted(info.leaders)}, LATEST, deadline)[PROGRESS_TOPIC]
        reader = CommittedReader(cluster, deadline.remaining)
        for partition, end in ends.items():
            for chunk in reader.read(PROGRESS_TOPIC, partition, 0, end):
                last.update((key, value) for key, value in zip(chunk.keys, chunk.values, strict=True) if key)
    except PermissionDeniedError as refused:
        if strict:
            raise
        log.warning("no permission to read %s, so flows are not known (%s)", PROGRESS_TOPIC, refused.detail)
        return
    for key, value in last.items():
        if value is not None:
            try:
                yield records.decode(key, value)
            except OnceflowError as error:
                if unreadable is not None:
                    unreadable(key.decode(errors="replace"), error)
                log.debug("a record of %s cannot be read: %s", PROGRESS_TOPIC, error)


def possible_progress(
    cluster: Cluster, deadline: Deadline, *, unreadable: Callable[[str, OnceflowError], None]
) -> list[Progress]:
    """As strict `all_progress`, and the progress that an open transaction hides, whether it will be committed or not.

    One flow may have several records. A transaction of another flow may hide a record that is committed, for as long
    as it is open; without limit if nobody ends it.

    Args:
        unreadable: see `all_progress`.
    """
    # In this order: the last stable offset may move between the two, and what it passes is then read twice. The other
    # way round, nobody would have read it.
    undecided = list(_undecided_progress(cluster, deadline, unreadable))
    return [*all_progress(cluster, deadline, strict=True, unreadable=unreadable), *undecided]


def _undecided_progress(
    cluster: Cluster, deadline: Deadline, unreadable: Callable[[str, OnceflowError], None]
) -> Iterator[Progress]:
    """Progress from the last stable offset on."""
    info = find_topic(cluster, PROGRESS_TOPIC, "READ", deadline)
    if info is None:
        return
    for partition, (stable, end) in ends_of(cluster, PROGRESS_TOPIC, sorted(info.leaders), deadline).items():
        if stable >= end:
            continue
        for item in read_log(cluster, PROGRESS_TOPIC, partition, stable, end, deadline):
            if isinstance(item, LogRecord) and item.key and item.value is not None:
                try:
                    yield records.decode(item.key, item.value)
                except OnceflowError as error:
                    unreadable(item.key.decode(errors="replace"), error)

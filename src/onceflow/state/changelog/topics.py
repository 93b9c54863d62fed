"""The two topics of a table: the table itself, and the companion topic for rows that other readers do not need.

Both are compacted and have the same number of partitions. The rows of a key are in the partition that Kafka's default
partitioner chooses for the key, so that any client finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onceflow.client import offsets as kafka_offsets
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import read_log
from onceflow.client.topics import create_own_topic, max_message_bytes, topic_configs
from onceflow.errors import PermissionDeniedError, ProgressConflictError, UnknownTopicError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import LocalTable

log = logging.getLogger("onceflow.state")

_CONFIGS = {
    # Keep what onceflow writes, whatever the broker's defaults are.
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    # Records that are not compacted yet are read in every restore.
    "min.cleanable.dirty.ratio": "0.2",
}
_SETTINGS = ("cleanup.policy", "delete.retention.ms")
_TOMBSTONE_MS = 86_400_000  # Kafka's default of delete.retention.ms


@dataclass(frozen=True)
class TableTopics:
    """A table's topics as they are in Kafka.

    Args:
        table, internal: names of the topics.
        table_id, internal_id: Kafka's topic ids. A topic that was deleted and created again has a new id.
        partitions: number of partitions of both topics.
        tombstone_ms: how long compaction keeps a tombstone, in milliseconds (``delete.retention.ms``).
        max_message_bytes: the smaller one of the two topics' limits.
        changelog: False: the table has no topics at all. Its names are those of local folders, its id is made up, and
            batch numbers take the place of offsets: the end of a partition is the batch that has changed it last.
    """

    table: str
    internal: str
    table_id: str
    internal_id: str
    partitions: int
    tombstone_ms: int
    max_message_bytes: int
    changelog: bool = True

    @property
    def ids(self) -> dict[str, str]:
        """Topic ids by name, as the progress record contains them; empty without a changelog."""
        return {self.table: self.table_id, self.internal: self.internal_id} if self.changelog else {}


def without_topics(table: str, local: LocalTable) -> TableTopics:
    """A table that has no changelog."""
    internal = table + INTERNAL_SUFFIX
    return TableTopics(table, internal, local.table_id, local.table_id, local.partitions, 0, 0, changelog=False)


def ensure_topics(cluster: Cluster, table: str, partitions: int, deadline: Deadline) -> TableTopics:
    """The table's topics. They are created if they are missing.

    Args:
        partitions: how many partitions a new table gets; an existing one keeps its own.

    Raises:
        PermissionDeniedError: a topic is missing, and this principal may not create it.
        ProgressConflictError: a topic exists and is not compacted, or the topics' numbers of partitions differ.
    """
    internal = table + INTERNAL_SUFFIX
    there = {name: _find(cluster, name, deadline) for name in (table, internal)}
    existing = [name for name, info in there.items() if info is not None]
    settings = _settings(cluster, existing, deadline)
    info = there[table] or _create(cluster, table, partitions, deadline)
    other = there[internal] or _create(cluster, internal, info.partitions, deadline)
    if other.partitions != info.partitions:
        raise ProgressConflictError(
            f"Table topic {table} has {counted(info.partitions, 'partition')}, its companion {internal} has "
            f"{other.partitions}",
            topic=table,
            next_step="`onceflow table repartition` gives both the same number of partitions, and moves the rows",
        )
    settings |= _settings(cluster, [name for name in there if name not in existing], deadline)
    retention = settings[table]["delete.retention.ms"]
    limits = max_message_bytes(cluster, [table, internal], deadline)
    return TableTopics(
        table=table,
        internal=internal,
        table_id=info.topic_id,
        internal_id=other.topic_id,
        partitions=info.partitions,
        tombstone_ms=_TOMBSTONE_MS if retention is None else int(retention),
        max_message_bytes=min(limits.values()),
    )


def _find(cluster: Cluster, topic: str, deadline: Deadline) -> TopicInfo | None:
    """A topic, if the one broker that is asked knows it."""
    try:
        return cluster.topics([topic], deadline, once=True)[topic]
    except UnknownTopicError:
        return None


def _create(cluster: Cluster, topic: str, partitions: int, deadline: Deadline) -> TopicInfo:
    try:
        return create_own_topic(
            cluster, topic, "table topic", partitions=partitions, configs=_CONFIGS, deadline=deadline
        )
    except PermissionDeniedError as refused:  # it may exist, because only one broker was asked
        try:
            return cluster.topics([topic], deadline)[topic]
        except UnknownTopicError:
            raise refused from None


def _settings(cluster: Cluster, topics: Sequence[str], deadline: Deadline) -> dict[str, dict[str, str | None]]:
    """The settings of topics that are asked for here.

    Raises:
        ProgressConflictError: one of them is not compacted.
    """
    found = topic_configs(cluster, topics, _SETTINGS, deadline) if topics else {}
    for topic, settings in found.items():
        policy = settings["cleanup.policy"]
        if policy is None:
            log.warning("no permission to read the settings of %s: make sure that its cleanup.policy is compact", topic)
        elif policy != "compact":
            raise ProgressConflictError(
                f"Table topic {topic} has cleanup.policy={policy}: Kafka would delete rows of it that are still needed",
                topic=topic,
                next_step=f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config "
                "cleanup.policy=compact (rows expire by ttl of the processor or retention= of Flow.process), or give "
                "the table another name",
            )
    return found


def committed_ends(cluster: Cluster, topics: TableTopics, deadline: Deadline) -> dict[str, dict[int, int]]:
    """Last stable offsets of both topics, per partition."""
    spans = {name: list(range(topics.partitions)) for name in (topics.table, topics.internal)}
    found = kafka_offsets.list_offsets(cluster, spans, kafka_offsets.LATEST, deadline)
    return {name: dict(ends) for name, ends in found.items()}


def check_readable(cluster: Cluster, ends: Mapping[str, Mapping[int, int]], deadline: Deadline) -> None:
    """Read at the end of each topic, where there is nothing to read.

    So a missing permission is noticed now, and not when state has to be restored.

    Raises:
        PermissionDeniedError: this principal may not READ a topic.
    """
    for topic, by_partition in ends.items():
        for _ in read_log(cluster, topic, 0, by_partition[0], by_partition[0], deadline):
            pass


def check_known(
    topics: TableTopics, changelogs: Mapping[str, Mapping[int, int]], ids: Mapping[str, str], *, flow: str
) -> None:
    """Check that the topics are those in the progress record.

    Args:
        changelogs: end offsets in the progress record.
        ids: topic ids in the progress record.
        flow: for the next step.

    Raises:
        ProgressConflictError: a topic was deleted and created again, or has another number of partitions.
    """
    for name, topic_id in topics.ids.items():
        if ids.get(name) not in (None, topic_id):
            raise ProgressConflictError(
                f"Table topic {name} was deleted and created again: the state that the flow has committed is lost",
                topic=name,
                detail=f"topic id {topic_id}, in the progress record {ids[name]}",
                next_step=f"if that was intended, make the flow forget its progress: `onceflow reset {flow}`",
            )
    known = len(changelogs[topics.table])
    if known != topics.partitions:
        raise ProgressConflictError(
            f"Table topic {topics.table} has {counted(topics.partitions, 'partition')}, its rows were placed for "
            f"{known}",
            topic=topics.table,
            detail="keys would be looked up in partitions that do not contain their rows",
            next_step=f"stop the flow and run `onceflow table repartition {flow} {topics.table} --partitions "
            f"{max(known, topics.partitions)}`: it moves the rows, in one transaction",
        )

"""The topics of a table's copy: checked, and created with the settings of the table's own topics."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.topics import create_own_topic, find_topics, own_settings
from onceflow.errors import ProgressConflictError, UnknownTopicError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import Progress
from onceflow.state.changelog.topics import TableTopics, check_known, check_readable, ensure_topics

_SECONDS = 60.0
_NOT_COPIED = ("cleanup.policy", "min.insync.replicas")  # create_own_topic sets them


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

"""A compacted topic of any program, as it is read for lookups: by a ``Table``, or by a flow that joins with it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topics, topic_configs
from onceflow.errors import OptionError

log = logging.getLogger("onceflow.tables")

_TOMBSTONE_MS = 86_400_000  # Kafka's default of delete.retention.ms


@dataclass(frozen=True)
class CompactedTopic:
    """A compacted topic.

    Args:
        tombstone_ms: how long compaction keeps a tombstone (``delete.retention.ms``).
    """

    info: TopicInfo
    tombstone_ms: int


def find_compacted(cluster: Cluster, topic: str, deadline: Deadline) -> CompactedTopic:
    """Look up a topic, and check that it is compacted.

    Raises:
        UnknownTopicError, PermissionDeniedError: it does not exist, or may not be read.
        OptionError: it is not compacted.
    """
    info = find_topics(cluster, {topic: "table"}, deadline)[topic]
    return CompactedTopic(info, _check_compacted(cluster, topic, deadline))


def tombstones_kept_ms(cluster: Cluster, topics: Collection[str], deadline: Deadline) -> int:
    """How long compaction keeps tombstones in each of some topics (``delete.retention.ms``)."""
    key = "delete.retention.ms"
    settings = topic_configs(cluster, topics, [key], deadline) if topics else {}
    return min((int(each[key] or _TOMBSTONE_MS) for each in settings.values()), default=_TOMBSTONE_MS)


def _check_compacted(cluster: Cluster, topic: str, deadline: Deadline) -> int:
    """Refuse a topic that is not compacted. Returns ``delete.retention.ms``."""
    settings = topic_configs(cluster, [topic], ["cleanup.policy", "delete.retention.ms"], deadline)[topic]
    check_policy(topic, settings["cleanup.policy"])
    retention = settings["delete.retention.ms"]
    return _TOMBSTONE_MS if retention is None else int(retention)


def check_policy(topic: str, policy: str | None) -> None:
    """Refuse a topic that is not compacted, and log a warning if it may lose rows.

    Args:
        policy: its ``cleanup.policy``; None: it may not be read.

    Raises:
        OptionError: the topic is not compacted.
    """
    if policy is None:
        log.warning("no permission to read the settings of %s: make sure that its cleanup.policy is compact", topic)
    elif "compact" not in policy:
        raise OptionError(
            f"Topic {topic} is not compacted (cleanup.policy={policy}), so Kafka deletes rows of it",
            topic=topic,
            next_step="a table is a compacted topic. Create one: onceflow topic create NAME --config "
            "cleanup.policy=compact; or let Kafka compact this one: kafka-configs.sh --alter --entity-type topics "
            f"--entity-name {topic} --add-config cleanup.policy=compact",
        )
    elif "delete" in policy:
        log.warning(
            "topic %s has cleanup.policy=%s: rows that retention deletes stay in a table that has read them",
            topic,
            policy,
        )

"""Which leader a partition has had when, and what its log has of the leaders before (KIP-320).

Each leader of a partition has an epoch, and each record that of the leader which has appended it. If an unclean leader
election truncates a log, the new leader ends the earlier epochs where its own log ends. So a reader that has read
further knows that its records are gone, even if others have the same offsets by now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.protocol.consumer import OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from onceflow.client.cluster import Cluster, ConnectionFailedError, unknown_topic
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import ask_leaders, known_leader
from onceflow.errors import BrokerUnsupportedError, DeadlineExceededError
from onceflow.protocol.codes import Code
from onceflow.protocol.names import TopicPartition

log = logging.getLogger("onceflow.client")


@dataclass(frozen=True)
class LeaderView:
    """Partitions as their leaders know them.

    Args:
        topic_ids: by topic.
        epochs: the epoch of each leader.
    """

    topic_ids: Mapping[str, str]
    epochs: Mapping[TopicPartition, int]


def look_at_leaders(cluster: Cluster, partitions: Iterable[TopicPartition], deadline: Deadline) -> LeaderView:
    """Ask the leader of each partition for its metadata: another broker may not know yet that a topic was deleted and
    created again, or that the leader has changed. A leader knows it before it takes or returns a record.

    All leaders are asked at once, each for the topics of its partitions. Partitions whose leaders have not answered by
    the deadline, or that have none, are not in the result.

    Raises:
        UnknownTopicError: a topic does not exist.
    """
    missing = {*partitions}
    topic_ids: dict[str, str] = {}
    epochs: dict[TopicPartition, int] = {}
    unknown: set[str] = set()  # topics that the leaders do not know (any more)
    attempt = 0
    while missing:
        led: dict[int, set[str]] = {}
        for topic, partition in missing:
            node = known_leader(cluster, topic, partition)
            if node >= 0:
                led.setdefault(node, set()).add(topic)
        problem = "its leader does not know that it leads" if led else "it has no leader"
        for node, response in cluster.exchange_all({node: _metadata_of(led[node]) for node in led}, deadline).items():
            if isinstance(response, ConnectionFailedError):
                problem = str(response)
                continue
            for topic in response.topics:
                if topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                    unknown.add(str(topic.name))
                for each in topic.partitions:
                    topic_partition = (str(topic.name), int(each.partition_index))
                    if int(each.leader_id) == node and topic_partition in missing:
                        missing.discard(topic_partition)
                        epochs[topic_partition] = int(each.leader_epoch)
                        topic_ids[topic_partition[0]] = str(topic.topic_id)
        if missing:
            try:
                if attempt:  # at first, what is known may only be old
                    deadline.pause(attempt, problem)
                cluster.topics({topic for topic, _ in missing}, deadline, patient=True, leaderless=True)
            except DeadlineExceededError as late:
                if gone := sorted(unknown & {topic for topic, _ in missing}):
                    raise unknown_topic(gone[0]) from late
                waits = "{}-{}".format(*min(missing))
                log.debug("leaders of %d partitions have not answered: %s: %s: %s", len(missing), waits, problem, late)
                break
            unknown.clear()  # that broker knows them: a leader may have known them not yet
            attempt += 1
    return LeaderView(topic_ids, epochs)


def _metadata_of(topics: Iterable[str]) -> MetadataRequest:
    wanted = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in sorted(topics)]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=False)


def epoch_ends(
    cluster: Cluster, epochs: Mapping[TopicPartition, int], deadline: Deadline, *, partial: bool = False
) -> dict[TopicPartition, int]:
    """Where the log of each partition ends what leaders up to an epoch have appended; -1: the leader does not know,
    or the brokers do not have this request: some that speak Kafka's protocol do not.

    Args:
        partial: at the deadline, return what the leaders have told that have answered.

    Raises:
        DeadlineExceededError: not every leader has answered, and ``partial`` is not set.
        PermissionDeniedError: DESCRIBE on a topic is missing.
    """
    if not epochs:
        return {}
    cluster.connect(deadline)
    try:
        version = cluster.version(OffsetForLeaderEpochRequest, min_version=2, max_version=4)
    except BrokerUnsupportedError as error:
        log.debug("truncated logs are not noticed: %s", error)
        return dict.fromkeys(epochs, -1)

    def request(wanted: Mapping[str, Sequence[int]]) -> OffsetForLeaderEpochRequest:
        topic_type = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        return OffsetForLeaderEpochRequest(
            version=version,
            replica_id=-1,
            topics=[
                topic_type(
                    topic=topic,
                    partitions=[
                        topic_type.OffsetForLeaderPartition(
                            partition=number, current_leader_epoch=-1, leader_epoch=epochs[topic, number]
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in wanted.items()
            ],
        )

    def topic_partition(topic: Any, answer: Any) -> TopicPartition:
        return str(topic.topic), int(answer.partition)

    return ask_leaders(
        cluster,
        epochs,
        deadline,
        api="OffsetForLeaderEpoch",
        request=request,
        read=lambda answer: int(answer.end_offset),
        topic_partition=topic_partition,
        partial=partial,
    )

"""A request about many partitions: sends each leader the part for its partitions, until there is a result for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.errors import DeadlineExceededError
from onceflow.protocol import codes
from onceflow.protocol.codes import Code
from onceflow.protocol.names import TopicPartition

T = TypeVar("T")


def ask_leaders(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    deadline: Deadline,
    *,
    api: str,
    request: Callable[[Mapping[str, Sequence[int]]], Any],
    read: Callable[[Any], T],
    topic_partition: Callable[[Any, Any], TopicPartition] = lambda topic, answer: (
        str(topic.name),
        int(answer.partition_index),
    ),
    partial: bool = False,
) -> dict[TopicPartition, T]:
    """The result of each partition, from its leader. Sends one request to each leader, to all of them at once; waits
    until leaders exist.

    Args:
        api: the request's name, for errors.
        request: makes the request from partition numbers by topic. Its response must have ``topics`` with
            ``partitions``, which have ``partition_index`` and ``error_code``.
        read: converts the partition's part of the response into the result.
        topic_partition: which partition that is.
        partial: return the results that there are at the deadline. A partition without a leader delays no other.

    Raises:
        OnceflowError: a partition has an error that is not retriable.
        DeadlineExceededError: not every leader has answered, and ``partial`` is not set.
    """
    missing = {*partitions}
    found: dict[TopicPartition, T] = {}
    attempt = 0
    while missing:
        problem = "its leader does not answer"
        try:
            led = _by_leader(cluster, missing, deadline, fresh=attempt > 0, leaderless=partial)
        except DeadlineExceededError:
            if partial:
                break
            raise
        answers = cluster.exchange_all({node: request(wanted) for node, wanted in led.items()}, deadline)
        for response in answers.values():
            if isinstance(response, ConnectionFailedError):
                problem = str(response)
                continue
            for topic in response.topics:
                for answer in topic.partitions:
                    asked = topic_partition(topic, answer)
                    if answer.error_code == Code.NONE:
                        found[asked] = read(answer)
                        missing.discard(asked)
                        continue
                    row = codes.describe(int(answer.error_code))
                    if not row.verdict.retriable:
                        raise codes.error_for(row.code, api=api, topic=asked[0])
                    problem = f"{asked[0]}-{asked[1]}: {row.name}"
        if missing:
            if not deadline.wait(attempt + 1):
                if partial:
                    break
                raise deadline.error(f"{api}: {problem}")
            attempt += 1
    return found


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """The partition numbers of each topic, in order."""
    found: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        found.setdefault(topic, []).append(partition)
    return found


def known_leader(cluster: Cluster, topic: str, partition: int) -> int:
    """Node id of the leader, as it was last known; -1: there is none, or it is not known. Nothing is asked."""
    info = cluster.known_topic(topic)
    return -1 if info is None else info.leaders.get(partition, -1)


def _by_leader(
    cluster: Cluster, partitions: Iterable[TopicPartition], deadline: Deadline, *, fresh: bool, leaderless: bool
) -> dict[int, dict[str, list[int]]]:
    """Partitions by the node id of their leader. ``leaderless``: those that have none now are left out."""
    unknown = {topic for topic, _ in partitions if fresh or (leaderless and cluster.known_topic(topic) is None)}
    if unknown:
        cluster.topics(unknown, deadline, patient=leaderless, leaderless=leaderless)
    led: dict[int, list[TopicPartition]] = {}
    for topic, partition in partitions:
        if leaderless:
            node = known_leader(cluster, topic, partition)
            if node < 0:
                continue
        else:
            node = cluster.leader(topic, partition, deadline)
        led.setdefault(node, []).append((topic, partition))
    return {node: by_topic(own) for node, own in led.items()}

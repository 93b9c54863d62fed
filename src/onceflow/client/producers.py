"""Who is writing to partitions right now: the open transactions that their leaders know of (KIP-664)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka.protocol.admin import DescribeProducersRequest

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.wire import codes

log = logging.getLogger("onceflow.client")

Place = tuple[str, int]
"""A topic and the number of one of its partitions."""


@dataclass(frozen=True)
class OpenTransaction:
    """Somebody's open transaction, as far as this principal may see.

    Args:
        start_offset: its first record in the partition. last_write_ms: of its last one there, epoch milliseconds.
        transactional_id: None: no coordinator tells. state: of the transactional id, ``Ongoing`` unless it hangs.
        started_ms, timeout_ms: -1 when they are not known.
    """

    producer_id: int
    producer_epoch: int
    start_offset: int
    last_write_ms: int
    transactional_id: str | None = None
    state: str = ""
    started_ms: int = -1
    timeout_ms: int = -1


def open_transactions(
    cluster: Cluster, places: Iterable[Place], deadline: Deadline
) -> dict[Place, list[OpenTransaction]]:
    """The open transactions of each partition. One request for each leader; waits for leaders.

    Raises:
        PermissionDeniedError: READ on one of the topics is missing.
        BrokerUnsupportedError: the brokers are older than Kafka 2.8.
    """
    cluster.connect(deadline)
    version = cluster.version(DescribeProducersRequest, least=0, most=0)
    missing = set(places)
    found: dict[Place, list[OpenTransaction]] = {}
    attempt = 0
    while missing:
        problem = ""
        for node, wanted in by_leader(cluster, missing, deadline, fresh=attempt > 0).items():
            topics = [
                DescribeProducersRequest.TopicRequest(name=topic, partition_indexes=sorted(numbers))
                for topic, numbers in sorted(wanted.items())
            ]
            try:
                response = cluster.exchange(DescribeProducersRequest(version=version, topics=topics), node, deadline)
            except ConnectionFailedError as lost:
                problem = str(lost)
                continue
            for topic in response.topics:
                for answer in topic.partitions:
                    row = codes.describe(int(answer.error_code))
                    if row.code and not row.verdict.retriable:
                        raise codes.error_for(row.code, api="DescribeProducers", topic=topic.name)
                    if row.code:
                        problem = f"{topic.name}-{answer.partition_index}: {row.name}"
                        continue
                    place = (str(topic.name), int(answer.partition_index))
                    found[place] = [_open(producer) for producer in answer.active_producers or [] if _is_open(producer)]
                    missing.discard(place)
        if missing:
            deadline.pause(attempt + 1, f"DescribeProducers: {problem}")
            attempt += 1
    return found


def by_leader(
    cluster: Cluster, places: Iterable[Place], deadline: Deadline, *, fresh: bool
) -> Mapping[int, Mapping[str, Sequence[int]]]:
    """The partitions by their leaders' node ids, then by topic.

    Args:
        fresh: ask the cluster again who leads.
    """
    ordered = sorted(places)
    if fresh:
        cluster.topics({topic for topic, _ in ordered}, deadline)
    found: dict[int, dict[str, list[int]]] = {}
    for topic, partition in ordered:
        node = cluster.leader(topic, partition, deadline)
        found.setdefault(node, {}).setdefault(topic, []).append(partition)
    return found


def _is_open(producer: object) -> bool:
    return int(getattr(producer, "current_txn_start_offset", -1)) >= 0


def _open(producer: object) -> OpenTransaction:
    def number(name: str) -> int:
        return int(getattr(producer, name))

    return OpenTransaction(
        producer_id=number("producer_id"),
        producer_epoch=number("producer_epoch"),
        start_offset=number("current_txn_start_offset"),
        last_write_ms=number("last_timestamp"),
    )

"""Open transactions in partitions, as the partition leaders know them (DescribeProducers, KIP-664)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.protocol.admin import DescribeProducersRequest

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import ask_leaders
from onceflow.protocol.names import TopicPartition


@dataclass(frozen=True)
class OpenTransaction:
    """An open transaction of any producer, as far as this principal may see it.

    Args:
        start_offset: its first record in the partition.
        last_write_ms: time of its last record in the partition, in epoch milliseconds.
        transactional_id: None: no coordinator has returned it.
        state: state of the transactional id: ``Ongoing``, unless the transaction hangs.
        started_ms, timeout_ms: -1 if they are not known.
        coordinator_epoch: that of the coordinator that has written the last marker of this producer in the partition;
            -1: there was none.
    """

    producer_id: int
    producer_epoch: int
    start_offset: int
    last_write_ms: int
    transactional_id: str | None = None
    state: str = ""
    started_ms: int = -1
    timeout_ms: int = -1
    coordinator_epoch: int = -1


def open_transactions(
    cluster: Cluster, partitions: Iterable[TopicPartition], deadline: Deadline
) -> dict[TopicPartition, list[OpenTransaction]]:
    """The open transactions of each partition. Sends one request to each leader; waits until leaders exist.

    Raises:
        PermissionDeniedError: this principal lacks READ on one of the topics.
        BrokerUnsupportedError: the brokers are older than Kafka 2.8.
    """
    cluster.connect(deadline)
    version = cluster.version(DescribeProducersRequest, min_version=0, max_version=0)

    def request(wanted: Mapping[str, Sequence[int]]) -> DescribeProducersRequest:
        topic_type = DescribeProducersRequest.TopicRequest
        topics = [topic_type(name=topic, partition_indexes=list(numbers)) for topic, numbers in wanted.items()]
        return DescribeProducersRequest(version=version, topics=topics)

    def read(answer: Any) -> list[OpenTransaction]:
        return [_open(producer) for producer in answer.active_producers or [] if _is_open(producer)]

    return ask_leaders(cluster, partitions, deadline, api="DescribeProducers", request=request, read=read)


def _is_open(producer: Any) -> bool:
    return int(producer.current_txn_start_offset) >= 0


def _open(producer: Any) -> OpenTransaction:
    return OpenTransaction(
        producer_id=int(producer.producer_id),
        producer_epoch=int(producer.producer_epoch),
        start_offset=int(producer.current_txn_start_offset),
        last_write_ms=int(producer.last_timestamp),
        coordinator_epoch=int(producer.coordinator_epoch),
    )

"""The requests of a transaction, one function for each. They are retried until a coordinator responds.

``transactions.py`` decides in which order they are sent. With transaction version 2 (KIP-890), Produce v12 and
TxnOffsetCommit v5 add their partitions to the transaction implicitly, and EndTxn v5 returns the next producer id and
epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kafka.protocol.admin import DescribeTransactionsRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from onceflow.client.cluster import GROUP, TRANSACTION, Cluster
from onceflow.client.connections import SentRequest
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import offset_topics, offsets_code, offsets_unknown
from onceflow.protocol import codes
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.codes import Code
from onceflow.protocol.produce import MAX_VERSION, MIN_VERSION

#: The state of a transactional id that its coordinator does not know, or has forgotten.
DEAD = "Dead"


def check_supported(cluster: Cluster, deadline: Deadline) -> None:
    """Raise ``BrokerUnsupportedError`` if the broker does not support transactions. Call it before other requests."""
    cluster.connect(deadline)
    cluster.version(InitProducerIdRequest, min_version=3, max_version=5)
    cluster.version(TxnOffsetCommitRequest, min_version=3, max_version=5)
    cluster.version(ProduceRequest, min_version=MIN_VERSION, max_version=MAX_VERSION)


def init_producer_id(
    cluster: Cluster, transactional_id: str, timeout_ms: int, producer: ProducerIdAndEpoch | None, deadline: Deadline
) -> ProducerIdAndEpoch:
    """Get a producer id and epoch for a transactional id.

    Args:
        producer: the caller's current producer id and epoch (KIP-360). None: take the transactional id over, which
            fences its owner (KIP-98).

    Raises:
        FencedError: ``producer`` is out of date.
    """
    request = InitProducerIdRequest(
        version=cluster.version(InitProducerIdRequest, min_version=3, max_version=5),
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1 if producer is None else producer.producer_id,
        producer_epoch=-1 if producer is None else producer.producer_epoch,
    )
    response = repeat(cluster, request, "InitProducerId", TRANSACTION, transactional_id, deadline)
    if response.error_code:
        raise error_of(transactional_id, response.error_code, "InitProducerId")
    return ProducerIdAndEpoch(int(response.producer_id), int(response.producer_epoch))


def idempotent_producer(cluster: Cluster, deadline: Deadline) -> ProducerIdAndEpoch:
    """A new producer id without transactions. Batches stay in order, and retries do not duplicate them (KIP-98).

    Any broker assigns one. Every broker that it writes to keeps state for it in memory for a day, so use one for a
    whole run, not one for each batch.
    """
    cluster.connect(deadline)
    request = InitProducerIdRequest(
        version=cluster.version(InitProducerIdRequest, min_version=3, max_version=5),
        transactional_id=None,
        transaction_timeout_ms=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    attempt = 0
    response = cluster.ask(request, "InitProducerId", deadline)
    while codes.describe(int(response.error_code)).verdict.retriable:  # the broker has no ids to assign yet
        deadline.pause(attempt, "InitProducerId")
        attempt += 1
        response = cluster.ask(request, "InitProducerId", deadline)
    if response.error_code:
        raise codes.error_for(int(response.error_code), api="InitProducerId", detail="an idempotent producer")
    return ProducerIdAndEpoch(int(response.producer_id), int(response.producer_epoch), transactional=False)


def add_partitions(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    partitions: Mapping[str, Iterable[int]],
    deadline: Deadline,
) -> None:
    """Add output partitions to the transaction. Needed with transaction version 1; harmless with 2."""
    request = AddPartitionsToTxnRequest(
        version=cluster.version(AddPartitionsToTxnRequest, min_version=0, max_version=3),
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.producer_epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=sorted(numbers))
            for topic, numbers in sorted(partitions.items())
        ],
    )

    def code_of(response: Any) -> int:
        found = [p.partition_error_code for t in response.results_by_topic_v3_and_below for p in t.results_by_partition]
        # OPERATION_NOT_ATTEMPTED (55) only means that another partition of the request has an error.
        return next((c for c in found if c not in (0, 55)), next((c for c in found if c), 0))

    def unknown(response: Any) -> str | None:
        found = ((t.name, p) for t in response.results_by_topic_v3_and_below for p in t.results_by_partition)
        return next(
            (name for name, p in found if p.partition_error_code == codes.Code.UNKNOWN_TOPIC_OR_PARTITION), None
        )

    response = repeat(
        *(cluster, request, "AddPartitionsToTxn", TRANSACTION, transactional_id, deadline),
        code_of=code_of,
        unknown=unknown,
    )
    if code_of(response):
        raise error_of(transactional_id, code_of(response), "AddPartitionsToTxn")


def add_offsets(
    cluster: Cluster, transactional_id: str, producer: ProducerIdAndEpoch, group: str, deadline: Deadline
) -> None:
    """Add a consumer group to the transaction. Needed with transaction version 1."""
    request = AddOffsetsToTxnRequest(
        version=cluster.version(AddOffsetsToTxnRequest, min_version=0, max_version=3),
        transactional_id=transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        group_id=group,
    )
    response = repeat(cluster, request, "AddOffsetsToTxn", TRANSACTION, transactional_id, deadline)
    if response.error_code:
        raise error_of(transactional_id, response.error_code, "AddOffsetsToTxn", group)


def commit_offsets(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    group: str,
    offsets: Mapping[str, Mapping[int, int]],
    deadline: Deadline,
    *,
    metadata: str = "",
    sent: SentRequest | None = None,
) -> None:
    """Add source offsets to the transaction, under an ordinary consumer group (KIP-447).

    The group has no members, so generation -1 and an empty member id are accepted. The producer epoch does the fencing.

    Args:
        sent: what `send_offsets` has returned for the same arguments.
    """
    request = _offsets_request(cluster, transactional_id, producer, group, offsets, metadata)
    response = repeat(
        *(cluster, request, "TxnOffsetCommit", GROUP, group, deadline),
        code_of=offsets_code,
        unknown=offsets_unknown,
        sent=sent,
    )
    if offsets_code(response):
        raise error_of(transactional_id, offsets_code(response), "TxnOffsetCommit", group)


def send_offsets(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    group: str,
    offsets: Mapping[str, Mapping[int, int]],
    deadline: Deadline,
    *,
    metadata: str = "",
) -> SentRequest:
    """Begin to add source offsets to the transaction. `commit_offsets` has to follow, which waits for the response."""
    request = _offsets_request(cluster, transactional_id, producer, group, offsets, metadata)
    return cluster.send(request, cluster.coordinator(GROUP, group, deadline), deadline)


def _offsets_request(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    group: str,
    offsets: Mapping[str, Mapping[int, int]],
    metadata: str,
) -> TxnOffsetCommitRequest:
    topic_type = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    implicit = cluster.transaction_version >= 2
    return TxnOffsetCommitRequest(
        version=cluster.version(TxnOffsetCommitRequest, min_version=3, max_version=5 if implicit else 4),
        transactional_id=transactional_id,
        group_id=group,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=offset_topics(topic_type, topic_type.TxnOffsetCommitRequestPartition, offsets, metadata),
    )


def end_transaction(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    deadline: Deadline,
    *,
    commit: bool,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int, ProducerIdAndEpoch]:
    """EndTxn, repeated until there is a response.

    Args:
        meanwhile: called when the request was sent for the first time. It must not raise, and not take long.

    Returns:
        The error code, and the producer id and epoch of the next transaction. They differ from ``producer`` only with
        transaction version 2, if there was no error.
    """
    moves = cluster.transaction_version >= 2
    request = EndTxnRequest(
        version=cluster.version(EndTxnRequest, min_version=0, max_version=5 if moves else 4),
        transactional_id=transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        committed=commit,
    )
    sent = None
    if meanwhile is not None:
        sent = cluster.send(request, cluster.coordinator(TRANSACTION, transactional_id, deadline), deadline)
        meanwhile()
    response = repeat(cluster, request, "EndTxn", TRANSACTION, transactional_id, deadline, sent=sent)
    code = int(response.error_code)
    if code == 0 and moves:
        return code, ProducerIdAndEpoch(int(response.producer_id), int(response.producer_epoch))
    return code, producer


def describe_transaction(cluster: Cluster, transactional_id: str, deadline: Deadline) -> dict[str, Any]:
    """State of a transactional id, from its coordinator (KIP-664).

    Returns:
        ``state`` (``Empty``, ``Ongoing``, ``PrepareCommit``, ..., ``Dead`` when unknown), ``producer_id``,
        ``producer_epoch``, ``timeout_ms``, ``started_ms`` (-1 while none is open), ``partitions``.
    """
    cluster.connect(deadline)
    request = DescribeTransactionsRequest(
        version=cluster.version(DescribeTransactionsRequest, min_version=0, max_version=0),
        transactional_ids=[transactional_id],
    )
    response = repeat(
        cluster,
        request,
        "DescribeTransactions",
        TRANSACTION,
        transactional_id,
        deadline,
        code_of=lambda response: int(response.transaction_states[0].error_code),
    )
    state = response.transaction_states[0]
    if state.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND:
        return {"state": DEAD, "producer_id": -1, "producer_epoch": -1, "partitions": {}}
    if state.error_code:
        raise error_of(transactional_id, int(state.error_code), "DescribeTransactions")
    return {
        "state": state.transaction_state,
        "producer_id": int(state.producer_id),
        "producer_epoch": int(state.producer_epoch),
        "timeout_ms": int(state.transaction_timeout_ms),
        "started_ms": int(state.transaction_start_time_ms),
        "partitions": {t.topic: sorted(t.partitions) for t in state.topics},
    }


def error_of(transactional_id: str, code: int, api: str, group: str = "") -> Exception:
    """The error for an error code that is not retriable."""
    of_group = bool(group) and code != Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    detail = f"group {group}" if group else f"transactional id {transactional_id}"
    return codes.error_for(code, api=api, resource=group if of_group else transactional_id, detail=detail)

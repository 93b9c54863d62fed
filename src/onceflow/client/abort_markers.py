"""Writes the abort marker of a hanging transaction to the leader of a partition (WriteTxnMarkers, KIP-664).

A coordinator writes the markers of its transactions. A transaction that no coordinator knows as open in a partition
gets none, so an administrator has to write it. Version 1 of the request is used, also with Kafka 4.2 and later: for
version 2 the marker's epoch must be one that a coordinator has assigned after the records (KIP-1228).
"""

from __future__ import annotations

from kafka.protocol.producer import WriteTxnMarkersRequest

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.client.producers import OpenTransaction, open_transactions
from onceflow.errors import PermissionDeniedError
from onceflow.protocol import acls, codes
from onceflow.protocol.codes import Code
from onceflow.protocol.names import TopicPartition


def still_open(
    cluster: Cluster, topic_partition: TopicPartition, transaction: OpenTransaction, deadline: Deadline
) -> OpenTransaction | None:
    """The same transaction as its leader knows it now; None: it has ended. Another one that the same producer has begun
    since is not the same."""
    for each in open_transactions(cluster, [topic_partition], deadline)[topic_partition]:
        if (each.producer_id, each.start_offset) == (transaction.producer_id, transaction.start_offset):
            return each
    return None


def write_abort_marker(
    cluster: Cluster, topic_partition: TopicPartition, transaction: OpenTransaction, deadline: Deadline
) -> bool:
    """Abort an open transaction in one partition. Returns False if it was not open any more.

    Before each attempt the leader is asked whether the transaction is still open: if a response was lost, a second
    marker could end another transaction.

    Raises:
        PermissionDeniedError: this principal lacks ALTER (Kafka 4.0 and later) or CLUSTER_ACTION on the cluster.
        OnceflowError: the leader refuses the marker.
    """
    topic, partition = topic_partition
    cluster.connect(deadline)
    attempt = 0
    while (current := still_open(cluster, topic_partition, transaction, deadline)) is not None:
        try:
            node = cluster.leader(topic, partition, deadline, fresh=attempt > 0)
            response = cluster.exchange(_request(cluster, topic_partition, current), node, deadline)
        except ConnectionFailedError as lost:
            problem = str(lost)
        else:
            code = int(response.markers[0].topics[0].partitions[0].error_code)
            if code == 0:
                return True
            if code == Code.CLUSTER_AUTHORIZATION_FAILED:
                raise _not_permitted(topic_partition)
            row = codes.describe(code)
            # A coordinator has written a marker since: the next look shows its epoch, or that nothing is open.
            if not row.verdict.retriable and code not in (
                Code.INVALID_PRODUCER_EPOCH,
                Code.TRANSACTION_COORDINATOR_FENCED,
            ):
                raise codes.error_for(code, api="WriteTxnMarkers", topic=f"{topic}-{partition}")
            problem = row.name
        deadline.pause(attempt, f"WriteTxnMarkers: {problem}")
        attempt += 1
    return attempt > 0


def _request(cluster: Cluster, topic_partition: TopicPartition, transaction: OpenTransaction) -> WriteTxnMarkersRequest:
    topic, partition = topic_partition
    marker = WriteTxnMarkersRequest.WritableTxnMarker
    return WriteTxnMarkersRequest(
        version=cluster.version(WriteTxnMarkersRequest, min_version=1, max_version=1),
        markers=[
            marker(
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
                transaction_result=False,
                topics=[marker.WritableTxnMarkerTopic(name=topic, partition_indexes=[partition])],
                # The epoch of the coordinator that has written the last marker of this producer here. A lower one is
                # refused; after a higher one the coordinator itself would be refused. -1: there was none.
                coordinator_epoch=max(0, transaction.coordinator_epoch),
            )
        ],
    )


def _not_permitted(topic_partition: TopicPartition) -> PermissionDeniedError:
    return PermissionDeniedError(
        "This principal may not write transaction markers",
        topic=f"{topic_partition[0]}-{topic_partition[1]}",
        detail="WriteTxnMarkers: CLUSTER_AUTHORIZATION_FAILED",
        next_step=acls.grant("ALTER", acls.CLUSTER)
        + " (before Kafka 4.0: CLUSTER_ACTION), or run this as an administrator",
    )

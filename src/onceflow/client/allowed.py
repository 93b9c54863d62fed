"""What this principal may do with topics, groups, transactional ids and the cluster, as the brokers tell it (KIP-430).

All requests are read-only. No transactional id is initialised, so no driver is fenced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kafka.protocol.admin import DescribeClusterRequest, DescribeGroupsRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import AddOffsetsToTxnRequest

from onceflow.client.cluster import GROUP, TRANSACTION, Cluster
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.errors import PermissionDeniedError
from onceflow.protocol import codes
from onceflow.protocol.codes import Code

# Numbers of org.apache.kafka.common.acl.AclOperation.
_OPERATIONS = {
    3: "READ",
    4: "WRITE",
    5: "CREATE",
    6: "DELETE",
    7: "ALTER",
    8: "DESCRIBE",
    9: "CLUSTER_ACTION",
    10: "DESCRIBE_CONFIGS",
    11: "ALTER_CONFIGS",
    12: "IDEMPOTENT_WRITE",
}
# No producer has this id: brokers count from 0. So the coordinator refuses the request after it has looked at the
# permissions, and changes nothing.
_NOBODY = 2**63 - 1


def operations(numbers: Iterable[int] | None) -> frozenset[str] | None:
    """The operations with these numbers, as kafka-python reads them from an answer; None: the broker has not told."""
    if numbers is None:
        return None
    return frozenset(_OPERATIONS[number] for number in numbers if number in _OPERATIONS)


def describe_topics(cluster: Cluster, names: Iterable[str], deadline: Deadline) -> list[Any]:
    """The topics of a Metadata response, as they are, with ``authorized_operations``."""
    cluster.connect(deadline)
    request = MetadataRequest(
        version=cluster.version(MetadataRequest, min_version=8, max_version=12),
        topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(names))],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    found: list[Any] = cluster.ask(request, "Metadata", deadline).topics
    return found


def of_cluster(cluster: Cluster, deadline: Deadline) -> frozenset[str] | None:
    """What this principal may do with the cluster itself."""
    cluster.connect(deadline)
    request = DescribeClusterRequest(
        version=cluster.version(DescribeClusterRequest, min_version=0, max_version=0),
        include_cluster_authorized_operations=True,
    )
    response = cluster.ask(request, "DescribeCluster", deadline)
    return None if response.error_code else operations(response.authorized_operations)


def of_group(cluster: Cluster, group: str, deadline: Deadline) -> frozenset[str] | None:
    """What this principal may do with a consumer group, which need not exist.

    Call it only if ``__consumer_offsets`` exists: the question would create it.
    """
    cluster.connect(deadline)
    # From version 6 on, a group that does not exist is an error, without operations.
    request = DescribeGroupsRequest(
        version=cluster.version(DescribeGroupsRequest, min_version=3, max_version=5),
        groups=[group],
        include_authorized_operations=True,
    )
    try:
        response = repeat(
            cluster, request, "DescribeGroups", GROUP, group, deadline, code_of=lambda r: int(r.groups[0].error_code)
        )
    except PermissionDeniedError:
        return frozenset()
    answer = response.groups[0]
    if answer.error_code == Code.GROUP_AUTHORIZATION_FAILED:
        return frozenset()
    return None if answer.error_code else operations(answer.authorized_operations)


def may_write_transactional_id(cluster: Cluster, transactional_id: str, group: str, deadline: Deadline) -> bool:
    """Whether this principal has WRITE on a transactional id, which need not exist.

    The request is AddOffsetsToTxn of a producer id that nobody has. The broker looks at the permissions first, and
    then refuses it, whatever the transactional id does at the moment. Nothing changes, and nobody is fenced.

    Call it only if ``__transaction_state`` exists: the question would create it.

    Raises:
        OnceflowError: the broker answers something else.
    """
    cluster.connect(deadline)
    request = AddOffsetsToTxnRequest(
        version=cluster.version(AddOffsetsToTxnRequest, min_version=0, max_version=3),
        transactional_id=transactional_id,
        producer_id=_NOBODY,
        producer_epoch=0,
        group_id=group,
    )
    try:
        response = repeat(cluster, request, "AddOffsetsToTxn", TRANSACTION, transactional_id, deadline)
    except PermissionDeniedError:  # not even DESCRIBE
        return False
    code = int(response.error_code)
    if code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return False
    if codes.describe(code).name in ("INVALID_PRODUCER_ID_MAPPING", "GROUP_AUTHORIZATION_FAILED"):
        return True  # WRITE is looked at before the producer id, and before the group
    raise codes.error_for(code, api="AddOffsetsToTxn", detail=f"transactional id {transactional_id}")

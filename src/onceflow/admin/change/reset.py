"""Resets a flow, so that it starts without progress: writes a tombstone of its progress record, and deletes its
consumer group."""

from __future__ import annotations

from typing import Any

from kafka.protocol.admin import DeleteGroupsRequest

from onceflow.admin.change.flow_transaction import told_of_flow
from onceflow.client.allowed import of_group
from onceflow.client.cluster import GROUP, Cluster
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import fetch_committed
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import DEAD, describe_transaction
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.driver.record.session import DriverSession
from onceflow.errors import BrokerUnsupportedError, PermissionDeniedError, UnknownTopicError
from onceflow.protocol import acls, codes
from onceflow.protocol.batches import encode_single
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.protocol.transaction import Event

_SECONDS = 60.0
_GROUP_ID_NOT_FOUND = 69


def is_known(settings: ClientSettings, names: Names) -> bool:
    """Whether Kafka knows anything of the flow: its transactional id, offsets of its group, or progress.

    Changes nothing, and fences no driver. If this principal may not read these, the result is True.

    Raises:
        BrokerUnreachableError: no broker answers.
    """
    deadline = Deadline(_SECONDS, f"looking for flow {names.flow}")
    cluster = Cluster(settings)
    try:
        if describe_transaction(cluster, names.transactional_id, deadline)["state"] != DEAD:
            return True
        if fetch_committed(cluster, names.group_id, None, deadline, stable=False):
            return True
        return names.progress_key.encode() in CommittedProgress().read(cluster, deadline)
    except UnknownTopicError:
        return False
    except (PermissionDeniedError, BrokerUnsupportedError):
        return True
    finally:
        cluster.close()


def reset(settings: ClientSettings, names: Names, source_topics: list[str]) -> Progress | None:
    """Delete the progress of a flow. A running driver of the flow is fenced.

    Args:
        source_topics: topics it reads, to find its progress faster; may be empty.

    Returns:
        The progress before, or None if there was none.

    Raises:
        PermissionDeniedError, BrokerUnreachableError, UnknownTopicError: nothing has changed.
        FencedError: a driver of the flow started meanwhile.
    """
    deadline = Deadline(_SECONDS, f"resetting flow {names.flow}")
    cluster = Cluster(settings)
    try:
        session = DriverSession(cluster, names)
        session.transactions.check_supported(deadline)
        progress_log.ensure_topic(cluster, deadline)
        _check_may_delete(cluster, names.group_id, deadline)
        session.init(deadline)
        spans = {name: sorted(cluster.topic(name, deadline).leaders) for name in source_topics}
        before = session.progress(spans, deadline, missing_is_fine=True)
        _write_tombstone(cluster, session.transactions, names, deadline)
        _delete_group(cluster, names.group_id, deadline)
        return before
    finally:
        cluster.close()


def _write_tombstone(cluster: Cluster, transactions: Transactions, names: Names, deadline: Deadline) -> None:
    partition = progress_log.partition_of(names.progress_key)
    identity = transactions.begin(deadline)
    if not transactions.version_2:
        transactions.add_partitions({PROGRESS_TOPIC: [partition]}, deadline)
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=deadline)
    key, now = names.progress_key.encode(), clock_ms()
    tombstone = encode_single(key, None, timestamp_ms=now, identity=identity, base_sequence=0)
    producer.send(PROGRESS_TOPIC, partition, tombstone)
    producer.flush()
    transactions.machine.on(Event.ROWS_AUDITED)  # it has no rows
    transactions.machine.on(Event.PROGRESS_WRITTEN)
    with told_of_flow(names):
        transactions.commit(deadline, flow=names.flow, doing="being reset")


def _check_may_delete(cluster: Cluster, group: str, deadline: Deadline) -> None:
    """Refuse before anything is written. Without progress, and with a group that stays, the flow would not start."""
    allowed = of_group(cluster, group, deadline)
    if allowed is not None and "DELETE" not in allowed:
        raise PermissionDeniedError(
            "This principal may not delete the flow's consumer group",
            detail=f"group {group}; nothing has changed",
            next_step=acls.grant("DELETE", acls.GROUP, group),
        )


def _delete_group(cluster: Cluster, group: str, deadline: Deadline) -> None:
    """Delete the consumer group. Offsets of the group without a progress record would look like lost progress."""
    request = DeleteGroupsRequest(
        version=cluster.version(DeleteGroupsRequest, min_version=0, max_version=2), groups_names=[group]
    )

    def code_of(response: Any) -> int:
        return int(response.results[0].error_code)

    code = code_of(repeat(cluster, request, "DeleteGroups", GROUP, group, deadline, code_of=code_of))
    if code not in (0, _GROUP_ID_NOT_FOUND):
        raise codes.error_for(code, api="DeleteGroups", resource=group, detail=f"group {group}")

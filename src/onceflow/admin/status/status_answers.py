"""Questions for the status of a flow that may be refused or get no answer: then the status says so, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from onceflow.admin.status.flow_status import FlowStatus
from onceflow.admin.status.table_counts import count_rows
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.errors import (
    BrokerUnreachableError,
    DeadlineExceededError,
    PermissionDeniedError,
    UnknownTopicError,
)
from onceflow.protocol.names import INTERNAL_SUFFIX

T = TypeVar("T")


def permitted(status: FlowStatus, permission: str, call: Callable[[], T]) -> T | None:
    """What the call returns; None if this principal may not: then the permission is named in ``missing``."""
    try:
        return call()
    except PermissionDeniedError:
        if permission not in status.missing:
            status.missing.append(permission)
        return None


def answered(status: FlowStatus, what: str, call: Callable[[], T]) -> T | None:
    """What the call returns; None if brokers do not answer in time: then what was asked for is named in ``unseen``."""
    try:
        return call()
    except (DeadlineExceededError, BrokerUnreachableError) as silent:
        status.unseen.append(f"{what}: no answer{f' ({silent.detail})' if silent.detail else ''}")
        return None


def gone(cluster: Cluster, status: FlowStatus, topic: str, deadline: Deadline, *, role: str) -> None:
    """A topic that is not listed: a warning if it was deleted. If it may not be seen, a permission is missing."""
    try:
        cluster.topics([topic], deadline, once=True)
    except PermissionDeniedError:
        status.missing.append(f"{'READ' if role == 'source' else 'DESCRIBE'} on topic {topic}")
        return
    except UnknownTopicError:
        pass
    status.warnings.append(f"{role} topic {topic} was deleted")


def count_tables(cluster: Cluster, status: FlowStatus) -> None:
    """Read the tables of a flow whose partitions can all be asked, and put what they have into the status.

    Raises:
        OnceflowError: a topic cannot be read for a reason other than a permission or brokers that do not answer.
    """
    by_name = {table.topic: table for table in status.tables}
    for at, table in enumerate(status.tables):
        topic, companion = table.topic, by_name.get(table.topic + INTERNAL_SUFFIX)
        if topic.removesuffix(INTERNAL_SUFFIX) in by_name.keys() - {topic} or table.records_at_most is None:
            continue
        internal_ends = {} if companion is None else companion.offsets
        read = partial(count_rows, cluster, topic, table.offsets, internal_ends, table.watermark_ms)
        try:
            status.tables[at] = replace(table, contents=answered(status, f"table {topic}", read))
        except PermissionDeniedError as denied:
            refused = topic if companion is None or companion.topic not in (denied.topic or "") else companion.topic
            status.missing.append(f"READ on topic {refused}")

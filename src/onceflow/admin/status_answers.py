"""Questions for the status of a flow that may be refused or get no answer: then the status says so, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from onceflow.admin.flow_status import FlowStatus
from onceflow.errors import BrokerUnreachableError, DeadlineExceededError, PermissionDeniedError

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

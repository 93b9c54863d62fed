"""Requests to a transaction or group coordinator, repeated until a non-retriable response."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.protocol import codes

log = logging.getLogger("onceflow.client")


def repeat(
    cluster: Cluster,
    request: Any,
    api: str,
    kind: int,
    key: str,
    deadline: Deadline,
    *,
    code_of: Callable[[Any], int] = lambda response: int(response.error_code),
) -> Any:
    """Send the same request until a non-retriable response.

    Args:
        kind, key: whose coordinator, see ``Cluster.coordinator``.
        code_of: the error code that counts, in a response.

    Returns:
        The response; its code is 0 or one that repeating does not change.

    Raises:
        DeadlineExceededError: no such answer in time. The broker may have acted.
    """
    attempt = 0
    while True:
        try:
            response = cluster.ask_coordinator(request, kind, key, deadline)
        except ConnectionFailedError as lost:
            problem = str(lost)
        else:
            row = codes.describe(code_of(response))
            if not row.verdict.retriable:
                return response
            if row.verdict is codes.Verdict.RETRY_AFTER_COORDINATOR:
                cluster.forget_coordinator(kind, key)
            problem = row.name
        log.debug("%s for %s: %s, trying again", api, key, problem)
        deadline.pause(attempt, f"{api}: {problem}")
        attempt += 1

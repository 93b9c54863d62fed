"""Requests to a transaction or group coordinator, repeated until a response without a retriable error arrives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster, ConnectionFailedError, unknown_topic
from onceflow.client.connections import SentRequest
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
    unknown: Callable[[Any], str | None] = lambda response: None,
    sent: SentRequest | None = None,
) -> Any:
    """Repeat a request until a response without a retriable error arrives.

    Args:
        kind, key: these identify the coordinator, see ``Cluster.coordinator``.
        code_of: returns the error code of a response.
        unknown: returns a topic that the broker says does not exist. It may have been deleted, or the broker may have
            just started and not know it yet.
        sent: the same request, if it is under way already.

    Returns:
        The response; its error code is 0 or not retriable.

    Raises:
        DeadlineExceededError: no such response in time. The broker may have executed the request.
        UnknownTopicError: a topic of the request has not existed for some seconds.
    """
    attempt, unknown_since = 0, 0.0
    while True:
        try:
            response = cluster.ask_coordinator(request, kind, key, deadline, sent=sent)
        except ConnectionFailedError as lost:
            problem = str(lost)
            sent = None
        else:
            sent = None
            row = codes.describe(code_of(response))
            if not row.verdict.retriable:
                return response
            if row.verdict is codes.Verdict.RETRY_AFTER_COORDINATOR:
                cluster.forget_coordinator(kind, key)
            problem = row.name
            name = unknown(response)
            unknown_since = 0.0 if name is None else unknown_since or monotonic()
            if name is not None and monotonic() - unknown_since > UNKNOWN_TOPIC_S:
                raise unknown_topic(name)
        log.debug("%s for %s: %s, retrying", api, key, problem)
        deadline.pause(attempt, f"{api}: {problem}")
        attempt += 1

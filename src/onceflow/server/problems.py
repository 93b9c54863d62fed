"""Errors of requests, as problem documents (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from onceflow.errors import OnceflowError, UnknownTopicError
from onceflow.protocol.position import other_topic

log = logging.getLogger("onceflow.server")

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1


class Problem(Exception):
    """A request that cannot be answered as asked.

    Args:
        status: of the response.
        detail: what is wrong, for people.
        next_step: what the client can do about it.
        headers, more: further headers, and members of the document.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        next_step: str = "",
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.next_step = next_step
        self.headers = dict(headers or {})
        self.more = dict(more or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def document(self) -> dict[str, Any]:
        found = {"type": "about:blank", "title": HTTPStatus(self.status).phrase, "status": self.status}
        found["detail"] = self.detail
        if self.next_step:
            found["next_step"] = self.next_step
        return {**found, **self.more}

    def response(self) -> Response:
        return Response(orjson.dumps(self.document()), self.status, self.headers, MEDIA_TYPE)


def another_topic(topic: str) -> Problem:
    """A position is of another topic of this name."""
    error = other_topic(topic)
    next_step = "take the position of a new answer; if this one is new, ask again"
    return Problem(400, error.what, next_step=next_step)


def unavailable(error: OnceflowError) -> Problem:
    """The table cannot be read: its topic is gone, or its folder cannot be used."""
    detail = error.what if not error.detail else f"{error.what} ({error.detail})"
    next_step = error.next_step
    if isinstance(error, UnknownTopicError):  # it stays like this, also when there is a topic of this name again
        next_step = "restart this instance when the topic exists, and may be described"
    return Problem(503, detail, next_step=next_step)


def failed(error: OnceflowError) -> Problem:
    """As `unavailable`, of a request that has failed with this error, which is logged."""
    log.error("a request failed: %s", error)
    return unavailable(error)


def disconnected() -> Problem:
    """Nobody gets this answer; without it, this would count as an error of the server."""
    return Problem(400, "The client has disconnected before its request was complete")

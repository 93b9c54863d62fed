"""What every request passes first: token, limits of size, time and number, and the access log."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onceflow.server.connection import ABORT, DRAIN
from onceflow.server.options import Limits
from onceflow.server.problems import Problem

log = logging.getLogger("onceflow.server")
access = logging.getLogger("onceflow.server.access")

_ABORTED_S = 0.01  # until uvicorn knows of it; otherwise it logs an answer that is not complete
_UNREAD_BYTES_MAX = 256 << 20  # of all answers that their clients are reading

PEER_PATHS = "/peer/"
#: In the scope of a request: whether it may know what is wrong here, with paths and names.
TRUSTED = "onceflow.trusted"
#: Without a token: probes send none, and the OpenAPI page says nothing about tables.
OPEN_PATHS = frozenset(("/health", "/ready", "/docs", "/openapi.json"))


class AccessControl:
    """An ASGI application around another one.

    Args:
        tokens: a request must carry one of them; empty: anybody may ask.
        access_log: whether each request is logged.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tokens: Sequence[str], *, access_log: bool) -> None:
        self._app = app
        self._limits = limits
        self._tokens = [f"Bearer {token}".encode() for token in tokens]
        self._access_log = access_log
        self._running = 0
        self.unread = 0  # bytes of answers that are made, and not yet read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close"})
            return
        passage = _Passage(self, scope, receive, send, self._limits)
        self._running += 1
        try:
            self._check(scope)
            await passage.run(self._app)
        except Problem as problem:
            if not passage.status:
                await problem.response()(scope, receive, passage.send)
        finally:
            self._running -= 1
            if self._access_log:
                passage.log()

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        # All are compared, so that the time says nothing about them.
        scope[TRUSTED] = not self._tokens or bool(sum([hmac.compare_digest(given, token) for token in self._tokens]))
        # Other instances send no token. What they ask is answered only with a proof of their own (`peer_auth`).
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(PEER_PATHS)
        if not (is_open or scope[TRUSTED]):
            raise Problem(
                401,
                "The request has no valid token",
                next_step="send the header Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._running > self._limits.requests and scope["path"] not in OPEN_PATHS:
            raise Problem(503, f"{self._limits.requests} requests are being answered already", next_step="ask again")
        if self.unread > _UNREAD_BYTES_MAX and scope["path"] not in OPEN_PATHS:
            raise Problem(503, "Other clients have not read their answers yet", next_step="ask again")
        if int(headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            raise _too_large(self._limits)


class _Passage:
    """One request on its way."""

    def __init__(self, gate: AccessControl, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._gate = gate
        self._scope, self._receive, self._send = scope, receive, send
        self._limits = limits
        self._since = time.perf_counter()
        self._received = self._sent = 0
        self._timer = anyio.CancelScope()
        self.status = 0

    async def run(self, app: ASGIApp) -> None:
        self._timer.deadline = anyio.current_time() + self._limits.request_s + 1.0
        with self._timer:
            await app(self._scope, self.receive, self.send)
        if not self._timer.cancelled_caught:
            return
        if not self.status:
            raise Problem(503, f"There was no answer within {self._limits.request_s:g} s", next_step="ask again")
        log.warning("%s did not read its answer, and was disconnected", self._client())
        if abort := self._scope.get(ABORT):
            abort()
            await anyio.sleep(_ABORTED_S)

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limits.body_bytes:
            raise _too_large(self._limits)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._send(message)
            return
        size = len(message.get("body", b""))
        self._sent += size
        self._gate.unread += size
        try:
            # From here on there is a limit for each part: an answer may be long, but it must be read.
            self._timer.deadline = anyio.current_time() + self._limits.stall_s
            await self._send(message)
            if drain := self._scope.get(DRAIN):  # uvicorn waits before the next part only, and there may be none
                await drain()
            self._timer.deadline = math.inf
        finally:
            self._gate.unread -= size

    def log(self) -> None:
        scope = self._scope
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
        if scope["query_string"]:
            path += "?" + scope["query_string"].decode("ascii", "backslashreplace")
        ms = (time.perf_counter() - self._since) * 1000
        level = logging.DEBUG if path.startswith("/peer/") else logging.INFO
        access.log(
            level, '%s "%s %s" %d %d bytes %.1f ms', self._client(), scope["method"], path, self.status, self._sent, ms
        )

    def _client(self) -> str:
        client: Any = self._scope.get("client")
        return f"{client[0]}:{client[1]}" if client else "-"


def _too_large(limits: Limits) -> Problem:
    return Problem(413, f"A request may have {limits.body_bytes:,} bytes", next_step="ask for fewer keys at once")

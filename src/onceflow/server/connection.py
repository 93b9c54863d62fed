"""uvicorn's connection, with limits for what comes before a request: its size, and the time that it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: In the scope of a request: ends its connection at once, although the client has not read everything.
ABORT = "onceflow.abort"
#: In the scope of a request: waits until the client has read nearly all of what was sent to it.
DRAIN = "onceflow.drain"
_CLOSED_S = 0.5
HEAD_BYTES_MAX = 64 << 10
_LINE_END = 4  # ": " and the end of the line of a header


class Connection(HttpToolsProtocol):
    """One connection.

    It has a timer whenever no request is running: it ends the connection, whatever is sent, if no further request
    begins in this time, or if its head is not complete in this time.
    """

    head_s = 30.0

    @classmethod
    def limited(cls, head_s: float) -> type[Connection]:
        """The class, with a limit in seconds for the time without a request, and for the head of one."""
        return type("Connection", (cls,), {"head_s": head_s})

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._unused_bytes = 0  # since the last head or part of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        super().data_received(data)
        if self._unused_bytes > HEAD_BYTES_MAX:  # a head without end, or what comes between requests
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self.scope[DRAIN] = self.flow.drain  # type: ignore[literal-required]
        self._in_head, self._head_bytes = True, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # behind the chunks of a body: nobody here uses such headers
            self.transport.abort()
            raise _RefusedError("a trailer")
        self._count(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unused_bytes = False, 0
        self._end_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self._timer is None and not self.transport.is_closing():
            self._start_timer()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            # With TLS, a connection is closed only when the client agrees, which it does not while it is idle.
            self.loop.call_later(_CLOSED_S, self.transport.abort)

    def _count(self, *parts: bytes) -> None:
        """Count what the head of a request has. The client gets 400 if it is too much."""
        self._head_bytes += sum(map(len, parts)) + _LINE_END
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _RefusedError("a head that is too large")

    def _start_timer(self) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _RefusedError(Exception):
    """Ends the reading of a request: the parser turns it into an error of its own."""

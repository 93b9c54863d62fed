"""uvicorn's connection, with limits for the head of a request: its size, and the time that it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: In the scope of a request: ends its connection at once, although the client has not read everything.
ABORT = "onceflow.abort"
_CLOSED_S = 0.5
HEAD_BYTES_MAX = 64 << 10


class Connection(HttpToolsProtocol):
    """One connection."""

    head_s = 30.0

    @classmethod
    def limited(cls, head_s: float) -> type[Connection]:
        """The class, with a limit in seconds for the time until the head of a request is complete."""
        return type("Connection", (cls,), {"head_s": head_s})

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        if self._timer is None:
            self._start_timer()
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_timer()
        super().on_headers_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            # With TLS, a connection is closed only when the client agrees, which it does not while it is idle.
            self.loop.call_later(_CLOSED_S, self.transport.abort)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

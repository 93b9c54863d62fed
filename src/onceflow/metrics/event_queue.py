"""A bounded queue of events, and the thread that sends them. Whoever has an event never waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_MOST = 1_000
_CLOSE_S = 5.0
_TELL_EVERY_S = 60.0
_NAME = "onceflow-events"


#: A client of HTTP logs each of its own attempts. This module says once a minute that events were not sent.
_CLIENTS = logging.getLogger("urllib3.connectionpool")


def _is_of_another_thread(record: logging.LogRecord) -> bool:
    return record.threadName != _NAME


class EventQueue:
    """Sends events in their order.

    Args:
        send: sends one event; it may take long, and may raise.
        what: what an event is called in warnings.
    """

    log = logging.getLogger("onceflow")

    def __init__(self, send: Callable[[Any], object], *, what: str) -> None:
        self._send = send
        self._what = what
        self._queue: queue.Queue[Any] = queue.Queue(_MOST)
        self._dropped = 0
        self._told_at: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=_NAME)
        self._thread.start()
        _CLIENTS.addFilter(_is_of_another_thread)

    def put(self, event: Any) -> None:
        """Send an event as soon as possible. It is dropped if too many wait already, or after `close`."""
        if self._closed.is_set():
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._drop(f"{_MOST} are waiting")

    def close(self, before: Callable[[], object]) -> None:
        """Wait until everything is sent, but at most 5 seconds. ``before`` is called first, by the first call only."""
        if self._closed.is_set():
            return
        before()
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            left = self._queue.qsize() + 1
            self.log.warning("%ss that were not sent: %d (the endpoint does not answer)", self._what, left)

    def _run(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._closed.is_set():
                    return
                continue
            try:
                self._send(event)
            except Exception as error:
                self._drop(f"{type(error).__name__}: {error}".partition("\n")[0])

    def _drop(self, why: str) -> None:
        self._dropped += 1
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self.log.warning("%ss that were not sent: %d (%s); flows go on", self._what, self._dropped, why)
            self._dropped = 0

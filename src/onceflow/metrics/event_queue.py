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
        finish: called after the last event, with the seconds that it may take. It waits for events that ``send`` has
            only put aside, and returns whether all of them have arrived. It may raise.
    """

    log = logging.getLogger("onceflow")

    def __init__(
        self, send: Callable[[Any], object], *, what: str, finish: Callable[[float], bool] | None = None
    ) -> None:
        self._send = send
        self._what = what
        self._finish = finish
        self._unfinished = ""
        self._until = 0.0
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

    def close(self, before: Callable[[], object], within_s: float | None = None) -> None:
        """Wait until everything is sent, but at most 5 seconds, and at most ``within_s``.

        ``before`` is called first, by the first call only.
        """
        if self._closed.is_set():
            return
        before()
        limit_s = _CLOSE_S if within_s is None else min(_CLOSE_S, within_s)
        self._until = time.monotonic() + limit_s
        self._closed.set()
        self._thread.join(limit_s)
        if self._unfinished:
            self.log.warning("%ss may not have arrived: %s", self._what, self._unfinished)
        elif self._thread.is_alive():
            left = self._queue.qsize() + 1
            self.log.warning("%ss that were not sent: %d (the endpoint does not answer)", self._what, left)

    def _run(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._closed.is_set():
                    self._wait_for_the_last()
                    return
                continue
            try:
                self._send(event)
            except Exception as error:
                self._drop(f"{type(error).__name__}: {error}".partition("\n")[0])

    def _wait_for_the_last(self) -> None:
        if self._finish is None:
            return
        self._unfinished = "the endpoint has not taken them in time"
        try:
            if self._finish(max(0.0, self._until - time.monotonic())):
                self._unfinished = ""
        except Exception as error:
            self._unfinished = f"{type(error).__name__}: {error}".partition("\n")[0]

    def _drop(self, why: str) -> None:
        self._dropped += 1
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self.log.warning("%ss that were not sent: %d (%s); flows go on", self._what, self._dropped, why)
            self._dropped = 0

"""kafka-python's event loop, with two defects corrected: it drops Ctrl-C, and can keep its lock after it.

It also needs fewer calls of the system for each request (``watched_sockets.py``).

Python raises KeyboardInterrupt wherever the main thread is. If that is in one of the loop's own tasks, the loop logs
the exception, ends the task, and goes on: a command would run until its deadline. Here the loop raises it again, if
the handler of SIGINT is that of ``client.interrupts``.

It can also be raised when the loop has its lock, and is not yet or no longer in the ``try`` that releases it. Then
even ``close`` would fail.
"""

from __future__ import annotations

import threading
from typing import Any

from kafka.net.selector import NetworkSelector

from onceflow.client import interrupts
from onceflow.client.watched_sockets import WatchedSockets


class EventLoop(NetworkSelector):  # type: ignore[misc]
    """The event loop of onceflow's connections."""

    _poll_owner: threading.Thread | None  # of kafka-python, which does not declare its type

    def __init__(self, **config: Any) -> None:
        super().__init__(selector=WatchedSockets, **config)

    def call_soon_threadsafe(self, callback: Any) -> Any:
        """As that of kafka-python, which also wakes up a loop in which nobody waits."""
        if self._exception:
            raise self._exception from None
        if self._closed:
            raise RuntimeError("NetworkSelector closed!")
        task = self.call_soon(callback)
        # Now the task is there: whoever takes the lock from here on finds it before he waits.
        if self._poll_lock.locked() and self._poll_owner is not threading.current_thread():
            self.wakeup()
        return task

    def _poll_once(self, timeout: float | None = None) -> None:
        with interrupts.not_dropped():
            try:
                super()._poll_once(timeout)
            except KeyboardInterrupt:
                # No owner: the owner is set and taken back inside the lock.
                if self._poll_lock.locked() and self._poll_owner in (None, threading.current_thread()):
                    self._poll_owner = None
                    self._poll_lock.release()
                raise

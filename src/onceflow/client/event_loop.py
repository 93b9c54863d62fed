"""kafka-python's event loop, with two defects corrected: it drops Ctrl-C, and can keep its lock after it.

Python raises KeyboardInterrupt wherever the main thread is. If that is in one of the loop's own tasks, the loop logs
the exception, ends the task, and goes on: a command would run until its deadline. Here the loop raises it again, if
the handler of SIGINT is that of ``client.interrupts``.

It can also be raised when the loop has its lock, and is not yet or no longer in the ``try`` that releases it. Then
even ``close`` would fail.
"""

from __future__ import annotations

import threading

from kafka.net.selector import NetworkSelector

from onceflow.client import interrupts


class EventLoop(NetworkSelector):  # type: ignore[misc]
    """The event loop of onceflow's connections."""

    _poll_owner: threading.Thread | None  # of kafka-python, which does not declare its type

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

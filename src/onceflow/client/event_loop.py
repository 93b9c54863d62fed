"""kafka-python's event loop, with a defect corrected: it drops Ctrl-C.

Python raises KeyboardInterrupt wherever the main thread is. If that is in one of the loop's own tasks, the loop logs
the exception, ends the task, and goes on: a command would run until its deadline. Here the loop raises it again, if
the handler of SIGINT is that of ``client.interrupts``.
"""

from __future__ import annotations

from kafka.net.selector import NetworkSelector

from onceflow.client import interrupts


class EventLoop(NetworkSelector):  # type: ignore[misc]
    """The event loop of onceflow's connections."""

    def _poll_once(self, timeout: float | None = None) -> None:
        with interrupts.not_dropped():
            super()._poll_once(timeout)

"""Threads for calls of plain functions. A call that never returns must not keep a process alive."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

_CLOSE_S = 0.2
NAME = "onceflow-call"


class DaemonThreads:
    """As many threads as there are jobs at a time. They are reused, and end with `close`.

    Not a ThreadPoolExecutor: a process waits at its end for the threads of that, also for one that hangs.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise. It sees the context variables of the caller."""
        context = contextvars.copy_context()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._work, name=NAME, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.put(partial(context.run, job))

    def close(self) -> None:
        """End the threads that are idle, and those that work when they have done so; wait for them, but not long."""
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the arguments of the call
            with self._lock:
                self._idle += 1

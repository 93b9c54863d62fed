"""A thread for short pieces of work that come one after the other, and often."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 1.0


class Background:
    """Runs functions in a thread of its own, one after the other.

    The thread ends when nothing has come for a second, and begins again when something comes. So nobody has to close
    it, and work that comes many times a second does not begin a thread each time.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run a function soon. It must not raise."""
        self._waiting.put(work)
        with self._lock:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                work = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._runs = False
                        return
                continue
            work()

"""The threads that read an LMDB environment: nobody moves its memory map or closes it meanwhile.

LMDB's readers do not wait for its writer. They must only be absent while the process enlarges its map, which may move
it, and while it closes the environment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceflow.errors import DeadlineExceededError

#: How long those who need all readers to be absent wait. A reader may check a whole copy.
WAIT_S = 60.0


class Readers:
    """Of one environment in this process. A thread that reads may begin to read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._gone = threading.Condition(self._lock)
        self._admitted = threading.Condition(self._lock)
        self._count = 0
        self._own = threading.local()  # .count: how often this thread reads
        self._waiting = 0  # threads that need all readers to be absent
        self._alone: int | None = None  # the thread that has sent them away

    def enter(self) -> None:
        """Begin to read. It waits only for `absent`. The caller must call `leave` afterwards."""
        with self._lock:
            own = getattr(self._own, "count", 0)
            # New readers wait, or there might always be one. One that reads already must not: it would wait for itself.
            while self._waiting and not own and self._alone != threading.get_ident():
                self._admitted.wait()
            self._own.count = own + 1
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._own.count -= 1
            self._count -= 1
            if not self._count:
                self._gone.notify_all()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While this is held, no other thread reads. It is reentrant. The thread must not be reading.

        Raises:
            DeadlineExceededError: a thread did not stop reading until the timeout.
        """
        with self._lock:
            self._send_away()
            before, self._alone = self._alone, threading.get_ident()
            try:
                yield
            finally:
                self._alone = before

    def _send_away(self) -> None:
        self._waiting += 1
        try:
            gone = self._gone.wait_for(lambda: not self._count, WAIT_S)
        finally:
            self._waiting -= 1
            self._admitted.notify_all()  # they go on when this thread has released the lock
        if not gone:
            raise DeadlineExceededError(
                f"Gave up after {WAIT_S:g} s: a thread is reading the local state in {self._folder}",
                next_step="an iteration over the state may not have been ended; end it, or close what it reads",
            )

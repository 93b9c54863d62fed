"""One writer of an LMDB folder at a time (process and thread); the others wait in bounded time.

LMDB has a lock of its own for this, but waits at it without end: a process that is stopped (SIGSTOP, a debugger, a
frozen container) while it writes would hang all others. So writers come to this lock first. Where everybody does,
LMDB's own one is always free. Nothing but the waiting depends on this lock: the data are safe by LMDB's.

A POSIX lock, because it belongs to the process: it ends with it, forked children do not keep it, and the system tells
who holds it. It takes two system calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceflow.errors import DeadlineExceededError

NAME = "writer.lock"
#: How long a writer waits for another one; a large restore is written in parts.
WAIT_S = 60.0
_PAUSE_S = 0.005
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class WriterLock:
    """Of one folder, in this process. The file is made at the first use, and opened nowhere else: whoever closes a
    file gives up all POSIX locks of the process on it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._threads = threading.Lock()
        self._file = -1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes meanwhile. Not reentrant.

        Raises:
            DeadlineExceededError: somebody did all the time.
            OSError: the file cannot be made.
        """
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """As `held`; to be followed by ``release``."""
        end = time.monotonic() + WAIT_S
        if not self._threads.acquire(timeout=WAIT_S):
            raise self._busy(os.getpid())
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while not self._try():
                if time.monotonic() > end:
                    raise self._busy(self._holder())
                time.sleep(_PAUSE_S)
        except BaseException:
            self._threads.release()
            raise

    def release(self) -> None:
        if self._file >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Gives up the file, and the lock with it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def _holder(self) -> int:
        """The process that holds the lock; 0 when it is free by now, or the system does not tell."""
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        except (OSError, struct.error):
            return 0
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    def _busy(self, pid: int) -> DeadlineExceededError:
        who = f"process {pid}" if pid else "another process"
        return DeadlineExceededError(
            f"Gave up after {WAIT_S:g} s: {who} is writing to the local state in {self._path.parent}",
            next_step=f"see whether {who} is stopped or hangs (ps -o pid,stat,args), and end it; a folder of local "
            "state serves one driver at a time",
        )

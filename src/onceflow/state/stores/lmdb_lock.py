"""A lock with a timeout, so that only one process and thread writes to an LMDB folder at a time.

LMDB has its own lock for this, but waits for it without a timeout. A process that is stopped while it writes (SIGSTOP,
a debugger, a frozen container) would block all others forever. So all writers acquire this lock first, and LMDB's own
lock is then always free. Only the timeout depends on this lock: the data are protected by LMDB's lock.

It is a POSIX lock, because such a lock belongs to the process: it is released when the process ends, forked children do
not inherit it, and the system tells who holds it. It takes two system calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onceflow.errors import DeadlineExceededError
from onceflow.state.stores.base import StoreHeldError

NAME = "writer.lock"
#: How long a writer waits for another one. (A large restore is written in parts.)
WAIT_S = 60.0
_PAUSE_S, _LOOK_S = 0.005, 0.1
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class WriterLock:
    """The lock of one folder in this process. The file is created at the first use. It must not be opened anywhere else
    in the process: closing any descriptor of a file releases all POSIX locks of the process on it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._threads = threading.Lock()
        self._file = -1

    @contextmanager
    def held(self, *, stopped_s: float | None = None) -> Iterator[None]:
        """Hold the lock, so that no one else writes. It is not reentrant.

        Args:
            stopped_s: for how long a process may hold it that is stopped (SIGSTOP), in seconds; None: until the
                timeout.

        Raises:
            StoreHeldError: a process holds it that has been stopped for so long.
            DeadlineExceededError: another writer held the lock until the timeout.
            OSError: the file cannot be created.
        """
        self.acquire(stopped_s)
        try:
            yield
        finally:
            self.release()

    def acquire(self, stopped_s: float | None = None) -> None:
        """As `held`. The caller must call ``release`` afterwards."""
        end = time.monotonic() + WAIT_S
        looks = _StoppedHolder(self._holder, stopped_s)
        if not self._threads.acquire(timeout=WAIT_S):
            raise self._busy(os.getpid())
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while not self._try():
                if time.monotonic() > end:
                    raise self._busy(self._holder())
                looks.check()
                time.sleep(_PAUSE_S)
        except BaseException:
            self._threads.release()
            raise

    def release(self) -> None:
        if self._file >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Closes the file, which also releases the lock."""
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
        """The process that holds the lock; 0 if the lock is free now, or if the system does not tell."""
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
            next_step=f"check whether {who} is stopped or hangs (ps -o pid,stat,args), and end it. Only one driver at "
            "a time can use a folder of local state",
        )


class _StoppedHolder:
    """Notices that the holder of a lock is stopped.

    Args:
        holder: returns its process id; 0: it is not known.
        stopped_s: see `WriterLock.held`.
    """

    def __init__(self, holder: Callable[[], int], stopped_s: float | None) -> None:
        self._holder = holder
        self._stopped_s = stopped_s
        self._look_at = 0.0
        self._since: tuple[int, float] | None = None  # process, and since when it was seen to be stopped

    def check(self) -> None:
        """To be called again and again while the lock is waited for.

        Raises:
            StoreHeldError: it has been stopped for long enough.
        """
        now = time.monotonic()
        if self._stopped_s is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        pid = self._holder()
        if not _is_stopped(pid):
            self._since = None
        elif self._since is None or self._since[0] != pid:
            self._since = pid, now
        elif now - self._since[1] >= self._stopped_s:
            raise StoreHeldError(f"process {pid} was stopped while it was writing to it")


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger. False also if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(fields) and fields[0] in ("T", "t")

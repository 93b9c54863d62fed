"""A lock that tells drivers of one machine that a process lives: the system frees it when the process dies.

Each driver holds one on a file of its own, which has its id as a name. Whoever finds the file is on the same machine,
and whoever gets the lock knows that the process is gone. A process that is stopped (SIGSTOP) keeps its lock: then
heartbeats decide. Services with temporary folders of their own (``PrivateTmp=``) do not find each other's files; they
have ``door.py``.

It is a POSIX lock, which forked children do not inherit. Within a process it would not be seen, so a process remembers
its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from onceflow.errors import EnvironmentUnusableError
from onceflow.host.private_folders import make_private, private_temporary

_PATIENCE_S, _PAUSE_S = 1.0, 0.002
_ours: set[str] = set()  # held in this process


class ProcessLock:
    """The lock of one driver. Without a folder for it, there is none, and others see by other means that it has died.

    Args:
        driver: its id.
    """

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._file = -1
        path = _path(driver)
        if path is None:
            return
        _ours.add(driver)
        try:
            make_private(path.parent)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._acquire()
        except OSError:
            self.release()

    def _acquire(self) -> None:
        """Another process may just be looking whether it is free: that takes microseconds."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return

    def release(self) -> None:
        """Release it, and remove the file."""
        path = _path(self._driver)
        if self._file >= 0 and path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(self._file)
            self._file = -1
        _ours.discard(self._driver)


def is_free(driver: str) -> bool:
    """Whether the process of a driver of this machine has ended. False also if that cannot be told."""
    path = _path(driver)
    if path is None or driver in _ours:
        return False
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False  # it runs elsewhere, or has ended by itself
    try:
        # Shared: of several who look at the same time, none takes the others for the driver.
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(file)


def remove_left() -> None:
    """Remove the files of drivers that have died long ago."""
    path = _path("any")
    if path is None:
        return
    for file in path.parent.glob("*.lock"):
        if is_free(file.stem):
            with contextlib.suppress(OSError):
                file.unlink()


def _path(driver: str) -> Path | None:
    """None: there is no folder, or it is no id of a driver."""
    if not (driver.isascii() and driver.isalnum()):
        return None
    try:
        return private_temporary() / "drivers" / f"{driver}.lock"
    except EnvironmentUnusableError:
        return None

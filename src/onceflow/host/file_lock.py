"""A lock that processes of one machine hold in turn, on a file."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import DeadlineExceededError

_POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, *, busy: str, next_step: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made when it is missing.

    Args:
        busy: what the error says.

    Raises:
        DeadlineExceededError: another process has held it all the time.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(busy, next_step=next_step) from None
                time.sleep(_POLL_S)
        yield  # closing the file releases the lock

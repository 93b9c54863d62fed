"""An exclusive lock on a file between processes of one machine: ``filelock``, with an onceflow error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import DeadlineExceededError


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, *, busy: str, next_step: str) -> Iterator[None]:
    """Hold an exclusive lock on a file. The file is created if it does not exist.

    Args:
        busy: text of the error.

    Raises:
        DeadlineExceededError: another process has held the lock for the whole time.
    """
    from filelock import FileLock, Timeout  # imported here: it imports asyncio, which most starts do not need

    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout as held:
        raise DeadlineExceededError(busy, next_step=next_step) from held
    try:
        yield
    finally:
        lock.release()

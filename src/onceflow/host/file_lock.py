"""A lock that processes of one machine hold in turn, on a file: ``filelock`` with an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from onceflow.errors import DeadlineExceededError


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, *, busy: str, next_step: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made when it is missing.

    Args:
        busy: what the error says.

    Raises:
        DeadlineExceededError: another process has held it all the time.
    """
    from filelock import FileLock, Timeout  # not before it is needed: it loads asyncio, which most starts do without

    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout as held:
        raise DeadlineExceededError(busy, next_step=next_step) from held
    try:
        yield
    finally:
        lock.release()

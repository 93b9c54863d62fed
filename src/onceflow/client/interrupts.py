"""Ctrl-C that nothing drops: a handler of SIGINT, and the block around code that swallows KeyboardInterrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn


class CommitInterruptedError(KeyboardInterrupt):
    """Ctrl-C while a transaction is committed: it was committed or not. Its text says so to people."""


@contextmanager
def outcome_told(change: str, look: str) -> Iterator[None]:
    """Around a commit: Ctrl-C says that nobody knows the outcome, and how to look.

    Args:
        change: what is being committed. look: a sentence without its full stop.

    Raises:
        CommitInterruptedError: Ctrl-C was pressed.
    """
    try:
        yield
    except KeyboardInterrupt as pressed:
        raise CommitInterruptedError(
            f"Ctrl-C came while {change} was being committed, so its outcome is not known: all of it was done, or "
            f"nothing. {look}"
        ) from pressed


_AS_GOOD = (KeyboardInterrupt, SystemExit, GeneratorExit)
_blocks: list[not_dropped] = []  # those that the main thread is in


class not_dropped:
    """If KeyboardInterrupt is raised in the block by `interrupt`, and gets lost there, it is raised at its end: also in
    place of another exception, which may be a consequence of it.

    It is a class, not a generator: it is entered at every turn of an event loop.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._ours = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._ours:
            _blocks.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ours:
            _blocks.remove(self)
        if self.interrupted and (kind is None or not issubclass(kind, _AS_GOOD)):
            raise KeyboardInterrupt from error


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGINT that raises KeyboardInterrupt, as Python's own does."""
    for block in _blocks:
        block.interrupted = True
    raise KeyboardInterrupt


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """In the block, `interrupt` handles SIGINT, if Python's own handler would. Only the main thread gets signals."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

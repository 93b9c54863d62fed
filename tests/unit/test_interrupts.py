"""Ctrl-C is not lost in code that swallows KeyboardInterrupt, or makes another exception of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from onceflow.client.event_loop import EventLoop
from onceflow.client.interrupts import interrupts_kept, not_dropped


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """Spark puts another one there, and Python has none where SIGINT was ignored when it began."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def work(then: BaseException | None) -> None:
    """Ctrl-C is swallowed here, and then another exception is raised, or none."""
    with interrupts_kept(), not_dropped():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        if then is not None:
            raise then


@pytest.mark.parametrize("other", [None, ValueError("x"), asyncio.CancelledError()], ids=["none", "error", "cancelled"])
def test_what_a_block_makes_of_it(other: BaseException | None) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        work(other)
    assert raised.value.__cause__ is other


def test_an_exit_is_as_good() -> None:
    with pytest.raises(SystemExit):
        work(SystemExit(3))


def test_errors_without_it_are_raised_as_they_are() -> None:
    with pytest.raises(ValueError, match="x"), interrupts_kept(), not_dropped():
        raise ValueError("x")


class InterruptedLock:
    """A lock that Ctrl-C meets once: when it has just been taken, or when it is about to be released."""

    def __init__(self, at: str) -> None:
        self._lock, self._at = threading.Lock(), at

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking)
        self._meet("acquire")
        return taken

    def release(self) -> None:
        self._meet("release")
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def _meet(self, here: str) -> None:
        if here == self._at:
            self._at = ""
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at", ["acquire", "release"])
def test_the_event_loop_can_be_closed_after_it(at: str) -> None:
    loop = EventLoop()
    loop._poll_lock = InterruptedLock(at)
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        loop.poll(timeout_ms=0)
    loop.call_soon(lambda: None)  # `close` runs what is left
    loop.close()


def test_the_event_loop_leaves_the_lock_to_another_thread() -> None:
    loop = EventLoop()
    loop._poll_lock.acquire()
    loop._poll_owner = threading.Thread()
    with pytest.raises(RuntimeError, match="Concurrent"):
        loop._poll_once(0)
    assert loop._poll_lock.locked()
    loop._poll_lock.release()
    loop.close()

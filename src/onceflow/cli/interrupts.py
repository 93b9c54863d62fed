"""Ctrl-C for commands that run until somebody presses it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises KeyboardInterrupt here as everywhere; and it is not forgotten.

    kafka-python's loop swallows what is raised while a task of its own runs. So call what this yields now and then: it
    raises KeyboardInterrupt when Ctrl-C was pressed.
    """
    pressed = threading.Event()

    def press(*_: Any) -> None:
        pressed.set()
        raise KeyboardInterrupt

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)

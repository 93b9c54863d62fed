"""Ctrl-C for commands that run until the user stops them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click

INTERRUPTED = 130


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises KeyboardInterrupt as usual, and does not get lost.

    kafka-python's event loop drops exceptions that are raised while one of its own tasks runs. So this yields a
    function that the command must call regularly: it raises KeyboardInterrupt if Ctrl-C was pressed.
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


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Around what has no other end than Ctrl-C: it ends the command with exit code 130, without a message."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)  # the terminal shows ^C
        raise click.exceptions.Exit(INTERRUPTED) from None

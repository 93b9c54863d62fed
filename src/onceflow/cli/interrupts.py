"""Ctrl-C for commands that run until the user stops them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import click

from onceflow.client.interrupts import interrupt

INTERRUPTED = 130


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises KeyboardInterrupt as usual, and does not get lost.

    Libraries may drop exceptions that are raised while they call back. So this yields a function that the command must
    call regularly: it raises KeyboardInterrupt if Ctrl-C was pressed.
    """
    pressed = threading.Event()

    def press(number: int, frame: FrameType | None) -> None:
        pressed.set()
        interrupt(number, frame)

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

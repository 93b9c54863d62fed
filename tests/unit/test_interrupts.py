"""Ctrl-C is not lost in code that swallows KeyboardInterrupt, or makes another exception of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

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

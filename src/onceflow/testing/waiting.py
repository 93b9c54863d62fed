"""Wait until something holds, with a deadline: tests and fault drivers have one way to do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


class WaitedInVainError(AssertionError):
    """The condition did not hold in time, or cannot hold any more. The text says what was waited for."""


def wait_until(
    condition: Callable[[], T],
    deadline_s: float,
    what: str | Callable[[], object],
    *,
    useless: Callable[[], object] | None = None,
    poll_s: float = POLL_S,
) -> T:
    """The first true answer of ``condition``, which is asked at once and then every ``poll_s`` seconds.

    Args:
        deadline_s: how long to wait, in seconds. The condition is asked a last time when they are over.
        what: what is waited for, for the error; a function is called when there is an error.
        useless: called whenever the condition does not hold. A true result says why it never will (a process has
            ended, a query has failed); then waiting ends at once.
        poll_s: seconds between two questions; more for conditions that cost something, such as reading a topic.

    Raises:
        WaitedInVainError: the condition did not hold in time, or ``useless`` gave a reason.
    """
    end = time.monotonic() + deadline_s
    while True:
        last = time.monotonic() >= end
        # Called before the condition: a process may make the condition true and end right after that.
        reason = useless() if useless is not None else None
        if answer := condition():
            return answer
        if reason:
            raise WaitedInVainError(f"It can no longer happen: {_text(what)}.\n{reason}")
        if last:
            raise WaitedInVainError(f"It did not happen within {deadline_s:g} s: {_text(what)}.")
        time.sleep(max(0.0, min(poll_s, end - time.monotonic())))


def _text(what: str | Callable[[], object]) -> str:
    return what if isinstance(what, str) else str(what())

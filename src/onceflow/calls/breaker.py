"""``Breaker``: after many failures in a row, calls fail at once for some time."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass

from onceflow.calls.options import seconds
from onceflow.errors import CircuitOpenError, OptionError
from onceflow.options.arguments import with_checked_arguments


@with_checked_arguments
@dataclass(frozen=True)
class Breaker:
    """When calls are refused without being made, because the other side does not work.

    After ``failures`` transient errors in a row, calls raise CircuitOpenError for the time of ``pause``. Then one call
    is made as a trial. If it succeeds, calls are made again; if not, they are refused for another ``pause``. Errors
    that are not transient do not count: the other side has answered.

    Each Python process has a breaker of its own for each function, or function and text that `functools.partial` binds
    to it, such as a URL. They live as long as the process, over many batches.

    Args:
        failures: how many transient errors in a row, over all calls of the function in the process.
        pause: how long calls are refused.

    Raises:
        OptionError: an argument is invalid.
    """

    failures: int = 10
    pause: str | float = "10 seconds"

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise OptionError(f"Breaker: failures={self.failures!r} is too few", next_step="give at least 1")
        seconds(self.pause, "Breaker: pause")


class Circuit:
    """The state of a breaker in this process."""

    def __init__(self, name: str, breaker: Breaker) -> None:
        self._name = name
        self._failures_max = breaker.failures
        self._pause_s = seconds(breaker.pause, "pause")
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until: float | None = None  # monotonic; None: calls are made

    def check(self) -> None:
        """To be called before every call.

        Raises:
            CircuitOpenError: the call must not be made.
        """
        with self._lock:
            now = time.monotonic()
            if self._closed_until is None:
                return
            if now < self._closed_until:
                raise CircuitOpenError(
                    f"{self._name} is not called: {self._failures} calls in a row have failed",
                    next_step=f"one call is tried again in {self._closed_until - now:.1f} s",
                )
            # This call is the trial. If nobody hears of it again, there will be another one after the pause.
            self._closed_until = now + self._pause_s

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._closed_until = 0, None

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self._failures_max:
                self._closed_until = time.monotonic() + self._pause_s


_circuits: dict[tuple[Hashable, Breaker], Circuit] = {}
_lock = threading.Lock()


def circuit_of(name: str, identity: Hashable, breaker: Breaker) -> Circuit:
    """The circuit of this process for a function: tasks that follow each other share it.

    Args:
        name: of the function, for messages.
        identity: what tells it from other functions.
    """
    with _lock:
        return _circuits.setdefault((identity, breaker), Circuit(name, breaker))

"""One deadline limits a whole operation, with all its requests and retries (invariant I8)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from onceflow.errors import DeadlineExceededError


class Deadline:
    """A point in time after which an operation gives up.

    Args:
        seconds: how long from now.
        what: what is being done, for the text of the error.
        clock: monotonic clock in seconds (injectable for tests).
        sleep: how to wait (injectable for tests).
        rng: source of the jitter (injectable, so that a seed reproduces a run).
    """

    def __init__(
        self,
        seconds: float,
        what: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.seconds = seconds
        self.what = what
        self._clock = clock
        self._sleep = sleep
        self._rng = rng  # one of its own is made when it is needed: its seed takes longer than most operations
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock())

    @property
    def expired(self) -> bool:
        return self.remaining <= 0.0

    def capped(self, seconds: float) -> float:
        """``seconds``, or the remaining time if that is less."""
        return min(seconds, self.remaining)

    def backoff_s(self, attempt: int, *, min_s: float = 0.005, max_s: float = 0.5) -> float:
        """Exponential wait with full jitter for the ``attempt``-th retry (0-based), in seconds.

        The first waits are short: the usual reason for a retry is that two tasks add partitions to the transaction at
        the same time, which is over within milliseconds.
        """
        ceiling = min(max_s, min_s * (2 ** min(attempt, 16)))
        self._rng = self._rng or random.Random()
        return self._rng.uniform(ceiling / 2, ceiling)

    def wait(self, attempt: int) -> bool:
        """Wait before retry ``attempt``. False, and no wait: the deadline has passed. Whoever raises an error of its
        own then asks this, not `expired` and then `pause`: the deadline may pass between the two."""
        if (left := self.remaining) <= 0.0:
            return False
        self._sleep(min(left, self.backoff_s(attempt)))
        return True

    def pause(self, attempt: int, last_problem: str) -> None:
        """Wait before retry ``attempt``; raise when the deadline has passed."""
        if not self.wait(attempt):
            raise self.error(last_problem)

    def error(self, last_problem: str = "") -> DeadlineExceededError:
        return DeadlineExceededError(
            f"Gave up after {self.seconds:g} s: {self.what}",
            detail=last_problem,
            next_step="check that the brokers are up and reachable; a flow that is started again continues from its "
            "committed progress",
        )

"""Who reads the next batch of the direct engine: the driver, or with a backlog tasks of Spark on all executors.

Only progress is handed over between them. So the decision may change from batch to batch. It follows from what batches
cost: how long the driver would need for what is left to read, and whether tasks have turned out to be faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from onceflow.errors import counted
from onceflow.planning.engine import AUTO, TASKS

log = logging.getLogger("onceflow")

#: Tasks read if the driver would need longer than this for the backlog, until it would need less than the other.
BEHIND_S, CAUGHT_UP_S = 10.0, 1.0
_KNOWN_BATCHES = 5  # so many batches of the driver tell how fast it is; the first ones are small
_TRIED_BATCHES = 3  # so many batches of tasks tell how fast tasks are, without the first, which starts processes
_GAIN = 1.2  # tasks have to be so much faster than the driver
_PAUSE_S = 600.0  # for so long tasks that were not faster are not tried again
_SMOOTHING = 0.3
# Of a batch of tasks: as long as nobody knows how much records cost, and at least.
_RECORDS_FIRST, _RECORDS_MIN = 4_000, 500


@dataclass
class Rate:
    """Records per second of the last batches.

    Attributes:
        per_s: 0: not known yet. batches: how many have run.
    """

    per_s: float = 0.0
    batches: int = 0

    def ran(self, records: int, seconds: float) -> None:
        """A batch has run."""
        now = records / max(seconds, 1e-4)
        self.per_s = now if not self.batches else self.per_s + _SMOOTHING * (now - self.per_s)
        self.batches += 1


class Backlog:
    """Decides who reads.

    Args:
        place: ``driver`` or ``tasks``: which of them reads all batches; ``auto``: decide by what batches cost.
        may_help: whether tasks may be faster than the driver; with too few cores they are not.
        batch_s: how long a batch of tasks may take, see `records_max`.

    Attributes:
        by_tasks: whether tasks read the next batch.
    """

    def __init__(
        self,
        flow: str,
        place: str,
        *,
        may_help: Callable[[], bool] = lambda: True,
        batch_s: float = 15.0,
    ) -> None:
        self._flow = flow
        self._place = place
        self._may_help = may_help
        self._batch_s = batch_s
        self._driver, self._tasks = Rate(), Rate()
        self._starts = False  # the next batch of tasks is their first one
        self._paused_until = float("-inf")
        self.by_tasks = False

    def ran(self, records: int, seconds: float, *, now: float) -> None:
        """A batch has run that took as much as it may.

        Args:
            now: monotonic seconds.
        """
        if not self.by_tasks:
            self._driver.ran(records, seconds)
            return
        if self._starts:
            self._starts = False
            return
        self._tasks.ran(records, seconds)
        if self._place != AUTO or self._tasks.batches < _TRIED_BATCHES:
            return
        if self._tasks.per_s < _GAIN * self._driver.per_s:
            self.give_back(
                f"tasks read {self._tasks.per_s:,.0f} records/s, the driver {self._driver.per_s:,.0f}",
                now=now,
                pause_s=_PAUSE_S,
            )

    def records_max(self) -> int:
        """How many records a batch of tasks may have: as many as the faster of the two has read in ``batch_s``.

        A batch that takes longer than a transaction may would be aborted in each attempt, and after the next start.
        """
        per_s = max(self._driver.per_s, self._tasks.per_s)
        return max(_RECORDS_MIN, int(per_s * self._batch_s)) if per_s else _RECORDS_FIRST

    def looked(self, left: int, *, now: float) -> None:
        """So many offsets are left to read."""
        if self._place != AUTO:
            self.by_tasks = self._place == TASKS and left > 0
            return
        if self._driver.batches < _KNOWN_BATCHES:
            return
        behind_s = left / self._driver.per_s
        if self.by_tasks:
            if behind_s < CAUGHT_UP_S:
                self._to_driver(f"{counted(left, 'record')} left")
        elif behind_s > BEHIND_S and now >= self._paused_until and self._may_help():  # the last question costs most
            self._to_tasks(left, behind_s)

    def give_back(self, why: str, *, now: float, pause_s: float = 30.0) -> None:
        """Let the driver read. Tasks are not tried again for some seconds, unless it was said when they read."""
        self._to_driver(why)
        self._paused_until = now + pause_s

    def _to_tasks(self, left: int, behind_s: float) -> None:
        self.by_tasks = True
        self._tasks, self._starts = Rate(), True
        log.info(
            "flow %s: %s records are left to read, about %.0f s for the driver: now tasks read by themselves",
            self._flow,
            f"{left:,}",
            behind_s,
        )

    def _to_driver(self, why: str) -> None:
        self.by_tasks = False
        log.info("flow %s: the driver reads again: %s", self._flow, why)

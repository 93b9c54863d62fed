"""What keeps a local copy from being used, and when that is tried again."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from onceflow.errors import EnvironmentUnusableError, OnceflowError

log = logging.getLogger("onceflow.tables")

_FIRST_PAUSE_S = 0.5
_LONGEST_REFUSAL_S = 5.0  # there may be room on the disk again at any time
_LONGEST_REPAIR_S = 60.0  # each repair reads the whole partition
_REPAIRS_PER_S = 600.0  # a copy that was well for so long has been repaired
_TOO_MANY = 3
_TOLD_S = 60.0


class Health:
    """Of one copy. One thread changes it, any thread may look.

    Attributes:
        problem: why the copy cannot be written, or cannot be repaired; None: nothing is known to be wrong.
        not_before: until then the copy is left alone, on the monotonic clock.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.problem: OnceflowError | None = None
        self.not_before = 0.0
        self._name = name
        self._folder = folder
        self._refusals = self._repairs = 0
        self._emptied_at = self._told_at = -_REPAIRS_PER_S

    @property
    def resting(self) -> bool:
        """Whether the copy is left alone now."""
        return time.monotonic() < self.not_before

    def well(self) -> None:
        """It was written, or there was nothing to write."""
        self.problem, self._refusals = None, 0

    def refused(self, problem: OnceflowError) -> None:
        """It cannot be written at the moment. What is there stays as it is."""
        self._refusals += 1
        self.problem = problem
        self._rest(_FIRST_PAUSE_S * 2.0 ** min(self._refusals - 1, 10), _LONGEST_REFUSAL_S)

    def emptied(self, why: str) -> None:
        """It was damaged, and is about to be removed. If that does not help, the next repair is put off."""
        now = time.monotonic()
        self._repairs = 0 if now - self._emptied_at > _REPAIRS_PER_S else self._repairs + 1
        self._emptied_at = now
        if now - self._told_at >= _TOLD_S:
            self._told_at = now
            log.warning("table %s: the local copy is removed and read again from Kafka: %s", self._name, why)
        if self._repairs:
            self._rest(_FIRST_PAUSE_S * 2.0 ** min(self._repairs - 1, 10), _LONGEST_REPAIR_S)
        if self._repairs >= _TOO_MANY:
            self.problem = EnvironmentUnusableError(
                f"The local copy of {self._name} is damaged again each time after it was read from Kafka",
                detail=f"{self._folder}: {why}",
                next_step="look for errors of this disk in the log of the system; give a folder on another disk",
            )

    def _rest(self, pause_s: float, longest_s: float) -> None:
        self.not_before = time.monotonic() + min(pause_s, longest_s)

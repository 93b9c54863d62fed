"""A warning for batches that take longer than the trigger, at most one a minute. Spark would log each batch."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("onceflow.sink")

_WARN_EVERY_S = 60.0
_SHARE = 0.1  # warn when more than this share of the batches is slow


class Pace:
    """The pace of the batches of one run.

    Args:
        trigger_s: how often a batch is to begin; 0: as soon as the last one is done.
    """

    def __init__(self, flow: str, trigger_s: float) -> None:
        self._flow = flow
        self._trigger_s = trigger_s
        self._since = time.monotonic()
        self._batches = self._slow = 0
        self._worst_s = 0.0

    def batch(self, seconds: float) -> None:
        """To be called after each batch, with its duration."""
        self._batches += 1
        self._slow += 0 < self._trigger_s < seconds
        self._worst_s = max(self._worst_s, seconds)
        now = time.monotonic()
        if now - self._since < _WARN_EVERY_S:
            return
        if self._slow > _SHARE * self._batches:
            log.warning(
                "flow %s: %d of the last %d batches took longer than trigger=%g s, the slowest %.1f s. Nothing is "
                "lost: the next batch follows at once. If this continues, raise the trigger or add cores; "
                "query.batches shows how long each step takes",
                self._flow,
                self._slow,
                self._batches,
                self._trigger_s,
                self._worst_s,
            )
        self._since, self._batches, self._slow, self._worst_s = now, 0, 0, 0.0

"""Warnings that brokers do not answer, and that they answer again."""

from __future__ import annotations

import logging
import time

_AGAIN_S = 60.0


class Outage:
    """Logs at most one warning a minute while it lasts, and one when it is over.

    Args:
        who: the beginning of each warning, for example ``flow orders``.
        over: what the last one says.
    """

    def __init__(self, log: logging.Logger, who: str, over: str) -> None:
        self._log = log
        self._who = who
        self._over = over
        self._warned_at: float | None = None

    def warn(self, message: str) -> None:
        """It lasts."""
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= _AGAIN_S:
            self._warned_at = now
            self._log.warning("%s: %s", self._who, message)

    def end(self) -> None:
        """Brokers answer, again or as before."""
        if self._warned_at is not None:
            self._log.warning("%s: %s", self._who, self._over)
        self._warned_at = None

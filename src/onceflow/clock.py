"""The time of day. Code that measures how long something takes uses ``time.monotonic`` instead."""

from __future__ import annotations

import time


def clock_ms() -> int:
    """The time in epoch milliseconds."""
    return time.time_ns() // 1_000_000

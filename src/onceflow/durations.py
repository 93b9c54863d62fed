"""Durations as people write them: ``"5 minutes"``, or a number of seconds."""

from __future__ import annotations

import math
import re

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_UNIT_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "second": 1_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "week": 604_800_000,
}


def duration_ms(value: str | float) -> int:
    """Milliseconds of a duration.

    Args:
        value: ``"250 ms"``, ``"10 seconds"``, ``"5 minutes"``, ``"1 hour"``, ``"7 days"``, or seconds as a number.

    Raises:
        ValueError: not a duration, or a negative one.
    """
    if isinstance(value, str):
        found = _PATTERN.fullmatch(value.lower())
        unit = found and (_UNIT_MS.get(found[2]) or _UNIT_MS.get(found[2].removesuffix("s")))
        if not found or not unit:
            raise ValueError(f"{value!r} is no duration: write it like '10 seconds', '5 minutes' or '7 days'")
        return round(float(found[1]) * unit)
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no duration: give seconds as a number, or a text like '5 minutes'")
    return round(value * 1000)

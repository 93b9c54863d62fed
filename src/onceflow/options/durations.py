"""Parses durations: texts such as ``"5 minutes"``, or numbers of seconds."""

from __future__ import annotations

import math
import re

from onceflow.errors import OptionError

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")  # of stripped texts: it takes linear time
_LONGEST_TEXT = 100
_LONGEST_MS = float((1 << 63) - 1024)  # the last float that times in 64 bits hold
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
        ValueError: not a duration, a negative one, or one of more milliseconds than 64 bits hold.
    """
    if isinstance(value, str):
        milliseconds = _parse(value)
        if milliseconds is None:
            raise ValueError(f"{value!r} is not a duration: write it like '10 seconds', '5 minutes' or '7 days'")
        return round(milliseconds)
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not 0 <= value <= _LONGEST_MS / 1000:  # also if it is no number (NaN)
        raise ValueError(f"{value!r} is not a duration: give seconds as a number, or a text like '5 minutes'")
    return round(value * 1000)


def option_seconds(value: str | float, name: str, flow: str | None, *, at_least: float = 1.0) -> float:
    """Seconds of a duration that is an option of a flow.

    Args:
        value: as for `duration_ms`. A text without a unit also means seconds.
        name: name of the option, for errors.
        at_least: the shortest valid duration, in seconds.

    Raises:
        OptionError: this is not a duration, or it is too short.
    """
    milliseconds = _parse(str(value), bare_unit="s")
    if milliseconds is None:
        raise OptionError(
            f"{name}={value!r} is not a duration", flow=flow, next_step='for example "100 milliseconds" or "60 seconds"'
        )
    if milliseconds < at_least * 1000:
        raise OptionError(f"{name}={value!r} is too short", flow=flow, next_step=f"use at least {at_least:g} second")
    return milliseconds / 1000


def _parse(text: str, *, bare_unit: str = "") -> float | None:
    """Milliseconds of a duration that is a number with a unit; None: the text is not a duration.

    Args:
        bare_unit: the unit of a number without a unit; empty: such a number is not a duration.
    """
    found = _PATTERN.fullmatch(text.strip().lower()) if len(text) <= _LONGEST_TEXT else None
    if found is None:
        return None
    name = found[2] or bare_unit
    unit = _UNIT_MS.get(name) or _UNIT_MS.get(name.removesuffix("s"))
    milliseconds = math.inf if unit is None else float(found[1]) * unit
    return milliseconds if milliseconds <= _LONGEST_MS else None

"""Points in time as users give them: texts in ISO 8601, epoch milliseconds, datetimes."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NUMBER = re.compile(r"\d+")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.IGNORECASE)
_EXAMPLE = "2025-01-31T08:00:00Z, or epoch milliseconds"


def instant_ms(given: object) -> int:
    """Epoch milliseconds of a point in time.

    Args:
        given: a datetime with a time zone, a text in ISO 8601 with one, or epoch milliseconds (a number, or its
            digits).

    Raises:
        ValueError: it is none of these; the text says why.
    """
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ValueError(f"{given!r} has no time zone: give one, for example tzinfo=timezone.utc")
        found = (given - _EPOCH) // timedelta(milliseconds=1)
    elif isinstance(given, int) and not isinstance(given, bool):
        found = given
    elif isinstance(given, str):
        found = _of_text(given.strip())
    else:
        raise ValueError(f"{given!r} is not a point in time: write it like {_EXAMPLE}")
    if not 0 <= found < 2**53:
        raise ValueError(f"{given!r} is not a point in time after 1970: write it like {_EXAMPLE}")
    return found


def _of_text(text: str) -> int:
    if _NUMBER.fullmatch(text) and text.isascii():
        return int(text)
    match = _ISO.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a point in time: write it like {_EXAMPLE}")
    day, minutes, seconds, fraction, zone = match.groups()
    if zone is None:
        raise ValueError(f"{text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    offset = "+00:00" if zone in "Zz" else f"{zone[:3]}:{zone[-2:]}"
    try:
        found = datetime.fromisoformat(f"{day}T{minutes}{seconds or ':00'}{offset}")
    except ValueError as error:
        raise ValueError(f"{text!r} is not a point in time: {error}") from error
    return (found - _EPOCH) // timedelta(milliseconds=1) + int((fraction or "0").ljust(3, "0")[:3])

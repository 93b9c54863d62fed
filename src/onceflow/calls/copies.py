"""Copies of what functions get and return, so that what one run changes in it is not seen by the next one."""

from __future__ import annotations

import copy
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

# Nothing can be changed in them; a plain object is a marker, which is known by its identity.
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, Decimal, date, datetime, timedelta, object})


def copied(value: Any) -> Any:
    """A copy of a value, however deep; the value itself if it cannot be copied, such as an open file."""
    if type(value) in _ATOMS:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # of the user's class: it has no other way to say so
        return value

"""Ranges of keys, whose order is that of the keys' bytes."""

from __future__ import annotations

from typing import Any


def against_order(start: Any, end: Any, low: bytes, high: bytes) -> str:
    """Why a range has no keys although its start comes before its end, in words; empty: that is not so.

    The bytes of numbers have another order than the numbers: negative ones of ``LONG`` and ``DOUBLE`` come after
    positive ones, and 10 as JSON comes before 9. A range whose start is not before its end is empty in any order.

    Args:
        start, end: as they were given. low, high: as the serde writes them.
    """
    if low <= high or _is_after(start, end):
        return ""
    return (
        f"start {start!r:.100} comes after end {end!r:.100} in the order of the keys' bytes, in which negative numbers "
        "come after positive ones, and numbers of JSON are text: give both in that order, or leave one of them out"
    )


def _is_after(start: Any, end: Any) -> bool:
    try:
        return bool(start >= end)
    except Exception:  # values that have no order, such as dicts
        return False

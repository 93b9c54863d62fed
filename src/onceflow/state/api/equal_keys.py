"""Keys that a table has and a dict cannot: 1, 1.0 and True are one key of it, and documents of JSON are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ambiguous(keys: Sequence[Any], raws: Sequence[bytes | None]) -> str:
    """Why a dict cannot have the values of these keys, or would have that of another key, in words; empty: it can.

    Args:
        raws: the value of each key; None: it does not exist.
    """
    try:
        last = dict(zip(keys, raws, strict=True))
    except TypeError:
        key = next(each for each in keys if not _is_hashable(each))
        return f"{key!r:.100} of type {type(key).__name__} cannot be a key of the dict that it returns"
    if len(last) == len(keys):
        return ""
    for key, raw in zip(keys, raws, strict=True):
        if last[key] != raw:
            other = next(each for each in reversed(keys) if each == key)
            return f"{key!r:.100} and {other!r:.100} are two keys of the table, but one key of a dict"
    return ""


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:  # `isinstance(key, Hashable)` is true for a tuple of lists
        return False
    return True

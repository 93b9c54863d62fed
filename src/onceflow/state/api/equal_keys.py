"""Keys that are equal in Python, but not in a table: 1, 1.0 and True are one key of a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ambiguous(keys: Sequence[Any], raws: Sequence[bytes | None]) -> str:
    """Why a dict of the values of these keys would have the value of another key, in words; empty: it would not.

    Args:
        raws: the value of each key; None: it does not exist.
    """
    last = dict(zip(keys, raws, strict=True))
    if len(last) == len(keys):
        return ""
    for key, raw in zip(keys, raws, strict=True):
        if last[key] != raw:
            other = next(each for each in reversed(keys) if each == key)
            return f"{key!r:.100} and {other!r:.100} are two keys of the table, but one key of a dict"
    return ""

"""Parses sizes: texts such as ``"1 MB"``, or numbers of bytes."""

from __future__ import annotations

import re

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_UNITS = {
    "": 1,
    "b": 1,
    "bytes": 1,
    "kb": 1_000,
    "mb": 1_000_000,
    "gb": 1_000_000_000,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def size_bytes(value: str | int) -> int:
    """Bytes of a size.

    Args:
        value: ``"900 KB"``, ``"1 MB"`` (a million bytes), ``"1 MiB"`` (1,048,576), or a number of bytes.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _PATTERN.fullmatch(value.lower()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size: write it like '900 KB' or '1 MB', or give a number of bytes")
    return round(float(found[1]) * _UNITS[found[2]])


def size_text(count: int) -> str:
    """A number of bytes for people, for example ``104.9 MB``."""
    for name, unit in (("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1_000)):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"

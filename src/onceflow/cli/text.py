"""Bytes and text of records, and counts, as commands print them for people."""

from __future__ import annotations


def shown(text: str, *, lines: bool = False) -> str:
    """A text of a record, safe for a terminal: control characters are replaced.

    Args:
        lines: keep line feeds and tabs.
    """
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else "\N{REPLACEMENT CHARACTER}" for c in text)


def in_words(content: bytes | None, *, lines: bool = False) -> str:
    """A key, a value or a header as text: ``null`` if there is none, Python's notation of bytes if it is not UTF-8."""
    if content is None:
        return "null"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"{content!r}"
    return shown(text, lines=lines)


def counted(count: int, noun: str = "record") -> str:
    """``1 record``, ``2,000 records``."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"

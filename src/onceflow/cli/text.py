"""Bytes and text of records, and counts, as commands print them for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


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


def print_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under the names of columns: the first column is aligned to the left, the others to the right."""
    for line in in_columns(columns, rows):
        click.echo(line)


def in_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of `print_columns`."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in [[*columns], *cells]) for n in range(len(columns))]
    lines = []
    for row in [[*columns], *cells]:
        first, *others = (
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return lines


def timeout_ms(text: str, option: str) -> int:
    """Milliseconds of a duration of at least a second; a number means seconds.

    Args:
        option: the name of the command's option, for the error.
    """
    from onceflow.durations import duration_ms

    try:
        found = duration_ms(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error
    if found < 1000:
        raise click.UsageError(f"{option} is shorter than a second")
    return found

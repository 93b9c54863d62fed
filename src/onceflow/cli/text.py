"""Bytes and text of records, and counts, as commands print them for people."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO
from unicodedata import combining, east_asian_width

import click


def confirm(question: str) -> None:
    """Ask on stderr.

    Raises:
        click.Abort: the answer is no, or there is none: standard input has ended, or is closed.
    """
    if sys.stdin is None:
        raise click.Abort from EOFError()
    click.confirm(question, abort=True, err=True)


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


# So many seconds are told in a unit up to the next one.
_UNITS = ((120, 1, "s"), (7_200, 60, "min"), (3 * 86_400, 3_600, "h"), (730 * 86_400, 86_400, "days"))
_YEAR_S = 31_556_952


def span(seconds: float | None) -> str:
    """A length of time: ``4.2 s``, ``35 min``, ``14 years``; ``?`` if it is not known."""
    if seconds is None:
        return "?"
    if 0 < seconds < 10:
        return f"{seconds:.1f} s"
    for bound, length, name in _UNITS:
        if seconds < bound:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds / _YEAR_S:,.0f} years"


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes: two for each East Asian wide character (UAX #11), none for marks
    that are drawn over the character before."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def print_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under the names of columns: the first column is aligned to the left, the others to the right. If that
    does not fit the terminal, another form is printed, see `laid_out`."""
    for line in in_columns(columns, rows):
        click.echo(line)


def in_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of `print_columns`, in a form that fits the terminal. See `laid_out`."""
    return laid_out(columns, rows, output_width())


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A line for each row, whatever its width."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(width_of(row[n]) for row in [[*columns], *cells]) for n in range(len(columns))]
    lines = []
    for row in [[*columns], *cells]:
        padded = [(cell, " " * (width - width_of(cell))) for cell, width in zip(row, widths, strict=True)]
        first, *others = (cell + blank if n == 0 else blank + cell for n, (cell, blank) in enumerate(padded))
        lines.append("  ".join([first, *others]).rstrip())
    return lines


def output_width() -> int | None:
    """How many characters a line of standard output may have; None: any number, because it goes to a file or a pipe."""
    if (sys.stdout is not None and sys.stdout.isatty()) or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size((80, 24)).columns
    return None


def laid_out(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None) -> list[str]:
    """The lines of a table in the first of these forms that fits: a line for each row; the same, with what all rows
    have in common in front of it; a line for each column; a block of lines for each row. No cell is broken.

    Args:
        width: how many characters a line may have; None: any number.
    """

    def fits(lines: Sequence[str]) -> bool:
        return width is None or max(map(width_of, lines)) <= width

    cells = [[str(cell) for cell in row] for row in rows]
    if not cells or fits(_aligned(columns, cells)):
        return _aligned(columns, cells)
    common = [n for n in range(len(columns)) if len(cells) > 1 and len({row[n] for row in cells}) == 1]
    above = ["in every row", *_pairs([(columns[n], cells[0][n]) for n in common]), ""] if common else []
    names, *values = ([line[n] for n in range(len(columns)) if n not in common] for line in (columns, *cells))
    if not names:
        return above[:-1]
    turned = [*zip(names, *values, strict=True)]
    for head, body in ((names, values), (turned[0], turned[1:])):
        if fits(lines := _aligned(head, body)):
            return [*above, *lines]
    blocks = [_pairs(list(zip(names, row, strict=True))) for row in values]
    return [*above, *(line for n, block in enumerate(blocks) for line in (["", *block] if n else block))]


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each name and its value."""
    widest = max((width_of(name) for name, _ in pairs), default=0)
    return [f"{name}{' ' * (widest - width_of(name))}  {value}".rstrip() for name, value in pairs]


class Number(click.FloatRange):
    """A number in a range: no range of click's refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is no number", param, ctx)
        return found


def standard_input() -> TextIO:
    """Standard input, which a program may be started without."""
    if sys.stdin is None:
        raise click.UsageError("there is no standard input")
    return sys.stdin


def timeout_ms(text: str, option: str) -> int:
    """Milliseconds of a duration of at least a second; a number means seconds.

    Args:
        option: the name of the command's option, for the error.
    """
    from onceflow.options.durations import duration_ms

    try:
        found = duration_ms(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error
    if found < 1000:
        raise click.UsageError(f"{option} is shorter than a second")
    return found

"""Lines of the user's code that errors were raised in: of an exception, and of the text of a traceback.

A stack has frames of onceflow, of PySpark, of Python itself and of other packages. The line that a user can change is
the innermost one that belongs to none of them. Cells of notebooks and what was typed at a prompt are the user's, too.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

MAX_TEXT = 500
"""Characters of an exception's text that are quoted."""

_PACKAGE = f"{Path(__file__).resolve().parent}/"
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
# A traceback may come from a worker, where all this lies elsewhere. Packages in Cython do not tell where they lie.
_ROOMS = "admin|client|driver|host|planning|protocol|spark|state|task"
_ONCEFLOW = re.compile(rf"[/\\]onceflow[/\\](?:{_ROOMS})[/\\](?:\w+[/\\])?\w+\.py$")
_PYTHON = re.compile(r"[/\\]lib(64)?[/\\]python3\.\d+[/\\]|^<frozen |^<__array_function__ |\.p(yx|xi|xd)$")
_SPARK = re.compile(r"[/\\](pyspark|py4j)(-[\w.-]+)?(\.zip)?[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_NEXT_IN_CHAIN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_AFTER_TEXT = ("at org.apache.", "at java.", "JVM stacktrace:", "Driver stacktrace:", "SQLSTATE:")


def frames_of(trace: TracebackType | None) -> Sequence[traceback.FrameSummary]:
    """The frames of a traceback, the innermost last."""
    return traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code; None: there is none.

    A service may be installed like any package. So where nothing else is the user's, the first package that was called
    is, and what it has called is not.
    """
    packages = [_package(frame.filename) for frame in frames]
    if "" in packages:
        return frames[len(packages) - 1 - packages[::-1].index("")]
    first = next((package for package in packages if package is not None), None)
    return None if first is None else frames[len(packages) - 1 - packages[::-1].index(first)]


def is_of_user(file: str) -> bool:
    """Whether code in this file is the user's for certain."""
    return _package(file) == ""


def place(frame: traceback.FrameSummary) -> str:
    """Name, file and line, as messages tell them."""
    return f"{frame.name}, {Path(frame.filename).name}:{frame.lineno}"


def blamed(text: str) -> str:
    """What a text with a Python traceback in it says: the exception, and the line of the user's code.

    Where exceptions are chained it is the last one, which nobody has handled. Java's stack around it is left out.

    Returns:
        one line; empty when there is no traceback.
    """
    lines = text.splitlines()
    found = ""
    at = 0
    while at < len(lines):
        at += 1
        if _HEADER not in lines[at - 1]:
            continue
        frames, at = _frames(lines, at)
        said, at = _said(lines, at)
        where = innermost(frames)
        found = said if where is None else f"{said} (raised in {place(where)})"
        following = next((line for line in lines[at:] if line.strip()), "")
        if following.strip() not in _NEXT_IN_CHAIN:
            break
    return found


def _package(file: str) -> str | None:
    """The package that a file belongs to; empty: it is the user's; None: it is Python's, Spark's or onceflow's."""
    if file.startswith(_PACKAGE) or _ONCEFLOW.search(file) or _SPARK.search(file):
        return None
    installed = _PACKAGES.search(file)
    if installed is not None:
        return installed[1]
    return None if file.startswith(_STDLIB) or _PYTHON.search(file) else ""


def _frames(lines: Sequence[str], at: int) -> tuple[list[traceback.FrameSummary], int]:
    """The frames that begin at a line, and where they end; between them are lines of the source."""
    frames = []
    while at < len(lines) and (not lines[at].strip() or lines[at][0] == " "):
        frame = _FRAME.match(lines[at])
        if frame is not None:
            frames.append(traceback.FrameSummary(frame["file"], int(frame["line"]), frame["name"], lookup_line=False))
        at += 1
    return frames, at


def _said(lines: Sequence[str], at: int) -> tuple[str, int]:
    """Class and text of the exception in one line, and where they end."""
    said = []
    while at < len(lines) and (line := lines[at].strip()) and not line.startswith(_AFTER_TEXT):
        said.append(line)
        at += 1
    return cut("; ".join(said), MAX_TEXT), at


def cut(text: str, max_characters: int) -> str:
    """The text, if need be only its beginning."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}... ({len(text)} characters)"

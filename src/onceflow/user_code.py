"""Finds the line of user code in which an error was raised, from an exception or from the text of a traceback.

A stack has frames of onceflow, of PySpark, of Python itself and of other packages. The line that a user can change is
the innermost one that belongs to none of them. Cells of notebooks and lines typed at a prompt are user code, too.
"""

from __future__ import annotations

import builtins
import json
import re
import sysconfig
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

MAX_TEXT = 500
"""Maximum number of characters of an exception's text that are quoted."""

_PACKAGE = f"{Path(__file__).resolve().parent}/"
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
# A traceback may come from a worker, where all this is in other folders. Packages in Cython do not show their folder.
_ROOMS = "admin|calls|client|driver|host|planning|protocol|spark|state|task"
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
    """The frames of a traceback; the innermost frame is the last one."""
    return traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of user code; None if there is none.

    A service may be installed like any package. So if no frame is certain to be user code, the first package that was
    called counts as user code, and the packages that it has called do not.
    """
    packages = [_package(frame.filename) for frame in frames]
    if "" in packages:
        return frames[len(packages) - 1 - packages[::-1].index("")]
    first = next((package for package in packages if package is not None), None)
    return None if first is None else frames[len(packages) - 1 - packages[::-1].index(first)]


def is_of_user(file: str) -> bool:
    """Whether code in this file is certain to be user code."""
    return _package(file) == ""


def place(frame: traceback.FrameSummary) -> str:
    """Name, file and line of a frame, as text for messages."""
    return f"{frame.name}, {Path(frame.filename).name}:{frame.lineno}"


def blamed(text: str) -> str:
    """Exception and line of user code, from a text that contains a Python traceback.

    If exceptions are chained, the last one is used, which was not handled. Java's stack around it is left out.

    Returns:
        One line; empty if there is no traceback.
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
    """The package that a file belongs to; empty: user code; None: the file is of Python, Spark or onceflow."""
    if file.startswith(_PACKAGE) or _ONCEFLOW.search(file) or _SPARK.search(file):
        return None
    installed = _PACKAGES.search(file)
    if installed is not None:
        return installed[1]
    return None if file.startswith(_STDLIB) or _PYTHON.search(file) else ""


def _frames(lines: Sequence[str], at: int) -> tuple[list[traceback.FrameSummary], int]:
    """The frames that begin at a line, and the line at which they end. Between them are lines of source code."""
    frames = []
    while at < len(lines) and (not lines[at].strip() or lines[at][0] == " "):
        frame = _FRAME.match(lines[at])
        if frame is not None:
            frames.append(traceback.FrameSummary(frame["file"], int(frame["line"]), frame["name"], lookup_line=False))
        at += 1
    return frames, at


def _said(lines: Sequence[str], at: int) -> tuple[str, int]:
    """Class and text of the exception in one line, and the line at which they end."""
    said = []
    while at < len(lines) and (line := lines[at].strip()) and not line.startswith(_AFTER_TEXT):
        said.append(line)
        at += 1
    return cut("; ".join(said), MAX_TEXT), at


def cut(text: str, max_characters: int) -> str:
    """The text; if it is too long, only its beginning."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}... ({len(text)} characters)"


def said(error: BaseException) -> str:
    """The text of an error."""
    try:
        return str(error)
    except Exception:  # a __str__ of the user's
        return "it has no text, because its __str__ failed"


def in_words(error: BaseException, max_characters: int = MAX_TEXT) -> str:
    """Class and text of an error."""
    return cut(f"{type(error).__name__}: {said(error)}", max_characters)


#: Stands between the class of a cause and the hook.
IN_HOOK = " in "
#: What may fail for one record, but not for all records of a run unless the code is at fault, see `of_hook`.
EVENT_TIME = "event_time()"
COLUMN_TYPES = "the check of the column types that process() returns"
RESOURCE, TRANSIENT = "resource= of a call", "transient= of a call"


def of_hook(error: BaseException, hook: str) -> None:
    """Note what has raised this error: one of the names above."""
    with suppress(AttributeError, TypeError):  # a class with __slots__
        error._of_hook = hook  # type: ignore[attr-defined]


def cause_of(error: BaseException) -> str:
    """The class of an error, and the hook that has raised it if it is one: how dead letters are counted."""
    hook = getattr(error, "_of_hook", "")
    return type(error).__name__ + (IN_HOOK + hook if hook else "")


# What code raises if it, what it was given or what it names is wrong.
_REPEATED = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    NameError,
    ImportError,
    NotImplementedError,
    RecursionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)


# The names of others, as tracebacks show them.
_REPEATED_NAMES = frozenset(
    (
        "binascii.Error",
        "decimal.DivisionByZero",
        "decimal.InvalidOperation",
        "decimal.Overflow",
        "pyarrow.lib.ArrowInvalid",
        "struct.error",
        "zlib.error",
    )
)


def repeats(problem: BaseException) -> bool:
    """Whether code fails again in the same way if it is called again, as far as the class of its error tells."""
    # The answer of a server that is no JSON may be another one next time.
    return isinstance(problem, _REPEATED) and not isinstance(problem, json.JSONDecodeError)


def raised_in_worker(text: str) -> str:
    """The class of an error in a Python worker of Spark, whose text contains the traceback; empty: it contains none."""
    return blamed(text).partition(" ")[0].rstrip(":")


def repeats_in_worker(text: str) -> bool:
    """As `repeats`, for `raised_in_worker`. It knows classes by their names only: Python's own, and a few others."""
    name = raised_in_worker(text)
    named = getattr(builtins, name, None)
    return name in _REPEATED_NAMES or (isinstance(named, type) and issubclass(named, _REPEATED))

"""The exit code of a program that a FencedError ends. Python itself always ends it with 1."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from onceflow.errors import FencedError
from onceflow.interactive import is_interactive


class fenced_ends_program:
    """If the block raises a FencedError and nobody catches it, the program ends with the exit code of the error, after
    the error was printed as usual.

    It is a class, not a generator: it adds no lines to the traceback.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Only now: a hook that the program has set meanwhile is called, too. In a notebook an error does not end it.
        if isinstance(error, FencedError) and not isinstance(sys.excepthook, _Hook) and not is_interactive():
            sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """In place of ``sys.excepthook``."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, raised, trace)
        if isinstance(raised, FencedError):
            raise SystemExit(raised.exit_code)  # of all that an excepthook can raise, Python respects this

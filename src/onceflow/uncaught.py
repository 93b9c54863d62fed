"""The exit code of a program that an error ends. Python itself always ends it with 1."""

from __future__ import annotations

import sys
from types import TracebackType

from onceflow.interactive import is_interactive


def ends_with(error: BaseException, code: int) -> None:
    """If nobody catches this error, the program ends with this exit code, after the error was printed as usual."""
    if is_interactive():  # an error does not end it
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        before(kind, raised, trace)
        if raised is error:
            raise SystemExit(code)  # of all that an excepthook can raise, Python respects this

    sys.excepthook = hook

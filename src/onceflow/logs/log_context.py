"""What the running code works on: flow, batch, producer, step. Log lines as JSON have these fields.

The fields are in a context variable. Each thread has a value of its own, so the lines of one flow never get the values
of another flow of the process. A thread that works for a batch gets the context of the thread that has started it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any

#: How log lines are written: as the program has configured it, or as JSON; and the variable that says which.
TEXT, JSON = "text", "json"
VARIABLE = "ONCEFLOW_LOG_FORMAT"

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_fields: ContextVar[Mapping[str, Any]] = ContextVar("onceflow_log_fields", default=_NOTHING)


def fields() -> Mapping[str, Any]:
    """The fields of this thread or coroutine, now."""
    return _fields.get()


def add(**more: Any) -> None:
    """Add fields until the innermost `within` of this thread ends."""
    _fields.set({**_fields.get(), **more})


class within:
    """Adds fields in the block; None removes one. It is a class, so that it adds no frame to tracebacks."""

    def __init__(self, **more: Any) -> None:
        self._more = more
        self._token: Token[Mapping[str, Any]] | None = None

    def __enter__(self) -> None:
        self._token = _fields.set({**_fields.get(), **self._more})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            try:
                _fields.reset(self._token)
            except ValueError:  # a generator that another context closes: the fields of that one are not ours
                pass

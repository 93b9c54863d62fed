"""What is called, and what has come of it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import CellType
from typing import Any, NamedTuple

from onceflow.calls.breaker import Breaker, Circuit, circuit_of
from onceflow.calls.options import CallOptions, Transient

log = logging.getLogger("onceflow")


@dataclass(frozen=True, eq=False)
class CallTarget:
    """A function, and how it is called. It can be pickled if the function can.

    Args:
        resource: makes a context manager, which is entered once per task; the function gets it as first argument.
    """

    function: Callable[..., Any]
    options: CallOptions
    transient: Transient
    breaker: Breaker | None = None
    resource: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        """For messages, and to find the circuit of this process."""
        inner = self.function
        while hasattr(inner, "func"):  # functools.partial
            inner = inner.func
        return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]

    @property
    def is_async(self) -> bool:
        function = self.function
        called = getattr(type(function), "__call__", None)  # noqa: B004  # of an object of a class of the user's
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def circuit(self) -> Circuit | None:
        if self.breaker is None:
            return None
        return circuit_of(self.name, _identity(self.function), self.breaker)


def _identity(function: Callable[..., Any]) -> Hashable:
    """What tells a function from others, also after it was pickled anew for another task.

    Texts that it was bound to count, because they are addresses: ``partial(ask, url)`` is made for several services.
    """
    if isinstance(function, functools.partial):
        bound = (*function.args, *function.keywords.values())
        return _identity(function.func), tuple(each for each in bound if isinstance(each, str))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    texts = tuple(each for each in cells if isinstance(each, str))
    return getattr(function, "__module__", None), name, getattr(function, "__code__", None), texts


class Outcome(NamedTuple):
    """What has come of a call.

    Args:
        value: what the function has returned; None if it has failed.
        error: why the last attempt has failed; None: the call has succeeded.
        attempts: how often the function was called.
    """

    value: Any
    error: Exception | None = None
    attempts: int = 1

    def get(self) -> Any:
        """The value.

        Raises:
            Exception: the error of a call that has failed.
        """
        if self.error is not None:
            # The traceback would grow with every time that it is raised.
            raise self.error.with_traceback(self.error.__dict__.setdefault("onceflow_trace", self.error.__traceback__))
        return self.value


@dataclass(eq=False)
class Call:
    """A call under way; ``outcome`` is there when it is done.

    Args:
        done: called in the thread that waits for the calls.
        ahead: whether it was made before the turn of its record, see ``Journal``.
        is_compared: whether the arguments are looked at later, so the function must not change them.
        seen: what the state of other keys was at, see ``Journal``.
        discard: called with a value that nobody takes any more, in any thread.
    """

    target: CallTarget
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    done: Callable[[Call], None] | None = None
    ahead: bool = False
    is_compared: bool = False
    seen: int | None = None
    discard: Callable[[Any], None] | None = None
    outcome: Outcome | None = None

    def dropped(self, value: Any) -> None:
        """Nobody takes this value."""
        if self.discard is None or value is None:
            return
        try:
            self.discard(value)
        except Exception:  # other values still have to be discarded
            log.warning("a result of %s that nobody takes could not be discarded", self.target.name, exc_info=True)

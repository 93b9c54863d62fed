"""``Journal``: what the calls of one record have returned, so that its ``process`` can run again and find it.

User code makes a call as if it were an ordinary one. If the result is not there yet, `Suspended` ends the run of user
code, and its changes are undone. When the call is done, user code runs again from its beginning. Now the same call
returns at once. So calls for many keys are under way at a time, and for each key user code runs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any

from onceflow.calls.copies import copied
from onceflow.calls.runner import CallRunner
from onceflow.calls.target import Call, CallTarget
from onceflow.errors import OnceflowError


class Suspended(BaseException):
    """User code waits for a call. No Exception: user code must not take it for a failure of the call."""


_current: ContextVar[Journal | OneByOne | None] = ContextVar("onceflow_journal", default=None)


def current() -> Journal | OneByOne | None:
    """What makes the calls of the user code that runs now; None: it does not run in a flow, or not in `Processor`."""
    return _current.get()


class OneByOne:
    """Calls of user code that is not run again, such as ``on_timer``: each one is waited for.

    Args:
        runner: whose limits these calls have.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner
        self.problem: OnceflowError | None = None
        """Why no more calls are made, even if user code has caught it."""

    @contextmanager
    def used(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def result(self, target: CallTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call.

        Raises:
            DeadlineExceededError, BatchAbortedError: see `CallRunner.settle`.
            Exception: the call has failed.
        """
        with closing(self._runner.alone()) as runner:
            call = runner.start(Call(target, args, kwargs))
            try:
                runner.settle()
            except OnceflowError as problem:
                self.problem = problem
                raise
        assert call.outcome is not None
        return call.outcome.get()


class Journal:
    """The calls of one record, in the order in which they were made.

    Args:
        wake: called when a call is done that user code waits for.
        seen: returns a number that grows with changes of other keys if the current run has read their state; None: it
            has not, and no such change can be the reason for what it does.
    """

    def __init__(self, runner: CallRunner, wake: Callable[[], None], seen: Callable[[], int | None]) -> None:
        self._runner = runner
        self._wake = wake
        self._seen = seen
        self._calls: list[Call] = []
        self._ahead = False
        self._position = 0
        self._recalls = False
        self.waits = False
        """Whether the last run of user code has to be repeated, even if it has caught `Suspended`."""

    @contextmanager
    def replay(self, *, ahead: bool = False) -> Iterator[None]:
        """User code runs from its beginning.

        Args:
            ahead: before its turn, perhaps with an older state: its calls are only made if they are the same later.
        """
        self._position, self.waits, self._ahead = 0, False, ahead
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def recall(self) -> Iterator[None]:
        """User code runs on trial: it finds the results of equal calls, and no call is made."""
        self._recalls = True
        try:
            with self.replay():
                yield
        finally:
            self._recalls = False

    def result(self, target: CallTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call.

        Raises:
            Suspended: it is not there yet.
            Exception: the call has failed.
        """
        if self._recalls:
            return self._recalled(target, args, kwargs)
        if self.waits:  # user code has caught Suspended
            raise Suspended
        at = self._position
        if at < len(self._calls) and not self._is_same(self._calls[at], target, args, kwargs):
            del self._calls[at:]  # what is still under way there is not waited for
        if at == len(self._calls):
            call = Call(target, args, kwargs, self._done, self._ahead, is_compared=True, seen=self._seen())
            self._calls.append(self._started(call))
        found = self._calls[at]
        if found.outcome is None:
            self.waits = True
            raise Suspended
        self._position += 1
        return copied(found.outcome.get())  # user code may change it, and run again

    def settled(self) -> None:
        """The record is done: forget what is not needed any more."""
        self._calls.clear()

    def _started(self, call: Call) -> Call:
        """The function runs in a copy of this context. Calls that it makes itself are not calls of the record."""
        token = _current.set(None)
        try:
            return self._runner.start(call)
        finally:
            _current.reset(token)

    def _is_same(self, call: Call, target: CallTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if call.target is not target:
            return False
        # In its turn, user code does the same each time, but for what it takes from the clock, from chance, or from the
        # state of other keys.
        if call.ahead and not self._ahead:
            call.ahead = not _equal((call.args, call.kwargs), (args, kwargs))
            return not call.ahead
        # Records of other keys may be done since, and then what it has read of them is another.
        seen = self._seen()
        if seen is not None and seen != call.seen:
            if not _equal((call.args, call.kwargs), (args, kwargs)):
                return False
            call.seen = seen
        return True

    def _done(self, call: Call) -> None:
        if call in self._calls:
            self._wake()

    def _recalled(self, target: CallTarget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for call in self._calls:
            if call.target is target and call.outcome is not None and _equal((call.args, call.kwargs), (args, kwargs)):
                return copied(call.outcome.get())
        raise RuntimeError("no calls are made while it is looked for the cause of an error")


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # objects that cannot be compared, such as arrays
        return False

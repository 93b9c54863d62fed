"""How calls are made: limits, times, retries. Checked when they are given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from onceflow.errors import CallTimeoutError, OptionError
from onceflow.options.durations import duration_ms

# asyncio has a TimeoutError of its own in Python 3.10.
TRANSIENT: tuple[type[Exception], ...] = (ConnectionError, TimeoutError, asyncio.TimeoutError, CallTimeoutError)
"""Errors for which a call is made again unless the user says otherwise."""

_CEILING_S = 30.0
Transient = Callable[[Exception], bool]


@dataclass(frozen=True)
class CallOptions:
    """See ``concurrently``; times are in seconds."""

    limit: int
    timeout_s: float
    deadline_s: float | None
    retries: int
    backoff_s: float

    @property
    def longest_s(self) -> float:
        """How long one call can take with all its attempts."""
        pauses = sum(min(self.backoff_s * 2.0**n, _CEILING_S) for n in range(self.retries))
        longest = self.timeout_s * (self.retries + 1) + pauses
        return longest if self.deadline_s is None else min(longest, self.deadline_s)

    def pause_s(self, attempt: int) -> float:
        """How long to wait after a failed attempt. Half of it is random: calls that failed together do not all come
        back together."""
        return min(self.backoff_s * 2.0 ** (attempt - 1), _CEILING_S) * random.uniform(0.5, 1.0)


def check_options(
    limit: object, timeout: str | float, deadline: str | float | None, retries: object, backoff: str | float
) -> CallOptions:
    """The options, if they can be used.

    Raises:
        OptionError: one of them cannot.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000:
        raise OptionError(f"concurrently: limit={limit!r} is not a number from 1 to 1000", next_step="for example 16")
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 100:
        raise OptionError(f"concurrently: retries={retries!r} is not a number from 0 to 100", next_step="for example 2")
    timeout_s = seconds(timeout, "concurrently: timeout")
    deadline_s = None if deadline is None else seconds(deadline, "concurrently: deadline")
    if deadline_s is not None and deadline_s < timeout_s:
        raise OptionError(
            f"concurrently: deadline={deadline!r} is shorter than timeout={timeout!r} of a single attempt",
            next_step="the deadline is for all attempts of a call together: raise it, or lower the timeout",
        )
    return CallOptions(limit, timeout_s, deadline_s, retries, seconds(backoff, "concurrently: backoff", zero=True))


def check_transient(transient: object) -> Transient:
    """The function that says whether an error is transient.

    Raises:
        OptionError: neither a function, nor classes of exceptions.
    """
    classes = transient if isinstance(transient, (tuple, list, set, frozenset)) else (transient,)
    if all(isinstance(each, type) and issubclass(each, Exception) for each in classes):
        return _Instances(tuple(classes))
    if callable(transient):
        return transient
    raise OptionError(
        f"concurrently: transient={transient!r} is neither a function nor classes of exceptions",
        next_step="for example transient=(ConnectionError, TimeoutError), or lambda error: error.status >= 500",
    )


@dataclass(frozen=True)
class _Instances:
    """A class, because a function in a function cannot be pickled by every pickler."""

    classes: tuple[type[Exception], ...]

    def __call__(self, error: Exception) -> bool:
        return isinstance(error, self.classes)


def seconds(value: str | float, name: str, *, zero: bool = False) -> float:
    """Seconds of a duration.

    Raises:
        OptionError: it is none, or it is not positive.
    """
    try:
        found = duration_ms(value) / 1000
    except ValueError as error:
        raise OptionError(f"{name}={value!r}: {error}", next_step='for example "10 seconds"') from None
    if not found and not zero:
        raise OptionError(f"{name}={value!r} must be positive", next_step='for example "10 seconds"')
    return found

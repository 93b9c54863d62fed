"""Waits while the system of an external sink cannot be reached: it is restarted, or another one takes its place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from onceflow.client.deadline import Deadline
from onceflow.driver.batch.errors import in_short, then_again
from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError, OnceflowError
from onceflow.external.sink import UnavailableError

log = logging.getLogger("onceflow.sink")

_T = TypeVar("_T")


def when_reached(
    call: Callable[[], _T], deadline: Deadline, target: str, flow: str, *, is_stopping: Callable[[], bool]
) -> _T:
    """What ``call`` returns. It is repeated while it raises ``ConnectionError``.

    Args:
        target: the sink's. is_stopping: whether to give up because the query is being stopped.

    Raises:
        DeadlineExceededError: the system could not be reached in time.
        Exception: whatever else ``call`` raises.
    """
    tried = 0
    while True:
        try:
            return call()
        except ConnectionError as error:
            if not tried and not is_stopping() and not deadline.expired:
                log.warning(
                    "flow %s: %s %s; waiting for it up to %.0f s: %s",
                    flow,
                    target,
                    _state(error),
                    deadline.remaining,
                    in_short(error),
                )
            if is_stopping() or not deadline.wait(tried):
                raise _given_up(error, target, flow) from None
            tried += 1


def _state(error: ConnectionError) -> str:
    return "cannot be used at the moment" if isinstance(error, UnavailableError) else "cannot be reached"


def _given_up(error: ConnectionError, target: str, flow: str) -> DeadlineExceededError:
    cure = error.next_step if isinstance(error, UnavailableError) else ""
    answers = "start the flow again when it answers: it continues where it is"
    return DeadlineExceededError(
        f"{target} {_state(error)}",
        flow=flow,
        detail=in_short(error),
        next_step=then_again(cure, "where it is") if cure else answers,
    )


def at_start(call: Callable[[], _T], deadline: Deadline, target: str, flow: str) -> _T:
    """The same before the first batch: everything else that is raised is an error of the start.

    Raises:
        DeadlineExceededError: the system could not be reached in time.
        EnvironmentUnusableError: it refuses the flow.
    """
    try:
        return when_reached(call, deadline, target, flow, is_stopping=lambda: False)
    except OnceflowError:
        raise
    except Exception as error:
        raise EnvironmentUnusableError(
            f"{target} cannot be used",
            flow=flow,
            detail=f"{type(error).__name__}: {in_short(error)}",
            next_step="check the address, the login and the privileges of its user",
        ) from error

"""``onceflow.concurrently``: functions that are cancelled, give no result, or return one when nobody waits any more."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import onceflow
from onceflow import user_code
from onceflow.calls import breaker as breakers
from onceflow.calls.runner import CallRunner
from onceflow.calls.target import Call, Outcome
from onceflow.errors import CallTimeoutError, CircuitOpenError
from onceflow.testing.waiting import wait_until


@pytest.fixture(autouse=True)
def no_circuits() -> Iterator[None]:
    breakers._circuits.clear()
    yield
    breakers._circuits.clear()


def outcome_of(calls: onceflow.Calls, item: Any = 1) -> Outcome:
    """As ``calls.all`` does, but a call of which nobody hears is no endless wait."""
    runner = CallRunner(5)
    call = runner.start(Call(calls.target, (item,)))
    try:
        runner.settle()
    finally:
        runner.close()
    assert call.outcome is not None
    return call.outcome


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("problem", [asyncio.CancelledError(), Panic("broken")])
@pytest.mark.parametrize("where", ["function", "resource", "transient"])
def test_whatever_is_raised_is_the_error_of_the_call(problem: BaseException, where: str) -> None:
    def raises(*_: object) -> Any:
        raise problem

    async def ask(*_: object) -> None:
        raise problem if where == "function" else ConnectionError("reset")

    found = outcome_of(
        onceflow.concurrently(
            ask,
            retries=0,
            resource=raises if where == "resource" else None,
            transient=raises if where == "transient" else None,
        )
    )
    assert type(found.error) is RuntimeError
    assert type(problem).__name__ in str(found.error)


@pytest.mark.parametrize("where", ["resource", "enter", "no manager", "transient", "function"])
def test_what_may_be_no_fault_of_the_record(where: str) -> None:
    """Dead letters of such calls are counted by themselves: if no record gets through, the flow stops."""

    class Session:
        async def __aenter__(self) -> Any:
            raise OSError("no such host")

        async def __aexit__(self, *_: object) -> None:
            pass

    def raises(*_: object) -> Any:
        raise OSError("no such host")

    resources: dict[str, Any] = {"resource": raises, "enter": Session, "no manager": lambda: 7}

    async def ask(*_: object) -> None:
        raise OSError("no such host")

    resource = resources.get(where)
    transient = raises if where == "transient" else None
    found = outcome_of(onceflow.concurrently(ask, retries=0, resource=resource, transient=transient))
    assert found.error is not None
    hook = {"function": "", "transient": " in transient= of a call"}.get(where, " in resource= of a call")
    assert user_code.cause_of(found.error) == type(found.error).__name__ + hook


def test_a_call_that_is_cancelled_with_another_one_fails() -> None:
    """Calls that share a task: the first one takes too long, and its cancellation goes on to what all wait for."""
    shared: list[asyncio.Future[str]] = []

    async def ask(item: int) -> str:
        if not shared:
            shared.append(asyncio.ensure_future(asyncio.sleep(30, "token")))
        return await shared[0]

    runner = CallRunner(5)
    target = onceflow.concurrently(ask, timeout=0.2, retries=0).target
    first = runner.start(Call(target, (1,)))
    time.sleep(0.1)  # the second one could wait for longer
    second = runner.start(Call(target, (2,)))
    runner.settle()
    runner.close()
    assert first.outcome is not None
    assert second.outcome is not None
    assert type(first.outcome.error) is CallTimeoutError
    assert "CancelledError" in str(second.outcome.error)


def test_a_coroutine_that_is_given_up_cleans_up_before_its_resource_is_closed() -> None:
    said: list[str] = []
    begun = threading.Event()

    class Session:
        async def __aenter__(self) -> Session:
            return self

        async def __aexit__(self, *_: object) -> None:
            said.append("closed")

    async def ask(session: Session, item: int) -> None:
        try:
            begun.set()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            said.append("released")

    runner = CallRunner()
    runner.start(Call(onceflow.concurrently(ask, resource=Session).target, (1,)))
    assert begun.wait(10)
    runner.close()
    assert said == ["released", "closed"]


@pytest.mark.parametrize("why", ["timeout", "end"])
def test_what_a_coroutine_returns_after_all_is_discarded(why: str) -> None:
    begun, discarded = threading.Event(), []

    async def ask(item: int) -> str:
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            pass
        return "a file"

    calls = onceflow.concurrently(ask, timeout=0.02 if why == "timeout" else 30, retries=0)
    runner = CallRunner()
    call = runner.start(Call(calls.target, (1,), discard=discarded.append))
    assert begun.wait(10)
    if why == "timeout":
        runner.settle()
        assert call.outcome is not None
        assert type(call.outcome.error) is CallTimeoutError
    runner.close()
    assert discarded == ["a file"]


def test_all_are_discarded_even_if_one_cannot_be() -> None:
    asked, discarded = [], []

    def ask(item: int) -> int:
        asked.append(item)
        return item

    def discard(value: int) -> None:
        discarded.append(value)
        raise OSError("no space left")

    results = onceflow.concurrently(ask, limit=4).each([1, 2, 3, 4], discard=discard)
    taken, _ = next(results)
    wait_until(lambda: len(asked) == 4, 10, "all are called")
    results.close()
    wait_until(lambda: len(discarded) == 3, 10, "all are discarded")
    assert sorted([taken, *discarded]) == [1, 2, 3, 4]


def test_a_plain_function_that_returns_a_coroutine_says_so() -> None:
    """It would never run, and nobody would notice who does not use the result."""

    async def ask(item: int) -> int:
        return item

    found = outcome_of(onceflow.concurrently(lambda item: ask(item)))
    assert type(found.error) is TypeError
    assert "async def" in str(found.error)


def test_waiting_for_a_place_counts_for_the_timeout() -> None:
    """A call that was given up keeps its place for a while. The next one has what is left of its own time."""
    leave = threading.Event()

    def ask(item: int) -> int:
        if item == 1:
            leave.wait(10)
        else:
            time.sleep(0.38)
        return item

    runner = CallRunner(10)
    target = onceflow.concurrently(ask, limit=1, timeout=0.4, retries=0).target
    runner.start(Call(target, (1,)))
    second = runner.start(Call(target, (2,)))
    runner.take()
    time.sleep(0.2)  # the second one has waited for so long
    leave.set()
    runner.settle()
    runner.close()
    assert second.outcome is not None
    assert type(second.outcome.error) is CallTimeoutError


def get(url: str, item: int) -> int:
    if "down" in url:
        raise ConnectionError("reset")
    return item


def test_each_function_has_a_breaker_of_its_own() -> None:
    once = onceflow.Breaker(failures=1, pause=60)

    def calls(function: Any) -> onceflow.Calls:
        return onceflow.concurrently(function, retries=0, breaker=once)

    def of(url: str) -> Any:
        return lambda item: get(url, item)

    down = functools.partial(get, "http://down")
    for bad, good in (
        (down, functools.partial(get, "http://up")),
        (lambda item: get("http://down", item), lambda item: get("http://up", item)),
        (of("http://down"), of("http://up")),
    ):
        assert type(outcome_of(calls(bad)).error) is ConnectionError
        assert outcome_of(calls(good)).value == 1
    assert type(outcome_of(calls(functools.partial(get, "http://down"))).error) is CircuitOpenError


def test_a_call_that_gets_its_place_as_everything_ends_is_not_made() -> None:
    """Until Python 3.12, asyncio.wait_for loses such a cancellation."""
    leave, called = threading.Event(), []

    def ask(item: int) -> None:
        called.append(item)
        leave.wait(10)

    runner = CallRunner()
    target = onceflow.concurrently(ask, limit=1, timeout=0.05, retries=0).target
    later = onceflow.concurrently(ask, limit=1, timeout=30, retries=0).target
    runner.start(Call(target, (1,)))
    runner.take()  # its thread keeps the place
    lane = runner._lanes[target]
    runner._lanes[later] = lane
    runner.start(Call(later, (2,)))
    wait_until(lambda: bool(lane.places._waiters), 10, "the second one waits for the place")

    def end() -> None:
        lane.places.release()
        runner._end()

    loop: Any = runner._loop
    loop.call_soon_threadsafe(end)
    runner.close()
    leave.set()
    assert called == [1]


def test_a_runner_can_begin_again_after_its_end() -> None:
    said: list[str] = []

    class Session:
        def __enter__(self) -> list[str]:
            said.append("enter")
            return said

        def __exit__(self, *_: object) -> None:
            said.append("exit")

    target = onceflow.concurrently(lambda session, item: session.append(item), limit=1, resource=Session).target
    runner = CallRunner(5)
    for item in ("one", "two"):
        for _ in range(2):
            runner.start(Call(target, (item,)))
        runner.settle()
        runner.close()
    assert said == ["enter", "one", "one", "exit", "enter", "two", "two", "exit"]

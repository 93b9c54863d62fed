"""``onceflow.concurrently``: limits, times, retries, circuit breakers, and threads that end."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

import onceflow
from onceflow import serdes
from onceflow.calls import breaker as breakers
from onceflow.calls.copies import copied
from onceflow.calls.runner import NAME, CallRunner
from onceflow.calls.target import Call
from onceflow.errors import CallTimeoutError, CircuitOpenError, OptionError
from onceflow.task.call_rows import CallOrder, _Round
from onceflow.testing.waiting import wait_until

BOTH = pytest.mark.parametrize("kind", ["plain", "async"])


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    breakers._circuits.clear()
    yield
    end = time.monotonic() + 5
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


class Service:
    """The other side: counts calls, and fails as often as it is told to."""

    def __init__(self, fails: int = 0, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.fails, self.error, self.seconds = fails, error or ConnectionError("reset"), seconds
        self.calls: list[Any] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    def _enter(self, item: Any) -> None:
        with self.lock:
            self.calls.append(item)
            self.now += 1
            self.most = max(self.most, self.now)
            number = len(self.calls)
        if number <= self.fails:
            with self.lock:
                self.now -= 1
            raise self.error

    def _leave(self) -> None:
        with self.lock:
            self.now -= 1

    def plain(self, item: Any) -> Any:
        self._enter(item)
        time.sleep(self.seconds)
        self._leave()
        return item * 2

    async def coroutine(self, item: Any) -> Any:
        self._enter(item)
        await asyncio.sleep(self.seconds)
        self._leave()
        return item * 2

    def of(self, kind: str) -> Callable[[Any], Any]:
        return self.plain if kind == "plain" else self.coroutine


def quick(function: Callable[..., Any], **options: Any) -> onceflow.Calls:
    return onceflow.concurrently(function, **{"backoff": "1 ms", **options})


@BOTH
def test_calls_are_made_side_by_side_up_to_the_limit(kind: str) -> None:
    service = Service(seconds=0.02)
    outcomes = quick(service.of(kind), limit=4).all(range(12))
    assert [outcome.value for outcome in outcomes] == [2 * n for n in range(12)]
    assert 1 < service.most <= 4


@BOTH
def test_a_transient_error_is_tried_again(kind: str) -> None:
    service = Service(fails=2)
    [outcome] = quick(service.of(kind), retries=2).all([7])
    assert (outcome.value, outcome.error, outcome.attempts) == (14, None, 3)
    service = Service(fails=3)
    [outcome] = quick(service.of(kind), retries=2).all([7])
    assert (outcome.value, outcome.attempts, len(service.calls)) == (None, 3, 3)
    with pytest.raises(ConnectionError, match="reset"):
        outcome.get()


@BOTH
def test_other_errors_are_not(kind: str) -> None:
    service = Service(fails=1, error=ValueError("400"))
    [outcome] = quick(service.of(kind)).all([7])
    assert (type(outcome.error), outcome.attempts) == (ValueError, 1)
    [outcome] = quick(Service(fails=1, error=ValueError("503")).of(kind), transient=lambda e: "503" in str(e)).all([7])
    assert (outcome.value, outcome.attempts) == (14, 2)
    [outcome] = quick(Service(fails=1, error=KeyError("x")).of(kind), transient=LookupError).all([7])
    assert outcome.attempts == 2


@BOTH
def test_a_call_that_takes_too_long_fails(kind: str) -> None:
    service = Service(seconds=0.3)
    [outcome] = quick(service.of(kind), timeout=0.02, retries=1, limit=2).all([7])
    assert type(outcome.error) is CallTimeoutError
    assert "within 0.02 s" in str(outcome.error)
    assert outcome.attempts == 2


def test_a_thread_that_hangs_keeps_its_place() -> None:
    """The other side never gets more calls at a time than the limit, even if some of them were given up."""
    service, leave = Service(), threading.Event()

    def hangs(item: int) -> int:
        service._enter(item)
        leave.wait(5)
        return item

    calls = quick(hangs, timeout=0.05, retries=0, limit=2)
    outcomes = calls.all(range(6))
    assert {type(outcome.error) for outcome in outcomes} == {CallTimeoutError}
    assert service.most == 2
    assert sum("earlier calls" in str(outcome.error) for outcome in outcomes) == 4
    leave.set()


@BOTH
def test_the_deadline_is_for_all_attempts(kind: str) -> None:
    service = Service(fails=1000)
    began = time.monotonic()
    [outcome] = quick(service.of(kind), timeout=0.2, deadline=0.2, retries=100, backoff="60 ms").all([7])
    assert type(outcome.error) is ConnectionError
    assert 1 < outcome.attempts < 8
    assert time.monotonic() - began < 2


@BOTH
def test_a_breaker_opens_and_lets_one_call_try(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(breakers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    service = Service(fails=4)
    calls = quick(service.of(kind), retries=0, limit=1, breaker=onceflow.Breaker(failures=3, pause="10 seconds"))
    errors = [type(outcome.error) for outcome in calls.all(range(6))]
    assert errors == [ConnectionError] * 3 + [CircuitOpenError] * 3
    assert len(service.calls) == 3
    assert [type(outcome.error) for outcome in calls.all([1])] == [CircuitOpenError]  # another task of this process
    now[0] += 10.1
    assert [type(outcome.error) for outcome in calls.all([1, 2])] == [ConnectionError, CircuitOpenError]
    now[0] += 10.1
    assert [outcome.value for outcome in calls.all([1, 2])] == [2, 4]


def test_a_trial_that_nobody_hears_of_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(breakers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    circuit = breakers.Circuit("pay", onceflow.Breaker(failures=1, pause=5))
    circuit.failed()
    now[0] += 5
    circuit.check()
    with pytest.raises(CircuitOpenError, match="pay is not called: 1 calls in a row have failed"):
        circuit.check()
    now[0] += 5
    circuit.check()


def test_answers_that_refuse_do_not_open_a_breaker() -> None:
    service = Service(fails=9, error=ValueError("400"))
    outcomes = quick(service.plain, breaker=onceflow.Breaker(failures=2), limit=1).all(range(9))
    assert {type(outcome.error) for outcome in outcomes} == {ValueError}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_resource_is_opened_once_and_closed(kind: str) -> None:
    said: list[str] = []

    class Session:
        def __enter__(self) -> Session:
            said.append("enter")
            return self

        def __exit__(self, *_: object) -> None:
            said.append("exit")

        async def __aenter__(self) -> Session:
            return self.__enter__()

        async def __aexit__(self, *_: object) -> None:
            self.__exit__()

    class Sync:
        __enter__, __exit__ = Session.__enter__, Session.__exit__

    async def ask(session: Any, item: int) -> int:
        said.append("call")
        return item

    calls = onceflow.concurrently(ask, resource=Session if kind == "async" else Sync)
    assert [outcome.value for outcome in calls.all([1, 2])] == [1, 2]
    assert said == ["enter", "call", "call", "exit"]


def test_each_takes_items_when_there_is_room() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            yield n

    results = quick(Service().plain, limit=3).each(items())
    for _ in range(2):
        next(results)
    assert len(taken) <= 4
    results.close()
    found = dict(quick(Service().plain, limit=3).each(range(20)))
    assert {item: outcome.value for item, outcome in found.items()} == {n: 2 * n for n in range(20)}


def test_leaving_does_not_wait_for_calls_under_way() -> None:
    leave = threading.Event()

    def ask(item: float) -> float:
        leave.wait(item)
        return item

    results = quick(ask, limit=2).each([0.0, 30.0])
    next(results)
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 3
    leave.set()


def test_what_nobody_takes_is_discarded() -> None:
    """Results that wait, and those of calls that end later."""
    leave, discarded = threading.Event(), []
    all_begun = threading.Barrier(4)

    def ask(item: int) -> int:
        all_begun.wait(10)
        if item == 3:
            leave.wait(10)
        return item

    results = quick(ask, limit=4).each([1, 2, 3, 4], discard=discarded.append)
    taken, _ = next(results)
    results.close()
    leave.set()
    end = time.monotonic() + 5
    while len(discarded) < 3:
        assert time.monotonic() < end, discarded
        time.sleep(0.01)
    assert sorted([taken, *discarded]) == [1, 2, 3, 4]


def test_what_returns_while_the_loop_ends_is_discarded() -> None:
    """The loop forgets what it was asked to call after its last round."""
    leave, asked, discarded = threading.Event(), threading.Event(), []

    def ask() -> str:
        leave.wait(10)
        return "a file"

    runner = CallRunner()
    runner.start(Call(quick(ask).target, (), discard=discarded.append))
    loop: Any = runner._loop
    close, call_soon = loop.close, loop.call_soon_threadsafe

    def late(function: Callable[..., Any], *args: Any) -> None:
        call_soon(function, *args)
        if leave.is_set():
            asked.set()

    def close_late() -> None:
        leave.set()
        assert asked.wait(10)
        close()

    loop.call_soon_threadsafe, loop.close = late, close_late
    wait_until(lambda: any(t.name == NAME for t in threading.enumerate()), 10, "the function is called")
    runner.close()
    assert discarded == ["a file"]


@pytest.mark.parametrize("problem", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
@BOTH
def test_what_would_end_a_thread_is_the_error_of_a_call(kind: str, problem: BaseException) -> None:
    async def coroutine(item: int) -> None:
        raise problem

    def plain(item: int) -> None:
        raise problem

    outcomes = quick(plain if kind == "plain" else coroutine).all([1, 2])
    assert {type(outcome.error) for outcome in outcomes} == {RuntimeError}


def test_an_ordinary_call_outside_of_a_flow() -> None:
    service = Service(fails=1)
    assert quick(service.plain)(21) == 42
    with pytest.raises(ValueError, match="no"):
        quick(Service(fails=1, error=ValueError("no")).coroutine)(1)


def test_it_can_be_pickled() -> None:
    calls = onceflow.concurrently(functools.partial(pow, 2), breaker=onceflow.Breaker())
    again = pickle.loads(pickle.dumps(calls))
    assert again(5) == 32
    assert again.target.name == "pow"


@pytest.mark.parametrize(
    "options, text",
    [({"limit": 0}, "limit=0"), ({"limit": True}, "limit=True"), ({"timeout": "soon"}, "timeout='soon'"),
     ({"timeout": 0}, "must be positive"), ({"retries": -1}, "retries=-1"), ({"backoff": "-1 s"}, "backoff='-1 s'"),
     ({"order": "any"}, "order='any'"), ({"transient": 3}, "transient=3"), ({"breaker": 5}, "breaker=5"),
     ({"deadline": 5, "timeout": 6}, "deadline=5 is shorter than timeout=6")],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        onceflow.concurrently(print, **options)


def test_what_is_no_function_or_breaker() -> None:
    with pytest.raises(OptionError, match="takes a function"):
        onceflow.concurrently("print")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="failures=0"):
        onceflow.Breaker(failures=0)
    with pytest.raises(OptionError, match="pause='x'"):
        onceflow.Breaker(pause="x")


def test_how_long_a_call_can_take() -> None:
    options = onceflow.concurrently(print, timeout=10, retries=2, backoff=1).target.options
    assert options.longest_s == 33
    assert onceflow.concurrently(print, timeout=10, deadline=20).target.options.longest_s == 20
    assert 0.5 <= options.pause_s(1) <= 1
    assert 15 <= options.pause_s(50) <= 30


def test_idempotency_keys_stay_the_same() -> None:
    record = onceflow.Record(b"k", b"v", "payments", (), 0, 3, 17)
    assert onceflow.idempotency_key(record) == "payments/3/17"
    origin = {"topic": b"payments", "partition": b"3", "offset": b"17"}
    headers = [(f"onceflow.origin.{name}", part) for name, part in origin.items()]
    came_back = onceflow.Record(b"k", b"v", "retry", headers, 0, 0, 2)
    assert onceflow.idempotency_key(came_back) == "payments/3/17"
    with pytest.raises(ValueError, match="keep the columns"):
        onceflow.idempotency_key(onceflow.Record(b"k", b"v"))


# ---- arguments ---------------------------------------------------------------------------------------


@BOTH
def test_each_attempt_gets_the_arguments_as_they_were_given(kind: str) -> None:
    """What a failed attempt had changed in them was there for the next one."""
    seen = []

    def post(order: dict[str, Any], *, notes: list[str]) -> int:
        seen.append((order["amount"], list(order["items"]), list(notes)))
        order["amount"] += 1
        order["items"].append("fee")
        notes.append("sent")
        if len(seen) % 3:
            raise ConnectionError("reset")
        return int(order["amount"])

    async def post_async(order: dict[str, Any], *, notes: list[str]) -> int:
        return post(order, notes=notes)

    ask = onceflow.concurrently(post if kind == "plain" else post_async, retries=2, backoff=0.001)
    order, notes = {"amount": 100, "items": ["book"]}, ["new"]
    assert ask(order, notes=notes) == 101
    assert seen == [(100, ["book"], ["new"])] * 3
    assert (order, notes) == ({"amount": 100, "items": ["book"]}, ["new"])


def test_each_attempt_of_a_row_gets_the_record_as_it_was_read() -> None:
    attempts = []

    def add(record: onceflow.Record) -> Any:
        attempts.append((record.value["amount"], record.headers))
        record.value["amount"] += 1
        if len(attempts) < 3:
            raise ConnectionError("reset")
        return record.value

    order = CallOrder(
        onceflow.concurrently(add, backoff=0.001), "t", None, serdes.JSON, serdes.JSON, "flow", max_dead_letters=None
    )
    record = onceflow.Record(b"k", b'{"amount": 100}', "in", (("trace", b"x"),), 5, 0, 7)
    with closing(CallRunner()) as runner:
        (outcome,) = _Round(order, runner).outcomes([record])
    assert outcome.get() == {"amount": 101}
    assert attempts == [(100, (("trace", b"x"),))] * 3


def test_a_copied_record_is_the_same_record() -> None:
    record = onceflow.Record("k", {"a": [1]}, "in", [("trace", b"x")], 5, 0, 7, "in")
    found = copied(record)
    assert (found, found._read_from) == (record, "in")
    found.value["a"].append(2)
    found.headers.append(("more", None))
    assert (record.value, record.headers) == ({"a": [1]}, [("trace", b"x")])


def test_what_cannot_be_copied_is_handed_on() -> None:
    lock = threading.Lock()
    ask = onceflow.concurrently(lambda given, of: given is lock and of[1] is lock)
    assert ask(lock, of=(1, lock))

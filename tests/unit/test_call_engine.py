"""Processors that call other services: calls of many keys side by side, each record as if it were the only one."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onceflow
from onceflow import Record, serdes
from onceflow.calls.runner import NAME, CallRunner, give_up
from onceflow.errors import BatchAbortedError, DeadlineExceededError, OnceflowError, ProcessorError
from onceflow.state.engine.choice import engine_for
from onceflow.testing import processor_driver
from onceflow.testing.processor_driver import ProcessorDriver


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    end = time.monotonic() + 5
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


class Bank:
    """The other side."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.lock = threading.Lock()
        self.calls: list[Any] = []
        self.now = self.most = 0
        self.bad: set[Any] = set()
        self.under_way: dict[Any, int] = defaultdict(int)
        self.most_of_key = 0

    def charge(self, key: str, amount: int) -> int:
        with self.lock:
            self.calls.append((key, amount))
            self.now += 1
            self.most = max(self.most, self.now)
            self.under_way[key] += 1
            self.most_of_key = max(self.most_of_key, self.under_way[key])
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
            self.under_way[key] -= 1
        if amount in self.bad:
            raise ValueError(f"{amount} is refused")
        return amount * 10

    async def charge_async(self, key: str, amount: int) -> int:
        return self.charge(key, amount)


class Pay(onceflow.Processor):
    """The state: how much was paid."""

    key = serdes.STRING
    value = state = output = serdes.JSON

    def __init__(self, function: Any, **options: Any) -> None:
        self.charge = onceflow.concurrently(function, **{"retries": 0, **options})

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            before = state.get(0)
            state.put(before + 1000)  # undone while the call is under way
            yield Record(key, "asked")
            receipt = self.charge(key, record.value)
            state.put(before + receipt)
            yield Record(key, receipt)


def receipts(outputs: Sequence[Record]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for record in outputs:
        if record.value != "asked":
            found[record.key].append(record.value)
    return found


INPUT = [(f"k{n % 8}", n) for n in range(24)]
RECEIPTS = {f"k{k}": [n * 10 for n in range(24) if n % 8 == k] for k in range(8)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("order", ["key", None])
@pytest.mark.parametrize("partitions", [1, 3])
def test_calls_of_many_keys(asynchronous: bool, order: str | None, partitions: int) -> None:
    bank = Bank()
    driver = ProcessorDriver(Pay(bank.charge_async if asynchronous else bank.charge, order=order), partitions)
    outputs = driver.send_many(INPUT)
    assert receipts(outputs) == RECEIPTS
    assert len(outputs) == 48
    assert driver.states == {key: sum(found) for key, found in RECEIPTS.items()}
    assert sorted(bank.calls) == sorted(INPUT), "each call once"


def test_calls_are_under_way_together_but_not_those_of_a_key() -> None:
    bank = Bank(0.01)
    ProcessorDriver(Pay(bank.charge, limit=6)).send_many(INPUT)
    assert 1 < bank.most <= 6
    assert bank.most_of_key == 1


def test_without_an_order_calls_of_a_key_are_under_way_together() -> None:
    bank = Bank(0.02)
    outputs = ProcessorDriver(Pay(bank.charge, limit=12, order=None)).send_many([("a", n) for n in range(12)])
    assert receipts(outputs) == {"a": [n * 10 for n in range(12)]}
    assert bank.most_of_key > 1


@pytest.mark.parametrize("order", ["key", None])
def test_a_call_that_fails_makes_a_dead_letter_of_its_record_alone(order: str | None) -> None:
    bank = Bank()
    bank.bad = {3, 11, 20}
    driver = ProcessorDriver(Pay(bank.charge, order=order), on_error="dead-letter")
    outputs = driver.send_many(INPUT)
    good = {key: [n for n in found if n // 10 not in bank.bad] for key, found in RECEIPTS.items()}
    assert receipts(outputs) == good
    assert len(outputs) == 2 * 21
    assert driver.states == {key: sum(found) for key, found in good.items()}
    assert sorted(int(letter.value) for letter in driver.dead_letters) == [3, 11, 20]
    headers = dict(driver.dead_letters[0].headers)
    assert headers["onceflow.error.class"] == b"ValueError"
    assert b"in charge" in (headers["onceflow.error.stack"] or b"")
    assert len(bank.calls) == 24, "a failed call is not made again"


def test_a_call_that_fails_stops_the_flow() -> None:
    bank = Bank()
    bank.bad = {5}
    driver = ProcessorDriver(Pay(bank.charge))
    with pytest.raises(ProcessorError, match="5 is refused"):
        driver.send_many(INPUT)
    assert driver.states == {}
    bank.bad.clear()
    driver.send_many(INPUT)
    assert driver.states == {key: sum(found) for key, found in RECEIPTS.items()}


def test_an_error_in_user_code_ends_the_calls_of_other_records() -> None:
    class Refuses(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                if key == "bad":
                    raise ValueError("refused")
                yield Record(key, self.charge(key, record.value))

    driver = ProcessorDriver(Refuses(Bank().charge))
    with pytest.raises(ProcessorError, match="refused"):
        driver.send_many([("good", 1), ("bad", 2)])


class PayOnce(Pay):
    """What was paid before is not called for again: what is called depends on the state."""

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            paid = state.map("paid")
            if str(record.value) not in paid:
                paid.put(str(record.value), self.charge(key, record.value))
                yield Record(key, record.value * 10)


def test_a_call_may_depend_on_the_state() -> None:
    bank = Bank(0.005)
    driver = ProcessorDriver(PayOnce(bank.charge))
    outputs = driver.send_many([(f"k{n % 3}", n // 6) for n in range(36)])
    assert receipts(outputs) == {f"k{k}": [0, 10, 20, 30, 40, 50] for k in range(3)}
    assert len(bank.calls) == len(set(bank.calls)) == 18


def test_calls_made_ahead_that_turn_out_different_are_made_again() -> None:
    class Sum(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                total = state.get(0) + record.value
                state.put(total)
                yield Record(key, self.charge(key, total))

    bank = Bank()
    driver = ProcessorDriver(Sum(bank.charge, order=None))
    outputs = driver.send_many([("a", n) for n in (1, 2, 3)])
    assert [record.value for record in outputs] == [10, 30, 60]
    assert {("a", 1), ("a", 3), ("a", 6)} <= set(bank.calls)


_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def spoil(value: Any) -> None:
    """Change whatever can be changed in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in list(inner):
        spoil(each)
    if isinstance(value, dict):
        value["changed"] = len(value)
    elif isinstance(value, list):
        value.append(len(value))


@settings(max_examples=30, deadline=None)
@given(answers=st.lists(_ANY_JSON, min_size=1, max_size=4))
@pytest.mark.slow
def test_what_user_code_changes_in_a_result_is_changed_once(answers: list[Any]) -> None:
    """`process` runs again after each call, and got the object that its earlier run had changed."""

    class Changes(onceflow.Processor):
        key, value, output = serdes.STRING, serdes.JSON, serdes.JSON

        def __init__(self) -> None:
            self.ask = onceflow.concurrently(lambda at, _: copy.deepcopy(answers[at]))

        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for _record in records:
                found: list[Any] = []
                for at in range(len(answers)):
                    found.append(self.ask(at, found))
                    spoil(found[-1])
                yield Record(key, found)

    expected = copy.deepcopy(answers)
    for each in expected:
        spoil(each)
    assert [record.value for record in ProcessorDriver(Changes()).send("a", 1)] == [expected]


def test_a_result_that_cannot_be_copied_is_handed_over_itself() -> None:
    lock = threading.Lock()
    marker = object()

    class Asks(onceflow.Processor):
        key = value = output = serdes.STRING

        def __init__(self) -> None:
            self.ask = onceflow.concurrently(lambda what: what)

        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            assert self.ask(lock) is lock
            assert self.ask(marker) is marker
            yield Record(key, "both")

    assert [record.value for record in ProcessorDriver(Asks()).send("a", "x")] == ["both"]


@pytest.mark.parametrize("order", ["key", None])
@pytest.mark.parametrize("retries", [0, 1])
def test_what_a_function_changes_in_its_arguments_changes_no_other_call(order: str | None, retries: int) -> None:
    """It changed the arguments with which later runs of `process` are compared, so calls were made again."""
    calls = []

    def ask(order_: dict[str, int]) -> int:
        calls.append(dict(order_))
        order_["n"] += 100
        return order_["n"]

    class Asks(onceflow.Processor):
        key, value, output = serdes.STRING, serdes.JSON, serdes.JSON

        def __init__(self) -> None:
            self.ask = onceflow.concurrently(ask, order=order, retries=retries)

        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                yield Record(key, self.ask(record.value))

    outputs = ProcessorDriver(Asks()).send_many([("a", {"n": n}) for n in range(5)])
    assert [record.value for record in outputs] == [100, 101, 102, 103, 104]
    assert sorted(each["n"] for each in calls) == [0, 1, 2, 3, 4]


class Counts(onceflow.Processor):
    """Asks with what other keys have at that moment."""

    key, value, state, output = serdes.STRING, serdes.JSON, serdes.JSON, serdes.JSON

    def __init__(self, ask: Any, *, prefix: bool = False) -> None:
        self.ask = onceflow.concurrently(ask, limit=8)
        self.prefix = prefix

    def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
        for record in records:
            others = sum(each for _, each in (state.prefix(b"") if self.prefix else state.range()))
            asked = self.ask(record.value, others)
            state.put(state.get(0) + 1)
            yield Record(key, [asked, others])


@pytest.mark.parametrize("prefix", [True, False])
def test_an_answer_belongs_to_what_was_read_of_other_keys(prefix: bool) -> None:
    """Records of other keys may be done while a call is under way. The answer to the earlier question was taken."""
    calls = []

    def ask(number: int, others: int) -> int:
        calls.append(number)
        time.sleep(0.05 if number == 0 else 0.002 * (number % 3))
        return others

    driver = ProcessorDriver(Counts(ask, prefix=prefix))
    outputs = driver.send_many([(f"k{n}", n) for n in range(8)])
    assert all(asked == others for asked, others in (record.value for record in outputs))
    assert sorted(record.value[1] for record in outputs) == list(range(8))
    assert set(calls) == set(range(8))


def test_a_question_that_differs_each_time_is_answered_in_the_end() -> None:
    class Differs(Counts):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            list(state.range())
            state.put(1)
            yield Record(key, self.ask(time.perf_counter_ns(), 0))

    driver = ProcessorDriver(Differs(lambda *_: 1))
    assert len(driver.send_many([(f"k{n}", n) for n in range(10)])) == 10


def test_several_calls_of_a_record_and_what_user_code_does_with_their_errors() -> None:
    class Twice(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                chance = time.perf_counter_ns()  # differs from run to run
                first = self.charge(key, chance)
                try:
                    second = self.charge(key, record.value)
                except ValueError:
                    second = "refused"
                except BaseException:  # not even this makes a failure of a call under way
                    second = "wrong"
                yield Record(key, [first // 10 > 0, second])

    bank = Bank()
    bank.bad = {4}
    driver = ProcessorDriver(Twice(bank.charge))
    outputs = driver.send_many([(f"k{n}", n) for n in range(6)])
    found = {record.key: record.value for record in outputs}
    assert found == {f"k{n}": [True, "refused" if n == 4 else n * 10] for n in range(6)}
    assert len(bank.calls) == 12


def test_timers_may_call_too() -> None:
    class Later(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> None:
            state.put(records[0].value)
            state.timers.register("due", state.now_ms + 1000, "processing")

        def on_timer(self, key: str, timer: Any, state: Any) -> Iterator[Record]:
            yield Record(key, self.charge(key, state.get()))

    driver = ProcessorDriver(Later(Bank().charge))
    driver.send_many([("a", 1), ("b", 2)])
    assert receipts(driver.advance(2)) == {"a": [10], "b": [20]}


def test_records_that_cannot_be_decoded_are_not_called_for() -> None:
    bank = Bank()
    driver = ProcessorDriver(Pay(bank.charge), on_error="dead-letter")
    driver.send_many([("a", 1), ("a", b"no JSON"), (None, 3), ("a", 2)])
    assert bank.calls == [("a", 1), ("a", 2)]
    assert len(driver.dead_letters) == 2


def test_looking_for_the_cause_of_an_error_makes_no_calls() -> None:
    """State of an older form: a KeyError after the call. Whether the record is at fault is tried with empty state."""

    class Newer(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                old = state.get({"sum": 0, "count": 0})
                receipt = self.charge(key, record.value)
                state.put({"sum": old["sum"] + receipt, "count": old["count"] + 1})
                yield Record(key, receipt)

    bank = Bank()
    driver = ProcessorDriver(Newer(bank.charge), on_error="dead-letter")
    driver.send("a", 1)
    state = driver._stores[0]
    state.write([(b"va", b'\x00{"sum": 10}')] if state.get(b"va") else [], index=True)
    found = [key for key, _ in state.scan(b"v", b"w")]
    state.write([(found[0], b'\x00{"sum": 10}')], index=True)
    with pytest.raises(ProcessorError, match="lacks fields"):
        driver.send("a", 2)
    assert bank.calls == [("a", 1), ("a", 2)]


def test_calls_have_a_limit_of_time_in_all() -> None:
    from onceflow.calls.target import Call

    leave = threading.Event()
    runner = CallRunner(0.1)
    target = onceflow.concurrently(lambda item: leave.wait(20), limit=2).target
    for n in range(4):
        runner.start(Call(target, (n,)))
    with pytest.raises(DeadlineExceededError, match="max_records_per_batch"):
        runner.settle()
    leave.set()
    runner.close()


def test_a_function_may_make_calls_itself() -> None:
    """They are calls of the function, and not of the record."""
    bank = Bank()
    inner = onceflow.concurrently(bank.charge, retries=0)

    async def outer(key: str, amount: int) -> int:
        return await asyncio.to_thread(inner, key, amount)

    driver = ProcessorDriver(Pay(outer, timeout="5 seconds"))
    assert receipts(driver.send_many([("a", 1), ("b", 2)])) == {"a": [10], "b": [20]}
    assert sorted(bank.calls) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("order", ["key", None])
def test_the_clean_up_of_a_generator_may_make_a_call(order: str | None) -> None:
    class Releases(Pay):
        def process(self, key: str, records: Sequence[Record], state: Any) -> Iterator[Record]:
            for record in records:
                self.charge(key, record.value)
                try:
                    yield Record(key, object() if record.value == 2 else record.value)  # cannot be encoded
                finally:
                    self.charge(key, -record.value)

    bank = Bank()
    driver = ProcessorDriver(Releases(bank.charge, order=order), on_error="dead-letter")
    assert receipts(driver.send_many([("a", n) for n in (1, 2, 3)])) == {"a": [1, 3]}
    assert [letter.value for letter in driver.dead_letters] == [b"2"]
    assert sorted(amount for _, amount in bank.calls) == [-3, -2, -1, 1, 2, 3]


@pytest.mark.parametrize("method", ["open", "on_timer", "close"])
@pytest.mark.parametrize("why", ["time", "stop"])
def test_calls_outside_of_process_have_the_limits_of_the_batch(
    method: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        leave.wait(10)

    class Asks(onceflow.Processor):
        ask = onceflow.concurrently(wait)

        def process(self, key: bytes, records: Sequence[Record], state: Any) -> None:
            state.timers.register("due", state.now_ms + 1000, "processing")

        def on_timer(self, key: bytes, timer: Any, state: Any) -> None:
            pass

    def asks(self: Asks, *_: object) -> None:
        with suppress(OnceflowError):  # user code may not notice
            self.ask()

    driver = ProcessorDriver(Asks())
    driver.send(b"a", b"1")
    setattr(Asks, method, asks)
    runner = CallRunner(0.05 if why == "time" else None, "flow")
    monkeypatch.setattr(processor_driver, "engine_for", lambda processor: engine_for(processor, runner))
    stop = threading.Thread(target=lambda: begun.wait(10) and give_up("flow"))
    if why == "stop":
        stop.start()
    with pytest.raises(DeadlineExceededError if why == "time" else BatchAbortedError, match="alls "):
        driver.advance(2)
    leave.set()
    runner.close()

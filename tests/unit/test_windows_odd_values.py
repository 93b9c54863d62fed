"""Windows over values that cannot be compared, added or written, and code that fails when a window closes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onceflow import ProcessorError, Record, serdes, windows
from onceflow.testing.processor_driver import ProcessorDriver

KINDS: dict[str, Any] = {
    "tumbling": windows.Tumbling(120),
    "hopping": windows.Hopping(120, every=60),
    "sliding": windows.Sliding(120),
    "session": windows.Session(90),
}
AGGREGATES: dict[str, Any] = {
    "sum": windows.Sum("v"),
    "mean": windows.Mean("v"),
    "max": windows.Max("v"),
    "min": windows.Min("v"),
    "first": windows.Min("v", text=True),
    "last": windows.Max("v", text=True),
}
#: A serde that keeps every value as it is: what a serde of Avro, for example, gives beyond JSON.
OBJECTS: dict[bytes, Any] = {}


def _kept(value: Any) -> bytes:
    raw = repr(value).encode()
    OBJECTS[raw] = value
    return raw


ANY = serdes.Serde(_kept, OBJECTS.__getitem__, "objects")
NUMBERS = st.one_of(
    st.integers(-9, 9), st.integers(-(10**20), 10**20), st.integers(10**299, 10**301), st.integers(10**400, 10**401),
    st.floats(), st.sampled_from([1e300, -1e300, 1.7e308, 5e-324]),
    st.decimals(), st.sampled_from([Decimal("1e300"), Decimal("1e301"), Decimal("1e-300"), Decimal("1e-401")]),
    st.sampled_from([np.int64(5), np.float32(1.5), np.uint8(200), np.float64("nan")]),
)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.text(max_size=2), st.lists(st.integers(), max_size=2), st.just({"a": 1}), st.binary(),
    st.complex_numbers(), st.just(np.bool_(True)),
)  # fmt: skip


def processor(kind: Any, aggregates: Mapping[str, Any], emit: Any = "close", **more: Any) -> Any:
    attributes = {"key": serdes.STRING, "value": ANY, "state": ANY, "output": ANY, **more}
    body = {**attributes, "window": kind, "aggregates": aggregates, "emit": emit}
    return type("Odd", (windows.WindowProcessor,), body)()


def usable(value: Any, name: str) -> bool:
    if name in ("first", "last"):
        return isinstance(value, str)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, Decimal, np.number)):
        return False
    if not (value.is_finite() if isinstance(value, Decimal) else isinstance(value, int) or math.isfinite(value)):
        return False
    if name in ("min", "max"):
        return True
    value = float(value) if isinstance(value, np.floating) else value
    exponent: Any = value.as_tuple().exponent if isinstance(value, Decimal) else 0
    return abs(value) <= 1e300 and exponent >= -400


def cause(letter: Record) -> str:
    return (dict(letter.headers)["onceflow.error.message"] or b"").decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("emit", ["close", "update"])
@given(
    name=st.sampled_from(sorted(AGGREGATES)),
    sent=st.lists(st.tuples(st.one_of(NUMBERS, ODD), st.integers(0, 5)), min_size=1, max_size=8),
)
@example(name="max", sent=[(5, 0), ("7", 1)])
@example(name="sum", sent=[(18 * 10**18, 0), (18 * 10**18, 1)])
@example(name="mean", sent=[(10**400, 0), (0.5, 1)])
@example(name="sum", sent=[(1e300, 0), (1e300, 1), (10**299, 0)])
@settings(max_examples=15, deadline=None)
def test_a_value_that_does_not_fit_is_bad_when_it_is_read(kind: str, emit: str, name: str, sent: Any) -> None:
    """And every window closes, over exactly the others."""
    driver = ProcessorDriver(processor(KINDS[kind], {"x": AGGREGATES[name]}, emit), on_error="dead-letter")
    for value, minute in sent:
        driver.send("k", {"v": value}, timestamp_ms=minute * 60_000, run=False)
    driver.run()
    driver.send("end", {"v": None}, timestamp_ms=10_000_000)
    driver.run()
    bad = [value for value, _ in sent if value is not None and not usable(value, name)]
    assert len(driver.dead_letters) == len(bad)
    assert all("onceflow.timer.name" not in dict(letter.headers) for letter in driver.dead_letters)
    assert driver.map("k", "windows") == {}, "all windows are closed"
    good = [(value, minute) for value, minute in sent if value is None or usable(value, name)]
    if emit == "close":
        for record in driver.outputs:
            if record.key == "k":
                start, end = record.value["start_ms"], record.value["end_ms"]
                values = [value for value, minute in good if start <= minute * 60_000 < end and value is not None]
                assert_result(name, values, record.value["x"])
        assert bool(good) == any(record.key == "k" for record in driver.outputs)


def assert_result(name: str, values: list[Any], found: Any) -> None:
    if not values:
        assert found is None
    elif name in ("first", "last"):
        assert found == (min if name == "first" else max)(values)
    elif name in ("min", "max"):
        assert as_written(found) == (min if name == "min" else max)(map(as_written, values))
    else:
        exact = sum(map(exactly, values), Fraction(0)) / (len(values) if name == "mean" else 1)
        if name == "sum" and all(isinstance(value, (int, Decimal, np.integer)) for value in values):
            assert exactly(found) == exact, "whole numbers and decimals are summed exactly"
        largest = max(abs(exactly(value)) for value in values)
        assert abs(exactly(found) - exact) <= largest * len(values) * Fraction(1, 1 << 49)


def exactly(value: Any) -> Fraction:
    if isinstance(value, np.integer):
        return Fraction(int(value))
    return Fraction(float(value) if isinstance(value, np.floating) else value)


def as_written(value: Any) -> Fraction:
    value = float(value) if isinstance(value, np.floating) else value
    return Fraction(repr(value)) if isinstance(value, float) else exactly(value)


class Amounts(windows.WindowProcessor):
    """State and results in JSON, in which a Decimal of few digits is read as a float."""

    key, value = serdes.STRING, serdes.JSON
    allowed_lateness = "1 hour"
    aggregates = {  # noqa: RUF012
        "sum": windows.Sum(lambda record: Decimal(record.value)),
        "mean": windows.Mean(lambda record: Decimal(record.value)),
        "min": windows.Min(lambda record: Decimal(record.value)),
        "max": windows.Max(lambda record: Decimal(record.value)),
    }

    def __init__(self, kind: Any) -> None:
        self.window = kind


CENTS = st.integers(-999, 999).map(lambda cents: Decimal(cents).scaleb(-2))
#: Next to numbers of two digits, on both sides of the floats that stand for them.
NEAR = st.builds(lambda cents, more: cents + Decimal(more).scaleb(-18), CENTS, st.integers(-9, 9))


@pytest.mark.parametrize("kind", KINDS)
@given(sent=st.lists(st.tuples(CENTS | NEAR, st.integers(0, 5)), min_size=1, max_size=8), at_once=st.booleans())
@example(sent=[(Decimal("0.10"), 0), (Decimal("0.20"), 1)], at_once=False)
@example(sent=[(Decimal("0.10"), 0), (Decimal("0.100000000000000001"), 0)], at_once=False)
@settings(max_examples=25, deadline=None)
def test_decimals_are_exact_whatever_has_been_in_the_state(kind: str, sent: Any, at_once: bool) -> None:
    driver = ProcessorDriver(Amounts(KINDS[kind]))
    for value, minute in sent:
        driver.send("k", str(value), timestamp_ms=minute * 60_000, run=not at_once)
    driver.run()
    driver.send("end", "0", timestamp_ms=10_000_000)
    driver.run()
    found = [record for record in driver.outputs if record.key == "k"]
    assert found
    for record in found:
        start, end = record.value["start_ms"], record.value["end_ms"]
        values = [value for value, minute in sent if start <= minute * 60_000 < end]
        assert as_written(record.value["sum"]) == sum(map(Fraction, values))
        assert record.value["mean"] == float(sum(map(Fraction, values)) / len(values))
        assert as_written(record.value["min"]) == Fraction(min(values))
        assert as_written(record.value["max"]) == Fraction(max(values))


def test_parts_of_earlier_versions_have_numbers() -> None:
    for aggregate in Amounts.aggregates.values():
        old = [0.1, 1] if isinstance(aggregate, windows.Mean) else 0.1
        found = aggregate.merge(old, aggregate.add(aggregate.initial(), Record("k", "0.20")))
        wanted = {windows.Sum: Decimal("0.3"), windows.Mean: 0.15, windows.Min: Decimal("0.1")}
        assert as_written(aggregate.result(found)) == as_written(wanted.get(type(aggregate), Decimal("0.2")))
        assert aggregate.result(aggregate.initial()) is None
        assert as_written(aggregate.result(old)) == Fraction("0.1")


def test_sums_of_whole_numbers_have_any_size() -> None:
    driver = ProcessorDriver(processor(KINDS["hopping"], {"sum": windows.Sum("v"), "mean": windows.Mean("v")}))
    for minute in (0, 1):
        driver.send("k", {"v": 18 * 10**18}, timestamp_ms=minute * 60_000)
    driver.send("k", {"v": 0}, timestamp_ms=10_000_000)
    driver.run()
    assert max(record.value["sum"] for record in driver.outputs) == 36 * 10**18
    assert {record.value["mean"] for record in driver.outputs} == {18e18}


@settings(max_examples=20, deadline=None)
@given(
    wholes=st.lists(st.tuples(st.sampled_from([2**60, -(2**60)]), st.integers(-3, 3)), min_size=1, max_size=4),
    fraction=st.sampled_from([0.5, -0.25, 1.0, 3e3]),
    data=st.data(),
)
def test_a_float_rounds_no_whole_number(wholes: Any, fraction: float, data: st.DataObject) -> None:
    """In any order, and whether the sum so far comes back from the state or not."""
    values = data.draw(st.permutations([*map(sum, wholes), fraction]))
    driver = ProcessorDriver(processor(KINDS["tumbling"], {"sum": windows.Sum("v"), "mean": windows.Mean("v")}))
    for value in values:
        driver.send("k", {"v": value}, timestamp_ms=0, run=data.draw(st.booleans()))
    driver.send("end", {"v": 0}, timestamp_ms=10_000_000)
    driver.run()
    exact = sum(map(Fraction, values))
    found = [record.value for record in driver.outputs if record.key == "k"]
    assert [(Fraction(each["sum"]), each["mean"]) for each in found] == [(exact, float(exact / len(values)))]


class Fragile(windows.WindowProcessor):
    """It fails where values say so."""

    key = value = serdes.STRING
    window = windows.Hopping(120, every=60)
    emit: Any = "close"

    def initial(self) -> Any:
        return []

    def add(self, accumulator: Any, record: Record) -> Any:
        return [*accumulator, record.value]

    def merge(self, left: Any, right: Any) -> Any:
        both = left + right
        left.append("changed")
        if "merge" in both:
            raise ArithmeticError("cannot be merged")
        return both

    def result(self, key: Any, window: windows.Window, accumulator: Any) -> Any:
        if "result" in accumulator:
            raise KeyError("result")
        yield Record(key, [window.start_ms, accumulator])
        if "unwritable" in accumulator:
            yield Record(key, {1, 2})
        if "topic" in accumulator:
            yield Record(key, "x", topic="__consumer_offsets")


def windows_of(sent: list[tuple[int, str]], **attributes: Any) -> ProcessorDriver:
    made = Fragile()
    for name, value in attributes.items():
        setattr(made, name, value)
    driver = ProcessorDriver(made, on_error="dead-letter")
    for minute, value in sent:
        driver.send("k", value, timestamp_ms=minute * 60_000, run=False)
    driver.run()
    driver.send("end", "", timestamp_ms=10_000_000)
    driver.run()
    return driver


@pytest.mark.parametrize("what, message", [
    ("merge", "cannot be merged"), ("result", "'result'"), ("unwritable", "the value you yielded is set"),
    ("topic", "names the topic '__consumer_offsets'"),
])  # fmt: skip
def test_a_window_that_cannot_be_closed_becomes_a_letter_and_the_others_are_closed(what: str, message: str) -> None:
    driver = windows_of([(0, "a"), (1, "b"), (3, what), (4, "c"), (8, "d")])
    lost = [(180_000, 300_000)] if what == "merge" else [(120_000, 240_000), (180_000, 300_000)]
    if what == "merge":  # alone in its window, it need not be merged
        assert [120_000, ["merge"]] in [record.value for record in driver.outputs]
    outputs = [record.value for record in driver.outputs if record.value[1] != ["merge"]]
    assert outputs == [
        [-60_000, ["a"]], [0, ["a", "b"]], [60_000, ["b"]], [240_000, ["c"]], [420_000, ["d"]], [480_000, ["d"]],
    ]  # fmt: skip
    letters = [json.loads(letter.value) for letter in driver.dead_letters]
    assert [(each["window"]["start_ms"], each["window"]["end_ms"]) for each in letters] == lost
    assert letters[-1]["accumulators"] == [[what], ["c"]]
    for letter in driver.dead_letters:
        assert letter.key == b"k"
        assert message in cause(letter)
        assert dict(letter.headers)["onceflow.timer.name"] == b"onceflow.windows"
    assert driver.map("k", "windows") == {}
    assert {key for key, _ in driver.timers} <= {"end"}
    assert driver.counts["dead_letters"] == len(lost)


def test_a_session_that_cannot_be_closed_becomes_a_letter() -> None:
    driver = windows_of([(0, "a"), (5, "result"), (10, "b")], window=windows.Session(60))
    assert [record.value for record in driver.outputs] == [[0, ["a"]], [600_000, ["b"]]]
    (letter,) = driver.dead_letters
    assert json.loads(letter.value)["accumulators"] == [["result"]]
    assert json.loads(letter.value)["window"] == {"start_ms": 300_000, "end_ms": 360_000}
    assert driver.map("k", "windows") == {}


def test_accumulators_that_json_has_no_form_for_are_named_as_well_as_possible() -> None:
    class Odd(Fragile):
        state = ANY

        def add(self, accumulator: Any, record: Record) -> Any:
            given = {"keys": [{(1, 2): b"\xff"}], "same names": [{1: "a", "1": "b"}]}
            return given.get(str(record.value), [b"\xff", object])

        def result(self, key: Any, window: windows.Window, accumulator: Any) -> Any:
            raise ValueError("never")

    cases = {
        "x": [[{"base64": "/w=="}, "<class 'object'>"]],
        "keys": [[{"(1, 2)": {"base64": "/w=="}}]],
        "same names": [["{1: 'a', '1': 'b'}"]],
    }
    for value, found in cases.items():
        driver = ProcessorDriver(Odd(), on_error="dead-letter")
        driver.send("k", value, timestamp_ms=0)
        driver.send("end", "", timestamp_ms=10_000_000)
        driver.run()
        assert json.loads(driver.dead_letters[0].value)["accumulators"] == found


def test_without_dead_letters_the_flow_stops_and_nothing_is_lost() -> None:
    driver = ProcessorDriver(Fragile())
    for minute, value in ((0, "a"), (3, "result")):
        driver.send("k", value, timestamp_ms=minute * 60_000)
    driver.send("end", "", timestamp_ms=10_000_000, run=False)
    with pytest.raises(ProcessorError, match="a timer could not be handled: KeyError") as caught:
        driver.run()
    assert "timer 'onceflow.windows'" in caught.value.detail
    assert len(driver.map("k", "windows")) == 1, "the pane of the second record"


def test_an_on_timer_of_ones_own_that_fails_is_named_as_a_whole() -> None:
    class Own(Fragile):
        def on_timer(self, key: Any, timer: Any, state: Any) -> Any:
            yield from super().on_timer(key, timer, state)
            raise RuntimeError("mine")

    driver = ProcessorDriver(Own(), on_error="dead-letter")
    for minute, value in ((0, "a"), (4, "b"), (10, "c")):
        driver.send("k", value, timestamp_ms=minute * 60_000)
    assert len(driver.dead_letters) == 4, "of the windows with a, and of those with b: the timer has moved on"
    driver.send("end", "", timestamp_ms=10_000_000)
    driver.run()
    assert driver.outputs == []
    letters = [json.loads(letter.value) for letter in driver.dead_letters]
    assert [(each["window"]["start_ms"] // 60_000, each["accumulators"]) for each in letters] == [
        (-1, [["a"]]), (0, [["a"]]), (3, [["b"]]), (4, [["b"]]), (9, [["c"]]), (10, [["c"]]),
    ]  # fmt: skip
    assert {each["timer"] for each in letters} == {"onceflow.windows"}
    assert {cause(letter) for letter in driver.dead_letters} == {"mine"}
    assert driver.map("k", "windows") == {}

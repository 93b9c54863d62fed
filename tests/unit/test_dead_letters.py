"""Dead letters of a run: counted, told once, and too many of them are an error; what is no record's fault is none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from onceflow import windows
from onceflow.errors import DeadLetterLimitError, OptionError, ProcessorError
from onceflow.planning.dead_letter_limit import DeadLetters, Letters, check_limit
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, JSON, STRING, struct
from onceflow.state.engine.shapes import declared_fields, lacks
from onceflow.testing.processor_driver import ProcessorDriver


def run_of(limit: float | None) -> DeadLetters:
    return DeadLetters("f", "letters", limit, "table balances")


def batch(records: int, letters: int) -> Letters:
    causes = {"KeyError": (letters, "in-0, offset 7: KeyError: 'amount'")} if letters else {}
    return Letters(records, letters, causes)


@pytest.mark.parametrize(
    "limit, batches, most",
    [
        (None, [(10, 10)] * 5, 5),
        (0, [(10, 0), (10, 1)], 1),
        (3, [(10, 2), (10, 1), (10, 0), (10, 1)], 3),
        (0.1, [(50, 50)], 1),  # too few records to say so
        (0.1, [(100, 10), (100, 10), (50, 6)], 2),
        (0.1, [(100, 0), (50, 15), (50, 6)], 2),
    ],
)
def test_too_many_stop_the_run(limit: float | None, batches: list[tuple[int, int]], most: int) -> None:
    run = run_of(limit)
    for letters in (batch(*counts) for counts in batches[:most]):
        run.check(letters)
        run.on_commit(letters)
    for letters in (batch(*counts) for counts in batches[most:]):
        with pytest.raises(DeadLetterLimitError) as caught:
            run.check(letters)
        assert "KeyError: 'amount'" in str(caught.value)
        assert caught.value.topic == "letters"


def test_event_time_that_fails_for_every_record() -> None:
    """No record is at fault then. A limit that was given is the user's own choice."""

    def untimed(records: int, letters: int) -> Letters:
        return Letters(records, letters, {"KeyError in event_time()": (letters, "in-0, offset 7: KeyError: 'at'")})

    run = run_of(None)
    run.check(untimed(60, 60))
    run.on_commit(untimed(60, 60))
    with pytest.raises(DeadLetterLimitError, match="for each of the 120 records of this run, so the code is at fault"):
        run.check(untimed(60, 60))
    run.check(untimed(60, 59))  # one has a time
    run.on_commit(untimed(60, 59))
    run.check(untimed(500, 500))
    other = run_of(None)
    other.check(batch(500, 500))  # process() has failed
    for undecodable, is_stopped in ((1, True), (60, True), (100, False)):  # event_time() was not called for these
        causes = {**untimed(600, 600 - undecodable).causes, "JSONDecodeError": (undecodable, "in-0, offset 8: no JSON")}
        stops = pytest.raises(DeadLetterLimitError, match=f"{600 - undecodable} of 600 records") if is_stopped else None
        with stops or contextlib.nullcontext():
            run_of(None).check(Letters(600, 600, causes))
    run_of(None).check(Letters(600, 599, untimed(600, 599).causes))  # one has got through
    run_of(1_000).check(untimed(500, 500))


@pytest.mark.parametrize("kind", ["records", "columns"])
def test_letters_say_that_event_time_has_failed(kind: str) -> None:
    class Records(Processor):
        value, allowed_lateness = STRING, "1 second"

        def event_time(self, record: Record) -> int:
            return {"good": 1}[record.value]

        def process(self, key: Any, records: Any, state: Any) -> None:
            list(records)

    class Columns(ColumnProcessor):
        allowed_lateness = "1 second"

        def event_time(self, records: Any) -> Any:
            return [{b"good": 1}[each] for each in records["value"].to_pylist()]

        def process(self, context: Any, records: Any, states: Any) -> Any:
            return None, None

    driver = ProcessorDriver(Records() if kind == "records" else Columns(), on_error="dead-letter")
    driver.send_many([Record(b"k", value) for value in ("good", "bad", "good", "worse")])
    assert {name: count for name, (count, _) in driver.causes.items()} == {"KeyError in event_time()": 2}


def test_a_share_is_judged_when_there_are_records_enough_also_without_a_new_one() -> None:
    run = run_of(0.1)
    for letters in (batch(50, 50), batch(40, 0)):
        run.check(letters)
        run.on_commit(letters)
    with pytest.raises(DeadLetterLimitError, match="50 of 110 records of this run") as caught:
        run.check(batch(20, 0))
    assert "in this batch: none" in caught.value.detail


def test_the_first_one_is_told_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(None)
    for letters in (batch(5, 0), batch(5, 2), batch(5, 3)):
        run.on_commit(letters)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "letters: 2 x KeyError, first in-0, offset 7: KeyError: 'amount'" in told
    assert (run.records, run.count) == (15, 5)
    run.on_commit(Letters(5, 5, {"KeyError": (3, "x"), "ValueError": (2, "in-0, offset 9: ValueError: no")}))
    assert caplog.messages[-1].endswith(
        "of another cause went to letters: 2 x ValueError, first in-0, offset 9: ValueError: no"
    )


@pytest.mark.parametrize("limit", [-1, True, 1.0, 0.0, 1.5, "10", float("nan")])
def test_limits_that_mean_nothing(limit: Any) -> None:
    with pytest.raises(OptionError, match="neither a count nor a share"):
        check_limit(limit, "f")


# ---- the shape of state ------------------------------------------------------------------------------


class Old(Processor):
    key = STRING
    value = state = output = JSON

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        account = state.get({"sum": 0})
        for record in records:
            account["sum"] += record.value["amount"]
        state.put(account)
        yield Record(key, account)


class Renamed(Old):
    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        account = state.get()
        for record in records:
            amount = record.value["amount"]
            account = {"total": amount} if account is None else {"total": account["total"] + amount}
        state.put(account)
        yield Record(key, account)


class Bare(Renamed):
    """From a dict to a number."""

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            total = state.get()
            state.put(record.value["amount"] if total is None else total + record.value["amount"])
        yield Record(key, {})


@pytest.mark.parametrize("new", [Renamed, Bare])
@pytest.mark.parametrize("records", [1, 3])
def test_state_that_other_code_has_written_is_no_fault_of_records(new: type[Processor], records: int) -> None:
    driver = ProcessorDriver(Old(), on_error="dead-letter")
    driver.send("ada", {"amount": 5})
    driver.processor = new()
    with pytest.raises(ProcessorError, match="lacks fields that process") as caught:
        driver.send_many([("ada", {"amount": n}) for n in range(records)])
    assert "`version`" in caught.value.next_step
    assert "migrate" in caught.value.next_step
    driver.processor = Old()
    assert driver.state("ada") == {"sum": 5}  # nothing of the trials is kept


class Rated(Renamed):
    """As `Renamed`, with a joined table."""

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        assert state.table("rates").get("EUR") == 2
        yield from super().process(key, records, state)


def test_the_trial_of_a_record_finds_the_joined_tables() -> None:
    driver = ProcessorDriver(Old(), on_error="dead-letter", tables={"rates": {"EUR": 2}})
    driver.send("ada", {"amount": 5})
    driver.processor = Rated()
    with pytest.raises(ProcessorError, match="lacks fields that process"):
        driver.send("ada", {"amount": 1})


class OldDays(Old):
    """A map of days, with a serde of its own if it is given one."""

    state: Any = JSON
    fields: tuple[str, ...] = ("n",)

    def __init__(self, serde: Any = None, fields: tuple[str, ...] = ("n",)) -> None:
        self.serde, self.fields = serde, fields
        if serde is not None:
            self.state = BYTES

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        days = state.map("days", value=self.serde)
        for record in records:
            day = days.get(record.value["day"]) or dict.fromkeys(self.fields, 0)
            for name in self.fields:
                day[name] += record.value["amount"]
            days.put(record.value["day"], day)
        yield Record(key, {})


@pytest.mark.parametrize("serde", [None, JSON])
@pytest.mark.parametrize("records", [1, 3])
def test_entries_of_a_map_that_other_code_has_written_are_no_fault_of_records(serde: Any, records: int) -> None:
    driver = ProcessorDriver(OldDays(serde), on_error="dead-letter")
    driver.send_many([("ada", {"day": "mon", "amount": 1}), ("bob", {"day": "sun", "amount": 1})])
    driver.processor = OldDays(serde, ("n", "total"))
    driver.send_many([("ada", {"day": "tue", "amount": 1}), ("ada", {"day": "tue", "amount": 1})])  # a new entry
    with pytest.raises(ProcessorError, match="lacks fields that process") as caught:
        driver.send_many([("ada", {"day": "mon", "amount": 2})] * records)
    assert "define migrate" in caught.value.next_step


@pytest.mark.parametrize("serde", [None, JSON])
@pytest.mark.parametrize("bad", [{}, {"day": "mon"}, {"day": "mon", "amount": "x"}, {"day": 7, "amount": 1}])
def test_bad_records_of_maps_stay_dead_letters(serde: Any, bad: dict[str, Any]) -> None:
    driver = ProcessorDriver(OldDays(serde), on_error="dead-letter")
    driver.send("ada", {"day": "mon", "amount": 5})
    driver.send_many([("ada", bad), ("ada", {"day": "mon", "amount": 2})])
    assert len(driver.dead_letters) == 1
    driver.processor = OldDays(serde, ("n", "total"))
    driver.send_many([("ada", bad), ("ada", {"day": "tue", "amount": 2})])
    assert len(driver.dead_letters) == 2


class OldWindows(windows.WindowProcessor):
    key, value = STRING, JSON
    window: Any = windows.Tumbling("1 minute")

    def initial(self) -> Any:
        return {"n": 0}

    def add(self, accumulator: Any, record: Record) -> Any:
        accumulator["n"] += record.value["amount"]
        return accumulator

    def merge(self, left: Any, right: Any) -> Any:
        return left

    def result(self, key: Any, window: Any, accumulator: Any) -> Any:
        return Record(key, accumulator["n"])


class NewWindows(OldWindows):
    def initial(self) -> Any:
        return {"n": 0, "total": 0}

    def add(self, accumulator: Any, record: Record) -> Any:
        accumulator["total"] += record.value["amount"]
        return super().add(accumulator, record)

    def result(self, key: Any, window: Any, accumulator: Any) -> Any:
        return Record(key, accumulator["total"])


class NewSessions(NewWindows):
    window = windows.Session("1 minute")


class OldSessions(OldWindows):
    window = windows.Session("1 minute")


@pytest.mark.parametrize("old, new", [(OldWindows, NewWindows), (OldSessions, NewSessions)])
def test_windows_that_other_code_has_filled_are_no_fault_of_records_nor_of_timers(old: Any, new: Any) -> None:
    def filled() -> ProcessorDriver:
        driver = ProcessorDriver(old(), on_error="dead-letter")
        driver.send("ada", {"amount": 1}, timestamp_ms=1)
        driver.processor = new()
        return driver

    for at_ms in (1, 9):
        driver = filled()
        with pytest.raises(ProcessorError, match="lacks fields that process"):
            driver.send("ada", {"amount": 1}, timestamp_ms=at_ms)
    driver = filled()
    with pytest.raises(ProcessorError, match="lacks fields that closing its windows needs: KeyError: 'total'"):
        driver.send("bob", {"amount": 1}, timestamp_ms=1_000_000)
    driver = ProcessorDriver(new(), on_error="dead-letter")
    driver.send_many([Record("ada", {}, timestamp_ms=1), Record("ada", {"amount": 2}, timestamp_ms=1)])
    driver.send("bob", {"amount": 1}, timestamp_ms=1_000_000)
    driver.run()
    assert ([record.value for record in driver.outputs], len(driver.dead_letters)) == ([2], 1)


@pytest.mark.parametrize("bad", [{}, {"amount": "x"}, {"amount": None}, {"amount": [1]}])
@pytest.mark.parametrize("processor", [Old, Renamed, Bare])
def test_bad_records_stay_dead_letters(processor: type[Processor], bad: dict[str, Any]) -> None:
    driver = ProcessorDriver(processor(), on_error="dead-letter")
    driver.send("ada", {"amount": 5})
    driver.send_many([("ada", bad), ("ada", {"amount": 2})])
    assert len(driver.dead_letters) == 1


class OnlyKnown(Old):
    """Ignores records of keys that it does not know."""

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            account = state.get()
            if record.value.get("open"):
                account = {"sum": 0}
            elif account is None:
                continue
            else:
                account["sum"] += record.value["amount"]
            state.put(account)
            yield Record(key, account)


class Items(Old):
    """The fields of its state come from records, and an output may not be such as can be written."""

    output = BYTES

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        counts = state.get({})
        for record in records:
            item = record.value["item"]
            counts[item] = counts.get(item, 0) + 1
            yield Record(key, record.value.get("note", b""))
        state.put(counts)


class NextVersion(Old):
    """No migrate(), and nothing of version 0 is read any more."""

    version = 1

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key, {"twice": 2 * record.value["amount"]})


def test_a_record_that_makes_no_state_tells_nothing_of_its_fields() -> None:
    driver = ProcessorDriver(OnlyKnown(), on_error="dead-letter")
    driver.send("ada", {"open": True})
    driver.send_many([("ada", {}), ("ada", {"amount": 2})])
    assert (len(driver.dead_letters), driver.state("ada")) == (1, {"sum": 2})


def test_state_of_the_same_batch_was_written_by_this_code() -> None:
    driver = ProcessorDriver(OnlyKnown(), on_error="dead-letter")
    driver.send_many([("ada", {"open": True}), ("ada", {}), ("ada", {"amount": 2})])
    assert (len(driver.dead_letters), driver.state("ada")) == (1, {"sum": 2})


def test_an_output_that_cannot_be_written_is_no_fault_of_state() -> None:
    driver = ProcessorDriver(Items(), on_error="dead-letter")
    driver.send("ada", {"item": "a"})
    driver.send("ada", {"item": "b", "note": 7})
    assert (len(driver.dead_letters), driver.state("ada")) == (1, {"a": 1})


def test_state_that_the_processor_does_not_read_fails_no_batch() -> None:
    driver = ProcessorDriver(Old(), on_error="dead-letter")
    driver.send("ada", {"amount": 5})
    driver.processor = NextVersion()
    driver.send_many([("ada", {}), ("ada", {"amount": 2})])
    assert len(driver.dead_letters) == 1


class Dicts(Old):
    def process(self, key: str, records: Any, state: Any) -> Any:
        yield {"sum": 1}


def test_a_processor_that_returns_no_records_makes_no_dead_letters() -> None:
    class Number(Old):
        def process(self, key: str, records: Any, state: Any) -> Any:
            return 5

    driver = ProcessorDriver(Number(), on_error="dead-letter")
    with pytest.raises(ProcessorError, match="has to yield Records: expected Records, got int"):
        driver.send("ada", {"amount": 1})


def test_a_processor_that_yields_no_records_makes_no_dead_letters() -> None:
    driver = ProcessorDriver(Dicts(), on_error="dead-letter")
    with pytest.raises(ProcessorError, match="has to yield Records: expected Records, got dict") as caught:
        driver.send_many([("ada", {"amount": 1}), ("bob", {"amount": 2})])
    assert "yielded in process, test_dead_letters.py:" in caught.value.detail


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "stored, new, expected",
    [
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1, "b": 2}, {"a": 2}, False),
        ({"a": 1}, {"a": 2, "b": 1}, True),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, True),
        (1, "text", False),
        (1, {"a": 1}, True),
        (1, [2], False),
        ({"a": 1}, 1, True),
        ([1], [{"a": 1}], False),
        (None, 1, False),
        ({"a": 1}, None, False),
        (None, {"a": 1}, False),
        ({"a": {"b": 1}}, {"a": None}, False),
        ({"a": None}, {"a": {"b": 1}}, False),
        (Point(1), Point(2), False),
        (1, Point(2), True),
    ],
)
def test_lacks(stored: Any, new: Any, expected: bool) -> None:
    assert lacks(stored, new) is expected


def test_declared_fields() -> None:
    class Columns(ColumnProcessor):
        state_fields = {"balance": "int64"}  # noqa: RUF012

    class Struct(Processor):
        state = struct(balance="long")

    assert declared_fields(Columns()) == declared_fields(Struct()) == "struct(balance=int64)"
    assert declared_fields(Old()) is None
    assert declared_fields(ColumnProcessor()) is None

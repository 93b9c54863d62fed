"""Records that cannot be processed: which one is blamed, what is taken back, where it goes."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.errors import OptionError, ProcessorError
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON, STRING, Serde
from onceflow.state.engine import dead_letters
from onceflow.state.engine.column_engine import ColumnEngine
from onceflow.state.engine.record_engine import Engine
from onceflow.state.format import rows, segments
from onceflow.state.stores.base import StoreCorruptError
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.testing.engines import engine_of


class Touchy(Processor):
    """Counts values per key in state, a map, a list and a timer, and fails on "bad" after having changed them all."""

    key = value = output = STRING
    state = JSON

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            state.put(state.get(0) + 1)
            state.map("m").put(record.value, 1)
            state.map("m").delete("first")
            state.list("l").append(record.value)
            state.timers.register("t", 1000 + state.get(), "processing")
            yield Record(key, record.value, headers=[("n", b"1")])
            if record.value == "bad":
                state.delete()
                state.map("m").clear()
                state.list("l").clear()
                state.timers.cancel("t")
                raise RuntimeError("no good")

    def on_timer(self, key: str, timer: Any, state: Any) -> Any:
        raise LookupError(f"timer of {key}")


def causes(letter: Record) -> dict[str, str]:
    """What the headers say of the error, but for the stack."""
    known = {name: (content or b"").decode() for name, content in letter.headers if name.startswith("onceflow.error.")}
    known.pop(dead_letters.ERROR_STACK, None)
    return {name.removeprefix("onceflow.error."): content for name, content in known.items()}


def test_the_bad_record_goes_to_the_dead_letters_and_the_others_count() -> None:
    driver = ProcessorDriver(Touchy(), on_error="dead-letter")
    driver.send_many([("k", "first"), ("k", "0")])
    yielded = driver.send_many(
        [
            ("k", "1"),
            ("other", "x"),
            Record("k", "bad", headers=[("h", b"x")], timestamp_ms=7),
            ("k", "2"),
            ("k", "bad"),
        ]
    )
    assert sorted(record.value for record in yielded) == ["1", "2", "x"]
    assert driver.state("k") == 4
    assert driver.map("k", "m") == {b"0": 1, b"1": 1, b"2": 1}
    assert driver.list("k", "l") == ["first", "0", "1", "2"]
    assert driver.timers == [("other", ("t", 1001, "processing")), ("k", ("t", 1004, "processing"))]
    assert [(each.key, each.value, each.topic) for each in driver.dead_letters] == [(b"k", b"bad", "dead-letters")] * 2
    first = driver.dead_letters[0]
    assert first.headers[0] == ("h", b"x")
    assert first.timestamp_ms == 7
    more = dict(first.headers)
    assert b'raise RuntimeError("no good")\nRuntimeError: no good' in (more["onceflow.error.stack"] or b"").replace(
        b"    ", b""
    )
    assert (more["onceflow.attempt"], more["onceflow.origin.topic"]) == (b"1", b"input")
    assert (more["onceflow.origin.partition"], more["onceflow.origin.offset"]) == (b"0", b"4")
    assert causes(first) == {
        "class": "RuntimeError",
        "message": "no good",
        "flow": "test",
        "topic": "input",
        "partition": "0",
        "offset": "4",
    }
    assert driver.counts["dead_letters"] == 2


def test_a_batch_that_fails_names_the_record_and_leaves_nothing() -> None:
    driver = ProcessorDriver(Touchy())
    driver.send("k", "0")
    driver.outputs.clear()
    with pytest.raises(ProcessorError, match="RuntimeError: no good") as raised:
        driver.send_many([Record("k", value, topic="deposits", partition=3) for value in ("1", "bad", "2")])
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.flow, error.topic, error.batch) == ("test", "deposits-3", 2)
    assert "offset 1, key b'k', table table-0, raised in process, test_processor_errors.py:" in error.detail
    assert driver.outputs == []
    assert driver.state("k") == 1


def test_a_timer_that_fails_becomes_a_letter_that_names_it() -> None:
    """The timer is gone, everything else that it has done is undone, and other timers fire."""

    class Ringing(Processor):
        key, value, state, output = STRING, STRING, STRING, STRING

        def process(self, key: str, records: Any, state: Any) -> None:
            state.put(records[-1].value)
            state.map("m").put("a", "kept")
            state.timers.register("ring", 1000 + len(key), "processing")
            state.timers.register("other", 9000, "processing")

        def on_timer(self, key: str, timer: Any, state: Any) -> Any:
            state.map("m").put("b", "undone")
            state.put("undone" if key.startswith("bad") else "rung")
            state.timers.cancel("other")
            yield Record(key, f"{timer.name} {key}")
            yield Record(key, 5 if key == "bad-output" else "again")
            if key == "bad":
                raise LookupError("no such account")

    driver = ProcessorDriver(Ringing(), on_error="dead-letter")
    driver.send_many([(key, "first") for key in ("good", "bad", "bad-output", "last-one-good")])
    yielded = driver.advance(2)
    assert [record.value for record in yielded] == ["ring good", "again", "ring last-one-good", "again"]
    assert driver.states == {"good": "rung", "last-one-good": "rung", "bad": "first", "bad-output": "first"}
    assert driver.map("bad", "m") == {b"a": "kept"}
    assert [(key, timer.name) for key, timer in driver.timers] == [("bad", "other"), ("bad-output", "other")]
    first, second = driver.dead_letters
    assert (first.key, first.timestamp_ms) == (b"bad", None)
    assert json.loads(first.value) == {"timer": "ring", "clock": "processing", "at_ms": 1003}
    found = dict(first.headers)
    assert found["onceflow.error.class"] == b"LookupError"
    assert found["onceflow.error.message"] == b"no such account"
    assert b'raise LookupError("no such account")' in (found["onceflow.error.stack"] or b"")
    assert found["onceflow.attempt"] == b"1"
    names = ("name", "clock", "at_ms", "table")
    assert [found[f"onceflow.timer.{each}"] for each in names] == [b"ring", b"processing", b"1003", b"table-0"]
    assert b"the value you yielded is int" in (dict(second.headers)["onceflow.error.message"] or b"")
    assert (driver.counts["dead_letters"], driver.counts["timers_fired"]) == (2, 4)
    driver.send("bad", "next")
    assert driver.state("bad") == "next", "the key goes on"


def test_the_causes_of_timers_are_told_as_those_of_records_are() -> None:
    engine = engine_of(
        Engine, Touchy(), MemoryStore.open(Path("timers")), partition=3, batch=1,
        on_error="dead-letter", dead_letter_topic="failed",
    )  # fmt: skip
    engine.feed(pa.record_batch({"key": [b"k"], "value": [b"0"]}))
    store = MemoryStore.open(Path("timers"))
    store.write(engine.local_changes(), index=True)
    again = engine_of(
        Engine, Touchy(), store, partition=3, batch=2, now_ms=5000,
        on_error="dead-letter", dead_letter_topic="failed",
    )  # fmt: skip
    again.start()
    ((count, first),) = again.causes.values()
    assert count == 1
    assert first.startswith("timer 't' (processing time 1001) of t-3, key b'k': LookupError: timer of k (raised in ")
    assert again.counts["aside"] == 1


def test_a_processor_whose_timers_yield_no_records_is_wrong_itself() -> None:
    class Wrong(Touchy):
        def on_timer(self, key: Any, timer: Any, state: Any) -> Any:
            return ["text"]

    driver = ProcessorDriver(Wrong(), on_error="dead-letter")
    driver.send("k", "0")
    with pytest.raises(ProcessorError, match="expected Records, got"):
        driver.advance(2)


def test_a_failing_timer_fails_the_batch_without_dead_letters() -> None:
    driver = ProcessorDriver(Touchy())
    driver.send("k", "0")
    with pytest.raises(ProcessorError, match="LookupError: timer of k") as raised:
        driver.advance(2)
    assert "timer 't' (processing time 1001), key b'k'" in raised.value.detail
    assert len(driver.timers) == 1


def test_keys_that_state_cannot_have() -> None:
    driver = ProcessorDriver(Touchy(), on_error="dead-letter")
    driver.send_many([("k" * 100_000, "1"), (None, "2"), ("k", "3"), ("", "5"), ("\0" * 3000, "6")])
    assert sorted(record.value for record in driver.outputs) == ["1", "3", "5", "6"]
    assert [causes(each)["message"] for each in driver.dead_letters] == [
        "the record has no key: state is kept by key",
    ]
    with pytest.raises(ProcessorError, match="no key"):
        ProcessorDriver(Touchy()).send(None, "1")


def test_bytes_that_the_serdes_cannot_decode() -> None:
    class Strict(Processor):
        key, value = STRING, JSON

        def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
            yield Record(key, str([record.value for record in records]).encode())

    driver = ProcessorDriver(Strict(), on_error="dead-letter")
    yielded = driver.send_many([("a", b"1"), ("a", b"{"), (b"\xff", b"2"), (b"\xff", b"3"), ("b", None), ("a", b"4")])
    assert yielded == [Record("a", b"[1, 4]"), Record("b", b"[None]")]
    assert sorted((each.key, each.value) for each in driver.dead_letters) == [
        (b"a", b"{"),
        (b"\xff", b"2"),
        (b"\xff", b"3"),
    ]
    told = {each.value: causes(each) for each in driver.dead_letters}
    assert told[b"{"]["class"] == "JSONDecodeError"
    assert re.fullmatch(
        r"the value of the record is not JSON: .* line 1 column 2 .*; it is b'{'", told[b"{"]["message"]
    )
    assert told[b"2"]["class"] == "UnicodeDecodeError"
    assert told[b"2"]["message"].startswith("the key of the record is not text in UTF-8: ")
    with pytest.raises(ProcessorError, match="processed: the value of the record is not JSON: ") as raised:
        ProcessorDriver(Strict()).send("a", b"x" * 100_000)
    assert "b'xxx" in raised.value.what
    assert raised.value.what.endswith("xxx'... (100000 bytes)")
    assert raised.value.detail == "offset 0, key b'a', table table-0"  # no line: none of the user's code has run
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    "yielded, match",
    [
        (Record(b"k", b"v"), "got one Record"),
        ([b"bytes"], "expected Records, got bytes"),
        ([None], "expected Records, got NoneType"),
        (7, "expected Records, got int: 7"),
        ({"a": 1}, "expected Records, got dict: {'a': 1}"),
        ([Record(b"k", "text")], "the value you yielded is str, output serde BYTES takes bytes; got 'text'"),
        ([Record(7, b"v")], "the key you yielded is int, key serde BYTES takes bytes; got 7; .* key = STRING or JSON"),
        ([Record(b"k", b"v", topic=b"topic")], "topic is text"),
        ([Record(b"k", b"v", timestamp_ms=1.5)], "timestamp_ms is a 64-bit integer"),
        ([Record(b"k", b"v", timestamp_ms=1 << 63)], "timestamp_ms is a 64-bit integer"),
        ([Record(b"k", b"v", headers=[(b"h", b"x")])], "header's name is text"),
        ([Record(b"k", b"v", headers=[("h", 1)])], "header h is bytes"),
        ([Record(b"k", b"v", headers=[{"key": "h", "value": b"1"}])], "a header is a pair of name and content"),  # type: ignore[list-item]
        ([Record(b"k", b"v", topic="t", headers=["ab"])], "a header is a pair of name and content"),  # type: ignore[list-item]
        ([Record(b"k", b"v", headers=[("h", b"1", 2)])], "a header is a pair of name and content"),  # type: ignore[list-item]
        (
            [Record(b"k", b"v", headers=[("\u00e4\ud835", b"1")])],
            r"header's name is not text in UTF-8: .*got '\\xe4\\ud835'",
        ),
        ([Record(b"k", b"v", topic="\udcff")], "topic is not text in UTF-8: 'utf-8' codec can't encode"),
        (
            [Record(b"k", b"v"), Record(b"k", object())],
            "the value you yielded is object, output serde BYTES takes bytes",
        ),
    ],
)
def test_what_must_not_be_yielded(yielded: Any, match: str) -> None:
    class Yields(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            state.put(b"changed")
            return yielded

    with pytest.raises(ProcessorError, match=match) as raised:
        ProcessorDriver(Yields()).send(b"k", b"v")
    line = Yields.process.__code__.co_firstlineno
    assert raised.value.detail.endswith(f", returned by Yields.process, test_processor_errors.py:{line}")
    driver = ProcessorDriver(Yields(), on_error="dead-letter")
    if "one Record" in match or "expected Records" in match:
        # Not the record's fault: else all of them would be dead letters.
        with pytest.raises(ProcessorError, match=match) as raised:
            driver.send_many([(b"k", b"v"), (b"k", b"w")])
        assert raised.value.detail.endswith(f"returned by Yields.process, test_processor_errors.py:{line}")
        return
    assert driver.send_many([(b"k", b"v"), (b"k", b"w")]) == []
    assert len(driver.dead_letters) == 2
    assert driver.state(b"k") is None


def test_a_serde_that_does_not_give_bytes() -> None:
    class Odd(Processor):
        output = Serde(str, str)

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            yield Record(key, 1)

    with pytest.raises(ProcessorError, match="returned str, not bytes"):
        ProcessorDriver(Odd()).send(b"k", b"v")


def test_records_that_only_fail_together() -> None:
    class Together(Processor):
        key = value = output = STRING

        def process(self, key: str, records: Any, state: Any) -> Any:
            if len(records) > 1:
                raise RuntimeError("too many")
            yield Record(key, records[0].value)

    with pytest.raises(ProcessorError, match="too many") as raised:
        ProcessorDriver(Together()).send_many([("k", "1"), ("k", "2")])
    assert "offsets 0 to 1, key b'k'; each record alone succeeds" in raised.value.detail
    driver = ProcessorDriver(Together(), on_error="dead-letter")
    assert [each.value for each in driver.send_many([("k", "1"), ("k", "2")])] == ["1", "2"]
    assert driver.dead_letters == []


def test_values_that_the_failing_call_changed_are_decoded_again() -> None:
    class Pops(Processor):
        value = output = JSON

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            for record in records:
                yield Record(key, record.value.pop())

    driver = ProcessorDriver(Pops(), on_error="dead-letter")
    assert [each.value for each in driver.send_many([(b"k", [1]), (b"k", []), (b"k", [2])])] == [1, 2]


def test_open_and_close_and_event_time_that_fail() -> None:
    class Fails(Processor):
        allowed_lateness = "1 s"
        where = ""

        def open(self, partition: int) -> None:
            self.check("open")

        def event_time(self, record: Record) -> Any:
            self.check(str(record.value))
            return "noon" if record.value == b"noon" else None

        def process(self, key: bytes, records: Any, state: Any) -> None:
            pass

        def close(self) -> None:
            self.check("close")

        def check(self, where: str) -> None:
            if where == self.where:
                raise OSError(where)

    for where in ("open", "close"):
        processor = Fails()
        processor.where = where
        with pytest.raises(ProcessorError, match=rf"Fails\.{where}\(\) failed: OSError: {where}"):
            ProcessorDriver(processor, on_error="dead-letter").run()
    driver = ProcessorDriver(processor := Fails(), on_error="dead-letter")
    processor.where = "b'bad'"
    driver.send_many([(b"k", b"bad"), (b"k", b"noon"), (b"k", b"fine")])
    assert [(each.value, causes(each)["class"]) for each in driver.dead_letters] == [
        (b"bad", "OSError"),
        (b"noon", "TypeError"),
    ]
    assert driver.watermark_ms is None


def test_clean_up_of_a_failed_call_is_taken_back_too() -> None:
    class CleansUp(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            try:
                yield Record(key, b"good")
                yield Record(key, object() if key == b"bad" else b"good")
            finally:
                state.put(b"cleaned up")
                if key == b"bad":
                    raise OSError("clean-up")

    driver = ProcessorDriver(CleansUp(), on_error="dead-letter")
    driver.send_many([(b"bad", b"1"), (b"bad", b"2"), (b"good", b"3")])
    assert driver.states == {b"good": b"cleaned up"}
    assert len(driver.dead_letters) == 2


@pytest.mark.parametrize("column_wise", [False, True])
def test_a_damaged_store_is_not_the_fault_of_a_record(column_wise: bool, tmp_path: Path) -> None:
    class Damaged(MemoryStore):
        def get(self, key: bytes) -> Any:
            raise StoreCorruptError("damaged")

        def get_many(self, keys: Any) -> Any:
            if keys == [segments.LIST]:
                return [None]  # what a write asks for
            raise StoreCorruptError("damaged")

    class Counts(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            state.get()

        def on_timer(self, key: bytes, timer: Any, state: Any) -> Any:
            state.get()

    kind: Any = ColumnEngine if column_wise else Engine
    store = Damaged.open(tmp_path)
    letters_to = {"on_error": "dead-letter", "dead_letter_topic": "dead"}
    engine = engine_of(kind, ColumnProcessor() if column_wise else Counts(), store, now_ms=9, **letters_to)
    with pytest.raises(StoreCorruptError):
        engine.feed(pa.record_batch({"key": pa.array([b"a", b"a"]), "value": pa.array([b"1", b"2"])}))
    store.write([(rows.timer_key(b"a", b"t"), rows.pack(rows.timer_payload(b"p", 1)))], index=True)
    if not column_wise:
        with pytest.raises(StoreCorruptError):
            engine.start()
    MemoryStore.remove(tmp_path)


def test_letters_have_short_messages_and_only_known_places() -> None:
    letter = dead_letters.dead_letter(Record(b"k", b"v"), "dead", ValueError("x" * 5000 + "\ud800"))
    assert letter.topic == "dead"
    assert set(causes(letter)) == {"class", "message"}
    assert causes(letter)["message"] == "x" * 1000
    assert dead_letters.dead_letter(Record(), "dead", ValueError("\ud800")).headers[1] == (
        "onceflow.error.message",
        b"?",
    )  # type: ignore[index]


def test_a_letter_of_a_letter_counts_on_and_remembers_where_it_came_from_first() -> None:
    record = Record(b"k", b"v", "orders", [("mine", b"1"), ("mine", b"2")], 9, 3, 12)
    first = dead_letters.dead_letter(record, "dead", ValueError("one"))
    read = Record(b"k", b"v", "retry", first.headers, 10, 0, 5)
    second = dead_letters.dead_letter(read, "dead", KeyError("two"))
    told = dict(second.headers)
    assert len(second.headers) == len(told) + 1  # `mine` is there twice, as it was
    assert second.headers[:2] == (("mine", b"1"), ("mine", b"2"))
    assert (told[dead_letters.ERROR_CLASS], told[dead_letters.ATTEMPT]) == (b"KeyError", b"2")
    assert [
        told[name] for name in (dead_letters.ERROR_TOPIC, dead_letters.ERROR_PARTITION, dead_letters.ERROR_OFFSET)
    ] == [
        b"retry",
        b"0",
        b"5",
    ]
    assert [
        told[name] for name in (dead_letters.ORIGIN_TOPIC, dead_letters.ORIGIN_PARTITION, dead_letters.ORIGIN_OFFSET)
    ] == [
        b"orders",
        b"3",
        b"12",
    ]
    late = dead_letters.late_record(read, "late", 1, 2)
    assert dead_letters.ERROR_STACK not in dict(late.headers)
    assert dead_letters.attempts(late) == 1  # being late is no attempt


@pytest.mark.parametrize("told", [b"", b"x", b"-1", None, b"1" * 30])
def test_a_header_that_is_no_number_of_attempts_counts_for_nothing(told: bytes | None) -> None:
    assert dead_letters.attempts(Record(headers=[(dead_letters.ATTEMPT, told)])) == 0


def test_a_long_stack_is_cut_at_its_outer_end() -> None:
    def even(depth: int) -> None:  # two of them: lines that repeat are shown once
        odd(depth - 1)

    def odd(depth: int) -> None:
        if depth < 0:
            raise ValueError("the bottom")
        even(depth - 1)

    with pytest.raises(ValueError, match="the bottom") as caught:
        even(200)
    stack = dict(dead_letters.dead_letter(Record(), "dead", caught.value).headers)[dead_letters.ERROR_STACK] or b""
    assert len(stack) <= 2000
    assert stack.endswith(b"ValueError: the bottom")


def test_a_long_message_does_not_push_the_places_out_of_the_stack() -> None:
    with pytest.raises(ValueError, match="xxx") as caught:
        raise ValueError("x" * 5000)
    stack = (
        dict(dead_letters.dead_letter(Record(), "dead", caught.value).headers)[dead_letters.ERROR_STACK] or b""
    ).decode()
    assert len(stack) <= 2000
    assert 'raise ValueError("x" * 5000)' in stack
    assert "\nValueError: xxx" in stack


def test_a_negative_timestamp_is_not_written_again() -> None:
    """Some clients may write it, and Kafka takes it; a letter that nobody may write would stop the flow for ever."""
    assert dead_letters.dead_letter(Record(timestamp_ms=-2), "dead", ValueError()).timestamp_ms is None
    assert dead_letters.dead_letter(Record(timestamp_ms=0), "dead", ValueError()).timestamp_ms == 0


def test_options_that_lead_nowhere() -> None:
    for options in ({"on_error": "skip"}, {"on_error": "dead-letter"}):
        with pytest.raises(OptionError):
            engine_of(Engine, Processor(), None, **options)


def test_a_processor_that_defines_nothing() -> None:
    with pytest.raises(ProcessorError, match=r"Processor does not define process\(\)"):
        ProcessorDriver(Processor()).send(b"k", b"v")


def test_state_that_cannot_be_decoded_is_no_dead_letter() -> None:
    """Else one changed serde would divert every record of the keys that have state."""

    class Texts(Processor):
        state = STRING

        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.put("text")

    class Numbers(Texts):
        state = JSON

        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.get()

    driver = ProcessorDriver(Texts(), on_error="dead-letter")
    driver.send(b"k", b"x")
    driver.processor = Numbers()
    with pytest.raises(ProcessorError, match=r"(?s)cannot be decoded as the processor declares it.*define migrate"):
        driver.send(b"k", b"x")
    assert driver.dead_letters == []

"""What errors say of the user's side: which serde did not take what, and which line of the user's code it came from."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.errors import BadRecordError, ProcessorError
from onceflow.protocol.names import OwnTopics
from onceflow.state.api import user_errors
from onceflow.state.api.json_columns import parse_json
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, DOUBLE, JSON, LONG, STRING, Serde, struct
from onceflow.state.engine import dead_letters
from onceflow.testing.processor_driver import ProcessorDriver

HERE = Path(__file__)


def line(mark: str) -> str:
    """``test_user_errors.py:12`` of the line that ends with this mark."""
    (number,) = [i for i, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    return f"{HERE.name}:{number}"


def failure(processor: Any, value: bytes = b"v") -> ProcessorError:
    """Of a batch with one record."""
    with pytest.raises(ProcessorError) as raised:
        ProcessorDriver(processor).send(b"k", value)
    return raised.value


def letter(processor: Any, value: bytes = b"v") -> dict[str, str]:
    """The headers of the dead letter of one record, but for the stack."""
    driver = ProcessorDriver(processor, on_error="dead-letter")
    driver.send(b"k", value)
    (found,) = driver.dead_letters
    return {name: (content or b"").decode() for name, content in found.headers}


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


# ---- serdes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "serde, given, told",
    [
        (STRING, 7, " is int, output serde STRING takes str; got 7"),
        (LONG, "x", " is str, output serde LONG takes int; got 'x'"),
        (LONG, 1 << 63, " cannot be encoded by output serde LONG: 9223372036854775808 is not a 64-bit integer: "),
        (DOUBLE, "x", " is str, output serde DOUBLE takes float; got 'x'"),
        (JSON, {1}, " is set, output serde JSON takes what JSON has (dict, list, str, int, float, bool); got {1}"),
        (JSON, {"a": {1}}, " cannot be encoded by output serde JSON: Type is not JSON serializable: set; got {'a': {"),
        (struct(n="int64"), [1], " is list, output serde struct(n=int64) takes a dict; got [1]"),
        (struct(n="int64"), {"m": 1}, " cannot be encoded by output serde struct(n=int64): ValueError: unknown fields"),
        (Serde(json.dumps, json.loads), 1, " cannot be encoded by output serde custom: TypeError: "),  # type: ignore[arg-type]
        (
            BYTES,
            Unspeakable(),
            " is Unspeakable, output serde BYTES takes bytes; got <Unspeakable>; declare another serde, for example ",
        ),
        (STRING, ["x" * 5000], " is list, output serde STRING takes str; got ['xxx"),
        (JSON, {"x" * 5000: {1}}, " cannot be encoded by output serde JSON: "),
    ],
)
def test_what_a_serde_does_not_take(serde: Any, given: Any, told: str) -> None:
    class Gives(Processor):
        output = serde

        def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
            yield Record(key, given)

    error = failure(Gives())
    assert f"processed: the value you yielded{told}" in error.what
    assert len(error.what) < 600


PLACES = {
    "key": "the key you yielded is int, key serde STRING takes str; got 7",
    "value": "the value you yielded is int, output serde STRING takes str; got 7",
    "put": "the value of state.put() is int, state serde STRING takes str; got 7",
    "range": "a bound of state.range() is int, key serde STRING takes str; got 7",
    "map": "the value put into map 'm' is int, state serde STRING takes str; got 7",
    "own map": "the value put into map 'm' is str, its serde LONG takes int; got '7'",
    "map key": "the key for map 'm' is int, its serde STRING takes str; got 7",
    "list": "the value put into list 'l' is int, state serde STRING takes str; got 7",
}


@pytest.mark.parametrize("where", PLACES)
def test_where_it_was_given(where: str) -> None:
    """User code that handles the error gets it as it was."""
    handled = []

    class Gives(Processor):
        key = state = output = STRING

        def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
            try:
                self.give(state)
            except (TypeError, ValueError) as error:
                handled.append(str(error))
                raise
            yield Record(7, "") if where == "key" else Record("", 7)

        def give(self, state: Any) -> None:
            match where:
                case "put":
                    state.put(7)
                case "range":
                    state.range(7)
                case "map":
                    state.map("m").put("entry", 7)
                case "own map":
                    state.map("m", value=LONG).put("entry", "7")
                case "map key":
                    state.map("m", key=STRING).put(7, "")
                case "list":
                    state.list("l").append(7)

    told = letter(Gives())
    assert told["onceflow.error.message"] == PLACES[where]
    assert told["onceflow.error.class"] == ("ValueError" if where == "own map" else "TypeError")
    assert set(handled) <= {"expected str, got int", "'7' is not a 64-bit integer: required argument is not an integer"}
    error = failure(Gives())
    assert f"processed: {PLACES[where]} [" in str(error)
    assert f" in {'process' if where in ('key', 'value') else 'give'}, {HERE.name}:" in error.detail


@pytest.mark.parametrize(
    "serde, raw, told",
    [
        (
            JSON,
            b"{",
            "the value of the record is not JSON: unexpected end of data: line 1 column 2 (char 1); it is b'{'",
        ),
        (STRING, b"\xff", "the value of the record is not text in UTF-8: "),
        (LONG, b"1", "the value of the record is not a LONG: a 64-bit integer has 8 bytes, got 1; it is b'1'"),
        (DOUBLE, b"1", "the value of the record is not a DOUBLE: a double has 8 bytes, got 1; it is b'1'"),
        (
            struct(n="int64"),
            b"1",
            "the value of the record cannot be decoded by serde struct(n=int64): ValueError: 1 bytes are not",
        ),
        (
            Serde(json.dumps, json.loads, "lines"),  # type: ignore[arg-type]
            b"x",
            "the value of the record cannot be decoded by serde lines: JSONDecodeError: Expecting value: line 1",
        ),
    ],
)
def test_what_a_serde_cannot_decode(serde: Any, raw: bytes, told: str) -> None:
    class Reads(Processor):
        value = serde

        def process(self, key: bytes, records: Any, state: Any) -> None:
            pass

    error = failure(Reads(), raw)
    assert f"processed: {told}" in error.what
    assert error.detail == "offset 0, key b'k', table table-0"  # no line: none of the user's has run
    assert letter(Reads(), raw)["onceflow.error.message"].startswith(told)


def test_a_timer_whose_key_the_serde_cannot_decode() -> None:
    class Timed(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.timers.register("t", 10, "processing")

        def on_timer(self, key: bytes, timer: Any, state: Any) -> None: ...

    driver = ProcessorDriver(Timed())
    driver.send(b"k")
    driver.processor.key = LONG  # type: ignore[union-attr]
    with pytest.raises(ProcessorError, match="the key of a timer is not a LONG: "):
        driver.advance(1)


def test_json_that_a_column_processor_cannot_read() -> None:
    class Amounts(ColumnProcessor):
        def process(self, records: Any, states: Any, context: Any) -> None:
            parse_json(records["value"], pa.schema([("amount", pa.int64())]))  # parsed

    driver = ProcessorDriver(Amounts(), on_error="dead-letter")
    values = (b'{"amount":1}', b'{"amount":"1"}', b"x" * 5000, b'{"amount":2}')
    driver.send_many([(b"k", value) for value in values])
    found = [dict(each.headers)["onceflow.error.message"] or b"" for each in driver.dead_letters]
    begin = b"the value of the record is not JSON with the fields that parse_json reads: "
    assert found[0] == begin + b'Column(/amount) changed from number to string; it is b\'{"amount":"1"}\''
    assert found[1].startswith(begin + b"unexpected character")
    assert len(found[1]) < 400
    assert f"raised in process, {line('parsed')}" in failure(Amounts(), b"x").detail


# ---- lines -------------------------------------------------------------------------------------------


def bad_lambda() -> Any:
    return lambda record: record.nothing  # lambda


@dataclass(frozen=True)
class Frozen(Exception):
    reason: str


@pytest.mark.parametrize(
    "how, place",
    [
        ("raises", "raised in raises, {raises}"),
        ("stdlib", "raised in stdlib, {stdlib}"),
        ("package", "raised in package, {package}"),
        ("applied", "raised in <lambda>, {lambda}"),
        ("frozen", "raised in frozen, {frozen}"),
        ("yields", "yielded in yields, {yields}"),
        ("delegates", "yielded in yields, {yields}"),
        ("returns", "returned by Service.process, {process}"),
    ],
)
def test_the_line_of_user_code(how: str, place: str) -> None:
    class Service(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:  # process
            return getattr(self, how)(records)

        def raises(self, records: Any) -> None:
            raise KeyError("amount")  # raises

        def stdlib(self, records: Any) -> None:
            json.loads("{")  # stdlib

        def package(self, records: Any) -> None:
            pa.array([1]).take(["x"])  # package

        def applied(self, records: Any) -> Any:
            return map(bad_lambda(), records)

        def frozen(self, records: Any) -> None:
            raise Frozen("ice")  # frozen

        def yields(self, records: Any) -> Iterator[Any]:
            yield Record(b"", b"")
            yield Record(b"", 7)  # yields
            yield Record(b"", b"")

        def delegates(self, records: Any) -> Iterator[Any]:
            yield from self.yields(records)

        def returns(self, records: Any) -> Any:
            return [Record(b"", 7)]

    marks = ("raises", "stdlib", "package", "lambda", "frozen", "yields", "process")
    wanted = place.format(**{mark: line(mark) for mark in marks})
    assert failure(Service()).detail.endswith(f", {wanted}")
    driver = ProcessorDriver(Service(), on_error="dead-letter")
    driver.send(b"k", b"v")
    stack = (dict(driver.dead_letters[0].headers)[dead_letters.ERROR_STACK] or b"").decode()
    name, number = wanted.partition(" in ")[2].split(", ") if how != "returns" else ("Service.process", line("process"))
    assert f'{HERE.name}", line {number.partition(":")[2]}, in {name}\n' in stack


def test_the_line_of_a_timers_handler_and_of_a_serde() -> None:
    class Timed(Processor):
        output = Serde(lambda value: b"%d" % value, int, "number")  # encode

        def process(self, key: bytes, records: Any, state: Any) -> None:
            state.timers.register("t", 10, "processing")

        def on_timer(self, key: bytes, timer: Any, state: Any) -> Iterator[Record]:
            yield Record(key, "x")  # on_timer

    driver = ProcessorDriver(Timed())
    driver.send(b"k")
    with pytest.raises(ProcessorError, match="encoded by output serde number: TypeError: ") as raised:
        driver.advance(1)
    places = f"raised in <lambda>, {line('encode')}, yielded in on_timer, {line('on_timer')}"
    assert raised.value.detail.endswith(places)


def test_the_line_of_a_record_that_names_a_source() -> None:
    class Loops(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
            yield Record(key, b"", topic="input")  # loops

    driver = ProcessorDriver(Loops(), own_topics=OwnTopics(frozenset({"input"})))
    with pytest.raises(BadRecordError) as raised:
        driver.send_many([Record(b"k", b"v", topic="elsewhere")])
    assert raised.value.detail.endswith(f"table table-0, yielded in process, {line('loops')}")


def test_the_line_of_what_event_time_gives() -> None:
    class Noon(Processor):
        allowed_lateness = "1 s"

        def event_time(self, record: Record) -> Any:  # event_time
            return "noon"

    error = failure(Noon())
    assert "processed: event_time() gives milliseconds since 1970 or None, got 'noon'" in error.what
    assert error.detail.endswith(f"returned by Noon.event_time, {line('event_time')}")


@pytest.mark.parametrize(
    "given, told",
    [
        ((pa.table({"key": [1], "value": ["x"]}), None), "column key has type int64"),
        ({}, "a tuple of outputs and new states is expected, got dict"),
    ],
)
def test_the_method_of_a_column_processor(given: Any, told: str) -> None:
    class Gives(ColumnProcessor):
        def process(self, records: Any, states: Any, context: Any) -> Any:  # columns
            return given

    error = failure(Gives())
    assert told in error.what
    assert error.detail.endswith(f"returned by Gives.process, {line('columns')}")


@pytest.mark.parametrize("name", ["<stdin>", "<string>", "<ipython-input-3-a1b2>", "<python-input-7>"])
def test_cells_and_prompts_are_user_code(name: str) -> None:
    scope: dict[str, Any] = {"Processor": Processor}
    text = "class Cell(Processor):\n    def process(self, key, records, state):\n        records[0].nothing\n"
    exec(compile(text, name, "exec"), scope)  # noqa: S102
    assert failure(scope["Cell"]()).detail.endswith(f"raised in process, {name}:3")


def test_an_installed_service_is_user_code_where_there_is_no_other(tmp_path: Path) -> None:
    """And what it calls of other packages is not."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    files = {
        "service/main.py": "def process(self, key, records, state):\n    return helped(records)\n",
        "service/helper.py": "def helped(records):\n    return loaded(records)\n",
        "library/load.py": "def loaded(records):\n    raise ValueError('no')\n",
    }
    scope: dict[str, Any] = {}
    for name, text in files.items():
        exec(compile(text, str(folder / name), "exec"), scope)  # noqa: S102
    error = failure(type("Installed", (Processor,), {"process": scope["process"]})())
    assert error.detail.endswith("raised in helped, helper.py:2")


def test_an_error_without_any_user_code_keeps_its_line() -> None:
    class Nothing(Processor):
        process = None  # type: ignore[assignment]

    assert re.search(r"raised in _process, record_engine\.py:\d+$", failure(Nothing()).detail)


# ---- bounds ------------------------------------------------------------------------------------------


def test_messages_are_bounded() -> None:
    class Long(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            return ({}["x" * 100_000] for _ in records)

    assert len(failure(Long()).what) < 1200
    assert len(letter(Long())["onceflow.error.message"]) == 1000


def test_an_explained_error_can_be_pickled() -> None:
    error = ValueError("x")
    user_errors.explain(error, "y" * 5000)
    again = pickle.loads(pickle.dumps(error))
    assert user_errors.text_of(again) == user_errors.full_text_of(again)
    assert len(user_errors.text_of(again)) < 1100

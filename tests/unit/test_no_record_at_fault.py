"""What no record has caused stops the flow: it makes no dead letters, although the step has some."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow import ColumnProcessor, Processor, Record, windows
from onceflow.errors import DeadLetterLimitError, ProcessorError
from onceflow.planning.dead_letter_limit import DeadLetters, Letters
from onceflow.state.api.serdes import LONG, STRING, Serde
from onceflow.testing.processor_driver import ProcessorDriver

sys.path.insert(0, str(Path(__file__).parent))
try:
    from text_processor import Text
finally:
    sys.path.pop(0)

RECORDS = [(f"k{n}", str(n)) for n in range(20)]


class Wrong(Exception):
    pass


def stops(driver: ProcessorDriver, match: str, records: Any = RECORDS) -> None:
    """The batch fails; nothing of it is kept, and no record has become a dead letter."""
    before = list(driver.outputs)
    with pytest.raises(ProcessorError, match=match) as caught:
        driver.send_many(records)
    assert "correct the processor or the record" not in caught.value.next_step
    assert driver.dead_letters == []
    assert driver.outputs == before


class Sum(ColumnProcessor):
    """Adds up the values of each key."""

    state_fields = {"total": "int64"}  # noqa: RUF012

    def process(self, records: Any, states: Any, context: Any) -> Any:
        return None, pa.table({"key": states["key"], "total": pa.array([1] * states.num_rows, pa.int64())})


# ---- migrate() ---------------------------------------------------------------------------------------------


def raising(self: Any, payload: bytes, from_version: int, name: str | None = None) -> Any:
    raise Wrong("no such field")


def look(key: str, records: Any, state: Any) -> None:
    state.get()


def look_at_entry(key: str, records: Any, state: Any) -> None:
    state.map("m").get("e")


def look_at_entries(key: str, records: Any, state: Any) -> None:
    list(state.map("m").items())


def look_at_list(key: str, records: Any, state: Any) -> None:
    list(state.list("l"))


def look_around(key: str, records: Any, state: Any) -> None:
    list(state.range())


def look_in_spite(key: str, records: Any, state: Any) -> None:
    try:
        state.get()
    except Exception:
        state.put("other")


def look_late(key: str, records: Any, state: Any) -> Any:
    yield Record(key, "one")
    state.get()


@pytest.mark.parametrize(
    "run", [look, look_at_entry, look_at_entries, look_at_list, look_around, look_in_spite, look_late]
)
def test_a_fault_in_migrate(run: Any) -> None:
    def fill(key: str, records: Any, state: Any) -> None:
        state.put(key)
        state.map("m").put("e", key)
        state.list("l").append(key)

    class Two(Text):
        version = 2
        migrate = raising

    driver = ProcessorDriver(Text(fill), on_error="dead-letter")
    driver.send_many(RECORDS)
    driver.processor = Two(run)
    where = r"table \S+-0" + (r", while key b'\w+' was processed" if run is not look_in_spite else "")
    stops(driver, rf"(?s)migrate\(\) failed for state of version 0.*no such field.*{where}, raised in")
    driver.processor = Text(fill)
    assert driver.state("k3") == "k3"


def test_a_fault_in_migrate_of_a_timer() -> None:
    """The timer is still there after the fault."""

    def register(key: str, records: Any, state: Any) -> None:
        state.put(1)
        state.timers.register("t", 1_000, clock="processing")

    class Two(Text):
        version = 2
        migrate = raising

    def fire(key: str, timer: Any, state: Any) -> Any:
        yield Record(key, str(state.get()))

    driver = ProcessorDriver(Text(register, fire), on_error="dead-letter")
    driver.send("k", "")
    driver.processor = Two(None, fire)
    with pytest.raises(ProcessorError, match=r"(?s)migrate\(\) failed.*-0, while key b'k' was processed"):
        driver.advance(5)
    assert driver.dead_letters == []
    driver.processor = Text(None, fire)
    driver.advance(5)
    assert driver.outputs == [Record("k", "1", timestamp_ms=driver.outputs[0].timestamp_ms)]


@pytest.mark.parametrize("given", [None, {"total": "no number"}, {"other": 1}, 17, b"bytes"])
def test_a_fault_in_migrate_of_columns(given: Any) -> None:
    def migrate(self: Any, payload: bytes, from_version: int) -> Any:
        if given is None:
            raise Wrong("no such field")
        return given

    driver = ProcessorDriver(Sum(), on_error="dead-letter")
    driver.send_many([(key.encode(), b"1") for key, _ in RECORDS])
    driver.processor = type("Two", (Sum,), {"version": 2, "migrate": migrate})()
    told = r"(?s)migrate\(\) failed for state of version 0.*table \S+-0, while key b'\w+' was processed"
    stops(driver, told, [(key.encode(), b"1") for key, _ in RECORDS])


# ---- serdes of records -------------------------------------------------------------------------------------


class Textless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, KeyError, Textless, OverflowError], ids=repr)
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_whatever_a_serde_raises(error: type[Exception], what: str, *, nulls: bool, windowed: bool) -> None:
    """Each record is in an output or in a letter. A StopIteration ends map() of Python in silence."""

    def decode(raw: bytes) -> str:
        if raw == b"bad":
            raise error
        return raw.decode()

    class Passing(Text):
        pass

    class Counted(windows.WindowProcessor):
        window = windows.Tumbling("1 minute")
        emit = "update"
        aggregates = {"n": windows.Count()}  # noqa: RUF012

    def passing(key: str, records: Any, state: Any) -> Any:
        yield from (Record(key, "one") for _ in records)

    processor: Any = Counted() if windowed else Passing(passing)
    setattr(type(processor), what, Serde(str.encode, decode))
    sent = [Record(b"k%d" % n, b"v%d" % n, timestamp_ms=1_000) for n in range(10)]
    bad = Record(b"bad", b"v", timestamp_ms=1_000) if what == "key" else Record(b"k", b"bad", timestamp_ms=1_000)
    sent[3] = bad
    if nulls:
        sent[7] = Record(b"k7", None, timestamp_ms=1_000)
    driver = ProcessorDriver(processor, on_error="dead-letter")
    driver.send_many(sent)
    assert len(driver.outputs) == 9
    assert [letter.value for letter in driver.dead_letters] == [bad.value]
    with pytest.raises(ProcessorError, match=error.__name__):
        ProcessorDriver(type(processor)() if windowed else Passing(passing)).send_many(sent)


# ---- serdes of what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Textless, StopIteration, Wrong])
def test_state_that_its_serde_does_not_decode(error: type[Exception]) -> None:
    class Other(Text):
        state = Serde(str.encode, lambda raw: (_ for _ in ()).throw(error))

    driver = ProcessorDriver(Text(lambda key, records, state: state.put(key)), on_error="dead-letter")
    driver.send_many(RECORDS)
    driver.processor = Other(look)
    stops(driver, "(?s)the state cannot be decoded as the processor declares it.*raise `version`")


def test_keys_that_another_serde_has_written() -> None:
    class Numbers(Text):
        key = LONG

    driver = ProcessorDriver(Text(lambda key, records, state: state.put(1)), on_error="dead-letter")
    driver.send_many(RECORDS)
    driver.processor = Numbers(look_around)
    stops(driver, "a stored key is not a LONG", [(5, "1")])

    def entries(serde: Any, put: Any) -> Any:
        def run(key: str, records: Any, state: Any) -> None:
            entries = state.map("m", key=serde)
            put(entries)

        return run

    driver = ProcessorDriver(Text(entries(STRING, lambda m: m.put("abc", 1))), on_error="dead-letter")
    driver.send("k", "")
    driver.processor = Text(entries(LONG, lambda m: list(m.items())))
    stops(driver, "a key of map 'm' is not a LONG", [("k", "1")])


def test_the_key_of_a_timer_that_another_serde_has_written() -> None:
    class Numbers(Text):
        key = LONG

    def register(key: str, records: Any, state: Any) -> None:
        state.timers.register("t", 1_000, clock="processing")

    driver = ProcessorDriver(Text(register), on_error="dead-letter")
    driver.send("abc", "")
    driver.processor = Numbers()
    with pytest.raises(ProcessorError, match="the key of a timer is not a LONG"):
        driver.advance(5)
    assert driver.dead_letters == []


# ---- windows -----------------------------------------------------------------------------------------------


class Sums(windows.WindowProcessor):
    """Adds up values, without ready aggregates."""

    value, window = LONG, windows.Tumbling("1 minute")

    def initial(self) -> Any:
        return 0

    def add(self, accumulator: Any, record: Record) -> Any:
        return accumulator + record.value

    def merge(self, left: Any, right: Any) -> Any:
        return left + right

    def result(self, key: Any, window: Any, accumulator: Any) -> Record:
        return Record(key, accumulator)


class Unmade(Sums):
    def initial(self) -> Any:
        raise Wrong("no start")


class Forgetful(Sums):
    def add(self, accumulator: Any, record: Record) -> Any:
        accumulator += record.value


class Broken(windows.Sum):
    def initial(self) -> Any:
        raise Wrong("no start")


class OfBroken(windows.WindowProcessor):
    value, window, aggregates = LONG, windows.Tumbling("1 minute"), {"n": Broken("n")}


class TooFew(windows.WindowProcessor):
    value, window = LONG, windows.Tumbling("1 minute")
    aggregates = {"n": windows.Count(), "m": windows.Count()}  # noqa: RUF012

    def initial(self) -> Any:
        return [0]


class Nothing(TooFew):
    def initial(self) -> Any:
        return None


@pytest.mark.parametrize(
    "kind", [windows.Tumbling("1 minute"), windows.Session("1 minute"), windows.Sliding("1 minute")]
)
@pytest.mark.parametrize(
    "given, told",
    [
        (Unmade, r"Unmade.initial\(\) failed: Wrong: no start"),
        (OfBroken, r"OfBroken.initial\(\) failed: Wrong: no start"),
        (TooFew, r"TooFew.initial\(\) failed: .*it gives 1 parts, there are 2 aggregates"),
        (Nothing, r"Nothing.initial\(\) failed"),
        (Forgetful, r"(?s)Forgetful.add\(\) has returned None.*table \S+-0, while key b'k\d' was processed"),
    ],
)
def test_faults_of_windows(given: type[windows.WindowProcessor], told: str, kind: Any) -> None:
    processor = type(given.__name__, (given,), {"window": kind})()
    driver = ProcessorDriver(processor, on_error="dead-letter")
    stops(driver, told, [Record(b"k%d" % n, n.to_bytes(8, "big"), timestamp_ms=1_000) for n in range(5)])


# ---- what may be the fault of a record, but not of all -------------------------------------------------------


class Untimed(Sums):
    def event_time(self, record: Record) -> Any:
        return None


@pytest.mark.parametrize(
    "columns",
    [
        {"total": pa.array(["1"])},
        {"total": pa.array([True])},
        {"total": pa.array([1], pa.timestamp("ms"))},
        {"value": pa.array([1])},
        {"value": pa.array([[b"1"]])},
        {"value": pa.array([b"1"]), "headers": pa.array(["h"])},
        {"value": pa.array([b"1"]), "timestamp_ms": pa.array([[1]])},
    ],
    ids=lambda columns: " ".join(f"{name} {array.type}" for name, array in columns.items()),
)
def test_columns_of_a_wrong_type(columns: dict[str, Any]) -> None:
    """Their types follow from values, which records may have brought. If no record gets through, the flow stops."""

    class Typed(Sum):
        def process(self, records: Any, states: Any, context: Any) -> Any:
            many = {name: pa.concat_arrays([column] * states.num_rows) for name, column in columns.items()}
            table = pa.table({"key": states["key"], **many})
            return (None, table) if "total" in columns else (table, None)

    driver = ProcessorDriver(Typed(), on_error="dead-letter")
    driver.send_many([(key.encode(), b"1") for key, _ in RECORDS])
    ((cause, (count, _)),) = driver.causes.items()
    assert count == len(RECORDS)
    all_bad(cause, "the check of the column types that process() returns")


def test_windows_whose_records_have_no_time() -> None:
    driver = ProcessorDriver(Untimed(), on_error="dead-letter")
    driver.send_many([(key.encode(), int(value).to_bytes(8, "big")) for key, value in RECORDS])
    ((cause, (count, _)),) = driver.causes.items()
    assert count == len(RECORDS)
    all_bad(cause, "event_time()")


def all_bad(cause: str, hook: str) -> None:
    """A run in which this is the cause of all dead letters stops."""
    run = DeadLetters("f", "letters", None, "table t")
    run.check(Letters(200, 199, {cause: (199, "")}))
    with pytest.raises(DeadLetterLimitError, match=re.escape(f"{hook} has failed for each of the 200 records")):
        run.check(Letters(200, 200, {cause: (200, "")}))


# ---- timers ------------------------------------------------------------------------------------------------


def without_on_timer(run: Any = None) -> Any:
    class Without(Processor):
        key = value = output = STRING

        def process(self, key: str, records: Any, state: Any) -> Any:
            return run and run(key, records, state)

    return Without()


def test_a_timer_without_on_timer() -> None:
    def register(key: str, records: Any, state: Any) -> None:
        state.timers.register("t", 1_000, clock="processing")

    driver = ProcessorDriver(without_on_timer(register), on_error="dead-letter")
    stops(driver, r"does not define on_timer\(\)")
    driver = ProcessorDriver(Text(register), on_error="dead-letter")
    driver.send("k", "")
    driver.processor = without_on_timer()  # of an earlier version of the code
    with pytest.raises(ProcessorError, match=r"does not define on_timer\(\)"):
        driver.advance(5)
    assert driver.dead_letters == []


# ---- results of column processors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result, match",
    [
        (lambda states: states, "a tuple of outputs and new states is expected, got Table"),
        (lambda states: (None, None, None), "a tuple"),
        (lambda states: ([1], None), "outputs are a table"),
        (lambda states: (None, "x"), "new states are a table"),
        (lambda states: (pa.table({"key": ["a"]}), None), "outputs have the columns"),
        (lambda states: (pa.table({"value": ["a"], "valu": ["a"]}), None), "outputs have the columns"),
        (lambda states: (None, states.select(["key"])), "new states have columns"),
        (lambda states: (None, states.append_column("more", states["total"])), "new states have columns"),
    ],
)
def test_results_that_have_not_the_form_of_results(result: Any, match: str) -> None:
    class Odd(Sum):
        def process(self, records: Any, states: Any, context: Any) -> Any:
            return result(states)

    driver = ProcessorDriver(Odd(), on_error="dead-letter")
    stops(driver, rf"process\(\) has returned what cannot be used: {match}", [(b"a", b"1"), (b"b", b"2")])


def test_event_times_of_another_number() -> None:
    class Odd(Sum):
        allowed_lateness = "1 minute"

        def event_time(self, records: Any) -> Any:
            return pa.array([1, 2, 3])

    driver = ProcessorDriver(Odd(), on_error="dead-letter")
    stops(
        driver, r"event_time\(\) has returned what cannot be used: 2 times are expected", [(b"a", b"1"), (b"b", b"2")]
    )

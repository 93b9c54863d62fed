"""Times of records that are unknown, far ahead, or cannot be expressed: in every engine, none is lost, none moves the
watermark, and none comes out as another time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow import ColumnProcessor, Processor, Record, serdes, windows
from onceflow.errors import OptionError, ProcessorError
from onceflow.planning.deduplicate import DedupOptions, check_deduplication
from onceflow.planning.process import StepOptions, check_options
from onceflow.protocol.timestamps import LATEST_MS, known_ms
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.engine.dedup_engine import DedupEngine
from onceflow.state.engine.input_batch import milliseconds
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.testing.engines import engine_of

NOW = 1_795_000_000_000
DAY = 86_400_000
ODD = [None, -1, -(2**63), NOW + DAY + 1, 4_070_908_800_000, NOW * 1000, NOW * 1_000_000, LATEST_MS, 2**63 - 1]
TIMES = st.one_of(st.sampled_from(ODD), st.integers(NOW - 3 * DAY, NOW + DAY))


class ByTimestamp(Processor):
    """Passes records on as they are."""

    allowed_lateness = "1 day"

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
        assert all(record.timestamp_ms is None or 0 <= record.timestamp_ms <= NOW + DAY for record in records)
        yield from records


class ByValue(ByTimestamp):
    value = output = serdes.JSON

    def event_time(self, record: Record) -> int | None:
        found: int | None = record.value["at"]
        return found

    def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
        for record in records:
            yield Record(key, record.value, timestamp_ms=None)


class Columns(ColumnProcessor):
    allowed_lateness = "1 day"

    def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
        return records.select(["key", "value", "timestamp_ms"]), None


class Windowed(windows.WindowProcessor):
    key = value = serdes.STRING
    window = windows.Tumbling("1 minute")
    allowed_lateness = "1 day"
    emit = "update"
    aggregates = MappingProxyType({"count": windows.Count()})


def driver(processor: Any, **options: Any) -> ProcessorDriver:
    return ProcessorDriver(processor, now_ms=NOW, **{"on_error": "dead-letter", **options})


def is_usable(at: int | None) -> bool:
    return at is None or at <= NOW + DAY


@pytest.mark.parametrize("make", [ByTimestamp, ByValue, Columns])
@settings(deadline=None, max_examples=30)
@given(batches=st.lists(st.lists(TIMES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_record_is_lost_and_none_moves_the_watermark_beyond_the_bound(
    make: type[Any], batches: list[list[int | None]]
) -> None:
    run = driver(make(), partitions=2)
    for batch in batches:
        for n, at in enumerate(batch):
            run.send(
                b"k%d" % (n % 3),
                {"at": at} if make is ByValue else b"%d" % n,
                # An own event time is judged, whatever the timestamp is.
                timestamp_ms=NOW if make is ByValue else -1 if at is None else at,
                run=False,
            )
        run.run()
    sent = [at for batch in batches for at in batch]
    assert len(run.outputs) + len(run.late) + len(run.dead_letters) == len(sent)
    assert len(run.dead_letters) == sum(not is_usable(at) for at in sent)
    known = [at for at in sent if at is not None and 0 <= at <= NOW + DAY]
    if known:
        assert run.watermark_ms is not None
        assert run.watermark_ms <= max(known) - DAY
    else:
        assert run.watermark_ms is None
    for letter in run.dead_letters:
        assert dict(letter.headers)["onceflow.error.class"] == b"FarAheadRecord"
    if make is not ByValue:
        timed = sorted((record.timestamp_ms or -1) for record in [*run.outputs, *run.late])
        assert timed == sorted(-1 if at is None or at < 0 else at for at in sent if is_usable(at))
        assert sorted(letter.timestamp_ms or 0 for letter in run.dead_letters) == sorted(
            known_ms(at) or 0 for at in sent if not is_usable(at)
        )


@pytest.mark.parametrize("emit", ["update", "close"])
def test_windows_are_of_records_with_a_time(emit: Any) -> None:
    processor = Windowed()
    processor.emit = emit
    run = driver(processor)
    for at in [NOW - 60_000, *(at for at in ODD if at is not None), NOW]:
        run.send("a", "x", timestamp_ms=at)
    assert sum(record.value["count"] for record in run.outputs) == (2 if emit == "update" else 0)
    assert run.watermark_ms == NOW - DAY
    assert len(run.dead_letters) == len(ODD) - 1
    causes = [dict(letter.headers)["onceflow.error.class"] for letter in run.dead_letters]
    assert causes.count(b"FarAheadRecord") == len(ODD) - 3
    assert causes.count(b"ValueError") == 2  # those before 1970


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    yield MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)


def dedup(store: Any, **options: Any) -> DedupEngine:
    run = engine_of(
        DedupEngine,
        Deduplication(within_ms=DAY, **options),
        store,
        now_ms=NOW,
        on_error="dead-letter",
        dead_letter_topic="dead",
        source_topic="in",
    )
    run.start()
    return run


def rows(times: list[int | None]) -> pa.RecordBatch:
    count = len(times)
    return pa.record_batch(
        {
            "key": pa.array([b"%d" % n for n in range(count)], pa.binary()),
            "value": pa.array([b"v"] * count, pa.binary()),
            "timestamp": pa.array(times, pa.int64()),
            "partition": pa.array(np.arange(count) % 2, pa.int32()),
        }
    )


@settings(deadline=None, max_examples=30)
@given(times=st.lists(TIMES, min_size=1, max_size=6))
def test_deduplication(times: list[int | None]) -> None:
    folder = Path("/dev/null/dedup-times")
    run = dedup(MemoryStore.open(folder))
    try:
        run.feed(rows(times))
        run.finish()
        made = run.outputs()
        assert made is not None
        assert made.num_rows == len(times)
        good = [n for n, at in enumerate(times) if at is not None and 0 <= at <= NOW + DAY]
        passed = made.filter(made["topic"].is_null())
        assert passed["key"].to_pylist() == [b"%d" % n for n in good]
        assert run.counts["dead_letters"] == len(times) - len(good)
        assert {place for _, place in run.max_event_ms} == {n % 2 for n in good}
        assert {place for _, place in run.untimed} == {n % 2 for n, at in enumerate(times) if at is None or at < 0}
        assert all(ms <= NOW + DAY for ms in run.max_event_ms.values())
    finally:
        MemoryStore.remove(folder)


@pytest.mark.parametrize("make", [ByTimestamp, ByValue, Columns])
def test_an_event_in_2099_makes_no_later_one_late(make: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    run = driver(make())
    for at in (NOW, 4_070_908_800_000, NOW + 1000, NOW + 2000):
        run.send(b"k", {"at": at} if make is ByValue else b"v", timestamp_ms=NOW if make is ByValue else at)
    assert (len(run.outputs), len(run.dead_letters), len(run.late)) == (3, 1, 0)
    assert run.watermark_ms == NOW + 2000 - DAY
    message = (dict(run.dead_letters[0].headers)["onceflow.error.message"] or b"").decode()
    assert "event time 4070908800000 (2099-01-01T00:00:00+00:00) is ahead of the clock (2026-" in message
    with pytest.raises(ProcessorError, match="event time 4070908800000") as raised:
        driver(make(), on_error="fail").send(
            b"k", {"at": 4_070_908_800_000} if make is ByValue else b"v", timestamp_ms=4_070_908_800_000
        )
    assert "max_ahead" in raised.value.next_step


def test_the_bound_is_that_of_the_processor() -> None:
    class Near(ByTimestamp):
        max_ahead = "1 hour"

    class Anything(ByTimestamp):
        max_ahead = None

        def process(self, key: bytes, records: Any, state: Any) -> Any:
            return records

    for processor, at, letters in ((Near(), NOW + 3_600_001, 1), (Near(), NOW + 3_600_000, 0), (Anything(), ODD[6], 0)):
        run = driver(processor)
        run.send(b"k", b"v", timestamp_ms=at)
        assert len(run.dead_letters) == letters
    assert run.watermark_ms == LATEST_MS - DAY


@pytest.mark.parametrize("wrong", ["soon", -1, "0 lightyears", True])
def test_a_bound_that_is_no_duration(wrong: Any) -> None:
    class Wrong(ByTimestamp):
        max_ahead = wrong

    options = StepOptions("t", None, "fail", None, "late", None, "lmdb", None, False, "30 seconds")
    with pytest.raises(OptionError, match="max_ahead"):
        check_options(options, Wrong(), flow="f", sources={}, tables={})
    with pytest.raises(OptionError, match="max_ahead"):
        driver(Wrong()).send(b"k", b"v")


def test_a_deduplication_by_count_has_no_time_to_be_ahead_of() -> None:
    with pytest.raises(OptionError, match="max_ahead= cannot be combined with records="):
        check_deduplication(DedupOptions("key", None, 5, "drop", None, None, "2 days"), "f")
    assert check_deduplication(DedupOptions("key", "1 day", None, "drop", None, None, None), "f").max_ahead is None


@pytest.mark.parametrize("at", [-1, None, -(2**63)])
def test_an_output_without_a_time_gets_the_time_of_writing(at: int | None) -> None:
    class Again(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Iterator[Record]:
            for record in records:
                assert record.timestamp_ms is None
                yield Record(key, b"x", timestamp_ms=at)

    class AgainInColumns(ColumnProcessor):
        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            assert records["timestamp_ms"].null_count == 1
            stamps = pa.array([at], pa.int64())
            return pa.table({"key": records["key"], "value": records["value"], "timestamp_ms": stamps}), None

    for processor in (Again(), AgainInColumns()):
        run = driver(processor)
        run.send(b"k", b"v", timestamp_ms=-1)
        assert [record.timestamp_ms for record in run.outputs] == [None]


@pytest.mark.parametrize("make", [lambda at: [Record(b"k", timestamp_ms=at)], None], ids=["records", "columns"])
def test_an_output_with_a_time_that_is_none_is_an_error_of_its_record(make: Callable[[int], Any] | None) -> None:
    class Wrong(Processor):
        def process(self, key: bytes, records: Any, state: Any) -> Any:
            assert make is not None
            return make(NOW * 1_000_000)

    class WrongInColumns(ColumnProcessor):
        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            stamps = pa.array([NOW * 1_000_000], pa.int64())
            return pa.table({"key": records["key"], "value": records["value"], "timestamp_ms": stamps}), None

    run = driver(WrongInColumns() if make is None else Wrong())
    run.send(b"k", b"v", timestamp_ms=NOW)
    (letter,) = run.dead_letters
    assert b"no time in milliseconds (+" in (dict(letter.headers)["onceflow.error.message"] or b"")


@given(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 0, 999, -999, -(2**63)]), max_size=5),
    st.sampled_from([("s", 1), ("ms", 1), ("us", 1000), ("ns", 1_000_000)]),
    st.sampled_from([None, "UTC", "Europe/Berlin"]),
    st.integers(0, 2),
)
def test_columns_of_times_in_any_unit(
    ticks: list[int | None], unit: tuple[str, int], zone: str | None, offset: int
) -> None:
    """Rounded down, in whatever way the column lies in memory."""
    kind = pa.timestamp(unit[0], tz=zone)
    found = milliseconds(pa.array([7, 7, *ticks], pa.int64()).view(kind).slice(offset))
    expected = [7 * 1000 if unit[0] == "s" else 7 // unit[1]] * (2 - offset)
    for each in ticks:
        if each is None or unit[0] != "s":
            expected.append(None if each is None else each // unit[1])
        else:
            expected.append(max(-LATEST_MS, min(LATEST_MS, each)) * 1000)
    assert found.type == pa.int64()
    assert found.to_pylist() == expected


class Own(ByTimestamp):
    """Its own event time is whatever it was made with."""

    def __init__(self, at: Any) -> None:
        self.at = at

    def event_time(self, record: Record) -> Any:
        return self.at


class OwnColumn(Columns):
    def __init__(self, times: Any) -> None:
        self.times = times

    def event_time(self, records: pa.Table) -> Any:
        return self.times


class OwnWindows(Windowed):
    def __init__(self, at: Any) -> None:
        self.at = at

    def event_time(self, record: Record) -> Any:
        return self.at


@pytest.mark.parametrize("make", [Own, OwnWindows])
@pytest.mark.parametrize("at", [True, False, np.bool_(True), 1.7e12, "1700000000000", np.datetime64("2025-01-01")])
def test_an_event_time_that_is_no_whole_number_is_none(make: Any, at: Any) -> None:
    """True is not a millisecond after 1970: the record would be late, or in a window of that time."""
    run = driver(make(at))
    run.send(b"k", b"v", timestamp_ms=NOW)
    assert (run.outputs, run.late, run.watermark_ms) == ([], [], None)
    (letter,) = run.dead_letters
    message = dict(letter.headers)["onceflow.error.message"] or b""
    assert message.startswith(b"event_time() gives milliseconds since 1970 or None")


NO_TIMES = {
    "booleans": pa.array([True]),
    "times of day": pa.array([5], pa.time64("us")),
    "times of day in seconds": pa.array([5], pa.time32("s")),
    "durations": pa.array([5], pa.duration("ms")),
    "rounded floats": pa.array(np.array([NOW], np.float32)),
    "rounded half floats": pa.array(np.array([4096], np.float16)),
    "rounded doubles": pa.array([float(2**53)]),
    "dates": pa.array([20_000], pa.date32()),
    "texts": pa.array(["2025-01-01"]),
}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("kind", NO_TIMES)
def test_a_column_of_no_times_is_none(kind: str, encoded: bool) -> None:
    """In an event time it is the error of its records, and in an output too: it would be another time."""
    column = NO_TIMES[kind].dictionary_encode() if encoded else NO_TIMES[kind]
    run = driver(OwnColumn(column))
    run.send(b"k", b"v", timestamp_ms=NOW)
    assert (run.outputs, run.late, run.watermark_ms, len(run.dead_letters)) == ([], [], None, 1)

    class Written(Columns):
        def process(self, records: pa.Table, states: pa.Table, context: Any) -> Any:
            return records.select(["key", "value"]).append_column("timestamp_ms", column), None

    run = driver(Written())
    run.send(b"k", b"v", timestamp_ms=NOW)
    assert (run.outputs, len(run.dead_letters)) == ([], 1)


@pytest.mark.parametrize(
    "times",
    [
        pa.array([float(NOW)]),
        np.array([NOW], np.float64),
        pa.array([NOW], pa.timestamp("ms", "Europe/Berlin")),
        pa.array([NOW], pa.uint64()),
        pa.array([NOW * 1_000_000], pa.int64()).view(pa.timestamp("ns")),
        [NOW],
        pa.array([NOW]).dictionary_encode(),
        pa.array([NOW * 1000], pa.timestamp("us")).dictionary_encode(),
        pa.chunked_array([pa.array([NOW * 1_000_000], pa.timestamp("ns", "UTC")).dictionary_encode()]),
        pd.Series([pd.Timestamp(NOW, unit="ms")]).astype("category"),
    ],
)
def test_columns_of_whole_milliseconds_and_of_timestamps_are_times(times: Any) -> None:
    run = driver(OwnColumn(times))
    run.send(b"k", b"v", timestamp_ms=NOW)
    assert (len(run.outputs), run.watermark_ms) == (1, NOW - DAY)


def test_an_event_time_may_be_an_attribute_of_the_processor() -> None:
    """It decides what is late and what is in a window, as one of the class does."""

    class Given(Windowed):
        value = serdes.STRING
        allowed_lateness = 0
        emit = "close"

        def __init__(self) -> None:
            self.event_time = lambda record: int(record.value)  # type: ignore[method-assign]

    class Opened(Given):
        def __init__(self) -> None:
            pass

        def open(self, partition: int) -> None:
            Given.__init__(self)

    for make in (Given, Opened):
        run = driver(make())
        for at in (NOW - 120_000, NOW - 60_000, NOW, NOW - 120_000):
            run.send("a", str(at), timestamp_ms=NOW)
        assert run.watermark_ms == NOW
        assert [record.value["count"] for record in run.outputs] == [1, 1], "each window closes once"
        assert len(run.late) == 1

"""The processor alone, in milliseconds; at the end the whole service, with kills."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import Pairs, canonical, epoch_ms, key_of, pairs_flow
from pairs_spark import sort_flow

from onceflow import Record
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow.testing.waiting import wait_until

NOON = "2026-01-31T12:00:00.000Z"
NOON_MS = epoch_ms(NOON)
MINUTE_MS = 60_000
SUM = Record(NOON, {"timestamp": NOON, "sum": 42})


def event(kind: str, value: Any = 7, timestamp: str = NOON, **changed: Any) -> dict[str, Any]:
    return {"id": f"{kind}-{timestamp}", "type": kind, "timestamp": timestamp, "value": value, **changed}


def at(ms: int) -> str:
    """So many milliseconds after noon, within the hour."""
    return f"2026-01-31T12:{ms // MINUTE_MS:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}Z"


@pytest.fixture
def driver() -> ProcessorDriver:
    return ProcessorDriver(Pairs(), on_error="dead-letter")


def send(driver: ProcessorDriver, *events: dict[str, Any], partition: int = 0, after_ms: int = 0) -> list[Record]:
    """One batch of events, which come a while after they have happened."""
    records = []
    for each in events:
        key = canonical(each["timestamp"])
        records.append(Record(key, each, timestamp_ms=epoch_ms(key) + after_ms, partition=partition))
    return driver.send_many(records)


def plain(kind: str, value: int, timestamp: str = "2024-02-09 21:00:00") -> dict[str, Any]:
    """An event without an id."""
    return {"type": kind, "timestamp": timestamp, "value": value}


def reasons(dead_letters: list[Record]) -> list[str]:
    return [(dict(dead_letter.headers)["onceflow.error.message"] or b"").decode() for dead_letter in dead_letters]


# ---- pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_pair_makes_a_sum(driver: ProcessorDriver, order: str, batches: int) -> None:
    first, second = (event(kind, value) for kind, value in zip(order, (40, 2), strict=True))
    if batches == 1:
        assert send(driver, first, second) == [SUM]
    else:
        assert send(driver, first) == []
        assert send(driver, second) == [SUM]


def test_duplicates_do_no_harm_whenever_they_come(driver: ProcessorDriver) -> None:
    a, b = event("A", 40), event("B", 2)
    assert send(driver, a, a) == []
    assert send(driver, a) == []
    assert send(driver, a, b, b) == [SUM]
    assert send(driver, b, a) == []
    assert driver.dead_letters == []
    assert len(driver.timers) == 1


def test_timestamps_are_pairs_of_their_own(driver: ProcessorDriver) -> None:
    assert send(driver, event("A", 1), event("B", 2, at(1))) == []
    assert send(driver, event("B", 1), event("A", 2, at(1))) == [
        Record(NOON, {"timestamp": NOON, "sum": 2}),
        Record(at(1), {"timestamp": at(1), "sum": 4}),
    ]


# ---- without an id, in other spellings, long ago -------------------------------------------------------

BEFORE_YEAR_1 = "0001-01-01T00:00:00+01:00"
YEARS_MS = 2 * 365 * 86_400_000


def test_plain_events_of_long_ago_make_a_pair(driver: ProcessorDriver) -> None:
    assert send(driver, plain("A", 10), after_ms=YEARS_MS) == []
    key = "2024-02-09T21:00:00.000Z"
    assert send(driver, plain("B", 32), after_ms=YEARS_MS) == [Record(key, {"timestamp": key, "sum": 42})]
    assert driver.late == driver.dead_letters == []


def test_among_events_of_long_ago_event_time_decides(driver: ProcessorDriver) -> None:
    """Not the clock, nor the records' own timestamps: nothing is late or over for its age."""
    alone = plain("A", 10)
    driver.now_ms = NOON_MS
    send(driver, alone, plain("B", 1, "2024-02-09 21:02:00"), after_ms=YEARS_MS)
    assert send(driver, plain("B", 1, "2024-02-09 21:05:00"), after_ms=YEARS_MS) == []
    send(driver, plain("B", 1, "2024-02-09 21:05:01"), after_ms=YEARS_MS)
    assert driver.take() == [Record("2024-02-09T21:00:00.000Z", alone, topic="unpaired")]
    assert driver.late == driver.dead_letters == []


def test_equal_events_without_an_id_are_two_events(driver: ProcessorDriver) -> None:
    a = event("A", 40)
    send(driver, plain("A", 40, NOON), plain("A", 40, NOON))
    assert send(driver, plain("A", 40, NOON), a, plain("B", 2, NOON)) == [SUM]
    first = "offset 0 of input-0 is the A of this timestamp already"
    assert reasons(driver.dead_letters) == [first, first, first]


def test_an_id_that_is_null_is_none(driver: ProcessorDriver) -> None:
    send(driver, event("A", 40, id=None), event("A", 1, id=None))
    assert send(driver, event("B", 2)) == [SUM]
    assert reasons(driver.dead_letters) == ["offset 0 of input-0 is the A of this timestamp already"]


SAME = [
    ("2024-02-09 21:00:00", "2024-02-09T21:00:00.000Z"),
    ("2024-02-09T21:00:00", "2024-02-09T21:00:00.000Z"),
    ("2024-02-09T21:00:00Z", "2024-02-09T21:00:00.000Z"),
    ("2024-02-09 21:00:00.5", "2024-02-09T21:00:00.500Z"),
    ("2024-02-09T21:00:00.123456", "2024-02-09T21:00:00.123456Z"),
    ("2024-02-09T21:00:00.000100Z", "2024-02-09T21:00:00.000100Z"),
    ("2024-02-09T22:30:00+01:30", "2024-02-09T21:00:00.000Z"),
    ("2024-02-29 23:00:00.25-03:00", "2024-03-01T02:00:00.250Z"),
    # Where clocks are put forward or back, there are hours that are not there, and hours that are there twice.
    ("2024-03-31 02:30:00", "2024-03-31T02:30:00.000Z"),
    ("2024-10-27 02:30:00", "2024-10-27T02:30:00.000Z"),
    ("1883-11-18 12:00:00", "1883-11-18T12:00:00.000Z"),
    ("0001-01-01 00:00:00", "0001-01-01T00:00:00.000Z"),
]


@pytest.mark.parametrize("text, key", SAME)
def test_spellings_of_one_moment_are_one_key(text: str, key: str) -> None:
    assert canonical(text) == canonical(key) == key


@pytest.mark.integration
def test_spark_finds_the_same_keys(onceflow_spark: Any) -> None:
    spark = onceflow_spark.newSession()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    bad = [value["timestamp"] for value, reason in BAD if reason == TIME]
    bad.remove(BEFORE_YEAR_1)  # Spark knows it, Python does not: no event has Spark's key
    timestamps = [*SAME, *((text, text) for text in bad)]
    values = [bytearray(Pairs.value.encode({"timestamp": text})) for text, _ in timestamps]
    rows = spark.createDataFrame([(n, value) for n, value in enumerate(values)], "n int, value binary")
    found = dict(rows.select("n", key_of(rows["value"])).collect())
    assert [found[n] for n in range(len(found))] == ["none" if key is None else str(key) for _, key in timestamps]


# ---- a stream that is quiet ----------------------------------------------------------------------------


def test_an_event_leaves_a_quiet_stream_after_ten_minutes_and_only_once(driver: ProcessorDriver) -> None:
    alone = plain("A", 10)
    send(driver, alone)
    left = Record("2024-02-09T21:00:00.000Z", alone, topic="unpaired")
    assert driver.advance(540) == driver.advance(59) == []
    assert driver.advance(1) == [left]
    assert driver.advance(3600) == []
    # Event time gets there, too: nothing is left of it then.
    send(driver, plain("A", 1, "2024-02-09 21:05:01"))
    assert driver.outputs == [left]
    assert [key for key, _ in driver.timers] == ["2024-02-09T21:05:01.000Z"] * 2
    assert list(driver.states) == ["2024-02-09T21:05:01.000Z"]


def test_what_event_time_has_let_go_does_not_leave_again(driver: ProcessorDriver) -> None:
    send(driver, event("A"))
    send(driver, event("A", timestamp=at(6 * MINUTE_MS)), event("B", timestamp=at(6 * MINUTE_MS)))
    assert [record.topic for record in driver.take()] == [None, "unpaired"]
    assert driver.advance(540) == driver.advance(60) == []


def test_a_pair_does_not_leave(driver: ProcessorDriver) -> None:
    send(driver, event("A", 40))
    driver.advance(540)
    assert send(driver, event("B", 2)) == [SUM]
    assert driver.advance(60) == driver.advance(600) == []
    assert [timer.name for _, timer in driver.timers] == ["over"]


def test_what_comes_after_an_event_has_left(driver: ProcessorDriver) -> None:
    """A duplicate is none the less one; the partner is late."""
    send(driver, event("A", 40))
    driver.advance(540)
    assert len(driver.advance(60)) == 1
    assert send(driver, event("A", 40), event("B", 2), event("A", 1, id="other")) == []
    assert driver.advance(600) == []
    (late,) = driver.late
    assert (late.key, Pairs.value.decode(late.value), late.timestamp_ms) == (NOON.encode(), event("B", 2), NOON_MS)
    assert dict(late.headers) == {
        "onceflow.error.class": b"LateRecord",
        "onceflow.error.message": b"its partner has been reported as unpaired",
        "onceflow.error.topic": b"input",
        "onceflow.error.partition": b"0",
        "onceflow.error.offset": b"2",
    }
    assert reasons(driver.dead_letters) == [f"A-{NOON} is the A of this timestamp already"]


def test_while_event_time_moves_it_decides(driver: ProcessorDriver) -> None:
    """For example when the partner is far behind in a partition that is much fuller."""
    send(driver, event("A", 40))
    for second in range(1, 30):
        driver.advance(60)
        assert send(driver, event("B", timestamp=at(1000 * second))) == []
    assert send(driver, event("B", 2)) == [SUM]


def test_a_service_that_did_not_run_reads_first(driver: ProcessorDriver) -> None:
    send(driver, event("A", 40), event("A", timestamp=at(1)))
    driver.advance(540)
    assert driver.advance(3600) == []
    assert send(driver, event("B", 2)) == [SUM]
    assert [record.key for record in driver.advance(60)] == [at(1)]


def test_the_bound_can_be_left_out() -> None:
    driver = ProcessorDriver(Pairs(quiet_minutes=0))
    send(driver, event("A"))
    assert [timer.name for _, timer in driver.timers] == ["over"]


@pytest.mark.parametrize("minutes", [-1, float("nan"), float("inf")])
def test_the_bound_must_be_a_time(minutes: float) -> None:
    with pytest.raises(ValueError, match="must be 0 or a time in minutes"):
        Pairs(quiet_minutes=minutes)


# ---- what stays alone --------------------------------------------------------------------------------


def test_an_event_is_reported_when_event_time_is_five_minutes_past_it(driver: ProcessorDriver) -> None:
    alone = event("A")
    send(driver, alone)
    assert send(driver, event("B", timestamp=at(5 * MINUTE_MS))) == []
    send(driver, event("B", timestamp=at(5 * MINUTE_MS + 1)))
    assert driver.take() == [Record(NOON, alone, topic="unpaired")]


def test_a_partner_that_just_comes_in_time_makes_a_pair(driver: ProcessorDriver) -> None:
    send(driver, event("A", 40))
    send(driver, event("B", timestamp=at(5 * MINUTE_MS)))
    assert send(driver, event("B", 2)) == [SUM]
    assert driver.late == []


def test_a_partner_that_comes_too_late_is_kept_elsewhere(driver: ProcessorDriver) -> None:
    send(driver, event("A"))
    send(driver, event("B", timestamp=at(5 * MINUTE_MS + 1)))
    driver.take()
    assert send(driver, event("B")) == []
    assert [late.key for late in driver.late] == [NOON.encode()]
    assert dict(driver.late[0].headers)["onceflow.error.class"] == b"LateRecord"


def test_nothing_is_kept_of_what_is_over(driver: ProcessorDriver) -> None:
    send(driver, event("A"), event("B"), event("A", timestamp=at(1)))
    last = event("A", timestamp=at(10 * MINUTE_MS))
    send(driver, last)
    assert list(driver.states) == [last["timestamp"]]
    assert [(key, timer.name) for key, timer in driver.timers] == [
        (last["timestamp"], "quiet"),
        (last["timestamp"], "over"),
    ]


def test_the_slowest_partition_says_how_late_it_is() -> None:
    """With Spark's own watermark, the fastest one does: what the others bring late vanishes."""
    driver = ProcessorDriver(Pairs(), on_error="dead-letter")
    send(driver, event("A", 40), partition=0)
    send(driver, event("A", timestamp=at(20 * MINUTE_MS)), partition=1)
    assert send(driver, event("B", 2), partition=0) == [SUM]
    assert driver.late == []


# ---- what is no event --------------------------------------------------------------------------------

ID = "id must be a text of 1 to 64 characters, if it is there"
VALUE = "value must be a whole number below 10^15"
TIME = "timestamp must be like 2026-01-31 23:59:59 or 2026-01-31T23:59:59.999Z"
AHEAD = "timestamp is more than a minute after the record's own"
BAD: list[tuple[Any, str]] = [
    (None, "not a JSON object"),
    (b"{", "unexpected end of data"),
    (b"\xff", "str is not valid UTF-8"),
    ([1], "not a JSON object"),
    ("text", "not a JSON object"),
    ({}, "type must be A or B"),
    (event("A", id=17), ID),
    (event("A", id=False), ID),
    (event("A", id="x" * 65), ID),
    (event("A", id=""), ID),
    ({"timestamp": NOON, "value": 1}, "type must be A or B"),
    (event("C"), "type must be A or B"),
    (event("A", type=["A"]), "type must be A or B"),
    (event("A", None), VALUE),
    (event("A", True), VALUE),
    (event("A", 1.0), VALUE),
    (event("A", "7"), VALUE),
    (event("A", 10**15), VALUE),
    (b'{"id":"a","type":"A","value":100000000000000000000}', VALUE),
    (event("A", timestamp=None), TIME),
    (event("A", timestamp=17), TIME),
    (event("A", timestamp="yesterday"), TIME),
    (event("A", timestamp="2026-01-31"), TIME),
    (event("A", timestamp="2026-01-31 12:00"), TIME),
    (event("A", timestamp="2026-02-30T12:00:00.000Z"), TIME),
    (event("A", timestamp="2026-01-31T24:00:00.000Z"), TIME),
    (event("A", timestamp="2026-01-31T12:00:60Z"), TIME),
    (event("A", timestamp="2026-01-31T12:00:00.0000000Z"), TIME),
    (event("A", timestamp="2026-01-31T12:00:00.000+15:00"), TIME),
    (event("A", timestamp="2026-01-31T12:00:00.000Z\n"), TIME),
    (event("A", timestamp=BEFORE_YEAR_1), TIME),
    (event("A", timestamp="9999-12-31T23:59:59.999Z"), AHEAD),
    (event("A", timestamp="2036-01-31T12:00:00.000Z"), AHEAD),
    (event("A", timestamp="2026-01-31T12:01:00.001Z"), AHEAD),
]


@pytest.mark.parametrize("value, reason", BAD)
def test_what_is_no_event_is_a_dead_letter_and_nothing_else(driver: ProcessorDriver, value: Any, reason: str) -> None:
    send(driver, event("A", 40))
    watermark_ms = driver.watermark_ms
    raw = value if value is None or isinstance(value, bytes) else Pairs.value.encode(value)
    # In one batch with a good record of its key.
    bad = Record(NOON, raw, timestamp_ms=NOON_MS)
    assert driver.send_many([bad, Record(NOON, event("B", 2), timestamp_ms=NOON_MS), bad]) == [SUM]
    assert [dead_letter.value for dead_letter in driver.dead_letters] == [raw, raw]
    assert all(reason in text for text in reasons(driver.dead_letters))
    assert driver.watermark_ms == watermark_ms


def test_a_second_event_of_a_type_is_no_duplicate(driver: ProcessorDriver) -> None:
    send(driver, event("A", 40))
    assert send(driver, event("A", 1, id="other"), event("B", 2)) == [SUM]
    assert reasons(driver.dead_letters) == [f"A-{NOON} is the A of this timestamp already"]


def test_an_event_under_a_key_that_is_no_timestamp_is_a_dead_letter(driver: ProcessorDriver) -> None:
    """An object with a field twice has no one timestamp: Spark, which makes the key, finds none."""
    assert driver.send("none", event("A"), timestamp_ms=NOON_MS) == []
    assert reasons(driver.dead_letters) == ["the key is not its timestamp"]
    assert driver.states == {}


# ---- the flows, on topics in memory --------------------------------------------------------------------


@pytest.fixture
def utc(onceflow_spark: Any) -> Any:
    spark = onceflow_spark.newSession()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


@pytest.mark.integration
def test_pairs_in_any_spelling_and_what_stays_alone(utc: Any) -> None:
    flow = FlowDriver(pairs_flow, spark=utc, now_ms=NOON_MS)
    flow.send("events", None, event("A", 40, "2026-01-31 13:00:00+01:00"))
    flow.send("events", "any key", event("B", 2))
    assert flow.read("pairs") == [SUM]
    flow.send("events", None, "no JSON")
    assert [each.value for each in flow.read("dead-letters")] == [b"no JSON"]
    alone = event("A", timestamp=at(1_000))
    flow.send("events", None, alone)
    for minute in range(1, 8):
        flow.advance(60)
        for kind in "AB":
            flow.send("events", None, event(kind, timestamp=at(minute * MINUTE_MS)))
    assert flow.read("unpaired") == [Record(at(1_000), alone)]
    flow.send("events", None, event("B", timestamp=at(1_000)))
    assert [each.key for each in flow.read("late")] == [at(1_000)]


@pytest.mark.integration
def test_without_events_the_clock_decides(utc: Any) -> None:
    flow = FlowDriver(pairs_flow, spark=utc, now_ms=NOON_MS)
    flow.send("events", None, event("A"))
    assert flow.advance(9 * 60) == []
    found = [record for _ in range(120) for record in flow.advance(1)]
    assert [(each.key, each.topic) for each in found] == [(NOON, "unpaired")]


@pytest.mark.integration
def test_events_are_sorted(utc: Any) -> None:
    flow = FlowDriver(sort_flow, spark=utc, partitions=2, now_ms=NOON_MS)
    events = [event("A"), event("B"), event("C")]
    for number, each in enumerate(events):
        flow.send("events", None, each, partition=number % 2)
    assert [(each.value, each.partition) for each in flow.read("as", places=True)] == [(events[0], 0)]
    assert [(each.value, each.partition) for each in flow.read("bs", places=True)] == [(events[1], 1)]
    assert reasons(flow.read("dead-letters-sort")) == ["type must be A or B"]


# ---- the whole service -------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.long
def test_plain_events_and_then_silence(onceflow_broker: str, tmp_path: Path) -> None:
    """The last event of a stream leaves, though nothing comes after it."""
    suffix = f"-{uuid.uuid4().hex[:6]}"
    for name in ("events", "pairs", "unpaired", "late", "dead-letters"):
        create_topic(onceflow_broker, name + suffix, 1)
    a, b, alone = plain("A", 10), plain("B", 32), plain("A", 7, "2024-02-09 21:00:01")
    independent.fill(onceflow_broker, f"events{suffix}", [(None, json.dumps(each).encode()) for each in (a, b, alone)])
    service = Path(__file__).with_name("pairs.py")
    command = [sys.executable, str(service), "--bootstrap-servers", onceflow_broker, f"--suffix={suffix}"]
    command += ["--state-dir", str(tmp_path), "--quiet-minutes", "0.05"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            unpaired = wait_until(
                lambda: independent.read_topic(onceflow_broker, f"unpaired{suffix}"),
                60,
                lambda: f"the event without a partner leaves\n{(tmp_path / 'log').read_text()}",
                useless=lambda: process.poll() is not None and "the service has ended",
                poll_s=0.1,
            )
        finally:
            process.terminate()
            process.wait(60)
    (pair,) = independent.read_topic(onceflow_broker, f"pairs{suffix}")
    at = b"2024-02-09T21:00:00.000Z"
    assert (pair.key, pair.value) == (at, b'{"timestamp":"%s","sum":42}' % at)
    assert [json.loads(each.value or b"") for each in unpaired] == [alone]
    for name in ("late", "dead-letters"):
        assert independent.read_topic(onceflow_broker, name + suffix) == []


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_killed_twice(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("pairs", "--version", "processor", records=6000, kills=2)
    assert result["in"] == 6000
    assert result["unpaired"] > 0
    assert result["late"] == 0


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
@pytest.mark.parametrize("version", ["join", "grouped"])
def test_with_sparks_state(run_demo: Callable[..., dict[str, Any]], version: str) -> None:
    result = run_demo("pairs", "--version", version, records=6000, kills=2)
    assert set(result["state_rows_peak"]) == {version}


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("partitions", [1, 6])
def test_all_versions_say_the_same(run_demo: Callable[..., dict[str, Any]], partitions: int) -> None:
    arguments = ("--version", "all", "--partitions", str(partitions))
    result = run_demo("pairs", *arguments, records=6000, kills=1, timeout=280)
    assert set(result["state_rows_peak"]) == {"processor", "join", "grouped"}

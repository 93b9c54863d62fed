"""The processor alone, in milliseconds; at the end the whole service, with kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import Pairs, epoch_ms

from onceflow import Record
from onceflow.testing.processor_driver import ProcessorDriver

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
        told_ms = epoch_ms(each["timestamp"]) + after_ms
        records.append(Record(each["timestamp"], each, timestamp_ms=told_ms, partition=partition))
    return driver.send_many(records)


def reasons(letters: list[Record]) -> list[str]:
    return [(dict(letter.headers)["onceflow.error.message"] or b"").decode() for letter in letters]


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
    assert [letter.key for letter in driver.late] == [NOON.encode()]
    assert dict(driver.late[0].headers)["onceflow.error.class"] == b"LateRecord"


def test_nothing_is_kept_of_what_is_over(driver: ProcessorDriver) -> None:
    send(driver, event("A"), event("B"), event("A", timestamp=at(1)))
    last = event("A", timestamp=at(10 * MINUTE_MS))
    send(driver, last)
    assert list(driver.states) == [last["timestamp"]]
    assert [key for key, _ in driver.timers] == [last["timestamp"]]


def test_the_slowest_partition_says_how_late_it_is() -> None:
    """With Spark's own watermark, the fastest one does: what the others bring late vanishes."""
    driver = ProcessorDriver(Pairs(), on_error="dead-letter")
    send(driver, event("A", 40), partition=0)
    send(driver, event("A", timestamp=at(20 * MINUTE_MS)), partition=1)
    assert send(driver, event("B", 2), partition=0) == [SUM]
    assert driver.late == []


# ---- what is no event --------------------------------------------------------------------------------

BAD = [
    (None, "not a JSON object"),
    (b"{", "unexpected end of data"),
    (b"\xff", "str is not valid UTF-8"),
    ([1], "not a JSON object"),
    ("text", "not a JSON object"),
    ({}, "id is not a short text"),
    (event("A", id=17), "id is not a short text"),
    (event("A", id="x" * 65), "id is not a short text"),
    (event("A", id=""), "id is not a short text"),
    (event("C"), "type is neither A nor B"),
    (event("A", type=["A"]), "type is neither A nor B"),
    (event("A", None), "value is not a whole number below 10^15"),
    (event("A", True), "value is not a whole number below 10^15"),
    (event("A", 1.0), "value is not a whole number below 10^15"),
    (event("A", "7"), "value is not a whole number below 10^15"),
    (event("A", 10**15), "value is not a whole number below 10^15"),
    (b'{"id":"a","type":"A","value":100000000000000000000}', "value is not a whole number below 10^15"),
    (event("A", timestamp=None), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp=17), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="2026-02-30T12:00:00.000Z"), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="2026-01-31T24:00:00.000Z"), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="2026-01-31T12:00:00Z"), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="2026-01-31T12:00:00.000+00:00"), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="2026-01-31T12:00:00.000Z\n"), "timestamp is not like 2026-01-31T23:59:59.999Z"),
    (event("A", timestamp="0001-01-01T00:00:00.000Z"), "timestamp is far from the record's own"),
    (event("A", timestamp="9999-12-31T23:59:59.999Z"), "timestamp is far from the record's own"),
    (event("A", timestamp="2036-01-31T12:00:00.000Z"), "timestamp is far from the record's own"),
    (event("A", timestamp="2026-01-31T12:01:00.001Z"), "timestamp is far from the record's own"),
    (event("A", timestamp="2026-01-30T11:59:59.999Z"), "timestamp is far from the record's own"),
]


@pytest.mark.parametrize("value, reason", BAD)
def test_what_is_no_event_is_a_dead_letter_and_nothing_else(driver: ProcessorDriver, value: Any, reason: str) -> None:
    send(driver, event("A", 40))
    watermark_ms = driver.watermark_ms
    raw = value if value is None or isinstance(value, bytes) else Pairs.value.encode(value)
    # In one batch with a good record of its key.
    bad = Record(NOON, raw, timestamp_ms=NOON_MS)
    assert driver.send_many([bad, Record(NOON, event("B", 2), timestamp_ms=NOON_MS), bad]) == [SUM]
    assert [letter.value for letter in driver.dead_letters] == [raw, raw]
    assert all(reason in told for told in reasons(driver.dead_letters))
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


# ---- the whole service -------------------------------------------------------------------------------


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

"""`onceflow.Retry`: how long letters wait, what comes back, what is parked, and that nothing of a record is lost."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.errors import OptionError, ProcessorError
from onceflow.state import dead_letters
from onceflow.state.api.record import Record
from onceflow.state.api.timers import Timer
from onceflow.state.retry import KEY, NULL_VALUE, RETRY_TOPIC, Retry
from onceflow.testing.processor_driver import ProcessorDriver

ORIGIN = "orders/3/17"
ORIGIN_HEADERS = [
    ("onceflow.origin.topic", b"orders"),
    ("onceflow.origin.partition", b"3"),
    ("onceflow.origin.offset", b"17"),
]


def policy(**options: Any) -> Retry:
    return Retry(**{"retry_topic": "retry", "parked_topic": "parked", "jitter": 0, **options})


def letter(attempt: int | bytes = 1, cause: str = "TimeoutError", *more: tuple[str, bytes | None]) -> list[Any]:
    """Headers of a dead letter as `Retry.by_origin` hands it on, its key included."""
    count = attempt if isinstance(attempt, bytes) else str(attempt).encode()
    return [
        ("trace", b"x"),
        (dead_letters.ERROR_CLASS, cause.encode()),
        (dead_letters.ATTEMPT, count),
        *ORIGIN_HEADERS,
        *(more or [(KEY, b"ada")]),
    ]


# ---- waiting -----------------------------------------------------------------------------------------


def test_a_letter_comes_back_when_its_time_has_come_and_not_before() -> None:
    driver = ProcessorDriver(policy(base="10 seconds"), now_ms=1_000_000)
    assert driver.send(ORIGIN, b"order", headers=letter(), timestamp_ms=7) == []
    assert driver.timers == [(ORIGIN, ("due", 1_010_000, "processing"))]
    assert driver.advance(9.999) == []
    (found,) = driver.advance(0.001)
    assert (found.key, found.value, found.topic, found.timestamp_ms) == ("ada", b"order", "retry", 7)
    assert dict(found.headers) == dict(letter()[:-1])
    assert [name for name, _ in found.headers].count("onceflow.origin.topic") == 1


def test_nothing_stays_behind_when_it_has_come_back() -> None:
    driver = ProcessorDriver(policy(base="10 seconds"))
    driver.send(ORIGIN, b"order", headers=letter())
    assert list(driver.states) == [ORIGIN]
    driver.advance(10)
    assert (driver.states, driver.timers) == ({}, [])
    assert driver.advance(3600) == []


def test_many_that_are_due_come_back_in_the_order_of_their_times() -> None:
    driver = ProcessorDriver(policy(base="10 seconds"))
    for number, attempt in enumerate((3, 1, 2)):
        driver.send(f"orders/0/{number}", b"%d" % number, headers=letter(attempt), run=False)
    driver.run()
    assert [record.value for record in driver.advance(60)] == [b"1", b"2", b"0"]


@pytest.mark.parametrize(
    "attempt, seconds", [(1, 2), (2, 6), (3, 18), (4, 50), (5, 50), (100, 50), (5000, 50), (b"many", 2), (b"", 2)]
)
def test_the_wait_grows_up_to_the_ceiling(attempt: int | bytes, seconds: float) -> None:
    retry = policy(base=2, factor=3, ceiling="50 seconds", max_attempts=10_000)
    driver = ProcessorDriver(retry)
    driver.send(ORIGIN, b"order", headers=letter(attempt))
    ((_, timer),) = driver.timers
    assert timer.at_ms == seconds * 1000


def test_a_record_that_waits_may_fail_again_it_waits_once() -> None:
    driver = ProcessorDriver(policy(base=2))
    driver.send_many([Record(ORIGIN, b"old", headers=letter(1)), Record(ORIGIN, b"new", headers=letter(2))])
    assert [record.value for record in driver.advance(3600)] == [b"new"]


def test_jitter_spreads_below_the_wait_and_says_the_same_again() -> None:
    retry = policy(base=10, jitter=0.4, ceiling=1000)
    waits = [retry.delay_ms(f"orders/0/{n}", 1) for n in range(1000)]
    assert waits == [retry.delay_ms(f"orders/0/{n}", 1) for n in range(1000)]
    assert 6000 <= min(waits) < 6100
    assert 9900 < max(waits) <= 10_000
    assert 7900 < sum(waits) / len(waits) < 8100
    assert retry.delay_ms("orders/0/1", 2) != 2 * retry.delay_ms("orders/0/1", 1)


# ---- parked ------------------------------------------------------------------------------------------


def test_the_last_attempt_is_parked_with_its_cause() -> None:
    driver = ProcessorDriver(policy(max_attempts=3))
    assert driver.send(ORIGIN, b"order", headers=letter(2)) == []
    driver.advance(3600)
    (found,) = driver.send(ORIGIN, b"order", headers=letter(3), timestamp_ms=7)
    assert (found.key, found.value, found.topic, found.timestamp_ms) == (ORIGIN, b"order", "parked", 7)
    assert dict(found.headers) == {**dict(letter(3)), RETRY_TOPIC: b"retry"}
    assert (driver.states, driver.timers) == ({}, [])


@pytest.mark.parametrize("cause", ["JSONDecodeError", "KeyError", "ValueError", "UnicodeDecodeError", "LateRecord"])
def test_what_no_retry_heals_is_parked_at_once(cause: str) -> None:
    driver = ProcessorDriver(policy())
    (found,) = driver.send(ORIGIN, b"order", headers=letter(1, cause))
    assert (found.topic, dict(found.headers)[dead_letters.ATTEMPT]) == ("parked", b"1")


def test_the_letter_of_a_timer_is_parked_at_once() -> None:
    """Its value would be taken for a record of a source."""
    timer = Timer("ring", 5, "processing")
    lost = dead_letters.timer_letter(b"ada", timer, "failed", "balances-3", RuntimeError("any"))
    driver = ProcessorDriver(policy())
    (found,) = driver.send("failed/0/3", lost.value, headers=[*lost.headers, (KEY, b"ada")])
    assert (found.topic, found.key, found.value) == ("parked", "failed/0/3", lost.value)
    assert driver.timers == []


def test_causes_are_classes_or_their_names() -> None:
    driver = ProcessorDriver(policy(permanent={TimeoutError, "Declined"}))
    for cause in ("TimeoutError", "Declined"):
        assert driver.send(ORIGIN, b"order", headers=letter(1, cause))[0].topic == "parked"
    assert driver.send(ORIGIN, b"order", headers=letter(1, "KeyError")) == []


def test_what_is_parked_does_not_wait_any_more() -> None:
    driver = ProcessorDriver(policy())
    driver.send_many([Record(ORIGIN, b"a", headers=letter(1)), Record(ORIGIN, b"b", headers=letter(1, "KeyError"))])
    assert (driver.states, driver.timers) == ({}, [])
    assert [record.topic for record in driver.outputs] == ["parked"]


def test_null_key_and_null_value_are_parked_so_that_they_can_be_told() -> None:
    driver = ProcessorDriver(policy())
    (found,) = driver.send(ORIGIN, None, headers=letter(1, "KeyError", ("other", None)))
    assert found.value == b""
    headers = dict(found.headers)
    assert headers[NULL_VALUE] == b"true"
    assert KEY not in headers
    assert headers["other"] is None


def test_null_key_and_null_value_come_back_as_they_were() -> None:
    driver = ProcessorDriver(policy())
    driver.send(ORIGIN, None, headers=letter(1, "TimeoutError", ("other", None)))
    (found,) = driver.advance(3600)
    assert (found.key, found.value) == (None, None)
    assert ("other", None) in found.headers


def test_a_letter_without_onceflow_headers_waits_as_after_a_first_failure() -> None:
    driver = ProcessorDriver(policy(base=2))
    driver.send("failed/0/5", b"order")
    ((_, timer),) = driver.timers
    assert timer.at_ms == 2000
    (found,) = driver.advance(2)
    assert dict(found.headers) == {
        "onceflow.origin.topic": b"failed",
        "onceflow.origin.partition": b"0",
        "onceflow.origin.offset": b"5",
    }


def test_a_record_without_a_timestamp_does_not_stop_the_flow() -> None:
    driver = ProcessorDriver(policy())
    driver.send(ORIGIN, b"order", headers=letter(), timestamp_ms=-1)
    (found,) = driver.advance(3600)
    assert found.timestamp_ms is None


# ---- what is kept ------------------------------------------------------------------------------------

_BYTES = st.none() | st.binary(max_size=300)


@given(
    key=_BYTES,
    value=_BYTES,
    headers=st.lists(st.tuples(st.text(max_size=5), _BYTES), max_size=5),
    timestamp_ms=st.none() | st.integers(0, (1 << 63) - 1),
)
def test_every_record_survives_the_table(key: Any, value: Any, headers: Any, timestamp_ms: Any) -> None:
    record = Record(key, value, headers=headers, timestamp_ms=timestamp_ms)
    assert Retry.state.decode(Retry.state.encode(record)) == record


def test_a_large_record_takes_hardly_more_room_than_it_has() -> None:
    driver = ProcessorDriver(policy())
    value = bytes(range(256)) * 2000
    headers = letter(1, "TimeoutError", (dead_letters.ERROR_STACK, b"x" * 2000), (KEY, b"k" * 400))
    driver.send(ORIGIN, value, headers=headers)
    plain = len(value) + sum(len(name) + len(content or b"") for name, content in headers)
    assert len(Retry.state.encode(driver.state(ORIGIN))) < plain
    assert driver.advance(3600)[0].value == value


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["ada", "", "orders/3", "orders/3/x", "a/b/3/17", "orders/3/17\n", "orders//17"])
def test_records_that_are_not_keyed_by_origin_stop_the_flow(key: str) -> None:
    with pytest.raises(ProcessorError, match="by_origin"):
        ProcessorDriver(policy()).send(key, b"order", headers=letter())


@pytest.mark.parametrize(
    "options, text",
    [
        ({"retry_topic": ""}, "two topics"),
        ({"parked_topic": "retry"}, "two topics"),
        ({"base": 0}, "positive"),
        ({"base": "soon"}, "not a duration"),
        ({"base": 10, "ceiling": 5}, "at most"),
        ({"factor": 0.5}, "shrink"),
        ({"factor": float("nan")}, "shrink"),
        ({"jitter": 1.1}, "share"),
        ({"max_attempts": 0}, "at least 1"),
        ({"permanent": "ValueError"}, "set of names"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        policy(**options)


def test_it_goes_to_tasks() -> None:
    copy = pickle.loads(pickle.dumps(policy(base=3)))
    assert copy.delay_ms(ORIGIN, 1) == 3000

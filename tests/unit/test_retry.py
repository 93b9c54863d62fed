"""`onceflow.Retry`: how long letters wait, what comes back, what is parked, and that nothing of a record is lost."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.errors import OptionError, ProcessorError
from onceflow.protocol.output_limits import OutputLimits, WriteLimits
from onceflow.state.api.record import Record
from onceflow.state.api.timers import Timer
from onceflow.state.engine import dead_letters
from onceflow.state.engine.dedup_engine import returned
from onceflow.state.engine.retry import KEY, NULL_VALUE, PARKED, PARKED_WHY, RETRY_TOPIC, Retry
from onceflow.testing.processor_driver import ProcessorDriver

ORIGIN = "orders/3/17"
ORIGIN_HEADERS = [
    ("onceflow.origin.topic", b"orders"),
    ("onceflow.origin.partition", b"3"),
    ("onceflow.origin.offset", b"17"),
]


def policy(**options: Any) -> Retry:
    permanent = Retry.PERMANENT | {"KeyError"}
    return Retry(**{"retry_topic": "retry", "parked_topic": "parked", "jitter": 0, "permanent": permanent, **options})


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


def origin_of(parked: Record) -> str:
    found = PARKED.fullmatch(parked.key)
    assert found is not None
    assert found[1] != parked.key
    return found[1]


# ---- waiting -----------------------------------------------------------------------------------------


def test_a_letter_comes_back_when_its_time_has_come_and_not_before() -> None:
    driver = ProcessorDriver(policy(base="10 seconds"), now_ms=1_000_000)
    assert driver.send(ORIGIN, b"order", headers=letter(), timestamp_ms=7) == []
    assert driver.timers == [(ORIGIN, ("due", 1_010_000, "processing"))]
    assert driver.advance(9.999) == []
    (found,) = driver.advance(0.001)
    assert (found.key, found.value, found.topic, found.timestamp_ms) == ("ada", b"order", "retry", 7)
    assert dict(found.headers) == {**dict(letter()[:-1]), RETRY_TOPIC: b"retry"}
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


def test_an_equal_record_that_waits_stays() -> None:
    """Two rows of one record are equal, and the first one fails again before the second one is due."""
    driver = ProcessorDriver(policy(base=10, max_attempts=3))
    driver.send(ORIGIN, b"item", headers=letter(1))
    driver.advance(5)
    driver.send(ORIGIN, b"item", headers=letter(1))
    assert len(driver.advance(5)) == 1
    driver.send(ORIGIN, b"item", headers=letter(2))
    found = driver.advance(3600)
    assert [dict(record.headers)[dead_letters.ATTEMPT] for record in found] == [b"1", b"2"]
    assert (driver.states, driver.timers, driver.map(ORIGIN, "others")) == ({}, [], {})
    driver.send(ORIGIN, b"item", headers=letter(1))
    (parked,) = driver.send(ORIGIN, b"item", headers=letter(3))
    assert parked.topic == "parked"
    assert len(driver.advance(3600)) == 1


def test_equal_letters_are_parked_under_keys_of_their_own() -> None:
    places = [(partition, offset) for partition in range(2) for offset in range(2)]
    read = [Record(ORIGIN, b"item", "failed", tuple(letter(1)), 7, *place) for place in places]
    state: Any = None  # nothing waits
    found = [*policy(max_attempts=1).process(ORIGIN, read, state)]
    assert len({record.key for record in found}) == len(places)


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
    assert (origin_of(found), found.value, found.topic, found.timestamp_ms) == (ORIGIN, b"order", "parked", 7)
    assert dict(found.headers) == {**dict(letter(3)), RETRY_TOPIC: b"retry", PARKED_WHY: b"attempts"}
    assert (driver.states, driver.timers) == ({}, [])


@pytest.mark.parametrize("cause", ["JSONDecodeError", "UnicodeDecodeError", "LateRecord"])
def test_what_no_retry_heals_is_parked_at_once(cause: str) -> None:
    driver = ProcessorDriver(Retry(retry_topic="retry", parked_topic="parked"))
    (found,) = driver.send(ORIGIN, b"order", headers=letter(1, cause))
    assert (found.topic, dict(found.headers)[dead_letters.ATTEMPT]) == ("parked", b"1")
    assert dict(found.headers)[PARKED_WHY] == b"permanent"


@pytest.mark.parametrize("cause", ["KeyError", "ValueError", "TypeError", "IndexError", "AttributeError"])
def test_what_may_be_an_error_in_the_code_is_retried(cause: str) -> None:
    """It was parked at once, without a word, in spite of max_attempts=3: a fault of a moment, or one that is mended."""
    driver = ProcessorDriver(Retry(retry_topic="retry", parked_topic="parked", max_attempts=3))
    for attempt in (1, 2):
        assert driver.send(ORIGIN, b"order", headers=letter(attempt, cause)) == []
        (again,) = driver.advance(3600)
        assert again.topic == "retry"
    (found,) = driver.send(ORIGIN, b"order", headers=letter(3, cause))
    assert (found.topic, dict(found.headers)[PARKED_WHY]) == ("parked", b"attempts")


def test_it_says_what_it_parks_at_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = ProcessorDriver(Retry(retry_topic="retry", parked_topic="told", permanent={"Declined"}))
    with caplog.at_level("WARNING", "onceflow"):
        for _ in range(3):
            driver.send(ORIGIN, b"order", headers=letter(1, "Declined"))
    assert caplog.text.count("parks records with the cause Declined at once, because it is in permanent=") == 1


def test_the_letter_of_a_timer_is_parked_at_once() -> None:
    """Its value would be taken for a record of a source."""
    timer = Timer("ring", 5, "processing")
    lost = dead_letters.timer_letter(b"ada", timer, "failed", "balances-3", RuntimeError("any"))
    driver = ProcessorDriver(policy())
    (found,) = driver.send("failed/0/3", lost.value, headers=[*lost.headers, (KEY, b"ada")])
    assert (found.topic, origin_of(found), found.value) == ("parked", "failed/0/3", lost.value)
    assert driver.timers == []


def test_causes_are_classes_or_their_names() -> None:
    driver = ProcessorDriver(policy(permanent={TimeoutError, "Declined"}))
    for cause in ("TimeoutError", "Declined"):
        assert driver.send(ORIGIN, b"order", headers=letter(1, cause))[0].topic == "parked"
    assert driver.send(ORIGIN, b"order", headers=letter(1, "KeyError")) == []


def test_what_is_parked_does_not_wait_any_more() -> None:
    driver = ProcessorDriver(policy())
    driver.send(ORIGIN, b"a", headers=letter(1))
    driver.advance(3600)
    driver.send(ORIGIN, b"a", headers=letter(2, "KeyError"))
    assert (driver.states, driver.timers) == ({}, [])
    assert [record.topic for record in driver.outputs] == ["retry", "parked"]


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
        "onceflow.retry.topic": b"retry",
    }


def test_a_record_without_a_timestamp_does_not_stop_the_flow() -> None:
    driver = ProcessorDriver(policy())
    driver.send(ORIGIN, b"order", headers=letter(), timestamp_ms=-1)
    (found,) = driver.advance(3600)
    assert found.timestamp_ms is None


# ---- several records of one origin -------------------------------------------------------------------


def test_rows_that_were_made_of_one_record_come_back_each() -> None:
    """One replaced the other, which was lost."""
    driver = ProcessorDriver(policy(base="10 seconds"))
    for value in (b"item 1", b"item 2", b"item 1"):
        driver.send(ORIGIN, value, headers=letter())
    found = driver.advance(10)
    assert sorted(record.value for record in found) == [b"item 1", b"item 1", b"item 2"]
    assert {(record.key, record.topic) for record in found} == {("ada", "retry")}
    assert (driver.states, driver.timers, driver.map(ORIGIN, "others")) == ({}, [], {})


def test_a_row_that_is_parked_does_not_end_the_wait_of_another() -> None:
    driver = ProcessorDriver(policy(base="10 seconds"))
    driver.send(ORIGIN, b"item 1", headers=letter())
    (parked,) = driver.send(ORIGIN, b"item 2", headers=letter(1, "KeyError"))
    assert (parked.topic, parked.value) == ("parked", b"item 2")
    (found,) = driver.advance(10)
    assert (found.topic, found.value) == ("retry", b"item 1")


def test_parked_rows_of_one_record_have_keys_of_their_own() -> None:
    """The topic is compacted, so only one of them stayed."""
    driver = ProcessorDriver(policy())
    for value in (b"item 1", b"item 2", b"item 1"):
        driver.send(ORIGIN, value, headers=letter(1, "KeyError"))
    assert len({record.key for record in driver.outputs}) == 3
    assert {origin_of(record) for record in driver.outputs} == {ORIGIN}


LETTERS = st.lists(
    st.tuples(
        st.sampled_from([None, b"k1", b"k2"]),
        st.sampled_from([None, b"", b"1", b"2"]),
        st.sampled_from(["TimeoutError", "TimeoutError", "KeyError"]),
        st.sampled_from([0, 0, 1, 5]),
    ),
    max_size=12,
)


@given(letters=LETTERS, max_timers=st.sampled_from([1, 1000]))
def test_each_letter_is_in_one_place(letters: list[Any], max_timers: int) -> None:
    driver = ProcessorDriver(policy(base=2), max_timers_per_batch=max_timers)
    for key, value, cause, seconds in letters:
        own = [] if key is None else [(KEY, key)]
        driver.send(ORIGIN, value, headers=[*letter(1, cause, ("other", None)), *own])
        driver.advance(seconds)
    driver.advance(3600)
    sent = [("parked" if cause == "KeyError" else "retry", key, value) for key, value, cause, _ in letters]
    found = []
    for record in driver.outputs:
        headers = dict(record.headers)
        parked = record.topic == "parked"
        key = headers.get(KEY) if parked else record.key and record.key.encode()
        found.append((record.topic, key, None if parked and NULL_VALUE in headers else record.value))
    assert Counter(found) == Counter(sent)
    keys = [record.key for record in driver.outputs if record.topic == "parked"]
    assert len(keys) == len(set(keys))
    assert (driver.states, driver.timers, driver.map(ORIGIN, "others")) == ({}, [], {})


def test_what_an_earlier_version_has_stored_is_retried() -> None:
    """It knew one record of each origin: the value of the key, with the timer `due`."""
    waiting = Record(b"ada", b"order", headers=letter()[:3], timestamp_ms=7)

    class Earlier(Retry):
        def process(self, key: str, records: Any, state: Any) -> Any:
            state.put(waiting)
            state.timers.register("due", state.now_ms + 1000, "processing")
            return ()

    driver = ProcessorDriver(Earlier(retry_topic="retry", parked_topic="parked"))
    driver.send(ORIGIN, b"order")
    driver.processor = policy()
    driver.send(ORIGIN, b"item 2", headers=letter())
    assert sorted(record.value for record in driver.advance(3600)) == [b"item 2", b"order"]


def test_what_waits_does_not_expire() -> None:
    """With a time to live, which `Flow.process` refuses now, waiting records vanished."""
    driver = ProcessorDriver(policy(base="10 minutes"), default_ttl_ms=1000)
    for value in (b"item 1", b"item 2"):
        driver.send(ORIGIN, value, headers=letter())
    assert len(driver.advance(600)) == 2


@pytest.mark.parametrize("on_error", ["fail", "dead-letter"])
def test_what_the_retry_topic_refuses_is_parked(on_error: str) -> None:
    """It stopped the flow at each start, or stayed in the table for ever, without a timer."""
    small, large = OutputLimits("retry", 1000), OutputLimits("any", 1_000_000)
    limits = WriteLimits(lambda topic: small if topic == "retry" else large, large)
    driver = ProcessorDriver(policy(), limits=limits, on_error=on_error)
    noise = random.Random(7).randbytes(5000)
    for value in (noise, b"small", noise):
        driver.send(ORIGIN, value, headers=[*letter(), (dead_letters.ERROR_MESSAGE, b"no answer")])
    found = driver.advance(3600)
    assert sorted(record.topic for record in found) == ["parked", "parked", "retry"]
    parked = [record for record in found if record.topic == "parked"]
    assert {record.value for record in parked} == {noise}
    assert len({record.key for record in parked}) == 2
    headers = dict(parked[0].headers)
    assert (headers[KEY], headers[RETRY_TOPIC], headers["trace"]) == (b"ada", b"retry", b"x")
    assert headers[dead_letters.ERROR_CLASS] == b"BadRecordError"
    message = (headers[dead_letters.ERROR_MESSAGE] or b"").decode()
    assert "of topic retry (max.message.bytes); it failed with TimeoutError: no answer" in message
    assert (driver.states, driver.timers, driver.dead_letters) == ({}, [], [])


# ---- what a record says when it comes back -----------------------------------------------------------


def fail(records: list[Record]) -> list[Record]:
    """Dead letters of records that were read, as `Retry.by_origin` hands them on."""
    found = []
    for record in records:
        failed = dead_letters.dead_letter(record, "failed", OSError("away"))
        told = dict(failed.headers)
        origin = "/".join(
            (told[f"onceflow.origin.{part}"] or b"").decode() for part in ("topic", "partition", "offset")
        )
        found.append(Record(origin, failed.value, "failed", (*failed.headers, (KEY, failed.key))))
    return found


def test_a_record_that_comes_back_keeps_its_origin_and_counts_on() -> None:
    driver = ProcessorDriver(policy())
    records = [Record(b"k", b"order", "orders", (), 7, 0, 17)]
    for attempt in (1, 2, 3):
        (failed,) = fail(records)
        headers = dict(failed.headers)
        assert (failed.key, headers[dead_letters.ATTEMPT]) == ("orders/0/17", str(attempt).encode())
        assert RETRY_TOPIC not in headers
        driver.send_many([failed])
        (again,) = driver.advance(3600)
        records = [Record(b"k", again.value, again.topic, again.headers, 7, 2, 100 + attempt)]
        assert dead_letters.idempotency_key(records[0]) == "orders/0/17"


def test_headers_that_are_passed_on_do_not_make_one_record_of_several() -> None:
    """Another flow reads outputs with the headers of a retried record. Their letters had its origin and attempts."""
    driver = ProcessorDriver(policy())
    driver.send_many(fail([Record(b"k", b"order", "orders", [("trace", b"x")], 7, 0, 17)]))
    (again,) = driver.advance(3600)
    lines = [Record(b"k", b"line", "lines", again.headers, 7, 1, offset) for offset in (100, 101)]
    assert [dead_letters.idempotency_key(line) for line in lines] == ["lines/1/100", "lines/1/101"]
    letters = fail(lines)
    assert [each.key for each in letters] == ["lines/1/100", "lines/1/101"]
    for each in letters:
        headers = dict(each.headers)
        assert (headers[dead_letters.ATTEMPT], headers["trace"]) == (b"1", b"x")
        assert len(headers) == len(list(each.headers))
    late = dead_letters.late_record(lines[0], "late", 1, 2)
    assert dict(late.headers)["onceflow.origin.offset"] == b"100"
    assert dead_letters.ATTEMPT not in dict(late.headers)
    other = ProcessorDriver(policy(retry_topic="retry-b"))
    other.send_many(letters)
    found = other.advance(3600)
    assert [dict(record.headers)[RETRY_TOPIC] for record in found] == [b"retry-b"] * 2


def test_headers_are_believed_if_it_is_not_known_where_a_record_was_read() -> None:
    """A row may have a column `topic` of its own; its attempts would never end if they began again each time."""
    headers = [*ORIGIN_HEADERS, (dead_letters.ATTEMPT, b"2"), (RETRY_TOPIC, b"retry")]
    failed = dead_letters.refused_record(Record(b"k", b"row", "sports", headers), "failed", "DataError", "too long")
    assert dict(failed.headers)[dead_letters.ATTEMPT] == b"3"
    assert dict(failed.headers)["onceflow.origin.offset"] == b"17"


def test_headers_of_earlier_versions_are_believed() -> None:
    """They do not say to which topic a record was sent."""
    headers = [*ORIGIN_HEADERS, (dead_letters.ATTEMPT, b"2")]
    (failed,) = fail([Record(b"k", b"order", "retry", headers, 7, 1, 5)])
    assert (failed.key, dict(failed.headers)[dead_letters.ATTEMPT]) == (ORIGIN, b"3")


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


def test_the_name_of_a_record_is_where_it_was_read_whatever_topic_it_is_given() -> None:
    headers = [*ORIGIN_HEADERS, (RETRY_TOPIC, b"orders-retry")]
    came_back = Record(b"ada", b"item", "orders-retry", tuple(headers), 7, 0, 3, "orders-retry")
    first = Record(b"ada", b"item", "orders", (), 7, 0, 3, "orders")
    names = [dead_letters.idempotency_key(each) for each in (came_back, first)]
    assert names == [ORIGIN, "orders/0/3"]
    came_back.topic = first.topic = "audit"
    assert [dead_letters.idempotency_key(each) for each in (came_back, first)] == names


def test_headers_that_are_passed_on_are_no_return() -> None:
    """Flow.deduplicate refuses records that come back in front of it."""
    headers = [(name, content) for name, content in letter(1) if name != KEY]
    rows = {
        "topic": ["corrections", "orders-retry", "orders"],
        "headers": [[*headers, (RETRY_TOPIC, b"orders-retry")]] * 2 + [headers],
    }
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    structs = [[{"key": name, "value": content} for name, content in each] for each in rows["headers"]]
    batch = pa.record_batch([pa.array(rows["topic"]), pa.array(structs, kind)], names=["topic", "headers"])
    found = returned(batch, ["orders", "orders-retry", "corrections"])
    assert found is not None
    assert found.tolist() == [1, 2]

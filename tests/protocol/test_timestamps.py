"""What times of records mean: unknown, far away, refused by a topic, not representable."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.protocol import timestamps
from onceflow.protocol.timestamps import LATEST_MS, AcceptedTimes, FarAheadRecord, fitted, in_utc, known_ms, known_times

NOW = 1_795_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
MS = timedelta(milliseconds=1)
ANY = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, LATEST_MS, LATEST_MS + 1, NOW, NOW * 1000]))


@given(st.lists(st.none() | ANY, max_size=8))
def test_columns_and_single_times_mean_the_same(given: list[int | None]) -> None:
    assert known_times(pa.array(given, pa.int64())).to_pylist() == [known_ms(each) for each in given]


@given(ANY)
def test_a_known_time_is_one_that_arrow_and_spark_can_have(at: int) -> None:
    known = known_ms(at)
    assert (known is None) == (at < 0)
    if known is not None:
        assert pa.array([known * 1000], pa.int64()).cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist() == [
            known * 1000
        ]


@given(ANY)
def test_every_time_has_a_text(at: int) -> None:
    text = in_utc(at)
    assert (text == "unknown") == (at < 0)
    if 0 <= at < 253_402_300_800_000:
        wanted = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=at)
        assert text == wanted.isoformat(timespec="seconds")
    found = timestamps.as_datetime(at)
    assert found is None or found.astimezone(timezone(timedelta(hours=14))).year <= 9999


@given(st.datetimes(timezones=st.none() | st.just(timezone.utc)))
def test_datetimes(at: datetime) -> None:
    found = timestamps.of_datetime(at)
    if at.tzinfo is not None:
        assert found == (None if at.year < 1970 else (at - datetime(1970, 1, 1, tzinfo=timezone.utc)) // MS)
    elif 1971 <= at.year <= 9998:
        assert found == int(at.replace(microsecond=0).timestamp()) * 1000 + at.microsecond // 1000


@pytest.mark.parametrize(
    "at, text",
    [
        (NOW * 1000, "+58851-04-14T23:06:40+00:00"),
        (253_402_300_800_000, "+10000-01-01T00:00:00+00:00"),
        (2**63 - 1, "+292278994-08-17T07:12:55+00:00"),
    ],
)
def test_years_of_many_digits(at: int, text: str) -> None:
    """As Java's Instant.ofEpochMilli says."""
    assert in_utc(at) == text


def test_ages() -> None:
    assert [timestamps.age_ms(at, NOW) for at in (NOW - 5, NOW + HOUR, NOW + 2 * DAY, NOW * 1000, -1, None)] == [
        5, 0, None, None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({"message.timestamp.before.max.ms": "7", "message.timestamp.after.max.ms": "9"}, (7, 9)),
        ({"message.timestamp.difference.max.ms": "5"}, (5, 5)),
        # Kafka 3.6 to 3.9: the old setting holds where the new one is not set.
        (
            {
                "message.timestamp.before.max.ms": str(2**63 - 1),
                "message.timestamp.after.max.ms": "3",
                "message.timestamp.difference.max.ms": "5",
            },
            (5, 3),
        ),
        ({"message.timestamp.type": "LogAppendTime", "message.timestamp.after.max.ms": "3"}, (2**63 - 1, 2**63 - 1)),
        ({"message.timestamp.type": None}, (2**63 - 1, HOUR)),  # may not be read
    ],
)
def test_what_a_topic_accepts(settings: dict[str, str | None], wanted: tuple[int, int]) -> None:
    assert AcceptedTimes.of(settings) == wanted


@given(
    st.lists(st.none() | ANY | st.integers(NOW - 3 * DAY, NOW + 3 * DAY), min_size=1, max_size=8),
    st.integers(0, 2 * DAY) | st.just(2**63 - 1),
    st.integers(0, 2 * DAY) | st.just(2**63 - 1),
    st.none() | st.lists(st.none() | st.lists(st.none() | st.just(b"v"), max_size=3), min_size=8, max_size=8),
    st.integers(0, 3),
)
def test_a_topic_gets_times_that_it_accepts_and_no_time_is_lost(
    given: list[int | None], before: int, after: int, headers: list[list[bytes | None] | None] | None, skipped: int
) -> None:
    entry: Any = pa.struct([("key", pa.string()), ("value", pa.binary())])
    kind: Any = pa.list_(pa.field("element", entry, nullable=False))
    own, names = None, [None if each is None else [("h", value) for value in each] for each in headers or [[]] * 8]
    if headers is not None:
        listed = [None if each is None else [{"key": key, "value": value} for key, value in each] for each in names]
        own = pa.array([[{"key": "x", "value": b"x"}]] * skipped + listed, kind).slice(skipped, len(given))
    taken = fitted(pa.array(given, pa.int64()), own, AcceptedTimes(before, after), NOW)
    lists = [None] * len(given) if taken.headers is None else taken.headers.to_pylist()
    refused = 0
    for n, (at, now, found) in enumerate(zip(given, taken.times.to_pylist(), lists, strict=True)):
        expected = list(names[n] or ())
        if known_ms(at) is not None and now is None:
            refused += 1
            expected.append(("onceflow.timestamp", str(at).encode()))
        else:
            assert now == known_ms(at)
            assert headers is None or (found is None) == (headers[n] is None)
        assert [(each["key"], each["value"]) for each in found or ()] == expected
        if now is not None:  # the check of the broker (Kafka: LogValidator.validateTimestamp)
            assert NOW - now <= before
            assert now - NOW <= after
        elif known_ms(at) is not None:
            assert at is not None
            assert NOW - at > before * 5 // 6 or at - NOW > after * 5 // 6, "not nearly refused"
    assert taken.refused == refused
    assert own is None or taken.headers.type == kind


def test_the_error_says_when_it_was_and_what_the_bound_is() -> None:
    error = pickle.loads(pickle.dumps(FarAheadRecord(4_070_908_800_000, NOW, "1 day")))
    assert "event time 4070908800000 (2099-01-01T00:00:00+00:00)" in str(error)
    assert "max_ahead='1 day'" in str(error)

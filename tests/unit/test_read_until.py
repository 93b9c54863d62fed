"""Where a read that ends stops, and points in time as users write them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from onceflow.errors import OptionError
from onceflow.options.instants import instant_ms
from onceflow.planning.bounded import bounded
from onceflow.planning.options import SinkOptions
from onceflow.planning.read_until import ReadBound, bound_offsets, check_until
from onceflow.planning.source_starts import SourceTopic

NOW_MS = 1_800_000_000_000
TOPIC = SourceTopic("in", "id", {0: 10, 1: 0}, {0: 50, 1: 0})


@pytest.mark.parametrize(
    "given",
    [
        1_738_310_400_000,
        "1738310400000",
        "2025-01-31T08:00:00Z",
        "2025-01-31 08:00z",
        "2025-01-31T10:00:00.000+02:00",
        "2025-01-31T10:00:00+0200",
        datetime(2025, 1, 31, 8, tzinfo=timezone.utc),
        datetime(2025, 1, 31, 10, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_points_in_time(given: object) -> None:
    assert instant_ms(given) == 1_738_310_400_000


def test_fractions_of_seconds() -> None:
    assert instant_ms("2025-01-31T08:00:00.1Z") == 1_738_310_400_100
    assert instant_ms("2025-01-31T08:00:00.123456Z") == 1_738_310_400_123


@pytest.mark.parametrize(
    "given, why",
    [
        ("yesterday", "not a point in time"),
        ("2025-01-31", "not a point in time"),
        ("2025-01-31T08:00:00", "no time zone"),
        ("2025-02-31T08:00:00Z", "day is out of range"),
        ("2025-01-31T08:00:00+99:00", "not a point in time"),
        ("1969-01-31T08:00:00Z", "after 1970"),
        ("-5", "not a point in time"),
        (-5, "after 1970"),
        (10**30, "after 1970"),
        (1.5, "not a point in time"),
        (True, "not a point in time"),
        (None, "not a point in time"),
        (datetime(2025, 1, 31), "no time zone"),
    ],
)
def test_what_is_no_point_in_time(given: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        instant_ms(given)


def check(until: Any) -> ReadBound | None:
    return check_until(until, topic="in", flow="f", now_ms=NOW_MS)


def test_bounds() -> None:
    assert check(None) is None
    assert check("latest") == check(" LATEST ") == ReadBound()
    assert check("2025-01-31T08:00:00Z") == check(1_738_310_400_000) == ReadBound(timestamp_ms=1_738_310_400_000)
    assert check({0: 5, 1: 0}) == ReadBound(offsets={0: 5, 1: 0})


@pytest.mark.parametrize("until", ["earliest", "", "lastest", 1.5, True, ["latest"], {0: -1}, {"0": 1}, {0: None}])
def test_what_is_no_bound(until: Any) -> None:
    with pytest.raises(OptionError, match=r"until=(.|\n)*latest") as raised:
        check(until)
    assert (raised.value.flow, raised.value.topic) == ("f", "in")


def test_a_time_to_come() -> None:
    check(NOW_MS)
    with pytest.raises(OptionError, match="a time to come"):
        check(NOW_MS + 1)


@pytest.mark.parametrize(
    "bound, at_time, end",
    [
        (ReadBound(), None, {0: 50, 1: 0}),
        (ReadBound(offsets={0: 30, 1: 0}), None, {0: 30, 1: 0}),
        (ReadBound(offsets={0: 5, 1: 0}), None, {0: 20, 1: 0}),  # it is behind that already
        (ReadBound(timestamp_ms=7), {0: 25, 1: -1}, {0: 25, 1: 0}),
        (ReadBound(timestamp_ms=7), {0: -1, 1: -1}, {0: 50, 1: 0}),  # all records are older
        (ReadBound(timestamp_ms=7), {0: 60, 1: -1}, {0: 50, 1: 0}),  # it was written since
    ],
)
def test_ends(bound: ReadBound, at_time: Any, end: Any) -> None:
    assert bound_offsets(TOPIC, {0: 20, 1: 0}, bound, at_time, flow="f") == end


@pytest.mark.parametrize(
    "offsets, why", [({0: 30}, r"missing \[1\]"), ({0: 3, 1: 0, 2: 0}, r"unknown \[2\]"), ({0: 51, 1: 0}, "ends at 50")]
)
def test_offsets_that_do_not_exist(offsets: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        bound_offsets(TOPIC, {0: 20, 1: 0}, ReadBound(offsets=offsets), None, flow="f")


def test_a_run_ends_if_all_of_its_reads_do() -> None:
    given = SinkOptions("out", "key", "none", 60.0)
    assert bounded(given, ["a", "b"], [], "f") == given
    ending = bounded(given, ["a"], ["a"], "f")
    assert (ending.once, ending.timers_s) == (True, float("inf"))
    with pytest.raises(OptionError, match=r"(?s)never end.*without until=: b, c"):
        bounded(given, ["a", "b", "c"], ["a"], "f")
    with pytest.raises(OptionError, match=r"(?s)checkpoint=.*once=True"):
        bounded(replace(given, checkpoint="/x"), ["a"], ["a"], "f")

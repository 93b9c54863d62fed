"""The service, without Kafka and Spark; at the end the whole of it, killed while it runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import moving_average as service
import pytest
from moving_average import Averages, ColumnAverages

from onceflow import Record
from onceflow.testing.flow_driver import FlowDriver
from onceflow.testing.processor_driver import ProcessorDriver

START = datetime(2010, 1, 1)
VERSIONS = [Averages, ColumnAverages]


@pytest.fixture(params=VERSIONS)
def driver(request: pytest.FixtureRequest) -> ProcessorDriver:
    return ProcessorDriver(request.param(), on_error="dead-letter")


def measurement(hours: float, value: Any, series: str = "a") -> tuple[bytes, bytes]:
    time = f"{(START + timedelta(hours=hours)).isoformat()}Z"
    return series.encode(), json.dumps({"series": series, "time": time, "value": value}).encode()


def changed(**fields: Any) -> bytes:
    return json.dumps({"series": "a", "time": "2010-01-01T00:00:00Z", "value": 5} | fields).encode()


def decoded(records: Iterable[Record]) -> list[dict[str, Any]]:
    values = (record.value for record in records)
    return [json.loads(value) if isinstance(value, bytes) else value for value in values]


def column(records: Iterable[Record], name: str) -> list[int]:
    return [value[name] for value in decoded(records)]


def causes(driver: ProcessorDriver) -> list[str]:
    return [
        (dict(dead_letter.headers)["onceflow.error.message"] or b"").decode() for dead_letter in driver.dead_letters
    ]


# ---- averages ----------------------------------------------------------------------------------------


def test_a_measurement_comes_out_with_its_averages(driver: ProcessorDriver) -> None:
    (record,) = driver.send(*measurement(0, 5))
    assert record.key == b"a"
    assert decoded([record]) == [
        {"series": "a", "time": "2010-01-01T00:00:00Z", "value": 5, "last_n": 5, "last_t": 5, "all": 5}
    ]


def test_averages_over_the_last_20_values(driver: ProcessorDriver) -> None:
    records = driver.send_many([measurement(n, 100 * n) for n in range(30)])
    assert column(records, "last_n")[:3] == [0, 50, 100]
    assert column(records, "last_n")[19:22] == [950, 1050, 1150]  # 0 to 19, 1 to 20, 2 to 21


def test_averages_over_the_last_7_days(driver: ProcessorDriver) -> None:
    """A value is left out when the next one is exactly 7 days later."""
    week = 7 * 24
    hours = [0, 1, week - 1 / 3600, week, week + 1, 10 * week]
    records = driver.send_many([measurement(hour, 10**n) for n, hour in enumerate(hours)])
    assert column(records, "last_t") == [1, 6, 37, 370, 3700, 100_000]


def test_averages_since_the_start(driver: ProcessorDriver) -> None:
    records = driver.send_many([measurement(1000 * n, n) for n in range(101)])
    assert column(records, "all")[-1] == 50
    assert column(records, "last_t")[-1] == 100


def test_averages_are_rounded_to_the_next_whole_number(driver: ProcessorDriver) -> None:
    """Of two the greater one, below zero as well."""
    for values, average in (([1, 2], 2), ([-1, -2], -1), ([1, 1, 2], 1), ([-1, -1, -2], -1), ([1, 2, 2], 2)):
        fresh = ProcessorDriver(type(driver.processor)())
        assert column(fresh.send_many([measurement(n, value) for n, value in enumerate(values)]), "all")[-1] == average


def test_several_values_may_have_one_time(driver: ProcessorDriver) -> None:
    records = driver.send_many([measurement(5, 1), measurement(5, 2), measurement(5, 6)])
    assert column(records, "all") == [1, 2, 3]


def test_series_have_nothing_to_do_with_each_other(driver: ProcessorDriver) -> None:
    records = driver.send_many(
        [measurement(500, 10, "a"), measurement(0, 20, "b"), measurement(501, 30, "a"), measurement(1, 60, "b")]
    )
    found = {(value["series"], value["value"]): value["last_t"] for value in decoded(records)}
    assert found == {("a", 10): 10, ("b", 20): 20, ("a", 30): 20, ("b", 60): 40}


def test_the_next_batch_goes_on_where_the_last_one_ended(driver: ProcessorDriver) -> None:
    values = [measurement(n, n * n) for n in range(400)]
    at_once = decoded(driver.send_many(values))
    one_by_one = ProcessorDriver(type(driver.processor)())
    assert [value for each in values for value in decoded(one_by_one.send(*each))] == at_once


def test_state_holds_what_is_needed_and_no_more(driver: ProcessorDriver) -> None:
    def kept() -> int:
        times = driver.state(b"a")["times"]
        return len(times) // 8 if isinstance(times, bytes) else len(times)

    driver.send_many([measurement(n, n) for n in range(1000)])
    assert kept() == 7 * 24
    driver.send(*measurement(10_000, 5))
    assert kept() == service.LAST_N


# ---- bad records -------------------------------------------------------------------------------------

BAD = {
    b"": "",
    b"5 degrees": "",
    b"\xff\xfe": "",
    changed()[:-1]: "",
    changed() + changed(): "",
    b"[]": "",
    b"7": "",
    b"null": "",
    b"{}": service.MISSING,
    changed(series=None): service.MISSING,
    changed(time=None): service.MISSING,
    changed(value=None): service.MISSING,
    changed(series="b"): service.FOREIGN,
    changed(series=7): "",
    changed(time=1_262_304_000): "",
    changed(time="yesterday"): service.BAD_TIME,
    changed(time="2010-01-01"): service.BAD_TIME,
    changed(time="2010-01-01T00:00:00"): service.BAD_TIME,
    changed(time="2010-01-01T00:00:00Z\n"): service.BAD_TIME,
    changed(time="0001-01-01T00:00:00Z"): service.BAD_TIME,
    changed(time="9999-12-31T23:59:59Z"): service.BAD_TIME,
    changed(time="2010-01-01T23:59:60Z"): service.BAD_TIME,
    changed(time="2010-02-29T00:00:00Z"): "",
    changed(value="5"): "",
    changed(value=1.0): "",
    changed(value=True): "",
    changed(value=[5]): "",
    changed(value=10**9 + 1): service.BAD_VALUE,
    changed(value=-(2**63)): service.BAD_VALUE,
    changed(value=2**63): "",
    changed(value=10**400): "",
    changed(value="x" * 300_000): "",
}


@pytest.mark.parametrize("value, cause", BAD.items(), ids=range(len(BAD)))
def test_a_bad_record_goes_to_the_dead_letters(driver: ProcessorDriver, value: bytes, cause: str) -> None:
    driver.send_many([measurement(0, 10), (b"a", value), measurement(1, 20)])
    assert column(driver.outputs, "all") == [10, 15]
    (dead_letter,) = driver.dead_letters
    assert (dead_letter.key, dead_letter.value) == (b"a", value)
    assert cause in causes(driver)[0]
    assert causes(driver) != [""]


def test_a_record_without_value_or_key_goes_to_the_dead_letters(driver: ProcessorDriver) -> None:
    driver.send_many([(b"a", None), (None, changed())])
    assert sorted(causes(driver)) == [service.MISSING, "the record has no key: state is kept by key"]
    assert driver.outputs == []


def test_the_extremes_are_no_bad_records(driver: ProcessorDriver) -> None:
    times = ("1900-01-01T00:00:00Z", "1969-12-31T23:59:59Z", "2012-02-29T00:00:00Z", "2999-12-31T23:59:59Z")
    records = driver.send_many([(b"a", changed(time=time, value=10**9)) for time in times])
    records += driver.send_many([(b"b", changed(series="b", time=time, value=-(10**9))) for time in times])
    assert column(records, "all") == [10**9] * 4 + [-(10**9)] * 4
    assert driver.dead_letters == []


def test_time_must_not_go_back_within_a_series(driver: ProcessorDriver) -> None:
    """It is the latest time of a good record that counts, in this batch or an earlier one."""
    driver.send_many([measurement(5, 1), measurement(4, 2), measurement(4.5, 3), measurement(6, 4)])
    driver.send_many([measurement(5.5, 5), measurement(7, 6), measurement(0, 7, "b")])
    assert sorted(column(driver.outputs, "value")) == [1, 4, 6, 7]
    assert causes(driver) == [service.BACK] * 3


def test_a_series_that_is_measured_too_often_is_stopped(
    driver: ProcessorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state would not fit into a record. What is 7 days later is taken again."""
    monkeypatch.setattr(service, "KEPT_MAX", 30)
    driver.send_many([measurement(n / 10, n) for n in range(40)])
    driver.send(*measurement(7 * 24, 100))
    assert column(driver.outputs, "value") == [*range(30), 100]
    assert len(driver.dead_letters) == 10
    assert "values within" in causes(driver)[0]


# ---- both versions are one ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_both_versions_yield_the_same_bytes(seed: int) -> None:
    """Of many series, in batches of all sizes, with bad records among them."""
    rng = random.Random(seed)
    hours = dict.fromkeys("abcde", 0.0)
    records: list[tuple[bytes, bytes]] = []
    for _ in range(600):
        series = rng.choice("aaabcde")
        # Now and then at the same time, a bit earlier, or after a long silence.
        hours[series] += rng.choice([0, 1, 1, 1, 5, 5, 30, 200, -1])
        bad = rng.random() < 0.03
        good = measurement(max(0, hours[series]), rng.randrange(-(10**9), 10**9), series)
        records.append((series.encode(), rng.choice(list(BAD))) if bad else good)
    results = []
    for version in VERSIONS:
        driver = ProcessorDriver(version(), 3, on_error="dead-letter")
        sizes = random.Random(seed)
        start = 0
        while start < len(records):
            end = start + sizes.choice([1, 10, 100])
            driver.send_many(records[start:end])
            start = end
        encode: Callable[[Any], bytes] = Averages.output.encode
        outputs = [value if isinstance(value, bytes) else encode(value) for value in (r.value for r in driver.outputs)]
        dead_letters = [dead_letter.value for dead_letter in driver.dead_letters]
        results.append((sorted(outputs), sorted(dead_letters), len(outputs) + len(dead_letters)))
    assert results[0] == results[1]
    assert results[0][2] == len(records)
    assert len(results[0][1]) > 20


# ---- both flows, on topics in memory ------------------------------------------------------------------


@pytest.mark.integration
def test_both_versions_write_the_same(onceflow_spark: Any) -> None:
    def records_flow(flow: Any) -> Any:
        return service.averages_flow(flow, "records")

    def columns_flow(flow: Any) -> Any:
        return service.averages_flow(flow, "columns")

    flows = FlowDriver(records_flow, columns_flow, partitions=2)
    random_ = random.Random(5)
    series = [f"series-{number}" for number in range(5)]
    for hour in range(0, 60, 3):
        flows.send_many("measurements", [measurement(hour, random_.randrange(100), name) for name in series])
    flows.send("measurements", "series-1", b"no JSON")
    assert len(flows.read("averages")) == 100
    assert column(flows.read("averages"), "all")[0] == column(flows.read("averages"), "value")[0]

    def of_series(topic: str) -> list[list[dict[str, Any]]]:
        return [decoded(each for each in flows.read(topic) if each.key == name) for name in series]

    assert of_series("averages-columns") == of_series("averages")
    assert [each.key for each in flows.read("bad-measurements")] == ["series-1"]
    assert [each.key for each in flows.read("bad-measurements-columns")] == ["series-1"]


# ---- with Kafka and Spark ----------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
@pytest.mark.parametrize("records, kills", [(3000, 1), pytest.param(40_000, 3, id="all-of-the-series-and-again")])
def test_averages_survive_kills(
    run_demo: Callable[..., dict[str, Any]], tmp_path: Path, records: int, kills: int
) -> None:
    picture = tmp_path / "averages.png"
    result = run_demo("moving-average", "--plot", str(picture), records=records, kills=kills)
    assert result["in"] == records
    assert result["out"] + result["dead_letters"] == 2 * records
    assert result["dead_letters"] > records / 100
    assert result["kills"] == 2 * kills
    assert result["plot"] == str(picture)
    image = pytest.importorskip("matplotlib.image").imread(picture)
    assert picture.stat().st_size > 20_000
    assert image.std() > 0.01

"""The demo ``moving-average``: its input, what it expects, that its auditor sees what is wrong, and its picture."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import moving_average as service
import pyarrow as pa
import pytest

from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow.state.api.record import Record
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos import moving_average as demo
from onceflow_workshop.demos import moving_average_data as data
from onceflow_workshop.demos.audit import Expected, Findings, Message, Origin, compare
from onceflow_workshop.demos.moving_average import MovingAverage, MovingAverageChoices, run
from onceflow_workshop.demos.moving_average_data import Measurement

SEED = 42
TOPIC = "measurements-1a2b3c"
PARTITIONS = 3


@pytest.fixture(scope="module")
def measurements() -> list[Measurement]:
    """Enough for every series, and for their second beginning."""
    return list(data.generate(SEED, 30_000))


@pytest.fixture(scope="module")
def expected(measurements: list[Measurement]) -> list[Expected]:
    return list(data.expected_averages(measurements))


# ---- input -------------------------------------------------------------------------------------------


def test_the_series_are_the_packaged_ones_in_order_of_time() -> None:
    series = data.series()
    assert len({name for _, name, _ in series}) == 11
    assert [time for time, _, _ in series] == sorted(time for time, _, _ in series)
    # The first lines of stocks.csv and seattle-temps.csv.
    assert [value for _, name, value in series if name == "stocks/MSFT"][:3] == [39810, 36350, 43220]
    assert [value for _, name, value in series if name == "temperature/seattle"][:3] == [39400, 39200, 39000]


def test_a_seed_repeats_the_records(measurements: list[Measurement]) -> None:
    assert list(data.generate(SEED, 5000)) == measurements[:5000]
    assert list(data.generate(SEED + 1, 5000)) != measurements[:5000]


def test_about_one_percent_is_bad_in_every_way(measurements: list[Measurement]) -> None:
    causes = Counter(each.cause for each in measurements)
    good = causes.pop(None)
    assert causes.keys() == data.CAUSES.keys()
    assert 0.007 < sum(causes.values()) / (sum(causes.values()) + good) < 0.013
    assert max(len(each.value or b"") for each in measurements) > 300_000


def test_good_measurements_are_distinct_and_in_order(measurements: list[Measurement]) -> None:
    good = [each for each in measurements if each.cause is None]
    assert len({each.identity for each in measurements}) == len(measurements)
    for name in {each.series for each in good}:
        times = [each.time for each in good if each.series == name]
        assert times == sorted(set(times))


def test_series_begin_again_later(measurements: list[Measurement]) -> None:
    good = [each for each in measurements if each.cause is None]
    series = data.series()
    assert len(good) > len(series) + 1000
    for first, again in zip(good[:1000], good[len(series) :], strict=False):
        assert (again.series, again.thousandths) == (first.series, first.thousandths)
        assert again.time == first.time + data.ROUND


def test_time_goes_back_behind_a_good_measurement(measurements: list[Measurement]) -> None:
    latest = {}
    seen = 0
    for each in measurements:
        if each.cause is None:
            latest[each.series] = each.identity.split()[-1]
        elif each.cause == "time goes back":
            assert json.loads(each.value or b"")["time"] < latest[each.series]
            seen += 1
    assert seen > 5


def test_bad_records_carry_their_number_and_are_asked_for(measurements: list[Measurement]) -> None:
    for each, record in zip(measurements, data.inputs(measurements), strict=True):
        assert (record.key, record.value) == (each.key, each.value)
        assert (record.identity is None) == (each.cause is None)
        assert data.identify(Message(0, 0, record.key, record.value, record.headers)) == each.identity


def test_all_records_that_are_allowed_have_times_that_services_take() -> None:
    rounds = -(-demo.RECORDS_MAX // len(data.series()))
    assert (data.series()[-1][0] + rounds * data.ROUND).year < 3000


# ---- expected results --------------------------------------------------------------------------------


def test_averages_by_hand() -> None:
    """25 hourly values and one 8 days later: over the last 20, over a week, over all."""
    start = data.series()[0][0]
    hours = [*range(25), 24 + 8 * 24]
    given = [
        Measurement(f"a {hour}", "a", start + timedelta(hours=hour), value, b"a", b"")
        for hour, value in zip(hours, [*range(0, 50, 2), 101], strict=True)
    ]
    found = [json.loads(each.value or b"") for each in data.expected_averages(given)]
    assert [(each["last_n"], each["last_t"], each["all"]) for each in (found[0], found[1], found[24], found[25])] == [
        (0, 0, 0),
        (1, 1, 1),
        (29, 24, 24),  # of 10 to 48, of 0 to 48
        (34, 101, 27),  # of 12 to 48 and 101: 671 / 20; 701 / 26
    ]


@pytest.mark.long
def test_averages_by_definition(measurements: list[Measurement], expected: list[Expected]) -> None:
    """Every hundredth, from nothing but the series."""
    good = [each for each in measurements if each.cause is None]
    for n in range(0, len(good), 100):
        last = good[n]
        before = [each for each in good[: n + 1] if each.series == last.series]
        week = [each.thousandths for each in before if each.time > last.time - timedelta(days=7)]
        values = [each.thousandths for each in before]
        told = json.loads(expected[n].value or b"")
        assert expected[n].identity == last.identity
        for name, part in (("last_n", values[-20:]), ("last_t", week), ("all", values)):
            assert abs(told[name] - Fraction(sum(part), len(part))) <= Fraction(1, 2)


@pytest.mark.parametrize("values, average", [([1, 2], 2), ([-1, -2], -1), ([1, 1, 2], 1), ([-5], -5)])
def test_halves_go_up(values: list[int], average: int) -> None:
    assert data.average(values) == average


@pytest.mark.long
@pytest.mark.parametrize("version", [service.Averages, service.ColumnAverages])
def test_the_service_makes_these_averages_and_letters(
    version: Callable[[], object], measurements: list[Measurement]
) -> None:
    """The processors, without Kafka and Spark, over batches of 2,000."""
    measurements = measurements[:12_000]
    driver = ProcessorDriver(version(), PARTITIONS, on_error="dead-letter")  # type: ignore[arg-type]
    records = [
        Record(record.key, record.value, TOPIC, record.headers, partition=0) for record in data.inputs(measurements)
    ]
    for first in range(0, len(records), 2000):
        driver.send_many(records[first : first + 2000])
    values = [each.value for each in driver.outputs]
    encoded = [each if isinstance(each, bytes) else service.Averages.output.encode(each) for each in values]
    assert sorted(encoded) == sorted(each.value or b"" for each in data.expected_averages(measurements))
    bad = [each for each in measurements if each.cause is not None]
    dead_letters = [Message(0, 0, each.key, each.value, tuple(each.headers)) for each in driver.dead_letters]
    assert sorted(data.identify(dead_letter) or "" for dead_letter in dead_letters) == [each.identity for each in bad]
    # The driver counts offsets from 0, for each topic and partition.
    offsets = {each.identity: Origin(TOPIC, 0, n) for n, each in enumerate(measurements)}
    assert data.dead_letter_problems(dead_letters, measurements, offsets) == []


# ---- auditor -----------------------------------------------------------------------------------------


def _found(expected: list[Expected]) -> list[Message]:
    places = key_partitions(pa.array([each.key for each in expected], pa.binary()), PARTITIONS).tolist()
    offsets: Counter[int] = Counter()
    messages = []
    for each, place in zip(expected, places, strict=True):
        messages.append(Message(place, offsets[place], each.key, each.value, each.headers or ()))
        offsets[place] += 1
    return sorted(messages, key=lambda message: message[:2])


def _compare(expected: list[Expected], found: list[Message]) -> Findings:
    return compare("averages", expected, found, partitions=PARTITIONS, identify=data.identify)


def test_right_averages_pass(expected: list[Expected]) -> None:
    findings = _compare(expected, _found(expected))
    assert findings.holds
    assert findings.found == findings.expected == len(expected)


def _drop(messages: list[Message]) -> None:
    del messages[500]


def _double(messages: list[Message]) -> None:
    messages.insert(501, messages[500])


def _swap(messages: list[Message]) -> None:
    first = messages[500]
    second = next(n for n in range(501, len(messages)) if messages[n].key == first.key)
    messages[500], messages[second] = messages[second], first


def _off_by_a_thousandth(messages: list[Message]) -> None:
    value = json.loads(messages[500].value or b"")
    value["last_t"] += 1
    messages[500] = messages[500]._replace(value=json.dumps(value, separators=(",", ":")).encode())


def _elsewhere(messages: list[Message]) -> None:
    messages[500] = messages[500]._replace(partition=(messages[500].partition + 1) % PARTITIONS)


def _of_a_bad_record(messages: list[Message]) -> None:
    """One whose time goes back came out, with averages."""
    value = (messages[500].value or b"").replace(b":00Z", b":01Z")
    messages.append(messages[500]._replace(value=value))


@pytest.mark.parametrize(
    "damage, kind",
    [
        (_drop, "lost"),
        (_double, "duplicated"),
        (_swap, "reordered"),
        (_off_by_a_thousandth, "wrong"),
        (_elsewhere, "misplaced"),
        (_of_a_bad_record, "unexpected"),
    ],
)
def test_the_auditor_sees_every_kind_of_damage(
    expected: list[Expected], damage: Callable[[list[Message]], None], kind: str
) -> None:
    messages = _found(expected)
    damage(messages)
    assert _compare(expected, messages).counts[kind]


Letters = tuple[list[Message], dict[str, Origin]]


@pytest.fixture
def dead_letters(measurements: list[Measurement]) -> Letters:
    """What a run record by record would leave, and where the bad records came from."""
    messages, origins = [], {}
    for n, each in enumerate(measurements):
        if each.cause is None:
            continue
        origins[each.identity] = Origin(TOPIC, 1, n)
        kind, _, text = data.CAUSES[each.cause].partition(": ")
        told = {"attempt": "1", "error.class": kind, "error.message": text, "error.stack": "line 1"}
        for place in ("error", "origin"):
            told |= {f"{place}.topic": TOPIC, f"{place}.partition": "1", f"{place}.offset": str(n)}
        headers = [(data.NUMBER, each.identity.encode())]
        headers += [(f"onceflow.{name}", value.encode()) for name, value in told.items()]
        messages.append(Message(0, n, each.key, each.value, tuple(headers)))
    return messages, origins


def test_right_letters_pass(measurements: list[Measurement], dead_letters: Letters) -> None:
    messages, origins = dead_letters
    assert data.dead_letter_problems(messages, measurements, origins) == []
    findings = _compare(list(data.expected_dead_letters(measurements)), messages)
    assert findings.holds
    assert findings.found == len(origins)


@pytest.mark.parametrize(
    "header, value",
    [
        ("error.class", "KeyError"),
        ("error.message", "something else"),
        ("error.stack", ""),
        ("error.offset", "0"),
        ("error.partition", "0"),
        ("origin.topic", "another"),
        ("origin.offset", "7"),
        ("attempt", "2"),
    ],
)
def test_a_wrong_header_of_a_letter_is_seen(
    measurements: list[Measurement], dead_letters: Letters, header: str, value: str
) -> None:
    messages, origins = dead_letters
    headers = dict(messages[3].headers)
    messages[3] = messages[3]._replace(headers=tuple({**headers, f"onceflow.{header}": value.encode()}.items()))
    (problem,) = data.dead_letter_problems(messages, measurements, origins)
    assert problem.startswith(data.identify(messages[3]) or "nothing")
    del headers[f"onceflow.{header}"]
    messages[3] = messages[3]._replace(headers=tuple(headers.items()))
    assert len(data.dead_letter_problems(messages, measurements, origins)) == 1


def test_a_letter_that_is_not_as_the_record_was_is_seen(measurements: list[Measurement], dead_letters: Letters) -> None:
    messages, _ = dead_letters
    wanted = list(data.expected_dead_letters(measurements))
    messages[3] = messages[3]._replace(value=b"{}")
    messages[4] = messages[4]._replace(key=b"another")
    del messages[5]
    assert _compare(wanted, messages).counts == {
        "lost": 1, "duplicated": 0, "unexpected": 0, "wrong": 2, "misplaced": 0, "reordered": 0
    }  # fmt: skip


# ---- picture -----------------------------------------------------------------------------------------


def _points(measurements: list[Measurement], expected: list[Expected]) -> tuple[demo.Series, demo.Series]:
    measured = [Message(0, 0, record.key, record.value, record.headers) for record in data.inputs(measurements)]
    averages = [Message(0, 0, each.key, each.value) for each in expected]
    return demo.points(measured, demo.MEASURED), demo.points(averages, list(demo.AVERAGES))


def test_what_is_drawn_is_what_the_topics_hold(measurements: list[Measurement], expected: list[Expected]) -> None:
    measured, averages = _points(measurements, expected)
    good = [each for each in measurements if each.cause is None]
    assert sum(map(len, measured.values())) == sum(map(len, averages.values())) == len(good)
    msft = [each for each in good if each.series == "stocks/MSFT"]
    assert measured["stocks/MSFT"] == [(each.time, [each.thousandths / 1000]) for each in msft]
    assert averages["stocks/MSFT"][0] == (msft[0].time, [39.81, 39.81, 39.81])


@pytest.mark.parametrize(
    "value", [None, b"", b"7", b"{}", b'{"series":"a","time":5,"value":1}', b'{"series":"a","time":"x","value":1}']
)
def test_what_cannot_be_drawn_is_left_out(value: bytes | None) -> None:
    """A run that failed has a picture, too."""
    assert demo.points([Message(0, 0, b"a", value)], demo.MEASURED) == {}


def test_the_beginning_ends_where_a_series_begins_again(
    measurements: list[Measurement], expected: list[Expected]
) -> None:
    measured, _ = _points(measurements, expected)
    assert len(measured["stocks/AAPL"]) > 123
    assert len(demo.beginning(measured["stocks/AAPL"])) == 123
    assert len(demo.beginning(measured["temperature/seattle"])) == demo.POINTS_MAX
    assert demo.beginning([]) == []


@pytest.mark.long
def test_the_picture_is_one(tmp_path: Path, measurements: list[Measurement], expected: list[Expected]) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "averages.png"
    demo.draw(path, *_points(measurements, expected))
    pixels = image.imread(path)
    assert pixels.shape[:2] == (800, 1400)
    empty = tmp_path / "empty.png"
    demo.draw(empty, {}, {})
    assert path.stat().st_size > 4 * empty.stat().st_size
    # The orange of an average is there, and not in the empty picture but for the legend.
    orange = [
        ((abs(p[:, :, 0] - 1.0) < 0.05) & (abs(p[:, :, 1] - 0.498) < 0.05)).sum() for p in (pixels, image.imread(empty))
    ]
    assert orange[0] > 4 * orange[1] > 0


# ---- command -----------------------------------------------------------------------------------------


def test_both_versions_run_and_lose_state(tmp_path: Path) -> None:
    class Deadline:
        seconds = remaining = 1.0

    choices = MovingAverageChoices(10_000, SEED, 3)
    chain = MovingAverage(choices, "localhost:1", tmp_path, Deadline())  # type: ignore[arg-type]
    assert [service.planned for service in chain.services] == [3, 3]
    assert all(service.planned_losses for service in chain.services)
    assert [chain.command(link)[2] for link in chain.links] == ["records", "columns"]
    wanted = chain.expected()
    assert wanted.keys() == chain.partitions.keys()
    assert len(list(wanted["averages"])) + len(list(wanted["bad-measurements"])) == 10_000


@pytest.mark.parametrize(
    "choices, told",
    [
        (MovingAverageChoices(records=1000, kills=3), "too few"),
        (MovingAverageChoices(records=1_000_001), "too many"),
        (MovingAverageChoices(plot=Path("/nowhere/at/all.png")), "cannot be written"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(choices: MovingAverageChoices, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        run(choices)


@pytest.mark.parametrize("module", ["vega_datasets", "matplotlib.figure"])
def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentUnusableError, match=r"pip install ./workshop"):
        run(MovingAverageChoices())


def test_the_example_is_the_service_of_the_demo() -> None:
    example = Path(__file__).parents[2] / "examples" / "moving-average" / "moving_average.py"
    assert example == demo.SERVICE == Path(service.__file__)

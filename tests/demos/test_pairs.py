"""The demo `pairs`: what it generates, what it expects, and that its auditor sees what is wrong."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pairs as service
import pyarrow as pa
import pytest

from onceflow import Record
from onceflow.client.deadline import Deadline
from onceflow.protocol.partitioners import key_partitions
from onceflow.testing.processor_driver import ProcessorDriver
from onceflow_workshop.demos import pairs as demo
from onceflow_workshop.demos import pairs_bad_records, pairs_events
from onceflow_workshop.demos import pairs_data as data
from onceflow_workshop.demos.audit import KINDS, Expected, Findings, Message, Origin, compare, origin_headers
from onceflow_workshop.demos.chain import Audit
from onceflow_workshop.demos.display import Display
from onceflow_workshop.demos.pairs_bad_records import Bad
from onceflow_workshop.demos.pairs_data import Arrival
from onceflow_workshop.demos.pairs_events import Moment

SEED = 42
COUNT = 8000
PARTITIONS = 3


@pytest.fixture(scope="module")
def story() -> list[Moment | Bad]:
    return list(data.story(SEED, COUNT, PARTITIONS))


@pytest.fixture(scope="module")
def moments(story: list[Moment | Bad]) -> list[Moment]:
    return [part for part in story if isinstance(part, Moment)]


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return list(data.arrivals(SEED, COUNT, PARTITIONS))


@pytest.fixture(scope="module")
def good(arrivals: list[Arrival]) -> list[tuple[Arrival, dict[str, Any], int]]:
    """The events among them, but the closing ones: record, what it says, when that was."""
    found = [(each, json.loads(each.value or b"")) for each in arrivals[: -2 * PARTITIONS] if each.bad is None]
    return [(each, event, service.epoch_ms(service.canonical(event["timestamp"]))) for each, event in found]


Good = list[tuple[Arrival, dict[str, Any], int]]


# ---- generator ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_records_again(arrivals: list[Arrival]) -> None:
    assert list(data.arrivals(SEED, COUNT, PARTITIONS)) == arrivals
    assert list(data.arrivals(SEED + 1, COUNT, PARTITIONS)) != arrivals


@pytest.mark.parametrize("count", [500, 501, 502, 503, 1000])
@pytest.mark.parametrize("partitions", [1, 4])
def test_there_are_as_many_records_as_were_asked_for(count: int, partitions: int) -> None:
    for seed in range(20):
        assert sum(1 for _ in data.arrivals(seed, count, partitions)) == count


def test_no_two_moments_are_at_the_same_time(moments: list[Moment]) -> None:
    times = [moment.at_ms for moment in moments]
    assert times == sorted(set(times))


def test_partitions_get_their_records_in_turn(arrivals: list[Arrival]) -> None:
    before_the_end = [each.partition for each in arrivals[: -2 * PARTITIONS]]
    assert before_the_end == [number % PARTITIONS for number in range(len(before_the_end))]


def test_records_come_in_the_order_of_their_own_time_and_events_do_not(arrivals: list[Arrival], good: Good) -> None:
    own = [each.at_ms for each in arrivals]
    assert own == sorted(own)
    behind = [each.at_ms - at_ms for each, _, at_ms in good]
    assert min(behind) >= 0
    assert pairs_events.DISORDER_MS * 0.9 < max(behind) < pairs_events.DISORDER_MS


def test_no_event_is_late_whichever_way_event_time_is_taken(good: Good) -> None:
    """Behind the latest of all partitions (Spark) is the most that can be asked for."""
    latest_ms = 0
    for _, _, at_ms in good:
        latest_ms = max(latest_ms, at_ms)
        assert at_ms > latest_ms - data.LATENESS_MS


def test_shares_are_as_described(moments: list[Moment], arrivals: list[Arrival]) -> None:
    assert 0.007 < sum(each.bad is not None for each in arrivals) / len(arrivals) < 0.013
    assert 0.02 < sum(moment.a is None or moment.b is None for moment in moments) / len(moments) < 0.04
    sent = Counter(each.value for each in arrivals if each.bad is None)
    assert set(sent.values()) == {1, 2}
    assert 0.01 < sum(copies == 2 for copies in sent.values()) / len(sent) < 0.03
    keyless = [each for each in arrivals if each.key is None]
    assert 0.03 < len(keyless) / len(arrivals) < 0.07
    assert all(each.bad is None for each in keyless)


def test_an_id_belongs_to_one_event(good: Good) -> None:
    values = defaultdict(set)
    for each, event, _ in good:
        if "id" in event:
            values[event["id"]].add((each.key, each.value))
    assert {len(found) for found in values.values()} == {1}


def test_events_without_an_id_are_written_in_every_way_and_meet_those_of_other_ways(moments: list[Moment]) -> None:
    events = [event for moment in moments for event in (moment.a, moment.b) if event is not None]
    told = [json.loads(event.encoded) for event in events]
    assert {event.spelling for event in events} == set(range(len(pairs_events.SPELLINGS)))
    assert all(("id" in each) == (event.spelling == 0) for each, event in zip(told, events, strict=True))
    assert all(event.copies == 1 for event in events if event.spelling)
    for each, event in zip(told, events, strict=True):
        assert service.canonical(each["timestamp"]) == pairs_events.timestamp(event.at_ms)
    assert any(moment.a and moment.b and 0 < moment.a.spelling < moment.b.spelling for moment in moments)


def test_a_short_run_lasts_long_enough_for_singletons_to_be_over(moments: list[Moment]) -> None:
    assert moments[-1].at_ms - moments[0].at_ms > 4 * data.LATENESS_MS


def test_closing_events_come_last_and_bring_every_partition_past_all_others(
    moments: list[Moment], arrivals: list[Arrival]
) -> None:
    ends = arrivals[-2 * PARTITIONS :]
    events = [json.loads(each.value or b"") for each in ends]
    assert {event["id"][:3] for event in events} == {"end"}
    kinds = {(each.partition, event["type"]) for each, event in zip(ends, events, strict=True)}
    assert kinds == {(partition, kind) for partition in range(PARTITIONS) for kind in "AB"}
    assert len({event["timestamp"] for event in events}) == 2 * PARTITIONS
    first_ms = min(service.epoch_ms(event["timestamp"]) for event in events)
    assert first_ms - data.LATENESS_MS > moments[-1].at_ms
    # They are over at their own time themselves only if something comes after them.
    assert max(service.epoch_ms(event["timestamp"]) for event in events) - data.LATENESS_MS < first_ms


# ---- bad records -------------------------------------------------------------------------------------


def test_every_kind_of_bad_record_is_there() -> None:
    bad = data.bad_records(data.story(SEED, 100_000, PARTITIONS)).values()
    assert {each.cause for each in bad} == set(pairs_bad_records.CAUSES)
    huge = [each for each in bad if len(each.value or b"") > 200_000]
    assert len(huge) == len(bad) // data.HUGE_EVERY


def test_bad_records_are_bad_in_the_way_they_say() -> None:
    for each in data.bad_records(data.story(SEED, 100_000, PARTITIONS)).values():
        for delay_ms in (0, pairs_events.DISORDER_MS - 1):
            assert _cause(each, each.at_ms + delay_ms) == each.cause, each


def _cause(bad: Bad, told_ms: int) -> str | None:
    """What the service finds."""
    try:
        event = None if bad.value is None else service.Pairs.value.decode(bad.value)
    except ValueError:
        return pairs_bad_records.NOT_JSON
    try:
        service.checked(event, told_ms)
    except service.BadEvent as error:
        return str(error)
    return pairs_bad_records.TWICE if bad.timestamp != event["timestamp"] else None


def test_bad_events_share_timestamps_with_good_ones(story: list[Moment | Bad], moments: list[Moment]) -> None:
    times = {moment.at_ms for moment in moments}
    bad = list(data.bad_records(story).values())
    assert sum(each.at_ms in times for each in bad) >= len(bad) - 3


# ---- expected results --------------------------------------------------------------------------------


def test_expected_is_what_brute_force_finds(story: list[Moment | Bad], good: Good) -> None:
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for _, event, _ in good:
        found[service.canonical(event["timestamp"])][event["type"]] = event
    sums = {at: of["A"]["value"] + of["B"]["value"] for at, of in found.items() if len(of) == 2}
    alone = {at: next(iter(of.values())) for at, of in found.items() if len(of) == 1}
    pairs = list(data.expected_pairs(story))
    unpaired = list(data.expected_unpaired(story))
    assert {each.identity: json.loads(each.value) for each in pairs} == {
        at: {"timestamp": at, "sum": total} for at, total in sums.items()
    }
    assert {each.identity: json.loads(each.value) for each in unpaired} == alone
    assert all(each.key == each.identity.encode() for each in pairs + unpaired)


@pytest.mark.long
@pytest.mark.parametrize("batch", [400, pytest.param(2000, marks=pytest.mark.long)])
def test_the_processor_makes_exactly_this(story: list[Moment | Bad], arrivals: list[Arrival], batch: int) -> None:
    """Without Kafka and Spark, in batches, timers and all."""
    driver = ProcessorDriver(service.Pairs(), partitions=4, on_error="dead-letter")
    by_id = data.bad_records(story)
    most = 0
    for first in range(0, len(arrivals), batch):
        records = []
        for each in arrivals[first : first + batch]:
            told = by_id[each.bad].timestamp if each.bad else None
            key = told if each.bad else service.canonical(json.loads(each.value or b"")["timestamp"])
            name = (key or "none").encode()
            records.append(Record(name, each.value, timestamp_ms=each.at_ms, partition=each.partition))
        driver.send_many(records)
        most = max(most, len(driver.states))
    outputs = sorted(
        (each.topic or "pairs", each.key, service.Pairs.output.encode(each.value)) for each in driver.outputs
    )
    expected = [("pairs", each.identity, each.value) for each in data.expected_pairs(story)]
    expected += [("unpaired", each.identity, each.value) for each in data.expected_unpaired(story)]
    assert outputs == sorted(expected)
    assert driver.late == []
    dead_letters = Counter(dead_letter.value for dead_letter in driver.dead_letters)
    assert dead_letters == Counter(each.value for each in by_id.values())
    assert len(driver.states) == 2 * PARTITIONS
    assert len(driver.timers) == 4 * PARTITIONS
    assert most <= data.max_moments(SEED, COUNT, PARTITIONS, records_per_batch=batch) < len(story)


# ---- state -------------------------------------------------------------------------------------------


def test_the_peak_of_a_table_counts_live_keys() -> None:
    log = [(0, b"a", b"1"), (0, b"b", b"1"), (0, b"a", b"2"), (0, b"a", None), (0, b"c", b"1"), (1, b"a", b"1")]
    messages = [Message(partition, offset, key, value) for offset, (partition, key, value) in enumerate(log)]
    assert data.live_rows(messages) == (3, 3)
    assert data.live_rows(messages[:2]) == (2, 2)
    assert data.live_rows([each for each in messages if each.value is not None]) == (4, 4)
    assert data.live_rows([*messages, Message(0, 6, b"b", None), Message(1, 7, b"a", None)]) == (3, 1)
    assert data.live_rows([]) == (0, 0)


def test_state_is_small_where_there_are_many_records() -> None:
    bound = data.max_moments(SEED, 100_000, PARTITIONS, records_per_batch=1000)
    assert bound < 0.4 * sum(isinstance(part, Moment) for part in data.story(SEED, 100_000, PARTITIONS))


# ---- auditor -----------------------------------------------------------------------------------------

Records = list[Message]


def _topic(expected: list[Expected], partitions: int = 2) -> Records:
    """The messages of a flawless topic."""
    places = key_partitions(pa.array([each.key for each in expected], pa.binary()), partitions).tolist()
    return [
        Message(place, n, each.key, each.value) for n, (place, each) in enumerate(zip(places, expected, strict=True))
    ]


def _audit(expected: list[Expected], found: Records) -> Findings:
    return compare("unpaired", expected, found, partitions=2, identify=data.identify)


def _change(found: Records) -> None:
    event = json.loads(found[3].value or b"")
    found[3] = found[3]._replace(value=json.dumps({**event, "value": event["value"] + 1}).encode())


def _pair_up(found: Records) -> None:
    at = json.loads(found[3].value or b"")["timestamp"]
    found[3] = found[3]._replace(value=json.dumps({"timestamp": at, "sum": 1}).encode())


def _add_closing(found: Records) -> None:
    event = next(data.closing(SEED, COUNT, PARTITIONS))
    found.append(Message(0, 10_000, pairs_events.timestamp(event.at_ms).encode(), event.encoded))


@pytest.mark.parametrize(
    "mutate, kind",
    [
        (lambda found: found.pop(3), "lost"),
        (lambda found: found.append(found[3]._replace(offset=10_000)), "duplicated"),
        (lambda found: found.append(Message(0, 10_000, None, None)), "unexpected"),
        (lambda found: found.append(Message(0, 10_000, b"k", b"[1]")), "unexpected"),
        (_add_closing, "unexpected"),
        (_change, "wrong"),
        (_pair_up, "wrong"),
        (lambda found: found.append(found.pop(3)._replace(key=b"none")), "wrong"),
        (lambda found: found.append((old := found.pop(3))._replace(partition=1 - old.partition)), "misplaced"),
    ],
)
def test_the_auditor_sees_what_is_wrong(story: list[Moment | Bad], mutate: Callable[[Records], Any], kind: str) -> None:
    expected = list(data.expected_unpaired(story))
    found = _topic(expected)
    assert _audit(expected, found).holds
    mutate(found)
    assert _audit(expected, found).counts == {**dict.fromkeys(KINDS, 0), kind: 1}


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., demo.Pairs]:
    """A run of the demo that has not begun; nobody listens at its broker."""

    def make(versions: str = "all", partitions: int = PARTITIONS) -> demo.Pairs:
        choices = demo.PairsChoices(records=COUNT, seed=SEED, kills=1, partitions=partitions, versions=versions)
        kind = demo.chosen(partitions, versions)
        run = kind(choices, "127.0.0.1:1", tmp_path, Deadline(60, "the test"))
        origins = {name: Origin("events", n % partitions, n) for n, name in enumerate(run.bad)}
        monkeypatch.setattr(kind, "origins", origins)
        return run

    return make


def _dead_letter(run: demo.Pairs, name: str, topic: str, **changed: str) -> Message:
    bad, origin = run.bad[name], run.origins[name]
    headers = demo.expected_cause(bad, of_processor=topic == "dead-letters")
    headers |= {"onceflow.attempt": "1", **origin_headers(origin)}
    headers |= {f"onceflow.{key.replace('_', '.')}": text for key, text in changed.items()}
    (key,) = [each.key for each in run.expected_dead_letters(topic) if each.identity == name]
    return Message(0, 1, key, bad.value, tuple((key, text.encode()) for key, text in headers.items()))


@pytest.mark.parametrize("topic", ["dead-letters", "dead-letters-sort"])
def test_letters_are_known_by_where_they_were_read(run_of: Callable[..., demo.Pairs], topic: str) -> None:
    """Not by their values: some have none."""
    run = run_of()
    assert {run.identify(topic, _dead_letter(run, name, topic)) for name in run.bad} == set(run.bad)
    assert run.identify(topic, _dead_letter(run, next(iter(run.bad)), topic, origin_offset="999999")) is None


@pytest.mark.parametrize("topic", ["dead-letters", "dead-letters-sort"])
@pytest.mark.parametrize(
    "changed", [{"error_class": "KeyError"}, {"origin_topic": "others"}, {"error_offset": "999999"}, {"attempt": "2"}]
)
def test_a_letter_that_says_something_else_is_seen(
    run_of: Callable[..., demo.Pairs], monkeypatch: pytest.MonkeyPatch, topic: str, changed: dict[str, str]
) -> None:
    run = run_of()
    right = [_dead_letter(run, name, topic) for name in run.bad]
    monkeypatch.setattr(demo, "read_topic", lambda *_: iter(right))
    assert run.wrong_causes(topic) == []
    wrong = [_dead_letter(run, name, topic, **changed) for name in run.bad]
    monkeypatch.setattr(demo, "read_topic", lambda *_: iter(wrong))
    assert len(run.wrong_causes(topic)) == len(run.bad)


def _table(run: demo.Pairs, moments: int, left: int) -> Records:
    """A table topic in which so many rows were put, and all but some of them deleted."""
    put = [Message(0, n, b"%d" % n, b"{}") for n in range(moments)]
    return put + [Message(0, moments + n, b"%d" % n, None) for n in range(moments - left)]


@pytest.mark.parametrize(
    "moments, left, told, problems",
    [
        (1000, 2 * PARTITIONS, 900, []),
        (1000, 2 * PARTITIONS + 1, 900, ["7 rows are left", "14 rows are left"]),
        (1000, 0, 900, ["0 rows are left", "0 rows are left"]),
        (COUNT, 2 * PARTITIONS, 900, ["processor: 16,000 rows of state"]),
        (1000, 2 * PARTITIONS, COUNT, ["grouped: 8,000 rows of state"]),
        (1000, 2 * PARTITIONS, 0, ["grouped: 0 rows of state"]),
    ],
)
def test_state_that_is_not_what_it_should_be_is_seen(
    run_of: Callable[..., demo.Pairs],
    monkeypatch: pytest.MonkeyPatch,
    moments: int,
    left: int,
    told: int,
    problems: list[str],
) -> None:
    run = run_of()
    for each in run.services:
        each.reports = [{"state_rows": told if "grouped" in each.flow else 1}, {}]
    dead_letters = {
        run.topics[topic]: [_dead_letter(run, name, topic) for name in run.bad] for topic in run.dead_letters
    }
    tables = {topic: _table(run, moments, n * left) for n, topic in enumerate(run.more_topics(), 1)}
    monkeypatch.setattr(demo, "read_topic", lambda _, topic, *__: iter((dead_letters | tables)[topic]))
    audit = Audit()
    run.look_further(audit, Display({}))
    assert [problem for problem, part in zip(audit.problems, problems, strict=True) if part not in problem] == []
    assert audit.facts["state_rows_peak"] == {"processor": 2 * moments, "join": 1, "grouped": told}


# ---- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "versions, flows, outputs",
    [
        ("processor", ["pairs"], ("pairs", "unpaired")),
        ("join", ["pairs-sort", "pairs-join"], ("pairs-join", "unpaired-join")),
        ("grouped", ["pairs-sort", "pairs-grouped"], ("pairs-grouped", "unpaired-grouped")),
        (
            "all",
            ["pairs", "pairs-sort", "pairs-join", "pairs-grouped"],
            ("pairs", "unpaired", "pairs-join", "unpaired-join", "pairs-grouped", "unpaired-grouped"),
        ),
    ],
)
def test_a_run_has_what_its_versions_need(
    run_of: Callable[..., demo.Pairs], versions: str, flows: list[str], outputs: tuple[str, ...]
) -> None:
    run = run_of(versions)
    assert [link.flow for link in run.links] == flows
    assert run.outputs == outputs
    assert set(run.expected()) == {*run.outputs, *run.dead_letters, *({"late"} if "late" in run.partitions else ())}
    for link in run.links:
        assert set(link.sources) <= set(run.partitions)
        assert ("--checkpoint" in run.command(link)) == ("as" in link.sources)


def test_all_versions_are_expected_to_come_to_the_same(run_of: Callable[..., demo.Pairs]) -> None:
    expected = {name: list(records) for name, records in run_of().expected().items()}
    for version in ("join", "grouped"):
        assert expected[f"pairs-{version}"] == expected["pairs"]
        assert expected[f"unpaired-{version}"] == expected["unpaired"]


def test_a_singleton_has_one_partition(run_of: Callable[..., demo.Pairs]) -> None:
    run = run_of(partitions=1)
    assert {run.partitions[name] for name in ("events", "as", "bs")} == {1}
    assert {record.partition for record in run.inputs()} == {0}


def test_batches_do_not_grow_with_the_run_and_kills_are_spread_over_all_of_them(tmp_path: Path) -> None:
    choices = demo.PairsChoices(records=1_000_000, seed=SEED, kills=3)
    run = demo.chosen(4, "all")(choices, "127.0.0.1:1", tmp_path, Deadline(60, "the test"))
    command = run.command(run.links[0])
    assert command[-command[::-1].index("--batch")] == str(run.records_per_batch) == "12000"
    last = [sum(kill.batches for kill in run.plan(random.Random(n), run.links[0])) for n in range(50)]
    assert 30 < max(last) < 1_000_000 // 12_000

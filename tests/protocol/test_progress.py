"""The progress record: written the same way every time, read back exactly, refused when it is not one."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from onceflow.errors import ProgressConflictError, ProtocolError
from onceflow.protocol.progress import (
    PROGRESS_FORMAT,
    CheckpointProgress,
    DriverProcess,
    EventTime,
    ForkOrigin,
    HandOver,
    Origin,
    Progress,
    Promotion,
    TableProgress,
    decode,
    encode,
    progress_partition,
)

PROGRESS = Progress(
    flow="orders",
    batch_id=12,
    offsets={"b": {10: 5, 2: 7}, "a": {0: 0}},
    topic_ids={"a": "x", "b": "y"},
    changelogs={"balances": {0: 99}},
    checkpoint=CheckpointProgress("0f-1", 7, "ab12"),
    watermark_ms=1_700_000_000_000,
    time_ms=1_700_000_000_123,
)
GOLDEN = (
    b'{"batch_id":12,"changelogs":{"balances":{"0":99}},"checkpoint":{"batch":7,"digest":"ab12"},'
    b'"checkpoint_query_id":"0f-1","flow":"orders","format":1,'
    b'"offsets":{"a":{"0":0},"b":{"2":7,"10":5}},"time_ms":1700000000123,"topic_ids":{"a":"x","b":"y"},'
    b'"watermark_ms":1700000000000}'
)


def test_golden_bytes() -> None:
    """Format 1 is in people's topics: these bytes may never change their meaning."""
    assert encode(PROGRESS) == (b"orders", GOLDEN)
    assert decode(b"orders", GOLDEN) == PROGRESS


def test_golden_bytes_of_a_flow_with_state() -> None:
    progress = Progress(
        flow="orders",
        batch_id=3,
        offsets={"a": {0: 9}},
        topic_ids={},
        changelogs={"balances": {0: 4}},
        time_ms=5,
        tables={"balances": TableProgress(2, 77), "other": TableProgress()},
        outputs=("settled", "statements"),
        producer_id=11,
        producer_epoch=6,
    )
    golden = (
        b'{"batch_id":3,"changelogs":{"balances":{"0":4}},"checkpoint_query_id":null,"flow":"orders","format":1,'
        b'"offsets":{"a":{"0":9}},"outputs":["settled","statements"],"producer_epoch":6,"producer_id":11,'
        b'"tables":{"balances":{"version":2,"watermark_ms":77},"other":{"version":0,"watermark_ms":null}},'
        b'"time_ms":5,"topic_ids":{},"watermark_ms":null}'
    )
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress


def test_golden_bytes_of_a_flow_whose_state_has_schemas() -> None:
    golden = GOLDEN.replace(
        b'"time_ms"', b'"tables":{"sums":{"schemas":[3,17],"version":0,"watermark_ms":null}},"time_ms"'
    )
    progress = replace(PROGRESS, tables={"sums": TableProgress(schemas=(3, 17))})
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", golden.replace(b"[3,17]", b'["3"]'))


def test_golden_bytes_of_a_flow_that_names_its_driver() -> None:
    """Versions before ignore the field, as any that they do not know; records of theirs have none."""
    golden = GOLDEN.replace(b'"flow":', b'"driver":{"host":"web-1","pid":412,"since_ms":1700000000000},"flow":')
    progress = replace(PROGRESS, driver=DriverProcess("web-1", 412, 1_700_000_000_000))
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert decode(b"orders", GOLDEN).driver is None
    later = golden.replace(b'"pid":412', b'"of_later_versions":[],"pid":412')
    assert decode(b"orders", later) == progress
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", golden.replace(b"412", b'"412"'))


@pytest.mark.parametrize("before", [None, "", "0c"])
def test_golden_bytes_of_a_flow_that_writes_another_system(before: str | None) -> None:
    follows = b"" if before is None else b'"external_before":"%b",' % before.encode()
    golden = GOLDEN.replace(b'"flow":', b'"external":"bank:ledger",' + follows + b'"external_commit":"0a1b","flow":')
    progress = replace(PROGRESS, external="bank:ledger", external_commit="0a1b", external_before=before)
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert (decode(b"orders", GOLDEN).external, decode(b"orders", GOLDEN).external_commit) == ("", "")


def test_golden_bytes_of_a_flow_that_names_its_transactional_id() -> None:
    golden = GOLDEN.replace(b'"watermark_ms":', b'"transactional_id":"a.onceflow.b","watermark_ms":')
    progress = replace(PROGRESS, transactional_id="a.onceflow.b")
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert decode(b"orders", GOLDEN).transactional_id == ""
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", golden.replace(b'"a.onceflow.b"', b"7"))


def test_golden_bytes_of_a_flow_that_has_found_keys_elsewhere() -> None:
    golden = GOLDEN.replace(b'"flow":', b'"elsewhere":{"keys":1700000000000,"outputs":9},"flow":')
    progress = replace(PROGRESS, elsewhere={"outputs": 9, "keys": 1_700_000_000_000})
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert decode(b"orders", GOLDEN).elsewhere == {}
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", golden.replace(b":9", b':"9"'))


def test_golden_bytes_of_a_copy_that_was_promoted() -> None:
    progress = Progress("next", 3, {}, {}, 1_700_000_000_000, became="sums")
    golden = (
        b'{"batch_id":3,"became":"sums","changelogs":{},"checkpoint_query_id":null,"flow":"next","format":1,"offsets":{},'
        b'"time_ms":1700000000000,"topic_ids":{},"watermark_ms":null}'
    )
    assert encode(progress) == (b"next", golden)
    assert decode(b"next", golden) == progress


def test_golden_bytes_of_a_flow_that_another_one_was_promoted_to() -> None:
    """A record of before does not say after which batch that was."""
    golden = GOLDEN.replace(
        b'"time_ms":',
        b'"promoted":{"batch_id":6,"flow":"next","inherited":["n","o"],"tables":{"t":"n"},"time_ms":9},"time_ms":',
    )
    progress = replace(PROGRESS, promoted=Promotion("next", 9, {"t": "n"}, 6, ("n", "o")))
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    before = golden.replace(b'"batch_id":6,', b"").replace(b'"inherited":["n","o"],', b"")
    assert decode(b"orders", before) == replace(PROGRESS, promoted=Promotion("next", 9, {"t": "n"}))
    for wrong in (b'"inherited":7,', b'"inherited":["n",1],', b""):
        with pytest.raises(ProtocolError, match="is not a progress record"):
            decode(b"orders", golden.replace(b'"inherited":["n","o"],', wrong))


def test_golden_bytes_of_a_flow_that_knows_leaders() -> None:
    golden = GOLDEN.replace(b'"flow":', b'"epochs":{"a":{"0":[0,4]},"b":{"2":[7,1],"10":[5,0]}},"flow":')
    progress = replace(PROGRESS, epochs={"b": {10: (5, 0), 2: (7, 1)}, "a": {0: (0, 4)}})
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert decode(b"orders", GOLDEN).epochs == {}


@pytest.mark.parametrize(
    "epochs", [[], {"a": []}, {"a": {"0": [1]}}, {"a": {"0": [1, -1]}}, {"a": {"x": [1, 2]}}, {"a": {"0": [1, True]}}]
)
def test_epochs_of_wrong_types_are_refused(epochs: Any) -> None:
    with pytest.raises(ProtocolError, match="is not a progress record"):
        decode(b"orders", json.dumps(json.loads(GOLDEN) | {"epochs": epochs}).encode())


def test_golden_bytes_of_a_flow_that_names_its_letters() -> None:
    """As above."""
    golden = GOLDEN.replace(b'"time_ms":', b'"side_topics":{"given-up":"parked","rejected":"dead letter"},"time_ms":')
    progress = replace(PROGRESS, side_topics={"rejected": "dead letter", "given-up": "parked"})
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    assert decode(b"orders", GOLDEN).side_topics == {}


def test_golden_bytes_of_a_table_with_event_time() -> None:
    """A record of before has no such time: it is that of the record, also after it is written again."""
    times = {("a", 0): EventTime(None, 60), (None, 1): EventTime(40, 70)}
    golden = GOLDEN.replace(
        b'"time_ms":',
        b'"tables":{"t":{"event_times":{"":{"1":[40,70]},"a":{"0":[null,60]}},"event_times_ms":80,"version":0,'
        b'"watermark_ms":30}},"time_ms":',
    )
    progress = replace(PROGRESS, tables={"t": TableProgress(watermark_ms=30, event_times=times, event_times_ms=80)})
    assert encode(progress) == (b"orders", golden)
    assert decode(b"orders", golden) == progress
    earlier = decode(b"orders", golden.replace(b'"event_times_ms":80,', b""))
    later = decode(*encode(replace(earlier, time_ms=PROGRESS.time_ms + 1)))
    assert later.tables["t"].event_times_ms == PROGRESS.time_ms
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", golden.replace(b'"event_times_ms":80', b'"event_times_ms":null'))


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
offsets = st.dictionaries(names, st.dictionaries(st.integers(0, 9999), st.integers(0, 2**62), max_size=4), max_size=3)

forks = st.builds(
    ForkOrigin,
    names,
    st.integers(0, 2**40),
    st.integers(0, 2**60),
    offsets,
    st.dictionaries(names, names, max_size=3),
    offsets,
)


@settings(max_examples=80, deadline=None, derandomize="CI" in os.environ)
@given(
    st.builds(
        Progress,
        flow=names,
        batch_id=st.integers(0, 2**40),
        offsets=offsets,
        topic_ids=st.dictionaries(names, names, max_size=3),
        changelogs=offsets,
        checkpoint=st.one_of(st.none(), st.builds(CheckpointProgress, names, st.integers(0, 2**40), names)),
        watermark_ms=st.one_of(st.none(), st.integers(-(2**40), 2**60)),
        time_ms=st.integers(0, 2**60),
        tables=st.dictionaries(
            names,
            st.builds(
                TableProgress,
                st.integers(0, 99),
                st.one_of(st.none(), st.integers(0, 2**60)),
                event_times=st.dictionaries(
                    st.tuples(st.none() | names, st.integers(0, 300)),
                    st.builds(EventTime, st.none() | st.integers(0, 2**60), st.integers(0, 2**60)),
                    min_size=1,
                    max_size=3,
                ),
                event_times_ms=st.integers(0, 2**60),
            )
            | st.builds(TableProgress, st.integers(0, 99), st.one_of(st.none(), st.integers(0, 2**60))),
            max_size=2,
        ),
        outputs=st.lists(names, max_size=3).map(tuple),
        side_topics=st.dictionaries(names, names, max_size=3),
        joined=offsets,
        joined_ms=st.one_of(st.none(), st.integers(0, 2**60)),
        driver=st.one_of(st.none(), st.builds(DriverProcess, names, st.integers(0, 2**31), st.integers(0, 2**60))),
        elsewhere=st.dictionaries(names, st.integers(0, 2**60), max_size=2),
        forked=st.none() | forks | forks.map(lambda each: replace(each, producer_id=7, producer_epoch=30_000)),
    )
)
def test_round_trip(progress: Progress) -> None:
    assert decode(*encode(progress)) == progress


T = 1_795_000_000_000
MAX_RECORD = 1_000_000  # below max.message.bytes of Kafka, 1,048,588


def of_many(count: int, seed: int = 1) -> Progress:
    """A flow that reads a topic of so many partitions into two tables with as many, with numbers as after years."""
    rng = random.Random(seed)

    def offsets(most: int) -> dict[int, int]:
        return {number: rng.randrange(most // 10, most) for number in range(count)}

    ends = offsets(10**10)
    since_ms = {number: T - rng.choice([0, 0, rng.randrange(60_000)]) for number in range(count)}
    times = [
        TableProgress(
            watermark_ms=T,
            event_times_ms=T,
            event_times={
                ("in", number): EventTime(T - rng.randrange(3_600_000), since_ms[number]) for number in range(count)
            },
        )
        for _ in range(2)
    ]
    return replace(
        Progress("flow", 10**7, {"in": ends}, {"in": "x" * 22}, T),
        changelogs={f"{name}{end}": offsets(10**9) for name in ("sums", "ids") for end in ("", "-internal")},
        tables=dict(zip(("sums", "ids"), times, strict=True)),
        # Brokers were restarted one after the other, again and again.
        epochs={"in": {number: (ends[number], rng.randrange(90, 100)) for number in range(count)}},
    )


def test_progress_of_10_000_partitions_and_two_tables_fits_into_a_record() -> None:
    progress = of_many(10_000)
    key, value = encode(progress)
    assert decode(key, value) == progress
    assert encode(decode(key, value)) == (key, value)
    assert len(value) < MAX_RECORD * 9 // 10
    of_time = len(value) - len(encode(replace(progress, tables={}))[1])
    of_epochs = len(value) - len(encode(replace(progress, epochs={}))[1])
    assert of_time < 2 * 10_000 * 15
    assert of_epochs < 10_000 * 11
    one = replace(progress, epochs={"in": {number: (at, 7) for number, (at, _) in progress.epochs["in"].items()}})
    assert len(encode(one)[1]) - len(encode(replace(one, epochs={}))[1]) < 50, "usually, most epochs are equal"


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize="CI" in os.environ)
@given(data=st.data(), count=st.integers(95, 130))
def test_round_trip_of_many_partitions(data: st.DataObject, count: int) -> None:
    """Some partitions are missing, have no event time yet, or an epoch of an earlier offset, or none."""
    progress = of_many(count, data.draw(st.integers(0, 99)))
    some = st.sets(st.integers(0, count - 1), max_size=count)
    gone, untimed, earlier, unknown = (data.draw(some) for _ in range(4))
    epochs = {
        number: (at - (number in earlier), epoch)
        for number, (at, epoch) in progress.epochs["in"].items()
        if number not in unknown
    }
    tables = {
        name: replace(
            table,
            event_times_ms=T if len(gone) < count else 0,
            event_times={
                (data.draw(st.sampled_from(["in", None])), number): time._replace(
                    latest_ms=None if number in untimed else time.latest_ms
                )
                for (_, number), time in table.event_times.items()
                if number not in gone
            },
        )
        for name, table in progress.tables.items()
    }
    offsets = {number: at for number, at in progress.offsets["in"].items() if number not in gone}
    progress = replace(progress, tables=tables, offsets={"in": offsets}, epochs={"in": epochs} if epochs else {})
    assert decode(*encode(progress)) == progress
    assert encode(decode(*encode(progress))) == encode(progress)


def with_many(field: str, numbers: Any) -> Progress:
    """A flow that knows something of these partitions of a topic."""
    offsets = {"many": dict.fromkeys(numbers, 7)}
    times: dict[Origin, EventTime] = {("many", number): EventTime(T, T) for number in numbers}
    fields: dict[str, dict[str, Any]] = {
        "event_times": {"tables": {"t": TableProgress(event_times=times, event_times_ms=T)}},
        "epochs": {
            "offsets": {"many": dict.fromkeys([*numbers, 10_000], 7)},  # no list: there is a gap
            "epochs": {"many": dict.fromkeys(numbers, (7, 1))},
        },
        "forked": {"forked": ForkOrigin("old", 1, 0, offsets)},
        "outputs": {"forked": ForkOrigin("old", 1, 0, outputs=offsets)},
        "handover": {"handover": HandOver(offsets)},
    }
    return replace(PROGRESS, **fields.get(field, {field: offsets}))


FIELDS_OF_MANY = ["offsets", "changelogs", "joined", "event_times", "epochs", "forked", "outputs", "handover"]


@pytest.mark.parametrize("field", FIELDS_OF_MANY)
def test_a_record_that_earlier_versions_cannot_read_has_a_higher_format(field: str) -> None:
    """They say that it was written by a newer onceflow, not that it is no progress record."""
    for numbers, version in ((range(99), 1), (range(100), 2)):
        progress = with_many(field, numbers)
        key, value = encode(progress)
        assert json.loads(value)["format"] == version
        assert decode(key, value) == progress
        smaller = replace(decode(key, value), **{name: getattr(PROGRESS, name) for name in vars(PROGRESS)})
        assert encode(smaller) == (b"orders", GOLDEN), "the format is that of the record, not of the one before"
        assert decode(key, value.replace(b'"format":2', b'"format":1')) == progress, "as it was written before"


@pytest.mark.parametrize("field", ["offsets", "changelogs", "joined", "forked", "outputs", "handover"])
def test_many_partitions_with_a_gap_can_be_read_by_earlier_versions(field: str) -> None:
    key, value = encode(with_many(field, [*range(100), 101]))
    assert json.loads(value)["format"] == 1
    assert decode(key, value) == with_many(field, [*range(100), 101])


@pytest.mark.parametrize(
    "field, wrong",
    [
        ("leaders", []),
        ("leaders", {"a": 7}),
        ("leaders", {"a": {}}),
        ("leaders", {"a": {"epoch": -1}}),
        ("leaders", {"a": {"epoch": 1, "other": {"0": None}}}),
        ("leaders", {"a": {"epoch": 1, "unknown": 4}}),
        ("leaders", {"a": {"epoch": 1, "unknown": ["x"]}}),
        ("offsets", {"a": [1, None]}),
        ("offsets", {"a": [1, -1]}),
    ],
)
def test_fields_of_many_partitions_with_wrong_types_are_refused(field: str, wrong: Any) -> None:
    with pytest.raises(ProtocolError, match="is not a progress record"):
        decode(b"orders", json.dumps(json.loads(GOLDEN) | {field: wrong}).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 10**12, "latest_ms": [0, [1]], "since_ms": [0, [1]]},
        {"partitions": 1, "latest_ms": [0, [1]], "since_ms": [0, [None]]},
        {"partitions": 1, "latest_ms": [0, [1, 2]], "since_ms": [0, [1]]},
        {"partitions": [-1], "latest_ms": [0, [1]], "since_ms": [0, [1]]},
        {"partitions": 1, "latest_ms": 5, "since_ms": [0, [1]]},
        {"partitions": 1, "latest_ms": [0, [1]]},
    ],
)
def test_event_times_of_many_partitions_with_wrong_types_are_refused(wrong: Any) -> None:
    tables = {"t": {"version": 1, "watermark_ms": None, "event_times": {"in": wrong}}}
    with pytest.raises(ProtocolError, match="is not a progress record"):
        decode(b"orders", json.dumps(json.loads(GOLDEN) | {"tables": tables}).encode())


def test_numpy_numbers_are_written_as_numbers() -> None:
    offsets: Any = {"a": {np.int32(1): np.int64(7)}}
    key, value = encode(Progress("f", 1, offsets, {}, time_ms=0))
    assert decode(key, value).offsets == {"a": {1: 7}}


def test_unknown_fields_are_ignored_and_optional_ones_may_be_missing() -> None:
    content = json.loads(GOLDEN) | {"later": {"x": 1}}
    assert decode(b"orders", json.dumps(content).encode()) == PROGRESS
    for name in ("changelogs", "checkpoint_query_id", "watermark_ms"):
        del content[name]
    short = decode(b"orders", json.dumps(content).encode())
    assert (short.changelogs, short.checkpoint, short.watermark_ms) == ({}, None, None)


def test_newer_format_says_so() -> None:
    content = {"format": PROGRESS_FORMAT + 1, "anything": "else"}
    with pytest.raises(ProgressConflictError, match="written by a newer onceflow") as caught:
        decode(b"orders", json.dumps(content).encode())
    assert "upgrade" in caught.value.next_step
    assert caught.value.flow == "orders"


def test_record_of_another_flow() -> None:
    with pytest.raises(ProgressConflictError, match="belongs to flow 'orders'"):
        decode(b"payments", GOLDEN)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_id": "12"},
        {"batch_id": True},
        {"batch_id": -1},
        {"batch_id": None},
        {"format": "1"},
        {"format": 0},
        {"flow": 3},
        {"offsets": []},
        {"offsets": {"a": 5}},
        {"outputs": "a"},
        {"outputs": [5]},
        {"side_topics": ["a"]},
        {"side_topics": {"a": None}},
        {"offsets": {"a": {"x": 5}}},
        {"offsets": {"a": {"-1": 5}}},
        {"offsets": {"a": {"²": 5}}},
        {"offsets": {"a": {"0": -5}}},
        {"offsets": {"a": {"0": 1.5}}},
        {"offsets": {"a": {"0": False}}},
        {"changelogs": None},
        {"topic_ids": {"a": 1}},
        {"topic_ids": None},
        {"checkpoint_query_id": 4},
        {"watermark_ms": "x"},
        {"tables": []},
        {"tables": {"a": 1}},
        {"producer_id": "x"},
        {"driver": "web-1"},
        {"time_ms": None},
    ],
)
def test_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    content = json.loads(GOLDEN) | changes
    with pytest.raises(ProtocolError, match="not a progress record") as caught:
        decode(b"orders", json.dumps(content).encode())
    assert next(iter(changes)) in caught.value.detail


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"{", b"[1]", b"null", b'"x"', b"[" * 100_000])
def test_garbage_is_refused(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(b"orders", value)


@pytest.mark.parametrize("key", [None, b"", b"\xff"])
def test_garbage_keys_are_refused(key: bytes | None) -> None:
    with pytest.raises(ProtocolError, match="not a progress record"):
        decode(key, GOLDEN)


@settings(max_examples=30, deadline=None, derandomize="CI" in os.environ)
@given(st.binary(max_size=60))
def test_any_bytes_give_one_of_our_errors(value: bytes) -> None:
    with pytest.raises((ProtocolError, ProgressConflictError)):
        decode(b"orders", value)


def test_partition_is_that_of_the_key() -> None:
    for flow in ("orders", "a", "validated-deposits"):
        assert progress_partition(flow, 50) == (murmur2(flow.encode()) & 0x7FFF_FFFF) % 50

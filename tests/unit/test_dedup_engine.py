"""The engine of ``Flow.deduplicate`` against a model: which records pass, what is kept, what is deleted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import ProcessorError
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.api.deduplication import EVENT_TIME, RECORD_KEY, SOURCE_COLUMNS, Deduplication
from onceflow.state.api.serdes import LONG
from onceflow.state.engine import dedup_engine
from onceflow.state.engine.dedup_engine import DedupEngine
from onceflow.state.format import rows, segments, stamps
from onceflow.state.format.segments import Segments
from onceflow.state.local.catch_up import stamped_rows
from onceflow.state.local.format import Changes
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.stamped_view import StampedView
from onceflow_workshop.testing.engines import engine_of

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    yield MemoryStore.open(tmp_path)
    MemoryStore.remove(tmp_path)


def engine(store: Any, watermark_ms: int | None = None, *, options: Any = None, **how: Any) -> DedupEngine:
    how = how or {"within_ms": 1000}
    given_options = {"partition": 2, "now_ms": 5, **(options or {})}
    run = engine_of(DedupEngine, Deduplication(**how), store, watermark_ms=watermark_ms, **given_options)
    run.start()
    return run


def batch(*records: tuple[Any, Any], **columns: Any) -> pa.RecordBatch:
    """Records of an id and a time, each with its number as value."""
    given_columns = {
        "key": pa.array([id_ for id_, _ in records], pa.binary()),
        "value": pa.array([b"%d" % number for number in range(len(records))], pa.binary()),
        "timestamp": pa.array([ms for _, ms in records], pa.int64()),
        **columns,
    }
    return pa.RecordBatch.from_arrays(list(given_columns.values()), names=list(given_columns))


def ran(store: Any, run: DedupEngine, *batches: pa.RecordBatch) -> list[bytes]:
    """Run a batch to its commit. Returns the values of the records that went to the default topic."""
    for each in batches:
        run.feed(each)
    run.finish()
    outputs = run.outputs()
    changes, before = run.local_changes(), len(ids_in(store))
    assert len(changes) == len(dict(changes))
    store.write(changes, index=True)
    assert before + run.growth(run.changes())[b"v"] == len(ids_in(store)) == store.rows_by_kind().get("S", 0)
    assert store.checksum_holds()
    assert StampedView.of(store).row_count() == len(ids_in(store))
    return [] if outputs is None else outputs.filter(outputs["topic"].is_null())["value"].to_pylist()


def ids_in(store: Any) -> dict[bytes, int]:
    found = dict(StampedView(store).scan(b"v", b"w"))
    return dict(zip([key[1:] for key in found], stamps.stamps_of(list(found.values())).tolist(), strict=True))


def segments_in(store: Any) -> int:
    return len(Segments(store).listed)


# ---- what passes -------------------------------------------------------------------------------------


def test_the_first_record_of_an_id_passes_unchanged(store: Any) -> None:
    headers = pa.array([[{"key": "h", "value": b"1"}], None, []], HEADERS)
    run = engine(store)
    run.feed(batch((b"a", 10), (b"b", 20), (b"a", 5), headers=headers, partition=pa.array([0, 1, 0])))
    outputs = run.outputs()
    assert outputs is not None
    record = ["key", "value", "topic", "headers", "timestamp"]
    assert outputs.select(record).to_pylist() == [
        {"key": b"a", "value": b"0", "topic": None, "headers": [{"key": "h", "value": b"1"}], "timestamp": 10},
        {"key": b"b", "value": b"1", "topic": None, "headers": None, "timestamp": 20},
    ]
    run.feed(batch((b"b", 30), (b"c", 40)))
    assert run.outputs().to_pydict()["key"] == [b"c"]  # type: ignore[union-attr]
    assert dict(run.changes()) == {b"v" + key: stamps.row_of(ms) for key, ms in ((b"a", 10), (b"b", 20), (b"c", 40))}
    assert run.counts["duplicates"] == 2
    assert run.counts["records"] == 5
    assert not run.counts["aside"]
    assert run.max_event_ms == {(None, 0): 10, (None, 1): 20, (None, 2): 40}
    assert run.next_timer_ms == {"event": None, "processing": None}


def test_the_key_of_the_record_is_not_the_id(store: Any) -> None:
    keys = pa.array([b"k", None, b"k"], pa.binary())
    run = engine(store, within_ms=1000, id_is_key=False, id_name="order")
    run.feed(batch((b"a", 1), (b"b", 2), (b"a", 3), **{RECORD_KEY: keys}))
    assert run.outputs().to_pydict()["key"] == [b"k", None]  # type: ignore[union-attr]
    run = engine(store, within_ms=1000)  # the id is the key, or its hash
    run.feed(batch((b"sha256:1", 1), (b"b", 2), **{RECORD_KEY: pa.array([b"long", None], pa.binary())}))
    assert run.outputs().to_pydict()["key"] == [b"long", b"b"]  # type: ignore[union-attr]


def test_an_id_is_forgotten_when_the_watermark_has_passed_it(store: Any) -> None:
    assert ran(store, engine(store), batch((b"a", 10), (b"b", 20))) == [b"0", b"1"]
    assert ran(store, engine(store, 10), batch((b"a", 30), (b"b", 30))) == []
    assert ran(store, engine(store, 11), batch((b"a", 30), (b"b", 30))) == [b"0"]
    assert ids_in(store) == {b"a": 30, b"b": 20}
    assert ran(store, engine(store, 31), batch((b"c", 40))) == [b"0"]
    assert ids_in(store) == {b"c": 40}
    assert segments_in(store) == 1
    assert ran(store, engine(store, 41), batch()) == []
    assert ids_in(store) == {}
    assert not list(store.scan(b""))


def test_late_records_are_not_judged(store: Any) -> None:
    late = engine(store, 10, options={"late_topic": "late"})
    late.feed(batch((b"a", 9), (b"a", 10), (b"b", 3)))
    outputs = late.outputs()
    assert outputs is not None
    assert [(each["key"], each["topic"]) for each in outputs.to_pylist()] == [
        (b"a", None),
        (b"a", "late"),
        (b"b", "late"),
    ]
    assert late.counts["late"] == late.counts["aside"] == 2
    assert ids_in(store) == {}
    dropped = engine(store, 10)
    assert ran(store, dropped, batch((b"a", 9), (b"a", 10))) == [b"1"]
    assert dropped.counts["late"] == 1
    assert not dropped.counts["aside"]


def test_an_event_time_of_its_own(store: Any) -> None:
    times = pa.array([7, 9], pa.int64())
    run = engine(store, 8)
    assert ran(store, run, batch((b"a", 100), (b"b", -1), **{EVENT_TIME: times})) == [b"1"]
    assert ids_in(store) == {b"b": 9}
    assert run.max_event_ms == {(None, 2): 9}


def test_duplicates_go_to_their_topic(store: Any) -> None:
    ran(store, engine(store), batch((b"a", 10)))
    run = engine(store, within_ms=1000, duplicates_topic="twice")
    run.feed(batch((b"b", 15), (b"a", 20), (b"b", 30), offset=pa.array([7, 8, 9])))
    outputs = run.outputs()
    assert outputs is not None
    assert [(each["key"], each["topic"]) for each in outputs.to_pylist()].count((b"b", None)) == 1
    aside = {each["key"]: each for each in outputs.to_pylist() if each["topic"] == "twice"}
    headers = {key: {h["key"]: h["value"] for h in each["headers"]} for key, each in aside.items()}
    assert {key: h["onceflow.duplicate.seen"] for key, h in headers.items()} == {b"a": b"10", b"b": b"15"}
    assert headers[b"a"]["onceflow.error.class"] == b"DuplicateRecord"
    assert headers[b"a"]["onceflow.duplicate.id"] == b"a"
    assert headers[b"a"]["onceflow.error.offset"] == b"8"
    assert aside[b"a"]["value"] == b"1"
    assert aside[b"a"]["timestamp"] == 20
    assert run.counts["duplicates"] == run.counts["aside"] == 2


def test_a_record_without_id_or_time_is_bad(store: Any) -> None:
    with pytest.raises(ProcessorError, match="no id: column 'order' is null"):
        engine(store, within_ms=1000, id_name="order").feed(batch((None, 3)))
    with pytest.raises(ProcessorError, match="no event time since 1970"):
        engine(store).feed(batch((b"a", None)))
    run = engine(store, options={"on_error": "dead-letter", "dead_letter_topic": "bad"})
    run.feed(batch((b"a", -1), (b"b", 1), (None, 2)))
    assert sorted(map(str, run.outputs().to_pydict()["topic"])) == ["None", "bad", "bad"]  # type: ignore[union-attr]
    assert run.counts["dead_letters"] == run.counts["aside"] == 2
    by_count = engine(store, records=3)  # no time is needed
    by_count.feed(batch((b"x", -1), (b"y", None)))
    assert by_count.outputs().to_pydict()["timestamp"] == [None, None]  # type: ignore[union-attr]


def places(run: DedupEngine) -> list[tuple[Any, ...]]:
    """Value, topic, and where it was read, of each output."""
    found: Any = run.outputs()
    return [tuple(row.values()) for row in found.select(["value", "topic", *SOURCE_COLUMNS.values()]).to_pylist()]


def test_what_passes_says_where_it_was_read(store: Any) -> None:
    """Side outputs do not: their headers say it."""
    run = engine(store, options={"source_topic": "orders"}, within_ms=1000, duplicates_topic="twice")
    place = {"partition": pa.array([3, 4, 5], pa.int32()), "offset": pa.array([70, 80, 90], pa.int64())}
    run.feed(batch((b"a", 10), (b"b", 20), (b"a", 5), **place))
    assert places(run) == [
        (b"0", None, "orders", 3, 70),
        (b"1", None, "orders", 4, 80),
        (b"2", "twice", None, None, None),
    ]
    run.feed(batch((b"c", 10)))
    assert places(run) == [(b"0", None, "orders", None, None)]
    run.feed(batch((b"d", 10), (b"e", 10), topic=pa.array(["x", None]), offset=pa.array([1, None], pa.int64())))
    assert places(run) == [(b"0", None, "x", None, 1), (b"1", None, "orders", None, None)]


def failed(*topics: str | None) -> Any:
    """Headers of dead letters that were first read from these topics; None: of a record that was none."""
    return pa.array(
        [
            topic
            and [{"key": "onceflow.origin.topic", "value": topic.encode()}, {"key": "onceflow.attempt", "value": b"1"}]
            for topic in topics
        ],
        HEADERS,
    )


@pytest.mark.parametrize("way", ["dead-letter", "fail"])
def test_a_record_that_comes_back_in_front_is_not_dropped_as_its_own_duplicate(store: Any, way: str) -> None:
    options = {
        "on_error": way, "dead_letter_topic": "failed" if way == "dead-letter" else None,
        "own_topics": OwnTopics(frozenset({"orders", "retry"})),
    }  # fmt: skip
    ran(store, engine(store, options=options), batch((b"a", 5000)))
    again = batch((b"a", 5000), (b"a", 5000), (b"a", 5000), (b"b", 1), (b"c", 5000))
    headers = failed("orders", None, "of-another-flow", "orders", "orders")
    again = again.append_column("headers", headers)
    run = engine(store, 4000, options=options)
    if way == "fail":
        with pytest.raises(ProcessorError, match="read the retry topic behind the step"):
            run.feed(again)
        return
    run.feed(again)
    outputs: Any = run.outputs()
    assert outputs.select(["value", "topic"]).to_pylist() == [
        {"value": b"4", "topic": None},
        {"value": b"0", "topic": "failed"},
        {"value": b"3", "topic": "failed"},
    ]
    assert (run.counts["duplicates"], run.counts["dead_letters"], run.counts["late"]) == (2, 2, 0)


# ---- the last ids ------------------------------------------------------------------------------------


def test_the_last_ids_are_remembered(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEAST_CAPACITY", 1)
    assert len(ran(store, engine(store, records=2), batch((b"a", 0), (b"b", 0), (b"c", 0), (b"a", 0)))) == 3
    assert ids_in(store) == {b"a": 0, b"b": 1, b"c": 2}
    assert ran(store, engine(store, records=2), batch((b"b", 0), (b"c", 0), (b"a", 0))) == [b"2"]
    assert ids_in(store) == {b"b": 1, b"c": 2, b"a": 3}
    assert ran(store, engine(store, records=2), batch((b"a", 0), (b"c", 0))) == []
    assert ran(store, engine(store, records=2), batch((b"b", 0), (b"d", 0))) == [b"0", b"1"]
    ran(store, engine(store, records=2), batch())
    assert ids_in(store) == {b"b": 4, b"d": 5}


def test_no_more_is_kept_than_asked_for(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEAST_CAPACITY", 20)
    for number in range(40):
        ran(store, engine(store, records=50), batch(*[(b"%d" % (number * 20 + i), 0) for i in range(20)]))
        assert len(ids_in(store)) <= 50 + 20 + 20, "an index row of a batch, and the batch itself"
    assert segments_in(store) <= 5


def test_expired_ids_are_deleted_in_portions(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup_engine, "DELETED_PER_BATCH", 30)
    ran(store, engine(store), batch(*[(b"%03d" % i, i) for i in range(100)]))
    left = []
    while ids_in(store):
        run = engine(store, 1000)
        assert ran(store, run, batch()) == []
        left.append(len(ids_in(store)))
        assert run.counts["expired"] == 30 or not left[-1]
    assert left == [70, 40, 10, 0]
    ran(store, engine(store), batch(*[(b"%03d" % i, i) for i in range(100)]))
    assert len(ran(store, engine(store, 1000), batch(*[(b"%03d" % i, 2000) for i in range(100)]))) == 100
    assert len(ids_in(store)) == 100


# ---- a model -----------------------------------------------------------------------------------------

RECORDS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f\0", b"\xff"]), st.integers(0, 40)))
BATCHES = st.lists(st.tuples(RECORDS, RECORDS), max_size=8)


def model(batches: Iterable[tuple[list[Any], list[Any]]], within: int | None, kept: int) -> list[list[int]]:
    """Which records of each batch pass."""
    seen: dict[bytes, int] = {}
    latest, number, found = None, 0, []
    for parts in batches:
        floor = number - kept if within is None else -1 if latest is None else latest - within
        remembered = {id_ for id_, stamp in seen.items() if stamp >= floor}
        passed = []
        for at, (id_, ms) in enumerate([*parts[0], *parts[1]]):
            latest = ms if latest is None else max(latest, ms)
            if id_ not in remembered and (within is None or ms >= floor):
                passed.append(at)
                remembered.add(id_)
                seen[id_] = number if within is None else ms
                number += 1
        found.append(passed)
    return found


@pytest.mark.parametrize("within", [10, None])
@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.long)])
@pytest.mark.slow
def test_model(examples: int, within: int | None, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(batches=BATCHES)
    def check(batches: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "LEAST_CAPACITY", 2)  # so that there are many
            patch.setattr(dedup_engine, "DELETED_PER_BATCH", 3)
            play(within, batches, tmp_path_factory.mktemp("model"))

    check()


def play(within: int | None, batches: Any, folder: Path) -> None:
    store = MemoryStore.open(folder)
    topic: dict[bytes, bytes] = {}
    latest, found = None, []
    for first, second in batches:
        watermark = None if latest is None or within is None else latest - within
        how: Any = {"records": 3} if within is None else {"within_ms": within}
        run = engine(store, watermark, **how)
        parts = []
        for part, start in ((first, 0), (second, len(first))):
            rows_ = batch(*part)
            values = pa.array([b"%d" % (start + i) for i in range(len(part))], pa.binary())
            parts.append(rows_.set_column(1, "value", values))
        found.append([int(value) for value in ran(store, run, *parts)])
        for key, row in run.changes():
            if key[:1] == b"v":
                topic.update({key[1:]: row[1:]}) if row is not None else topic.pop(key[1:])
        latest = max([ms for _, ms in [*first, *second]] + ([] if latest is None else [latest]), default=None)
        store = restored(store, folder, topic) if len(found) % 3 == 0 else store
    assert found == model(batches, within, 3)
    assert set(ids_in(store)) == set(topic)
    MemoryStore.remove(folder)


def restored(store: Any, folder: Path, topic: dict[bytes, bytes]) -> Any:
    """A store with nothing but what is in the topic."""
    nothing = np.zeros(len(topic), np.int64)
    keys, values = pa.array(topic.keys(), pa.binary()), pa.array(topic.values(), pa.binary())
    found = stamped_rows(RecordColumns(keys, values, nothing, nothing, nothing.astype(np.int32)))
    changes: Changes = dict(zip(found.keys.to_pylist(), found.rows.to_pylist(), strict=True))
    store.close()
    MemoryStore.remove(folder)
    fresh = MemoryStore.open(folder)
    fresh.write(changes, index=True)
    return fresh


# ---- stamps ------------------------------------------------------------------------------------------


def test_a_stamp_is_a_long_for_readers_of_the_table() -> None:
    assert LONG.decode(stamps.row_of(1_700_000_000_123)[1:]) == 1_700_000_000_123
    assert stamps.rows_of(np.array([0, 5, 1 << 62])) == [stamps.row_of(stamp) for stamp in (0, 5, 1 << 62)]
    assert stamps.stamps_of([stamps.row_of(7), None]).tolist() == [7, -1]
    assert rows.unpack(stamps.row_of(7)).payload == LONG.encode(7)


def test_records_of_others_are_soon_deleted() -> None:
    for value in (b"", b"text", LONG.encode(-5), b"123456789"):
        assert stamps.from_value(value) == stamps.row_of(0)
    assert stamps.from_value(LONG.encode(5)) == stamps.row_of(5)

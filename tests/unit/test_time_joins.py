"""The engines of ``Flow.join_interval`` and ``Flow.join_as_of`` against a computation over the whole input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.api.time_joins import IS_RIGHT, AsOfJoin, IntervalJoin
from onceflow.state.engine import output_collector, time_join_engine
from onceflow.state.engine.as_of_engine import AsOfEngine
from onceflow.state.engine.interval_engine import IntervalEngine
from onceflow.state.format import rows
from onceflow.state.local.catch_up import internal_rows
from onceflow.state.local.row_fields import index_of
from onceflow.state.stores.memory_store import MemoryStore
from onceflow_workshop.testing.engines import engine_of

pytestmark = pytest.mark.slow

LATENESS_MS = 3


class Sent(NamedTuple):
    right: bool
    key: bytes
    ms: int
    value: bytes | None


class Joined(NamedTuple):
    key: bytes
    left: bytes | None
    left_ms: int | None
    right: bytes | None
    right_ms: int | None


class Run:
    """Batches of one partition. The watermark follows the greatest time, as in a flow with one source partition."""

    def __init__(self, folder: Path, join: Any) -> None:
        self.join = join
        self.folder = folder
        self.store = MemoryStore.open(folder)
        self.kind: Any = IntervalEngine if isinstance(join, IntervalJoin) else AsOfEngine
        self.batch = 0
        self.watermark: int | None = None
        self.results: list[Joined] = []
        self.late: list[Sent] = []
        self.taken: list[Sent] = []
        self.letters, self.now_ms = 0, 10_000

    def send(self, *records: Sent, feeds: int = 1) -> list[Joined]:
        self.batch += 1
        before = len(self.results)
        options = {"late_topic": "late", "on_error": "dead-letter", "dead_letter_topic": "bad", "batch": self.batch}
        engine = engine_of(self.kind, self.join, self.store, watermark_ms=self.watermark, now_ms=self.now_ms, **options)
        engine.start()
        for part in np.array_split(np.arange(len(records)), feeds):
            if len(part):
                engine.feed(_rows([records[at] for at in part]))
        engine.finish()
        late = [self.watermark is not None and each.ms < self.watermark for each in records]
        self.late += [each for each, is_late in zip(records, late, strict=True) if is_late]
        self.taken += [each for each, is_late in zip(records, late, strict=True) if not is_late]
        for row in (row for outputs in iter(engine.outputs, None) for row in outputs.to_pylist()):
            if row["topic"] is None:
                names = ("key", "left_value", "left_timestamp", "right_value", "right_timestamp")
                self.results.append(Joined(*[row[name] for name in names]))
                times = [row[name] for name in ("left_timestamp", "right_timestamp") if row[name] is not None]
                assert row["timestamp"] == max(times)
            else:
                self.letters += row["topic"] == "bad"
        assert engine.counts["late"] == sum(late)
        due = engine.next_timer_ms["event"]
        changes = engine.local_changes()
        assert len(changes) == len(dict(changes))
        before_rows = self.count()
        self.store.write(changes, index=True)
        assert before_rows + engine.growth(engine.changes()).get(b"m", 0) == self.count()
        first = next(self.store.scan(rows.DUE_INDEX, rows.after(rows.DUE_INDEX)), None)
        assert due == (None if first is None else rows.due_index_parts(first[0])[0])
        if engine.max_event_ms:
            reached = max(engine.max_event_ms.values()) - LATENESS_MS
            self.watermark = reached if self.watermark is None else max(reached, self.watermark)
        return self.results[before:]

    def end(self) -> None:
        """Move the watermark beyond everything."""
        self.send(Sent(False, b"end", 9_000_000, b""))
        while self.timers_are_due():
            self.send()

    def timers_are_due(self) -> bool:
        assert self.watermark is not None
        first = next(self.store.scan(rows.DUE_INDEX, rows.DUE_INDEX + rows.time_bytes(self.watermark + 1)), None)
        return first is not None

    def restore(self) -> None:
        """Write the rows into an empty store, as a restore does."""
        kept = [(key, row) for key, row in self.store.scan(b"m", b"n")]
        columns = [pa.array(column, pa.binary()) for column in ([key for key, _ in kept], [row for _, row in kept])]
        nothing = np.zeros(len(kept), np.int64)
        found = internal_rows(RecordColumns(*columns, nothing, nothing, nothing.astype(np.int32)))
        assert not found.ignored
        index = index_of(found)
        there = [key for key, _ in self.store.scan(rows.DUE_INDEX, rows.after(rows.DUE_INDEX))]
        assert sorted([] if index is None else index.keys.to_pylist()) == there
        MemoryStore.remove(self.folder)
        self.store = MemoryStore.open(self.folder)
        self.store.write(kept, index=True)
        assert [key for key, _ in self.store.scan(rows.DUE_INDEX, rows.after(rows.DUE_INDEX))] == there

    def count(self) -> int:
        return sum(1 for _ in self.store.scan(b"m", b"n"))


def _rows(records: Sequence[Sent]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([each.key for each in records], pa.binary()),
            "value": pa.array([each.value for each in records], pa.binary()),
            "timestamp": pa.array([each.ms for each in records], pa.int64()),
            IS_RIGHT: pa.array([each.right for each in records]),
        }
    )


def intervals(sent: Sequence[Sent], join: IntervalJoin) -> Counter[Joined]:
    """All pairs, and what has none, over the whole input."""
    found = Counter[Joined]()
    lefts, rights = [each for each in sent if not each.right], [each for each in sent if each.right]
    alone = [True] * len(rights)
    for left in lefts:
        matched = False
        for at, right in enumerate(rights):
            if left.key == right.key and left.ms - join.before_ms <= right.ms <= left.ms + join.after_ms:
                found[Joined(left.key, left.value, left.ms, right.value, right.ms)] += 1
                matched, alone[at] = True, False
        if not matched and join.how in ("left", "full"):
            found[Joined(left.key, left.value, left.ms, None, None)] += 1
    if join.how in ("right", "full"):
        for right, is_alone in zip(rights, alone, strict=True):
            if is_alone:
                found[Joined(right.key, None, None, right.value, right.ms)] += 1
    return found


def as_of(sent: Sequence[Sent], join: AsOfJoin) -> Counter[Joined]:
    found = Counter[Joined]()
    for left in (each for each in sent if not each.right):
        best: Sent | None = None
        for right in sent:
            if right.right and right.key == left.key and right.ms <= left.ms and (best is None or right.ms >= best.ms):
                best = right
        if best is not None and join.tolerance_ms is not None and left.ms - best.ms > join.tolerance_ms:
            best = None
        if best is not None and best.value is None:
            best = None
        if best is not None:
            found[Joined(left.key, left.value, left.ms, best.value, best.ms)] += 1
        elif join.how == "left":
            found[Joined(left.key, left.value, left.ms, None, None)] += 1
    return found


# Times and keys are few, so that bounds are met exactly.
KEYS = st.one_of(st.just(b"a"), st.sampled_from([b"a", b"a\0", b"", b"\0\0", b"a\0\1", b"\xff"]))
VALUES = st.one_of(st.none(), st.sampled_from([b"", b"1", b"2", b"\0", b"x" * 30]))
SENT = st.builds(Sent, st.booleans(), KEYS, st.integers(0, 14), VALUES)
HISTORY = st.lists(st.tuples(st.lists(SENT, max_size=6), st.integers(1, 3), st.booleans()), max_size=8)


def tried(folder: Path, join: Any, history: Any, judge: Any) -> Run:
    run = Run(folder / "store", join)
    try:
        for records, feeds, restored in history:
            run.send(*records, feeds=feeds)
            if restored:
                run.restore()
        run.end()
        ended = Joined(b"end", b"", 9_000_000, None, None)  # it waits
        assert Counter(run.results) == judge(run.taken, join) - Counter([ended])
    finally:
        MemoryStore.remove(folder / "store")
    return run


@pytest.fixture(autouse=True)
def few_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_collector, "_TAKEN_BYTES", 200)
    monkeypatch.setattr(time_join_engine, "_DUE_READ", 2)
    monkeypatch.setattr(time_join_engine, "_DUE_BYTES", 60)
    monkeypatch.setattr(time_join_engine, "DUE_PER_BATCH", 5)
    monkeypatch.setattr(time_join_engine, "_JOINED_AT_ONCE", 4)
    monkeypatch.setattr(time_join_engine, "_RESULT_BYTES", 40)


@settings(max_examples=300, deadline=None)
@given(HISTORY, st.integers(0, 5), st.integers(0, 5), st.sampled_from(["inner", "left", "right", "full"]))
def test_intervals_are_those_of_the_whole_input(
    tmp_path_factory: Any, history: Any, before: int, after: int, how: Any
) -> None:
    join = IntervalJoin(before, after, how, LATENESS_MS / 1000)
    run = tried(tmp_path_factory.mktemp("join"), join, history, intervals)
    assert run.count() <= 1, "what waits ends"


@settings(max_examples=300, deadline=None)
@given(HISTORY, st.one_of(st.none(), st.integers(0, 5)), st.sampled_from(["inner", "left"]))
def test_as_of_is_that_of_the_whole_input(tmp_path_factory: Any, history: Any, tolerance: int | None, how: Any) -> None:
    join = AsOfJoin(tolerance, how, LATENESS_MS / 1000)
    run = tried(tmp_path_factory.mktemp("join"), join, history, as_of)
    keys = len({each.key for each in run.taken if each.right and each.value is not None})
    assert run.count() <= 1 + (keys if tolerance is None else 0), "one version of each key stays"


JOINS = [
    *[
        (IntervalJoin(before, after, how, LATENESS_MS / 1000), intervals)
        for before, after, how in ((0, 0, "full"), (2, 1, "left"))
    ],
    *[(AsOfJoin(tolerance, "left", LATENESS_MS / 1000), as_of) for tolerance in (None, 0, 2)],
]


@pytest.mark.parametrize("join, judge", JOINS)
@pytest.mark.parametrize("right_first", [False, True])
def test_a_partner_that_comes_at_the_last_moment(tmp_path: Path, join: Any, judge: Any, right_first: bool) -> None:
    for watermark in range(6, 14):
        for ms in range(6, 14):
            history = [
                [Sent(right_first, b"a", 10, b"1")],
                [Sent(False, b"other", watermark + LATENESS_MS, b"")],
                [Sent(not right_first, b"a", ms, b"2")],
            ]
            tried(tmp_path, join, [(records, 1, False) for records in history], judge)


def test_rows_of_a_flow_that_had_the_table_before_stay(tmp_path: Path) -> None:
    """Whoever takes over a table counts its batches from 1 again."""
    run = Run(tmp_path / "store", IntervalJoin(5, 5, "inner", LATENESS_MS / 1000))
    try:
        run.send(Sent(False, b"a", 10, b"first"))
        run.batch, run.now_ms = 0, run.now_ms + 1
        run.send(Sent(False, b"a", 10, b"second"))
        found = run.send(Sent(True, b"a", 10, b"partner"))
        assert sorted(each.left or b"" for each in found) == [b"first", b"second"]
    finally:
        MemoryStore.remove(tmp_path / "store")

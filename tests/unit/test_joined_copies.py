"""Copies of joined tables: exactly the rows at an offset, however the log is compacted meanwhile."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.client.committed import Chunk
from onceflow.errors import OnceflowError
from onceflow.state.api.serdes import BYTES
from onceflow.state.format import rows
from onceflow.state.joins import copies
from onceflow.state.joins.copies import InexactCopyError, JoinedCopies, open_copy
from onceflow.state.joins.spec import JoinSpec
from onceflow.state.local.format import COMMIT_RECORD, CommitRecord
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import DATA, RocksdbStore
from onceflow.task.join_task import JoinTask
from onceflow_workshop.testing.columns import ReadsColumns


class InjectedError(OnceflowError):
    """The process ends while it reads."""


class Log(ReadsColumns):
    """One partition of a topic. Records stay at their offsets when others are compacted away."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[bytes, bytes | None]] = {}
        self.stable = 0
        self.reads = 0
        self.dies_after: int | None = None
        self.between: Callable[[], None] = lambda: None

    def put(self, key: bytes, value: bytes | None) -> None:
        self.records[self.stable] = key, value
        self.stable += 1

    def compact(self, upto: int) -> None:
        """Keep the last record of each key below an offset, unless there is a later one (beyond it, too)."""
        last = {key: offset for offset, (key, _) in sorted(self.records.items())}
        self.records = {
            offset: record for offset, record in self.records.items() if offset >= upto or last[record[0]] == offset
        }

    def at(self, end: int, full: list[tuple[bytes, bytes | None]]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for key, value in full[:end]:
            found.pop(key, None)
            if value is not None:
                found[key] = value
        return found

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        self.reads += 1
        position = start
        while position < end:
            stop = min(position + 3, end)
            held = [(offset, *self.records[offset]) for offset in range(position, stop) if offset in self.records]
            yield Chunk(
                [key for _, key, _ in held],
                [value for _, _, value in held],
                next_offset=stop,
                places=[np.array([offset for offset, _, _ in held], dtype=np.int64)],
                whole=len(held) == stop - position,
            )
            position = stop
            self.between()
            if self.dies_after is not None and position >= self.dies_after:
                self.dies_after = None
                raise InjectedError("injected")

    def end(self, topic: str, partition: int) -> int:
        return self.stable


def spec_in(folder: Path, store: type[Store] = MemoryStore, run: str = "run") -> JoinSpec:
    return JoinSpec("rates", "fx", "id", 1, None, None, False, store, "flow", run, folder, tombstone_ms=86_400_000)


def content(store: Store) -> dict[bytes, bytes]:
    return {key[1:]: row[1:] for key, row in store.scan(rows.VALUE, rows.after(rows.VALUE))}


KEYS = st.sampled_from([b"a", b"b", b"c" * 600, b"c" * 600 + b"d"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.one_of(st.none(), st.binary(min_size=1, max_size=2))),
        st.tuples(st.just("compact"), st.integers(0, 40)),
        st.tuples(st.just("open"), st.integers(0, 8), st.booleans()),
    ),
    max_size=40,
)


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.long)])
def test_a_copy_is_exact_or_refused(examples: int) -> None:
    """The offset of a batch is the end of the log as it was before more was written and compacted."""

    @settings(max_examples=examples, deadline=None)
    @given(STEPS)
    def check(steps: list[tuple[object, ...]]) -> None:
        log, full, pinned = Log(), [], 0
        with tempfile.TemporaryDirectory() as folder:
            spec = spec_in(Path(folder))
            for step in steps:
                if step[0] == "put":
                    log.put(step[1], step[2])  # type: ignore[arg-type]
                    full.append((step[1], step[2]))
                elif step[0] == "compact":
                    log.compact(min(int(step[1]), log.stable))  # type: ignore[call-overload]
                else:
                    pinned = max(pinned, log.stable - int(step[1]))  # type: ignore[call-overload]
                    log.dies_after = pinned - 1 if step[2] else None
                    try:
                        store = open_copy(spec, 0, pinned, log)
                    except InexactCopyError:
                        # At the end of the log it is exact, unless compaction runs during that reading, too.
                        pinned = log.stable
                        store = open_copy(spec, 0, pinned, log)
                    except InjectedError:
                        continue
                    assert content(store) == log.at(pinned, full)  # type: ignore[arg-type]
                    store.close()

    check()


def test_a_record_that_was_compacted_away_is_not_missed(tmp_path: Path) -> None:
    log = Log()
    log.put(b"EUR", b"1")
    log.put(b"USD", b"1")
    log.put(b"EUR", b"2")
    log.compact(2)
    with pytest.raises(InexactCopyError, match="compacted while they were read") as raised:
        open_copy(spec_in(tmp_path, LmdbStore), 0, 2, log)
    assert copies.INEXACT in str(raised.value)
    store = open_copy(spec_in(tmp_path, LmdbStore), 0, 3, log)
    assert content(store) == {b"EUR": b"2", b"USD": b"1"}
    store.close()


def test_a_copy_is_read_and_verified_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for n in range(50):
        log.put(b"key-%d" % n, b"v")
    verified = []
    holds = LmdbStore.checksum_holds
    monkeypatch.setattr(LmdbStore, "checksum_holds", lambda self: verified.append(1) or holds(self))
    opened: list[Store] = []
    threads = [
        threading.Thread(target=lambda: opened.append(open_copy(spec_in(tmp_path, LmdbStore), 0, 50, log)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(opened) == 6
    assert log.reads == 1
    assert all(len(content(store)) == 50 for store in opened)
    for store in opened:
        store.close()
    verified.clear()  # the first one, of an empty store
    for run in ("next", "next"):
        open_copy(spec_in(tmp_path, LmdbStore, run), 0, 50, log).close()
    assert len(verified) == 1
    assert log.reads == 1


def test_a_copy_of_another_topic_or_beyond_the_batch_is_replaced(tmp_path: Path) -> None:
    log = Log()
    for n in range(5):
        log.put(b"key-%d" % n, b"v")
    spec = spec_in(tmp_path, LmdbStore)
    open_copy(spec, 0, 5, log).close()
    store = open_copy(spec, 0, 3, log)
    assert len(content(store)) == 3
    store.close()
    store = open_copy(replace(spec, topic_id="another"), 0, 4, log)
    assert len(content(store)) == 4
    store.close()


def test_co_partitioned_tables_open_only_what_is_asked_for(tmp_path: Path) -> None:
    log = Log()
    log.put(b"k", b"v")
    spec = replace(spec_in(tmp_path, LmdbStore), partitions=3, co_partitioned=True)
    joined = JoinedCopies({"rates": spec}, {"fx": {0: 0, 1: 1, 2: 0}}, log)
    joined.open([1])
    assert log.reads == 1
    joined.close()


def test_one_attempt_makes_all_copies_exact(tmp_path: Path) -> None:
    log = Log()
    for value in (b"1", b"2", b"3"):
        log.put(b"EUR", value)
    log.compact(3)
    spec = replace(spec_in(tmp_path, LmdbStore), partitions=6)
    joined = JoinedCopies({"rates": spec}, {"fx": dict.fromkeys(range(6), 2)}, log)
    with pytest.raises(InexactCopyError, match=r"fx-0 at offset 2.*fx-1 at offset 2"):
        joined.open([0])
    joined.close()
    log.put(b"EUR", b"4")
    joined = JoinedCopies({"rates": spec}, {"fx": dict.fromkeys(range(6), 4)}, log)
    joined.open([0])
    joined.close()


def test_an_open_copy_does_not_keep_others_out(tmp_path: Path) -> None:
    """RocksDB lets one process write. All tasks of a host have a copy open for as long as they run."""
    rocksdict = pytest.importorskip("rocksdict")
    log = Log()
    log.put(b"k", b"v")
    spec = spec_in(tmp_path, RocksdbStore)
    for _ in range(2):
        store = open_copy(spec, 0, 1, log)
        rocksdict.Rdict(str(spec.folder(0) / DATA), rocksdict.Options(raw_mode=True)).close()
        assert content(store) == {b"k": b"v"}
        store.close()


def test_stores_of_two_kinds_are_verified_apart(tmp_path: Path) -> None:
    log = Log()
    log.put(b"k", b"v")
    open_copy(spec_in(tmp_path, LmdbStore), 0, 1, log).close()
    pages = spec_in(tmp_path).folder(0) / "data.mdb"
    raw = pages.read_bytes()
    open_copy(spec_in(tmp_path, MemoryStore, "next"), 0, 1, log).close()
    at = raw.index(b"vk")
    pages.write_bytes(raw[:at] + b"vx" + raw[at + 2 :])
    store = open_copy(spec_in(tmp_path, LmdbStore, "next"), 0, 1, log)
    assert content(store) == {b"k": b"v"}
    store.close()


def test_a_copy_of_an_idle_topic_does_not_age(tmp_path: Path) -> None:
    log = Log()
    log.put(b"k", b"v")
    spec = spec_in(tmp_path, LmdbStore)
    open_copy(spec, 0, 1, log).close()
    store = LmdbStore.open(spec.folder(0))
    record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
    assert record is not None
    store.write((), {COMMIT_RECORD: replace(record, time_ms=record.time_ms - 7_200_000).encode()})
    store.close()
    store = open_copy(spec, 0, 1, log)
    refreshed = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
    store.close()
    assert refreshed is not None
    assert refreshed.time_ms >= record.time_ms
    assert log.reads == 1


class Logs(ReadsColumns):
    """A topic of two partitions."""

    def __init__(self) -> None:
        self.partitions = (Log(), Log())

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        return self.partitions[partition].read(topic, 0, start, end)

    def end(self, topic: str, partition: int) -> int:
        return self.partitions[partition].end(topic, 0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_a_join_finds_keys_wherever_they_are(places: list[int], co_partitioned: bool, one_by_one: bool) -> None:
    """``Flow.join_table``: whatever partitioner the table's producer has, and however the rows are divided."""
    logs = Logs()
    keys = [b"k%d" % n for n in range(len(places))]
    for key, place in zip(keys, places, strict=True):
        logs.partitions[place].put(key, b"value of " + key)
    with tempfile.TemporaryDirectory() as folder:
        spec = JoinSpec(
            "t", "customers", "id", 2, None, BYTES, co_partitioned, MemoryStore, "flow", "run", Path(folder), 86_400_000
        )
        order: Any = SimpleNamespace(
            spec=spec, on="k", inner=False, raw=True, flow="f", corrupt=None, fields=pa.schema([("v", pa.binary())])
        )
        ends = {number: log.stable for number, log in enumerate(logs.partitions)}
        joined = JoinedCopies({"t": spec}, {"customers": ends}, logs)
        rows_of = [[key] for key in keys] if one_by_one else [keys]
        found = [
            value
            for part in rows_of
            for value in JoinTask(order)
            ._joined(pa.RecordBatch.from_pydict({"k": pa.array(part, pa.binary())}), joined, 0)
            .column("v")
            .to_pylist()
        ]
        joined.close()
    assert found == [b"value of " + key for key in keys]

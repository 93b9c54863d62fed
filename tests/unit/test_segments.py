"""Stamped rows in segments: every store finds what was written, wherever it lies, and tells it to other readers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onceflow.state.format import rows, segments, stamps
from onceflow.state.format.segments import Segments
from onceflow.state.local.format import COMMIT_RECORD, CommitRecord, Goal
from onceflow.state.local.opening import open_partition
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.state.stores.stamped_view import StampedView
from onceflow_workshop.testing.columns import ReadsColumns

Ids = dict[bytes, bytes]


@pytest.fixture(params=[LmdbStore, MemoryStore, RocksdbStore], ids=["lmdb", "memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = request.param.open(tmp_path / "store")
    yield opened
    opened.close()
    request.param.remove(tmp_path / "store")


def put(store: Store, ids: Ids, *gone: bytes) -> None:
    changes: dict[bytes, bytes | None] = {b"v" + id_: row for id_, row in ids.items()}
    store.write({**changes, **dict.fromkeys([b"v" + id_ for id_ in gone])}, index=True)


def numbered(first: int, end: int) -> Ids:
    return {b"id-%d" % number: stamps.row_of(number) for number in range(first, end)}


def check(store: Store, ids: Ids) -> None:
    view = StampedView.of(store)
    expected = sorted((b"v" + id_, row) for id_, row in ids.items())
    assert list(view.scan(b"")) == expected
    assert list(view.scan(b"", reverse=True)) == expected[::-1]
    assert view.row_count() == len(ids)
    asked = [*ids, b"absent", b""]
    assert view.get_many([b"v" + id_ for id_ in asked]) == [ids.get(id_) for id_ in asked]
    assert store.checksum_holds()


@pytest.mark.parametrize("seed", range(3))
def test_a_store_of_segments_is_a_dictionary(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEAST_CAPACITY", 4)
    dice = random.Random(seed)
    keys = [b"", b"\0", b"\xff" * 5000, b"\xff" * 5001, *[b"key-%d" % number for number in range(60)]]
    ids: Ids = {}
    put(store, {b"first": stamps.row_of(0)})
    ids[b"first"] = stamps.row_of(0)
    for stamp in range(1, 40):
        new = dict.fromkeys(dice.choices(keys, k=dice.randrange(8)), stamps.row_of(stamp))
        gone = [id_ for id_ in dice.choices(keys, k=dice.randrange(4)) if id_ not in new]
        put(store, new, *gone)
        ids = {id_: row for id_, row in {**ids, **new}.items() if id_ not in gone}
    check(store, ids)
    assert len(Segments(store).listed) > 5
    low, high = b"vkey-2", b"vkey-40"
    expected = sorted((b"v" + id_, row) for id_, row in ids.items() if low <= b"v" + id_ < high)
    view = StampedView(store)
    assert list(view.scan(low, high)) == expected
    assert list(view.scan(low, high, reverse=True)) == expected[::-1]
    assert not list(view.scan(b"m", b"n"))
    assert view.get(b"m" + dice.choice(keys)) is None


def test_segments_grow_with_the_number_of_ids(store: Store) -> None:
    for first in range(0, 40_000, 500):
        put(store, numbered(first, first + 500))
    listed = Segments(store).listed
    assert [segment.number for segment in listed] == list(range(len(listed)))
    assert len(listed) < 3 * segments.SHARES
    assert listed[-1].capacity > 900
    assert sum(segment.ids for segment in listed) == 40_000
    assert all(segment.due == segment.greatest for segment in listed), "stamps came in their order"
    assert Segments(store).greatest == 39_999


def test_a_filter_denies_nothing_and_seldom_confirms_what_is_not_there() -> None:
    held, others = ([b"%s-%d" % (kind, number) for number in range(20_000)] for kind in (b"a", b"b"))
    words = np.zeros(segments._HEAD + 20_000 * segments._FILTER_BITS_PER_ID // 64, np.uint64)
    segments._Hashes(held).add_to(words[segments._HEAD :])
    raw = words.tobytes()
    assert segments._Hashes(held).may_be_in(raw) == list(range(20_000))
    assert len(segments._Hashes(others).may_be_in(raw)) < 60
    assert not segments._Hashes(others).may_be_in(None)
    assert not segments._Hashes([]).may_be_in(raw)


def test_times_in_the_far_future_do_not_keep_a_segment(store: Store) -> None:
    far = stamps.row_of(1 << 62)
    for first in range(0, 250, 50):
        put(store, {**numbered(first, first + 50), b"far-%d" % first: far})
    (segment,) = Segments(store).listed
    assert segment.greatest == 1 << 62
    assert 230 <= segment.due < 300
    assert not Segments(store).due(230)
    assert Segments(store).due(300) == [segment]


def test_a_segment_ends_or_is_closed(store: Store) -> None:
    put(store, numbered(0, 3))
    (segment,) = Segments(store).listed
    located: dict[bytes, bytes | None] = {segments.LOCATED: b""}
    moved = {segment.prefix + b"id-0": None, segment.prefix + b"id-2": None, b"vid-2": stamps.row_of(2)}
    store.write({**moved, segment.filter_key: b"", **located}, index=True)
    assert [each.capacity > 0 for each in Segments(store).listed] == [False, True]
    check(store, numbered(1, 3))
    store.write({segment.prefix + b"id-1": b"", segment.filter_key: None, **located}, index=True)
    assert [each.number for each in Segments(store).listed] == [1]
    check(store, numbered(2, 3))
    (segment,) = Segments(store).listed
    store.write({segment.prefix + b"id-2": b"", segment.filter_key: None, **located}, index=True)
    assert not list(store.scan(b""))
    assert store.checksum_holds()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_sees_ids_that_move_meanwhile(store: Store, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lmdb_store", "memory_store"):  # as if the store were much larger
        monkeypatch.setattr(f"onceflow.state.stores.{name}._SCANNED_AT_ONCE", 10)
    monkeypatch.setattr("onceflow.state.stores.stamped_view._SCANNED_AT_ONCE", 8)
    ids = numbered(100, 300)
    put(store, ids)
    scan = StampedView(store).scan(b"", reverse=reverse)
    found = [next(scan) for _ in range(8)]
    for id_, row in sorted(ids.items(), reverse=not reverse):
        put(store, {id_: row})
        found += [] if len(found) == len(ids) else [next(scan)]
    found += list(scan)
    assert found == sorted(((b"v" + id_, row) for id_, row in ids.items()), reverse=reverse)


def test_a_part_of_a_segment_is_deleted(store: Store) -> None:
    put(store, numbered(0, 9))
    put(store, numbered(10, 300))
    first, _ = Segments(store).listed
    gone: dict[bytes, bytes | None] = {first.prefix + b"id-4": b"", first.filter_key: b"", segments.LOCATED: b""}
    store.write(gone, index=True)
    check(store, numbered(5, 9) | numbered(10, 300))
    # An id of that part is written again, one of the rest is replaced, and one is deleted that is not there.
    again = {b"vid-3": stamps.row_of(7), b"vid-6": stamps.row_of(8), first.prefix + b"id-6": None}
    store.write({**again, first.prefix + b"id-2": None, segments.LOCATED: b""}, index=True)
    ids = {b"id-3": stamps.row_of(7), b"id-6": stamps.row_of(8)}
    check(store, numbered(5, 9) | numbered(10, 300) | ids)


def test_bulk_writes_see_what_they_have_placed(store: Store) -> None:
    with store.bulk() as commit:
        put(store, numbered(0, 300))
        put(store, {b"id-7": stamps.row_of(1000)}, b"id-8")
        commit()
        put(store, {}, b"id-9")
    ids = {**numbered(0, 300), b"id-7": stamps.row_of(1000)}
    del ids[b"id-8"], ids[b"id-9"]
    check(store, ids)


def test_rows_of_other_tables_are_where_they_were(store: Store) -> None:
    store.write({b"va": b"\0row", b"vb": b"\0row"}, index=True)
    store.write({b"vb": None}, index=True)
    assert list(store.scan(b"")) == [(b"va", b"\0row")]
    assert StampedView.of(store) is store


class NoRecords(ReadsColumns):
    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[object]:
        return iter(())

    def end(self, topic: str, partition: int) -> int:
        return 0


def test_a_copy_of_an_earlier_version_is_restored(tmp_path: Path) -> None:
    goal = Goal("flow", "ids", 0, "t", "i", 5, 0)
    store = LmdbStore.open(tmp_path)
    store.write({b"vold": stamps.row_of(7)}, {COMMIT_RECORD: CommitRecord.of(goal, 0).encode()})
    store.close()
    opened = open_partition(tmp_path, LmdbStore, goal, NoRecords(), verify=True, now_ms=0, stamped=True)  # type: ignore[arg-type]
    assert (opened.how, opened.why) == ("restored", "its ids are in the format of an earlier version")
    assert not list(opened.store.scan(rows.VALUE))
    opened.store.close()

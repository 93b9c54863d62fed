"""Every store keeps rows and blobs the same way: in order, in one commit, with a checksum over all of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError
from onceflow.state.format import rows
from onceflow.state.stores import base, lmdb_environment, lmdb_lock, rocksdb_store
from onceflow.state.stores.base import Store, StoreCorruptError
from onceflow.state.stores.lmdb_pages import Meta, check_pages, read_meta
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore

OPENERS: list[type[Store]] = [LmdbStore, MemoryStore, RocksdbStore]


@pytest.fixture(params=OPENERS, ids=["lmdb", "memory", "rocksdb"])
def opener(request: pytest.FixtureRequest) -> type[Store]:
    opener: type[Store] = request.param
    return opener


@pytest.fixture
def store(opener: type[Store], tmp_path: Path) -> Iterator[Store]:
    opened = opener.open(tmp_path / "store")
    yield opened
    opened.close()
    opener.remove(tmp_path / "store")


# ---- rows and blobs ----------------------------------------------------------------------------------


def test_rows_are_put_replaced_and_deleted(store: Store) -> None:
    assert store.get(b"va") is None
    store.write([(b"va", b"1"), (b"vb", b"2"), (b"vc", b"")])
    store.write([(b"va", b"3"), (b"vb", None), (b"gone", None)])
    assert store.get(b"va") == b"3"
    assert store.get(b"vb") is None
    assert store.get(b"vc") == b""
    assert store.get_many([b"vc", b"vb", b"va", b"va"]) == [b"", None, b"3", b"3"]
    assert store.get_many([]) == []
    assert store.checksum_holds()


def test_a_key_that_comes_twice_gets_its_last_row(store: Store) -> None:
    store.write([(b"va", b"1"), (b"va", None), (b"vb", None), (b"vb", b"2")])
    assert list(store.scan(b"")) == [(b"vb", b"2")]
    assert store.checksum_holds()


def test_scans_are_in_order_and_within_bounds(store: Store) -> None:
    keys = [b"a", b"a\0", b"a\xff", b"a\xff\xff", b"b", b"b\0\0", b"c", b"\xff"]
    store.write([(key, key * 2) for key in reversed(keys)], {"blob": b"not a row"})
    ordered = [(key, key * 2) for key in sorted(keys)]
    for start in [b"", b"a", b"a\1", b"a\xff", b"bb", b"\xff", b"\xff\xff"]:
        for end in [None, b"a", b"a\xff", b"b", b"c\0", b"\xff", b"\xff\xff"]:
            wanted = [item for item in ordered if start <= item[0] and (end is None or item[0] < end)]
            assert list(store.scan(start, end)) == wanted
            assert list(store.scan(start, end, reverse=True)) == wanted[::-1]


def test_prefixes_end_where_they_should(store: Store) -> None:
    keys = [b"p", b"p\0", b"p\xff", b"p\xff\xff\xff", b"q", b"\xff", b"\xff\xff", b"\xff\xff\0"]
    store.write([(key, b"") for key in keys])
    for prefix in [b"p", b"p\xff", b"p\xff\xff", b"\xff", b"\xff\xff", b"x"]:
        found = [key for key, _ in store.scan(prefix, rows.after(prefix))]
        assert found == sorted(key for key in keys if key.startswith(prefix))


@pytest.mark.parametrize("longest", [10, 600])
def test_many_ranges_are_scanned_as_one_after_the_other(store: Store, longest: int) -> None:
    """The last range begins with a key that LMDB does not take as it is, long after the first rows were read."""
    store.write({b"m%05d" % n: b"%d" % n for n in range(3_000)})
    ranges = [(b"m%05d" % n, b"m%05d" % (n + 3)) for n in range(0, 2_400, 2)]
    ranges += [(b"m00007", b"m00003"), (b"m01000", b"m02500"), (b"m02000" + b"x" * longest, b"m02010")]
    expected = [(at, *pair) for at, (start, end) in enumerate(ranges) for pair in store.scan(start, end)]
    assert list(store.scan_many(ranges)) == expected
    assert list(store.scan_many([])) == []


def test_long_scans_go_on_while_rows_change(store: Store) -> None:
    store.write([(b"v%05d" % number, b"old") for number in range(5000)])
    seen = []
    for at, (key, _) in enumerate(store.scan(b"v", b"w")):
        if at == 10:
            store.write([(b"v%05d" % number, None) for number in range(20)] + [(b"w", b"")])
        seen.append(key)
    assert seen == sorted(seen)
    assert seen[-4980:] == [b"v%05d" % number for number in range(20, 5000)]
    assert len(list(store.scan(b"v", b"w", reverse=True))) == 4980


@pytest.mark.parametrize("length", [509, 510, 511, 512, 1012, 1013, 1514, 5000])
def test_scans_over_long_keys(store: Store, length: int) -> None:
    keys = [b"v%03d" % number + b"x" * (length - 4) for number in range(100)]
    store.write([(key, b"") for key in keys])
    assert [key for key, _ in store.scan(b"v")] == keys
    assert [key for key, _ in store.scan(b"v", reverse=True)] == keys[::-1]
    assert [key for key, _ in store.scan(keys[5] + b"\0", keys[9] + b"\0")] == keys[6:10]
    assert [key for key, _ in store.scan(keys[5] + b"\0", keys[9] + b"\0", reverse=True)] == keys[6:10][::-1]


def test_a_key_of_no_bytes_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="byte"):
        store.write([(b"va", b""), (b"", b"")])
    assert store.get(b"va") is None


_START = b"v" + b"p" * 600 + b"q" * 600
_ends = st.sampled_from([b"", b"\0", b"\0\0", b"\xff", b"\xff\xff", b"x" * 1000]) | st.binary(max_size=3)
#: Keys that share beginnings of all lengths, with ends that make the order difficult.
_long_keys = st.builds(
    lambda length, end, more: _START[:length] + end + more,
    st.sampled_from([1, 2, 508, 509, 510, 511, 512, 600, 1011, 1012, 1013, 1201]),
    _ends,
    _ends,
)


@pytest.mark.long_but("LmdbStore")
@pytest.mark.parametrize("opener", OPENERS)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.dictionaries(_long_keys, st.none() | st.binary(max_size=3), max_size=12), max_size=4),
    bounds=st.lists(st.tuples(_long_keys | st.just(b""), st.none() | _long_keys), max_size=8),
    many=st.booleans(),
)
def test_keys_of_any_length_are_found_in_order(opener: type[Store], steps: Any, bounds: Any, many: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(opener.open(Path(folder))) as store:
        want: dict[bytes, bytes] = {}
        with store.bulk() if many else contextlib.nullcontext():
            for changes in steps:
                store.write(changes)
                want |= changes
                want = {key: row for key, row in want.items() if row is not None}
        keys = sorted({key for changes in steps for key in changes} | {end for pair in bounds for end in pair if end})
        assert store.get_many(keys) == [want.get(key) for key in keys]
        assert [store.get(key) for key in keys] == [want.get(key) for key in keys]
        in_place: Any = lambda row: row if row is None else bytes(row)  # noqa: E731
        assert [store.read_in_place(key, in_place) for key in keys] == [want.get(key) for key in keys]
        ordered = sorted(want.items())
        for low, high in [(b"", None), *bounds]:
            wanted = [item for item in ordered if low <= item[0] and (high is None or item[0] < high)]
            assert list(store.scan(low, high)) == wanted
            assert list(store.scan(low, high, reverse=True)) == wanted[::-1]
        assert store.checksum_holds()
        assert store.row_count() == len(want)
        with store.snapshot() as found:
            assert list(found.items) == ordered
        store.write(dict.fromkeys(want))
        assert list(store.scan(b"")) == []
        assert store.checksum_holds()
        opener.remove(Path(folder))


@pytest.mark.parametrize("opener", OPENERS)
@settings(max_examples=20, deadline=None)
@given(st.lists(_long_keys, unique=True, min_size=1, max_size=10), st.data())
def test_new_rows_of_keys_of_any_length(opener: type[Store], keys: list[bytes], data: st.DataObject) -> None:
    keys.sort()
    at = data.draw(st.integers(0, len(keys)))
    with tempfile.TemporaryDirectory() as folder, closing(opener.open(Path(folder))) as store:
        assert store.write({key: key for key in keys[:at]}, {"marker": b"1"})
        assert store.put_new(keys[at:], keys[at:], ("marker", b"1"))
        assert list(store.scan(b"")) == [(key, key) for key in keys]
        assert store.checksum_holds()
        opener.remove(Path(folder))


def test_many_long_keys_with_one_beginning_are_scanned_while_they_change(store: Store) -> None:
    keys = [b"v" + b"p" * 2000 + b"%05d" % number + b"s" * 2000 for number in range(1500)]
    store.write(dict.fromkeys(keys, b"old"))
    seen = []
    for at, (key, _) in enumerate(store.scan(b"v", b"w")):
        if at == 10:
            store.write({**dict.fromkeys(keys[:20]), b"vp": b"", keys[-1] + b"s": b"new"})
        seen.append(key)
    assert seen == sorted(seen)
    assert set(keys[20:]) <= set(seen)
    assert len(list(store.scan(keys[100], keys[200], reverse=True))) == 100
    assert store.checksum_holds()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_a_very_long_key_takes_little_memory(tmp_path: Path, reverse: bool) -> None:
    with closing(LmdbStore.open(tmp_path)) as store:
        keys = [b"a", b"k" * 400_000, b"k" * 400_000 + b"l", b"z"]
        store.write(dict.fromkeys(keys, b"1"))
        tracemalloc.start()
        try:
            assert [key for key, _ in store.scan(b"", reverse=reverse)] == (keys[::-1] if reverse else keys)
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()


def test_nodes_of_long_keys_are_deleted_with_their_last_row(tmp_path: Path) -> None:
    with closing(LmdbStore.open(tmp_path)) as store:
        environment = store._environment
        for _ in range(3):
            store.write({b"v" + b"k" * 3000: b"1", b"v" + b"k" * 3000 + b"2": b"2"})
            store.write({b"v" + b"k" * 3000: None})
            assert store.get(b"v" + b"k" * 3000 + b"2") == b"2"
            store.write({b"v" + b"k" * 3000 + b"2": None})
            for database in (environment.rows, environment.nodes):
                assert environment.read(lambda txn, _, db=database: txn.stat(db)["entries"]) == 0


@pytest.mark.parametrize("node", [b"", b"\0" * 7 + b"\1", b"\0" * 8, b"\0" * 7 + b"\2"])
def test_a_reference_to_a_node_that_is_damaged_ends(tmp_path: Path, node: bytes) -> None:
    """Not in an endless scan, even if a node refers to itself."""
    with closing(LmdbStore.open(tmp_path)) as store:
        store.write({b"v" + b"k" * 3000: b"1"})
        environment = store._environment

        def damage(txn: Any, _: Any) -> bool:
            cursor = txn.cursor(environment.nodes)
            assert cursor.first()
            return bool(cursor.put(cursor.key(), node))

        environment.write(damage, 1)
        if node == b"\0" * 7 + b"\2":
            assert store.checksum_holds()
            return
        with pytest.raises(StoreCorruptError, match="damaged"):
            list(store.scan(b""))
        with pytest.raises(StoreCorruptError, match="damaged"):
            store.checksum_holds()


def test_a_store_that_has_no_place_for_long_keys_is_restored(tmp_path: Path) -> None:
    with closing(lmdb.open(str(tmp_path), max_dbs=2)) as environment, environment.begin(write=True) as txn:
        txn.put(b"vk", b"1", db=environment.open_db(b"rows", txn=txn))
    for read_only in (False, True):
        with pytest.raises(StoreCorruptError, match="older version"):
            LmdbStore.open(tmp_path, read_only=read_only)


def test_blobs(store: Store) -> None:
    assert store.blob("marker") is None
    large = random.Random(1).randbytes(3_000_000)
    store.write([], {"marker": b"1", "pending": large, "gone": None})
    assert store.blob("marker") == b"1"
    assert store.blob("pending") == large
    store.write([], {"pending": None, "marker": b""})
    assert store.blob("pending") is None
    assert store.blob("marker") == b""
    assert list(store.scan(b"")) == []
    assert store.checksum_holds()


def test_a_write_is_all_or_nothing(store: Store) -> None:
    store.write([(b"va", b"1")], {"marker": b"1"})

    def failing() -> Iterator[tuple[bytes, bytes | None]]:
        yield b"va", b"2"
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        store.write(failing(), {"marker": b"2"})
    assert (store.get(b"va"), store.blob("marker")) == (b"1", b"1")
    assert store.checksum_holds()


def test_a_write_expects_a_blob(store: Store) -> None:
    assert store.write([(b"va", b"1")], {"marker": b"1"}, expect=("marker", None))
    assert not store.write([(b"va", b"2")], {"marker": b"2"}, expect=("marker", None))
    assert not store.write([(b"va", b"2")], {"marker": b"2"}, expect=("marker", b"x"))
    assert (store.get(b"va"), store.blob("marker")) == (b"1", b"1")
    assert store.write([(b"va", None)], {"marker": b"2"}, expect=("marker", b"1"))
    assert (store.get(b"va"), store.blob("marker")) == (None, b"2")


def test_bulk_writes_are_there_at_the_end(store: Store) -> None:
    with store.bulk() as commit:
        assert store.write([(b"va", b"1")], {"marker": b"1"}, expect=("marker", None))
        commit()
        assert store.blob("marker") == b"1"
        assert store.write([(b"vb", b"2")], {"marker": b"2"}, expect=("marker", b"1"))
        assert not store.write([(b"vc", b"3")], {}, expect=("marker", b"1"))
    assert list(store.scan(b"")) == [(b"va", b"1"), (b"vb", b"2")]
    assert store.checksum_holds()


@pytest.mark.parametrize("seed", range(5))
def test_rows_behind_the_last_one_and_before_it(store: Store, seed: int) -> None:
    """An engine may append what is behind its last row."""
    dice = random.Random(seed)
    want: dict[bytes, bytes] = {}
    with store.bulk():
        for low in (0, 40, 80, 79, 100, 30):
            changes: dict[bytes, bytes | None] = {
                b"v%03d" % n: None if dice.random() < 0.1 else rows.pack(b"%d" % low, dice.choice([None, low]))
                for n in range(low, low + 40)
            }
            store.write(changes, index=True)
            want |= changes  # type: ignore[arg-type]
    want = {key: row for key, row in want.items() if row is not None}
    assert dict(store.scan(b"v")) == want
    expiring = {rows.expiry_index(ms, key) for key, row in want.items() if (ms := rows.expiry_of(row)) is not None}
    assert {key for key, _ in store.scan(b"X", b"Y")} == expiring
    assert store.checksum_holds()


def test_index_rows_come_with_their_rows(store: Store) -> None:
    timer = rows.timer_key(b"k", b"t")
    entry = rows.map_key(b"k", b"m", b"e")
    at = {ms: rows.pack(rows.timer_payload(b"e", ms)) for ms in (5, 9)}
    store.write([(timer, at[5]), (entry, rows.pack(b"1", 7)), (b"va", rows.pack(b""))], index=True)
    store.write([(timer, at[9]), (entry, rows.pack(b"2", 8)), (b"va", rows.pack(b"", 3))], index=True)
    assert [key for key, _ in store.scan(b"T", b"U")] == [rows.timer_index(b"e", 9, b"k", b"t")]
    assert [key for key, _ in store.scan(b"X", b"Y")] == [rows.expiry_index(3, b"va"), rows.expiry_index(8, entry)]
    assert store.checksum_holds()
    assert store.rows_by_kind() == {"t": 1, "m": 1, "v": 1, "T": 1, "X": 2}
    store.write([(timer, None), (entry, None), (b"va", None)], index=True)
    assert list(store.scan(b"")) == []
    assert store.rows_by_kind() == {}
    assert store.checksum_holds()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([b"va", b"vb", b"vb\0", b"m\xff", b"t", b"X\0\0"]) | st.binary(min_size=1, max_size=3),
            st.none() | st.binary(max_size=4) | st.just(b"x" * 5000),
            max_size=12,
        ),
        max_size=6,
    ),
    st.binary(max_size=2),
    st.none() | st.binary(max_size=2),
)
@pytest.mark.parametrize("opener", OPENERS, ids=["lmdb", "memory", "rocksdb"])
@pytest.mark.slow
def test_a_store_is_a_sorted_dictionary(
    opener: type[Store], writes: list[dict[bytes, bytes | None]], start: bytes, end: bytes | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        store = opener.open(path)
        model: dict[bytes, bytes] = {}
        for changes in writes:
            store.write(changes.items())
            model.update({key: row for key, row in changes.items() if row is not None})
            model = {key: row for key, row in model.items() if changes.get(key, b"") is not None}
        between = [item for item in sorted(model.items()) if start <= item[0] and (end is None or item[0] < end)]
        assert list(store.scan(start, end)) == between
        assert list(store.scan(start, end, reverse=True)) == between[::-1]
        assert store.get_many(sorted(model)) == [model[key] for key in sorted(model)]
        assert store.rows_by_kind() == Counter(chr(key[0]) for key in model)
        assert store.checksum_holds()
        store.close()
        opener.remove(path)


def test_rows_that_were_not_counted_by_kind_are_not_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version has written them."""
    monkeypatch.setattr(base, "_by_kind", lambda keys: {})
    store.write([(b"va", b"1"), (b"vb", b"2")])
    monkeypatch.undo()
    store.write([(b"vc", b"3"), (b"va", None)])
    assert store.rows_by_kind() == {}
    assert store.row_count() == 2
    assert store.checksum_holds()


def test_a_store_knows_its_size(opener: type[Store], tmp_path: Path) -> None:
    with closing(opener.open(tmp_path)) as store:
        store.write([(b"v%d" % n, bytes(1000)) for n in range(1000)])
        size = store.nbytes()
        if not opener.on_disk:
            assert size is None
            return
        there = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert size is not None
        assert 0 < size <= there
        for file in tmp_path.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        assert store.nbytes() in (size, None), "a batch does not fail because its local folder is gone"
    opener.remove(tmp_path)


def test_the_size_of_rocksdb_is_known_without_a_look_at_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch asks for it, for each partition. It is near the truth while rows are in the log of writes only, in
    tables only, and in both."""

    def there() -> int:
        return sum(file.stat().st_size for file in (tmp_path / rocksdb_store.DATA).iterdir())

    def size(store: Store) -> int:
        with monkeypatch.context() as patched:
            for name in ("scandir", "listdir", "stat"):
                patched.setattr(os, name, lambda *_, **__: pytest.fail("a look at the files"))
            return store.nbytes() or 0

    written = [(b"v%d" % n, os.urandom(1000)) for n in range(3000)]
    with closing(RocksdbStore.open(tmp_path)) as store:
        assert size(store) == 0
        store.write(written[:100])
        assert 100_000 < size(store) <= there()
        store.write(written)
        assert 0.95 < size(store) / there() <= 1
    with closing(RocksdbStore.open(tmp_path)) as store:
        assert 0.95 < size(store) / there() <= 1
        store.write(written[:100])
        assert 0.95 < size(store) / there() <= 1
    with closing(RocksdbStore.open(tmp_path, read_only=True)) as reader:
        assert 0.9 < size(reader) / there() < 1.1
    with closing(RocksdbStore.open(tmp_path)) as store:
        store.write([(key, None) for key, _ in written])
        store._rdict.compact_range(None, None)
        assert size(store) < 100_000
    RocksdbStore.remove(tmp_path)


# ---- opening and removing ----------------------------------------------------------------------------


def test_what_was_written_is_there_after_reopening(opener: type[Store], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert not opener.exists(folder)
    with pytest.raises(FileNotFoundError):
        opener.open(folder, read_only=True)
    store = opener.open(folder)
    store.write([(b"va", b"1")], {"marker": b"m"})
    store.close()
    store.close()
    assert opener.exists(folder)
    for read_only in (True, False):
        store = opener.open(folder, read_only=read_only)
        assert (store.get(b"va"), store.blob("marker")) == (b"1", b"m")
        assert store.checksum_holds()
        store.close()
    opener.remove(folder)


def test_a_folder_may_be_open_twice_in_a_process(opener: type[Store], tmp_path: Path) -> None:
    reader_before = opener.open(tmp_path)
    reader_before.write([(b"va", b"1")])
    reader = opener.open(tmp_path, read_only=True)
    writer = opener.open(tmp_path)
    writer.write([(b"va", b"2")])
    writer.close()
    assert reader.get(b"va") == reader_before.get(b"va") == b"2"
    reader.close()
    reader_before.close()
    opener.remove(tmp_path)


def test_removed_data_are_gone_and_nothing_else(opener: type[Store], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("not ours")
    folder = tmp_path / "store"
    folder.mkdir()
    for name in ("data.mdb", "rocksdb", "lock.mdb"):
        (folder / name).symlink_to(outside, target_is_directory=True)
    (folder / "note").write_text("somebody's")
    opener.remove(folder)
    assert (outside / "file").read_text() == "not ours"
    for name in ("data.mdb", "rocksdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)
    store = opener.open(folder)
    store.write([(b"va", b"1")])
    opener.remove(folder)
    opener.remove(folder)
    assert (folder / "note").exists()
    store = opener.open(folder)
    assert store.get(b"va") is None
    assert store.blob("marker") is None
    store.close()
    opener.remove(folder)


def test_a_file_where_the_folder_should_be_is_damage(tmp_path: Path) -> None:
    for opener in (LmdbStore, RocksdbStore):
        (tmp_path / "store").write_text("a file")
        with pytest.raises((StoreCorruptError, EnvironmentUnusableError)):
            opener.open(tmp_path / "store")
        opener.remove(tmp_path / "store")
        opener.open(tmp_path / "store").close()
        opener.remove(tmp_path / "store")
        (tmp_path / "store").rmdir()


# ---- checksums ---------------------------------------------------------------------------------------


def test_what_was_changed_behind_the_stores_back_is_noticed(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path)
    store.write([(b"va", b"1"), (b"vb", b"2")], {"marker": b"m"})
    environment = store._environment
    for changes in (
        {b"va": b"2"},
        {b"vc": b""},
        {b"va": b"2", b"vb": b"1"},
        {b"va": None},
        {b"va": None, b"v": b"a1"},
    ):
        with environment.begin_write() as txn:
            before = {key: txn.get(key, db=environment.rows) for key in changes}
            for key, row in changes.items():
                if row is None:
                    txn.delete(key, db=environment.rows)
                else:
                    txn.put(key, row, db=environment.rows)
        assert not store.checksum_holds()
        with environment.begin_write() as txn:
            for key, row in before.items():
                if row is None:
                    txn.delete(key, db=environment.rows)
                else:
                    txn.put(key, row, db=environment.rows)
        assert store.checksum_holds()
    for name, blob in ((b"marker", b"n"), (b"other", b""), (b"\0tally", b"{}")):
        with environment.begin_write() as txn:
            txn.put(name, blob, db=environment.blobs)
        with pytest.raises((AssertionError, StoreCorruptError)):
            assert store.checksum_holds()


def test_a_flipped_byte_of_rocksdb_is_noticed(tmp_path: Path) -> None:
    store = RocksdbStore.open(tmp_path)
    store.write([(b"v%04d" % number, b"x" * 50) for number in range(1000)])
    store.close()
    for file in (tmp_path / "rocksdb").iterdir():
        if file.suffix in (".sst", ".log") and file.stat().st_size > 1000:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 0x40
            file.write_bytes(raw)
    with pytest.raises((AssertionError, StoreCorruptError)):
        assert RocksdbStore.open(tmp_path).checksum_holds()
    RocksdbStore.remove(tmp_path)


def tree_root(tree: bytes) -> int:
    """Page number of a tree's root, of its 48 bytes in a meta page or a node."""
    return int(struct.unpack("=IHHQQQQQ", tree)[-1])


def nodes(raw: bytearray, page: int) -> list[int]:
    """Where a page's pointers point to in the file."""
    lower = struct.unpack_from("=H", raw, page * 4096 + 12)[0]
    return [page * 4096 + at for at in struct.unpack_from(f"={(lower - 16) // 2}H", raw, page * 4096 + 16)]


def damage_separator(raw: bytearray, meta: Meta, root: int) -> None:
    assert raw[root * 4096 + 10] == 1  # a branch
    raw[nodes(raw, root)[1] + 8] ^= 1  # the second key's first letter


def damage_free_list(raw: bytearray, meta: Meta, root: int) -> None:
    node = nodes(raw, tree_root(meta.free))[0]
    struct.pack_into("=Q", raw, node + 8 + 8 + 8, root)


def damage_free_room(raw: bytearray, meta: Meta, root: int) -> None:
    upper = struct.unpack_from("=H", raw, root * 4096 + 14)[0]
    struct.pack_into("=H", raw, root * 4096 + 14, upper + 200)


def damage_page_number(raw: bytearray, meta: Meta, root: int) -> None:
    raw[root * 4096] ^= 2


def damage_order(raw: bytearray, meta: Meta, root: int) -> None:
    leaf = struct.unpack_from("=I", raw, nodes(raw, root)[1])[0]
    first = leaf * 4096 + 16
    raw[first : first + 2], raw[first + 2 : first + 4] = raw[first + 2 : first + 4], raw[first : first + 2]


def damage_turn(raw: bytearray, meta: Meta, root: int) -> None:
    struct.pack_into("=Q", raw, meta.transaction % 2 * 4096 + 144, meta.transaction + 1)


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="finds its way by the size of pages")
@pytest.mark.parametrize(
    "damage", [damage_separator, damage_free_list, damage_free_room, damage_page_number, damage_order, damage_turn]
)
def test_damage_that_does_not_show_in_the_rows_is_noticed(
    tmp_path: Path, damage: Callable[[bytearray, Meta, int], None]
) -> None:
    store = LmdbStore.open(tmp_path / "whole")
    store.write([(b"v%05d" % number, b"x" * 100) for number in range(2000)])
    store.write([(b"v00000", b"y")])
    assert store.checksum_holds()
    meta = read_meta(tmp_path / "whole" / "data.mdb")
    assert meta is not None
    raw = bytearray((tmp_path / "whole" / "data.mdb").read_bytes())
    rows_node = nodes(raw, tree_root(meta.main))[2]
    damage(raw, meta, tree_root(bytes(raw[rows_node + 8 + 4 : rows_node + 8 + 4 + 48])))
    (tmp_path / "data.mdb").write_bytes(raw)
    with pytest.raises(StoreCorruptError):
        LmdbStore.open(tmp_path).checksum_holds()


# ---- LMDB --------------------------------------------------------------------------------------------


def test_the_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "_MAP_BYTES", 1 << 20)
    monkeypatch.setattr(lmdb_environment, "_MIN_ROOM", 0)
    monkeypatch.setattr(lmdb_environment, "_ROOM_PER_BYTE", 0)
    store = LmdbStore.open(tmp_path)
    for turn in range(3):
        store.write([(b"v%d-%05d" % (turn, number), b"x" * 1000) for number in range(3000)])
    assert sum(1 for _ in store.scan(b"")) == 9000
    assert store.checksum_holds()


def test_reading_does_not_wait_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "_MAP_BYTES", 1 << 20)
    monkeypatch.setattr(lmdb_environment, "_MIN_ROOM", 0)
    store = LmdbStore.open(tmp_path)
    store.write([(b"va", b"1"), (b"vb", b"2")])
    begun, end = threading.Event(), threading.Event()

    def write(txn: Any, db: Any) -> bool:
        txn.put(b"va", b"3", db=db)
        begun.set()
        return end.wait(30)

    writing = threading.Thread(target=store._environment.write, args=(write, 10))
    writing.start()
    with ThreadPoolExecutor(1) as other:
        try:
            assert begun.wait(30)
            assert other.submit(store.get, b"va").result(10) == b"1"
            assert other.submit(lambda: list(store.scan(b""))).result(10) == [(b"va", b"1"), (b"vb", b"2")]
            assert other.submit(store.checksum_holds).result(10)
        finally:
            end.set()
            writing.join(30)
        assert store.get(b"va") == b"3"
        # It does wait while the map grows, which must wait for those who read.
        reading = store._environment.reading()
        other.submit(reading.__enter__).result(10)
        growing = threading.Thread(target=store.write, args=([(b"v%d" % n, b"x" * 1000) for n in range(3000)],))
        growing.start()
        growing.join(0.2)
        assert growing.is_alive()
        other.submit(reading.__exit__, None, None, None).result(10)
        growing.join(30)
        assert not growing.is_alive()
        assert store.get(b"v2999") == b"x" * 1000


def test_pages_fit_together_after_many_changes(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path)
    dice = random.Random(7)
    for turn in range(60):
        changes: dict[bytes, bytes | None] = {
            b"v%04d" % dice.randrange(3000): dice.randbytes(dice.choice([5, 100, 100, 6000]))
            for _ in range(dice.choice([3, 300]))
        }
        if turn % 7 == 0:
            changes.update({key: None for at, (key, _) in enumerate(store.scan(b"")) if at % 3})
        store.write(changes.items(), {"pending": dice.choice([None, dice.randbytes(20_000)])})
        check_pages(tmp_path / "data.mdb")
        page_size = os.sysconf("SC_PAGE_SIZE")
        assert (tmp_path / "data.mdb").stat().st_size >= (store._environment._env.info()["last_pgno"] + 1) * page_size
    assert store.checksum_holds()


def test_deleted_and_replaced_files_are_noticed(tmp_path: Path) -> None:
    folder, other = tmp_path / "store", tmp_path / "other"
    LmdbStore.open(folder).write([(b"va", b"1")])
    (folder / "data.mdb").unlink()
    store = LmdbStore.open(folder)
    assert store.get(b"va") is None
    store.write([(b"va", b"2")])
    foreign = LmdbStore.open(other)
    for number in range(5):
        foreign.write([(b"va", b"other %d" % number)])
    shutil.copy(other / "data.mdb", tmp_path)
    (tmp_path / "data.mdb").replace(folder / "data.mdb")
    store = LmdbStore.open(folder)
    assert store.get(b"va") == b"other 4"
    store.write([(b"vb", b"3")])
    (folder / "lock.mdb").unlink()
    store = LmdbStore.open(folder)
    assert list(store.scan(b"")) == [(b"va", b"other 4"), (b"vb", b"3")]
    assert store.checksum_holds()


def test_a_file_of_another_kind_is_damage(tmp_path: Path) -> None:
    for content in (b"x", b"x" * 10_000, b"\0" * 4096, b"\0" * 100_000):
        (tmp_path / "data.mdb").write_bytes(content)
        with pytest.raises(StoreCorruptError):
            LmdbStore.open(tmp_path)
        LmdbStore.remove(tmp_path)
    (tmp_path / "data.mdb").write_bytes(b"")
    assert LmdbStore.open(tmp_path).get(b"va") is None


def test_idle_environments_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "_IDLE_MAX", 2)
    for number in range(5):
        store = LmdbStore.open(tmp_path / str(number))
        store.write([(b"va", b"%d" % number)])
        store.close()
    known = [name for _, name in lmdb_environment._cache if name.startswith(str(tmp_path))]
    assert len(known) <= 2
    assert [LmdbStore.open(tmp_path / str(number)).get(b"va") for number in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


READER = """
import sys
from pathlib import Path
from onceflow.state.stores import lmdb_environment
from onceflow.state.stores.lmdb_store import LmdbStore
lmdb_environment._MAP_BYTES = 1 << 20
for line in sys.stdin:
    store = LmdbStore.open(Path(sys.argv[1]), read_only=True)
    print(store.get(b"va"), sum(1 for _ in store.scan(b"v")), store.checksum_holds(), flush=True)
    store.close()
"""


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    store = LmdbStore.open(tmp_path)
    store.write([(b"va", b"0")])
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def read() -> str:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
            return reader.stdout.readline().strip()

        assert read() == "b'0' 1 True"
        store.write([(b"va", b"1"), *((b"v%06d" % number, b"x" * 1000) for number in range(5000))])
        assert read() == "b'1' 5001 True"  # far beyond the map that it had
        LmdbStore.remove(tmp_path)
        store = LmdbStore.open(tmp_path)
        store.write([(b"va", b"2")])
        assert read() == "b'2' 1 True"
        # Other data beside a lock file that the reader holds: it counts other transactions.
        for commits in (4, 9):
            other = LmdbStore.open(tmp_path / str(commits))
            for number in range(commits):
                other.write([(b"va", b"%d of %d" % (number + 1, commits))])
            shutil.copy(tmp_path / str(commits) / "data.mdb", tmp_path / "copy")
            (tmp_path / "copy").replace(tmp_path / "data.mdb")
            store = LmdbStore.open(tmp_path)
            assert store.get(b"va") == b"%d of %d" % (commits, commits)
            store.write([(b"vb", b"more")])
            assert read() == f"b'{commits} of {commits}' 2 True"
        reader.stdin.close()
        assert reader.wait() == 0


# ---- RocksDB -----------------------------------------------------------------------------------------


WRITES_AND_STOPS = """
import os, signal, sys
from pathlib import Path
from onceflow.state.stores.lmdb_store import LmdbStore

store = LmdbStore.open(Path(sys.argv[1]))
store.write([(b"va", b"1")])
with store.bulk():
    store.write([(b"vb", b"2")])
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_writer_that_is_stopped_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_lock, "WAIT_S", 0.3)
    folder = tmp_path / "store"
    store = LmdbStore.open(folder)
    command = [sys.executable, "-c", WRITES_AND_STOPS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            told = f"process {process.pid} is writing to the local state in {folder}"
            with pytest.raises(DeadlineExceededError, match=told):
                store.write([(b"vc", b"3")])
            with pytest.raises(DeadlineExceededError, match=told), store.bulk():
                pass
            assert store.get(b"va") == b"1"  # nobody waits for a writer to read
            store.close()
            lmdb_environment.forget(folder)
            with pytest.raises(DeadlineExceededError, match=told):
                LmdbStore.open(folder)
            with closing(LmdbStore.open(folder, read_only=True)) as reader:
                assert reader.get(b"va") == b"1"
            os.kill(process.pid, signal.SIGCONT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    store = LmdbStore.open(folder)
    with store.bulk() as commit:
        store.write([(b"vd", b"4")])
        commit()
        store.write([(b"ve", b"5")])
    assert store.get_many([b"vb", b"vc", b"vd", b"ve"]) == [b"2", None, b"4", b"5"]
    store.close()


@pytest.mark.parametrize("turn", range(5))
def test_others_read_while_many_rows_are_written(tmp_path: Path, turn: int) -> None:
    """The map is made larger for it, which no reader of the process must meet. No process finds a file cut off."""
    store = LmdbStore.open(tmp_path)
    store.write([(b"va", b"1")])
    problems: list[BaseException] = []
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        try:
            with closing(LmdbStore.open(tmp_path, read_only=True)) as reader:
                while not done.is_set():
                    assert next(reader.scan(b"v", b"w")) == (b"va", b"1")
                    reading.set()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(30)
    with store.bulk() as commit:
        for n in range(3):
            store.write([(b"vb%d-%d" % (n, i), bytes(500)) for i in range(500)])
            commit()
            read_meta(tmp_path / lmdb_environment.DATA)
    done.set()
    thread.join(30)
    store.close()
    assert not problems


def test_threads_of_a_process_write_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_lock, "WAIT_S", 0.3)
    store, same = LmdbStore.open(tmp_path), LmdbStore.open(tmp_path)
    with store.bulk(), pytest.raises(DeadlineExceededError, match=f"process {os.getpid()} "):
        same.write([(b"va", b"1")])
    same.write([(b"va", b"1")])
    assert store.get(b"va") == b"1"
    for one in (store, same):
        one.close()


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(EnvironmentUnusableError, match=r"pip install 'onceflow\[rocksdb\]'"):
        RocksdbStore.open(tmp_path)


def test_a_rocksdb_that_another_process_holds_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocksdb_store, "_LOCK_WAIT_S", 0.05)
    holder = (
        "import sys; from pathlib import Path; from onceflow.state.stores.rocksdb_store import RocksdbStore as R;"
        "s = R.open(Path(sys.argv[1])); s.write([(b'va', b'1')]); print('open', flush=True);"
        "sys.stdin.read(); s.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(DeadlineExceededError, match="another process has the local state open"):
            RocksdbStore.open(tmp_path)
        reader = RocksdbStore.open(tmp_path, read_only=True)
        assert reader.get(b"va") == b"1"
        reader.close()
        process.stdin.close()
        assert process.wait() == 0
    store = RocksdbStore.open(tmp_path)
    assert store.get(b"va") == b"1"
    store.close()

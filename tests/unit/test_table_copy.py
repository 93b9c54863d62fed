"""The local copy behind a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow import EnvironmentUnusableError, OptionError, Table
from onceflow.client.committed import Chunk
from onceflow.clock import clock_ms
from onceflow.state.local.format import COMMIT_RECORD
from onceflow.state.stores.base import StoreCorruptError
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.tables import copies
from onceflow.tables.copies import Copy, Followed
from onceflow.tables.opening import OpenedTable
from onceflow_workshop.testing.columns import ReadsColumns


class Log(ReadsColumns):
    """A topic with one record."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        yield Chunk([b"a"], [b"1"], next_offset=end)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(Followed("rates", "id", 1, tmp_path, MemoryStore, tombstone_ms=60_000), 0)


def test_a_copy_that_was_out_of_touch_is_restored(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka may have removed tombstones meanwhile. It makes no difference that the process was alive."""
    now = int(time.time())

    def at(seconds: int) -> int:
        monkeypatch.setattr(copies, "clock_ms", lambda: (now + seconds) * 1000)
        return (now + seconds) * 1000

    copy.apply(Chunk([b"a"], [b"1"], next_offset=1), stable=1, as_of_ms=at(0), wanted=False)
    copy.still_current(at(29))
    copy.apply(Chunk([b"b"], [b"1"], next_offset=2), stable=2, as_of_ms=at(58), wanted=False)
    # What was in an answer that was read long ago is no gap; an answer that was read late does not end one.
    at(100)
    copy.apply(Chunk([b"c"], [b"1"], next_offset=3), stable=3, as_of_ms=(now + 58) * 1000, wanted=False)
    copy.still_current((now + 59) * 1000)
    assert copy.current_ms == (now + 59) * 1000
    with pytest.raises(StoreCorruptError, match="out of touch"), copy.mended():
        copy.apply(Chunk([b"c"], [b"1"], next_offset=4), stable=4, as_of_ms=at(101), wanted=False)
    assert copy.position == 0
    assert not copy.store.row_count()


def test_a_damaged_copy_is_emptied_when_nothing_is_written_either(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.apply(Chunk([b"a"], [b"1"], next_offset=1), stable=1, as_of_ms=1, wanted=False)
    copy.store.write((), {COMMIT_RECORD: b"?"})
    monkeypatch.setattr(copies, "_PERSISTED_S", 0)
    with pytest.raises(StoreCorruptError), copy.mended():
        copy.still_current(2)
    assert copy.position == 0
    copy.still_current(3)


def test_keys_in_other_partitions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = Copy(Followed("rates", "id", 2, tmp_path, MemoryStore, tombstone_ms=60_000), 0)
    with caplog.at_level("INFO", "onceflow.tables"):
        copy.check_placement(pa.array([b"%d" % n for n in range(20)], pa.binary()))
    assert not copy.placed
    assert "another partitioner was used, or partitions were added" in caplog.text


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnusableError, match="--state-dir of a command"):
        OpenedTable("rates", "127.0.0.1:1", None, None, "lmdb", tmp_path / "file", "1 second").take_folder()


def test_a_restore_is_as_old_as_its_end(copy: Copy) -> None:
    copy.restore(Log(), 1, 12_345, lambda _: None)
    assert (copy.position, copy.current_ms) == (1, 12_345)


def test_memory_is_given_back(copy: Copy, tmp_path: Path) -> None:
    copy.close()
    assert not MemoryStore.exists(tmp_path / "0")


@pytest.mark.parametrize("keys", ["c1", b"c1"])
def test_one_key_is_no_list_of_keys(keys: str | bytes) -> None:
    with pytest.raises(OptionError, match=r"multi_get\(\) takes a list of keys, got (str|bytes): b?'c1'"):
        Table.of_flow("/nowhere").multi_get(keys)


def test_a_copy_that_is_damaged_again_and_again_is_left_alone_for_longer_and_longer(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = 1_000.0
    monkeypatch.setattr(copies.time, "monotonic", lambda: clock)
    copy.apply(Chunk([b"a"], [b"1"], next_offset=1), stable=1, as_of_ms=1, wanted=False)
    pauses = []
    for _ in range(12):
        copy.store.write((), {COMMIT_RECORD: b"?"})
        with pytest.raises(StoreCorruptError), copy.mended():
            copy.apply(Chunk([b"a"], [b"2"], next_offset=2), stable=2, as_of_ms=clock_ms(), wanted=False)
        pauses.append(max(0.0, copy.health.not_before - clock))
        assert copy.emptied
        clock += pauses[-1]
        with copy.mended():
            copy.restore(Log(), 1, 12_345, lambda _: None)
        assert not copy.emptied
        assert copy.health.problem is None
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert 1 <= len(caplog.messages) <= 1 + (clock - 1_000) // 60
    with pytest.raises(StoreCorruptError), copy.mended():
        raise StoreCorruptError("again")
    assert copy.health.problem is not None
    assert "damaged again each time" in copy.health.problem.what
    clock += 601
    copy.replace("much later")
    assert not copy.health.resting


def test_a_copy_that_cannot_be_written_keeps_what_it_has(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.apply(Chunk([b"a"], [b"1"], next_offset=1), stable=1, as_of_ms=clock_ms(), wanted=False)

    def apply() -> None:
        with copy.mended():
            copy.apply(Chunk([b"b"], [b"1"], next_offset=2), stable=2, as_of_ms=clock_ms(), wanted=False)

    def full(*_: object, **__: object) -> bool:
        raise EnvironmentUnusableError("The disk of the local state is full")

    with monkeypatch.context() as patch:
        patch.setattr(copy.store, "write", full)
        for _ in range(8):
            with pytest.raises(EnvironmentUnusableError):
                apply()
        assert copy.health.resting
        assert copy.health.not_before - time.monotonic() <= 5
        assert copy.health.problem is not None
    assert (copy.position, copy.emptied, copy.store.row_count()) == (1, False, 1)
    apply()
    assert (copy.position, copy.health.problem, copy.store.row_count()) == (2, None, 2)


def test_a_disk_that_is_full_for_long_is_a_copy_that_was_out_of_touch(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka may have removed tombstones that were read, but could not be written."""
    begin = clock_ms()

    def apply(seconds: int) -> None:
        monkeypatch.setattr(copies, "clock_ms", lambda: begin + seconds * 1000)
        copy.apply(Chunk([b"a"], [b"1"], next_offset=1), stable=1, as_of_ms=begin + seconds * 1000, wanted=False)

    def full(*_: object, **__: object) -> bool:
        raise EnvironmentUnusableError("The disk of the local state is full")

    with monkeypatch.context() as patch:
        patch.setattr(copy.store, "write", full)
        for seconds in range(0, 30, 5):
            with pytest.raises(EnvironmentUnusableError):
                apply(seconds)
    with pytest.raises(StoreCorruptError, match="out of touch"):
        apply(31)

"""A disk that is full, or nearly: nothing is lost, nobody takes it for damage, and all goes on when there is room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.client.committed import Chunk
from onceflow.errors import EnvironmentUnusableError
from onceflow.state.local.catch_up import RowColumns
from onceflow.state.local.format import Goal
from onceflow.state.local.opening import Opened, open_partition
from onceflow.state.local.spool import Spool
from onceflow.state.stores import disk_space, rocksdb_store
from onceflow.state.stores.base import Store, StoreCorruptError
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow_workshop.testing.columns import ReadsColumns

pytestmark = pytest.mark.faults  # disks fill up

FEW = {b"v%03d" % n: b"1" for n in range(200)}
MANY = {b"w%06d" % n: b"2" * 50 for n in range(9_000)}
LITTLE = [0, 60 << 10, *(pytest.param(size, marks=pytest.mark.long) for size in (4 << 10, 300 << 10))]


@pytest.fixture(params=[LmdbStore, RocksdbStore], ids=["lmdb", "rocksdb"])
def opener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    monkeypatch.setattr(rocksdb_store, "_WRITE_BUFFER_BYTES", 1 << 20)
    opener: type[Store] = request.param
    return opener


@pytest.mark.parametrize("bulk", [False, True], ids=["write", "bulk"])
@pytest.mark.parametrize("left", LITTLE)
def test_a_write_that_does_not_fit(opener: type[Store], left: int, bulk: bool, small_disk: Any) -> None:
    """LMDB says EIO if a part of the write fits."""
    folder = small_disk.folder / "store"
    store = opener.open(folder)
    store.write(FEW)
    writing: Any = store.bulk if bulk else nullcontext
    small_disk.fill(left)
    for _ in range(2):
        with pytest.raises(EnvironmentUnusableError, match="The disk of the local state is full"), writing():
            store.write(MANY)
        assert store.get(b"v007") == b"1"
        assert store.row_count() == len(FEW)
        assert store.checksum_holds()
    small_disk.mend()
    store.write(MANY)
    assert store.row_count() == len(FEW) + len(MANY)
    store.close()
    store = opener.open(folder)
    assert store.checksum_holds()
    store.close()
    opener.remove(folder)


def test_a_store_is_closed_while_the_disk_is_full(opener: type[Store], small_disk: Any) -> None:
    folder = small_disk.folder / "store"
    store = opener.open(folder)
    store.write(FEW)
    small_disk.fill(60 << 10)
    with pytest.raises(EnvironmentUnusableError):
        store.write(MANY)
    store.close()
    small_disk.mend()
    store = opener.open(folder)
    assert (store.row_count(), store.checksum_holds()) == (len(FEW), True)
    store.write(MANY)
    store.close()
    opener.remove(folder)


OPEN = """
import sys
from pathlib import Path
from onceflow.errors import EnvironmentUnusableError
from onceflow.state.stores.lmdb_store import LmdbStore
try:
    LmdbStore.open(Path(sys.argv[1])).write([(b"v%06d" % n, b"1" * 50) for n in range(9_000)])
except EnvironmentUnusableError as error:
    sys.exit(error.what.partition(":")[0])
"""


@pytest.mark.parametrize("left", [0, 4 << 10, 16 << 10, 32 << 10, 40 << 10])
def test_a_new_store_does_not_fit(left: int, small_disk: Any) -> None:
    """In a process of its own: LMDB writes to its lock file through a map, which could kill it (SIGBUS)."""
    small_disk.fill(left)
    command = [sys.executable, "-B", "-c", OPEN, str(small_disk.folder / "store")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr.strip()) == (1, "The disk of the local state is full")


def test_errors_of_a_disk_with_room_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdb

    store = LmdbStore.open(tmp_path)
    error = lmdb.Error("mdb_txn_commit: Input/output error", 5)
    error.code = 5

    def fail() -> Any:
        raise error

    monkeypatch.setattr(store._environment, "begin_write", fail)
    with pytest.raises(StoreCorruptError, match="Input/output error"):
        store.write(FEW)
    monkeypatch.setattr(disk_space.os, "posix_fallocate", _over_quota)
    with pytest.raises(EnvironmentUnusableError, match="is full"):
        store.write(FEW)
    monkeypatch.undo()
    store.close()
    LmdbStore.remove(tmp_path)


def _over_quota(*_: Any) -> None:
    raise OSError(122, "Disk quota exceeded")


@pytest.mark.parametrize("left", LITTLE)
def test_changes_that_do_not_fit_until_their_commit(left: int, small_disk: Any) -> None:
    def fill(spool: Spool[int]) -> None:
        with spool:
            try:
                for mark in range(1_000):
                    found = [b"x" * 500 + b"%d" % mark for _ in range(50)]
                    spool.add(mark, RowColumns(pa.array([b"%02d" % n for n in range(50)]), pa.array(found)))
            finally:
                for _, blocks in spool.take():  # as a restore does, so that what was read is kept
                    list(blocks)

    small_disk.fill(left)
    with pytest.raises(EnvironmentUnusableError, match="cannot be written"):
        fill(Spool(small_disk.folder / "store"))


@pytest.mark.parametrize("left", LITTLE)
def test_the_copy_of_a_flow_stays(opener: type[Store], left: int, small_disk: Any) -> None:
    def opened(end: int) -> Opened:
        goal = Goal("flow", "t", 0, "id", "", table_end=end, internal_end=0)
        return open_partition(small_disk.folder / "0", opener, goal, Log(), verify=True, now_ms=1)

    opened(10).store.close()
    small_disk.fill(left)
    for _ in range(2):
        with pytest.raises(EnvironmentUnusableError, match="is full"):
            opened(9_000)
    small_disk.mend()
    found = opened(9_000)
    assert (found.how, found.records, found.why) == ("caught up", 8_990, "")
    assert found.store.checksum_holds()
    found.store.close()
    opener.remove(small_disk.folder / "0")


class Log(ReadsColumns):
    """A table topic of any length."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        keys: list[bytes | None] = [b"%06d" % n for n in range(start, end)]
        yield Chunk(keys, [b"v" * 50] * (end - start), next_offset=end)

"""The default store: LMDB, which many processes read while one writes, and which a kill leaves whole.

Nothing is synced to disk. Kafka is the truth, and after a crash of the machine the checksum tells whether the
file may be used.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from onceflow.state import rows
from onceflow.state.lmdb_pages import check_pages, read_meta
from onceflow.state.store import (
    BULK_BYTES_MAX,
    BULK_ROWS_MAX,
    NO_BLOBS,
    TALLY,
    Store,
    StoreCorruptError,
    Tally,
    plan,
    unusable,
)

_T = TypeVar("_T")
_Identity = tuple[tuple[int, int], ...]

DATA, LOCK = "data.mdb", "lock.mdb"
_MAP_BYTES = 1 << 30
_READERS_MAX = 512
_IDLE_MAX = 64
_SCANNED_FIRST, _SCANNED_AT_ONCE = 16, 1024
# Pages are written anew where a row changes; beyond this much room a transaction seldom runs out of map.
_ROOM_PER_BYTE, _ROOM_LEAST = 4, 16 << 20
# As many pages as there are rows, each of them split, and what is in pages of its own.
_BULK_ROOM = 2 * BULK_ROWS_MAX * 4096 + 2 * BULK_BYTES_MAX
_READER_ATTEMPTS, _READER_PAUSE_S = 20, 0.005


class LmdbStore(Store):
    """Rows and blobs in two named databases of one LMDB environment."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment
        self._closed = False
        self._bulk: Any = None

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> LmdbStore:
        return cls(_acquire(folder, read_only))

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / DATA).exists()

    @staticmethod
    def remove(folder: Path) -> None:
        with _cache_lock:
            known = _cache.pop(_name(folder), None)
            if known is not None:
                known.close()
            if folder.exists() and not folder.is_dir():
                folder.unlink()
            # The lock file first: one that outlives its data would give the next data wrong transaction numbers.
            for file in (folder / LOCK, folder / DATA):
                if file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
                elif os.path.lexists(file):
                    file.unlink(missing_ok=True)

    def get(self, key: bytes) -> bytes | None:
        row: bytes | None = self._environment.read(lambda txn, db: txn.get(key, db=db))
        return row

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def read(txn: Any, db: Any) -> list[bytes | None]:
            cursor = txn.cursor(db)
            return list(map(cursor.get, keys))

        return self._environment.read(read)

    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # In parts: a read transaction that stays open keeps pages from being used again, and forbids the map to grow.
        wanted = _SCANNED_FIRST
        while True:
            part = self._environment.read(_part_read(start, end, reverse, wanted))
            for key, row in part:
                if not (start <= key and (end is None or key < end)):
                    raise StoreCorruptError("keys of the local store are out of order")
                if reverse:
                    end = key
                else:
                    start = key + b"\0"
                yield key, row
            if len(part) < wanted:
                return
            wanted = min(2 * wanted, _SCANNED_AT_ONCE)

    def blob(self, name: str) -> bytes | None:
        found: bytes | None = self._environment.read(lambda txn, _: txn.get(name.encode(), db=self._environment.blobs))
        return found

    def write(
        self,
        changes: rows.Changes,
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
        expect: tuple[str, bytes | None] | None = None,
        *,
        index: bool = False,
    ) -> bool:
        wanted = dict(changes)
        size = sum(sum(map(len, filter(None, part))) for part in (wanted, wanted.values(), blobs.values()))
        environment = self._environment

        def write(txn: Any, db: Any) -> bool:
            if expect is not None and txn.get(expect[0].encode(), db=environment.blobs) != expect[1]:
                return False
            tally = Tally.decode(txn.get(TALLY.encode(), db=environment.blobs))
            cursor = txn.cursor(db)
            planned = plan(wanted, tally, lambda keys: map(cursor.get, keys), index=index)
            for key in planned.deletes:
                txn.delete(key, db=db)
            # Appended pages are full; others are split in halves.
            cursor.putmulti(zip(planned.keys, planned.values, strict=True), append=not tally.rows)
            for name, blob in {**blobs, TALLY: planned.tally.with_blobs(blobs).encode()}.items():
                if blob is None:
                    txn.delete(name.encode(), db=environment.blobs)
                else:
                    txn.put(name.encode(), blob, db=environment.blobs)
            return True

        if self._bulk is not None:
            with environment.translated():
                return write(self._bulk, environment.rows)
        return environment.write(write, size)

    @contextmanager
    def bulk(self) -> Iterator[Callable[[], None]]:
        # Every commit copies the pages that the next one touches: with keys in random order, all of them.
        environment = self._environment

        def commit() -> None:
            with environment.translated():
                self._bulk.commit()
                self._bulk = begin()

        def begin() -> Any:
            # While the transaction is open the map cannot grow. It is only address space.
            environment.make_room(_BULK_ROOM)
            return environment.begin(write=True)

        with environment.translated():
            self._bulk = begin()
        try:
            yield commit
            with environment.translated():
                self._bulk.commit()
        finally:
            self._bulk.abort()  # nothing is left of it if it is committed
            self._bulk = None
        environment.complete_file()

    def checksum_holds(self) -> bool:
        with self._environment.translated():
            # What LMDB would trust comes first: a damaged page may crash the process.
            check_pages(self._environment.folder / DATA)
        return super().checksum_holds()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _release(self._environment)

    def _tally(self) -> Tally:
        return Tally.decode(self.blob(TALLY))

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        # One transaction and one cursor: reading ends even where the tree is damaged.
        environment = self._environment
        with environment.lock, environment.translated(), environment.begin() as txn:
            yield from txn.cursor(environment.rows).iternext()

    def _blobs(self) -> dict[str, bytes]:
        def read(txn: Any, _: Any) -> dict[str, bytes]:
            return {name.decode(errors="replace"): blob for name, blob in txn.cursor(self._environment.blobs)}

        found = self._environment.read(read)
        found.pop(TALLY, None)
        return found


def _part_read(start: bytes, end: bytes | None, reverse: bool, wanted: int) -> Callable[[Any, Any], list[Any]]:
    def read(txn: Any, db: Any) -> list[tuple[bytes, bytes]]:
        cursor = txn.cursor(db)
        if not reverse:
            if not (cursor.set_range(start) if start else cursor.first()):
                return []
            part = list(islice(cursor.iternext(), wanted))
            if end is not None and part[-1][0] >= end:
                part = [(key, row) for key, row in part if key < end]
            return part
        if not (cursor.prev() if end is not None and cursor.set_range(end) else cursor.last()):
            return []
        part = list(islice(cursor.iterprev(), wanted))
        return part if part[-1][0] >= start else [(key, row) for key, row in part if key >= start]

    return read


class _Environment:
    """An open LMDB environment, shared by all stores of one folder in this process (LMDB forbids a second one)."""

    def __init__(self, folder: Path, read_only: bool) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.users = 0
        self.open(read_only)

    def open(self, read_only: bool) -> None:
        """Opens the files that are there now."""
        self.read_only = read_only
        with self.translated():
            self._open()
            try:
                if not self._lock_file_belongs():
                    self._open_with_new_lock()
                self.rows = self._env.open_db(b"rows", create=not read_only)
                self.blobs = self._env.open_db(b"blobs", create=not read_only)
            except BaseException as error:
                self._env.close()
                if read_only and isinstance(error, lmdb.NotFoundError):
                    raise FileNotFoundError(self.folder / DATA) from error  # made, and nothing written yet
                raise
        self.identity = identity(self.folder)

    def _open(self) -> None:
        data = self.folder / DATA
        size = data.stat().st_size if data.exists() else 0
        if size:
            self.check_file()
        elif self.read_only:
            raise FileNotFoundError(data)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
        map_size = _MAP_BYTES
        while map_size < 2 * size:
            map_size *= 2
        self._env = lmdb.open(
            str(self.folder),
            map_size=map_size,
            readonly=self.read_only,
            create=not self.read_only,
            sync=False,
            metasync=False,
            mode=0o644,
            max_readers=_READERS_MAX,
            max_dbs=2,
            max_spare_txns=2,
        )

    def check_file(self) -> None:
        """What LMDB would not survive: a file that is cut off, or is something else."""
        attempts = _READER_ATTEMPTS if self.read_only else 1
        for attempt in range(attempts):
            try:
                read_meta(self.folder / DATA)
                return
            except StoreCorruptError:
                # A reader may look between two steps of a writer's commit.
                if attempt + 1 == attempts:
                    raise
                time.sleep(_READER_PAUSE_S)

    def _open_with_new_lock(self) -> None:
        # Somebody has put other data beside a lock file in use, which would tell us of the wrong last commit.
        self._env.close()
        if self.read_only:
            raise StoreCorruptError("the lock file belongs to other data")
        (self.folder / LOCK).unlink(missing_ok=True)
        self._open()

    def _lock_file_belongs(self) -> bool:
        """Transactions are counted in the lock file and in the data; writers elsewhere may move both on."""
        before = self._env.info()["last_txnid"]
        with self._env.begin() as txn:
            counted: int = txn.id()
        return bool(before <= counted <= self._env.info()["last_txnid"])

    def close(self) -> None:
        with self.lock:
            self._env.close()

    def begin(self, *, write: bool = False) -> Any:
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)  # another process has made it larger
        except lmdb.ReadersFullError:
            self._env.reader_check()  # forgets readers that died
        return self._env.begin(write=write)

    def read(self, work: Callable[[Any, Any], _T]) -> _T:
        """Runs a function of transaction and rows in a read transaction."""
        try:
            with self.lock, self.begin() as txn:
                return work(txn, self.rows)
        except (lmdb.Error, struct.error) as error:
            raise _translate(error, self.folder) from error

    def write(self, work: Callable[[Any, Any], bool], size: int) -> bool:
        """Runs a function in a write transaction, again with a larger map when it does not fit.

        Args:
            size: bytes that it writes, about.
        """
        with self.lock, self.translated():
            self.make_room(_ROOM_PER_BYTE * size + _ROOM_LEAST)
            while True:
                try:
                    with self.begin(write=True) as txn:
                        done = work(txn, self.rows)
                    break
                except lmdb.MapFullError:
                    self._grow()
            self.complete_file()
            return done

    def make_room(self, size: int) -> None:
        """Makes the map large enough for so many bytes more."""
        while self._env.info()["map_size"] < self._bytes_used() + size:
            self._grow()

    def _bytes_used(self) -> int:
        used: int = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        return used

    def _grow(self) -> None:
        self._env.set_mapsize(2 * self._env.info()["map_size"])

    def complete_file(self) -> None:
        """LMDB does not write a free page at the end; a file that is too short shall mean that it was cut off."""
        whole = self._bytes_used()
        data = self.folder / DATA
        with suppress(FileNotFoundError):
            if data.stat().st_size < whole and identity(self.folder) == self.identity:
                os.truncate(data, whole)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Errors of the engine become ours."""
        try:
            yield
        except (lmdb.Error, struct.error, OSError) as error:
            raise _translate(error, self.folder) from error


def _translate(error: Exception, folder: Path) -> Exception:
    """Damage is for the caller to repair; what a repair cannot help is for the user."""
    if isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, lmdb.BadValsizeError):
        return ValueError(f"a key that LMDB does not take: {error}")
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if isinstance(error, lmdb.DiskError) or number in (errno.ENOSPC, errno.EDQUOT):
        return unusable(folder, "The disk of the local state is full", error)
    # LMDB's own codes are negative. Of the system's, only these come from what is in the folder.
    of_files = (errno.EINVAL, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
    of_system = (number or 0) > 0 and number not in of_files
    if isinstance(error, (lmdb.ReadersFullError, lmdb.TlsFullError)) or of_system:
        return unusable(folder, "The local state cannot be opened", error)
    return StoreCorruptError(f"the local store is damaged: {error}")


# Python workers serve batch after batch, and opening costs more than a small batch. Entries of a forked child's
# parent are never looked at: LMDB must not be used across a fork.
_cache: dict[tuple[int, str], _Environment] = {}
_cache_lock = threading.RLock()


def _name(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def identity(folder: Path) -> _Identity:
    """Which files are there. An open environment keeps its own from being given out again as others'."""
    found = []
    for name in (DATA, LOCK):
        try:
            stat = os.stat(folder / name)
        except OSError:
            found.append((0, 0))
        else:
            found.append((stat.st_dev, stat.st_ino))
    return tuple(found)


def _acquire(folder: Path, read_only: bool) -> _Environment:
    name = _name(folder)
    with _cache_lock:
        known = _cache.get(name)
        if known is not None:
            with known.lock:
                if known.identity != identity(folder) or (known.read_only and not read_only):
                    known.close()
                    del _cache[name]
                    known.open(read_only and known.read_only)
                else:
                    with known.translated():
                        known.check_file()
        else:
            known = _Environment(folder, read_only)
        _cache.pop(name, None)
        _cache[name] = known  # the last one used comes last
        known.users += 1
        return known


def _release(environment: _Environment) -> None:
    with _cache_lock:
        environment.users -= 1
        idle = [name for name, known in _cache.items() if not known.users]
        for name in idle[: max(0, len(idle) - _IDLE_MAX)]:
            _cache.pop(name).close()

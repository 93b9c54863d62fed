"""LMDB environments: one for each folder and process, with what LMDB does not take care of.

LMDB trusts the files it opens, forbids to open them twice in a process, and has a map that must be made larger
by hand. Nothing is synced to disk: Kafka is the truth, and after a crash of the machine a checksum tells whether
the file may be used.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from onceflow.state.stores.base import StoreCorruptError, unusable
from onceflow.state.stores.lmdb_lock import WriterLock
from onceflow.state.stores.lmdb_pages import read_meta

_T = TypeVar("_T")
_Identity = tuple[tuple[int, int], ...]

DATA, LOCK = "data.mdb", "lock.mdb"
_MAP_BYTES = 1 << 30
_READERS_MAX = 512
_IDLE_MAX = 64
# Pages are written anew where a row changes; beyond this much room a transaction seldom runs out of map.
_ROOM_PER_BYTE, _MIN_ROOM = 4, 16 << 20
_READER_ATTEMPTS, _READER_PAUSE_S = 20, 0.005


class Environment:
    """An open LMDB environment, shared by all stores of one folder in this process (LMDB forbids a second one)."""

    def __init__(self, folder: Path, read_only: bool) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.users = 0
        self.writer = WriterLock(folder)
        self.open(read_only)

    def open(self, read_only: bool) -> None:
        """Opens the files that are there now."""
        self.read_only = read_only
        with self.translated():
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with nullcontext() if read_only else self.writer.held():
                    self._open_all(read_only)
            except BaseException:
                self.writer.close()
                raise
        self.identity = identity(self.folder)

    def _open_all(self, read_only: bool) -> None:
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

    def _open(self) -> None:
        data = self.folder / DATA
        size = data.stat().st_size if data.exists() else 0
        if size:
            self.check_file()
        elif self.read_only:
            raise FileNotFoundError(data)
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

    def check_open_file(self) -> None:
        """The same of a file that others may be writing to: what looks cut off may be a commit under way."""
        try:
            self.check_file()
        except StoreCorruptError:
            if self.read_only:
                raise
            with self.writer.held():
                self.check_file()

    def _open_with_new_lock(self) -> None:
        # Somebody has put other data beside a lock file in use, which would tell us of the wrong last commit.
        self._env.close()
        if not self.read_only:
            (self.folder / LOCK).unlink(missing_ok=True)
            self._open()
            return
        for _ in range(_READER_ATTEMPTS):  # or a writer is at it
            time.sleep(_READER_PAUSE_S)
            self._open()
            if self._lock_file_belongs():
                return
            self._env.close()
        raise StoreCorruptError("the lock file belongs to other data")

    def _lock_file_belongs(self) -> bool:
        """Transactions are counted in the lock file and in the data; writers elsewhere may move both on."""
        before = self._env.info()["last_txnid"]
        with self._env.begin() as txn:
            counted: int = txn.id()
        return bool(before <= counted <= self._env.info()["last_txnid"])

    def close(self) -> None:
        with self.lock:
            self._env.close()
            self.writer.close()

    def begin(self, *, write: bool = False) -> Any:
        """A transaction of LMDB. Who writes holds ``writer``."""
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
        with self.lock, self.translated(), self.writer.held():
            self.make_room(_ROOM_PER_BYTE * size + _MIN_ROOM)
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
    of_files = (errno.EINVAL, errno.EIO, errno.EISDIR, errno.EEXIST)
    of_system = (number or 0) > 0 and number not in of_files
    if isinstance(error, (lmdb.ReadersFullError, lmdb.TlsFullError)) or of_system:
        return unusable(folder, "The local state cannot be opened", error)
    return StoreCorruptError(f"the local store is damaged: {error}")


# Python workers serve batch after batch, and opening costs more than a small batch. Entries of a forked child's
# parent are never looked at: LMDB must not be used across a fork.
_cache: dict[tuple[int, str], Environment] = {}
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


def acquire(folder: Path, read_only: bool) -> Environment:
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
                        known.check_open_file()
        else:
            known = Environment(folder, read_only)
        _cache.pop(name, None)
        _cache[name] = known  # the last one used comes last
        known.users += 1
        return known


def release(environment: Environment) -> None:
    with _cache_lock:
        environment.users -= 1
        idle = [name for name, known in _cache.items() if not known.users]
        for name in idle[: max(0, len(idle) - _IDLE_MAX)]:
            _cache.pop(name).close()


def forget(folder: Path) -> None:
    """Closes the folder's environment, whoever uses it: its files are about to be removed."""
    with _cache_lock:
        known = _cache.pop(_name(folder), None)
        if known is not None:
            known.close()

"""LMDB environments, one for each folder and process. This module does what LMDB leaves to its users.

LMDB does not check the files that it opens, must not open them twice in a process, and has a memory map that the caller
must enlarge. Nothing is synced to disk: the data are also in Kafka, and after a crash of the machine a checksum shows
whether the file is intact.
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

from onceflow.errors import DeadlineExceededError
from onceflow.host.private_folders import make_private
from onceflow.state.stores.base import DISK_FULL, StoreCorruptError, unusable
from onceflow.state.stores.disk_space import NO_ROOM, allocate, lacks_room
from onceflow.state.stores.lmdb_lock import WriterLock
from onceflow.state.stores.lmdb_pages import read_meta

#: How long those who need all readers to be absent wait. A reader may check a whole copy.
WAIT_S = 60.0

_T = TypeVar("_T")
_Identity = tuple[tuple[int, int], ...]

DATA, LOCK = "data.mdb", "lock.mdb"
_MAP_BYTES = 1 << 30
_READERS_MAX = 512
_LOCK_BYTES = 36864  # of so many readers, and whole pages
_IDLE_MAX = 64
# A changed row makes LMDB write a new copy of its page. With this much free room, a transaction seldom fills the map.
_ROOM_PER_BYTE, _MIN_ROOM = 4, 16 << 20
_READER_ATTEMPTS, _READER_PAUSE_S = 20, 0.005
_MAP_ATTEMPTS = 10  # it is doubled each time
_STOPPED_S = 1.0  # how long a process that is stopped may hold a store that another one opens


class Readers:
    """The threads of this process that read one environment. A thread that reads may begin to read again.

    LMDB's readers do not wait for its writer. They must only be absent while the process enlarges its map, which may
    move it, and while it closes the environment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._gone = threading.Condition(self._lock)
        self._admitted = threading.Condition(self._lock)
        self._count = 0
        self._own = threading.local()  # .count: how often this thread reads
        self._waiting = 0  # threads that need all readers to be absent
        self._alone: int | None = None  # the thread that has sent them away

    def enter(self) -> None:
        """Begin to read. It waits only for `absent`. The caller must call `leave` afterwards."""
        with self._lock:
            own = getattr(self._own, "count", 0)
            # New readers wait, or there might always be one. One that reads already must not: it would wait for itself.
            while self._waiting and not own and self._alone != threading.get_ident():
                self._admitted.wait()
            self._own.count = own + 1
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._own.count -= 1
            self._count -= 1
            if not self._count:
                self._gone.notify_all()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While this is held, no other thread reads. It is reentrant. The thread must not be reading.

        Raises:
            DeadlineExceededError: a thread did not stop reading until the timeout.
        """
        with self._lock:
            self._send_away()
            before, self._alone = self._alone, threading.get_ident()
            try:
                yield
            finally:
                self._alone = before

    def _send_away(self) -> None:
        self._waiting += 1
        try:
            gone = self._gone.wait_for(lambda: not self._count, WAIT_S)
        finally:
            self._waiting -= 1
            self._admitted.notify_all()  # they go on when this thread has released the lock
        if not gone:
            raise DeadlineExceededError(
                f"Gave up after {WAIT_S:g} s: a thread is reading the local state in {self._folder}",
                next_step="an iteration over the state may not have been ended; end it, or close what it reads",
            )


class Environment:
    """An open LMDB environment, shared by all stores of one folder in this process (LMDB forbids a second one).

    ``lock`` is for those who write, open and close. Readers do not take it, so they do not wait for a write.
    """

    def __init__(self, folder: Path, read_only: bool) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.users = 0
        self.written = 0  # roughly how many bytes the transaction that runs has written
        self.writer = WriterLock(folder)
        self.readers = Readers(folder)
        self.open(read_only)

    def open(self, read_only: bool) -> None:
        """Opens the files that are in the folder now."""
        self.read_only = read_only
        with self.translated():
            if not read_only:
                make_private(self.folder)
            try:
                with nullcontext() if read_only else self.writer.held(stopped_s=_STOPPED_S):
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
            self.nodes = self._open_nodes(create=not read_only)
        except BaseException as error:
            self._env.close()
            if read_only and isinstance(error, lmdb.NotFoundError):
                raise FileNotFoundError(self.folder / DATA) from error  # created, and nothing is written yet
            raise

    def _open_nodes(self, *, create: bool) -> Any:
        """The database of `lmdb_long_keys`."""
        try:
            return self._env.open_db(b"nodes", create=False)
        except lmdb.NotFoundError:
            with self._env.begin() as txn:
                if txn.stat(self.rows)["entries"]:
                    raise StoreCorruptError("an older version has written the local store") from None
            return self._env.open_db(b"nodes", create=create)

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
        # LMDB writes it through a map. If there were no room for a page of it, that would kill the process (SIGBUS).
        allocate(self.folder / LOCK, _LOCK_BYTES)
        self._env = lmdb.open(
            str(self.folder),
            map_size=map_size,
            readonly=self.read_only,
            create=not self.read_only,
            sync=False,
            metasync=False,
            mode=0o644,
            max_readers=_READERS_MAX,
            max_dbs=3,
            max_spare_txns=2,
        )

    def check_file(self) -> None:
        """Checks for a truncated file, or one that is not LMDB's: such a file could crash LMDB and the process."""
        attempts = _READER_ATTEMPTS if self.read_only else 1
        for attempt in range(attempts):
            try:
                read_meta(self.folder / DATA)
                return
            except StoreCorruptError:
                # A reader may see the file between two steps of a writer's commit.
                if attempt + 1 == attempts:
                    raise
                time.sleep(_READER_PAUSE_S)

    def check_open_file(self) -> None:
        """As `check_file`, for a file that others may be writing to: what looks truncated may be a running commit."""
        try:
            self.check_file()
        except StoreCorruptError:
            if self.read_only:
                raise
            with self.writer.held():
                self.check_file()

    def _open_with_new_lock(self) -> None:
        # The data file was replaced while the lock file was in use. The lock file names a last commit of the old data.
        self._env.close()
        if not self.read_only:
            (self.folder / LOCK).unlink(missing_ok=True)
            self._open()
            return
        for _ in range(_READER_ATTEMPTS):  # a writer may be writing just now
            time.sleep(_READER_PAUSE_S)
            self._open()
            if self._lock_file_belongs():
                return
            self._env.close()
        raise StoreCorruptError("the lock file belongs to other data")

    def _lock_file_belongs(self) -> bool:
        """Whether lock file and data belong together: both count transactions, and other writers may advance both."""
        before = self._env.info()["last_txnid"]
        with self._env.begin() as txn:
            counted: int = txn.id()
        return bool(before <= counted <= self._env.info()["last_txnid"])

    def close(self) -> None:
        with self.lock, self.readers.absent():
            self._env.close()
            self.writer.close()

    def begin_write(self) -> Any:
        """A write transaction of LMDB. The caller must hold ``writer``."""
        for _ in range(_MAP_ATTEMPTS):
            try:
                return self._env.begin(write=True)
            except lmdb.MapResizedError:
                self._follow_map()
        return self._env.begin(write=True)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A read transaction of LMDB."""
        txn = self._begin_read()
        try:
            with txn:
                yield txn
        finally:
            self.readers.leave()

    def read(self, work: Callable[[Any, Any], _T], *, in_place: bool = False) -> _T:
        """Runs a function in a read transaction. It is called with the transaction and the database of the rows.

        Args:
            in_place: rows are views of the file's pages, which end with the transaction.
        """
        try:
            txn = self._begin_read(in_place)
            try:
                with txn:
                    return work(txn, self.rows)
            finally:
                self.readers.leave()
        except (lmdb.Error, struct.error) as error:
            raise _translate(error, self.folder) from error

    def _begin_read(self, in_place: bool = False) -> Any:
        """A read transaction, after ``readers.enter``."""
        for attempt in range(_MAP_ATTEMPTS):
            self.readers.enter()
            begin: Any = self._env.begin  # its declared type takes no variable
            try:
                try:
                    return begin(buffers=in_place)
                except lmdb.ReadersFullError:
                    self._env.reader_check()  # removes readers whose process has died
                    return begin(buffers=in_place)
            except lmdb.MapResizedError:
                self.readers.leave()
                if attempt + 1 == _MAP_ATTEMPTS:
                    raise
            except BaseException:
                self.readers.leave()
                raise
            self._follow_map()
        raise AssertionError("not reached")

    def _follow_map(self) -> None:
        """Another process has made the map larger."""
        with self.readers.absent():
            self._env.set_mapsize(0)

    def write(self, work: Callable[[Any, Any], bool], size: int) -> bool:
        """Runs a function in a write transaction. If the map is too small, it is enlarged, and the function runs again.

        Args:
            size: roughly how many bytes the function writes.
        """
        with self.lock, self.translated(), self.writer.held():
            self.written = size
            self.make_room(_ROOM_PER_BYTE * size + _MIN_ROOM)
            while True:
                try:
                    with self.begin_write() as txn:
                        done = work(txn, self.rows)
                    break
                except lmdb.MapFullError:
                    self._grow()
            self.complete_file()
            return done

    def make_room(self, size: int) -> None:
        """Makes the map large enough for this many more bytes."""
        while self._env.info()["map_size"] < self.bytes_used() + size:
            self._grow()

    def bytes_used(self) -> int:
        used: int = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        return used

    def _grow(self) -> None:
        with self.readers.absent():
            self._env.set_mapsize(2 * self._env.info()["map_size"])

    def complete_file(self) -> None:
        """Extends the file to its full length, because LMDB does not write free pages at the end.

        So a file that is too short has been truncated.
        """
        whole = self.bytes_used()
        data = self.folder / DATA
        with suppress(FileNotFoundError):
            if data.stat().st_size < whole and identity(self.folder) == self.identity:
                os.truncate(data, whole)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Converts errors of LMDB to errors of onceflow."""
        try:
            yield
        except (lmdb.Error, struct.error, OSError) as error:
            # If only a part of a write fits, LMDB says EIO. What was committed before is as it was. It is not known any
            # more how many pages the write needed, so there may be as much room as a write of this size ever needs.
            # Less than that may also be a coincidence; but a copy must not be removed for want of room.
            room = _ROOM_PER_BYTE * self.written + _MIN_ROOM
            if _number(error) == errno.EIO and lacks_room(self.folder, room):
                raise unusable(self.folder, DISK_FULL, error) from error
            raise _translate(error, self.folder) from error


def _translate(error: Exception, folder: Path) -> Exception:
    """Damage becomes an error that the caller repairs. What a repair cannot solve becomes an error for the user."""
    if isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, lmdb.BadValsizeError):
        return ValueError(f"LMDB does not accept a key: {error}")
    number = _number(error)
    if isinstance(error, lmdb.DiskError) or number in NO_ROOM:
        return unusable(folder, DISK_FULL, error)
    # LMDB's own codes are negative. Of the system's codes, only these are caused by the files in the folder.
    of_files = (errno.EINVAL, errno.EIO, errno.EISDIR, errno.EEXIST)
    of_system = number > 0 and number not in of_files
    if isinstance(error, (lmdb.ReadersFullError, lmdb.TlsFullError)) or of_system:
        return unusable(folder, "The local state cannot be opened", error)
    return StoreCorruptError(f"the local store is damaged: {error}")


def _number(error: Exception) -> int:
    """The system's number of an error, or LMDB's; 0: it has none."""
    return (error.errno if isinstance(error, OSError) else getattr(error, "code", 0)) or 0


# Python workers are reused for many batches, and opening takes longer than a small batch. The process id is a part of
# the key, because a forked child must not use an environment of its parent.
_cache: dict[tuple[int, str], Environment] = {}
_cache_lock = threading.RLock()


def _name(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def identity(folder: Path) -> _Identity:
    """Device and inode of the files in the folder. While an environment is open, its inodes cannot be reused."""
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
                    with known.readers.absent():
                        known.close()
                        del _cache[name]
                        known.open(read_only and known.read_only)
                else:
                    with known.translated():
                        known.check_open_file()
        else:
            known = Environment(folder, read_only)
        _cache.pop(name, None)
        _cache[name] = known  # the one that was used last is the last one
        known.users += 1
        return known


def release(environment: Environment) -> None:
    with _cache_lock:
        environment.users -= 1
        idle = [name for name, known in _cache.items() if not known.users]
        for name in idle[: max(0, len(idle) - _IDLE_MAX)]:
            _cache.pop(name).close()


def forget(folder: Path) -> None:
    """Closes the folder's environment, even if it is in use, because its files are about to be removed."""
    with _cache_lock:
        known = _cache.pop(_name(folder), None)
        if known is not None:
            known.close()

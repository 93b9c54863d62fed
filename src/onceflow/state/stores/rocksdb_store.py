"""A store in RocksDB, for state that is much larger than memory.

Only one process can have it open for writing. So it is opened for each batch and closed after it, which takes some
milliseconds. It needs the package ``rocksdict`` (``pip install 'onceflow[rocksdb]'``).
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError
from onceflow.host.private_folders import make_private
from onceflow.state.format import rows
from onceflow.state.stores.base import (
    DISK_FULL,
    NO_BLOBS,
    TALLY,
    Store,
    StoreCorruptError,
    StoreSummary,
    plan,
    unusable,
)
from onceflow.state.stores.disk_space import lacks_room

_T = TypeVar("_T")

DATA = "rocksdb"
_ROW, _AFTER_ROWS, _BLOB = b"r", b"s", b"b"
_WRITE_BUFFER_BYTES = 32 << 20
_SIZES = "rocksdb.total-sst-files-size", "rocksdb.cur-size-all-mem-tables"
_LOCK_WAIT_S, _VANISHED_WAIT_S, _LOCK_PAUSE_S = 10.0, 1.0, 0.02
_LOCK_MESSAGES = ("lock hold by current process", "While lock file")
_VANISHED = ("No such file or directory",)
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
_NOT_ALLOWED = ("Permission denied", "Not a directory", "Read-only file system", "Too many open files")


class RocksdbStore(Store):
    """Rows and blobs in one RocksDB. The first letter of a key distinguishes them."""

    def __init__(self, database: _Database) -> None:
        self._database = database
        self._closed = False

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> RocksdbStore:
        library()
        with _open_lock:
            name = _name(folder)
            database = _open.get(name)
            if database is None or (database.read_only and not read_only):
                database = _Database(folder, read_only)
                _open[name] = database
            database.users += 1
        return cls(database)

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / DATA / "CURRENT").exists()

    @staticmethod
    def remove(folder: Path) -> None:
        with _open_lock:
            known = _open.pop(_name(folder), None)
            if known is not None:
                known.close()
            data = folder / DATA
            if folder.exists() and not folder.is_dir():
                folder.unlink()
            elif data.is_dir() and not data.is_symlink():
                shutil.rmtree(data)
            elif os.path.lexists(data):
                data.unlink()

    def get(self, key: bytes) -> bytes | None:
        row: bytes | None = self._read(lambda rdict: rdict.get(_ROW + key))
        return row

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._read(lambda rdict: list(rdict.get([_ROW + key for key in keys]) or ()) if keys else [])

    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        low, high = _ROW + start, _AFTER_ROWS if end is None else _ROW + end
        with self._translated():
            for key, row in self._rdict.items(backwards=reverse, from_key=high if reverse else low):
                if reverse and key == high:
                    continue
                if not low <= key < high:
                    return
                yield key[1:], row

    def blob(self, name: str) -> bytes | None:
        found: bytes | None = self._read(lambda rdict: rdict.get(_BLOB + name.encode()))
        return found

    def write(
        self,
        changes: rows.Changes | dict[bytes, bytes | None],
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
        expect: tuple[str, bytes | None] | None = None,
        *,
        index: bool = False,
    ) -> bool:
        wanted = changes if isinstance(changes, dict) else dict(changes)
        with self._translated(), self._database.writing():
            # No other process has it open, so what is read here does not change before the batch is written.
            if expect is not None and self.blob(expect[0]) != expect[1]:
                return False
            planned = plan(wanted, self._tally(), self.get_many, self.scan, index=index)
            batch = library().WriteBatch(raw_mode=True)
            for key in planned.deletes:
                batch.delete(_ROW + key)
            for key, row in zip(planned.keys, planned.values, strict=True):
                batch.put(_ROW + key, row)
            for name, blob in {**blobs, TALLY: planned.tally.with_blobs(blobs).encode()}.items():
                if blob is None:
                    batch.delete(_BLOB + name.encode())
                else:
                    batch.put(_BLOB + name.encode(), blob)
            self._database.written_bytes += batch.size_in_bytes()
            self._rdict.write(batch)
        return True

    def nbytes(self) -> int | None:
        """Of its tables, and of the log of writes that are not in a table yet. RocksDB knows it without a look at each
        file: a batch asks for each partition."""
        tables, buffers = self._read(lambda rdict: [int(rdict.property_int_value(name) or 0) for name in _SIZES])
        # Buffers are allocated by the megabyte. They are empty when RocksDB has made a table of what was written.
        return tables + (buffers if self._database.read_only else min(buffers, self._database.written_bytes))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with _open_lock:
            database = self._database
            database.users -= 1
            if not database.users:
                database.close()
                name = _name(database.folder)
                if _open.get(name) is database:
                    del _open[name]

    def _tally(self) -> StoreSummary:
        return StoreSummary.decode(self.blob(TALLY))

    def _items(self) -> AbstractContextManager[Iterator[tuple[bytes, bytes]]]:
        return nullcontext(self.scan(b""))

    def _blobs(self) -> dict[str, bytes]:
        found = {}
        with self._translated():
            for key, blob in self._rdict.items(from_key=_BLOB):
                if not key.startswith(_BLOB):
                    break
                found[key[1:].decode(errors="replace")] = blob
        found.pop(TALLY, None)
        return found

    def _read(self, work: Callable[[Any], _T]) -> _T:
        with self._translated():
            rdict = self._rdict
            try:
                return work(rdict)
            except Exception:
                with self._database.lock:  # a writer may be opening it again
                    if self._rdict is rdict:
                        raise
                return work(self._rdict)

    @property
    def _rdict(self) -> Any:
        return self._database.rdict

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with _translated(self._database.folder):
            yield


class _Database:
    """An open RocksDB, shared by all stores of one folder in this process."""

    def __init__(self, folder: Path, read_only: bool) -> None:
        self.folder = folder
        self.read_only = read_only
        self.lock = threading.RLock()
        self.users = 0
        self.written_bytes = 0  # since it was opened
        self._failed = False
        if read_only and not RocksdbStore.exists(folder):
            raise FileNotFoundError(folder / DATA)
        with _translated(folder):
            if not read_only:
                make_private(folder)
            self.rdict = _opened(folder, read_only)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For one write. RocksDB refuses all further writes after one that failed; opened again, it takes them."""
        with self.lock:
            if self._failed and not lacks_room(self.folder, _WRITE_BUFFER_BYTES):
                self.close()
                self.rdict = _opened(self.folder, self.read_only)
                self.written_bytes, self._failed = 0, False
            try:
                yield
            except Exception:
                self._failed = True
                raise

    def close(self) -> None:
        """Close it. The error of an earlier write would come again; what was written before that is in its log."""
        with suppress(Exception):
            self.rdict.close()


def _opened(folder: Path, read_only: bool) -> Any:
    """Opens the database. If another process still has it open, this call waits some seconds.

    A reader may open it while a writer merges files. If a file is deleted just then, the reader tries again.
    """
    rocksdict = library()
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_keep_log_file_num(1)
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    until = time.monotonic() + (_VANISHED_WAIT_S if read_only else _LOCK_WAIT_S)
    while True:
        try:
            return rocksdict.Rdict(str(folder / DATA), options, access_type=access)
        except Exception as error:  # the library raises no more specific class
            passing = _VANISHED if read_only else _LOCK_MESSAGES
            if not any(message in str(error) for message in passing) or time.monotonic() >= until:
                raise
        time.sleep(_LOCK_PAUSE_S)


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except (DeadlineExceededError, EnvironmentUnusableError, StoreCorruptError, FileNotFoundError, ValueError):
        raise
    except Exception as error:  # the library raises no more specific class, only the messages differ
        message = str(error)
        if any(part in message for part in _LOCK_MESSAGES):
            raise DeadlineExceededError(
                f"Gave up after {_LOCK_WAIT_S:g} s: another process has the local state open: {folder} on host "
                f"{socket.gethostname()}",
                detail=message,
                next_step="none if it is a task of an earlier attempt, which will end. Otherwise end that process: "
                "only one driver at a time can use a folder of local state",
            ) from error
        if any(part in message for part in _NO_ROOM):
            raise unusable(folder, DISK_FULL, error) from error
        if any(part in message for part in _NOT_ALLOWED):
            raise unusable(folder, "The local state cannot be opened", error) from error
        raise StoreCorruptError(f"the local store is damaged: {message}") from error


def library() -> Any:
    """The package that has RocksDB.

    Raises:
        EnvironmentUnusableError: it is not installed.
    """
    try:
        import rocksdict
    except ImportError as missing:
        raise EnvironmentUnusableError(
            "State in RocksDB needs a package that is not installed",
            detail=str(missing),
            next_step="run: pip install 'onceflow[rocksdb]'",
        ) from missing
    return rocksdict


_open: dict[tuple[int, str], _Database] = {}
_open_lock = threading.RLock()


def _name(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)

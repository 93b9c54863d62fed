"""The default store, LMDB. Many processes can read while one writes, and it stays intact if a process is killed."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from onceflow.state.format import rows
from onceflow.state.stores.base import (
    BULK_BYTES_MAX,
    BULK_ROWS_MAX,
    NO_BLOBS,
    TALLY,
    Snapshot,
    Store,
    StoreCorruptError,
    StoreSummary,
    plan,
    with_new,
)
from onceflow.state.stores.lmdb_environment import DATA, LOCK, Environment, acquire, forget, release
from onceflow.state.stores.lmdb_lock import NAME as WRITER
from onceflow.state.stores.lmdb_long_keys import SHORT_KEY_BYTES_MAX, LongKeys
from onceflow.state.stores.lmdb_pages import check_pages

_T = TypeVar("_T")
_SCANNED_FIRST, _SCANNED_AT_ONCE, _RANGES_AT_ONCE = 16, 1024, 1024
# Two pages for each row, because each may be in another page that has to be split, and room for rows that are so large
# that they have pages of their own.
_BULK_ROOM = 2 * BULK_ROWS_MAX * 4096 + 2 * BULK_BYTES_MAX


class LmdbStore(Store):
    """Rows and blobs in two named databases of one LMDB environment."""

    combines = True

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._closed = False
        self._bulk: Any = None

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> LmdbStore:
        return cls(acquire(folder, read_only))

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / DATA).exists()

    @staticmethod
    def remove(folder: Path) -> None:
        forget(folder)
        if folder.exists() and not folder.is_dir():
            folder.unlink()
        # LMDB's lock file first: if it were left behind, the next data would get its transaction numbers.
        for file in (folder / LOCK, folder / DATA, folder / WRITER):
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            elif os.path.lexists(file):
                file.unlink(missing_ok=True)

    def get(self, key: bytes) -> bytes | None:
        row: bytes | None
        if len(key) > SHORT_KEY_BYTES_MAX:
            row = self._environment.read(lambda txn, _: self._keys(txn).get(key))
        else:
            row = self._environment.read(lambda txn, db: txn.get(key, db=db))
        return row

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def read(txn: Any, db: Any) -> list[bytes | None]:
            return self._keys(txn).get_many(txn.cursor(db), keys)

        return self._environment.read(read)

    def read_in_place(self, key: bytes, work: Callable[[bytes | memoryview | None], _T]) -> _T:
        return self._environment.read(lambda txn, _: work(self._keys(txn).get(key)), in_place=True)

    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # In parts: while a read transaction is open, free pages cannot be reused, and the map cannot grow.
        wanted = _SCANNED_FIRST
        while True:
            part = self._environment.read(self._part_read(start, end, reverse, wanted))
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

    def scan_many(self, ranges: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes, bytes]]:
        at, start = 0, b""  # the range to go on with, and where in it
        while at < len(ranges):
            found, at, start = self._environment.read(self._many_read(ranges, at, start))
            if found is None:
                rest = [(max(start, ranges[at][0]), ranges[at][1]), *ranges[at + 1 :]]
                for number, key, row in super().scan_many(rest):
                    yield at + number, key, row
                return
            yield from found

    def blob(self, name: str) -> bytes | None:
        found: bytes | None = self._environment.read(lambda txn, _: txn.get(name.encode(), db=self._environment.blobs))
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
        environment = self._environment

        def write(txn: Any, db: Any) -> bool:
            if expect is not None and txn.get(expect[0].encode(), db=environment.blobs) != expect[1]:
                return False
            tally = StoreSummary.decode(txn.get(TALLY.encode(), db=environment.blobs))
            cursor, long = txn.cursor(db), self._keys(txn)
            last = cursor.key() if cursor.last() else b""

            def fetch(keys: Sequence[bytes]) -> Iterable[bytes | None]:
                if not keys or keys[0][:SHORT_KEY_BYTES_MAX] > last:  # all of them are behind the last row
                    return [None] * len(keys)
                return long.get_many(cursor, keys)

            planned = plan(wanted, tally, fetch, long.scan, index=index)
            for key in planned.deletes:
                if len(key) > SHORT_KEY_BYTES_MAX:
                    long.delete(key)
                else:
                    txn.delete(key, db=db)
            _put(cursor, long, planned.keys, planned.values)
            for name, blob in {**blobs, TALLY: planned.tally.with_blobs(blobs).encode()}.items():
                if blob is None:
                    txn.delete(name.encode(), db=environment.blobs)
                else:
                    txn.put(name.encode(), blob, db=environment.blobs)
            return True

        return self._run(write, sum(_size(part) for part in (wanted, wanted.values(), blobs.values())))

    def put_new(self, keys: Sequence[bytes], values: Sequence[bytes], expect: tuple[str, bytes | None]) -> bool:
        blobs = self._environment.blobs

        def write(txn: Any, db: Any) -> bool:
            if txn.get(expect[0].encode(), db=blobs) != expect[1]:
                return False
            tally = StoreSummary.decode(txn.get(TALLY.encode(), db=blobs))
            _put(txn.cursor(db), self._keys(txn), keys, values)
            txn.put(TALLY.encode(), with_new(keys, values, tally).encode(), db=blobs)
            return True

        return self._run(write, _size(keys) + _size(values))

    def _run(self, write: Callable[[Any, Any], bool], size: int) -> bool:
        """Run a write in the transaction of `bulk`, or else in one of its own."""
        environment = self._environment
        if self._bulk is None:
            return environment.write(write, size)
        environment.written += size
        with environment.translated():
            return write(self._bulk, environment.rows)

    @contextmanager
    def bulk(self) -> Iterator[Callable[[], None]]:
        # LMDB copies the pages that a transaction changes. With keys in random order, every commit changes all pages.
        environment = self._environment

        def commit() -> None:
            with environment.translated():
                self._bulk.commit()
                environment.complete_file()
                environment.writer.release()  # so that other writers can continue
                begin()

        def begin() -> None:
            # First the environment's lock, then its writer lock, as in `Environment.write`. The map cannot grow while
            # the transaction is open, so it is made large enough now. This takes only address space.
            with environment.lock:
                environment.writer.acquire()
                try:
                    environment.written = 0
                    environment.make_room(_BULK_ROOM)
                    self._bulk = environment.begin_write()
                except BaseException:
                    environment.writer.release()
                    self._bulk = None
                    raise

        with environment.translated():
            begin()
        try:
            yield commit
            with environment.translated():
                self._bulk.commit()
                environment.complete_file()
        finally:
            if self._bulk is not None:
                self._bulk.abort()  # does nothing if it is committed
                self._bulk = None
                environment.writer.release()

    def checksum_holds(self) -> bool:
        self.check_pages()  # first: LMDB does not check them, and a damaged page may crash the process
        return super().checksum_holds()

    def nbytes(self) -> int:
        return self._environment.bytes_used()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        environment = self._environment
        with environment.translated(), environment.reading() as txn:
            blobs = {name.decode(errors="replace"): blob for name, blob in txn.cursor(environment.blobs)}
            tally = StoreSummary.decode(blobs.pop(TALLY, None))
            yield Snapshot(tally, blobs, self._all(txn))

    def check_pages(self) -> None:
        """Check that the pages of the file are consistent. Inside of a `snapshot`, another process may write.

        Raises:
            StoreCorruptError: they are not.
        """
        with self._environment.translated():
            check_pages(self._environment.folder / DATA)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            release(self._environment)

    def _keys(self, txn: Any) -> LongKeys:
        return LongKeys(txn, self._environment.rows, self._environment.nodes)

    def _all(self, txn: Any) -> Iterator[tuple[bytes, bytes]]:
        long = self._keys(txn)
        return long.scan() if long.are_there else txn.cursor(self._environment.rows).iternext()

    def _part_read(
        self, start: bytes, end: bytes | None, reverse: bool, wanted: int
    ) -> Callable[[Any, Any], list[tuple[bytes, bytes]]]:
        def read(txn: Any, db: Any) -> list[tuple[bytes, bytes]]:
            long = self._keys(txn)
            there = long.are_there
            if not there or _are_short((start, end or b"")):
                part = _part(txn.cursor(db), start, end, reverse, wanted)
                if not there or _are_short([key for key, _ in part]):  # between long keys there are mostly short ones
                    return part
            return list(islice(long.scan(start, end, reverse=reverse), wanted))

        return read

    def _many_read(
        self, ranges: Sequence[tuple[bytes, bytes]], at: int, start: bytes
    ) -> Callable[[Any, Any], tuple[list[tuple[int, bytes, bytes]] | None, int, bytes]]:
        """Reads a part of `scan_many`. It returns rows (None: there are long keys), and where the next part begins."""

        def read(txn: Any, db: Any) -> tuple[list[tuple[int, bytes, bytes]] | None, int, bytes]:
            part = ranges[at : at + _RANGES_AT_ONCE]
            if self._keys(txn).are_there or not all(map(_are_short, part)):
                return None, at, start
            cursor = txn.cursor(db)
            found: list[tuple[int, bytes, bytes]] = []
            for number, (low, high) in enumerate(part, at):
                key = cursor.key() if cursor.set_range(max(low, start) if number == at else low) else high
                while key < high:
                    if len(found) >= _SCANNED_AT_ONCE:
                        return found, number, key
                    found.append((number, key, cursor.value()))
                    key = cursor.key() if cursor.next() else high
            return found, at + len(part), b""

        return read

    def _tally(self) -> StoreSummary:
        return StoreSummary.decode(self.blob(TALLY))

    @contextmanager
    def _items(self) -> Iterator[Iterator[tuple[bytes, bytes]]]:
        # One transaction and one cursor, so that reading ends even if the tree is damaged.
        environment = self._environment
        with environment.translated(), environment.reading() as txn:
            yield self._all(txn)

    def _blobs(self) -> dict[str, bytes]:
        def read(txn: Any, _: Any) -> dict[str, bytes]:
            return {name.decode(errors="replace"): blob for name, blob in txn.cursor(self._environment.blobs)}

        found = self._environment.read(read)
        found.pop(TALLY, None)
        return found


def _part(cursor: Any, start: bytes, end: bytes | None, reverse: bool, wanted: int) -> list[tuple[bytes, bytes]]:
    """The next rows of a scan over short keys."""
    if not reverse:
        if not _seek(cursor, start):
            return []
        part = list(islice(cursor.iternext(), wanted))
        if end is not None and part[-1][0] >= end:
            part = [(key, row) for key, row in part if key < end]
        return part
    if not (cursor.prev() if end is not None and _seek(cursor, end) else cursor.last()):
        return []
    part = list(islice(cursor.iterprev(), wanted))
    return part if part[-1][0] >= start else [(key, row) for key, row in part if key >= start]


def _are_short(keys: Sequence[bytes]) -> bool:
    return not keys or max(map(len, keys)) <= SHORT_KEY_BYTES_MAX


def _put(cursor: Any, long: LongKeys, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Put sorted rows. Those behind the last row are appended: that fills each page. Otherwise full pages are split in
    halves."""
    if not _are_short(keys):
        pairs = list(zip(keys, values, strict=True))
        for key, row in pairs:
            if len(key) > SHORT_KEY_BYTES_MAX:
                long.put(key, row)
        pairs = [pair for pair in pairs if len(pair[0]) <= SHORT_KEY_BYTES_MAX]
        keys, values = [key for key, _ in pairs], [row for _, row in pairs]
    at = bisect_right(keys, cursor.key()) if cursor.last() else 0
    if at:
        cursor.putmulti(zip(keys[:at], values[:at], strict=True))
        keys, values = keys[at:], values[at:]
    cursor.putmulti(zip(keys, values, strict=True), append=True)


def _size(payloads: Iterable[bytes | None]) -> int:
    return sum(map(len, filter(None, payloads)))


def _seek(cursor: Any, key: bytes) -> bool:
    """Moves to the first key that is not less than this one. This one may be longer than LMDB allows."""
    if not key:
        return bool(cursor.first())
    found = cursor.set_range(key[:SHORT_KEY_BYTES_MAX])
    return bool(cursor.next() if found and cursor.key() < key else found)

"""``LocalTable``: a read-only view of the local copies of a table, for any process on the machine."""

from __future__ import annotations

import difflib
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from onceflow.errors import OptionError
from onceflow.state import rows
from onceflow.state.local.format import COMMIT_RECORD, CommitRecord
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore

_BYTES = (bytes, bytearray, memoryview)
_MAX_NAMES = 10  # in an error
_OPENERS: tuple[type[Store], ...] = (LmdbStore, RocksdbStore, MemoryStore)


class LocalTable:
    """The keys and values of a table that are on this machine.

    It shows what the flow has applied to the local copies: a batch is visible when the next one has begun, or when the
    flow has ended. Partitions that tasks on other machines process are missing, or as old as their copy here. To see
    the whole current table, read its topic. Expired values are hidden. Nothing is written or kept open.

    Args:
        folder: the folder of the table, ``<state_dir>/<flow>/<table>``. It need not exist before the first read.
        clock_ms: returns the time in epoch milliseconds; for tests.

    Every method raises `OptionError` if the folder is not that of a table, or if a key is not bytes.
    """

    def __init__(self, folder: Path | str, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._folder = Path(folder)
        self._clock_ms = clock_ms or (lambda: time.time_ns() // 1_000_000)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        _check("The key for get()", key, *_BYTES)
        now_ms = self._clock_ms()
        row_key = rows.value_key(key)
        if len(row_key) > rows.ROW_KEY_BYTES_MAX:
            return None
        with self._stores() as stores:
            found = (store.get(row_key) for store in stores)
            return next((value for row in found if row and (value := _value(row, now_ms)) is not None), None)

    def range(
        self, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys with ``start <= key < end`` and their values, in order of keys over all partitions."""
        _check("The start for range()", start, *_BYTES)
        _check("The end for range()", b"" if end is None else end, *_BYTES)
        return self._values(start, end, reverse)

    def _values(self, start: bytes, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        now_ms = self._clock_ms()
        last = rows.after(rows.VALUE) if end is None else rows.value_key(end)
        with self._stores() as stores:
            scans = [store.scan(rows.value_key(start), last, reverse=reverse) for store in stores]
            for row_key, row in heapq.merge(*scans, key=_first, reverse=reverse):
                value = _value(row, now_ms)
                if value is not None:
                    yield row_key[1:], value

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with these bytes, and their values, in order of keys over all partitions."""
        _check("The prefix", prefix, *_BYTES)
        return self.range(prefix, rows.after(prefix), reverse=reverse)

    def map_entries(self, name: str) -> Iterator[tuple[bytes, bytes, bytes]]:
        """All entries of the maps of this name: the key that the map belongs to, the entry's key, the entry's value."""
        _check("The name for map_entries()", name, str)
        now_ms = self._clock_ms()
        with self._stores() as stores:
            for store in stores:
                for row_key, row in store.scan(rows.MAP, rows.after(rows.MAP)):
                    key, found, entry = rows.map_parts(row_key)
                    value = _value(row, now_ms)
                    if found == name.encode() and value is not None:
                        yield key, entry, value

    @contextmanager
    def _stores(self) -> Iterator[list[Store]]:
        opened: list[Store] = []
        folders = self._partition_folders()
        if not folders:
            self._refuse()
        try:
            for folder in folders:
                for opener in _OPENERS:
                    try:
                        if opener.exists(folder):
                            opened.append(opener.open(folder, read_only=True))
                            break
                    except FileNotFoundError:
                        continue  # the store is being removed or created
            yield _of_one_table(opened)
        finally:
            for store in opened:
                store.close()

    def _partition_folders(self) -> list[Path]:
        names = {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        names |= {path.name for path in MemoryStore.folders() if path.parent == self._folder.absolute()}
        return [self._folder / name for name in sorted(names) if name.isdecimal()]

    def _refuse(self) -> NoReturn:
        """Explain that the folder has no partitions: which part of its path exists, and what is there.

        Raises:
            OptionError: always.
        """
        folder = self._folder.absolute()
        there = next(each for each in (folder, *folder.parents) if each.is_dir())
        names = sorted(each.name for each in there.iterdir() if each.is_dir())
        if there == folder:
            what = f"{self._folder} is not the folder of a table"
        else:
            what = f"There is no table in {self._folder}"
            close = difflib.get_close_matches(folder.relative_to(there).parts[0], names, n=1)
            names = close or names
        detail = f"there is no folder below {there}"
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            detail = f"below {there} there is {', '.join(names[:_MAX_NAMES])}{more}"
        raise OptionError(
            what,
            detail=detail,
            next_step="give the folder <state_dir>/<flow>/<table>; it exists when the flow has begun a batch on this "
            "machine (copies of the memory store are visible in the flow's own process only)",
        )


def _of_one_table(stores: list[Store]) -> list[Store]:
    """The stores without copies of an earlier topic of the same name."""
    found = [(store, CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")) for store in stores]
    newest = max((held for _, held in found if held is not None), key=_age, default=None)
    if newest is None:
        return []
    return [store for store, held in found if held is not None and held.table_id == newest.table_id]


def _age(commit_record: CommitRecord) -> int:
    return commit_record.time_ms


def _check(what: str, given: object, *kinds: type) -> None:
    if not isinstance(given, kinds):
        raise OptionError(
            f"{what} of a LocalTable is {kinds[0].__name__}, got {type(given).__name__}: {given!r:.100}",
            next_step="encode keys as the processor's key serde does, for example 'ada'.encode(); names are text",
        )


def _first(item: tuple[bytes, bytes]) -> bytes:
    return item[0]


def _value(row: bytes, now_ms: int) -> bytes | None:
    payload, expires_ms, _ = rows.unpack(row)
    return payload if expires_ms is None or expires_ms > now_ms else None

"""The interface of local stores of one table partition, and the checksum that detects damage.

A store is a cache of data in Kafka. It may be lost or damaged at any time, but damage must always be detected. So
every write updates a checksum over all rows and blobs in the same commit. Errors that a storage engine raises for a
damaged file become `StoreCorruptError`; the caller then removes the data and restores them.
"""

from __future__ import annotations

import abc
import socket
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter, lt
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import orjson

from onceflow.errors import EnvironmentUnusableError, OnceflowError
from onceflow.state.format import rows, segments

_T = TypeVar("_T")
NO_BLOBS: Mapping[str, bytes | None] = {}

#: Name of the blob that contains the checksum. No other blob's name begins with a zero byte.
TALLY = "\0tally"

#: Limits of `Store.bulk` for one commit.
BULK_ROWS_MAX, BULK_BYTES_MAX = 2_000_000, 1 << 30

#: What errors say that are not about damage, and pass when there is room again.
DISK_FULL = "The disk of the local state is full"

# Odd 64-bit factors. They make the lengths change the upper half of the sum, too, which the CRCs do not reach.
_OF_KEY_LENGTH, _OF_ROW_LENGTH, _OF_ROW = 0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9
_MASK = (1 << 64) - 1
# Small, so that the lists stay in the CPU cache. With ten thousand at a time, a scan takes four times as long.
_SCANNED_AT_ONCE = 256
_FLAGS = itemgetter(0)  # of a row


class StoreCorruptError(OnceflowError):
    """A local store cannot be read, or does not contain what was written. The caller restores it from Kafka."""


class StoreHeldError(StoreCorruptError):
    """A process that is stopped (SIGSTOP) holds the store, and may hold it for ever. The data may be in order."""


def unusable(folder: Path, what: str, error: Exception) -> EnvironmentUnusableError:
    """The error for a problem of the machine, which a restore would not solve."""
    return EnvironmentUnusableError(
        f"{what}: {folder} on host {socket.gethostname()}",
        detail=f"{type(error).__name__}: {error}",
        next_step="make the folder writable and its disk large enough, or give another folder: state_dir= of "
        "Flow.process or Table, --state-dir of a command, or ONCEFLOW_STATE_DIR on that host",
    )


def checksum(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """The sum (modulo 2^64) of a hash of each row. So the order does not matter, and rows can be added and removed.

    The hash is the CRC-32 of key and row, combined with their lengths. There is no Python loop here.
    """
    total = sum(map(zlib.crc32, values, map(zlib.crc32, keys)))
    total += _OF_KEY_LENGTH * sum(map(len, keys)) + _OF_ROW_LENGTH * sum(map(len, values)) + _OF_ROW * len(keys)
    return total & _MASK


@dataclass(frozen=True)
class StoreSummary:
    """How many rows there are, their checksum, and one checksum for each blob.

    Args:
        kinds: how many rows there are of each kind, by its letter. In a store that an older version has written, their
            sum is not ``rows``.
    """

    rows: int = 0
    total: int = 0
    blobs: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict, compare=False)

    def encode(self) -> bytes:
        return orjson.dumps({"rows": self.rows, "total": self.total, "blobs": self.blobs, "kinds": self.kinds})

    @classmethod
    def decode(cls, raw: bytes | None) -> StoreSummary:
        """The tally of a store; an empty one if nothing was written yet."""
        if raw is None:
            return cls()
        try:
            read = orjson.loads(raw)
            return cls(int(read["rows"]), int(read["total"]), dict(read["blobs"]), dict(read.get("kinds", {})))
        except (ValueError, KeyError, TypeError) as unreadable:
            raise StoreCorruptError(f"the checksum of the local store is unreadable: {unreadable}") from unreadable

    def with_blobs(self, blobs: Mapping[str, bytes | None]) -> StoreSummary:
        """This tally as it is after these blobs are written (None: deleted)."""
        if not blobs:
            return self
        sums = {name: total for name, total in self.blobs.items() if name not in blobs}
        sums.update({name: checksum([name.encode()], [blob]) for name, blob in blobs.items() if blob is not None})
        return replace(self, blobs=sums)


def tally_of(items: Iterator[tuple[bytes, bytes]], blobs: Mapping[str, bytes]) -> StoreSummary:
    """The tally of all these rows and blobs. The rows must be in order of keys.

    Raises:
        StoreCorruptError: the keys are not in ascending order, so that some rows could not be found.
    """
    count = total = 0
    last = b""
    while part := list(islice(items, _SCANNED_AT_ONCE)):
        keys = [key for key, _ in part]
        if not (last < keys[0] and all(map(lt, keys, islice(keys, 1, None)))):
            raise StoreCorruptError("keys of the local store are out of order")
        last = keys[-1]
        count += len(keys)
        total += checksum(keys, [row for _, row in part])
    return StoreSummary(count, total & _MASK).with_blobs(blobs)


class Snapshot(NamedTuple):
    """What is in a store: its tally, the blobs except the tally, and the rows in order. They can be read once."""

    tally: StoreSummary
    blobs: Mapping[str, bytes]
    items: Iterator[tuple[bytes, bytes]]


class Plan(NamedTuple):
    """What one write does: sorted keys to put and their rows, existing keys to delete, and the new tally."""

    keys: list[bytes]
    values: list[bytes]
    deletes: list[bytes]
    tally: StoreSummary


def plan(
    changes: dict[bytes, bytes | None],
    tally: StoreSummary,
    fetch: Callable[[Sequence[bytes]], Iterable[bytes | None]],
    scan: Callable[[bytes, bytes], Iterable[tuple[bytes, bytes]]],
    *,
    index: bool,
) -> Plan:
    """Plans a write, inside the engine's write transaction.

    Args:
        changes: row keys and rows; None deletes the row.
        tally: the tally before the write.
        fetch: returns the current rows for sorted keys.
        scan: returns the current rows with ``start <= key < end``.
        index: the changes are of ``v``, ``m`` and ``t`` rows, and the changes of index rows have to be added. Stamped
            rows are placed in their segments.
    """
    known: Mapping[bytes, bytes | None] = {}
    flags = set(map(_FLAGS, filter(None, changes.values())))
    if index and (placed := segments.placed(changes, fetch, scan, flags)) is not None:
        (changes, known), index = placed, False
    keys = sorted(changes)
    if keys and not keys[0]:
        raise ValueError("row keys have at least one byte")
    old = {}
    if tally.rows:
        old = _found([key for key in keys if key not in known] if known else keys, fetch)
        old.update((key, row) for key, row in known.items() if row is not None)
    if index:
        follow = _index_rows(changes, keys, flags, old)
        if follow and old:  # otherwise there are no index rows yet
            old.update(_found(sorted(follow), fetch))
        due, due_before = _due_rows(changes, flags, old)
        old.update(due_before)
        if follow or due:
            changes = {**changes, **follow, **due}
            keys = sorted(changes)
    puts, deletes = changes, []
    if None in changes.values():
        puts = {key: row for key, row in changes.items() if row is not None}
        deletes = [key for key in keys if changes[key] is None and key in old]
        keys = [key for key in keys if key in puts]
    values: list[bytes] = list(map(puts.__getitem__, keys))  # type: ignore[arg-type]  # no None is left
    # In the order of the changes, not of the keys, because this is their order in memory.
    total = tally.total - checksum(list(old), list(old.values()))
    total += checksum(list(puts), list(puts.values()))  # type: ignore[arg-type]
    kinds = Counter(tally.kinds)
    kinds.update(_by_kind(keys))
    kinds.subtract(_by_kind(sorted(old)))
    after = replace(tally, rows=tally.rows - len(old) + len(puts), total=total & _MASK, kinds=dict(+kinds))
    return Plan(keys, values, deletes, after)


def with_new(keys: Sequence[bytes], values: Sequence[bytes], tally: StoreSummary) -> StoreSummary:
    """The tally after a write of sorted rows that are all new."""
    total = tally.total + checksum(keys, values)
    kinds = Counter(tally.kinds)
    kinds.update(_by_kind(keys))
    return replace(tally, rows=tally.rows + len(keys), total=total & _MASK, kinds=dict(kinds))


def _by_kind(keys: Sequence[bytes]) -> dict[str, int]:
    """How many of these sorted keys are of each kind."""
    found, at = {}, 0
    while at < len(keys):
        kind = keys[at][0]
        end = len(keys) if keys[-1][0] == kind else bisect_left(keys, bytes((kind + 1,)), at)
        found[chr(kind)], at = end - at, end
    return found


def _found(keys: Sequence[bytes], fetch: Callable[[Sequence[bytes]], Iterable[bytes | None]]) -> dict[bytes, bytes]:
    return {key: row for key, row in zip(keys, fetch(keys), strict=True) if row is not None}


def _index_rows(
    changes: Mapping[bytes, bytes | None], keys: Sequence[bytes], flags: set[int], old: Mapping[bytes, bytes]
) -> dict[bytes, bytes | None]:
    """The changes of index rows. Most rows have no index row, so those that have one are selected first.

    Args:
        keys: of the changes, sorted. flags: of the rows.
    """
    timers, behind = (bisect_left(keys, each) for each in (rows.TIMER, bytes((rows.TIMER[0] + 1,))))
    concerned = {*keys[timers:behind], *rows.may_have_json_index(keys)}
    if any(each & rows.HAS_EXPIRY for each in flags):
        concerned.update(key for key, row in changes.items() if row and row[0] & rows.HAS_EXPIRY)
    if not old:
        return dict(rows.new_index((key, changes[key]) for key in concerned))
    concerned.update(key for key, row in old.items() if row and row[0] & rows.HAS_EXPIRY)
    follow = dict(rows.with_index(((key, changes[key]) for key in concerned), old.get))
    index: dict[bytes, bytes | None] = {key: row for key, row in follow.items() if key not in concerned}
    return index


def _due_rows(
    changes: Mapping[bytes, bytes | None], flags: set[int], old: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes | None], dict[bytes, bytes]]:
    """The changes of index rows of rows that are due, and those of them that are there.

    Such rows come and go in large numbers. Their index rows follow from them, so nothing has to be read.
    """
    before = {rows.DUE_INDEX + row[1:9] + key: b"" for key, row in old.items() if row and row[0] & rows.IS_DUE}
    if not before and not any(each & rows.IS_DUE for each in flags):
        return {}, {}
    index: dict[bytes, bytes | None] = dict.fromkeys(before)
    for key, row in changes.items():
        if row and row[0] & rows.IS_DUE:
            index[rows.DUE_INDEX + row[1:9] + key] = b""
    return index, before


class Store(abc.ABC):
    """Ordered rows of one table partition, and a few named blobs.

    Any method except `remove` and `exists` may raise `StoreCorruptError`, and `EnvironmentUnusableError` if the
    disk is full or the folder is not accessible.

    Attributes:
        on_disk: whether all processes of the machine see the same rows in a folder.
        combines: whether `bulk` combines writes, so that they become visible together.
    """

    on_disk: ClassVar[bool] = True
    combines: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> Store:
        """Opens the store in a folder, and creates it if it is missing.

        Raises:
            FileNotFoundError: with read_only, if there is no store.
        """

    @staticmethod
    @abc.abstractmethod
    def exists(folder: Path) -> bool:
        """Whether there is a store in the folder. It may be damaged."""

    @staticmethod
    @abc.abstractmethod
    def remove(folder: Path) -> None:
        """Deletes the data, even if they are damaged. A symlink is deleted, not followed."""

    @abc.abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """One row."""

    @abc.abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The row of each key, in the order of the keys; sorted keys are found faster."""

    def read_in_place(self, key: bytes, work: Callable[[bytes | memoryview | None], _T]) -> _T:
        """What a function makes of a row (None: there is none). The row is not copied if this engine can do without;
        then it is gone when the function returns."""
        return work(self.get(key))

    @abc.abstractmethod
    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Rows with ``start <= key < end`` in order. Writes during the scan may be visible or not."""

    def scan_many(self, ranges: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes, bytes]]:
        """Rows in ranges of keys, each with the number of its range: as `scan` for one range after the other, but
        faster if this engine can do so."""
        for number, (start, end) in enumerate(ranges):
            for key, row in self.scan(start, end):
                yield number, key, row

    @abc.abstractmethod
    def blob(self, name: str) -> bytes | None:
        """One blob."""

    @abc.abstractmethod
    def write(
        self,
        changes: rows.Changes | dict[bytes, bytes | None],
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
        expect: tuple[str, bytes | None] | None = None,
        *,
        index: bool = False,
    ) -> bool:
        """Writes rows and blobs in one atomic commit. If a key occurs twice, its last row is written.

        Args:
            changes: row keys and rows, as pairs or a dictionary; None deletes the row.
            blobs: names and blobs; None deletes the blob.
            expect: name and expected value of a blob. They are compared inside the transaction.
            index: whether to add the changes of index rows (see `rows.with_index`).

        Returns:
            Whether it was written. False: the blob is not as expected, and nothing was changed.
        """

    def put_new(self, keys: Sequence[bytes], values: Sequence[bytes], expect: tuple[str, bytes | None]) -> bool:
        """Writes rows, of whose keys the store has none, in the order of their keys. No index rows are added.

        Args:
            expect: as for `write`.

        Returns:
            As `write`.
        """
        return self.write(zip(keys, values, strict=True), expect=expect)

    @contextmanager
    def bulk(self) -> Iterator[Callable[[], None]]:
        """Combines many writes into few commits, if that is faster with this engine.

        It yields a function that commits the writes so far. The writes of one commit must not exceed `BULK_BYTES_MAX`
        and `BULK_ROWS_MAX`. The end of the block commits. An error drops what is not committed. Reads in the block see
        the last commit.
        """
        yield lambda: None

    def checksum_holds(self) -> bool:
        """Reads everything, and returns whether rows and blobs are those that were written.

        Raises:
            StoreCorruptError: means the same as False; the damage was found by the engine, or during the scan.
        """
        with self.snapshot() as found:
            return found.tally == tally_of(found.items, found.blobs)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Everything that is in the store, as of one moment if this engine can read while another process writes.

        Keep the block short: an engine may need more disk space meanwhile.
        """
        tally, blobs = self._tally(), self._blobs()
        with self._items() as items:
            yield Snapshot(tally, blobs, items)

    def row_count(self) -> int:
        """How many rows there are, of all kinds. Nothing is read but the checksum's record."""
        return self._tally().rows

    def rows_by_kind(self) -> Mapping[str, int]:
        """How many rows there are of each kind, by its letter (``rows.py``). Nothing is read but the checksum's record.
        Empty if an older version has written the store, because it has not counted them."""
        tally = self._tally()
        return tally.kinds if sum(tally.kinds.values()) == tally.rows else {}

    def nbytes(self) -> int | None:
        """How large the store is on disk, in bytes, about; None: it is not on disk, or not any more."""
        return None

    def close(self) -> None:  # noqa: B027 (not every engine has something to release)
        """Releases the resources of this object. The data stay."""

    @abc.abstractmethod
    def _tally(self) -> StoreSummary: ...

    @abc.abstractmethod
    def _items(self) -> AbstractContextManager[Iterator[tuple[bytes, bytes]]]:
        """All rows, while the block lasts."""

    @abc.abstractmethod
    def _blobs(self) -> dict[str, bytes]:
        """All blobs except the tally."""

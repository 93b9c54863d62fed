"""What a table's topics contain at given offsets, in a store in a scratch folder, and how two stores differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.client.committed import CommittedReader
from onceflow.clock import clock_ms
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.state.format import rows
from onceflow.state.local.catch_up import CatchUp, Source
from onceflow.state.local.format import KINDS, Columns, Goal
from onceflow.state.local.watched_source import WatchedSource
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore

_NO_FLOW = _NO_ID = "verify"
_FOREVER_MS = 1 << 62


@dataclass(frozen=True)
class Position:
    """A partition of a table, and where its two topics are read to."""

    table: str
    partition: int
    table_end: int
    internal_end: int

    @property
    def name(self) -> str:
        return f"{self.table}-{self.partition}"


class RowDifference(NamedTuple):
    """A row that differs. ``expected`` or ``found`` is None if there is no row."""

    row_key: bytes
    expected: bytes | None
    found: bytes | None

    @property
    def key(self) -> bytes:
        """The user's key that the row belongs to."""
        return key_of(self.row_key)


def key_of(row_key: bytes) -> bytes:
    """The user's key that a row belongs to."""
    return row_key[1:] if row_key[:1] == rows.VALUE else rows.split(row_key[1:])[0]


def what_of(row_key: bytes) -> str:
    """What a row is, for people."""
    if row_key[:1] == rows.MAP:
        return f"an entry of map {rows.map_parts(row_key)[1].decode(errors='replace')!r}"
    if row_key[:1] == rows.TIMER:
        return f"timer {rows.timer_parts(row_key)[1].decode(errors='replace')!r}"
    return "the value"


def restored(
    folder: Path, at: Position, reader: Source, tell: Callable[[int], None], *, stamped: bool = False
) -> Store:
    """A store with what is committed up to a position, as a restore of the flow would make it. The caller closes it.

    Args:
        folder: an empty folder for it.
        stamped: the table is that of a de-duplication.

    Raises:
        OnceflowError: the topics cannot be read, or the folder cannot be used.
    """
    goal = Goal(_NO_FLOW, at.table, at.partition, _NO_ID, _NO_ID, at.table_end, at.internal_end)
    store = LmdbStore.open(folder)
    try:
        run = CatchUp(folder, goal, reader, _FOREVER_MS, clock_ms(), tell, None, stamped)
        run.bring_up(store)
    except BaseException:
        store.close()
        raise
    return store


def differences(
    expected: Iterator[tuple[bytes, bytes]],
    found: Iterator[tuple[bytes, bytes]],
    same: Callable[[bytes, bytes], bool] = bytes.__eq__,
) -> Iterator[RowDifference]:
    """The rows that are not the same on two sides, both in order of row keys."""
    left, right = next(expected, None), next(found, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left[0] < right[0]):
            assert left is not None
            yield RowDifference(left[0], left[1], None)
            left = next(expected, None)
        elif left is None or right[0] < left[0]:
            yield RowDifference(right[0], None, right[1])
            right = next(found, None)
        else:
            if not same(left[1], right[1]):
                yield RowDifference(left[0], left[1], right[1])
            left, right = next(expected, None), next(found, None)


def rows_of(store: Store) -> Iterator[tuple[bytes, bytes]]:
    """The rows that come from Kafka, in order, without the indexes that a store computes from them."""
    for kind in sorted(KINDS):
        yield from store.scan(kind, rows.after(kind))


class WrittenLater:
    """The user's keys that have records behind a position. They are read when they are asked for.

    Compaction may have removed their rows at the position. So nothing is known of them there.
    """

    def __init__(self, reader: CommittedReader, at: Position) -> None:
        self._reader, self._at = reader, at
        self._keys: set[bytes] | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys

    @property
    def keys(self) -> set[bytes]:
        if self._keys is None:
            self._keys = set()
            at = self._at
            for topic, start in ((at.table, at.table_end), (at.table + INTERNAL_SUFFIX, at.internal_end)):
                for chunk in self._reader.read(topic, at.partition, start, self._reader.end(topic, at.partition)):
                    keys = (key for key in chunk.keys if key is not None)
                    self._keys.update(keys if topic == at.table else map(key_of, keys))
        return self._keys


class WatchedReader(WatchedSource):
    """Notes what it has seen of a table's topics.

    Attributes:
        whole: whether compaction has removed none of the records.
        expires: whether rows with a time to live were among them. Compaction may have removed others.
    """

    def __init__(self, reader: Source) -> None:
        super().__init__(reader)
        self.whole = True
        self.expires = False

    def see(self, topic: str, partition: int, chunk: Columns) -> None:
        self.whole = self.whole and chunk.whole
        self.expires = self.expires or _expires(chunk, is_internal=topic.endswith(INTERNAL_SUFFIX))


def _expires(chunk: Columns, *, is_internal: bool) -> bool:
    records = chunk.records
    if is_internal:
        pairs = zip(records.keys.to_pylist(), records.values.to_pylist(), strict=True)
        return any(
            row is not None and len(row) > 8 and key is not None and key[:1] == rows.MAP and rows.expiry_of(row)
            for key, row in pairs
        )
    names = pa.array([], pa.string()) if records.headers is None else records.headers.flatten().field(0)
    return bool(pc.any(pc.equal(names, rows.EXPIRES_HEADER), min_count=0).as_py())

"""Uncommitted changes of a batch over the committed rows of a store. Reads see both; changes can be rolled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from sortedcontainers import SortedSet

if TYPE_CHECKING:
    from onceflow.state.stores.base import Store

_T = TypeVar("_T")
_MISSING: Any = object()
_ALL = 1 << 62


class NoRows:
    """A store without rows, for a trial with empty state. It has the methods that ``Overlay`` calls."""

    def get(self, row_key: bytes) -> None:
        return None

    def get_many(self, row_keys: Sequence[bytes]) -> list[None]:
        return [None] * len(row_keys)

    def read_in_place(self, key: bytes, work: Callable[[bytes | memoryview | None], _T]) -> _T:
        return work(None)

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def scan_many(self, ranges: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes, bytes]]:
        return iter(())


class Overlay:
    """Rows of one partition as a batch sees them.

    Rows that were read are cached, because nothing else writes to the store while a batch runs.

    Args:
        store: the committed rows.
        large_bytes: keys of rows with more bytes are noted when they are put.
    """

    def __init__(self, store: Store | NoRows, large_bytes: int = _ALL) -> None:
        self.store = store
        self._rows: dict[bytes, bytes | None] = {}  # every known row, read or changed
        self._committed: dict[bytes, bytes | None] = {}  # rows in the store, as far as they were read
        self._changed: dict[bytes, None] = {}  # keys that were written; their rows may be as before again
        self._journal: list[tuple[bytes, Any]] = []  # the earlier rows of all changes since the savepoint
        self._ordered: dict[bytes, Any] = {}  # kind of row -> sorted changed keys; filled by the first scan
        self.large_bytes = large_bytes
        self.large: set[bytes] = set()
        """Keys of the rows with more bytes than that, which were put since the savepoint."""

    def get(self, row_key: bytes) -> bytes | None:
        """The row; None if there is none."""
        row = self._rows.get(row_key, _MISSING)
        if row is _MISSING:
            row = self._rows[row_key] = self._committed[row_key] = self.store.get(row_key)
        return row  # type: ignore[no-any-return]

    def get_many(self, row_keys: Sequence[bytes]) -> list[bytes | None]:
        """The rows of many keys; None for a key without a row."""
        found: list[Any] = list(map(self._rows.get, row_keys, repeat(_MISSING)))
        if _MISSING in found:
            absent = [i for i, row in enumerate(found) if row is _MISSING]
            keys = [row_keys[i] for i in absent]
            read = self.store.get_many(keys)
            pairs = dict(zip(keys, read, strict=True))
            self._rows.update(pairs)
            self._committed.update(pairs)
            for i, row in zip(absent, read, strict=True):
                found[i] = row
        return found

    def put(self, row_key: bytes, row: bytes | None) -> None:
        """Change a row; None deletes it."""
        rows = self._rows
        self._journal.append((row_key, rows.get(row_key, _MISSING)))
        rows[row_key] = row
        if row is not None and (len(row) > self.large_bytes or len(row_key) > self.large_bytes):
            self.large.add(row_key)
        if row_key not in self._changed:
            self._changed[row_key] = None
            if self._ordered and row_key[:1] in self._ordered:
                self._ordered[row_key[:1]].add(row_key)

    def put_many(self, row_keys: Sequence[bytes], new: Sequence[bytes | None]) -> None:
        """Change many rows. `roll_back` does not undo this."""
        self._rows.update(zip(row_keys, new, strict=True))
        self._changed.update(dict.fromkeys(row_keys))
        self._ordered.clear()

    def scan(self, start: bytes, end: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Rows of one kind with start <= key < end, as they are now. The scan does not see later changes."""
        kind = start[:1]
        ordered = self._ordered.get(kind)
        if ordered is None:
            ordered = self._ordered[kind] = SortedSet(key for key in self._changed if key[:1] == kind)
        between = ordered.irange(start, end, (True, False), reverse)
        changed = [(key, self._rows[key]) for key in between if key in self._rows]
        committed = self.store.scan(start, end, reverse=reverse)
        return _merged(committed, changed, reverse) if changed else committed

    def scan_many(self, ranges: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes, bytes]]:
        """Rows of one kind in ranges of keys, each with the number of its range: as `scan` for one after the other. The
        rows must not be changed meanwhile."""
        if not ranges:
            return
        kind, rows, changed = ranges[0][0][:1], self._rows, self._changed
        if any(key[:1] == kind and rows.get(key) is not None for key in changed):
            for number, (start, end) in enumerate(ranges):
                for key, row in self.scan(start, end):
                    yield number, key, row
            return
        for number, key, row in self.store.scan_many(ranges):
            if key not in changed or key not in rows:
                yield number, key, row

    def savepoint(self) -> None:
        """From here on, changes can be rolled back."""
        self._journal.clear()
        self.large.clear()

    def roll_back(self) -> None:
        """Undo the changes since the savepoint."""
        rows = self._rows
        while self._journal:
            row_key, row = self._journal.pop()
            if row is _MISSING:
                del rows[row_key]  # not known again; the key stays in _changed, which is harmless
            else:
                rows[row_key] = row

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """The last row of every key whose row differs from the one in the store."""
        rows, committed = self._rows, self._committed
        unread = [key for key in self._changed if key not in committed and key in rows]
        if unread:
            committed.update(zip(unread, self.store.get_many(unread), strict=True))
        return [(key, rows[key]) for key in self._changed if key in rows and rows[key] != committed[key]]

    def growth(self, changes: Sequence[tuple[bytes, bytes | None]]) -> dict[bytes, int]:
        """How many more rows there are of each kind after these `changes`, without index rows."""
        if not changes:
            return {}
        keys, new = zip(*changes, strict=True)
        old = list(map(self._committed.get, keys))
        found: Counter[bytes] = Counter()
        if None in old:
            found.update(key[:1] for key, row in zip(keys, old, strict=True) if row is None)
        if None in new:
            found.subtract(key[:1] for key, row in changes if row is None)
        return dict(found)


def _merged(
    committed: Iterator[tuple[bytes, bytes]], changed: list[tuple[bytes, bytes | None]], reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """Both in the order of keys. If both have a key, the changed row is used."""
    waiting = iter(changed)
    key, row = next(waiting, (None, None))
    for old_key, old_row in committed:
        while key is not None and (key > old_key if reverse else key < old_key):
            if row is not None:
                yield key, row
            key, row = next(waiting, (None, None))
        if key == old_key:
            if row is not None:
                yield old_key, row
            key, row = next(waiting, (None, None))
        else:
            yield old_key, old_row
    while key is not None:
        if row is not None:
            yield key, row
        key, row = next(waiting, (None, None))

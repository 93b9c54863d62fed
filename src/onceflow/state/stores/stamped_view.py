"""Stamped rows of a store as other readers of local copies expect them: as ``v`` rows, whatever segment they are in."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

from onceflow.state.format import rows, segments
from onceflow.state.format.segments import Segments
from onceflow.state.stores.base import NO_BLOBS, Store, StoreSummary

_SCANNED_AT_ONCE = 1000


class StampedView(Store):
    """Reads a store of stamped rows, while another process may write to it. It cannot be written.

    Args:
        store: closed with this view.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def of(cls, store: Store) -> Store:
        """A view of a store of stamped rows; another store is returned unchanged."""
        return store if store.get(segments.LIST) is None else cls(store)

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        while True:
            current = Segments(self._store)
            found = current.find([key[1:] for key in keys])
            if segments.listed(self._store.get(segments.LIST)) == current.listed:  # else an id may have moved
                return [row if key[:1] == rows.VALUE else None for key, row in zip(keys, found, strict=True)]

    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        after = rows.after(rows.VALUE)
        assert after is not None
        low, high = max(start, rows.VALUE), after if end is None else min(end, after)
        wanted = _SCANNED_AT_ONCE
        while low < high:
            current = Segments(self._store).listed
            parts = [self._part(each.prefix, low[1:], None if high == after else high[1:], reverse) for each in current]
            merged = heapq.merge(*parts, reverse=reverse)
            while found := list(islice(merged, wanted)):
                if segments.listed(self._store.get(segments.LIST)) != current:  # an id may have moved
                    break
                yield from found
                low, high = (low, found[-1][0]) if reverse else (found[-1][0] + b"\0", high)
                wanted = min(2 * wanted, _SCANNED_AT_ONCE)
            else:
                return
            wanted = max(1, wanted // 2)  # a writer that never rests does not keep a reader from going on

    def _part(self, prefix: bytes, low: bytes, high: bytes | None, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        end = segments.end_of(prefix) if high is None else prefix + high
        for key, row in self._store.scan(prefix + low, end, reverse=reverse):
            yield rows.VALUE + key[len(prefix) :], row

    def blob(self, name: str) -> bytes | None:
        return self._store.blob(name)

    def row_count(self) -> int:
        return self._store.row_count() - 1 - len(Segments(self._store).listed)  # without the list and the filters

    def rows_by_kind(self) -> Mapping[str, int]:
        return {rows.VALUE.decode(): self.row_count()}

    def close(self) -> None:
        self._store.close()

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> Store:
        raise NotImplementedError("a view has no folder")

    @staticmethod
    def exists(folder: Path) -> bool:
        return False

    @staticmethod
    def remove(folder: Path) -> None:
        raise NotImplementedError("a view has no folder")

    def write(
        self,
        changes: rows.Changes | dict[bytes, bytes | None],
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
        expect: tuple[str, bytes | None] | None = None,
        *,
        index: bool = False,
    ) -> bool:
        raise NotImplementedError("a view is not written")

    def _tally(self) -> StoreSummary:
        raise NotImplementedError("a view has no checksum of its own")

    def _items(self) -> AbstractContextManager[Iterator[tuple[bytes, bytes]]]:
        return nullcontext(self.scan(b""))

    def _blobs(self) -> dict[str, bytes]:
        raise NotImplementedError("a view has no blobs of its own")

"""A store in the memory of one process: for tests, and for state that is small or cheap to restore."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sortedcontainers import SortedDict

from onceflow.state.format import rows
from onceflow.state.stores.base import NO_BLOBS, Store, StoreSummary, plan

_SCANNED_AT_ONCE = 512


@dataclass
class _Data:
    rows: Any = field(default_factory=SortedDict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    tally: StoreSummary = field(default_factory=StoreSummary)
    lock: threading.RLock = field(default_factory=threading.RLock)


# Python workers are reused for many batches, so a partition that runs in the same worker again finds its rows. The
# process id is a part of the key, because nothing would update the copy in a forked child.
_data: dict[tuple[int, str], _Data] = {}


class MemoryStore(Store):
    """Rows of one process. Another process, or this one after a restart, starts with an empty store and restores it."""

    on_disk = False

    def __init__(self, data: _Data) -> None:
        self._data = data

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> MemoryStore:
        if read_only and not cls.exists(folder):
            raise FileNotFoundError(folder)
        return cls(_data.setdefault(_name(folder), _Data()))

    @staticmethod
    def exists(folder: Path) -> bool:
        return _name(folder) in _data

    @staticmethod
    def folders() -> list[Path]:
        """The folders whose rows are in this process."""
        return [Path(folder) for pid, folder in list(_data) if pid == os.getpid()]

    @staticmethod
    def remove(folder: Path) -> None:
        _data.pop(_name(folder), None)

    def get(self, key: bytes) -> bytes | None:
        row: bytes | None = self._data.rows.get(key)
        return row

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self._data.rows.get, keys))

    def scan(self, start: bytes, end: bytes | None = None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # In parts: a sorted dict must not change under its iterator.
        while True:
            with self._data.lock:
                found = self._data.rows.irange(start, end, inclusive=(True, False), reverse=reverse)
                part = [(key, self._data.rows[key]) for key in islice(found, _SCANNED_AT_ONCE)]
            yield from part
            if len(part) < _SCANNED_AT_ONCE:
                return
            if reverse:
                end = part[-1][0]
            else:
                start = part[-1][0] + b"\0"

    def blob(self, name: str) -> bytes | None:
        return self._data.blobs.get(name)

    def write(
        self,
        changes: rows.Changes | dict[bytes, bytes | None],
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
        expect: tuple[str, bytes | None] | None = None,
        *,
        index: bool = False,
    ) -> bool:
        data = self._data
        wanted = changes if isinstance(changes, dict) else dict(changes)
        with data.lock:
            if expect is not None and data.blobs.get(expect[0]) != expect[1]:
                return False
            planned = plan(wanted, data.tally, self.get_many, self.scan, index=index)
            for key in planned.deletes:
                del data.rows[key]
            data.rows.update(zip(planned.keys, planned.values, strict=True))
            for name, blob in blobs.items():
                if blob is None:
                    data.blobs.pop(name, None)
                else:
                    data.blobs[name] = blob
            data.tally = planned.tally.with_blobs(blobs)
        return True

    def _tally(self) -> StoreSummary:
        return self._data.tally

    def _items(self) -> AbstractContextManager[Iterator[tuple[bytes, bytes]]]:
        return nullcontext(iter(self._data.rows.items()))

    def _blobs(self) -> dict[str, bytes]:
        return self._data.blobs


def _name(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.abspath(folder)

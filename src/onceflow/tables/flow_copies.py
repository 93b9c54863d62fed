"""The local copies that a flow keeps of its own table, read by another process of the machine."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from onceflow.errors import OptionError
from onceflow.state.local.format import COMMIT_RECORD, CommitRecord
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.state.stores.rocksdb_store import RocksdbStore
from onceflow.state.stores.stamped_view import StampedView
from onceflow.state.stores.stored_rows import Stores
from onceflow.tables.lag import Lag

_MAX_NAMES = 10  # in an error
_OPENERS: tuple[type[Store], ...] = (LmdbStore, RocksdbStore, MemoryStore)
_LOOK_S = 0.02


class FlowCopies:
    """The copies in the folder of a table of a flow. Nothing is written or kept open.

    Args:
        folder: ``<state_dir>/<flow>/<table>``. It need not exist before the first read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def topic(self) -> str:
        """The name of the table; that of the folder as long as there is no copy."""
        return next((record.table for record in self._records()), self._folder.name)

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic; empty as long as there is no copy."""
        return next((record.table_id for record in self._records()), "")

    @contextmanager
    def stores(self) -> Iterator[Stores]:
        """The stores of all partitions that are on this machine, without those of an earlier topic of the same name.

        Raises:
            OptionError: the folder is not that of a table.
        """
        with self._opened() as opened:
            yield {partition: store for partition, (store, _) in opened.items()}

    def offsets(self) -> dict[int, int]:
        """Up to which offset of the table topic each partition is here."""
        return {record.partition: record.table_end for record in self._records()}

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is true that changes with the copies. Returns whether it is."""
        over = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > over:
                return False
            time.sleep(_LOOK_S)
        return True

    def lag(self) -> Lag:
        """Unknown: only the flow knows what is committed."""
        return Lag(None, None)

    def check(self) -> None:
        """Nothing can fail while nothing is read."""

    def _records(self) -> list[CommitRecord]:
        with self._opened() as opened:
            return [record for _, record in opened.values()]

    @contextmanager
    def _opened(self) -> Iterator[dict[int, tuple[Store, CommitRecord]]]:
        opened: list[tuple[Store, CommitRecord]] = []
        folders = self._partition_folders()
        if not folders:
            self._refuse()
        try:
            for folder in folders:
                store = _open(folder)
                if store is None:
                    continue
                record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
                if record is None:
                    store.close()
                else:
                    opened.append((store, record))
            newest = max((record for _, record in opened), key=lambda record: record.time_ms, default=None)
            yield {
                record.partition: (store, record)
                for store, record in opened
                if newest is not None and record.table_id == newest.table_id
            }
        finally:
            for store, _ in opened:
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


def _open(folder: Path) -> Store | None:
    for opener in _OPENERS:
        try:
            if opener.exists(folder):
                return StampedView.of(opener.open(folder, read_only=True))
        except FileNotFoundError:
            continue  # the store is being removed or created
    return None

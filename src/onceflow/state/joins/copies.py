"""Brings the local copies of joined tables to the offsets of a batch, and keeps them open for a task.

All tasks of a host share the copies. The first one that needs a copy verifies it (once in each run of the driver) and
reads what is missing; the others wait for it.

**A copy must be exact**: it must show the topic as it was at the offset of the batch. That is not so after reading
records that compaction has thinned out: if a key has a newer record beyond the offset, the older one may be gone. So a
copy that was read from thinned-out records is exact only from the offset on where the log ended after the reading. It
says so in a blob. A batch that is below that offset is run again, at newer offsets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from onceflow.clock import clock_ms
from onceflow.errors import BatchAbortedError, UnknownTopicError, counted
from onceflow.host.file_lock import locked
from onceflow.host.identity import host_identity
from onceflow.host.private_folders import make_private
from onceflow.protocol.position import Position
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.joins.spec import Ends, JoinSpec
from onceflow.state.local.catch_up import REFRESHED_MS, CatchUp, Source
from onceflow.state.local.format import COMMIT_RECORD, Columns, CommitRecord
from onceflow.state.local.move_marks import marks_of
from onceflow.state.local.opening import RestoreLog, open_store, remove_store
from onceflow.state.local.watched_source import WatchedSource
from onceflow.state.stores.base import Store, StoreCorruptError

_EXACT_FROM = "exact from"
_UNKNOWN = b"?"  # written before records are read; it stays if the process is killed meanwhile
_VERIFIED, _LOCK = "verified", "lock"
_WAIT_S = 600.0

#: A part of the text of `InexactCopyError`, by which the driver recognises it in an error of Spark.
INEXACT = "Joined tables were compacted while they were read"


class InexactCopyError(BatchAbortedError):
    """Internal: a copy is not exact at the offset of the batch. The batch runs again, at newer offsets."""


def _inexact(topics: Iterable[str], detail: str) -> InexactCopyError:
    return InexactCopyError(
        f"{INEXACT}: {','.join(sorted(set(topics)))}",
        detail=detail,
        next_step="none: the batch runs again, at newer offsets",
    )


class JoinedCopies:
    """The copies of joined tables that a task has open, at the offsets of one batch.

    Args:
        ends: the offsets, by topic and partition.
        source: reads the topics.
        still_owner: called if a copy is ahead of the batch. False: a newer driver has fenced this one.
    """

    def __init__(
        self,
        specs: Mapping[str, JoinSpec],
        ends: Ends,
        source: Source,
        *,
        still_owner: Callable[[], bool] | None = None,
    ) -> None:
        self.specs = dict(specs)
        self.ends = ends
        self._source = source
        self._still_owner = still_owner
        self._stores: dict[str, dict[int, Store]] = {name: {} for name in specs}

    def open(self, partitions: Iterable[int]) -> None:
        """Bring the copies that a task needs up to the offsets of the batch.

        Args:
            partitions: those of its keys. Co-partitioned tables need only these; of other tables, all are opened.

        Raises:
            InexactCopyError: a copy cannot be exact at its offset.
            FencedError: a newer driver has fenced this one.
            OnceflowError: Kafka could not be read, or the folder cannot be used.
        """
        refused: list[tuple[str, str]] = []
        own = list(partitions)
        for name, spec in self.specs.items():
            for partition in own if spec.co_partitioned else range(spec.partitions):
                if partition in self._stores[name]:
                    continue
                end = self.ends[spec.topic][partition]
                try:
                    self._stores[name][partition] = open_copy(
                        spec, partition, end, self._source, still_owner=self._still_owner
                    )
                except InexactCopyError as error:
                    # The others are read, too. Otherwise every attempt of the batch would bring only one copy further.
                    refused.append((spec.topic, error.detail))
        if refused:
            raise _inexact((topic for topic, _ in refused), "; ".join(detail for _, detail in refused[:5]))

    def handle(self, name: str, now_ms: int, own_partition: int | None) -> JoinedTable:
        """What user code gets. The copies are open.

        Args:
            now_ms: rows that have expired then are hidden.
            own_partition: the only partition of a co-partitioned table that user code sees; None: all that are open.
        """
        spec = self.specs[name]
        own = own_partition if spec.co_partitioned else None
        return JoinedTable(
            name,
            lambda: self.stores(name, own),
            partitions=spec.partitions,
            key=spec.key,
            value=spec.value,
            now_ms=now_ms,
            position=str(Position({spec.topic: self.ends[spec.topic]})),
            own_partition=own,
        )

    @contextlib.contextmanager
    def stores(self, name: str, own: int | None) -> Iterator[Mapping[int, Store]]:
        """The open stores of a table, or only that of one partition."""
        opened = self._stores[name]
        yield opened if own is None else {own: opened[own]}

    def close(self) -> None:
        for stores in self._stores.values():
            for store in stores.values():
                store.close()
            stores.clear()


def open_copy(
    spec: JoinSpec,
    partition: int,
    end: int,
    source: Source,
    *,
    still_owner: Callable[[], bool] | None = None,
) -> Store:
    """The copy of a partition on this host, exactly as the topic was at an offset. See `JoinedCopies.open`."""
    folder = spec.folder(partition)
    if _is_verified(folder, spec):
        # Only for reading: RocksDB lets one process of the host write.
        with contextlib.suppress(StoreCorruptError, FileNotFoundError):
            store = spec.store.open(folder, read_only=True)
            if _is_ready(store, spec, partition, end):
                return store
            store.close()
    name = f"{spec.topic}-{partition}"
    make_private(folder)
    with locked(
        folder / _LOCK,
        _WAIT_S,
        busy=f"Another task has been restoring the local copy of {name} for {_WAIT_S:g} s",
        next_step="nothing is lost: the batch runs again, and what was restored is kept",
    ):
        bring_up = _BringUp(spec, partition, end, source, still_owner)
        try:
            bring_up.run(verify=not _is_verified(folder, spec))
        except StoreCorruptError:
            remove_store(folder, spec.store)
            bring_up.run(verify=False)
        return spec.store.open(folder, read_only=True)


class _BringUp:
    """One call of `open_copy` that has to do something, under the lock of the folder."""

    def __init__(
        self, spec: JoinSpec, partition: int, end: int, source: Source, still_owner: Callable[[], bool] | None
    ) -> None:
        self._spec = spec
        self._partition = partition
        self._end = end
        self._source = source
        self._still_owner = still_owner
        self._folder = spec.folder(partition)

    def run(self, *, verify: bool) -> None:
        spec = self._spec
        store = open_store(self._folder, spec.store, verify=verify)
        try:
            _verified(self._folder, spec).write_bytes(_mark(spec))
            if not _is_ready(store, spec, self._partition, self._end):
                self._read(store)
            exact_from = int(store.blob(_EXACT_FROM) or 0)
        finally:
            store.close()
        if exact_from > self._end:
            raise _inexact(
                [spec.topic],
                f"the batch sees {spec.topic}-{self._partition} at offset {self._end}, rows are complete from offset "
                f"{exact_from} on",
            )

    def _read(self, store: Store) -> None:
        before = store.blob(_EXACT_FROM) or b"0"
        store.write((), {_EXACT_FROM: _UNKNOWN})
        noting = _Noting(self._source, self._spec.partitions)
        CatchUp(
            self._folder,
            self._spec.goal(self._partition, self._end),
            noting,
            self._spec.tombstone_ms // 2,
            clock_ms(),
            RestoreLog(f"{self._spec.topic}-{self._partition}"),
            self._still_owner,
        ).bring_up(store)
        if before == _UNKNOWN or not noting.whole:
            exact_from = self._source.end(self._spec.topic, self._partition)
        else:
            exact_from = int(before)  # not reached yet, or it does not matter any more
        store.write((), {_EXACT_FROM: b"%d" % exact_from})


class _Noting(WatchedSource):
    """Notes whether compaction has removed any of the records, and refuses rows that move to unknown partitions."""

    def __init__(self, source: Source, partitions: int) -> None:
        super().__init__(source)
        self._partitions = partitions
        self.whole = True

    def see(self, topic: str, partition: int, chunk: Columns) -> None:
        self.whole = self.whole and chunk.whole
        now = max((mark.partitions for mark in marks_of(chunk)), default=0)
        if now > self._partitions:
            # Tombstones of rows that have moved follow. Whoever joins would miss these rows.
            raise UnknownTopicError(
                f"Topic {topic} has {counted(now, 'partition')} now, it had {self._partitions}",
                topic=topic,
                next_step="start the flow again: it joins with all partitions then",
            )


def _is_ready(store: Store, spec: JoinSpec, partition: int, end: int) -> bool:
    """Whether a copy is at the offset, and exact."""
    record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
    goal = spec.goal(partition, end)
    if record is None or record.misfit(goal) or not record.at(goal):
        return False
    if clock_ms() - record.time_ms > REFRESHED_MS:
        return False  # so that the record says how recent the copy is. An old copy is read again after a change
    exact_from = store.blob(_EXACT_FROM)
    return exact_from is not None and exact_from != _UNKNOWN and int(exact_from) <= end


def _verified(folder: Path, spec: JoinSpec) -> Path:
    """A file that says in which run the copy was verified. Stores of several kinds may be in one folder."""
    return folder / f"{_VERIFIED}-{spec.store.__name__}"


def _mark(spec: JoinSpec) -> bytes:
    return f"{spec.run} {spec.topic_id} {host_identity()}".encode()


def _is_verified(folder: Path, spec: JoinSpec) -> bool:
    """Whether the copy was verified in this run of the driver, since the host was started."""
    try:
        return _verified(folder, spec).read_bytes() == _mark(spec)
    except OSError:
        return False

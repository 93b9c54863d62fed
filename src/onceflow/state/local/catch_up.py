"""Brings the local copy of one partition up to what is committed in Kafka: settled, caught up, or restored.

Each write is one commit of the store, with the commit record that goes with it, and only if nobody else has written
meanwhile. So a process that is killed leaves a copy that the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from onceflow.errors import EnvironmentUnusableError, FencedError, OnceflowError
from onceflow.state import rows
from onceflow.state.local.format import (
    AHEAD,
    COMMIT_RECORD,
    KINDS,
    PENDING,
    Changes,
    Chunk,
    CommitRecord,
    Goal,
    Pending,
    internal_changes,
    rows_of_snapshot,
    table_changes,
)
from onceflow.state.local.spool import Spool
from onceflow.state.stores.base import BULK_ROWS_MAX, Store, StoreCorruptError

_REFRESHED_MS = 3_600_000
# A restore holds this much in memory (the larger, the fewer pages are visited again) and commits now and then.
_WRITTEN_ROWS, _WRITTEN_BYTES = 250_000, 32 << 20
_COMMITTED_ROWS, _COMMITTED_S = BULK_ROWS_MAX - 2 * _WRITTEN_ROWS, 10.0
_ATTEMPTS = 10

IN_SYNC, SETTLED, CAUGHT_UP, RESTORED = "in sync", "settled", "caught up", "restored"


class Source(Protocol):
    """Reads committed records (``client.committed.CommittedReader``)."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]: ...


class _MovedError(Exception):
    """Another process has written a newer commit record meanwhile."""


class CatchUp:
    """One call of `open_partition`, whose arguments it has.

    Attributes:
        records: read from Kafka so far.
        ignored: of these, how many no processor wrote.
    """

    def __init__(
        self,
        folder: Path,
        goal: Goal,
        source: Source,
        snapshot_per_partition: bool,
        tombstone_age_ms: int,
        now_ms: int,
        progress: Callable[[int], None] | None,
        still_owner: Callable[[], bool] | None,
    ) -> None:
        self.goal = goal
        self.records = self.ignored = 0
        self._folder = folder
        self._source = source
        self._snapshot_per_partition = snapshot_per_partition
        self._tombstone_age_ms = tombstone_age_ms
        self._now_ms = now_ms
        self._progress = progress or (lambda _: None)
        self._still_owner = still_owner or (lambda: True)

    def bring_up(self, store: Store) -> str:
        """What had to be done.

        Raises:
            StoreCorruptError: the data are to be removed first.
        """
        moved = 0
        before: tuple[int, int] = (-1, -1)
        while moved < _ATTEMPTS:
            try:
                return self._step(store)
            except _MovedError:
                # A task of another attempt works on it; every commit of its is as good as one of ours.
                commit_record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
                reached = before if commit_record is None else (commit_record.table_end, commit_record.internal_end)
                moved = 0 if reached > before else moved + 1
                before = max(reached, before)
        raise EnvironmentUnusableError(
            f"Another process keeps changing the local state of {self.goal.table}-{self.goal.partition}",
            next_step="see that no two flows of this name use one state folder",
        )

    def _step(self, store: Store) -> str:
        raw = store.blob(COMMIT_RECORD)
        if raw is None:
            if next(store.scan(b""), None) is not None:
                raise StoreCorruptError("it has rows but no commit record")
            fresh = replace(CommitRecord.of(self.goal, self._now_ms), table_end=0, internal_end=0)
            raw = self._write(store, None, fresh, {})
            self._read(store, raw, fresh)
            return RESTORED
        commit_record = CommitRecord.decode(raw)
        if commit_record is None:
            raise StoreCorruptError("its commit record cannot be read")
        if problem := commit_record.misfit(self.goal):
            if problem == AHEAD and not self._still_owner():
                raise FencedError(
                    "A newer driver of the flow keeps this local state",
                    topic=f"{self.goal.table}-{self.goal.partition}",
                    next_step="see who has started it twice: a flow has one driver; nothing was lost or doubled",
                )
            raise StoreCorruptError(problem)
        if commit_record.at(self.goal):
            if self._now_ms - commit_record.time_ms > _REFRESHED_MS:
                self._write(store, raw, replace(commit_record, time_ms=self._now_ms), {})
            return IN_SYNC
        pending = Pending.decode(store.blob(PENDING))
        ends = (self.goal.table_end, self.goal.internal_end)
        if (
            pending is not None
            and pending.commit == self.goal.last
            and pending.ends == ends
            and pending.follows(commit_record)
        ):
            self._write(store, raw, CommitRecord.of(self.goal, self._now_ms), pending.changes, done=True)
            return SETTLED
        if self._now_ms - commit_record.time_ms > self._tombstone_age_ms:
            raise StoreCorruptError("it is so old that Kafka may have dropped deletes which it has not seen")
        self._read(store, raw, commit_record)
        return CAUGHT_UP

    def _read(self, store: Store, raw: bytes, commit_record: CommitRecord) -> None:
        """From the commit record to the goal, with a commit now and then, so that a killed process need not begin anew.

        Nothing is locked while Kafka is read, however long it takes to answer. The record's time stays until the goal
        is reached: how long tombstones are kept counts from the first record that was read.
        """
        if self._snapshot_per_partition:
            changes = self._replaced(store, commit_record)
            self._write(store, raw, CommitRecord.of(self.goal, self._now_ms), changes, done=True)
            return
        since = time.monotonic()
        with Spool[CommitRecord](self._folder) as spool:
            try:
                for reached, changes in self._pieces(commit_record):
                    spool.add(reached, changes)
                    if spool.rows > _COMMITTED_ROWS or time.monotonic() - since > _COMMITTED_S:
                        raw = self._write_spooled(store, raw, spool)
                        since = time.monotonic()
            except OnceflowError:
                with suppress(OnceflowError, _MovedError):  # the next one need not read it again
                    self._write_spooled(store, raw, spool)
                raise
            self._write_spooled(store, raw, spool, done=True)

    def _pieces(self, commit_record: CommitRecord) -> Iterator[tuple[CommitRecord, Changes]]:
        """What is missing in parts, each with the commit record once it is written."""
        for name, topic, changes_of in (
            ("table_end", self.goal.table, table_changes),
            ("internal_end", self.goal.internal, internal_changes),
        ):
            start, end = getattr(commit_record, name), getattr(self.goal, name)
            for changes, position in self._gathered(topic, start, end, changes_of):
                commit_record = replace(commit_record, **{name: position})  # type: ignore[arg-type]
                yield commit_record, changes

    def _write_spooled(self, store: Store, raw: bytes, spool: Spool[CommitRecord], *, done: bool = False) -> bytes:
        """All parts in one commit; the commit record as it is now.

        Args:
            done: nothing is missing then.
        """
        with store.bulk():
            for reached, changes in spool.take():
                raw = self._write(store, raw, reached, changes)
            if done:
                raw = self._write(store, raw, CommitRecord.of(self.goal, self._now_ms), {}, done=True)
        return raw

    def _gathered(
        self, topic: str, start: int, end: int, changes_of: Callable[[Chunk, Changes], int]
    ) -> Iterator[tuple[Changes, int]]:
        """Last rows per row key, of as many records as memory allows, and the offset they go up to."""
        gathered: Changes = {}
        size = 0
        for chunk in self._chunks(topic, start, end):
            self.ignored += changes_of(chunk, gathered)
            size += sum(map(len, filter(None, chunk.values)))
            if len(gathered) >= _WRITTEN_ROWS or size >= _WRITTEN_BYTES:
                yield gathered, min(chunk.next_offset, end)
                gathered, size = {}, 0
        if gathered:
            yield gathered, end

    def _chunks(self, topic: str, start: int, end: int) -> Iterator[Chunk]:
        if start < end:
            for chunk in self._source.read(topic, self.goal.partition, start, end):
                yield chunk
                self.records += len(chunk.keys)
                self._progress(self.records)

    def _replaced(self, store: Store, commit_record: CommitRecord) -> dict[bytes, bytes | None]:
        """All rows of the last snapshot, and deletes of those that are not in it."""
        last: tuple[bytes | None] | None = None
        for chunk in self._chunks(self.goal.table, commit_record.table_end, self.goal.table_end):
            values = [value for key, value in zip(chunk.keys, chunk.values, strict=True) if key is not None]
            self.ignored += len(chunk.keys) - len(values)
            last = (values[-1],) if values else last
        if last is None:
            return {}
        changes: dict[bytes, bytes | None] = {
            key: None for kind in KINDS for key, _ in store.scan(kind, rows.after(kind))
        }
        changes.update(rows_of_snapshot(last[0]) if last[0] is not None else ())
        return changes

    def _write(
        self,
        store: Store,
        raw: bytes | None,
        commit_record: CommitRecord,
        changes: Changes | Sequence[tuple[bytes, bytes | None]],
        *,
        done: bool = False,
    ) -> bytes:
        """Rows and commit record in one commit, if that is still what was read; the commit record as it is now.

        Args:
            done: what is pending has had its time.
        """
        blobs: dict[str, bytes | None] = {COMMIT_RECORD: commit_record.encode()}
        if done:
            blobs[PENDING] = None
        if not store.write(changes, blobs, (COMMIT_RECORD, raw), index=True):
            raise _MovedError
        return commit_record.encode()

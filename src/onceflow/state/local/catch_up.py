"""Brings the local copy of one partition up to what is committed in Kafka: settles it, catches up, or restores it.

Each write is one commit of the store, and contains the commit record that belongs to it. It is done only if no other
process has written meanwhile. So when a process is killed, the next one can continue with the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import EnvironmentUnusableError, FencedError, OnceflowError
from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.format import rows, segments, stamps
from onceflow.state.local.format import (
    AHEAD,
    COMMIT_RECORD,
    DUE_ROW_BYTES,
    PENDING,
    TIMER_ROW_BYTES,
    Changes,
    Columns,
    CommitRecord,
    Goal,
    Pending,
    is_internal_row,
)
from onceflow.state.local.row_columns import NOTHING, TO_THE_END, RowColumns, first_bytes
from onceflow.state.local.row_fields import fields_of, index_of
from onceflow.state.local.sorted_rows import sorted_rows
from onceflow.state.local.spool import Spool
from onceflow.state.stores.base import BULK_BYTES_MAX, BULK_ROWS_MAX, NO_BLOBS, Store, StoreCorruptError

REFRESHED_MS = 3_600_000
# A restore keeps this much in memory, and commits from time to time (the more, the fewer pages are written again).
_WRITTEN_ROWS, _WRITTEN_BYTES = 250_000, 32 << 20
_COMMITTED_ROWS, _COMMITTED_BYTES = BULK_ROWS_MAX - 2 * _WRITTEN_ROWS, BULK_BYTES_MAX - 4 * _WRITTEN_BYTES
_COMMITTED_S = 10.0
_ATTEMPTS = 10

IN_SYNC, SETTLED, CAUGHT_UP, RESTORED = "in sync", "settled", "caught up", "restored"
#: Without a changelog: what was committed is not on this host, and cannot be read from anywhere.
LOST = "lost"
#: A restore has ended before it was complete. What it has read is kept.
BEHIND = "behind"

_VALUE, _PLAIN, _STAMPED = (pa.scalar(each, pa.binary()) for each in (rows.VALUE, b"\0", stamps.FLAGS))


class Source(Protocol):
    """Reads committed records (``client.committed.CommittedReader``)."""

    def read_columns(self, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Columns]: ...

    def end(self, topic: str, partition: int) -> int:
        """The last stable offset now."""


class InterruptedRestoreError(OnceflowError):
    """Internal: the time for a restore is over. The copy has what was read until then.

    Attributes:
        records: how many records were read.
    """

    records = 0


class _MovedError(Exception):
    """Another process has written a newer commit record in the meantime."""


class CatchUp:
    """One call of `open_partition`, with the same arguments.

    Args:
        stamped: the rows of the table are stamped (``stamps.py``).
        is_over: returns whether to end now, and to keep what was read.

    Attributes:
        records: number of records read from Kafka so far.
        ignored: how many of these were not written by a processor.
    """

    def __init__(
        self,
        folder: Path,
        goal: Goal,
        source: Source,
        tombstone_age_ms: int,
        now_ms: int,
        progress: Callable[[int], None] | None,
        still_owner: Callable[[], bool] | None,
        stamped: bool = False,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self._stamped = stamped
        self._is_over = is_over or (lambda: False)
        self._interrupted = False
        self._table_rows = stamped_rows if stamped else table_rows
        self.goal = goal
        self.records = self.ignored = 0
        self._folder = folder
        self._source = source
        self._tombstone_age_ms = tombstone_age_ms
        self._now_ms = now_ms
        self._progress = progress or (lambda _: None)
        self._still_owner = still_owner or (lambda: True)

    def bring_up(self, store: Store) -> str:
        """Bring the store up to what is committed. Returns what had to be done for that.

        Raises:
            StoreCorruptError: the caller must remove the data first.
            InterruptedRestoreError: the time is over.
        """
        moved = 0
        before: tuple[int, int] = (-1, -1)
        while moved < _ATTEMPTS:
            try:
                return self._step(store)
            except _MovedError:
                # A task of another attempt works on the same copy. Its commits are progress, too.
                commit_record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
                reached = before if commit_record is None else (commit_record.table_end, commit_record.internal_end)
                moved = 0 if reached > before else moved + 1
                before = max(reached, before)
        raise EnvironmentUnusableError(
            f"Another process keeps changing the local state of {self.goal.table}-{self.goal.partition}",
            next_step="make sure that no two flows of this name use the same state folder",
        )

    def _step(self, store: Store) -> str:
        raw = store.blob(COMMIT_RECORD)
        if raw is None:
            if next(store.scan(b""), None) is not None:
                raise StoreCorruptError("it has rows but no commit record")
            fresh = replace(CommitRecord.of(self.goal, self._now_ms), table_end=0, internal_end=0)
            raw = self._write(store, None, fresh, {})
            if not self.goal.changelog:
                return IN_SYNC if fresh.at(self.goal) else LOST
            self._read(store, raw, fresh)
            return RESTORED
        commit_record = CommitRecord.decode(raw)
        if commit_record is None:
            raise StoreCorruptError("its commit record cannot be read")
        if problem := commit_record.misfit(self.goal):
            if problem == AHEAD and not self._still_owner():
                raise FencedError(
                    "A newer driver of the flow uses this local state",
                    topic=f"{self.goal.table}-{self.goal.partition}",
                    next_step="find out who has started the flow twice: a flow has one driver. Nothing was lost or "
                    "written twice",
                )
            raise StoreCorruptError(problem)
        if self._stamped and next(store.scan(rows.VALUE, rows.after(rows.VALUE)), None) is not None:
            raise StoreCorruptError("its ids are in the format of an earlier version")
        if commit_record.at(self.goal):
            if self._now_ms - commit_record.time_ms > REFRESHED_MS:
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
        if not self.goal.changelog:
            if not commit_record.table_end:
                return LOST  # it is empty, and stays at its beginning until a batch that has changed it is committed
            raise StoreCorruptError(
                f"it is at batch {commit_record.table_end}, but batch {self.goal.table_end} has changed it"
            )
        if self._now_ms - commit_record.time_ms > self._tombstone_age_ms:
            raise StoreCorruptError("it is so old that Kafka may have removed tombstones that it has not read")
        self._read(store, raw, commit_record)
        return CAUGHT_UP

    def _read(self, store: Store, raw: bytes, commit_record: CommitRecord) -> None:
        """Read from the commit record to the goal. Commits from time to time, so that less is lost if the process is
        killed.

        No lock is held while Kafka is read, however long that takes. The time in the commit record does not change
        before the goal is reached, because the retention of tombstones counts from the first record that was read.
        """
        since = time.monotonic()
        with Spool[CommitRecord](self._folder) as spool:
            try:
                for reached, part in self._pieces(commit_record):
                    spool.add(reached, part)
                    full = spool.rows > _COMMITTED_ROWS or spool.nbytes > _COMMITTED_BYTES
                    if full or time.monotonic() - since > _COMMITTED_S:
                        raw = self._write_spooled(store, raw, spool)
                        since = time.monotonic()
            except OnceflowError:
                with suppress(OnceflowError, _MovedError):  # so that the next process need not read it again
                    self._write_spooled(store, raw, spool)
                raise
            self._write_spooled(store, raw, spool, done=not self._interrupted)
        if self._interrupted:
            interrupted = InterruptedRestoreError(f"restoring {self.goal.table}-{self.goal.partition} was interrupted")
            interrupted.records = self.records
            raise interrupted

    def _pieces(self, commit_record: CommitRecord) -> Iterator[tuple[CommitRecord, RowColumns]]:
        """The missing changes in parts, each with the commit record that is valid when the part is written."""
        for name, topic, rows_of in (
            ("table_end", self.goal.table, self._table_rows),
            ("internal_end", self.goal.internal, internal_rows),
        ):
            start, goal_end = getattr(commit_record, name), getattr(self.goal, name)
            for part, position in self._gathered(topic, start, self._end(topic, goal_end), rows_of):
                if position < goal_end or not self.goal.open_ended:  # else rows after the goal may still be missing
                    commit_record = replace(commit_record, **{name: position})  # type: ignore[arg-type]
                yield commit_record, part
            if self._interrupted:
                return

    def _end(self, topic: str, goal_end: int) -> int:
        """Up to where a topic is read. Rows after the goal belong to batches without progress, which run again. They
        have to be read, because compaction removes the committed rows of their keys."""
        return max(goal_end, self._source.end(topic, self.goal.partition)) if self.goal.open_ended else goal_end

    def _write_spooled(self, store: Store, raw: bytes, spool: Spool[CommitRecord], *, done: bool = False) -> bytes:
        """Write all parts in one commit. Returns the new commit record.

        Args:
            done: nothing is missing after this write.
        """
        # Rows of all parts may be written in the order of their keys only if all of them become visible together. In
        # a table of stamped rows, those that are deleted together have to be written together.
        merges = store.combines and not self._stamped
        is_empty = store.row_count() == 0
        with store.bulk():
            if merges and (found := spool.take_merged()) is not None:
                reached, blocks = found
                if is_empty:
                    self._put_new(store, raw, blocks)
                else:
                    for block in blocks:
                        self._write_rows(store, raw, _changes(block))
                raw = self._write(store, raw, reached, {})
            for reached, blocks in spool.take():
                if self._stamped and is_empty:
                    self._put_first_ids(store, raw, blocks)
                    raw, is_empty = self._write(store, raw, reached, {}), False
                    continue
                changes: Changes = {}
                for block in blocks:
                    changes.update(_changes(block))
                raw = self._write(store, raw, reached, changes)
            if done:
                raw = self._write(store, raw, CommitRecord.of(self.goal, self._now_ms), {}, done=True)
        return raw

    def _put_new(self, store: Store, raw: bytes, blocks: Iterator[RowColumns]) -> None:
        """Write the first rows of a store, and then their index rows, both in the order of their keys."""
        with Spool[None](self._folder) as index:
            for block in blocks:
                kept = _kept(block)
                self._put_block(store, raw, kept.keys.to_pylist(), kept.rows.to_pylist())
                if (found := index_of(kept)) is not None:
                    index.add(None, sorted_rows([found]))
            if (sorted_index := index.take_merged()) is not None:
                for block in sorted_index[1]:
                    self._put_block(store, raw, block.keys.to_pylist(), block.rows.to_pylist())

    def _put_first_ids(self, store: Store, raw: bytes, blocks: Iterator[RowColumns]) -> None:
        """Write the first part of a table of stamped rows. They are all in one segment."""
        ids: list[bytes] = []
        found: list[bytes] = []
        for kept in map(_kept, blocks):
            ids += pc.binary_slice(kept.keys, len(rows.VALUE), TO_THE_END).to_pylist()
            found += kept.rows.to_pylist()
        if ids:
            self._put_block(store, raw, *segments.first(ids, found))

    def _put_block(self, store: Store, raw: bytes, keys: list[bytes], values: list[bytes]) -> None:
        if keys and not store.put_new(keys, values, (COMMIT_RECORD, raw)):
            raise _MovedError

    def _gathered(
        self, topic: str, start: int, end: int, rows_of: Callable[[RecordColumns], RowColumns]
    ) -> Iterator[tuple[RowColumns, int]]:
        """Parts with the last row of each row key, sorted and of limited size, and the offset at which each ends."""
        gathered: list[RowColumns] = []
        count = size = 0
        reached = end
        for chunk in self._read_columns(topic, start, end):
            if chunk.next_offset < end and self._is_over():
                self._interrupted, reached = True, chunk.next_offset
            if not len(chunk.records):
                if self._interrupted:
                    break
                continue
            found = rows_of(chunk.records)
            gathered.append(found)
            self.ignored += found.ignored
            count, size = count + len(found.keys), size + found.nbytes
            if count >= _WRITTEN_ROWS or size >= _WRITTEN_BYTES:
                part = sorted_rows(gathered)
                gathered, count, size = [part], len(part.keys), part.nbytes
                if count > _WRITTEN_ROWS // 2 or size > _WRITTEN_BYTES // 2:  # else the same keys come again and again
                    yield part, min(chunk.next_offset, end)
                    gathered, count, size = [], 0, 0
            if self._interrupted:
                break
        if count:
            yield sorted_rows(gathered), reached

    def _read_columns(self, topic: str, start: int, end: int) -> Iterator[Columns]:
        if start < end:
            for chunk in self._source.read_columns(topic, self.goal.partition, start, end, headers=True):
                yield chunk
                self._count(len(chunk.records))

    def _count(self, records: int) -> None:
        self.records += records
        self._progress(self.records)

    def _write(
        self,
        store: Store,
        raw: bytes | None,
        commit_record: CommitRecord,
        changes: Changes | Sequence[tuple[bytes, bytes | None]],
        *,
        done: bool = False,
    ) -> bytes:
        """Write rows and commit record in one commit, if the commit record is still the one that was read.

        Args:
            raw: the commit record that was read; None: there was none.
            done: delete the pending changes.

        Returns:
            The new commit record.
        """
        blobs: dict[str, bytes | None] = {COMMIT_RECORD: commit_record.encode()}
        if done:
            blobs[PENDING] = None
        self._write_rows(store, raw, changes, blobs)
        return commit_record.encode()

    def _write_rows(
        self,
        store: Store,
        raw: bytes | None,
        changes: Changes | Sequence[tuple[bytes, bytes | None]],
        blobs: Mapping[str, bytes | None] = NO_BLOBS,
    ) -> None:
        if not store.write(changes, blobs, (COMMIT_RECORD, raw), index=True):
            raise _MovedError


def _kept(block: RowColumns) -> RowColumns:
    """Without the rows that delete what a key has."""
    if not block.rows.null_count:
        return block
    present = block.rows.is_valid()
    return RowColumns(block.keys.filter(present), block.rows.filter(present))


def _changes(block: RowColumns) -> Changes:
    return dict(zip(block.keys.to_pylist(), block.rows.to_pylist(), strict=True))


def table_rows(records: RecordColumns) -> RowColumns:
    """The rows of records of the table topic, which were read with their headers."""
    headers = records.headers
    if headers is None or headers.null_count == len(headers):
        return _value_rows(records, _with_prefix(_PLAIN, records.values))
    return _value_rows(records, pc.binary_join_element_wise(fields_of(headers), records.values, NOTHING))


def stamped_rows(records: RecordColumns) -> RowColumns:
    """As `table_rows`, for a table of stamped rows."""
    values = records.values
    present = values.drop_null()
    if pc.all(pc.equal(pc.binary_length(present), 8), min_count=0).as_py() and not (first_bytes(present) & 0x80).any():
        return _value_rows(records, _with_prefix(_STAMPED, values))
    return _value_rows(
        records, _binary([None if each is None else stamps.from_value(each) for each in values.to_pylist()])
    )


def internal_rows(records: RecordColumns) -> RowColumns:
    """As `table_rows`, for the internal topic."""
    keys, found = records.keys, records.values
    if _are_internal(keys, found):
        return RowColumns(keys, found)
    fit = [
        (key, row)
        for key, row in zip(keys.to_pylist(), found.to_pylist(), strict=True)
        if key is not None and is_internal_row(key, row)
    ]
    keys, found = _binary([key for key, _ in fit]), _binary([row for _, row in fit])
    return RowColumns(keys, found, len(records) - len(fit))


def _are_internal(keys: pa.BinaryArray, found: pa.BinaryArray) -> bool:
    """Whether all of these are rows of a processor, without expiry and version: as `is_internal_row`, for most. Rows
    that are due may be among them."""
    if not len(keys) or keys.null_count or found.null_count:
        return False
    key_bytes, row_bytes = (pc.binary_length(each).to_numpy() for each in (keys, found))
    if not key_bytes.all() or not row_bytes.all():
        return False
    kinds, flags = first_bytes(keys), first_bytes(found)
    large = (flags == 0) | ((flags == rows.IS_DUE) & (row_bytes >= DUE_ROW_BYTES))
    fits = ((kinds == rows.MAP[0]) & large) | ((kinds == rows.TIMER[0]) & (row_bytes == TIMER_ROW_BYTES) & (flags == 0))
    return bool(fits.all())


def _value_rows(records: RecordColumns, found: pa.BinaryArray) -> RowColumns:
    keys = records.keys
    ignored = keys.null_count
    if ignored:
        fits = keys.is_valid()
        keys, found = keys.filter(fits), found.filter(fits)
    return RowColumns(_with_prefix(_VALUE, keys), found, ignored)


def _with_prefix(prefix: pa.Scalar, column: pa.BinaryArray) -> pa.BinaryArray:
    return pc.binary_join_element_wise(prefix, column, NOTHING)


def _binary(payloads: Sequence[bytes | None]) -> pa.BinaryArray:
    return pa.array(payloads, pa.binary())

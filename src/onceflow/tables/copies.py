"""The local copy of one partition of a topic that a `Table` follows.

A copy is a store as that of a flow (see ``state.local``), with the same commit record and checksum, but it belongs to
no flow: its owner is the process that follows the topic. It is opened as it is on disk, restored up to an end offset,
and then changed chunk by chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from onceflow.client.committed import Chunk
from onceflow.clock import clock_ms
from onceflow.errors import EnvironmentUnusableError, OnceflowError
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.timestamps import known_ms
from onceflow.state.format import rows
from onceflow.state.local.catch_up import CatchUp, Source
from onceflow.state.local.format import (
    COMMIT_RECORD,
    Changes,
    CommitRecord,
    Goal,
    table_changes,
)
from onceflow.state.local.move_marks import MARK_KEY, Mark, Moves
from onceflow.state.local.opening import open_store, remove_store
from onceflow.state.stores.base import Store, StoreCorruptError, unusable
from onceflow.tables.layout import Layout

_FIRST_PAUSE_S = 0.5
_LONGEST_REFUSAL_S = 5.0  # there may be room on the disk again at any time
_LONGEST_REPAIR_S = 60.0  # each repair reads the whole partition
_REPAIRS_PER_S = 600.0  # a copy that was well for so long has been repaired
_TOO_MANY = 3
_TOLD_S = 60.0

log = logging.getLogger("onceflow.tables")

#: A commit record counts as the copy of a table of no flow.
NO_FLOW = ""
#: Blob with the time when the copy last contained everything that was committed.
_CURRENT = "current"
#: Blob that says for how many partitions, and up to which offset, all keys are where the default partitioner puts them.
_PLACED = "placed"
_CHECKED_ROWS = 10_000  # keys at once, of a copy whose blob is out of date
_OUT_OF_TOUCH_MS = 10_000  # at least; less is usual, even if tombstones are kept for a shorter time
_PERSISTED_S = 10.0  # how often a position is written that moves without rows


class Health:
    """Of one copy. One thread changes it, any thread may look.

    Attributes:
        problem: why the copy cannot be written, or cannot be repaired; None: nothing is known to be wrong.
        not_before: until then the copy is left alone, on the monotonic clock.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.problem: OnceflowError | None = None
        self.not_before = 0.0
        self._name = name
        self._folder = folder
        self._refusals = self._repairs = 0
        self._emptied_at = self._told_at = -_REPAIRS_PER_S

    @property
    def resting(self) -> bool:
        """Whether the copy is left alone now."""
        return time.monotonic() < self.not_before

    def well(self) -> None:
        """It was written, or there was nothing to write."""
        self.problem, self._refusals = None, 0

    def refused(self, problem: OnceflowError) -> None:
        """It cannot be written at the moment. What is there stays as it is."""
        self._refusals += 1
        self.problem = problem
        self._rest(_FIRST_PAUSE_S * 2.0 ** min(self._refusals - 1, 10), _LONGEST_REFUSAL_S)

    def emptied(self, why: str) -> None:
        """It was damaged, and is about to be removed. If that does not help, the next repair is put off."""
        now = time.monotonic()
        self._repairs = 0 if now - self._emptied_at > _REPAIRS_PER_S else self._repairs + 1
        self._emptied_at = now
        if now - self._told_at >= _TOLD_S:
            self._told_at = now
            log.warning("table %s: the local copy is removed and read again from Kafka: %s", self._name, why)
        if self._repairs:
            self._rest(_FIRST_PAUSE_S * 2.0 ** min(self._repairs - 1, 10), _LONGEST_REPAIR_S)
        if self._repairs >= _TOO_MANY:
            self.problem = EnvironmentUnusableError(
                f"The local copy of {self._name} is damaged again each time after it was read from Kafka",
                detail=f"{self._folder}: {why}",
                next_step="look for errors of this disk in the log of the system; give a folder on another disk",
            )

    def _rest(self, pause_s: float, longest_s: float) -> None:
        self.not_before = time.monotonic() + min(pause_s, longest_s)


class RawChange(NamedTuple):
    """One committed record: how it has changed the value of its key.

    Args:
        value, before: payloads after and before the record; None: there is no value.
        timestamp_ms: of the record, epoch milliseconds; None: it has none.
    """

    key: bytes
    value: bytes | None
    before: bytes | None
    partition: int
    offset: int
    timestamp_ms: int | None


@dataclass(frozen=True)
class Followed:
    """The topic that is followed, and how it is kept on this machine.

    Args:
        topic_id: a topic that was deleted and created again has a new id.
        folder: the folder of all copies; each has a folder with the number of its partition.
        tombstone_ms: how long compaction keeps a tombstone.
        layout: what all copies of the topic in this process have heard of moves.
    """

    topic: str
    topic_id: str
    partitions: int
    folder: Path
    opener: type[Store]
    tombstone_ms: int
    layout: Layout = field(default_factory=Layout)

    def goal(self, partition: int, end: int) -> Goal:
        return Goal(NO_FLOW, self.topic, partition, self.topic_id, "", table_end=end, internal_end=0)


class Copy:
    """A copy that is open. One thread writes; any thread may read `store`.

    Attributes:
        store: replaced by another object if the copy was damaged and has to be restored.
        position: all committed records below this offset are in the store.
        current_ms: when the copy last contained everything that was committed, epoch milliseconds; None: never.
        ignored: how many records could not be kept: they have no key.
        emptied: whether it had something, was emptied because it was damaged, and has not been restored since. It must
            not be read: it would not have what it had before.
        placed: whether every key of the partition, as far as it was read, is where Kafka's default partitioner puts it.
    """

    def __init__(self, followed: Followed, partition: int) -> None:
        self._followed = followed
        self._layout = followed.layout
        # The number of partitions in the last mark that was read to the end, and the same of what is written.
        self._moved_as_read = self._moved = 0
        self._moves = Moves()
        self.partition = partition
        self._folder = followed.folder / str(partition)
        self._record: CommitRecord
        self._raw: bytes | None = None
        self.current_ms: int | None = None
        self._heard_ms = clock_ms()  # on the clock of the wall: the machine may sleep
        self.ignored = 0
        self.placed = True
        self.emptied = False
        self.health = Health(self.name, self._folder)
        self.store: Store
        self._open()

    @property
    def name(self) -> str:
        return f"{self._followed.topic}-{self.partition}"

    @property
    def position(self) -> int:
        return self._record.table_end

    @property
    def incomplete(self) -> bool:
        """Whether rows were moved between partitions, and this copy is still before that, or in the middle of it."""
        return not self._layout.is_complete(self._moved, self.current_ms)

    def note_marks(self, marks: Iterable[Mark]) -> None:
        """Note marks that were read. What they say of this copy holds when the records are written."""
        for mark in marks:
            self._layout.hear(mark.partitions, mark.moved_ms)
            if mark.ended:
                self._moved_as_read = max(self._moved_as_read, mark.partitions)

    def restore(self, source: Source, end: int, end_ms: int, progress: Callable[[int], None]) -> None:
        """Read up to an end offset. What was read stays, also if an error is raised.

        Args:
            end_ms: when the end offset was the last stable offset, epoch milliseconds.

        Raises:
            StoreCorruptError: the copy is damaged.
            OnceflowError: Kafka could not be read, or the folder cannot be used.
        """
        since = time.monotonic()
        run = self._catch_up(source, end, progress)
        run.bring_up(self.store)
        self._load()
        self.current_ms, self._heard_ms = end_ms, clock_ms()
        self._moved = self._moved_as_read
        self.emptied = False
        self.ignored += run.ignored
        if run.records:
            seconds = time.monotonic() - since
            log.info("table %s: %d records read in %.2f s", self.name, run.records, seconds)

    def check_placement(self, keys: pa.BinaryArray) -> None:
        """Note whether these keys of the partition are where the default partitioner puts them. Keys of tombstones say
        nothing: there is no row, as where a row was before it moved."""
        if not self.placed or self._followed.partitions == 1 or not len(keys):
            return
        found = key_partitions(keys, self._followed.partitions)
        strays = (found != self.partition) & (found >= 0)
        if strays.any() and not all(keys[at].as_py() == MARK_KEY for at in np.flatnonzero(strays)):
            self.placed = False
            log.info(
                "table %s: it has keys that are not where Kafka's default partitioner puts them: another partitioner "
                "was used, or partitions were added",
                self.name,
            )

    def apply(
        self, chunk: Chunk, marks: Sequence[Mark] = (), *, stable: int, as_of_ms: int, wanted: bool
    ) -> list[RawChange]:
        """Apply the records that follow the position.

        Args:
            marks: those among the records.
            stable: the last stable offset. When the position reaches it, the copy is as current as that offset.
            as_of_ms: nothing was committed behind that offset before this time, epoch milliseconds.
            wanted: whether to return the changes.

        Raises:
            StoreCorruptError: the copy is damaged. `replace` makes a new one.
        """
        silent_ms = 0 if as_of_ms == self._heard_ms else clock_ms() - self._heard_ms
        if silent_ms > max(self._followed.tombstone_ms // 2, _OUT_OF_TOUCH_MS):
            raise StoreCorruptError("it was out of touch so long that Kafka may have removed tombstones")
        current_ms = as_of_ms if chunk.next_offset >= stable else self.current_ms
        self.note_marks(marks)  # before others can see tombstones of rows that have moved
        keys = [key for key, value in zip(chunk.keys, chunk.values, strict=True) if value is not None]
        self.check_placement(pa.array(keys, pa.binary()))
        changes: Changes = {}
        if chunk.keys:
            self.ignored += table_changes(chunk, changes)
        moves = self._moves.after(len(chunk.keys), marks)
        found = self._changes(chunk, moves.still) if wanted and chunk.keys else []
        time_ms = self._record.time_ms if current_ms is None else current_ms
        record = replace(self._record, table_end=chunk.next_offset, time_ms=time_ms)
        if changes or time.monotonic() - self._written_at > _PERSISTED_S:
            self._write(changes, record, current_ms)
        # Only now: other threads must not see a position before the rows that belong to it.
        self._record, self.current_ms = record, current_ms
        self._heard_ms = as_of_ms  # not of what could not be written
        self._moved = self._moved_as_read
        self._moves = moves
        return found

    def still_current(self, as_of_ms: int) -> None:
        """Note that it contained everything that was committed before this time, epoch milliseconds."""
        self.current_ms = self._heard_ms = as_of_ms
        if time.monotonic() - self._written_at > _PERSISTED_S:
            self._record = replace(self._record, time_ms=self.current_ms)
            self._write({}, self._record, self.current_ms)

    @contextmanager
    def mended(self) -> Iterator[None]:
        """Around what writes: if the copy turns out to be damaged, it is emptied, and has to be restored.

        The error goes on. `health` says when to try again.
        """
        try:
            try:
                yield
            except StoreCorruptError as damage:
                self.replace(damage.what)
                raise
        except EnvironmentUnusableError as problem:
            self.health.refused(problem)
            raise
        self.health.well()

    def replace(self, why: str) -> None:
        """Remove the copy, and begin with an empty one."""
        self.health.emptied(why)
        # First of all: other threads must know before they find the new store.
        self.emptied = self.emptied or self.position > 0
        self._record = replace(self._record, table_end=0)
        self.current_ms, self._heard_ms = None, clock_ms()
        with suppress(StoreCorruptError):
            self.store.close()
        self.remove()
        self._open()

    def remove(self) -> None:
        """Delete what is on disk. The copy must be closed."""
        try:
            remove_store(self._folder, self._followed.opener)
        except OSError as refused:
            raise unusable(self._folder, "A local copy cannot be removed", refused) from refused

    def refresh(self) -> None:
        """Look how far a restore, which runs in the same thread, has written."""
        record = CommitRecord.decode(self.store.blob(COMMIT_RECORD) or b"")
        if record is not None:
            self._record = record

    def close(self) -> None:
        with suppress(OnceflowError):
            self._write({}, self._record, self.current_ms)
        self.store.close()
        if not self._followed.opener.on_disk:
            self.remove()  # nobody can find it again

    # ---- inside --------------------------------------------------------------------------------------

    def _open(self) -> None:
        opener = self._followed.opener
        try:
            self.store = open_store(self._folder, opener, verify=True)
            self._load()
        except StoreCorruptError as problem:
            log.warning("table %s: the local copy is removed and read again from Kafka: %s", self.name, problem.what)
            self.remove()
            self.store = open_store(self._folder, opener, verify=False)
            self._load()

    def _load(self) -> None:
        """Read the commit record; a new store gets one.

        Raises:
            StoreCorruptError: it is unreadable, belongs to an earlier topic, or is too old.
        """
        now_ms = clock_ms()
        raw = self.store.blob(COMMIT_RECORD)
        self._written_at = time.monotonic()
        if raw is None:
            self._record = CommitRecord.of(self._followed.goal(self.partition, 0), now_ms)
            self._raw = None
            self._write({}, self._record, None)
            return
        record = CommitRecord.decode(raw)
        if record is None:
            raise StoreCorruptError("its commit record cannot be read")
        if (when := self.store.blob(_CURRENT)) is not None:
            self.current_ms = int(when)
        if problem := record.misfit(self._followed.goal(self.partition, record.table_end)):
            raise StoreCorruptError(problem)
        if now_ms - record.time_ms > self._followed.tombstone_ms // 2:
            raise StoreCorruptError("it is so old that Kafka may have removed tombstones that it has not read")
        self._record, self._raw = record, raw
        if self.store.blob(_PLACED) != self._placement(record):
            self._check_rows()

    def _placement(self, record: CommitRecord) -> bytes:
        return b"%d %d" % (self._followed.partitions, record.table_end)

    def _check_rows(self) -> None:
        """Read all keys, because the copy does not say whether they are where the default partitioner puts them."""
        scan = self.store.scan(rows.VALUE, rows.after(rows.VALUE))
        while self.placed and (keys := [key[1:] for key, _ in islice(scan, _CHECKED_ROWS)]):
            self.check_placement(pa.array(keys, pa.binary()))

    def _catch_up(self, source: Source, end: int, progress: Callable[[int], None]) -> CatchUp:
        followed = self._followed
        return CatchUp(
            self._folder,
            followed.goal(self.partition, end),
            source,
            followed.tombstone_ms // 2,
            clock_ms(),
            progress,
            None,
        )

    def _write(self, changes: Changes, record: CommitRecord, current_ms: int | None) -> None:
        raw = record.encode()
        when = None if current_ms is None else b"%d" % current_ms
        blobs = {COMMIT_RECORD: raw, _CURRENT: when, _PLACED: self._placement(record) if self.placed else None}
        if not self.store.write(changes, blobs, (COMMIT_RECORD, self._raw), index=True):
            raise StoreCorruptError("another process has changed it")
        self._raw = raw
        self._written_at = time.monotonic()

    def _changes(self, chunk: Chunk, still: Collection[int]) -> list[RawChange]:
        """How the records change values.

        Args:
            still: rows of records that only move rows from partition to partition.
        """
        now_ms = clock_ms()
        keys = [key for key in chunk.keys if key is not None]
        known: dict[bytes, bytes | None] = {}
        for key, row in zip(keys, self.store.get_many([rows.value_key(key) for key in keys]), strict=True):
            known[key] = rows.live_payload(row, now_ms) if row else None
        found = []
        columns: Sequence[list[int]] = (chunk.offsets.tolist(), chunk.timestamps_ms.tolist())
        for at, (key, value, offset, timestamp_ms) in enumerate(zip(chunk.keys, chunk.values, *columns, strict=True)):
            if key in known:
                if at not in still:
                    found.append(RawChange(key, value, known[key], self.partition, offset, known_ms(timestamp_ms)))
                known[key] = value
        return found

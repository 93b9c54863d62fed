"""The local copy of one partition of a table: brought up to what is committed in Kafka, or made anew from it.

Kafka first, then local. A batch leaves its changes here as *pending*; the next one, which knows what was
committed, applies them or drops them. The *marker* says which flow and table the rows are of and up to which
offsets of the two topics they go; it moves in the same commit as the rows. Whatever is missing, foreign or
damaged ends the same way: the data are removed and read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from onceflow.errors import EnvironmentUnusableError, FencedError, OnceflowError
from onceflow.state import rows
from onceflow.state.local.format import (
    AHEAD,
    INTERNAL_SUFFIX,
    KINDS,
    MARKER,
    PENDING,
    Changes,
    Chunk,
    Commit,
    Goal,
    Marker,
    Pending,
    default_state_dir,
    internal_changes,
    partition_folder,
    rows_of_snapshot,
    snapshot,
    table_changes,
)
from onceflow.state.local.spool import Spool
from onceflow.state.local.table import LocalTable
from onceflow.state.stores.base import BULK_ROWS_MAX, Store, StoreCorruptError, unusable

__all__ = [
    "INTERNAL_SUFFIX",
    "Chunk",
    "Commit",
    "Goal",
    "LocalTable",
    "Opened",
    "Source",
    "default_state_dir",
    "open_partition",
    "partition_folder",
    "rows_of_snapshot",
    "set_pending",
    "settle",
    "snapshot",
]

log = logging.getLogger("onceflow.state")

VERIFYING = "verifying"
#: Half of what Kafka keeps tombstones for, unless a topic says otherwise.
TOMBSTONE_AGE_MS = 12 * 3_600_000
_MARKER_REFRESHED_MS = 3_600_000
# A restore holds this much in memory (the larger, the fewer pages are visited again) and commits now and then.
_WRITTEN_ROWS, _WRITTEN_BYTES = 250_000, 32 << 20
_COMMITTED_ROWS, _COMMITTED_S = BULK_ROWS_MAX - 2 * _WRITTEN_ROWS, 10.0
_ATTEMPTS = 10

IN_SYNC, SETTLED, CAUGHT_UP, RESTORED = "in sync", "settled", "caught up", "restored"


class Source(Protocol):
    """Reads committed records (``client.committed.CommittedReader``)."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]: ...


@dataclass
class Opened:
    """A store that holds what is committed.

    Args:
        how: ``in sync``, ``settled``, ``caught up`` or ``restored``.
        records: read from Kafka for it.
        why: what was wrong with the copy that was there, if anything.
    """

    store: Store
    how: str
    records: int
    seconds: float
    why: str = ""


class _MovedError(Exception):
    """Another process has moved the marker meanwhile."""


# ---- opening -----------------------------------------------------------------------------------------


def open_partition(
    folder: Path,
    opener: type[Store],
    goal: Goal,
    source: Source,
    *,
    verify: bool,
    snapshot_per_partition: bool = False,
    tombstone_age_ms: int = TOMBSTONE_AGE_MS,
    now_ms: int,
    progress: Callable[[int], None] | None = None,
    still_owner: Callable[[], bool] | None = None,
) -> Opened:
    """A store that holds exactly what is committed, from whatever there is on disk.

    Args:
        verify: read the whole copy first and compare checksums (once per run of the driver).
        snapshot_per_partition: a record of the table topic is a `snapshot` of the partition; the internal topic is
            not used.
        tombstone_age_ms: a copy that was last in sync longer ago is restored (half of ``delete.retention.ms``).
        now_ms: epoch milliseconds.
        progress: told of the number of records read so far, again and again.
        still_owner: asked when the copy is ahead of the goal. False: a newer driver of the flow keeps it, and the
            caller is the one that is behind. The copy is left alone then.

    Raises:
        FencedError: a newer driver has taken the flow over.
        OnceflowError: Kafka could not be read, or the folder cannot be used. What is there stays consistent.
    """
    began = time.monotonic()
    run = _Run(folder, goal, source, snapshot_per_partition, tombstone_age_ms, now_ms, progress, still_owner)
    why = ""
    try:
        store, how = _brought_up(folder, opener, run, verify=verify)
    except StoreCorruptError as problem:
        why = problem.what
        opener.remove(folder)
        (folder / VERIFYING).unlink(missing_ok=True)
        store, how = _brought_up(folder, opener, run, verify=False)
    opened = Opened(store, how, run.records, time.monotonic() - began, why)
    if run.records or why:
        log.log(
            logging.WARNING if why else logging.INFO,
            "table %s-%d: local copy %s%s; %d records read in %.2f s, %.0f a second",
            goal.table,
            goal.partition,
            how,
            f" ({why})" if why else "",
            run.records,
            opened.seconds,
            run.records / max(opened.seconds, 1e-6),
        )
    if run.ignored:
        log.warning(
            "table %s-%d: %d records ignored that no processor wrote (no key, or too long a key)",
            goal.table,
            goal.partition,
            run.ignored,
        )
    return opened


def _brought_up(folder: Path, opener: type[Store], run: _Run, *, verify: bool) -> tuple[Store, str]:
    died, there = found_in(folder, opener)
    if died:
        raise StoreCorruptError("the process that was verifying it died")
    with _verifying(folder) if verify and there else nullcontext():
        store = opener.open(folder)
        try:
            if verify and not store.checksum_holds():
                raise StoreCorruptError("its checksum does not hold")
        except BaseException:
            store.close()
            raise
    try:
        return store, run.bring_up(store)
    except BaseException:
        store.close()
        raise


def found_in(folder: Path, opener: type[Store]) -> tuple[bool, bool]:
    """Whether a process has died verifying what is there, and whether something is."""
    try:
        return (folder / VERIFYING).exists(), opener.exists(folder)
    except OSError as refused:
        raise unusable(folder, "The local state cannot be opened", refused) from refused


@contextmanager
def _verifying(folder: Path) -> Iterator[None]:
    """Leaves a file behind when the process dies of what it reads, as an engine may: the next one is warned."""
    trial = folder / VERIFYING
    try:
        folder.mkdir(parents=True, exist_ok=True)  # not every store keeps something there
        trial.touch()
    except OSError as refused:
        raise unusable(folder, "The local state cannot be opened", refused) from refused
    try:
        yield
    except StoreCorruptError:
        raise  # the file stays until the data are removed
    except BaseException:
        trial.unlink(missing_ok=True)
        raise
    trial.unlink(missing_ok=True)


class _Run:
    """One call of `open_partition`."""

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
                marker = Marker.decode(store.blob(MARKER) or b"")
                reached = before if marker is None else (marker.table_end, marker.internal_end)
                moved = 0 if reached > before else moved + 1
                before = max(reached, before)
        raise EnvironmentUnusableError(
            f"Another process keeps changing the local state of {self.goal.table}-{self.goal.partition}",
            next_step="see that no two flows of this name use one state folder",
        )

    def _step(self, store: Store) -> str:
        raw = store.blob(MARKER)
        if raw is None:
            if next(store.scan(b""), None) is not None:
                raise StoreCorruptError("it has rows but no marker")
            fresh = replace(Marker.of(self.goal, self._now_ms), table_end=0, internal_end=0)
            raw = self._write(store, None, fresh, {})
            self._read(store, raw, fresh)
            return RESTORED
        marker = Marker.decode(raw)
        if marker is None:
            raise StoreCorruptError("its marker cannot be read")
        if problem := marker.misfit(self.goal):
            if problem == AHEAD and not self._still_owner():
                raise FencedError(
                    "A newer driver of the flow keeps this local state",
                    topic=f"{self.goal.table}-{self.goal.partition}",
                    next_step="see who has started it twice: a flow has one driver; nothing was lost or doubled",
                )
            raise StoreCorruptError(problem)
        if marker.at(self.goal):
            if self._now_ms - marker.time_ms > _MARKER_REFRESHED_MS:
                self._write(store, raw, replace(marker, time_ms=self._now_ms), {})
            return IN_SYNC
        pending = Pending.decode(store.blob(PENDING))
        ends = (self.goal.table_end, self.goal.internal_end)
        if (
            pending is not None
            and pending.commit == self.goal.last
            and pending.ends == ends
            and pending.follows(marker)
        ):
            self._write(store, raw, Marker.of(self.goal, self._now_ms), pending.changes, done=True)
            return SETTLED
        if self._now_ms - marker.time_ms > self._tombstone_age_ms:
            raise StoreCorruptError("it is so old that Kafka may have dropped deletes which it has not seen")
        self._read(store, raw, marker)
        return CAUGHT_UP

    def _read(self, store: Store, raw: bytes, marker: Marker) -> None:
        """From the marker to the goal, with a commit now and then, so that a killed process need not begin anew.

        Nothing is locked while Kafka is read, however long it takes to answer. The marker's time stays until the goal
        is reached: how long tombstones are kept counts from the first record that was read.
        """
        if self._snapshot_per_partition:
            self._write(store, raw, Marker.of(self.goal, self._now_ms), self._replaced(store, marker), done=True)
            return
        since = time.monotonic()
        with Spool[Marker](self._folder) as spool:
            try:
                for reached, changes in self._pieces(marker):
                    spool.add(reached, changes)
                    if spool.rows > _COMMITTED_ROWS or time.monotonic() - since > _COMMITTED_S:
                        raw = self._write_spooled(store, raw, spool)
                        since = time.monotonic()
            except OnceflowError:
                with suppress(OnceflowError, _MovedError):  # the next one need not read it again
                    self._write_spooled(store, raw, spool)
                raise
            self._write_spooled(store, raw, spool, done=True)

    def _pieces(self, marker: Marker) -> Iterator[tuple[Marker, Changes]]:
        """What is missing in parts, each with the marker once it is written."""
        for name, topic, changes_of in (
            ("table_end", self.goal.table, table_changes),
            ("internal_end", self.goal.internal, internal_changes),
        ):
            start, end = getattr(marker, name), getattr(self.goal, name)
            for changes, position in self._gathered(topic, start, end, changes_of):
                marker = replace(marker, **{name: position})  # type: ignore[arg-type]
                yield marker, changes

    def _write_spooled(self, store: Store, raw: bytes, spool: Spool[Marker], *, done: bool = False) -> bytes:
        """All parts in one commit; the marker as it is now.

        Args:
            done: nothing is missing then.
        """
        with store.bulk():
            for reached, changes in spool.take():
                raw = self._write(store, raw, reached, changes)
            if done:
                raw = self._write(store, raw, Marker.of(self.goal, self._now_ms), {}, done=True)
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

    def _replaced(self, store: Store, marker: Marker) -> dict[bytes, bytes | None]:
        """All rows of the last snapshot, and deletes of those that are not in it."""
        last: tuple[bytes | None] | None = None
        for chunk in self._chunks(self.goal.table, marker.table_end, self.goal.table_end):
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
        marker: Marker,
        changes: Changes | Sequence[tuple[bytes, bytes | None]],
        *,
        done: bool = False,
    ) -> bytes:
        """Rows and marker in one commit, if the marker is still what was read; the marker as it is now.

        Args:
            done: what is pending has had its time.
        """
        blobs: dict[str, bytes | None] = {MARKER: marker.encode()}
        if done:
            blobs[PENDING] = None
        if not store.write(changes, blobs, (MARKER, raw), index=True):
            raise _MovedError
        return marker.encode()


# ---- pending -----------------------------------------------------------------------------------------


def set_pending(
    store: Store,
    goal: Goal,
    commit: Commit,
    changes: Sequence[tuple[bytes, bytes | None]],
    table_end: int,
    internal_end: int,
) -> None:
    """Leaves a batch's changes in a store that is at the goal, in place of what was pending before.

    Args:
        commit: the transaction that writes them to Kafka.
        changes: last row per row key, without index rows; None deletes.
        table_end, internal_end: where the topics end once it is committed.
    """
    pending = Pending(commit, (table_end, internal_end), (goal.table_end, goal.internal_end), changes)
    store.write((), {PENDING: pending.encode()})


def settle(folder: Path, opener: type[Store], commit: Commit) -> bool:
    """Applies what is pending if it is of this transaction, which is known to be committed.

    For the end of a flow: the next one, and readers, find the store in sync. Nothing is lost when it cannot be.
    """
    if (folder / VERIFYING).exists() or not opener.exists(folder):
        return False
    try:
        store = opener.open(folder)
        try:
            raw = store.blob(MARKER)
            marker = Marker.decode(raw) if raw is not None else None
            pending = Pending.decode(store.blob(PENDING))
            if marker is None or pending is None or pending.commit != commit or not pending.follows(marker):
                return False
            moved = replace(marker, table_end=pending.ends[0], internal_end=pending.ends[1])
            blobs = {MARKER: moved.encode(), PENDING: None}
            return store.write(pending.changes, blobs, (MARKER, raw), index=True)
        finally:
            store.close()
    except StoreCorruptError as problem:
        log.info("the local copy in %s is left to the next start: %s", folder, problem.what)
        return False

"""Opens the local copy of one partition of a table, brought up to what is committed in Kafka.

Changes are written to Kafka first, then to the local copy. A batch leaves its changes in the copy as *pending*. The
next batch knows what was committed, and applies or drops them. The *commit record* says to which flow and table the
rows belong, and up to which offsets of the two topics they go. It is written in the same commit as the rows. A copy
that is missing, damaged or of another table is removed, and restored from Kafka.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from onceflow.errors import DeadlineExceededError
from onceflow.host.private_folders import make_private
from onceflow.state.local.catch_up import CAUGHT_UP, LOST, CatchUp, Source
from onceflow.state.local.format import COMMIT_RECORD, PENDING, CommitId, CommitRecord, Goal, Pending
from onceflow.state.stores.base import Store, StoreCorruptError, StoreHeldError, unusable

log = logging.getLogger("onceflow.state")

_LONG_RESTORE_S = 5.0
_HELD_S = 60.0  # how long a copy without a changelog is waited for that a stopped process holds

VERIFYING = "verifying"
#: Half of the time for which Kafka keeps tombstones by default.
TOMBSTONE_AGE_MS = 12 * 3_600_000


@dataclass
class Opened:
    """A store that contains what is committed.

    Args:
        how: ``in sync``, ``settled``, ``caught up`` or ``restored``; ``lost``: the store is empty, because the table
            has no changelog, and what was committed is not on this host.
        records: how many records were read from Kafka for it.
        why: what was wrong with the copy on disk, if anything.
    """

    store: Store
    how: str
    records: int
    seconds: float
    why: str = ""


# ---- opening -----------------------------------------------------------------------------------------


def open_partition(
    folder: Path,
    opener: type[Store],
    goal: Goal,
    source: Source,
    *,
    verify: bool,
    tombstone_age_ms: int = TOMBSTONE_AGE_MS,
    now_ms: int,
    progress: Callable[[int], None] | None = None,
    still_owner: Callable[[], bool] | None = None,
    stamped: bool = False,
    is_over: Callable[[], bool] | None = None,
) -> Opened:
    """Open a store that contains exactly what is committed, whatever is on disk now.

    Args:
        verify: read the whole copy first and compare checksums (once per run of the driver).
        tombstone_age_ms: a copy that was last in sync longer ago is restored (half of ``delete.retention.ms``).
        now_ms: epoch milliseconds.
        progress: called repeatedly with the number of records read so far.
        still_owner: called if the copy is ahead of the goal. False: a newer driver of the flow has updated the copy,
            and the caller is fenced. Then the copy is not changed.
        stamped: the rows of the table are stamped (``stamps.py``).
        is_over: returns whether to end now, and to keep what was read; None: a restore takes as long as it takes.

    Raises:
        FencedError: a newer driver has fenced this one.
        InterruptedRestoreError: ``is_over`` has ended it.
        OnceflowError: Kafka could not be read, or the folder cannot be used. The copy on disk stays consistent.
    """
    began = time.monotonic()
    run = CatchUp(folder, goal, source, tombstone_age_ms, now_ms, progress, still_owner, stamped, is_over)
    store, how, why = _opened(folder, opener, run, verify=verify)
    if how == LOST:
        why = why or "there is no local copy of it on this host"
    opened = Opened(store, how, run.records, time.monotonic() - began, why)
    if (run.records or why) and how != LOST:  # the driver tells of what is lost
        log.log(
            _level(how, why, beside=is_over is not None),
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
            "table %s-%d: %d records ignored that no processor wrote (for example without a key)",
            goal.table,
            goal.partition,
            run.ignored,
        )
    return opened


def _level(how: str, why: str, *, beside: bool) -> int:
    """Of the log line about a copy. Standby copies are brought up every second."""
    if why:
        return logging.WARNING
    return logging.DEBUG if beside and how == CAUGHT_UP else logging.INFO


def _opened(folder: Path, opener: type[Store], run: CatchUp, *, verify: bool) -> tuple[Store, str, str]:
    """The store that is there, or one that is restored; how it was brought up; and what was wrong with it."""
    until = time.monotonic() + _HELD_S
    while True:
        try:
            return *_brought_up(folder, opener, run, verify=verify), ""
        except StoreHeldError as held:
            why = held.what
            if run.goal.changelog:
                break  # the other process keeps its files, which nobody else finds any more
            if time.monotonic() > until:  # the copy is all there is
                raise DeadlineExceededError(
                    f"The local state in {folder} cannot be opened: {why}",
                    next_step="let that process go on, or end it; without a changelog there is no other copy",
                ) from held
        except StoreCorruptError as problem:
            why = problem.what
            break
    remove_store(folder, opener)
    return *_brought_up(folder, opener, run, verify=False), why


def _brought_up(folder: Path, opener: type[Store], run: CatchUp, *, verify: bool) -> tuple[Store, str]:
    store = open_store(folder, opener, verify=verify)
    try:
        return store, run.bring_up(store)
    except BaseException:
        store.close()
        raise


def open_store(folder: Path, opener: type[Store], *, verify: bool) -> Store:
    """Open the store in a folder as it is on disk, or create it.

    Args:
        verify: read the whole store first and compare checksums.

    Raises:
        StoreCorruptError: the data are damaged. `remove_store` removes them.
        EnvironmentUnusableError: the folder cannot be used.
    """
    died, there = found_in(folder, opener)
    if died:
        raise StoreCorruptError("the process that was verifying it died")
    with suspecting(folder) if verify and there else nullcontext():
        store = opener.open(folder)
        try:
            if verify and not store.checksum_holds():
                raise StoreCorruptError("its checksum does not match")
        except BaseException:
            store.close()
            raise
    return store


def remove_store(folder: Path, opener: type[Store]) -> None:
    """Delete the data of a store, even if they are damaged.

    Raises:
        EnvironmentUnusableError: the folder cannot be used.
    """
    try:
        opener.remove(folder)
        (folder / VERIFYING).unlink(missing_ok=True)
    except OSError as refused:
        raise unusable(folder, "The local state cannot be removed", refused) from refused


def found_in(folder: Path, opener: type[Store]) -> tuple[bool, bool]:
    """Whether a process has died while it verified the copy, and whether there is a copy."""
    try:
        return (folder / VERIFYING).exists(), opener.exists(folder)
    except OSError as refused:
        raise unusable(folder, "The local state cannot be opened", refused) from refused


@contextmanager
def suspecting(folder: Path) -> Iterator[None]:
    """Data are read that may be damaged. While this runs, a file exists in the folder. It stays there if they crash the
    storage engine, and with it the process. So the next process knows of the damage."""
    trial = folder / VERIFYING
    try:
        make_private(folder)  # not every store has files there
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


# ---- pending -----------------------------------------------------------------------------------------


def set_pending(
    store: Store,
    goal: Goal,
    commit: CommitId,
    changes: Sequence[tuple[bytes, bytes | None]],
    table_end: int,
    internal_end: int,
    *,
    lost: bool = False,
) -> None:
    """Leaves a batch's changes as pending in a store that is at the goal. They replace earlier pending changes.

    Without a changelog the pending changes are the only copy of what their transaction has changed. So those of a
    higher producer epoch stay: then this attempt is a zombie, and its transaction cannot be committed.

    Args:
        commit: the transaction that writes them to Kafka.
        changes: last row per row key, without index rows; None deletes the row.
        table_end, internal_end: end offsets of the topics when the transaction is committed.
        lost: the store is not at the goal, but empty (`LOST`).
    """
    base = (0, 0) if lost else (goal.table_end, goal.internal_end)
    blobs = {PENDING: Pending(commit, (table_end, internal_end), base, changes).encode()}
    if goal.changelog:
        store.write((), blobs)
        return
    while True:
        there = store.blob(PENDING)
        if _is_newer(there, commit) or store.write((), blobs, (PENDING, there)):
            return


def _is_newer(there: bytes | None, commit: CommitId) -> bool:
    """Whether pending changes are of a later attempt of the same producer. Epochs of two producer ids say nothing."""
    try:
        pending = Pending.decode(there)
    except StoreCorruptError:  # they are of no use to anybody
        return False
    if pending is None or pending.commit.producer_id != commit.producer_id:
        return False
    return pending.commit.producer_epoch > commit.producer_epoch


def settle(folder: Path, opener: type[Store], commit: CommitId) -> bool:
    """Applies the pending changes if they are of this transaction, which is known to be committed.

    It is called at the end of a flow, so that the next start and readers find the store in sync. If it fails, nothing
    is lost. Returns whether changes were applied.
    """
    if (folder / VERIFYING).exists() or not opener.exists(folder):
        return False
    try:
        store = opener.open(folder)
        try:
            raw = store.blob(COMMIT_RECORD)
            commit_record = CommitRecord.decode(raw) if raw is not None else None
            pending = Pending.decode(store.blob(PENDING))
            if commit_record is None or pending is None:
                return False
            if pending.commit != commit or not pending.follows(commit_record):
                return False
            moved = replace(commit_record, table_end=pending.ends[0], internal_end=pending.ends[1])
            blobs = {COMMIT_RECORD: moved.encode(), PENDING: None}
            return store.write(pending.changes, blobs, (COMMIT_RECORD, raw), index=True)
        finally:
            store.close()
    except StoreCorruptError as problem:
        log.info("the local copy in %s is not settled now, the next start repairs it: %s", folder, problem.what)
        return False


class RestoreLog:
    """Logs a long restore every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = self._logged = time.monotonic()

    def __call__(self, records: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _LONG_RESTORE_S:
            self._logged = now
            rate = records / (now - self._started)
            log.info("restoring %s: %d records so far, %.0f a second", self._what, records, rate)

"""Opens local copies in a batch, or brings them up to what is committed before a batch begins.

A batch has to end before its transaction times out, but it is not known in advance how long a restore takes. So a copy
that lacks many records, or has to be verified, can be prepared before the transaction is opened: by the driver, or by
a task of a separate job. The batch then finds the copy in sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from onceflow.clock import clock_ms
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.local.catch_up import BEHIND, InterruptedRestoreError, Source
from onceflow.state.local.format import COMMIT_RECORD, PENDING, CommitRecord, Goal, Pending
from onceflow.state.local.opening import Opened, RestoreLog, found_in, open_partition, suspecting
from onceflow.state.spec import AttemptContext, ProcessSpec
from onceflow.state.stores.base import Store, StoreCorruptError


@dataclass(frozen=True)
class Prepared:
    """A local copy that contains what was committed when it was opened, for `TableState.prepared`.

    Args:
        location: see `ProcessSpec.location`.
        how, records, seconds, why: see `Opened`; ``behind``: the time was over before all was read.
        ends: up to which offsets of the two topics the copy goes.
    """

    table: str
    partition: int
    location: str
    how: str
    records: int
    seconds: float
    why: str = ""
    ends: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, opened: Opened, spec: ProcessSpec, moment: AttemptContext, partition: int) -> Prepared:
        ends = moment.table_ends[partition], moment.internal_ends[partition]
        how, why = opened.how, opened.why
        return cls(spec.table, partition, spec.location(), how, opened.records, opened.seconds, why, ends)


def open_local(
    spec: ProcessSpec,
    moment: AttemptContext,
    partition: int,
    source: Source,
    *,
    still_owner: Callable[[], bool] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> Opened:
    """The store of a partition on this host, see `open_partition`. A long restore is logged every few seconds."""
    return open_partition(
        spec.folder(partition),
        spec.store,
        moment.goal(spec, partition),
        source,
        verify=not is_verified(spec, moment, partition),
        tombstone_age_ms=spec.topics.tombstone_ms // 2,
        now_ms=clock_ms(),
        progress=RestoreLog(f"{spec.table}-{partition}"),
        still_owner=still_owner,
        stamped=isinstance(spec.processor, Deduplication),
        is_over=is_over,
    )


def prepare_partition(
    spec: ProcessSpec,
    moment: AttemptContext,
    partition: int,
    source: Source,
    *,
    still_owner: Callable[[], bool] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> Prepared:
    """Bring the copy on this host up to what is committed, before a batch begins. This needs no transaction.

    Args:
        moment: the moment of the next batch, as far as it is known: what is committed, and what is verified.
        still_owner: returns False if a newer driver has fenced this one. It is called only when that is in doubt.
        is_over: returns whether to end now, and to keep what was read.

    Raises:
        FencedError: a newer driver has fenced this one.
        OnceflowError: Kafka could not be read, or the folder cannot be used. What was read so far is kept.
    """
    began = time.monotonic()
    try:
        opened = open_local(spec, moment, partition, source, still_owner=still_owner, is_over=is_over)
    except InterruptedRestoreError as interrupted:
        seconds = time.monotonic() - began
        ends = held(spec, moment, partition) or (0, 0)
        return Prepared(spec.table, partition, spec.location(), BEHIND, interrupted.records, seconds, ends=ends)
    opened.store.close()
    return Prepared.of(opened, spec, moment, partition)


def held(spec: ProcessSpec, moment: AttemptContext, partition: int) -> tuple[int, int] | None:
    """Up to which offsets of the two topics the copy on this host goes. None: there is none that can be continued.

    This call takes no longer than opening the store. If damaged data end the process, the next call finds no copy.
    """
    folder, opener, goal = spec.folder(partition), spec.store, moment.goal(spec, partition)
    died, there = found_in(folder, opener)
    if died or not there:
        return None
    with nullcontext() if is_verified(spec, moment, partition) else suspecting(folder):
        return _held(folder, opener, goal)


def lacks(spec: ProcessSpec, moment: AttemptContext, partition: int) -> int | None:
    """The most records that a batch would have to read for the copy on this host; None: it has to verify the copy, too.

    This call takes no longer than opening the store.
    """
    verified = is_verified(spec, moment, partition)
    return missing_records(spec.folder(partition), spec.store, moment.goal(spec, partition), verified=verified)


def is_verified(spec: ProcessSpec, moment: AttemptContext, partition: int) -> bool:
    """Whether the copy on this host was verified in this run."""
    return (spec.location(), partition) in moment.verified


def missing_records(folder: Path, opener: type[Store], goal: Goal, *, verified: bool) -> int | None:
    """The most records that have to be read before the copy is at the goal, according to its commit record.

    Args:
        verified: whether the copy was verified in this run. If not, it is not opened here, because damaged data may
            crash the process that opens it.

    Returns:
        The number of records; None: there is a copy, and it has to be verified first.
    """
    everything = goal.table_end + goal.internal_end if goal.changelog else 0
    died, there = found_in(folder, opener)
    if died or not there:
        return everything
    if not verified:
        return None
    if not goal.changelog:
        return 0
    ends = _held(folder, opener, goal)
    return everything if ends is None else everything - sum(ends)


def _held(folder: Path, opener: type[Store], goal: Goal) -> tuple[int, int] | None:
    try:
        store = opener.open(folder)
        try:
            commit_record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
            pending = Pending.decode(store.blob(PENDING))
        finally:
            store.close()
    except StoreCorruptError:
        return None
    if commit_record is None or commit_record.misfit(goal):
        return None
    if pending is not None and pending.commit == goal.last and pending.follows(commit_record):
        return goal.table_end, goal.internal_end
    return commit_record.table_end, commit_record.internal_end

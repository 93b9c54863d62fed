"""Opens local copies in a batch, or brings them up to what is committed before a batch begins.

A batch has to end before its transaction times out, but it is not known in advance how long a restore takes. So a copy
that lacks many records, or has to be verified, can be prepared before the transaction is opened: by the driver, or by
a task of a separate job. The batch then finds the copy in sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onceflow.clock import clock_ms
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.local.catch_up import Source
from onceflow.state.local.format import COMMIT_RECORD, PENDING, CommitRecord, Goal, Pending
from onceflow.state.local.opening import Opened, RestoreLog, found_in, open_partition
from onceflow.state.spec import AttemptContext, ProcessSpec
from onceflow.state.stores.base import Store, StoreCorruptError


@dataclass(frozen=True)
class Prepared:
    """A local copy that contains what was committed when it was opened, for `TableState.prepared`.

    Args:
        location: see `ProcessSpec.location`.
        how, records, seconds, why: see `Opened`.
    """

    table: str
    partition: int
    location: str
    how: str
    records: int
    seconds: float
    why: str = ""

    @classmethod
    def of(cls, opened: Opened, spec: ProcessSpec, partition: int) -> Prepared:
        return cls(spec.table, partition, spec.location(), opened.how, opened.records, opened.seconds, opened.why)


def open_local(
    spec: ProcessSpec,
    moment: AttemptContext,
    partition: int,
    source: Source,
    *,
    still_owner: Callable[[], bool] | None = None,
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
    )


def prepare_partition(
    spec: ProcessSpec,
    moment: AttemptContext,
    partition: int,
    source: Source,
    *,
    still_owner: Callable[[], bool] | None = None,
) -> Prepared:
    """Bring the copy on this host up to what is committed, before a batch begins. This needs no transaction.

    Args:
        moment: the moment of the next batch, as far as it is known: what is committed, and what is verified.
        still_owner: returns False if a newer driver has fenced this one. It is called only when that is in doubt.

    Raises:
        FencedError: a newer driver has fenced this one.
        OnceflowError: Kafka could not be read, or the folder cannot be used. What was read so far is kept.
    """
    opened = open_local(spec, moment, partition, source, still_owner=still_owner)
    opened.store.close()
    return Prepared.of(opened, spec, partition)


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
    try:
        store = opener.open(folder)
        try:
            commit_record = CommitRecord.decode(store.blob(COMMIT_RECORD) or b"")
            pending = Pending.decode(store.blob(PENDING))
        finally:
            store.close()
    except StoreCorruptError:
        return everything
    if commit_record is None or commit_record.misfit(goal):
        return everything
    if pending is not None and pending.commit == goal.last and pending.follows(commit_record):
        return 0
    return everything - commit_record.table_end - commit_record.internal_end

"""Lets a flow take the place of another one, in one transaction of the other one's transactional id.

The new flow is fenced first: it is a shadow, and its stop hurts nobody. The old one goes on until it has read and done
at least as much. Then it is fenced, too, and the transaction has its new progress record, the group's offsets, and the
last progress record of the new flow, which says whose place it has taken. Until it is committed, both flows can be
started again as they were: a start of the new flow waits until the transaction is decided.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from onceflow.admin.change.flow_transaction import FlowTransaction, Wording, Written
from onceflow.admin.change.move import committed, known
from onceflow.admin.change.settled_progress import SettledProgress
from onceflow.admin.records.writer import Row, Writer
from onceflow.admin.transactions.unfinished import left_by_command
from onceflow.admin.versions.promotion_plan import (
    Position,
    check_can_promote,
    ended_progress,
    has_unfired,
    missing,
    pairs,
    positions,
    promoted_progress,
    was_promoted,
)
from onceflow.admin.versions.promotion_timers import Unfired, check_unfired, unfired
from onceflow.admin.versions.table_copy import Tell
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.topics import find_topic
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.errors import (
    DeadlineExceededError,
    FencedError,
    PermissionDeniedError,
    ProgressConflictError,
    counted,
    located,
)
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, encode

_SECONDS = 60.0
_TIMERS_SECONDS = 5.0
#: Of the transaction. It has two records. If the command is killed, a start of the new flow waits as long as that, and
#: until the coordinator looks for such transactions (every 10 s by default).
_TRANSACTION_MS = 30_000
_COMMAND_SECONDS = 3.0  # another command, which may be at work, ends its transaction meanwhile
_POLL_ATTEMPT = 4  # of `Deadline.wait`: about a tenth of a second


@dataclass(frozen=True)
class Promoted:
    """What takes whose place.

    Args:
        flow: the flow that is replaced. new: the one that takes its place.
        before: progress of the flow that is replaced. copy: of the one that takes its place, if it is still there.
        positions: where both are in the source.
        tables: by table of ``flow``, what replaces it ('': nothing).
        progress: what was committed; None: nothing yet.
        already: whether that was done before.
    """

    flow: str
    new: str
    before: Progress
    positions: tuple[Position, ...]
    stateful: bool
    progress: Progress | None = None
    already: bool = False
    copy: Progress | None = None

    @property
    def gap(self) -> int:
        """How many offsets are processed without outputs, at most."""
        return sum(each.gap for each in self.positions) if self.stateful else 0

    @property
    def ahead(self) -> int:
        """How many offsets the flow that is replaced has to read first, at most."""
        return sum(each.ahead for each in self.positions) if self.stateful else 0


@dataclass(frozen=True)
class Limits:
    """What a user accepts.

    Args:
        max_gap: how many offsets the new flow may be behind.
        wait_s: how long to wait until the old one has done as much as the new one.
        new_timers: see `missing`.
        same_timers, new_topics: see `check_can_promote`.
    """

    max_gap: int = 100_000
    wait_s: float = 60.0
    new_timers: bool = False
    same_timers: bool = False
    new_topics: bool = False

    def check(self, old: Progress, new: Progress, names: Names, other: Names) -> None:
        """See `check_can_promote`."""
        check_can_promote(old, new, names, other, same_timers=self.same_timers, new_topics=self.new_topics)


def preview(cluster: Cluster, names: Names, other: Names, limits: Limits) -> Promoted:
    """What `promote` would do now. Nothing is changed, and nobody is fenced. Errors as of `promote`."""
    deadline = Deadline(_SECONDS, f"looking at flow {names.flow}")
    old = known(committed(cluster, names, deadline), names, cluster)
    new = committed(cluster, other, deadline)
    if was_promoted(old, new, other):
        return Promoted(names.flow, other.flow, old, (), bool(old.tables), old, already=True)
    new = known(new, other, cluster)
    limits.check(old, new, names, other)
    _check_tables(cluster, new, other, deadline)
    _check_gap(old, new, other, limits.max_gap)
    return Promoted(names.flow, other.flow, old, positions(old, new), bool(new.tables), copy=new)


def promote(cluster: Cluster, names: Names, other: Names, limits: Limits, tell: Tell = lambda *_: None) -> Promoted:
    """Let a flow take the place of another one. Drivers of both are fenced.

    Args:
        names: the flow that is replaced. other: the one that takes its place.

    Raises:
        OptionError, ProgressConflictError: it cannot take the other one's place.
        DeadlineExceededError: the old flow does not get as far as the new one in time. It goes on.
        FencedError: a driver of one of both has started meanwhile.
        OnceflowError: see `FlowTransaction.commit`. After each of these, both flows can be started as they were.
    """
    preview(cluster, names, other, limits)  # what it refuses stops nobody
    deadline = Deadline(_SECONDS, f"preparing the promotion of flow {other.flow}")
    wording = Wording(
        doing=f"letting {other.flow} take the place of flow {names.flow}",
        too_slow="The promotion was not committed",
        undone="nothing has changed: start both flows as they were, and run the command again",
    )
    shadow = FlowTransaction(cluster, other, wording)
    shadow.session.transactions.check_supported(deadline)
    settled = SettledProgress(cluster, names)
    with located(flow=other.flow):
        shadow.take_over(deadline)
        _end_earlier(cluster, names, other, wording, deadline)
        old = known(settled.read(deadline), names)
        found = shadow.session.progress({}, deadline, missing_is_fine=True)
        if was_promoted(old, found, other):
            return Promoted(names.flow, other.flow, old, (), bool(old.tables), old, already=True)
        new = known(found, other)
        limits.check(old, new, names, other)
        _check_gap(old, new, other, limits.max_gap)
        until = Deadline(limits.wait_s, f"waiting for flow {names.flow} to get as far as {other.flow}")
        old = _wait(settled, new, names, until, tell, new_timers=limits.new_timers)
        _unfired(cluster, old, new)  # it would be refused below, but there the old flow is stopped already
    own = FlowTransaction(cluster, names, wording, timeout_ms=_TRANSACTION_MS)
    with located(flow=names.flow):
        return _commit(cluster, names, other, new, shadow, own, limits)


def _end_earlier(cluster: Cluster, names: Names, other: Names, wording: Wording, deadline: Deadline) -> None:
    """Abort what a killed command has left open in the progress of one of both flows, as a start of the old one would.
    A command that is at work gets a few seconds to end."""
    soon = Deadline(_COMMAND_SECONDS, deadline.what)
    try:
        SettledProgress(cluster, names).read(soon)
        progress_log.read_progress(cluster, other.progress_key, other.group_id, {}, soon, missing_is_fine=True)
    except DeadlineExceededError:
        if left_by_command(cluster, names, deadline):
            FlowTransaction(cluster, names, wording).take_over(deadline)


def _check_tables(cluster: Cluster, new: Progress, other: Names, deadline: Deadline) -> None:
    """Refuse tables whose topics are gone: the flow could not be started after that, and its old state would be no
    flow's. Topics that this principal may not see are not looked at."""
    for name in sorted(new.changelogs):
        with suppress(PermissionDeniedError):
            found = find_topic(cluster, name, "DESCRIBE", deadline)
            if found is None or new.topic_ids.get(name, found.topic_id) != found.topic_id:
                raise ProgressConflictError(
                    f"Topic {name} of flow {other.flow!r} "
                    + ("does not exist" if found is None else "was deleted and created again"),
                    flow=other.flow,
                    topic=name,
                    next_step=f"the state of {other.flow!r} is lost: make another copy with `onceflow fork`, and "
                    "promote that one",
                )


def _check_gap(old: Progress, new: Progress, other: Names, max_gap: int) -> None:
    gap = sum(each.gap for each in positions(old, new)) if new.tables else 0
    if gap > max_gap:
        raise ProgressConflictError(
            f"Flow {other.flow!r} is {counted(gap, 'record')} behind, which is more than {max_gap:,}",
            flow=other.flow,
            next_step="let it catch up, or give a larger --max-gap: as many records are processed without outputs in "
            "one transaction at the next start",
        )


def _wait(
    settled: SettledProgress, new: Progress, names: Names, deadline: Deadline, tell: Tell, *, new_timers: bool
) -> Progress:
    """Wait until the old flow has done all that the new one has done. Returns its progress.

    For a short while, also wait until it has fired the timers that its last batch has left.
    """
    patience = Deadline(_TIMERS_SECONDS, f"waiting for timers of flow {names.flow}")
    while True:
        old = known(settled.read(Deadline(_SECONDS, f"reading the progress of flow {names.flow}")), names)
        left = missing(old, new, new_timers=new_timers)
        if not left and (not has_unfired(old, new) or patience.expired or deadline.expired):
            return old
        ahead = sum(each.ahead for each in positions(old, new))
        tell(f"waiting for flow {names.flow}", 0, ahead)
        if not (deadline if left else patience).wait(_POLL_ATTEMPT) and left:
            raise ProgressConflictError(
                f"Flow {names.flow!r} has not got as far as the new version within {deadline.seconds:g} s",
                flow=names.flow,
                detail=left,
                next_step="nothing has changed; the old version has to run, and to get records, while the command "
                "waits. Start the new one again under its own name, or give a longer --wait",
            )


def _unfired(cluster: Cluster, old: Progress, new: Progress) -> Unfired:
    """What `check_unfired` lets through: usually nothing, and nothing is read."""
    copies = pairs(old, new)
    deadline = Deadline(_SECONDS, f"reading the timers of flow {old.flow}")
    reader = CommittedReader(cluster)
    left = unfired(reader, old, copies, deadline)
    known = unfired(reader, new, (copies[table] for table in left), deadline)
    return check_unfired(left, known, old, new, copies)


def _commit(
    cluster: Cluster,
    names: Names,
    other: Names,
    new: Progress,
    shadow: FlowTransaction,
    own: FlowTransaction,
    limits: Limits,
) -> Promoted:
    """Fence the old flow, and commit what it becomes."""
    deadline = Deadline(_SECONDS, f"promoting flow {other.flow}")
    own.take_over(deadline)
    old = known(own.session.progress({}, deadline, missing_is_fine=True), names)
    limits.check(old, new, names, other)
    if left := missing(old, new, new_timers=limits.new_timers):  # it was moved back by another command
        raise ProgressConflictError(
            f"Flow {names.flow!r} was changed meanwhile",
            flow=names.flow,
            detail=left,
            next_step="run the command again",
        )
    kept = _unfired(cluster, old, new)
    key = other.progress_key
    partition = progress_log.partition_of(key)

    def end_new(writer: Writer, until: Deadline) -> None:
        now_ms = clock_ms()
        content = encode(ended_progress(new, names.progress_key, now_ms))[1]
        writer.write(PROGRESS_TOPIC, partition, [(key.encode(), Row(content, now_ms))])

    def still_ours(until: Deadline) -> None:
        """A driver that starts from now on waits for this transaction. None may have started before."""
        try:
            shadow.session.transactions.renew(until)
        except FencedError as error:
            raise ProgressConflictError(
                f"Flow {other.flow!r} was started again meanwhile",
                flow=other.flow,
                detail=error.what,
                next_step="nothing has changed; stop what starts it (a service manager, for example), start the old "
                "version, and run the command again",
            ) from error

    def after(written: Written) -> Progress:
        return promoted_progress(old, new, clock_ms(), kept)

    progress = own.commit([PROGRESS_TOPIC], end_new, after, before_end=still_ours)
    return Promoted(names.flow, other.flow, old, positions(old, new), bool(new.tables), progress)

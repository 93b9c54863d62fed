"""Moves a flow in time: fences its driver, and commits new positions and what becomes of its state in one transaction.

The transaction is of the flow's own transactional id. It has the new progress record, the consumer group's offsets,
and, if the state is deleted, a tombstone for every row of its tables. After a crash there is either all of it, or
nothing; the same command can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onceflow.admin.change.flow_transaction import FlowTransaction, Wording, Written
from onceflow.admin.change.move_plan import DELETE, Move, check_state, plan_move, without_state
from onceflow.admin.change.table_rows import Tell, delete_rows
from onceflow.admin.change.target import TIMESTAMP, OffsetSpec
from onceflow.admin.records.writer import Writer
from onceflow.admin.status.similar_flows import meant, named, similar_flows
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.topics import find_topic
from onceflow.driver.record import progress_log
from onceflow.driver.record.committed_progress import CommittedProgress
from onceflow.driver.record.handover import check_exists
from onceflow.driver.start.source_offsets import look_at
from onceflow.errors import PermissionDeniedError, ProgressConflictError, UnknownTopicError, located
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress, decode

_SECONDS = 60.0


@dataclass(frozen=True)
class Decision:
    """What is to be committed.

    Args:
        move: the new positions.
        after: the progress record, before its rows are deleted.
        deletes: whether the rows of its tables are deleted.
    """

    move: Move
    after: Progress
    deletes: bool


@dataclass(frozen=True)
class Moved:
    """What was committed.

    Args:
        rows: how many rows of tables were deleted.
    """

    move: Move
    progress: Progress
    rows: int


def committed(cluster: Cluster, names: Names, deadline: Deadline) -> Progress | None:
    """The committed progress of a flow. Nobody is fenced; None: it has none."""
    found = CommittedProgress().read(cluster, deadline).get(names.progress_key.encode())
    if found is None or found[1].value is None:
        return None
    with located(flow=names.flow):
        return decode(found[1].key, found[1].value)


def known(progress: Progress | None, names: Names, cluster: Cluster | None = None) -> Progress:
    """The progress, if there is one.

    Args:
        cluster: is asked for flows of a similar name, for the error; None: nobody is.

    Raises:
        ProgressConflictError: there is none, or the flow has taken another one's place.
    """
    check_exists(progress, flow=names.flow)
    if progress is None:
        similar = [] if cluster is None else similar_flows(cluster, names)
        raise ProgressConflictError(
            f"Flow {names.flow!r} has no progress here",
            flow=names.flow,
            detail=named(similar),
            next_step=meant(
                similar,
                "check its name and its prefixes (--transactional-id-prefix, --group-id-prefix), and "
                "--bootstrap-servers; a flow that has never run, or was reset, starts at its starting_offsets",
            ),
        )
    return progress


def sources_of(cluster: Cluster, progress: Progress, deadline: Deadline) -> dict[str, SourceTopic]:
    """The topics that a flow has read, as they are now. Those that do not exist are left out.

    Raises:
        PermissionDeniedError: one may not be described.
    """
    found = {}
    for name in sorted(progress.offsets):
        info = find_topic(cluster, name, "READ", deadline)
        if info is not None:
            found[name] = look_at(cluster, info, deadline)
    return found


def plan(cluster: Cluster, progress: Progress, target: OffsetSpec, deadline: Deadline) -> Move:
    """Where the partitions of a flow's sources are to go. Errors as of `plan_move`."""
    topics = sources_of(cluster, progress, deadline)
    at_time: Mapping[str, Mapping[int, int]] = {}
    if target.kind == TIMESTAMP and topics:
        spans = {name: sorted(topic.earliest) for name, topic in topics.items()}
        at_time = list_offsets(cluster, spans, target.timestamp_ms, deadline)
    return plan_move(progress, topics, target, at_time)


def preview(cluster: Cluster, names: Names, target: OffsetSpec, state: str | None) -> Move:
    """What `move` would do now. Nothing is changed, and nobody is fenced. Errors as of `move`."""
    deadline = Deadline(_SECONDS, f"looking at flow {names.flow}")
    found = plan(cluster, known(committed(cluster, names, deadline), names, cluster), target, deadline)
    check_state(found.before, state)
    return found


def move(cluster: Cluster, names: Names, target: OffsetSpec, state: str | None, tell: Tell) -> Moved:
    """Move a flow. A running driver of the flow is fenced.

    Args:
        state: what becomes of its state: ``keep`` or ``delete``; None: it has none.

    Raises:
        OptionError, DataLossError, ProgressConflictError: it cannot be moved there; nothing has moved.
        FencedError: a driver of the flow has started meanwhile.
        OnceflowError: see `FlowTransaction.commit`.
    """

    def decide(before: Progress | None, deadline: Deadline) -> Decision:
        found = plan(cluster, known(before, names), target, deadline)
        return Decision(found, found.after(found.before), check_state(found.before, state) == DELETE)

    return carry_out(cluster, names, decide, tell)


def carry_out(
    cluster: Cluster, names: Names, decide: Callable[[Progress | None, Deadline], Decision], tell: Tell
) -> Moved:
    """Fence the flow, decide on the progress that is committed then, and commit what was decided."""
    wording = Wording(
        doing=f"moving flow {names.flow}",
        too_slow="The rows of the tables were not deleted",
        undone="nothing has changed; give a new flow name and tables of its own, which start empty",
    )
    transaction = FlowTransaction(cluster, names, wording)
    deadline = Deadline(_SECONDS, f"moving flow {names.flow}")
    with located(flow=names.flow):
        transaction.session.transactions.check_supported(deadline)
        progress_log.ensure_topic(cluster, deadline)
        transaction.take_over(deadline)
        decision = decide(transaction.session.progress({}, deadline, missing_is_fine=True), deadline)
        after = decision.after
        ends = _ends(cluster, after, deadline) if decision.deletes else {}
        rows = 0

        def write(writer: Writer, until: Deadline) -> None:
            nonlocal rows
            rows = delete_rows(CommittedReader(cluster), writer, ends, until, tell)

        def changed(written: Written) -> Progress:
            if not decision.deletes:
                return after
            behind: dict[str, dict[int, int]] = {}
            for (topic, partition), acknowledged in written.items():
                behind.setdefault(topic, {})[partition] = acknowledged.end_offset
            return without_state(after, behind)

        offsets = transaction.group_offsets(after, deadline)
        progress = transaction.commit(ends, write, changed, offsets)
        return Moved(decision.move, progress, rows)


def _ends(cluster: Cluster, progress: Progress, deadline: Deadline) -> dict[str, dict[int, int]]:
    """Up to where the table topics are read, to delete their rows."""
    found: dict[str, dict[int, int]] = {}
    for topic, by_partition in progress.changelogs.items():
        try:
            stable = list_offsets(cluster, {topic: sorted(by_partition)}, LATEST, deadline)[topic]
        except (UnknownTopicError, PermissionDeniedError) as error:
            raise ProgressConflictError(
                f"The rows of table topic {topic} cannot be deleted",
                topic=topic,
                detail=error.what,
                next_step="if the topic was deleted, `onceflow reset` without --to makes the flow forget its tables",
            ) from error
        found[topic] = {p: max(stable[p], end) for p, end in by_partition.items()}
    return found

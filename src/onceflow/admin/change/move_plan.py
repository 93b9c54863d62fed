"""Moving a flow in time, as a pure decision: which partition goes where, and what that does to records and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import uuid4

from onceflow.admin.change.target import BEGINNING, EARLIEST, LATEST, OFFSETS, OffsetSpec
from onceflow.errors import DataLossError, OptionError, ProgressConflictError, counted
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.progress import Offsets, Progress

KEEP, DELETE = "keep", "delete"


@dataclass(frozen=True)
class PartitionMove:
    """One partition of a source.

    Args:
        before: the next offset that the flow would read; None: it has not read the partition yet.
        after: the one that it reads next.
        earliest: the first offset that is still there.
    """

    topic: str
    partition: int
    before: int | None
    after: int
    earliest: int

    @property
    def again(self) -> int:
        """How many offsets are read a second time, at most: transaction markers count, too."""
        return 0 if self.before is None else max(0, self.before - self.after)

    @property
    def skipped(self) -> int:
        """How many offsets that are there are never read, at most."""
        return max(0, self.after - max(self.earliest, self.before or 0))


@dataclass(frozen=True)
class Move:
    """A move of a flow.

    Args:
        before: the progress that it was planned for.
        moves: all partitions of the topics that are moved; some may stay where they are.
        topic_ids: ids of these topics.
        gone: topics that the flow has read, and that no longer exist. Their offsets stay in progress.
    """

    before: Progress
    moves: tuple[PartitionMove, ...]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    @property
    def positions(self) -> dict[str, dict[int, int]]:
        """Where each partition of the moved topics is afterwards."""
        found: dict[str, dict[int, int]] = {}
        for move in self.moves:
            found.setdefault(move.topic, {})[move.partition] = move.after
        return found

    @property
    def tables(self) -> list[str]:
        """The tables of the flow."""
        return sorted(self.before.tables)

    def after(self, before: Progress) -> Progress:
        """A progress record with the new positions, without changes of state."""
        return replace(
            before,
            offsets={**before.offsets, **self.positions},
            topic_ids={**before.topic_ids, **self.topic_ids},
            # The user may accept with the move that a log was truncated.
            epochs={topic: each for topic, each in before.epochs.items() if topic not in self.positions},
            handover=None,
        )


def plan_move(
    before: Progress,
    topics: Mapping[str, SourceTopic],
    target: OffsetSpec,
    at_time: Offsets,
) -> Move:
    """Decide where each partition goes.

    Args:
        topics: the flow's sources that exist, as they are now.
        at_time: for a timestamp: the first offset with it, by topic and partition; -1: there is none.

    Raises:
        OptionError: an offset is not in the log, or a topic or partition is none of the flow's.
        DataLossError: ``beginning``, and the first records have expired.
        ProgressConflictError: none of the flow's sources exists.
    """
    gone = tuple(sorted(set(before.offsets) - set(topics)))
    if not topics:
        raise ProgressConflictError(
            f"Flow {before.flow!r} has no source that could be moved",
            flow=before.flow,
            detail=f"it has read {', '.join(gone) or 'no topic'}",
            next_step="check the topics; `onceflow reset` without --to makes the flow forget all of its progress",
        )
    if target.kind == OFFSETS:
        _check_named(before, topics, target.offsets)
    moves = []
    for name, topic in sorted(topics.items()):
        if target.kind == OFFSETS and name not in target.offsets:
            continue
        same = before.topic_ids.get(name) in (None, topic.topic_id)
        known = before.offsets.get(name, {}) if same else {}
        for partition, earliest in sorted(topic.earliest.items()):
            after = _place(topic, partition, known.get(partition), target, at_time)
            _check_there(before.flow, topic, partition, after, target)
            moves.append(PartitionMove(name, partition, known.get(partition), after, earliest))
    return Move(before, tuple(moves), {name: topics[name].topic_id for name in {move.topic for move in moves}}, gone)


def _place(topic: SourceTopic, partition: int, before: int | None, target: OffsetSpec, at_time: Offsets) -> int:
    if target.kind == EARLIEST:
        return topic.earliest[partition]
    if target.kind == LATEST:
        return topic.latest[partition]
    if target.kind == BEGINNING:
        return 0
    if target.kind == OFFSETS:
        stays = topic.earliest[partition] if before is None else before
        return target.offsets[topic.name].get(partition, stays)
    found = at_time[topic.name][partition]
    return topic.latest[partition] if found < 0 else min(found, topic.latest[partition])


def _check_there(flow: str, topic: SourceTopic, partition: int, after: int, target: OffsetSpec) -> None:
    low, high = topic.earliest[partition], topic.latest[partition]
    place = f"{topic.name}-{partition}"
    if target.kind == BEGINNING and low > 0:
        raise DataLossError(
            f"The beginning of {place} is gone: the log starts at {low}",
            flow=flow,
            topic=place,
            next_step="give --to earliest to read everything that is still there",
        )
    if target.kind == OFFSETS and partition in target.offsets[topic.name] and not low <= after <= high:
        raise OptionError(
            f"Offset {after} of {place} is out of range: the log holds {low} to {high}",
            flow=flow,
            topic=place,
            next_step="give an offset that exists, or --to earliest or latest",
        )


def _check_named(before: Progress, topics: Mapping[str, SourceTopic], offsets: Offsets) -> None:
    for name, partitions in offsets.items():
        if name not in topics:
            raise OptionError(
                f"Flow {before.flow!r} does not read {name}",
                flow=before.flow,
                topic=name,
                detail=f"its sources: {', '.join(sorted(topics))}",
                next_step="check the name of the topic",
            )
        unknown = sorted(set(partitions) - set(topics[name].earliest))
        if unknown:
            raise OptionError(
                f"{name} has no partition {unknown[0]}",
                flow=before.flow,
                topic=name,
                detail=f"it has {counted(len(topics[name].earliest), 'partition')}, numbered from 0",
                next_step="check the number of the partition",
            )


# ---- state -----------------------------------------------------------------------------------------------


def check_state(before: Progress, state: str | None) -> str:
    """What becomes of the flow's state, if it may be so.

    Raises:
        OptionError: it has state and ``state`` says nothing about it; or its state cannot be kept.
    """
    tables = ", ".join(sorted(before.tables))
    if before.checkpoint is not None and state != DELETE:
        raise OptionError(
            f"Flow {before.flow!r} keeps state in a Spark checkpoint, which cannot be moved to other offsets",
            flow=before.flow,
            next_step="give --state delete; then start the flow with an empty checkpoint folder and "
            'on_checkpoint_conflict="resume": its state begins empty at the new offsets',
        )
    if tables and state is None:
        raise OptionError(
            f"Flow {before.flow!r} has state, and --state does not say what becomes of it",
            flow=before.flow,
            detail=f"tables: {tables}",
            next_step="give --state keep (records that are read again are applied to it again) or --state delete "
            "(its rows are deleted in the same transaction; with --to earliest, the flow builds it anew)",
        )
    return state or KEEP


def meaning(before: Progress, state: str) -> str:
    """What the choice means, as a sentence; '' if the flow has no state."""
    tables = ", ".join(sorted(before.tables))
    if before.checkpoint is not None:
        return (
            "State in Spark's checkpoint is given up: start with an empty checkpoint folder and "
            'on_checkpoint_conflict="resume".'
        )
    if not tables:
        return ""
    if state == DELETE:
        return (
            f"The rows, timers and parked records of {tables} are deleted; the state begins empty. A rebuild reads the "
            "records again, so it also writes the outputs again."
        )
    late = ", ".join(sorted(name for name, table in before.tables.items() if table.watermark_ms is not None))
    return f"{tables}: the state stays as it is; records that are read again are applied to it again." + (
        f" The watermark of {late} stays, too: older records are late." if late else ""
    )


def without_state(progress: Progress, ends: Offsets) -> Progress:
    """A progress record with empty tables.

    Args:
        ends: the ends of the table topics behind the tombstones.
    """
    tables = {}
    for name, table in progress.tables.items():
        local = None if table.local is None else replace(table.local, table_id=uuid4().hex, last={})
        tables[name] = replace(
            table,
            watermark_ms=None,
            event_times={},
            event_times_ms=0,
            local=local,
            fired={},
            soonest={},
            unfired=(),
            processing_timers=False,
            fields=None,  # there is no row any more that has them
            schemas=(),
        )
    changelogs = {name: {**known, **ends.get(name, {})} for name, known in progress.changelogs.items()}
    return replace(progress, tables=tables, changelogs=changelogs, checkpoint=None, watermark_ms=None)

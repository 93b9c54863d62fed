"""The first batches of a flow whose place another version has taken (`onceflow promote`).

The earlier version had read further than the new one, and has written the outputs of these records. So the new version
processes them without writing outputs: only its state changes. Exactly this range is the first batch. A batch without
records follows, in which those timers fire that have fired in the earlier version. From then on, outputs are written.
Each of these batches is one transaction, so after a crash the next start does what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from onceflow.driver.record.offset_log import SourceRange, TopicOffsets
from onceflow.errors import ProgressConflictError
from onceflow.protocol.progress import HandOver, Progress, TimerId


def check_exists(progress: Progress | None, *, flow: str) -> None:
    """Refuse a flow that has taken another one's place: it goes on as that one.

    Raises:
        ProgressConflictError: it does not exist under its own name any more.
    """
    if progress is None or progress.became is None:
        return
    raise ProgressConflictError(
        f"Flow {flow!r} has taken the place of flow {progress.became!r}: its own name is not in use any more",
        flow=flow,
        detail=f"`onceflow promote` has done that, behind its batch {progress.batch_id}",
        next_step=f"start its program as flow {progress.became!r}, and stop what starts it as {flow!r} (a service "
        f"manager, for example). To use the name for a new flow: `onceflow reset {flow}`",
    )


def first_range_end(progress: Progress) -> TopicOffsets | None:
    """Where the first batch has to end; None: it may end anywhere."""
    if not _is_behind(progress):
        return None
    return {
        topic: {partition: max(offset, _written(progress, topic, partition)) for partition, offset in offsets.items()}
        for topic, offsets in progress.offsets.items()
    }


def owes_timers(progress: Progress) -> bool:
    """Whether the records that the earlier version has read are processed, but not its timers."""
    return progress.handover is not None and not _is_behind(progress)


def nothing(progress: Progress, topics: Iterable[str]) -> SourceRange:
    """A range of these topics without records, where progress is."""
    there = {topic: dict(progress.offsets[topic]) for topic in topics}
    return SourceRange(there, there)


def timers_until(progress: Progress, table: str) -> Mapping[str, int] | None:
    """See `AttemptContext`: which timers may fire in the next batch."""
    return None if progress.handover is None else progress.handover.timers.get(table, {})


def unfired(progress: Progress, table: str) -> frozenset[TimerId]:
    """See `AttemptContext`: which of them may not fire all the same: they have not fired in the earlier version."""
    return frozenset() if progress.handover is None else progress.handover.unfired.get(table, frozenset())


def of_same_topic(progress: Progress, topic: str, topic_id: str) -> HandOver | None:
    """What is left of a hand-over when a source has this id: offsets of a topic that was deleted mean nothing."""
    known = progress.handover
    if known is None or progress.topic_ids.get(topic) in (None, topic_id):
        return known
    return replace(known, offsets={name: offsets for name, offsets in known.offsets.items() if name != topic})


def check_sources(progress: Progress, topics: Collection[str], *, flow: str) -> None:
    """Check that all topics are read in which there are records to be processed without outputs.

    Raises:
        ProgressConflictError: one is not.
    """
    for topic, offsets in sorted(progress.offsets.items()):
        left = sum(max(0, _written(progress, topic, partition) - offset) for partition, offset in offsets.items())
        if left and topic not in topics:
            raise ProgressConflictError(
                f"After its promotion, flow {flow!r} has to read {left:,} more records of topic {topic} into its state",
                flow=flow,
                topic=topic,
                detail="the earlier version has read them, and the new one has not",
                next_step="start the program that reads this topic. When it has committed a batch, start the one that "
                "does not. If the state can do without these records, `onceflow reset FLOW --to` forgets the promotion",
            )


def check_range(progress: Progress, source: SourceRange, *, flow: str, batch: int) -> None:
    """Check that the outputs of the range are all written already, or none of them.

    Raises:
        ProgressConflictError: it reaches beyond what the earlier version has read.
    """
    if progress.handover is None:
        return
    for topic, offsets in source.end.items():
        for partition, end in offsets.items():
            if end > max(_written(progress, topic, partition), source.start.get(topic, {}).get(partition, 0)):
                raise ProgressConflictError(
                    f"The first batch after a promotion reads too much of {topic}-{partition}",
                    flow=flow,
                    batch=batch,
                    topic=f"{topic}-{partition}",
                    detail=f"the earlier version has read up to {_written(progress, topic, partition)}, the batch ends "
                    f"at {end}",
                    next_step="nothing was written; start the flow again, without checkpoint=",
                )


def after(progress: Progress, offsets: Mapping[str, Mapping[int, int]], *, timers_left: bool) -> HandOver | None:
    """What is left of a hand-over after a batch without outputs.

    Args:
        progress: before the batch. offsets: after it.
        timers_left: whether more of these timers are due than one batch may fire, or it has registered such ones.
    """
    handover = progress.handover
    if handover is None:
        return None
    is_done = owes_timers(progress) or not handover.timers
    return None if is_done and not timers_left and not _is_behind_of(handover, offsets) else handover


def _written(progress: Progress, topic: str, partition: int) -> int:
    handover = progress.handover
    return 0 if handover is None else handover.offsets.get(topic, {}).get(partition, 0)


def _is_behind(progress: Progress) -> bool:
    return progress.handover is not None and _is_behind_of(progress.handover, progress.offsets)


def _is_behind_of(handover: HandOver, offsets: Mapping[str, Mapping[int, int]]) -> bool:
    return any(
        offset < handover.offsets.get(topic, {}).get(partition, 0)
        for topic, by_partition in offsets.items()
        for partition, offset in by_partition.items()
    )

"""Where a flow starts: a pure decision from its progress and the current offsets of the source topics.

``plan`` decides or raises; it does no I/O. ``driver/start/startup.py`` collects the facts after it has initialised the
transactional id, so that they cannot change any more, and carries out the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.errors import OptionError, ProgressConflictError, data_loss, log_replaced
from onceflow.protocol.progress import Progress

STARTING = ("earliest", "latest")
StartingOffsets = str | Mapping[int, int]


@dataclass(frozen=True)
class SourceTopic:
    """A source topic as it is now.

    Args:
        earliest, latest: per partition, log start and last stable offset.
        epoch_ends: per partition, where the log ends what the leaders have appended that progress knows (KIP-320).
            Missing, or negative: not known.
    """

    name: str
    topic_id: str
    earliest: Mapping[int, int]
    latest: Mapping[int, int]
    epoch_ends: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """The decision.

    Args:
        offsets: where each partition is read from.
        must_commit: whether these offsets differ from those in progress, so that they must be committed before
            anything is read.
        warnings: texts to log (accepted loss of records, new partitions).
    """

    offsets: dict[int, int]
    must_commit: bool
    warnings: tuple[str, ...] = field(default=())


def plan(
    topic: SourceTopic,
    progress: Progress | None,
    *,
    starting_offsets: StartingOffsets,
    fail_on_data_loss: bool,
    flow: str,
) -> Start:
    """Decide where ``topic`` is read from.

    - Never read before by this flow: at ``starting_offsets``. They are committed at once, so that "latest"
      means the time of the first start. Otherwise it would mean the time of each start until the first batch.
    - Read before: exactly where progress ends. New partitions are read from their beginning.
    - Records between progress and the log's start have expired: ``DataLossError``. With
      ``fail_on_data_loss=False`` the gap is logged, and the offsets after it are committed.
    - The log was truncated below progress: an error, also if it has other records at these offsets by now.
    - The topic was deleted and created again: an error, because its offsets now mean other records.
    """
    _check_starting(topic, starting_offsets, flow)
    known = None if progress is None else progress.offsets.get(topic.name)
    if progress is None or known is None:
        return Start(_first_start(topic, starting_offsets, flow), must_commit=True)
    _check_same_topic(topic, progress, flow)
    check_log(topic.name, topic.epoch_ends, known, progress.epochs.get(topic.name, {}), flow)
    warnings: list[str] = []
    offsets = {
        partition: _continued(topic, partition, known.get(partition), warnings, fail_on_data_loss, flow)
        for partition in sorted(topic.earliest)
    }
    gone = sorted(set(known) - set(topic.earliest))
    if gone:
        raise ProgressConflictError(
            f"Topic {topic.name} has lost partitions {gone} that this flow has read",
            flow=flow,
            topic=topic.name,
            detail="partitions can only go when a topic is deleted and created again",
            next_step="`onceflow reset` the flow to read the new topic from its start",
        )
    must_commit = offsets != {partition: known.get(partition) for partition in offsets}
    if progress.batch_id and starting_offsets not in ("earliest", dict(known)):
        warnings.append(
            f"starting_offsets={starting_offsets!r} is for the first start only; {topic.name} is read where progress "
            f"ends, at {offsets}. To start over: `onceflow reset {flow} --bootstrap-servers HOST:PORT`"
        )
    return Start(offsets, must_commit, tuple(warnings))


def _check_starting(topic: SourceTopic, given: Any, flow: str) -> None:
    """Check what `starting_offsets` are by themselves: at every start, also if progress decides.

    Raises:
        OptionError: they are neither a known word nor whole numbers.
    """
    if isinstance(given, str):
        if given not in STARTING:
            raise OptionError(
                f"starting_offsets={given!r} is unknown",
                flow=flow,
                next_step='use "earliest", "latest" or a dictionary {partition: offset} of all partitions',
            )
        return
    for partition, offset in given.items():
        if not (is_count(partition) and isinstance(offset, int) and not isinstance(offset, bool)):
            raise OptionError(
                f"starting_offsets={{{partition!r}: {offset!r}}} is not {{partition: offset}}",
                flow=flow,
                topic=topic.name,
                next_step="give whole numbers from 0 on, one offset for each partition",
            )


def is_count(given: object) -> bool:
    """Whether something that a user has given is a number of a partition, or an offset."""
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def check_log(
    topic: str,
    epoch_ends: Mapping[int, int],
    known: Mapping[int, int],
    epochs: Mapping[int, tuple[int, int]],
    flow: str,
) -> None:
    """Check that a log still has what was read of it.

    Args:
        epoch_ends: see `SourceTopic`.
        known: the first offsets that were not read. epochs: as in progress.

    Raises:
        DataLossError: it was truncated since.
    """
    for partition, end in epoch_ends.items():
        read = min(epochs[partition][0], known.get(partition, 0))
        if 0 <= end < read:
            raise log_replaced(f"{topic}-{partition}", end, read, flow)


def _continued(
    topic: SourceTopic, partition: int, committed: int | None, warnings: list[str], fail_on_data_loss: bool, flow: str
) -> int:
    """The offset at which reading a partition continues. Adds unusual cases to ``warnings``."""
    earliest = topic.earliest[partition]
    if committed is None:
        warnings.append(f"{topic.name}-{partition} is new and is read from offset {earliest}")
        return earliest
    if committed < earliest:
        lost = f"{topic.name}-{partition}: offsets {committed} to {earliest - 1} have expired before they were read"
        if fail_on_data_loss:
            raise data_loss(f"{topic.name}-{partition}", lost, flow)
        warnings.append(lost + "; skipped, because fail_on_data_loss=False")
        return earliest
    if committed > topic.latest[partition]:
        raise _behind(topic, partition, committed, flow)
    return committed


def _first_start(topic: SourceTopic, starting: StartingOffsets, flow: str) -> dict[int, int]:
    if isinstance(starting, str):
        return dict(topic.earliest if starting == "earliest" else topic.latest)
    missing = sorted(set(topic.earliest) - set(starting))
    unknown = sorted(set(starting) - set(topic.earliest))
    if missing or unknown:
        raise OptionError(
            f"starting_offsets must name every partition of {topic.name} and no other",
            flow=flow,
            topic=topic.name,
            detail=f"missing {missing}, unknown {unknown}",
            next_step="give one offset for each partition",
        )
    for partition, offset in starting.items():
        low, high = topic.earliest[partition], topic.latest[partition]
        if not low <= offset <= high:
            raise OptionError(
                f"starting_offsets of {topic.name}-{partition} is {offset}, the log holds {low} to {high}",
                flow=flow,
                topic=f"{topic.name}-{partition}",
                next_step="give an offset that exists",
            )
    return dict(starting)


def _check_same_topic(topic: SourceTopic, progress: Progress, flow: str) -> None:
    before = progress.topic_ids.get(topic.name)
    if before is not None and before != topic.topic_id:
        raise ProgressConflictError(
            f"Topic {topic.name} was deleted and created again since this flow last read it",
            flow=flow,
            topic=topic.name,
            detail=f"topic id was {before}, is {topic.topic_id}; progress ends at {dict(progress.offsets[topic.name])}",
            next_step="`onceflow reset` the flow to read the new topic from its start, or use another flow name",
        )


def _behind(topic: SourceTopic, partition: int, committed: int, flow: str) -> ProgressConflictError:
    return ProgressConflictError(
        f"Progress is ahead of {topic.name}-{partition}",
        flow=flow,
        topic=f"{topic.name}-{partition}",
        detail=f"progress ends at {committed}, the log's last stable offset is {topic.latest[partition]}",
        next_step="the log was truncated (unclean leader election, restored from a backup); "
        "find out what is missing, then `onceflow reset` the flow",
    )

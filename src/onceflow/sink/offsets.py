"""Spark's own offset log of a query: which source range a batch was planned for.

Inside foreachBatch(N) the file ``offsets/N`` of the checkpoint is written already (SPARK: MicroBatchExecution
writes it before the batch runs). It holds the end offsets; the start is ``offsets/(N-1)``, and for the first
batch the initial offsets that the Kafka source stores under ``sources/<index>/0``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from onceflow.errors import ProgressConflictError

TopicOffsets = dict[str, dict[int, int]]
_VERSION = "v1"


@dataclass(frozen=True)
class SourceRange:
    """Start and end offsets of one batch, per topic and partition."""

    start: TopicOffsets
    end: TopicOffsets

    @property
    def rows_most(self) -> int:
        """Upper bound of the records in the range (markers and aborted records count, too)."""
        return sum(
            end - self.start.get(topic, {}).get(partition, 0)  # 0: a partition that was added while running
            for topic, partitions in self.end.items()
            for partition, end in partitions.items()
        )


def read_range(checkpoint: Path, batch_id: int) -> SourceRange:
    """The range of batch ``batch_id`` (Spark's number) of the query with this checkpoint.

    Raises:
        ProgressConflictError: the offset log is missing or holds something that is no Kafka source.
    """
    end = _offsets_of(checkpoint / "offsets" / str(batch_id))
    start = _offsets_of(checkpoint / "offsets" / str(batch_id - 1)) if batch_id > 0 else _initial(checkpoint)
    if set(start) != set(end):
        # A Kafka source has offsets from its first batch on; one without a start would be read from anywhere.
        differ = ", ".join(sorted(set(start) ^ set(end)))
        raise _unreadable(checkpoint / "offsets" / str(batch_id), f"start and end disagree about {differ}")
    return SourceRange(start, end)


def _initial(checkpoint: Path) -> TopicOffsets:
    """Where the sources of the first batch start."""
    start: TopicOffsets = {}
    sources = checkpoint / "sources"
    for folder in sorted(sources.iterdir()) if sources.is_dir() else ():
        initial = folder / "0"
        if initial.exists():
            # Spark writes a zero byte first, for readers of version 1.0 of the format.
            lines = _text(initial).lstrip("\0").splitlines()
            if len(lines) != 2 or lines[0] != _VERSION:
                raise _unreadable(initial, f"it holds {lines[:1]} and {len(lines)} lines")
            _merge(start, _parse(lines[1], initial), initial)
    return start


def _offsets_of(path: Path) -> TopicOffsets:
    lines = _text(path).splitlines()
    if len(lines) < 3 or lines[0] != _VERSION:
        # A cut or foreign file must not read as "no sources": the batch would be written without moving progress.
        raise _unreadable(path, f"it begins with {lines[:1]} and has {len(lines)} lines")
    merged: TopicOffsets = {}
    for line in lines[2:]:  # version, metadata, then one line per source
        if line != "-":  # a source that has no offset yet
            _merge(merged, _parse(line, path), path)
    return merged


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> ProgressConflictError:
    return ProgressConflictError(
        "Spark's offset log of this query cannot be read",
        detail=f"{path}: {why}",
        next_step="was the scratch folder deleted while the query ran, or spark.sql.streaming.offsetLog.formatVersion "
        "set? Start the flow again: progress is in Kafka",
    )


def _parse(line: str, path: Path) -> TopicOffsets:
    try:
        raw = json.loads(line)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return {}  # the clock that wakes a flow with timers up (Spark's rate source): nothing to commit
        return {
            str(topic): {int(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in raw.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise ProgressConflictError(
            "A source of this query is not a Kafka source",
            detail=f"{path.name} holds {line[:100]!r}",
            next_step="read every stream with Flow.read: only Kafka sources have progress that Kafka can hold",
        ) from error


def _merge(into: TopicOffsets, more: TopicOffsets, path: Path) -> None:
    for topic, partitions in more.items():
        if topic in into:
            raise ProgressConflictError(
                f"Topic {topic!r} is read twice in one query",
                topic=topic,
                detail=str(path.name),
                next_step="call Flow.read once and use the DataFrame twice, or use one flow for each",
            )
        into[topic] = partitions


def check_contiguous(
    planned: TopicOffsets, committed: TopicOffsets, new_partitions_start: TopicOffsets, *, flow: str, batch: int
) -> None:
    """Invariant I2: a batch starts exactly where committed progress ends.

    Topics of progress that the query does not read (any more) keep their offsets, and are no part of the check.

    Args:
        planned: start offsets of the batch.
        committed: end offsets of the last committed batch.
        new_partitions_start: where partitions unknown to progress may start (their earliest offset).

    Raises:
        ProgressConflictError: a gap or an overlap; nothing has been written.
    """
    for topic in planned:
        if topic not in committed:
            raise ProgressConflictError(
                f"Topic {topic} is read but has no committed start",
                flow=flow,
                batch=batch,
                topic=topic,
                next_step="read every stream of the query with Flow.read of the flow that writes it",
            )
        for partition, expected in committed[topic].items():
            got = planned[topic].get(partition)
            if got != expected:
                kind = "is missing" if got is None else ("overlaps" if got < expected else "leaves a gap")
                raise ProgressConflictError(
                    f"The batch does not continue committed progress: {topic}-{partition} {kind}",
                    flow=flow,
                    batch=batch,
                    topic=f"{topic}-{partition}",
                    detail=f"progress ends at {expected}, the batch starts at {got}",
                    next_step="start the flow again; if this repeats, the source topic was changed under it "
                    "(`onceflow reset` starts over deliberately)",
                )
    for topic, partitions in planned.items():
        for partition, got in partitions.items():
            if partition in committed.get(topic, {}):
                continue
            allowed = new_partitions_start.get(topic, {}).get(partition)
            if allowed is not None and got != allowed:
                raise ProgressConflictError(
                    f"New partition {topic}-{partition} does not start at its beginning",
                    flow=flow,
                    batch=batch,
                    topic=f"{topic}-{partition}",
                    detail=f"its log starts at {allowed}, the batch starts at {got}",
                    next_step="start the flow again: new partitions are then planned from their earliest offset",
                )

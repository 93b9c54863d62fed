"""Spark's own offset log of a query: which source range a batch was planned for.

Inside foreachBatch(N) the file ``offsets/N`` of the checkpoint is written already (SPARK: MicroBatchExecution
writes it before the batch runs). It holds the end offsets; the start is ``offsets/(N-1)``, and for the first
batch the initial offsets that the Kafka source stores under ``sources/<index>/0``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.errors import ProgressConflictError, counted
from onceflow.spark.checkpoint_files import Folder, LocalFolder, unreadable

TopicOffsets = dict[str, dict[int, int]]
_VERSION = "v1"


@dataclass(frozen=True)
class SourceRange:
    """Start and end offsets of one batch, per topic and partition.

    Args:
        others: whether the query also has sources that are not topics of the flow. Their rows are not counted here.
        digest: hash of the end offsets of all sources, as they are in the log.
        epochs: of partitions whose records the driver has fetched: the leader epoch of the last one, or of a later
            leader whose log had it.
    """

    start: TopicOffsets
    end: TopicOffsets
    others: bool = field(default=False, compare=False)
    digest: str = field(default="", compare=False)
    epochs: Mapping[tuple[str, int], int] = field(default_factory=dict, compare=False)

    @property
    def max_rows(self) -> int:
        """Upper bound of the records in the range (markers and aborted records count, too)."""
        return sum(count for _, count in self._counts())

    def by_topic(self) -> dict[str, int]:
        """How many offsets of each topic are in the range."""
        found = dict.fromkeys(self.end, 0)
        for (topic, _), count in self._counts():
            found[topic] += count
        return found

    def news(self) -> list[tuple[str, int]]:
        """Topics and partitions that have offsets in the range."""
        return [place for place, count in self._counts() if count > 0]

    def back(self) -> list[tuple[str, int]]:
        """Topics and partitions that end before their start: Spark plans that when their logs have become shorter."""
        return [place for place, count in self._counts() if count < 0]

    def gone(self) -> list[tuple[str, int]]:
        """Topics and partitions that have a start, and no end."""
        return [
            (topic, partition)
            for topic, partitions in self.start.items()
            for partition in partitions
            if partition not in self.end.get(topic, {})
        ]

    def ranges(self) -> list[tuple[str, int, int, int]]:
        """Topic, partition, start and end offset of each partition that has offsets in the range."""
        return [
            (topic, partition, self.start.get(topic, {}).get(partition, 0), self.end[topic][partition])
            for topic, partition in self.news()
        ]

    def _counts(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Topic and partition, and how many offsets of it are in the range."""
        for topic, partitions in self.end.items():
            start = self.start.get(topic, {})
            for partition, end in partitions.items():
                yield (topic, partition), end - start.get(partition, 0)  # 0: it was added while the query ran


@dataclass(frozen=True)
class Sources:
    """The topics that a query reads, by name.

    Args:
        starts: where partitions that progress does not know may start.
        partitions: the number of partitions.
    """

    starts: TopicOffsets
    partitions: Mapping[str, int]


def has_reached(offsets: Mapping[str, Mapping[int, int]], ends: Mapping[str, Mapping[int, int]]) -> bool:
    """Whether everything before these ends was read, if the next offsets are these."""
    return all(
        offsets.get(topic, {}).get(partition, 0) >= end
        for topic, by_partition in ends.items()
        for partition, end in by_partition.items()
    )


def read_range(checkpoint: Path | Folder, batch_id: int, topics: Collection[str] | None = None) -> SourceRange:
    """The range of batch ``batch_id`` (Spark's number) of the query with this checkpoint.

    Args:
        topics: what the flow reads, if the query may also have sources that are not topics; None if it may not.

    Raises:
        ProgressConflictError: the offset log is missing, or a source in it is not a Kafka source.
    """
    folder = LocalFolder(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    name = f"offsets/{batch_id}"
    lines = _lines(folder, name)
    end, others = _offsets_of(lines, folder, name, topics)
    if batch_id > 0:
        before = f"offsets/{batch_id - 1}"
        start, _ = _offsets_of(_lines(folder, before), folder, before, topics)
    else:
        start = _initial(folder, topics)
    if set(start) != set(end):
        # A Kafka source has offsets from its first batch on. Without a start, it is unknown where reading begins.
        differ = ", ".join(sorted(set(start) ^ set(end)))
        raise unreadable(f"{folder}/{name}", f"start and end disagree about {differ}")
    return SourceRange(start, end, others, digest_of(lines))


def read_ends(folder: Folder, batch_id: int, topics: Collection[str]) -> TopicOffsets:
    """End offsets of a batch, for the topics that it read."""
    name = f"offsets/{batch_id}"
    return _offsets_of(_lines(folder, name), folder, name, topics)[0]


def read_digest(folder: Folder, batch_id: int) -> str | None:
    """``SourceRange.digest`` of a batch; None when the batch is not in the checkpoint (any more)."""
    if folder.text(f"offsets/{batch_id}") is None:
        return None
    return digest_of(_lines(folder, f"offsets/{batch_id}"))


def digest_of(lines: list[str]) -> str:
    """Hash of the lines of an offset log: those of the sources only, without Spark's metadata before them."""
    return hashlib.sha256("\n".join(lines[2:]).encode()).hexdigest()


def _initial(folder: Folder, topics: Collection[str] | None) -> TopicOffsets:
    """Where the sources of the first batch start."""
    start: TopicOffsets = {}
    for source in folder.names("sources"):
        name = f"sources/{source}/0"
        text = folder.text(name)
        if text is None:
            continue
        # Spark writes a zero byte first, for readers of version 1.0 of the format.
        lines = text.lstrip("\0").splitlines()
        if len(lines) != 2 or lines[0] != _VERSION:
            if topics is not None:
                continue  # the log of another source, of files for example
            raise unreadable(f"{folder}/{name}", f"it holds {lines[:1]} and {counted(len(lines), 'line')}")
        _merge(start, _parse(lines[1], name, topics) or {}, name)
    return start


def _offsets_of(
    lines: list[str], folder: Folder, name: str, topics: Collection[str] | None
) -> tuple[TopicOffsets, bool]:
    """Offsets of the topics, and whether there are other sources."""
    merged: TopicOffsets = {}
    others = False
    for line in lines[2:]:  # version, metadata, then one line per source
        found = None if line == "-" else _parse(line, name, topics)  # "-": a source that has no offset yet
        others = others or found is None
        _merge(merged, found or {}, name)
    return merged, others and topics is not None


def _lines(folder: Folder, name: str) -> list[str]:
    text = folder.text(name)
    if text is None:
        raise unreadable(f"{folder}/{name}", "it does not exist")
    lines = text.splitlines()
    if len(lines) < 3 or lines[0] != _VERSION:
        # A truncated or foreign file must not count as "no sources": the batch would be written without progress.
        raise unreadable(f"{folder}/{name}", f"it begins with {lines[:1]} and has {counted(len(lines), 'line')}")
    return lines


def _parse(line: str, name: str, topics: Collection[str] | None) -> TopicOffsets | None:
    """The offsets of a Kafka source; None for another source."""
    try:
        raw = json.loads(line)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return None  # Spark's rate source
        if topics is not None and not (isinstance(raw, dict) and raw and set(raw) <= set(topics)):
            return None
        return {
            str(topic): {int(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in raw.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        if topics is not None:
            return None
        raise ProgressConflictError(
            "A source of this query is not a Kafka source",
            detail=f"{Path(name).name} holds {line[:100]!r}",
            next_step="read every stream with Flow.read, or give checkpoint=: without it, all progress is kept in "
            "Kafka, and that works for Kafka sources only",
        ) from error


def _merge(into: TopicOffsets, more: TopicOffsets, name: str) -> None:
    for topic, partitions in more.items():
        if topic in into:
            raise ProgressConflictError(
                f"Topic {topic!r} is read twice in one query",
                topic=topic,
                detail=Path(name).name,
                next_step="Spark reads a stream once for every place where it is used: make both parts of a union in "
                "one pass, with CASE or explode(array(struct(...), struct(...))); or use one flow for each",
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
                    next_step="start the flow again; if this repeats, the source topic was changed while the flow ran "
                    "(`onceflow reset` starts over)",
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

"""What has arrived from the sources, until batches take it. It uses no sockets."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from onceflow.direct.fetched import FetchedPart
from onceflow.driver.record.offset_log import SourceRange, TopicOffsets
from onceflow.protocol.names import TopicPartition


@dataclass(frozen=True)
class Limits:
    """How much one batch may take.

    Args:
        records: most offsets of each topic; topics without a limit are not in it.
        every: most offsets of all topics together.
        nbytes: of keys and values together. The batch ends with the response that reaches it.
    """

    records: Mapping[str, int]
    every: int
    nbytes: int


@dataclass(frozen=True)
class Taken:
    """What a batch has taken: its range, and the records in it.

    Args:
        limited: whether it has as much as a limit allows.
    """

    source: SourceRange
    parts: tuple[FetchedPart, ...]
    limited: bool = False


class Arrivals:
    """The records that wait, in the order in which they have arrived; those of a partition in the order of its log.

    Args:
        starts: the offset at which each partition is read first, by topic.

    Attributes:
        taken: everything below these offsets was taken by batches, or was there before.
        nbytes: size of what waits, about.
        offsets: how many offsets of each topic wait.
    """

    def __init__(self, starts: Mapping[str, Mapping[int, int]]) -> None:
        self.taken: TopicOffsets = {topic: dict(offsets) for topic, offsets in starts.items()}
        self.nbytes = 0
        self.offsets = dict.fromkeys(starts, 0)
        self._waiting: collections.deque[FetchedPart] = collections.deque()

    @property
    def has_records(self) -> bool:
        """Whether records wait."""
        return any(part.records for part in self._waiting)

    @property
    def has_offsets(self) -> bool:
        """Whether offsets wait, maybe without records: those of transaction markers and of aborted records."""
        return bool(self._waiting)

    def takeable(self, most: Mapping[str, int]) -> int:
        """How many of the offsets that wait a batch may take that takes so many of each topic at most."""
        return sum(min(count, most.get(topic, count)) for topic, count in self.offsets.items())

    def waiting(self, bounds: Mapping[str, Mapping[int, int]] | None = None) -> TopicOffsets:
        """How many offsets of each partition wait that a batch may take; see `take`."""
        found = {topic: dict.fromkeys(offsets, 0) for topic, offsets in self.taken.items()}
        for part in self._waiting:
            topic, partition = part.topic_partition
            end = part.end if bounds is None else min(part.end, bounds.get(topic, {}).get(partition, part.start))
            found[topic][partition] += max(0, end - part.start)
        return found

    def add(self, part: FetchedPart) -> None:
        """Records of a partition have arrived. They follow those that have arrived before."""
        self._waiting.append(part)
        self.nbytes += part.nbytes
        self.offsets[part.topic_partition[0]] += part.end - part.start

    def begin(self, topic: str, partition: int, offset: int) -> None:
        """A partition was added to a topic; it is read from here."""
        self.taken[topic][partition] = offset

    def drop(self) -> None:
        """Forget what waits. Nothing of it was taken, so it is read again."""
        self._waiting.clear()
        self.nbytes = 0
        self.offsets = dict.fromkeys(self.taken, 0)

    def take_unread(self, ends: Mapping[str, Mapping[int, int]]) -> SourceRange:
        """A batch takes everything below these offsets, which others read. Nothing may wait here meanwhile."""
        assert not self._waiting, "what waits would be read twice"
        before = self._snapshot()
        for topic, offsets in ends.items():
            self.taken[topic] |= offsets
        return SourceRange(before, self._snapshot())

    def nothing(self) -> SourceRange:
        """A range without offsets, where batches are."""
        there = self._snapshot()
        return SourceRange(there, there)

    def take(self, limits: Limits, bounds: Mapping[str, Mapping[int, int]] | None = None) -> Taken:
        """The next records for a batch. Without limits and bounds it is everything that waits.

        Args:
            bounds: the first offset of each partition that may not be taken; None: all may.
        """
        before = self._snapshot()
        by_topic = dict(limits.records)
        left, size = limits.every, limits.nbytes
        parts: list[FetchedPart] = []
        kept: list[FetchedPart] = []
        held: set[TopicPartition] = set()  # of these, an earlier part is kept
        while self._waiting:
            part = self._waiting.popleft()
            topic, partition = part.topic_partition
            end = min(part.end, part.start + min(left, by_topic.get(topic, left)))
            if bounds is not None:
                end = min(end, bounds.get(topic, {}).get(partition, part.start))
            if part.topic_partition in held or end <= part.start or size <= 0:
                kept.append(part)
                held.add(part.topic_partition)
                continue
            nbytes = part.nbytes
            if end < part.end:
                part, rest = part.split(end)
                nbytes -= rest.nbytes  # the sizes of both are rounded down
                kept.append(rest)
                held.add(part.topic_partition)
            left -= part.end - part.start
            if topic in by_topic:
                by_topic[topic] -= part.end - part.start
            size -= nbytes
            self.nbytes -= nbytes
            self.offsets[topic] -= part.end - part.start
            self.taken[topic][partition] = part.end
            parts.append(part)
        self._waiting.extend(kept)
        limited = left <= 0 or size <= 0 or any(most <= 0 for most in by_topic.values())
        epochs = {part.topic_partition: part.leader_epoch for part in parts}
        return Taken(SourceRange(before, self._snapshot(), epochs=epochs), tuple(parts), limited)

    def _snapshot(self) -> TopicOffsets:
        return {topic: dict(offsets) for topic, offsets in self.taken.items()}

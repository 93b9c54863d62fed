"""Consecutive committed records of one partition, as they wait for a batch and become rows of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from onceflow.client.column_chunks import ColumnChunk
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.task.source_rows import QueryRows


@dataclass(frozen=True)
class FetchedPart:
    """Records of one partition with offsets in ``[start, end)``.

    Args:
        chunk: the records of one response.
        leader_epoch: of the last one, or of a later leader whose log had it; -1: not known.
    """

    topic_partition: TopicPartition
    start: int
    end: int
    chunk: ColumnChunk
    leader_epoch: int = -1

    @property
    def records(self) -> int:
        """How many there are."""
        low, high = self._bounds()
        return high - low

    @property
    def nbytes(self) -> int:
        """Size of their keys and values, about."""
        total = len(self.chunk)
        return self.chunk.nbytes * self.records // total if total else 0

    def split(self, offset: int) -> tuple[FetchedPart, FetchedPart]:
        """The records below an offset, and the others."""
        return replace(self, end=offset), replace(self, start=offset)

    def rows(self, query: QueryRows) -> Iterator[pa.RecordBatch]:
        if self.records:
            yield from query.of([(self.topic_partition, self.taken())])

    def sources(self) -> Sequence[tuple[TopicPartition, RecordColumns]]:
        return [(self.topic_partition, self.taken())]

    def taken(self) -> RecordColumns:
        """The records."""
        low, high = self._bounds()
        return self.chunk.records.slice(low, high)

    def _bounds(self) -> tuple[int, int]:
        offsets = self.chunk.records.offsets
        if self.end >= self.chunk.next_offset and (not len(offsets) or self.start <= offsets[0]):
            return 0, len(offsets)
        low, high = np.searchsorted(offsets, (self.start, self.end)).tolist()
        return low, high


@dataclass(frozen=True)
class MergedParts:
    """Parts of one topic whose rows are made at once, because each call of Spark costs milliseconds."""

    parts: Sequence[FetchedPart]

    def rows(self, query: QueryRows) -> Iterator[pa.RecordBatch]:
        yield from query.of(self.sources())

    def sources(self) -> Sequence[tuple[TopicPartition, RecordColumns]]:
        return [source for part in self.parts for source in part.sources()]


def merged(parts: Sequence[FetchedPart], query: QueryRows) -> Sequence[FetchedPart | MergedParts]:
    """What makes the rows of these parts: those of a partition stay in their order."""
    if len(parts) < 2 or not query.merges:
        return parts
    by_topic: dict[str, list[FetchedPart]] = {}
    for part in parts:
        if part.records:
            by_topic.setdefault(part.topic_partition[0], []).append(part)
    return [MergedParts(each) for each in by_topic.values()]

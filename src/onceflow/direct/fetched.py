"""Consecutive committed records of one partition, as they wait for a batch and become rows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from onceflow.client.column_chunks import ColumnChunk
from onceflow.planning.direct_plan import SOURCE_TYPES, DirectSource
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns

#: Makes rows of a source partition, whose number is the second argument, what the sink or a process step takes.
Finish = Callable[[pa.RecordBatch, int], pa.RecordBatch]


@dataclass(frozen=True)
class FetchedPart:
    """Records of one partition with offsets in ``[start, end)``.

    Args:
        chunk: the records of one response.
        source: the operators that make rows of them.
        finish: see `Finish`.
    """

    place: TopicPartition
    start: int
    end: int
    chunk: ColumnChunk
    source: DirectSource
    finish: Finish

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

    def rows(self) -> Iterator[pa.RecordBatch]:
        low, high = self._bounds()
        if low == high:
            return
        records = self.chunk.records.slice(low, high)
        made = self.source.apply(source_rows(records, self.place, self.source.needed))
        if made.num_rows:
            yield self.finish(made, self.place[1])

    def _bounds(self) -> tuple[int, int]:
        offsets = self.chunk.records.offsets
        if self.end >= self.chunk.next_offset and (not len(offsets) or self.start <= offsets[0]):
            return 0, len(offsets)
        low, high = np.searchsorted(offsets, (self.start, self.end)).tolist()
        return low, high


def source_rows(records: RecordColumns, place: TopicPartition, needed: Sequence[str]) -> pa.RecordBatch:
    """Records with the columns of Spark's Kafka source, see ``direct_plan.SOURCE_TYPES``.

    Args:
        needed: names of the columns that are wanted.
    """
    made: dict[str, Callable[[], pa.Array]] = {
        "key": lambda: records.keys,
        "value": lambda: records.values,
        "topic": lambda: pa.repeat(pa.scalar(place[0], pa.string()), len(records)),
        "partition": lambda: pa.repeat(pa.scalar(place[1], pa.int32()), len(records)),
        "offset": lambda: pa.array(records.offsets),
        "timestamp": lambda: pa.array(records.timestamps_ms * 1000).view(SOURCE_TYPES["timestamp"]),
        "timestampType": lambda: pa.array(records.timestamp_types),
        "headers": lambda: records.headers,
    }
    return pa.RecordBatch.from_arrays([made[name]() for name in needed], names=list(needed))

"""Reads everything in the log of one partition: all records, with their producer ids, and transaction markers.

A read_committed consumer stops at the last stable offset, which an open transaction of another producer may hold back.
A flow that starts must not wait for other flows that share the progress topic. It need not: its own transactions are
decided, because InitProducerId has returned, so their markers are in the log below the high watermark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.fetching import READ_UNCOMMITTED, PartitionFetch
from onceflow.errors import DataLossError
from onceflow.protocol.decode import COMMIT, HeaderList, RawBatch


@dataclass(frozen=True)
class LogRecord:
    """One data record, with the producer id of its transaction (-1: it is in none)."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    producer_id: int
    producer_epoch: int
    headers: HeaderList = field(default_factory=list)


@dataclass(frozen=True)
class Marker:
    """A transaction marker: how a producer's transaction ended."""

    offset: int
    producer_id: int
    producer_epoch: int
    committed: bool


def read_log(
    cluster: Cluster, topic: str, partition: int, start: int, end: int, deadline: Deadline
) -> Iterator[LogRecord | Marker]:
    """All records and markers in ``[start, end)``, including undecided and aborted ones, in order of offsets.

    A request is sent even for an empty range: if READ on the topic is missing, the error is raised now, and not at a
    later start that has to read.
    """
    read = _LogRead(cluster, topic, partition, start, end, deadline)
    while read.position < end or not read.answered:
        yield from read.step()


class _LogRead(PartitionFetch[LogRecord | Marker]):
    isolation_level = READ_UNCOMMITTED

    def _items(self, batches: Iterator[RawBatch], answer: Any) -> Iterator[LogRecord | Marker]:
        if self.position >= self.end:
            return
        for raw in batches:
            for item in _records(raw):
                if item.offset >= self.end:
                    self.position = self.end
                    return
                if item.offset >= self.position:
                    yield item
                    self.position = item.offset + 1
            # Compaction may have removed the last records of a batch; the batch still extends to its last offset.
            self.position = max(self.position, raw.last_offset + 1)

    def _stalled(self, *, empty: bool) -> None:
        if self.position < self.end:
            self._wait(f"no progress at offset {self.position}")

    def _out_of_range(self, answer: Any) -> str:
        raise DataLossError(
            f"Offset {self.position} of {self.name} is no longer in the log",
            topic=self.name,
            detail=f"the log starts at {answer.log_start_offset}",
            next_step="start again; the log was cleaned while it was being read",
        )


def _records(raw: RawBatch) -> Iterator[LogRecord | Marker]:
    batch = raw.decode()
    offsets = batch.offsets.tolist()
    if batch.control:
        if batch.marker is not None:
            yield Marker(offsets[0], batch.producer_id, batch.producer_epoch, batch.marker == COMMIT)
        return
    producer_id = batch.producer_id if batch.transactional else -1
    columns = zip(offsets, batch.keys, batch.values, batch.timestamps_ms.tolist(), strict=True)
    for row, (offset, key, value, timestamp_ms) in enumerate(columns):
        yield LogRecord(
            offset, key, value, timestamp_ms, producer_id, batch.producer_epoch, batch.headers.get(row) or []
        )

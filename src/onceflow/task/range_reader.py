"""Reads the source ranges of a batch in a task: many partitions together, and ahead of what is being written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll
from onceflow.client.settings import ClientSettings
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.task.row_writer import worker_cluster
from onceflow.task.source_rows import QueryRows, expired, joined

_FETCH_BYTES = 4_000_000
# Of one partition in a response. Without it, a response would have one partition only, and mostly records that are
# behind the end of its range.
_PARTITION_BYTES = 256_000
_WAIT_S = 0.5
#: First offset, and the offset behind the last one.
Range = tuple[int, int]


@dataclass(frozen=True)
class ReadOrder:
    """All that tasks need to read a batch by themselves. All records in the ranges are decided: they are below the last
    stable offset.

    Args:
        ranges: of each task, by partition.
        topic_ids: of the source topics, as the driver has seen them.
        query: makes rows of the records.
        deadline_s: how long a task may wait without getting any records.
    """

    flow: str
    settings: ClientSettings
    ranges: tuple[Mapping[TopicPartition, Range], ...]
    topic_ids: Mapping[str, str]
    query: QueryRows
    deadline_s: float

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self.ranges)


class RangeReader:
    """Reads the part of one task.

    Args:
        cluster: connections that only readers use: a Fetch that waits would hold up others.

    Attributes:
        records: how many were read so far, by topic.
    """

    def __init__(self, order: ReadOrder, task: int, cluster: Cluster) -> None:
        self._order = order
        self._ends = {
            topic_partition: end for topic_partition, (start, end) in order.ranges[task].items() if start < end
        }
        self._starts = {each: order.ranges[task][each][0] for each in self._ends}
        self._cluster = cluster
        self.records: dict[str, int] = {}

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The rows that become of the records.

        Raises:
            OnceflowError: see `parts`, and `QueryRows.of`.
        """
        return joined(rows for part in self.parts() for rows in self._order.query.of([part]))

    def parts(self) -> Iterator[tuple[TopicPartition, RecordColumns]]:
        """The committed records, those of a partition in the order of its log. While the caller works on the records
        of one response, brokers prepare the next one.

        Raises:
            DataLossError: records have expired before they were read.
            DeadlineExceededError: there was no progress.
            OnceflowError: see `LongPoll.poll`.
        """
        if not self._ends:
            return
        left = dict(self._ends)
        deadline = self._deadline(len(left))
        poll = self._poll(deadline)
        while left:
            arrived = list(poll.poll(deadline.capped(_WAIT_S)))
            for topic_partition, chunk in arrived:
                if chunk.next_offset >= self._ends[topic_partition] and topic_partition in left:
                    poll.remove(*topic_partition)
                    del left[topic_partition]
            if left:
                poll.send()
            for topic_partition, chunk in arrived:
                records = self._in_range(topic_partition, chunk)
                if len(records):
                    yield topic_partition, records
            if arrived:
                deadline = self._deadline(len(left))
            elif deadline.expired:
                (topic, partition) = next(iter(left))
                raise deadline.error(f"no records of {topic}-{partition} have come")

    def _deadline(self, partitions: int) -> Deadline:
        return Deadline(self._order.deadline_s, f"reading {partitions} source partitions (flow {self._order.flow})")

    def _poll(self, deadline: Deadline) -> LongPoll[ColumnChunk]:
        infos = []
        for name in sorted({topic for topic, _ in self._starts}):
            info = self._cluster.topic(name, deadline, patient=True, leaderless=True)
            wanted = {partition for topic, partition in self._starts if topic == name}
            if info.topic_id != self._order.topic_ids[name] or not wanted <= set(info.leaders):
                info = self._cluster.topic(name, deadline, fresh=True, patient=True, leaderless=True)
            info.check_same(self._order.topic_ids[name])
            infos.append(info)
        headers = any(source.include_headers for source in self._order.query.program.reads.values())
        return LongPoll(
            self._cluster,
            infos,
            self._starts,
            ColumnForm(headers=headers),
            fetch_bytes=_FETCH_BYTES,
            partition_bytes=max(_PARTITION_BYTES, _FETCH_BYTES // len(self._starts)),
        )

    def _in_range(self, topic_partition: TopicPartition, chunk: ColumnChunk) -> RecordColumns:
        """The records of a chunk that belong to the range: a response has whole record batches, which end later."""
        if chunk.expired_from is not None:
            end = min(chunk.next_offset, self._ends[topic_partition])
            may_lose = not self._order.query.program.reads[topic_partition[0]].fail_on_data_loss
            expired(topic_partition, chunk.expired_from, end, may_lose=may_lose, flow=self._order.flow)
        records = chunk.records
        if chunk.next_offset > self._ends[topic_partition]:
            records = records.slice(0, int(np.searchsorted(records.offsets, self._ends[topic_partition])))
        self.records[topic_partition[0]] = self.records.get(topic_partition[0], 0) + len(records)
        return records


def reader_cluster(settings: ClientSettings) -> Cluster:
    """The connections of this worker process for its readers."""
    return worker_cluster(settings, use="read")

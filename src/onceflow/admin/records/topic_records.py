"""Writes and reads records of a topic without a flow: for ``onceflow produce`` and ``onceflow consume``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from onceflow.admin.records.writer import Row, Writer
from onceflow.client.cluster import Cluster
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.topics import find_topics, topic_limits
from onceflow.client.transaction_requests import idempotent_producer
from onceflow.errors import BadRecordError, OptionError
from onceflow.protocol.batches import encode_single, too_large
from onceflow.protocol.compression import CODECS
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.partitioners import group_by_partition, key_partitions
from onceflow.state.api.record import Record

_CALL_S = 60.0
_LOOK_S = 0.1
FETCH_BYTES = 1_000_000
_RECORD_OVERHEAD_BYTES, _HEADER_OVERHEAD_BYTES = 200, 10  # upper bounds of what the format needs


class TopicWriter:
    """Writes records to one topic, each to the partition that the Java client would choose for its key.

    That is murmur2 of the key; records without a key go to the partitions in turn. The producer is idempotent: its
    own retries neither duplicate nor reorder records. There is no transaction: records are visible at once.

    Raises:
        UnknownTopicError: there is no such topic.
        OptionError: it is an internal topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self.written = 0
        self.unconfirmed = 0  # records of a `write` that has not returned: none, some or all of them are written
        refusal = OwnTopics().refusal(topic)
        if refusal:
            raise OptionError(
                f"Nothing may be written to {topic}, which {refusal}",
                topic=topic,
                next_step="write to a topic of your own",
            )
        deadline = Deadline(_CALL_S, f"preparing to write to {topic}")
        self._partitions = find_topics(cluster, {topic: ""}, deadline, needs="WRITE")[topic].partitions
        self._limits = topic_limits(cluster, [topic], deadline)
        self._identity = idempotent_producer(cluster, deadline)
        self._sequences: dict[tuple[str, int], int] = {}
        self._turn = 0

    def check(self, record: Record) -> None:
        """Check that the topic accepts a record of this size.

        Raises:
            BadRecordError: it is larger than ``max.message.bytes``.
        """
        sizes = [len(record.key or b"") + len(record.value or b"") + _RECORD_OVERHEAD_BYTES]
        sizes += [len(name.encode()) + len(value or b"") + _HEADER_OVERHEAD_BYTES for name, value in record.headers]
        limits = self._limits[self._topic]
        limit = limits.max_message_bytes
        if sum(sizes) > limit:  # the sum is an upper bound, so encode the record to be sure
            encoded = encode_single(
                record.key, record.value, record.headers, timestamp_ms=0, identity=self._identity, base_sequence=0
            )
            given = record.key, record.value, list(record.headers)
            if encoded.nbytes > limit and all(
                too_large(*given, compression=codec, max_batch_bytes=limit, stored=limits.stored) for codec in CODECS
            ):
                raise BadRecordError(
                    f"the record takes {encoded.nbytes:,} bytes, the topic at most {limit:,} (max.message.bytes)",
                    topic=self._topic,
                )

    def write(self, records: Sequence[Record]) -> None:
        """Write records with key, value, headers and timestamp. Returns when all are acknowledged.

        Raises:
            OnceflowError: none, some or all of these records are written. `unconfirmed` counts them, not `written`.
        """
        if not records:
            return
        self.unconfirmed = len(records)
        deadline = Deadline(_CALL_S, f"writing to {self._topic}")
        places = key_partitions(pa.array([record.key for record in records], pa.large_binary()), self._partitions)
        open_places = np.flatnonzero(places < 0)
        places[open_places] = (self._turn + np.arange(len(open_places))) % self._partitions
        self._turn += len(open_places)
        writer = Writer(self._cluster, self._identity, self._limits, deadline, sequences=self._sequences)
        for partition, rows in group_by_partition(places, self._partitions):
            found = [records[row] for row in rows.tolist()]
            writer.write(self._topic, partition, [(record.key, _row(record)) for record in found])
        writer.finish()
        self.unconfirmed = 0
        self.written += len(records)


def read(
    cluster: Cluster,
    topic: str,
    *,
    start: int = EARLIEST,
    partition: int | None = None,
    follow: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Iterator[list[Record]]:
    """Committed records up to the current last stable offsets, or without end. Each list is from one partition, in
    order.

    Args:
        start: where to begin in each partition: ``EARLIEST``, ``LATEST``, or an offset.
        partition: read only this one. None: all; with ``follow`` also partitions that are added later.
        follow: whether to wait for more records.
        check: called repeatedly; an exception that it raises ends the reading.

    Raises:
        UnknownTopicError: there is no such topic. OptionError: it has no such partition.
        OnceflowError: the brokers do not answer, or refuse a request.
    """
    reader = CommittedReader(cluster, fetch_bytes=FETCH_BYTES)
    positions: dict[int, int] = {}
    while True:
        deadline = Deadline(_CALL_S, f"reading {topic}")
        ends = stable_offsets(cluster, topic, partition, deadline)
        if not positions:
            positions = _positions(cluster, topic, start, ends, deadline)
        found = False
        for number, end in ends.items():
            for chunk in reader.read(topic, number, positions.get(number, 0), end):
                check()
                positions[number] = chunk.next_offset
                if chunk.keys:
                    found = True
                    yield records_of(chunk, topic, number)
        if not follow:
            return
        check()
        if not found:
            time.sleep(_LOOK_S)


def stable_offsets(
    cluster: Cluster, topic: str, wanted: int | Sequence[int] | None, deadline: Deadline
) -> dict[int, int]:
    """Last stable offsets, by partition.

    Args:
        wanted: only this partition, or these; None: all.

    Raises:
        UnknownTopicError: there is no such topic. OptionError: it has no such partition.
    """
    there = sorted(find_topics(cluster, {topic: ""}, deadline)[topic].leaders)
    numbers = there if wanted is None else [wanted] if isinstance(wanted, int) else sorted(set(wanted))
    for number in numbers:
        if number not in there:
            raise OptionError(
                f"Topic {topic} has no partition {number}",
                topic=topic,
                next_step=f"it has {len(there)}, counted from 0",
            )
    span = {topic: numbers}
    return dict(sorted(list_offsets(cluster, span, LATEST, deadline)[topic].items()))


def held_back(cluster: Cluster, topic: str, stable: Mapping[int, int]) -> dict[int, int]:
    """How many offsets of each partition are held back by an open transaction. Partitions with none are left out.

    Args:
        stable: the last stable offsets.
    """
    deadline = Deadline(_CALL_S, f"reading the end offsets of {topic}")
    ends = list_offsets(cluster, {topic: sorted(stable)}, LATEST, deadline, committed=False)[topic]
    return {number: ends[number] - offset for number, offset in stable.items() if ends[number] > offset}


def _positions(cluster: Cluster, topic: str, start: int, ends: Mapping[int, int], deadline: Deadline) -> dict[int, int]:
    if start == LATEST:
        return dict(ends)
    if start == EARLIEST:
        return list_offsets(cluster, {topic: sorted(ends)}, EARLIEST, deadline)[topic]
    return dict.fromkeys(ends, start)


def records_of(chunk: Chunk, topic: str, partition: int) -> list[Record]:
    """The records of a chunk that was read from a partition."""
    rows = zip(chunk.keys, chunk.values, chunk.timestamps_ms.tolist(), chunk.offsets.tolist(), strict=True)
    return [
        Record(key, value, topic, chunk.headers.get(row, ()), stamp, partition, offset)
        for row, (key, value, stamp, offset) in enumerate(rows)
    ]


def _row(record: Record) -> Row:
    # A negative timestamp stands for the time of writing.
    return Row(record.value, -1 if record.timestamp_ms is None else record.timestamp_ms, list(record.headers) or None)

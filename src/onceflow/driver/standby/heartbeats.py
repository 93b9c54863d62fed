"""The topic of heartbeats: created, written, and followed."""

from __future__ import annotations

import time
from collections.abc import Iterator

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.long_poll import LongPoll
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.produce import Producer
from onceflow.client.topics import create_own_topic, find_topic
from onceflow.clock import clock_ms
from onceflow.driver.record.progress_log import PROGRESS_PARTITIONS, partition_of
from onceflow.errors import DataLossError, OnceflowError, ProgressConflictError, UnknownTopicError, counted
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.heartbeats import ENDED, HEARTBEATS_TOPIC, Heartbeat, decode, encode

#: So many offsets before the end are read to learn what was before: more than a minute of ten flows.
TAIL = 2_000
# What a standby knows is at most this old, plus the time between two looks.
_WAIT_MS = 100
_LATELY_MS = 5_000
_CONFIGS = {
    "retention.ms": "3600000",
    "segment.ms": "600000",
    "segment.bytes": str(16 * 1024 * 1024),
    # The time of the broker: the clocks of drivers may differ.
    "message.timestamp.type": "LogAppendTime",
    # One that is lost costs nothing, but one that is refused may cost a needless take-over.
    "min.insync.replicas": "1",
}
# A retry may write a heartbeat twice.
_PLAIN = ProducerIdAndEpoch(-1, -1, transactional=False)


def ensure_topic(cluster: Cluster, deadline: Deadline) -> TopicInfo:
    """The topic of heartbeats, created when it is missing.

    Raises:
        PermissionDeniedError: this principal may not see it; or it is missing and may not be created.
        ProgressConflictError: it has too few partitions.
    """
    info = find_topic(cluster, HEARTBEATS_TOPIC, "READ", deadline) or create_own_topic(
        cluster,
        HEARTBEATS_TOPIC,
        "topic of heartbeats",
        partitions=PROGRESS_PARTITIONS,
        configs=_CONFIGS,
        deadline=deadline,
        policy="delete",
    )
    check_partitions(info)
    return info


def check_partitions(info: TopicInfo) -> None:
    """Refuse a topic of heartbeats that somebody has made with too few partitions.

    Raises:
        ProgressConflictError: it has.
    """
    if info.partitions < PROGRESS_PARTITIONS:
        raise ProgressConflictError(
            f"The topic of heartbeats {HEARTBEATS_TOPIC} has {counted(info.partitions, 'partition')}, but needs "
            f"{PROGRESS_PARTITIONS}",
            topic=HEARTBEATS_TOPIC,
            next_step="delete it: a driver with standby=True that starts makes it anew. Or add partitions: "
            f"kafka-topics.sh --alter --topic {HEARTBEATS_TOPIC} --partitions {PROGRESS_PARTITIONS}",
        )


def write(cluster: Cluster, heartbeat: Heartbeat, deadline: Deadline) -> int:
    """Write a heartbeat. Returns its offset.

    Raises:
        OnceflowError: it was not acknowledged. It may have been written.
    """
    producer = Producer(cluster, transactional_id=None, deadline=deadline)
    place = HEARTBEATS_TOPIC, partition_of(heartbeat.flow)
    key, value = encode(heartbeat)
    producer.send(*place, encode_single(key, value, timestamp_ms=clock_ms(), identity=_PLAIN, base_sequence=-1))
    return producer.flush()[place].base_offset


def read_tail(
    cluster: Cluster, flow: str, deadline: Deadline, *, first: int | None = None
) -> tuple[list[tuple[Heartbeat, int]], int, bool]:
    """The last heartbeats of a flow's drivers.

    Args:
        first: where to begin; None: `TAIL` before the end.

    Returns:
        Each with the time at which the broker has got it, in epoch milliseconds, in order; the end up to which was
        read; and whether there is nothing before it.
    """
    number = partition_of(flow)
    span = {HEARTBEATS_TOPIC: [number]}
    begin = list_offsets(cluster, span, EARLIEST, deadline)[HEARTBEATS_TOPIC][number]
    end = list_offsets(cluster, span, LATEST, deadline, committed=False)[HEARTBEATS_TOPIC][number]
    start = max(begin, end - TAIL if first is None else first)
    found = []
    if start < end:
        for record in read_log(cluster, HEARTBEATS_TOPIC, number, start, end, deadline):
            if isinstance(record, LogRecord) and (each := _of_flow(flow, record.key, record.value)) is not None:
                found.append((each, record.timestamp_ms))
    return found, end, start == begin


def heard_lately(cluster: Cluster, flow: str, deadline: Deadline) -> list[Heartbeat]:
    """The drivers of a flow that live, by their heartbeats and the clock of this machine: for a warning. Empty if this
    cannot be known."""
    try:
        cluster.topics([HEARTBEATS_TOPIC], deadline, once=True)
        found, _, _ = read_tail(cluster, flow, deadline)
    except OnceflowError:  # there is no such topic, or it may not be read
        return []
    last = {heartbeat.driver: (heartbeat, at_ms) for heartbeat, at_ms in found}
    since_ms = clock_ms() - _LATELY_MS
    return [heartbeat for heartbeat, at_ms in last.values() if heartbeat.role != ENDED and at_ms > since_ms]


class Follower:
    """Follows the heartbeats of a flow. One thread owns it, and its cluster.

    Args:
        position: the offset to begin at.

    Attributes:
        read_until: when the topic had no other heartbeats than those that were returned, on the monotonic clock.
        answered_at: when the broker has answered last, on the same clock.
    """

    def __init__(self, cluster: Cluster, flow: str, position: int, deadline: Deadline) -> None:
        self._cluster = cluster
        self._flow = flow
        self._place = HEARTBEATS_TOPIC, partition_of(flow)
        topic = ensure_topic(cluster, deadline)
        self._poll = LongPoll(cluster, [topic], {self._place: position}, max_wait_ms=_WAIT_MS)
        self.read_until = self.answered_at = time.monotonic()

    @property
    def position(self) -> int:
        """The next offset to read."""
        return self._poll.followed[self._place].position

    def poll(self, timeout_s: float) -> Iterator[Heartbeat]:
        """Wait for heartbeats, at most this many seconds, and return what has come.

        Raises:
            DataLossError, UnknownTopicError: records are gone that were not read, or the topic is: follow it anew.
            OnceflowError: the brokers refuse the request.
        """
        for _, chunk in self._poll.poll(timeout_s):
            for key, value in zip(chunk.keys, chunk.values, strict=True):
                if (heartbeat := _of_flow(self._flow, key, value)) is not None:
                    yield heartbeat
        followed = self._poll.followed[self._place]
        if followed.known_at is not None and followed.answered_at is not None:
            self.read_until = max(self.read_until, followed.known_at)
            self.answered_at = followed.answered_at


LOST = (DataLossError, UnknownTopicError)
"""After one of these, a topic has to be followed anew."""


def _of_flow(flow: str, key: bytes | None, value: bytes | None) -> Heartbeat | None:
    heartbeat = decode(key, value)
    return heartbeat if heartbeat is not None and heartbeat.flow == flow else None

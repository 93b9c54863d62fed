"""Reads one partition's log as it is, record batches with their producer ids and markers.

Ordinary consumers stop at the last stable offset, which somebody else's open transaction may hold back.
A flow that starts must not wait for other flows that share the progress topic: its own transactions are
decided (InitProducerId has returned), so their markers are in the log below the high watermark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kafka.protocol.consumer import FetchRequest
from kafka.record import MemoryRecords

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.errors import DataLossError
from onceflow.protocol import codes

_OFFSET_OUT_OF_RANGE = 1
_FETCH_BYTES = 8_000_000
_WAIT_MS = 500


@dataclass(frozen=True)
class LogRecord:
    """One data record, with whose transaction it belongs to (-1: none)."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True)
class Marker:
    """A control record: how a producer's transaction ended."""

    offset: int
    producer_id: int
    producer_epoch: int
    committed: bool


def read_log(
    cluster: Cluster, topic: str, partition: int, start: int, end: int, deadline: Deadline
) -> Iterator[LogRecord | Marker]:
    """Everything in ``[start, end)``, undecided and aborted records too, in offset order.

    An empty range is asked for, too: a missing READ then shows at once, not at the start that needs it.
    """
    position = start
    attempt = 0
    asked = False
    while position < end or not asked:
        problem = ""
        node = cluster.leader(topic, partition, deadline, fresh=attempt > 0)
        wait_ms = _WAIT_MS if position < end else 0
        try:
            response = cluster.exchange(_request(cluster, topic, partition, position, wait_ms), node, deadline)
        except ConnectionFailedError as lost:
            problem = str(lost)
        else:
            answer, problem = _answer(response, f"{topic}-{partition}", position)
            if answer is not None:
                asked = True
                if position >= end:
                    return
                advanced = position
                for item in _items(answer.records):
                    if item.offset >= end:
                        return
                    if item.offset >= position:
                        yield item
                        advanced = item.offset + 1
                # A compacted batch may hold nothing at its end; its last offset still counts.
                advanced = max(advanced, _last_offset(answer.records) + 1)
                if advanced > position:
                    position, attempt = advanced, 0
                    continue
                problem = f"no progress at offset {position}"
        deadline.pause(attempt, f"Fetch {topic}-{partition}: {problem}")
        attempt += 1


def _answer(response: Any, name: str, position: int) -> tuple[Any, str]:
    """The partition's part of a response; or None, and a problem that may pass."""
    if not response.error_code and not response.responses:
        return None, "the broker throttles this client"  # it answers with no partition at all
    answer = response.responses[0].partitions[0] if response.responses else None
    row = codes.describe(int(response.error_code) if answer is None else int(answer.error_code))
    if row.code == _OFFSET_OUT_OF_RANGE and answer is not None:
        raise DataLossError(
            f"Offset {position} of {name} is gone",
            topic=name,
            detail=f"the log starts at {answer.log_start_offset}",
            next_step="start again; the log was cleaned while it was being read",
        )
    if row.verdict is codes.Verdict.OK:
        return answer, ""
    if row.verdict.retriable:
        return None, row.name
    raise codes.error_for(row.code, api="Fetch", topic=name)


def _request(cluster: Cluster, topic: str, partition: int, position: int, wait_ms: int) -> Any:
    topic_type = FetchRequest.FetchTopic
    return FetchRequest(
        version=cluster.version(FetchRequest, least=11, most=11),
        replica_id=-1,
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=_FETCH_BYTES,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[
            topic_type(
                topic=topic,
                partitions=[
                    topic_type.FetchPartition(
                        partition=partition,
                        current_leader_epoch=-1,
                        fetch_offset=position,
                        log_start_offset=-1,
                        partition_max_bytes=_FETCH_BYTES,
                    )
                ],
            )
        ],
        forgotten_topics_data=[],
        rack_id="",
    )


def _items(raw: Any) -> Iterator[LogRecord | Marker]:
    records = MemoryRecords(bytes(raw or b""))
    while True:
        batch = records.next_batch()
        if batch is None:
            return
        if batch.is_control_batch:
            for record in batch:
                # Control record key: version int16, type int16 (0 abort, 1 commit).
                kind = int.from_bytes(record.key[2:4], "big")
                if kind in (0, 1):
                    yield Marker(record.offset, batch.producer_id, batch.producer_epoch, kind == 1)
            continue
        producer_id = batch.producer_id if batch.is_transactional else -1
        for record in batch:
            yield LogRecord(
                record.offset, record.key, record.value, record.timestamp, producer_id, batch.producer_epoch
            )


def _last_offset(raw: Any) -> int:
    records = MemoryRecords(bytes(raw or b""))
    last = -1
    while True:
        batch = records.next_batch()
        if batch is None:
            return last
        last = batch.base_offset + batch.last_offset_delta

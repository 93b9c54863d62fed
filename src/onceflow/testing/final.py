"""Reads the topics of a flow when its drivers have ended: the last part of a history, see ``testing/recorder.py``."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from onceflow.driver.record import progress_log
from onceflow.errors import OnceflowError
from onceflow.protocol import progress as records
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent
from onceflow.testing.history import Final, Reads
from onceflow.testing.observed import HEADER, TopicOffsets

Replay = Callable[[Iterable[independent.Seen]], Mapping[Any, Any]]
"""Computes from source records the state that they lead to."""


def read_final(
    bootstrap_servers: str,
    flow: str,
    sources: Iterable[str],
    outputs: Iterable[str],
    options: Mapping[str, str] | None = None,
    *,
    seconds: float = 120.0,
    start: TopicOffsets | None = None,
    progress_key: str | None = None,
    table: str | None = None,
    replay: Replay | Mapping[Any, Any] | None = None,
    state_value: Callable[[bytes], Any] = bytes,
) -> Final:
    """Read everything with librdkafka at read_committed. The drivers must have ended.

    Args:
        options: options of librdkafka for the connection.
        seconds: limit for the whole read. It waits for the end of transactions that a killed driver left open.
        start: offsets from which on source records are read. By default this is where the flow started; then no output
            may have been deleted since that start.
        progress_key: key of the flow's progress record, when the flow has a prefix.
        table: topic of a table of the flow. replay: the state that this table must have, or a function that computes
            it from the source records. state_value: decodes a value of the table.
    """
    reader = _Reader(bootstrap_servers, options, seconds)
    reads, seen = Reads(), _Sources(keep=callable(replay))
    state: dict[Any, Any] | None = None
    progress: list[tuple[int, TopicOffsets]] = []
    try:
        progress = reader.progress(progress_key or flow)
        first = progress[0][1] if progress else {}
        for topic in sources:
            wanted = {**first.get(topic, {}), **({} if start is None else start.get(topic, {}))}
            for message in reader.records(topic, begins={p: wanted.get(p, 0) for p in reader.partitions(topic)}):
                seen.add(topic, message)
        for topic in outputs:
            begins = dict.fromkeys(reader.partitions(topic), 0)
            for message in reader.records(topic, begins=begins if start is None else {}):
                reads.add(topic, message.partition(), message.offset(), message.key(), _tag(message))
        if table is not None:
            state = _last_values(reader.records(table), state_value)
        moved = progress != reader.progress(progress_key or flow)
        why = "the flow is running: its progress moved during the read" if moved else ""
    except (TimeoutError, RuntimeError, KafkaException, OnceflowError) as error:
        why = str(error)
    finally:
        reader.close()
    made = replay(seen.covered(progress)) if callable(replay) else replay
    return Final(flow, reads, progress, seen.offsets(), not why, why, state, made)


def _tag(message: Any) -> bytes | None:
    return next((value for name, value in message.headers() or () if name == HEADER), None)


def _last_values(messages: Iterable[Any], decode: Callable[[bytes], Any]) -> dict[Any, Any]:
    """The last value of each key, in the order of their offsets; deleted keys are not in it.

    A key that has moved to another partition (`onceflow table repartition`) is deleted in the one where it was, which
    may be read last.
    """
    state: dict[Any, dict[Any, Any]] = {}
    for message in messages:
        rows = state.setdefault(message.partition(), {})
        rows.pop(message.key(), None)
        if message.value() is not None:
            rows[message.key()] = decode(message.value())
    return {key: value for rows in state.values() for key, value in rows.items()}


class _Sources:
    """Offsets of the source records, and the records themselves if they are needed."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._offsets: dict[TopicPartition, array[int]] = {}
        self._kept: list[independent.Seen] = []

    def add(self, topic: str, message: Any) -> None:
        self._offsets.setdefault((topic, message.partition()), array("q")).append(message.offset())
        if self._keep:
            self._kept.append(independent._seen(message))

    def offsets(self) -> dict[TopicPartition, Any]:
        return {place: np.frombuffer(offsets, np.int64) for place, offsets in self._offsets.items()}

    def covered(self, progress: list[tuple[int, TopicOffsets]]) -> list[independent.Seen]:
        """The records that the flow has processed, each partition in order."""
        ends = progress[-1][1] if progress else {}
        return [seen for seen in self._kept if seen.offset < ends.get(seen.topic, {}).get(seen.partition, 0)]


class _Reader:
    """Reads committed records of topics up to their current ends. To be closed."""

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str] | None, seconds: float) -> None:
        self._connection = bootstrap_servers, options
        self._asking = self._consumer("read_uncommitted")  # its end offsets include open transactions
        self._end = time.monotonic() + seconds

    def close(self) -> None:
        self._asking.close()

    def partitions(self, topic: str) -> list[int]:
        """Raises ``RuntimeError`` when there is no such topic."""
        found = self._asking.list_topics(topic, timeout=self._left(topic)).topics[topic]
        if found.error is not None or not found.partitions:
            raise RuntimeError(f"topic {topic}: {found.error or 'it has no partitions'}")
        return sorted(found.partitions)

    def progress(self, key: str) -> list[tuple[int, TopicOffsets]]:
        """Batch and end offsets of the flow's progress records since its last reset."""
        found: list[tuple[int, TopicOffsets]] = []
        for message in self.records(PROGRESS_TOPIC, [progress_log.partition_of(key)]):
            if message.key() == key.encode() and message.value() is None:
                found = []
            elif message.key() == key.encode():
                record = records.decode(message.key(), message.value())
                found.append((record.batch_id, record.offsets))
        return found

    def records(
        self, topic: str, partitions: Iterable[int] | None = None, *, begins: Mapping[int, int] | None = None
    ) -> Iterator[Any]:
        """Committed records. Waits for open transactions before the end: a decided commit may not be visible yet.

        Args:
            begins: offsets from which on nothing may have been deleted.

        Raises:
            TimeoutError: the end was not reached. RuntimeError: something was deleted, or cannot be read.
        """
        there = self.partitions(topic)
        lows, ends = dict[int, int](), dict[int, int]()
        for partition in there if partitions is None else partitions:
            place = ClientPartition(topic, partition)
            low, high = self._asking.get_watermark_offsets(place, timeout=self._left(topic))
            if begins is not None and low > begins.get(partition, low):
                raise RuntimeError(f"records of {topic}-{partition} before offset {low} were deleted")
            if low < high:
                lows[partition], ends[partition] = low, high
        waiting = set(ends)
        # A new consumer for each topic: after another assign() a consumer may return positions of before.
        consumer = self._consumer("read_committed")
        try:
            consumer.assign([ClientPartition(topic, partition, low) for partition, low in lows.items()])
            while waiting:
                self._left(topic)
                for message in consumer.consume(10_000, 0.02):
                    if message.error() is not None:
                        raise RuntimeError(f"{topic}: {message.error()}")
                    if message.offset() < ends[message.partition()]:
                        yield message
                # The position moves over control records and aborted data, too.
                for place in consumer.position([ClientPartition(topic, p) for p in waiting]):
                    if place.offset >= ends[place.partition]:
                        waiting.discard(place.partition)
        finally:
            consumer.close()

    def _consumer(self, isolation: str) -> Any:
        return independent._consumer(self._connection[0], isolation, self._connection[1])

    def _left(self, topic: str) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{topic} was not read to its end in time")
        return left

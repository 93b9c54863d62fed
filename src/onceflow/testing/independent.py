"""Reads and fills topics with confluent-kafka (librdkafka), without any code of onceflow's own clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

_NEW_LEADER = (
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
)
# A new client waits for a part of the default before its second connection, which costs 40 ms.
_SOON = {"reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 200}


@dataclass(frozen=True)
class Seen:
    """One record as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


def read_topic(
    bootstrap_servers: str,
    topic: str,
    *,
    isolation: str = "read_committed",
    decided: bool = False,
    seconds: float = 60.0,
    options: Mapping[str, str] | None = None,
) -> list[Seen]:
    """Every committed record of a topic, up to its end as of now.

    Args:
        decided: True: read up to the high watermark, and wait for open transactions before it. A commit is decided
            shortly before its markers are in every partition, so a reader that wants to see it must wait. False:
            read up to the last stable offset, which is what read_committed readers see at this moment.

    Raises:
        TimeoutError: the end was not reached in time.
    """
    consumer = _consumer(bootstrap_servers, isolation, options)
    try:
        partitions = sorted(consumer.list_topics(topic, timeout=seconds).topics[topic].partitions)
        # For a read_committed consumer the high end of get_watermark_offsets is the last stable offset.
        spans = {p: watermarks(consumer, topic, p, seconds) for p in partitions}
        if decided:
            highs = end_offsets(bootstrap_servers, topic, isolation="read_uncommitted", options=options)
            spans = {p: (low, highs[topic, p]) for p, (low, _) in spans.items()}
        waiting = {p for p, (low, high) in spans.items() if low < high}
        consumer.assign([TopicPartition(topic, p, spans[p][0]) for p in sorted(waiting)])
        records: list[Seen] = []
        end = time.monotonic() + seconds
        while waiting:
            if time.monotonic() > end:
                raise TimeoutError(f"{topic}: partitions {sorted(waiting)} were not read to their end in {seconds} s")
            for message in consumer.consume(10_000, 0.02):
                if message.error() is not None:
                    raise RuntimeError(f"{topic}: {message.error()}")
                if int(message.offset() or 0) < spans[int(message.partition() or 0)][1]:
                    records.append(_seen(message))
            # The position moves over control records and aborted data, too.
            for place in consumer.position([TopicPartition(topic, p) for p in waiting]):
                if place.offset >= spans[place.partition][1]:
                    waiting.discard(place.partition)
        return records
    finally:
        consumer.close()


def _consumer(bootstrap_servers: str, isolation: str, options: Mapping[str, str] | None) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "onceflow-independent",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            "log_level": 0,
            "auto.offset.reset": "error",
            # A first request for an empty partition only would delay the others.
            "fetch.wait.max.ms": 20,
            **_SOON,
            **(options or {}),
        }
    )


def _seen(message: Any) -> Seen:
    return Seen(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=tuple(message.headers() or ()),
        timestamp_ms=message.timestamp()[1],
    )


def fill(
    bootstrap_servers: str,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None]],
    *,
    options: Mapping[str, str] | None = None,
) -> int:
    """Produce pairs of key and value with the Java client's partitioner, and return how many there were.

    Raises:
        RuntimeError: a record was refused. TimeoutError: not all were delivered in time.
    """
    producer = _producer_for(bootstrap_servers, topic, tuple(sorted((options or {}).items())))
    refused: list[str] = []

    def failed(error: KafkaError | None, _: Any) -> None:
        refused.append(str(error))

    count = 0
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=failed)
                break
            except BufferError:
                producer.poll(0.05)
        count += 1
    left = producer.flush(60)
    if left:
        raise TimeoutError(f"{left} records were not delivered to {topic}")
    if refused:
        raise RuntimeError(f"{topic}: {len(refused)} of {count} records were refused: {refused[0]}")
    return count


def _producer_for(bootstrap_servers: str, topic: str, options: tuple[tuple[str, str], ...]) -> Producer:
    """A producer that knows the topic's partition count. A query updates it if the count grows, but not if it falls."""
    while True:
        producer, known = _producer(bootstrap_servers, options)
        count = len(producer.list_topics(topic, timeout=60).topics[topic].partitions)
        if count >= known.get(topic, 0):
            known[topic] = count
            return producer
        _producer.cache_clear()  # the topic was deleted and made again


@lru_cache(maxsize=4)
def _producer(bootstrap_servers: str, options: tuple[tuple[str, str], ...]) -> tuple[Producer, dict[str, int]]:
    """A producer for all calls, because an idempotent producer of librdkafka waits half a second for its id.

    Also returns how many partitions the topics had when it was last asked.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 20,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
            # Tests stop brokers: reconnect soon when they are back.
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            **dict(options),
        },
        logger=logging.getLogger("onceflow.testing.librdkafka"),
    )
    return producer, {}


def committed_offsets(
    bootstrap_servers: str, group: str, *, options: Mapping[str, str] | None = None
) -> dict[tuple[str, int], int]:
    """The committed offset of each (topic, partition) of a group, as group tools show it."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0, **_SOON, **(options or {})})
    futures = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    result = futures[group].result(timeout=30)
    return {(p.topic, p.partition): p.offset for p in result.topic_partitions if p.offset >= 0}


def end_offsets(
    bootstrap_servers: str,
    topic: str,
    *,
    isolation: str = "read_committed",
    options: Mapping[str, str] | None = None,
) -> dict[tuple[str, int], int]:
    """Where every partition ends: its last stable offset, or for read_uncommitted its high watermark."""
    consumer = _consumer(bootstrap_servers, isolation, options)
    try:
        partitions = sorted(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        return {(topic, p): watermarks(consumer, topic, p, 30)[1] for p in partitions}
    finally:
        consumer.close()


def watermarks(consumer: Consumer, topic: str, partition: int, seconds: float) -> tuple[int, int]:
    """First and end offset of a partition. Retries, because a new leader does not know the end at once.

    Raises:
        KafkaException: there was no answer in time.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=seconds)
            return int(low), int(high)
        except KafkaException as error:
            if (not error.args[0].retriable() and error.args[0].code() not in _NEW_LEADER) or time.monotonic() > end:
                raise
            time.sleep(0.1)

"""Reads topics and group offsets with librdkafka: a client that shares no code with onceflow or Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from onceflow.client.deadline import Deadline
from onceflow.errors import BrokerUnreachableError
from onceflow_workshop.demos.audit import Message

_CHUNK = 10_000
_CALL_S = 5.0
# A broker that has just started, or just got a group, says so while it loads the group's offsets. It passes by itself.
_COORDINATOR_MOVES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError._WAIT_COORD,
)
_quiet = logging.getLogger("onceflow_workshop.demos.librdkafka")


def read_topic(
    bootstrap_servers: str, topic: str, deadline: Deadline, *, isolation: str = "read_committed"
) -> Iterator[Message]:
    """All records of a topic, from the beginning to the end it has now, in offset order per partition.

    Raises:
        BrokerUnreachableError: a consumer error, or the end was not reached before the deadline.
    """
    consumer = _consumer(bootstrap_servers, "onceflow-demo-audit", isolation)
    try:
        metadata = consumer.list_topics(topic, timeout=_CALL_S).topics[topic]
        unread = set(metadata.partitions)
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in unread])
        while unread:
            if deadline.expired:
                raise _unreadable(topic, f"partitions {sorted(unread)} were not read to their end")
            for message in consumer.consume(_CHUNK, timeout=0.2):
                error = message.error()
                if error is None:
                    headers = tuple((name, value) for name, value in message.headers() or ())
                    yield Message(message.partition(), message.offset(), message.key(), message.value(), headers)
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(message.partition())
                elif not error.retriable():
                    raise _unreadable(topic, str(error))
    finally:
        consumer.close()


class GroupLag:
    """How far a consumer group is through its topics.

    Args:
        group: whose committed offsets are looked at; nothing is consumed.
        partitions: topics and how many partitions they have.
    """

    def __init__(self, bootstrap_servers: str, group: str, partitions: Mapping[str, int]) -> None:
        # With read_committed the offset fetch would block while an offset commit is pending in a transaction.
        self._consumer = _consumer(bootstrap_servers, group, "read_uncommitted")
        self._span = [TopicPartition(topic, at) for topic, count in partitions.items() for at in range(count)]

    def read(self) -> tuple[int, int] | None:
        """(committed, end): sums of the group's offsets and of the log end offsets, over all partitions.

        None: the group has no coordinator at this moment; look again later.

        Raises:
            KafkaException: the broker did not answer.
        """
        try:
            committed = self._consumer.committed(self._span, timeout=_CALL_S)
        except KafkaException as problem:
            if problem.args[0].code() in _COORDINATOR_MOVES:
                return None
            raise
        ends = [self._consumer.get_watermark_offsets(place, timeout=_CALL_S)[1] for place in self._span]
        return sum(max(0, place.offset) for place in committed), sum(ends)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()


class Tally:
    """Counts the committed records of topics, again and again without reading them twice.

    Args:
        partitions: topics and how many partitions they have.
    """

    def __init__(self, bootstrap_servers: str, partitions: Mapping[str, int]) -> None:
        self._consumer = _consumer(bootstrap_servers, "onceflow-demo-tally", "read_committed")
        places = [
            TopicPartition(name, at, OFFSET_BEGINNING) for name, count in partitions.items() for at in range(count)
        ]
        self._consumer.assign(places)
        self.counts = dict.fromkeys(partitions, 0)
        self._changed_at = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """For how long looks have found nothing new."""
        return time.monotonic() - self._changed_at

    def look(self, deadline: Deadline) -> Mapping[str, int]:
        """The counts, up to the ends that the topics have now.

        Raises:
            BrokerUnreachableError: a consumer error.
        """
        while not deadline.expired:
            found = self._consumer.consume(_CHUNK, timeout=0.3)
            for message in found:
                error = message.error()
                if error is None:
                    self.counts[message.topic()] += 1
                    self._changed_at = time.monotonic()
                elif error.code() != KafkaError._PARTITION_EOF and not error.retriable():
                    raise _unreadable(message.topic(), str(error))
            if not found:
                break
        return self.counts

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()


def _consumer(bootstrap_servers: str, group: str, isolation: str) -> Any:
    options = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group,
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        # An audit must not jump over records that it cannot find.
        "auto.offset.reset": "error",
        "log_level": 0,
    }
    return Consumer(options, logger=_quiet)


def _unreadable(topic: str, detail: str) -> BrokerUnreachableError:
    return BrokerUnreachableError(
        f"Topic {topic} could not be read to its end",
        topic=topic,
        detail=detail,
        next_step="see whether the broker still runs and has memory and disk; then run the demo again",
    )

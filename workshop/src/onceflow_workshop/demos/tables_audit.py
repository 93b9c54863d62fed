"""Reads the topic of a table all the time, and holds every answer against the fold of it."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any

import confluent_kafka.admin
from confluent_kafka import OFFSET_BEGINNING, Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition

from onceflow.errors import BrokerUnreachableError
from onceflow_workshop.demos.tables_check import Answer, Change, Checked, Fold, Offsets, StreamCheck, check

_kafka_admin: Any = confluent_kafka.admin  # not all of it has types
_CHUNK = 2_000
_POLL_S = 0.03
_CALL_S = 10.0


class Auditor(threading.Thread):
    """A thread with a read_committed consumer of librdkafka. Whoever asks puts answers into `answers`.

    An answer is compared when the consumer has read what was committed at a moment after the answer had come.

    Attributes:
        fold: the topic as far as it was read.
        checked: what was found, by kind of question.
        problem: the error that has ended the thread.
    """

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int) -> None:
        super().__init__(name="auditor", daemon=True)
        self.answers: deque[Answer] = deque()
        self.fold = Fold(partitions)
        self.checked: dict[str, Checked] = {}
        self.problem: BaseException | None = None
        self._servers = bootstrap_servers
        self._places = [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(partitions)]
        self._streams: list[tuple[StreamCheck, deque[Offsets | Change]]] = []
        self._pending: deque[tuple[dict[int, int], list[Answer]]] = deque()
        self._leave = threading.Event()

    def stream(self) -> deque[Offsets | Change]:
        """For a new stream of changes: gets its first position, then every change."""
        found: deque[Offsets | Change] = deque()
        self._streams.append((StreamCheck(), found))
        return found

    def check(self) -> bool:
        """Whether everything that was answered before is compared, and no stream lacks a record.

        Raises:
            BrokerUnreachableError: the topic could not be read.
        """
        if self.problem is not None:
            raise BrokerUnreachableError(
                "The topic of the table could not be read for the audit",
                topic=self._places[0].topic,
                detail=f"{type(self.problem).__name__}: {self.problem}",
                next_step="see whether the broker still runs and has memory and disk; then run the demo again",
            )
        return not self.answers and not self._pending and not self.behind

    @property
    def behind(self) -> int:
        """How many records streams have not had yet."""
        return sum(stream.left(self.fold) + len(found) for stream, found in self._streams)

    def stop(self) -> None:
        self._leave.set()

    def run(self) -> None:
        options = {"bootstrap.servers": self._servers, "log_level": 0}
        consumer = Consumer(
            {
                **options,
                "group.id": "onceflow-demo-tables",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            }
        )
        try:
            consumer.assign(self._places)
            admin = _kafka_admin.AdminClient(options)
            while not self._leave.is_set():
                self._look(consumer, admin)
        except Exception as error:
            self.problem = error
        finally:
            consumer.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _look(self, consumer: Any, admin: Any) -> None:
        taken = [self.answers.popleft() for _ in range(len(self.answers))]
        if taken:
            # Only now: what they contain was committed before.
            self._pending.append((self._stable_ends(admin), taken))
        for message in consumer.consume(_CHUNK, timeout=_POLL_S):
            self._read(message)
        while self._pending and self.fold.reached(self._pending[0][0]):
            bounds, ready = self._pending[0]
            for answer in ready:
                check(self.fold, answer, bounds, self.checked.setdefault(answer.kind, Checked()))
            self._pending.popleft()  # only now: who asks whether all is compared sees the result
        for stream, found in self._streams:
            self._follow(stream, found)

    def _read(self, message: Any) -> None:
        error = message.error()
        if error is None:
            value = None if message.value() is None else json.loads(message.value())
            self.fold.apply(Change(message.partition(), message.offset(), message.key().decode(), value))
        elif error.code() == KafkaError._PARTITION_EOF:
            self.fold.reach(message.partition(), message.offset())
        elif not error.retriable():
            raise KafkaException(error)

    def _follow(self, stream: StreamCheck, found: deque[Offsets | Change]) -> None:
        while found:
            first = found[0]
            if not isinstance(first, Change):
                stream.begin(first)
            elif self.fold.ends[first.partition] > first.offset:
                stream.see(self.fold, first, self.checked.setdefault("changes", Checked()))
            else:
                return
            found.popleft()

    def _stable_ends(self, admin: Any) -> dict[int, int]:
        """The last stable offsets now."""
        wanted = {TopicPartition(each.topic, each.partition): _kafka_admin.OffsetSpec.latest() for each in self._places}
        found = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_CALL_S)
        return {place.partition: future.result(_CALL_S).offset for place, future in found.items()}

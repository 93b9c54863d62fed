"""Produces the input of a run, and remembers where the broker put what the audit will ask for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Producer

from onceflow.errors import BrokerUnreachableError
from onceflow_workshop.demos.audit import Headers, Origin

# Of one record; topics and brokers allow one of this size, with its headers, too.
_BYTES_MAX = 1_000_000


class Input(NamedTuple):
    """One record to be produced.

    Args:
        topic: its name, without the suffix of the run.
        identity: given: where the broker puts the record is remembered under this name.
        partition: None: where Java's default partitioner puts the key; without a key anywhere.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    identity: str | None = None
    partition: int | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None


class Generator(threading.Thread):
    """Produces records with an idempotent producer: each is in its topic once, in order per partition.

    Afterwards ``origins`` says where those with an identity are, and ``problem`` is None.

    Args:
        topics: the full names of the topics.
    """

    def __init__(self, bootstrap_servers: str, topics: Mapping[str, str], inputs: Iterable[Input]) -> None:
        super().__init__(name="generator", daemon=True)
        self.delivered = 0
        self.problem: BaseException | None = None
        self.origins: dict[str, Origin] = {}
        self.leave = threading.Event()
        self._topics = topics
        self._inputs = inputs
        self._produced = 0
        self._exhausted = False
        self._producer: Any = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "message.max.bytes": _BYTES_MAX,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        try:
            for record in self._inputs:
                if self.leave.is_set():
                    self._producer.purge()
                    return
                self._produce(record)
            self._exhausted = True
            while self.delivered < self._produced and self.problem is None and not self.leave.is_set():
                self._producer.poll(0.1)
        except Exception as error:
            self.problem = error

    def check(self) -> bool:
        """Whether all are delivered.

        Raises:
            BrokerUnreachableError: one could not be delivered.
        """
        if self.problem is not None:
            raise BrokerUnreachableError(
                "The generator could not deliver a record",
                detail=f"{type(self.problem).__name__}: {self.problem}",
                next_step="see whether the broker still runs and has disk space",
            )
        return self._exhausted and self.delivered == self._produced

    def _produce(self, record: Input) -> None:
        report = self._delivered
        if record.identity is not None:
            report = functools.partial(self._delivered, identity=record.identity)
        options: dict[str, Any] = {"on_delivery": report}
        if record.partition is not None:
            options["partition"] = record.partition
        if record.headers:
            options["headers"] = list(record.headers)
        if record.timestamp_ms is not None:
            options["timestamp"] = record.timestamp_ms
        while True:
            try:
                self._producer.produce(self._topics[record.topic], record.value, record.key, **options)
                self._produced += 1
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)
                if self.leave.is_set():
                    return

    def _delivered(self, error: Any, message: Any, identity: str | None = None) -> None:
        if error is not None:
            self.problem = RuntimeError(f"topic {message.topic()}: {error}")
            return
        self.delivered += 1
        if identity is not None:
            self.origins[identity] = Origin(message.topic(), message.partition(), message.offset())

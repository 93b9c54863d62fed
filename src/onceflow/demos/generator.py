"""Produces the deposits of a run, and remembers where the broker put those that must be rejected."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Producer

from onceflow.demos import deposits_data as data
from onceflow.errors import BrokerUnreachableError


class Generator(threading.Thread):
    """Produces the deposits with an idempotent producer: each is in the topic once, in order per key.

    Afterwards ``origins`` tells where each invalid one is, and ``problem`` is None.

    Args:
        records: how many deposits there are.
    """

    def __init__(self, bootstrap_servers: str, topic: str, deposits: Iterable[data.Deposit], *, records: int) -> None:
        super().__init__(name="generator", daemon=True)
        self.delivered = 0
        self.problem: BaseException | None = None
        self.origins: dict[str, data.Origin] = {}
        self.leave = threading.Event()
        self._topic = topic
        self._deposits = deposits
        self._records = records
        self._producer: Any = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        try:
            for deposit in self._deposits:
                if self.leave.is_set():
                    self._producer.purge()
                    return
                self._produce(deposit)
            while self.delivered < self._records and self.problem is None and not self.leave.is_set():
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
                "The generator could not deliver a deposit",
                topic=self._topic,
                detail=str(self.problem),
                next_step="see whether the broker still runs and has disk space",
            )
        return self.delivered == self._records

    def _produce(self, deposit: data.Deposit) -> None:
        report = self._delivered if deposit.cause is None else functools.partial(self._delivered, identity=deposit.id)
        while True:
            try:
                self._producer.produce(self._topic, deposit.value, deposit.key, on_delivery=report)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)
                if self.leave.is_set():
                    return

    def _delivered(self, error: Any, message: Any, identity: str | None = None) -> None:
        if error is not None:
            self.problem = RuntimeError(str(error))
            return
        self.delivered += 1
        if identity is not None:
            self.origins[identity] = data.Origin(message.topic(), message.partition(), message.offset())

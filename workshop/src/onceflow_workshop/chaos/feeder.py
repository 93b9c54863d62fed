"""Fills the source topic, unaffected by faults: an idempotent producer of librdkafka.

The rate is steady, but from time to time nothing comes for seconds. Half of the times, what was missed follows at once.
"""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType

from confluent_kafka import KafkaError, Message, Producer

KEYS = 200
# In seconds: how long records come at a steady rate, and how long none come then.
_STEADY_S = (4.0, 12.0)
_QUIET_S = (1.0, 3.0)


class Feeder:
    """Produces values ``{"n": number}``, each number once. As a context manager it stops at the end.

    Args:
        rate: records per second.
        rng: decides when there are quiet times and bursts.

    Attributes:
        sent: how many records were sent. quiet_times: how often none came for seconds.
        bursts: how often the missed ones followed at once.
    """

    def __init__(self, bootstrap_servers: str, topic: str, rate: int, rng: random.Random) -> None:
        self._topic = topic
        self._rate = rate
        self._rng = rng
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 10,
                "message.timeout.ms": 0,  # no timeout: a broker that is down comes back
                "queue.buffering.max.messages": 1_000_000,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )
        self._stopping = threading.Event()
        self._paused_s = 0.0
        self._thread = threading.Thread(target=self._feed, daemon=True, name="feeder")
        self.sent = 0
        self.quiet_times = self.bursts = 0
        self.failed: str | None = None

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(10)

    def pause(self, seconds: float) -> None:
        """Send nothing for some seconds."""
        self._paused_s = seconds
        time.sleep(seconds)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Send the records in the queue, and stop.

        Raises:
            RuntimeError: records could not be delivered.
        """
        self._stopping.set()
        self._thread.join(timeout_s)
        left = self._producer.flush(timeout_s)
        if left or self.failed:
            raise RuntimeError(f"{left} records were not delivered to {self._topic}: {self.failed}")

    def _feed(self) -> None:
        started = time.monotonic()
        quiet_at = started + self._rng.uniform(*_STEADY_S)
        while not self._stopping.is_set():
            if time.monotonic() >= quiet_at:
                started += self._quiet()
                quiet_at = time.monotonic() + self._rng.uniform(*_STEADY_S)
            if self._paused_s:
                paused_s, self._paused_s = self._paused_s, 0.0
                self._stopping.wait(paused_s)
                started += paused_s
            due = int((time.monotonic() - started) * self._rate)
            while self.sent < due:
                key, value = f"key-{self.sent % KEYS:03d}".encode(), b'{"n": %d}' % self.sent
                try:
                    self._producer.produce(self._topic, value, key, on_delivery=self._delivered)
                except BufferError:
                    self._producer.poll(0.1)
                    break
                self.sent += 1
            self._producer.poll(0)
            self._stopping.wait(0.02)

    def _quiet(self) -> float:
        """Send nothing for some seconds. Returns how many of them are not made up for."""
        seconds, burst = self._rng.uniform(*_QUIET_S), self._rng.random() < 0.5
        self.quiet_times += 1
        self.bursts += burst
        self._stopping.wait(seconds)
        return 0.0 if burst else seconds

    def _delivered(self, error: KafkaError | None, message: Message[bytes, bytes]) -> None:
        if error is not None:
            self.failed = str(error)

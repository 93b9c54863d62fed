"""End-to-end latency: from producing a record to consuming what a service made of it, read_committed.

A producer at a steady rate and the consumer of the output are one process of their own, so that neither competes for
the interpreter of the driver that is measured. The key of a record is its number, its value begins with the time at
which it was produced.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VALUE_BYTES = 1024
# Short waits: a record is handed out as soon as it may be read.
_FETCH_WAIT_MS = 20
_DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What the probe does.

    Args:
        warm_seconds: records of this time are produced and consumed, and do not count.
        seconds: how long records count.
    """

    servers: str
    source: str
    target: str
    records_per_second: int
    warm_seconds: float
    seconds: float

    @property
    def records(self) -> int:
        """To be produced in all."""
        return max(1, round(self.records_per_second * (self.warm_seconds + self.seconds)))

    @property
    def warm_records(self) -> int:
        """The first ones, which do not count."""
        return min(self.records - 1, round(self.records_per_second * self.warm_seconds))


@dataclass(frozen=True)
class Probed:
    """What the probe saw: milliseconds of each record that counts, and how many there were of all."""

    latencies_ms: list[float]
    sent: int
    seconds: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of all do not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile of nothing")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def measure(plan: Plan, is_alive: Callable[[], bool]) -> Probed:
    """Run the probe against a service that runs already.

    Raises:
        RuntimeError: the service has ended, or the probe failed; with its last words.
    """
    code = "from onceflow.bench.latency import probe; probe()"
    probing = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(plan.__dict__)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answer: list[tuple[str, str]] = []
    reading = threading.Thread(target=lambda: answer.append(probing.communicate()), daemon=True)
    try:
        reading.start()
        end = time.monotonic() + plan.warm_seconds + plan.seconds + _DRAIN_SECONDS + 30
        while reading.is_alive() and is_alive() and time.monotonic() < end:
            reading.join(0.2)
    finally:
        probing.kill()
        reading.join(10)
    if probing.returncode != 0:
        words = answer[0][1].strip().splitlines()[-1:] if answer else []
        raise RuntimeError(f"the latency probe did not come to its end: {' '.join(words) or 'the service has ended'}")
    return Probed(**json.loads(answer[0][0].splitlines()[-1]))


# ---- the process of its own --------------------------------------------------------------------------------


def probe() -> None:
    """Child process: produces, consumes, prints one JSON line."""
    plan = Plan(**json.loads(sys.argv[1]))
    try:
        print(json.dumps(_probe(plan).__dict__), flush=True)
    except KeyboardInterrupt:
        sys.exit(130)


def _probe(plan: Plan) -> Probed:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": plan.servers,
            "group.id": "onceflow-latency",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            "fetch.min.bytes": 1,
        }
    )
    sending = threading.Thread(target=_send, args=(plan,), daemon=True)
    try:
        partitions = consumer.list_topics(plan.target, timeout=30).topics[plan.target].partitions
        consumer.assign([TopicPartition(plan.target, number, 0) for number in partitions])
        began = time.monotonic()
        sending.start()
        latencies = _receive(plan, consumer, began + plan.warm_seconds + plan.seconds + _DRAIN_SECONDS)
        sending.join(_DRAIN_SECONDS)
        return Probed(latencies, plan.records, time.monotonic() - began)
    finally:
        consumer.close()


def _receive(plan: Plan, consumer: Any, end: float) -> list[float]:
    """Milliseconds of the records that count; waits for all that are sent."""
    latencies: list[float] = []
    missing = set(range(plan.records))
    while missing:
        # One by one: a call for many would wait for many.
        message = consumer.poll(0.5)
        now_ns = time.monotonic_ns()
        if time.monotonic() > end:
            raise TimeoutError(f"{len(missing)} of {plan.records} records did not come out of {plan.target}")
        if message is None:
            continue
        if message.error() is not None:
            raise RuntimeError(f"{plan.target}: {message.error()}")
        number = int.from_bytes(message.key(), "big")
        if number in missing:
            missing.discard(number)
            if number >= plan.warm_records:
                latencies.append(round((now_ns - int.from_bytes(message.value()[:8], "big")) / 1e6, 3))
    return latencies


def _send(plan: Plan) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": plan.servers, "partitioner": "murmur2_random", "linger.ms": 0})
    padding = bytes(VALUE_BYTES - 8)
    began = time.monotonic()
    for number in range(plan.records):
        due = began + number / plan.records_per_second
        while (left := due - time.monotonic()) > 0:
            producer.poll(0)
            time.sleep(min(left, 0.01))
        value = time.monotonic_ns().to_bytes(8, "big") + padding
        producer.produce(plan.source, value, number.to_bytes(8, "big"))
    producer.flush(_DRAIN_SECONDS)

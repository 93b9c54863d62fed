"""End-to-end latency: from producing a record to consuming what a service made of it, read_committed.

A producer at a steady rate and the consumer of the output are one process of their own, so that neither competes for
the interpreter of the driver that is measured.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onceflow_workshop.bench.latency_records import COPY, records_of

#: What the probe does, one after the other. STARTING ends with the first record that comes out.
STARTING, WARMING, MEASURING, DRAINING = "starting", "warming up", "measuring", "draining"
_TICK_S = 0.2
_SEND_TICK_S = 0.002
_DRAIN_SECONDS = 60.0
# After the last missing record, a second one of some record may still come.
_DOUBLES_SECONDS = 0.5
_POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """What the probe does.

    Args:
        warm_seconds: records of this time after the first output are produced and consumed, and do not count.
        seconds: how long records count.
        workload: of `latency_records.WORKLOADS`. value_bytes: of `records_of`.
        start_seconds: how long the first output is waited for.
    """

    servers: str
    source: str
    target: str
    records_per_second: int
    warm_seconds: float
    seconds: float
    workload: str = COPY
    value_bytes: int | None = None
    start_seconds: float = 120.0

    @property
    def most_seconds(self) -> float:
        """The probe takes no longer."""
        return self.start_seconds + self.warm_seconds + self.seconds + 2 * _DRAIN_SECONDS


@dataclass(frozen=True)
class Probed:
    """What the probe saw: milliseconds of each record that counts, and how many there were of all."""

    latencies_ms: list[float]
    sent: int
    missing: int
    doubled: int
    wrong: int

    @property
    def problem(self) -> str:
        """What is wrong with the output, in a few words; empty: nothing."""
        found = {"missing": self.missing, "doubled": self.doubled, "wrong": self.wrong}
        parts = [f"{count:,} {what}" for what, count in found.items() if count]
        return f"{', '.join(parts)} of {self.sent:,} records" if parts else ""


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of all do not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile of nothing")
    return percentile_of_sorted(sorted(values), percent)


def percentile_of_sorted(ordered: Sequence[float], percent: float) -> float:
    """`percentile` of values that are in order; at least one."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def measure(plan: Plan, is_alive: Callable[[], bool], watch: Callable[[str], None] = lambda phase: None) -> Probed:
    """Run the probe against a service that runs already, or is being started.

    Args:
        watch: called with what the probe does, several times a second, and at once when that changes.

    Raises:
        RuntimeError: the service has ended, or the probe failed; with its last words.
    """
    code = "from onceflow_workshop.bench.latency import probe; probe()"
    probing = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(plan))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C does not reach it; it is killed below
    )
    said: queue.Queue[str] = queue.Queue()
    words: list[str] = []
    readers = [
        threading.Thread(target=_each, args=(probing.stdout, said.put), daemon=True),
        threading.Thread(target=_each, args=(probing.stderr, words.append), daemon=True),
    ]
    try:
        for reader in readers:
            reader.start()
        answer = _watched(plan, probing, said, is_alive, watch)
    finally:
        probing.kill()
        probing.wait()
        for reader in readers:
            reader.join(10)
        for stream in (probing.stdout, probing.stderr):
            if stream is not None:
                stream.close()
    if answer is None:
        why = words[-1].strip() if words else "the service has ended"
        raise RuntimeError(f"the latency probe did not come to its end: {why}")
    return answer


def _each(lines: Any, take: Callable[[str], None]) -> None:
    for line in lines:
        take(line)


def _watched(
    plan: Plan, probing: Any, said: queue.Queue[str], is_alive: Callable[[], bool], watch: Callable[[str], None]
) -> Probed | None:
    """What the probe has seen; None: it or the service has ended."""
    end = time.monotonic() + plan.most_seconds + 30
    phase = STARTING
    while is_alive() and time.monotonic() < end:
        ended = probing.poll() is not None
        try:
            line = json.loads(said.get(timeout=_TICK_S))
        except queue.Empty:
            if ended:
                return None
        else:
            if isinstance(line, dict):
                return Probed(**line)
            phase = line
        watch(phase)
    return None


# ---- the process of its own --------------------------------------------------------------------------------


def probe() -> None:
    """Child process: produces and consumes. Prints JSON lines: what it does, at last what it saw."""
    seen = _Probe(Plan(**json.loads(sys.argv[1]))).run()
    print(json.dumps(asdict(seen)), flush=True)


class _Probe:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._records = records_of(plan.workload, plan.value_bytes)
        self._at = array("d")  # when each record was produced
        self._stop_at = math.inf
        self._failed: list[BaseException] = []
        self._parent = os.getppid()
        self._seen = bytearray()
        self._distinct = 0
        self._complete_at = math.inf
        self._doubled = self._wrong = 0

    def run(self) -> Probed:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self._plan.servers,
                "group.id": "onceflow-latency",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.min.bytes": 1,
                "fetch.queue.backoff.ms": 1,
            }
        )
        sending = threading.Thread(target=self._send_all, daemon=True)
        try:
            partitions = consumer.list_topics(self._plan.target, timeout=30).topics[self._plan.target].partitions
            consumer.assign([TopicPartition(self._plan.target, number, 0) for number in partitions])
            sending.start()
            latencies = self._receive(consumer)
            sending.join(_DRAIN_SECONDS)
            sent = len(self._at)
            return Probed(latencies, sent, sent - self._distinct, self._doubled, self._wrong)
        finally:
            consumer.close()

    def _receive(self, consumer: Any) -> list[float]:
        """Milliseconds of the records that count; waits for all that are sent."""
        latencies: list[float] = []
        phase, begun = "", time.monotonic()
        counts_from = counts_to = math.inf
        give_up = begun + self._plan.start_seconds
        while True:
            # One by one: a call for many would wait for many.
            message = consumer.poll(_POLL_S)
            now = time.monotonic()
            if self._failed:
                raise self._failed[0]
            if os.getppid() != self._parent:
                raise RuntimeError("nobody waits for the answer any more")
            if message is not None:
                number = self._taken(message)
                if counts_from == math.inf:
                    counts_from = now + self._plan.warm_seconds
                    self._stop_at = counts_to = counts_from + self._plan.seconds
                    give_up = counts_to + _DRAIN_SECONDS
                if number is not None and counts_from <= self._at[number] < counts_to:
                    latencies.append(round((now - self._at[number]) * 1000, 3))
            if (current := _phase(now, counts_from, counts_to)) != phase:
                phase = current
                print(json.dumps(phase), flush=True)
            if phase == DRAINING and self._is_over(now):
                return latencies
            if now > give_up:
                if counts_from == math.inf:
                    raise TimeoutError(f"nothing came out within {self._plan.start_seconds:g} s")
                return latencies

    def _taken(self, message: Any) -> int | None:
        """The number of a record that came out for the first time, else None."""
        if message.error() is not None:
            raise RuntimeError(f"{self._plan.target}: {message.error()}")
        number, right = self._records.output(message.key(), message.value())
        if number >= len(self._at):
            raise RuntimeError(f"{self._plan.target}: there is a record {number} that was not sent")
        if number >= len(self._seen):
            self._seen.extend(bytes(number + 100_000 - len(self._seen)))
        self._wrong += not right
        if self._seen[number]:
            self._doubled += 1
            return None
        self._seen[number] = 1
        self._distinct += 1
        return number

    def _is_over(self, now: float) -> bool:
        """Whether all records came out, and no second ones of them for a while."""
        # The sender has not stopped before its next look at the clock.
        if now < self._stop_at + _DOUBLES_SECONDS or self._distinct < len(self._at):
            return False
        self._complete_at = min(self._complete_at, now)
        return now >= self._complete_at + _DOUBLES_SECONDS

    def _send_all(self) -> None:
        try:
            self._send()
        except BaseException as error:
            self._failed.append(error)

    def _send(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": self._plan.servers,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 1,
            }
        )
        began = time.monotonic()
        while (now := time.monotonic()) < self._stop_at:
            due = int((now - began) * self._plan.records_per_second) + 1
            while len(self._at) < due and time.monotonic() < self._stop_at:
                self._produce(producer)
            producer.poll(0)
            time.sleep(_SEND_TICK_S)
        producer.flush(_DRAIN_SECONDS)

    def _produce(self, producer: Any) -> None:
        key, value = self._records.record(len(self._at))
        self._at.append(time.monotonic())
        while True:
            try:
                producer.produce(self._plan.source, value, key, on_delivery=self._delivered)
                return
            except BufferError:  # the broker is slower than the rate
                producer.poll(_POLL_S)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failed.append(RuntimeError(f"{self._plan.source}: a record was not written: {error}"))


def _phase(now: float, counts_from: float, counts_to: float) -> str:
    if counts_from == math.inf:
        return STARTING
    return WARMING if now < counts_from else MEASURING if now < counts_to else DRAINING

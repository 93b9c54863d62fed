"""The load of ``onceflow bench cluster``, and the independent consumer of its outputs: a process of their own.

Payments are sent at a steady rate, or as fast as possible. The consumer is read_committed. It compares every output
with the balance that the account must have had after that record, so it notices what is missing, doubled or wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from onceflow.errors import EnvironmentUnusableError
from onceflow_workshop.bench.latency import percentile_of_sorted
from onceflow_workshop.bench.latency_records import Balances

_SEND_TICK_S = 0.005
_POLL_S = 0.1
_FLUSH_S = 60.0
_STOP_S = 5.0
_MORE = 100_000
_LOG_CHARACTERS = 2000


@dataclass(frozen=True)
class Plan:
    """Where to send, and where the outputs are read."""

    servers: str
    source: str
    target: str
    accounts: int


@dataclass(frozen=True)
class Seen:
    """What the load has done and seen so far.

    Args:
        sent, visible: records; each counts once.
        window_sent, window_visible: those sent while the window was open.
        outage_s: the longest time in which no record became visible, since the window was opened.
    """

    sent: int = 0
    visible: int = 0
    doubled: int = 0
    wrong: int = 0
    window_sent: int = 0
    window_visible: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    outage_s: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong with the outputs, in a few words; empty: nothing."""
        found = {"missing": self.sent - self.visible, "doubled": self.doubled, "wrong": self.wrong}
        parts = [f"{count:,} {what}" for what, count in found.items() if count]
        return f"{', '.join(parts)} of {self.sent:,} records" if parts else ""


class Tally:
    """Counts outputs and measures a window. Times are seconds of one clock.

    Args:
        accounts: see `Balances`.
    """

    def __init__(self, accounts: int) -> None:
        self._records = Balances(None, accounts)
        self._at = array("d")  # when each record was sent
        self._seen = bytearray()
        self._visible = self._doubled = self._wrong = 0
        self._from = self._to = 0
        self._latencies_ms: list[float] = []
        self._last = 0.0  # when a record has become visible, or the window was opened
        self._gap_s = 0.0

    def next(self, now: float) -> tuple[bytes, bytes]:
        """Key and value of the next record to send."""
        record = self._records.record(len(self._at))
        self._at.append(now)
        return record

    def open_window(self, now: float) -> None:
        """Records that are sent from now on are measured."""
        self._from, self._to = len(self._at), sys.maxsize
        self._latencies_ms, self._last, self._gap_s = [], now, 0.0

    def close_window(self) -> None:
        """Records that are sent from now on are not measured any more."""
        self._to = len(self._at)

    def came(self, key: bytes | None, value: bytes | None, now: float) -> None:
        """An output has become visible."""
        number, right = self._records.output(key, value)
        if number >= len(self._at):
            self._wrong += 1
            return
        if number >= len(self._seen):
            self._seen.extend(bytes(number + _MORE - len(self._seen)))
        self._wrong += not right
        if self._seen[number]:
            self._doubled += 1
            return
        self._seen[number] = 1
        self._visible += 1
        self._gap_s, self._last = max(self._gap_s, now - self._last), now
        if self._from <= number < self._to:
            self._latencies_ms.append((now - self._at[number]) * 1000)

    def seen(self, *, percentiles: bool = False) -> Seen:
        """As of now."""
        ordered = sorted(self._latencies_ms) if percentiles else []
        p50, p99 = (round(percentile_of_sorted(ordered, n), 1) if ordered else None for n in (50, 99))
        sent, window_visible = len(self._at), len(self._latencies_ms)
        window_sent = max(0, min(self._to, sent) - self._from)
        return Seen(
            sent,
            self._visible,
            self._doubled,
            self._wrong,
            window_sent,
            window_visible,
            p50,
            p99,
            round(self._gap_s, 2),
        )


class Load:
    """The process, as its parent sees it. It runs while this is open.

    Args:
        log: a file for what it has to say when it fails.
    """

    def __init__(self, plan: Plan, log: Path) -> None:
        self._plan, self._log = plan, log

    def __enter__(self) -> Load:
        code = "from onceflow_workshop.bench.cluster_load import main; main()"
        with self._log.open("w") as handle:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(asdict(self._plan))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                text=True,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(_STOP_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def rate(self, per_s: int) -> Seen:
        """Send so many records per second from now on."""
        return self._ask("rate", per_s=per_s)

    def fill(self, records: int) -> Seen:
        """Send so many records at once. Returns when they are in Kafka."""
        return self._ask("fill", records=records)

    def consume(self, *, wanted: bool) -> Seen:
        """Whether the consumer reads; it takes CPU."""
        return self._ask("consume", wanted=wanted)

    def open_window(self) -> Seen:
        """See `Tally`."""
        return self._ask("open_window")

    def close_window(self) -> Seen:
        """See `Tally`."""
        return self._ask("close_window")

    def look(self, *, percentiles: bool = False) -> Seen:
        """What it has done and seen."""
        return self._ask("look", percentiles=percentiles)

    def _ask(self, what: str, **more: Any) -> Seen:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        if pipe_in is None or pipe_out is None:
            raise RuntimeError("the load has no pipes")
        try:
            print(json.dumps({"what": what, **more}), file=pipe_in, flush=True)
            answer = pipe_out.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise EnvironmentUnusableError(
                "The process that sends the load has ended.",
                detail=self._log.read_text(errors="replace")[-_LOG_CHARACTERS:].strip(),
                next_step="run `onceflow doctor`, which checks this machine",
            )
        return Seen(**json.loads(answer))


# ---- the process of its own --------------------------------------------------------------------------------


def main() -> None:
    """Child process: answers each line of standard input with one of standard output, until there is no more."""
    child = _Child(Plan(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        print(json.dumps(asdict(child.answer(**json.loads(line)))), flush=True)
    os._exit(0)  # whoever has started it has ended; the other threads are in the middle of calls of librdkafka


class _Child:
    """Three threads: one answers (and fills), one sends at a rate, and one consumes."""

    def __init__(self, plan: Plan) -> None:
        from confluent_kafka import Producer

        self._plan = plan
        self._tally = Tally(plan.accounts)
        self._lock = threading.Lock()  # of the tally, and of the order in which records are sent
        self._failed: list[BaseException] = []
        self._per_s, self._since, self._sent_since = 0, 0.0, 0
        self._wanted = threading.Event()
        self._wanted.set()
        self._producer = Producer(
            {
                "bootstrap.servers": plan.servers,
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 1,
                "delivery.report.only.error": True,
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        for work in (self._send, self._receive):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def answer(self, what: str, **more: Any) -> Seen:
        if self._failed:
            raise self._failed[0]
        if what == "rate":
            self._rate(more["per_s"])
        elif what == "fill":
            self._fill(more["records"])
        elif what == "consume":
            (self._wanted.set if more["wanted"] else self._wanted.clear)()
        elif what == "open_window":
            with self._lock:
                self._tally.open_window(time.monotonic())
        elif what == "close_window":
            with self._lock:
                self._tally.close_window()
        with self._lock:
            return self._tally.seen(percentiles=more.get("percentiles", False))

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._failed.append(error)

    def _rate(self, per_s: int) -> None:
        with self._lock:
            self._per_s, self._since, self._sent_since = per_s, time.monotonic(), 0

    def _fill(self, records: int) -> None:
        for _ in range(records):
            with self._lock:
                self._produce()
        if left := self._producer.flush(_FLUSH_S):
            raise TimeoutError(f"{left} records were not written to {self._plan.source}")

    def _send(self) -> None:
        while True:
            with self._lock:
                due = int((time.monotonic() - self._since) * self._per_s)
                while self._sent_since < due:
                    self._produce()
                    self._sent_since += 1
            self._producer.poll(0)
            time.sleep(_SEND_TICK_S)

    def _produce(self) -> None:
        key, value = self._tally.next(time.monotonic())
        while True:
            try:
                self._producer.produce(self._plan.source, value, key, on_delivery=self._refused)
                return
            except BufferError:  # the broker is slower
                self._producer.poll(_POLL_S)

    def _refused(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failed.append(RuntimeError(f"{self._plan.source}: a record was not written: {error}"))

    def _receive(self) -> None:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self._plan.servers,
                "group.id": "onceflow-bench-cluster",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.min.bytes": 1,
                "fetch.queue.backoff.ms": 1,
                "queued.max.messages.kbytes": 16_384,
                "max.poll.interval.ms": 86_400_000,
            }
        )
        partitions = consumer.list_topics(self._plan.target, timeout=30).topics[self._plan.target].partitions
        consumer.assign([TopicPartition(self._plan.target, number, 0) for number in partitions])
        while True:
            self._wanted.wait()
            # One by one: a call for many would wait for many.
            message = consumer.poll(_POLL_S)
            now = time.monotonic()
            if message is None:
                continue
            if message.error() is not None:
                raise RuntimeError(f"{self._plan.target}: {message.error()}")
            with self._lock:
                self._tally.came(message.key(), message.value(), now)

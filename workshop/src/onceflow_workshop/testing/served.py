"""Query servers as processes of their own, and a check of their answers that uses no code of onceflow's tables."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Producer

from onceflow.protocol.position import Position
from onceflow.testing import independent
from onceflow.testing.waiting import WaitedInVainError, wait_until

START_S = 60.0
#: By which instances of the query server recognise each other that this process starts.
PEER_SECRET = secrets.token_urlsafe(32)


class ServerProcess:
    """``onceflow table serve``.

    Args:
        arguments: of the command, without ``--port``.
        log: the file that its output is appended to.
        apart: Ctrl-C in this terminal does not reach it.

    Attributes:
        url: where it answers; "" before the first start. Later starts take the same port.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, apart: bool = False) -> None:
        self._apart = apart
        self._arguments = [sys.executable, "-m", "onceflow.cli.main", "table", "serve", *arguments]
        self.log = log
        self._port = self._begin = 0
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.poll()

    def start(self) -> None:
        """Start it, and return when it listens. Errors are those of `wait`; then it is ended."""
        self.launch()
        try:
            self.wait()
        except WaitedInVainError:
            self.end()
            raise

    def launch(self) -> None:
        """Start it, and return at once."""
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            command = [*self._arguments, "--port", str(self._port)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self._apart,
                env={"ONCEFLOW_PEER_SECRETS": PEER_SECRET, **os.environ},
            )

    def wait(self) -> None:
        """Wait until it listens.

        Raises:
            WaitedInVainError: it has ended, or it does not listen; the text is its log.
        """

        def said() -> str:
            return self.log.read_bytes()[self._begin :].decode(errors="replace")

        found = wait_until(
            lambda: re.search(r"Serving .+? at (https?://\S+?:(\d+)) ", said()),
            START_S,
            said,
            useless=lambda: self.exit_code is not None and said(),
        )
        assert found is not None
        self.url, self._port = found[1], int(found[2])

    def send(self, signal_number: int) -> None:
        self._child.send_signal(signal_number)

    def end(self, by: int = signal.SIGKILL) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(by)
        if by == signal.SIGKILL:
            self._process.send_signal(signal.SIGCONT)
        return self._process.wait(60)

    def stop(self) -> None:
        """End it with SIGTERM, or with SIGKILL if that takes too long."""
        try:
            self.end(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.end()

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process


@dataclass(frozen=True)
class Answer:
    """What a server has said about one key.

    Args:
        value: as bytes of the record; None: there is none.
        position: the position that it said.
        lag_ms: the lag that it said; None: it is not known.
        asked_ms: when it was asked, epoch milliseconds.
    """

    key: bytes
    value: bytes | None
    position: str
    lag_ms: int | None = None
    asked_ms: int = 0


@dataclass
class Versions:
    """All values that the keys of a topic have had.

    Args:
        partitions: where each key is.
        written: by key, pairs of offset and value, in order.
        acknowledged: by partition, pairs of offset and the time when the writer knew of it (epoch milliseconds).
    """

    topic: str
    partitions: dict[bytes, int] = field(default_factory=dict)
    written: dict[bytes, list[tuple[int, bytes | None]]] = field(default_factory=lambda: defaultdict(list))
    acknowledged: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, bootstrap_servers: str, topic: str, *, seconds: float = 60.0) -> Versions:
        """From the committed records of a topic, read with confluent-kafka. It must not have been compacted."""
        found = cls(topic)
        for record in independent.read_topic(bootstrap_servers, topic, decided=True, seconds=seconds):
            found.add(record.partition, record.offset, record.key or b"", record.value)
        return found

    def add(self, partition: int, offset: int, key: bytes, value: bytes | None, ms: int | None = None) -> None:
        """One committed record; those of a partition in the order of their offsets."""
        self.partitions[key] = partition
        self.written[key].append((offset, value))
        if ms is not None:
            self.acknowledged[partition].append((offset, ms))

    def problem(self, answer: Answer) -> str:
        """Why an answer is wrong; "": it is right for its position, and not older than it says."""
        offsets = Position.parse(answer.position).offsets.get(self.topic, {})
        if answer.key not in self.partitions:
            return "" if answer.value is None else f"{answer.key!r} has a value, but was never written"
        partition = self.partitions[answer.key]
        if partition not in offsets:
            return f"{answer.key!r}: {answer.position} says nothing about partition {partition}"
        written = self.written[answer.key]
        begin = bisect_left(written, offsets[partition], key=lambda each: each[0])
        allowed = [value for _, value in written[max(0, begin - 1) :]]
        if begin == 0:
            allowed.append(None)
        if answer.value not in allowed:
            return f"{answer.key!r}: {answer.value!r} at {answer.position}, expected {allowed[:3]}"
        return self._older(partition, offsets[partition], answer)

    def problems(self, answers: Iterable[Answer]) -> list[str]:
        """Why answers are wrong."""
        return [problem for answer in answers if (problem := self.problem(answer))]

    def _older(self, partition: int, offset: int, answer: Answer) -> str:
        known = self.acknowledged.get(partition)
        if not known or answer.lag_ms is None:
            return ""
        missing = next((each for each in known[bisect_left(known, (offset, 0)) :]), None)
        if missing is not None and missing[1] < answer.asked_ms - answer.lag_ms:
            late = answer.asked_ms - answer.lag_ms - missing[1]
            return (
                f"{answer.key!r}: {answer.position} with a lag of {answer.lag_ms} ms, but offset {missing[0]} of "
                f"partition {partition} had been acknowledged {late} ms before that"
            )
        return ""


def numbers(count: int) -> dict[str, str]:
    """Rows ``key-0007: {"n": 7}``."""
    return {f"key-{n:04d}": json.dumps({"n": n}) for n in range(count)}


def write_rows(
    bootstrap_servers: str, topic: str, pairs: Mapping[Any, Any], partitioner: str = "murmur2_random"
) -> str:
    """Write rows as another program does, and return the position after them.

    Raises:
        RuntimeError: a record was refused, or not delivered in time.
    """
    ends: dict[int, int] = {}
    refused: list[str] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        if error is not None:
            refused.append(str(error))
            return
        ends[message.partition()] = max(message.offset() + 1, ends.get(message.partition(), 0))

    producer = Producer({"bootstrap.servers": bootstrap_servers, "partitioner": partitioner, "linger.ms": 1})
    for key, value in pairs.items():
        producer.produce(topic, value, key, on_delivery=delivered)
    left = producer.flush(30)
    if left or refused:
        raise RuntimeError(f"{topic}: {left} rows were not delivered, {len(refused)} were refused: {refused[:1]}")
    return str(Position({topic: ends}))

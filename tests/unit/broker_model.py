"""A broker that errs, in the place of ``Cluster``: what the producer writes is put together as the transport would and
parsed by kafka-python; the model then enforces Kafka's rules of sequence numbers (``ProducerAppendInfo``): epoch, next
sequence or 45, a repeated one of the last five batches answered as the first time (no error, the original base offset).
Time is the model's, too.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kafka.errors as kafka_errors
import pyarrow as pa
from kafka.future import Future
from kafka.protocol.producer import ProduceRequest, ProduceResponse
from kafka.record.memory_records import MemoryRecords

from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.errors import (
    BrokerUnsupportedError,
)
from onceflow.protocol.batches import EncodedBatch, ProducerIdAndEpoch, encode_batches

IDENTITY = ProducerIdAndEpoch(producer_id=4711, producer_epoch=3)
LOST, DELAY = "the answer is lost", "the request is lost"
"""Instead of an error code: the connection breaks after, or before, the broker has done what was asked."""


@dataclass(frozen=True)
class Arrived:
    """One batch in one request."""

    topic: str
    partition: int
    epoch: int
    sequence: int
    count: int
    raw: bytes
    alone: bool  # nothing else of the partition was under way


@dataclass
class Log:
    """A partition: its batches, and what the broker remembers of the producer."""

    batches: list[Arrived] = field(default_factory=list)
    end: int = 1000
    epoch: int = -1
    next_sequence: int = 0
    remembered: collections.deque[tuple[int, int, int]] = field(default_factory=lambda: collections.deque(maxlen=5))

    def append(self, one: Arrived) -> tuple[int, int]:
        """Error code and base offset, as the broker answers."""
        if one.epoch < self.epoch:
            return 47, -1
        if one.epoch > self.epoch:
            self.epoch, self.next_sequence = one.epoch, 0
            self.remembered.clear()
        for first, last, offset in self.remembered:
            if (first, last) == (one.sequence, one.sequence + one.count - 1):
                return 0, offset
        if one.sequence != self.next_sequence:
            return 45, -1
        offset = self.end
        self.batches.append(one)
        self.remembered.append((one.sequence, one.sequence + one.count - 1, offset))
        self.next_sequence += one.count
        self.end += one.count
        return 0, offset


Script = Callable[[Arrived], Any]


class World:
    """Clock, event loop, cluster metadata and brokers in one; what ``Producer`` needs of a ``Cluster``."""

    def __init__(self, script: Script | None = None, *, transaction_version: int = 2) -> None:
        self.now = 100.0
        self.script = script or (lambda _: 0)
        self.transaction_version = transaction_version
        self.settings = ClientSettings("h:9092")
        self.lock = _NoLock()
        self.net = self
        self.manager = self
        self.logs: dict[tuple[str, int], Log] = collections.defaultdict(Log)
        self.arrived: list[Arrived] = []
        self.requests: list[Any] = []
        self.fresh: list[tuple[str, int]] = []
        self.connects = 0
        self.asked_version: tuple[int, int] = (0, 0)
        self.oldest: int | None = None  # the version that the leader understands, where it is older than others
        self.node = 1  # that leads every partition now
        self.known: dict[tuple[str, int], int] = {}  # what metadata said last
        self.refreshes_whole_topic = False
        self.connections: dict[int, Connection] = {}
        self.refuse_connection: Exception | None = None
        self.login_again = False
        self.answers_per_poll: Callable[[], int] = lambda: 99
        self.shuffle: Callable[[list[Any]], None] = lambda _: None  # which broker answers first
        self.polls = 0

    # Cluster
    def connect(self, deadline: Deadline) -> None:
        self.connects += 1

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        assert request is ProduceRequest
        self.asked_version = (min_version, max_version)
        return max_version

    def fits(self, key: int, version: int, connection: Any) -> int:
        assert key == ProduceRequest.API_KEY
        if self.oldest is None:
            return version
        if self.oldest < 9:
            raise BrokerUnsupportedError("too old", next_step="upgrade it")
        return min(version, self.oldest)

    def leader(self, topic: str, partition: int, deadline: Deadline, *, fresh: bool = False) -> int:
        if fresh:
            self.fresh.append((topic, partition))
            for place in self.known:
                if self.refreshes_whole_topic and place[0] == topic:
                    self.known[place] = self.node
        if fresh or (topic, partition) not in self.known:
            self.known[topic, partition] = self.node
        return self.known[topic, partition]

    def may_log_in_again(self, error: Exception) -> bool:
        return self.login_again

    # KafkaConnectionManager
    def get_connection(self, node: int) -> Connection:
        if self.refuse_connection is not None:
            raise self.refuse_connection
        if node not in self.connections:
            self.connections[node] = Connection(self)
        return self.connections[node]

    # NetworkSelector
    def poll(self, timeout_ms: int, future: Any = None) -> None:
        self.polls += 1
        assert self.polls < 50_000, "the producer makes no progress"
        left = self.answers_per_poll()
        answered = 0
        connections = list(self.connections.values())
        self.shuffle(connections)
        for connection in connections:
            answered += connection.serve(left - answered)
        if future is None:
            assert timeout_ms == 0
        else:
            assert timeout_ms >= 1
            # Returns early once the future is done, as NetworkSelector.poll does.
            self.now += 0.0005 if future.is_done else timeout_ms / 1000
            assert future.is_done or not answered, "an answer came and nobody was told"

    def producer(self, seconds: float = 60.0, **more: Any) -> Producer:
        deadline = Deadline(seconds, "writing", clock=lambda: self.now, sleep=_never_sleep, rng=random.Random(1))
        cluster: Any = self
        return Producer(cluster, transactional_id="onceflow.f", deadline=deadline, **more)


class _NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _never_sleep(_: float) -> None:
    raise AssertionError("the producer slept instead of polling")


class Connection:
    """A ready KafkaConnection; the transport's bytes are cut into frames again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.connected, self.initializing = True, False
        self.paused: set[str] = set()
        self._reauth = SimpleNamespace(is_reauthenticating=False)
        self.init_future = Future()
        self.transport = self
        self.raw = bytearray()
        self.waiting: collections.deque[tuple[int, int, Future]] = collections.deque()
        self.correlation_id = 0

    def send_request(self, request: Any, request_timeout_ms: int) -> Future:
        assert request_timeout_ms >= 1
        assert self.connected
        assert not self.initializing
        self.correlation_id += 1
        request.with_header(correlation_id=self.correlation_id, client_id="test")
        self.raw += request.encode(framed=True, header=True)
        assert request.expect_response()
        future = Future()
        self.waiting.append((self.correlation_id, request.API_VERSION, future))
        return future

    def writelines(self, buffers: list[Any]) -> None:
        for one in buffers:
            self.raw += one

    def break_(self) -> None:
        self.connected = False
        self.world.connections = {n: c for n, c in self.world.connections.items() if c is not self}
        while self.waiting:
            self.waiting.popleft()[2].failure(kafka_errors.KafkaConnectionError("gone"))

    def serve(self, most: int) -> int:
        """Let the broker answer up to ``most`` requests, in order."""
        served = 0
        while self.waiting and served < most:
            served += 1
            correlation_id, version, future = self.waiting.popleft()
            size = int.from_bytes(self.raw[:4], "big")
            frame, self.raw = bytes(self.raw[4 : 4 + size]), self.raw[4 + size :]
            assert len(frame) == size, "the frame is cut"
            request = ProduceRequest.decode(frame, version=version, header=True)
            assert (request.header.correlation_id, request.header.request_api_version) == (correlation_id, version)
            assert (request.transactional_id, request.acks) == ("onceflow.f", -1)
            self.world.requests.append(request)
            self.world.now += 0.0005
            response = self._handle(request, version)
            if response is None:
                self.waiting.appendleft((correlation_id, version, future))
                self.break_()
                return served
            future.success(response)
        return served

    def _handle(self, request: Any, version: int) -> Any:
        answers = ProduceResponse.TopicProduceResponse
        out, broken = [], False
        for topic in request.topic_data:
            parts = []
            for part in topic.partition_data:
                one = self._parse(topic.name, part)
                self.world.arrived.append(one)
                verdict = self.world.script(one)
                if verdict is None:  # the response does not mention it
                    continue
                if verdict == DELAY:
                    return None
                code, offset = (verdict, -1) if verdict not in (0, LOST, 7, 20) else self._append(one)
                if verdict in (7, 20) and code == 0:
                    code, offset = verdict, -1
                broken = broken or verdict == LOST
                parts.append(answers.PartitionProduceResponse(index=part.index, error_code=code, base_offset=offset))
            out.append(answers(name=topic.name, partition_responses=parts))
        if broken:
            return None
        response = ProduceResponse(version=version, responses=out)
        return ProduceResponse.decode(response.encode(), version=version)

    def _append(self, one: Arrived) -> tuple[int, int]:
        return self.world.logs[one.topic, one.partition].append(one)

    def _parse(self, topic: str, part: Any) -> Arrived:
        raw = bytes(part.records)
        batch = MemoryRecords(raw).next_batch()
        assert batch.validate_crc()
        assert batch.producer_id == IDENTITY.producer_id
        later = [self._places(raw_later) for raw_later in self._later()]
        alone = not any((topic, part.index) in places for places in later)
        return Arrived(
            topic, part.index, batch.producer_epoch, batch.base_sequence, batch.last_offset_delta + 1, raw, alone
        )

    def _later(self) -> list[tuple[bytes, int]]:
        """Requests that are under way behind the one that is being answered."""
        frames, rest = [], bytes(self.raw)
        for _, version, _ in self.waiting:
            size = int.from_bytes(rest[:4], "big")
            frames.append((rest[4 : 4 + size], version))
            rest = rest[4 + size :]
        return frames

    @staticmethod
    def _places(frame: tuple[bytes, int]) -> set[tuple[str, int]]:
        request = ProduceRequest.decode(frame[0], version=frame[1], header=True)
        return {(t.name, p.index) for t in request.topic_data for p in t.partition_data}


def encode(count: int, *, per_batch: int = 1, size: int = 10, epoch: int = 3) -> list[EncodedBatch]:
    """``count`` batches of ``per_batch`` records that continue each other."""
    values = pa.array([b"%06d" % n + b"v" * size for n in range(count * per_batch)], pa.binary())
    out: list[EncodedBatch] = []
    for start in range(0, count * per_batch, per_batch):
        out += encode_batches(
            None,
            values.slice(start, per_batch),
            None,
            None,
            identity=ProducerIdAndEpoch(IDENTITY.producer_id, epoch),
            base_sequence=start,
            max_batch_bytes=10_000_000,
            default_timestamp_ms=1,
        )
    return out


def raws(batches: list[EncodedBatch]) -> list[bytes]:
    return [b.head + bytes(b.body) for b in batches]

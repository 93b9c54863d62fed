"""Produces encoded batches to partition leaders, in sequence, and waits for every acknowledgement.

To *enrol* a partition is to add it to the transaction: the first batch for it does that implicitly (KIP-890).

Rules (tested in tests/unit/test_producer_state.py):

- The first batch of a partition is in flight alone until it is acknowledged, because it enrols the partition.
  Enrolments by several tasks collide at the coordinator (error 19 or 51), so the same bytes are sent again until they
  succeed. A producer has only one such request in flight to each broker. The broker handles the requests of a
  connection one after the other anyway, and the next request then enrols all partitions that wait.
- After that, at most ``MAX_IN_FLIGHT`` batches of a partition are in flight. The broker remembers the last five
  batches and recognises a repeated batch only among these; its response is then the same as the first time. Error 46
  would mean that another process has written under this epoch, so the attempt is aborted.
- After a failure in a partition, nothing is sent to it until all requests in flight have ended. Then all
  unacknowledged batches are sent again, in order and with the same bytes, the first one alone.
- Memory is limited: ``send`` waits while more than ``max_unacked_bytes`` are unacknowledged.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.producer import ProduceRequest

from onceflow.client.auth.logins import authentication_failed
from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster, unknown_topic
from onceflow.client.deadline import Deadline
from onceflow.client.library_log import muted
from onceflow.errors import BrokerUnsupportedError
from onceflow.protocol import codes
from onceflow.protocol.batches import EncodedBatch
from onceflow.protocol.codes import Code
from onceflow.protocol.produce import MAX_VERSION, MIN_VERSION, encode_produce

MAX_IN_FLIGHT = 4
_MAX_REQUEST_BYTES = 8_000_000
_REPLICAS_TIMEOUT_MS = 30_000
_THROTTLE_LOOK_S = 0.02


class _Frame:
    """A Produce request with the interface that kafka-python's connection expects: see ``_transmit``."""

    def __init__(self, version: int, topics: Any, transactional_id: str | None) -> None:
        self.API_VERSION = version
        self.API_KEY = ProduceRequest.API_KEY
        self._topics = topics
        self._transactional_id = transactional_id
        self._inner = ProduceRequest(version=version, acks=-1)  # defines the response's class and version
        self.rest: list[Any] = []

    def with_header(self, correlation_id: int, client_id: str) -> None:
        self._inner.with_header(correlation_id=correlation_id, client_id=client_id)
        first, *self.rest = encode_produce(
            self._topics,
            transactional_id=self._transactional_id,
            timeout_ms=_REPLICAS_TIMEOUT_MS,
            version=self.API_VERSION,
            correlation_id=correlation_id,
            client_id=client_id,
        )
        self._first = first

    @property
    def header(self) -> Any:
        return self._inner.header

    def encode(self, **_: Any) -> bytes:
        return bytes(self._first)

    def expect_response(self) -> bool:
        return True


@dataclass
class Acknowledged:
    """The acknowledged records of this producer in one partition."""

    base_offset: int = -1
    count: int = 0
    nbytes: int = 0
    # The offset after the last record. Records of other producers may be in between.
    end_offset: int = field(default=-1, compare=False)


@dataclass
class _Partition:
    topic: str
    partition: int
    queue: collections.deque[EncodedBatch] = field(default_factory=collections.deque)  # unacknowledged, in order
    under_way: int = 0  # how many of them, from the left, are in flight
    enrolled: bool = False
    node: int = -1  # the broker it was last sent to
    recovering: bool = False  # a failure happened: resend in order, one at a time
    attempt: int = 0
    not_before: float = 0.0
    stale_leader: bool = False
    unknown_since: float | None = None  # when its leader first responded that the topic does not exist
    problem: str = ""  # why the last batch has to be sent again
    done: Acknowledged = field(default_factory=Acknowledged)

    @property
    def window(self) -> int:
        return MAX_IN_FLIGHT if self.enrolled and not self.recovering else 1

    def sendable(self, now: float) -> bool:
        if self.recovering and self.under_way:
            return False
        return self.under_way < min(self.window, len(self.queue)) and now >= self.not_before


class Producer:
    """Writes batches under one producer id and epoch. Not thread-safe: one task, or the driver, owns it.

    Args:
        transactional_id: None for a producer without transactions.
        deadline: applies to everything this producer does.
        max_unacked_bytes: limit of memory; ``send`` waits above it.
        gathered_bytes: ``send`` waits for so many before it sends the first ones. So the batches of several partitions
            go in one request, and are enrolled by it. ``flush`` sends what there is.
        transaction_version: for a task, the one that the driver uses. None: that of the cluster.
        before: called just before the first request is sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None,
        deadline: Deadline,
        max_unacked_bytes: int = 12_000_000,
        gathered_bytes: int = 0,
        transaction_version: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        cluster.connect(deadline)
        self._before = before
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._deadline = deadline
        self._max_unacked_bytes = max_unacked_bytes
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._unacked_bytes = 0
        self._gathered_bytes = gathered_bytes
        self._unsent_bytes = 0  # at most
        self._failure: BaseException | None = None
        self._answer = _Signal()
        # Produce version 12 enrols partitions, but only if the cluster has transaction version 2 (KIP-890).
        # Never combine it with EndTxn below version 5: a late batch would then open a new transaction.
        version = cluster.transaction_version if transaction_version is None else transaction_version
        max_version = MAX_VERSION if version >= 2 or transactional_id is None else 11
        self._version = cluster.version(ProduceRequest, min_version=MIN_VERSION, max_version=max_version)

    def send(self, topic: str, partition: int, batch: EncodedBatch) -> None:
        """Queue one batch, and send what can be sent if enough is queued. Waits while more than ``max_unacked_bytes``
        are unacknowledged."""
        slot = self._partitions.get((topic, partition))
        if slot is None:
            slot = self._partitions[topic, partition] = _Partition(topic, partition)
            slot.enrolled = self._transactional_id is None  # there is no transaction
        slot.queue.append(batch)
        self._unacked_bytes += batch.nbytes
        self._unsent_bytes += batch.nbytes
        if self._unsent_bytes < self._gathered_bytes and self._unacked_bytes <= self._max_unacked_bytes:
            return
        self._unsent_bytes = 0
        self._pump(wait=False)
        while self._unacked_bytes > self._max_unacked_bytes:
            self._pump(wait=True)

    def flush(self) -> dict[tuple[str, int], Acknowledged]:
        """Wait until all batches are acknowledged by all in-sync replicas."""
        if self._failure is not None:
            raise self._failure
        while any(slot.queue for slot in self._partitions.values()):
            self._pump(wait=True)
        return {key: slot.done for key, slot in self._partitions.items()}

    # ---- sending -------------------------------------------------------------------------------------

    def _pump(self, *, wait: bool) -> None:
        """Send what can be sent, then run the event loop once."""
        if self._failure is not None:
            raise self._failure
        before, self._before = self._before, None
        if before is not None:
            before()
        self._check_deadline()  # nothing is sent after it, when whoever sends may be about to abort
        with self._cluster.lock, muted():
            now = time.monotonic()
            self._submit(now)
            self._run_loop(0.05 if wait else 0.0)
        if self._failure is not None:
            raise self._failure
        self._check_deadline()

    def _check_deadline(self) -> None:
        if self._deadline.expired:
            stuck = next((s for s in self._partitions.values() if s.queue), None)
            where = f"{stuck.topic}-{stuck.partition}" if stuck else "-"
            last = f": {stuck.problem}" if stuck and stuck.problem else ""
            raise self._deadline.error(f"unacknowledged batches for {where}{last}")

    def _run_loop(self, timeout_s: float) -> None:
        net = self._cluster.net
        self._answer.is_done = False
        if timeout_s == 0.0:
            net.poll(timeout_ms=0)
            return
        if not any(slot.under_way for slot in self._partitions.values()):
            soonest = min((s.not_before for s in self._partitions.values() if s.queue), default=0.0)
            timeout_s = min(timeout_s, max(0.001, soonest - time.monotonic()))
        net.poll(timeout_ms=max(1, int(timeout_s * 1000)), future=self._answer)

    def _submit(self, now: float) -> None:
        by_node: dict[int, list[_Partition]] = {}
        enrolling = {slot.node for slot in self._partitions.values() if slot.under_way and not slot.enrolled}
        for slot in self._partitions.values():
            if slot.sendable(now):
                node = self._leader(slot)
                if slot.enrolled or node not in enrolling:
                    by_node.setdefault(node, []).append(slot)
        for node, slots in by_node.items():
            self._submit_to(node, slots, now)

    def _leader(self, slot: _Partition) -> int:
        fresh, slot.stale_leader = slot.stale_leader, False
        return self._cluster.leader(slot.topic, slot.partition, self._deadline, fresh=fresh)

    def _submit_to(self, node: int, slots: list[_Partition], now: float) -> None:
        try:
            connection = self._cluster.manager.get_connection(node)
        except (kafka_errors.SaslAuthenticationFailedError, kafka_errors.AuthorizationError) as error:
            self._failure = authentication_failed(self._cluster.settings, error)
            return
        except kafka_errors.KafkaError as error:
            if isinstance(error, kafka_errors.UnknownBrokerIdError):
                self._cluster.refresh_brokers(self._deadline)
            for slot in slots:
                slot.not_before = now + self._deadline.backoff_s(slot.attempt)
                slot.attempt += 1
                slot.stale_leader = True
                slot.problem = f"broker {node} cannot be reached"
            return
        if not _ready(connection):
            if connection.initializing:
                connection.init_future.add_both(self._answer.set)
                connection.init_future.add_errback(self._no_login)
            elif "throttle" in connection.paused:
                for slot in slots:
                    slot.problem = "throttled by a quota of the brokers"
                    slot.not_before = now + _THROTTLE_LOOK_S
            return
        more = True
        while more and _ready(connection):
            chosen: list[tuple[_Partition, EncodedBatch]] = []
            size = 0
            more = False
            for slot in slots:
                if not slot.sendable(now):
                    continue
                batch = slot.queue[slot.under_way]
                if chosen and size + batch.nbytes > _MAX_REQUEST_BYTES:
                    more = True
                    continue
                chosen.append((slot, batch))
                size += batch.nbytes
                slot.under_way += 1
                slot.node = node
            if not chosen:
                return
            self._transmit(connection, chosen)
            more = more or any(slot.sendable(now) for slot in slots)

    def _transmit(self, connection: Any, chosen: list[tuple[_Partition, EncodedBatch]]) -> None:
        """Write one request, without copying the records.

        kafka-python encodes a request to one byte string. ``_Frame.encode`` returns only the first buffer of it.
        The other buffers are appended to the same transport before the event loop runs, so they follow directly.
        This works only on a connection that is ready (``_ready``): otherwise kafka-python would buffer the first one
        elsewhere.
        """
        topics: dict[str, list[tuple[int, EncodedBatch]]] = {}
        for slot, batch in chosen:
            topics.setdefault(slot.topic, []).append((slot.partition, batch))
        try:
            version = self._cluster.fits(ProduceRequest.API_KEY, self._version, connection)
        except BrokerUnsupportedError as error:
            self._fail(error)
            return
        frame = _Frame(version, list(topics.items()), self._transactional_id)
        try:
            future = connection.send_request(frame, request_timeout_ms=int(self._deadline.capped(30.0) * 1000) + 1)
            if not future.is_done:
                connection.transport.writelines(frame.rest)
        except (RuntimeError, AttributeError) as error:  # the transport was closed meanwhile
            self._lost(chosen, str(error))
            return
        future.add_callback(lambda response: self._answered(chosen, response))
        future.add_errback(lambda error: self._lost(chosen, f"{type(error).__name__}: {error}"))

    # ---- responses (called from the event loop) --------------------------------------------------------

    def _answered(self, chosen: list[tuple[_Partition, EncodedBatch]], response: Any) -> None:
        answers = {(topic.name, part.index): part for topic in response.responses for part in topic.partition_responses}
        for slot, batch in chosen:
            slot.under_way -= 1
            answer = answers.get((slot.topic, slot.partition))
            if answer is None:
                self._retry(slot, "the response does not mention the partition")
            elif answer.error_code == 0:
                self._acknowledge(slot, batch, answer)
            else:
                self._refused(slot, batch, answer)
        self._answer.set()

    def _acknowledge(self, slot: _Partition, batch: EncodedBatch, answer: Any) -> None:
        if not slot.queue or slot.queue[0] is not batch:
            # The batch before it was appended, too, but not acknowledged (error 7 or 20, or a slow old leader). Both
            # are sent again in order, and the broker recognises them as repeated.
            self._retry(slot, "acknowledged before an earlier batch")
            return
        slot.queue.popleft()
        slot.enrolled = True
        slot.recovering = slot.recovering and slot.under_way > 0
        slot.attempt = 0
        slot.unknown_since = None
        slot.problem = ""
        self._unacked_bytes -= batch.nbytes
        if slot.done.count == 0:
            slot.done.base_offset = int(answer.base_offset)
        slot.done.count += batch.count
        slot.done.nbytes += batch.nbytes
        slot.done.end_offset = int(answer.base_offset) + batch.count

    def _refused(self, slot: _Partition, batch: EncodedBatch, answer: Any) -> None:
        code = int(answer.error_code)
        row = codes.describe(code)
        if row.verdict.retriable or (code == 45 and slot.queue[0] is not batch):
            # 45 (out of order) after a failed batch only means that the failed one is missing. It is sent first now.
            self._retry(slot, row.name, stale_leader=row.verdict is not codes.Verdict.RETRY)
            if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                slot.unknown_since = None
            elif slot.unknown_since is None:
                slot.unknown_since = time.monotonic()
            elif time.monotonic() - slot.unknown_since > UNKNOWN_TOPIC_S:
                self._fail(unknown_topic(slot.topic))
            return
        message = getattr(answer, "error_message", None) or ""
        where = f"{slot.topic}-{slot.partition}"
        self._fail(codes.error_for(code, api="Produce", topic=where, resource=slot.topic, detail=message))

    def _lost(self, chosen: list[tuple[_Partition, EncodedBatch]], problem: str) -> None:
        for slot, _ in chosen:
            slot.under_way -= 1
            slot.unknown_since = None  # nobody has said so meanwhile
            self._retry(slot, problem, stale_leader=True)
        self._answer.set()

    def _no_login(self, error: Exception) -> None:
        """A connection could not be made. A refused login fails the producer, everything else is retried."""
        refused = isinstance(error, kafka_errors.SaslAuthenticationFailedError)
        if refused and not self._cluster.may_log_in_again(error):
            self._fail(authentication_failed(self._cluster.settings, error))

    def _retry(self, slot: _Partition, problem: str, *, stale_leader: bool = False) -> None:
        slot.recovering = True
        if not (
            slot.problem and self._deadline.expired
        ):  # what the deadline has cut short says less than what was before
            slot.problem = problem
        slot.stale_leader = slot.stale_leader or stale_leader
        slot.not_before = time.monotonic() + self._deadline.backoff_s(slot.attempt)
        slot.attempt += 1

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error


class _Signal:
    """A future for ``NetworkSelector.poll(future=...)``: done as soon as any response has arrived."""

    def __init__(self) -> None:
        self.is_done = False

    def set(self, _: object = None) -> None:
        self.is_done = True


def _ready(connection: Any) -> bool:
    """Whether a request would be written directly to the socket, and not buffered during a handshake or a pause."""
    return (
        connection.connected
        and not connection.initializing
        and not connection.paused
        and not connection._reauth.is_reauthenticating
    )

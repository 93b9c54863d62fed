"""Follows the committed records of many partitions: one Fetch in flight to each broker, which waits for new records.

`CommittedReader` reads one partition up to a known end, as fast as possible. A `LongPoll` has no end: it returns
records soon after they are committed. A broker holds a request back until there is something to return, at most
``MAX_WAIT_MS``, so that following costs little while nothing happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.consumer import FetchRequest

from onceflow.client.auth.logins import authentication_failed
from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster, TopicInfo, unknown_topic
from onceflow.client.committed import Chunk, chunks_of
from onceflow.client.deadline import Deadline
from onceflow.client.fetching import FETCH_BYTES, READ_COMMITTED, fetch_request
from onceflow.client.library_log import muted
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.clock import clock_ms
from onceflow.errors import (
    BrokerUnreachableError,
    DataLossError,
    DeadlineExceededError,
    OnceflowError,
    UnknownTopicError,
)
from onceflow.protocol import codes
from onceflow.protocol.decode import split_batches
from onceflow.protocol.names import TopicPartition

MAX_WAIT_MS = 500
_REQUEST_TIMEOUT_MS = 30_000
_LOOK_S = 2.0  # the most that one look at the metadata may take
_REPLICAS_LAG = 5  # attempts: a replica that has just become the leader may lag behind
_OFFSET_OUT_OF_RANGE, _UNKNOWN_TOPIC, _UNKNOWN_TOPIC_ID = 1, 3, 100
_BY_ID = 13  # from this version on, Fetch names topics by their ids (KIP-516)


@dataclass
class Followed:
    """One partition that is followed.

    Attributes:
        position: all committed records below this offset have been returned.
        last_stable_offset: of the last response; -1 before the first.
        answered_at: when its leader last answered without an error, on the monotonic clock; None: never.
        as_of_ms: the last response knew of everything that was committed before (epoch milliseconds). That is not when
            it was read: this process may have been stopped meanwhile, and the machine may have slept.
    """

    topic: str
    partition: int
    position: int
    last_stable_offset: int = -1
    answered_at: float | None = None
    as_of_ms: int = 0
    asked: bool = False
    attempt: int = 0
    not_before: float = 0.0
    unknown_since: float | None = None  # when a broker first answered that there is no such topic or partition

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


class LongPoll:
    """Follows partitions. Not thread-safe: one thread owns this object and its cluster.

    Args:
        cluster: connections for this object alone, because `poll` waits while it holds their lock.
        topics: the topics as they were when the positions were taken. A topic that was deleted and created again since
            then is refused.
        positions: where to begin, by topic and partition.
        fetch_bytes: size of a response, which limits memory. A single larger batch is still returned as a whole.
    """

    def __init__(
        self,
        cluster: Cluster,
        topics: Iterable[TopicInfo],
        positions: Mapping[TopicPartition, int],
        *,
        fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        self._cluster = cluster
        self._ids = {info.name: info.topic_id for info in topics}
        self._names = {topic_id: name for name, topic_id in self._ids.items()}
        # In the order in which they are asked for. A partition that has returned records goes to the end.
        self.followed = {place: Followed(*place, position=position) for place, position in positions.items()}
        self._fetch_bytes = fetch_bytes
        self._asked: dict[int, list[Followed]] = {}  # by node, while its request is in flight
        self._results: list[tuple[list[Followed], int, Any, BaseException | None]] = []
        self._stale = False
        self._arrived = _Arrived()

    def add(self, topic: str, partition: int, position: int) -> None:
        """Follow one more partition."""
        self.followed[topic, partition] = Followed(topic, partition, position=position)

    def poll(self, timeout_s: float) -> Iterator[tuple[TopicPartition, Chunk]]:
        """Wait for a response, at most this many seconds, and return the committed records in it.

        A chunk may have no records: its ``next_offset`` still says how far the partition has been read. Problems that
        may pass (no leader, no connection) are retried in later calls.

        Raises:
            DataLossError: a log ends below its position.
            UnknownTopicError: a topic was deleted, or deleted and created again.
            OnceflowError: a broker refuses a request for another reason, or data cannot be decoded.
        """
        self._refresh()
        if not self._results:
            with self._cluster.lock, muted():
                self._arrived.is_done = False
                wait_s = self._submit(time.monotonic(), timeout_s)
                self._cluster.net.poll(timeout_ms=max(1, int(wait_s * 1000)), future=self._arrived)
        while self._results:
            asked, asked_ms, response, error = self._results.pop(0)
            if error is not None:
                self._lost(asked, error)
            else:
                yield from self._answered(asked, asked_ms, response)

    # ---- sending -------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read the metadata again if a response has shown that they are out of date."""
        if not self._stale and all(self._cluster.known_topic(topic) for topic in self._ids):
            return
        deadline = Deadline(_LOOK_S, f"looking for the leaders of {', '.join(self._ids)}")
        try:
            self._cluster.connect(deadline)
            found = self._cluster.topics(self._ids, deadline, once=True)
        except (DeadlineExceededError, BrokerUnreachableError):
            return  # metadata that were read are kept, also if a partition has no leader
        except UnknownTopicError:
            self._delay([each for each in self.followed.values() if not each.asked], unknown=True)
            return
        self._stale = False
        for name, info in found.items():
            info.check_same(self._ids[name])

    def _submit(self, now: float, timeout_s: float) -> float:
        """Ask every broker that has no request for the partitions it leads. Returns for how long to wait."""
        by_node: dict[int, list[Followed]] = {}
        for each in self.followed.values():
            if each.asked:
                continue
            if each.not_before > now:
                timeout_s = min(timeout_s, each.not_before - now)
                continue
            node = self._leader(each)
            if node is None:
                self._delay([each])
            elif node not in self._asked:
                by_node.setdefault(node, []).append(each)
        for node, wanted in by_node.items():
            self._ask(node, wanted)
        return timeout_s

    def _leader(self, each: Followed) -> int | None:
        info = self._cluster.known_topic(each.topic)
        node = -1 if info is None else info.leaders.get(each.partition, -1)
        return node if node >= 0 else None

    def _ask(self, node: int, wanted: list[Followed]) -> None:
        manager = self._cluster.manager
        asked_ms = clock_ms()

        async def ask() -> Any:
            connection = manager.get_connection(node)
            await connection
            request = self._request(wanted, self._cluster.fits(FetchRequest.API_KEY, self._version(), connection))
            return await connection.send_request(request, request_timeout_ms=_REQUEST_TIMEOUT_MS)

        def done(response: Any, error: BaseException | None) -> None:
            del self._asked[node]
            for each in wanted:
                each.asked = False
            self._results.append((wanted, asked_ms, response, error))
            self._arrived.is_done = True

        self._asked[node] = wanted
        for each in wanted:
            each.asked = True
        future = self._cluster.net.call_soon_with_future(ask)
        future.add_callback(lambda response: done(response, None))
        future.add_errback(lambda error: done(None, error))

    def _version(self) -> int:
        return self._cluster.version(FetchRequest, min_version=11, max_version=_BY_ID)

    def _request(self, wanted: list[Followed], version: int) -> FetchRequest:
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for each in wanted:
            by_topic.setdefault(each.topic, []).append((each.partition, each.position))
        return fetch_request(
            version,
            by_topic,
            isolation_level=READ_COMMITTED,
            max_wait_ms=MAX_WAIT_MS,
            max_bytes=self._fetch_bytes,
            topic_ids=self._ids,
        )

    # ---- responses -----------------------------------------------------------------------------------

    def _answered(self, asked: list[Followed], asked_ms: int, response: Any) -> Iterator[tuple[TopicPartition, Chunk]]:
        if response.error_code:
            self._refused(asked, int(response.error_code), whole=True)
            return
        as_of_ms = _as_of_ms(asked_ms, response)
        waiting = {(each.topic, each.partition): each for each in asked}
        for topic in response.responses:
            name = topic.topic or self._names.get(str(topic.topic_id), "")
            for answer in topic.partitions:
                each = waiting.get((name, int(answer.partition_index)))
                if each is None:
                    continue
                if answer.error_code:
                    before = each.position
                    self._refused([each], int(answer.error_code))
                    if each.position > before:  # the log begins later
                        yield (each.topic, each.partition), Chunk(next_offset=each.position, whole=False)
                    continue
                each.attempt, each.not_before, each.unknown_since = 0, 0.0, None
                each.last_stable_offset, each.answered_at = int(answer.last_stable_offset), time.monotonic()
                each.as_of_ms = as_of_ms
                yield from self._records(each, answer, first=each is asked[0])

    def _records(self, each: Followed, answer: Any, *, first: bool) -> Iterator[tuple[TopicPartition, Chunk]]:
        """The records of one partition.

        Args:
            first: whether the partition was the first one in the request. Only then does an empty response mean that
                there is nothing up to the last stable offset (compaction has removed it): the records of partitions
                before it may have filled the response.
        """
        place = each.topic, each.partition
        end = max(each.position, each.last_stable_offset)
        before = each.position
        for chunk in chunks_of(split_batches(answer.records or b""), answer.aborted_transactions, before, end):
            each.position = chunk.next_offset
            self.followed[place] = self.followed.pop(place)  # others are first next time
            yield place, chunk
        if each.position == before < end and not answer.records:
            if first:
                each.position = end
                yield place, Chunk(next_offset=end)
            else:
                self.followed = {place: each, **self.followed}

    def _refused(self, asked: list[Followed], code: int, *, whole: bool = False) -> None:
        """An error of one partition, or (``whole``) of the whole request."""
        row = codes.describe(code)
        if code == _OFFSET_OUT_OF_RANGE and not whole:
            self._out_of_range(asked[0])
        elif code in (_UNKNOWN_TOPIC, _UNKNOWN_TOPIC_ID):
            self._stale = True
            self._delay(asked, unknown=True)
        elif row.verdict.retriable or row.verdict is codes.Verdict.UNKNOWN_OUTCOME:
            self._stale = self._stale or row.verdict is not codes.Verdict.RETRY
            self._delay(asked)
        else:
            raise codes.error_for(code, api="Fetch", topic=asked[0].name)

    def _out_of_range(self, each: Followed) -> None:
        """Continue at the log's start if the records below it were deleted. The response itself has no offsets."""
        place = {each.topic: [each.partition]}
        deadline = Deadline(_LOOK_S, f"looking for the offsets of {each.name}")
        try:
            first = list_offsets(self._cluster, place, EARLIEST, deadline)[each.topic][each.partition]
            last = list_offsets(self._cluster, place, LATEST, deadline, committed=False)[each.topic][each.partition]
        except (DeadlineExceededError, BrokerUnreachableError):
            self._delay([each])
            return
        if each.position < first:
            each.position = first
            return
        if each.position <= last or each.attempt < _REPLICAS_LAG:
            self._stale = True
            self._delay([each])
            return
        raise DataLossError(
            f"The log ends at offset {last}, although records after it were read",
            topic=each.name,
            detail=f"read up to offset {each.position}",
            next_step="find out whether the topic was deleted and created again, or whether records were lost in an "
            "unclean leader election",
        )

    def _lost(self, asked: list[Followed], error: BaseException) -> None:
        if isinstance(error, OnceflowError):
            raise error
        refused = isinstance(error, (kafka_errors.SaslAuthenticationFailedError, kafka_errors.AuthorizationError))
        if refused and not self._cluster.may_log_in_again(error):  # type: ignore[arg-type]
            raise authentication_failed(self._cluster.settings, error)  # type: ignore[arg-type]
        if not isinstance(error, (kafka_errors.KafkaError, OSError, RuntimeError)):
            raise error
        if isinstance(error, kafka_errors.UnknownBrokerIdError):
            self._cluster.refresh_brokers(Deadline(_LOOK_S, "looking for brokers"))
        self._stale = True
        self._delay(asked)

    def _delay(self, delayed: Iterable[Followed], *, unknown: bool = False) -> None:
        """Ask for these partitions again a little later."""
        now = time.monotonic()
        for each in delayed:
            each.not_before = now + Deadline(_LOOK_S, "").backoff_s(each.attempt)
            each.attempt += 1
            if unknown:
                each.unknown_since = each.unknown_since or now
                if now - each.unknown_since > UNKNOWN_TOPIC_S:
                    raise unknown_topic(each.topic)


class _Arrived:
    """A future for ``NetworkSelector.poll(future=...)``: done when any response has arrived."""

    is_done = False


def _as_of_ms(asked_ms: int, response: Any) -> int:
    """At least up to when a response knows what was committed, epoch milliseconds.

    A broker answers at any time after the request. Only if it has nothing to return it waits for as long as it may.
    """
    waited = not response.throttle_time_ms and not any(
        answer.error_code or answer.records for topic in response.responses for answer in topic.partitions
    )
    return min(clock_ms(), asked_ms + MAX_WAIT_MS) if waited else asked_ms

"""Follows the committed records of many partitions: one Fetch in flight to each broker, which waits for new records.

`CommittedReader` reads one partition up to a known end, as fast as possible. A `LongPoll` has no end: it returns
records soon after they are committed. A broker holds a request back until there is something to return, at most
``MAX_WAIT_MS``, so that following costs little while nothing happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, overload

import kafka.errors as kafka_errors
from kafka.errors import RequestTimedOutError
from kafka.protocol.consumer import FetchRequest

from onceflow.client.auth.logins import authentication_failed
from onceflow.client.chunk_form import C, ChunkForm
from onceflow.client.cluster import UNKNOWN_TOPIC_S, Cluster, TopicInfo, unknown_topic
from onceflow.client.committed import LISTS, Chunk, gather
from onceflow.client.deadline import Deadline
from onceflow.client.fetching import FETCH_BYTES, READ_COMMITTED, fetch_request
from onceflow.client.followed import Followed
from onceflow.client.holes import is_hole
from onceflow.client.leaders import known_leader
from onceflow.client.library_log import muted
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.clock import clock_ms, passing_s
from onceflow.errors import (
    BrokerUnreachableError,
    DeadlineExceededError,
    OnceflowError,
    ProtocolError,
    UnknownTopicError,
    located,
    log_replaced,
    log_too_short,
)
from onceflow.protocol import codes
from onceflow.protocol.codes import Code
from onceflow.protocol.decode import RawBatch, split_batches
from onceflow.protocol.names import TopicPartition

REQUEST_TIMEOUT_MS = 30_000

MAX_WAIT_MS = 500
_PAUSED_WAIT_MS = 50  # while partitions are paused: those that are resumed cannot be asked for before the response
_LOOK_S = 2.0  # the most that one look at the metadata may take
_REPLICAS_LAG = 5  # attempts: a replica that has just become the leader may lag behind
_REMOTE_ATTEMPT = 5  # the pause of so many attempts, before records in remote storage are asked for again
_TURNS_MIN, _TURNS_MAX = 4, 20  # of the event loop, until a request is written if its connection is ready
_BY_ID = 13  # from this version on, Fetch names topics by their ids (KIP-516)


class PollResult(NamedTuple):
    """The response to a request, or why there is none.

    Attributes:
        asked: the partitions in the request.
        asked_ms, asked_at: when it was sent, in epoch milliseconds, and as of `passing_s`.
        wait_ms: how long the broker may wait for records.
    """

    asked: list[Followed]
    asked_ms: int
    asked_at: float
    wait_ms: int
    response: Any
    error: BaseException | None

    def as_of(self) -> tuple[int, float]:
        """At least up to when the response knows what was committed: epoch milliseconds, and as of `passing_s`.

        A broker answers at any time after the request. Only if it has nothing to return it waits for as long as it may.
        """
        waited = not self.response.throttle_time_ms and not any(
            answer.error_code or answer.records for topic in self.response.responses for answer in topic.partitions
        )
        wait_ms = self.wait_ms if waited else 0
        return min(clock_ms(), self.asked_ms + wait_ms), min(passing_s(), self.asked_at + wait_ms / 1000)

    def was_not_read(self, away_s: float) -> bool:
        """Whether the request has timed out while nobody read what the broker may have answered.

        Args:
            away_s: for how long the caller has not polled before. kafka-python reads a part of what has come, and then
                looks at the time.
        """
        return isinstance(self.error, RequestTimedOutError) and away_s >= REQUEST_TIMEOUT_MS / 2000


class Arrived:
    """A future for ``NetworkSelector.poll(future=...)``: done when any response has arrived."""

    is_done = False


class LongPoll(Generic[C]):
    """Follows partitions. Not thread-safe: one thread owns this object and its cluster.

    Args:
        cluster: connections for this object alone, because `poll` waits while it holds their lock.
        topics: the topics as they were when the positions were taken. A topic that was deleted and created again since
            then is refused.
        positions: where to begin, by topic and partition.
        form: what it returns: lists, or with a `ColumnForm` Arrow columns.
        fetch_bytes: size of a response, which limits memory. A single larger batch is still returned as a whole.
        partition_bytes: size of the part of each partition in a response; None: one partition may fill it.
        max_wait_ms: how long a broker may wait for records.

    Attributes:
        partition_bytes: as above; it may be changed between calls.
    """

    @overload
    def __init__(
        self: LongPoll[Chunk],
        cluster: Cluster,
        topics: Iterable[TopicInfo],
        positions: Mapping[TopicPartition, int],
        *,
        fetch_bytes: int = ...,
        max_wait_ms: int = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        cluster: Cluster,
        topics: Iterable[TopicInfo],
        positions: Mapping[TopicPartition, int],
        form: ChunkForm[Any, C],
        *,
        fetch_bytes: int = ...,
        partition_bytes: int | None = ...,
        max_wait_ms: int = ...,
    ) -> None: ...

    def __init__(
        self,
        cluster: Cluster,
        topics: Iterable[TopicInfo],
        positions: Mapping[TopicPartition, int],
        form: ChunkForm[Any, Any] = LISTS,
        *,
        fetch_bytes: int = FETCH_BYTES,
        partition_bytes: int | None = None,
        max_wait_ms: int = MAX_WAIT_MS,
    ) -> None:
        self._max_wait_ms = max_wait_ms
        self._cluster = cluster
        self._ids = {info.name: info.topic_id for info in topics}
        self._names = {topic_id: name for name, topic_id in self._ids.items()}
        # In the order in which they are asked for. A partition that has returned records goes to the end.
        self.followed = {place: Followed(*place, position=position) for place, position in positions.items()}
        self._form: ChunkForm[Any, C] = form
        self._fetch_bytes, self.partition_bytes = fetch_bytes, partition_bytes
        self._asked: dict[int, list[Followed]] = {}  # by node, while its request is in flight
        self._unwritten = 0  # how many of these requests wait for their connections
        self._results: list[PollResult] = []
        self._stale = False
        self._polled_at = time.monotonic()
        self._arrived = Arrived()

    def add(self, topic: str, partition: int, position: int) -> None:
        """Follow one more partition."""
        self.followed[topic, partition] = Followed(topic, partition, position=position)

    def seek(self, topic: str, partition: int, position: int) -> None:
        """Go on from another position. What has been requested from the old one will not be returned."""
        paused = self.followed[topic, partition].paused
        self.followed[topic, partition] = Followed(topic, partition, position=position, paused=paused)

    def remove(self, topic: str, partition: int) -> None:
        """Do not follow a partition any more. What has been requested of it will not be returned."""
        del self.followed[topic, partition]

    def pause(self, topic: str, partition: int) -> None:
        """Leave a partition out of requests until `resume`. A request that has been sent may still return records."""
        self.followed[topic, partition].paused = True

    def resume(self, topic: str, partition: int) -> None:
        """Ask for a partition again."""
        self.followed[topic, partition].paused = False

    @property
    def is_stale(self) -> bool:
        """Whether `poll` is going to look at the metadata first, which takes time."""
        return self._stale

    def send(self) -> None:
        """Send the requests that can be sent now, and do not wait for responses: the brokers prepare them while the
        caller processes what `poll` has returned. Only partitions are asked for whose chunks have all been taken."""
        if self._stale:
            return  # `poll` looks at the metadata first, which takes time
        with self._cluster.lock, muted():
            self._submit(time.monotonic(), 0.0)
            for turn in range(_TURNS_MAX):
                if not self._unwritten and turn >= _TURNS_MIN:
                    break
                self._cluster.net.poll(timeout_ms=0)

    def poll(self, timeout_s: float) -> Iterator[tuple[TopicPartition, C]]:
        """Wait for a response, at most this many seconds, and return the committed records in it.

        A chunk may have no records: its ``next_offset`` still says how far the partition has been read, and its
        ``expired_from`` whether the log begins later than the position. Problems that may pass (no leader, no
        connection) are retried in later calls. After an error, or if the caller stops in the middle, the next call goes
        on behind the chunks that were returned.

        Raises:
            DataLossError: a log ends below its position, or has got other records there (KIP-320): its leader does not
                know the record before the position.
            UnknownTopicError: a topic was deleted, or deleted and created again.
            OnceflowError: a broker refuses a request for another reason, or data cannot be decoded.
        """
        away_s = time.monotonic() - self._polled_at
        self._refresh()
        if not self._results:
            with self._cluster.lock, muted():
                self._arrived.is_done = False
                wait_s = self._submit(time.monotonic(), timeout_s)
                self._cluster.net.poll(timeout_ms=max(1, int(wait_s * 1000)), future=self._arrived)
        self._polled_at = time.monotonic()
        while self._results:
            result = self._results.pop(0)
            try:
                if result.error is not None:
                    self._lost(result.error, [] if result.was_not_read(away_s) else result.asked)
                else:
                    yield from self._answered(result)
            finally:
                for each in result.asked:
                    each.asked = False

    # ---- sending -------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read the metadata again if a response has shown that they are out of date."""
        if not self._stale and all(self._cluster.known_topic(topic) for topic in self._ids):
            return
        deadline = Deadline(_LOOK_S, f"looking for the leaders of {', '.join(self._ids)}")
        try:
            self._cluster.connect(deadline)
            found = self._cluster.topics(self._ids, deadline, once=True, leaderless=True)
        except (DeadlineExceededError, BrokerUnreachableError):
            return
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
            if each.asked or each.paused:
                continue
            if each.not_before > now:
                timeout_s = min(timeout_s, each.not_before - now)
                continue
            node = self._leader(each)
            if node is None:
                self._stale = True
                self._delay([each])
            elif node not in self._asked:
                by_node.setdefault(node, []).append(each)
        for node, wanted in by_node.items():
            self._ask(node, wanted)
        return timeout_s

    def _leader(self, each: Followed) -> int | None:
        node = known_leader(self._cluster, each.topic, each.partition)
        return node if node >= 0 else None

    def _ask(self, node: int, wanted: list[Followed]) -> None:
        manager = self._cluster.manager
        asked_ms, asked_at = clock_ms(), passing_s()
        wait_ms = _PAUSED_WAIT_MS if any(each.paused for each in self.followed.values()) else self._max_wait_ms

        async def ask() -> Any:
            try:
                connection = manager.get_connection(node)
                await connection
                most = self._cluster.version(FetchRequest, min_version=11, max_version=_BY_ID)
                version = self._cluster.fits(FetchRequest.API_KEY, most, connection)
                response = connection.send_request(
                    self._request(wanted, version, wait_ms), request_timeout_ms=REQUEST_TIMEOUT_MS
                )
            finally:
                self._unwritten -= 1
            return await response

        def done(response: Any, error: BaseException | None) -> None:
            del self._asked[node]
            self._results.append(PollResult(wanted, asked_ms, asked_at, wait_ms, response, error))
            self._arrived.is_done = True

        self._asked[node] = wanted
        self._unwritten += 1
        for each in wanted:
            each.asked = True
        future = self._cluster.net.call_soon_with_future(ask)
        future.add_callback(lambda response: done(response, None))
        future.add_errback(lambda error: done(None, error))

    def _request(self, wanted: list[Followed], version: int, wait_ms: int) -> FetchRequest:
        by_topic: dict[str, list[tuple[int, int, int]]] = {}
        for each in wanted:
            by_topic.setdefault(each.topic, []).append((each.partition, each.position, each.leader_epoch))
        return fetch_request(
            version,
            by_topic,
            isolation_level=READ_COMMITTED,
            max_wait_ms=wait_ms,
            max_bytes=self._fetch_bytes,
            partition_bytes=self.partition_bytes,
            topic_ids=self._ids,
        )

    # ---- responses -----------------------------------------------------------------------------------

    def _answered(self, result: PollResult) -> Iterator[tuple[TopicPartition, C]]:
        response = result.response
        if response.error_code:
            self._refused(result.asked, int(response.error_code), whole=True)
            return
        as_of = result.as_of()
        waiting = {(each.topic, each.partition): each for each in result.asked}
        gathered: list[tuple[Followed, Any]] = []
        no_room: set[str] = set()  # the records of partitions before them have filled the response
        size = 0
        for topic in response.responses:
            name = topic.topic or self._names.get(str(topic.topic_id), "")
            for answer in topic.partitions:
                each = waiting.get((name, int(answer.partition_index)))
                if each is None or not self._is_followed(each):
                    continue
                if answer.error_code:
                    before = each.position
                    self._refused([each], int(answer.error_code))
                    if each.position > before:  # the log begins later
                        chunk = self._form.without_records(each.position, whole=False, expired_from=before)
                        yield (each.topic, each.partition), chunk
                    continue
                if answer.diverging_epoch is not None and answer.diverging_epoch.end_offset >= 0:
                    self._diverging(each, answer.diverging_epoch)
                    continue
                each.attempt, each.not_before, each.unknown_since = 0, 0.0, None
                each.last_stable_offset, each.answered_at = int(answer.last_stable_offset), time.monotonic()
                each.as_of_ms, each.known_at = as_of
                if not answer.records and each is not result.asked[0]:
                    no_room.update([each.name] if each.last_stable_offset > each.position else ())
                    continue
                for part in self._records(each, answer):
                    gathered.append((each, part))
                    size += part.nbytes
                    if size >= self._form.together_bytes:
                        yield from self._chunks(gathered)
                        gathered, size = [], 0
        yield from self._chunks(gathered)
        if no_room:  # they are first next time, in the order that they had before: so each one has its turn
            asked = [each for each in result.asked if each.name in no_room and self._is_followed(each)]
            self.followed = {**{(each.topic, each.partition): each for each in asked}, **self.followed}

    def _records(self, each: Followed, answer: Any) -> Iterator[Any]:
        """What the chunks of one partition are made of, if partitions before it have not filled the response."""
        begin = each.position
        end = max(begin, each.last_stable_offset)
        if answer.records:
            with located(topic=each.name):
                batches = self._noted(each, split_batches(answer.records))
                yield from gather(self._form, batches, answer.aborted_transactions, begin, end)
        elif begin < end:
            look = Deadline(_LOOK_S, f"looking for the records of {each.name}")
            if is_hole(self._cluster, each.topic, each.partition, begin, look):
                each.leader_epoch = -1  # who has appended the records that are gone is not known
                nothing = self._form.begin(end)
                nothing.whole = False
                yield nothing
            else:
                each.attempt = _REMOTE_ATTEMPT
                self._delay([each])

    def _noted(self, each: Followed, batches: Iterator[RawBatch]) -> Iterator[RawBatch]:
        for raw in batches:
            if raw.base_offset < each.last_stable_offset:
                each.leader_epoch = raw.leader_epoch
            yield raw

    def _diverging(self, each: Followed, known: Any) -> None:
        """The leader does not know the epoch of the last record, or its log leaves that of the record before there.

        No record may have been written under the epoch, if it is that of a later leader than the record's: then all is
        well, and the leader has said which epoch it knows.
        """
        if known.end_offset < each.position:
            raise log_replaced(each.name, int(known.end_offset), each.position)
        each.leader_epoch = int(known.epoch)

    def _chunks(self, gathered: list[tuple[Followed, Any]]) -> Iterator[tuple[TopicPartition, C]]:
        """Moves the positions, each just before its chunk is handed out."""
        for (each, part), chunk in zip(gathered, self._finished(gathered), strict=True):
            if self._is_followed(each):
                place = each.topic, each.partition
                each.position = part.next_offset
                self.followed[place] = self.followed.pop(place)  # others are first next time
                yield place, chunk

    def _finished(self, gathered: list[tuple[Followed, Any]]) -> list[C]:
        try:
            return self._form.finish([part for _, part in gathered])
        except ProtocolError:
            for each, part in gathered:
                with located(topic=each.name):
                    self._form.finish([part])
            raise

    def _is_followed(self, each: Followed) -> bool:
        """Not if it was removed, or its position replaced, since the request."""
        return self.followed.get((each.topic, each.partition)) is each

    def _refused(self, asked: list[Followed], code: int, *, whole: bool = False) -> None:
        """An error of one partition, or (``whole``) of the whole request."""
        row = codes.describe(code)
        if code == Code.OFFSET_OUT_OF_RANGE and not whole:
            self._out_of_range(asked[0])
        elif code in (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID):
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
            if each.attempt >= _REPLICAS_LAG:
                each.leader_epoch = -1  # an error also if the leader has never heard of the epoch: it cannot be checked
            self._stale = True
            self._delay([each])
            return
        raise log_too_short(each.name, last, "read", f"read up to offset {each.position}")

    def _lost(self, error: BaseException, delayed: list[Followed]) -> None:
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
        self._delay(delayed)

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

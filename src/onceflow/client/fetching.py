"""Fetches the log of one partition from a position to an end: requests, retries, splitting into record batches.

Two readers use it: `committed` returns committed records in columns, `log_reader` returns everything in the log. They
differ in what they return from a response, and in what they wait for.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

from kafka.protocol.consumer import FetchRequest

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.protocol import codes
from onceflow.protocol.codes import Code
from onceflow.protocol.decode import RawBatch, split_batches

T = TypeVar("T")

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
FETCH_BYTES = 8_000_000
_MIN_FETCH_BYTES = 250_000
_WAIT_S = 0.5
_GRACE_S = 2.0  # additional time for the last response: the error can then say what held the read up
_EPOCHS = 12  # from this version on, Fetch has the leader epoch of the last record


class PartitionFetch(abc.ABC, Generic[T]):
    """One read of ``[start, end)`` of one partition.

    Args:
        deadline: of the whole read; subclasses may replace it.
        max_fetch_bytes: size of a fetch, which limits memory. A single larger batch is still returned as a whole.

    Attributes:
        position: everything below this offset has been returned.
        last_stable_offset, high_watermark: from the last response; -1 before the first.
        answered: whether the leader has responded without an error.
    """

    isolation_level: ClassVar[int]
    repeats_unknown_errors: ClassVar[bool] = False
    """Whether to retry UNKNOWN_OUTCOME errors until the deadline. That is safe, because a read can be repeated."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        start: int,
        end: int,
        deadline: Deadline,
        *,
        max_fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        self.cluster, self.topic, self.partition = cluster, topic, partition
        self.name = f"{topic}-{partition}"
        self.position, self.end = start, end
        self.deadline = deadline
        self.last_stable_offset = self.high_watermark = -1
        self.answered = False
        self._max_fetch_bytes = self._fetch_bytes = max_fetch_bytes
        self._attempt = 0  # since the last response that moved the position
        self.is_remote = False  # whether records have come from remote storage, or should have

    def step(self) -> Iterator[T]:
        """Fetch once. Moves the position, or waits a little before the next fetch.

        Raises:
            DeadlineExceededError: no progress in time.
            OnceflowError: the broker returned an error that is not retriable, or its data cannot be decoded.
        """
        before = self.position
        problem, answer = self._fetch()
        if answer is not None:
            # The time that the caller needs between two items counts, too, unless a subclass replaces the deadline.
            yield from self._items(split_batches(answer.records or b""), answer)
        if self.position > before:
            self._attempt = 0
            self._progressed()
        elif answer is None:
            self._wait(problem)
        else:
            self._stalled(empty=not answer.records)

    # ---- to be implemented by readers ------------------------------------------------------------------

    @abc.abstractmethod
    def _items(self, batches: Iterator[RawBatch], answer: Any) -> Iterator[T]:
        """The items of one response. Moves the position."""

    @abc.abstractmethod
    def _out_of_range(self, answer: Any) -> str:
        """Called when the position is not in the log. Returns the reason for a retry, or raises. May move the
        position."""

    @abc.abstractmethod
    def _stalled(self, *, empty: bool) -> None:
        """Called when a response did not move the position.

        Args:
            empty: the response had no data at all, not even part of a batch.
        """

    def _progressed(self) -> None:
        """Called when the position has moved."""

    def _wait(self, problem: str) -> None:
        self.deadline.pause(self._attempt, f"Fetch {self.name}: {problem}")
        self._attempt += 1

    # ---- one request -----------------------------------------------------------------------------------

    def _fetch(self) -> tuple[str, Any]:
        """The reason for a retry and None, or '' and the partition's part of the response."""
        node = self.cluster.leader(self.topic, self.partition, self.deadline, fresh=self._attempt > 0)
        try:
            patience = Deadline(self.deadline.remaining + _GRACE_S, self.deadline.what)
            response = self.cluster.exchange(self._request(), node, patience)
        except ConnectionFailedError as lost:
            # On a slow network a large response may take longer than the request timeout: ask for less.
            self._fetch_bytes = max(self._fetch_bytes // 4, min(_MIN_FETCH_BYTES, self._max_fetch_bytes))
            return str(lost), None
        if response.error_code:
            return self._refused(int(response.error_code), None), None
        if not response.responses:
            return "the broker throttles this client", None  # a throttled response has no partitions
        answer = response.responses[0].partitions[0]
        if answer.error_code:
            return self._refused(int(answer.error_code), answer), None
        self._fetch_bytes = min(2 * self._fetch_bytes, self._max_fetch_bytes)
        self.last_stable_offset, self.high_watermark = int(answer.last_stable_offset), int(answer.high_watermark)
        self.answered = True
        return "", answer

    def _refused(self, code: int, answer: Any) -> str:
        """The reason for a retry. Raises an error that is not retriable.

        Args:
            answer: the partition's part of the response. None: the error concerns the whole request.
        """
        row = codes.describe(code)
        if code == Code.OFFSET_OUT_OF_RANGE and answer is not None:
            return self._out_of_range(answer)
        unknown = row.verdict is codes.Verdict.UNKNOWN_OUTCOME and self.repeats_unknown_errors
        if row.verdict.retriable or unknown:
            return row.name
        raise codes.error_for(
            code, api="Fetch", topic=self.name, resource=self.topic, detail=f"at offset {self.position}"
        )

    def _request(self) -> FetchRequest:
        readable = self.last_stable_offset if self.isolation_level == READ_COMMITTED else self.high_watermark
        # The broker may wait for new records only if they are still missing; that is unknown before the first response.
        # (Up to Kafka 3.7, it also waits no longer for records in remote storage.)
        wait_s = self.deadline.capped(_WAIT_S) if 0 <= readable < self.end or self.is_remote else 0.0
        return fetch_request(
            self.cluster.version(FetchRequest, min_version=11, max_version=11),
            {self.topic: [(self.partition, self.position)]},
            isolation_level=self.isolation_level,
            max_wait_ms=int(wait_s * 1000),
            max_bytes=self._fetch_bytes,
        )


def fetch_request(
    version: int,
    wanted: Mapping[str, Iterable[tuple[int, int] | tuple[int, int, int]]],
    *,
    isolation_level: int,
    max_wait_ms: int,
    max_bytes: int,
    partition_bytes: int | None = None,
    topic_ids: Mapping[str, str] = MappingProxyType({}),
) -> FetchRequest:
    """A Fetch request of a consumer without a fetch session.

    Args:
        wanted: partitions and the offsets to read from, by topic; maybe with the leader epoch of the record before, so
            that the leader tells whether it has another one there (from version 12 on, KIP-595).
        max_wait_ms: how long the broker may wait for the first record.
        max_bytes: size of the response. partition_bytes: of the part of each partition; None: the same. A single larger
            batch of the first partition that has any is still returned.
        topic_ids: by topic; needed from version 13 on, which has no names (KIP-516).
    """
    topic_type = FetchRequest.FetchTopic
    return FetchRequest(
        version=version,
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        session_id=0,
        session_epoch=-1,
        topics=[
            topic_type(
                topic=topic,
                partitions=[
                    topic_type.FetchPartition(
                        partition=partition,
                        current_leader_epoch=-1,
                        fetch_offset=offset,
                        log_start_offset=-1,
                        last_fetched_epoch=epoch[0] if epoch and version >= _EPOCHS else -1,
                        partition_max_bytes=max_bytes if partition_bytes is None else partition_bytes,
                    )
                    for partition, offset, *epoch in places
                ],
                **({"topic_id": UUID(topic_ids[topic])} if topic in topic_ids else {}),
            )
            for topic, places in wanted.items()
        ],
        forgotten_topics_data=[],
        rack_id="",
    )

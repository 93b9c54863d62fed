"""Takes the first or last committed records of a topic, without a consumer group and without a transactional id."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from onceflow.admin.records import topic_records
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, list_offsets
from onceflow.errors import OptionError
from onceflow.state.api.record import Record

MAX_RECORDS = 1_000_000  # of an excerpt that begins at a time: all of it is in the memory of one process
_CALL_S = 60.0
_FIRST_RANGE = 100  # offsets; a range has more if more records are wanted
_RANGE_GROWTH = 4  # aborted and compacted records leave holes, so the next range backwards is larger


@dataclass(frozen=True)
class Excerpt:
    """Which records of a topic are wanted.

    Args:
        count: at most this many records in all partitions together.
        newest: the last ones; otherwise the first ones.
        since_ms: only records with this timestamp or a later one, in epoch milliseconds.
        partitions: only these; None: all.
        fails_beyond: an error if there are more records than ``count``.
    """

    count: int
    newest: bool = True
    since_ms: int | None = None
    partitions: Sequence[int] | None = None
    fails_beyond: bool = False


def take(cluster: Cluster, topic: str, wanted: Excerpt, check: Callable[[], None] = lambda: None) -> list[Record]:
    """The records of an excerpt up to the current last stable offsets, the oldest first.

    From each partition come its last (or first) records, in the order of their offsets. Between partitions, timestamps
    decide which records come and in which order. At most twice the wanted records are in memory, and one fetch.

    Args:
        check: called repeatedly; an exception that it raises ends the reading.

    Raises:
        UnknownTopicError: there is no such topic. OptionError: it has no such partition, or too many records.
        OnceflowError: the brokers do not answer, or refuse a request.
    """
    deadline = Deadline(_CALL_S, f"reading {topic}")
    ends = topic_records.stable_offsets(cluster, topic, wanted.partitions, deadline)
    starts = list_offsets(cluster, {topic: sorted(ends)}, EARLIEST, deadline)[topic]
    if wanted.since_ms is not None:
        found = list_offsets(cluster, {topic: sorted(ends)}, wanted.since_ms, deadline)[topic]
        starts = {number: max(starts[number], at) if at >= 0 else ends[number] for number, at in found.items()}
    reader = _TopicReader(
        CommittedReader(cluster, fetch_bytes=topic_records.FETCH_BYTES), topic, wanted.since_ms, check
    )
    most = wanted.count + wanted.fails_beyond
    taken: list[Record] = []
    for number, end in ends.items():
        if wanted.newest:
            taken = newest_of(taken, reader.last(number, starts[number], end, most), most)
        else:
            taken = oldest_of(taken, reader.first(number, starts[number], end, most), most)
    if len(taken) > wanted.count:
        raise OptionError(
            f"There are more than {wanted.count:,} records",
            topic=topic,
            next_step="give last= or first= beside since=, or a later time",
        )
    return taken


def newest_of(one: Sequence[Record], other: Sequence[Record], count: int) -> list[Record]:
    """The last ``count`` records of two sequences, each of which keeps its order; the oldest first."""
    both = heapq.merge(reversed(one), reversed(other), key=lambda record: -_stamp(record))
    return list(islice(both, count))[::-1]


def oldest_of(one: Iterable[Record], other: Iterable[Record], count: int) -> list[Record]:
    """The first ``count`` records of two sequences, each of which keeps its order; the oldest first."""
    return list(islice(heapq.merge(one, other, key=_stamp), count))


def _stamp(record: Record) -> int:
    return -1 if record.timestamp_ms is None else record.timestamp_ms


@dataclass(frozen=True)
class _TopicReader:
    """Reads the newest or the oldest records of partitions of a topic."""

    reader: CommittedReader
    topic: str
    since_ms: int | None
    check: Callable[[], None]

    def first(self, partition: int, start: int, end: int, count: int) -> list[Record]:
        return list(islice(self._records(partition, start, end), count))

    def last(self, partition: int, start: int, end: int, count: int) -> list[Record]:
        """Reads backwards, in ranges of offsets that grow, until there are enough visible records."""
        pieces: list[deque[Record]] = []
        missing, width = count, max(count, _FIRST_RANGE)
        while end > start and missing:
            low = max(start, end - width)
            piece = deque(self._records(partition, low, end), maxlen=missing)
            pieces.append(piece)
            missing -= len(piece)
            end, width = low, width * _RANGE_GROWTH
        return [record for piece in reversed(pieces) for record in piece]

    def _records(self, partition: int, start: int, end: int) -> Iterator[Record]:
        for chunk in self.reader.read(self.topic, partition, start, end):
            self.check()
            for record in topic_records.records_of(chunk, self.topic, partition):
                if self.since_ms is None or _stamp(record) >= self.since_ms:
                    yield record

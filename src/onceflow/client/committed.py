"""Reads the committed records of one partition, fast: to restore state from a changelog.

Fetch with ``isolation_level=1`` returns everything below the last stable offset, and nothing above it. This includes
records of aborted transactions and transaction markers, with a list of the aborted transactions (KIP-98). The reader
drops both; what remains is what a read_committed consumer sees.

Callers give the end offset. They know it from committed progress: all of the flow's records up to there are decided.
So the reader does not follow a growing log. It waits for an open transaction of another producer only if that begins
below the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onceflow.client.chunk_form import C, ChunkForm, G
from onceflow.client.cluster import Cluster
from onceflow.client.column_chunks import ColumnChunk, ColumnForm
from onceflow.client.deadline import Deadline
from onceflow.client.fetching import FETCH_BYTES, READ_COMMITTED, PartitionFetch
from onceflow.client.holes import is_hole
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.errors import DataLossError, DeadlineExceededError, located, log_too_short
from onceflow.protocol.decode import ABORT, DecodedBatch, HeaderList, Payloads, RawBatch
from onceflow.protocol.record_fields import Int64s

_CHUNK_BYTES = 16_000_000  # after decompression; a response with more is returned as several chunks


@dataclass(slots=True)
class Chunk:
    """Consecutive committed records; row ``i`` of each list belongs to the same record.

    Args:
        keys, values: payloads; None for null.
        headers: by row, only for records that have headers. Records may share one list, so do not change it.
        next_offset: where reading continues. All committed records below it have been returned.
        stamps, places: `timestamps_ms` and `offsets`, in one array for each record batch.
        plain: first row, and the row behind the last one, of records that are in no transaction.
        whole: whether the log still has every batch and record from the end of the last chunk to ``next_offset``, with
            those of aborted transactions. False: compaction or retention has removed some.
        expired_from: None, or: the records from this offset to ``next_offset`` were removed before they were read,
            because the log begins later. Such a chunk has no records.
        nbytes: size of the record batches after decompression.
    """

    keys: Payloads = field(default_factory=list)
    values: Payloads = field(default_factory=list)
    headers: dict[int, HeaderList] = field(default_factory=dict)
    next_offset: int = 0
    stamps: list[Int64s] = field(default_factory=list, repr=False)
    places: list[Int64s] = field(default_factory=list, repr=False)
    plain: list[tuple[int, int]] = field(default_factory=list, repr=False)
    whole: bool = True
    expired_from: int | None = None
    nbytes: int = 0

    @property
    def timestamps_ms(self) -> Int64s:
        """Epoch milliseconds, by row. The arrays are joined only on access, because a restore does not need it."""
        return _joined(self.stamps)

    @property
    def offsets(self) -> Int64s:
        """Offsets, by row. Also joined only on access."""
        return _joined(self.places)

    def take(self, raw: RawBatch, start: int, end: int) -> None:
        """See `onceflow.client.chunk_form.Gathered`."""
        batch, before = raw.decode(), len(self.keys)
        self.add(batch, start, end)
        if not raw.transactional:
            self.plain.append((before, len(self.keys)))
        self.nbytes += batch.nbytes

    def add(self, batch: DecodedBatch, start: int, end: int) -> None:
        """Append the records of a batch whose offsets are in ``[start, end)``."""
        low, high = np.searchsorted(batch.offsets, (start, end)).tolist()
        shift = len(self.keys) - low
        whole = high - low == len(batch.keys)
        self.keys += batch.keys if whole else batch.keys[low:high]
        self.values += batch.values if whole else batch.values[low:high]
        self.stamps.append(batch.timestamps_ms[low:high])
        self.places.append(batch.offsets[low:high])
        for row, listed in batch.headers.items():
            if low <= row < high:
                self.headers[row + shift] = listed


class ListForm(ChunkForm[Chunk, Chunk]):
    """Makes `Chunk`."""

    together_bytes = 0

    def begin(self, next_offset: int) -> Chunk:
        return Chunk(next_offset=next_offset)

    def finish(self, gathered: Sequence[Chunk]) -> list[Chunk]:
        return list(gathered)


LISTS = ListForm()


def _joined(pieces: Sequence[Int64s]) -> Int64s:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


class CommittedReader:
    """Reads committed records of partitions up to an end. All records below it are decided, or will be soon.

    It is as thread-safe as ``Cluster``, no more. One thread may advance several reads in turn.

    Args:
        cluster: connections of this process.
        deadline_seconds: for how long a read may make no progress: not one more record, marker or batch. The
            duration of the whole read is not limited.
        fetch_bytes: size of a fetch, which limits memory. A single larger batch is still returned as a whole.
        check: called before each fetch, also while an open transaction is waited for. It may raise, to stop the read.
    """

    def __init__(
        self,
        cluster: Cluster,
        deadline_seconds: float = 60.0,
        *,
        fetch_bytes: int = FETCH_BYTES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._cluster = cluster
        self._seconds = deadline_seconds
        self._fetch_bytes = fetch_bytes

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        """Committed records with offsets in ``[start, end)``, in order. Begins at the log's start if that is later.

        A chunk may have no records: all were aborted, or they have been removed. The last chunk has
        ``next_offset == end``. If ``start >= end`` there is no chunk.

        Raises:
            DeadlineExceededError: no progress for ``deadline_seconds``, because an open transaction holds the last
                stable offset back, or because no leader answers.
            DataLossError: the log ends below ``start`` or ``end``.
            ProtocolError: a batch is damaged or has an old format.
            OnceflowError: the broker refuses the request for another reason.
        """
        return self._read(LISTS, topic, partition, start, end)

    def read_columns(
        self, topic: str, partition: int, start: int, end: int, *, headers: bool = False
    ) -> Iterator[ColumnChunk]:
        """As `read`, in Arrow columns.

        Args:
            headers: whether the headers are wanted.
        """
        return self._read(ColumnForm(headers=headers), topic, partition, start, end)

    def _read(self, form: ChunkForm[Any, C], topic: str, partition: int, start: int, end: int) -> Iterator[C]:
        read = _CommittedRead(form, self._cluster, topic, partition, start, end, self._seconds, self._fetch_bytes)
        return read.chunks(self._check)

    def end(self, topic: str, partition: int) -> int:
        """The last stable offset of a partition now."""
        deadline = Deadline(self._seconds, f"looking for the end of {topic}-{partition}")
        return list_offsets(self._cluster, {topic: [partition]}, LATEST, deadline)[topic][partition]


class _CommittedRead(PartitionFetch[C]):
    """One call of ``read``."""

    isolation_level = READ_COMMITTED
    repeats_unknown_errors = True

    def __init__(
        self,
        form: ChunkForm[Any, C],
        cluster: Cluster,
        topic: str,
        partition: int,
        start: int,
        end: int,
        seconds: float,
        fetch_bytes: int,
    ) -> None:
        self._form = form
        self._seconds = seconds
        self._expired_from: int | None = None
        deadline = _deadline(seconds, f"{topic}-{partition}", start)
        super().__init__(cluster, topic, partition, start, end, deadline, max_fetch_bytes=fetch_bytes)

    def chunks(self, check: Callable[[], None]) -> Iterator[C]:
        handed_out = self.end if self.position >= self.end else -1  # the caller has all records below it
        self._progressed()  # the caller may ask for the first chunk a long time after the call
        with located(topic=self.name):
            while self.position < self.end:
                check()
                for chunk in self.step():
                    handed_out = self.position
                    yield chunk
                if self._expired_from is not None:
                    expired, self._expired_from, handed_out = self._expired_from, None, self.position
                    yield self._form.without_records(self.position, whole=False, expired_from=expired)
        if handed_out < self.end:
            yield self._form.without_records(self.end, whole=False)

    def _progressed(self) -> None:
        self.deadline = _deadline(self._seconds, self.name, self.position)

    def _items(self, batches: Iterator[RawBatch], answer: Any) -> Iterator[C]:
        for gathered in gather(self._form, batches, answer.aborted_transactions, self.position, self.end):
            (chunk,) = self._form.finish([gathered])
            self.position = gathered.next_offset
            yield chunk

    def _stalled(self, *, empty: bool) -> None:
        if self.last_stable_offset >= self.end and empty:
            if is_hole(self.cluster, self.topic, self.partition, self.position, self.deadline):
                self.position = self.end
            else:
                self.is_remote = True
                self._wait("the records have not come from remote storage")
        elif not self.deadline.wait(0):
            raise self._held_back()

    # ---- what went wrong -----------------------------------------------------------------------------

    def _out_of_range(self, answer: Any) -> str:
        """Continue at the log's start, if the records below it were deleted."""
        place = {self.topic: [self.partition]}
        first = list_offsets(self.cluster, place, EARLIEST, self.deadline)[self.topic][self.partition]
        if self.position < first:
            self._expired_from, self.position = self.position, min(first, self.end)
            return f"the log starts at {first}"
        last = list_offsets(self.cluster, place, LATEST, self.deadline, committed=False)[self.topic][self.partition]
        if self.position <= last:
            return f"offset {self.position} is in the log now"  # another replica has become the leader meanwhile
        raise self._too_short(last)

    def _held_back(self) -> Exception:
        if self.high_watermark < self.end:
            return self._too_short(self.high_watermark)
        return DeadlineExceededError(
            f"An open transaction holds back committed records below offset {self.end}: "
            f"no progress in {self._seconds:g} s",
            topic=self.name,
            detail=f"the last stable offset is {self.last_stable_offset}, the log ends at {self.high_watermark}; read "
            f"up to {self.position}",
            next_step=f"`onceflow transactions list --topic {self.topic}` shows whose transaction is open; end that "
            "producer, or abort its transaction with `onceflow transactions abort`",
        )

    def _too_short(self, last: int) -> DataLossError:
        return log_too_short(self.name, last, "committed", f"reading from {self.position} to {self.end}")


def gather(
    form: ChunkForm[G, Any], batches: Iterator[RawBatch], aborted_transactions: Any, start: int, end: int
) -> Iterator[G]:
    """What the chunks of one Fetch response are made of: its committed records with offsets in ``[start, end)``, in
    parts of limited size.

    Args:
        batches: the record batches of the response.
        aborted_transactions: as in the response; None: there are none.
    """
    aborted = Aborted((int(each.first_offset), int(each.producer_id)) for each in aborted_transactions or ())
    gathered = form.begin(start)
    for raw in batches:
        if raw.base_offset > gathered.next_offset or raw.count != raw.last_offset - raw.base_offset + 1:
            gathered.whole = False
        if raw.base_offset >= end:
            gathered.next_offset = end
            break
        if aborted.keeps(raw):
            gathered.take(raw, start, end)
        # Compaction may have removed the last records of a batch; the batch still extends to its last offset.
        gathered.next_offset = max(gathered.next_offset, min(raw.last_offset + 1, end))
        if gathered.nbytes >= _CHUNK_BYTES:
            start = gathered.next_offset
            yield gathered
            gathered = form.begin(start)
    if gathered.next_offset > start:
        yield gathered


def _deadline(seconds: float, name: str, position: int) -> Deadline:
    return Deadline(seconds, f"reading committed records of {name} at offset {position}")


class Aborted:
    """Which batches of one Fetch response belong to aborted transactions.

    Args:
        transactions: (first offset, producer id) of each, as in the response, in any order.
    """

    def __init__(self, transactions: Any) -> None:
        self._ahead: list[tuple[int, int]] = list(transactions)
        heapq.heapify(self._ahead)
        self._open: set[int] = set()  # producers with an aborted transaction at the current position

    def keeps(self, batch: RawBatch) -> bool:
        """Whether the batch has committed records. Must be called for every batch, in order of offsets."""
        while self._ahead and self._ahead[0][0] <= batch.last_offset:
            self._open.add(heapq.heappop(self._ahead)[1])
        if batch.control:
            if batch.producer_id in self._open and batch.decode().marker == ABORT:
                self._open.discard(batch.producer_id)
            return False
        return not (batch.transactional and batch.producer_id in self._open)

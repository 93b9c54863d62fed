"""Step ``progress`` of a batch that the driver writes, sent before its rows are acknowledged.

In a transaction, rows, progress record and source offsets are visible together or not at all (I1). So they need not
wait for each other, only EndTxn for all of them. The offsets are sent when a batch begins, and the record with the last
rows, in the same request. What was sent ahead is compared with what the batch has come to at step ``progress``: if it
is not the same, the attempt is aborted (the record), or the right ones follow (the offsets).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from onceflow.client.deadline import Deadline
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.errors import BatchAbortedError
from onceflow.protocol.batches import EncodedBatch
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Offsets, Progress

_UNSURE = 100  # batches, after another flow has written to the partition of the record


class RecordPosition:
    """Where the next progress record is going to be, if nobody else writes to its partition.

    Attributes:
        next: its offset; None: nobody can tell.
    """

    def __init__(self) -> None:
        self.next: int | None = None
        self._unsure = 0  # for so many batches nobody should guess

    def written(self, offset: int) -> None:
        """The record of a transaction is there. Its marker follows."""
        self._unsure = _UNSURE if self.next not in (None, offset) else max(0, self._unsure - 1)
        self.next = offset + 2 if offset >= 0 and not self._unsure else None

    def forget(self) -> None:
        """A transaction is aborted: it may have left a record, a marker, or nothing."""
        self.next = None


class ProgressAhead:
    """Progress of one attempt, for `Delivery.ahead`.

    Args:
        progress: see `Delivery.ahead`.

    Attributes:
        written: what was sent. offset: of its record, when it is acknowledged.
    """

    def __init__(self, session: DriverSession, progress: Callable[[Collection[str]], Progress] | None) -> None:
        self._session = session
        self._progress = progress
        self.topic_partition: TopicPartition = progress_log.topic_partition_of(session.names.progress_key)
        self.written: Progress | None = None
        self.offset = -1

    def send_offsets(self, offsets: Offsets, record: int, deadline: Deadline) -> None:
        """Send the group's offsets, which point to a record that is not there yet."""
        names = self._session.names
        metadata = progress_log.hint(names.progress_key, record)
        self._session.transactions.send_offsets(names.group_id, offsets, deadline, metadata=metadata)

    def before_rows(self) -> None:
        """The group is a part of the transaction before rows are: two requests that add something to it at the same
        time would collide, and the broker would try the second one again 20 ms later."""
        self._session.transactions.await_offsets()

    def record(self, topics: Collection[str]) -> EncodedBatch | None:
        """The record; nothing is written behind it."""
        if self._progress is None:
            return None
        self.written = self._progress(topics)
        return progress_log.record_of(self.written, self._session.names, self._session.transactions.identity)

    def acknowledged(self, offset: int) -> None:
        """It is there."""
        self.offset = offset

    def checked(self, progress: Progress) -> Progress:
        """Progress as it was written: that of the batch.

        Raises:
            BatchAbortedError: the batch has come to another one.
        """
        assert self.written is not None
        if replace(progress, time_ms=self.written.time_ms) != self.written:
            raise BatchAbortedError(
                "The progress that was sent with the rows is not that of the batch",
                flow=progress.flow,
                batch=progress.batch_id,
                next_step="none: the batch is aborted and run again under a new epoch",
            )
        return self.written

"""The steps of the sink under each guarantee: which of them are in a transaction, and in which order they run.

Everything else of a batch (plan, tasks, encoding, audit) is the same code for all three guarantees:

- ``exactly_once``: rows, progress and source offsets in one transaction.
- ``at_least_once``: rows, then progress. After a crash in between the rows are written again. There is no transaction.
  An idempotent producer keeps the records of a partition in order, and its own retries write no duplicates (KIP-98).
  With state, it also fences older drivers.
- ``at_most_once``: progress, then rows. A crash in between loses the rows; nothing is tried twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.transaction_requests import idempotent_producer
from onceflow.client.transactions import Outcome
from onceflow.driver.record import progress_log
from onceflow.driver.record.progress_ahead import ProgressAhead, RecordPosition
from onceflow.driver.record.session import DriverSession, enrolled, partitions_of
from onceflow.messages import Report
from onceflow.planning.options import AT_MOST_ONCE, EXACTLY_ONCE
from onceflow.protocol.batches import ProducerIdAndEpoch, next_sequence
from onceflow.protocol.names import Names, TopicPartition
from onceflow.protocol.progress import Offsets, Progress
from onceflow.protocol.transaction import GIVEN, Epoch, Event, Mode, Phase, Transaction
from onceflow.task.row_writer import Companion

_LOOK_S = 5.0
# So often a driver that writes no transactions asks for an epoch. Otherwise Kafka would forget its transactional id
# after ``transactional.id.expiration.ms`` (7 days), and the next driver would get a producer id that fences nobody.
_OWNED_S = 3600.0

Sequences = Mapping[tuple[str, int], int]


class Delivery(Protocol):
    """How a batch gets its producer id and epoch, writes its progress, and ends.

    Args:
        transactional_id: of the rows' producers; None without transactions.
        progress_first: whether progress moves before anything is written.
    """

    @property
    def progress_first(self) -> bool: ...

    @property
    def transactional_id(self) -> str | None: ...

    @property
    def machine(self) -> Transaction:
        """The state of the batch. The steps report their events to it."""
        ...

    @property
    def sequences(self) -> Sequences:
        """The next sequence number of the producer in each partition; 0 for partitions that are not in it."""
        ...

    def begin(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Producer id and epoch under which this attempt's rows are written."""
        ...

    def written(self, reports: Iterable[Report]) -> None:
        """All rows are acknowledged, and the audit has passed."""
        ...

    def ahead(
        self, progress: Callable[[Collection[str]], Progress] | None, offsets: Offsets, deadline: Deadline
    ) -> Companion | None:
        """What can be sent of step ``progress`` before the rows are acknowledged, because the transaction alone decides
        about all of it. The offsets are sent now, the record with the last rows.

        Args:
            progress: returns it, for the topics that rows were written to; None: it is not known before the
                acknowledgements.

        Returns:
            What goes with the rows; None: everything comes in its turn.
        """
        ...

    def write_progress(self, progress: Progress, offsets: Offsets, deadline: Deadline) -> Progress:
        """Step ``progress``: the record and the group's offsets. Returns progress as it was written."""
        ...

    def end(self, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Outcome:
        """Step ``end``: it decides whether the batch is committed.

        Args:
            meanwhile: called while this is being decided, if that takes a request. It must not raise.
        """
        ...

    def abort(self, deadline: Deadline) -> None:
        """Nothing more is written under this attempt's producer id and epoch."""
        ...


class ExactlyOnce:
    """One transaction for everything (I1)."""

    progress_first = False

    def __init__(self, session: DriverSession, topics: Iterable[str]) -> None:
        self.sequences: Sequences = {}  # each transaction has an epoch of its own, whose sequences start at 0 (I4)
        self._session = session
        self._transactions = session.transactions
        self._markers = session.markers
        self._topics = {*topics}  # topics that are written to, as far as is known
        # Of this transaction: its first offset in each partition, or None if the offset is not known.
        self._topic_partitions: dict[TopicPartition, int | None] = {}
        self._progress: Progress | None = None  # of this transaction
        self._ahead: ProgressAhead | None = None  # of this transaction
        self._position = RecordPosition()
        self.machine = self._transactions.machine

    @property
    def transactional_id(self) -> str | None:
        return self._transactions.transactional_id

    def begin(self, deadline: Deadline) -> ProducerIdAndEpoch:
        self._markers.confirm(deadline)
        producer = self._transactions.begin(deadline)
        self._topic_partitions, self._ahead = {}, None
        return producer

    def written(self, reports: Iterable[Report]) -> None:
        """All rows are acknowledged. The first offset in each partition is kept, to check for missing markers later."""
        for report in reports:
            if report.topic is not None:
                known = report.base_offset >= 0  # a broker may not return it for a record batch that it already has
                self._topic_partitions[report.topic, report.partition] = report.base_offset if known else None
                self._topics.add(report.topic)
        self.machine.on(Event.ROWS_AUDITED)

    def ahead(
        self, progress: Callable[[Collection[str]], Progress] | None, offsets: Offsets, deadline: Deadline
    ) -> Companion | None:
        if not self._transactions.version_2 or not offsets:
            return None
        self._ahead = ProgressAhead(self._session, progress)
        if self._position.next is not None:
            self._ahead.send_offsets(offsets, self._position.next, deadline)
        return self._ahead

    def write_progress(self, progress: Progress, offsets: Offsets, deadline: Deadline) -> Progress:
        ahead, self._ahead = self._ahead, None
        written = None
        if ahead is not None and ahead.written is not None:
            progress, written = ahead.checked(progress), ahead.offset
        offset = progress_log.write_progress(
            *(self._session.cluster, self._transactions, self._session.names),
            *(progress, offsets, deadline),
            written=written,
        )
        self._topic_partitions[progress_log.topic_partition_of(progress.flow)] = offset
        self._position.written(offset)
        self._progress = progress
        return progress

    def end(self, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Outcome:
        outcome = self._transactions.end(deadline, commit=True, meanwhile=meanwhile)
        if outcome is Outcome.COMMITTED:
            self._committed()
        return outcome

    def _committed(self) -> None:
        if self._progress is not None:
            self._session.committed(self._progress)
        self._markers.ended(self._topic_partitions)

    def commit(self, deadline: Deadline, *, doing: str) -> None:
        """As `end`, for a transaction that belongs to no batch. Raises what ``Transactions.commit`` raises."""
        self._transactions.commit(deadline, flow=self._session.names.flow, doing=doing)
        self._committed()

    def abort(self, deadline: Deadline) -> None:
        self._position.forget()
        phase = self.machine.phase
        if phase is Phase.COMPLETING_COMMIT:
            return  # an abort would drop committed records whose markers are missing
        if phase in (Phase.IDLE, Phase.COMMITTED, Phase.SETTLED, Phase.ABORTED):
            # The failure came before this transaction was open: at its begin, or while the markers of the last one
            # were checked. The outcome of the last one stays as it is.
            self._transactions.renew(deadline)
            return
        if phase is Phase.COMPLETING_ABORT:
            self._transactions.abort(deadline)
            return
        topic_partitions = self._enrolled(deadline)
        self._transactions.abort(deadline)
        self._markers.ended(topic_partitions)

    def _enrolled(self, deadline: Deadline) -> dict[TopicPartition, int | None]:
        """Where a failed attempt may have written. It can be more than it has reported, and more than Kafka reports."""
        progress = progress_log.topic_partition_of(self._session.names.progress_key)
        look = Deadline(deadline.capped(_LOOK_S), "looking at the transaction")  # leaves time for the abort
        known = enrolled(self._session.described(look))
        return dict.fromkeys({progress, *known, *partitions_of(self._session.cluster, self._topics, deadline)})


class WithoutTransactions:
    """Rows and progress one after the other. The same producer id is used until an attempt fails."""

    transactional_id: str | None = None

    def __init__(self, cluster: Cluster, names: Names, *, progress_first: bool = False) -> None:
        self.progress_first = progress_first
        self._cluster = cluster
        self._names = names
        self.machine = Transaction(Mode.AT_MOST_ONCE if progress_first else Mode.AT_LEAST_ONCE, GIVEN)
        self._producer: ProducerIdAndEpoch | None = None
        self._sequences: dict[tuple[str, int], int] = {}

    @property
    def sequences(self) -> Sequences:
        return self._sequences

    def begin(self, deadline: Deadline) -> ProducerIdAndEpoch:
        if self._producer is None:
            self._producer = idempotent_producer(self._cluster, deadline)
            self._sequences = {}
        self.machine.on(Event.BEGIN)
        return self._producer

    def written(self, reports: Iterable[Report]) -> None:
        for report in reports:
            if report.topic is not None:
                topic_partition = (report.topic, report.partition)
                self._sequences[topic_partition] = next_sequence(self._sequences.get(topic_partition, 0), report.count)
        self.machine.on(Event.ROWS_AUDITED)

    def ahead(
        self, progress: Callable[[Collection[str]], Progress] | None, offsets: Offsets, deadline: Deadline
    ) -> Companion | None:
        """Nothing: without a transaction, progress is true as soon as it is written."""
        return None

    def write_progress(self, progress: Progress, offsets: Offsets, deadline: Deadline) -> Progress:
        progress_log.write_progress(self._cluster, None, self._names, progress, offsets, deadline)
        self.machine.on(Event.PROGRESS_WRITTEN)
        return progress

    def end(self, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Outcome:
        """There is nothing to decide: what was written is visible already."""
        self.machine.on(Event.COMMIT)
        return Outcome.COMMITTED

    def abort(self, deadline: Deadline) -> None:
        """It is unknown how far the failed attempt got. So the next one gets a new producer id, with new sequences."""
        self._producer = None
        self.machine.on(Event.ABORT)


class AtLeastOnceWithState(WithoutTransactions):
    """Rows and changes of state, then progress; an older driver of the flow is fenced.

    With state, two drivers at once would not only duplicate rows: the older one could overwrite newer state. So
    everything is written under the producer id and epoch of the flow's transactional id, but outside of transactions.
    A partition's leader rejects the older epochs of a producer id as soon as it has a record of a newer one. The first
    record of a run is its progress, once more: from then on an older driver cannot move progress.

    Args:
        progress: with which the run begins. It says that rows of the tables may follow which have no progress.
    """

    def __init__(self, session: DriverSession, progress: Progress) -> None:
        super().__init__(session.cluster, session.names)
        self._session = session
        self._first: Progress | None = progress
        self._owned_at = time.monotonic()

    def begin(self, deadline: Deadline) -> ProducerIdAndEpoch:
        if self._producer is not None and time.monotonic() - self._owned_at > _OWNED_S:
            self._session.transactions.renew(deadline)
            self._producer = None
        if self._producer is None:
            self._owned_at = time.monotonic()
            self._producer = self._owned(deadline)
            self._sequences = {}
        if self._first is not None:
            self._write(self._producer, self._first, {}, deadline)
            self._first = None
        return super().begin(deadline)

    def write_progress(self, progress: Progress, offsets: Offsets, deadline: Deadline) -> Progress:
        if self._producer is None:
            raise RuntimeError("begin has not been called")
        self._write(self._producer, progress, offsets, deadline)
        self.machine.on(Event.PROGRESS_WRITTEN)
        return progress

    def abort(self, deadline: Deadline) -> None:
        """The next attempt has another epoch. It fences tasks of the failed one where it writes itself.

        Raises:
            FencedError: a newer driver owns the flow.
        """
        self._session.transactions.renew(deadline)
        super().abort(deadline)

    def _owned(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """The flow's producer id, and an epoch that nothing was written under."""
        transactions = self._session.transactions
        self._session.markers.confirm(deadline)  # a partition with an open transaction takes no other records
        if transactions.machine.epoch is not Epoch.FRESH:
            transactions.renew(deadline)
        return replace(transactions.identity, transactional=False)

    def _write(self, producer: ProducerIdAndEpoch, progress: Progress, offsets: Offsets, deadline: Deadline) -> None:
        topic_partition = progress_log.topic_partition_of(progress.flow)
        sequence = self._sequences.get(topic_partition, 0)
        progress_log.write_progress(
            self._cluster, None, self._names, progress, offsets, deadline, producer=(producer, sequence)
        )
        self._sequences[topic_partition] = next_sequence(sequence, 1)
        self._session.committed(progress)


def delivery(
    guarantee: str, session: DriverSession, topics: Iterable[str], *, with_state: Progress | None = None
) -> Delivery:
    """The delivery for a guarantee, which has been checked.

    Args:
        topics: outputs and tables, as far as they are known at a start.
        with_state: for a query with process steps, the progress with which its run begins.
    """
    if guarantee == EXACTLY_ONCE:
        return ExactlyOnce(session, topics)
    if with_state is not None:
        return AtLeastOnceWithState(session, with_state)
    return WithoutTransactions(session.cluster, session.names, progress_first=guarantee == AT_MOST_ONCE)

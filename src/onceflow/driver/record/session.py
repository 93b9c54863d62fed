"""Step ``init``: a driver that starts fences older drivers. After that, all transactions of the flow are decided.

The transactional id is initialised first. That fences older drivers and aborts their open transaction, so what is read
afterwards does not change any more. Then missing markers are written (``client/markers.py``): first that of the
progress record, which says how the last batch has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.markers import Markers
from onceflow.client.producers import OpenTransaction
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Transactions
from onceflow.driver.record import progress_log
from onceflow.errors import (
    FencedError,
    OnceflowError,
    PermissionDeniedError,
    ProgressConflictError,
    UnknownTopicError,
)
from onceflow.protocol.names import Names, TopicPartition
from onceflow.protocol.progress import Progress, encode
from onceflow.protocol.transaction import Event, ProgressState

log = logging.getLogger("onceflow.sink")

_GROUPS_TOPIC = "__consumer_offsets"  # the next transaction overwrites the group's offsets, whatever its outcome
_UNKNOWN: Mapping[str, Any] = {"state": "", "partitions": {}}
_COMMITTED = ("PrepareCommit", "CompleteCommit")


class DriverSession:
    """The session of one driver of a flow: its transactional id, its markers, and the committed progress it knows.

    Args:
        cluster: the caller keeps and closes it.

    Attributes:
        earlier: the transactional id as `describe_transaction` has shown it before the first `init`; None: there was
            none.
    """

    def __init__(self, cluster: Cluster, names: Names) -> None:
        self.cluster = cluster
        self.transactions = Transactions(cluster, names.transactional_id, check=self._check_progress, batch=True)
        self.markers = Markers(cluster, self.transactions, names.flow)
        self.names = names
        self._committed: Progress | None = None  # as this driver has read or committed it last
        self._sources: Mapping[str, list[int]] = {}
        self._described = dict(_UNKNOWN)
        self.earlier: Mapping[str, Any] | None = None
        self._looked_at: set[TopicPartition] = set()

    def init(self, deadline: Deadline) -> None:
        """Fence older drivers. Before that, ask the coordinator about their last transaction: fencing makes it forget.

        Raises:
            OptionError: the brokers do not allow such a long transaction timeout.
        """
        self._described = self.described(deadline)
        self.earlier = self.earlier or self._described
        self.transactions.init(deadline)
        self._looked_at = set()

    def committed(self, progress: Progress) -> None:
        """To be called when a transaction with this progress record was committed."""
        self._committed = progress_log.named(progress, self.names)

    def described(self, deadline: Deadline) -> dict[str, Any]:
        """As `describe_transaction`; with an empty state and no partitions if the coordinator cannot be asked."""
        try:
            return describe_transaction(self.cluster, self.transactions.transactional_id, deadline)
        except OnceflowError as error:
            log.debug("flow %s: could not look at the last transaction: %s", self.names.flow, error)
            return dict(_UNKNOWN)

    def progress(
        self, source_topics: Mapping[str, list[int]], deadline: Deadline, *, missing_is_fine: bool = False
    ) -> Progress | None:
        """The last committed progress. The transactions it names are decided then. Arguments as of `read_progress`."""
        names = self.names
        own = progress_log.topic_partition_of(names.progress_key)
        left = self._left_open([own, *enrolled(self._described)], deadline)
        if own in left:
            hinted = progress_log.hinted_offset(
                self.cluster, names.group_id, source_topics, names.progress_key, deadline, stable=True
            )
            # The group's offsets are a part of the same transaction: when they point to the record, it is committed.
            points_there = hinted is not None and hinted >= left[own].start_offset
            committed = self._described["state"] in _COMMITTED or points_there
            self.markers.write([own], committed=committed, deadline=deadline)
        found = progress_log.read_progress(
            self.cluster, names.progress_key, names.group_id, source_topics, deadline, missing_is_fine=missing_is_fine
        )
        check_owner(found, names)
        self._committed, self._sources = found, source_topics
        self.transactions.machine.on(Event.PROGRESS_READ)
        self._decide(
            {topic_partition: each for topic_partition, each in left.items() if topic_partition != own}, found, deadline
        )
        if found is not None:
            self.decide([*found.changelogs, *found.outputs], found, deadline)
        return found

    @property
    def knows_progress(self) -> bool:
        """Whether progress was read since the older drivers were fenced, and nobody else can have moved it."""
        return self.transactions.machine.progress_state is ProgressState.READ

    def give_up(self) -> None:
        """A start has failed: the next one fences and reads progress again."""
        self.transactions.machine.on(Event.GIVEN_UP)

    def _check_progress(self, deadline: Deadline) -> None:
        """Check that progress in Kafka is still what this driver read or committed last. Called after InitProducerId.

        Kafka forgets a transactional id that is idle for ``transactional.id.expiration.ms``, and with it that a newer
        driver has fenced this one. What that driver has committed is in the progress record.

        Raises:
            FencedError: another driver has changed the progress.
        """
        if not self.knows_progress:
            return  # this driver does not rely on any progress yet
        names = self.names
        found = progress_log.read_progress(
            self.cluster, names.progress_key, names.group_id, self._sources, deadline, missing_is_fine=True
        )
        if _bytes(found) != _bytes(self._committed):
            at = "none" if found is None else f"batch {found.batch_id}"
            ours = "none" if self._committed is None else f"batch {self._committed.batch_id}"
            raise FencedError(
                f"Another driver has changed the progress of flow {names.flow!r}",
                flow=names.flow,
                detail=f"progress in Kafka: {at}; what this driver has committed last: {ours}",
                next_step="stop one of the two drivers: a flow has one driver. Nothing was lost or written twice",
            )

    def decide(self, topics: Iterable[str], progress: Progress | None, deadline: Deadline) -> None:
        """Decide what this flow's last batch may have left undecided in these topics.

        Args:
            topics: topics that no longer exist are skipped.
        """
        self._decide(self._left_open(partitions_of(self.cluster, topics, deadline), deadline), progress, deadline)

    def _left_open(
        self, topic_partitions: Iterable[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, OpenTransaction]:
        new = {*topic_partitions} - self._looked_at
        self._looked_at |= new
        return self.markers.left_open(new, deadline) if new else {}

    def _decide(
        self, left: Mapping[TopicPartition, OpenTransaction], progress: Progress | None, deadline: Deadline
    ) -> None:
        for committed in (True, False):
            topic_partitions = [
                topic_partition
                for topic_partition, each in left.items()
                if self._is_committed(each, progress) is committed
            ]
            self.markers.write(topic_partitions, committed=committed, deadline=deadline)

    def _is_committed(self, left: OpenTransaction, progress: Progress | None) -> bool:
        """Whether it is the transaction that wrote this progress. Every attempt has an epoch of its own (I3)."""
        if progress is None:
            return False
        if progress.producer_id < 0:  # written by an earlier onceflow
            return self._described["state"] in _COMMITTED
        return (progress.producer_id, progress.producer_epoch) == (left.producer_id, left.producer_epoch)


def check_owner(found: Progress | None, names: Names) -> None:
    """Refuse the progress of another flow, whose prefix and name only look the same when one follows the other.

    Raises:
        ProgressConflictError: the record was written under another transactional id.
    """
    if found is None or found.transactional_id in ("", names.transactional_id):
        return
    prefix = names.transactional_id_prefix
    raise ProgressConflictError(
        f"Another flow has the progress record {found.flow!r}",
        flow=names.flow,
        detail=f"it has the transactional id {found.transactional_id!r}; this one, with the name {names.flow!r} and "
        f"the prefix {prefix!r}, has {names.transactional_id!r}. Prefix and name together are the key of the record",
        next_step="give this flow another name, or the name and the transactional_id_prefix= of the flow that is "
        "there. Nothing was changed",
    )


def _bytes(progress: Progress | None) -> tuple[bytes, bytes] | None:
    return None if progress is None else encode(progress)


def enrolled(described: Mapping[str, Any]) -> list[TopicPartition]:
    """The partitions of a transaction that `describe_transaction` returned, without those of the group's offsets."""
    partitions: Mapping[str, list[int]] = described["partitions"]
    return [(topic, number) for topic, numbers in partitions.items() for number in numbers if topic != _GROUPS_TOPIC]


def partitions_of(cluster: Cluster, topics: Iterable[str], deadline: Deadline) -> list[TopicPartition]:
    """All partitions of these topics. Topics that no longer exist are skipped."""
    found: list[TopicPartition] = []
    for topic in sorted({*topics}):
        try:
            found += [(topic, partition) for partition in sorted(cluster.topic(topic, deadline).leaders)]
        except (UnknownTopicError, PermissionDeniedError) as error:
            log.debug("topic %s is not checked for open transactions: %s", topic, error)
    return found

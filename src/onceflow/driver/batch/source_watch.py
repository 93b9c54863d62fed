"""Whether the sources are still the same while a batch reads them: the same topics, with the same records (KIP-320).

Spark and its tasks ask for offsets by the names of topics. So if a topic is deleted and created again, or if an unclean
leader election truncates its log, they go on at the same offsets, where other records are. The driver looks at the
leaders when the range of a batch is known, and again when its records were read. Where the driver itself has fetched
the records, the leaders have checked both at each Fetch, and the batches of records have their epochs.

A partition whose leader does not answer soon is not checked in this batch, but in a later one, or at the next start:

- If the leader has not answered after the batch, progress has the epoch of the one that led before it, and had the
  range. So records of the range that are lost are noticed later. The same goes for a range of which the leaders before
  have lost records while it was read, also if the tasks have read what is there now: nobody knows what they have read.
- If the leader has not told whether it has what was read before the batch, or if nobody knows which leader the range
  was read from, progress keeps what it knows of an earlier offset.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.leader_epochs import LeaderView, epoch_ends, look_at_leaders
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import ProgressConflictError, UnknownTopicError, log_too_short
from onceflow.planning.source_starts import check_log
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import Epochs, Progress

log = logging.getLogger("onceflow.driver")

_LOOK_S = 3.0
"""For how long one look waits for leaders. The second one is inside the transaction: while it waits, readers of the
outputs wait, too, in all of their partitions. A leader answers in milliseconds, and a new one is usually elected in
less than a second. Whoever waits longer holds up all partitions for one, whose records were read already."""
_CHECK_S = 1.0
"""For how long leaders that have just answered are asked about their logs. That is a time of its own: one partition
without a leader takes all of the look, and what the others have told must be checked all the same."""


class SourceWatch:
    """Watches the sources of one query.

    Args:
        cluster: connections of the driver.
    """

    def __init__(self, cluster: Cluster, flow: str) -> None:
        self._cluster = cluster
        self._flow = flow
        self._topic_ids: Mapping[str, str] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self._before: Mapping[TopicPartition, tuple[int, int]] = {}
        self._start: Mapping[str, Mapping[int, int]] = {}

    def planned(self, source: SourceRange, progress: Progress, deadline: Deadline) -> None:
        """Check that the partitions have the records before the range that were read. Its end must be known by now.

        A range may end before its start, or leave partitions out: without ``failOnDataLoss``, Spark goes back to the
        end of a log that has become shorter, and forgets partitions that it does not see (KafkaOffsetReader:
        fetchLatestOffsets, getOffsetRangesFromResolvedOffsets). Progress must not follow, because records that were
        read would be read again, or others in their place.

        Raises:
            UnknownTopicError: a topic was deleted, or deleted and created again.
            DataLossError: a log was truncated below the range, or ends there.
            ProgressConflictError: a partition is not there.
        """
        self._topic_ids = progress.topic_ids
        wanted = self._unwatched(source)
        view = self._look(wanted, deadline)
        self._before = {
            (topic, partition): pair
            for topic, partition in wanted
            if (pair := progress.epochs.get(topic, {}).get(partition)) is not None
        }
        self._start = source.start
        checked = self._check_logs(view, self._before, source.start, deadline)
        for topic, partition in source.gone():
            raise ProgressConflictError(
                f"Partition {topic}-{partition}, which this flow has read, is not there",
                flow=self._flow,
                topic=topic,
                detail=f"progress ends at {source.start[topic][partition]}, and Spark does not see the partition",
                next_step="start the flow again. If the topic was deleted and created again, the start says so",
            )
        for topic, partition in source.back():
            read, end = source.start[topic][partition], source.end[topic][partition]
            raise log_too_short(f"{topic}-{partition}", end, "read", f"read up to offset {read}")
        self._before = {each: pair for each, pair in self._before.items() if each not in checked}
        fetched = {topic_partition: epoch for topic_partition, epoch in source.epochs.items() if epoch >= 0}
        self._epochs = {**view.epochs, **fetched}

    def was_read(self, source: SourceRange, deadline: Deadline) -> None:
        """Check that the records of the range were those of the logs that `planned` has seen. Errors as of it."""
        wanted = self._unwatched(source)
        view = self._look(wanted, deadline)
        for topic_partition, (_, epoch) in self._before.items():
            # It has led since before the batch, also if it was silent then.
            if view.epochs.get(topic_partition) == epoch:
                self._epochs.setdefault(topic_partition, epoch)
        checked = self._check_logs(view, self._before, self._start, deadline)  # what could not be checked before
        self._before = {each: pair for each, pair in self._before.items() if each not in checked}
        read = {
            (topic, partition): (source.end[topic][partition], self._epochs[topic, partition])
            for topic, partition in wanted
            if (topic, partition) in self._epochs
        }
        self._check_logs(view, read, source.end, deadline)

    def looks_again(self, source: SourceRange) -> bool:
        """Whether `was_read` asks leaders: what progress knows of them may change then."""
        return bool(self._unwatched(source))

    def epochs(self, source: SourceRange, before: Epochs) -> Epochs:
        """What progress knows of the leaders after the batch.

        If the check of what was read before the batch could not be done, it keeps what it knows of that: only this
        shows later whether the log was truncated there.
        """
        found = {topic: dict(pairs) for topic, pairs in before.items()}
        for topic, partition in source.news():
            epoch = self._epochs.get((topic, partition), -1)
            if epoch >= 0 and (topic, partition) not in self._before:
                found.setdefault(topic, {})[partition] = (source.end[topic][partition], epoch)
        return found

    def _unwatched(self, source: SourceRange) -> list[TopicPartition]:
        """The partitions of the range of which it is not known from Fetch responses whose records were read."""
        partitions = [*source.news(), *source.back()]
        return [topic_partition for topic_partition in partitions if source.epochs.get(topic_partition, -1) < 0]

    def _look(self, partitions: Collection[TopicPartition], deadline: Deadline) -> LeaderView:
        if not partitions:
            return LeaderView({}, {})
        deadline = _soon(deadline, _LOOK_S)
        view = look_at_leaders(self._cluster, partitions, deadline)
        if silent := sorted({*partitions} - view.epochs.keys()):
            log.warning(
                "flow %s: leaders of %d partitions, such as %s-%d, have not answered within %g s: whether their logs "
                "are still the same is not checked in this batch",
                *(self._flow, len(silent), *silent[0], deadline.seconds),
            )
        for topic, topic_id in view.topic_ids.items():
            if self._topic_ids.get(topic) not in (None, topic_id):
                raise UnknownTopicError(
                    f"Topic {topic} was deleted and created again while the flow ran",
                    flow=self._flow,
                    topic=topic,
                    detail=f"topic id was {self._topic_ids[topic]}, is {topic_id}; nothing of it was committed",
                    next_step="`onceflow reset` the flow to read the new topic from its start, or use another flow "
                    "name",
                )
        return view

    def _check_logs(
        self,
        view: LeaderView,
        known: Mapping[TopicPartition, tuple[int, int]],
        read: Mapping[str, Mapping[int, int]],
        deadline: Deadline,
    ) -> set[TopicPartition]:
        """Check logs. Returns the partitions that could be checked.

        Args:
            known: as in progress, by partition. read: the first offsets that were not read.
        """
        asked = {each: pair for each, pair in known.items() if each in view.epochs}
        # While the same leader leads, it keeps its log.
        changed = {
            topic_partition: epoch
            for topic_partition, (_, epoch) in asked.items()
            if view.epochs[topic_partition] != epoch
        }
        ends = epoch_ends(self._cluster, changed, _soon(deadline, _CHECK_S), partial=True)
        if silent := sorted(changed.keys() - ends.keys()):
            log.warning(
                "flow %s: leaders of %d partitions, such as %s-%d, have not told within %g s what their logs have of "
                "earlier leaders: whether their logs are still the same is not checked in this batch",
                *(self._flow, len(silent), *silent[0], _CHECK_S),
            )
        for (topic, partition), end in ends.items():
            pairs = {partition: known[topic, partition]}
            check_log(topic, {partition: end}, read[topic], pairs, self._flow)
        return {*asked} - {*silent}


def _soon(deadline: Deadline, seconds: float) -> Deadline:
    return Deadline(deadline.capped(seconds), deadline.what)

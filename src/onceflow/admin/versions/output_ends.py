"""Where the outputs of a running flow stand at one of its progress records.

Progress names the outputs, not their offsets. Offsets are noted before the record is read, so the records below them
are of that batch or of earlier ones. Behind them, each record batch carries the producer id and epoch of its
transaction, and the progress record has those of its own. Every batch of a flow has a higher epoch than the one before.
"""

from __future__ import annotations

from collections.abc import Collection

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.errors import PermissionDeniedError, UnknownTopicError
from onceflow.protocol.progress import Offsets, Progress


class OutputEnds:
    """Finds where outputs stand at a progress record."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._noted: dict[str, dict[int, int]] = {}

    def note(self, topics: Collection[str], deadline: Deadline) -> None:
        """Note the ends of these topics. To be called before the progress record is read."""
        self._noted = {}
        for topic in topics:
            ends = self._offsets(topic, LATEST, deadline)
            if ends is not None:
                self._noted[topic] = ends

    def behind(self, progress: Progress, topics: Collection[str], deadline: Deadline) -> Offsets:
        """By topic and partition, the first offset behind what the flow had written up to this record.

        Topics that do not exist, or may not be read, are left out.

        Args:
            topics: the outputs of the flow. Those that were not noted are read from their beginning.
        """
        found: dict[str, dict[int, int]] = {}
        for topic in sorted(topics):
            starts = self._noted.get(topic) or self._offsets(topic, EARLIEST, deadline)
            ends = self._offsets(topic, LATEST, deadline, committed=False)
            if starts is None or ends is None or progress.producer_id < 0:
                continue
            try:
                who = progress.producer_id, progress.producer_epoch
                found[topic] = {
                    p: behind(self._cluster, who, (topic, p), (start, ends[p]), deadline) for p, start in starts.items()
                }
            except PermissionDeniedError:
                continue
        return found

    def _offsets(
        self, topic: str, timestamp: int, deadline: Deadline, *, committed: bool = True
    ) -> dict[int, int] | None:
        try:
            info = self._cluster.topics([topic], deadline, once=True)[topic]
            span = {topic: sorted(info.leaders)}
            return list_offsets(self._cluster, span, timestamp, deadline, committed=committed)[topic]
        except (UnknownTopicError, PermissionDeniedError):
            return None


def behind(
    cluster: Cluster, producer: tuple[int, int], place: tuple[str, int], span: tuple[int, int], deadline: Deadline
) -> int:
    """The first offset behind what a producer had written up to an epoch; the beginning of the span if it is nothing.

    Args:
        producer: id and epoch.
        place: topic and partition.
        span: first offset, and the one behind the last.
    """
    producer_id, epoch = producer
    (topic, partition), (start, end) = place, span
    found = start
    for item in read_log(cluster, topic, partition, start, end, deadline):
        if isinstance(item, LogRecord) and item.producer_id == producer_id:
            if item.producer_epoch > epoch:
                break
            found = item.offset + 1
    return found

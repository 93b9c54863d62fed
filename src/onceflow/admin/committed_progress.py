"""The committed progress records of all flows, read without a flow's transactional id: nobody is fenced."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, Marker, read_log
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
from onceflow.client.topics import find_topic
from onceflow.protocol.progress import PROGRESS_TOPIC


@dataclass
class _Partition:
    """What is read of one partition: up to ``position``, the last committed records by key, and open transactions."""

    position: int
    committed: dict[bytes, LogRecord] = field(default_factory=dict)
    undecided: dict[int, dict[bytes, LogRecord]] = field(default_factory=dict)  # by producer id, then by key

    def add(self, item: LogRecord | Marker) -> None:
        """Take the next record or transaction marker of the log."""
        if isinstance(item, LogRecord):
            key = item.key or b""
            if item.producer_id < 0:
                self.committed[key] = item
            else:
                self.undecided.setdefault(item.producer_id, {})[key] = item
        else:
            for key, record in self.undecided.pop(item.producer_id, {}).items():
                if item.committed:
                    self._commit(key, record)

    def settle(self, stable: int) -> None:
        """Compaction may remove the marker of a committed transaction, never that of an aborted one whose records are
        still there. So a record below the last stable offset without a marker is committed."""
        for producer_id, records in list(self.undecided.items()):
            for key, record in list(records.items()):
                if record.offset < stable:
                    self._commit(key, record)
                    del records[key]
            if not records:
                del self.undecided[producer_id]

    def _commit(self, key: bytes, record: LogRecord) -> None:
        if key not in self.committed or record.offset > self.committed[key].offset:
            self.committed[key] = record


class CommittedProgress:
    """The last committed progress record of each flow. A second `read` only reads what is new.

    The log is read beyond the last stable offset: an open transaction of one flow hides nothing of the others.
    """

    def __init__(self) -> None:
        self._topic_id = ""
        self._partitions: dict[int, _Partition] = {}

    def read(
        self, cluster: Cluster, deadline: Deadline, without: Collection[int] = ()
    ) -> dict[bytes, tuple[int, LogRecord]]:
        """Partition and record, by key. Flows that were reset, and so have a tombstone, are left out.

        Args:
            without: partitions that are not read.

        Raises:
            PermissionDeniedError: READ or DESCRIBE on the progress topic is missing.
        """
        info = find_topic(cluster, PROGRESS_TOPIC, "READ", deadline)
        if info is None:
            self._partitions = {}
            return {}  # no flow has run here
        if info.topic_id != self._topic_id:
            self._topic_id, self._partitions = info.topic_id, {}
        span = {PROGRESS_TOPIC: sorted(info.leaders.keys() - set(without))}
        first = list_offsets(cluster, span, EARLIEST, deadline)[PROGRESS_TOPIC]
        # Before the records are read: transactions below these offsets are decided, so their markers are read, too.
        stable = list_offsets(cluster, span, LATEST, deadline)[PROGRESS_TOPIC]
        ends = list_offsets(cluster, span, LATEST, deadline, committed=False)[PROGRESS_TOPIC]
        found: dict[bytes, tuple[int, LogRecord]] = {}
        for number, end in ends.items():
            part = self._partitions.setdefault(number, _Partition(first[number]))
            start = max(part.position, first[number])
            for item in read_log(cluster, PROGRESS_TOPIC, number, start, end, deadline):
                part.add(item)
            part.position = max(start, end)
            part.settle(stable[number])
            found |= {key: (number, each) for key, each in part.committed.items() if each.value is not None}
        return found

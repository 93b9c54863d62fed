"""The committed progress records of all flows, read without a flow's transactional id: nobody is fenced."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.decided import Decided, ends_of, read_decided
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST, list_offsets
from onceflow.client.topics import find_topic
from onceflow.errors import OnceflowError, PermissionDeniedError
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, decode


@dataclass
class _Partition:
    """What is read of one partition.

    Args:
        position: up to where everything was decided.
        committed: the last committed record of each key before that.
    """

    position: int
    committed: dict[bytes, LogRecord] = field(default_factory=dict)


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
        ends = ends_of(cluster, PROGRESS_TOPIC, span[PROGRESS_TOPIC], deadline)
        found: dict[bytes, tuple[int, LogRecord]] = {}
        for number, begin in first.items():
            is_known = number in self._partitions
            part = self._partitions.setdefault(number, _Partition(begin))
            start = max(part.position, begin)
            if is_known and ends[number] == (start, start):  # nothing has come since
                now = Decided(stable=start)
            else:
                now = read_decided(cluster, PROGRESS_TOPIC, number, start, deadline, ends=ends[number])
            last = {**part.committed, **{each.key or b"": each for each in now.committed}}
            part.committed = {
                **part.committed,
                **{each.key or b"": each for each in now.committed if each.offset < now.stable},
            }
            part.position = max(start, now.stable)
            found |= {key: (number, each) for key, each in last.items() if each.value is not None}
        return found

    def decoded(self, cluster: Cluster, deadline: Deadline) -> Iterator[Progress]:
        """The progress of all flows that this principal and this version of onceflow can read; none if it may not."""
        try:
            found = self.read(cluster, deadline)
        except PermissionDeniedError:
            return
        for key, (_, record) in found.items():
            with suppress(OnceflowError):
                yield decode(key, record.value or b"")

"""The committed progress of one flow at a moment when everything that it had begun before is decided.

Nobody is fenced, so the flow may run meanwhile. Each of its transactions has one progress record. So the last record
that `read` returns covers every record that the flow had committed to any topic before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.decided import Decided, read_decided
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST, list_offsets
from onceflow.driver.record import progress_log
from onceflow.errors import DeadlineExceededError, located
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, decode


class SettledProgress:
    """Reads the progress records of one flow. A second `read` only reads what is new.

    Attributes:
        outputs: the topics that the records read so far name as outputs.
    """

    def __init__(self, cluster: Cluster, names: Names) -> None:
        self._cluster, self._names = cluster, names
        self._position: int | None = None
        self._last: Progress | None = None
        self.outputs: set[str] = set()

    def read(self, deadline: Deadline) -> Progress | None:
        """The last committed progress; None: there is none, or the flow was reset.

        Raises:
            UnknownTopicError: there is no progress topic.
            DeadlineExceededError: see `settled_records`.
        """
        for record in self._new(deadline):
            if record.value is None:
                self._last = None
                continue
            with located(flow=self._names.flow):
                self._last = decode(record.key, record.value)
            self.outputs |= {*self._last.outputs}
        return self._last

    def _new(self, deadline: Deadline) -> Sequence[LogRecord]:
        _, number = progress_log.topic_partition_of(self._names.progress_key)
        span = {PROGRESS_TOPIC: [number]}
        first = list_offsets(self._cluster, span, EARLIEST, deadline)[PROGRESS_TOPIC][number]
        start = first if self._position is None else max(first, self._position)
        found = settled_records(self._cluster, self._names, start, deadline)
        self._position = found.stable
        return found.committed


def settled_records(
    cluster: Cluster, names: Names, start: int, deadline: Deadline, check: Callable[[], None] = lambda: None
) -> Decided:
    """The committed progress records of a flow from an offset on, when all that are there at the call are decided.
    Transactions of other flows are not waited for, nor those that the flow begins meanwhile: a flow that commits often
    nearly always has one.

    Args:
        check: called while it waits. It may raise, to end the wait.

    Returns:
        What was found last. ``undecided`` has only records that were not there at the call.

    Raises:
        DeadlineExceededError: a transaction with a progress record of the flow stays open.
    """
    _, number = progress_log.topic_partition_of(names.progress_key)
    attempt = 0
    last: int | None = None  # the last one that was undecided at the first look
    while True:
        found = read_decided(cluster, PROGRESS_TOPIC, number, start, deadline, key=names.progress_key.encode())
        if last is None:
            last = max((each.offset for each in found.undecided), default=-1)
        waits = [each for each in found.undecided if each.offset <= last]
        if not waits:
            return found
        check()
        if not deadline.wait(attempt):
            raise DeadlineExceededError(
                "A transaction with progress of the flow stays open",
                flow=names.flow,
                topic=f"{PROGRESS_TOPIC}-{number}",
                detail=f"{deadline.what}: waited for {deadline.seconds:g} s for the progress record at offset "
                f"{waits[0].offset}, of producer id {waits[0].producer_id}",
                next_step=f"`onceflow transactions list --topic {PROGRESS_TOPIC}` shows whose it is: the next "
                "start of that flow ends it, and so does its timeout",
            )
        attempt += 1

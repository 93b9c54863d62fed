"""The progress records of a flow that the log still has, in order, and whether each continues the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from onceflow.admin.change.settled_progress import settled_records
from onceflow.admin.status.similar_flows import meant, named, similar_flows
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord
from onceflow.client.offsets import EARLIEST, list_offsets
from onceflow.driver.record import progress_log
from onceflow.driver.record.handover import check_exists
from onceflow.errors import OptionError, UnknownTopicError
from onceflow.protocol import progress as records
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Offsets, Progress

_CALL_S = 60.0


def read_history(cluster: Cluster, names: Names, check: Callable[[], None] = lambda: None) -> list[LogRecord]:
    """The committed progress records of a flow, and their tombstones; waits until each that is there at the call is
    decided. Those of batches that the flow begins meanwhile are not waited for.

    Args:
        check: called while it waits. It may raise, to end the wait.

    Raises:
        OnceflowError: the progress topic cannot be read, or a transaction stays open for a minute.
    """
    deadline = Deadline(_CALL_S, f"reading {PROGRESS_TOPIC}")
    try:
        cluster.topics([PROGRESS_TOPIC], deadline, once=True)
    except UnknownTopicError:
        return []  # no flow has run here
    number = progress_log.partition_of(names.progress_key)
    begin = list_offsets(cluster, {PROGRESS_TOPIC: [number]}, EARLIEST, deadline)[PROGRESS_TOPIC][number]
    return settled_records(cluster, names, begin, deadline, check).committed


def last_of(history: Sequence[LogRecord], names: Names, cluster: Cluster | None = None) -> Progress:
    """The newest progress.

    Args:
        cluster: is asked for flows of a similar name, for the error; None: nobody is.

    Raises:
        OptionError: the flow has none. ProgressConflictError: it has taken another one's place.
    """
    if not history or history[-1].value is None:
        similar = [] if cluster is None else similar_flows(cluster, names)
        raise OptionError(
            "The flow has no progress, so there is nothing to verify",
            flow=names.flow,
            detail=named(similar),
            next_step=meant(similar, "`onceflow status` lists the flows; is a prefix missing?"),
        )
    found = records.decode(history[-1].key, history[-1].value)
    check_exists(found, flow=names.flow)
    return found


def breaks(history: Iterable[LogRecord]) -> Iterator[str]:
    """What is wrong between a batch and the next one.

    A reset, a move in time and an import begin anew. Compaction leaves gaps: there, nothing is said.
    """
    before: Progress | None = None
    for record in history:
        if record.value is None:
            before = None
            continue
        now = records.decode(record.key, record.value)
        if before is not None and now.batch_id == before.batch_id + 1:
            where = f"batch {now.batch_id} (offset {record.offset} of the progress topic)"
            for what, old, new in (
                ("source", before.offsets, now.offsets),
                ("table", before.changelogs, now.changelogs),
            ):
                for place, was, is_ in _backwards(old, new, before, now, source=what == "source"):
                    yield f"{where}: {what} {place} went back from {was} to {is_}"
            if now.producer_id == before.producer_id >= 0 and now.producer_epoch < before.producer_epoch:
                yield f"{where}: the producer epoch went back from {before.producer_epoch} to {now.producer_epoch}"
        before = now


def _backwards(
    old: Offsets, new: Offsets, before: Progress, now: Progress, *, source: bool
) -> Iterator[tuple[str, int, int]]:
    for topic, offsets in old.items():
        if source and before.topic_ids.get(topic) != now.topic_ids.get(topic):
            continue  # it was deleted and created again
        for partition, offset in offsets.items():
            later = new.get(topic, {}).get(partition)
            if later is not None and later < offset:
                yield f"{topic}-{partition}", offset, later

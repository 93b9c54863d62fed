"""Which records of a partition are committed, also behind an open transaction of another producer.

Below the last stable offset every transaction is decided, and a Fetch with ``isolation_level=1`` says which were
aborted (KIP-98): what is read there is what any read_committed consumer reads.

From the last stable offset on, nothing was compacted yet (Kafka: LogCleanerManager.cleanableOffsets). So each
transaction that has ended has its marker there. A record without a marker is undecided, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, Marker, read_log
from onceflow.client.offsets import LATEST, list_offsets


@dataclass
class Decided:
    """Records of one partition, in order of their offsets.

    Args:
        committed: those of committed transactions, and those of none.
        undecided: those of transactions that are open.
        stable: the last stable offset. All records below it are decided.
    """

    committed: list[LogRecord] = field(default_factory=list)
    undecided: list[LogRecord] = field(default_factory=list)
    stable: int = 0


def read_decided(
    cluster: Cluster,
    topic: str,
    partition: int,
    start: int,
    deadline: Deadline,
    *,
    key: bytes | None = None,
    ends: tuple[int, int] | None = None,
) -> Decided:
    """The records from an offset to the high watermark. Open transactions are not waited for.

    At least one Fetch is sent, so that a missing permission is found out now, and not at a later call.

    Args:
        key: of the records that are wanted; None: all of them.
        ends: as of `ends_of`; None: they are asked for.

    Raises:
        PermissionDeniedError: READ on the topic is missing.
        DeadlineExceededError: no leader answers.
    """
    stable, end = ends or ends_of(cluster, topic, [partition], deadline)[partition]
    found = Decided(stable=stable)
    for each in read_stable(cluster, topic, partition, start, stable, deadline):
        if key is None or each.key == key:
            found.committed.append(each)
    if stable < end or start >= stable:
        behind = decide(read_log(cluster, topic, partition, min(max(start, stable), end), end, deadline), key=key)
        found.committed += behind.committed
        found.undecided = behind.undecided
    return found


def ends_of(cluster: Cluster, topic: str, partitions: Sequence[int], deadline: Deadline) -> dict[int, tuple[int, int]]:
    """The last stable offset and the high watermark of each partition."""
    span = {topic: partitions}
    stable = list_offsets(cluster, span, LATEST, deadline)[topic]
    # Asked afterwards: the markers of what lies below the last stable offset may lie behind it.
    end = list_offsets(cluster, span, LATEST, deadline, committed=False)[topic]
    return {partition: (stable[partition], end[partition]) for partition in partitions}


def read_stable(
    cluster: Cluster, topic: str, partition: int, start: int, stable: int, deadline: Deadline
) -> Iterator[LogRecord]:
    """The committed records in ``[start, stable)``, in order.

    Args:
        stable: an offset up to which every transaction is decided. It may be less than the last stable offset.

    Raises:
        OnceflowError: as `CommittedReader.read`.
    """
    for chunk in CommittedReader(cluster, deadline.remaining).read(topic, partition, start, stable):
        places, stamps = chunk.offsets.tolist(), chunk.timestamps_ms.tolist()
        for row, (offset, key) in enumerate(zip(places, chunk.keys, strict=True)):
            yield LogRecord(offset, key, chunk.values[row], stamps[row], -1, -1)


def decide(items: Iterable[LogRecord | Marker], *, key: bytes | None = None) -> Decided:
    """Decide the records of a part of the log that was not compacted, by its transaction markers.

    Args:
        items: all records and markers, in order.
        key: as of `read_decided`.
    """
    open_: dict[int, list[LogRecord]] = {}
    committed: list[LogRecord] = []
    for item in items:
        if isinstance(item, Marker):
            ended = open_.pop(item.producer_id, [])
            committed += ended if item.committed else []
        elif key is None or item.key == key:
            if item.producer_id < 0:
                committed.append(item)
            else:
                open_.setdefault(item.producer_id, []).append(item)
    return Decided(_in_order(committed), _in_order(each for waiting in open_.values() for each in waiting))


def _in_order(found: Iterable[LogRecord]) -> list[LogRecord]:
    return sorted(found, key=lambda each: each.offset)

"""How many letters wait: records that are parked, and in other topics of letters all that were not replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from onceflow.admin.records import letter_replay
from onceflow.admin.status.flow_status import FlowStatus
from onceflow.admin.status.status_answers import answered, permitted
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline

T = TypeVar("T")

_LOOK_S = 60.0


def count_letters(cluster: Cluster, status: FlowStatus) -> None:
    """Read the topics of letters whose partitions can all be asked, and put their counts into the status.

    Raises:
        OnceflowError: a topic cannot be read for a reason other than a permission or brokers that do not answer.
    """
    for at, each in enumerate(status.letters):
        if each.records_at_most is None:
            continue
        count: int | None
        if each.role == "parked":
            read = partial(_count_parked, cluster, each.topic, each.ends)
            count = _answer(status, each.topic, each.topic, read)
        else:
            # First: a letter that is replayed meanwhile still counts, and no count is too small.
            deadline = Deadline(_LOOK_S, f"looking for replayed letters of {each.topic}")
            notes = partial(letter_replay.replayed_in, cluster, each.topic, deadline)
            gone = _answer(status, each.topic, each.topic + letter_replay.SUFFIX, notes)
            others = partial(_count_others, cluster, each.topic, each.ends, gone or ())
            count = None if gone is None else _answer(status, each.topic, each.topic, others)
        status.letters[at] = replace(each, waiting=count)


def _answer(status: FlowStatus, letters: str, topic: str, read: Callable[[], T]) -> T | None:
    """What was read; None: not permitted, or no answer. The status says so."""
    return answered(status, f"topic {letters}", partial(permitted, status, f"READ on topic {topic}", read))


def _count_parked(cluster: Cluster, topic: str, ends: Mapping[int, int]) -> int:
    """Count the records that are parked now. Memory grows with their number."""
    reader = CommittedReader(cluster)
    count = 0
    for partition, end in sorted(ends.items()):
        live: set[bytes | None] = set()
        for chunk in reader.read(topic, partition, 0, end):
            for key, value in zip(chunk.keys, chunk.values, strict=True):
                (live.discard if value is None else live.add)(key)
        count += len(live)
    return count


def _count_others(
    cluster: Cluster, topic: str, ends: Mapping[int, int], gone: Collection[letter_replay.Position]
) -> int:
    """Count committed records, without those at these places."""
    reader = CommittedReader(cluster)
    count = 0
    for partition, end in sorted(ends.items()):
        for chunk in reader.read(topic, partition, 0, end):
            count += sum((partition, offset) not in gone for offset in chunk.offsets.tolist())
    return count

"""How many letters wait: records that are parked, and all records in other topics of letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from onceflow.admin.flow_status import FlowStatus
from onceflow.admin.status_answers import answered, permitted
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader


def count_letters(cluster: Cluster, status: FlowStatus) -> None:
    """Read the topics of letters whose partitions can all be asked, and put their counts into the status.

    Raises:
        OnceflowError: a topic cannot be read for a reason other than a permission or brokers that do not answer.
    """
    for at, each in enumerate(status.letters):
        if each.records_at_most is None:
            continue
        read = partial(_count, cluster, each.topic, each.ends, parked=each.role == "parked")
        allowed = partial(permitted, status, f"READ on topic {each.topic}", read)
        status.letters[at] = replace(each, waiting=answered(status, f"topic {each.topic}", allowed))


def _count(cluster: Cluster, topic: str, ends: Mapping[int, int], *, parked: bool) -> int:
    """Count committed records. Memory grows with the number of parked records only."""
    reader = CommittedReader(cluster)
    count = 0
    for partition, end in sorted(ends.items()):
        live: set[bytes | None] = set()
        for chunk in reader.read(topic, partition, 0, end):
            if not parked:
                count += len(chunk.keys)
                continue
            for key, value in zip(chunk.keys, chunk.values, strict=True):
                (live.discard if value is None else live.add)(key)
        count += len(live)
    return count

"""Where a flow has begun to read its sources, as a user says it."""

from __future__ import annotations

from onceflow.admin.change.target import BEGINNING, EARLIEST, OFFSETS, TIMESTAMP, OffsetSpec
from onceflow.admin.verify.progress_history import last_of, read_history
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST as FIRST
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.errors import OptionError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Offsets

_CALL_S = 60.0


def offsets_at(cluster: Cluster, names: Names, target: OffsetSpec) -> Offsets:
    """The offsets of a place in the sources of a flow, by topic and partition.

    Raises:
        OptionError: the place is none at which a flow begins, or names a partition that the flow does not read.
    """
    offsets = last_of(read_history(cluster, names), names, cluster).offsets
    if target.kind == BEGINNING:
        return {topic: dict.fromkeys(each, 0) for topic, each in offsets.items()}
    if target.kind == OFFSETS:
        for topic, each in target.offsets.items():
            for partition in each:
                if partition not in offsets.get(topic, {}):
                    raise OptionError(
                        f"--from names {topic}-{partition}, which the flow has not read",
                        flow=names.flow,
                        next_step=f"it reads {', '.join(sorted(offsets))}",
                    )
        return target.offsets
    deadline = Deadline(_CALL_S, "reading offsets of sources")
    span = {topic: sorted(each) for topic, each in offsets.items()}
    if target.kind == EARLIEST:
        return list_offsets(cluster, span, FIRST, deadline)
    if target.kind != TIMESTAMP:
        raise OptionError(
            "--from latest is not where a flow has begun",
            flow=names.flow,
            next_step="say when it was started first: --from timestamp=TIME",
        )
    found = list_offsets(cluster, span, target.timestamp_ms, deadline)
    ends = list_offsets(cluster, span, LATEST, deadline)
    # Kafka answers -1 if all records are older.
    return {topic: {p: at if at >= 0 else ends[topic][p] for p, at in each.items()} for topic, each in found.items()}

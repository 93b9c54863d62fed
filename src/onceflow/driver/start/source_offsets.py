"""Offsets of the topics that a flow reads: where they begin and end now, and where a read that ends stops."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onceflow.client import offsets as kafka_offsets
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.leader_epochs import epoch_ends
from onceflow.planning.read_until import ReadBound, bound_offsets
from onceflow.planning.source_starts import SourceTopic


def look_at(
    cluster: Cluster, info: TopicInfo, deadline: Deadline, epochs: Mapping[int, tuple[int, int]] = MappingProxyType({})
) -> SourceTopic:
    """A source topic as it is now.

    Args:
        epochs: what progress knows of its leaders, by partition.
    """
    span = {info.name: sorted(info.leaders)}
    earliest = kafka_offsets.list_offsets(cluster, span, kafka_offsets.EARLIEST, deadline)[info.name]
    latest = kafka_offsets.list_offsets(cluster, span, kafka_offsets.LATEST, deadline)[info.name]
    known = {number: pair for number, pair in epochs.items() if number in info.leaders}
    return SourceTopic(info.name, info.topic_id, earliest, latest, ends_of_epochs(cluster, info.name, known, deadline))


def ends_of_epochs(
    cluster: Cluster, topic: str, epochs: Mapping[int, tuple[int, int]], deadline: Deadline
) -> dict[int, int]:
    """Where the log of each partition ends what leaders up to the epoch in progress have appended."""
    asked = {(topic, number): epoch for number, (_, epoch) in epochs.items()}
    return {number: end for (_, number), end in epoch_ends(cluster, asked, deadline).items()}


def end_of_read(
    cluster: Cluster,
    topic: SourceTopic,
    start: Mapping[int, int],
    bound: ReadBound,
    deadline: Deadline,
    *,
    flow: str,
) -> dict[int, int]:
    """The first offset of each partition that is not read. Arguments and errors as of `bound_offsets`."""
    at_time = None
    if bound.timestamp_ms is not None:
        span = {topic.name: sorted(start)}
        at_time = kafka_offsets.list_offsets(cluster, span, bound.timestamp_ms, deadline)[topic.name]
    return bound_offsets(topic, start, bound, at_time, flow=flow)

"""Offsets: the beginning and end of partitions, and the committed offsets of consumer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kafka.protocol.consumer import ListOffsetsRequest, OffsetCommitRequest, OffsetFetchRequest

from onceflow.client.cluster import GROUP, Cluster
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import ask_leaders
from onceflow.protocol import codes

EARLIEST, LATEST = -2, -1
NEWEST_TIMESTAMP = -3
_EARLIEST_LOCAL = -4


def list_offsets(
    cluster: Cluster,
    partitions: Mapping[str, Sequence[int]],
    timestamp: int,
    deadline: Deadline,
    *,
    committed: bool = True,
    versions: tuple[int, int] = (2, 6),
) -> dict[str, dict[int, int]]:
    """Offset of each partition at ``timestamp`` (``EARLIEST``, ``LATEST`` or epoch milliseconds).

    Args:
        committed: whether LATEST means the last stable offset; otherwise it means the high watermark.
        versions: the lowest and the highest version of the request that may be used.
    """
    cluster.connect(deadline)
    version = cluster.version(ListOffsetsRequest, min_version=versions[0], max_version=versions[1])
    answers = ask_leaders(
        cluster,
        [(topic, partition) for topic, numbers in partitions.items() for partition in numbers],
        deadline,
        api="ListOffsets",
        request=lambda wanted: _list_offsets_request(version, wanted, timestamp, committed),
        read=lambda answer: int(answer.offset),
    )
    found: dict[str, dict[int, int]] = {topic: {} for topic in partitions}
    for (topic, partition), offset in answers.items():
        found[topic][partition] = offset
    return found


def earliest_local(cluster: Cluster, topic: str, partition: int, deadline: Deadline) -> int:
    """The first offset that the leader has on its disk. Records below it are in remote storage (KIP-405), if anywhere.

    Raises:
        BrokerUnsupportedError: it needs Kafka 3.6, which is the first version with remote storage.
    """
    found = list_offsets(cluster, {topic: [partition]}, _EARLIEST_LOCAL, deadline, versions=(8, 8))
    return found[topic][partition]


def newest_timestamps(cluster: Cluster, partitions: Mapping[str, Sequence[int]], deadline: Deadline) -> dict[str, int]:
    """The newest timestamp in each topic, in epoch milliseconds; -1 if it has no records. No records are read.

    Raises:
        BrokerUnsupportedError: it needs Kafka 3.0.
    """
    cluster.connect(deadline)
    version = cluster.version(ListOffsetsRequest, min_version=7, max_version=7)
    answers = ask_leaders(
        cluster,
        [(topic, partition) for topic, numbers in partitions.items() for partition in numbers],
        deadline,
        api="ListOffsets",
        request=lambda wanted: _list_offsets_request(version, wanted, NEWEST_TIMESTAMP, False),
        read=lambda answer: int(answer.timestamp),
    )
    return {topic: max((ms for (name, _), ms in answers.items() if name == topic), default=-1) for topic in partitions}


def _list_offsets_request(version: int, wanted: Mapping[str, Sequence[int]], timestamp: int, committed: bool) -> Any:
    topic_type = ListOffsetsRequest.ListOffsetsTopic
    return ListOffsetsRequest(
        version=version,
        replica_id=-1,
        isolation_level=1 if committed else 0,
        topics=[
            topic_type(
                name=topic,
                partitions=[
                    topic_type.ListOffsetsPartition(partition_index=p, current_leader_epoch=-1, timestamp=timestamp)
                    for p in numbers
                ],
            )
            for topic, numbers in wanted.items()
        ],
    )


def fetch_committed(
    cluster: Cluster, group: str, partitions: Mapping[str, list[int]] | None, deadline: Deadline, *, stable: bool = True
) -> dict[str, dict[int, tuple[int, str]]]:
    """Committed (offset, metadata) of a group, by topic and partition.

    Partitions without a committed offset are left out.

    Args:
        partitions: None: all partitions for which the group has offsets.
        stable: wait while a transaction that commits offsets of the group is undecided (KIP-447). Otherwise the
            offsets from before that transaction are returned.
    """
    cluster.connect(deadline)
    version = cluster.version(OffsetFetchRequest, min_version=7, max_version=7)
    topics = None
    if partitions is not None:
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=sorted(numbers))
            for topic, numbers in sorted(partitions.items())
        ]
    request = OffsetFetchRequest(
        version=version,
        group_id=group,
        topics=topics,
        require_stable=stable,
    )
    response = repeat(cluster, request, "OffsetFetch", GROUP, group, deadline, code_of=_first_code)
    if _first_code(response):
        raise codes.error_for(_first_code(response), api="OffsetFetch", resource=group, detail=f"group {group}")
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for topic in response.topics:
        for part in topic.partitions:
            if part.committed_offset >= 0:
                value = (int(part.committed_offset), part.metadata or "")
                found.setdefault(topic.name, {})[part.partition_index] = value
    return found


def commit_offsets(
    cluster: Cluster, group: str, offsets: Mapping[str, Mapping[int, int]], deadline: Deadline, *, metadata: str = ""
) -> None:
    """Commit offsets of a group without members, outside of any transaction.

    Raises:
        OnceflowError: the coordinator refuses the request.
    """
    cluster.connect(deadline)
    topic_type = OffsetCommitRequest.OffsetCommitRequestTopic
    request = OffsetCommitRequest(
        version=cluster.version(OffsetCommitRequest, min_version=6, max_version=7),
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=offset_topics(topic_type, topic_type.OffsetCommitRequestPartition, offsets, metadata),
    )
    response = repeat(
        cluster, request, "OffsetCommit", GROUP, group, deadline, code_of=offsets_code, unknown=offsets_unknown
    )
    if offsets_code(response):
        raise codes.error_for(offsets_code(response), api="OffsetCommit", resource=group, detail=f"group {group}")


def offset_topics(
    topic_type: Any, partition_type: Any, offsets: Mapping[str, Mapping[int, int]], metadata: str
) -> list[Any]:
    """The ``topics`` field of an OffsetCommit or a TxnOffsetCommit. It is the same in both; only type names differ."""
    return [
        topic_type(
            name=topic,
            partitions=[
                partition_type(
                    partition_index=partition,
                    committed_offset=offset,
                    committed_leader_epoch=-1,
                    committed_metadata=metadata,
                )
                for partition, offset in sorted(partitions.items())
            ],
        )
        for topic, partitions in sorted(offsets.items())
    ]


def offsets_code(response: Any) -> int:
    """The first error code in the response to an OffsetCommit or a TxnOffsetCommit, or 0."""
    return next((int(p.error_code) for t in response.topics for p in t.partitions if p.error_code), 0)


def offsets_unknown(response: Any) -> str | None:
    """A topic that does not exist, in the response to an OffsetCommit or a TxnOffsetCommit."""
    return next(
        (
            t.name
            for t in response.topics
            for p in t.partitions
            if p.error_code == codes.Code.UNKNOWN_TOPIC_OR_PARTITION
        ),
        None,
    )


def _first_code(response: Any) -> int:
    partitions = (p for t in response.topics for p in t.partitions)
    return int(response.error_code) or next((int(p.error_code) for p in partitions if p.error_code), 0)

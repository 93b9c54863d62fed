"""The flow's progress in Kafka: a compacted topic with one record per flow, which is decisive, and the committed
offsets of an ordinary consumer group, for tools that show lag.

The metadata of the offset commit contains the position of the progress record (``onceflow:<partition>:<offset>``), so
a start reads a few records instead of the topic. It is only a hint: without it the partition is read from its start.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from onceflow.client import offsets as kafka_offsets
from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.decided import read_decided
from onceflow.client.log_reader import LogRecord
from onceflow.client.produce import Producer
from onceflow.client.topics import create_own_topic, topic_config
from onceflow.client.transactions import Transactions
from onceflow.errors import DeadlineExceededError, ProgressConflictError, UnknownTopicError, counted, located
from onceflow.protocol import progress as records
from onceflow.protocol.batches import EncodedBatch, ProducerIdAndEpoch, encode_single
from onceflow.protocol.names import Names, TopicPartition
from onceflow.protocol.progress import (
    PROGRESS_TOPIC,
    Offsets,
    Progress,
    progress_partition,
)
from onceflow.protocol.transaction import Event

log = logging.getLogger("onceflow.progress")

# The partition of a flow's record must never change. So the partitioner always uses this number, even if the topic
# gets more partitions.
PROGRESS_PARTITIONS = 8
# Small segments: only closed ones are compacted, and a start without hint reads what is not compacted.
_CONFIGS = {
    "segment.bytes": str(16 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
    # Keep records as onceflow writes them (not compressed), whatever the broker's default is: the reader knows few
    # codecs.
    "compression.type": "producer",
}
# For a record outside any transaction. If a retry writes it twice, both records are equal.
_PLAIN = ProducerIdAndEpoch(-1, -1, transactional=False)
_HINT = re.compile(r"onceflow:(\d+):(\d+)(?::([0-9a-f]{8}))?")


@lru_cache
def partition_of(flow: str) -> int:
    """Partition of the progress topic that holds this flow's record."""
    return progress_partition(flow, PROGRESS_PARTITIONS)


def topic_partition_of(flow: str) -> TopicPartition:
    """Topic and partition of this flow's record."""
    return PROGRESS_TOPIC, partition_of(flow)


def hint(flow: str, offset: int) -> str:
    """Metadata of the offset commit: where the progress record of the same transaction is, and whose it is. Flows with
    different prefixes of the transactional id may share a group."""
    return f"onceflow:{partition_of(flow)}:{offset}:{_digest(flow)}"


def offset_of_hint(metadata: str, flow: str) -> int | None:
    """The offset of a flow's progress record; None: this is no hint to it. Earlier builds have not said whose it is."""
    found = _HINT.fullmatch(metadata)
    if found is None or int(found[1]) != partition_of(flow) or found[3] not in (None, _digest(flow)):
        return None
    return int(found[2])


@lru_cache
def _digest(flow: str) -> str:
    return hashlib.sha256(flow.encode()).hexdigest()[:8]


def ensure_topic(cluster: Cluster, deadline: Deadline) -> TopicInfo:
    """The progress topic, created when it is missing.

    Raises:
        PermissionDeniedError: it is missing and this principal may not create it.
        ProgressConflictError: it has too few partitions or is not compacted.
    """
    try:
        info = cluster.topics([PROGRESS_TOPIC], deadline)[PROGRESS_TOPIC]
    except UnknownTopicError:
        info = create_own_topic(
            cluster,
            PROGRESS_TOPIC,
            "progress topic",
            partitions=PROGRESS_PARTITIONS,
            configs=_CONFIGS,
            deadline=deadline,
        )
    policy = topic_config(cluster, PROGRESS_TOPIC, "cleanup.policy", deadline)
    check_topic(info.partitions, policy)
    if policy is None:
        log.warning(
            "no permission to read the settings of %s: make sure that its cleanup.policy is compact", PROGRESS_TOPIC
        )
    return info


def check_topic(partitions: int, policy: str | None) -> None:
    """Refuse a progress topic that cannot be used.

    Args:
        policy: its ``cleanup.policy``; None: it may not be read.

    Raises:
        ProgressConflictError: it has too few partitions or is not compacted.
    """
    if partitions < PROGRESS_PARTITIONS:
        raise ProgressConflictError(
            f"The progress topic {PROGRESS_TOPIC} has {counted(partitions, 'partition')}, but needs "
            f"{PROGRESS_PARTITIONS}",
            topic=PROGRESS_TOPIC,
            next_step=f"add partitions: kafka-topics.sh --alter --topic {PROGRESS_TOPIC} "
            f"--partitions {PROGRESS_PARTITIONS} (a flow's partition does not depend on the count)",
        )
    if policy not in (None, "compact"):
        raise ProgressConflictError(
            f"The progress topic {PROGRESS_TOPIC} has cleanup.policy={policy}: progress of an idle flow would expire",
            topic=PROGRESS_TOPIC,
            next_step=f"kafka-configs.sh --alter --entity-type topics --entity-name {PROGRESS_TOPIC} "
            "--add-config cleanup.policy=compact",
        )


def read_progress(
    cluster: Cluster,
    flow: str,
    group: str,
    source_topics: Mapping[str, list[int]],
    deadline: Deadline,
    *,
    missing_is_fine: bool = False,
) -> Progress | None:
    """The last committed progress of a flow, or None when it never committed.

    Call it after InitProducerId of the flow's transactional id: then every transaction of that id is decided. But a
    command may write the record of a flow under the transactional id of another one: ``onceflow promote`` ends the
    copy in the transaction of the flow that it replaces. Such a transaction is waited for. No other open transaction of
    the progress topic is.

    Args:
        flow: key of the record (``Names.progress_key``).
        missing_is_fine: accept group offsets that point to a record that no longer exists.

    Raises:
        DeadlineExceededError: such a transaction is still open when the deadline has passed.
    """
    partition = partition_of(flow)
    span = {PROGRESS_TOPIC: [partition]}
    begin = kafka_offsets.list_offsets(cluster, span, kafka_offsets.EARLIEST, deadline)[PROGRESS_TOPIC][partition]
    hinted = hinted_offset(cluster, group, source_topics, flow, deadline)
    latest = None
    if hinted is not None and begin <= hinted:
        latest = _latest(cluster, flow, partition, hinted, hinted, deadline)
    if latest is None:
        latest = _latest(cluster, flow, partition, begin, hinted, deadline)
    if latest is None:
        if hinted is not None and not missing_is_fine:
            raise ProgressConflictError(
                "The flow has committed offsets, but its progress record is gone",
                flow=flow,
                topic=f"{PROGRESS_TOPIC}-{partition}",
                detail=f"group {group} points to offset {hinted}; the log begins at {begin}",
                next_step="check whether the progress topic was deleted, or was not compacted. To start over: "
                f"`onceflow reset {flow}`",
            )
        return None
    if latest.value is None:  # a tombstone: the flow was reset
        return None
    with located(flow=flow, topic=f"{PROGRESS_TOPIC}-{partition}"):
        return records.decode(latest.key, latest.value)


def hinted_offset(
    cluster: Cluster,
    group: str,
    source_topics: Mapping[str, list[int]],
    flow: str,
    deadline: Deadline,
    *,
    stable: bool = False,
) -> int | None:
    """Offset of the progress record, according to the group's committed offsets.

    Args:
        flow: key of the record.
        stable: wait until no transaction on the group's offsets is open. Otherwise they may be older: that is good
            enough to find the record, and needs no waiting.
    """
    committed = kafka_offsets.fetch_committed(cluster, group, source_topics, deadline, stable=stable)
    hints = [
        offset
        for by_partition in committed.values()
        for _, metadata in by_partition.values()
        if (offset := offset_of_hint(metadata, flow)) is not None
    ]
    return min(hints) if hints else None


def _latest(
    cluster: Cluster, flow: str, partition: int, start: int, hinted: int | None, deadline: Deadline
) -> LogRecord | None:
    """The last committed record (or tombstone) of a flow from an offset on. A newer one that is undecided is waited
    for.

    Args:
        hinted: where the group's offsets point to. The record there is committed, also if its marker is missing: both
            are in one transaction.
    """
    attempt = 0
    while True:
        found = read_decided(cluster, PROGRESS_TOPIC, partition, start, deadline, key=flow.encode())
        known = [each for each in found.undecided if hinted is not None and each.offset <= hinted]
        latest = max((*found.committed[-1:], *known[-1:]), key=lambda each: each.offset, default=None)
        newer = [each for each in found.undecided if latest is None or each.offset > latest.offset]
        if not newer:
            return latest
        if not attempt and not deadline.expired:
            log.warning(
                "flow %s: its progress record at offset %d of %s-%d was written by another transaction (producer id "
                "%d), which is open: waiting until it ends",
                *(flow, newer[-1].offset, PROGRESS_TOPIC, partition, newer[-1].producer_id),
            )
        if not deadline.wait(attempt):
            raise _undecided(flow, partition, newer[-1], deadline)
        start = max(start, found.stable) if latest is None else latest.offset
        attempt += 1


def _undecided(flow: str, partition: int, record: LogRecord, deadline: Deadline) -> DeadlineExceededError:
    return DeadlineExceededError(
        "Another transaction is about to change the flow's progress, and is still open",
        flow=flow,
        topic=f"{PROGRESS_TOPIC}-{partition}",
        detail=f"producer id {record.producer_id}, offset {record.offset}; waited {deadline.seconds:g} s while "
        f"{deadline.what}",
        next_step=f"`onceflow transactions list --topic {PROGRESS_TOPIC}` names its transactional id: usually "
        "`onceflow promote` is at work, or was killed. Run that command again, or start the flow that it replaces: "
        "both end the transaction, and so does its timeout. If no coordinator knows it, `onceflow transactions abort` "
        "ends it. Then start this flow again; nothing was lost",
    )


def named(progress: Progress, names: Names) -> Progress:
    """The record as it is written: it names the flow that it belongs to, whatever the one before it did."""
    return replace(progress, transactional_id=names.transactional_id)


def record_of(progress: Progress, names: Names, identity: ProducerIdAndEpoch, sequence: int = 0) -> EncodedBatch:
    """The progress record as a batch of records, see `named`."""
    key, value = records.encode(named(progress, names))
    return encode_single(key, value, timestamp_ms=progress.time_ms, identity=identity, base_sequence=sequence)


def write_progress(
    cluster: Cluster,
    transactions: Transactions | None,
    names: Names,
    progress: Progress,
    offsets: Offsets,
    deadline: Deadline,
    *,
    producer: tuple[ProducerIdAndEpoch, int] = (_PLAIN, 0),
    sequence: int = 0,
    written: int | None = None,
) -> int:
    """Step ``progress``: the record (see `named`), then the group offsets that point to it. Returns its offset.

    Args:
        transactions: both become visible with the transaction; None: at once, in this order.
        offsets: what to commit to the group: offsets of the topics that are read. Progress may know other topics,
            which the query does not read any more and which may no longer exist.
        producer: without transactions, the producer of the record, and its next sequence number there.
        sequence: with transactions, how many records the transaction already has in the record's partition.
        written: its offset, if it was written ahead (see `record_of`).
    """
    partition = partition_of(progress.flow)
    if written is None:
        if transactions is not None and not transactions.version_2:
            transactions.add_partitions({PROGRESS_TOPIC: [partition]}, deadline)
        transactional_id = None if transactions is None else transactions.transactional_id
        identity, sequence = producer if transactions is None else (transactions.identity, sequence)
        sender = Producer(cluster, transactional_id=transactional_id, deadline=deadline)
        sender.send(PROGRESS_TOPIC, partition, record_of(progress, names, identity, sequence))
        written = sender.flush()[PROGRESS_TOPIC, partition].base_offset
    metadata = hint(progress.flow, written)
    if offsets and transactions is None:
        kafka_offsets.commit_offsets(cluster, names.group_id, offsets, deadline, metadata=metadata)
    elif (
        offsets and transactions is not None
    ):  # without offsets no source is a topic; the record is found without the group's hint, too
        transactions.commit_offsets(names.group_id, offsets, deadline, metadata=metadata)
    if transactions is not None:
        transactions.machine.on(Event.PROGRESS_WRITTEN)
    return written

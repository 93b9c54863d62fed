"""Open transactions over topics: whose they are, for how long, and which of them hang (KIP-664).

The leader of a partition knows the transactions that are open in it, by producer id. A coordinator knows the
transactional id and the partitions of a transaction. A transaction *hangs* in a partition if no coordinator has it open
there: then nothing will ever end it. Leaders are asked first, coordinators then, and leaders again. A transaction that
ends meanwhile is gone at the second look, and one that begins meanwhile has another first offset. So what was open at
both looks and unknown in between hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from onceflow.client.cluster import Cluster, TopicInfo
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import by_topic
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.producers import OpenTransaction, open_transactions
from onceflow.client.topics import find_topics
from onceflow.client.transaction_requests import DEAD, describe_transaction
from onceflow.client.transactional_ids import Listing, list_surely
from onceflow.errors import (
    DataLossError,
    DeadlineExceededError,
    OnceflowError,
    PermissionDeniedError,
    UnknownTopicError,
)
from onceflow.protocol import acls, timestamps
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import PROGRESS_TOPIC

log = logging.getLogger("onceflow.admin")

T = TypeVar("T")
_TRY_S = 15.0
ONGOING = "Ongoing"
#: States in which a coordinator will still end the transaction in the partitions that it lists.
PENDING = frozenset({ONGOING, "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})


@dataclass(frozen=True)
class OpenInPartition:
    """A transaction that is open in one partition.

    Args:
        transaction: what the leader knows, and of the coordinator the transactional id, state, start and timeout.
        hanging: whether no coordinator has it open in this partition; None: that could not be found out.
        first_write_ms: timestamp of its first record here, epoch milliseconds; None: it could not be read.
        held_back: how many offsets are in the partition after its last stable offset.
    """

    topic: str
    partition: int
    transaction: OpenTransaction
    hanging: bool | None
    first_write_ms: int | None
    held_back: int

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    def age_ms(self, now_ms: int) -> int | None:
        """How long ago that was; None: its producer has set a time that cannot be right, or none."""
        return timestamps.age_ms(self.since_ms, now_ms)

    @property
    def since_ms(self) -> int:
        """When it was begun, epoch milliseconds. If no coordinator has it open, the timestamps of its records tell; its
        producer may have set these to any time."""
        if self.transaction.started_ms >= 0 and not self.hanging:
            return self.transaction.started_ms
        return self.transaction.last_write_ms if self.first_write_ms is None else self.first_write_ms


@dataclass(frozen=True)
class Search:
    """What was found in topics.

    Args:
        found: in order of topics, partitions and offsets.
        unseen: topics or partitions that were not looked at, each with the reason.
        gap: why coordinators may know more than they have told; empty: they do not.
        partitions: how many partitions were looked at.
    """

    found: list[OpenInPartition]
    unseen: Mapping[str, str] = field(default_factory=dict)
    gap: str = ""
    partitions: int = 0


def find_open(
    cluster: Cluster, topics: Sequence[str], deadline: Deadline, *, producer_ids: Iterable[int] | None = None
) -> Search:
    """The open transactions of topics.

    Args:
        topics: none: all that are not internal, and the progress topic. What of these cannot be looked at is left out,
            and is in ``unseen``.
        producer_ids: only the transactions of these producers. None: all.

    Raises:
        UnknownTopicError: one of ``topics`` does not exist.
        PermissionDeniedError: this principal lacks READ on one of ``topics``.
        BrokerUnsupportedError: the brokers are older than Kafka 3.0.
    """
    while not topics and deadline.remaining > _TRY_S:
        # A leader that fails meanwhile is waited for in vain. At the next try its partitions are known to have none.
        try:
            return _find(cluster, topics, Deadline(_TRY_S, "listing open transactions"), producer_ids)
        except DeadlineExceededError as late:
            log.debug("looking at all topics again: %s", late)
    return _find(cluster, topics, deadline, producer_ids)


# ---- how -------------------------------------------------------------------------------------------------


def _find(cluster: Cluster, topics: Sequence[str], deadline: Deadline, producer_ids: Iterable[int] | None) -> Search:
    unseen: dict[str, str] = {}
    chosen = find_topics(cluster, dict.fromkeys(topics, ""), deadline) if topics else _ordinary(cluster, deadline)
    places = _led(chosen, unseen)
    behind = _each_topic(lambda some: _held_back(cluster, some, deadline), places, unseen, strict=bool(topics))
    suspects = [topic_partition for topic_partition, count in behind.items() if count > 0]

    def look(some: Iterable[TopicPartition]) -> dict[TopicPartition, list[OpenTransaction]]:
        return open_transactions(cluster, some, deadline)

    first = _each_topic(look, suspects, unseen, strict=bool(topics))
    wanted = None if producer_ids is None else {*producer_ids}
    first = {p: [each for each in all_ if wanted is None or each.producer_id in wanted] for p, all_ in first.items()}
    first = {topic_partition: all_ for topic_partition, all_ in first.items() if all_}
    if not first:
        return Search([], unseen, partitions=len(places))
    known, gap = _known(cluster, {each.producer_id for all_ in first.values() for each in all_}, deadline)
    second = _each_topic(look, first, unseen, strict=bool(topics))
    found = [
        _completed(cluster, topic_partition, each, known.get(each.producer_id), gap, behind[topic_partition], deadline)
        for topic_partition in sorted(first)
        for each in sorted(first[topic_partition], key=lambda each: each.start_offset)
        if _same(each) in {_same(other) for other in second.get(topic_partition, [])}
    ]
    return Search(found, unseen, gap, len(places))


def _ordinary(cluster: Cluster, deadline: Deadline) -> dict[str, TopicInfo]:
    there = cluster.topics(None, deadline)
    return {
        name: info
        for name, info in there.items()
        if name == PROGRESS_TOPIC or not (info.internal or name.startswith("__"))
    }


def _led(topics: Mapping[str, TopicInfo], unseen: dict[str, str]) -> list[TopicPartition]:
    found = []
    for name, info in sorted(topics.items()):
        for partition, leader in sorted(info.leaders.items()):
            if leader < 0:
                unseen[f"{name}-{partition}"] = "it has no leader"
            else:
                found.append((name, partition))
    return found


def _each_topic(
    ask: Callable[[Iterable[TopicPartition]], dict[TopicPartition, T]],
    places: Iterable[TopicPartition],
    unseen: dict[str, str],
    *,
    strict: bool,
) -> dict[TopicPartition, T]:
    """One request about all partitions. If it fails for a topic, one for each topic, without those where it fails."""
    places = list(places)
    try:
        return ask(places) if places else {}
    except UnknownTopicError:
        if strict:
            raise
    except PermissionDeniedError as denied:
        if strict:
            raise PermissionDeniedError(
                "This principal may not look for open transactions there",
                topic=denied.topic,
                detail=denied.detail,
                next_step=f"{acls.grant('READ', acls.TOPIC, denied.topic or 'NAME')}, or run this as an administrator",
            ) from denied
    found: dict[TopicPartition, T] = {}
    for topic, numbers in by_topic(places).items():
        try:
            found |= ask([(topic, number) for number in numbers])
        except PermissionDeniedError:
            unseen[topic] = "this principal lacks READ on it"
        except UnknownTopicError:
            log.debug("topic %s was deleted meanwhile", topic)
    return found


def _held_back(cluster: Cluster, places: Iterable[TopicPartition], deadline: Deadline) -> dict[TopicPartition, int]:
    """High watermark minus last stable offset. The high watermark is read second, so it is not below the other."""
    span = by_topic(places)
    stable = list_offsets(cluster, span, LATEST, deadline)
    high = list_offsets(cluster, span, LATEST, deadline, committed=False)
    return {(topic, p): high[topic][p] - stable[topic][p] for topic, numbers in span.items() for p in numbers}


def _known(
    cluster: Cluster, producer_ids: Iterable[int], deadline: Deadline
) -> tuple[dict[int, tuple[str, dict[str, Any]]], str]:
    """The transactional id of each producer id with its description, and why there may be more."""
    listing: Listing = list_surely(cluster, producer_ids, deadline)
    known: dict[int, tuple[str, dict[str, Any]]] = {}
    gap = listing.gap
    for each in listing.ids:
        described = describe_transaction(cluster, each.name, deadline)
        # It may have got another producer id between the two requests. Then what it had open has ended.
        if described["state"] != DEAD and described["producer_id"] == each.producer_id:
            known[each.producer_id] = (each.name, described)
    return known, gap


def _completed(
    cluster: Cluster,
    topic_partition: TopicPartition,
    seen: OpenTransaction,
    known: tuple[str, dict[str, Any]] | None,
    gap: str,
    held_back: int,
    deadline: Deadline,
) -> OpenInPartition:
    hanging: bool | None = None if gap else True
    if known is not None:
        name, described = known
        topic, partition = topic_partition
        hanging = not (described["state"] in PENDING and partition in described["partitions"].get(topic, ()))
        seen = replace(
            seen,
            transactional_id=name,
            state=str(described["state"]),
            started_ms=int(described["started_ms"]),
            timeout_ms=int(described["timeout_ms"]),
        )
    first_write_ms = _timestamp(cluster, topic_partition, seen.start_offset, deadline)
    return OpenInPartition(*topic_partition, seen, hanging, first_write_ms, held_back)


def _timestamp(cluster: Cluster, topic_partition: TopicPartition, offset: int, deadline: Deadline) -> int | None:
    """Timestamp of the record at an offset; None: it is not in the log any more, or it cannot be read."""
    try:
        for item in read_log(cluster, *topic_partition, offset, offset + 1, deadline):
            if isinstance(item, LogRecord):
                return item.timestamp_ms
    except DataLossError:
        pass
    except OnceflowError as error:
        log.debug("the first record of a transaction in %s-%d could not be read: %s", *topic_partition, error)
    return None


def _same(transaction: OpenTransaction) -> tuple[int, int]:
    return transaction.producer_id, transaction.start_offset

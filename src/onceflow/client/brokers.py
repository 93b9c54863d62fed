"""Warnings about a cluster and its other clients, logged before they do harm to a flow.

- Topic settings with which acknowledged records can be lost. They are read once, at a start.
- Transactions of other producers that stay open in a source. A read_committed reader gets no records after the start
  of an open transaction, so a flow that waits there looks idle.

Both are warnings only and never stop a flow. Where ACLs forbid the requests, there is neither a warning nor an error.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kafka.protocol.metadata import MetadataRequest

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.producers import OpenTransaction, open_transactions
from onceflow.client.topics import topic_configs
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactional_ids import list_transactional_ids
from onceflow.errors import OnceflowError, counted
from onceflow.protocol import timestamps

log = logging.getLogger("onceflow")

#: Kafka's own topics: the states of transactions, and the committed offsets of consumer groups.
CLUSTER_TOPICS = ("__transaction_state", "__consumer_offsets")
_UNCLEAN, _MIN_IN_SYNC = "unclean.leader.election.enable", "min.insync.replicas"
_SETTINGS_SECONDS = 10.0
_EXISTS = (0, 5)  # NONE; LEADER_NOT_AVAILABLE: a partition has no leader, but the topic exists

Offsets = Mapping[str, Mapping[int, int]]


# ---- settings --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Safety:
    """The settings of a topic that decide whether acknowledged records can be lost.

    Args:
        replicas: number of replicas of the partition with the fewest.
        unclean: ``unclean.leader.election.enable`` of the topic, or the brokers' default. None: this principal may not
            read it.
        min_in_sync: ``min.insync.replicas``, likewise.
    """

    topic: str
    replicas: int
    unclean: bool | None = None
    min_in_sync: int | None = None


def settings_warnings(topics: Iterable[Safety], brokers: int) -> list[str]:
    """The risks of these topics in a cluster with this number of brokers: one sentence for each kind of risk.

    A single replica is no risk worth a warning if the cluster has one broker. A setting that cannot be read is
    assumed to be safe.
    """
    ordered = sorted(topics, key=lambda topic: topic.topic)
    unclean = [topic.topic for topic in ordered if topic.unclean]
    single = [topic.topic for topic in ordered if topic.replicas == 1 and brokers > 1]
    lonely = [topic.topic for topic in ordered if topic.replicas > 1 and topic.min_in_sync == 1]
    found = []
    if unclean:
        found.append(
            f"{_UNCLEAN}=true for {', '.join(unclean)}: a replica that lacks committed records may become the leader, "
            "and these records are lost; set it to false"
        )
    if single:
        found.append(
            f"a single copy of {', '.join(single)}, in a cluster of {brokers} brokers: if its broker is lost, so are "
            f"its records, and nothing commits while it is down; raise the replication factor to {min(3, brokers)}"
        )
    if lonely:
        found.append(
            f"{_MIN_IN_SYNC}=1 for {', '.join(lonely)}: one broker alone may acknowledge a record, which is lost "
            "if that broker is lost; set it to 2, with a replication factor of 3"
        )
    return found


def read_safety(cluster: Cluster, topics: Iterable[str], deadline: Deadline) -> tuple[list[Safety], int]:
    """The settings of these topics and of Kafka's own ones, and the number of brokers. Sends two requests.

    Topics that do not exist, or that this principal may not describe, are left out.
    """
    cluster.connect(deadline)
    names = sorted({*topics, *CLUSTER_TOPICS})
    listed = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    response = cluster.ask(MetadataRequest(topics=listed, allow_auto_topic_creation=False), "Metadata", deadline)
    replicas = {
        str(topic.name): min(len(partition.replica_nodes) for partition in topic.partitions)
        for topic in response.topics
        if topic.error_code in _EXISTS and topic.partitions
    }
    configs = topic_configs(cluster, replicas, (_UNCLEAN, _MIN_IN_SYNC), deadline) if replicas else {}
    found = []
    for name, count in replicas.items():
        unclean, in_sync = configs[name][_UNCLEAN], configs[name][_MIN_IN_SYNC]
        found.append(
            Safety(
                topic=name,
                replicas=count,
                unclean=None if unclean is None else unclean == "true",
                min_in_sync=None if in_sync is None else int(in_sync),
            )
        )
    return found, len(response.brokers)


def warn_of_settings(cluster: Cluster, topics: Iterable[str | None], deadline: Deadline, *, flow: str) -> None:
    """Log a warning for each kind of setting with which records of these topics can be lost. Raises nothing.

    Args:
        topics: outputs, progress topic, tables. None is skipped (the output of a flow whose rows name their topics).
    """
    look = Deadline(deadline.capped(_SETTINGS_SECONDS), "reading the settings of topics")
    try:
        found, brokers = read_safety(cluster, [name for name in topics if name is not None], look)
    except OnceflowError as error:
        log.debug("flow %s: could not read the settings of topics: %s", flow, error)
        return
    for sentence in settings_warnings(found, brokers):
        log.warning("flow %s: %s", flow, sentence)


# ---- transactions of others ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A partition whose last stable offset has not moved, although there are records after it.

    Args:
        stable, high: last stable offset and high watermark.
        seconds: the last stable offset has not moved for at least so long.
    """

    topic: str
    partition: int
    stable: int
    high: int
    seconds: float


@dataclass
class _Stalled:
    stable: int
    since: float
    report_after_s: float


class StableOffsets:
    """Remembers for how long last stable offsets have not moved. It sends no requests: callers pass the offsets.

    Args:
        after_s: a partition is reported when its last stable offset has not moved for this time, and again each time
            the time has doubled.
        clock: monotonic, seconds.
    """

    def __init__(self, after_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._stalled: dict[tuple[str, int], _Stalled] = {}

    def look(self, stable: Offsets, high: Offsets) -> list[Held]:
        """The partitions to report now.

        Args:
            stable, high: last stable offsets, and high watermarks that were read after them.
        """
        now = self._clock()
        found = []
        for topic, partitions in stable.items():
            for partition, offset in partitions.items():
                topic_partition, end = (topic, partition), high[topic][partition]
                stalled = self._stalled.get(topic_partition)
                if end <= offset:
                    self._stalled.pop(topic_partition, None)
                elif stalled is None or stalled.stable != offset:
                    self._stalled[topic_partition] = _Stalled(offset, now, self._after_s)
                elif now - stalled.since >= stalled.report_after_s:
                    stalled.report_after_s = 2 * (now - stalled.since)
                    found.append(Held(topic, partition, offset, end, now - stalled.since))
        return found


def held_back(
    cluster: Cluster, watch: StableOffsets, partitions: Mapping[str, Sequence[int]], deadline: Deadline
) -> list[str]:
    """Warnings about partitions in which an open transaction has held back readers for a long time.

    Sends two requests to each leader, and a few more if there is something to report. READ on the topics is enough.
    To find the name of the transaction, DESCRIBE on its transactional id is needed, too.

    Args:
        watch: one object for all calls of a run; it remembers what earlier calls have read.
        partitions: the partitions of the sources.

    Raises:
        OnceflowError: no broker answers, or Kafka refuses the requests.
    """
    span = {topic: list(numbers) for topic, numbers in partitions.items()}
    stable = list_offsets(cluster, span, LATEST, deadline)
    high = list_offsets(cluster, span, LATEST, deadline, committed=False)
    return [held_back_warning(held, oldest_transaction(cluster, held, deadline)) for held in watch.look(stable, high)]


def held_back_warning(held: Held, transaction: OpenTransaction | None) -> str:
    """The text of a warning: the partition, since when it is held back, whose transaction it is, and what to do."""
    since = f" for at least {held.seconds:.0f} s" if held.seconds else ""  # its producer may have set any time
    text = (
        f"no record from offset {held.stable} of {held.topic}-{held.partition} on could be read{since} "
        f"({counted(held.high - held.stable, 'offset')} behind it): a transaction is open"
    )
    if transaction is None:
        return f"{text}; its producer could not be found out"
    text += (
        f" since offset {transaction.start_offset}, of producer id {transaction.producer_id}, epoch "
        f"{transaction.producer_epoch}, last write {_time(transaction.last_write_ms)}"
    )
    if transaction.transactional_id is not None and transaction.state == "Ongoing":
        name = transaction.transactional_id
        return (
            f"{text}; transactional id {name!r}, begun {_time(transaction.started_ms)}. Kafka aborts it "
            f"{transaction.timeout_ms / 1000:g} s after it was begun. If its application does not run any more, "
            f"`onceflow transactions abort {shlex.quote(name)}` does so now"
        )
    if transaction.transactional_id is None:
        text += "; no coordinator knows it: it hangs, or this principal lacks DESCRIBE on its transactional id"
    else:
        text += f"; its transactional id {transaction.transactional_id!r} is {transaction.state}, so it hangs"
    return (
        f"{text}. See `onceflow transactions describe --producer-id {transaction.producer_id} --topic {held.topic}`, "
        "and `abort` with the same arguments"
    )


def oldest_transaction(cluster: Cluster, held: Held, deadline: Deadline) -> OpenTransaction | None:
    """The oldest open transaction of the partition; None if it could not be found. READ on the topic is needed."""
    topic_partition = (held.topic, held.partition)
    try:
        found = open_transactions(cluster, [topic_partition], deadline)[topic_partition]
    except OnceflowError as error:
        log.debug("could not read the producers of %s-%d: %s", *topic_partition, error)
        return None
    if not found:
        return None
    seen = min(found, key=lambda transaction: transaction.start_offset)
    try:
        return _named(cluster, seen, deadline)
    except OnceflowError as error:
        log.debug("could not find the transactional id of producer id %d: %s", seen.producer_id, error)
        return seen


def _named(cluster: Cluster, seen: OpenTransaction, deadline: Deadline) -> OpenTransaction:
    """The same transaction, with what its coordinator knows of it."""
    listing = list_transactional_ids(cluster, deadline, producer_ids=[seen.producer_id])
    known = listing.by_producer.get(seen.producer_id)
    if known is None:
        return seen
    described = describe_transaction(cluster, known.name, deadline)
    return replace(
        seen,
        transactional_id=known.name,
        state=str(described["state"]),
        started_ms=int(described.get("started_ms", -1)),
        timeout_ms=int(described.get("timeout_ms", -1)),
    )


def _time(epoch_ms: int) -> str:
    return "at an unknown time" if epoch_ms < 0 else timestamps.in_utc(epoch_ms)

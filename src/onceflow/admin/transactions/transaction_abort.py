"""Describes the transaction of one producer, and aborts it.

There are two kinds. If a coordinator has the transaction open, InitProducerId with its transactional id makes the
coordinator abort it, which fences a running producer. If it hangs in a partition, an abort marker is written to the
leader of that partition.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onceflow.admin.records.tables import all_progress
from onceflow.admin.transactions.open_transactions import ONGOING, PENDING, OpenInPartition, Search, find_open
from onceflow.client.abort_markers import still_open, write_abort_marker
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.transaction_requests import DEAD, describe_transaction, init_producer_id
from onceflow.client.transactional_ids import list_transactional_ids
from onceflow.clock import clock_ms
from onceflow.errors import OnceflowError, OptionError, PermissionDeniedError
from onceflow.protocol import acls
from onceflow.protocol.names import TopicPartition, progress_keys_of

log = logging.getLogger("onceflow.admin")

#: A flow that has committed within this time is taken for a running one.
RECENT_MS = 5 * 60_000


@dataclass(frozen=True)
class Producer:
    """One producer and its transaction.

    Args:
        transactional_id: None: no coordinator has returned it.
        state: of the transactional id; ``Dead`` if there is none.
        started_ms: begin of the transaction that is open, or that was the last one; -1: not known.
        timeout_ms: -1: not known.
        partitions: those that the coordinator has in the transaction.
        search: where leaders have a transaction of this producer open.
    """

    transactional_id: str | None
    producer_id: int
    producer_epoch: int
    state: str
    started_ms: int
    timeout_ms: int
    partitions: Sequence[TopicPartition]
    search: Search

    @property
    def is_open(self) -> bool:
        """Whether its coordinator has the transaction open, or is ending it."""
        return self.state in PENDING


@dataclass(frozen=True)
class AbortPlan:
    """What an abort would do.

    Args:
        fence: whether the coordinator is told to abort the transaction.
        markers: partitions that get an abort marker.
        refusals: why it is not done without ``--force``.
    """

    producer: Producer
    fence: bool = False
    markers: list[OpenInPartition] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def describe(
    cluster: Cluster,
    transactional_id: str | None,
    producer_id: int | None,
    topics: Sequence[str],
    deadline: Deadline,
) -> Producer:
    """One producer, by its transactional id or by its producer id.

    Args:
        topics: where to look for its open transactions; none: as for `find_open`, and in the partitions that the
            coordinator has in the transaction.

    Raises:
        OptionError: nothing is known of it.
        PermissionDeniedError: this principal lacks DESCRIBE on the transactional id, or READ on one of ``topics``.
    """
    if transactional_id is None and producer_id is not None:
        known = list_transactional_ids(cluster, deadline, producer_ids=[producer_id]).by_producer.get(producer_id)
        transactional_id = None if known is None else known.name
    described: Mapping[str, Any] = {"state": DEAD, "producer_id": producer_id, "producer_epoch": -1, "partitions": {}}
    if transactional_id is not None:
        with _may("describe", transactional_id, "DESCRIBE"):
            described = describe_transaction(cluster, transactional_id, deadline)
        if described["state"] == DEAD:
            raise _unknown_id(cluster, transactional_id, deadline)
    number = int(described["producer_id"])
    search = find_open(cluster, topics, deadline, producer_ids=[number])
    listed = [(t, p) for t, numbers in sorted(described["partitions"].items()) for p in numbers]
    if not topics:
        search = _with_internal(cluster, search, listed, number, deadline)
    if transactional_id is None and not search.found:
        raise _unknown_producer(number, search, topics)
    return Producer(
        transactional_id,
        number,
        int(described["producer_epoch"]) if transactional_id else search.found[0].transaction.producer_epoch,
        str(described["state"]),
        int(described.get("started_ms", -1)),
        int(described.get("timeout_ms", -1)),
        listed,
        search,
    )


def plan(producer: Producer, flow_committed_ms: int | None) -> AbortPlan:
    """What has to be done so that nothing of this producer is open, and what speaks against it.

    Args:
        flow_committed_ms: how long ago the flow with this transactional id has committed, in milliseconds; None: it is
            not the id of a flow that has progress.

    Raises:
        OptionError: its coordinator is already ending the transaction.
    """
    if producer.is_open and producer.state != ONGOING:
        raise OptionError(
            f"The transaction of {producer.transactional_id!r} is {producer.state}: its coordinator is ending it",
            next_step="wait; if it stays so, look for partitions without a leader: markers cannot be written there",
        )
    fence = producer.state == ONGOING
    markers = [each for each in producer.search.found if each.hanging is not False]
    refusals = []
    name = producer.transactional_id
    if fence and flow_committed_ms is not None and flow_committed_ms < RECENT_MS:
        refusals.append(
            f"{name!r} belongs to a flow that has committed {flow_committed_ms / 1000:.0f} s ago: it seems to run. "
            "It ends its transactions by itself. If it was killed, its next start aborts this one"
        )
    if any(each.hanging is None for each in markers):
        refusals.append(f"a coordinator may still have this transaction open: {producer.search.gap}")
    if markers and flow_committed_ms is not None:
        refusals.append(
            f"{name!r} belongs to a flow: its next start decides these records as their batch was decided, and an "
            "abort may lose committed ones"
        )
    elif markers and producer.state == "CompleteCommit":
        refusals.append(
            f"the last transaction of {name!r} was committed. If these records are part of it, and only their marker "
            "is missing (KIP-664), an abort loses committed records"
        )
    return AbortPlan(producer, fence, markers, refusals)


def flow_committed_ms(cluster: Cluster, transactional_id: str | None, deadline: Deadline) -> int | None:
    """How long ago the flow with this transactional id has committed, in milliseconds; None: there is no such flow.

    Raises:
        PermissionDeniedError: it is the id of a flow, and this principal lacks READ on the progress topic.
        ProgressConflictError: the flow's progress cannot be read by this version.
    """
    keys = progress_keys_of(transactional_id or "")
    if not keys:
        return None

    def unreadable(key: str, error: OnceflowError) -> None:
        if key in keys:
            raise error

    flows = all_progress(cluster, deadline, strict=True, unreadable=unreadable)
    times = [each.time_ms for each in flows if each.flow in keys]
    return max(0, clock_ms() - max(times)) if times else None


def abort(cluster: Cluster, what: AbortPlan, deadline: Deadline) -> list[TopicPartition]:
    """Do it, and return when leaders have nothing of it open any more.

    Returns:
        The partitions where that was seen. Those that this principal may not read are left out.

    Raises:
        OptionError: the transaction has ended, or another one has begun, since the plan was made.
        PermissionDeniedError: this principal lacks WRITE on the transactional id, or ALTER on the cluster.
        DeadlineExceededError: something is still open.
    """
    producer = what.producer
    if what.fence and producer.transactional_id is not None:
        now = describe_transaction(cluster, producer.transactional_id, deadline)
        before = (producer.producer_id, producer.producer_epoch, producer.started_ms)
        if now["state"] != ONGOING or (now["producer_id"], now["producer_epoch"], now["started_ms"]) != before:
            raise OptionError(
                f"The transaction of {producer.transactional_id!r} has ended meanwhile; nothing was done",
                next_step="its producer is alive; look again with `onceflow transactions list`",
            )
        with _may("take over", producer.transactional_id, "WRITE"):
            init_producer_id(cluster, producer.transactional_id, producer.timeout_ms, None, deadline)
    for each in what.markers:
        write_abort_marker(cluster, each.topic_partition, each.transaction, deadline)
    for each in producer.search.found:
        attempt = 0
        while still_open(cluster, each.topic_partition, each.transaction, deadline) is not None:
            deadline.pause(attempt, f"the transaction is still open in {each.topic}-{each.partition}")
            attempt += 1
    return sorted({each.topic_partition for each in producer.search.found})


@contextlib.contextmanager
def _may(verb: str, transactional_id: str, operation: str) -> Iterator[None]:
    try:
        yield
    except PermissionDeniedError as denied:
        raise PermissionDeniedError(
            f"This principal may not {verb} the transactional id {transactional_id!r}",
            detail=denied.detail,
            next_step=acls.grant(operation, acls.TRANSACTIONAL_ID, transactional_id)
            + ", or run this as an administrator",
        ) from denied


def _with_internal(
    cluster: Cluster, search: Search, listed: Sequence[TopicPartition], producer_id: int, deadline: Deadline
) -> Search:
    """With the internal topics that the coordinator has in the transaction, as far as they can be read."""
    unseen = dict(search.unseen)
    found = list(search.found)
    gap = search.gap
    for topic in sorted({topic for topic, _ in listed if topic.startswith("__")} - {each.topic for each in found}):
        try:
            more = find_open(cluster, [topic], deadline, producer_ids=[producer_id])
        except OnceflowError as error:
            unseen[topic] = error.what
            continue
        found += more.found
        gap = gap or more.gap
    return replace(search, found=found, unseen=unseen, gap=gap)


def _unknown_id(cluster: Cluster, transactional_id: str, deadline: Deadline) -> OptionError:
    names = [each.name for each in list_transactional_ids(cluster, deadline).ids]
    close = difflib.get_close_matches(transactional_id, names, 3, 0.6)
    return OptionError(
        f"No coordinator knows the transactional id {transactional_id!r}",
        detail=f"similar ids: {', '.join(close)}" if close else "",
        next_step=(f"did you mean {close[0]}? If not, " if close else "")
        + "check the name, with its prefix. Kafka forgets an id that is idle for a week; what it has left open only "
        "has a producer id: `onceflow transactions list`, then --producer-id",
    )


def _unknown_producer(producer_id: int, search: Search, topics: Sequence[str]) -> OptionError:
    where = ", ".join(topics) if topics else "the topics that are not internal"
    hidden = "; ".join(f"{name}: {why}" for name, why in search.unseen.items())
    return OptionError(
        f"No coordinator knows producer id {producer_id}, and it has no open transaction in {where}",
        detail=f"not looked at: {hidden}" if hidden else "",
        next_step="`onceflow transactions list` shows what is open; --topic also takes internal topics such as "
        "__consumer_offsets",
    )

"""Which transactional ids the coordinators of a cluster know (ListTransactions, KIP-664)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kafka.protocol.admin import ListTransactionsRequest

from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.client.topics import copies
from onceflow.client.transaction_requests import describe_transaction
from onceflow.errors import DeadlineExceededError, PermissionDeniedError
from onceflow.protocol import codes

log = logging.getLogger("onceflow.client")

STATE_TOPIC = "__transaction_state"
_LOADING_S = 10.0


@dataclass(frozen=True)
class TransactionalId:
    """A transactional id that a coordinator knows.

    Args:
        state: ``Empty``, ``Ongoing``, ``PrepareCommit``, ``CompleteAbort``, ...
    """

    name: str
    producer_id: int
    state: str


@dataclass(frozen=True)
class Listing:
    """The transactional ids that this principal may see.

    Args:
        gap: why coordinators may know more than these; empty: these are all.
    """

    ids: list[TransactionalId] = field(default_factory=list)
    gap: str = ""

    @property
    def by_producer(self) -> Mapping[int, TransactionalId]:
        return {each.producer_id: each for each in self.ids}


def list_transactional_ids(cluster: Cluster, deadline: Deadline, *, producer_ids: Iterable[int] = ()) -> Listing:
    """What the coordinators answer. Any broker may be one, so all brokers are asked.

    Kafka leaves out the ids on which this principal lacks DESCRIBE, without an error.

    Args:
        producer_ids: only the transactional ids that have these producer ids. Empty: all.

    Raises:
        BrokerUnsupportedError: the brokers are older than Kafka 3.0.
    """
    cluster.connect(deadline)
    request = ListTransactionsRequest(
        version=cluster.version(ListTransactionsRequest, min_version=0, max_version=0),
        state_filters=[],
        producer_id_filters=sorted(set(producer_ids)),
    )
    found: dict[str, TransactionalId] = {}
    gap = ""
    for broker in cluster.manager.cluster.brokers():
        problem = _ask(cluster, request, int(broker.node_id), found, deadline)
        gap = gap or problem
    return Listing([found[name] for name in sorted(found)], gap)


def list_surely(cluster: Cluster, producer_ids: Iterable[int], deadline: Deadline) -> Listing:
    """As `list_transactional_ids`, and ``gap`` also says whether an id may be hidden from this principal, or may be
    one of a coordinator that is not available."""
    cluster.connect(deadline)
    cluster.refresh_brokers(deadline)
    before = _coordinators(cluster, deadline)
    listing = list_transactional_ids(cluster, deadline, producer_ids=producer_ids)
    after = _coordinators(cluster, deadline)
    gap = listing.gap
    if not gap and not before:
        gap = f"this principal lacks DESCRIBE on topic {STATE_TOPIC}"
    if not gap and before != after:
        gap = "coordinators have moved to other brokers meanwhile"
    if not gap and min(after.values()) < 0:
        gap = f"partitions of {STATE_TOPIC} have no leader"
    if not gap and not _may_describe_all(cluster, deadline):
        gap = "this principal lacks DESCRIBE on all transactional ids ('*')"
    return Listing(listing.ids, gap)


def _ask(
    cluster: Cluster,
    request: ListTransactionsRequest,
    node: int,
    found: dict[str, TransactionalId],
    deadline: Deadline,
) -> str:
    """Add what one broker answers. Returns why it is not known to be all, or ''."""
    loading = Deadline(deadline.capped(_LOADING_S), f"listing the transactions of broker {node}")
    attempt = 0
    while True:
        try:
            response = cluster.exchange(request, node, loading)
        except ConnectionFailedError as lost:
            problem = str(lost)
            if attempt:
                return f"broker {node} did not answer ({problem})"
        else:
            row = codes.describe(int(response.error_code))
            if row.code == 0:
                for state in response.transaction_states or []:
                    name = str(state.transactional_id)
                    found[name] = TransactionalId(name, int(state.producer_id), str(state.transaction_state))
                return ""
            if not row.verdict.retriable:
                raise codes.error_for(row.code, api="ListTransactions", detail=f"broker {node}")
            problem = row.name
        try:
            loading.pause(attempt, problem)
        except DeadlineExceededError:
            log.debug("broker %d does not list transactions: %s", node, problem)
            return f"broker {node} did not answer ({problem})"
        attempt += 1


def _coordinators(cluster: Cluster, deadline: Deadline) -> dict[int, int]:
    """The leaders of the partitions that keep the states of transactions; empty: this principal may not see them."""
    return {partition: each.leader for partition, each in copies(cluster, STATE_TOPIC, deadline).items()}


def _may_describe_all(cluster: Cluster, deadline: Deadline) -> bool:
    """Whether this principal may describe an id that nobody has named in an ACL: then its permission is for all ids,
    but for those that an ACL denies by name."""
    try:
        describe_transaction(cluster, f"~{uuid.uuid4().hex}", deadline)
    except PermissionDeniedError:
        return False
    return True

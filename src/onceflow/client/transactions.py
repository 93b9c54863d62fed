"""The transaction protocol of one transactional id, as the driver speaks it.

Transaction version 2 (KIP-890): Produce v12 and TxnOffsetCommit v5 enrol implicitly, EndTxn v5 returns
the next (producer id, epoch). Version 1: partitions and the group are added explicitly, the epoch does
not move by itself, so ``begin`` calls InitProducerId before every transaction; otherwise a late write of
an aborted attempt could enter the next transaction (KAFKA-17754).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from kafka.protocol.admin import DescribeTransactionsRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from onceflow.client.cluster import GROUP, TRANSACTION, Cluster
from onceflow.client.coordinators import repeat
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import offset_topics, offsets_code
from onceflow.errors import FencedError, TransactionTimeoutError
from onceflow.wire import codes
from onceflow.wire.batches import BatchHeader
from onceflow.wire.produce import LEAST_VERSION, MOST_VERSION

_FENCED_CODES = (47, 90)
_INVALID_TXN_STATE = 48
_TRANSACTIONAL_ID_NOT_FOUND = 105


class Outcome(enum.Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"  # not by us: it timed out, or a driver that is starting has aborted it
    FENCED = "fenced"  # somebody re-initialised the transactional id; progress in Kafka decides


class Transactions:
    """One transactional id. Not thread-safe.

    Args:
        transactional_id: one per flow; whoever initialises it last owns it (zombie fencing, KIP-98).
        timeout_ms: the broker aborts a transaction open for longer than this.
        identity: what the driver was given, for a task that writes in the driver's transaction.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        timeout_ms: int = 60_000,
        *,
        identity: BatchHeader | None = None,
    ) -> None:
        self._cluster = cluster
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self._identity = identity
        self._used = False  # whether this epoch may have been written under

    @property
    def identity(self) -> BatchHeader:
        """Producer id and epoch that the next or current transaction is written with."""
        if self._identity is None:
            raise RuntimeError("Transactions.init has not been called")
        return self._identity

    @property
    def version_2(self) -> bool:
        """Whether the cluster has transaction version 2."""
        return self._cluster.transaction_version >= 2

    def check_supported(self, deadline: Deadline) -> None:
        """Raises ``BrokerUnsupportedError`` when the broker has no transactions, before anything else is asked."""
        self._cluster.connect(deadline)
        self._cluster.version(InitProducerIdRequest, least=3, most=5)
        self._cluster.version(TxnOffsetCommitRequest, least=3, most=5)
        self._cluster.version(ProduceRequest, least=LEAST_VERSION, most=MOST_VERSION)

    # ---- identity ------------------------------------------------------------------------------------

    def init(self, deadline: Deadline) -> BatchHeader:
        """Take over the transactional id: fences every older owner and aborts what it left open.

        Returns only when an open transaction of the id has been decided.
        """
        return self._init_producer_id(-1, -1, deadline)

    def renew(self, deadline: Deadline) -> BatchHeader:
        """A fresh epoch for the same owner. Nothing may be open.

        Raises:
            FencedError: somebody else has taken over.
        """
        current = self.identity
        return self._init_producer_id(current.producer_id, current.producer_epoch, deadline)

    def begin(self, deadline: Deadline) -> BatchHeader:
        """An identity nothing has been written under yet (I3)."""
        if self._used:
            self.renew(deadline)
        self._used = True
        return self.identity

    def _init_producer_id(self, producer_id: int, epoch: int, deadline: Deadline) -> BatchHeader:
        self._cluster.connect(deadline)
        request = InitProducerIdRequest(
            version=self._cluster.version(InitProducerIdRequest, least=3, most=5),
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
        response = repeat(self._cluster, request, "InitProducerId", TRANSACTION, self.transactional_id, deadline)
        if response.error_code:
            raise self._error(response.error_code, "InitProducerId")
        self._identity = BatchHeader(int(response.producer_id), int(response.producer_epoch))
        self._used = False
        return self._identity

    # ---- enrolment -----------------------------------------------------------------------------------

    def add_partitions(self, partitions: Mapping[str, Iterable[int]], deadline: Deadline) -> None:
        """Enrol output partitions. Needed with transaction version 1; harmless with 2."""
        request = AddPartitionsToTxnRequest(
            version=self._cluster.version(AddPartitionsToTxnRequest, least=0, most=3),
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.identity.producer_id,
            v3_and_below_producer_epoch=self.identity.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=sorted(numbers))
                for topic, numbers in sorted(partitions.items())
            ],
        )

        def code_of(response: Any) -> int:
            found = [
                p.partition_error_code for t in response.results_by_topic_v3_and_below for p in t.results_by_partition
            ]
            # OPERATION_NOT_ATTEMPTED (55) only says that another partition of the request is at fault.
            return next((c for c in found if c not in (0, 55)), next((c for c in found if c), 0))

        response = repeat(
            self._cluster, request, "AddPartitionsToTxn", TRANSACTION, self.transactional_id, deadline, code_of=code_of
        )
        if code_of(response):
            raise self._error(code_of(response), "AddPartitionsToTxn")

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[str, Mapping[int, int]],
        deadline: Deadline,
        *,
        metadata: str = "",
    ) -> None:
        """Add the source offsets to the transaction, under an ordinary consumer group (KIP-447).

        Generation -1 and an empty member are accepted: the group has no members, fencing is by epoch.
        """
        if not self.version_2:
            self._add_offsets(group, deadline)
        most = 5 if self.version_2 else 4
        topic_type = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        request = TxnOffsetCommitRequest(
            version=self._cluster.version(TxnOffsetCommitRequest, least=3, most=most),
            transactional_id=self.transactional_id,
            group_id=group,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=offset_topics(topic_type, topic_type.TxnOffsetCommitRequestPartition, offsets, metadata),
        )
        response = repeat(self._cluster, request, "TxnOffsetCommit", GROUP, group, deadline, code_of=offsets_code)
        if offsets_code(response):
            raise self._error(offsets_code(response), "TxnOffsetCommit", detail=f"group {group}")

    def _add_offsets(self, group: str, deadline: Deadline) -> None:
        request = AddOffsetsToTxnRequest(
            version=self._cluster.version(AddOffsetsToTxnRequest, least=0, most=3),
            transactional_id=self.transactional_id,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
            group_id=group,
        )
        response = repeat(self._cluster, request, "AddOffsetsToTxn", TRANSACTION, self.transactional_id, deadline)
        if response.error_code:
            raise self._error(response.error_code, "AddOffsetsToTxn", detail=f"group {group}")

    # ---- end -----------------------------------------------------------------------------------------

    def end(self, deadline: Deadline, *, commit: bool) -> Outcome:
        """End the transaction. The request is repeated until its outcome is known.

        A lost response is not a lost decision: the same request, with the same epoch and before any
        InitProducerId, answers NONE when the commit was applied, INVALID_TXN_STATE when the transaction
        had been aborted (timed out), a fencing code when somebody re-initialised the id.

        Raises:
            DeadlineExceededError: the outcome is unknown. The caller must stop; a restart finds out.
        """
        request = EndTxnRequest(
            version=self._cluster.version(EndTxnRequest, least=0, most=5 if self.version_2 else 4),
            transactional_id=self.transactional_id,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
            committed=commit,
        )
        response = repeat(self._cluster, request, "EndTxn", TRANSACTION, self.transactional_id, deadline)
        code = int(response.error_code)
        if code == 0:
            if self.version_2:
                self._identity = BatchHeader(int(response.producer_id), int(response.producer_epoch))
                self._used = False
            return Outcome.COMMITTED if commit else Outcome.ABORTED
        if code == _INVALID_TXN_STATE:
            return Outcome.ABORTED
        if code in _FENCED_CODES:
            return Outcome.FENCED
        raise self._error(code, "EndTxn")

    def commit(self, deadline: Deadline, *, flow: str, doing: str) -> None:
        """Commit a transaction that is not a batch's: one outcome is good, the others are errors.

        Args:
            doing: what the flow was doing, for the error: "while this one was ...".

        Raises:
            FencedError: a driver of the flow has started meanwhile.
            TransactionTimeoutError: the broker ended the transaction before.
        """
        outcome = self.end(deadline, commit=True)
        if outcome is Outcome.FENCED:
            raise fenced(flow, doing)
        if outcome is Outcome.ABORTED:
            raise TransactionTimeoutError(
                f"The broker ended the transaction while the flow was {doing}", flow=flow, next_step="try again"
            )

    def abort(self, deadline: Deadline) -> None:
        """Abort what is open and take a fresh epoch, so that late writes of this attempt are refused.

        Raises:
            FencedError: somebody else owns the transactional id.
        """
        # Not by InitProducerId alone: repeated while it aborts (CONCURRENT_TRANSACTIONS), it would fence itself.
        if self.end(deadline, commit=False) is Outcome.FENCED:
            raise self._error(90, "EndTxn")
        if self._used:  # version 1, or there was nothing to abort: the epoch has not moved
            self.renew(deadline)

    # ---- shared --------------------------------------------------------------------------------------

    def _error(self, code: int, api: str, detail: str = "") -> Exception:
        return codes.error_for(code, api=api, detail=detail or f"transactional id {self.transactional_id}")


def fenced(flow: str, doing: str) -> FencedError:
    """The error of a driver that finds itself fenced. ``doing``: as of `Transactions.commit`."""
    return FencedError(
        f"A newer driver of flow {flow!r} has taken over while this one was {doing}",
        flow=flow,
        next_step="a flow has one driver: stop the other one, or leave it to it",
    )


def idempotent_identity(cluster: Cluster, deadline: Deadline) -> BatchHeader:
    """A new producer id for batches that are in order and not doubled by retries, without transactions (KIP-98).

    Any broker hands them out. Each has a place in the memory of every broker it writes to, for a day: so take one
    for a run, not for a batch.
    """
    cluster.connect(deadline)
    request = InitProducerIdRequest(
        version=cluster.version(InitProducerIdRequest, least=3, most=5),
        transactional_id=None,
        transaction_timeout_ms=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    attempt = 0
    response = cluster.ask(request, "InitProducerId", deadline)
    while codes.describe(int(response.error_code)).verdict.retriable:  # no block of ids yet
        deadline.pause(attempt, "InitProducerId")
        attempt += 1
        response = cluster.ask(request, "InitProducerId", deadline)
    if response.error_code:
        raise codes.error_for(int(response.error_code), api="InitProducerId", detail="an idempotent producer")
    return BatchHeader(int(response.producer_id), int(response.producer_epoch), transactional=False)


def describe_transaction(cluster: Cluster, transactional_id: str, deadline: Deadline) -> dict[str, Any]:
    """State of a transactional id as its coordinator sees it (KIP-664).

    Returns:
        ``state`` (``Empty``, ``Ongoing``, ``PrepareCommit``, ..., ``Dead`` when unknown), ``producer_id``,
        ``producer_epoch``, ``timeout_ms``, ``started_ms`` (-1 while none is open), ``partitions``.
    """
    cluster.connect(deadline)
    request = DescribeTransactionsRequest(
        version=cluster.version(DescribeTransactionsRequest, least=0, most=0), transactional_ids=[transactional_id]
    )
    response = repeat(
        cluster,
        request,
        "DescribeTransactions",
        TRANSACTION,
        transactional_id,
        deadline,
        code_of=lambda response: int(response.transaction_states[0].error_code),
    )
    state = response.transaction_states[0]
    if state.error_code == _TRANSACTIONAL_ID_NOT_FOUND:
        return {"state": "Dead", "producer_id": -1, "producer_epoch": -1, "partitions": {}}
    if state.error_code:
        raise codes.error_for(int(state.error_code), api="DescribeTransactions")
    return {
        "state": state.transaction_state,
        "producer_id": int(state.producer_id),
        "producer_epoch": int(state.producer_epoch),
        "timeout_ms": int(state.transaction_timeout_ms),
        "started_ms": int(state.transaction_start_time_ms),
        "partitions": {t.topic: sorted(t.partitions) for t in state.topics},
    }

"""The transaction protocol of one transactional id, on the driver.

Transaction version 2 (KIP-890): Produce v12 and TxnOffsetCommit v5 add their partitions to the transaction implicitly,
and EndTxn v5 returns the next producer id and epoch. Version 1: partitions and the group are added explicitly, and the
epoch stays the same. So ``begin`` calls InitProducerId before every transaction. Otherwise a late write of an aborted
attempt could become part of the next transaction (KAFKA-17754).

With version 1, an owner whose transaction has timed out gets the same error as an owner that was fenced, because the
coordinator aborts such a transaction under the next epoch. To distinguish the two, a driver does not send
EndTxn(abort) with version 1. It aborts with InitProducerId, which works like the timeout. So the state CompleteAbort
under the epoch after ours means that our transaction was aborted and that no process was given that epoch. The owner
may then use that epoch in InitProducerId (KIP-360). The request fails if another process has initialised the id before.

The table of ``protocol/transaction.py`` defines which steps may follow each other. This module sends the requests, and
reports each step or response to that table as an event.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from onceflow.client import transaction_requests as requests
from onceflow.client.cluster import Cluster
from onceflow.client.connections import SentRequest
from onceflow.client.deadline import Deadline
from onceflow.errors import BrokerUnsupportedError, FencedError, PermissionDeniedError, TransactionTimeoutError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.codes import Code
from onceflow.protocol.transaction import GIVEN, START, Epoch, Event, Mode, Transaction

_FENCED_CODES = (Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED)


class Outcome(enum.Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"  # by the caller, by the timeout, or by a driver that is starting
    FENCED = "fenced"  # another process has initialised the transactional id; progress shows what was committed


class _CoordinatorState(enum.Enum):
    """The state of the transactional id at its coordinator, as seen by its last owner."""

    OWN = "own"  # our epoch; or the id is forgotten, as it was idle for longer than transactional.id.expiration.ms
    ABORTED = "aborted"  # the coordinator has aborted our transaction under the next epoch, which no process was given
    FENCED = "fenced"  # another process has initialised it
    UNKNOWN = "unknown"  # the broker does not return the state


class _Ahead(NamedTuple):
    """Source offsets that are on their way to the group.

    Args:
        identity: of the transaction. of: group, offsets and metadata.
    """

    identity: ProducerIdAndEpoch
    of: tuple[str, Mapping[str, Mapping[int, int]], str]
    sent: SentRequest


class Transactions:
    """One transactional id. Not thread-safe.

    Args:
        transactional_id: one per flow. The last process that initialises it owns it (zombie fencing, KIP-98).
        timeout_ms: the broker aborts a transaction that is open for longer than this.
        identity: the driver's producer id and epoch, for a task that writes in the driver's transaction.
        check: raises ``FencedError`` if another process has committed under the transactional id since this owner did.
            It is called when Kafka cannot know that: it has forgotten the id (``transactional.id.expiration.ms``), or
            it has aborted the owner's transaction.
        batch: whether the transactions are batches of a flow, with an audit and a progress record; otherwise they are
            those of a tool.

    Attributes:
        machine: the state of the transactional id.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        timeout_ms: int = 60_000,
        *,
        identity: ProducerIdAndEpoch | None = None,
        check: Callable[[Deadline], None] = lambda deadline: None,
        batch: bool = False,
    ) -> None:
        self._cluster = cluster
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self._identity = identity
        self._check = check
        self._batch = batch
        self._ahead: _Ahead | None = None
        self.machine = Transaction(Mode.of(2, batch=batch), START if identity is None else GIVEN)

    def over(self, cluster: Cluster) -> Transactions:
        """The same transactional id in its current state, with other connections."""
        same = Transactions(cluster, self.transactional_id, self.timeout_ms, check=self._check, batch=self._batch)
        same._identity, same.machine = self._identity, self.machine
        return same

    @property
    def identity(self) -> ProducerIdAndEpoch:
        """Producer id and epoch of the current or next transaction."""
        if self._identity is None:
            raise RuntimeError("Transactions.init has not been called")
        return self._identity

    @property
    def version_2(self) -> bool:
        """Whether the cluster has transaction version 2."""
        return self._cluster.transaction_version >= 2

    def check_supported(self, deadline: Deadline) -> None:
        """Raise ``BrokerUnsupportedError`` if the broker has no transactions. Call it before other requests."""
        requests.check_supported(self._cluster, deadline)

    # ---- identity ------------------------------------------------------------------------------------

    def init(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Take over the transactional id. This fences every older owner and aborts an open transaction of it.

        Returns only when such a transaction has been decided.
        """
        self._identity = self._init_producer_id(None, deadline)
        self.machine.on(Event.INITIALIZED)
        return self.identity

    def renew(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Get a new epoch for the same owner. No transaction may be open.

        Raises:
            FencedError: another process has taken over the transactional id.
        """
        mine = self.identity
        self.machine.expect(Event.EPOCH_BUMPED)
        try:
            fresh = self._init_producer_id(mine, deadline)
        except FencedError:
            if self.version_2 or self._coordinator_state(deadline) is not _CoordinatorState.ABORTED:
                self.machine.on(Event.FENCED)
                raise
            return self._continue(deadline)
        self._identity = fresh
        # The producer id changes if Kafka had forgotten the transactional id, or if the epochs are used up.
        same = fresh.producer_id == mine.producer_id
        self.machine.on(Event.EPOCH_BUMPED if same else Event.PRODUCER_ID_REPLACED)
        self._verify(deadline)
        return self.identity

    def begin(self, deadline: Deadline, event: Event = Event.BEGIN) -> ProducerIdAndEpoch:
        """Begin a transaction. Returns a producer id and epoch with which nothing has been written yet (I3).

        Args:
            event: the kind of transaction: an ordinary one, or one that writes missing markers.
        """
        self._connect(deadline)
        self.machine.expect(event)
        self._verify(deadline)
        if self.machine.epoch is Epoch.USED:
            self.renew(deadline)
        self._ahead = None
        self.machine.on(event)
        return self.identity

    def _continue(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Version 1: continue after the coordinator has aborted our transaction.

        Raises:
            FencedError: another process has initialised the transactional id, or has committed meanwhile.
        """
        aborted = ProducerIdAndEpoch(self.identity.producer_id, self.identity.producer_epoch + 1)
        try:
            self._identity = self._init_producer_id(aborted, deadline)
        except FencedError:
            self.machine.on(Event.FENCED)
            raise
        self.machine.on(Event.TIMEOUT_CONTINUED)
        self._verify(deadline)
        return self.identity

    def _verify(self, deadline: Deadline) -> None:
        """Check that no newer driver has committed, if Kafka assigned the epoch without checking that itself."""
        if self.machine.epoch is Epoch.UNVERIFIED:
            self._ask_progress(deadline)
            self.machine.on(Event.OWNERSHIP_VERIFIED)

    def _ask_progress(self, deadline: Deadline) -> None:
        try:
            self._check(deadline)
        except FencedError:
            self.machine.on(Event.FENCED)
            raise

    def _connect(self, deadline: Deadline) -> None:
        self._cluster.connect(deadline)
        self.machine.mode = Mode.of(self._cluster.transaction_version, batch=self._batch)

    def _coordinator_state(self, deadline: Deadline) -> _CoordinatorState:
        mine = self.identity
        try:
            seen = requests.describe_transaction(self._cluster, self.transactional_id, deadline)
        except (BrokerUnsupportedError, PermissionDeniedError):
            return _CoordinatorState.UNKNOWN
        epoch = int(seen["producer_epoch"])
        if seen["state"] == requests.DEAD or (seen["producer_id"], epoch) == (mine.producer_id, mine.producer_epoch):
            return _CoordinatorState.OWN
        aborted = seen["state"] in ("PrepareAbort", "CompleteAbort") and epoch == mine.producer_epoch + 1
        return (
            _CoordinatorState.ABORTED
            if aborted and seen["producer_id"] == mine.producer_id
            else _CoordinatorState.FENCED
        )

    def _init_producer_id(self, producer: ProducerIdAndEpoch | None, deadline: Deadline) -> ProducerIdAndEpoch:
        self._connect(deadline)
        return requests.init_producer_id(self._cluster, self.transactional_id, self.timeout_ms, producer, deadline)

    # ---- partitions and offsets of the transaction ---------------------------------------------------

    def add_partitions(self, partitions: Mapping[str, Iterable[int]], deadline: Deadline) -> None:
        """Add output partitions to the transaction. Needed with transaction version 1; harmless with 2."""
        requests.add_partitions(self._cluster, self.transactional_id, self.identity, partitions, deadline)

    def commit_offsets(
        self, group: str, offsets: Mapping[str, Mapping[int, int]], deadline: Deadline, *, metadata: str = ""
    ) -> None:
        """Add the source offsets to the transaction, under an ordinary consumer group (KIP-447)."""
        owner = self._cluster, self.transactional_id, self.identity
        if not self.version_2:
            requests.add_offsets(*owner, group, deadline)
        ahead, self._ahead = self._ahead, None
        sent = None
        if ahead is not None and ahead.identity == self.identity:
            given, sent = ahead, ahead.sent
            if given.of != (group, offsets, metadata):  # the broker has to take these after those
                requests.commit_offsets(*owner, *given.of[:2], deadline, metadata=given.of[2], sent=sent)
                sent = None
        requests.commit_offsets(*owner, group, offsets, deadline, metadata=metadata, sent=sent)

    def send_offsets(
        self, group: str, offsets: Mapping[str, Mapping[int, int]], deadline: Deadline, *, metadata: str
    ) -> None:
        """Begin to do what `commit_offsets` does, and do not wait. That has to follow, with what holds in the end.

        Only with transaction version 2: there, brokers refuse a request that arrives behind the end of its transaction.
        With version 1 it could enter the next one.
        """
        if not self.version_2:
            raise RuntimeError("offsets may be sent ahead with transaction version 2 only")
        owner = self._cluster, self.transactional_id, self.identity
        sent = requests.send_offsets(*owner, group, offsets, deadline, metadata=metadata)
        self._ahead = _Ahead(self.identity, (group, offsets, metadata), sent)

    def await_offsets(self) -> None:
        """Wait for the response to `send_offsets`. `commit_offsets` looks at it."""
        if self._ahead is not None:
            self._cluster.settle(self._ahead.sent)

    # ---- end -----------------------------------------------------------------------------------------

    def end(self, deadline: Deadline, *, commit: bool, meanwhile: Callable[[], None] | None = None) -> Outcome:
        """End the transaction. The request is repeated until its outcome is known.

        If a response is lost, the outcome can still be found out. The same request is sent again, with the same epoch
        and before any InitProducerId. Its error code is NONE if the commit was applied, INVALID_TXN_STATE if the
        transaction had timed out and was aborted, and a fencing code if another process has initialised the id.
        Version 1 returns a fencing code after a timeout, too. Then the state at the coordinator decides, and after a
        timeout a new epoch is requested at once.

        Args:
            meanwhile: see `requests.end_transaction`.

        Raises:
            DeadlineExceededError: the outcome is unknown. The caller must stop; the next start finds it out.
            FencedError: only for an abort: Kafka has forgotten the transactional id, and ``check`` has raised this.
        """
        if self.machine.is_fenced:
            return Outcome.FENCED
        self._connect(deadline)
        self.machine.on(Event.COMMIT if commit else Event.ABORT)
        outcome = self._end(deadline, commit=commit, meanwhile=meanwhile)
        if outcome is Outcome.FENCED and not self.machine.is_fenced:
            self.machine.on(Event.FENCED)
        return outcome

    def _end(self, deadline: Deadline, *, commit: bool, meanwhile: Callable[[], None] | None) -> Outcome:
        if not commit and not self.version_2:
            outcome = self._abort_as_the_timeout_does(deadline)
            if outcome is not None:
                return outcome
        code, following = requests.end_transaction(
            self._cluster, self.transactional_id, self.identity, deadline, commit=commit, meanwhile=meanwhile
        )
        if code == 0:
            self._identity = following
            self.machine.on(Event.COMMIT_DONE if commit else Event.ABORT_DONE)
            return Outcome.COMMITTED if commit else Outcome.ABORTED
        if code == Code.INVALID_TXN_STATE:
            self.machine.on(Event.TIMED_OUT)
            return Outcome.ABORTED
        if code in _FENCED_CODES:
            return Outcome.ABORTED if self._was_aborted(deadline) else Outcome.FENCED
        if code == Code.INVALID_PRODUCER_ID_MAPPING and not commit:
            # Kafka has forgotten the id, or another process owns it. In both cases nothing of ours is open, and
            # ``renew`` finds out which it is. Progress must be checked before that: ``renew`` would take the
            # transactional id from a newer driver that Kafka has forgotten, too.
            self._ask_progress(deadline)
            self.machine.on(Event.TIMED_OUT)
            return Outcome.ABORTED
        if commit:
            self.machine.on(Event.COMMIT_REFUSED)
        raise requests.error_of(self.transactional_id, code, "EndTxn")

    def _was_aborted(self, deadline: Deadline) -> bool:
        """Version 1: whether a fencing code was caused by a timeout. If so, a new epoch has been requested."""
        if self.version_2 or self._coordinator_state(deadline) is not _CoordinatorState.ABORTED:
            return False
        self.machine.on(Event.TIMED_OUT)
        try:
            self._continue(deadline)
        except FencedError:
            return False
        return True

    def _abort_as_the_timeout_does(self, deadline: Deadline) -> Outcome | None:
        """Version 1: abort with InitProducerId, see the docstring of this module. None: the broker does not return
        the state of the transactional id.

        That state is read first, because InitProducerId would also abort the transaction of another process.
        """
        known = self._coordinator_state(deadline)
        if known is _CoordinatorState.UNKNOWN:
            return None
        try:
            if known is _CoordinatorState.OWN:
                self.renew(deadline)
            elif known is _CoordinatorState.ABORTED:
                self._continue(deadline)
            else:
                return Outcome.FENCED
        except FencedError:
            return Outcome.FENCED
        return Outcome.ABORTED

    def commit(self, deadline: Deadline, *, flow: str, doing: str) -> None:
        """Commit a transaction that is not a batch. Every outcome except COMMITTED is an error.

        Args:
            doing: what the flow was doing, for the error: "while this one was ...".

        Raises:
            FencedError: a driver of the flow has started meanwhile.
            TransactionTimeoutError: the broker has aborted the transaction before.
        """
        outcome = self.end(deadline, commit=True)
        if outcome is Outcome.FENCED:
            raise fenced(flow, doing)
        if outcome is Outcome.ABORTED:
            raise TransactionTimeoutError(
                f"The broker aborted the transaction while the flow was {doing}", flow=flow, next_step="try again"
            )

    def abort(self, deadline: Deadline) -> None:
        """Abort the transaction and get a new epoch, so that the broker refuses late writes of this attempt.

        Raises:
            FencedError: another process has taken over the transactional id.
        """
        if self.end(deadline, commit=False) is Outcome.FENCED:
            raise requests.error_of(self.transactional_id, Code.PRODUCER_FENCED, "EndTxn")
        if self.machine.epoch is Epoch.USED:  # there was nothing to abort, so the epoch has not changed
            self.renew(deadline)


def fenced(flow: str, doing: str) -> FencedError:
    """The error of a driver that was fenced. ``doing``: as in `Transactions.commit`."""
    return FencedError(
        f"A newer driver of flow {flow!r} has taken over while this one was {doing}",
        flow=flow,
        next_step="a flow has one driver: stop the newer one, or let it run instead of this one",
    )

"""The transaction protocol of one transactional id, as the driver speaks it.

Transaction version 2 (KIP-890): Produce v12 and TxnOffsetCommit v5 enrol implicitly, EndTxn v5 returns
the next (producer id, epoch). Version 1: partitions and the group are added explicitly, the epoch does
not move by itself, so ``begin`` calls InitProducerId before every transaction; otherwise a late write of
an aborted attempt could enter the next transaction (KAFKA-17754).

Version 1 answers the owner of a transaction that timed out like somebody who is fenced: the coordinator has aborted it
under the next epoch. To tell the two apart, no driver sends EndTxn(abort) there. It lets InitProducerId abort, as the
timeout does. So the state CompleteAbort under the epoch after ours means: our transaction was aborted, and nobody has
been given that epoch. Its owner may then name it in InitProducerId (KIP-360), which fails if anybody was faster.

What may follow what is the table of ``protocol/transaction.py``. Here are the requests. Each reports to that table
what it has done, or what its answer says.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping

from onceflow.client import transaction_requests as requests
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.errors import BrokerUnsupportedError, FencedError, PermissionDeniedError, TransactionTimeoutError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.transaction import GIVEN, START, Epoch, Event, Mode, Transaction

_FENCED_CODES = (47, 90)
_INVALID_TXN_STATE = 48
_INVALID_PRODUCER_ID_MAPPING = 49


class Outcome(enum.Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"  # not by us: it timed out, or a driver that is starting has aborted it
    FENCED = "fenced"  # somebody re-initialised the transactional id; progress in Kafka decides


class _Standing(enum.Enum):
    """What the coordinator has under the transactional id, as seen by who held it last."""

    OWN = "own"  # our epoch, or nothing at all: it was idle for longer than transactional.id.expiration.ms
    ABORTED = "aborted"  # the coordinator has aborted our transaction, under the next epoch, which nobody was given
    FENCED = "fenced"  # somebody else has initialised it
    UNKNOWN = "unknown"  # this broker does not tell


class Transactions:
    """One transactional id. Not thread-safe.

    Args:
        transactional_id: one per flow; whoever initialises it last owns it (zombie fencing, KIP-98).
        timeout_ms: the broker aborts a transaction open for longer than this.
        identity: what the driver was given, for a task that writes in the driver's transaction.
        check: raises ``FencedError`` when somebody else has committed under the transactional id since this owner did.
            Called when Kafka itself cannot tell: it has forgotten the id (``transactional.id.expiration.ms``), or it
            has aborted the owner's transaction.
        batch: whether its transactions are a flow's, with an audit and a progress record; else a tool's.

    Attributes:
        machine: where the transactional id stands.
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
        self.machine = Transaction(Mode.of(2, batch=batch), START if identity is None else GIVEN)

    def over(self, cluster: Cluster) -> Transactions:
        """The same transactional id, as it stands, over another connection."""
        same = Transactions(cluster, self.transactional_id, self.timeout_ms, check=self._check, batch=self._batch)
        same._identity, same.machine = self._identity, self.machine
        return same

    @property
    def identity(self) -> ProducerIdAndEpoch:
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
        requests.check_supported(self._cluster, deadline)

    # ---- identity ------------------------------------------------------------------------------------

    def init(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Take over the transactional id: fences every older owner and aborts what it left open.

        Returns only when an open transaction of the id has been decided.
        """
        self._identity = self._init_producer_id(None, deadline)
        self.machine.on(Event.INITIALIZED)
        return self.identity

    def renew(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """A fresh epoch for the same owner. Nothing may be open.

        Raises:
            FencedError: somebody else has taken over.
        """
        mine = self.identity
        self.machine.expect(Event.EPOCH_BUMPED)
        try:
            fresh = self._init_producer_id(mine, deadline)
        except FencedError:
            if self.version_2 or self._standing(deadline) is not _Standing.ABORTED:
                self.machine.on(Event.FENCED)
                raise
            return self._continue(deadline)
        self._identity = fresh
        # Another producer id for the same owner: Kafka had forgotten the transactional id, or epochs have run out.
        same = fresh.producer_id == mine.producer_id
        self.machine.on(Event.EPOCH_BUMPED if same else Event.PRODUCER_ID_REPLACED)
        self._verify(deadline)
        return self.identity

    def begin(self, deadline: Deadline, event: Event = Event.BEGIN) -> ProducerIdAndEpoch:
        """An identity nothing has been written under yet (I3).

        Args:
            event: what begins: a transaction, or one that writes missing markers.
        """
        self._connect(deadline)
        self.machine.expect(event)
        self._verify(deadline)
        if self.machine.epoch is Epoch.USED:
            self.renew(deadline)
        self.machine.on(event)
        return self.identity

    def _continue(self, deadline: Deadline) -> ProducerIdAndEpoch:
        """Version 1: go on after the coordinator has aborted our transaction.

        Raises:
            FencedError: somebody else was faster, or has committed meanwhile.
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
        """Before anything is written under an epoch that was given without a look at newer drivers."""
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

    def _standing(self, deadline: Deadline) -> _Standing:
        mine = self.identity
        try:
            seen = requests.describe_transaction(self._cluster, self.transactional_id, deadline)
        except (BrokerUnsupportedError, PermissionDeniedError):
            return _Standing.UNKNOWN
        epoch = int(seen["producer_epoch"])
        if seen["state"] == requests.DEAD or (seen["producer_id"], epoch) == (mine.producer_id, mine.producer_epoch):
            return _Standing.OWN
        aborted = seen["state"] in ("PrepareAbort", "CompleteAbort") and epoch == mine.producer_epoch + 1
        return _Standing.ABORTED if aborted and seen["producer_id"] == mine.producer_id else _Standing.FENCED

    def _init_producer_id(self, producer: ProducerIdAndEpoch | None, deadline: Deadline) -> ProducerIdAndEpoch:
        self._connect(deadline)
        return requests.init_producer_id(self._cluster, self.transactional_id, self.timeout_ms, producer, deadline)

    # ---- enrolment -----------------------------------------------------------------------------------

    def add_partitions(self, partitions: Mapping[str, Iterable[int]], deadline: Deadline) -> None:
        """Enrol output partitions. Needed with transaction version 1; harmless with 2."""
        requests.add_partitions(self._cluster, self.transactional_id, self.identity, partitions, deadline)

    def commit_offsets(
        self, group: str, offsets: Mapping[str, Mapping[int, int]], deadline: Deadline, *, metadata: str = ""
    ) -> None:
        """Add the source offsets to the transaction, under an ordinary consumer group (KIP-447)."""
        owner = self._cluster, self.transactional_id, self.identity
        if not self.version_2:
            requests.add_offsets(*owner, group, deadline)
        requests.commit_offsets(*owner, group, offsets, deadline, metadata=metadata)

    # ---- end -----------------------------------------------------------------------------------------

    def end(self, deadline: Deadline, *, commit: bool) -> Outcome:
        """End the transaction. The request is repeated until its outcome is known.

        A lost response is not a lost decision: the same request, with the same epoch and before any
        InitProducerId, answers NONE when the commit was applied, INVALID_TXN_STATE when the transaction
        had been aborted (timed out), a fencing code when somebody re-initialised the id. Version 1 answers a timeout
        with a fencing code, too; then a look at the coordinator tells, and a fresh epoch is taken at once.

        Raises:
            DeadlineExceededError: the outcome is unknown. The caller must stop; a restart finds out.
            FencedError: of an abort, when Kafka has forgotten the transactional id, and ``check`` says so.
        """
        if self.machine.is_fenced:
            return Outcome.FENCED
        self._connect(deadline)
        self.machine.on(Event.COMMIT if commit else Event.ABORT)
        outcome = self._end(deadline, commit=commit)
        if outcome is Outcome.FENCED and not self.machine.is_fenced:
            self.machine.on(Event.FENCED)
        return outcome

    def _end(self, deadline: Deadline, *, commit: bool) -> Outcome:
        if not commit and not self.version_2:
            outcome = self._abort_as_the_timeout_does(deadline)
            if outcome is not None:
                return outcome
        code, following = requests.end_transaction(
            self._cluster, self.transactional_id, self.identity, deadline, commit=commit
        )
        if code == 0:
            self._identity = following
            self.machine.on(Event.COMMIT_DONE if commit else Event.ABORT_DONE)
            return Outcome.COMMITTED if commit else Outcome.ABORTED
        if code == _INVALID_TXN_STATE:
            self.machine.on(Event.TIMED_OUT)
            return Outcome.ABORTED
        if code in _FENCED_CODES:
            return Outcome.ABORTED if self._was_aborted(deadline) else Outcome.FENCED
        if code == _INVALID_PRODUCER_ID_MAPPING and not commit:
            # Forgotten, or another's: nothing of ours is open, and ``renew`` tells which. A look before that, too: it
            # would take the transactional id from a newer driver that Kafka has forgotten as well.
            self._ask_progress(deadline)
            self.machine.on(Event.TIMED_OUT)
            return Outcome.ABORTED
        if commit:
            self.machine.on(Event.COMMIT_REFUSED)
        raise requests.error_of(self.transactional_id, code, "EndTxn")

    def _was_aborted(self, deadline: Deadline) -> bool:
        """Version 1: whether what looks like fencing was a timeout. Then there is a fresh epoch."""
        if self.version_2 or self._standing(deadline) is not _Standing.ABORTED:
            return False
        self.machine.on(Event.TIMED_OUT)
        try:
            self._continue(deadline)
        except FencedError:
            return False
        return True

    def _abort_as_the_timeout_does(self, deadline: Deadline) -> Outcome | None:
        """Version 1: abort by InitProducerId, see the top of this module. None: the broker is too old to look at it.

        The look comes first: InitProducerId would abort the transaction of somebody else, too.
        """
        standing = self._standing(deadline)
        if standing is _Standing.UNKNOWN:
            return None
        try:
            if standing is _Standing.OWN:
                self.renew(deadline)
            elif standing is _Standing.ABORTED:
                self._continue(deadline)
            else:
                return Outcome.FENCED
        except FencedError:
            return Outcome.FENCED
        return Outcome.ABORTED

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
        if self.end(deadline, commit=False) is Outcome.FENCED:
            raise requests.error_of(self.transactional_id, 90, "EndTxn")
        if self.machine.epoch is Epoch.USED:  # there was nothing to abort: the epoch has not moved
            self.renew(deadline)


def fenced(flow: str, doing: str) -> FencedError:
    """The error of a driver that finds itself fenced. ``doing``: as of `Transactions.commit`."""
    return FencedError(
        f"A newer driver of flow {flow!r} has taken over while this one was {doing}",
        flow=flow,
        next_step="a flow has one driver: stop the other one, or leave it to it",
    )

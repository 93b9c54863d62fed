"""Finds missing transaction markers, and writes them.

If a transaction ends while one of its partitions has no leader, the coordinator assumes that the partition was
deleted: it writes no marker there and calls the transaction complete (Kafka 4.3: TransactionMarkerChannelManager,
KRaftMetadataCache.getPartitionLeaderEndpoint). The records stay undecided, and the producer's next transaction in
that partition decides them, too: aborted records may become visible, or committed ones may never become visible. So
before a transaction begins, the last one must be decided in every partition that it has written to. Where it is not,
a transaction without records is run. It only adds these partitions, and ends in the same way as the last one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.leaders import by_topic
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.producers import OpenTransaction, open_transactions
from onceflow.client.transaction_requests import DEAD, describe_transaction
from onceflow.client.transactions import Outcome, Transactions, fenced
from onceflow.errors import (
    BrokerUnsupportedError,
    DataLossError,
    DeadlineExceededError,
    PermissionDeniedError,
    UnknownTopicError,
)
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.transaction import Event, Phase

log = logging.getLogger("onceflow.client")

_LOOK_S = 2.0
_FIRST_LOOK_S = 0.004  # markers usually take a few milliseconds
_END_S = 120.0
#: States of a transactional id in which the coordinator writes no more markers for its last transaction.
_OVER = frozenset({"CompleteCommit", "CompleteAbort", "Empty", DEAD})

_IDLE_S = 1.0  # then the thread in the background ends


class Markers:
    """Makes sure that a transaction is decided in all its partitions before the next one begins. Not thread-safe.

    Args:
        transactions: the transactional id. It must be initialised before a method of this class is called. Its
            ``machine`` knows how the last transaction has ended.
        name: the name of the flow, for log messages.
    """

    def __init__(self, cluster: Cluster, transactions: Transactions, name: str) -> None:
        self._cluster = cluster
        self._transactions = transactions
        self._name = name
        self._topic_partitions: dict[TopicPartition, int | None] = {}
        self._producer_ids: set[int] = set()  # all of this flow: it gets another one after Kafka has forgotten its id
        self._look: _Look | None = None
        self._background = Background("onceflow-markers")

    def ended(self, topic_partitions: Mapping[TopicPartition, int | None]) -> None:
        """Report that the last transaction has ended. A thread begins to watch for its markers in the background.

        Args:
            topic_partitions: the partitions that it has written to, or may have, each with the offset of the first
                record there; None if that is not known.
        """
        self._topic_partitions = dict(topic_partitions)
        self._producer_ids.add(self._transactions.identity.producer_id)
        firsts = {topic_partition: first for topic_partition, first in topic_partitions.items() if first is not None}
        if self._look is not None:
            self._look.end()
            self._look = None
        if self._was_committed and topic_partitions and len(firsts) == len(topic_partitions):
            self._look = _Look(self._cluster, firsts, self._own)
            self._background.submit(self._look.run)

    def confirm(self, deadline: Deadline) -> None:
        """Return when the last transaction is decided in all its partitions. If the thread has seen that, no request
        is sent.

        Raises:
            FencedError: another process has taken over the transactional id.
            DeadlineExceededError: it is not known whether it is decided. Nothing may be written under the
                transactional id yet.
            DataLossError: committed records may be lost, see `write`.
        """
        if self._topic_partitions and not (self._look is not None and self._look.seen()):
            self._decide(self._topic_partitions, self._was_committed, deadline)
        self._topic_partitions, self._look = {}, None
        # The next transaction is written under it. Its end may bring another one, because the epochs are used up.
        self._producer_ids.add(self._transactions.identity.producer_id)
        self._transactions.machine.on(Event.MARKERS_CONFIRMED)

    @property
    def _was_committed(self) -> bool:
        """Whether the last transaction was committed; otherwise it was aborted."""
        return self._transactions.machine.phase in (Phase.COMMITTED, Phase.SETTLED)

    def left_open(
        self, topic_partitions: Iterable[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, OpenTransaction]:
        """The partitions where this producer has an open transaction. Call it when there should be none.

        Sends two requests for each topic and leader, and one more where a transaction of any producer is open. If
        this principal lacks READ on a topic, a warning is logged and no partition of it is returned.
        """
        own, unseen = self._own(self._undecided(dict.fromkeys(topic_partitions), deadline), deadline)
        if unseen:
            log.warning(
                "flow %s: a transaction is open in %s; whether it is one of this flow can only be seen with READ "
                "on the topic",
                self._name,
                _named(unseen),
            )
        return own

    def write(self, topic_partitions: Iterable[TopicPartition], *, committed: bool, deadline: Deadline) -> None:
        """Write the markers of a transaction that has ended, and check that they are there.

        Raises:
            FencedError, DeadlineExceededError: as `confirm` does.
            DataLossError: records of a committed transaction may never become visible. This happens only if there is
                a second failure between adding the partitions and the commit.
        """
        if wanted := dict.fromkeys(topic_partitions):
            self._write(wanted, committed, deadline, sure=True)
            self._decide(wanted, committed, deadline)
            self._transactions.machine.on(Event.MARKERS_CONFIRMED)

    # ---- how -------------------------------------------------------------------------------------------

    def _decide(
        self, topic_partitions: Mapping[TopicPartition, int | None], committed: bool, deadline: Deadline
    ) -> None:
        suspects = dict(topic_partitions)
        unseen_once: set[TopicPartition] = set()
        attempt = 0
        while True:
            state = self._state(deadline)  # first: if it is over, what is still open then stays open
            over = state in _OVER
            suspects = self._undecided(suspects, deadline)
            own, unseen = self._own(suspects, deadline)
            if over:
                own = self._without_forgotten(own, committed)
            if missing := own.keys() | (unseen - unseen_once):
                if over:
                    self._write(missing, committed, deadline, sure=bool(own))
                    unseen_once |= unseen
            elif over:
                return
            where = f", and undecided in {_named(missing or suspects)}" if suspects else ""
            deadline.pause(attempt, f"the last transaction is {state}{where}: markers must be replicated, too")
            attempt += 1

    def _undecided(
        self, topic_partitions: Mapping[TopicPartition, int | None], deadline: Deadline
    ) -> dict[TopicPartition, int | None]:
        """The partitions where a transaction is open that may be the last one of this flow. Topics that no longer
        exist are left out."""
        found: dict[TopicPartition, int | None] = {}
        for topic, numbers in by_topic(topic_partitions).items():
            unknown = [partition for partition in numbers if topic_partitions[topic, partition] is None]
            try:
                stable = list_offsets(self._cluster, {topic: numbers}, LATEST, deadline)[topic]
                high = list_offsets(self._cluster, {topic: unknown}, LATEST, deadline, committed=False)[topic]
            except UnknownTopicError as error:
                log.debug("no markers are missing in a topic that does not exist any more: %s", error)
                continue
            for partition in numbers:
                first = topic_partitions[topic, partition]
                if stable[partition] < high[partition] if first is None else stable[partition] <= first:
                    found[topic, partition] = first
        return found

    def _own(
        self, topic_partitions: Iterable[TopicPartition], deadline: Deadline
    ) -> tuple[dict[TopicPartition, OpenTransaction], set[TopicPartition]]:
        """The partitions where this producer has an open transaction, and those that this principal may not read."""
        mine = self._producer_ids | {self._transactions.identity.producer_id}
        own: dict[TopicPartition, OpenTransaction] = {}
        unseen: set[TopicPartition] = set()
        for topic, numbers in by_topic(topic_partitions).items():
            at = [(topic, partition) for partition in numbers]
            try:
                found = open_transactions(self._cluster, at, deadline)
            except UnknownTopicError:
                continue
            except (PermissionDeniedError, BrokerUnsupportedError) as error:
                log.debug("could not read the producers of %s: %s", topic, error)
                unseen |= {*at}
                continue
            own |= {
                topic_partition: each
                for topic_partition, all_ in found.items()
                for each in all_
                if each.producer_id in mine
            }
        return own, unseen

    def _without_forgotten(
        self, own: Mapping[TopicPartition, OpenTransaction], committed: bool
    ) -> dict[TopicPartition, OpenTransaction]:
        """The open transactions that can still be decided, when the coordinator writes no more markers. Those of an
        earlier producer id cannot: a transaction of this flow now has another one. Kafka has forgotten the earlier one,
        together with the transactional id, or its epochs are used up."""
        mine = self._transactions.identity.producer_id
        forgotten = {topic_partition: each for topic_partition, each in own.items() if each.producer_id != mine}
        if forgotten and committed:
            raise self._lost(
                forgotten,
                "the flow has another producer id since: it was idle, and Kafka has forgotten its transactional id, or "
                "the epochs of the id are used up",
            )
        for (topic, partition), each in forgotten.items():
            log.warning(
                "flow %s: an aborted attempt has left records undecided in %s-%d, and the flow has another producer id "
                "since: readers wait there until you run `onceflow transactions abort "
                "--producer-id %d --topic %s`",
                *(self._name, topic, partition),
                *(each.producer_id, topic),
            )
        return {topic_partition: each for topic_partition, each in own.items() if topic_partition not in forgotten}

    def _state(self, deadline: Deadline) -> str:
        described = describe_transaction(self._cluster, self._transactions.transactional_id, deadline)
        return str(described["state"])

    def _write(
        self, topic_partitions: Iterable[TopicPartition], committed: bool, deadline: Deadline, *, sure: bool
    ) -> None:
        """Run a transaction without records. In a partition where nothing is open it changes nothing."""
        log.log(
            logging.WARNING if sure else logging.DEBUG,
            "flow %s: transaction markers are missing in %s, which had no leader then; a transaction without records "
            "%s what was left undecided there",
            self._name,
            _named(topic_partitions),
            "commits" if committed else "aborts",
        )
        transactions = self._transactions
        transactions.begin(deadline, Event.COMPLETE_COMMIT if committed else Event.COMPLETE_ABORT)
        # From here on an abort would decide the records. So a transaction that is to commit must not be aborted.
        try:
            transactions.add_partitions(by_topic(topic_partitions), deadline)
            outcome = transactions.end(
                Deadline(_END_S, f"deciding what is open in {_named(topic_partitions)}"), commit=committed
            )
        except DeadlineExceededError as error:
            if not committed:
                raise  # the next driver aborts it, which is the intended outcome
            raise self._lost(
                topic_partitions, "the coordinator does not respond to the commit of that transaction"
            ) from error
        if outcome is Outcome.FENCED:
            raise fenced(self._name, "writing missing transaction markers")
        if outcome is Outcome.ABORTED and committed:
            raise self._lost(topic_partitions, "the broker has aborted that transaction")

    def _lost(self, topic_partitions: Iterable[TopicPartition], why: str) -> DataLossError:
        return DataLossError(
            f"Records of the last committed batch may have been lost in {_named(topic_partitions)}",
            flow=self._name,
            detail=f"Their transaction markers were missing, and the transaction that writes them failed: {why}",
            next_step="compare the end of these partitions with the source; if records are missing, `onceflow reset` "
            "the flow and run it into a new topic",
        )


class _Look:
    """Checks in a thread whether a committed transaction is decided in all its partitions. If it cannot find out, the
    transaction counts as undecided."""

    def __init__(
        self,
        cluster: Cluster,
        topic_partitions: Mapping[TopicPartition, int],
        own: Callable[
            [Iterable[TopicPartition], Deadline], tuple[dict[TopicPartition, OpenTransaction], set[TopicPartition]]
        ],
    ) -> None:
        self._cluster = cluster
        self._topic_partitions = topic_partitions
        self._own = own
        self._yes = False
        self._last, self._ended = threading.Event(), threading.Event()

    def end(self) -> None:
        """Look once more at most."""
        self._last.set()

    def seen(self) -> bool:
        """Whether the thread has seen that all partitions are decided. Ends it."""
        self.end()
        self._ended.wait()
        return self._yes

    def run(self) -> None:
        """Called by the thread."""
        deadline = Deadline(_LOOK_S, "looking at transaction markers")
        pause_s = _FIRST_LOOK_S
        try:
            while not self._yes and not deadline.expired:
                last = self._last.wait(pause_s)
                stable = list_offsets(self._cluster, by_topic(self._topic_partitions), LATEST, deadline)
                waiting = [(t, p) for (t, p), first in self._topic_partitions.items() if stable[t][p] <= first]
                self._yes = not waiting
                if waiting and pause_s > _FIRST_LOOK_S:  # what is open may be another producer's
                    own, unseen = self._own(waiting, deadline)
                    self._yes = not own and not unseen
                    if unseen:
                        return
                pause_s *= 2
                if last:
                    return
        except Exception as error:  # for example, the cluster was closed: then the result stays "not seen"
            log.debug("could not read transaction markers: %s", error)
        finally:
            self._ended.set()


def _named(topic_partitions: Iterable[TopicPartition]) -> str:
    named = [f"{topic}-{partition}" for topic, partition in sorted(topic_partitions)]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")


class Background:
    """Runs functions in a thread of its own, one after the other.

    The thread ends when nothing has come for a second, and begins again when something comes. So nobody has to close
    it, and work that comes many times a second does not begin a thread each time.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run a function soon. It must not raise."""
        self._waiting.put(work)
        with self._lock:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                work = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._runs = False
                        return
                continue
            work()

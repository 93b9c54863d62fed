"""Several instances share the tables: a consumer group says who has which partition.

The group's consumer reads no records. Each member tells the leader its address and what it has; the leader's assignment
tells every member where all partitions are. Whoever may read the group can join it, so both carry a proof that they
are of an instance (`peer_auth`). What has none is passed over: a stranger gets no partitions. As the leader of the
group it keeps the instances from a new assignment, no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from kafka import KafkaConsumer
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.errors import GroupAuthorizationFailedError, InvalidSessionTimeoutError
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from onceflow.client.library_log import filter_loggers, muted
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError
from onceflow.server.assignment import Member, assign
from onceflow.server.partitions import HeldPartitions
from onceflow.server.peer_auth import PeerSecrets
from onceflow.server.routes import Routes, TableRoutes
from onceflow.tables.share import Share

log = logging.getLogger("onceflow.server")

_POLL_MS = 200
_RETRY_S = 2.0
_REJOIN_S = 1.0  # between two rebalances that this instance asks for
_REBALANCE_MS = 30_000
_LEAVE_MS = 3_000


class Members:
    """The routes of an instance that shares its tables with others.

    Args:
        group: the consumer group. secrets: by which its instances recognise each other.
        copies: how many instances have each partition.
        session_s: after how long without a sign of life an instance is replaced.
        give_up: called when this instance can never be a member.

    Attributes:
        refused: why it can never be a member; None: it can.
    """

    def __init__(
        self,
        shares: Mapping[str, Share],
        routes: Routes,
        settings: ClientSettings,
        *,
        group: str,
        secrets: PeerSecrets,
        copies: int,
        session_s: float,
        give_up: Callable[[], None],
    ) -> None:
        self._shares = shares
        self._routes = routes
        self._settings = settings
        self._group = group
        self._secrets = secrets
        self._strangers = 0
        self._copies = copies
        self._session_s = session_s
        self._give_up = give_up
        self.refused: OptionError | None = None
        self._holding = HeldPartitions(shares, self._look)
        self._reported: dict[str, frozenset[int]] = {}
        self._rejoin = threading.Event()
        self._leaving = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="onceflow-members", daemon=True)

    @property
    def problems(self) -> list[str]:
        """Why it is not a member, and what cannot be opened."""
        return [*([self._problem] if self._problem else []), *self._holding.problems]

    def start(self) -> None:
        self._holding.start()
        self._thread.start()

    def leave(self) -> None:
        """Tell other instances that this one ends, so that they take its partitions over."""
        self._leaving.set()

    def close(self) -> None:
        self.leave()
        self._thread.join(2 * _LEAVE_MS / 1000)
        self._holding.close()

    # ---- what the group is told ----------------------------------------------------------------------

    def said(self, member_id: str) -> bytes:
        """What this instance says about itself.

        Args:
            member_id: its id in the group, which the broker has made. So nobody else can say the same.
        """
        restored, begun = {}, {}
        for topic, share in self._shares.items():
            restored[topic] = frozenset(each for each in share.held if _restored(share, each))
            begun[topic] = {*share.held, *share.on_disk()} - restored[topic]
        self._reported = restored
        document = {
            "member": member_id,
            "address": self._routes.address,
            "restored": {topic: sorted(partitions) for topic, partitions in restored.items()},
            "begun": {topic: sorted(partitions) for topic, partitions in begun.items()},
            "partitions": {topic: share.partitions_now for topic, share in self._shares.items()},
            "misplaced": [topic for topic, share in self._shares.items() if not share.placed],
        }
        return self._secrets.sealed("member", self._group, orjson.dumps(document))

    def decided(self, sealed: Mapping[str, bytes], generation: int) -> dict[str, bytes]:
        """Where all partitions are to be, decided from what all instances say. Called at the group's leader.

        Args:
            sealed: what the members of the group say, by their ids.
            generation: of the group. With it, nobody can use this decision later.

        Returns:
            By the ids of the instances, what they are told. Strangers are told nothing.
        """
        opened = {member: self._secrets.opened("member", self._group, each or b"") for member, each in sealed.items()}
        documents = {member: orjson.loads(each) for member, each in opened.items() if each is not None}
        # What another member has said, perhaps one that has gone, says nothing about this one.
        said = [each for member, each in documents.items() if each["member"] == member]
        self._tell_of_strangers(len(opened) - len(said))
        members = {each["address"]: _member(each) for each in said}
        partitions: dict[str, int] = {}
        for each in said:
            for topic, count in each["partitions"].items():
                partitions[topic] = max(count, partitions.get(topic, 0))
        misplaced = sorted({topic for each in said for topic in each["misplaced"]})
        holders = assign(list(members.values()), partitions, self._copies)
        usual = min(self._copies, len(members))
        known = sorted(each["member"] for each in said)
        document = {"holders": holders, "misplaced": misplaced, "usual": usual}
        content = orjson.dumps({**document, "generation": generation, "members": known})
        return dict.fromkeys(known, self._secrets.sealed("assignment", self._group, content))

    def _tell_of_strangers(self, count: int) -> None:
        if count > self._strangers:
            log.warning(
                "consumer group %s: %s no secret of this instance, so there are no partitions for it; next step: give "
                "all instances the same --peer-secret-file, and let nobody else READ this group",
                self._group,
                "1 member has" if count == 1 else f"{count} members have",
            )
        self._strangers = count

    def on_assignment(self, decided: bytes, member_id: str, generation: int) -> None:
        """Take over what the leader has decided.

        Args:
            member_id, generation: of this instance in the group, as the broker says.

        Raises:
            _StrangerError: the leader is no instance of this group, or repeats what one has decided earlier. What was
                known before stays.
        """
        opened = self._secrets.opened("assignment", self._group, decided or b"")
        document = None if opened is None else orjson.loads(opened)
        if document is None or document["generation"] != generation or member_id not in document["members"]:
            raise _StrangerError
        misplaced = document["misplaced"]
        self._routes.tables = {
            topic: TableRoutes(holders, topic not in misplaced, document["usual"])
            for topic, holders in document["holders"].items()
        }
        here = self._routes.address
        mine = {
            topic: [
                partition for partition, addresses in enumerate(document["holders"].get(topic, ())) if here in addresses
            ]
            for topic in self._shares
        }
        log.info("partitions of this instance: %s", mine)
        self._holding.want(mine)

    # ---- threads -------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask for a new assignment if it would be another one. Called by the thread that opens partitions."""
        for topic, share in self._shares.items():
            known = self._routes.tables.get(topic)
            if known is None:
                continue
            found_other = known.placed and not share.placed
            more = share.partitions_now > len(known.holders)
            here = [each for each in share.held if each < len(known.holders)]
            new = [each for each in here if each not in self._reported.get(topic, ()) and _restored(share, each)]
            # Somebody has a partition only until this instance has restored it.
            replaces = any(len(known.holders[each]) > known.usual for each in new)
            # It may own some of them now. When all are restored, so that the group is rebalanced once.
            complete = bool(new) and all(_restored(share, each) for each in here)
            if found_other or more or replaces or complete:
                self._rejoin.set()

    def _run(self) -> None:
        filter_loggers()
        with muted():
            while not self._leaving.is_set():
                try:
                    self._belong()
                except Exception as error:  # also others than KafkaError: without this thread it would be out for good
                    if isinstance(error, InvalidSessionTimeoutError) and not self._routes.tables:
                        self._refuse(error)
                        return
                    problem = f"consumer group {self._group}: {_reason(error)}"
                    if problem != self._problem:
                        log.error("this instance is no member of its group now: %s", problem)
                    self._problem = problem
                    self._leaving.wait(_RETRY_S)

    def _refuse(self, error: InvalidSessionTimeoutError) -> None:
        """End the server: waiting does not help, and it has nothing to answer with."""
        self.refused = OptionError(
            f"The broker refuses --session-timeout {self._session_s:g}s",
            detail=str(error),
            next_step="give one between its group.min.session.timeout.ms and group.max.session.timeout.ms",
        )
        self._give_up()

    def _belong(self) -> None:
        session_ms = int(self._session_s * 1000)
        # The consumer refuses options that only connections have, such as the time to make one.
        settings = {k: v for k, v in self._settings.kafka_python().items() if k in KafkaConsumer.DEFAULT_CONFIG}
        assignor = _Assignor(self)
        consumer = KafkaConsumer(
            **settings,
            group_id=self._group,
            partition_assignment_strategy=[assignor],
            enable_auto_commit=False,
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=min(3_000, session_ms // 4),
            max_poll_interval_ms=max(_REBALANCE_MS, session_ms),
        )
        assignor.coordinator = consumer._coordinator
        try:
            consumer.subscribe(sorted(self._shares))
            asked_at = 0.0
            while not self._leaving.is_set():
                if self._rejoin.is_set() and time.monotonic() - asked_at > _REJOIN_S:
                    self._rejoin.clear()
                    asked_at = time.monotonic()
                    consumer._coordinator.request_rejoin()
                if consumer._coordinator.rejoining:
                    # kafka-python 3.0 forgets a rebalance that it has begun because metadata had changed, if ``poll``
                    # returns before its end: then it sends no heartbeats any more, and never joins again.
                    consumer._coordinator.request_rejoin()
                consumer.poll(_POLL_MS)
        finally:
            consumer.close(autocommit=False, timeout_ms=_LEAVE_MS)

    def joined(self) -> None:
        """The group has an assignment."""
        self._problem = ""

    def stranger_leads(self) -> None:
        """The group has an assignment that no instance has made. When its leader leaves, there is another one."""
        self._problem = (
            f"consumer group {self._group}: its leader is no instance with a secret of this one; give all instances "
            "the same --peer-secret-file, and let nobody else READ this group"
        )
        log.error("%s", self._problem)


class _StrangerError(Exception):
    """An assignment was made without a secret of this group."""


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Carries what members say and what the leader decides. No partitions are assigned, so nothing is read."""

    # A name of its own: an instance of an earlier version, without proofs, cannot join the same group by mistake.
    name = "onceflow-tables-2"
    version = 0

    def __init__(self, members: Members) -> None:
        self._members = members
        self.coordinator: Any = None  # knows the generation, and the id that the broker has given (KIP-394)

    def metadata(self, topics: Any) -> ConsumerProtocolSubscription:
        said = self._members.said(self.coordinator._generation.member_id)
        return ConsumerProtocolSubscription(self.version, sorted(topics), said)

    def assign(self, cluster: Any, members: Any) -> dict[str, ConsumerProtocolAssignment]:
        said = {member.member_id: member.metadata.user_data for member in members}
        decided = self._members.decided(said, self.coordinator._generation.generation_id)
        return {each: ConsumerProtocolAssignment(self.version, [], decided.get(each, b"")) for each in said}

    def on_assignment(self, assignment: Any, generation: int) -> None:
        try:
            self._members.on_assignment(assignment.user_data, self.coordinator._generation.member_id, generation)
        except _StrangerError:
            self._members.stranger_leads()
        else:
            self._members.joined()


def _reason(error: Exception) -> str:
    """What is wrong, and what to do if it does not pass by itself."""
    if isinstance(error, GroupAuthorizationFailedError):
        return "the broker refuses this user; grant READ on the group"
    return f"{type(error).__name__}: {error}"


def _member(said: Mapping[str, Any]) -> Member:
    restored = {topic: frozenset(partitions) for topic, partitions in said["restored"].items()}
    begun = {topic: frozenset(partitions) for topic, partitions in said["begun"].items()}
    return Member(said["address"], frozenset(said["partitions"]), restored, begun)


def _restored(share: Share, partition: int) -> bool:
    progress = share.progress(partition)
    return progress is not None and progress.restored

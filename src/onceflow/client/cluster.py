"""Metadata of a cluster, for the driver or one task: topics, leaders and coordinators. Uses `Connections`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from onceflow.client.connections import ConnectionFailedError, Connections, SentRequest
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import REFUSED_S
from onceflow.client.settings import ClientSettings
from onceflow.errors import DeadlineExceededError, UnknownTopicError, counted
from onceflow.protocol import codes
from onceflow.protocol.codes import Code

__all__ = ["GROUP", "TRANSACTION", "Cluster", "ConnectionFailedError", "TopicInfo", "unknown_topic"]

TRANSACTION, GROUP = 1, 0  # coordinator key types of FindCoordinator (KIP-699)
_OWN = "__onceflow_"  # how the names of topics begin that onceflow makes
# Error codes of one topic.
# A broker that has just started, or does not know a new topic yet, responds that the topic does not exist.
_UNKNOWN_ATTEMPTS, UNKNOWN_TOPIC_S = 3, 10.0


@dataclass(frozen=True)
class TopicInfo:
    """Metadata of one topic."""

    name: str
    topic_id: str
    leaders: Mapping[int, int]  # partition -> node id, -1 while there is none
    internal: bool = False

    @property
    def partitions(self) -> int:
        return len(self.leaders)

    def check_same(self, topic_id: str) -> None:
        """Make sure that this is the topic with an id.

        Raises:
            UnknownTopicError: that one was deleted, and this one was created with its name.
        """
        if self.topic_id != topic_id:
            raise UnknownTopicError(
                f"Topic {self.name} was deleted and created again while it was followed",
                topic=self.name,
                next_step="start again: what was read belongs to the earlier topic",
            )


class Cluster(Connections):
    """Connections to one Kafka cluster, and its metadata.

    Args:
        refused_s: for how long all servers may refuse the first connection, in seconds. None: until the deadline, as
            for a flow that is already running: its brokers may be down for a while.
    """

    def __init__(self, settings: ClientSettings, *, refused_s: float | None = REFUSED_S) -> None:
        super().__init__(settings, refused_s=refused_s)
        self._topics: dict[str, TopicInfo] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        self._cluster_id: str | None = None

    def cluster_id(self, deadline: Deadline) -> str:
        """Kafka's id of the cluster (KIP-78), which stays the same; "" if the brokers tell none."""
        if self._cluster_id is None:
            response = self.ask(MetadataRequest(topics=[], allow_auto_topic_creation=False), "Metadata", deadline)
            self._cluster_id = str(response.cluster_id or "")
        return self._cluster_id

    # ---- topics --------------------------------------------------------------------------------------

    def topics(
        self,
        names: Iterable[str] | None,
        deadline: Deadline,
        *,
        patient: bool = False,
        once: bool = False,
        leaderless: bool = False,
    ) -> dict[str, TopicInfo]:
        """Current metadata of the named topics, read from a broker. None: of all topics that are visible.

        Args:
            patient: the topics are expected to exist. If a broker does not know one of them, the request is repeated
                for some seconds, as it is for topics that existed before. Otherwise it is repeated a few times.
            once: do not repeat the request if a topic does not exist: the caller creates it then.
            leaderless: do not repeat the request if a partition has no leader: that of the partition is -1 then.

        Raises:
            UnknownTopicError: a topic does not exist, or this principal may not describe it.
        """
        wanted = None if names is None else sorted(set(names))
        unknown_until = time.monotonic() + deadline.capped(UNKNOWN_TOPIC_S)
        attempt = 0
        unknown = ""
        while True:
            listed = None if wanted is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in wanted]
            request = MetadataRequest(topics=listed, allow_auto_topic_creation=False)
            try:
                response = self.ask(request, "Metadata", deadline)
            except DeadlineExceededError as late:
                if unknown:
                    raise unknown_topic(unknown) from late
                raise
            found: dict[str, TopicInfo] = {}
            unsettled = unknown = ""
            for topic in response.topics:
                if topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                    unknown = str(topic.name)
                    waits = (patient or topic.name in self._topics) and time.monotonic() < unknown_until
                    if (once or attempt >= _UNKNOWN_ATTEMPTS) and not waits:
                        self._topics.pop(topic.name, None)
                        raise unknown_topic(topic.name)
                unsettled = _read_topic(topic, found) or unsettled
            self._topics.update(found)
            without = [name for name, info in found.items() if any(leader < 0 for leader in info.leaders.values())]
            if without and not leaderless and not unsettled:
                unsettled = f"{without[0]} has partitions without a leader"
            if wanted is not None and not unsettled and len(found) < len(wanted):
                unsettled = "the response does not mention every topic asked for"
            if wanted is None or not unsettled:
                return found
            if not deadline.wait(attempt + 3):
                raise unknown_topic(unknown) if unknown else deadline.error(unsettled)
            attempt += 1

    def topic(
        self, name: str, deadline: Deadline, *, fresh: bool = False, patient: bool = False, leaderless: bool = False
    ) -> TopicInfo:
        """As `topics`, for one topic. ``fresh``: read it from a broker, even if it is known."""
        if fresh or name not in self._topics:
            self.topics([name], deadline, patient=patient, leaderless=leaderless)
        return self._topics[name]

    def known_topic(self, name: str) -> TopicInfo | None:
        """Metadata of a topic as they were last read; None: not yet. Nothing is asked."""
        return self._topics.get(name)

    def leader(self, topic: str, partition: int, deadline: Deadline, *, fresh: bool = False) -> int:
        """Node id of the partition's leader. Waits until there is one.

        If a broker does not know the partition (yet), the request is repeated for some seconds, as for a topic.
        """
        missing_until = time.monotonic() + deadline.capped(UNKNOWN_TOPIC_S)
        attempt = 0
        while True:
            info = self.topic(topic, deadline, fresh=fresh or attempt > 0, patient=True)
            if partition not in info.leaders:
                if time.monotonic() < missing_until:
                    deadline.pause(attempt + 2, f"{topic}-{partition} is unknown")
                    attempt += 1
                    continue
                raise UnknownTopicError(
                    f"Topic {topic} has no partition {partition}",
                    topic=f"{topic}-{partition}",
                    detail=f"it has {counted(info.partitions, 'partition')}",
                    next_step="was the topic deleted and created again with fewer partitions?",
                )
            node = info.leaders[partition]
            if node >= 0:
                return node
            deadline.pause(attempt, f"{topic}-{partition} has no leader")
            attempt += 1

    # ---- coordinators --------------------------------------------------------------------------------

    def coordinator(self, kind: int, key: str, deadline: Deadline) -> int:
        """Node id of the transaction (kind 1) or group (kind 0) coordinator of ``key``."""
        self.connect(deadline)
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        attempt = 0
        while True:
            version = self.version(FindCoordinatorRequest, min_version=1, max_version=4)
            # Version 4 has a list of keys instead of one (KIP-699).
            request = FindCoordinatorRequest(version=version, key_type=kind, key=key, coordinator_keys=[key])
            response = self.ask(request, "FindCoordinator", deadline)
            answer = response.coordinators[0] if response.coordinators else response
            if answer.error_code == 0:
                node = int(answer.node_id)
                self._coordinators[kind, key] = node
                return node
            verdict = codes.describe(answer.error_code).verdict
            if not verdict.retriable:
                raise codes.error_for(answer.error_code, api="FindCoordinator", resource=key, detail=f"key {key}")
            deadline.pause(attempt + 2, f"FindCoordinator: {codes.describe(answer.error_code).name}")
            attempt += 1

    def forget_coordinator(self, kind: int, key: str) -> None:
        self._coordinators.pop((kind, key), None)

    def ask_coordinator(
        self, request: Any, kind: int, key: str, deadline: Deadline, *, sent: SentRequest | None = None
    ) -> Any:
        """Send one request to a coordinator. If the connection is lost, the next call looks the coordinator up again.

        Args:
            sent: the same request, if it is under way: then its response is waited for.

        Raises:
            ConnectionFailedError: see ``exchange``.
        """
        node = self.coordinator(kind, key, deadline)
        try:
            return self.exchange(request, node, deadline) if sent is None else self.received(sent, deadline)
        except ConnectionFailedError:
            self.forget_coordinator(kind, key)
            self.refresh_brokers(deadline)
            raise


def _read_topic(topic: Any, found: dict[str, TopicInfo]) -> str:
    """Add a topic of a Metadata response to ``found``. Returns why the request must be repeated, or ''.

    Raises:
        OnceflowError: this principal may not describe the topic, or its name is not legal.
    """
    if topic.error_code in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
        leaders = {p.partition_index: p.leader_id for p in topic.partitions}
        found[topic.name] = TopicInfo(topic.name, str(topic.topic_id), leaders, bool(topic.is_internal))
        return ""
    if topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        return f"{topic.name} is unknown"
    if topic.error_code == Code.TOPIC_AUTHORIZATION_FAILED:
        raise codes.error_for(Code.TOPIC_AUTHORIZATION_FAILED, api="Metadata", topic=topic.name)
    if topic.error_code == Code.INVALID_TOPIC_EXCEPTION:
        raise unknown_topic(topic.name, "its name is not legal in Kafka")
    return f"{topic.name}: {codes.describe(topic.error_code).name}"


def unknown_topic(name: str, why: str = "") -> UnknownTopicError:
    """The error for a topic that does not exist. `client.topics.missing` adds more information to it."""
    if why:
        return UnknownTopicError(f"Topic {name!r} does not exist: {why}", topic=name, next_step="check the name")
    if name.startswith(_OWN):
        step = "none, if it was deleted: a flow that starts creates it; or check the DESCRIBE permission"
        return UnknownTopicError(f"Topic {name!r} does not exist", topic=name, next_step=step)
    return UnknownTopicError(
        f"Topic {name!r} does not exist",
        topic=name,
        next_step=f"create it: `onceflow topic create {name} --partitions N`; or check the name and the DESCRIBE "
        "permission",
    )

"""Reads from Kafka what ``onceflow doctor`` looks at. Requests are read-only, and no driver is fenced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from onceflow.admin.doctor.cluster import BROKER_SETTINGS
from onceflow.admin.doctor.facts import (
    CLUSTER,
    INTERNAL,
    JOINED,
    NAMED,
    OUTPUT,
    PROGRESS,
    SOURCE,
    TABLE,
    Facts,
    FlowFacts,
    Topic,
)
from onceflow.admin.doctor.finding import Finding, Level, of_error
from onceflow.admin.doctor.topics import TOPIC_SETTINGS
from onceflow.admin.records.tables import all_progress
from onceflow.admin.status.flow_status import FlowStatus
from onceflow.admin.status.flow_status_reader import StatusReader
from onceflow.admin.status.similar_flows import alike
from onceflow.client import allowed
from onceflow.client.brokers import CLUSTER_TOPICS
from onceflow.client.cluster import Cluster, unknown_topic
from onceflow.client.deadline import Deadline
from onceflow.client.nodes import look_at_nodes, node_settings
from onceflow.client.offsets import EARLIEST, LATEST, list_offsets, newest_timestamps
from onceflow.client.topics import Copies, missing, topic_configs
from onceflow.client.transaction_requests import check_supported
from onceflow.clock import clock_ms
from onceflow.errors import OnceflowError, PermissionDeniedError, UnknownTopicError
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol import codes
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress

T = TypeVar("T")
_SECONDS = 10.0
_EXISTS = (0, 5)  # NONE; LEADER_NOT_AVAILABLE: a partition has no leader, but the topic exists
_UNKNOWN = 3


@dataclass
class Reading:
    """One look at a cluster.

    Args:
        problems: what could not be read, and why.
    """

    cluster: Cluster
    problems: list[Finding] = field(default_factory=list)

    def read(self, names: Names | None, topics: Iterable[str], local: Mapping[str, Path]) -> Facts:
        """Read everything. What cannot be read is left out of the facts.

        Args:
            names: the flow, if one is looked at.
            topics: topics that were named by the user.
            local: flows with local state on this machine.
        """
        self._try("versions", lambda deadline: check_supported(self.cluster, deadline))
        brokers = tuple(self._try("brokers", lambda deadline: look_at_nodes(self.cluster, deadline)) or ())
        answered = [broker.node for broker in brokers if not broker.problem]
        operations = self._try("permissions", lambda deadline: allowed.of_cluster(self.cluster, deadline))
        progress = self._try("progress", lambda deadline: list(all_progress(self.cluster, deadline)))
        own = next((each for each in progress or () if names and each.flow == names.progress_key), None)
        found = self._topics(_roles(own, topics))
        may_read = "READ" in (found[PROGRESS_TOPIC].operations or ()) if PROGRESS_TOPIC in found else False
        absent = PROGRESS_TOPIC in found and isinstance(found[PROGRESS_TOPIC].problem, UnknownTopicError)
        flows = frozenset(each.flow for each in progress) if progress is not None and (may_read or absent) else None
        return Facts(
            brokers=brokers,
            broker_settings=self._try("broker-settings", lambda deadline: self._settings(answered, deadline)),
            operations=operations,
            topics=found,
            flow=None if names is None else self._flow(names, own, flows or frozenset(), found),
            flows=flows,
            local_flows=local,
            now_ms=clock_ms(),
        )

    def _settings(self, nodes: list[int], deadline: Deadline) -> Mapping[str, frozenset[str]] | None:
        try:
            return node_settings(self.cluster, nodes, BROKER_SETTINGS, deadline)
        except PermissionDeniedError:
            return None  # the check says so

    # ---- topics --------------------------------------------------------------------------------------

    def _topics(self, roles: Mapping[str, str]) -> dict[str, Topic]:
        described = self._try("topics", lambda deadline: allowed.describe_topics(self.cluster, roles, deadline)) or []
        found = {str(each.name): self._topic(each, roles[str(each.name)], roles) for each in described}
        visible = [name for name, topic in found.items() if topic.problem is None]
        settings = self._try("topics", lambda deadline: self._topic_settings(visible, deadline)) or {}
        stamped = {
            name: sorted(found[name].copies)
            for name in visible
            if settings.get(name, {}).get("message.timestamp.type") == "LogAppendTime"
        }
        newest = {}
        if stamped:
            newest = self._try("clock", lambda deadline: newest_timestamps(self.cluster, stamped, deadline)) or {}
        return {
            name: replace(found[name], settings=settings.get(name, {}), newest_ms=newest.get(name))
            for name in roles
            if name in found
        }

    def _topic_settings(self, names: list[str], deadline: Deadline) -> Mapping[str, Mapping[str, str | None]]:
        return topic_configs(self.cluster, names, TOPIC_SETTINGS, deadline) if names else {}

    def _topic(self, described: Any, role: str, roles: Mapping[str, str]) -> Topic:
        """A topic of a Metadata response."""
        name, code = str(described.name), int(described.error_code)
        if code in _EXISTS:
            copies = {
                int(part.partition_index): Copies(
                    int(part.leader_id), [int(n) for n in part.replica_nodes], [int(n) for n in part.isr_nodes]
                )
                for part in sorted(described.partitions, key=lambda each: int(each.partition_index))
            }
            allowed_here = allowed.operations(described.authorized_operations)
            return Topic(name, role, copies=copies, operations=allowed_here)
        problem: OnceflowError = codes.error_for(code, api="Metadata", topic=name)
        if code == _UNKNOWN:
            known = "" if role == NAMED else role
            looked = Deadline(_SECONDS, "looking for topics of a similar name")
            problem = missing(self.cluster, unknown_topic(name), {**roles, name: known}, looked)
        return Topic(name, role, problem=problem)

    # ---- the flow ------------------------------------------------------------------------------------

    def _flow(
        self, names: Names, progress: Progress | None, flows: frozenset[str], topics: Mapping[str, Topic]
    ) -> FlowFacts:
        sources, old = {}, {}
        for name, committed in progress.offsets.items() if progress else ():
            topic = topics.get(name)
            if topic is not None and topic.problem is None:
                read = self._source(topic, committed)
                if read is not None:
                    sources[name], old[name] = read
        group, may_write = None, None
        if _is_there(topics.get("__consumer_offsets")):
            group = self._try("permissions", lambda d: allowed.of_group(self.cluster, names.group_id, d))
        if _is_there(topics.get("__transaction_state")):
            may_write = self._try(
                "permissions",
                lambda d: allowed.may_write_transactional_id(self.cluster, names.transactional_id, names.group_id, d),
            )
        return FlowFacts(
            names,
            progress,
            similar=tuple(alike(names.progress_key, flows)),
            sources=sources,
            status=None if progress is None else self._try("held-back", lambda d: self._status(names, d)),
            old_unread=old,
            group=group,
            may_write_id=may_write,
        )

    def _status(self, names: Names, deadline: Deadline) -> FlowStatus:
        reader = StatusReader(
            self.cluster,
            transactional_id_prefix=names.transactional_id_prefix,
            group_id_prefix=names.group_id_prefix,
        )
        (status,) = reader.read([names.progress_key], deadline)
        return status

    def _source(self, topic: Topic, committed: Mapping[int, int]) -> tuple[SourceTopic, tuple[int, ...]] | None:
        """A source as it is now, and its partitions with old unread records."""

        def read(deadline: Deadline) -> tuple[SourceTopic, tuple[int, ...]]:
            cluster, span = self.cluster, {topic.name: sorted(topic.copies)}
            topic_id = cluster.topic(topic.name, deadline).topic_id
            earliest = list_offsets(cluster, span, EARLIEST, deadline)[topic.name]
            latest = list_offsets(cluster, span, LATEST, deadline)[topic.name]
            retention = topic.number("retention.ms")
            if retention is None or retention <= 0:
                return SourceTopic(topic.name, topic_id, earliest, latest), ()
            young = list_offsets(cluster, span, clock_ms() - retention // 2, deadline)[topic.name]
            return SourceTopic(topic.name, topic_id, earliest, latest), old_unread(committed, latest, young)

        return self._try("lag", read)

    def _try(self, check: str, read: Callable[[Deadline], T]) -> T | None:
        try:
            return read(Deadline(_SECONDS, f"looking at {check}"))
        except OnceflowError as problem:
            unimportant = check == "clock" or isinstance(problem, PermissionDeniedError)
            level = Level.SKIPPED if unimportant else Level.ERROR
            self.problems.append(replace(of_error(check, problem, level), check=check))
            return None


def old_unread(committed: Mapping[int, int], latest: Mapping[int, int], young: Mapping[int, int]) -> tuple[int, ...]:
    """Partitions whose next record to read is before the first young record.

    Args:
        young: the first offset whose record is young; -1: there is none.
    """
    return tuple(
        partition
        for partition, offset in sorted(committed.items())
        if offset < latest.get(partition, 0) and (young.get(partition, 0) < 0 or offset < young.get(partition, 0))
    )


def _is_there(topic: Topic | None) -> bool:
    """Whether a topic of Kafka itself exists, or may exist."""
    return topic is not None and not isinstance(topic.problem, UnknownTopicError)


def _roles(progress: Progress | None, named: Iterable[str]) -> dict[str, str]:
    """The topics to look at. What progress says of a topic goes before its being named."""
    roles = dict.fromkeys(named, NAMED)
    if progress is not None:
        roles |= dict.fromkeys([*progress.outputs, *progress.side_topics], OUTPUT)
        roles |= dict.fromkeys(progress.joined, JOINED)
        roles |= {name: INTERNAL if name.endswith(INTERNAL_SUFFIX) else TABLE for name in progress.changelogs}
        roles |= dict.fromkeys(progress.offsets, SOURCE)
    return {**roles, PROGRESS_TOPIC: PROGRESS, **dict.fromkeys(CLUSTER_TOPICS, CLUSTER)}

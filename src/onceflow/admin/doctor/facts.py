"""What ``onceflow doctor`` knows of a cluster, its topics and a flow. The checks are functions of these facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.admin.status.flow_status import FlowStatus
from onceflow.client.brokers import Safety
from onceflow.client.nodes import Node
from onceflow.client.topics import Copies
from onceflow.errors import OnceflowError
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress

SOURCE, OUTPUT, TABLE, INTERNAL, JOINED = "source", "output", "table", "internal topic of a table", "joined table"
#: Of a topic that was named on the command line.
NAMED = "topic"
PROGRESS, CLUSTER = "progress topic", "topic of Kafka itself"

Settings = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Topic:
    """A topic, and what it is for.

    Args:
        role: one of the constants above.
        problem: why it cannot be used: it does not exist, or this principal may not see it.
        copies: the brokers of each partition.
        settings: its settings, by name. None: this principal may not read them.
        operations: what this principal may do with the topic, such as ``READ``; None: unknown.
        newest_ms: the newest timestamp in it, if brokers set the timestamps (LogAppendTime); None: unknown.
    """

    name: str
    role: str
    problem: OnceflowError | None = None
    copies: Mapping[int, Copies] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    operations: frozenset[str] | None = None
    newest_ms: int | None = None

    def number(self, name: str) -> int | None:
        """A setting that is a number; None: it may not be read."""
        value = self.settings.get(name)
        return None if value is None else int(value)

    @property
    def safety(self) -> Safety:
        unclean, in_sync = self.settings.get("unclean.leader.election.enable"), self.number("min.insync.replicas")
        replicas = min((len(each.replicas) for each in self.copies.values()), default=0)
        return Safety(self.name, replicas, None if unclean is None else unclean == "true", in_sync)


@dataclass(frozen=True)
class FlowFacts:
    """A flow.

    Args:
        progress: what it has committed; None: nothing that can be read.
        similar: flows of a similar name that have progress.
        sources: its source topics as they are now.
        status: where it is, and what holds it back; None: it has no progress, or this could not be read.
        old_unread: partitions of a source whose oldest unread record is older than half of the topic's retention.
        group: what this principal may do with its consumer group; None: unknown.
        may_write_id: whether this principal has WRITE on its transactional id; None: unknown.
    """

    names: Names
    progress: Progress | None = None
    similar: tuple[str, ...] = ()
    sources: Mapping[str, SourceTopic] = field(default_factory=dict)
    status: FlowStatus | None = None
    old_unread: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    group: frozenset[str] | None = None
    may_write_id: bool | None = None


@dataclass(frozen=True)
class Facts:
    """A cluster.

    Args:
        broker_settings: a setting -> its values on the brokers that were asked; None: they may not be read.
        operations: what this principal may do with the cluster; None: unknown.
        topics: the topics that were looked at, by name.
        flows: the keys of all flows with progress; None: unknown.
        local_flows: folders of local state on this machine, by flow.
        now_ms: this machine's time when the facts were read, epoch milliseconds.
    """

    brokers: tuple[Node, ...] = ()
    broker_settings: Mapping[str, frozenset[str]] | None = None
    operations: frozenset[str] | None = None
    topics: Mapping[str, Topic] = field(default_factory=dict)
    flow: FlowFacts | None = None
    flows: frozenset[str] | None = None
    local_flows: Mapping[str, Path] = field(default_factory=dict)
    now_ms: int = 0

    def there(self, *roles: str) -> list[Topic]:
        """Topics that exist and can be seen, of these roles or of all of them."""
        return [topic for topic in self.topics.values() if topic.problem is None and (not roles or topic.role in roles)]

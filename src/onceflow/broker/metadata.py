"""What brokers say about their cluster: its id, its nodes and all partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.errors import OnceflowError

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster as Client

_LEAST_S = 0.1


@dataclass(frozen=True)
class Partition:
    """The metadata of one partition; ``leader`` is -1 while there is none."""

    topic: str
    number: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: frozenset[int]

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    def next_order(self) -> tuple[int, ...] | None:
        """The replicas in the same cyclic order, beginning with the next in-sync replica after the leader. None: no
        other replica is in sync."""
        if self.leader not in self.replicas:
            return None
        after = self.replicas.index(self.leader) + 1
        circle = self.replicas[after:] + self.replicas[:after]
        for place, node_id in enumerate(circle[:-1]):
            if node_id in self.in_sync:
                return circle[place:] + circle[:place]
        return None


@dataclass(frozen=True)
class Metadata:
    """One answer.

    Args:
        cluster_id: None: the brokers tell none yet.
        nodes: ids of the nodes in the cluster.
        partitions: of all topics, also internal ones.
    """

    cluster_id: str | None
    nodes: frozenset[int]
    partitions: tuple[Partition, ...]


class MetadataReader:
    """Asks one node after the other, because one that is paused accepts a request and does not respond. The connection
    to the last one that responded is kept."""

    def __init__(self, bootstrap_servers: str, client_options: Mapping[str, Any]) -> None:
        self._addresses = bootstrap_servers.split(",")
        self._options = client_options
        self._client: Client | None = None

    def read(self, timeout_s: float) -> Metadata:
        """Ask now.

        Raises:
            OnceflowError: no node has responded in time.
        """
        count = len(self._addresses)
        for number in range(count):
            try:
                return self._ask(max(_LEAST_S, timeout_s / count))
            except OnceflowError:
                self.close()
                self._addresses = [*self._addresses[1:], self._addresses[0]]
                if number == count - 1:
                    raise
        raise AssertionError("there is no address")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, timeout_s: float) -> Metadata:
        # Imported here, because most commands need no client, and its codec is slow to import.
        from kafka.protocol.metadata import MetadataRequest

        from onceflow.client.cluster import Cluster as Client
        from onceflow.client.deadline import Deadline
        from onceflow.client.settings import ClientSettings

        deadline = Deadline(timeout_s, f"reading the metadata of {self._addresses[0]}")
        if self._client is None:
            self._client = Client(ClientSettings(self._addresses[0], self._options))
        self._client.connect(deadline)
        request = MetadataRequest(topics=None, allow_auto_topic_creation=False)
        answer = self._client.ask(request, "Metadata", deadline)
        return Metadata(
            answer.cluster_id or None,
            frozenset(broker.node_id for broker in answer.brokers),
            tuple(
                Partition(topic.name, p.partition_index, p.leader_id, tuple(p.replica_nodes), frozenset(p.isr_nodes))
                for topic in answer.topics
                for p in topic.partitions
            ),
        )


@contextlib.contextmanager
def metadata_reader(bootstrap_servers: str, client_options: Mapping[str, Any]) -> Iterator[MetadataReader]:
    """A reader that is closed at the end."""
    with contextlib.closing(MetadataReader(bootstrap_servers, client_options)) as reader:
        yield reader

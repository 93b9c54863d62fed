"""The nodes of a local Kafka cluster, and the server.properties of each node. Without I/O."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import javaproperties

from onceflow.errors import OptionError

HOST = "127.0.0.1"
CONTROLLER_LISTENER = "CONTROLLER"
CLIENT_LISTENER = "PLAINTEXT"
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
# Kafka's default for its internal topics is 50 partitions. Each needs files, and time at a start. A few behave the
# same.
INTERNAL_PARTITIONS = 4
COPIES = 3


@dataclass(frozen=True)
class Node:
    """One Kafka process, which is both broker and controller."""

    node_id: int
    data_dir: Path
    port: int
    controller_port: int

    @property
    def properties_file(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def log_file(self) -> Path:
        return self.data_dir / "server.log"

    @property
    def pid_file(self) -> Path:
        return self.data_dir / "pid.json"

    @property
    def kafka_data_dir(self) -> Path:
        return self.data_dir / "data"

    @property
    def clean_shutdown_file(self) -> Path:
        """Kafka writes this file when it has closed all logs, and removes it when it opens them."""
        return self.kafka_data_dir / ".kafka_cleanshutdown"


@dataclass(frozen=True)
class Cluster:
    """Nodes that form one Kafka cluster.

    Args:
        cluster_id: Kafka's own id, 22 characters; see ``new_cluster_id``.
        version: version of Apache Kafka.
        nodes: all nodes; each is a voter of the controller quorum.
        properties: broker properties, which override the defaults of this module. ``{port}``, ``{controller_port}``,
            ``{node_id}`` and ``{data_dir}`` in a value are replaced by those of the node.
        node_properties: node id -> properties of that node only; they override ``properties``.
        client_listener: name of the listener that clients use; by default the first one.
        features: feature levels for formatting the storage, for example ``{"transaction.version": 1}``; by default
            the newest. They are used only once, when the data folder is created.
    """

    cluster_id: str
    version: str
    nodes: tuple[Node, ...]
    properties: Mapping[str, str] = field(default_factory=dict)
    client_listener: str | None = None
    features: Mapping[str, int] = field(default_factory=dict)
    node_properties: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node_id in self.node_properties:
            self.node(node_id)

    @property
    def bootstrap_servers(self) -> str:
        """Addresses of the client listener of every node."""
        return ",".join(self.client_address(node) for node in self.nodes)

    @property
    def majority(self) -> int:
        """How many nodes must run, so that the controllers have a quorum."""
        return len(self.nodes) // 2 + 1

    def node(self, node_id: int) -> Node:
        """The node with this id.

        Raises:
            OptionError: there is no such node.
        """
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise OptionError(
            f"The cluster has no node {node_id}.",
            next_step="Its nodes are " + ", ".join(str(node.node_id) for node in self.nodes) + ".",
        )

    def client_address(self, node: Node) -> str:
        """host:port of the client listener of one node.

        Raises:
            OptionError: it has no such listener.
        """
        properties = server_properties(self, node)
        listeners = parse_listeners(properties["listeners"])
        controllers = _names(properties["controller.listener.names"])
        for name, address in listeners:
            if name == self.client_listener or (self.client_listener is None and name not in controllers):
                return address
        raise OptionError(
            f"There is no listener {self.client_listener or 'for clients'} in {properties['listeners']}.",
            next_step="Name one of the listeners as client_listener.",
        )


def new_cluster_id() -> str:
    """A new cluster id in Kafka's format: a random UUID as URL-safe base64, without padding."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # Kafka's tool would treat an argument that begins with a dash as an option.
        if not text.startswith("-"):
            return text


def server_properties(cluster: Cluster, node: Node) -> dict[str, str]:
    """All entries of server.properties of one node: the defaults, overridden by the properties of the caller."""
    own = cluster.node_properties.get(node.node_id, {})
    given = {key: _fill(value, node) for key, value in {**cluster.properties, **own}.items()}
    controllers = _names(given.get("controller.listener.names", CONTROLLER_LISTENER))
    listeners = given.get("listeners", f"{CLIENT_LISTENER}://{HOST}:{node.port}")
    names = [name for name, _ in parse_listeners(listeners)]
    if not any(name in controllers for name in names):
        listeners += f",{controllers[0]}://{HOST}:{node.controller_port}"
    client_names = [name for name in names if name not in controllers]
    if not client_names:
        raise OptionError(
            f"listeners={listeners} has only a controller listener.",
            next_step="Add a listener for clients, for example PLAINTEXT://127.0.0.1:{port}.",
        )
    copies = min(COPIES, len(cluster.nodes))
    in_sync_min = max(1, copies - 1)
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": ",".join(f"{n.node_id}@{HOST}:{n.controller_port}" for n in cluster.nodes),
        "controller.listener.names": ",".join(controllers),
        "listener.security.protocol.map": _protocol_map(names, controllers),
        "inter.broker.listener.name": client_names[0],
        "log.dirs": str(node.kafka_data_dir),
        # A misspelled topic name must be an error; an auto-created topic would have the wrong number of partitions.
        "auto.create.topics.enable": "false",
        "default.replication.factor": str(copies),
        "min.insync.replicas": str(in_sync_min),
        "offsets.topic.replication.factor": str(copies),
        "offsets.topic.num.partitions": str(INTERNAL_PARTITIONS),
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": str(in_sync_min),
        "transaction.state.log.num.partitions": str(INTERNAL_PARTITIONS),
        # Tests and demos have one consumer per group, so waiting 3 s for a second one would be useless.
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker can register again only after the session of its previous process has expired: by default
        # after 9 s.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "800",
        # Small enough for a laptop that also runs a Spark driver.
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "4",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    }
    if "security.inter.broker.protocol" in given:  # Kafka does not accept both
        del properties["inter.broker.listener.name"]
    return {**properties, **given, "listeners": listeners}


def render_properties(properties: Mapping[str, str]) -> str:
    """Text of a Java properties file with these entries, in ASCII: Java reads these files as Latin-1."""
    return "".join(f"{javaproperties.join_key_value(key, value)}\n" for key, value in properties.items())


def parse_listeners(text: str) -> list[tuple[str, str]]:
    """``NAME://host:port,...`` as (name, host:port) pairs.

    Raises:
        OptionError: an entry has another form.
    """
    listeners = []
    for entry in _names(text):
        name, separator, address = entry.partition("://")
        if not separator or not name or ":" not in address:
            raise OptionError(
                f"Listener {entry!r} is not of the form NAME://host:port.",
                next_step="Write for example listeners=SASL_PLAINTEXT://127.0.0.1:{port}.",
            )
        listeners.append((name, address))
    return listeners


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _protocol_map(names: list[str], controllers: list[str]) -> str:
    # A listener with the name of a protocol uses that protocol. For every other name Kafka requires an entry in the
    # caller's own map: a default of PLAINTEXT could open a listener without security that was meant to be secure. The
    # controllers listen on 127.0.0.1 only.
    pairs = {name: name for name in names if name in SECURITY_PROTOCOLS}
    for name in controllers:
        pairs.setdefault(name, "PLAINTEXT")
    return ",".join(f"{name}:{protocol}" for name, protocol in pairs.items())


def _fill(value: str, node: Node) -> str:
    # Not str.format: JAAS configurations and regular expressions may contain other braces.
    for name in ("port", "controller_port", "node_id", "data_dir"):
        value = value.replace("{" + name + "}", str(getattr(node, name)))
    return value

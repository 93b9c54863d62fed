"""A local Apache Kafka: start, stop, status.

The data folder keeps the settings that must not change between starts (see ``broker.folder``). Options of the caller
(heap, properties, client options) are not stored; pass them at every start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from onceflow.broker import nodes as agreed
from onceflow.broker import ports, process
from onceflow.broker.config import Cluster, Node, new_cluster_id
from onceflow.broker.folder import Folder, default_data_dir, free_ports
from onceflow.broker.status import Status, status_of
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.host.jars import BROKER_VERSION

__all__ = ["LocalBroker", "Status", "default_data_dir", "free_ports"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
HEAP = "1g"
HEAP_OF_SEVERAL = "512m"


class LocalBroker:
    """A Kafka cluster on 127.0.0.1 with one or several nodes. Each is broker and controller in one process.

    Args:
        data_dir: folder for all files; by default ``default_data_dir()``.
        port: port for clients, of the first node; the other nodes have the ports after it. By default the port stored
            in the folder, else a free one.
        controller_port: port of the controller listener; likewise.
        version: version of Apache Kafka; by default the one stored in the folder, else 4.3.1.
        heap: heap of the JVM of each node, in the format of ``-Xmx``; by default 1g, or 512m with several nodes.
        properties: broker properties, which override the defaults. ``broker.config.Cluster`` describes the
            placeholders in their values.
        nodes: number of nodes; by default the number stored in the folder, else 1. With three, every topic has three
            replicas, and one node may fail. Their ids are 1, 2, 3.
        node_properties: node id -> properties of that node only; they override ``properties``.
        client_options: librdkafka options for the health check, for listeners that need TLS or SASL.
        client_listener: name of the listener for ``bootstrap_servers``; by default the first one.
        environment: additional environment variables for the processes, for example JAVA_TOOL_OPTIONS.
        features: feature levels of a new cluster, see ``broker.config.Cluster``.

    As a context manager it starts at the beginning and stops at the end. Otherwise it runs until ``stop``.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        port: int | None = None,
        controller_port: int | None = None,
        version: str | None = None,
        heap: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        nodes: int | None = None,
        node_properties: Mapping[int, Mapping[str, str]] | None = None,
        client_options: Mapping[str, Any] | None = None,
        client_listener: str | None = None,
        environment: Mapping[str, str] | None = None,
        features: Mapping[str, int] | None = None,
    ) -> None:
        if nodes is not None and nodes < 1:
            raise OptionError(f"nodes={nodes}: a cluster has at least one node.", next_step="Give 1 or 3.")
        self.data_dir = Path(data_dir).expanduser().absolute() if data_dir else default_data_dir().absolute()
        self._folder = Folder(self.data_dir)
        self._port = port
        self._controller_port = controller_port
        self._version = version
        self._heap = heap
        self._properties = dict(properties or {})
        self._nodes = nodes
        self._node_properties = dict(node_properties or {})
        self._client_options = dict(client_options or {})
        self._client_listener = client_listener
        self._environment = dict(environment or {})
        self._features = dict(features or {})

    @property
    def bootstrap_servers(self) -> str:
        """host:port of the client listener of every node. Known after the first start."""
        return self.cluster.bootstrap_servers

    @property
    def cluster(self) -> Cluster:
        """The cluster stored in the folder, with the options of this object.

        Raises:
            OptionError: no broker was started with this folder yet.
        """
        cluster = self._remembered()
        if cluster is None:
            raise OptionError(
                f"There is no broker in {self.data_dir} yet.", next_step="Start it: `onceflow broker start`."
            )
        return cluster

    # ---- the whole cluster ---------------------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Start the nodes that do not run, and wait until all respond. Returns False if all were running already.

        Raises:
            OptionError: it runs, or was formatted, with another port, version, number of nodes or feature level.
            EnvironmentUnusableError: a port is in use, or Kafka or Java cannot be started; the detail has the end of
                the log. All processes that were started are stopped again, and the given ports are not stored.
            BrokerUnreachableError: it did not respond in time.
        """
        if not self._folder.path.exists():  # checked before the folder is created, so that a failed start leaves none
            cluster = self._with_wanted_ports(self._invented())
            ports.refuse_taken(cluster, cluster.nodes)
        with self._folder.exclusive(timeout_s):
            before = cluster = self._remembered() or self._invented()
            self._refuse_other_layout(cluster)
            down = [node for node in cluster.nodes if not process.running(node)]
            if len(down) < len(cluster.nodes):
                self._refuse_other_port(cluster)
            else:
                cluster = self._with_wanted_ports(cluster)
                down = list(cluster.nodes)
            ports.refuse_taken(cluster, down)
            if down:
                self._folder.write(cluster)
            try:
                self._spawn(cluster, down)
                self._wait_until_ready(cluster, cluster.nodes, timeout_s)
            except EnvironmentUnusableError:
                # A node has ended. The others would wait for it without end, so they are stopped, too.
                process.kill(down)
                if down:
                    self._folder.write(before)
                ports.refuse_taken(cluster, down)  # another process may have taken a port meanwhile
                raise
            except KeyboardInterrupt:
                process.kill(down)
                if down:
                    self._folder.write(before)
                raise
            return bool(down)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop all nodes: SIGTERM, then SIGKILL after this time. Returns False if none was running."""
        if self._remembered() is None:
            return False
        with self._folder.exclusive(timeout_s + START_TIMEOUT_S):
            return process.stop(self.cluster.nodes, timeout_s=timeout_s)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop and start, with the same data and ports."""
        self.stop()
        self.start(timeout_s)

    def status(self, timeout_s: float = 5.0) -> Status:
        """Whether it runs and responds, and at which addresses."""
        return status_of(self._remembered(), self.data_dir, self._client_options, timeout_s)

    def __enter__(self) -> LocalBroker:
        try:
            self.start()
        except BaseException:
            self.stop()  # processes that started but did not respond must not keep running
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- single nodes --------------------------------------------------------------------------------

    def kill(self, node_id: int | None = None) -> bool:
        """Kill a node, or all, with SIGKILL, to simulate a crash. Returns False if none was running."""
        return process.kill(self.cluster.nodes if node_id is None else [self.cluster.node(node_id)])

    def pause(self, node_id: int) -> bool:
        """Pause a node (SIGSTOP): it keeps its connections but does not respond. Returns False if it does not run."""
        return process.signal_node(self.cluster.node(node_id), signal.SIGSTOP)

    def resume(self, node_id: int) -> bool:
        """Let a paused node continue. Returns False if it does not run."""
        return process.signal_node(self.cluster.node(node_id), signal.SIGCONT)

    def start_node(self, node_id: int, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Start one node of a running cluster, and wait until it is in the cluster. Returns False if it was running.

        Raises:
            OptionError: even with this node there would be no majority of running nodes, so it could not become ready.
            EnvironmentUnusableError: one of its ports is in use, or the process ended while it started.
            BrokerUnreachableError: it was not in the cluster in time.
        """
        with self._folder.exclusive(timeout_s):
            cluster = self.cluster
            node = cluster.node(node_id)
            was_running = process.running(node) is not None
            up = sum(1 for other in cluster.nodes if process.running(other)) + (not was_running)
            if up < cluster.majority:
                raise OptionError(
                    f"Node {node_id} cannot start alone: {cluster.majority} of {len(cluster.nodes)} have to run.",
                    next_step="Start all: `start()` or `onceflow broker start`.",
                )
            if not was_running:
                ports.refuse_taken(cluster, [node])
                self._spawn(cluster, [node])
            self._wait_until_ready(cluster, [node], timeout_s)
            return not was_running

    def stop_node(self, node_id: int, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop one node cleanly: it first gives up the leadership of its partitions. Returns False if it was not
        running."""
        with self._folder.exclusive(timeout_s + START_TIMEOUT_S):
            return process.stop([self.cluster.node(node_id)], timeout_s=timeout_s)

    def rolling_restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop and start every node, each one after all replicas are in sync again. The timeout applies to each
        node."""
        self.wait_in_sync(timeout_s)
        for node in self.cluster.nodes:
            self.stop_node(node.node_id)
            self.start_node(node.node_id, timeout_s)
            self.wait_in_sync(timeout_s)

    # ---- metadata of the cluster ---------------------------------------------------------------------

    def wait_in_sync(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until all replicas of every partition are in sync; see ``broker.nodes``."""
        agreed.wait_in_sync(self.cluster, self._client_options, timeout_s)

    def leader_of(self, topic: str, partition: int, timeout_s: float = START_TIMEOUT_S) -> int:
        """Node id of the leader in the metadata that clients get. Just after a crash this is still the crashed node."""
        return agreed.leader_of(self.cluster, self._client_options, topic, partition, timeout_s)

    def move_leaders(self, topics: Collection[str] | None = None, timeout_s: float = START_TIMEOUT_S) -> int:
        """Elect another node as leader of each partition, by default of all topics, including internal ones. Returns
        how many leaders have changed."""
        return agreed.move_leaders(self.cluster, self._client_options, topics, timeout_s)

    def downgrade_transaction_version(self, level: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        """Finalize another ``transaction.version`` while the cluster runs. It is stored in the folder.

        Raises:
            BrokerUnsupportedError: this version of Kafka does not support that level.
        """
        self._finalize_transaction_version(level, timeout_s)

    def upgrade_transaction_version(self, level: int = 2, timeout_s: float = START_TIMEOUT_S) -> None:
        """As `downgrade_transaction_version`, to a higher level."""
        self._finalize_transaction_version(level, timeout_s)

    def transaction_versions(self, timeout_s: float = START_TIMEOUT_S) -> dict[int, int]:
        """Node id -> ``transaction.version`` as this node knows it. Only for nodes in the cluster."""
        return agreed.feature_levels(self.cluster, self._client_options, agreed.TRANSACTION_VERSION, timeout_s)

    # ---- inside --------------------------------------------------------------------------------------

    def _finalize_transaction_version(self, level: int, timeout_s: float) -> None:
        name = agreed.TRANSACTION_VERSION
        with self._folder.exclusive(timeout_s):
            cluster = self.cluster
            agreed.set_feature(cluster, self._client_options, name, level, timeout_s)
            self._folder.write(replace(cluster, features={**cluster.features, name: level}))

    def _spawn(self, cluster: Cluster, nodes: Collection[Node]) -> None:
        heap = self._heap or (HEAP if len(cluster.nodes) == 1 else HEAP_OF_SEVERAL)

        def spawn(node: Node) -> None:
            process.write_properties(cluster, node)
            process.format_storage(cluster, node)
            process.spawn(cluster, node, heap=heap, environment=self._environment)

        if nodes:  # in parallel, because each needs a JVM for formatting
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(spawn, nodes))

    def _wait_until_ready(self, cluster: Cluster, nodes: Collection[Node], timeout_s: float) -> None:
        process.wait_until_ready(
            cluster,
            nodes=list(nodes),
            client_options=self._client_options,
            timeout_s=timeout_s,
            still_running=lambda: all(process.running(node) for node in nodes),
        )

    def _invented(self) -> Cluster:
        count = self._nodes or 1
        free = free_ports(2 * count)
        nodes = tuple(
            Node(number, self.data_dir / f"node-{number}", free.pop(), free.pop()) for number in range(1, count + 1)
        )
        # If there is data but broker.json was removed, the cluster keeps the id with which the data was formatted.
        cluster_id = next((found for node in nodes if (found := process.laid_out_id(node))), None) or new_cluster_id()
        cluster = Cluster(cluster_id, self._version or BROKER_VERSION, nodes, features=self._features)
        return self._with_options(cluster)

    def _remembered(self) -> Cluster | None:
        cluster = self._folder.read()
        return None if cluster is None else self._with_options(cluster)

    def _with_options(self, cluster: Cluster) -> Cluster:
        return replace(
            cluster,
            properties=self._properties,
            node_properties=self._node_properties,
            client_listener=self._client_listener,
        )

    def _with_wanted_ports(self, cluster: Cluster) -> Cluster:
        """The cluster with the ports of the caller instead of the stored ones. Only for a stopped broker."""
        nodes = tuple(
            Node(
                node.node_id,
                node.data_dir,
                self._port + index if self._port else node.port,
                self._controller_port + index if self._controller_port else node.controller_port,
            )
            for index, node in enumerate(cluster.nodes)
        )
        return replace(cluster, nodes=nodes)

    def _refuse_other_layout(self, cluster: Cluster) -> None:
        """Raise if version, nodes or features differ from those of the first start in this folder."""
        if self._version not in (None, cluster.version):
            raise self._other_layout(f"is Kafka {cluster.version}, not {self._version}")
        if self._nodes not in (None, len(cluster.nodes)):
            raise self._other_layout(f"has {len(cluster.nodes)} node(s), not {self._nodes}")
        for name, level in self._features.items():
            if cluster.features.get(name) != level:
                has = cluster.features.get(name, "as this version of Kafka has it")
                raise self._other_layout(f"was formatted with {name} {has}, not {level}")

    def _other_layout(self, problem: str) -> OptionError:
        return OptionError(
            f"The broker in {self.data_dir} {problem}.",
            next_step="Leave the option out, or give another data folder: it cannot be changed in this one.",
        )

    def _refuse_other_port(self, cluster: Cluster) -> None:
        if self._port not in (None, cluster.nodes[0].port):
            raise OptionError(
                f"The broker in {self.data_dir} runs already, on port {cluster.nodes[0].port}.",
                next_step="Stop it first, or leave the port out.",
            )

"""A local Apache Kafka that is there when you need it: start, stop, status, and what its folder remembers.

``broker.json`` in the data folder holds what must not change from one start to the next: cluster id, version
and ports. Options of the caller (heap, properties, client options) are not kept; pass them at every start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from onceflow.broker import process
from onceflow.broker.config import HOST, Cluster, Node, new_cluster_id
from onceflow.errors import DeadlineExceededError, EnvironmentUnusableError, OptionError
from onceflow.jars import BROKER_VERSION

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PORTS = range(20_000, 32_000)


def default_data_dir() -> Path:
    """``$ONCEFLOW_HOME/broker``, else ``~/.local/share/onceflow/broker``."""
    home = os.environ.get("ONCEFLOW_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".local" / "share" / "onceflow"
    return base / "broker"


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody listens on now, all different.

    They lie below the range from which systems take the ports of outgoing connections: a broker that is
    stopped must find its port free when it comes back.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                return found
            candidate = stack.enter_context(socket.socket())
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((HOST, port))
            except OSError:
                continue
            found.append(port)
    raise EnvironmentUnusableError(
        f"No {count} free ports between {PORTS.start} and {PORTS.stop}.", next_step="Give a port."
    )


@dataclass(frozen=True)
class Status:
    """What is known about a local broker without starting anything."""

    running: bool
    ready: bool
    data_dir: Path
    bootstrap_servers: str | None
    version: str | None
    pids: tuple[int, ...]
    log_files: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        """The same, in types that JSON has."""
        return {
            "running": self.running,
            "ready": self.ready,
            "data_dir": str(self.data_dir),
            "bootstrap_servers": self.bootstrap_servers,
            "version": self.version,
            "pids": list(self.pids),
            "log_files": [str(path) for path in self.log_files],
        }


class LocalBroker:
    """One Kafka node (broker and controller in one process) that listens on 127.0.0.1 only.

    Args:
        data_dir: everything it keeps; ``default_data_dir()`` by default.
        port: where clients connect; the one remembered in the folder, else a free one.
        controller_port: where the controller listens; likewise.
        version: of Apache Kafka; the one remembered in the folder, else 4.3.1.
        heap: of the JVM, as ``-Xmx`` takes it.
        properties: broker properties; they win over the defaults. See ``broker.config.Cluster`` for what may
            stand in their values.
        client_options: librdkafka options for the health check, when listeners need TLS or SASL.
        client_listener: name of the listener ``bootstrap_servers`` points to; the first one by default.
        environment: environment variables added for the process, for example JAVA_TOOL_OPTIONS.
        features: feature levels of a new cluster, see ``broker.config.Cluster``.

    As a context manager it is started and, at the end, stopped. Without, it runs on until ``stop``.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        port: int | None = None,
        controller_port: int | None = None,
        version: str | None = None,
        heap: str = "1g",
        properties: Mapping[str, str] | None = None,
        *,
        client_options: Mapping[str, Any] | None = None,
        client_listener: str | None = None,
        environment: Mapping[str, str] | None = None,
        features: Mapping[str, int] | None = None,
    ) -> None:
        self.data_dir = Path(data_dir).expanduser().absolute() if data_dir else default_data_dir().absolute()
        self._port = port
        self._controller_port = controller_port
        self._version = version
        self._heap = heap
        self._properties = dict(properties or {})
        self._client_options = dict(client_options or {})
        self._client_listener = client_listener
        self._environment = dict(environment or {})
        self._features = dict(features or {})

    @property
    def bootstrap_servers(self) -> str:
        """host:port of the client listener; known once the broker has been started."""
        return self.cluster.bootstrap_servers

    @property
    def cluster(self) -> Cluster:
        """What the folder remembers, with the options of this object.

        Raises:
            OptionError: nothing was started in this folder yet.
        """
        cluster = self._remembered()
        if cluster is None:
            raise OptionError(
                f"There is no broker in {self.data_dir} yet.", next_step="Start it: `onceflow broker start`."
            )
        return cluster

    def start(self, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Start the broker and wait until it answers. False when it was running already.

        Raises:
            OptionError: it is running, or was formatted, with another port or version than asked for.
            EnvironmentUnusableError: Kafka or Java cannot be started; the detail has the end of the log.
            BrokerUnreachableError: it did not answer in time.
        """
        with self._exclusive(timeout_s):
            cluster = self._remembered() or self._invented()
            self._refuse_other_version(cluster)
            was_running = all(process.running(node) for node in cluster.nodes)
            if was_running:
                self._refuse_other_port(cluster)
            else:
                cluster = self._with_wanted_ports(cluster)
                self._remember(cluster)
                self._start_nodes(cluster)
            process.wait_until_ready(
                cluster,
                client_options=self._client_options,
                timeout_s=timeout_s,
                still_running=lambda: all(process.running(node) for node in cluster.nodes),
            )
            return not was_running

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the broker: SIGTERM, then SIGKILL after this time. False when it was not running."""
        if self._remembered() is None:
            return False
        with self._exclusive(timeout_s + START_TIMEOUT_S):
            stopped = [process.stop(node, timeout_s=timeout_s) for node in self.cluster.nodes]
            return any(stopped)

    def kill(self) -> bool:
        """Kill the broker with SIGKILL, as a crash would. False when it was not running."""
        killed = [process.kill(node) for node in self.cluster.nodes]
        return any(killed)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop and start: same data, same ports."""
        self.stop()
        self.start(timeout_s)

    def status(self, timeout_s: float = 5.0) -> Status:
        """Whether it runs, whether it answers, and where."""
        cluster = self._remembered()
        if cluster is None:
            return Status(False, False, self.data_dir, None, None, (), ())
        found = [process.running(node) for node in cluster.nodes]
        is_running = all(found)
        return Status(
            running=is_running,
            ready=is_running and process.answers(cluster, client_options=self._client_options, timeout_s=timeout_s),
            data_dir=self.data_dir,
            bootstrap_servers=cluster.bootstrap_servers,
            version=cluster.version,
            pids=tuple(identity.pid for identity in found if identity),
            log_files=tuple(node.log_file for node in cluster.nodes),
        )

    def __enter__(self) -> LocalBroker:
        try:
            self.start()
        except BaseException:
            self.stop()  # a process that started but never answered must not be left behind
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_nodes(self, cluster: Cluster) -> None:
        for node in cluster.nodes:
            if process.running(node):
                continue
            process.write_properties(cluster, node)
            process.format_storage(cluster, node)
            process.spawn(cluster, node, heap=self._heap, environment=self._environment)

    def _invented(self) -> Cluster:
        port, controller_port = free_ports(2)
        return self._cluster(
            new_cluster_id(),
            self._version or BROKER_VERSION,
            (Node(1, self.data_dir / "node-1", self._port or port, self._controller_port or controller_port),),
        )

    def _cluster(self, cluster_id: str, version: str, nodes: tuple[Node, ...]) -> Cluster:
        return Cluster(cluster_id, version, nodes, self._properties, self._client_listener, self._features)

    def _with_wanted_ports(self, cluster: Cluster) -> Cluster:
        """Given ports win over remembered ones; a stopped broker may move."""
        nodes = tuple(
            Node(
                node.node_id,
                node.data_dir,
                self._port + index if self._port else node.port,
                self._controller_port + index if self._controller_port else node.controller_port,
            )
            for index, node in enumerate(cluster.nodes)
        )
        return self._cluster(cluster.cluster_id, cluster.version, nodes)

    def _refuse_other_version(self, cluster: Cluster) -> None:
        if self._version is not None and self._version != cluster.version:
            raise OptionError(
                f"The broker in {self.data_dir} is Kafka {cluster.version}, not {self._version}.",
                next_step="Give another data folder: a folder stays with the version that laid it out.",
            )

    def _refuse_other_port(self, cluster: Cluster) -> None:
        if self._port is not None and self._port != cluster.nodes[0].port:
            raise OptionError(
                f"The broker in {self.data_dir} runs already, on port {cluster.nodes[0].port}.",
                next_step="Stop it first, or leave the port out.",
            )

    def _remembered(self) -> Cluster | None:
        try:
            fields = json.loads((self.data_dir / "broker.json").read_text())
            nodes = tuple(
                Node(n["node_id"], self.data_dir / n["folder"], n["port"], n["controller_port"])
                for n in fields["nodes"]
            )
            return self._cluster(fields["cluster_id"], fields["version"], nodes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{self.data_dir / 'broker.json'} cannot be read: {type(error).__name__}.",
                next_step="Remove the folder to begin anew, or give another one.",
            ) from error

    def _remember(self, cluster: Cluster) -> None:
        fields = {
            "cluster_id": cluster.cluster_id,
            "version": cluster.version,
            "nodes": [
                {
                    "node_id": node.node_id,
                    "folder": node.data_dir.name,
                    "port": node.port,
                    "controller_port": node.controller_port,
                }
                for node in cluster.nodes
            ],
        }
        scratch = self.data_dir / "broker.json.tmp"
        scratch.write_text(json.dumps(fields, indent=2) + "\n")
        scratch.replace(self.data_dir / "broker.json")

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float) -> Iterator[None]:
        """One start or stop at a time per folder, over all processes."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        with (self.data_dir / "lock").open("w") as handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise DeadlineExceededError(
                            f"Another process has been at {self.data_dir} for {timeout_s:g} s.",
                            next_step="See what that process waits for, then try again.",
                        ) from None
                    time.sleep(process.POLL_S)
            yield

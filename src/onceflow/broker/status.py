"""Which nodes of a local broker run, and whether they respond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.broker import process
from onceflow.broker.config import Cluster


@dataclass(frozen=True)
class NodeStatus:
    """One node; ``pid`` is None if it does not run."""

    node_id: int
    port: int
    pid: int | None


@dataclass(frozen=True)
class Status:
    """The state of a local broker. ``running``: all its nodes run."""

    running: bool
    ready: bool
    data_dir: Path
    bootstrap_servers: str | None
    version: str | None
    pids: tuple[int, ...]
    log_files: tuple[Path, ...]
    nodes: tuple[NodeStatus, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The status in types that JSON supports."""
        return {
            "running": self.running,
            "ready": self.ready,
            "data_dir": str(self.data_dir),
            "bootstrap_servers": self.bootstrap_servers,
            "version": self.version,
            "pids": list(self.pids),
            "log_files": [str(path) for path in self.log_files],
            "nodes": [{"node_id": n.node_id, "port": n.port, "pid": n.pid} for n in self.nodes],
        }


def status_of(cluster: Cluster | None, data_dir: Path, client_options: Mapping[str, Any], timeout_s: float) -> Status:
    """Look at the processes of the nodes; if all run, ask them.

    Args:
        cluster: None: no broker was started in the folder yet.
        client_options: librdkafka options, for listeners that need TLS or SASL.
        timeout_s: for the answer.
    """
    if cluster is None:
        return Status(False, False, data_dir, None, None, (), ())
    found = {node: process.running(node) for node in cluster.nodes}
    is_running = all(found.values())
    return Status(
        running=is_running,
        ready=is_running and process.answers(cluster, client_options=client_options, timeout_s=timeout_s),
        data_dir=data_dir,
        bootstrap_servers=cluster.bootstrap_servers,
        version=cluster.version,
        pids=tuple(identity.pid for identity in found.values() if identity),
        log_files=tuple(node.log_file for node in cluster.nodes),
        nodes=tuple(
            NodeStatus(node.node_id, node.port, identity.pid if identity else None) for node, identity in found.items()
        ),
    )

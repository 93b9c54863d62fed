"""The data folder of a local Kafka: what it remembers from one start to the next, and who may change it now."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from onceflow.broker.config import HOST, Cluster, Node
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.host.file_lock import locked

PORTS = range(20_000, 32_000)
_given: set[int] = set()


def default_data_dir() -> Path:
    """``$ONCEFLOW_HOME/broker``, else ``~/.local/share/onceflow/broker``."""
    home = os.environ.get("ONCEFLOW_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".local" / "share" / "onceflow"
    return base / "broker"


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody listens on now, all different, and none that was given out before.

    They lie below the range from which systems take the ports of outgoing connections: a broker that is
    stopped must find its port free when it comes back.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                _given.update(found)
                return found
            if port in _given:  # whoever asked for it may not listen yet
                continue
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


class Folder:
    """``broker.json`` and the lock of one data folder.

    The file holds what must not change from one start to the next: cluster id, version, nodes with their
    ports, and the feature levels that were asked for when the storage was laid out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "broker.json"

    def exists(self) -> bool:
        """Whether a broker was started in it."""
        return self._file.exists()

    def read(self) -> Cluster | None:
        """The cluster, without options of the caller; None before the first start.

        Raises:
            OptionError: the file is there and cannot be read.
        """
        try:
            fields = json.loads(self._file.read_text())
            nodes = tuple(
                Node(n["node_id"], self.path / n["folder"], n["port"], n["controller_port"]) for n in fields["nodes"]
            )
            return Cluster(fields["cluster_id"], fields["version"], nodes, features=dict(fields.get("features", {})))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{self._file} cannot be read: {type(error).__name__}.",
                next_step="Remove the folder to begin anew, or give another one.",
            ) from error

    def write(self, cluster: Cluster) -> None:
        """Remember this cluster; under the lock."""
        fields = {
            "cluster_id": cluster.cluster_id,
            "version": cluster.version,
            "features": dict(cluster.features),
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
        scratch = self._file.with_suffix(".json.tmp")
        scratch.write_text(json.dumps(fields, indent=2) + "\n")
        scratch.replace(self._file)

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """One start or stop at a time per folder, over all processes."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(
            self.path / "lock",
            timeout_s,
            busy=f"Another process has been at {self.path} for {timeout_s:g} s.",
            next_step="See what that process waits for, then try again.",
        ):
            yield

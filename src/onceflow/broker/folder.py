"""The data folder of a local Kafka: the settings that are kept between starts, and a lock for changes."""

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
from onceflow.host.private_folders import in_home, make_private

PORTS = range(20_000, 32_000)
_given: set[int] = set()


def default_data_dir() -> Path:
    """``$ONCEFLOW_HOME/broker``, else ``~/.local/share/onceflow/broker``, see `in_home`."""
    home = os.environ.get("ONCEFLOW_HOME")
    base = Path(home).expanduser() if home else in_home(".local", "share", "onceflow")
    return base / "broker"


def free_ports(count: int) -> list[int]:
    """Different ports on 127.0.0.1 on which no process listens now. No port is returned twice in a process.

    They are below the range that operating systems use for outgoing connections, so that the port of a stopped broker
    is still free when the broker starts again.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                _given.update(found)
                return found
            if port in _given:  # the broker that gets it may not listen yet
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

    The file has everything that must not change between starts: cluster id, version, nodes with their ports, and the
    feature levels with which the storage was formatted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "broker.json"

    def exists(self) -> bool:
        """Whether a broker was ever started with this folder."""
        return self._file.exists()

    def read(self) -> Cluster | None:
        """The cluster in ``broker.json``, without options of the caller. None before the first start.

        Raises:
            OptionError: the file exists and cannot be read.
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
                next_step="Remove the folder to start with an empty one, or give another folder.",
            ) from error

    def write(self, cluster: Cluster) -> None:
        """Write the cluster to ``broker.json``. The caller must hold the lock."""
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
        """Hold the lock of the folder: only one process at a time may start or stop brokers in it."""
        make_private(self.path)
        with locked(
            self.path / "lock",
            timeout_s,
            busy=f"Another process has held the lock of {self.path} for {timeout_s:g} s.",
            next_step="Find out what that process waits for, then try again.",
        ):
            yield

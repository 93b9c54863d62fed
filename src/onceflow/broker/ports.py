"""Checks whether the ports of a node are free, and finds the process that uses one."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onceflow.broker.config import HOST, Cluster, Node, parse_listeners, server_properties
from onceflow.broker.folder import Folder
from onceflow.broker.metadata import metadata_reader
from onceflow.broker.process import BROKER_CLASS
from onceflow.errors import EnvironmentUnusableError, OnceflowError

_ANSWER_S = 3.0
_LISTENING = "0A"  # state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Holder:
    """A process that listens on a port.

    Args:
        folder: its data folder, if it is a local broker of onceflow.
    """

    pid: int
    name: str
    folder: Path | None


def refuse_taken(cluster: Cluster, nodes: Iterable[Node]) -> None:
    """Check that these nodes, which do not run, will be able to listen on their ports.

    Raises:
        EnvironmentUnusableError: another process listens on a port, or this user may not use it.
    """
    for node in nodes:
        for host, port in _listened_to(cluster, node):
            problem = _problem(host, port)
            if problem == errno.EADDRINUSE:
                raise _taken(port, f"{HOST if host in ('', '0.0.0.0', '::') else host}:{port}")
            if problem == errno.EACCES:
                raise EnvironmentUnusableError(
                    f"Port {port} cannot be used: permission denied.", next_step="Give a port above 1023."
                )


def holder_of(port: int) -> Holder | None:
    """The process that listens on this port. None: not found. It is found only on Linux, if it belongs to this user."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if any(_target(link) in sockets for link in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return Holder(int(folder.name), Path(words[0]).name, _data_folder(words))
    return None


def _listened_to(cluster: Cluster, node: Node) -> Iterator[tuple[str, int]]:
    for _, address in parse_listeners(server_properties(cluster, node)["listeners"]):
        host, _, port = address.rpartition(":")
        if port.isdigit() and int(port):  # 0 means any free port
            yield host.strip("[]"), int(port)


def _problem(host: str, port: int) -> int | None:
    """Why a process cannot listen there now, as an errno: EADDRINUSE or EACCES. Kafka itself reports other problems."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as candidate:
            # As Kafka does, so that connections of a broker that has just stopped (TIME_WAIT) do not matter.
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(address)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return error.errno
    return None


def _taken(port: int, address: str) -> EnvironmentUnusableError:
    holder = holder_of(port)
    if holder is not None and holder.folder is not None:
        return EnvironmentUnusableError(
            f"Port {port} is in use: another broker of onceflow listens there (folder {holder.folder}, "
            f"process {holder.pid}).",
            next_step="Use that one, give another port, or stop it: "
            f"`onceflow broker stop --data-dir {shlex.quote(str(holder.folder))}`.",
        )
    by = "" if holder is None else f" by process {holder.pid} ({holder.name})"
    cluster_id = _cluster_id(address)
    if cluster_id:
        return EnvironmentUnusableError(
            f"Port {port} is in use{by}: a broker of the Kafka cluster {cluster_id} answers there.",
            next_step=f"Use that one, at {address}, or give another port.",
        )
    return EnvironmentUnusableError(
        f"Port {port}: address in use{by}. What listens there does not answer as a Kafka broker.",
        next_step="Give another port, or end the process that uses this one.",
    )


def _cluster_id(address: str) -> str | None:
    with metadata_reader(address, {}) as reader:
        try:
            return reader.read(_ANSWER_S).cluster_id
        except OnceflowError:
            return None


def _inodes(port: int) -> set[str]:
    """The inodes of the sockets that listen on this port."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""


def _data_folder(words: list[str]) -> Path | None:
    """The data folder of a local broker, from its command line. The last argument is
    ``<data folder>/node-1/server.properties``."""
    if BROKER_CLASS not in words:
        return None
    folder = Path(words[words.index(BROKER_CLASS) + 1]).parent.parent
    return folder if Folder(folder).exists() else None

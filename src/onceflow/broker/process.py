"""Kafka processes: formats their storage, starts them, finds them again, waits until they respond, stops them.

The pid file of a node has the pid *and* the start time of the process: after a reboot or a crash the pid may belong to
another process, which must never be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onceflow.broker.config import Cluster, Node, render_properties, server_properties
from onceflow.broker.metadata import MetadataReader, metadata_reader
from onceflow.errors import BrokerUnreachableError, EnvironmentUnusableError, OnceflowError
from onceflow.host.jars import kafka_broker_classpath
from onceflow.host.java import find_java
from onceflow.host.private_folders import make_private

#: The main class of a broker's process; its argument is the path of server.properties.
BROKER_CLASS = "kafka.Kafka"
POLL_S = 0.05
FORMAT_TIMEOUT_S = 60
LOG_TAIL_LINES = 15

# These references keep Popen objects alive: Popen warns if it is garbage-collected while its process runs. A broker may
# outlive the process that started it. If it ends before, that process must reap it.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, identified so that it cannot be confused with a later one with the same pid."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        """Whether this process still runs. A zombie does not count as running."""
        alive = _start_time(self.pid) == self.started
        child = _children.get(self.pid)
        if child is not None and child.poll() is not None:
            _children.pop(self.pid, None)
            return False
        return alive

    def send(self, signal_number: int) -> None:
        """Send a signal to this process, if it still runs."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended. Returns False if it has not within this time."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def running(node: Node) -> ProcessIdentity | None:
    """The process of this node, or None if it does not run."""
    try:
        fields = json.loads(node.pid_file.read_text())
        identity = ProcessIdentity(int(fields["pid"]), str(fields["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return identity if identity.is_alive() else None


def format_storage(cluster: Cluster, node: Node) -> None:
    """Format the data folder with Kafka's storage tool. Does nothing if it is formatted already."""
    if (node.kafka_data_dir / "meta.properties").exists():
        return
    make_private(node.kafka_data_dir)
    # This JVM runs for about a second, so fast compilation matters more than fast code. Not for the broker's own JVM.
    command = _java(cluster, heap="256m", flags=["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"])
    command += ["kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", cluster.cluster_id]
    command += ["-c", str(node.properties_file)]
    for name, level in sorted(cluster.features.items()):
        command += ["--feature", f"{name}={level}"]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FORMAT_TIMEOUT_S,
            check=False,
            env={**os.environ, **_locale(cluster, node, command)},
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusableError(
            f"Kafka's storage tool did not end within {FORMAT_TIMEOUT_S} s.",
            next_step=f"Check the disk of {node.data_dir}, and try again.",
        ) from None
    if answer.returncode != 0:
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        raise EnvironmentUnusableError(
            f"Kafka's storage tool could not format {node.kafka_data_dir}.",
            detail="\n".join(lines[-LOG_TAIL_LINES:]),
            next_step="See the detail; if the folder holds another cluster's data, choose another one.",
        )


def laid_out_id(node: Node) -> str | None:
    """The id of the cluster to which the node's data belongs; None if it is not formatted yet."""
    try:
        lines = (node.kafka_data_dir / "meta.properties").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("cluster.id=")), None)


def write_properties(cluster: Cluster, node: Node) -> None:
    """Write the node's server.properties. Only the owner may read it, because it may contain passwords."""
    make_private(node.data_dir)
    text = render_properties(server_properties(cluster, node))
    owned = os.open(node.properties_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(owned, "w", encoding="ascii") as handle:
        handle.write(text)


def spawn(cluster: Cluster, node: Node, *, heap: str, environment: Mapping[str, str]) -> ProcessIdentity:
    """Start the node's process and write its pid file. Returns before the node is ready."""
    if node.log_file.exists():
        node.log_file.replace(node.log_file.with_suffix(".log.1"))
    command = [*_java(cluster, heap=heap, flags=["-XX:+UseG1GC", "-Djava.awt.headless=true"])]
    command += [BROKER_CLASS, str(node.properties_file)]
    with node.log_file.open("wb") as log_handle:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_handle,
            stderr=subprocess.STDOUT,
            cwd=node.data_dir,
            env={**os.environ, **environment, **_locale(cluster, node, command)},
            # In its own session, so that Ctrl-C in the terminal does not end the broker.
            start_new_session=True,
        )
    _children[child.pid] = child
    identity = ProcessIdentity(child.pid, _start_time(child.pid) or "")
    scratch = node.pid_file.with_suffix(".tmp")
    scratch.write_text(json.dumps({"pid": identity.pid, "started": identity.started}))
    scratch.replace(node.pid_file)
    return identity


def _locale(cluster: Cluster, node: Node, command: Sequence[str]) -> dict[str, str]:
    """Java cannot open files whose names are not in the charset of its locale, and in a container that is often C."""
    named = (*command, *server_properties(cluster, node).values())
    return {} if all(each.isascii() for each in named) else {"LC_ALL": "C.UTF-8"}


def stop(nodes: Sequence[Node], *, timeout_s: float) -> bool:
    """Send SIGTERM to all nodes, and SIGKILL to those that have not ended in time. Returns whether any was running."""
    found = {node: identity for node in nodes if (identity := running(node))}
    for identity in found.values():
        identity.send(signal.SIGTERM)
        identity.send(signal.SIGCONT)  # a paused process handles SIGTERM only after SIGCONT
    deadline = time.monotonic() + timeout_s
    waiting = dict(found)
    while waiting:
        waiting = {node: identity for node, identity in waiting.items() if identity.is_alive()}
        if time.monotonic() > deadline:
            kill(list(waiting))
            break
        if len(waiting) <= len(nodes) // 2:
            # Without a majority no other controller can be elected. A node whose broker has closed its logs would only
            # wait 5 s more for that, so it is killed.
            kill([node for node in waiting if node.clean_shutdown_file.exists()])
        time.sleep(POLL_S)
    for node in nodes:
        node.pid_file.unlink(missing_ok=True)
    for pid, child in list(_children.items()):  # also reap nodes that another process has stopped
        if child.poll() is not None:
            _children.pop(pid, None)
    return bool(found)


def kill(nodes: Sequence[Node]) -> bool:
    """Send SIGKILL, to simulate a crash: nothing is flushed, no leadership is given up. Returns whether any was
    running."""
    found = [identity for node in nodes if (identity := running(node))]
    for identity in found:
        identity.send(signal.SIGKILL)
    for identity in found:
        identity.wait(timeout_s=10)
    for node in nodes:
        node.pid_file.unlink(missing_ok=True)
    return bool(found)


def signal_node(node: Node, signal_number: int) -> bool:
    """Send a signal to the node's process. Returns whether it runs."""
    identity = running(node)
    if identity is not None:
        identity.send(signal_number)
    return identity is not None


def wait_until_ready(
    cluster: Cluster,
    *,
    client_options: Mapping[str, Any],
    timeout_s: float,
    still_running: Callable[[], bool],
    nodes: Sequence[Node] = (),
) -> None:
    """Wait until every node is in the metadata that a client gets.

    Args:
        nodes: the nodes to ask and to wait for, if some of the others do not run; by default all.

    Raises:
        EnvironmentUnusableError: a process ended meanwhile, and the detail has the end of its log; or brokers of
            another cluster respond.
        BrokerUnreachableError: no response in time, or not all nodes were in it.
    """
    deadline = time.monotonic() + timeout_s
    problem = "nothing listens"
    wanted = nodes or cluster.nodes
    addresses = [cluster.client_address(node) for node in wanted]
    with contextlib.ExitStack() as stack:
        reader: MetadataReader | None = None
        while time.monotonic() < deadline:
            if not still_running():
                raise EnvironmentUnusableError(
                    "Kafka ended while it started.",
                    detail=log_tail(cluster),
                    next_step="See the log: " + ", ".join(str(node.log_file) for node in cluster.nodes),
                )
            # A TCP connection first: it fails at once, while a Kafka client would wait between attempts, and log them.
            if reader is None and not all(map(_accepts, addresses)):
                time.sleep(POLL_S)
                continue
            if reader is None:
                reader = stack.enter_context(metadata_reader(",".join(addresses), client_options))
            left_s = min(5, deadline - time.monotonic())
            problem, stranger = _metadata_problem(reader, cluster, wanted, timeout_s=left_s)
            if stranger:
                raise EnvironmentUnusableError(
                    f"Brokers of another Kafka cluster, {stranger}, answer at {','.join(addresses)}.",
                    detail=log_tail(cluster),
                    next_step="Give another port, or stop those brokers.",
                )
            if not problem:
                return
            time.sleep(POLL_S)
    raise BrokerUnreachableError(
        f"Kafka at {','.join(addresses)} was not ready within {timeout_s:g} s.",
        detail=f"{problem}\n{log_tail(cluster)}",
        next_step="With listeners that need TLS or SASL, give client_options; else see the log: "
        + ", ".join(str(node.log_file) for node in cluster.nodes),
    )


def answers(cluster: Cluster, *, client_options: Mapping[str, Any], timeout_s: float) -> bool:
    """Whether the cluster responds to a metadata request now, with all its nodes."""
    if not all(map(_accepts, cluster.bootstrap_servers.split(","))):
        return False
    with metadata_reader(cluster.bootstrap_servers, client_options) as reader:
        return not any(_metadata_problem(reader, cluster, cluster.nodes, timeout_s=timeout_s))


def log_tail(cluster: Cluster) -> str:
    """The last lines of the log of every node."""
    tails = []
    for node in cluster.nodes:
        with contextlib.suppress(OSError):
            tails += node.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(tails)


def _metadata_problem(
    reader: MetadataReader, cluster: Cluster, nodes: Sequence[Node], *, timeout_s: float
) -> tuple[str, str | None]:
    """Why the nodes are not ready, or ''; and the id of the cluster if another one responds."""
    try:
        answer = reader.read(timeout_s)
    except OnceflowError as error:
        return f"{error.what}: {error.detail}", None
    if answer.cluster_id is None:
        return "the response has no cluster id", None
    if answer.cluster_id != cluster.cluster_id:
        return "another cluster answers", answer.cluster_id
    missing = [str(node.node_id) for node in nodes if node.node_id not in answer.nodes]
    return f"not in the cluster: node {', '.join(missing)}" if missing else "", None


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except OSError:
        return False


def _java(cluster: Cluster, *, heap: str, flags: list[str]) -> list[str]:
    classpath = os.pathsep.join(map(str, kafka_broker_classpath(cluster.version)))
    return [
        str(find_java()),
        f"-Xmx{heap}",
        *flags,
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
        "-cp",
        classpath,
    ]


def _start_time(pid: int) -> str | None:
    """The start time of a process, as a text that is the same at every call. None: it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_time_by_ps(pid)
    except OSError:  # it ended meanwhile
        return None
    # The name in parentheses may itself have spaces and parentheses. After it: state (field 3) ... starttime
    # (22).
    fields = stat.rpartition(")")[2].split()
    state, threads = fields[0], int(fields[17])
    # If a JVM is killed, its first thread is a zombie before the other threads have ended, and these still hold the
    # ports.
    return None if state == "X" or (state == "Z" and threads <= 1) else fields[19]


def _start_time_by_ps(pid: int) -> str | None:
    # macOS has no /proc.
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = answer.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None

"""Ports that a broker is to listen on: who holds one is said before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceflow.broker import LocalBroker, ports, process
from onceflow.broker.config import Node
from onceflow.broker.folder import Folder, free_ports
from onceflow.errors import EnvironmentUnusableError


@pytest.fixture
def held() -> Iterator[int]:
    """A port that this process holds; it is no Kafka."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_ANSWER_S", 0.2)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise EnvironmentUnusableError("It would have been started.")

    monkeypatch.setattr(process, "format_storage", spawn)


@pytest.mark.parametrize("option", ["port", "controller_port"])
def test_a_port_of_something_else(tmp_path: Path, held: int, option: str, no_processes: None) -> None:
    broker = LocalBroker(tmp_path / "broker", **{option: held})  # type: ignore[arg-type]
    with pytest.raises(EnvironmentUnusableError, match=f"Port {held}: address in use") as caught:
        broker.start()
    assert "does not answer as a Kafka broker" in caught.value.what
    if sys.platform == "linux":
        assert f"process {os.getpid()}" in caught.value.what
    assert Folder(broker.data_dir).read() is None


def is_free(port: int) -> bool:
    """Whether no process listens on it, such as the broker of other tests."""
    with socket.socket() as candidate:
        return candidate.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_on_all_addresses_and_a_later_node(tmp_path: Path, no_processes: None) -> None:
    first = next(port for port in iter(lambda: free_ports(1)[0], 0) if is_free(port + 1) and is_free(port + 2))
    with (
        socket.create_server(("", first + 2), family=socket.AF_INET),
        pytest.raises(EnvironmentUnusableError, match=f"Port {first + 2}: address in use"),
    ):
        LocalBroker(tmp_path / "broker", port=first, nodes=3).start()


def test_ports_of_a_start_that_failed_are_forgotten(tmp_path: Path, no_processes: None) -> None:
    port = free_ports(1)[0]
    with pytest.raises(EnvironmentUnusableError, match="would have been started"):
        LocalBroker(tmp_path / "broker", port=port).start()
    assert LocalBroker(tmp_path / "broker").cluster.nodes[0].port != port
    before = LocalBroker(tmp_path / "broker").cluster
    with pytest.raises(EnvironmentUnusableError, match="would have been started"):
        LocalBroker(tmp_path / "broker", port=port).start()
    assert LocalBroker(tmp_path / "broker").cluster == before


def test_connections_of_a_broker_that_has_stopped_do_not_count(tmp_path: Path, no_processes: None) -> None:
    """TIME_WAIT is on the side that closes first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    with pytest.raises(EnvironmentUnusableError, match="would have been started"):
        LocalBroker(tmp_path / "broker", port=port).start()


@pytest.mark.skipif(sys.platform != "linux", reason="who holds a port is read from /proc")
def test_another_broker_of_onceflow_is_known_by_its_command_line(tmp_path: Path, no_processes: None) -> None:
    other = tmp_path / "the other"
    node = Node(1, other / "node-1", 1, 2)
    node.data_dir.mkdir(parents=True)
    (other / "broker.json").touch()
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", code, process.BROKER_CLASS, str(node.properties_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            with pytest.raises(EnvironmentUnusableError, match=f"Port {port} is in use: another broker") as caught:
                LocalBroker(tmp_path / "broker", port=port).start()
        finally:
            child.communicate("\n", timeout=30)
    assert f"(folder {other}, process {child.pid})" in caught.value.what
    assert f"`onceflow broker stop --data-dir '{other}'`" in caught.value.next_step


def test_data_keep_their_cluster_id(tmp_path: Path) -> None:
    """Also when only broker.json was removed: the brokers would answer with another id than the one expected."""
    data = tmp_path / "broker" / "node-1" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("#\nnode.id=1\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\nversion=1\n")
    assert LocalBroker(tmp_path / "broker")._invented().cluster_id == "AAAAAAAAAAAAAAAAAAAAAA"

"""The local Kafka as a process: start, find again, crash, come back, stop; by API and by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer

from onceflow.broker import LocalBroker, ports, process
from onceflow.broker.config import Cluster, Node, new_cluster_id
from onceflow.broker.folder import Folder
from onceflow.broker.process import ProcessIdentity
from onceflow.cli.main import cli
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.testing.broker import BACK_SOON, create_topic
from onceflow_workshop.testing.librdkafka import admin_client

pytestmark = pytest.mark.integration


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    local = LocalBroker(tmp_path / "broker", heap="512m", properties=BACK_SOON)
    yield local
    local.stop()


def produce(bootstrap_servers: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def first_value(bootstrap_servers: str, topic: str) -> bytes | None:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        value = message.value() if message is not None and message.error() is None else None
        return value if isinstance(value, bytes) else None
    finally:
        consumer.close()


# Its data and ports are those of test_broker_killed_in_mid_batch, too.
@pytest.mark.long
def test_a_killed_broker_comes_back_with_its_data_and_ports(broker: LocalBroker) -> None:
    assert broker.start() is True
    assert broker.start() is False
    before = broker.status()
    assert (before.running, before.ready) == (True, True)
    create_topic(broker.bootstrap_servers, "kept", partitions=1)
    produce(broker.bootstrap_servers, "kept", b"precious")

    assert broker.kill() is True
    assert broker.status().running is False
    assert broker.kill() is False

    again = LocalBroker(broker.data_dir, heap="512m", properties=BACK_SOON)
    assert again.start() is True
    assert again.bootstrap_servers == before.bootstrap_servers
    assert again.status().pids != before.pids
    assert first_value(again.bootstrap_servers, "kept") == b"precious"

    assert again.stop() is True
    assert again.stop() is False
    assert broker.status().ready is False


@pytest.mark.long
def test_a_folder_of_a_broker_that_was_stopped(broker: LocalBroker) -> None:
    """It keeps its version, and a process that only has the pid of the broker is left alone."""
    broker.start()
    node = broker.cluster.nodes[0]
    broker.stop()
    with pytest.raises(OptionError, match=r"not 3\.9\.2"):
        LocalBroker(broker.data_dir, version="3.9.2").start()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        node.pid_file.write_text(json.dumps({"pid": stranger.pid, "started": "1"}))
        assert broker.status().running is False
        assert broker.stop() is False
        assert broker.kill() is False
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n", timeout=30)


def test_an_unusable_property_is_reported_with_the_log(tmp_path: Path) -> None:
    broker = LocalBroker(tmp_path / "broker", heap="512m", properties={"num.io.threads": "none"})
    with pytest.raises(EnvironmentUnusableError) as caught:
        broker.start()
    assert "num.io.threads" in caught.value.detail
    assert broker.status().running is False


@pytest.mark.long
def test_a_context_manager_stops_what_it_started(tmp_path: Path) -> None:
    with LocalBroker(
        tmp_path / "broker",
        heap="512m",
        properties={
            "listeners": "INSIDE://127.0.0.1:{port},OUTSIDE://127.0.0.1:0",
            "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT",
        },
        client_listener="INSIDE",
    ) as broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{broker.cluster.nodes[0].port}"
        assert broker.status().ready
    assert broker.status().running is False


def test_commands(tmp_path: Path) -> None:
    """In a folder whose name is not ASCII, with the locale of most containers."""
    data_dir = tmp_path / "daten-für \U0001f600"

    def command(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        options = ["--data-dir", str(data_dir), "--json", *arguments]
        answer = subprocess.run(
            [sys.executable, "-m", "onceflow.cli.main", "broker", name, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        assert answer.stderr == ""
        return answer.returncode, json.loads(answer.stdout)

    code, fields = command("status")
    assert (code, fields["running"]) == (1, False)
    try:
        code, fields = command("start", "--heap", "512m")
        assert (code, fields["started"], fields["ready"]) == (0, True, True)
        pid = fields["pids"][0]
        code, fields = command("start")
        assert (code, fields["started"], fields["pids"]) == (0, False, [pid])
        code, fields = command("status")
        assert (code, fields["ready"], fields["version"]) == (0, True, "4.3.1")
        (properties,) = tmp_path.rglob("meta.properties")
        assert data_dir in properties.parents
    finally:
        code, fields = command("stop")
    assert (code, fields["stopped"], fields["running"]) == (0, True, False)
    code, fields = command("stop")
    assert (code, fields["stopped"]) == (0, False)


def test_a_port_that_another_broker_holds(
    onceflow_broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started, and the port is not remembered."""
    port = int(onceflow_broker.partition(",")[0].rpartition(":")[2])
    with admin_client(onceflow_broker, {}) as admin:
        cluster_id = admin.list_topics(timeout=30).cluster_id
    mine = LocalBroker(tmp_path / "mine", port=port)
    arguments = ["broker", "start", "--data-dir", str(mine.data_dir), "--port", str(port)]
    told = CliRunner().invoke(cli, arguments)
    assert isinstance(told.exception, EnvironmentUnusableError)
    assert f"Port {port} is in use" in str(told.exception)
    if sys.platform == "linux" and "ONCEFLOW_TEST_BOOTSTRAP" not in os.environ:
        assert "another broker of onceflow listens there (folder " in str(told.exception)
    assert not mine.data_dir.exists()

    monkeypatch.setattr(ports, "holder_of", lambda port: None)
    mine.data_dir.mkdir()  # of somebody who has made it
    with pytest.raises(EnvironmentUnusableError, match=f"a broker of the Kafka cluster {cluster_id} answers there"):
        mine.start()
    assert not mine.status().pids
    assert Folder(mine.data_dir).read() is None


def test_brokers_of_another_cluster_are_not_taken_for_ones_own(onceflow_broker: str, tmp_path: Path) -> None:
    """Whoever answers at the port of a node that is still starting."""
    port = int(onceflow_broker.partition(",")[0].rpartition(":")[2])
    mine = Cluster(new_cluster_id(), "4.3.1", (Node(1, tmp_path, port, port),))
    with pytest.raises(EnvironmentUnusableError, match="Brokers of another Kafka cluster"):
        process.wait_until_ready(mine, client_options={}, timeout_s=30, still_running=lambda: True)
    assert not process.answers(mine, client_options={}, timeout_s=30)


def test_identities_of_processes_tell_generations_apart() -> None:
    started = process._start_time(os.getpid())
    assert started is not None
    assert ProcessIdentity(os.getpid(), started).is_alive()
    assert not ProcessIdentity(os.getpid(), "1").is_alive()


def test_fixtures_share_a_broker_and_make_topics(onceflow_broker: str, make_topic: Any) -> None:
    first, second = make_topic("orders", partitions=2, cleanup_policy="compact"), make_topic("orders")
    assert first != second
    produce(onceflow_broker, second, b"hello")
    assert first_value(onceflow_broker, second) == b"hello"

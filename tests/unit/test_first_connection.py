"""A start with a wrong server says what it tries, and gives up before its deadline; a slow server has its time."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from onceflow.broker.folder import free_ports
from onceflow.client import first_connection
from onceflow.client.addresses import Address
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.first_connection import Wait
from onceflow.client.settings import ClientSettings
from onceflow.errors import BrokerUnreachableError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_connection, "_TELL_AFTER_S", 0.1)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def connect(servers: str, *, seconds: float, refused_s: float | None) -> tuple[BrokerUnreachableError, float]:
    """What the start ended with, and after how many seconds."""
    cluster = Cluster(ClientSettings(servers), refused_s=refused_s)
    began = time.monotonic()
    try:
        with pytest.raises(BrokerUnreachableError) as caught:
            cluster.connect(Deadline(seconds, "starting flow orders"))
        return caught.value, time.monotonic() - began
    finally:
        cluster.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "onceflow"]


def test_refused_by_all(caplog: pytest.LogCaptureFixture) -> None:
    first, second = closed(), closed()
    error, seconds = connect(f"{first},{second}", seconds=30, refused_s=0.4)
    assert 0.4 <= seconds < 10
    assert f"No broker answered at {first},{second} within 0.4 s" in error.what
    assert f"{first}: [Errno {errno.ECONNREFUSED}] Connection refused" in error.detail
    assert f"{second}: [Errno {errno.ECONNREFUSED}] Connection refused" in error.detail
    assert "connect_timeout" in error.next_step
    (line,) = lines(caplog)
    assert line.startswith("starting flow orders: no broker has answered for ")
    assert f"{first}: [Errno {errno.ECONNREFUSED}] Connection refused" in line


def test_a_name_that_does_not_resolve() -> None:
    # RFC 6761: there is never a host of this name.
    error, seconds = connect("broker.invalid:9092", seconds=60, refused_s=0.3)
    assert seconds < 45
    assert "broker.invalid:9092: the name broker.invalid does not resolve" in error.detail


def test_a_silent_server_has_until_the_deadline(caplog: pytest.LogCaptureFixture, silent: str) -> None:
    refusing = closed()
    error, seconds = connect(f"{refusing},{silent}", seconds=0.8, refused_s=0.3)
    assert seconds >= 0.8
    assert f"{silent} accepts connections but did not complete the Kafka handshake" in error.detail
    assert f"{refusing}: [Errno {errno.ECONNREFUSED}] Connection refused" in error.detail
    # It comes in the middle of the first attempt.
    assert f"{silent}: " in lines(caplog)[0]


def test_a_server_that_comes_too_late(silent: str) -> None:
    """It was refused at the last attempt, so it is not said that it may want another protocol."""
    host, port = silent.rsplit(":", 1)
    address = Address(host, int(port))
    wait = Wait(ClientSettings(silent), Deadline(1, "starting flow orders"), refused_s=None)
    wait.over([address])
    wait.failed(address, "KafkaConnectionError: 111 ECONNREFUSED")
    assert f"{silent} has refused connections, and accepts them now" in wait.error("within 1 s").detail
    wait.failed(address, None)
    assert "accepts them now" in wait.error("within 1 s").detail
    wait.failed(address, "KafkaConnectionError: socket disconnected")
    assert "did not complete the Kafka handshake" in wait.error("within 1 s").detail


def test_connections_of_a_running_flow_have_until_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    _, seconds = connect(closed(), seconds=0.4, refused_s=None)
    assert seconds >= 0.4
    assert lines(caplog) == []


def test_a_server_that_comes_is_tried_at_once() -> None:
    """kafka-python alone does not look again for as long as it was refused before, up to half a minute."""
    port = free_ports(1)[0]
    patient = {"reconnect.backoff.ms": 20_000, "reconnect.backoff.max.ms": 20_000}
    cluster = Cluster(ClientSettings(f"127.0.0.1:{port}", patient), refused_s=30)
    tried = threading.Event()

    def come() -> None:
        time.sleep(0.2)  # it is refused meanwhile
        with contextlib.suppress(TimeoutError), socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(5)
            while not tried.is_set():
                link, _ = server.accept()
                with link:
                    if link.recv(1):  # a plain connection says nothing
                        tried.set()

    thread = threading.Thread(target=come)
    thread.start()
    # What comes is no broker: the time is over when it was tried.
    deadline = Deadline(20, "a test", clock=lambda: time.monotonic() + 20 * tried.is_set())
    try:
        with pytest.raises(BrokerUnreachableError):
            cluster.connect(deadline)
        assert tried.is_set()
    finally:
        thread.join()
        cluster.close()

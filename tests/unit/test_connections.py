"""Logins at a broker made of a few lines, which can do at every time what a real one does now and then."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onceflow.client import connections
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.event_loop import EventLoop
from onceflow.client.settings import ClientSettings
from onceflow.errors import AuthenticationFailedError, BrokerUnreachableError
from onceflow.testing.waiting import wait_until

_API_VERSIONS, _METADATA, _HANDSHAKE, _AUTHENTICATE = 18, 3, 17, 36
_REFUSAL = b'{"status":"invalid_token"}'


class Doorman:
    """Refuses every login: it answers and closes the connection, and both arrive together."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        is_last = False
        while not is_last:
            head = connection.recv(4, socket.MSG_WAITALL)
            if len(head) < 4:
                return
            request = connection.recv(struct.unpack(">i", head)[0], socket.MSG_WAITALL)
            api, version, correlation = struct.unpack(">hhi", request[:8])
            body, is_last = self._answer(api, version, request)
            answer = struct.pack(">i", correlation) + body
            connection.sendall(struct.pack(">i", len(answer)) + answer)

    def _answer(self, api: int, version: int, request: bytes) -> tuple[bytes, bool]:
        if api == _API_VERSIONS and version > 0:
            return struct.pack(">hihhh", 35, 1, _API_VERSIONS, 0, 0), False
        if api == _API_VERSIONS:
            known = [(_API_VERSIONS, 0), (_HANDSHAKE, 1), (_AUTHENTICATE, 1), (_METADATA, 8)]
            return struct.pack(">hi", 0, len(known)) + b"".join(struct.pack(">hhh", k, 0, v) for k, v in known), False
        if api == _HANDSHAKE:
            return struct.pack(">hih", 0, 1, 11) + b"OAUTHBEARER", False
        self.shown.append(request.partition(b"auth=Bearer ")[2].rstrip(b"\x01"))
        if request.endswith(b"\x00\x01\x01"):  # the one byte that acknowledges the error
            self.shown.pop()
            time.sleep(0.05)
            return struct.pack(">hh", 58, len(_REFUSAL)) + _REFUSAL + struct.pack(">iq", 0, 0), True
        return struct.pack(">hhi", 0, -1, len(_REFUSAL)) + _REFUSAL + struct.pack(">q", 0), False


@pytest.fixture
def doorman() -> Iterator[Doorman]:
    doorman = Doorman()
    yield doorman
    doorman.close()


@pytest.fixture
def connecting(doorman: Doorman, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], Cluster]]:
    """``connecting(f)``: a cluster whose tokens are what ``f`` returns."""
    made: list[Cluster] = []

    def make(function: Callable[[], Any]) -> Cluster:
        module = ModuleType(f"tokens_of_{id(doorman)}")
        module.token = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        options = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "onceflow.token.provider": f"{module.__name__}:token",
        }
        made.append(Cluster(ClientSettings(doorman.address, options)))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def test_a_refusal_is_read_though_the_connection_ends_with_it(
    doorman: Doorman, connecting: Callable[..., Cluster]
) -> None:
    """kafka-python alone takes it for a broken connection and tries again until the deadline."""
    given = iter(["first", "second", "third"])
    with pytest.raises(AuthenticationFailedError, match="refused the credentials") as caught:
        connecting(lambda: (next(given), 60)).connect(Deadline(20, "a test connects"))
    assert "invalid_token" in caught.value.detail
    assert "issuer, audience" in caught.value.next_step
    assert doorman.shown == [b"first", b"second"], "one try with a new token"


def test_tokens_that_are_refused_by_their_source_are_not_tried(
    doorman: Doorman, connecting: Callable[..., Cluster]
) -> None:
    with pytest.raises(AuthenticationFailedError, match="is no bearer token"):
        connecting(lambda: ("Bearer x", 60)).connect(Deadline(20, "a test connects"))
    assert doorman.shown == []


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_broker_that_accepts_and_says_nothing(protocol: str) -> None:
    """As one that is stopped (SIGSTOP): the kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        cluster = Cluster(ClientSettings(address, {"security.protocol": protocol}))
        began = time.monotonic()
        try:
            with pytest.raises(BrokerUnreachableError):
                cluster.connect(Deadline(0.5, "a test connects"))
        finally:
            cluster.close()
        assert time.monotonic() - began < 20


def test_the_end_of_a_process_leaves_a_loop_alone_that_a_daemon_thread_runs() -> None:
    """Else its finalizer would print a traceback behind all that the program has printed."""
    net = EventLoop()
    closed: list[bool] = []
    manager: Any = SimpleNamespace(closed=False, _conns={}, close=lambda: closed.append(True))
    runs = threading.Thread(target=lambda: net.poll(timeout_ms=60_000), daemon=True)
    runs.start()
    wait_until(lambda: net.is_run_elsewhere, 30, "the thread runs the loop")
    connections._close(manager, net)
    assert not closed
    net._stop = True
    net.wakeup()
    runs.join(30)
    assert not net.is_run_elsewhere
    connections._close(manager, net)
    assert closed
    assert net._closed

"""The client's own parts of kafka-python's event loop: which sockets are watched, how bytes are sent and received."""

from __future__ import annotations

import collections
import random
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError

from onceflow.client import event_loop
from onceflow.client.event_loop import EventLoop, WatchedSockets
from onceflow.client.markers import Background
from onceflow.client.transport import _TcpTransport
from onceflow.testing.waiting import wait_until

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


@pytest.fixture
def watched() -> Iterator[WatchedSockets]:
    found = WatchedSockets()
    yield found
    found.close()


def ready(watched: WatchedSockets) -> list[tuple[Any, int, Any]]:
    return [(key.fileobj, events, key.data) for key, events in watched.select(0)]


def test_a_socket_is_watched_as_wanted(watched: WatchedSockets, pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    watched.register(one, READ, "reader")
    assert ready(watched) == []
    other.send(b"x")
    assert ready(watched) == [(one, READ, "reader")]
    watched.modify(one, READ | WRITE, "both")
    assert ready(watched) == [(one, READ | WRITE, "both")]
    watched.modify(one, WRITE, "writer")
    assert ready(watched) == [(one, WRITE, "writer")]
    assert watched.get_key(one).data == "writer"
    assert list(watched.get_map()) == [one]
    watched.unregister(one)
    assert ready(watched) == []
    assert not watched.get_map()


def test_what_is_registered_again_costs_no_call(
    watched: WatchedSockets, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    other.send(b"x")
    watched.register(one, READ, 1)
    assert ready(watched) == [(one, READ, 1)]
    for name in ("register", "unregister", "modify"):
        monkeypatch.setattr(watched._system, name, None)
    watched.unregister(one)
    watched.register(one, READ, 2)
    assert ready(watched) == [(one, READ, 2)]


def test_a_number_that_belongs_to_another_socket_now(watched: WatchedSockets) -> None:
    first, first_peer = socket.socketpair()
    watched.register(first, READ, "first")
    assert ready(watched) == []
    number = first.fileno()
    watched.unregister(first)
    first.close()
    second, second_peer = socket.socketpair()
    with first_peer, second, second_peer:
        assert number in (second.fileno(), second_peer.fileno())
        for one in (second, second_peer):
            watched.register(one, READ, one.fileno())
        second.send(b"x")
        second_peer.send(b"x")
        assert sorted(data for _, _, data in ready(watched)) == sorted([second.fileno(), second_peer.fileno()])


def test_a_socket_that_is_closed_while_it_is_watched(watched: WatchedSockets) -> None:
    one, other = socket.socketpair()
    with other:
        watched.register(one, READ, None)
        one.close()
        assert ready(watched) == []
        watched.unregister(one)
        assert ready(watched) == []
        with pytest.raises(ValueError, match="is closed"):
            watched.register(one, READ, None)
        with pytest.raises(KeyError):
            watched.unregister(one)


# ---- bytes -------------------------------------------------------------------------------------------


class Loop:
    def call_soon(self, task: Any) -> None: ...


@pytest.mark.parametrize("seed", range(5))
def test_all_bytes_arrive_in_order(pair: tuple[socket.socket, socket.socket], seed: int) -> None:
    dice = random.Random(seed)
    one, other = pair
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
    sender, receiver = _TcpTransport(Loop(), one), _TcpTransport(Loop(), other)
    parts = [dice.randbytes(dice.choice([0, 1, 100, 70_000, 300_000])) for _ in range(200)]
    sender._write_buffer = collections.deque([dice.choice([bytes, bytearray, memoryview])(part) for part in parts])
    sent, received, turns = 0, bytearray(), 0
    while sender._write_buffer or len(received) < sent:
        count, error = sender._sock_send()
        assert error is None
        sent += count
        data, error = receiver._sock_recv()
        assert error is None
        received += data
        turns += 1
        assert turns < 100_000
    assert received == b"".join(parts)
    assert sent == len(received)


def test_the_end_of_a_connection_comes_behind_its_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    transport = _TcpTransport(Loop(), one)
    other.send(b"last words")
    other.close()
    assert transport._sock_recv() == (b"last words", None)
    data, error = transport._sock_recv()
    assert (data, type(error)) == (b"", KafkaConnectionError)
    transport._write_buffer.append(b"x")
    sent, error = transport._sock_send()
    assert (sent, type(error)) == (0, KafkaConnectionError)
    transport._sock = None
    assert type(transport._sock_send()[1]) is KafkaConnectionError


# ---- the loop, and a thread --------------------------------------------------------------------------


def test_another_thread_wakes_up_the_loop() -> None:
    loop = EventLoop(slow_task_threshold_secs=0)
    ran = threading.Event()
    try:
        polling = threading.Thread(target=lambda: loop.poll(timeout_ms=30_000))
        polling.start()
        wait_until(lambda: loop._poll_lock.locked(), 10, "the loop waits")
        loop.call_soon_threadsafe(ran.set)
        polling.join(10)
        assert not polling.is_alive()
        loop.poll(timeout_ms=0)
        assert ran.is_set()
        assert loop.run(lambda: 5) == 5
    finally:
        loop.close()


def test_work_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.client.markers._IDLE_S", 0.01)
    background = Background("test-background")
    done: list[tuple[int, str]] = []

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name))

    for turn in range(50):
        background.submit(lambda turn=turn: work(turn))  # type: ignore[misc]
        if turn % 10 == 0:
            wait_until(lambda: not background._runs, 10, "the thread ends")
    wait_until(lambda: len(done) == 50, 10, "all work is done")
    assert done == [(turn, "test-background") for turn in range(50)]


def test_a_long_wait_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before a call of the system is only seen when the call returns."""
    now, waits = [0.0], []
    monkeypatch.setattr(event_loop.time, "monotonic", lambda: now[0])
    sockets = event_loop.WatchedSockets()

    def select(timeout: float) -> list[Any]:
        waits.append(timeout)
        now[0] += timeout
        return [] if len(waits) < 5 else [(selectors.SelectorKey("gone", 1, 1, None), 1)]

    monkeypatch.setattr(sockets._system, "select", select)
    assert sockets.select(2.5) == []
    assert sockets.select(0) == []
    assert waits == [1.0, 1.0, 0.5, 0.0]
    assert sockets.select(None) == [], "somebody who is not waited for any more"
    assert waits[4:] == [1.0]
    sockets.close()

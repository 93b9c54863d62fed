"""The proxy between clients and a small server that speaks the framing: who sees what, for every action."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onceflow.broker.config import Cluster, Node, server_properties
from onceflow_workshop.testing.network import ANSWER, API_KEYS, DIRECTIONS, REQUEST, Network, Rule
from onceflow_workshop.testing.proxy import END_TXN, Proxies, Proxy, proxied_node_properties

pytestmark = pytest.mark.slow  # bytes on real sockets, many times

PRODUCE, FETCH = API_KEYS["Produce"], API_KEYS["Fetch"]
PATIENCE_S = 20.0
LONG_S = 60.0  # what must not be waited for


@dataclass(frozen=True)
class Seen:
    connection: int
    api_key: int
    correlation_id: int
    body: bytes
    at: float


def receive(sock: socket.socket) -> bytes | None:
    """One frame without its size; None at the end of the connection."""

    def exactly(count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                piece = sock.recv(min(count - len(data), 1 << 20))
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    size = exactly(4)
    return None if size is None else exactly(struct.unpack(">i", size)[0])


class Upstream:
    """Answers every request with its body, in order; keeps what it saw."""

    def __init__(self) -> None:
        self.silent: set[int] = set()  # APIs it never answers
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.ended: set[int] = set()
        self.events: list[tuple[str, int]] = []
        self._seen: list[Seen] = []
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._sockets.append(sock)
            threading.Thread(target=self._serve, args=(number, sock), daemon=True).start()

    def _serve(self, number: int, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (frame := receive(sock)) is not None:
                api_key, _, correlation_id = struct.unpack_from(">hhi", frame)
                with self._changed:
                    self._seen.append(Seen(number, api_key, correlation_id, frame[8:], time.monotonic()))
                    self.events.append(("seen", number))
                    self._changed.notify_all()
                self.may_answer.wait(PATIENCE_S)
                if api_key in self.silent:
                    continue
                self.events.append(("answered", number))
                sock.sendall(struct.pack(">ii", 4 + len(frame) - 8, correlation_id) + frame[8:])
        with self._changed:
            self.ended.add(number)
            self._changed.notify_all()

    @property
    def seen(self) -> list[Seen]:
        with self._changed:
            return list(self._seen)

    @property
    def ids(self) -> list[int]:
        return [one.correlation_id for one in self.seen]

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), f"only {self._seen} came, {self.ended} ended"

    def wait_for(self, count: int) -> list[Seen]:
        self.wait(lambda: len(self._seen) >= count)
        return self.seen

    def close(self) -> None:
        for sock in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Client:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    def send(self, correlation_id: int, body: bytes = b"", api_key: int = FETCH) -> None:
        self.sock.sendall(frame_of(correlation_id, body, api_key))

    def read(self) -> tuple[int, bytes] | None:
        """Correlation id and body of an answer; None when the connection has ended."""
        frame = receive(self.sock)
        return None if frame is None else (struct.unpack_from(">i", frame)[0], frame[4:])

    def nothing_comes(self) -> bool:
        self.sock.settimeout(0.1)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
            return False
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(PATIENCE_S)


def frame_of(correlation_id: int, body: bytes = b"", api_key: int = FETCH) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), api_key, 12, correlation_id) + body


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    proxy = Proxy(0, upstream.port)
    yield proxy
    proxy.close()
    assert threads_of(proxy) == []


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Callable[[], Client]]:
    with contextlib.ExitStack() as stack:

        def open_() -> Client:
            client = Client(proxy.port)
            stack.callback(client.sock.close)
            return client

        yield open_


@pytest.fixture
def client(connect: Callable[[], Client]) -> Client:
    return connect()


def threads_of(proxy: Proxy) -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(f"proxy-{proxy.port}") or name == "proxy-copies"]


def with_rule(proxy: Proxy, action: str, direction: str = REQUEST, **fields: object) -> Network:
    """One fault, at the first frame of Fetch."""
    rule = {"action": action, "direction": direction, "apis": ["Fetch"], "count": 1, **fields}
    network = Network(1, [Rule.from_json(rule)])
    proxy.faults(network)
    return network


# ---- without faults ----------------------------------------------------------------------------------


def test_frames_pass(upstream: Upstream, connect: Callable[[], Client]) -> None:
    clients = [connect(), connect()]
    for number, client in enumerate(clients):
        client.send(7, b"body %d" % number)
        assert client.read() == (7, b"body %d" % number)
    assert [(one.correlation_id, one.body) for one in upstream.seen] == [(7, b"body 0"), (7, b"body 1")]


@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 12, 256 * 1024, 20_000_000])
@pytest.mark.parametrize("action", [None, "delay", "duplicate", "reorder"])
def test_sizes(upstream: Upstream, proxy: Proxy, client: Client, size: int, action: str | None) -> None:
    if action is not None:
        with_rule(proxy, action, seconds=0.01)
    body = os.urandom(size)
    sending = threading.Thread(target=client.send, args=(1, body))  # the answer may come before all is sent
    sending.start()
    assert client.read() == (1, body)
    sending.join(PATIENCE_S)
    assert upstream.seen[0].body == body


def test_requests_under_way_together(upstream: Upstream, client: Client) -> None:
    client.sock.sendall(b"".join(frame_of(n, b"%d" % n) for n in range(50)))
    assert [client.read() for _ in range(50)] == [(n, b"%d" % n) for n in range(50)]
    assert upstream.ids == list(range(50))


def test_a_request_without_an_answer_holds_nothing_up(upstream: Upstream, client: Client) -> None:
    upstream.silent.add(PRODUCE)
    client.sock.sendall(frame_of(1, b"acks=0", PRODUCE) + frame_of(2, b"b"))
    assert client.read() == (2, b"b")
    assert upstream.ids == [1, 2]


def test_a_broker_that_is_down(upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]) -> None:
    upstream.close()
    assert connect().read() is None
    assert connect().read() is None


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", b"\xff" * 12, bytes(12)])
def test_what_is_not_kafka_ends_the_connection(client: Client, upstream: Upstream, nonsense: bytes) -> None:
    client.sock.sendall(nonsense)
    assert client.read() is None
    upstream.wait(lambda: upstream.ended == {0})
    assert upstream.seen == []


def test_either_end_closes_the_other(upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]) -> None:
    first, second = connect(), connect()
    for client in (first, second):
        client.send(1)
        client.read()
    first.sock.close()
    upstream.wait(lambda: upstream.ended == {0})
    upstream.close()
    assert second.read() is None


# ---- actions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delay(upstream: Upstream, proxy: Proxy, client: Client, direction: str) -> None:
    network = with_rule(proxy, "delay", direction, seconds=0.2)
    asked = time.monotonic()
    client.send(1, b"late")
    assert client.read() == (1, b"late")
    answered = time.monotonic()
    (seen,) = upstream.seen
    waited = seen.at - asked if direction == REQUEST else answered - seen.at
    assert waited >= 0.2
    assert [(f.action, f.direction, f.k) for f in network.log] == [("delay", direction, 1)]


def test_a_delayed_request_arrives_after_its_client_has_gone(
    upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]
) -> None:
    with_rule(proxy, "delay", seconds=0.2)
    client = connect()
    client.send(1, b"late")
    client.sock.close()
    assert [seen.body for seen in upstream.wait_for(1)] == [b"late"]


@pytest.mark.parametrize("again_s", [None, 0.05])
def test_duplicate(upstream: Upstream, proxy: Proxy, client: Client, again_s: float | None) -> None:
    with_rule(proxy, "duplicate", seconds=again_s)
    client.send(1, b"twice")
    times = 2 if again_s is None else 3
    copies = proxy.copies.wait(times - 1)
    assert [(one.correlation_id, one.body) for one in upstream.seen] == [(1, b"twice")] * times
    # Each on a connection of its own, and only once the original had been answered.
    assert upstream.events == [(what, n) for n in range(times) for what in ("seen", "answered")]
    assert [(c.api, c.version, c.answer) for c in copies] == [("Fetch", 12, b"\x00\x00\x00\x01twice")] * (times - 1)
    if again_s is not None:
        assert upstream.seen[2].at - upstream.seen[1].at >= again_s
    # The client hears of one.
    client.send(2, b"once")
    assert [client.read(), client.read()] == [(1, b"twice"), (2, b"once")]
    assert client.nothing_comes()
    assert upstream.ids == [1] * times + [2]


def test_a_duplicate_whose_original_has_no_answer(
    upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]
) -> None:
    """The client gave up: the copy comes nevertheless, as the late one that it is."""
    with_rule(proxy, "duplicate")
    upstream.may_answer.clear()
    client = connect()
    client.send(1, b"twice")
    upstream.wait_for(1)
    client.sock.close()
    seen = upstream.wait_for(2)
    assert [(one.connection, one.body) for one in seen] == [(0, b"twice"), (1, b"twice")]
    upstream.may_answer.set()


def test_a_duplicate_for_a_broker_that_is_down(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    with_rule(proxy, "duplicate", seconds=0.5)
    client.send(1)
    proxy.copies.wait(1)
    upstream.close()
    assert proxy.copies.wait(2)[1].answer is None


def test_reorder(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    network = with_rule(proxy, "reorder", seconds=LONG_S)
    client.send(1, b"first")
    assert client.nothing_comes()
    client.sock.sendall(frame_of(2, b"second") + frame_of(3, b"third"))
    assert [client.read() for _ in range(3)] == [(1, b"first"), (2, b"second"), (3, b"third")]
    assert upstream.ids == [2, 1, 3]
    assert network.counts == {"reorder": 1}


def test_answers_wait_for_the_one_to_an_earlier_request(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    """Several are held back: each until a later one has been forwarded."""
    with_rule(proxy, "reorder", seconds=LONG_S, count=2)
    client.sock.sendall(b"".join(frame_of(n) for n in (1, 2, 3, 4)))
    assert [client.read() for _ in range(4)] == [(n, b"") for n in (1, 2, 3, 4)]
    assert upstream.ids == [3, 1, 2, 4]


def test_what_is_held_back_alone_goes_on_after_a_while(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    with_rule(proxy, "reorder", seconds=0.2)
    asked = time.monotonic()
    client.send(1, b"alone")
    assert client.read() == (1, b"alone")
    assert upstream.seen[0].at - asked >= 0.2


def test_what_is_held_back_arrives_after_its_client_has_gone(
    upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]
) -> None:
    with_rule(proxy, "reorder", seconds=LONG_S)
    client = connect()
    client.send(1, b"late")
    client.sock.close()
    assert [seen.body for seen in upstream.wait_for(1)] == [b"late"]


def test_a_dropped_answer_behind_one_that_waits(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    rules = [Rule("reorder", ("Fetch",), count=1, seconds=LONG_S), Rule("drop", ("Fetch",), ANSWER, first=2, count=1)]
    proxy.faults(Network(1, rules))
    client.sock.sendall(frame_of(1, b"a") + frame_of(2, b"b") + frame_of(3, b"c"))
    # The broker has answered 2, 1, 3; the second of these is gone, and 2 does not wait for it any more.
    assert [client.read(), client.read()] == [(2, b"b"), (3, b"c")]
    assert upstream.ids == [2, 1, 3]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_drop(upstream: Upstream, proxy: Proxy, client: Client, direction: str) -> None:
    with_rule(proxy, "drop", direction)
    client.send(1, b"x" * 1_000_000)
    if direction == ANSWER:
        upstream.wait_for(1)
    assert client.nothing_comes()
    client.send(2, b"b")  # the connection is still there
    assert client.read() == (2, b"b")
    assert upstream.ids == ([2] if direction == REQUEST else [1, 2])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cut(upstream: Upstream, proxy: Proxy, connect: Callable[[], Client], direction: str) -> None:
    other = connect()
    other.send(1, b"a", api_key=PRODUCE)
    assert other.read() == (1, b"a")
    with_rule(proxy, "cut", direction)
    client = connect()
    client.send(2, b"b")
    assert client.read() is None
    upstream.wait(lambda: upstream.ended == {1})
    assert upstream.ids == ([1] if direction == REQUEST else [1, 2])
    other.send(3, b"c")  # not that of others; the fault was for one frame
    assert other.read() == (3, b"c")


def test_an_answer_that_was_cut_takes_a_duplicate_along(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    proxy.faults(Network(1, [Rule("duplicate", count=1), Rule("cut", direction=ANSWER, count=1)]))
    client.send(1, b"a")
    assert client.read() is None
    proxy.copies.wait(1)
    assert upstream.ids == [1, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_armed_cut(upstream: Upstream, proxy: Proxy, connect: Callable[[], Client], when: str) -> None:
    proxy.cut(END_TXN, when, times=2)
    for number in (1, 2, 3):
        client = connect()
        client.send(10 + number)
        assert client.read() == (10 + number, b"")
        client.send(number, b"end", END_TXN)
        assert client.read() == ((number, b"end") if number == 3 else None)
    assert proxy.cuts == 2
    assert upstream.ids == ([11, 12, 13, 3] if when == "before" else [11, 1, 12, 2, 13, 3])


def test_armed_cut_with_a_wrong_word(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match="before"):
        proxy.cut(END_TXN, "during")


# ---- on and off --------------------------------------------------------------------------------------


def test_faults_are_switched_on_and_off(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    network = Network(1, [Rule("drop", ("Fetch",))])
    answered = []
    for number, faults in enumerate([None, network, None, network, None]):
        proxy.faults(faults)
        client.send(number)
        if faults is None:
            answered.append(client.read())
        else:
            upstream_has = len(upstream.seen)
            assert client.nothing_comes()
            assert len(upstream.seen) == upstream_has
    assert answered == [(0, b""), (2, b""), (4, b"")]
    assert [f.k for f in network.log] == [1, 2]
    assert network.frames("Fetch", REQUEST) == 2


def test_pause(upstream: Upstream, proxy: Proxy, client: Client, connect: Callable[[], Client]) -> None:
    client.send(1)
    assert client.read() == (1, b"")
    proxy.pause()
    client.send(2, b"b")
    newcomer = connect()  # connections can be made, and nothing passes
    newcomer.send(3, b"c")
    assert client.nothing_comes()
    assert newcomer.nothing_comes()
    assert upstream.ids == [1]
    proxy.resume()
    assert client.read() == (2, b"b")
    assert newcomer.read() == (3, b"c")


def test_answers_wait_while_paused(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    upstream.may_answer.clear()
    client.send(1, b"a")
    upstream.wait_for(1)
    proxy.pause()
    upstream.may_answer.set()
    assert client.nothing_comes()
    proxy.resume()
    assert client.read() == (1, b"a")


def test_copies_wait_while_paused(upstream: Upstream, proxy: Proxy, client: Client) -> None:
    with_rule(proxy, "duplicate", seconds=0.5)
    client.send(1)
    proxy.copies.wait(1)
    proxy.pause()
    with pytest.raises(TimeoutError, match="1 of 2"):
        proxy.copies.wait(2, 0.7)
    proxy.resume()
    proxy.copies.wait(2)
    assert upstream.ids == [1, 1, 1]


def test_requests_of_a_client_that_gave_up_arrive_after_a_pause(
    upstream: Upstream, proxy: Proxy, connect: Callable[[], Client]
) -> None:
    client = connect()
    client.send(1)
    assert client.read() == (1, b"")
    proxy.pause()
    client.send(2, b"late")
    client.sock.close()
    proxy.resume()
    assert [seen.body for seen in upstream.wait_for(2)] == [b"", b"late"]


@pytest.mark.parametrize("paused", [False, True])
def test_cut_all(upstream: Upstream, proxy: Proxy, connect: Callable[[], Client], paused: bool) -> None:
    clients = [connect(), connect()]
    for client in clients:
        client.send(1)
        assert client.read() == (1, b"")
    if paused:
        proxy.pause()
        for client in clients:
            client.send(2)
    proxy.cut_all()
    assert [client.read() for client in clients] == [None, None]
    proxy.resume()
    upstream.wait(lambda: upstream.ended == {0, 1})
    assert upstream.ids == [1, 1]
    newcomer = connect()
    newcomer.send(3)
    assert newcomer.read() == (3, b"")


@pytest.mark.parametrize("state", ["idle", "paused", "delayed", "held", "copying", "inside a frame"])
def test_close_ends_every_thread(upstream: Upstream, state: str) -> None:
    proxy = Proxy(0, upstream.port)
    client = Client(proxy.port)
    client.send(1, api_key=PRODUCE)
    assert client.read() == (1, b"")
    assert len(threads_of(proxy)) == 3
    if state == "paused":
        proxy.pause()
        client.send(2)
    elif state == "delayed":
        with_rule(proxy, "delay", seconds=LONG_S)
        client.send(2)
    elif state == "held":
        with_rule(proxy, "reorder", seconds=LONG_S)
        client.send(2)
    elif state == "copying":
        with_rule(proxy, "duplicate", seconds=LONG_S)
        client.send(2)
        proxy.copies.wait(1)
    elif state == "inside a frame":
        client.sock.sendall(frame_of(2, b"x" * 100)[:50])
    began = time.monotonic()
    proxy.close()
    assert threads_of(proxy) == []
    assert time.monotonic() - began < 4
    assert client.read() in (None, (2, b""))
    client.sock.close()
    proxy.close()  # once more does no harm


# ---- many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everything_arrives_in_order(
    upstream: Upstream, proxy: Proxy, connect: Callable[[], Client], seed: int
) -> None:
    """Delays, copies and another order on the way: each client sees its own answers, in its order."""
    rules = [
        Rule("duplicate", probability=0.2, seconds=0.01),
        Rule("reorder", probability=0.3, seconds=0.01),
        Rule("delay", probability=0.1, seconds=0.001),
        Rule("delay", direction=ANSWER, probability=0.1, seconds=0.001),
    ]
    network = Network(seed, rules)
    proxy.faults(network)
    clients = [connect() for _ in range(3)]
    requests = {(number, n): b"%d of %d " % (n, number) * (n + 1) for number in range(3) for n in range(100)}
    for number, client in enumerate(clients):
        client.sock.sendall(b"".join(frame_of(n, requests[number, n]) for n in range(100)))
    for number, client in enumerate(clients):
        assert [client.read() for _ in range(100)] == [(n, requests[number, n]) for n in range(100)]
    counts = network.counts
    proxy.copies.wait(2 * counts["duplicate"])
    assert {f.direction for f in network.log if f.action == "delay"} == set(DIRECTIONS)
    arrived = Counter(one.body for one in upstream.seen)
    assert arrived.total() == 300 + 2 * counts["duplicate"]
    assert set(arrived) == set(requests.values())
    assert counts["duplicate"] > 20
    # Other requests overtook those that were held back.
    by_connection: dict[int, list[int]] = {}
    for one in upstream.seen:
        by_connection.setdefault(one.connection, []).append(one.correlation_id)
    assert any(ids != sorted(ids) for ids in by_connection.values())
    assert counts["reorder"] > 20


# ---- brokers behind proxies --------------------------------------------------------------------------


def test_proxies_share_a_network() -> None:
    upstreams = [Upstream(), Upstream()]
    with Proxies((0, upstream.port) for upstream in upstreams) as proxies:
        assert len(proxies) == 2
        assert proxies.bootstrap_servers == f"127.0.0.1:{proxies[0].port},127.0.0.1:{proxies[1].port}"
        network = Network(1, [Rule("cut", ("Fetch",), first=2, count=1)])
        proxies.faults(network)
        clients = [Client(proxy.port) for proxy in proxies]
        answers = []
        for client in clients:
            client.send(1)
            answers.append(client.read())
        assert answers == [(1, b""), None]  # the second frame of all
        assert network.frames("Fetch", REQUEST) == 2
        proxies.faults(None)
        proxies.pause()
        clients[0].send(2)
        assert clients[0].nothing_comes()
        proxies.resume()
        assert clients[0].read() == (2, b"")
        proxies[1].pause()  # one broker alone
        clients[0].send(3)
        assert clients[0].read() == (3, b"")
        proxies.cut_all()
        assert clients[0].read() is None
        for client in clients:
            client.sock.close()
    assert [threads_of(proxy) for proxy in proxies] == [[], []]
    for upstream in upstreams:
        upstream.close()


def test_proxies_that_cannot_all_be_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Proxies([(0, 1), (port, 2)])
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("proxy-")] == []


def test_every_node_advertises_a_proxy_of_its_own(tmp_path: Path) -> None:
    properties, ports = proxied_node_properties([1, 2, 5])
    assert list(properties) == [1, 2, 5]
    assert len({port for pair in ports for port in pair}) == 6
    for node_id, (port, upstream_port) in zip(properties, ports, strict=True):
        node = Node(node_id, tmp_path, port=9092, controller_port=9093)
        cluster = Cluster("id", "4.3.1", (node,), properties=properties[node_id])
        made = server_properties(cluster, node)
        assert made["listeners"] == (
            f"PLAINTEXT://127.0.0.1:9092,PROXIED://127.0.0.1:{upstream_port},CONTROLLER://127.0.0.1:9093"
        )
        assert made["advertised.listeners"] == f"PLAINTEXT://127.0.0.1:9092,PROXIED://127.0.0.1:{port}"
        assert made["inter.broker.listener.name"] == "PLAINTEXT"
        assert cluster.bootstrap_servers == "127.0.0.1:9092"  # of the direct listener

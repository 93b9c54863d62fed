"""Clients that want the query server's memory, connections or time: what they may keep is limited."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from onceflow.errors import BrokerUnreachableError, OptionError
from onceflow.server.access import AccessControl
from onceflow.server.app import make_app
from onceflow.server.connection import HEAD_BYTES_MAX
from onceflow.server.fast_path import FastPath
from onceflow.server.formats import Format
from onceflow.server.local import LocalTable
from onceflow.server.options import Limits
from onceflow.server.problems import Problem
from onceflow.server.process import _config, _listening, _nothing, _Server
from onceflow.server.requests import freshness_of
from onceflow.server.routed import RoutedTable
from onceflow.server.routes import Routes, TableRoutes
from onceflow.server.service import Served, Service
from onceflow.server.staleness import Freshness
from onceflow.state.format import rows
from onceflow.state.stores.stored_rows import StoredRows
from onceflow.tables.layout import Layout
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.faults  # clients keep the server busy

LARGE = b"x" * 100_000
LIMITS = Limits(stall_s=1.0, request_s=1.0, requests=5, connections=40)
TOKEN = "a-token-of-the-tests"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /tables/t/multi-get HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Store:
    """50 rows with large values."""

    rows = {rows.value_key(b"k%02d" % n): rows.pack(LARGE) for n in range(50)}  # noqa: RUF012

    def get(self, row_key: bytes) -> bytes | None:
        return self.rows.get(row_key)

    def scan(self, first: bytes, last: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(self.rows, reverse=reverse):
            if key >= first and (last is None or key < last):
                yield key, self.rows[key]


class Share:
    topic, topic_id, placed, partitions_now, partitions, ignored = "t", "id", True, 1, 1, 0
    failure: Any = None

    def __init__(self) -> None:
        self.layout = Layout()
        self.problem: Any = None

    def progress(self, partition: int) -> Any:
        lag = SimpleNamespace(records=0, ms=0)
        known = {"position": 5, "lag": lag, "emptied": False, "incomplete": False, "restored": True}
        return SimpleNamespace(**known, problem=self.problem)

    def store(self, partition: int) -> Any:
        return Store()


class Serving:
    """A query server of this process."""

    def __init__(self, tokens: tuple[str, ...] = ()) -> None:
        self.share: Any = Share()
        routes = Routes("http://a")
        routes.tables = {"t": TableRoutes([["http://a"]])}
        local = LocalTable(self.share)
        self.routed = RoutedTable("t", local, routes, None, LIMITS)
        table = Served("t", self.share, local, self.routed, Format.of("text", "text"))
        settings: Any = None
        service = Service({"t": table}, routes, LIMITS, settings, lambda: ["group g: OSError: /home/ada/key.pem"])
        self.gate = AccessControl(FastPath(make_app(service, _nothing), service), LIMITS, tokens, access_log=False)
        options: Any = SimpleNamespace(limits=LIMITS, certificate=None, certificate_key=None)
        self.server = _Server(_config(options, self.gate), lambda: None)

    def __enter__(self) -> Serving:
        self.socket = _listening("127.0.0.1", 0)
        self.thread = threading.Thread(target=lambda: self.server.run([self.socket]), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, 30, "the server answers")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.end()
        self.thread.join(30)

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self, sent: bytes, receive_bytes: int = 0) -> socket.socket:
        """A connection on which this was sent."""
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(30)
        made.connect(self.socket.getsockname())
        made.sendall(sent)
        return made

    def ask(self, path: str, headers: str = "") -> tuple[int, dict[str, Any]]:
        """Status and document of an answer."""
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n"
        with self.connect(request.encode()) as made:
            answer = b""
            while part := made.recv(1 << 16):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), orjson.loads(body)


def answered(made: socket.socket) -> bytes:
    """One whole answer: its head and its body may come in two parts."""
    answer = b""
    while not answer.endswith(b"}"):
        part = made.recv(1 << 16)
        assert part, answer
        answer += part
    return answer


def ended(made: socket.socket) -> bool:
    """Whether the server has ended a connection; what it has answered is read."""
    try:
        while made.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "more", [b"a:\r\n" * 40_000, b"a: " + b"x" * 200_000, b"\r\n" * 60_000], ids=["many", "one", "empty lines"]
)
@pytest.mark.parametrize("begin", [CHUNKED + b"0\r\n", GET, CHUNKED], ids=["trailers", "between", "chunks"])
def test_bytes_that_are_no_request(begin: bytes, more: bytes) -> None:
    """Without a token: they end the connection, before they fill the memory."""
    with Serving((TOKEN,)) as served, served.connect(begin) as made:
        answer = made.recv(1 << 16)
        assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 200 "))
        try:
            made.sendall(more)
        except ConnectionError:
            return
        assert ended(made)


@pytest.mark.long_but("idle", "a part of a body")
@pytest.mark.parametrize(
    "first, then",
    [(b"", b""), (b"GET /health", b""), (GET, b""), (GET, b"\r\n"), (GET, b"GET"), (CHUNKED, b"5\r\nx")],
    ids=["nothing", "a part of a head", "idle", "an empty line", "one more head", "a part of a body"],
)
def test_connections_without_a_request_end(first: bytes, then: bytes) -> None:
    """Otherwise few clients take all connections."""
    with Serving((TOKEN,)) as served, served.connect(first) as made:
        if first.endswith(b"\r\n\r\n"):
            answered(made)
        made.sendall(then)
        wait_until(lambda: not served.open, 30, lambda: f"{served.open} connections are open")


@pytest.mark.long
def test_a_connection_with_requests_goes_on() -> None:
    with Serving() as served, served.connect(b"") as made:
        end = time.monotonic() + 3 * LIMITS.stall_s
        while time.monotonic() < end:
            made.sendall(GET)
            assert answered(made).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.1)
        made.sendall(GET * 3)  # pipelined
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < 3:
            answers += made.recv(1 << 16)


@pytest.mark.parametrize("size, status", [(HEAD_BYTES_MAX // 2, 200), (HEAD_BYTES_MAX * 3 // 2, 400), (200_000, 0)])
def test_the_size_of_a_head(size: int, status: int) -> None:
    with Serving() as served:
        head = GET.removesuffix(b"\r\n") + b"".join(b"h%d: %s\r\n" % (n, b"x" * 994) for n in range(size // 1_000))
        try:
            made = served.connect(head + b"\r\n")
        except ConnectionError:
            assert not status
            return
        with made:
            try:
                answer = made.recv(1 << 16)
            except ConnectionError:
                answer = b""
        assert answer.startswith(b"HTTP/1.1 %d " % status) if status == 200 else not answer.startswith(b"HTTP/1.1 200")


def test_answers_that_nobody_reads() -> None:
    """They count as long as they are in memory, and their clients are disconnected."""
    with Serving() as served:
        ask = b"GET /tables/t/range?limit=40 HTTP/1.1\r\nHost: x\r\n\r\n"  # 4 MB
        slow = [served.connect(ask, receive_bytes=4096) for _ in range(LIMITS.requests)]
        wait_until(lambda: served.gate.unread > 0, 30, "answers wait")
        wait_until(lambda: served.gate._running == LIMITS.requests, 30, lambda: str(served.gate._running))
        assert served.ask("/tables/t/keys/k01")[0] == 503
        wait_until(lambda: not served.open, 30, lambda: f"{served.open} connections are open")
        assert served.gate.unread == 0
        assert served.ask("/tables/t/keys/k01")[0] == 200
        for each in slow:
            each.close()


def test_what_strangers_see_of_an_instance_that_is_not_ready() -> None:
    """Neither paths nor names of this machine."""
    with Serving((TOKEN,)) as served:
        served.share.problem = OptionError(
            "The local copy cannot be written: /home/ada/state", next_step="df /home/ada"
        )
        for failure in (None, BrokerUnreachableError("broker-7.internal does not answer", next_step="ask ada")):
            served.share.failure = failure
            status, told = served.ask("/ready")
            assert status == 503
            assert len(told["waiting_for"]) == 2
            assert "ada" not in str(told)
            assert "internal" not in str(told)
            _, told = served.ask("/ready", f"Authorization: Bearer {TOKEN}\r\n")
            assert str(told).count("ada") >= 2


def test_counts_share_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count reads all rows if some expire. One that has begun may lack rows that a later request has been told of."""
    scans, now, most = 0, 0, 0

    def counted(rows: StoredRows) -> int:
        nonlocal scans, now, most
        scans, now = scans + 1, now + 1
        most = max(most, now)
        time.sleep(0.05)
        now -= 1
        return scans

    monkeypatch.setattr(StoredRows, "count", counted)

    async def ask() -> None:
        table = Serving().routed
        first = asyncio.create_task(table.count(Freshness()))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(table.count(Freshness())) for _ in range(50)]
        await asyncio.sleep(0.01)
        others.pop().cancel()
        assert (await first)[0] == 1
        assert {found for found, _ in await asyncio.gather(*others)} == {2}
        assert (await table.count(Freshness()))[0] == 3

    asyncio.run(ask())
    assert most == 1


@pytest.mark.parametrize("name", ["max_staleness", "wait"])
@pytest.mark.parametrize("text", ["1" + " " * 60_000 + "!", " " * 60_000, "1" * 60_000, "1." + "0" * 60_000 + "s"])
def test_durations_that_are_long_texts(name: str, text: str) -> None:
    """They took quadratic time."""
    given = {"max_staleness": None, "wait": None, name: text}
    with pytest.raises(Problem, match="is not a duration"):
        freshness_of("t", LIMITS, None, given["max_staleness"], given["wait"])


@pytest.mark.parametrize("last, waits", [(0, False), (1, True), (90, True), (30_000, False)])
def test_partitions_that_there_will_hardly_be_are_not_waited_for(last: int, *, waits: bool) -> None:
    async def ask() -> float:
        begun = time.monotonic()
        freshness = Freshness({last: 1}, None, begun + 0.3)
        if last:
            with pytest.raises(Problem, match=rf"has 1 partition as far .* names partition {last}") as caught:
                await Serving().routed.get(b"k01", freshness)
            assert caught.value.status == 503
        else:
            await Serving().routed.get(b"k01", freshness)
        return time.monotonic() - begun

    assert (asyncio.run(ask()) >= 0.3) == waits

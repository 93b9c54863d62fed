"""The connections of a proxy: frames are forwarded, held back, dropped, or sent once more.

``onceflow_workshop.testing.proxy`` is what tests use.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from onceflow.broker.config import HOST
from onceflow_workshop.testing.network import (
    ANSWER,
    CUT,
    DELAY,
    DROP,
    DUPLICATE,
    REORDER,
    REORDER_SECONDS,
    REQUEST,
    Fault,
    api_name,
)

log = logging.getLogger("onceflow.testing")

JOIN_S = 5.0
_REQUEST_HEAD = struct.Struct(">ihhi")  # size, API key, API version, correlation id
_ANSWER_HEAD = struct.Struct(">ii")  # size, correlation id
_MAX_FRAME_BYTES = 128 * 1024 * 1024  # brokers take 100 MiB by default
_PIECE_BYTES = 256 * 1024
_COPY_TIMEOUT_S = 10.0
_MAX_COPY_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True)
class Copy:
    """A request that the broker was sent once more.

    Args:
        answer: from the correlation id on (the first 64 KiB); None when none came.
    """

    api: str
    version: int
    answer: bytes | None


@dataclass(eq=False)
class _Exchange:
    """One request, and what is known of its answer."""

    correlation_id: int
    api_key: int
    version: int
    sent: int | None = None  # its number in the order in which the broker got them; None while it is held back
    answer: bytearray | None = None  # kept until earlier requests are answered
    copy: bytearray | None = None  # to be sent once more
    again_s: float | None = None
    cut: bool = False


class Faults(Protocol):
    """What a link asks its proxy.

    Args:
        port: of the proxy.
        gate: frames pass while it is set.
        copies: sends requests once more.
    """

    port: int
    gate: threading.Event
    copies: Copies

    def armed(self, api_key: int) -> str | None:
        """When the connection is cut for this request; None: it is not."""
        ...

    def decide(self, api_key: int, direction: str) -> Fault | None:
        """What happens to a request or an answer."""
        ...

    def ended(self, link: Link) -> None:
        """The connection has ended."""
        ...


class Link:
    """A client's connection and the one to the broker that belongs to it; a thread for each direction."""

    def __init__(self, proxy: Faults, client: socket.socket, broker: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._broker = broker
        for sock in (client, broker):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._exchanges: collections.deque[_Exchange] = collections.deque()  # unanswered, as the client asked
        self._places = itertools.count()
        self._held: list[tuple[float, _Exchange, bytearray]] = []  # with its end; only the request thread uses it
        self.threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True, name=f"proxy-{proxy.port}-{name}")
            for work, name in ((self._requests, "requests"), (self._answers, "answers"))
        ]
        self._running = len(self.threads)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def shut(self) -> None:
        """End both threads soon. The last one closes the sockets, so that their numbers are not reused before."""
        self._closed.set()
        for sock in (self._client, self._broker):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            log.debug("proxy %d: a connection ends: %s", self._proxy.port, error)
        finally:
            self.shut()
            with self._lock:
                self._running -= 1
                last = self._running == 0
            if last:
                for exchange in self._exchanges:
                    self._send_copies(exchange)
                self._client.close()
                self._broker.close()
                self._proxy.ended(self)

    # ---- requests ------------------------------------------------------------------------------------

    def _requests(self) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while (head := self._next_request()) is not None:
            self._request(head, buffer)
        self._release(math.inf)  # the client has closed the connection, but its requests were sent

    def _next_request(self) -> bytes | None:
        while self._held:
            wait_s = min(until for until, _, _ in self._held) - time.monotonic()
            if wait_s > 0 and _readable(self._client, wait_s):
                break
            self._release(time.monotonic())
        return _read(self._client, _REQUEST_HEAD.size)

    def _request(self, head: bytes, buffer: memoryview) -> None:
        size, api_key, version, correlation_id = _REQUEST_HEAD.unpack(head)
        left = _left(size, _REQUEST_HEAD)
        exchange = _Exchange(correlation_id, api_key, version)
        armed = self._proxy.armed(api_key)
        fault = None if armed else self._proxy.decide(api_key, REQUEST)
        action = fault.action if fault else None
        seconds = fault.rule.seconds if fault else None
        if armed == "before" or action == CUT:
            raise ConnectionAbortedError("cut at a request")
        exchange.cut = armed == "after"
        if action == DROP:
            _skip(self._client, left, buffer)
            return
        if action == DELAY:
            self._closed.wait(seconds)
        frame = _whole(self._client, head, left) if action in (REORDER, DUPLICATE) else None
        with self._lock:
            self._exchanges.append(exchange)
        if action == REORDER and frame is not None:
            hold_s = REORDER_SECONDS if seconds is None else seconds
            self._held.append((time.monotonic() + hold_s, exchange, frame))
            return
        if frame is not None:
            exchange.copy, exchange.again_s = frame, seconds
            self._forward(exchange, frame)
        else:
            self._take_place(exchange)
            self._stream(self._client, self._broker, head, left, buffer)
        self._release(math.inf)

    def _release(self, until: float) -> None:
        """Forward what may be held back no longer than ``until``, in order."""
        due = [entry for entry in self._held if entry[0] <= until]
        self._held = [entry for entry in self._held if entry[0] > until]
        for _, exchange, frame in due:
            self._forward(exchange, frame)

    def _forward(self, exchange: _Exchange, frame: bytearray) -> None:
        self._take_place(exchange)
        self._send(self._broker, frame)

    def _take_place(self, exchange: _Exchange) -> None:
        with self._lock:
            exchange.sent = next(self._places)

    # ---- answers -------------------------------------------------------------------------------------

    def _answers(self) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while (head := _read(self._broker, _ANSWER_HEAD.size)) is not None:
            size, correlation_id = _ANSWER_HEAD.unpack(head)
            left = _left(size, _ANSWER_HEAD)
            exchange = self._match(correlation_id)
            self._send_copies(exchange)
            fault = None if exchange.cut else self._proxy.decide(exchange.api_key, ANSWER)
            action = fault.action if fault else None
            if exchange.cut or action == CUT:
                raise ConnectionAbortedError("cut at an answer")  # the broker has acted, but the client gets no answer
            if fault is not None and action == DELAY:
                self._closed.wait(fault.rule.seconds)
            if action == DROP:
                _skip(self._broker, left, buffer)
                self._forget(exchange)
            elif self._exchanges[0] is exchange:
                self._stream(self._broker, self._client, head, left, buffer)
                self._forget(exchange)
            else:
                exchange.answer = _whole(self._broker, head, left)
            # Answers that came before one to an earlier request.
            while self._exchanges and (answer := self._exchanges[0].answer) is not None:
                self._send(self._client, answer)
                self._forget(self._exchanges[0])

    def _match(self, correlation_id: int) -> _Exchange:
        """The request that the broker has answered."""
        with self._lock:
            waiting = [e for e in self._exchanges if e.sent is not None and e.answer is None]
        found = next((e for e in waiting if e.correlation_id == correlation_id), None)
        if found is None or found.sent is None:
            raise ConnectionAbortedError(f"an answer to no request: correlation id {correlation_id}")
        for other in waiting:
            # Brokers answer in order, so earlier requests get no answer (Produce with acks=0).
            if other.sent is not None and other.sent < found.sent:
                self._send_copies(other)
                self._forget(other)
        return found

    def _forget(self, exchange: _Exchange) -> None:
        with self._lock:
            self._exchanges.remove(exchange)

    def _send_copies(self, exchange: _Exchange) -> None:
        frame, exchange.copy = exchange.copy, None
        if frame is not None:
            self._proxy.copies.put(Copy(api_name(exchange.api_key), exchange.version, None), frame, exchange.again_s)

    # ---- bytes ---------------------------------------------------------------------------------------

    def _stream(self, source: socket.socket, target: socket.socket, head: bytes, left: int, buffer: memoryview) -> None:
        """Pass a frame on piece by piece."""
        filled = len(head)
        buffer[:filled] = head
        while True:
            if left:
                got = _receive(source, buffer[filled : filled + left])
                filled, left = filled + got, left - got
            self._send(target, buffer[:filled])
            if not left:
                return
            filled = 0

    def _send(self, target: socket.socket, data: memoryview | bytearray) -> None:
        self._proxy.gate.wait()
        target.sendall(data)


class Copies:
    """Requests that a broker is sent once more, each on a connection of its own, one after the other."""

    def __init__(self, upstream_port: int, gate: threading.Event) -> None:
        self._upstream_port = upstream_port
        self._gate = gate
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Copy, bytearray, float | None]] = []
        self._numbers = itertools.count()  # frames are not compared
        self._done: list[Copy] = []
        self._asked = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    @property
    def done(self) -> list[Copy]:
        """What has been sent, in that order."""
        with self._changed:
            return list(self._done)

    def wait(self, count: int, seconds: float = 30.0) -> list[Copy]:
        """Everything that has been sent, as soon as there are ``count`` copies.

        Raises:
            TimeoutError: there are still fewer.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._done) >= count, seconds):
                raise TimeoutError(f"{len(self._done)} of {count} copies were sent in {seconds:g} s")
            return list(self._done)

    def wait_for_all(self, seconds: float = 30.0) -> list[Copy]:
        """Everything that has been sent, as soon as nothing is left to be sent. A request whose connection ended before
        its answer has no copy.

        Raises:
            TimeoutError: there is still something left.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._done) == self._asked, seconds):
                raise TimeoutError(f"{len(self._done)} of {self._asked} copies were sent in {seconds:g} s")
            return list(self._done)

    def put(self, copy: Copy, frame: bytearray, again_s: float | None, *, after_s: float = 0.0) -> None:
        with self._changed:
            if self._closed:
                return
            self._asked += 1
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._numbers), copy, frame, again_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="proxy-copies")
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            copy, frame, again_s = entry
            answer = self._exchange(frame)
            if again_s is not None:
                self.put(copy, frame, None, after_s=again_s)
            with self._changed:
                self._done.append(replace(copy, answer=answer))
                self._changed.notify_all()

    def _next(self) -> tuple[Copy, bytearray, float | None] | None:
        with self._changed:
            while not self._closed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2:]
                self._changed.wait(wait_s)
            return None

    def _exchange(self, frame: bytearray) -> bytes | None:
        self._gate.wait()
        try:
            with socket.create_connection((HOST, self._upstream_port), timeout=_COPY_TIMEOUT_S) as sock:
                with self._changed:
                    if self._closed:
                        return None
                    self._socket = sock
                try:
                    sock.sendall(frame)
                    head = _read(sock, 4)
                    if head is None:
                        return None
                    left = int.from_bytes(head, "big")
                    kept = _read(sock, min(left, _MAX_COPY_ANSWER_BYTES))
                    if kept is not None:
                        _skip(sock, left - len(kept), memoryview(bytearray(_PIECE_BYTES)))
                    return kept
                finally:
                    with self._changed:
                        self._socket = None
        except OSError:
            return None


def _left(size: int, head: struct.Struct) -> int:
    """Bytes of a frame after its head. The size of a frame does not include the size field."""
    if not head.size - 4 <= size <= _MAX_FRAME_BYTES:
        raise ConnectionAbortedError(f"a frame of {size} bytes: this is not Kafka's protocol, or not in plaintext")
    return size + 4 - head.size


def _receive(sock: socket.socket, room: memoryview) -> int:
    """Receive at least one byte into ``room``. Returns how many."""
    got = sock.recv_into(room)
    if not got:
        raise ConnectionAbortedError("the connection ends inside a frame")
    return got


def _whole(sock: socket.socket, head: bytes, left: int) -> bytearray:
    """Read a whole frame into memory."""
    frame = bytearray(len(head) + left)
    frame[: len(head)] = head
    room = memoryview(frame)[len(head) :]
    while room:
        room = room[_receive(sock, room) :]
    return frame


def _skip(sock: socket.socket, left: int, buffer: memoryview) -> None:
    while left:
        left -= _receive(sock, buffer[: min(left, len(buffer))])


def _read(sock: socket.socket, count: int) -> bytes | None:
    """Read ``count`` bytes; None if the connection ends before."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _readable(sock: socket.socket, seconds: float) -> bool:
    poller = select.poll()  # unlike select, it takes sockets with large numbers
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(math.ceil(seconds * 1000)))

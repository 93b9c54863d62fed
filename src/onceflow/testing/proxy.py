"""A loopback proxy that understands Kafka's framing, and cuts connections at a chosen request.

A broker must advertise the proxy's port on a listener of its own, or clients would go around it::

    with proxied_broker(folder) as (bootstrap_servers, proxy): ...
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from onceflow.broker.local import LocalBroker, free_ports

END_TXN = 26
_HEADER = struct.Struct(">i")


class Proxy:
    """Forwards frames between clients and one broker.

    ``cut`` arms one fault: the next ``times`` requests of an API are lost, either before the broker sees them
    (``before``) or after it has answered (``after``, the answer is lost). The client's connection is closed.
    """

    def __init__(self, port: int, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._armed: tuple[int, str, int] | None = None
        self.cuts = 0
        self._server = socket.create_server(("127.0.0.1", port))
        self._sockets: set[socket.socket] = {self._server}
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="proxy")
        self._accepting.start()

    def cut(self, api_key: int, when: str, times: int = 1) -> None:
        if when not in ("before", "after"):
            raise ValueError(f"when={when!r}: use 'before' or 'after'")
        with self._lock:
            self._armed = (api_key, when, times)
            self.cuts = 0

    def close(self) -> None:
        with self._lock:
            open_sockets, self._sockets = self._sockets, set()
        for sock in open_sockets:
            _close(sock)
        self._accepting.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", self._upstream_port), timeout=10)
            except OSError:
                _close(client)
                continue
            broker.settimeout(None)
            with self._lock:
                self._sockets |= {client, broker}
            threading.Thread(target=self._serve, args=(client, broker), daemon=True, name="proxy-link").start()

    def _serve(self, client: socket.socket, broker: socket.socket) -> None:
        """One connection: requests in order, so that an answer can be told to belong to its request."""
        cut_answer = threading.Event()
        answers = threading.Thread(target=self._answers, args=(client, broker, cut_answer), daemon=True)
        answers.start()
        try:
            while (frame := _read_frame(client)) is not None:
                fault = self._fault(struct.unpack_from(">h", frame, 4)[0])
                if fault == "before":
                    break
                if fault == "after":
                    cut_answer.set()
                broker.sendall(frame)
                if fault == "after":
                    answers.join(30)
                    break
        except OSError:
            pass
        finally:
            for sock in (client, broker):
                _close(sock)
                with self._lock:
                    self._sockets.discard(sock)

    def _answers(self, client: socket.socket, broker: socket.socket, cut_answer: threading.Event) -> None:
        try:
            while (frame := _read_frame(broker)) is not None:
                if cut_answer.is_set():
                    return  # the broker has answered, so it has acted; nobody hears of it
                client.sendall(frame)
        except OSError:
            return
        finally:
            if not cut_answer.is_set():
                _close(client)

    def _fault(self, api_key: int) -> str | None:
        with self._lock:
            if self._armed is None or self._armed[0] != api_key:
                return None
            _, when, times = self._armed
            self._armed = (api_key, when, times - 1) if times > 1 else None
            self.cuts += 1
            return when


def _read_frame(sock: socket.socket) -> bytes | None:
    head = _read(sock, 4)
    if head is None:
        return None
    body = _read(sock, _HEADER.unpack(head)[0])
    return None if body is None else head + body


def _read(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@contextlib.contextmanager
def proxied_broker(data_dir: Path) -> Iterator[tuple[str, str, Proxy]]:
    """A broker of its own behind a proxy.

    Yields:
        bootstrap servers of the direct listener, bootstrap servers through the proxy, the proxy.
    """
    through, behind = free_ports(2)
    properties = {
        "listeners": f"PLAINTEXT://127.0.0.1:{{port}},PROXIED://127.0.0.1:{behind}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{{port}},PROXIED://127.0.0.1:{through}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    with LocalBroker(data_dir, properties=properties) as broker:
        proxy = Proxy(through, behind)
        try:
            yield broker.bootstrap_servers, f"127.0.0.1:{through}", proxy
        finally:
            proxy.close()

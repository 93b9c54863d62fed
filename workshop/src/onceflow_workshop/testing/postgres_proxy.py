"""A proxy in front of PostgreSQL. It cuts a connection at a COMMIT: before the server gets it, or after its answer."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

_COMMIT = re.compile(rb"COMMIT(?!TED)")  # not BEGIN ISOLATION LEVEL READ COMMITTED

HOST = "127.0.0.1"


class PostgresProxy:
    """Forwards connections to a server; a context manager.

    ``cut("before")``: the next connection that sends a COMMIT is closed, and the server does not get it.
    ``cut("after")``: the server gets it, and its answer is lost. ``cut("after", 3)``: so it is with the next three.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._server = socket.create_server((HOST, 0))
        self.port = int(self._server.getsockname()[1])
        self._armed: list[str] = []
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.cuts = 0

    def cut(self, when: str, times: int = 1) -> None:
        self._armed = [when] * times

    def __enter__(self) -> PostgresProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in [self._server, *self._sockets]:
            _close(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                server = socket.create_connection((HOST, self._upstream_port))
            except OSError:
                return
            self._sockets += [client, server]
            lost = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, lost), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, client, lost), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                when = self._take() if _COMMIT.search(data) else None
                if when == "before":
                    break
                if when == "after":
                    lost.set()
                server.sendall(data)
        _close(server)
        _close(client)

    def _answers(self, server: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if lost.is_set():
                    break
                client.sendall(data)
        _close(client)
        _close(server)

    def _take(self) -> str | None:
        with self._lock:
            if not self._armed:
                return None
            self.cuts += 1
            return self._armed.pop()


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()

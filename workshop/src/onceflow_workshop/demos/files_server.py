"""The server of the demo ``files``: it fails, truncates, answers slowly and changes its mind, as the seed says.

What it does with a file depends on how often it was asked for it, ever: what comes out in the end must not depend on
how many batches were run again. Only loopback, only for the time of a run.
"""

from __future__ import annotations

import gzip
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from onceflow_workshop.demos.files_big import BIG, big_bytes, big_parts
from onceflow_workshop.demos.files_data import Case, Links
from onceflow_workshop.demos.files_rows import HEAD

FAILS = 2  # so often a server that recovers fails first
TYPES = {".csv": "text/csv", ".jsonl": "application/jsonl", ".gz": "application/gzip", ".png": "image/png"}
_STALL_S = 60.0


class FilesServer:
    """Serves the files of a run's links; a context manager. The port is known before it begins.

    Attributes:
        requests: how often each name was asked for.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self._links: Links | None = None
        self._lock = threading.Lock()
        self._leave = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="files", daemon=True)

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self, links: Links) -> Iterator[FilesServer]:
        """For the time of the ``with`` block."""
        self._links = links
        self._thread.start()
        try:
            yield self
        finally:
            self._leave.set()
            self._server.shutdown()
            self._thread.join()
            self.close()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()

    # ---- answers -------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.close_connection = True
                try:
                    server._answer(self)
                except OSError:
                    pass  # the client has gone

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Nothing: the display of the demo is on this terminal."""

        return Handler

    def _answer(self, to: BaseHTTPRequestHandler) -> None:
        name = to.path.partition("?")[0].rsplit("/", 1)[-1]
        with self._lock:
            self.requests[name] += 1
            time = self.requests[name]
        if name == BIG:
            self._send_big(to)
            return
        links = self._links
        case = None if links is None else links.by_name.get(name)
        if links is None or case is None:
            _status(to, 404)
            return
        special: dict[str, Callable[[], None]] = {
            "missing": lambda: _status(to, 404),
            "down": lambda: _status(to, 503),
            "busy": lambda: _status(to, 503) if time <= FAILS else self._send(to, case),
            "cut": lambda: self._send(to, case, cut=time <= FAILS),
            "cut gzip": lambda: self._send(to, case, cut=time <= FAILS),
            "always cut": lambda: self._send(to, case, cut=True),
            "stalls": lambda: self._send(to, case, cut=time == 1, then_wait=True),
            "changes": lambda: self._send(to, case, version="old" if time == 1 else "", cut=time == 1),
            "damaged": lambda: self._send_bytes(to, case, _damaged(links.content(case))),
            "half a gzip": lambda: self._send_bytes(to, case, _half(links.content(case))),
            "slow": lambda: self._trickle(to, case),
            "endless": lambda: self._send_bytes(to, case, b"", length=10**12),
            "no length": lambda: self._send_bytes(to, case, links.content(case), length=None),
            "led astray": lambda: _redirect(to, "http://169.254.169.254/latest/meta-data/"),
            "in circles": lambda: _redirect(to, f"/{name}"),
            "redirected": lambda: _redirect(to, f"/{name}") if to.path.startswith("/moved/") else self._send(to, case),
            "chunked": lambda: self._send_chunks(to, case),
            "encoded": lambda: self._send_bytes(
                to, case, gzip.compress(links.content(case)), headers={"Content-Encoding": "gzip"}
            ),
            "picture": lambda: self._send_bytes(to, case, b"\x89PNG\r\n"),
        }
        special.get(case.kind, lambda: self._send(to, case))()

    def _send(
        self, to: BaseHTTPRequestHandler, case: Case, *, version: str = "", cut: bool = False, then_wait: bool = False
    ) -> None:
        content = self._content(case, version)
        self._send_bytes(to, case, _half(content) if cut else content, length=len(content))
        if cut and then_wait:
            to.wfile.flush()
            self._leave.wait(_STALL_S)

    def _content(self, case: Case, version: str = "") -> bytes:
        assert self._links is not None
        return self._links.content(case, version)

    def _send_bytes(
        self,
        to: BaseHTTPRequestHandler,
        case: Case,
        content: bytes,
        *,
        length: int | None = -1,
        headers: dict[str, str] | None = None,
    ) -> None:
        """``length`` is announced: -1: as it is, None: not at all."""
        announced = {} if length is None else {"Content-Length": str(len(content) if length < 0 else length)}
        _begin(to, case, announced | (headers or {}))
        to.wfile.write(content)

    def _send_chunks(self, to: BaseHTTPRequestHandler, case: Case) -> None:
        _begin(to, case, {"Transfer-Encoding": "chunked"})
        content = self._content(case)
        for at in range(0, len(content), 1000):
            part = content[at : at + 1000]
            to.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        to.wfile.write(b"0\r\n\r\n")

    def _trickle(self, to: BaseHTTPRequestHandler, case: Case) -> None:
        """A byte now and then: within every timeout, and never done."""
        _begin(to, case, {"Content-Length": "1000000"})
        for byte in itertools.cycle(self._content(case)):
            to.wfile.write(bytes([byte]))
            if self._leave.wait(0.3):
                return

    def _send_big(self, to: BaseHTTPRequestHandler) -> None:
        count = 0 if self._links is None else self._links.big_rows
        to.send_response(200)
        to.send_header("Content-Type", "text/csv")
        to.send_header("Content-Length", str(big_bytes(count)))
        to.end_headers()
        to.wfile.write(HEAD)
        for part in big_parts(count):
            to.wfile.write(part)


def write_files(links: Links, folder: Path) -> None:
    """The files that links name by path."""
    for name, case in links.by_name.items():
        if case.about.where == "path" and not case.about.error:
            (folder / name).write_bytes(links.content(case))


def _begin(to: BaseHTTPRequestHandler, case: Case, headers: dict[str, str]) -> None:
    suffix = "." + case.about.suffix.rpartition(".")[-1] if case.about.suffix else ".csv"
    to.send_response(200)
    to.send_header("Content-Type", TYPES[suffix])
    for name, value in headers.items():
        to.send_header(name, value)
    to.end_headers()


def _status(to: BaseHTTPRequestHandler, status: int) -> None:
    to.send_response(status)
    to.send_header("Content-Length", "0")
    to.end_headers()


def _redirect(to: BaseHTTPRequestHandler, where: str) -> None:
    to.send_response(302)
    to.send_header("Location", where)
    to.send_header("Content-Length", "0")
    to.end_headers()


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _damaged(packed: bytes) -> bytes:
    """The checksum of gzip is in the last 8 bytes."""
    return packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]

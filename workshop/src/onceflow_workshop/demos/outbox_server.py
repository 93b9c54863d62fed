"""The payment service of the demo ``outbox``: it is slow, fails, and loses answers, as the card of a request says.

What it does depends on how often it was asked for a payment, ever: what comes out in the end must not depend on how
many batches were run again. Only loopback, only for the time of a run.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LATE_S = 2.5
_FATAL_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
BUSY_TIMES = 2


@dataclass(frozen=True)
class Charge:
    """Money that was taken."""

    account: str
    amount: int
    receipt: str


class PaymentServer:
    """Charges cards; ``serving`` runs it. The port is known before.

    Attributes:
        charges: all that were made, in order.
        requests: how often it was asked, by account. answered_again: how often it knew the idempotency key.
        fatal: set while a request waits for the death of who has made it.
    """

    def __init__(self) -> None:
        self.charges: list[Charge] = []
        self.requests: Counter[str] = Counter()
        self.answered_again = 0
        self.fatal = threading.Event()
        self._known: dict[str, Charge] = {}
        self._lock = threading.Lock()
        self._leave = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="payments", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[PaymentServer]:
        """For the time of the ``with`` block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._leave.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def by_account(self) -> dict[str, list[Charge]]:
        """The charges of each account."""
        found: dict[str, list[Charge]] = {}
        with self._lock:
            for charge in self.charges:
                found.setdefault(charge.account, []).append(charge)
        return found

    # ---- answers -------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.close_connection = True
                try:
                    server._answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                except OSError:
                    pass  # the client has gone

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Nothing: the display of the demo is on this terminal."""

        return Handler

    def _answer(self, to: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        card, key = request["card"], to.headers.get("Idempotency-Key")
        with self._lock:
            self.requests[request["account"]] += 1
            time = self.requests[request["account"]]
        if card == "declined" or card == "down" or (card == "busy" and time <= BUSY_TIMES):
            _send(to, 402 if card == "declined" else 503, {})
        elif card == "reset" and time == 1:
            to.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            charge = self._charge(request, key)
            if time == 1 and card == "late":
                self._leave.wait(_LATE_S)
            if time == 1 and card == "fatal":
                self.fatal.set()
                self._leave.wait(_FATAL_S)
            if not (time == 1 and card == "lost"):
                _send(to, 200, {"receipt": charge.receipt})

    def _charge(self, request: dict[str, Any], key: str | None) -> Charge:
        """Take the money, unless the idempotency key is known: then the first answer holds."""
        with self._lock:
            known = None if key is None else self._known.get(key)
            if known is not None:
                self.answered_again += 1
                return known
            charge = Charge(request["account"], request["amount"], f"ch-{len(self.charges) + 1:06d}")
            self.charges.append(charge)
            if key is not None:
                self._known[key] = charge
            return charge


def _send(to: BaseHTTPRequestHandler, status: int, content: dict[str, str]) -> None:
    body = json.dumps(content).encode()
    to.send_response(status)
    to.send_header("Content-Type", "application/json")
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    to.wfile.write(body)

"""Serves the page balances.html, forwards its questions to the query server, and writes its movements to Kafka.

python balances_web.py --bootstrap-servers localhost:9092 --instance http://127.0.0.1:8790 --instance http://127.0.0.1:8791

The page asks this server only: browsers need no token then, and no other origin. Each question goes to any of the
instances, and to another one if that does not answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import ssl
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import Producer

PAGE = Path(__file__).with_name("balances.html")
ANSWER_S = 40.0  # longer than a request to the query server may take, and than a stream is silent
BODY_MAX = 1_000
# The page may load nothing from elsewhere, and nobody may show it in a frame.
POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
POLICY += "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"


class BalancesWeb(ThreadingHTTPServer):
    """Args:
    instances: URLs of the query server's instances.
    token: of the query server; "": it wants none.
    """

    daemon_threads = True

    def __init__(self, port: int, instances: Sequence[str], producer: Any, movements: str, token: str = "") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.instances = list(instances)
        self.producer = producer
        self.movements = movements
        self.token = token
        # Under other names this address can only have been reached by a page of somebody else (DNS rebinding).
        self.hosts = {f"{name}:{self.server_address[1]}" for name in ("127.0.0.1", "localhost")}

    def asked(self, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, str] | None:
        """The answer of an instance that can be reached, and its URL."""
        for url in random.sample(self.instances, len(self.instances)):
            place = urlsplit(url)
            secure = {"context": ssl.create_default_context()} if place.scheme == "https" else {}
            kind: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(place.netloc, timeout=ANSWER_S, **secure)
            try:
                connection.request("GET", path, headers=headers)
                return connection.getresponse(), url
            except (OSError, http.client.HTTPException):
                connection.close()
        return None

    def written(self, account: str, amount: int) -> dict[str, int]:
        """Write a movement; where it is, when the brokers have it.

        Raises:
            OSError: they have not said so.
        """
        placed: dict[str, int] = {}

        def delivered(error: Any, message: Any) -> None:
            if error is None:
                placed.update(partition=message.partition(), offset=message.offset())

        self.producer.produce(self.movements, json.dumps({"amount": amount}), account, on_delivery=delivered)
        self.producer.flush(ANSWER_S)
        if not placed:
            raise OSError("the movement is not acknowledged; look at the balance before you repeat it")
        return placed


class Handler(BaseHTTPRequestHandler):
    server: BalancesWeb

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._say(403, {"detail": "Ask 127.0.0.1 or localhost"})
        elif self.path == "/":
            self._answer(200, PAGE.read_bytes(), {"Content-Type": "text/html", "Content-Security-Policy": POLICY})
        elif self.path.startswith("/tables/"):
            self._forward()
        else:
            self._say(404, {"detail": "There is nothing here"})

    def do_POST(self) -> None:
        # Pages of other origins cannot send this type without asking first, and nobody answers that.
        right = self.headers.get("Content-Type") == "application/json" and self.headers.get("Host") in self.server.hosts
        if self.path != "/movements" or not right:
            self._say(404, {"detail": "POST JSON to /movements"})
            return
        try:
            size = int(self.headers.get("Content-Length", ""))
            asked = json.loads(self.rfile.read(max(0, min(size, BODY_MAX))))
            account, amount = str(asked["account"]), int(asked["amount"])
        except (ValueError, KeyError, TypeError):
            self._say(400, {"detail": 'Send {"account": "ada", "amount": 5}'})
            return
        try:
            self._say(202, self.server.written(account, amount))
        except OSError as error:
            self._say(503, {"detail": str(error)})

    def _forward(self) -> None:
        headers = {name: self.headers[name] for name in ("Accept", "Last-Event-ID") if name in self.headers}
        if self.server.token:
            headers["Authorization"] = f"Bearer {self.server.token}"
        found = self.server.asked(self.path, headers)
        if found is None:
            self._say(503, {"detail": "No instance of the query server can be reached"})
            return
        response, url = found
        with response:
            kept = {name: value for name, value in response.getheaders() if name.lower().startswith("onceflow-")}
            kept["Content-Type"] = response.getheader("Content-Type", "application/json")
            self._begin(response.status, {**kept, "Answered-By": url})
            try:
                while part := response.read1(1 << 16):  # a stream is passed on as it comes
                    self.wfile.write(part)
            except (OSError, http.client.HTTPException):
                pass  # the browser has gone, or the instance: the browser asks again

    def _say(self, status: int, document: dict[str, Any]) -> None:
        self._answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: the query server logs what it is asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--instance", action="append", required=True, help="URL of the query server; may be repeated")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    # The same partition for a key as Java's clients and onceflow; no attempts any more when the page has its answer.
    options = {
        "bootstrap.servers": given.bootstrap_servers,
        "partitioner": "murmur2_random",
        "message.timeout.ms": 30_000,
    }
    token = next(iter(os.environ.get("ONCEFLOW_SERVER_TOKENS", "").split()), "")
    server = BalancesWeb(given.port, given.instance, Producer(options), "movements", token)
    print(f"http://127.0.0.1:{server.server_address[1]}/", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

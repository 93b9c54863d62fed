"""``serve_metrics``: metrics of the flows of this process for Prometheus, and probes, over HTTP."""

from __future__ import annotations

import io
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from onceflow._version import __version__
from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.metrics.watch import FlowWatch, WatchedQuery, are_healthy, are_ready
from onceflow.options.arguments import checked_arguments

# How long a client may take to send its request, and then to take each of the two parts of the answer.
_CLIENT_S = 10.0
# Each handler holds a thread and a file descriptor of the driver. Further connections are closed at once.
_HANDLERS_MAX = 32
# How often the server looks whether it is to end.
_LOOK_S = 0.1

#: By this a client knows whose document it is.
SERVICE = "onceflow"
_COUNTS = ("batches_committed", "attempts_aborted", "batches_lost", "dead_letters", "late_records", "duplicates")


class MetricsEndpoint:
    """What ``serve_metrics`` returns. It ends with ``close``, with the ``with`` statement, or with the process.

    Attributes:
        host, port: where it listens.
    """

    def __init__(self, server: _Server, watch: FlowWatch, host: str) -> None:
        self._server = server
        self._watch = watch
        self.host = host
        self.port = int(server.server_address[1])
        threading.Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True, name="onceflow-metrics").start()

    def __repr__(self) -> str:
        return f"<metrics at {self.url}>"

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def add(self, query: WatchedQuery) -> None:
        """Show a query that was started before the endpoint. Its last 200 batches are counted, too."""
        self._watch.add(query)

    def close(self) -> None:
        """Stop listening. The second call has no effect."""
        server, self._server = self._server, None  # type: ignore[assignment]
        if server is not None:
            server.shutdown()
            server.server_close()
            self._watch.close()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@checked_arguments
def serve_metrics(port: int, host: str = "127.0.0.1") -> MetricsEndpoint:
    """Serve metrics of all flows of this process over HTTP, from now on. Call it before the flows start.

    ``/metrics`` is for Prometheus. ``/healthz`` answers 503 when a query has failed and was not started again, else
    200. ``/readyz`` answers 200 when every query has committed a batch or has nothing to read, else 503. ``/status`` is
    for ``onceflow status --endpoint``. There is no login.

    ::

        onceflow.serve_metrics(9404)
        flow.write(rows, topic="validated").start().awaitTermination()

    Args:
        port: 0: a free one, see ``MetricsEndpoint.port``.
        host: address to listen on; ``0.0.0.0``: all addresses.

    Raises:
        OptionError: the port is no port.
        EnvironmentUnusableError: the address is in use or not one of this machine, or prometheus-client is missing.
    """
    given: Any = port
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 65535:
        raise OptionError(f"The port of metrics is {port!r}", next_step="give a number from 0 to 65535, such as 9404")
    if not host:
        raise OptionError(f"The host of metrics is {host!r}", next_step='give an address, such as "0.0.0.0"')
    try:
        from prometheus_client import CollectorRegistry, exposition

        from onceflow.metrics.families import Collector
    except ImportError as missing:
        raise EnvironmentUnusableError(
            "Metrics need the package prometheus-client",
            detail=str(missing),
            next_step="pip install 'onceflow[metrics]'",
        ) from missing
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = _Server((host, port), family)
    except (OSError, UnicodeError) as error:  # the latter: no host name
        raise EnvironmentUnusableError(
            f"Metrics cannot be served at {host}:{port}",
            detail=getattr(error, "strerror", None) or str(error),
            next_step="choose another port, or end the process that listens there; several flows of one process share "
            "one endpoint",
        ) from error
    watch = FlowWatch()
    registry: Any = CollectorRegistry()
    registry.register(Collector(watch))

    def metrics(accept: str) -> tuple[bytes, str]:
        encode, content_type = exposition.choose_encoder(accept)
        return encode(registry), content_type

    server.metrics, server.watch = metrics, watch
    return MetricsEndpoint(server, watch, host)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # connections of an earlier process may still be in TIME_WAIT
    metrics: Any
    watch: FlowWatch

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._handlers = threading.BoundedSemaphore(_HANDLERS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, unless too many are being handled."""
        if not self._handlers.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system has no thread left
            self._handlers.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What that thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._handlers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no error."""


class _Request(io.RawIOBase):
    """What a client sends. All of it must arrive in time: a socket's own timeout would begin again with each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + _CLIENT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request has not arrived in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server_version, sys_version = "onceflow", ""
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/metrics", "/"):
            self._answer(HTTPStatus.OK, *self.server.metrics(self.headers.get("Accept", "")))
        elif path == "/status":
            body = json.dumps(driver_document(self.server.watch)).encode() + b"\n"
            self._answer(HTTPStatus.OK, body, "application/json")
        elif path == "/healthz":
            self._probe(are_healthy)
        elif path == "/readyz":
            self._probe(are_ready)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"try /metrics, /status, /healthz or /readyz\n", "text/plain")

    def _probe(self, are_good: Callable[[Iterable[str]], bool]) -> None:
        """The conditions of all flows, as JSON."""
        conditions = self.server.watch.conditions()
        body = json.dumps({"flows": conditions}).encode() + b"\n"
        self._answer(
            HTTPStatus.OK if are_good(conditions.values()) else HTTPStatus.SERVICE_UNAVAILABLE, body, "application/json"
        )

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.connection.settimeout(_CLIENT_S)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Requests are not logged."""


def driver_document(watch: FlowWatch) -> dict[str, Any]:
    """The flows of this process. It has no text of an error, because texts may contain parts of records, and the
    endpoint has no login."""
    conditions, lags = watch.conditions(), watch.lags()
    return {
        "service": SERVICE,
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "flows": [
            _flow(query, conditions.get(flow, ""), lags.get(flow), watch.counts.of_flow(flow, _COUNTS))
            for flow, query in watch.queries()
        ],
    }


def _flow(
    query: WatchedQuery,
    condition: str,
    lag: Mapping[str, Mapping[int, int]] | None,
    counts: Mapping[str, float],
) -> dict[str, Any]:
    done, batches = query.progress, query.batches
    failure = query.failure
    return {
        "flow": done.flow,
        "condition": condition,
        "since_ms": query.since_ms,
        "guarantee": query.guarantee,
        "batch": done.batch_id,
        "producer_id": done.producer_id,
        "producer_epoch": done.producer_epoch,
        "failure": None if failure is None else type(failure).__name__,
        "lag": None if lag is None else sum(sum(left.values()) for left in lag.values()),
        "last_batch": _last(batches),
        "counts": {name: int(count) for name, count in counts.items()},
        "tables": [asdict(table) for table in query.tables],
    }


def _last(batches: Sequence[Any]) -> dict[str, Any] | None:
    """The last batch of this run."""
    if not batches:
        return None
    last = batches[-1]
    return {
        "read": sum(last.read.values()),
        "records": last.records,
        "attempts": last.attempts,
        "seconds": round(sum(last.seconds.values()), 3),
        "ran_in": last.path,
    }

"""Connections to the brokers of one cluster: requests, API versions, one deadline per operation.

Connections, TLS, SASL and the message codec are those of kafka-python. It is pinned to one minor version, because
onceflow uses some of its internals: see ``produce.py`` and ``transport.py``. This module adds what exactly-once
needs: explicit API versions, one deadline per operation, and errors that name a next step.

``Connections`` runs kafka-python's event loop on the caller's thread, under a lock. It must be created in the process
that uses it: Spark forks its Python workers, and a forked process must not use the sockets of its parent.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer import EndTxnRequest, ProduceRequest, TxnOffsetCommitRequest

from onceflow.client.auth.logins import authentication_failed, await_token, may_log_in_again
from onceflow.client.deadline import Deadline
from onceflow.client.event_loop import EventLoop
from onceflow.client.first_connection import REFUSED_S, Wait, connect_to_any
from onceflow.client.library_log import filter_loggers, muted
from onceflow.client.settings import ClientSettings
from onceflow.client.transport import ConnectionManager
from onceflow.errors import BrokerUnsupportedError

log = logging.getLogger("onceflow.client")

# Requests that begin or end transactions differently from transaction version 2 on. One transaction must never use
# both ways.
_ENROL = frozenset({EndTxnRequest.API_KEY, TxnOffsetCommitRequest.API_KEY, ProduceRequest.API_KEY})
_REFRESH_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 30.0
# kafka-python closes a connection whose broker does not answer in time. A healthy broker needs some milliseconds, so
# a request gets this time even if the deadline comes earlier.
_LEAST_TIMEOUT_S = 0.1
_FIRST_TRY_S = 3.0
_TURNS = 4  # of the event loop, until a request is written if its connection is ready


class ConnectionFailedError(Exception):
    """Internal: there was no response. The broker may or may not have received the request; callers handle that."""


@dataclass(frozen=True)
class SentRequest:
    """A request for whose response nobody waits yet."""

    node: int
    future: Any


class Connections:
    """Connections to one Kafka cluster.

    Args:
        refused_s: for how long all servers may refuse the first connection, in seconds. None: until the deadline, as
            for a flow that is already running: its brokers may be down for a while.
    """

    def __init__(self, settings: ClientSettings, *, refused_s: float | None = REFUSED_S) -> None:
        self.settings = settings
        self._refused_s = refused_s
        self.lock = threading.RLock()
        self.net = EventLoop(slow_task_threshold_secs=0)
        config = settings.kafka_python()
        filter_loggers()
        with muted():
            self.manager = ConnectionManager(self.net, **config)
        self.tokens = settings.tokens
        self._features: dict[str, int] | None = None
        self._api_versions: dict[int, tuple[int, int]] = {}  # by API key: the range of all brokers seen so far
        self._min_versions: dict[int, int] = {}  # by API key: the lowest that callers allow
        self._bootstrapped = False
        # A Cluster that is dropped without ``close`` (in a failed start) must not leak sockets.
        self._finalizer = weakref.finalize(self, _close, self.manager, self.net)

    def connect(self, deadline: Deadline) -> None:
        """Connect through the bootstrap servers, and read metadata and the finalized features of the cluster.

        Raises:
            BrokerUnreachableError: no broker answers. Raised before the deadline if all servers refuse connections.
        """
        if self._bootstrapped:
            return
        with self.lock:
            await_token(self.settings, deadline)
            known = self.manager.cluster
            wait = Wait(self.settings, deadline, refused_s=self._refused_s)
            self._connect_to_any(known.bootstrap_brokers, deadline, wait)
            try:
                with muted():
                    self._bootstrap(deadline)
            except kafka_errors.KafkaError as error:
                raise wait.error(f"within {deadline.seconds:g} s", str(error)) from error
            if self._refused_s is not None:  # later requests go to the addresses that the brokers advertise
                wait = Wait(self.settings, deadline, refused_s=self._refused_s, named=True)
                self._connect_to_any(known.brokers, deadline, wait)
            self._read_features(deadline)
            self._bootstrapped = True  # only now: without the features, every API would look unsupported

    def _bootstrap(self, deadline: Deadline) -> None:
        """Read the metadata. kafka-python chooses a bootstrap server at random, and gives it all of its time. So it
        gets little time at first: the server may be a broker that hangs."""
        patience_s = _FIRST_TRY_S
        while not self.manager.bootstrapped:  # else by an earlier call, which then failed
            try:
                self.manager.bootstrap(max(1, int(deadline.capped(patience_s) * 1000)))
            except kafka_errors.KafkaTimeoutError:
                if deadline.expired:
                    raise
            patience_s *= 2

    def _connect_to_any(self, nodes: Callable[[], Sequence[Any]], deadline: Deadline, wait: Wait) -> None:
        connect_to_any(nodes, self.manager, self.net, self.settings, deadline, wait)

    def may_log_in_again(self, error: Exception) -> bool:
        """Whether to log in again, with a new token, after a broker has refused a login. A second refusal is final."""
        return may_log_in_again(self.settings, error)

    def close(self) -> None:
        with self.lock:
            self._finalizer()

    def _read_features(self, deadline: Deadline) -> None:
        response = self._ask(
            ApiVersionsRequest(version=3, client_software_name="onceflow", client_software_version="0"),
            "ApiVersions",
            deadline,
        )
        self._api_versions = {k.api_key: (k.min_version, k.max_version) for k in response.api_keys}
        known = response.finalized_features_epoch >= 0
        self._features = {f.name: f.max_version_level for f in response.finalized_features or []} if known else {}

    def exchange(self, request: Any, node: int, deadline: Deadline) -> Any:
        """Send one request to one broker and return its response, without retries.

        Raises:
            ConnectionFailedError: no response. The broker may or may not have received the request.
        """
        with self.lock:
            try:
                self._log_in_again()
                with muted():
                    return self.net.run(self._sent, request, node, deadline)
            except (kafka_errors.KafkaError, OSError, RuntimeError) as error:
                raise self._failure(error, node, deadline) from error

    def send(self, request: Any, node: int, deadline: Deadline) -> SentRequest:
        """Send one request to one broker, and do not wait for its response: `received` does."""
        with self.lock:
            self._log_in_again()
            with muted():
                future = self.net.call_soon_with_future(self._sent, request, node, deadline)
                for _ in range(_TURNS):
                    self.net.poll(timeout_ms=0)
        return SentRequest(node, future)

    def received(self, sent: SentRequest, deadline: Deadline) -> Any:
        """The response to a request that was sent before. It raises what `exchange` raises."""
        self.settle(sent)
        error = sent.future.exception
        if isinstance(error, (kafka_errors.KafkaError, OSError, RuntimeError)):
            raise self._failure(error, sent.node, deadline) from error
        if error is not None:
            raise error
        return sent.future.value

    def settle(self, sent: SentRequest) -> None:
        """Wait until there is a response, or until it is known that there is none."""
        if not sent.future.is_done:
            with self.lock, muted():
                self.net.poll(future=sent.future)

    def exchange_all(self, requests: Mapping[int, Any], deadline: Deadline) -> dict[int, Any]:
        """As `exchange`, with one request for each of several brokers, all at once: one that does not answer delays
        nobody but the caller.

        Returns:
            By broker, the response, or the `ConnectionFailedError`.
        """
        if len(requests) == 1:
            ((node, request),) = requests.items()
            try:
                return {node: self.exchange(request, node, deadline)}
            except ConnectionFailedError as lost:
                return {node: lost}
        found: dict[int, Any] = {}

        async def run() -> None:
            sent = {
                node: self.net.call_soon_with_future(self._sent, request, node, deadline)
                for node, request in requests.items()
            }
            for node, future in sent.items():
                try:
                    found[node] = await future
                except (kafka_errors.KafkaError, OSError, RuntimeError) as error:
                    found[node] = error

        with self.lock:
            try:
                self._log_in_again()
                with muted():
                    self.net.run(run)
            except (kafka_errors.KafkaError, OSError, RuntimeError) as error:
                found = {**dict.fromkeys(requests, error), **found}
            for node, answer in found.items():
                if isinstance(answer, Exception):
                    found[node] = self._failure(answer, node, deadline)
                    found[node].__cause__ = answer
        for answer in found.values():
            if isinstance(answer, Exception) and not isinstance(answer, ConnectionFailedError):
                raise answer
        return found

    async def _sent(self, request: Any, node: int, deadline: Deadline) -> Any:
        timeout_ms = int(max(_LEAST_TIMEOUT_S, deadline.capped(_REQUEST_TIMEOUT_S)) * 1000)
        connection = self.manager.get_connection(node, timeout_ms=timeout_ms)
        await connection
        self._fit(request, connection)
        return await connection.send_request(request, request_timeout_ms=timeout_ms)

    def _log_in_again(self) -> None:
        """The event loop does not run between two requests, so a re-authentication may be overdue. It must come first:
        a broker closes a connection that sends another request after its session has expired."""
        if self.tokens is not None:
            with muted():
                self.net.poll(timeout_ms=0)

    def _failure(self, error: Exception, node: int, deadline: Deadline) -> Exception:
        """What a request has failed with: a `ConnectionFailedError`, or that the login was refused."""
        if isinstance(error, (kafka_errors.SaslAuthenticationFailedError, kafka_errors.AuthorizationError)):
            if self.may_log_in_again(error):
                return ConnectionFailedError(f"broker {node}: {error}")
            return authentication_failed(self.settings, error)
        if isinstance(error, kafka_errors.UnknownBrokerIdError):
            self.refresh_brokers(deadline)
        kind = f"{type(error).__name__}: " if isinstance(error, kafka_errors.KafkaError) else ""
        return ConnectionFailedError(f"broker {node}: {kind}{error}")

    def ask(self, request: Any, api: str, deadline: Deadline) -> Any:
        """Send a request to any broker, again and again until one responds. The request must be safe to repeat."""
        self.connect(deadline)
        return self._ask(request, api, deadline)

    def _ask(self, request: Any, api: str, deadline: Deadline) -> Any:
        """As ``ask``, of a cluster whose brokers are known."""
        attempt = 0
        while True:
            node = self.manager.least_loaded_node()
            try:
                if node is None:
                    # A timer of the event loop resumes connections that the broker throttles, so the loop must run.
                    with self.lock, muted():
                        self.net.poll(timeout_ms=0)
                    raise ConnectionFailedError("no connection is ready: refused, broken, or throttled by a quota")
                return self.exchange(request, node, deadline)
            except ConnectionFailedError as problem:
                deadline.pause(attempt, f"{api}: {problem}")
                attempt += 1

    def broker_count(self) -> int:
        """Number of brokers in the cluster, as of the last metadata."""
        return max(1, len(self.manager.cluster.brokers()))

    def refresh_brokers(self, deadline: Deadline) -> None:
        """Refresh metadata, to find brokers that have joined or returned. Does nothing if no broker answers soon.

        kafka-python removes a broker that is down from its list, and refreshes metadata only every few minutes.
        """
        timeout_ms = max(1, int(deadline.capped(_REFRESH_TIMEOUT_S) * 1000))

        async def run() -> None:
            # kafka-python would wait for its own, longer timeout.
            refreshed = self.net.call_soon_with_future(self.manager.cluster.refresh_metadata)
            await self.manager.wait_for(refreshed, timeout_ms)

        with self.lock:
            try:
                with muted():
                    self.net.run(run)
            except (kafka_errors.KafkaError, OSError, RuntimeError) as error:
                log.debug("metadata refresh failed: %s", error)

    # ---- API versions --------------------------------------------------------------------------------

    @property
    def transaction_version(self) -> int:
        """2 when the cluster has finalized ``transaction.version`` 2 or later (KIP-890), else 1."""
        if self._features is None:
            raise RuntimeError("Cluster.connect has not been called")
        return 2 if self._features.get("transaction.version", 0) >= 2 else 1

    def version(self, request: Any, *, min_version: int, max_version: int) -> int:
        """The API version to send ``request`` with, between ``min_version`` and ``max_version``.

        During a rolling upgrade brokers may support different versions. If the request later goes to an older broker,
        ``exchange`` sends it with a lower version, but not below ``min_version``.

        Raises:
            BrokerUnsupportedError: the broker supports no version in this range.
        """
        name, key = request.name.removesuffix("Request"), request.API_KEY
        low, high = self._api_versions.get(key, (0, -1))
        self._min_versions[key] = min_version
        chosen = min(high, max_version)
        if chosen < max(low, min_version):
            offer = "does not offer it" if high < 0 else f"offers versions {low}-{high}"
            raise BrokerUnsupportedError(
                f"The broker cannot do {name} version {min_version}-{max_version}: it {offer}",
                next_step="exactly-once needs a broker with transactions: Apache Kafka 2.8 or later",
            )
        return chosen

    def fits(self, key: int, version: int, connection: Any) -> int:
        """The API version to use with the broker of this connection, which may be older than others.

        Raises:
            BrokerUnsupportedError: the broker is too old for every version that may be sent.
        """
        known = getattr(connection.broker_version_data, "api_versions", None)
        if not known or version <= known.get(key, (0, -1))[1] or key == ApiVersionsRequest.API_KEY:
            return version  # ApiVersions: every broker responds, whatever the version of the request (KIP-511)
        for api, (low, high) in self._api_versions.items():
            theirs = known.get(api, (0, -1))
            self._api_versions[api] = (max(low, theirs[0]), min(high, theirs[1]))
        chosen = int(known.get(key, (0, -1))[1])
        # At transaction version 2 every broker supports the new versions. If one claims that it does not, the request
        # must not be sent with a lower version.
        if chosen < self._min_versions.get(key, version) or (key in _ENROL and self.transaction_version >= 2):
            raise BrokerUnsupportedError(
                f"Broker {connection.node_id} understands request {key} up to version {chosen} only",
                detail=f"it was to be sent with version {version}, which another broker offers",
                next_step="upgrade all brokers to Apache Kafka 2.8 or later; leave transaction.version at 1 until then",
            )
        return chosen

    def _fit(self, request: Any, connection: Any) -> None:
        if request.API_VERSION is not None:
            request.API_VERSION = self.fits(request.API_KEY, request.API_VERSION, connection)


def _close(manager: Any, net: Any) -> None:
    # At the end of the process, a daemon thread may still wait in the loop. Its sockets are closed by the system.
    if not manager.closed and not net.is_run_elsewhere:
        with muted():
            for connection in list(manager._conns.values()):
                if connection.transport is not None:
                    connection.transport.abort()  # ``close`` would wait for a flush, but the event loop no longer runs
            manager.close()
            net.close()

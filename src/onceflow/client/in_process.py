"""Brokers that live in this process: connections to them need no sockets. `onceflow.testing` serves one for a test.

Only the transport is another one. Requests, their versions, retries and the bytes of records are as with real brokers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

from kafka.errors import KafkaConnectionError

_LENGTH_BYTES = 4


class Broker(Protocol):
    """What answers the requests."""

    def answer(self, request: bytes) -> bytes:
        """The response to one request, both without their length in front. Called by the thread that asks."""
        ...


_brokers: dict[str, Broker] = {}


def serve(host: str, broker: Broker) -> None:
    """From now on, connections to this host, at any port, go to the broker."""
    _brokers[host] = broker


def withdraw(host: str) -> None:
    """The opposite of `serve`."""
    _brokers.pop(host, None)


def broker_at(host: str) -> Broker | None:
    """The broker of this process that is served under the name of a host."""
    return _brokers.get(host)


class InProcessTransport:
    """The transport of a connection of kafka-python to such a broker. It has the methods that a connection calls.

    Args:
        net: the event loop of the connection. A response arrives in a turn of it, as it does from a socket.
    """

    def __init__(self, net: Any, broker: Broker, host: str) -> None:
        self._net = net
        self._broker = broker
        self.host = host
        self._protocol: Any = None
        self._written = bytearray()
        self._is_scheduled = False
        self._closed = False
        self.last_activity = time.monotonic()

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def resume_reading(self) -> None:
        """It always reads."""

    def is_closing(self) -> bool:
        return self._closed

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, data: Iterable[Any]) -> None:
        if self._closed:
            raise RuntimeError("Transport closed for writes")
        for each in data:
            self._written += each
        if not self._is_scheduled:
            self._is_scheduled = True
            self._net.call_soon(self._deliver)

    async def _deliver(self) -> None:
        self._is_scheduled = False
        self.last_activity = time.monotonic()
        while not self._closed and len(self._written) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._written[:_LENGTH_BYTES], "big")
            if len(self._written) < end:
                return
            request = bytes(self._written[_LENGTH_BYTES:end])
            del self._written[:end]
            try:
                response = self._broker.answer(request)
            except Exception as problem:
                self.abort(KafkaConnectionError(f"{type(problem).__name__}: {problem}"))
                raise
            self._protocol.data_received(len(response).to_bytes(_LENGTH_BYTES, "big") + response)

    def close(self) -> None:
        self._end(None)

    def abort(self, error: Any = None) -> None:
        self._end(error)

    def _end(self, error: Any) -> None:
        if self._closed:
            return
        self._closed = True
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def getPeer(self) -> tuple[str, int]:
        return self.host, 0

    def host_port(self) -> str:
        return self.host

"""kafka-python's connections, with one fault less.

A broker that refuses a login answers, and closes the connection. Where both arrive together, kafka-python 3.0 takes the
end for an error and drops the answer: a wrong password looks like a broken network, and is tried again and again. Here
what was received is handed on first; the end is met by the next read.
"""

from __future__ import annotations

from typing import Any

from kafka.net.manager import KafkaConnectionManager


class ConnectionManager(KafkaConnectionManager):  # type: ignore[misc]
    """Makes connections that read a broker's last words."""

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at=timeout_at)
        receive = transport._sock_recv

        def received() -> tuple[bytes, Exception | None]:
            data, error = receive()
            return data, None if data else error

        transport._sock_recv = received
        return transport

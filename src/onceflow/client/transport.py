"""kafka-python's connections, with two defects corrected.

1. A broker that is stopped or frozen may accept a connection and then send nothing. kafka-python 3.0 limits the time
   to make a connection, but not the time of its TLS handshake, so a deadline could be exceeded.
2. A broker that refuses a login sends an error response and closes the connection. If both arrive together,
   kafka-python 3.0 reports a broken connection and drops the response. Then a wrong password looks like a network
   failure and is retried again and again. Here the received data is processed first. The next read reports the end.
"""

from __future__ import annotations

import ssl
from typing import Any

from kafka.errors import KafkaConnectionError
from kafka.net.inet import create_connection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport


class ConnectionManager(KafkaConnectionManager):  # type: ignore[misc]
    """Makes connections that process the data received just before the broker closed the connection."""

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        if self.ssl_enabled:
            transport = await self._with_tls(node, timeout_at)
        else:
            transport = await super()._build_transport(node, timeout_at=timeout_at)
        receive = transport._sock_recv

        def received() -> tuple[bytes, Exception | None]:
            data, error = receive()
            return data, None if data else error

        transport._sock_recv = received
        return transport

    async def _with_tls(self, node: Any, timeout_at: float | None) -> Any:
        sock = await create_connection(
            self._net,
            node.host,
            node.port,
            self.config["socket_options"],
            proxy_url=self.config["proxy_url"],
            timeout_at=timeout_at,
        )
        options = {name: value for name, value in self.config.items() if name.startswith("ssl_")}
        transport = _TlsTransport(self._net, sock, host=node.host, **options)
        try:
            await transport.handshake_until(timeout_at)
        except Exception as error:
            transport.close()
            raise KafkaConnectionError(f"Handshake failed: {error}") from error
        return transport


class _TlsTransport(KafkaSSLTransport):  # type: ignore[misc]
    async def handshake_until(self, timeout_at: float | None) -> None:
        """As ``handshake`` of kafka-python, but with a time limit.

        Args:
            timeout_at: end of the time limit, by ``time.monotonic``. None: no limit.
        """
        while True:
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._net.wait_read(self._sock, timeout_at)
            except ssl.SSLWantWriteError:
                await self._net.wait_write(self._sock, timeout_at)

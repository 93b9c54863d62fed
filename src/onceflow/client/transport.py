"""kafka-python's connections with two faults corrected.

A broker that accepts a connection and then says nothing, because it is stopped or frozen, must not hold up a deadline:
kafka-python 3.0 bounds the making of a connection, but not its TLS handshake.

A broker that refuses a login answers, and closes the connection. Where both arrive together, kafka-python 3.0 takes the
end for an error and drops the answer: a wrong password looks like a broken network, and is tried again and again. Here
what was received is handed on first; the end is met by the next read.
"""

from __future__ import annotations

import ssl
from typing import Any

from kafka.errors import KafkaConnectionError
from kafka.net.inet import create_connection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport


class ConnectionManager(KafkaConnectionManager):  # type: ignore[misc]
    """Makes connections that read a broker's last words."""

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
        """``handshake``, which may wait for ever.

        Args:
            timeout_at: of ``time.monotonic``.
        """
        while True:
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._net.wait_read(self._sock, timeout_at)
            except ssl.SSLWantWriteError:
                await self._net.wait_write(self._sock, timeout_at)

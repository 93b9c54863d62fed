"""kafka-python's connections, with two defects corrected, and with fewer calls of the system.

1. A broker that is stopped or frozen may accept a connection and then send nothing. kafka-python 3.0 limits the time
   to make a connection, but not the time of its TLS handshake, so a deadline could be exceeded.
2. A broker that refuses a login sends an error response and closes the connection. If both arrive together,
   kafka-python 3.0 reports a broken connection and drops the response. Then a wrong password looks like a network
   failure and is retried again and again. Here the received data is processed first. The next read reports the end.

kafka-python waits until a socket can be written to before it writes, sends each buffer of a request by itself, and
reads 4 KiB at a time. A flow that commits often would spend a good part of its time in these calls.
"""

from __future__ import annotations

import ssl
import time
from itertools import islice
from typing import Any

from kafka.errors import KafkaConnectionError
from kafka.net.inet import create_connection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

from onceflow.client.in_process import InProcessTransport, broker_at

_READ_BYTES = 1 << 16  # at once
_BUFFERS_AT_ONCE = 64  # the system takes some more


class ConnectionManager(KafkaConnectionManager):  # type: ignore[misc]
    """Makes connections that process the data received just before the broker closed the connection."""

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        broker = broker_at(node.host)
        if broker is not None:
            return InProcessTransport(self._net, broker, node.host)
        sock = await create_connection(
            self._net,
            node.host,
            node.port,
            self.config["socket_options"],
            proxy_url=self.config["proxy_url"],
            timeout_at=timeout_at,
        )
        if self.ssl_enabled:
            transport: KafkaTCPTransport = await self._with_tls(sock, node, timeout_at)
        else:
            transport = _TcpTransport(self._net, sock, host=node.host)
        receive = transport._sock_recv

        def received() -> tuple[bytes, Exception | None]:
            data, error = receive()
            return data, None if data else error

        transport._sock_recv = received
        return transport

    async def _with_tls(self, sock: Any, node: Any, timeout_at: float | None) -> Any:
        options = {name: value for name, value in self.config.items() if name.startswith("ssl_")}
        transport = _TlsTransport(self._net, sock, host=node.host, **options)
        try:
            await transport.handshake_until(timeout_at)
        except Exception as error:
            transport.close()
            raise KafkaConnectionError(f"Handshake failed: {error}") from error
        return transport


class _WritesAtOnce(KafkaTCPTransport):  # type: ignore[misc]
    """A transport that waits only when the system takes no more."""

    async def _write_to_sock(self) -> None:
        try:
            _, error = self._sock_send()
            self.last_write = time.monotonic()
            if error:
                self.abort(error=error)
        except BaseException:
            self._writing = False
            raise
        await super()._write_to_sock()  # what is left


class _TcpTransport(_WritesAtOnce):
    def _sock_send(self) -> tuple[int, Exception | None]:
        total = 0
        if self._sock is None:
            return total, KafkaConnectionError("Connection closed during send")
        buffers = self._write_buffer
        while buffers:
            try:
                sent = self._sock.sendmsg(list(islice(buffers, _BUFFERS_AT_ONCE)))
            except (BlockingIOError, InterruptedError):
                break
            except BaseException as error:  # as kafka-python does
                return total, KafkaConnectionError(error)
            total += sent
            while buffers:
                first = memoryview(buffers.popleft())
                if sent < first.nbytes:
                    buffers.appendleft(first.cast("B")[sent:])
                    break
                sent -= first.nbytes
        return total, None

    def _sock_recv(self) -> tuple[bytes, Exception | None]:
        parts: list[bytes] = []
        error = None
        while True:
            try:
                part: bytes = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except BaseException as problem:  # as kafka-python does
                error = KafkaConnectionError(problem)
                break
            if not part:
                error = KafkaConnectionError("socket disconnected")
                break
            parts.append(part)
            if len(part) < _READ_BYTES:
                break
        return b"".join(parts), error


class _TlsTransport(_WritesAtOnce, KafkaSSLTransport):  # type: ignore[misc]
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

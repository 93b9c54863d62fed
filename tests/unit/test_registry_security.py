"""TLS, credentials and tokens of a registry, tried with servers that want them; and servers that come to no end."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import trustme

from onceflow.errors import OptionError, RegistryUnavailableError
from onceflow.schema_registry.registry import SchemaRegistry
from onceflow.schema_registry.wire_format import SchemaId

TEXT = b'{"schema": "\\"string\\""}'
Answer = Callable[[http.server.BaseHTTPRequestHandler, bytes], tuple[int, bytes]]


class Server:
    """Answers with what a function returns, with or without TLS.

    Attributes:
        release: ends an answer that drips.
    """

    def __init__(self, answer: Answer, context: ssl.SSLContext | None = None) -> None:
        self.release = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                self.send_response(status or 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body) if status else 10_000))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has gone
                    while not status and not server.release.wait(0.05):
                        self.wfile.write(b" ")
                    self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answer: Answer, context: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(answer, context))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def asked(url: str, properties: Any = None, wait: float = 0) -> str:
    """The schema that a registry gives."""
    return SchemaRegistry(url, properties, wait=wait).client.by_id(SchemaId(5)).text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def of_server(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def test_tls(serve: Callable[..., Server], authority: trustme.CA, tmp_path: Path) -> None:
    url = serve(lambda *_: (200, TEXT), of_server(authority)).url
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    assert asked(url, {"ssl.ca.location": str(tmp_path / "ca.pem")}) == '"string"'
    for properties in ({}, {"ssl.ca.location": str(tmp_path / "other.pem")}):
        with pytest.raises(RegistryUnavailableError, match=r"(?s)does not answer.*CERTIFICATE_VERIFY_FAILED"):
            asked(url, properties)
    with pytest.raises(OptionError, match="cannot be used"):
        asked(url, {"ssl.ca.location": str(tmp_path / "nothing.pem")})


def test_a_certificate_of_the_client(serve: Callable[..., Server], authority: trustme.CA, tmp_path: Path) -> None:
    context = of_server(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    url = serve(lambda *_: (200, TEXT), context).url
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ours = authority.issue_cert("client@example.org")
    ours.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
    ours.private_key_pem.write_to_path(tmp_path / "client.key")
    trusted = {"ssl.ca.location": str(tmp_path / "ca.pem")}
    given = {
        "ssl.certificate.location": str(tmp_path / "client.pem"),
        "ssl.key.location": str(tmp_path / "client.key"),
    }
    assert asked(url, {**trusted, **given}) == '"string"'
    with pytest.raises(RegistryUnavailableError, match="does not answer"):
        asked(url, trusted)


def test_a_name_and_a_password(serve: Callable[..., Server]) -> None:
    wanted = "Basic " + base64.b64encode(b"alice:sec:ret").decode()

    def answer(request: http.server.BaseHTTPRequestHandler, _: bytes) -> tuple[int, bytes]:
        return (200, TEXT) if request.headers.get("Authorization") == wanted else (401, b'{"error_code": 401}')

    url = serve(answer).url
    assert asked(url, {"basic.auth.user.info": "alice:sec:ret"}) == '"string"'
    assert asked(url.replace("//", "//alice:sec%3Aret@")) == '"string"'
    for properties in ({}, {"basic.auth.user.info": "alice:wrong-password"}):
        with pytest.raises(RegistryUnavailableError, match="does not accept the credentials") as error:
            asked(url, properties, wait=30)
        assert "wrong-password" not in str(error.value)


def test_tokens_of_oauth(serve: Callable[..., Server]) -> None:
    tokens: list[str] = []

    def issue(request: http.server.BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        given = {name: value for name, (value,) in parse_qs(body.decode()).items()}
        basic = "Basic " + base64.b64encode(b"client:secret").decode()
        if request.headers.get("Authorization") != basic or given.get("scope") != "schemas":
            return 401, b'{"error": "invalid_client"}'
        tokens.append(f"token-{len(tokens)}")
        return 200, json.dumps({"access_token": tokens[-1], "token_type": "Bearer", "expires_in": 3600}).encode()

    def answer(request: http.server.BaseHTTPRequestHandler, _: bytes) -> tuple[int, bytes]:
        known = request.headers.get("Authorization") in [f"Bearer {token}" for token in tokens]
        return (200, TEXT) if known and request.headers.get("target-sr-cluster") == "lsrc-1" else (401, b"{}")

    url, issuer = serve(answer).url, serve(issue).url
    properties = {
        "bearer.auth.credentials.source": "OAUTHBEARER",
        "bearer.auth.issuer.endpoint.url": f"{issuer}/token",
        "bearer.auth.client.id": "client",
        "bearer.auth.client.secret": "secret",
        "bearer.auth.scope": "schemas",
        "bearer.auth.logical.cluster": "lsrc-1",
    }
    assert asked(url, properties) == '"string"'
    assert len(tokens) == 1
    with pytest.raises(RegistryUnavailableError) as error:
        asked(url, {**properties, "bearer.auth.client.secret": "another-secret"})
    assert "another-secret" not in str(error.value)
    fixed = {
        "bearer.auth.credentials.source": "STATIC_TOKEN",
        "bearer.auth.token": "token-0",
        "bearer.auth.logical.cluster": "lsrc-1",
    }
    assert asked(url, fixed) == '"string"'


@pytest.mark.slow
def test_a_server_that_drips_bytes_is_not_waited_for_without_end(serve: Callable[..., Server]) -> None:
    answers: list[tuple[int, bytes]] = [(0, b""), (200, TEXT)]
    server = serve(lambda *_: answers.pop(0))
    registry = SchemaRegistry(server.url, {"timeout": 0.5}, wait=0)
    begin = time.monotonic()
    with pytest.raises(RegistryUnavailableError, match="no whole answer within"):
        registry.client.by_id(SchemaId(5))
    assert time.monotonic() - begin < 10
    assert registry.client.by_id(SchemaId(5)).text == '"string"', "the request that goes on holds up no other"

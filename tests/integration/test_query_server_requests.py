"""Requests that are hostile, slow, many or wrong."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from onceflow.server.options import Limits
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.served import numbers, write_rows

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
TOKEN = "a-token-of-the-tests"


def test_tokens_and_limits(onceflow_broker: str, topic: str, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(onceflow_broker, topic, {"a": "1"})
    with caplog.at_level("INFO", "onceflow.server.access"):
        client = serve(topic, tokens=["an-older-token-of-these", TOKEN], limits=Limits(body_bytes=1_000))
        path = f"/tables/{topic}/keys/a"
        for headers in (
            {},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer no"},
            {"Authorization": f"Bearer {TOKEN}x"},
        ):
            refused = client.get(path, headers=headers)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get(path, headers=allowed).status_code == 200
        body = {"keys": ["x" * 400] * 3}
        assert client.post(f"/tables/{topic}/multi-get", json=body, headers=allowed).status_code == 413
        chunks = (b"x" * 400 for _ in range(3))
        assert client.post(f"/tables/{topic}/multi-get", content=chunks, headers=allowed).status_code == 413
        assert client.get("/nothing", headers=allowed).status_code == 404
        assert client.delete(path, headers=allowed).status_code == 405
    lines = [record.getMessage() for record in caplog.records if record.name == "onceflow.server.access"]
    assert any(f'"GET {path}" 200' in line for line in lines)
    assert not any(TOKEN in line for line in lines)


@pytest.mark.long
def test_slow_clients_and_many_connections(
    onceflow_broker: str, topic: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(onceflow_broker, topic, {f"key-{n}": json.dumps("x" * 10_000) for n in range(2_000)})
    client = serve(topic, limits=Limits(stall_s=0.5, request_s=1.0, requests=2_000))
    where = (client.base_url.host, client.base_url.port or 0)

    def opened(sent: bytes) -> socket.socket:
        found = socket.create_connection(where, 30)
        found.sendall(sent)
        return found

    def ends(one: socket.socket) -> bytes:
        with one:
            found = b""
            while part := one.recv(1 << 16):
                found += part
            return found

    nothing, half_head = opened(b""), opened(b"GET /tables HTTP/1.1\r\nHos")
    half_body = opened(f"POST /tables/{topic}/multi-get HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    reader = opened(f"GET /tables/{topic}/range HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\n\r\n".encode())
    endless = opened(b"GET /tables HTTP/1.1\r\n")
    lines = (b"X: " + b"y" * 1_000 + b"\r\n" for _ in range(10_000))
    with endless, pytest.raises(OSError, match=r"reset|pipe"):
        endless.sendall(b"".join(lines))
    assert ends(nothing) == ends(half_head) == b""
    assert b"503" in ends(half_body)[:20]
    # The one that does not read is disconnected after a while. It finds only what the system has buffered.
    wait_until(lambda: "did not read its answer" in caplog.text, 10, "it is disconnected")
    with contextlib.suppress(ConnectionResetError):
        assert len(ends(reader)) < 15_000_000
    assert client.get("/ready").status_code == 200

    # One that goes away before its request is complete is no error of the server.
    path = f"/tables/{topic}/multi-get"

    def is_logged() -> bool:
        """The server need not hear of a request whose connection is closed at once, so there may be several."""
        opened(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode()).close()
        # Not `caplog.text`: PySpark's own loggers change how handlers that they find write their lines.
        return any(f'{path}" 400' in message for message in caplog.messages)

    with caplog.at_level("DEBUG", "onceflow.server.access"):
        wait_until(is_logged, 20, "it is logged", poll_s=0.2)
    assert "Exception" not in caplog.text

    request = f"GET /tables/{topic}/keys/key-7 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    many = [opened(request) for _ in range(1_000)]  # at once: one that says nothing for 0.5 s is disconnected
    assert {ends(each)[:15] for each in many} == {b"HTTP/1.1 200 OK"}


@pytest.mark.long
def test_requests_of_every_kind(onceflow_broker: str, topic: str, serve: Serve) -> None:
    """Requests made from the OpenAPI document, valid and invalid ones: no 500, and answers are as the document says."""
    from hypothesis import HealthCheck, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.openapi import from_url
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    write_rows(onceflow_broker, topic, {**numbers(50), b"\xff": b"1", "bad": "no json"})
    client = serve(topic, limits=Limits(stream_s=0.01, wait_s=0.01, request_s=1.0))
    schema = from_url(str(client.base_url.join("/openapi.json")))
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        tried.append(operation.label)
        for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if "{table}/" in operation.path else [])):

            @settings(
                max_examples=3 if operation.path.endswith("/changes") else 15,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                if "table" in case.path_parameters and len(str(case.body)) % 5:
                    case.path_parameters["table"] = topic
                answer = case.call(timeout=20)
                # 503 says that it is not now, as the document says; it is no error of the server.
                wanted = checks if answer.status_code != 503 else checks[1:]
                case.validate_response(answer, checks=wanted)

            ask()
    assert len(tried) == 9
    assert client.get("/ready").status_code == 200

"""What a registry may answer over HTTP, and what that means for a record and for a flow."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from onceflow.errors import EnvironmentUnusableError, RegistryUnavailableError
from onceflow.schema_registry.registry import SchemaRegistry
from onceflow.schema_registry.wire_format import SchemaId, prefix

Answer = tuple[int, bytes]
Serve = Callable[[Callable[[str, dict[str, list[str]]], Answer]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(answer)``: the URL of a server that answers each GET with what the function returns."""
    servers = []

    def start(answer: Callable[[str, dict[str, list[str]]], Answer]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                status, body = answer(parts.path, parse_qs(parts.query))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_each_context_has_ids_of_its_own(serve: Serve) -> None:
    ours = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "int"}]}'
    others = '{"type": "record", "name": "R", "fields": [{"name": "b", "type": "int"}, {"name": "a", "type": "int"}]}'

    def answer(path: str, query: dict[str, list[str]]) -> Answer:
        if path.endswith("/versions/latest"):
            return 200, json.dumps({"subject": ":.x:s", "version": 1, "id": 7, "schema": ours}).encode()
        return 200, json.dumps({"schema": ours if query.get("subject") == [":.x:"] else others}).encode()

    serde = SchemaRegistry(serve(answer)).avro(":.x:s")
    assert serde.decode(serde.encode({"a": 1, "b": 2})) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "status, body",
    [(404, b'{"error_code": 40403, "message": "no"}'), (400, b"{}"), (422, b"{}"), (409, b"{}")],
)
def test_an_unknown_id_is_the_fault_of_the_record_and_is_asked_for_once(serve: Serve, status: int, body: bytes) -> None:
    asked: list[str] = []

    def answer(path: str, _: dict[str, list[str]]) -> Answer:
        asked.append(path)
        return status, body

    serde = SchemaRegistry(serve(answer), wait=0).avro("s", '"string"')
    for _ in range(3):
        with pytest.raises(ValueError, match="has no schema with id 5"):
            serde.registry.by_id(SchemaId(5))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "status, body",
    [(500, b"{}"), (503, b""), (429, b"{}"), (401, b"{}"), (403, b"{}"), (404, b"<html>"), (200, b"{}"),
     (200, b'{"schema": null}'), (200, b"<html>"), (302, b"")],
)  # fmt: skip
def test_a_registry_that_cannot_answer_is_no_fault_of_the_record(serve: Serve, status: int, body: bytes) -> None:
    serde = SchemaRegistry(serve(lambda path, query: (status, body)), wait=0).avro("s", '"string"')
    with pytest.raises(RegistryUnavailableError):
        serde.decode(prefix(5) + b"\2x")


@pytest.mark.parametrize("given", [2**32, -1, "7", None])
def test_an_id_that_is_none(serve: Serve, given: object) -> None:
    body = json.dumps({"subject": "s", "version": 1, "id": given, "schema": '"string"'}).encode()
    with pytest.raises(EnvironmentUnusableError, match="no id for the schema"):
        SchemaRegistry(serve(lambda path, query: (200, body)), wait=0).avro("s").encode("x")


def test_references_without_end(serve: Serve) -> None:
    references = [{"name": "r", "subject": "s", "version": 1}]
    body = json.dumps({"subject": "s", "version": 1, "id": 1, "schema": '"string"', "references": references}).encode()
    with pytest.raises(EnvironmentUnusableError, match="have no end"):
        SchemaRegistry(serve(lambda path, query: (200, body)), wait=0).avro("s").own()


def test_a_server_that_answers_after_a_while_is_asked_again(serve: Serve) -> None:
    answers = [(503, b""), (503, b""), (200, b'{"schema": "\\"string\\""}')]
    serde = SchemaRegistry(serve(lambda path, query: answers.pop(0)), wait=20)
    assert serde.client.by_id(SchemaId(5)).text == '"string"'

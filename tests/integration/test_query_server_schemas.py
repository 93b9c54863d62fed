"""The query server on tables whose values have schemas in a registry: JSON, and never a wait in the event loop."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from onceflow.schema_registry.client import RegistryClient
from onceflow.schema_registry.json_view import JsonView
from onceflow.schema_registry.wire_format import prefix
from onceflow.server.formats import Format
from onceflow.server.schema_values import SchemaValues
from onceflow.testing import independent

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
SCHEMA = json.dumps({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]})


class Registry:
    """A registry that can be held up.

    Attributes:
        open: answers wait until it is set. asked: paths that were asked for.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.asked: list[str] = []
        self.schemas: dict[str, str] = {"7": SCHEMA}
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                registry.open.wait(60)
                text = registry.schemas.get(self.path.partition("?")[0].rpartition("/")[2])
                body = json.dumps({"schema": text} if text else {"error_code": 40403, "message": "no"}).encode()
                self.send_response(200 if text else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.close()


def value(n: int, schema_id: int = 7) -> bytes:
    return prefix(schema_id) + bytes([2 * n])


def schema_format(registry: Registry, wait_s: float = 5.0) -> Format:
    return Format.of("text", "schema", SchemaValues(JsonView(RegistryClient(registry.url, wait=0)), wait_s))


def test_values_with_schemas_are_json(onceflow_broker: str, topic: str, serve: Serve, registry: Registry) -> None:
    rows = [(b"k%d" % n, value(n)) for n in range(20)]
    independent.fill(onceflow_broker, topic, [*rows, (b"other", value(1, 8)), (b"text", b"x"), (b"cut", value(1)[:-1])])
    client = serve({topic: schema_format(registry)})
    assert client.get(f"/tables/{topic}/keys/k3").json()["value"] == {"n": 3}
    assert client.get(f"/tables/{topic}").json()["value"] == "schema"
    for key, said in (("other", "no schema with id 8"), ("text", "does not begin with the id"), ("cut", "too early")):
        found = client.get(f"/tables/{topic}/keys/{key}")
        assert found.status_code == 422
        assert said in found.json()["detail"]
        assert client.get(f"/tables/{topic}/keys/{key}", params={"value_encoding": "base64"}).status_code == 200
    many = client.post(f"/tables/{topic}/multi-get", json={"keys": ["k1", "k2"]}).json()["rows"]
    assert many == [{"key": "k1", "value": {"n": 1}}, {"key": "k2", "value": {"n": 2}}]
    page = client.get(f"/tables/{topic}/range", params={"prefix": "k", "limit": 3}).json()["rows"]
    assert [row["value"] for row in page] == [{"n": 0}, {"n": 1}, {"n": 10}]
    lines = client.get(f"/tables/{topic}/range", headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line).get("value") for line in lines[1:3]] == [{"n": 0}, {"n": 1}]
    assert "no schema with id 8" in next(line for line in lines if '"other"' in line)
    assert len(registry.asked) == 2, "each schema once"


def test_a_registry_that_does_not_answer_holds_up_nobody_else(
    onceflow_broker: str, topic: str, serve: Serve, registry: Registry
) -> None:
    independent.fill(onceflow_broker, topic, [(b"k", value(5)), (b"plain", b"{}")])
    client = serve({topic: schema_format(registry, wait_s=1.0)})
    registry.open.clear()
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(client.get(f"/tables/{topic}/keys/k"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    assert client.get(f"/tables/{topic}/keys/k", params={"value_encoding": "base64"}).status_code == 200
    assert client.get("/health").status_code == 200
    assert time.monotonic() - begin < 1, "the event loop waits for no registry"
    for thread in threads:
        thread.join(30)
    assert {answer.status_code for answer in answers} == {503}
    assert "has not answered within 1 s" in answers[0].json()["detail"]
    assert answers[0].headers["Retry-After"]
    lines = client.get(f"/tables/{topic}/range", headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert json.loads(lines[-1])["error"]["status"] == 503
    with client.stream("GET", f"/tables/{topic}/changes", params={"since": f"{topic}:0.0.0.0"}) as response:
        events = "".join(response.iter_text())
    assert "event: problem" in events
    assert "has not answered" in events
    assert len(registry.asked) == 1, "one request at a time for a schema"
    registry.open.set()
    registry_answers = [client.get(f"/tables/{topic}/keys/k")]
    while registry_answers[-1].status_code == 503 and len(registry_answers) < 20:
        registry_answers.append(client.get(f"/tables/{topic}/keys/k"))
    assert registry_answers[-1].json()["value"] == {"n": 5}


def test_a_registry_that_is_away(onceflow_broker: str, topic: str, serve: Serve) -> None:
    independent.fill(onceflow_broker, topic, [(b"k", value(5))])
    away = SchemaValues(JsonView(RegistryClient("http://127.0.0.1:9", wait=0)))
    client = serve({topic: Format.of("text", "schema", away)})
    found: Any = client.get(f"/tables/{topic}/keys/k")
    assert found.status_code == 503
    assert "was asked for the schema with id 7, and does not answer" in found.json()["detail"]

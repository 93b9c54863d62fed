"""The query server (`onceflow table serve`) on a real broker."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest
import trustme
from confluent_kafka.admin import AdminClient, NewPartitions

from onceflow.client.settings import ClientSettings
from onceflow.server.formats import Format, to_base64url
from onceflow.server.options import Limits, ServeOptions
from onceflow.server.process import QueryServer
from onceflow.tables import following
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

Serve = Callable[..., httpx.Client]
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def serve(onceflow_broker: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers in this process; each call returns a client of a new one, when it is ready."""
    running: list[tuple[QueryServer, threading.Thread, httpx.Client]] = []

    def start(tables: dict[str, Format] | str, *, ready: bool = True, **given: Any) -> httpx.Client:
        named = {tables: Format()} if isinstance(tables, str) else tables
        options = {"settings": ClientSettings(onceflow_broker), "state_dir": tmp_path, "port": 0, **given}
        server = QueryServer(ServeOptions(named, **options))
        server.open()
        thread = threading.Thread(target=server.run)
        thread.start()
        client = httpx.Client(base_url=server.url, timeout=30, verify=False)
        running.append((server, thread, client))
        if ready:
            wait_until(lambda: client.get("/ready").status_code == 200, 30, lambda: client.get("/ready").text)
        return client

    yield start
    for server, thread, client in running:
        client.close()
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("served", 4, cleanup_policy="compact")


def write(bootstrap: str, topic: str, pairs: dict[Any, Any], partitioner: str = "murmur2_random") -> str:
    """Write rows as another program does. Returns the position after them."""
    ends: dict[int, int] = {}

    def delivered(error: Any, message: Any) -> None:
        assert error is None
        ends[message.partition()] = max(message.offset() + 1, ends.get(message.partition(), 0))

    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "partitioner": partitioner})
    for key, value in pairs.items():
        producer.produce(topic, value, key, on_delivery=delivered)
    assert not producer.flush(30)
    return f"{topic}:" + ".".join(str(ends.get(partition, "")) for partition in range(max(ends) + 1))


def numbers(count: int) -> dict[str, str]:
    return {f"key-{n:04d}": json.dumps({"n": n}) for n in range(count)}


def test_lookups(onceflow_broker: str, topic: str, serve: Serve) -> None:
    write(onceflow_broker, topic, numbers(500))
    client = serve(topic)
    found = client.get(f"/tables/{topic}/keys/key-0007")
    assert found.status_code == 200
    document = found.json()
    assert (document["table"], document["key"], document["value"]) == (topic, "key-0007", {"n": 7})
    assert document["position"] == found.headers["Onceflow-Position"]
    assert document["position"].startswith(f"{topic}:")
    assert str(document["lag"]["records"]) == found.headers["Onceflow-Lag-Records"] == "0"
    assert str(document["lag"]["ms"]) == found.headers["Onceflow-Lag-Ms"]
    # With a parameter, the request takes another way through the server.
    again = client.get(f"/tables/{topic}/keys/key-0007", params={"value_encoding": "text"}).json()
    assert (again["key"], again["value"]) == ("key-0007", '{"n": 7}')

    missing = client.get(f"/tables/{topic}/keys/nobody")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"
    assert missing.headers["Onceflow-Position"] == missing.json()["position"]

    many = client.post(f"/tables/{topic}/multi-get", json={"keys": ["key-0003", "no", "key-0001", "key-0003"]}).json()
    assert many["rows"] == [{"key": f"key-000{n}", "value": {"n": n}} for n in (3, 1, 3)]
    assert client.get(f"/tables/{topic}/count").json()["count"] == 500

    listed = client.get("/tables").json()["tables"]
    assert [table["table"] for table in listed] == [topic]
    assert listed[0]["placement"] == client.get(f"/tables/{topic}").json()["placement"] == "default"
    assert [each["partition"] for each in listed[0]["partitions"]] == [0, 1, 2, 3]
    assert all(each["instances"] and not each["restoring"] for each in listed[0]["partitions"])
    assert client.get("/tables/other").status_code == client.get("/tables/other/count").status_code == 404
    assert client.get("/health").json()["status"] == "ok"
    assert "/tables/{table}/range" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


def test_ranges_and_cursors(onceflow_broker: str, topic: str, serve: Serve) -> None:
    rows = numbers(3_000)
    write(onceflow_broker, topic, {**rows, "other": "1", "pretty": '{\n  "big": 12345678901234567890123,\n "a": 1.0}'})
    client = serve(topic)

    def get(**params: Any) -> Any:
        found = client.get(f"/tables/{topic}/range", params=params)
        assert found.status_code == 200, found.text
        return found.json()

    def lines(**params: Any) -> tuple[list[Any], Any]:
        headers = {"Accept": "application/x-ndjson"}
        with client.stream("GET", f"/tables/{topic}/range", params=params, headers=headers) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            *found, last = [json.loads(line) for line in response.iter_lines()]
        return [row["key"] for row in found], last

    first = get(start="key-0010", end="key-0020", limit=4)
    assert [row["key"] for row in first["rows"]] == [f"key-{n:04d}" for n in range(10, 14)]
    rest = get(start="key-0010", end="key-0020", cursor=first["cursor"])
    assert [row["value"]["n"] for row in rest["rows"]] == list(range(14, 20))
    assert rest["cursor"] is None
    last = get(prefix="key-", reverse=True, limit=3)
    assert [row["key"] for row in last["rows"]] == ["key-2999", "key-2998", "key-2997"]
    before = get(prefix="key-", reverse=True, limit=2, cursor=last["cursor"])
    assert [row["key"] for row in before["rows"]] == ["key-2996", "key-2995"]
    assert get(start="key-0020", end="key-0010")["rows"] == []
    assert len(get()["rows"]) == 100
    assert get(limit=2, prefix="p")["cursor"] is None

    keys, ending = lines()
    assert keys == sorted([*rows, "other", "pretty"])
    assert (ending["cursor"], ending["count"]) == (None, 3_002)
    assert ending["position"].startswith(topic)
    assert lines(reverse=True)[0] == keys[::-1]
    some, ending = lines(limit=1_700)
    more, _ = lines(cursor=ending["cursor"])
    assert some + more == keys
    # Digits stay as they were written, and line breaks do not break lines.
    text = client.get(f"/tables/{topic}/range?prefix=pretty", headers={"Accept": "application/x-ndjson"}).text
    assert "12345678901234567890123" in text
    assert "1.0" in text.splitlines()[0]
    assert client.get(f"/tables/{topic}/range?limit=100000").status_code == 400
    assert client.get(f"/tables/{topic}/range?cursor=%C3%BC").status_code == 400


def test_keys_and_values_of_all_kinds(onceflow_broker: str, topic: str, make_topic: Any, serve: Serve) -> None:
    binary = bytes(range(256))
    longest = b"k" * 501
    hostile = [
        b"../../etc/passwd",
        b"",
        b".",
        b"a/b//c",
        b"?x=1#y",
        b"%2e",
        b" \t\r\n\0",
        "\u00fc\u4e2d".encode(),
        longest,
    ]
    write(
        onceflow_broker,
        topic,
        {**dict.fromkeys(hostile, b"1"), binary: b"2", b"bad": b"\xffno json", b"l" * 502: b"3"},
    )
    longs = make_topic("longs", 2, cleanup_policy="compact")
    write(onceflow_broker, longs, {n.to_bytes(8, "big", signed=True): f"text {n}".encode() for n in (-1, 0, 1 << 62)})
    client = serve({topic: Format(), longs: Format.of("long", "text")})
    for key in hostile:
        quoted = "".join(f"%{byte:02x}" for byte in key)
        assert client.get(f"/tables/{topic}/keys/{quoted}").json()["value"] == 1, key
        params = {"key_encoding": "base64url"}
        found = client.get(f"/tables/{topic}/keys/{to_base64url(key)}", params=params).json()
        assert (found["key"], found["value"]) == (to_base64url(key), 1)
    in_base64 = client.get(f"/tables/{topic}/keys/{to_base64url(binary)}", params={"key_encoding": "base64url"})
    assert in_base64.json()["value"] == 2
    assert client.get(f"/tables/{topic}/keys/%ff").status_code == 400
    too_long = client.get(f"/tables/{topic}/keys/{'l' * 502}")
    assert too_long.status_code == 400
    assert "502 bytes" in too_long.json()["detail"]
    assert client.get(f"/tables/{topic}").json()["ignored"] == 1

    unreadable = client.get(f"/tables/{topic}/keys/bad")
    assert unreadable.status_code == 422
    assert "not json" in unreadable.json()["detail"]
    raw = client.get(f"/tables/{topic}/keys/bad", params={"value_encoding": "base64"}).json()["value"]
    assert base64.b64decode(raw) == b"\xffno json"
    rows = {row["key"]: row for row in client.get(f"/tables/{topic}/range").json()["rows"]}
    assert len(rows) == len(hostile) + 2
    assert "not json" in rows["bad"]["error"]
    assert rows[None]["key_base64"] == to_base64url(binary)

    assert client.get(f"/tables/{longs}/keys/-1").json()["value"] == "text -1"
    many = client.post(f"/tables/{longs}/multi-get", json={"keys": [0, str(1 << 62), 5]}).json()["rows"]
    assert [row["key"] for row in many] == [0, 1 << 62]
    for wrong in ("x", "1" * 30, "1.5"):
        assert client.get(f"/tables/{longs}/keys/{wrong}").status_code == 400
    for body in ("", "[]", '{"keys": 3}', '{"keys": [[1]]}', '{"keys": ["\\ud800"]}', '{"keys": [true]}'):
        assert client.post(f"/tables/{longs}/multi-get", content=body).status_code == 400
    assert client.post(f"/tables/{topic}/multi-get", json={"keys": ["a"] * 1_001}).status_code == 413


def test_read_your_writes_and_staleness(onceflow_broker: str, topic: str, serve: Serve) -> None:
    client = serve(topic)
    for n in range(5):
        position = write(onceflow_broker, topic, {f"key-{key}": str(n) for key in range(8)})
        for key in range(8):
            found = client.get(f"/tables/{topic}/keys/key-{key}", params={"min_position": position})
            assert found.json()["value"] == n
        counted = client.get(f"/tables/{topic}/count", params={"min_position": position, "max_staleness": "1 minute"})
        assert counted.json()["count"] == 8
    behind = client.get(f"/tables/{topic}/count", params={"min_position": f"{topic}:9999", "wait": "0.05"})
    assert behind.status_code == 503
    assert behind.headers["Retry-After"] == "1"
    assert "min_position" in behind.json()["detail"]
    assert behind.json()["position"]
    stale = client.get(f"/tables/{topic}/keys/key-1", params={"max_staleness": "0", "wait": "0"})
    assert stale.status_code in (200, 503)
    for params in (
        {"min_position": "1 2"},
        {"min_position": "other:1"},
        {"max_staleness": "soon"},
        {"wait": "-1"},
        {"wait": "1e999"},
        {"value_encoding": "xml"},
    ):
        assert client.get(f"/tables/{topic}/keys/key-1", params=params).status_code == 400, params


def test_changes(onceflow_broker: str, topic: str, serve: Serve) -> None:
    write(onceflow_broker, topic, {"a": "1", "b": "2"})
    client = serve(topic, limits=Limits(streams=1))

    def read(count: int, **params: Any) -> list[tuple[str, str, Any]]:
        found: list[tuple[str, str, Any]] = []
        with client.stream("GET", f"/tables/{topic}/changes", params=params) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            event: dict[str, str] = {}
            for line in response.iter_lines():
                if line:
                    name, _, rest = line.partition(": ")
                    event[name] = rest
                    continue
                found.append((event["event"], event["id"], json.loads(event["data"])))
                if len(found) == 1:
                    assert client.get(f"/tables/{topic}/changes").status_code == 503  # one stream is the limit
                    write(onceflow_broker, topic, {"a": None, "c": "3"})
                if len(found) == count:
                    return found
        return found

    first, *changes = read(3)
    assert first[0] == "position"
    assert {(event, data["key"], data["value"]) for event, _, data in changes} == {
        ("change", "a", None),
        ("change", "c", 3),
    }
    wait_until(lambda: client.get(f"/tables/{topic}/changes", params={"since": "x"}).status_code == 400, 30, "the end")
    # From an earlier position, and on from where another stream has ended.
    _, *again = read(5, since=first[1])
    assert [data["key"] for _, _, data in again[:2]] in (["a", "c"], ["c", "a"])
    assert set(again[1][2]) == {"key", "value", "partition", "offset", "timestamp_ms"}
    wait_until(lambda: client.get(f"/tables/{topic}/changes", params={"since": "x"}).status_code == 400, 30, "the end")
    _, *rest = read(3, since=again[0][1], prefix="c")
    assert {data["key"] for _, _, data in rest} == {"c"}


def test_another_partitioner(onceflow_broker: str, make_topic: Callable[..., str], serve: Serve) -> None:
    """Python producers with default settings place keys by CRC32."""
    topic = make_topic("crc", 6, cleanup_policy="compact")
    write(onceflow_broker, topic, numbers(100), "consistent_random")
    client = serve(topic)
    assert client.get(f"/tables/{topic}").json()["placement"] == "other"
    for n in range(100):
        assert client.get(f"/tables/{topic}/keys/key-{n:04d}").json()["value"] == {"n": n}
    many = client.post(f"/tables/{topic}/multi-get", json={"keys": list(numbers(120))}).json()
    assert len(many["rows"]) == 100


def test_tokens_and_limits(onceflow_broker: str, topic: str, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    write(onceflow_broker, topic, {"a": "1"})
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


def test_slow_clients_and_many_connections(
    onceflow_broker: str, topic: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    write(onceflow_broker, topic, {f"key-{n}": json.dumps("x" * 10_000) for n in range(2_000)})
    client = serve(topic, limits=Limits(stall_s=1.0, request_s=2.0, requests=2_000))
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

    request = f"GET /tables/{topic}/keys/key-7 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    many = [socket.create_connection(where, 30) for _ in range(1_000)]
    for each in many:
        each.sendall(request)
    assert {ends(each)[:15] for each in many} == {b"HTTP/1.1 200 OK"}


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
    write(onceflow_broker, topic, {**numbers(50), b"\xff": b"1", "bad": "no json"})
    client = serve(topic, limits=Limits(stream_s=0.01, wait_s=0.01, request_s=1.0))
    schema = from_url(str(client.base_url.join("/openapi.json")))
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        tried.append(operation.label)
        for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if "{table}/" in operation.path else [])):

            @settings(
                max_examples=3 if operation.path.endswith("/changes") else 25,
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


def test_instances_ask_each_other_with_tls_and_tokens(
    onceflow_broker: str, make_topic: Callable[..., str], serve: Serve, tmp_path: Path
) -> None:
    topic = make_topic("secret", 4, cleanup_policy="compact")
    write(onceflow_broker, topic, numbers(200), "consistent_random")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    given = {
        "certificate": tmp_path / "server.pem",
        "certificate_key": tmp_path / "server.pem",
        "authority": tmp_path / "ca.pem",
        "tokens": [TOKEN],
        "instances": f"group-{topic}",
    }
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    both = [serve(topic, **given, ready=False) for _ in range(2)]
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    with contextlib.ExitStack() as stack:
        urls = [str(each.base_url) for each in both]
        clients = [stack.enter_context(httpx.Client(base_url=url, verify=context, headers=allowed)) for url in urls]

        def shared() -> bool:
            listed = [client.get(f"/tables/{topic}").json()["partitions"] for client in clients]
            ready = all(client.get("/ready").status_code == 200 for client in clients)
            return ready and all(
                len({each["instances"][0] for each in partitions if each["instances"]}) == 2 for partitions in listed
            )

        wait_until(shared, 30, lambda: clients[0].get("/tables").text)
        assert urls[0].startswith("https://")
        for client in clients:
            for key, value in list(numbers(200).items())[::10]:
                assert client.get(f"/tables/{topic}/keys/{key}").json()["value"] == json.loads(value)
            many = client.post(f"/tables/{topic}/multi-get", json={"keys": [*numbers(200), "no"]}).json()
            assert {row["key"]: json.dumps(row["value"]) for row in many["rows"]} == numbers(200)
            assert client.get(f"/tables/{topic}/range", params={"limit": 7}).json()["rows"][6]["key"] == "key-0006"
            assert client.get(f"/tables/{topic}/count").json()["count"] == 200
            assert client.get(f"/tables/{topic}").json()["placement"] == "other"
            for body in (
                "",
                "1",
                '{"keys": 1}',
                '{"wish": {"least": [], "staleness_ms": null, "wait_s": 1}, "places": [[[], 1]]}',
            ):
                assert client.post(f"/peer/{topic}/get", content=body).status_code == 400
            assert client.post(f"/peer/{topic}/get", headers={"Authorization": "no"}).status_code == 401


def test_a_topic_that_grows(onceflow_broker: str, topic: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_METADATA_S", 0.2)
    write(onceflow_broker, topic, {**numbers(40), **{f"old-{n}": "1" for n in range(20)}})
    client = serve(topic)
    assert client.get(f"/tables/{topic}").json()["placement"] == "default"
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    admin.create_partitions([NewPartitions(topic, 7)])[topic].result(30)
    wait_until(lambda: len(client.get(f"/tables/{topic}").json()["partitions"]) == 7, 30, "all partitions")
    position = write(onceflow_broker, topic, {f"key-{n:04d}": '"new"' for n in range(40)})
    assert client.get(f"/tables/{topic}").json()["placement"] == "other"
    wait_until(lambda: client.get("/ready").status_code == 200, 30, "it is ready")
    for n in range(40):
        params = {"min_position": position}
        assert client.get(f"/tables/{topic}/keys/key-{n:04d}", params=params).json()["value"] == "new"
    assert client.get(f"/tables/{topic}/keys/old-3").json()["value"] == 1

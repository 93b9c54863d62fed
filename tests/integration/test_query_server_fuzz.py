"""Minutes of hostile requests to two instances of the query server: no 500, nothing hangs, memory is bounded."""

from __future__ import annotations

import base64
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceflow.server.options import Limits
from onceflow.server.peer_auth import HEADER, Asked, PeerSecrets
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.served import PEER_SECRET, ServerProcess, numbers, write_rows

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(900)]

FUZZ_S, RAW_S, AMPLIFIED_S = 180.0, 60.0, 60.0
#: More than what a server with these tables takes when all of its connections are used.
GROWN_MIB = 200.0


class Servers:
    """Two instances that share a table with text keys, one with binary keys, and one whose keys are JSON."""

    def __init__(self, bootstrap: str, topics: list[str], folder: Path) -> None:
        self.text, self.binary, self.json = topics
        tables = [self.text, f"{self.binary},key=base64,value=base64", self.json]
        given = [*tables, "--bootstrap-servers", bootstrap, "--instances", f"group-{self.text}", "--copies", "1"]
        given += ["--state-dir", str(folder), "--request-timeout", "3s", "--no-access-log"]
        self.all = [ServerProcess(given, folder / f"{n}.log") for n in range(2)]
        self.client = httpx.Client(timeout=20)
        self.binary_key = base64.urlsafe_b64encode(bytes(range(200, 256))).decode().rstrip("=")

    def ready(self) -> bool:
        return all(self.client.get(f"{each.url}/ready").status_code == 200 for each in self.all)

    def check(self) -> None:
        """Both answer rightly for all tables."""
        for each in self.all:
            for n in range(0, 200, 17):
                found = self.client.get(f"{each.url}/tables/{self.text}/keys/key-{n:04d}")
                assert (found.status_code, found.json().get("value")) == (200, {"n": n}), found.text
            found = self.client.get(f"{each.url}/tables/{self.binary}/keys/{self.binary_key}")
            assert base64.b64decode(found.json()["value"]) == b"binary"
            many = self.client.post(f"{each.url}/tables/{self.json}/multi-get", json={"keys": ['{"id": 7}', "no"]})
            assert [row["value"] for row in many.json()["rows"]] == [7]

    def rss_mib(self) -> list[float]:
        """The memory of each."""
        lines = [Path(f"/proc/{each.pid}/status").read_text() for each in self.all]
        return [int(text.split("VmRSS:")[1].split()[0]) / 1024 for text in lines]

    def open_files(self) -> list[int]:
        return [len(list(Path(f"/proc/{each.pid}/fd").iterdir())) for each in self.all]


@pytest.fixture(scope="module")
def servers(onceflow_broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    from onceflow.testing.broker import create_topic

    topics = [f"fuzzed-{kind}-{time.time_ns()}" for kind in ("text", "binary", "json")]
    for topic in topics:
        create_topic(onceflow_broker, topic, 4, {"cleanup.policy": "compact"})
    binary = {bytes(range(n, 256)): b"binary" for n in range(200, 250)}
    write_rows(onceflow_broker, topics[0], {**numbers(200), b"\xff\xfe": b"1", "bad": "no json", "": "2"})
    write_rows(onceflow_broker, topics[1], {**binary, b"large": b"x" * 900_000})
    write_rows(onceflow_broker, topics[2], {json.dumps({"id": n}): str(n) for n in range(100)})
    found = Servers(onceflow_broker, topics, tmp_path_factory.mktemp("fuzzed"))
    try:
        for each in found.all:
            each.launch()
        for each in found.all:
            each.wait()
        wait_until(found.ready, 60, lambda: found.client.get(f"{found.all[0].url}/ready").text)
        found.check()
        yield found
    finally:
        found.client.close()
        for each in found.all:
            each.end()


def alive_afterwards(servers: Servers, before: list[float], files: list[int]) -> None:
    """Both answer, with no more memory and open files than before, apart from a bound."""
    wait_until(servers.ready, 60, lambda: servers.client.get(f"{servers.all[0].url}/ready").text)
    servers.check()
    after = servers.rss_mib()
    assert all(now - then < GROWN_MIB for now, then in zip(after, before, strict=True)), (before, after)
    wait_until(
        lambda: all(now < then + 50 for now, then in zip(servers.open_files(), files, strict=True)),
        60,
        lambda: (files, servers.open_files()),
    )
    logs = "".join(each.log.read_text() for each in servers.all)
    assert "Traceback" not in logs, logs[logs.index("Traceback") - 500 :][:9000]


def test_requests_of_every_kind(servers: Servers) -> None:
    """Made from the OpenAPI document, valid and invalid ones, by turns to both instances."""
    import requests
    from hypothesis import seed
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.openapi import from_url
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    tables = [servers.text, servers.binary, servers.json]
    before, files, asked = servers.rss_mib(), servers.open_files(), Counter[str]()
    end = time.monotonic() + FUZZ_S
    for round_ in range(1000):
        schema = from_url(servers.all[round_ % 2].url + "/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
                if mode is GenerationMode.NEGATIVE and "{table}/" not in operation.path:
                    continue

                @seed(round_)
                @settings(
                    max_examples=3 if operation.path.endswith("/changes") else 30,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case: Any) -> None:
                    if "table" in case.path_parameters and len(str(case.body)) % 5:
                        case.path_parameters["table"] = tables[len(str(case.query)) % 3]
                    if case.operation.path.endswith("/changes"):  # they have no end
                        kwargs = case.as_transport_kwargs()
                        with requests.request(**kwargs, timeout=20, stream=True) as streamed:
                            asked[f"{case.operation.label} {streamed.status_code}"] += 1
                            assert streamed.status_code in (200, 400, 404, 405, 503), streamed.text
                            if streamed.status_code == 200:
                                assert next(streamed.iter_lines()) == b"event: position"
                        return
                    answer = case.call(timeout=20)
                    asked[f"{case.operation.label} {answer.status_code}"] += 1
                    # 503 says that it is not now, as the document says; it is no error of the server.
                    case.validate_response(answer, checks=checks if answer.status_code != 503 else checks[1:])

                if time.monotonic() < end:
                    ask()
        if time.monotonic() > end:
            break
    print(json.dumps(dict(sorted(asked.items())), indent=1), before, servers.rss_mib())
    assert asked.total() > 1_000
    alive_afterwards(servers, before, files)


def hostile(servers: Servers) -> list[Callable[[random.Random], bytes]]:
    """Makers of what is sent on one connection."""
    head = f"POST /tables/{servers.text}/multi-get HTTP/1.1\r\nHost: x\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    paths = [
        b"/tables/../../etc/passwd",
        b"/tables/%2e%2e/%2e%2e/etc/passwd",
        f"/tables/{servers.text}/keys/%00".encode(),
        f"/tables/{servers.text}/keys/%c0%ae%c0%ae%c0%af".encode(),  # overlong UTF-8
        f"/tables/{servers.text}/keys/%ed%a0%80".encode(),  # half of a surrogate pair
        f"/tables/{servers.text}/keys/%zz%".encode(),
        f"/tables/{servers.text}/keys/\xff\xfe".encode("latin-1"),
        f"/tables/{servers.text}/range?start=%ff&limit=99999999999999999999".encode(),
        f"/tables/{servers.text}/range?cursor=\x00\x01".encode(),
        b"//",
        b"*",
        b"/peer/../tables",
        b"/" + b"a" * 60_000,
        f"/peer/{servers.text}/get".encode(),
    ]
    get = b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n"
    return [
        lambda chance: get % (chance.choice(paths), b""),
        lambda chance: (get % (chance.choice(paths), b""))[: chance.randrange(40)],
        lambda chance: get % (b"/tables", b"".join(b"X-%d: y\r\n" % n for n in range(3_000))),
        lambda chance: get % (b"/tables", b"X: " + b"y" * chance.choice([1 << 15, 1 << 18, 1 << 21]) + b"\r\n"),
        lambda chance: (get % (b"/health", b"")) * 300,
        lambda chance: (get % (b"/tables", b"")) * 3 + chance.randbytes(2_000),
        lambda chance: chance.randbytes(chance.randrange(5_000)),
        lambda chance: chunked + b"10\r\n" + b"x" * 16 + b"\r\n",
        lambda chance: chunked + b"ffffffffffffffff\r\nxx",
        lambda chance: chunked + b"\r\n".join(b"1\r\n[" for _ in range(5_000)),
        lambda chance: head + b"Content-Length: 99999999999999999999\r\n\r\n{",
        lambda chance: head + b"Content-Length: -1\r\n\r\n{}",
        lambda chance: head + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
        lambda chance: head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        lambda chance: head + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000,
        lambda chance: head + b'Content-Length: 40\r\n\r\n{"keys": ["' + b"\xff" * 29,
        lambda chance: b"GET /tables HTTP/9.9\r\n\r\n",
        lambda chance: b"GET /changes HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        lambda chance: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda chance: bytes.fromhex("1603010200010001fc0303") + chance.randbytes(300),  # a hello of TLS
    ]


def test_hostile_bytes(servers: Servers) -> None:
    """Raw connections that break every rule, and 1,000 that stay half open, while others get right answers."""
    before, files = servers.rss_mib(), servers.open_files()
    makers = hostile(servers)
    end = time.monotonic() + RAW_S
    statuses: Counter[bytes] = Counter()
    errors: list[BaseException] = []
    slowest = 0.0
    half_open: list[socket.socket] = []

    def attack(number: int) -> None:
        chance = random.Random(number)
        try:
            while time.monotonic() < end:
                host, port = chance.choice(servers.all).url.removeprefix("http://").split(":")
                with socket.create_connection((host, int(port)), 20) as connection:
                    connection.settimeout(0.5)
                    found = b""
                    try:
                        connection.sendall(chance.choice(makers)(chance))
                        if chance.random() < 0.5:
                            connection.shutdown(socket.SHUT_WR)
                        found = connection.recv(1 << 16)
                    except OSError:  # it is disconnected, or there is no answer to half a request
                        pass
                    statuses[found[9:12]] += 1
                    assert not found.startswith(b"HTTP/1.1 500"), found
        except BaseException as error:
            errors.append(error)

    for n in range(1_000):
        host, port = servers.all[n % 2].url.removeprefix("http://").split(":")
        half_open.append(socket.create_connection((host, int(port)), 20))
        half_open[-1].sendall(b"GET /tables/x/keys/"[: n % 20])
    threads = [threading.Thread(target=attack, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end and not errors:
        began = time.monotonic()
        servers.check()
        slowest = max(slowest, time.monotonic() - began)
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    for each in half_open:
        each.close()
    print(dict(statuses), f"slowest check {slowest:.2f} s", before, servers.rss_mib())
    assert statuses[b"200"]
    assert statuses[b"400"]
    assert slowest < 10
    alive_afterwards(servers, before, files)


#: Numbers and lists that ask for something again and again.
_MANY = st.sampled_from([1, 2, 50, 999, 1_000, 5_000, 60_000])
_NUMBER = st.sampled_from([0, 0, 1, 3, 4, -1, 10**9, True])
_NUMBERS = st.one_of(st.none(), st.tuples(_NUMBER, _MANY).map(lambda each: [each[0]] * each[1]), st.lists(_NUMBER))
_RANGE = {"low": st.sampled_from(["", "AA=="]), "high": st.none(), "reverse": st.booleans()}


def test_small_requests_with_large_answers(servers: Servers) -> None:
    """An answer is bounded whatever is asked for: the bytes, the memory of the server, and how long others wait."""
    large = base64.urlsafe_b64encode(b"large").decode().rstrip("=")
    before, files = servers.rss_mib(), servers.open_files()
    secrets, seen = PeerSecrets([PEER_SECRET]), Counter[str]()
    limits, slowest = Limits(), [0.0]
    end = time.monotonic() + AMPLIFIED_S

    def send(path: str, document: Any, *, peer: bool) -> None:
        content = json.dumps(document).encode()
        if time.monotonic() > end or len(content) > limits.body_bytes:
            return
        url = servers.all[len(content) % 2].url
        headers = {HEADER: secrets.proof(Asked(url, path, content))[0]} if peer else {}
        began = time.monotonic()
        answer = servers.client.post(url + path, content=content, headers=headers)
        seconds = time.monotonic() - began
        seen[f"{path.rsplit('/', 1)[1]} {answer.status_code}"] += 1
        assert answer.status_code in (200, 400, 409, 413, 503), answer.text[:500]
        # One row always fits; base64 and JSON make a third more of it.
        assert len(answer.content) < 1.5 * limits.answer_bytes, len(content)
        slowest[0] = max(slowest[0], seconds)  # for so long others may have waited for the loop of the server

    freshness = {"least": [], "staleness_ms": None, "wait_s": 0, "topic_id": "", "layout": [0, 0]}
    key = base64.b64encode(b"large").decode()

    @settings(max_examples=2_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        keys=st.tuples(st.sampled_from([large, "AA", "%", 1]), _MANY).map(lambda each: [each[0]] * each[1]),
        places=st.one_of(
            st.lists(st.tuples(_NUMBER, _NUMBERS), max_size=5),
            st.tuples(_NUMBER, _NUMBERS, _MANY).map(lambda each: [[each[0], each[1]]] * min(each[2], 1_000)),
        ),
        partitions=_NUMBERS,
        limit=_MANY,
        range_=st.fixed_dictionaries(_RANGE),
    )
    def ask(keys: Any, places: Any, partitions: Any, limit: int, range_: Any) -> None:
        send(f"/tables/{servers.binary}/multi-get", {"keys": keys}, peer=False)
        asked = {"keys": [key] * min(len(keys), 20_000), "places": places}
        send(f"/peer/{servers.binary}/get", {**asked, "freshness": freshness}, peer=True)
        page = {**range_, "partitions": partitions, "limit": limit, "freshness": freshness}
        send(f"/peer/{servers.binary}/page", page, peer=True)
        send(f"/peer/{servers.binary}/count", {"partitions": partitions, "freshness": freshness}, peer=True)

    ask()
    print(dict(seen), f"slowest answer {slowest[0]:.2f} s", before, servers.rss_mib())
    assert {"multi-get 413", "get 413", "get 400", "page 200", "count 200"} <= set(seen)
    assert slowest[0] < 5
    alive_afterwards(servers, before, files)

"""Several instances of the query server share tables: processes of their own, on a real broker."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.served import Answer, ServerProcess, Versions

pytestmark = [pytest.mark.integration, pytest.mark.faults]

KEYS, PARTITIONS = [f"key-{n:02d}" for n in range(60)], 6


class Writer:
    """Writes rising numbers to random keys, until it is stopped, and knows when each was acknowledged."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap, self._topic = bootstrap, topic
        self._producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        self._stopping = threading.Event()
        self._acknowledged: list[tuple[int, int, int]] = []
        self._number = 0
        self.write(KEYS)
        self._thread = threading.Thread(target=self._run)

    def write(self, keys: list[str]) -> None:
        def delivered(error: Any, message: Any) -> None:
            assert error is None
            self._acknowledged.append((message.partition(), message.offset(), int(time.time() * 1000)))

        for key in keys:
            self._number += 1
            self._producer.produce(self._topic, str(self._number), key, on_delivery=delivered)
        assert not self._producer.flush(30)

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            self.write(random.choices(KEYS, k=3))

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def versions(self) -> Versions:
        """Everything that was written, as another consumer reads it."""
        found = Versions.read(self._bootstrap, self._topic)
        for partition, offset, ms in sorted(self._acknowledged):
            found.acknowledged[partition].append((offset, ms))
        return found


class Readers:
    """Threads that ask random instances. All answers are kept."""

    def __init__(self, topic: str, urls: list[str]) -> None:
        self._topic, self._urls = topic, urls
        self._stopping = threading.Event()
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(ask,)) for ask in (self._one, self._many, self._all)]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]

    def _run(self, ask: Callable[[httpx.Client], httpx.Response]) -> None:
        try:
            with httpx.Client(timeout=30) as client:
                while not self._stopping.wait(0.01):  # the servers need the processor more
                    try:
                        response = ask(client)
                    except httpx.TransportError:  # of an instance that was killed
                        continue
                    assert response.status_code in (200, 503), response.text
                    if response.status_code == 503:
                        # Only of one that has just started or is being stopped: all others know who is alive.
                        assert re.search("not known yet|being stopped", response.text), response.text
                        assert response.headers["Retry-After"]
        except BaseException as error:
            self.errors.append(error)

    def _url(self) -> str:
        return f"{random.choice(self._urls)}/tables/{self._topic}"

    def _add(self, asked_ms: int, row: Any, aged: Any) -> None:
        value = str(row["value"]).encode()
        self.answers.append(Answer(row["key"].encode(), value, aged["position"], aged["lag"]["ms"], asked_ms))

    def _one(self, client: httpx.Client) -> httpx.Response:
        asked_ms = int(time.time() * 1000)
        found = client.get(f"{self._url()}/keys/{random.choice(KEYS)}")
        if found.status_code == 200:
            document = found.json()
            assert found.headers["Onceflow-Position"] == document["position"]
            assert found.headers.get("Onceflow-Lag-Ms", "None") == str(document["lag"]["ms"])
            self._add(asked_ms, document, document)
        return found

    def _many(self, client: httpx.Client) -> httpx.Response:
        keys = random.sample(KEYS, 20)
        asked_ms = int(time.time() * 1000)
        found = client.post(f"{self._url()}/multi-get", json={"keys": keys})
        if found.status_code == 200:
            document = found.json()
            assert [row["key"] for row in document["rows"]] == keys
            for row in document["rows"]:
                self._add(asked_ms, row, document)
        return found

    def _all(self, client: httpx.Client) -> httpx.Response:
        asked_ms = int(time.time() * 1000)
        found = client.get(f"{self._url()}/range", headers={"Accept": "application/x-ndjson"})
        if found.status_code == 200:
            *rows, last = [json.loads(line) for line in found.text.splitlines()]
            if "error" not in last:
                assert [row["key"] for row in rows] == KEYS
                for row in rows:
                    self._add(asked_ms, row, last)
        return found


class Group:
    """Three instances, and what each of them says."""

    def __init__(self, topic: str, instances: list[ServerProcess], session_s: float) -> None:
        self.topic, self.all, self.session_s = topic, instances, session_s
        self.client = httpx.Client(timeout=30)

    def start(self, *instances: ServerProcess) -> None:
        for each in instances:
            each.launch()
        for each in instances:
            each.wait()

    def holders(self, instance: ServerProcess) -> list[list[str]]:
        """Who has each partition, as this instance knows it."""
        document = self.client.get(f"{instance.url}/tables/{self.topic}").json()
        return [each["instances"] for each in document["partitions"]]

    def owned(self) -> list[int]:
        owners = [listed[0] for listed in self.holders(self.all[0])]
        return [owners.count(each.url) for each in self.all]

    def settled(self, *alive: ServerProcess) -> bool:
        """Whether these, and nobody else, have two copies of all partitions, up to date."""
        urls = {each.url for each in alive}
        for each in alive:
            if self.client.get(f"{each.url}/ready").status_code != 200:
                return False
            if any(len(listed) != min(2, len(alive)) or not urls.issuperset(listed) for listed in self.holders(each)):
                return False
        return True


@pytest.fixture
def group(onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path) -> Iterator[Group]:
    topic = make_topic("shared", PARTITIONS, cleanup_policy="compact")
    session_s = max(2.0, _least_session_s(onceflow_broker))
    given = [topic, "--bootstrap-servers", onceflow_broker, "--instances", f"group-{topic}", "--copies", "2"]
    given += ["--session-timeout", f"{session_s}s", "--state-dir", str(tmp_path)]
    found = Group(topic, [ServerProcess(given, tmp_path / f"{n}.log") for n in range(3)], session_s)
    yield found
    found.client.close()
    for each in found.all:
        each.end()


def _least_session_s(bootstrap: str) -> float:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    node = next(iter(admin.list_topics(timeout=30).brokers))
    (found,) = admin.describe_configs([ConfigResource("broker", str(node))]).values()
    return int(found.result(30)["group.min.session.timeout.ms"].value) / 1000


@pytest.mark.long
def test_instances_are_killed(onceflow_broker: str, group: Group) -> None:
    one, two, three = group.all
    writer = Writer(onceflow_broker, group.topic)
    group.start(*group.all)

    def awaited(*alive: ServerProcess, within_s: float = 30) -> None:
        wait_until(lambda: group.settled(*alive) or readers.errors, within_s, lambda: str([*map(group.holders, alive)]))

    wait_until(lambda: group.settled(*group.all) and group.owned() == [2, 2, 2], 30, lambda: str(group.holders(one)))
    with writer, Readers(group.topic, [each.url for each in group.all]) as readers:
        wait_until(lambda: len(readers.answers) > 1000 or readers.errors, 30, "answers")
        two.end()
        # Its partitions are answered by the other copies at once.
        for key in KEYS:
            found = group.client.get(f"{one.url}/tables/{group.topic}/keys/{key}")
            assert found.status_code == 200, found.text
        awaited(one, three, within_s=group.session_s + 15)
        # One is killed while the group is rebalanced for another one.
        two.start()
        three.end()
        awaited(one, two, within_s=group.session_s + 20)
        three.start()
        awaited(one, two, three)
        # One that is stopped leaves: nobody waits for its session to end.
        assert one.end(signal.SIGTERM) == 0
        awaited(two, three, within_s=max(5.0, group.session_s))
        one.start()
        awaited(one, two, three)
    assert len(readers.answers) > 5_000
    assert writer.versions().problems(readers.answers) == []
    position = group.client.get(f"{one.url}/tables/{group.topic}/count").json()["position"]
    for each in group.all:
        counted = group.client.get(f"{each.url}/tables/{group.topic}/count", params={"min_position": position}).json()
        assert counted["count"] == len(KEYS)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 10])
def test_an_owner_that_was_stopped_for_longer_than_its_session(onceflow_broker: str, group: Group, rounds: int) -> None:
    """It continues with what it had, and believes that it is still the owner: its answers say how old they are."""
    one, two, _ = group.all
    writer = Writer(onceflow_broker, group.topic)
    group.start(one, two)
    wait_until(lambda: group.settled(one, two), 30, lambda: str(group.holders(one)))
    host, port = two.url.removeprefix("http://").split(":")
    request = "GET /tables/{}/keys/{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers: list[Answer] = []

    def asked(keys: list[str]) -> list[socket.socket]:
        found = [socket.create_connection((host, int(port)), 30) for _ in keys]
        for key, connection in zip(keys, found, strict=True):
            connection.sendall(request.format(group.topic, key).encode())
        return found

    def answered(waiting: list[socket.socket], asked_ms: int) -> None:
        for connection in waiting:
            with connection, connection.makefile("rb") as file:
                head, _, body = file.read().partition(b"\r\n\r\n")
            document = json.loads(body)
            assert b" 200 " in head.splitlines()[0], document
            lag_ms, value = document["lag"]["ms"], str(document["value"]).encode()
            answers.append(Answer(document["key"].encode(), value, document["position"], lag_ms, asked_ms))

    with writer, Readers(group.topic, [one.url]) as readers:
        for _ in range(rounds):
            two.send(signal.SIGSTOP)
            waiting = asked(KEYS)
            wait_until(lambda: group.settled(one) or readers.errors, group.session_s + 15, lambda: group.holders(one))
            two.send(signal.SIGCONT)
            asked_ms = int(time.time() * 1000)
            answered(waiting, asked_ms)
            assert max(each.lag_ms or 0 for each in answers[-len(KEYS) :]) > 1000
            wait_until(lambda: group.settled(one, two) or readers.errors, 30, lambda: group.holders(two))
            asked_ms = int(time.time() * 1000)
            answered(asked(KEYS), asked_ms)
    versions = writer.versions()
    assert versions.problems(answers) == []
    assert versions.problems(readers.answers) == []

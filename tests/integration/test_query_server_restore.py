"""A query server is killed again and again while it restores a large table: every answer is right for its position."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest

from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.network import ANSWER, DELAY, Network, Rule
from onceflow_workshop.testing.proxy import Proxy, proxied_broker
from onceflow_workshop.testing.served import Answer, ServerProcess, Versions

pytestmark = [pytest.mark.integration, pytest.mark.faults]

KEYS, PARTITIONS, TOPIC = 200_000, 8, "large"
#: Each Fetch takes this long: the restore of all partitions takes some seconds.
SLOW = Network(1, [Rule(DELAY, ("Fetch",), ANSWER, seconds=0.1)])


@pytest.fixture(scope="module")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Proxy]]:
    with proxied_broker(tmp_path_factory.mktemp("broker")) as found:
        create_topic(found[0], TOPIC, PARTITIONS, {"cleanup.policy": "compact"})
        independent.fill(found[0], TOPIC, [(b"key-%d" % n, b"%050d" % n) for n in range(KEYS)])
        yield found


class Updates:
    """Writes and deletes few of the keys, until the end of the block."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for n in itertools.count(KEYS):
            value = None if random.random() < 0.1 else b"%d" % n
            self._producer.produce(TOPIC, value, b"key-%d" % random.randrange(200))
            if self._over.wait(0.002):
                break
        assert not self._producer.flush(30)

    def __enter__(self) -> Updates:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)


class Asker:
    """Asks for keys and keeps the answers, with what they say about their age."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)
        self.answers: list[Answer] = []
        self.restoring = 0

    def ask(self) -> None:
        keys = [f"key-{random.choice((random.randrange(200), random.randrange(KEYS + 9)))}" for _ in range(20)]
        found = self.client.post(f"/tables/{TOPIC}/multi-get", json={"keys": keys})
        if self._right(found, 200):
            document = found.json()
            values = {row["key"]: row["value"] for row in document["rows"]}
            self.answers += [self._answer(key, values.get(key), document) for key in keys]
        found = self.client.get(f"/tables/{TOPIC}/keys/{keys[0]}")
        if self._right(found, 200, 404):
            document = found.json()
            self.answers.append(self._answer(keys[0], document.get("value"), document))

    def all_rows(self) -> None:
        """Of what the table has now, in pages, as each page says."""
        cursor: dict[str, str] = {}
        while True:
            document = self.client.get(f"/tables/{TOPIC}/range", params={"limit": 10_000, **cursor}).json()
            self.answers += [self._answer(row["key"], row["value"], document) for row in document["rows"]]
            if document["cursor"] is None:
                return
            cursor = {"cursor": document["cursor"]}

    def refused(self, **params: Any) -> None:
        """What demands more than a table has that is restored gets 503, and what is there."""
        found = self.client.get(f"/tables/{TOPIC}/count", params={"wait": "0.05", **params})
        assert found.status_code == 503, found.text
        assert found.headers["Retry-After"] == "1"
        self._aged(found)

    def _right(self, found: httpx.Response, *codes: int) -> bool:
        if found.status_code == 503:  # the first moment: the copies are opened
            assert "No instance" in found.text or "not known yet" in found.text, found.text
            assert found.headers["Retry-After"] == "1"
            return False
        assert found.status_code in codes, found.text
        self._aged(found)
        return True

    def _aged(self, found: httpx.Response) -> None:
        """Header and document say the same, and that it lags while it is restored."""
        document = found.json()
        lag = document["lag"]
        assert document["position"] == found.headers["Onceflow-Position"]
        assert str(lag["records"]) == found.headers.get("Onceflow-Lag-Records", "None")
        assert str(lag["ms"]) == found.headers.get("Onceflow-Lag-Ms", "None")
        self.restoring += bool(lag["records"]) and lag["ms"] is None

    @staticmethod
    def _answer(key: str, value: str | None, aged: Any) -> Answer:
        raw = None if value is None else value.encode()
        return Answer(key.encode(), raw, aged["position"], aged["lag"]["ms"], int(time.time() * 1000))


@pytest.fixture
def server(behind_proxy: tuple[str, str, Proxy], tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def make(*options: str) -> ServerProcess:
        given = [TOPIC, "--value", "text", "--bootstrap-servers", behind_proxy[1], "--state-dir", str(tmp_path)]
        started.append(ServerProcess([*given, *options], tmp_path / "server.log"))
        return started[-1]

    yield make
    for each in started:
        each.end()


@pytest.mark.long
@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.timeout(600))])
def test_it_is_killed_while_it_restores(
    behind_proxy: tuple[str, str, Proxy], server: Callable[..., ServerProcess], rounds: int
) -> None:
    direct, _, proxy = behind_proxy
    instance = server()
    answers: list[Answer] = []
    restoring = 0
    with Updates(direct):
        for _ in range(rounds):
            proxy.faults(SLOW)
            instance.start()
            asker = Asker(instance.url)
            end = time.monotonic() + random.uniform(0.1, 1.5)
            while time.monotonic() < end:
                asker.ask()
            instance.end()
            answers += asker.answers
            restoring += asker.restoring
        proxy.faults(None)
        instance.start()
        asker = Asker(instance.url)
        wait_until(lambda: asker.client.get("/ready").status_code == 200, 60, lambda: asker.client.get("/ready").text)
    end = independent.end_offsets(direct, TOPIC)
    position = f"{TOPIC}:" + ".".join(str(end[TOPIC, each]) for each in range(PARTITIONS))
    counted = asker.client.get(f"/tables/{TOPIC}/count", params={"min_position": position, "wait": "20s"})
    asker.all_rows()
    versions = Versions.read(direct, TOPIC)
    assert versions.problems([*answers, *asker.answers]) == []
    living = sum(written[-1][1] is not None for written in versions.written.values())
    assert counted.json()["count"] == len(asker.answers) == living
    assert len(answers) > 50 * rounds
    assert restoring > rounds


@pytest.mark.long
def test_what_it_says_while_it_restores(
    behind_proxy: tuple[str, str, Proxy], server: Callable[..., ServerProcess]
) -> None:
    _, _, proxy = behind_proxy
    proxy.faults(SLOW)
    instance = server()
    instance.start()
    asker = Asker(instance.url)
    wait_until(
        lambda: any(each["restoring"] for each in asker.client.get(f"/tables/{TOPIC}").json()["partitions"]),
        30,
        "it restores",
    )
    proxy.pause()
    try:
        assert asker.client.get("/health").status_code == 200
        not_ready = asker.client.get("/ready")
        assert not_ready.status_code == 503
        assert "is restored, now at offset" in not_ready.json()["waiting_for"][-1]
        asker.refused(max_staleness="1 hour")
        asker.refused(min_position=f"{TOPIC}:{'.'.join(['1000'] * PARTITIONS)}")
        found = asker.client.get(f"/tables/{TOPIC}/count")
        assert found.status_code == 200
        assert found.json()["count"] < KEYS
        assert found.json()["lag"]["records"] > 0
        assert found.json()["lag"]["ms"] is None
        assert "Onceflow-Lag-Ms" not in found.headers
    finally:
        proxy.faults(None)
        proxy.resume()
    wait_until(lambda: asker.client.get("/ready").status_code == 200, 60, lambda: asker.client.get("/ready").text)
    assert asker.client.get(f"/tables/{TOPIC}/count", params={"max_staleness": "5s"}).json()["count"] > KEYS - 200

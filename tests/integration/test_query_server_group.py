"""Several instances of the query server share tables: processes of their own, on a real broker."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest

from onceflow.protocol.position import Position
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

KEYS, PARTITIONS, SESSION_S = 60, 6, 6


class Instance:
    """``onceflow table serve`` in a process of its own."""

    def __init__(self, bootstrap: str, topic: str, folder: Path, name: str) -> None:
        self._arguments = [sys.executable, "-m", "onceflow.cli.main", "table", "serve", topic]
        self._arguments += ["--bootstrap-servers", bootstrap, "--instances", f"group-{topic}", "--copies", "2"]
        self._arguments += ["--session-timeout", f"{SESSION_S}s", "--state-dir", str(folder / name)]
        self._log = folder / f"{name}.log"
        self._port = 0

    def start(self) -> Instance:
        """The first time at any free port, later at the same one."""
        with self._log.open("w") as log:
            command = [*self._arguments, "--port", str(self._port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        found = wait_until(
            lambda: re.search(r"Serving \S+ at (http://\S+:(\d+)) ", self._log.read_text()),
            30,
            self._log.read_text,
            useless=lambda: self.process.poll() is not None and self._log.read_text(),
        )
        self.url, self._port = found[1], int(found[2])
        self.client = httpx.Client(base_url=self.url, timeout=30)
        return self

    def end(self, by: signal.Signals = signal.SIGKILL) -> int:
        self.client.close()
        self.process.send_signal(by)
        return self.process.wait(30)

    def holders(self, topic: str) -> list[list[str]]:
        """Who has each partition, as this instance knows it."""
        return [each["instances"] for each in self.client.get(f"/tables/{topic}").json()["partitions"]]


class Writer:
    """Writes rising numbers to random keys, until it is stopped, and knows at which offset each number is."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        self._topic = topic
        self._stopping = threading.Event()
        self.written: dict[str, list[tuple[int, int, int]]] = {f"key-{n:02d}": [] for n in range(KEYS)}
        self.number = 0
        self.write(list(self.written))
        self._thread = threading.Thread(target=self._run)

    def write(self, keys: list[str]) -> None:
        def delivered(error: Any, message: Any) -> None:
            assert error is None
            place = message.partition(), message.offset(), int(message.value())
            self.written[message.key().decode()].append(place)

        for key in keys:
            self.number += 1
            self._producer.produce(self._topic, str(self.number), key, on_delivery=delivered)
        assert not self._producer.flush(30)

    def _run(self) -> None:
        while not self._stopping.wait(0.005):
            self.write(random.choices(list(self.written), k=3))

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def check(self, topic: str, key: str, value: int, position: str) -> None:
        """The value is the last one below the position, or a later one."""
        written = list(self.written[key])
        partition = written[0][0]
        offset = Position.parse(position).offsets[topic][partition]
        least = max((number for _, at, number in written if at < offset), default=0)
        assert value >= least, f"{key}: {value} at {position}, but {least} was written before"
        assert value <= self.number


class Readers:
    """Threads that ask random instances, and check every answer."""

    def __init__(self, writer: Writer, topic: str, instances: list[Instance]) -> None:
        self._writer, self._topic, self._instances = writer, topic, instances
        self._stopping = threading.Event()
        self.answers = 0
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
            with httpx.Client(timeout=20) as client:
                while not self._stopping.is_set():
                    try:
                        response = ask(client)
                    except httpx.TransportError:  # of an instance that was killed
                        continue
                    assert response.status_code in (200, 503), response.text
                    if response.status_code == 503:
                        # Only of one that has just started or is being stopped: all others know who is alive.
                        assert re.search("not known yet|being stopped", response.text), response.text
                        assert response.headers["Retry-After"]
                    else:
                        self.answers += 1
        except BaseException as error:
            self.errors.append(error)

    def _url(self) -> str:
        return f"{random.choice(self._instances).url}/tables/{self._topic}"

    def _one(self, client: httpx.Client) -> httpx.Response:
        key = f"key-{random.randrange(KEYS):02d}"
        found = client.get(f"{self._url()}/keys/{key}")
        if found.status_code == 200:
            self._writer.check(self._topic, key, found.json()["value"], found.headers["Onceflow-Position"])
        return found

    def _many(self, client: httpx.Client) -> httpx.Response:
        keys = random.sample(list(self._writer.written), 20)
        found = client.post(f"{self._url()}/multi-get", json={"keys": keys})
        if found.status_code == 200:
            document = found.json()
            assert [row["key"] for row in document["rows"]] == keys
            for row in document["rows"]:
                self._writer.check(self._topic, row["key"], row["value"], document["position"])
        return found

    def _all(self, client: httpx.Client) -> httpx.Response:
        found = client.get(f"{self._url()}/range", headers={"Accept": "application/x-ndjson"})
        if found.status_code == 200:
            *rows, last = [json.loads(line) for line in found.text.splitlines()]
            if "error" not in last:
                assert [row["key"] for row in rows] == list(self._writer.written)
                for row in rows:
                    self._writer.check(self._topic, row["key"], row["value"], last["position"])
        return found


@pytest.fixture
def instances(
    onceflow_broker: str, make_topic: Callable[..., str], tmp_path: Path
) -> Iterator[tuple[str, list[Instance]]]:
    topic = make_topic("shared", PARTITIONS, cleanup_policy="compact")
    found = [Instance(onceflow_broker, topic, tmp_path, f"i{n}") for n in range(3)]
    yield topic, found
    for each in found:
        if hasattr(each, "process") and each.process.poll() is None:
            each.end()


def test_instances_are_killed(onceflow_broker: str, instances: tuple[str, list[Instance]]) -> None:
    topic, (one, two, three) = instances
    writer = Writer(onceflow_broker, topic)
    for each in (one, two, three):
        each.start()

    def settled(*alive: Instance) -> bool:
        urls = {each.url for each in alive}
        for each in alive:
            if each.client.get("/ready").status_code != 200:
                return False
            holders = each.holders(topic)
            if any(len(listed) != min(2, len(alive)) or not urls.issuperset(listed) for listed in holders):
                return False
        return True

    def owned() -> list[int]:
        owners = [listed[0] for listed in one.holders(topic)]
        return [owners.count(each.url) for each in (one, two, three)]

    wait_until(lambda: settled(one, two, three) and owned() == [2, 2, 2], 30, lambda: str(one.holders(topic)))
    with writer, Readers(writer, topic, [one, two, three]) as readers:
        wait_until(lambda: readers.answers > 100 or readers.errors, 30, "answers")
        two.end()
        # Its partitions are answered by the other copies at once.
        for key in writer.written:
            found = one.client.get(f"/tables/{topic}/keys/{key}")
            assert found.status_code == 200, found.text
            writer.check(topic, key, found.json()["value"], found.headers["Onceflow-Position"])
        wait_until(lambda: settled(one, three) or readers.errors, SESSION_S + 15, lambda: str(one.holders(topic)))
        # One is killed while the group is rebalanced for another one.
        two.start()
        three.end()
        wait_until(lambda: settled(one, two) or readers.errors, SESSION_S + 20, lambda: str(one.holders(topic)))
        three.start()
        wait_until(lambda: settled(one, two, three) or readers.errors, 30, lambda: str(one.holders(topic)))
        # One that is stopped leaves: nobody waits for its session to end.
        assert one.end(signal.SIGTERM) == 0
        wait_until(lambda: settled(two, three) or readers.errors, SESSION_S, lambda: str(two.holders(topic)))
        one.start()
        wait_until(lambda: settled(one, two, three) or readers.errors, 30, lambda: str(one.holders(topic)))
    assert readers.answers > 1_000
    position = one.client.get(f"/tables/{topic}/count").json()["position"]
    for each in (one, two, three):
        counted = each.client.get(f"/tables/{topic}/count", params={"min_position": position}).json()
        assert counted["count"] == KEYS

"""How long a standby needs: from SIGKILL of the active driver to the next record that everybody can read.

``python -m onceflow_workshop.bench.standby --kills 20``: two drivers of one flow with state, and records all the time.
The active one is killed with its JVM, again and again; what was killed is started again and becomes the standby. An
independent read_committed consumer notes when records of the other process arrive, and checks at the end that every
record was counted exactly once.

With ``--drivers 1`` nobody stands by: the killed driver is started again at once, as a supervisor does it. With
``--workers 2`` the flow runs on a standalone cluster of so many workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.standby.heartbeats import read_tail
from onceflow.errors import FencedError, OnceflowError
from onceflow.protocol.heartbeats import ACTIVE, STANDBY
from onceflow.testing.broker import create_topic, running_broker
from onceflow.testing.waiting import wait_until
from onceflow_workshop.chaos.hosts import Hosts
from onceflow_workshop.chaos.spark_cluster import SparkCluster

PARTITIONS = 4
_KEYS = 40
_WAIT_S = 90.0


class Feeder:
    """Writes so many records a second in a thread, until it is closed."""

    def __init__(self, servers: str, topic: str, rate: int = 100) -> None:
        self.count = 0
        self._every_s = 1 / rate
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            key = f"key-{self.count % _KEYS}".encode()
            self._producer.produce(self._topic, key=key, value=str(self.count // _KEYS).encode())
            self._producer.poll(0)
            self.count += 1

    def close(self) -> None:
        """Stop, and wait until all is written."""
        self._over.set()
        self._thread.join()
        self._producer.flush()


class Watcher:
    """Reads results with read_committed in a thread, and notes when each was read first.

    Attributes:
        seen: time (monotonic seconds) and content of each, in order.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self.seen: list[tuple[float, bytes, list[Any]]] = []
        settings = {
            "bootstrap.servers": servers,
            "group.id": "watcher",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
        }
        self._consumer = Consumer(settings)
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(0.05)
            if message is not None and not message.error():
                self.seen.append((time.monotonic(), message.key() or b"", json.loads(message.value() or b"null")))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()


class Pair:
    """Driver processes of one flow."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._number = 0
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> int:
        """One more driver. Returns its process id."""
        self._number += 1
        log = (self._folder / f"driver-{self._number}.log").open("wb")
        command = [sys.executable, "-m", "onceflow_workshop.bench.standby_service", json.dumps(self._given)]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        self.running[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> None:
        """SIGKILL to a driver and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.running.pop(pid).wait()

    def stop(self, pid: int) -> None:
        """SIGSTOP to a driver and all of its processes."""
        os.killpg(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        """SIGCONT to a driver that was stopped. It must notice that it is fenced.

        Raises:
            AssertionError: it did not, or has said something else.
        """
        os.killpg(pid, signal.SIGCONT)
        code = self.running[pid].wait(_WAIT_S)
        assert code == FencedError.exit_code, f"exit code {code}"
        self.kill(pid)  # its JVM, if that still runs

    def close(self) -> None:
        for pid in list(self.running):
            self.kill(pid)


def roles(cluster: Cluster, flow: str) -> dict[int, str]:
    """What the drivers of a flow are, by process id; "" for a standby that is not warm yet."""
    found, _, _ = read_tail(cluster, flow, Deadline(10, "looking at heartbeats"))
    return {each.pid: each.role if each.role != STANDBY or each.warm else "" for each, _ in found}


def measure(
    servers: str,
    folder: Path,
    kills: int,
    drivers: int,
    *,
    stops: bool,
    rate: int,
    cluster_of: SparkCluster | None = None,
) -> list[float]:
    """Seconds from each kill to the next commit.

    Args:
        drivers: how many there are. stops: the active one is stopped (SIGSTOP), and goes on later.
        rate: records per second.
        cluster_of: where the flow runs; None: in the drivers.

    Raises:
        AssertionError: records were lost or doubled.
    """
    given: dict[str, Any] = {"servers": servers, "flow": f"bench-standby-{os.getpid()}", "folder": str(folder)}
    given |= {"source": f"{given['flow']}-in", "target": f"{given['flow']}-out"}
    if cluster_of is not None:
        given |= {"master": cluster_of.master, "config": cluster_of.settings}
    for topic in (given["source"], given["target"]):
        create_topic(servers, topic, PARTITIONS, {})
    cluster = Cluster(ClientSettings(servers, {}))
    feeder, watcher = Feeder(servers, given["source"], rate), Watcher(servers, given["target"])
    pair = Pair(given, folder)
    took = []
    try:
        for _ in range(drivers):
            pair.start()
        for number in range(kills):
            active = _ready(cluster, given["flow"], pair, watcher)
            killed_at = time.monotonic()
            (pair.stop if stops else pair.kill)(active)
            if drivers == 1:
                pair.start()
            others = [pid for pid in pair.running if pid != active]

            def found(others: list[int] = others, killed_at: float = killed_at) -> float:
                return next((at for at, _, value in watcher.seen if at > killed_at and value[2] in others), 0.0)

            took.append(wait_until(found, _WAIT_S, "a commit of the standby") - killed_at)
            if stops:
                pair.go_on(active)
            print(f"{number + 1}: {took[-1] * 1000:.0f} ms", flush=True)
            if drivers > 1:
                pair.start()
        feeder.close()
        wait_until(lambda: len(watcher.seen) >= feeder.count, _WAIT_S, lambda: f"{len(watcher.seen)} of {feeder.count}")
        time.sleep(1.0)  # so that doubled records have time to come
    finally:
        pair.close()
        watcher.close()
        cluster.close()
    check(watcher, feeder.count)
    return took


def _ready(cluster: Cluster, flow: str, pair: Pair, watcher: Watcher) -> int:
    """Wait until one driver commits, and the others stand by. Returns the active one."""

    def ready() -> int:
        try:
            known = roles(cluster, flow)
        except OnceflowError:
            return 0
        living = {pid: known.get(pid, "") for pid in pair.running}
        active = [pid for pid, role in living.items() if role == ACTIVE]
        waiting = [pid for pid, role in living.items() if role == STANDBY]
        if len(active) != 1 or len(waiting) != len(living) - 1:
            return 0
        recent = any(value[2] == active[0] and at > time.monotonic() - 1 for at, _, value in watcher.seen[-50:])
        return active[0] if recent else 0

    found = wait_until(ready, _WAIT_S, "a driver that is active, and others that stand by", poll_s=0.3)
    time.sleep(2.0)
    return found


def check(watcher: Watcher, count: int) -> None:
    """Every record was counted exactly once, and in order."""
    seen = sorted((key, value[1], value[0]) for _, key, value in watcher.seen)
    want = sorted((f"key-{n % _KEYS}".encode(), n // _KEYS + 1, str(n // _KEYS)) for n in range(count))
    assert seen == want, f"{len(seen)} results of {count} records"


def _rows(took: list[float]) -> Iterator[str]:
    ordered = sorted(took)
    yield f"{len(ordered)} take-overs, exactly once"
    for name, value in (
        ("least", ordered[0]),
        ("median", statistics.median(ordered)),
        ("90 %", ordered[int(0.9 * (len(ordered) - 1))]),
        ("95 %", ordered[int(0.95 * (len(ordered) - 1))]),
        ("most", ordered[-1]),
    ):
        yield f"{name:>8} {value * 1000:6.0f} ms"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="of a standalone cluster; 0: the drivers do the work")
    parser.add_argument("--rate", type=int, default=100, help="records per second")
    parser.add_argument("--stops", action="store_true", help="SIGSTOP in place of SIGKILL")
    choices = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="onceflow-standby-") as folder,
        running_broker(Path(folder, "broker")) as servers,
        Hosts(Path(folder, "cluster"), choices.workers) if choices.workers else contextlib.nullcontext() as cluster,
    ):
        took = measure(
            servers,
            Path(folder),
            choices.kills,
            choices.drivers,
            stops=choices.stops,
            rate=choices.rate,
            cluster_of=cluster,
        )
    print("\n".join(_rows(took)))


if __name__ == "__main__":
    main()

"""Tables and copies of joined tables: processes and brokers are killed, topics are compacted meanwhile."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import onceflow
from onceflow.broker.local import LocalBroker
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.settings import ClientSettings
from onceflow.state.format import rows
from onceflow.state.joins.copies import InexactCopyError, open_copy
from onceflow.state.joins.spec import JoinSpec
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.testing import independent
from onceflow.testing.broker import BACK_SOON, create_topic
from onceflow.testing.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

COMPACTED_AT_ONCE = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "segment.ms": "50",
    "max.compaction.lag.ms": "100",
}


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that may be killed, and that compacts at once."""
    properties = {"log.cleaner.backoff.ms": "100", **BACK_SOON}
    with LocalBroker(tmp_path_factory.mktemp("own"), properties=properties) as broker:
        yield broker


class Updates:
    """Writes to few keys all the time. ``history`` has every record that was committed, by partition and offset."""

    def __init__(self, bootstrap: str, topic: str, keys: int = 40, pause_s: float = 0.005) -> None:
        self.history: dict[tuple[int, int], tuple[bytes, bytes | None]] = {}
        self._producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        self._topic, self._keys, self._pause_s = topic, keys, pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        chance = random.Random(3)
        for n in itertools.count():
            key = b"key-%d" % chance.randrange(self._keys)
            value = None if chance.random() < 0.1 else b"%d" % n
            self._producer.produce(self._topic, value, key, on_delivery=self._delivered)
            self._producer.poll(0)
            if self._over.wait(self._pause_s):
                return

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.history[message.partition(), message.offset()] = message.key(), message.value()

    def stop(self) -> dict[bytes, bytes]:
        """End it. Returns the rows of the topic."""
        self._over.set()
        self._thread.join(30)
        assert not self._producer.flush(60)
        return self.at({})

    def at(self, ends: dict[int, int]) -> dict[bytes, bytes]:
        """The rows of the topic below these offsets. All of the records below them must be in the history."""
        found: dict[bytes, bytes | None] = {}
        for (partition, offset), (key, value) in sorted(self.history.items()):
            if offset < ends.get(partition, sys.maxsize):
                found[key] = value
        return {key: value for key, value in found.items() if value is not None}


@pytest.mark.long
@pytest.mark.parametrize("rounds", [60, 600])
def test_copies_are_exact_while_the_topic_is_compacted(own_broker: LocalBroker, tmp_path: Path, rounds: int) -> None:
    """Every copy shows the topic as it was at its offset, or says that it cannot."""
    bootstrap, topic = own_broker.bootstrap_servers, f"thinned-{rounds}"
    create_topic(bootstrap, topic, 1, COMPACTED_AT_ONCE)
    updates = Updates(bootstrap, topic)
    cluster = Cluster(ClientSettings(bootstrap))
    source = CommittedReader(cluster)
    topic_id = cluster.topics([topic], _deadline())[topic].topic_id
    spec = JoinSpec("t", topic, topic_id, 1, None, None, False, LmdbStore, "flow", "run", tmp_path, 86_400_000)
    chance = random.Random(5)
    seen: list[tuple[int, dict[bytes, bytes]]] = []
    inexact = 0
    end = 0
    try:
        for _ in range(rounds):
            if chance.random() < 0.3:
                shutil.rmtree(tmp_path, ignore_errors=True)
            end = source.end(topic, 0)
            threading.Event().wait(chance.choice([0, 0, 0.2]))  # the log is written and compacted meanwhile
            try:
                store = open_copy(spec, 0, end, source)
            except InexactCopyError:
                inexact += 1
                continue
            seen.append((end, {key[1:]: row[1:] for key, row in store.scan(rows.VALUE, rows.after(rows.VALUE))}))
            store.close()
    finally:
        updates.stop()
        cluster.close()
    assert inexact
    assert len(seen) > rounds / 4
    for at, found in seen:
        assert found == updates.at({0: at}), f"at offset {at}"


def _deadline() -> Any:
    from onceflow.client.deadline import Deadline

    return Deadline(30, "test")


FOLLOWER = """
import sys, time
import onceflow

bootstrap, topic, folder = sys.argv[1:]
with onceflow.Table(topic, bootstrap_servers=bootstrap, state_dir=folder, wait=False) as table:
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_a_process_that_follows_a_table_is_killed(own_broker: LocalBroker, tmp_path: Path) -> None:
    """At any moment: in its restore, and while it follows. What it leaves is continued, and right."""
    bootstrap, topic = own_broker.bootstrap_servers, "followed"
    create_topic(bootstrap, topic, 3, {"cleanup.policy": "compact"})
    independent.fill(bootstrap, topic, [(b"many-%d" % n, b"v") for n in range(100_000)])
    updates = Updates(bootstrap, topic, keys=2000, pause_s=0.0005)
    chance = random.Random(1)
    for _ in range(6):
        command = [sys.executable, "-c", FOLLOWER, bootstrap, topic, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            threading.Event().wait(chance.random())
            process.send_signal(signal.SIGKILL)
    rest = updates.stop()
    with onceflow.Table(topic, bootstrap_servers=bootstrap, state_dir=tmp_path) as table:
        table.wait_until_current()
        found = dict(table.items())
    expected = {b"many-%d" % n: b"v" for n in range(100_000)} | rest
    assert {key: value for key, value in found.items() if not key.startswith(b"many")} == rest
    assert len(found) == len(expected)


@pytest.mark.long
def test_a_broker_that_stays_away(own_broker: LocalBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Look-ups answer from the copy, and say how old it is; when the broker is back, the table continues."""
    bootstrap, topic = own_broker.bootstrap_servers, "kept"
    create_topic(bootstrap, topic, 2, {"cleanup.policy": "compact"})
    independent.fill(bootstrap, topic, [(b"k", json.dumps(1).encode())])
    with onceflow.Table(topic, bootstrap_servers=bootstrap, state_dir=tmp_path) as table:
        own_broker.kill()
        wait_until(lambda: (table.lag.ms or 0) > 3000, 60, "the lag grows")
        assert table.get(b"k") == b"1"
        own_broker.start()
        independent.fill(bootstrap, topic, [(b"k", json.dumps(2).encode())])
        wait_until(lambda: table.get(b"k") == b"2", 60, "the table continues")
        wait_until(lambda: (table.lag.ms or 0) < 2000, 60, "the lag is small again")

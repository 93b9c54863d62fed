"""`onceflow.Table` over topics that other programs write, against a real broker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

import onceflow
from onceflow import (
    BadRecordError,
    Change,
    DataLossError,
    DeadlineExceededError,
    OptionError,
    Table,
    UnknownTopicError,
    serdes,
)
from onceflow.client import cluster
from onceflow.client.column_chunks import ColumnChunk
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll
from onceflow.client.settings import ClientSettings
from onceflow.protocol.position import Position
from onceflow.state.local.format import COMMIT_RECORD
from onceflow.state.stores.lmdb_store import LmdbStore
from onceflow.state.stores.memory_store import MemoryStore
from onceflow.tables import following
from onceflow.tables.lag import Restore
from onceflow.tables.opening import TABLES_FOLDER
from onceflow.testing import independent
from onceflow.testing.waiting import wait_until

pytestmark = pytest.mark.integration

Open = Callable[..., Table]


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("rates", 3, cleanup_policy="compact")


@pytest.fixture
def opened(onceflow_broker: str, tmp_path: Path) -> Iterator[Open]:
    """Opens tables with their copies in the test's folder, and closes them in the end."""
    tables: list[Table] = []

    def open_one(topic: str, **given: Any) -> Table:
        table = Table(topic, bootstrap_servers=onceflow_broker, **{"state_dir": tmp_path, **given})
        tables.append(table)
        return table.start()

    yield open_one
    for table in tables:
        table.close()


class Writer:
    """A transactional producer of another program."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": f"w-{topic}", "partitioner": "murmur2_random"}
        )
        self._producer.init_transactions(30)

    def write(self, pairs: dict[str, str | None], *, commit: bool = True, headers: Any = None) -> str:
        """Write in one transaction. Returns the position after it."""
        ends: dict[int, int] = {}

        def delivered(error: Any, message: Any) -> None:
            assert error is None
            ends[message.partition()] = message.offset() + 1

        self._producer.begin_transaction()
        for key, value in pairs.items():
            self._producer.produce(self._topic, value, key, headers=headers, on_delivery=delivered)
        assert not self._producer.flush(30)
        if commit:
            self._producer.commit_transaction(30)
        else:
            self._producer.abort_transaction(30)
        listed = ".".join(str(ends.get(partition, "")) for partition in range(max(ends) + 1))
        return f"{self._topic}:{listed}"


def test_a_table_follows_what_is_committed(onceflow_broker: str, topic: str, opened: Open) -> None:
    writer = Writer(onceflow_broker, topic)
    writer.write({f"key-{n:02d}": json.dumps({"n": n}) for n in range(20)})
    writer.write({"key-03": None, "aborted": "1"}, commit=False)
    table = opened(topic, key=serdes.STRING, value=serdes.JSON)
    assert table.get("key-03") == {"n": 3}
    assert table.get("aborted") is None
    assert table.get("aborted", 7) == 7
    assert list(table.range("key-05", "key-08")) == [(f"key-{n:02d}", {"n": n}) for n in (5, 6, 7)]
    assert [key for key, _ in table.prefix("key-1", reverse=True)] == [f"key-{n}" for n in range(19, 9, -1)]
    assert list(table) == [f"key-{n:02d}" for n in range(20)]
    assert table.multi_get(["key-01", "no", "key-00"]) == {"key-01": {"n": 1}, "key-00": {"n": 0}}
    assert table.count() == 20
    assert "key-01" in table
    with pytest.raises(KeyError, match="no such"):
        table["no such"]
    frame = table.to_pandas()
    assert list(frame["key"])[:2] == ["key-00", "key-01"]
    assert table.to_arrow().column("value").to_pylist()[19] == {"n": 19}

    changes: list[Change] = []
    end = table.on_change(changes.append)
    table.wait_until_current(writer.write({"key-03": None, "key-04": '{"n": 44}', "new": "5"}))
    assert table.get("key-03") is None
    assert (table["key-04"], table["new"], table.count()) == ({"n": 44}, 5, 20)
    found = {change.key: (change.before, change.value) for change in changes}
    assert found == {"key-03": ({"n": 3}, None), "key-04": ({"n": 4}, {"n": 44}), "new": (None, 5)}
    end()
    table.wait_until_current(writer.write({"key-03": "1"}))
    assert len(changes) == 3
    lag = table.lag
    assert lag.ms is not None
    table.wait_until_current()


def test_a_restore_tells_how_far_it_has_read(
    make_topic: Callable[..., str], onceflow_broker: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it writes, which it does in large parts; and it is over only when all is written."""
    topic = make_topic("restored", 1, cleanup_policy="compact")
    for n in range(2):
        independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"1")])
    go_on = threading.Event()

    class Halting(CommittedReader):
        def read_columns(self, *place: Any, headers: bool = False) -> Iterator[ColumnChunk]:
            for chunk in super().read_columns(*place, headers=headers):
                yield chunk
                assert go_on.wait(60)

    monkeypatch.setattr(following, "CommittedReader", lambda *given: Halting(*given, fetch_bytes=1))
    table = opened(topic, wait=False)
    try:
        wait_until(lambda: table.restore.done == 1, 60, "the first record is read")
        assert (table.restore, table.restore.running) == (Restore(1, 2), True)
    finally:
        go_on.set()
    table.wait_until_current()
    assert (table.restore.running, table.count()) == (False, 2)


@pytest.mark.long
def test_a_table_continues_from_its_copy(
    onceflow_broker: str, topic: str, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(onceflow_broker, topic)
    writer.write({f"k{n}": str(n) for n in range(100)})
    first = opened(topic)
    assert first.count() == 100
    position = first.position
    # A second table of the same machine has a copy of its own.
    second = opened(topic)
    assert second.count() == 100
    folders = tmp_path / TABLES_FOLDER / topic
    assert {path.name for path in folders.iterdir() if path.is_dir()} == {"0", "1"}
    first.close()
    writer.write({"k1": None, "k2": "two"})
    with caplog.at_level("INFO", "onceflow.tables"):
        again = opened(topic)
        assert (again.get(b"k1"), again.get(b"k2"), again.count()) == (None, b"two", 99)
    read = [int(record.args[1]) for record in caplog.records if "records read" in record.msg]  # type: ignore[index,arg-type]
    assert sum(read) == 2
    assert again.position != position
    again.close()

    # Damage is found when the table is opened, and repaired from the topic.
    store = LmdbStore.open(folders / "0" / "0")
    raw = store.blob(COMMIT_RECORD)
    store._environment.write(lambda txn, db: txn.put(b"vk2", b"\0damaged", db=db), 10)
    store.close()
    assert raw is not None
    repaired = opened(topic)
    assert dict(repaired.items()) == dict(second.items()) | {b"k2": b"two"}
    assert b"k1" not in repaired
    repaired.close()
    shutil.rmtree(folders)
    assert opened(topic).count() == 99


class SlowStore(MemoryStore):
    """Takes its time to write."""

    def write(self, *given: Any, **named: Any) -> bool:
        time.sleep(0.05)
        return super().write(*given, **named)


def test_a_position_is_not_ahead_of_the_rows(onceflow_broker: str, topic: str, opened: Open) -> None:
    writer = Writer(onceflow_broker, topic)
    table = opened(topic, store=SlowStore)
    for n in range(10):
        wanted = Position.parse(writer.write({"k": str(n)}))
        wait_until(lambda wanted=wanted: wanted.reached(Position.parse(table.position).offsets), 10, "not reached")  # type: ignore[misc]
        assert table.get(b"k") == b"%d" % n


def test_a_log_that_ends_below_what_was_read(onceflow_broker: str, topic: str) -> None:
    """Brokers do not say where a log begins and ends when they refuse an offset."""
    connections = cluster.Cluster(ClientSettings(onceflow_broker, {}))
    try:
        deadline = Deadline(20, "connecting")
        connections.connect(deadline)
        info = connections.topic(topic, deadline)
        poll = LongPoll(connections, [info], {(topic, 0): 100})

        def refused() -> bool:
            list(poll.poll(0.2))
            return False

        with pytest.raises(DataLossError, match="The log ends at offset 0"):
            wait_until(refused, 20, "the log is found to be too short")
    finally:
        connections.close()


def test_a_log_that_begins_later_than_what_was_read(onceflow_broker: str, make_topic: Callable[..., str]) -> None:
    """Retention, or DeleteRecords, may remove records before a table has read them."""
    topic = make_topic("aged", 1, cleanup_policy="compact,delete")
    independent.fill(onceflow_broker, topic, [(b"k%d" % n, b"v") for n in range(10)])
    begin = confluent_kafka.TopicPartition(topic, 0, 4)
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    admin.delete_records([begin])[begin].result(30)
    connections = cluster.Cluster(ClientSettings(onceflow_broker, {}))
    found: list[Chunk] = []
    try:
        deadline = Deadline(20, "connecting")
        connections.connect(deadline)
        poll = LongPoll(connections, [connections.topic(topic, deadline)], {(topic, 0): 1})

        def read() -> bool:
            found.extend(chunk for _, chunk in poll.poll(0.2))
            return bool(found) and found[-1].next_offset >= 10

        wait_until(read, 20, "the records that are left are read")
    finally:
        connections.close()
    assert (found[0].next_offset, found[0].whole, found[0].keys) == (4, False, [])
    assert [key for chunk in found for key in chunk.keys] == [b"k%d" % n for n in range(4, 10)]
    assert poll.followed[topic, 0].last_stable_offset == 10


def test_only_some_partitions(onceflow_broker: str, topic: str, opened: Open) -> None:
    pairs = [(b"k%d" % n, b"v%d" % n) for n in range(50)]
    independent.fill(onceflow_broker, topic, pairs)
    whole = {record.key: record.partition for record in independent.read_topic(onceflow_broker, topic)}
    table = opened(topic, partitions=[2, 0], store="memory")
    assert list(table) == sorted(key for key, partition in whole.items() if partition != 1 and key is not None)
    assert table.position.startswith(f"{topic}@")
    with pytest.raises(OptionError, match="has no partition 3"):
        opened(topic, partitions=[3])


def test_keys_of_any_partitioner_are_found(onceflow_broker: str, make_topic: Callable[..., str], opened: Open) -> None:
    """Python producers with default settings place keys by CRC32, in other partitions than Kafka's own clients."""
    topic = make_topic("crc", 12, cleanup_policy="compact")
    producer = confluent_kafka.Producer({"bootstrap.servers": onceflow_broker})
    for n in range(200):
        producer.produce(topic, b"v%d" % n, b"k%d" % n)
    assert not producer.flush(30)
    table = opened(topic)
    assert all(table.get(b"k%d" % n) == b"v%d" % n for n in range(200))
    assert len(table.multi_get([b"k%d" % n for n in range(300)])) == 200


@pytest.mark.long
def test_a_topic_that_changes_is_an_error(
    onceflow_broker: str, topic: str, make_topic: Callable[..., str], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_METADATA_S", 0.5)
    monkeypatch.setattr(cluster, "UNKNOWN_TOPIC_S", 1.0)
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    independent.fill(onceflow_broker, topic, [(b"k", b"v")])
    table = opened(topic)
    assert table.get(b"k") == b"v"
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(30)
    # A record of a partition that the table does not have is not taken for one that can be looked up.
    with pytest.raises(UnknownTopicError, match="has 5 partitions now, it had 3"):
        table.wait_until_current(f"{topic}:....1", timeout=60)
    with pytest.raises(UnknownTopicError, match="has 5 partitions now, it had 3"):
        wait_until(lambda: table.get(b"k") is None, 60, "not reached")

    deleted = make_topic("gone", 1, cleanup_policy="compact")
    table = opened(deleted)
    admin.delete_topics([deleted])[deleted].result(30)
    with pytest.raises(UnknownTopicError, match=r"does not exist|was deleted and created again"):
        wait_until(lambda: table.get(b"k") is not None, 60, "not reached")


@pytest.mark.long
def test_a_recreated_topic_is_not_taken_for_the_old_one(
    onceflow_broker: str, make_topic: Callable[..., str], opened: Open
) -> None:
    from onceflow.testing.broker import create_topic

    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    topic = make_topic("again", 1, cleanup_policy="compact")
    independent.fill(onceflow_broker, topic, [(b"old", b"1"), (b"older", b"1")])
    table = opened(topic)
    assert table.count() == 2
    earlier = table.position
    table.wait_until_current(earlier)
    table.close()
    open_table = opened(topic)
    admin.delete_topics([topic])[topic].result(30)

    def created() -> bool:
        try:
            create_topic(onceflow_broker, topic, 1, {"cleanup.policy": "compact"})
        except Exception:
            return False
        return True

    wait_until(created, 30, "not reached")
    independent.fill(onceflow_broker, topic, [(b"new", b"2")] * 5)
    with pytest.raises(UnknownTopicError):
        wait_until(lambda: open_table.get(b"new") is not None, 60, "not reached")
    open_table.close()
    fresh = opened(topic)
    assert dict(fresh.items()) == {b"new": b"2"}
    with pytest.raises(OptionError, match="was deleted and created again") as raised:
        fresh.wait_until_current(earlier)
    assert raised.value.next_step
    fresh.wait_until_current(f"{topic}:2")  # without the id of the topic


@pytest.mark.parametrize(
    "given, what",
    [
        ({"topic": "no-such-topic"}, "Table topic 'no-such-topic' does not exist"),
        ({"topic": ""}, "'' is not the name of a topic"),
        ({"partitions": []}, "partitions=[] of table"),
        ({"partitions": ["0"]}, "partitions=['0'] of table"),
        ({"key": str}, "key=<class 'str'> is not a serde"),
        ({"value": "json"}, "value='json' is not a serde"),
        ({"store": "rocks"}, "store='rocks' is unknown"),
        ({"restore_timeout": "soon"}, "restore_timeout: 'soon' is not a duration"),
        ({"connect_timeout": "soon"}, "connect_timeout='soon' is not a duration"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], what: str, topic: str, opened: Open) -> None:
    with pytest.raises((OptionError, UnknownTopicError)) as raised:
        opened(**{"topic": topic, **given})
    assert raised.value.what.startswith(what)
    assert raised.value.next_step


def test_wrong_use(onceflow_broker: str, topic: str, make_topic: Callable[..., str], opened: Open) -> None:
    independent.fill(onceflow_broker, topic, [(b"k", b"no json"), (b"l", b"1")])
    plain = make_topic("plain", 1)
    with pytest.raises(OptionError, match="is not compacted"):
        opened(plain)
    table = Table(topic, bootstrap_servers=onceflow_broker)
    with pytest.raises(OptionError, match="is not open"):
        table.get(b"k")
    table = opened(topic, key=serdes.STRING, value=serdes.JSON)
    with pytest.raises(BadRecordError, match="is not json") as raised:
        table.get("k")
    assert "key 'k'" in raised.value.detail
    with pytest.raises(OptionError, match="The key for get\\(\\) of a Table is string, got bytes"):
        table.get(b"k")
    with pytest.raises(OptionError, match="is not a position"):
        table.wait_until_current("1 2 3")
    with pytest.raises(OptionError, match="says nothing about topic"):
        table.wait_until_current("other:1")
    with pytest.raises(DeadlineExceededError, match="did not reach a position"):
        table.wait_until_current(f"{topic}:999", timeout=0.1)
    with pytest.raises(OptionError, match="is open already"):
        table.start()
    assert table.get("l") == 1


def test_a_failing_callback_stops_the_table(onceflow_broker: str, topic: str, opened: Open) -> None:
    table = opened(topic)
    called = threading.Event()

    def fail(change: Change) -> None:
        called.set()
        raise ZeroDivisionError("of the user")

    table.on_change(fail)
    independent.fill(onceflow_broker, topic, [(b"k", b"v")])
    assert called.wait(30)
    with pytest.raises(onceflow.OnceflowError, match="cannot be followed any more"):
        wait_until(lambda: table.get(b"k") is None, 30, "not reached")


READER = """
import json, sys
import onceflow
from onceflow import serdes

bootstrap, topic, folder = sys.argv[1:]
with onceflow.Table(topic, bootstrap_servers=bootstrap, value=serdes.JSON, state_dir=folder) as table:
    print("open", flush=True)
    for line in sys.stdin:
        position, keys = json.loads(line)
        table.wait_until_current(position)
        found = table.multi_get([key.encode() for key in keys])
        print(json.dumps({key.decode(): value for key, value in found.items()}), flush=True)
"""


@pytest.mark.parametrize("commits", [10, pytest.param(100, marks=pytest.mark.long)])
def test_another_process_reads_what_was_committed(
    onceflow_broker: str, onceflow_spark: Any, make_state_pipe: Any, tmp_path: Path, commits: int
) -> None:
    """Write, commit, read elsewhere: with the position of the commit, no answer is stale. 100 checks in each commit."""
    pipe = make_state_pipe()
    query = pipe.start()
    table_id, _, offsets = query.position.partition(":")
    assert offsets == "0.0.0.0"
    with Table(pipe.table, bootstrap_servers=onceflow_broker, state_dir=tmp_path) as table:
        assert table.position == query.position
    assert table_id.startswith(f"{pipe.table}@")
    command = [sys.executable, "-c", READER, onceflow_broker, pipe.table, str(tmp_path / "copies")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        stale = 0
        for _ in range(commits):
            pipe.fill(200)
            query.processAllAvailable()
            _, sums, _ = pipe.ledger.expected(pipe.sent)
            wanted = {key.decode(): value for key, value in sums.items()}
            for _ in range(100 // len(wanted) + 1):
                reader.stdin.write(json.dumps([query.position, list(wanted)]) + "\n")
                reader.stdin.flush()
                stale += json.loads(reader.stdout.readline()) != wanted
        reader.stdin.close()
    query.stop()
    assert not stale

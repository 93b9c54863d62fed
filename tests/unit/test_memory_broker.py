"""``MemoryBroker`` answers onceflow's own client as a broker does: offsets, transactions, fencing, groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from onceflow import clock
from onceflow.client import in_process
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, Marker, read_log
from onceflow.client.offsets import EARLIEST, LATEST, commit_offsets, fetch_committed, list_offsets
from onceflow.client.produce import Producer
from onceflow.client.producers import open_transactions
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import create_topic, find_topic, topic_config
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome, Transactions
from onceflow.errors import BrokerUnreachableError, FencedError, UnknownTopicError
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.testing.memory_broker import MemoryBroker

PLAIN = ProducerIdAndEpoch(-1, -1, transactional=False)


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    broker = MemoryBroker()
    broker.create("in", 2)
    yield broker
    broker.close()


@pytest.fixture
def cluster(broker: MemoryBroker) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(broker.address))
    cluster.connect(soon())
    yield cluster
    cluster.close()


def soon() -> Deadline:
    return Deadline(5, "a test")


def transactions(cluster: Cluster, name: str = "id") -> Transactions:
    found = Transactions(cluster, name, check=lambda deadline: None)
    found.init(soon())
    return found


def write(
    cluster: Cluster, producer: ProducerIdAndEpoch, value: bytes, *, name: str | None = "id", sequence: int = 0
) -> int:
    sender = Producer(cluster, transactional_id=name, deadline=soon())
    sender.send("in", 0, encode_single(b"k", value, timestamp_ms=7, identity=producer, base_sequence=sequence))
    return sender.flush()["in", 0].base_offset


def committed(cluster: Cluster) -> list[bytes | None]:
    reader = CommittedReader(cluster, 5)
    return [value for chunk in reader.read("in", 0, 0, reader.end("in", 0)) for value in chunk.values]


def end(cluster: Cluster, *, stable: bool = True) -> int:
    return list_offsets(cluster, {"in": [0]}, LATEST, soon(), committed=stable)["in"][0]


def test_topics(cluster: Cluster) -> None:
    assert cluster.topics(["in"], soon())["in"].leaders == {0: 1, 1: 1}
    assert find_topic(cluster, "new", "READ", soon()) is None
    create_topic(cluster, "new", partitions=3, configs={"cleanup.policy": "compact"}, deadline=soon())
    assert cluster.topics(["new"], soon())["new"].partitions == 3
    assert [topic_config(cluster, name, "cleanup.policy", soon()) for name in ("in", "new")] == ["delete", "compact"]
    assert not create_topic(cluster, "new", partitions=5, configs={}, deadline=soon())


def test_a_topic_may_be_made_when_somebody_asks_for_it(broker: MemoryBroker, cluster: Cluster) -> None:
    broker.make = lambda name: None if name.startswith("no") else broker.create(name, 4) and None
    assert cluster.topics(["asked"], soon())["asked"].partitions == 4
    with pytest.raises(UnknownTopicError):
        cluster.topics(["not-asked"], soon(), once=True)


def test_an_open_transaction_is_not_seen_and_holds_back_what_is_behind_it(cluster: Cluster) -> None:
    mine = transactions(cluster)
    producer = mine.begin(soon())
    assert [write(cluster, producer, b"1"), write(cluster, PLAIN, b"plain", name=None)] == [0, 1]
    assert (end(cluster), end(cluster, stable=False), committed(cluster)) == (0, 2, [])
    (found,) = open_transactions(cluster, [("in", 0)], soon())["in", 0]
    assert (found.producer_id, found.start_offset) == (producer.producer_id, 0)
    described = describe_transaction(cluster, "id", soon())
    assert (described["state"], described["partitions"]) == ("Ongoing", {"in": [0]})
    assert mine.end(soon(), commit=True) is Outcome.COMMITTED
    assert (end(cluster), committed(cluster)) == (3, [b"1", b"plain"])
    assert open_transactions(cluster, [("in", 0)], soon())["in", 0] == []


def test_what_was_aborted_stays_in_the_log_and_is_not_read(cluster: Cluster) -> None:
    mine = transactions(cluster)
    for number in range(4):
        producer = mine.begin(soon())
        write(cluster, producer, b"%d" % number)
        mine.end(soon(), commit=bool(number % 2))
    assert committed(cluster) == [b"1", b"3"]
    log = list(read_log(cluster, "in", 0, 0, 8, soon()))
    assert [each.value for each in log if isinstance(each, LogRecord)] == [b"0", b"1", b"2", b"3"]
    assert [each.committed for each in log if isinstance(each, Marker)] == [False, True, False, True]


def test_a_newer_owner_fences_and_aborts(cluster: Cluster) -> None:
    old = transactions(cluster)
    producer = old.begin(soon())
    write(cluster, producer, b"old")
    new = transactions(cluster)
    assert committed(cluster) == []
    assert end(cluster) == 2  # its marker is there
    with pytest.raises(FencedError):
        write(cluster, producer, b"late", sequence=1)
    assert old.end(soon(), commit=True) is Outcome.FENCED
    write(cluster, new.begin(soon()), b"new")
    assert new.end(soon(), commit=True) is Outcome.COMMITTED
    assert committed(cluster) == [b"new"]


def test_offsets_of_a_group_come_with_the_transaction(cluster: Cluster) -> None:
    def known() -> dict[int, tuple[int, str]]:
        return fetch_committed(cluster, "group", {"in": [0, 1]}, soon()).get("in", {})

    commit_offsets(cluster, "group", {"in": {1: 5}}, soon(), metadata="plain")
    mine = transactions(cluster)
    for commit in (False, True):
        mine.begin(soon())
        mine.commit_offsets("group", {"in": {0: 7}}, soon(), metadata="mine")
        assert known() == {1: (5, "plain")}
        mine.end(soon(), commit=commit)
    assert known() == {0: (7, "mine"), 1: (5, "plain")}
    assert fetch_committed(cluster, "group", None, soon()) == {"in": known()}


def test_offsets_by_time(cluster: Cluster) -> None:
    for number in range(3):
        batch = encode_single(b"k", b"v", timestamp_ms=10 * number, identity=PLAIN, base_sequence=-1)
        sender = Producer(cluster, transactional_id=None, deadline=soon())
        sender.send("in", 1, batch)
        sender.flush()
    for wanted, offset in ((EARLIEST, 0), (LATEST, 3), (0, 0), (1, 1), (20, 2), (21, -1)):
        assert list_offsets(cluster, {"in": [1]}, wanted, soon())["in"] == {1: offset}, wanted


def test_several_threads_ask(broker: MemoryBroker) -> None:
    found: list[int] = []

    def run() -> None:
        cluster = Cluster(ClientSettings(broker.address))
        cluster.connect(soon())
        found.extend(write(cluster, PLAIN, b"v", name=None) for _ in range(20))
        cluster.close()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == list(range(80))


def test_a_broker_that_is_closed_is_not_reached(broker: MemoryBroker) -> None:
    host = broker.address.partition(":")[0]
    assert in_process.broker_at(host) is broker
    broker.close()
    assert in_process.broker_at(host) is None
    cluster = Cluster(ClientSettings(broker.address), refused_s=0.1)
    with pytest.raises(BrokerUnreachableError):
        cluster.connect(Deadline(1, "a test"))


# ---- the clock of a test ---------------------------------------------------------------------------------


def test_the_time_is_told_in_one_thread_only() -> None:
    seen = []
    with clock.told_by(lambda: 5_000):
        assert (clock.clock_ms(), clock.passing_s()) == (5_000, 5.0)
        thread = threading.Thread(target=lambda: seen.append(clock.clock_ms()))
        thread.start()
        thread.join()
    assert seen[0] > 1_700_000_000_000
    assert clock.clock_ms() > 1_700_000_000_000

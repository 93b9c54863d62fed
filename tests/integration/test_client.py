"""The client against a real broker: what the sink relies on, request by request."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from onceflow import DeadlineExceededError, FencedError
from onceflow.client import connections
from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, Marker, read_log
from onceflow.client.offsets import EARLIEST, LATEST, fetch_committed, list_offsets
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import max_message_bytes, topic_config
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome, Transactions
from onceflow.protocol.batches import encode_single
from onceflow.testing import independent

pytestmark = pytest.mark.integration


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline(seconds, "a test")


@pytest.fixture
def cluster(onceflow_broker: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(onceflow_broker))
    cluster.connect(soon())
    yield cluster
    cluster.close()


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic("client", 2)


def write(cluster: Cluster, transactions: Transactions, topic: str, value: bytes, sequence: int = 0) -> None:
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=soon())
    identity = transactions.identity
    now_ms = int(time.time() * 1000)  # the broker deletes what is older than its retention at once
    batch = encode_single(b"k", value, timestamp_ms=now_ms, identity=identity, base_sequence=sequence)
    producer.send(topic, 0, batch)
    producer.flush()


def opened(cluster: Cluster, topic: str) -> Transactions:
    transactions = Transactions(cluster, f"onceflow.{topic}")
    transactions.init(soon())
    transactions.begin(soon())
    return transactions


@pytest.mark.long
def test_a_connection_whose_first_attempt_ran_out_of_time(
    onceflow_broker: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be left half made: every API would look unsupported then."""

    def unanswered(*_: object) -> None:
        raise ConnectionFailedError("no answer")

    with closing(Cluster(ClientSettings(onceflow_broker))) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "exchange", unanswered)
            with pytest.raises(DeadlineExceededError, match="ApiVersions"):
                list_offsets(cluster, {topic: [0]}, LATEST, soon(2))
        assert list_offsets(cluster, {topic: [0]}, LATEST, soon()) == {topic: {0: 0}}
        assert cluster.transaction_version in (1, 2)


def test_the_id_of_the_cluster(cluster: Cluster, onceflow_broker: str) -> None:
    admin = AdminClient({"bootstrap.servers": onceflow_broker})
    assert cluster.cluster_id(soon()) == admin.list_topics(timeout=60).cluster_id


def test_the_life_of_a_transaction(cluster: Cluster, topic: str, onceflow_broker: str) -> None:
    name = f"onceflow.{topic}"
    assert describe_transaction(cluster, name, soon())["state"] == "Dead"
    transactions = opened(cluster, topic)
    assert describe_transaction(cluster, name, soon())["state"] == "Empty"
    before = transactions.identity
    write(cluster, transactions, topic, b"one")
    described = describe_transaction(cluster, name, soon())
    assert described["state"] == "Ongoing"
    assert described["partitions"] == {topic: [0]}
    assert (described["producer_id"], described["producer_epoch"]) == (before.producer_id, before.producer_epoch)
    # The last stable offset stays in front of what is open; the high watermark does not.
    assert list_offsets(cluster, {topic: [0]}, LATEST, soon()) == {topic: {0: 0}}
    assert list_offsets(cluster, {topic: [0]}, LATEST, soon(), committed=False) == {topic: {0: 1}}
    assert independent.read_topic(onceflow_broker, topic) == []
    assert transactions.end(soon(), commit=True) is Outcome.COMMITTED
    assert transactions.identity.producer_epoch == before.producer_epoch + 1
    assert [s.value for s in independent.read_topic(onceflow_broker, topic, decided=True)] == [b"one"]
    assert list_offsets(cluster, {topic: [0, 1]}, EARLIEST, soon()) == {topic: {0: 0, 1: 0}}


def test_offsets_are_stable_only_when_decided(cluster: Cluster, topic: str) -> None:
    transactions = opened(cluster, topic)
    transactions.commit_offsets(topic, {topic: {0: 7, 1: 9}}, soon(), metadata="hint")
    with pytest.raises(DeadlineExceededError, match=f"OffsetFetch.*{topic}|OffsetFetch"):
        fetch_committed(cluster, topic, {topic: [0, 1]}, soon(0.5))
    assert fetch_committed(cluster, topic, {topic: [0, 1]}, soon(), stable=False) == {}
    transactions.end(soon(), commit=True)
    assert fetch_committed(cluster, topic, {topic: [0, 1]}, soon()) == {topic: {0: (7, "hint"), 1: (9, "hint")}}


def test_aborted_offsets_and_records_are_as_if_never_written(
    cluster: Cluster, topic: str, onceflow_broker: str
) -> None:
    transactions = opened(cluster, topic)
    write(cluster, transactions, topic, b"gone")
    transactions.commit_offsets(topic, {topic: {0: 7}}, soon())
    old = transactions.identity
    transactions.abort(soon())
    assert transactions.identity.producer_epoch > old.producer_epoch
    assert fetch_committed(cluster, topic, {topic: [0]}, soon()) == {}
    assert independent.read_topic(onceflow_broker, topic) == []


def test_a_late_write_of_an_aborted_attempt_is_refused(cluster: Cluster, topic: str, onceflow_broker: str) -> None:
    """I3: a zombie task that wakes up after its batch was aborted.

    Until the abort marker is in the partition, the broker still takes its records: into the aborted
    transaction, in front of the marker. Afterwards it refuses them.
    """
    transactions = opened(cluster, topic)
    write(cluster, transactions, topic, b"first attempt")
    zombie = Transactions(cluster, transactions.transactional_id, identity=transactions.identity)
    transactions.abort(soon())
    deadline = soon()
    while describe_transaction(cluster, transactions.transactional_id, deadline)["state"] != "CompleteAbort":
        deadline.pause(0, "the abort is not complete")
    with pytest.raises(FencedError):
        write(cluster, zombie, topic, b"late", sequence=1)
    with pytest.raises(FencedError):
        zombie.commit_offsets(topic, {topic: {0: 1}}, soon())
    assert independent.read_topic(onceflow_broker, topic, decided=True) == []


def test_the_log_is_read_with_markers_behind_somebody_elses_open_transaction(cluster: Cluster, topic: str) -> None:
    other = Transactions(cluster, f"onceflow.other.{topic}")
    other.init(soon())
    other.begin(soon())
    write(cluster, other, topic, b"open for long")
    transactions = opened(cluster, topic)
    write(cluster, transactions, topic, b"mine")
    transactions.end(soon(), commit=True)
    items = list(read_log(cluster, topic, 0, 0, 3, soon()))
    assert [type(item) for item in items] == [LogRecord, LogRecord, Marker]
    assert items[1].producer_id == items[2].producer_id != items[0].producer_id
    assert isinstance(items[2], Marker)
    assert items[2].committed
    other.abort(soon())


def test_settings_of_topics(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    plain, special = make_topic("plain"), make_topic("special", max_message_bytes=12345, cleanup_policy="compact")
    limits: Any = max_message_bytes(cluster, [plain, special], soon())
    assert limits == {plain: 1048588, special: 12345}
    assert topic_config(cluster, special, "cleanup.policy", soon()) == "compact"


@pytest.mark.long
def test_a_bootstrap_server_that_hangs_does_not_take_all_the_time(
    onceflow_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and says nothing, as a broker does that is paused; another one answers."""
    chosen: list[int] = []

    def choice(servers: Any) -> Any:
        """The silent one at first."""
        (found,) = [server for server in servers if (server.port == port) == (not chosen)]
        chosen.append(found.port)
        return found

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr("kafka.net.manager.random.choice", choice)
        monkeypatch.setattr(connections, "_FIRST_TRY_S", 0.5)
        with closing(Cluster(ClientSettings(f"{onceflow_broker},127.0.0.1:{port}"))) as cluster:
            cluster.connect(Deadline(12, "a test"))  # the first handshake gets a quarter of it
            assert cluster.broker_count() == 1
    assert chosen[0] == port

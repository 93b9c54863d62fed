"""Limits of brokers and of the protocol, met on a real broker: quotas, replicas, epochs, partitions, transactions."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer as LibrdkafkaProducer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from kafka.protocol.admin import AlterClientQuotasRequest
from kafka.protocol.producer import InitProducerIdRequest

import onceflow
from onceflow.broker.local import LocalBroker
from onceflow.client.brokers import Safety, StableOffsets, held_back, read_safety, warn_of_settings
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import await_topic
from onceflow.client.topics import create_topic as create_own_topic
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Outcome, Transactions
from onceflow.driver.record.progress_log import ensure_topic
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_single
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent
from onceflow.testing.broker import create_topic

pytestmark = pytest.mark.integration

MAX_EPOCH = 32_767


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline(seconds, "a test")


@pytest.fixture
def cluster(onceflow_broker: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(onceflow_broker))
    cluster.connect(soon())
    yield cluster
    cluster.close()


def set_config(bootstrap_servers: str, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.incremental_alter_configs([resource])[resource].result(30)


def write(
    cluster: Cluster, transactions: Transactions, topic: str, value: bytes, *, seconds: float = 30.0, sequence: int = 0
) -> None:
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=soon(seconds))
    batch = encode_single(b"k", value, timestamp_ms=1, identity=transactions.identity, base_sequence=sequence)
    producer.send(topic, 0, batch)
    producer.flush()


# ---- quotas ----------------------------------------------------------------------------------------------


@pytest.fixture
def quota(cluster: Cluster) -> Iterator[Callable[[str, float], None]]:
    """``quota("client-a", 100_000.0)``: bytes a second that this client id may produce; removed afterwards."""
    given: list[str] = []
    request = AlterClientQuotasRequest

    def alter(client_id: str, rate: float, *, remove: bool = False) -> None:
        entity = request.EntryData.EntityData(entity_type="client-id", entity_name=client_id)
        change = request.EntryData.OpData(key="producer_byte_rate", value=rate, remove=remove)
        entries = [request.EntryData(entity=[entity], ops=[change])]
        answer = cluster.ask(request(entries=entries, validate_only=False), "AlterClientQuotas", soon())
        assert [entry.error_code for entry in answer.entries] == [0]

    def give(client_id: str, rate: float) -> None:
        given.append(client_id)
        alter(client_id, rate)

    yield give
    for client_id in given:
        alter(client_id, 0.0, remove=True)


@pytest.mark.long
def test_a_throttled_connection_is_used_again(
    onceflow_broker: str, make_topic: Callable[..., str], quota: Callable[[str, float], None]
) -> None:
    """With one broker there is no other connection to ask on."""
    topic = make_topic("slow", 1)
    quota(f"slow-{topic}", 10_000.0)
    cluster = Cluster(ClientSettings(onceflow_broker, {"client.id": f"slow-{topic}"}))
    try:
        transactions = Transactions(cluster, f"onceflow.{topic}")
        transactions.init(soon())
        transactions.begin(soon())
        sequence, deadline = 0, soon()
        while cluster.manager.least_loaded_node() is not None:  # until the quota is known to the broker, and exceeded
            deadline.pause(0, "the connection is not throttled")
            write(cluster, transactions, topic, b"x" * 40_000, sequence=sequence)
            sequence += 1
        assert cluster.topics([topic], soon(10))[topic].partitions == 1
        assert transactions.end(soon(), commit=True) is Outcome.COMMITTED
    finally:
        cluster.close()


@pytest.mark.long
def test_a_quota_slows_down_and_loses_nothing(make_pipe: Any, quota: Callable[[str, float], None]) -> None:
    """Brokers count over ten seconds, so a rate is felt after ten times as many bytes."""
    pipe = make_pipe()
    rate = 100_000.0
    rest = "x" * 900
    pipe.sent = [(f"key-{n % 50}".encode(), f"{n:09d}{rest}".encode()) for n in range(1300)]
    independent.fill(pipe.bootstrap, pipe.source, pipe.sent)
    client_id = f"slow-{pipe.source}"
    quota(client_id, rate)
    flow = pipe.open(options={"client.id": client_id})
    df = flow.read(pipe.source, max_records_per_batch=325).select("key", "value")
    query = flow.write(df, topic=pipe.target, transaction_timeout="30 seconds").start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    batches = query.batches
    felt = sum(batch.nbytes for batch in batches) / rate - 10
    assert felt > 1.5, "too few bytes to be slowed down"
    assert sum(sum(batch.seconds.values()) for batch in batches) > felt / 2
    assert [batch.attempts for batch in batches] == [1] * len(batches)
    pipe.check()


# ---- settings that can lose records ----------------------------------------------------------------------


def warnings_of(
    cluster: Cluster, topics: list[str | None], caplog: pytest.LogCaptureFixture, flow: str = "f"
) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onceflow"):
        warn_of_settings(cluster, topics, soon(), flow=flow)
    return [record.getMessage() for record in caplog.records if record.name == "onceflow"]


def test_unclean_settings_are_told(
    cluster: Cluster, make_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    good = make_topic("good")
    unclean = make_topic("unclean", unclean_leader_election_enable="true")
    few = make_topic("few", 1, min_insync_replicas=2)  # no fault: brokers ask for no more replicas than there are
    assert warnings_of(cluster, [good, few, None, "no-such-topic"], caplog) == []
    transactions = Transactions(cluster, f"onceflow.{few}")
    transactions.init(soon())
    transactions.begin(soon())
    write(cluster, transactions, few, b"taken")
    assert transactions.end(soon(), commit=True) is Outcome.COMMITTED
    (warning,) = warnings_of(cluster, [good, unclean], caplog)
    assert warning.startswith(f"flow f: unclean.leader.election.enable=true for {unclean}: ")


# ---- a cluster of three ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    properties = {
        "unclean.leader.election.enable": "true",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    }
    with LocalBroker(tmp_path_factory.mktemp("three"), nodes=3, properties=properties) as broker:
        yield broker
        broker.kill()  # two that are left cannot stop cleanly, and would take their time to try


@pytest.fixture
def cluster_of_three(three: LocalBroker) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(three.bootstrap_servers))
    cluster.connect(soon())
    yield cluster
    cluster.close()


@pytest.mark.long
def test_settings_of_a_cluster_of_three(cluster_of_three: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Single copies, one copy that acknowledges alone, and the brokers' default of unclean elections."""
    cluster = cluster_of_three
    Transactions(cluster, "onceflow.any").init(soon())  # makes Kafka's own topic
    ensure_topic(cluster, soon())
    for name, copies, configs in (
        ("lonely", 3, {"min.insync.replicas": "1"}),
        ("safe", 3, {"unclean.leader.election.enable": "false"}),
        ("single", 1, {"unclean.leader.election.enable": "false"}),
    ):
        create_own_topic(cluster, name, partitions=2, configs=configs, deadline=soon(), replication=copies)
        await_topic(cluster, name, soon())
    names = [PROGRESS_TOPIC, "lonely", "safe", "single", "no-such-topic"]
    deadline, complete = soon(), 0
    while complete < 10:  # each broker hears of a new topic at a time of its own, and any of them is asked
        found, brokers = read_safety(cluster, names, deadline)
        complete = complete + 1 if len(found) == 5 else 0
        deadline.pause(0, "a broker does not know the topics yet")
    assert brokers == 3
    assert {one.topic: one for one in found} == {
        "lonely": Safety("lonely", 3, True, 1),
        "safe": Safety("safe", 3, False, 2),
        "single": Safety("single", 1, False, 2),
        PROGRESS_TOPIC: Safety(PROGRESS_TOPIC, 3, True, 2),
        # Kafka makes it with unclean elections off, whatever the default is.
        "__transaction_state": Safety("__transaction_state", 3, False, 2),
    }
    unclean, single, lonely = warnings_of(cluster, [*names, None], caplog)
    assert unclean.startswith(f"flow f: unclean.leader.election.enable=true for {PROGRESS_TOPIC}, lonely: ")
    assert "a single copy of single, in a cluster of 3 brokers" in single
    assert "min.insync.replicas=1 for lonely: " in lonely


@pytest.fixture(scope="module")
def two_left(three: LocalBroker) -> LocalBroker:
    """One node is down from here on; a topic that wants three copies in sync takes no records."""
    three.wait_in_sync()
    three.stop_node(3)
    return three


@pytest.fixture
def three_wanted(two_left: LocalBroker, make_pipe: Any) -> Any:
    """A flow whose output wants all three copies in sync."""
    pipe = replace(make_pipe(), bootstrap=",".join(two_left.bootstrap_servers.split(",")[:2]))
    create_topic(pipe.bootstrap, pipe.source, 4)
    create_topic(pipe.bootstrap, pipe.target, 4, {"min.insync.replicas": "3"})
    pipe.fill(200)
    return pipe


@pytest.mark.long
def test_too_few_replicas_in_sync_for_long(three_wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is retried until its deadline and aborted; once the setting is mended the flow goes on.

    The abort itself waits for the replicas: its markers are records, too.
    """
    monkeypatch.setattr("onceflow.driver.kafka.output_writer._MIN_PATIENCE_S", 1.0)
    pipe = three_wanted
    with pytest.raises((onceflow.BatchAbortedError, onceflow.DeadlineExceededError)) as caught:
        pipe.run(transaction_timeout="1 second")
    assert (caught.value.flow, caught.value.batch) == (pipe.flow, 1)
    assert f"unacknowledged batches for {pipe.target}-" in caught.value.detail
    assert caught.value.next_step
    assert independent.read_topic(pipe.bootstrap, pipe.target) == []
    set_config(pipe.bootstrap, pipe.target, "min.insync.replicas", "2")
    pipe.run()
    pipe.check()


@pytest.mark.long
def test_too_few_replicas_in_sync_for_a_while(three_wanted: Any) -> None:
    """The first attempt waits for them: nothing is aborted, nobody has to do anything."""
    pipe = three_wanted
    flow = pipe.open()
    query = flow.write(flow.read(pipe.source).select("key", "value"), topic=pipe.target).start()
    cluster = Cluster(ClientSettings(pipe.bootstrap))
    try:
        deadline = soon()
        # The partition is enrolled before the broker looks at its replicas.
        while pipe.target not in describe_transaction(cluster, f"onceflow.{pipe.flow}", deadline)["partitions"]:
            assert query.isActive
            deadline.pause(0, "nothing was produced")
        assert independent.end_offsets(pipe.bootstrap, pipe.target, isolation="read_uncommitted")[pipe.target, 0] == 0
        set_config(pipe.bootstrap, pipe.target, "min.insync.replicas", "2")
        query.processAllAvailable()
    finally:
        cluster.close()
        query.stop()
    assert [batch.attempts for batch in query.batches] == [1]
    pipe.check()


@pytest.mark.long
def test_the_error_tells_why_a_batch_was_refused(three_wanted: Any) -> None:
    pipe = three_wanted
    cluster = Cluster(ClientSettings(pipe.bootstrap))
    try:
        transactions = Transactions(cluster, f"onceflow.{pipe.target}")
        transactions.init(soon())
        transactions.begin(soon())
        with pytest.raises(onceflow.DeadlineExceededError) as caught:
            write(cluster, transactions, pipe.target, b"refused", seconds=1)
    finally:
        cluster.close()
    assert f"{pipe.target}-0" in caught.value.detail
    assert "NOT_ENOUGH_REPLICAS" in caught.value.detail


# ---- epochs ----------------------------------------------------------------------------------------------


def use_up_epochs(bootstrap_servers: str, transactional_id: str, last: int) -> ProducerIdAndEpoch:
    """Initialise a transactional id until its epoch is ``last``: the same request, many at a time."""
    request = InitProducerIdRequest(
        version=5, transactional_id=transactional_id, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    request.with_header(correlation_id=1, client_id="epochs")
    frame = request.encode(header=True, framed=True)
    answer = struct.Struct(">iibihqhb")  # size, correlation id, tags, throttle, error, producer id, epoch, tags
    host, _, port = bootstrap_servers.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as link, link.makefile("rb") as stream:
        known = -1
        while known < last:
            count = min(500, last - known) if known >= 0 else 1
            link.sendall(frame * count)
            for _ in range(count):
                size, _, _, _, error, producer_id, known, _ = answer.unpack(stream.read(answer.size))
                assert (size, error) == (answer.size - 4, 0)
        assert known == last
        return ProducerIdAndEpoch(producer_id, known)


@pytest.mark.long
def test_epochs_run_out_between_transactions(
    cluster: Cluster, make_topic: Callable[..., str], onceflow_broker: str
) -> None:
    """The coordinator hands out another producer id; nothing is lost, doubled or fenced, and the old one is over."""
    topic = make_topic("epochs", 1)
    transactions = Transactions(cluster, f"onceflow.{topic}")
    use_up_epochs(onceflow_broker, transactions.transactional_id, MAX_EPOCH - 7)
    transactions.init(soon())
    committed, used = [], []
    for number in range(12):
        used.append(transactions.begin(soon()))
        value, commit = b"%d" % number, number % 3 != 2
        write(cluster, transactions, topic, value)
        outcome = Outcome.COMMITTED if commit else Outcome.ABORTED
        assert transactions.end(soon(), commit=commit) is outcome
        committed += [value] if commit else []
        if transactions.identity.producer_id != used[-1].producer_id:
            # The answer may be lost: the same request finds the same outcome, and the same new identity.
            again = Transactions(cluster, transactions.transactional_id, identity=used[-1])
            assert again.end(soon(), commit=commit) is outcome
            assert again.identity == transactions.identity
    ids = [identity.producer_id for identity in used]
    assert len(set(ids)) == 2, used
    change = ids.index(ids[-1])
    assert 2 < change < 10, "the change must come between two transactions"
    assert used[change - 1].producer_epoch == MAX_EPOCH - 1
    assert used[change].producer_epoch == 0
    assert [s.value for s in independent.read_topic(onceflow_broker, topic, decided=True)] == committed

    late = Transactions(cluster, transactions.transactional_id, identity=used[change - 1])
    with pytest.raises((onceflow.FencedError, onceflow.BatchAbortedError)):
        write(cluster, late, topic, b"late")
    with pytest.raises(onceflow.FencedError):
        late.renew(soon())
    assert [s.value for s in independent.read_topic(onceflow_broker, topic, decided=True)] == committed


@pytest.mark.long
def test_epochs_run_out_while_a_flow_runs(make_pipe: Any, onceflow_broker: str) -> None:
    pipe = make_pipe()
    pipe.fill(2000)
    transactional_id = f"onceflow.{pipe.flow}"
    before = use_up_epochs(onceflow_broker, transactional_id, MAX_EPOCH - 8)
    query = pipe.run(read={"max_records_per_batch": 200})
    assert [batch.attempts for batch in query.batches] == [1] * len(query.batches)
    assert len(query.batches) >= 10
    pipe.fill(300)
    pipe.run()
    pipe.check()
    cluster = Cluster(ClientSettings(onceflow_broker))
    try:
        after = describe_transaction(cluster, transactional_id, soon())
    finally:
        cluster.close()
    assert after["producer_id"] != before.producer_id
    assert after["producer_epoch"] < 100


# ---- partitions ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_thousand_partitions_in_one_transaction(make_pipe: Any, onceflow_broker: str) -> None:
    """Written by the driver, then by two tasks that enrol five hundred each."""
    wide = f"wide-{time.time_ns()}"
    create_topic(onceflow_broker, wide, 1000)
    expected: list[tuple[bytes | None, bytes | None]] = []
    for path, rows in (("driver", 5_000), ("2 reading tasks", 4_000)):  # as many as the first batch of each takes
        pipe = replace(make_pipe(), target=wide)
        pipe.sent = [(b"key-%d" % n, f"{path} {n:09d}".encode()) for n in range(rows)]
        independent.fill(pipe.bootstrap, pipe.source, pipe.sent)
        engine = "tasks" if "tasks" in path else "driver"
        (batch,) = pipe.run(read={"max_records_per_batch": None}, engine=engine).batches
        assert (batch.records, batch.attempts, batch.path) == (rows, 1, path)
        expected += pipe.sent
    seen = independent.read_topic(onceflow_broker, wide, decided=True)
    assert Counter((s.key, s.value) for s in seen) == Counter(expected)
    for path in (b"driver", b"2 reading tasks"):
        assert len({s.partition for s in seen if (s.value or b"").startswith(path)}) > 950


# ---- transactions of others ------------------------------------------------------------------------------


def test_an_open_transaction_on_the_source_is_told(make_pipe: Any, cluster: Cluster) -> None:
    """The flow waits in front of it, which looks like having nothing to do; and goes on when it has ended."""
    pipe = make_pipe(partitions=2)
    pipe.fill(100)
    name = f"loader-{pipe.source}"
    producer = LibrdkafkaProducer({"bootstrap.servers": pipe.bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(pipe.source, b"undecided", b"loader", partition=1)
    assert producer.flush(30) == 0
    pipe.sent.append((b"loader", b"undecided"))
    held = independent.end_offsets(pipe.bootstrap, pipe.source)[pipe.source, 1]
    pipe.fill(100)

    now = [0.0]
    watch = StableOffsets(60.0, clock=lambda: now[0])

    def look() -> list[str]:
        return held_back(cluster, watch, {pipe.source: [0, 1]}, soon())

    assert look() == []
    now[0] += 59.0
    assert look() == []
    now[0] += 6.0
    (warning,) = look()
    described = describe_transaction(cluster, name, soon())
    assert f"no record from offset {held} of {pipe.source}-1 on could be read for at least 65 s" in warning
    assert f"producer id {described['producer_id']}, epoch {described['producer_epoch']}" in warning
    begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(described["started_ms"] / 1000))
    assert f"transactional id {name!r}, begun {begun}" in warning
    assert look() == []  # told a moment ago
    now[0] += 66.0
    assert "131 s" in look()[0]

    pipe.run()
    assert independent.committed_offsets(pipe.bootstrap, pipe.flow)[pipe.source, 1] == held
    producer.commit_transaction(30)
    deadline = soon()
    while independent.end_offsets(pipe.bootstrap, pipe.source)[pipe.source, 1] == held:
        deadline.pause(0, "the commit is not complete")
    now[0] += 1000.0
    assert look() == []
    pipe.run()
    seen = independent.read_topic(pipe.bootstrap, pipe.target, decided=True)
    assert sorted((s.key, s.value) for s in seen) == sorted(pipe.sent)

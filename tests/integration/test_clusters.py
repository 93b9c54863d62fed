"""Three nodes that die, halt, restart and hand over while clients work; other versions of Kafka and of transactions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError, KafkaException, Producer
from kafka.protocol.metadata import MetadataRequest

from onceflow.admin.doctor import checks as doctor
from onceflow.admin.doctor.local import Host
from onceflow.broker import LocalBroker
from onceflow.broker.metadata import Partition, metadata_reader
from onceflow.cli.main import cli
from onceflow.client import produce, topics
from onceflow.client.cluster import Cluster, ConnectionFailedError
from onceflow.client.deadline import Deadline
from onceflow.client.long_poll import LongPoll
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import topic_config
from onceflow.client.transactions import Outcome, Transactions
from onceflow.driver.record import progress_log
from onceflow.errors import BrokerUnsupportedError, DeadlineExceededError
from onceflow.protocol.batches import encode_single
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.testing import independent
from onceflow.testing.broker import create_topic, three_nodes
from onceflow.testing.waiting import wait_until

# `make test` has three nodes, killed and started again while flows run, in test_missing_markers.py and test_chaos.py.
pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(240)]

HEAP = "300m"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with three_nodes(tmp_path_factory.mktemp("cluster")) as broker:
        yield broker
        broker.kill()  # the last test leaves two nodes, which would take their time to stop


@pytest.fixture
def three(started: LocalBroker) -> LocalBroker:
    """All three nodes run and are in sync, whatever the test before has done to them."""
    for node in started.cluster.nodes:
        started.resume(node.node_id)
    started.start()
    started.wait_in_sync()
    return started


@pytest.fixture
def topic(three: LocalBroker, request: pytest.FixtureRequest) -> str:
    """A topic with three partitions, named after the test."""
    name = request.node.name.replace("[", "-").replace("]", "")
    create_topic(three.bootstrap_servers, name, 3)
    three.wait_in_sync()
    return str(name)


def connected(bootstrap_servers: str) -> Cluster:
    cluster = Cluster(ClientSettings(bootstrap_servers))
    cluster.connect(Deadline(30, "a test"))
    return cluster


def partitions_of(broker: LocalBroker, topic: str) -> list[Partition]:
    with metadata_reader(broker.bootstrap_servers, {}) as reader:
        return [p for p in reader.read(30).partitions if p.topic == topic]


def send(broker: LocalBroker, topic: str, value: bytes, partition: int = 0, **options: Any) -> KafkaError | None:
    """What became of one record that all in-sync replicas have to take."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "log_level": 0, **options})
    errors: list[KafkaError | None] = []
    producer.produce(topic, value, partition=partition, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    return errors[0]


def values(broker: LocalBroker, topic: str) -> list[bytes | None]:
    deadline = Deadline(60, f"{topic} to be readable")
    while True:
        try:
            return [seen.value for seen in independent.read_topic(broker.bootstrap_servers, topic, decided=True)]
        except KafkaException as error:  # a new leader does not know its high watermark at once
            if error.args[0].code() != KafkaError.OFFSET_NOT_AVAILABLE:
                raise
            deadline.pause(0, str(error))


def write_transaction(
    bootstrap_servers: str, topic: str, value: bytes, while_open: Callable[[], None] = lambda: None
) -> int:
    """Commit one record in a transaction of onceflow's client; the transaction version it went by."""
    cluster = connected(bootstrap_servers)
    deadline = Deadline(30, "a transaction")
    try:
        transactions = Transactions(cluster, f"onceflow.{topic}")
        transactions.init(deadline)
        transactions.begin(deadline)
        if cluster.transaction_version < 2:
            transactions.add_partitions({topic: [0]}, deadline)
        producer = produce.Producer(cluster, transactional_id=transactions.transactional_id, deadline=deadline)
        identity = transactions.identity
        producer.send(topic, 0, encode_single(b"k", value, timestamp_ms=1, identity=identity, base_sequence=0))
        producer.flush()
        while_open()
        transactions.commit_offsets(topic, {topic: {0: 7}}, deadline)
        assert transactions.end(deadline, commit=True) is Outcome.COMMITTED
        return cluster.transaction_version
    finally:
        cluster.close()


def command(data_dir: Path, name: str, *arguments: str) -> tuple[int, Any]:
    """Exit code, and the JSON object, or the error's text."""
    answer = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main", "broker", name, "--data-dir", str(data_dir), "--json", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return answer.returncode, json.loads(answer.stdout) if answer.stdout else answer.stderr


# ---- three nodes -----------------------------------------------------------------------------------------


def test_everything_has_three_copies(three: LocalBroker, topic: str) -> None:
    status = three.status()
    assert (status.running, status.ready, len(set(status.pids))) == (True, True, 3)
    assert three.start() is False
    assert three.status().pids == status.pids
    write_transaction(three.bootstrap_servers, topic, b"one")
    for name in (topic, "__transaction_state", "__consumer_offsets"):
        found = partitions_of(three, name)
        assert len(found) in (3, 4)
        assert all(set(p.replicas) == p.in_sync == {1, 2, 3} for p in found)
        cluster = connected(three.bootstrap_servers)
        assert topic_config(cluster, name, "min.insync.replicas", Deadline(30, "a test")) == "2"
        cluster.close()


def test_one_node_may_fail_and_two_may_not(three: LocalBroker, topic: str) -> None:
    assert send(three, topic, b"by three") is None
    leader = three.leader_of(topic, 0)
    assert three.kill(leader) is True
    assert three.kill(leader) is False
    assert send(three, topic, b"by two") is None
    second, last = sorted({1, 2, 3} - {leader})
    assert three.leader_of(topic, 0) in (second, last)
    status = three.status()
    assert (status.running, status.ready, len(status.pids)) == (False, False, 2)

    # Cleanly: the second one tells the controllers while they are still two, which is a majority.
    assert three.stop_node(second) is True
    deadline = Deadline(60, "the last replica to refuse")
    while (error := send(three, topic, b"by one", retries=0, **{"message.timeout.ms": 5000})) is None or (
        error.code() != KafkaError.NOT_ENOUGH_REPLICAS
    ):
        deadline.pause(0, str(error))

    assert three.start() is True
    three.wait_in_sync()
    assert send(three, topic, b"by all again") is None
    # What was not acknowledged may be there or not.
    assert [v for v in values(three, topic) if v != b"by one"] == [b"by three", b"by two", b"by all again"]


def test_a_node_that_was_killed_comes_back_alone(three: LocalBroker, topic: str) -> None:
    before = three.status().nodes
    client, deadline = connected(three.bootstrap_servers), Deadline(60, "node 2 to answer a client that has seen it go")
    three.kill(2)
    while client.broker_count() == 3:
        client.refresh_brokers(deadline)
        deadline.pause(3, "node 2 is still in the cluster")
    assert three.start_node(2) is True
    assert three.start_node(2) is False
    three.wait_in_sync()
    after = three.status().nodes
    assert [n.pid for n in after if n.node_id != 2] == [n.pid for n in before if n.node_id != 2]
    assert after[1].pid != before[1].pid
    assert after[1].port == before[1].port
    soon = Deadline(20, "node 2 to answer")
    while True:  # kafka-python has forgotten the node, and would learn of it after minutes
        try:
            client.exchange(MetadataRequest(topics=[]), 2, soon)
            break
        except ConnectionFailedError as problem:
            soon.pause(3, str(problem))
    client.close()


def test_partitions_are_followed_while_others_have_no_leader(three: LocalBroker, topic: str) -> None:
    """What has a leader is returned, without a look at the metadata that waits for the others."""
    single = f"{topic}-single"
    with closing(connected(three.bootstrap_servers)) as cluster:
        deadline = Deadline(60, "a test")
        topics.create_topic(cluster, single, partitions=6, configs={}, deadline=deadline, replication=1)
        independent.fill(three.bootstrap_servers, single, [(b"%d" % n, b"v") for n in range(60)])
        info = cluster.topic(single, deadline)
        poll = LongPoll(cluster, [info], {(single, n): 0 for n in range(6)})
        gone = three.leader_of(single, 0)
        lost = {p.number for p in partitions_of(three, single) if p.leader == gone}
        three.kill(gone)
        seen: dict[int, int] = {}

        def read(until: set[int]) -> bool:
            for (_, partition), chunk in poll.poll(0.2):
                seen[partition] = seen.get(partition, 0) + len(chunk.keys)
            leaders = cluster.topics([single], Deadline(60, "a test"), once=True, leaderless=True)[single].leaders
            return {n for n, leader in leaders.items() if leader < 0} == lost - until and set(seen) >= until

        others = {*range(6)} - lost
        wait_until(lambda: read(others), 90, "what has a leader is read")
        assert set(seen) == others
        three.start()
        wait_until(lambda: read({*range(6)}), 90, "everything is read")
        assert sum(seen.values()) == 60


@pytest.mark.parametrize("way", ["halts", "dies"])
def test_the_status_of_a_flow_goes_on_without_a_leader(three: LocalBroker, topic: str, way: str) -> None:
    """A source without copies: the partitions of the node cannot be asked, before and after the cluster has noticed.

    The node that halts leads only the source, the one that dies also the partition with the progress of the flow.
    """
    single, flow = f"{topic}-single", f"flow-{topic}"
    with closing(connected(three.bootstrap_servers)) as cluster:
        deadline = Deadline(60, "a test")
        topics.create_topic(cluster, single, partitions=6, configs={}, deadline=deadline, replication=1)
        independent.fill(three.bootstrap_servers, single, [(b"%d" % n, b"v") for n in range(60)])
        progress_log.ensure_topic(cluster, deadline)
        offsets = {single: dict.fromkeys(range(6), 0)}
        done = Progress(flow, 3, offsets, {}, 1_700_000_000_000)
        progress_log.write_progress(cluster, None, Names(flow), done, {}, deadline)
    three.wait_in_sync()

    def look(*arguments: str) -> tuple[dict[str, Any], float]:
        began = time.monotonic()
        place = ["--bootstrap-servers", three.bootstrap_servers, "--timeout", "40 seconds"]
        answer = CliRunner().invoke(cli, ["status", *arguments, "--json", *place], standalone_mode=False)
        assert answer.exception is None, answer.exception
        told = {each["flow"]: each for each in map(json.loads, answer.stdout.splitlines())}
        return {"code": answer.return_value, "said": answer.stderr, **told[flow]}, time.monotonic() - began

    (before, _) = look(flow)
    assert (before["lag"], before["unseen"]) == (60, [])
    partition = progress_log.partition_of(flow)
    shows = three.leader_of(PROGRESS_TOPIC, partition)
    leaders = {p.number: p.leader for p in partitions_of(three, single)}
    gone = shows if way == "dies" else next(leader for leader in leaders.values() if leader != shows)
    lost = sorted(number for number, leader in leaders.items() if leader == gone)
    assert 0 < len(lost) < 6
    assert three.pause(gone) if way == "halts" else three.kill(gone)
    hidden = f"{PROGRESS_TOPIC}-{partition}, with its progress: its leader, broker {gone}, does not answer"

    def is_noticed() -> bool:
        """What is known of the others is shown, and of the whole flow what coordinators know."""
        found, took_s = look(flow, "--max-lag", "1000")
        if gone == shows and hidden in found["unseen"]:
            # Progress has copies: another node leads it as soon as the cluster has noticed.
            assert (found["batch"], found["sources"], found["code"]) == (None, [], 1)
            return False
        (source,) = found["sources"]
        assert sorted(map(int, source["unseen"])) == lost
        assert sorted(part["partition"] for part in source["partitions"]) == sorted({*range(6)} - {*lost})
        assert sum(part["lag"] for part in source["partitions"]) > 0
        assert (found["batch"], found["lag"], found["code"]) == (3, None, 1)
        assert found["said"] == f"onceflow: {flow}: its lag is not known\n"
        assert took_s < 42
        why = {*source["unseen"].values()}
        assert why in ({"it has no leader"}, {f"its leader, broker {gone}, does not answer"})
        return why == {"it has no leader"}

    wait_until(is_noticed, 90, "the cluster has noticed that the node is gone", poll_s=0.5)
    found, _ = look()
    assert (found["batch"], found["code"], found["said"]) == (3, 0, ""), "progress has copies, so no flow is missing"


def test_a_node_that_halts_loses_its_leaderships(three: LocalBroker, topic: str) -> None:
    leader = three.leader_of(topic, 1)
    assert three.pause(leader) is True
    deadline = Deadline(60, "another leader")
    while three.leader_of(topic, 1) == leader:
        deadline.pause(4, f"{leader} leads")
    assert send(three, topic, b"without it", partition=1) is None
    assert three.resume(leader) is True
    three.wait_in_sync()
    assert values(three, topic) == [b"without it"]


def test_a_rolling_restart_loses_nothing(three: LocalBroker, topic: str) -> None:
    before = three.status().pids
    done = threading.Event()
    sent: list[bytes] = []
    errors: list[str] = []

    def keep_sending() -> None:
        producer = Producer(
            {"bootstrap.servers": three.bootstrap_servers, "enable.idempotence": True, "log_level": 0, "linger.ms": 0}
        )
        while not done.wait(0.02):
            sent.append(b"%d" % len(sent))
            producer.produce(topic, sent[-1], on_delivery=lambda error, _: error and errors.append(str(error)))
            producer.poll(0)
        if producer.flush(60):
            errors.append("not everything was delivered")

    sender = threading.Thread(target=keep_sending)
    sender.start()
    try:
        three.rolling_restart()
    finally:
        done.set()
        sender.join()
    assert errors == []
    assert not set(three.status().pids) & set(before)
    assert sorted(values(three, topic), key=lambda v: int(v or b"")) == sent


def test_leaders_move(three: LocalBroker, topic: str) -> None:
    before = {p.number: p.leader for p in partitions_of(three, topic)}
    assert three.move_leaders([topic]) == 3
    after = {p.number: p.leader for p in partitions_of(three, topic)}
    assert all(after[number] != before[number] for number in range(3))
    assert send(three, topic, b"to the new one") is None
    write_transaction(three.bootstrap_servers, topic, b"coordinators, too")
    coordinators = {p.number: p.leader for p in partitions_of(three, "__transaction_state")}
    assert three.move_leaders() > 3
    moved = {p.number: p.leader for p in partitions_of(three, "__transaction_state")}
    assert all(moved[number] != coordinators[number] for number in range(4))
    assert values(three, topic) == [b"to the new one", b"coordinators, too"]


def test_wait_in_sync_does_not_return_while_a_node_is_down(three: LocalBroker) -> None:
    three.kill(3)
    with pytest.raises(DeadlineExceededError) as caught:
        three.wait_in_sync(timeout_s=1)
    assert "not running: node 3" in caught.value.detail


def test_commands_for_several_nodes(three: LocalBroker) -> None:
    code, fields = command(three.data_dir, "status")
    assert (code, fields["ready"], [node["node_id"] for node in fields["nodes"]]) == (0, True, [1, 2, 3])
    assert [node["pid"] for node in fields["nodes"]] == fields["pids"]
    code, error = command(three.data_dir, "start", "--nodes", "1")
    assert (code, "has 3 node(s), not 1" in error) == (1, True)
    three.kill(1)
    code, fields = command(three.data_dir, "status")
    assert (code, fields["running"], fields["nodes"][0]["pid"], len(fields["pids"])) == (1, False, None, 2)
    code, fields = command(three.data_dir, "start", "--nodes", "3", "--heap", HEAP)
    assert (code, fields["started"], fields["ready"], len(fields["pids"])) == (0, True, True, 3)
    code, fields = command(three.data_dir, "stop")
    assert (code, fields["stopped"], fields["pids"]) == (0, True, [])


# ---- other versions --------------------------------------------------------------------------------------


def test_kafka_3_9_commits_transactions_at_version_1(tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "broker", version="3.9.2", heap=HEAP) as broker:
        create_topic(broker.bootstrap_servers, "older", 1)
        assert write_transaction(broker.bootstrap_servers, "older", b"one") == 1
        assert values(broker, "older") == [b"one"]
        assert broker.status().version == "3.9.2"


def test_the_transaction_version_changes_while_the_cluster_runs(tmp_path: Path) -> None:
    data_dir = tmp_path / "broker"
    broker = LocalBroker(data_dir, heap=HEAP)
    try:
        code, fields = command(data_dir, "start", "--transaction-version", "1", "--heap", HEAP)
        assert (code, fields["ready"]) == (0, True)
        code, error = command(data_dir, "start", "--transaction-version", "2")
        assert (code, "transaction.version 1, not 2" in error) == (1, True)
        create_topic(broker.bootstrap_servers, "changing", 1)
        assert broker.transaction_versions() == {1: 1}
        assert write_transaction(broker.bootstrap_servers, "changing", b"first") == 1
        broker.upgrade_transaction_version()
        assert broker.transaction_versions() == {1: 2}
        assert write_transaction(broker.bootstrap_servers, "changing", b"second") == 2
        # Who is connected goes on as before; the open transaction is committed.
        down = broker.downgrade_transaction_version
        assert write_transaction(broker.bootstrap_servers, "changing", b"third", while_open=down) == 2
        assert broker.transaction_versions() == {1: 1}
        up = broker.upgrade_transaction_version
        assert write_transaction(broker.bootstrap_servers, "changing", b"fourth", while_open=up) == 1
        with pytest.raises(BrokerUnsupportedError, match=r"transaction\.version 9"):
            broker.upgrade_transaction_version(9)
        assert values(broker, "changing") == [b"first", b"second", b"third", b"fourth"]
    finally:
        broker.stop()


def test_the_doctor_names_a_broker_that_is_down(three: LocalBroker, topic: str) -> None:
    def told() -> dict[str, str]:
        settings = ClientSettings(three.bootstrap_servers)
        found = doctor.cluster_findings(settings, None, [topic], Host(()))
        return {f"{each.check} {each.level.value}": each.subject + ": " + each.found for each in found}

    assert not any(each.endswith((" error", " warning")) for each in told())
    three.kill(2)
    wait_until(lambda: "topics warning" in told(), 60, lambda: str(told()))
    found = told()
    assert found["brokers error"].startswith("broker 2 at 127.0.0.1:")
    assert "under-replicated" in found["topics warning"]
    assert "refused" in found["connection warning"]

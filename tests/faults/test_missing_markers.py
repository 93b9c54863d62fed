"""What Kafka does to a transaction that ends while one of its partitions has no leader: it leaves the marker out.

TransactionMarkerChannelManager takes a partition without a leader for a deleted one. The transaction is complete then,
its records stay undecided in that partition, and the producer's next transaction there decides them, too. The first
test pins that; when it fails, Kafka has been mended. The others show that no flow begins a transaction before.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from onceflow import hooks
from onceflow.broker.local import LocalBroker
from onceflow.cli.main import cli
from onceflow.client.cluster import TRANSACTION, Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.errors import BatchAbortedError
from onceflow.protocol.batches import encode_single
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.testing import independent
from onceflow.testing.broker import create_topic, three_nodes

pytestmark = [pytest.mark.integration, pytest.mark.faults]

SOURCE, OUT = "in", "out"


def soon() -> Deadline:
    return Deadline(90, "a test")


@dataclass
class Flow:
    """The Kafka side of a flow whose output, and progress if ``alone`` says so, have one copy on one node."""

    broker: LocalBroker
    name: str
    alone: tuple[str, ...]
    node: int = 0
    batch: int = 0
    clusters: list[Cluster] = field(default_factory=list)

    @property
    def out(self) -> str:
        return f"{self.name}-{OUT}"

    @property
    def names(self) -> Names:
        return Names(self.name)

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.broker.bootstrap_servers, "log_level": 0})

    def kill(self) -> None:
        """Returns when the topics have no leader, and the brokers know."""
        self.broker.kill(self.node)
        deadline, admin = soon(), self.admin
        while any(
            partition.leader >= 0
            for topic in self.alone
            for partition in admin.list_topics(topic, timeout=10).topics[topic].partitions.values()
        ):
            deadline.pause(3, "a partition has a leader")

    def driver(self, name: str | None = None) -> DriverSession:
        cluster = Cluster(ClientSettings(self.broker.bootstrap_servers))
        self.clusters.append(cluster)
        cluster.connect(soon())
        session = DriverSession(cluster, Names(name or self.name))
        session.transactions._batch = False  # the tests walk the steps by themselves
        return session

    def create(self, topic: str, partitions: int) -> None:
        """Its one copy is not where the transaction's coordinator is."""
        if not self.node:
            coordinator = self.driver().cluster.coordinator(TRANSACTION, self.names.transactional_id, soon())
            self.node = next(node for node in (1, 2, 3) if node != coordinator)
        made = NewTopic(
            topic,
            partitions,
            replica_assignment=[[self.node]] * partitions,
            config={"min.insync.replicas": "1", **({"cleanup.policy": "compact"} if topic == PROGRESS_TOPIC else {})},
        )
        self.admin.create_topics([made])[topic].result(30)

    def write(self, driver: DriverSession, text: str) -> int:
        """One record; its offset."""
        transactions = driver.transactions
        if not transactions.version_2:
            transactions.add_partitions({self.out: [0]}, soon())
        producer = Producer(driver.cluster, transactional_id=transactions.transactional_id, deadline=soon())
        now_ms = int(time.time() * 1000)
        batch = encode_single(b"k", text.encode(), timestamp_ms=now_ms, identity=transactions.identity, base_sequence=0)
        producer.send(self.out, 0, batch)
        return producer.flush()[self.out, 0].base_offset

    def move_progress(self, driver: DriverSession) -> int:
        """A progress record of the next batch; its offset."""
        self.batch += 1
        identity = driver.transactions.identity
        progress = Progress(
            self.name,
            self.batch,
            {SOURCE: {0: self.batch}},
            {},
            clock_ms(),
            outputs=(self.out,),
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
        )
        return progress_log.write_progress(
            driver.cluster, driver.transactions, self.names, progress, progress.offsets, soon()
        )

    def end_without_leader(self, driver: DriverSession, *, commit: bool) -> None:
        """The transaction ends, and its marker is left out where ``alone`` has one copy."""
        self.kill()
        driver.transactions.end(soon(), commit=commit)
        deadline, transactional_id = soon(), self.names.transactional_id
        # Empty: at version 1 an abort ends with a new epoch.
        over = ("CompleteCommit", "CompleteAbort", "Empty")
        while describe_transaction(driver.cluster, transactional_id, soon())["state"] not in over:
            deadline.pause(3, "the transaction is not over")
        self.broker.start_node(self.node)
        driver.cluster.topics(self.alone, soon())  # it leads again

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()

    def seen(self) -> list[bytes]:
        records = independent.read_topic(self.broker.bootstrap_servers, self.out, decided=True)
        return [record.value for record in records]


# Version 1 is left to make test-long.
VERSIONS = [pytest.param(2, id="v2"), pytest.param(1, id="v1", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=VERSIONS)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    features = {"transaction.version": request.param}
    with three_nodes(tmp_path_factory.mktemp("kafka"), features=features) as broker:
        create_topic(broker.bootstrap_servers, SOURCE, 1)
        yield broker


@pytest.fixture
def flow(broker: LocalBroker) -> Iterator[Flow]:
    """Its output has one copy."""
    name = f"markers-{uuid.uuid4().hex[:8]}"
    flow = Flow(broker, name, (f"{name}-{OUT}",))
    flow.create(flow.out, 1)
    yield flow
    flow.close()


@pytest.fixture
def driver(flow: Flow) -> DriverSession:
    driver = flow.driver()
    progress_log.ensure_topic(driver.cluster, soon())
    driver.init(soon())
    return driver


def commit_after_an_abort(flow: Flow, driver: DriverSession, *, looks: bool) -> None:
    driver.transactions.begin(soon())
    flow.write(driver, "aborted")
    flow.end_without_leader(driver, commit=False)
    if looks:
        driver.markers.ended({(flow.out, 0): None})
        driver.markers.confirm(soon())
    driver.transactions.begin(soon())
    flow.write(driver, "committed")
    driver.transactions.end(soon(), commit=True)


@pytest.mark.long
def test_aborted_records_become_visible(flow: Flow, driver: DriverSession) -> None:
    """Kafka alone."""
    commit_after_an_abort(flow, driver, looks=False)
    assert flow.seen() == [b"aborted", b"committed"]


@pytest.mark.long
def test_an_aborted_attempt_is_decided_before_the_next(flow: Flow, driver: DriverSession) -> None:
    commit_after_an_abort(flow, driver, looks=True)
    assert flow.seen() == [b"committed"]


@pytest.mark.long
def test_a_committed_batch_is_decided_before_the_next(flow: Flow, driver: DriverSession) -> None:
    driver.transactions.begin(soon())
    first = flow.write(driver, "committed")
    flow.end_without_leader(driver, commit=True)
    driver.markers.ended({(flow.out, 0): first})
    driver.markers.confirm(soon())
    driver.transactions.begin(soon())
    flow.write(driver, "aborted")
    driver.transactions.end(soon(), commit=False)
    assert flow.seen() == [b"committed"]


@pytest.mark.long
def test_others_open_transactions_are_left_alone(
    flow: Flow, driver: DriverSession, caplog: pytest.LogCaptureFixture
) -> None:
    """They hold the last stable offset back just as a missing marker does."""
    stranger = flow.driver(flow.name + "-other")
    stranger.transactions.init(soon())
    stranger.transactions.begin(soon())
    flow.write(stranger, "open")
    driver.transactions.begin(soon())
    first = flow.write(driver, "committed")
    driver.transactions.end(soon(), commit=True)
    with caplog.at_level(logging.WARNING):
        driver.markers.ended({(flow.out, 0): first})
        driver.markers.confirm(soon())
    assert not caplog.records
    stranger.transactions.end(soon(), commit=False)
    assert flow.seen() == [b"committed"]


@pytest.mark.long
def test_an_administrator_aborts_what_has_no_marker(flow: Flow, driver: DriverSession) -> None:
    """`onceflow transactions`, when the producer itself does not come back."""

    def command(*arguments: str, code: int = 0) -> str:
        given = ["transactions", *arguments, "--bootstrap-servers", flow.broker.bootstrap_servers]
        answer = CliRunner().invoke(cli, given, standalone_mode=False)
        assert answer.exception is None, repr(answer.exception)
        assert (answer.return_value or 0) == code
        return answer.stdout

    driver.transactions.begin(soon())
    flow.write(driver, "aborted")
    flow.end_without_leader(driver, commit=False)
    stranger = flow.driver(flow.name + "-other")
    stranger.transactions.init(soon())
    stranger.transactions.begin(soon())
    flow.write(stranger, "committed")
    stranger.transactions.end(soon(), commit=True)
    assert independent.read_topic(flow.broker.bootstrap_servers, flow.out) == []
    (found,) = [json.loads(line) for line in command("list", "--hanging", "--fail", "--json", code=1).splitlines()]
    assert (found["topic"], found["transactional_id"]) == (flow.out, flow.names.transactional_id)
    assert found["hanging"]
    command("abort", flow.names.transactional_id, "--yes")
    assert flow.seen() == [b"committed"]
    assert command("list", "--fail") == ""


def started_again(flow: Flow, starts: int, *, batch_id: int) -> DriverSession:
    """The last of some starts; the others have died before they looked. It finds progress at this batch."""
    for _ in range(starts - 1):
        flow.driver().init(soon())
    following = flow.driver()
    following.init(soon())
    progress = following.progress({SOURCE: [0]}, soon())
    assert progress is not None
    assert progress.batch_id == batch_id
    return following


@pytest.mark.long
@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
@pytest.mark.parametrize("starts", [1, 2], ids=["next-start", "after-a-start-that-died"])
def test_the_next_start_decides_the_output(flow: Flow, driver: DriverSession, commit: bool, starts: int) -> None:
    driver.transactions.begin(soon())
    flow.write(driver, "first")
    flow.move_progress(driver)
    driver.transactions.end(soon(), commit=True)
    driver.transactions.begin(soon())
    flow.write(driver, "second")
    flow.move_progress(driver)
    flow.end_without_leader(driver, commit=commit)
    following = started_again(flow, starts, batch_id=2 if commit else 1)
    following.transactions.begin(soon())
    flow.write(following, "never")
    following.transactions.end(soon(), commit=False)
    assert flow.seen() == ([b"first", b"second"] if commit else [b"first"])


@pytest.mark.long
@pytest.mark.parametrize("commit", [False, True])
def test_a_flow_writes_once_when_markers_are_missing(
    broker: LocalBroker, make_pipe: Callable[..., Any], commit: bool
) -> None:
    """Spark, and an output without a leader when the second batch aborts, and when the third commits."""
    pipe = replace(make_pipe(), bootstrap=broker.bootstrap_servers)
    kafka = Flow(broker, pipe.flow, (pipe.target,))
    create_topic(pipe.bootstrap, pipe.source, 2)
    kafka.create(pipe.target, 2)
    pipe.fill(4000)
    done: list[str] = []

    def once(what: str, when: bool) -> bool:
        if when and what not in done:
            done.append(what)
            return True
        return False

    def watch(step: str, *, flow: str, batch: int | None, **_: Any) -> None:
        if flow != pipe.flow:
            return
        if once("abort", step == "audit" and batch == 2):
            kafka.kill()
            raise BatchAbortedError("for the test")
        if once("back again", step == "aborted") or once("back", commit and step == "end" and batch == 3):
            broker.start_node(kafka.node)
        if commit and once("commit", step == "progress" and batch == 3):
            kafka.kill()
        if commit and once("abort after the commit", step == "audit" and batch == 4):
            raise BatchAbortedError("for the test")

    forget = hooks.observe(watch)
    try:
        pipe.run()
    finally:
        forget()
        kafka.close()
    assert done == ["abort", "back again", *(["commit", "back", "abort after the commit"] if commit else [])]
    pipe.check()


# Last in this file: the topic of progress has one copy afterwards, on any node.
@pytest.mark.long
@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
@pytest.mark.parametrize("starts", [1, 2], ids=["next-start", "after-a-start-that-died"])
def test_the_next_start_decides_progress(broker: LocalBroker, commit: bool, starts: int) -> None:
    """The record that tells how the batch has ended has no marker itself."""
    flow = Flow(broker, f"markers-{uuid.uuid4().hex[:8]}", (PROGRESS_TOPIC,))
    waited, gone = soon(), True
    if PROGRESS_TOPIC in flow.admin.list_topics(timeout=10).topics:
        flow.admin.delete_topics([PROGRESS_TOPIC])[PROGRESS_TOPIC].result(30)
    while gone:
        try:
            flow.create(PROGRESS_TOPIC, progress_log.PROGRESS_PARTITIONS)
            gone = False
        except Exception as error:  # the topic is still being deleted
            waited.pause(5, str(error))
    flow.create(flow.out, 1)
    driver = flow.driver()
    driver.init(soon())
    for text, last in (("first", False), ("second", True)):
        driver.transactions.begin(soon())
        flow.write(driver, text)
        flow.move_progress(driver)
        if last:
            flow.end_without_leader(driver, commit=commit)
        else:
            driver.transactions.end(soon(), commit=True)
    started_again(flow, starts, batch_id=2 if commit else 1)
    assert flow.seen() == ([b"first", b"second"] if commit else [b"first"])
    flow.close()

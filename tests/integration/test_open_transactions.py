"""`onceflow transactions`: open transactions of other producers, and hanging ones that are made on purpose.

A hanging one is made as clients before Kafka 4.0 could make it: a Produce request of transaction version 1 whose
partition nobody has added to the transaction (KIP-890), to a broker that does not verify that.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer as LibrdkafkaProducer
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from onceflow.admin.transactions import transaction_abort
from onceflow.broker.local import LocalBroker
from onceflow.cli import transactions as transactions_command
from onceflow.cli.main import cli
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Producer
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.errors import OptionError, PermissionDeniedError, UnknownTopicError
from onceflow.protocol.batches import encode_single
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress
from onceflow.testing import faults, independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.secure import Secure, grant

pytestmark = pytest.mark.integration

Run = Callable[..., Result]


def soon() -> Deadline:
    return Deadline(30, "a test")


@pytest.fixture
def run(onceflow_broker: str) -> Run:
    """Runs a command; ``error`` is the class of the error that it must raise."""

    def call(
        *arguments: str,
        code: int = 0,
        error: type[Exception] | None = None,
        servers: str = "",
        typed: str | None = None,
    ) -> Result:
        named = ["transactions", *arguments, "--bootstrap-servers", servers or onceflow_broker]
        answer = CliRunner().invoke(cli, named, standalone_mode=False, input=typed)
        if error is not None:
            assert isinstance(answer.exception, error), answer.output + repr(answer.exception)
        else:
            assert answer.exception is None, answer.output + repr(answer.exception)
            assert (answer.return_value or 0) == code, answer.output
        return answer

    return call


@contextlib.contextmanager
def unverified(servers: str) -> Iterator[None]:
    """The brokers do not ask the coordinator whether a partition is in the transaction."""
    admin = AdminClient({"bootstrap.servers": servers})
    setting = "transaction.partition.verification.enable"

    def change(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(setting, "false", incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.BROKER, node, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(30)

    def verifies() -> bool:
        asked = ConfigResource(ConfigResource.Type.BROKER, node)
        return bool(admin.describe_configs([asked])[asked].result(30)[setting].value == "true")

    (node,) = (str(each) for each in admin.list_topics(timeout=30).brokers)
    change(AlterConfigOpType.SET)
    wait_until(lambda: not verifies(), 20, "the setting is in effect")
    yield
    change(AlterConfigOpType.DELETE)
    wait_until(verifies, 20, "the setting is back")


def write(cluster: Cluster, transactions: Transactions, topic: str, text: str, sequence: int = 0) -> None:
    """One record in partition 0, with the Produce request of transaction version 1, which adds no partition."""
    producer = Producer(cluster, transactional_id=transactions.transactional_id, deadline=soon(), transaction_version=1)
    identity = transactions.identity
    batch = encode_single(b"k", text.encode(), timestamp_ms=clock_ms(), identity=identity, base_sequence=sequence)
    producer.send(topic, 0, batch)
    producer.flush()


@pytest.fixture
def cluster(onceflow_broker: str) -> Iterator[Cluster]:
    cluster = Cluster(ClientSettings(onceflow_broker))
    cluster.connect(soon())
    yield cluster
    cluster.close()


def _state(cluster: Cluster, transactions: Transactions) -> str:
    return str(describe_transaction(cluster, transactions.transactional_id, soon())["state"])


def hung(cluster: Cluster, topic: str, *, committed: bool = False) -> Transactions:
    """Leaves a hanging transaction in partition 0; its last transaction was committed, if ``committed`` says so."""
    transactions = Transactions(cluster, f"hanging-{uuid.uuid4().hex[:8]}")
    transactions.init(soon())
    if committed:
        transactions.begin(soon())
        transactions.add_partitions({topic: [1]}, soon())
        transactions.end(soon(), commit=True)
        wait_until(lambda: _state(cluster, transactions) == "CompleteCommit", 30, "the coordinator has ended it")
    write(cluster, transactions, topic, "hangs")
    return transactions


@pytest.fixture
def hang(cluster: Cluster, onceflow_broker: str) -> Iterator[Callable[..., Transactions]]:
    with unverified(onceflow_broker):
        yield partial(hung, cluster)


def left_open(servers: str, topic: str, *, partition: int = 0) -> tuple[LibrdkafkaProducer, str]:
    name = f"loader-{topic}"
    producer = LibrdkafkaProducer({"bootstrap.servers": servers, "transactional.id": name, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"undecided", b"k", partition=partition)
    assert producer.flush(30) == 0
    return producer, name


def plain(servers: str, topic: str, text: bytes, *, partition: int = 0) -> None:
    producer = LibrdkafkaProducer({"bootstrap.servers": servers, "log_level": 0})
    producer.produce(topic, text, b"k", partition=partition)
    assert producer.flush(30) == 0


def lines(answer: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.stdout.splitlines()]


def seen(servers: str, topic: str) -> list[bytes | None]:
    """What an independent read_committed consumer gets at this moment."""
    return [record.value for record in independent.read_topic(servers, topic)]


def test_an_ordinary_open_transaction(run: Run, make_topic: Any, onceflow_broker: str, cluster: Cluster) -> None:
    topic, empty = make_topic("loaded", 2), make_topic("empty", 2)
    answer = run("list", "--topic", empty, "--fail")
    assert answer.stdout == ""
    assert "No transaction is open: looked in 2 partitions" in answer.stderr
    plain(onceflow_broker, topic, b"before", partition=1)
    producer, name = left_open(onceflow_broker, topic, partition=1)
    plain(onceflow_broker, topic, b"after", partition=1)
    described = describe_transaction(cluster, name, soon())

    (found,) = lines(run("list", "--topic", topic, "--topic", empty, "--json", "--fail", code=1))
    assert (found["topic"], found["partition"], found["start_offset"], found["held_back"]) == (topic, 1, 1, 2)
    assert (found["transactional_id"], found["state"], found["hanging"]) == (name, "Ongoing", False)
    assert (found["producer_id"], found["producer_epoch"]) == (described["producer_id"], described["producer_epoch"])
    assert 0 <= found["age_seconds"] < 60
    assert name in run("list").stdout, "all topics"
    assert "None of 1 open transaction is one of these" in run("list", "--topic", topic, "--hanging", "--fail").stderr
    assert run("list", "--topic", topic, "--min-age", "1 hour", "--fail").stdout == ""
    words = run("describe", name).stdout
    assert f"transactional id {name}, producer id {described['producer_id']}" in words
    assert f"partitions in the transaction: {topic}-1" in words
    (same,) = [run("describe", *by, "--json").stdout for by in [("--producer-id", str(found["producer_id"]))]]
    assert json.loads(same)["transactional_id"] == name

    dry = run("abort", name, code=1)
    assert "A running producer is fenced by that" in dry.stdout
    assert "nothing was done. Without a terminal, give --yes" in dry.stderr
    assert json.loads(run("abort", name, "--json", code=1).stdout)["done"] is False
    assert seen(onceflow_broker, topic) == [b"before"], "nothing was done"
    assert f"nothing of it is open any more in {topic}-1" in run("abort", name, "--yes").stdout
    assert seen(onceflow_broker, topic) == [b"before", b"after"]
    with pytest.raises(Exception, match=r"(?i)fenced|newer"):
        producer.commit_transaction(30)
    assert "there is nothing to abort" in run("abort", name, "--yes").stdout
    assert "there is nothing to abort" in run("abort", name).stdout
    assert "No record of it is undecided" in run("describe", name).stdout


def test_a_hanging_transaction(run: Run, make_topic: Any, onceflow_broker: str, hang: Any, cluster: Cluster) -> None:
    topic = make_topic("hung", 2)
    hanging = hang(topic)
    other, name = left_open(onceflow_broker, topic)
    plain(onceflow_broker, topic, b"after")
    number = hanging.identity.producer_id

    first, second = sorted(lines(run("list", "--topic", topic, "--json")), key=lambda each: each["start_offset"])
    assert (first["producer_id"], first["hanging"], first["transactional_id"]) == (
        number, True, hanging.transactional_id
    )  # fmt: skip
    assert (second["transactional_id"], second["hanging"]) == (name, False)
    assert {first["held_back"], second["held_back"]} == {3}
    (only,) = lines(run("list", "--topic", topic, "--hanging", "--json", "--fail", code=1))
    assert only == {**first, "age_seconds": only["age_seconds"]}

    answer = run("abort", "--producer-id", str(number), "--json", code=1)
    assert json.loads(answer.stdout)["markers"] == [{"topic": topic, "partition": 0}]
    assert json.loads(answer.stdout)["done"] is False
    assert seen(onceflow_broker, topic) == []
    run("abort", "--producer-id", str(number), "--yes")
    assert lines(run("list", "--topic", topic, "--hanging", "--json")) == []
    other.commit_transaction(30)  # the open one of the other producer was left alone
    wait_until(lambda: seen(onceflow_broker, topic) == [b"undecided", b"after"], 20, "the commit is decided")
    # The transactional id goes on.
    hanging.begin(soon())
    hanging.add_partitions({topic: [0]}, soon())
    hanging.end(soon(), commit=True)


@pytest.mark.long
def test_kafka_3_9(run: Run, tmp_path: Path) -> None:
    """It takes a marker in version 1 of the request, too."""
    verify = {"transaction.partition.verification.enable": "false"}
    with LocalBroker(tmp_path / "broker", version="3.9.2", properties=verify) as broker:
        servers = broker.bootstrap_servers
        create_topic(servers, "orders", 2)
        with contextlib.closing(Cluster(ClientSettings(servers))) as cluster:
            cluster.connect(soon())
            hanging = hung(cluster, "orders", committed=True)
            plain(servers, "orders", b"after")
            assert seen(servers, "orders") == []
            run("abort", hanging.transactional_id, "--yes", servers=servers, error=OptionError)
            run("abort", hanging.transactional_id, "--yes", "--force", servers=servers)
            assert seen(servers, "orders") == [b"after"]
            _, name = left_open(servers, "orders")
            run("abort", name, "--yes", servers=servers)
            assert run("list", "--fail", servers=servers).stdout == ""


def test_what_may_be_committed_is_not_aborted_without_force(
    run: Run, make_topic: Any, onceflow_broker: str, hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic("hung", 2)
    name = hang(topic, committed=True).transactional_id
    answer = run("abort", name, "--yes", error=OptionError)
    assert "an abort loses committed records" in str(answer.exception)
    assert "Refused without --force" in run("abort", name, code=1).stdout
    monkeypatch.setattr(transactions_command, "_terminal", lambda: True)
    run("abort", name, typed="y\n", error=OptionError)
    run("abort", name, "--force", typed="n\n", error=click.Abort)
    assert run("list", "--topic", topic, "--fail", code=1).stdout
    run("abort", name, "--force", typed="y\n")
    assert run("list", "--topic", topic, "--fail").stdout == ""


def test_a_flow_that_seems_to_run(
    run: Run, make_topic: Any, onceflow_broker: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, flow = make_topic("out", 1), f"flow-{uuid.uuid4().hex[:8]}"
    progress_log.ensure_topic(cluster, soon())
    names = Names(flow, transactional_id_prefix="team.")
    session = DriverSession(cluster, names)
    session.transactions._batch = False
    session.init(soon())
    session.transactions.begin(soon())
    identity = session.transactions.identity
    progress = Progress(names.progress_key, 1, {topic: {0: 0}}, {}, clock_ms(), producer_id=identity.producer_id)
    progress_log.write_progress(cluster, session.transactions, names, progress, progress.offsets, soon())
    session.transactions.end(soon(), commit=True)
    session.transactions.begin(soon())
    session.transactions.add_partitions({topic: [0]}, soon())
    write(cluster, session.transactions, topic, "open")

    answer = run("abort", names.transactional_id, "--yes", error=OptionError)
    assert "belongs to a flow that has committed" in str(answer.exception)
    assert "start it: its start ends this transaction" in str(answer.exception)
    monkeypatch.setattr(transaction_abort, "RECENT_MS", 0)
    answer = run("abort", names.transactional_id, "--yes")
    assert "its next start continues after the last committed batch" in answer.stdout
    assert run("list", "--topic", topic, "--fail").stdout == ""


def aborted_by_hand(run: Run, pipe: Any, onceflow_broker: str) -> None:
    """The flow has an open transaction in its second batch. Its commit of the first one was a moment ago."""
    name = Names(pipe.flow).transactional_id
    (state,) = {each["state"] for each in lines(run("list", "--topic", pipe.target, "--json"))}
    assert state == "Ongoing"
    assert "seems to run" in str(run("abort", name, "--yes", error=OptionError).exception)
    run("abort", name, "--yes", "--force")
    assert run("list", "--topic", pipe.target, "--fail").stdout == ""


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_flow_goes_on_after_an_abort_by_hand(
    run: Run, make_pipe: Callable[..., Any], onceflow_broker: str, how: str
) -> None:
    """After SIGKILL to its driver in mid-batch; and a running driver is fenced."""
    pipe = make_pipe()
    pipe.fill(2500)
    ready, go_on = pipe.tmp_path / "reached", pipe.tmp_path / "go-on"
    more = {"seconds": 60, "until": str(go_on)} if how == "pause" else {}
    process = pipe.driver(faults.fault("progress", how, batch=2, once_file=str(ready), **more))
    try:
        wait_until(ready.exists, 60, "the driver is in its second batch")
        if how == "kill":
            process.communicate(timeout=60)
        aborted_by_hand(run, pipe, onceflow_broker)
        go_on.touch()
        if how == "pause":
            output = process.communicate(timeout=60)[0]
            assert process.returncode != 0
            assert "FencedError" in output
    finally:
        pipe.end_driver(process)
    assert len(independent.read_topic(onceflow_broker, pipe.target)) < len(pipe.sent)
    pipe.run()
    pipe.check()


def test_mistakes(run: Run, make_topic: Any, onceflow_broker: str) -> None:
    topic = make_topic("orders", 1)
    assert topic in str(run("list", "--topic", topic.upper(), error=UnknownTopicError).exception)
    _, name = left_open(onceflow_broker, topic)
    answer = run("describe", name + "x", error=OptionError)
    assert "No coordinator knows the transactional id" in str(answer.exception)
    assert name in str(answer.exception)
    answer = run("abort", "--producer-id", "999999999", error=OptionError)
    assert "No coordinator knows producer id 999999999" in str(answer.exception)
    run("abort", name, "--yes")


@pytest.mark.long
def test_missing_permissions(run: Run, secure: Secure) -> None:
    """READ on the topic is needed to look; DESCRIBE on all ids to be certain; ALTER on the cluster for a marker."""
    topic = f"hidden-{uuid.uuid4().hex[:8]}"
    create_topic(secure.internal, topic, 1)
    owner = Cluster(ClientSettings(secure.internal))
    owner.connect(soon())
    transactions = Transactions(owner, f"secret-{topic}")
    transactions.init(soon())
    with unverified(secure.internal):
        write(owner, transactions, topic, "hangs")
    number = str(transactions.identity.producer_id)
    options = [f"--option={key}={value}" for key, value in secure.options().items()]

    def may(*acls: Any) -> None:
        grant(secure, acls)

    read = (ResourceType.TOPIC, topic, AclOperation.READ)
    state = (ResourceType.TOPIC, "__transaction_state", AclOperation.DESCRIBE)
    ids = (ResourceType.TRANSACTIONAL_ID, "*", AclOperation.DESCRIBE)
    may((ResourceType.TOPIC, topic, AclOperation.DESCRIBE), state, ids)
    assert "grant READ" in str(
        run("list", "--topic", topic, *options, servers=secure.servers, error=PermissionDeniedError).exception
    )
    assert f"not looked at: {topic}: this principal lacks READ" in run("list", *options, servers=secure.servers).stderr
    may(read, state)
    answer = run("list", "--topic", topic, *options, servers=secure.servers)
    assert "hanging?" in answer.stdout
    assert "lacks DESCRIBE on all transactional ids" in answer.stderr
    by = ("abort", "--producer-id", number, "--topic", topic, "--yes", *options)
    assert "may still have this" in str(run(*by, servers=secure.servers, error=OptionError).exception)
    may(read, state, ids)
    assert "grant ALTER on the cluster" in str(run(*by, servers=secure.servers, error=PermissionDeniedError).exception)
    may(read, state, ids, (ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER))
    run(*by, servers=secure.servers)
    owner.close()

    _, name = left_open(secure.internal, topic)
    may(read, state)
    answer = run("describe", name, *options, servers=secure.servers, error=PermissionDeniedError)
    assert f"may not describe the transactional id {name!r}" in str(answer.exception)
    may(read, state, ids)
    answer = run("abort", name, "--yes", *options, servers=secure.servers, error=PermissionDeniedError)
    assert f"may not take over the transactional id {name!r}" in str(answer.exception)
    may(read, state, ids, (ResourceType.TRANSACTIONAL_ID, name, AclOperation.WRITE))
    run("abort", name, "--yes", *options, servers=secure.servers)
    assert run("list", "--topic", topic, "--fail", *options, servers=secure.servers).stdout == ""

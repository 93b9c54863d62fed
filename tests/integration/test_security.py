"""TLS, SASL (SCRAM and PLAIN) and ACLs on a real broker: least privileges work, a missing one says which it is."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, AdminClient, ResourceType
from sqlite_sink import SqliteSink

import onceflow
from onceflow.admin.doctor import checks as doctor
from onceflow.admin.doctor.finding import Level
from onceflow.admin.doctor.local import Host
from onceflow.admin.status.flow_status_reader import StatusReader
from onceflow.client.brokers import Safety, StableOffsets, held_back, read_safety, warn_of_settings
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transaction_requests import describe_transaction
from onceflow.driver.record import progress_log
from onceflow.driver.record.session import DriverSession
from onceflow.protocol.heartbeats import HEARTBEATS_TOPIC
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.testing.waiting import wait_until
from onceflow_workshop.testing.secure import SCRAM, SECRET, Secure, connected, grant

sys.path.insert(0, str(Path(__file__).parent))
try:
    from permission_table import table
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


@pytest.fixture
def pipe(secure: Secure, make_pipe: Callable[..., Any]) -> Any:
    pipe = replace(make_pipe(), bootstrap=secure.internal)
    for topic in (pipe.source, pipe.target):
        create_topic(secure.internal, topic, 4)
    pipe.fill(300)
    return pipe


def needed(pipe: Any) -> dict[str, tuple[Any, str, Any]]:
    """What docs/connect.md says that a flow needs."""
    keys = {
        ("READ", "SOURCE"): "source",
        ("WRITE", "OUTPUT"): "target",
        ("READ", PROGRESS_TOPIC): "progress-read",
        ("WRITE", PROGRESS_TOPIC): "progress-write",
        ("WRITE", "onceflow.FLOW"): "transactional-id",
        ("READ", "FLOW"): "group",
    }
    return {keys[right.operation, right.name]: right.of(named(pipe)).acl for right in table()["a flow"]}


def named(pipe: Any) -> dict[str, str]:
    """What the names in capitals stand for."""
    return {
        "SOURCE": pipe.source,
        "OUTPUT": pipe.target,
        "FLOW": pipe.flow,
        "TOPIC": pipe.source,
        "TABLE": pipe.source.replace("in-", "table-", 1),
        "LETTERS": pipe.source.replace("in-", "letters-", 1),
    }


def rights(pipe: Any, *kinds: str) -> list[tuple[Any, str, Any]]:
    """What docs/connect.md says that a flow of these kinds needs."""
    return [right.of(named(pipe)).acl for kind in kinds for right in table()[kind]]


def run(secure: Secure, pipe: Any, *, mechanism: str = SCRAM, **write: Any) -> Any:
    options = secure.options(mechanism)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=options)
    try:
        df = flow.read(pipe.source, max_records_per_batch=1000).select("key", "value")
        query = flow.write(df, topic=pipe.target, **write).start()
        query.processAllAvailable()
        return query
    finally:
        flow.close()


@pytest.mark.long
def test_the_progress_topic_cannot_be_created(secure: Secure, pipe: Any) -> None:
    """Runs first: no flow has made the topic on this broker yet."""
    grant(secure, list(needed(pipe).values()))
    with pytest.raises(onceflow.PermissionDeniedError, match=r"(?s)may not create it.*create it once: 8 partitions"):
        run(secure, pipe)


@pytest.mark.long_but("SCRAM-SHA-512-tasks")
@pytest.mark.parametrize("mechanism, engine", [(SCRAM, "tasks"), ("PLAIN", "driver")])
def test_least_privileges_over_tls(secure: Secure, pipe: Any, mechanism: str, engine: str) -> None:
    # CREATE on the one topic; without it an operator makes the topic (see the test above).
    grant(secure, [*needed(pipe).values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    run(secure, pipe, mechanism=mechanism, engine=engine)
    pipe.check()


@pytest.mark.parametrize(
    "missing, step",
    [
        ("source", "grant READ on the topic"),
        ("target", "grant WRITE on the topic"),
        ("progress-read", "grant READ on the topic"),
        ("progress-write", "grant WRITE on the topic"),
        ("transactional-id", "grant WRITE on the transactional id"),
        ("group", "grant READ on the group id"),
    ],
)
def test_each_missing_privilege_is_named(secure: Secure, pipe: Any, missing: str, step: str) -> None:
    acls = needed(pipe)
    _, name, _ = acls.pop(missing)
    grant(secure, [*acls.values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    with pytest.raises(onceflow.PermissionDeniedError) as caught:
        run(secure, pipe)
    text = str(caught.value)
    assert name in text, text
    assert f"{step}: kafka-acls.sh" in caught.value.next_step
    assert caught.value.next_step.endswith(f" {name}")
    assert SECRET not in text
    assert independent.read_topic(secure.internal, pipe.target) == []


@pytest.mark.parametrize("missing", ["", "source", "target", "progress-read", "transactional-id", "group"])
def test_the_doctor_names_each_missing_privilege(secure: Secure, pipe: Any, missing: str) -> None:
    """Nothing is written to find that out. The flow has progress, of which the doctor has the topics."""
    acls = needed(pipe)
    names = Names(pipe.flow)
    with contextlib.closing(Cluster(ClientSettings(secure.internal))) as cluster:
        deadline = Deadline(30, "a test")
        progress_log.ensure_topic(cluster, deadline)
        session = DriverSession(cluster, names)
        session.init(deadline)  # Kafka's own topics exist then
        ids = {pipe.source: cluster.topic(pipe.source, deadline).topic_id}
        progress = Progress(pipe.flow, 1, {pipe.source: dict.fromkeys(range(4), 0)}, ids, 1, outputs=(pipe.target,))
        progress_log.write_progress(cluster, None, names, progress, progress.offsets, deadline)
        before = describe_transaction(cluster, names.transactional_id, deadline)
        lacks = acls.pop(missing, None)
        grant(secure, list(acls.values()))
        found = list(doctor.cluster_findings(ClientSettings(secure.servers, secure.options()), names, [], Host(())))
        assert describe_transaction(cluster, names.transactional_id, deadline) == before
    denied = {each.fix.partition(": ")[0]: each.subject for each in found if each.level is Level.ERROR}
    if lacks is None:
        assert denied == {}
        told = {each.fix for each in found if each.level is Level.WARNING and each.check == "permissions"}
        assert any("--operation DescribeConfigs --topic" in fix for fix in told)
        return
    _, name, operation = lacks
    (fix,) = denied
    assert fix.startswith(f"grant {operation.name} on the ")
    assert denied[fix].split()[-1] == name


def test_write_is_missing_where_describe_is_not(secure: Secure, pipe: Any) -> None:
    """The output can be seen at the start; the first batch finds out."""
    acls = needed(pipe)
    acls["target"] = (ResourceType.TOPIC, pipe.target, AclOperation.DESCRIBE)
    grant(secure, [*acls.values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    with pytest.raises(onceflow.PermissionDeniedError, match=f"may not use the topic.*{pipe.target}") as caught:
        run(secure, pipe)
    assert "grant WRITE on the topic" in caught.value.next_step
    assert independent.read_topic(secure.internal, pipe.target) == []


@pytest.mark.parametrize("missing", ["", "table-READ", "table-WRITE", "internal-READ"])
def test_privileges_of_a_flow_with_state(secure: Secure, pipe: Any, ledger: Any, tmp_path: Path, missing: str) -> None:
    """Both topics of the table: READ and WRITE, and CREATE unless an operator has made them."""
    table_topic = named(pipe)["TABLE"]
    of_state = rights(pipe, "a flow with state, in addition")
    acls = {f"{'internal' if '-internal' in each[1] else 'table'}-{each[2].name}": each for each in of_state}
    creates = {name: (kind, name, AclOperation.CREATE) for kind, name, _ in acls.values()}
    name = acls.pop(missing)[1] if missing else ""
    create = (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)
    grant(secure, [*needed(pipe).values(), *acls.values(), *creates.values(), create])
    sent = ledger.inputs(0, 200)
    independent.fill(secure.internal, pipe.source, sent)

    def run_once() -> None:
        flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
        with flow:
            records = flow.read(pipe.source).where("string(value) like '{%'")
            output = flow.process(records, ledger.Ledger(), table=table_topic, state_dir=tmp_path / "state")
            flow.write(output, topic=pipe.target).start().processAllAvailable()

    if missing:
        with pytest.raises((onceflow.PermissionDeniedError, onceflow.UnknownTopicError)) as caught:
            run_once()
        assert name in str(caught.value)
        assert SECRET not in str(caught.value)
        assert independent.read_topic(secure.internal, pipe.target) == []
        return
    run_once()
    shutil.rmtree(tmp_path / "state")
    independent.fill(secure.internal, pipe.source, ledger.inputs(200, 50))
    run_once()  # restores
    assert len(independent.read_topic(secure.internal, pipe.target, decided=True)) == 250


@pytest.mark.long
@pytest.mark.parametrize("may", [AclOperation.READ, AclOperation.DESCRIBE, None], ids=["read", "describe", "nothing"])
def test_privileges_of_a_flow_that_joins(secure: Secure, pipe: Any, tmp_path: Path, may: Any) -> None:
    """READ on the topic of the table, of which another flow may have the state; nothing on that flow's other topic."""
    joined_topic = named(pipe)["TABLE"]
    for topic in (joined_topic, f"{joined_topic}-internal"):
        create_topic(secure.internal, topic, 2, {"cleanup.policy": "compact"})
    independent.fill(secure.internal, joined_topic, [(key, b"known") for key, _ in pipe.sent[:50]])
    create = (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)
    (read,) = rights(pipe, "a flow that joins with a table, in addition")
    grant(secure, [*needed(pipe).values(), create, *([(*read[:2], may)] if may else [])])
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())

    def run_once() -> None:
        with flow:
            joined = onceflow.JoinTable(joined_topic, state_dir=tmp_path)
            df = flow.join_table(flow.read(pipe.source), joined, on="key", columns="known")
            flow.write(df.select("key", "value"), topic=pipe.target, engine="tasks").start().processAllAvailable()

    if may == read[2]:
        run_once()
        pipe.check()
        return
    with pytest.raises(onceflow.PermissionDeniedError) as caught:
        run_once()
    assert (caught.value.flow, caught.value.topic) == (pipe.flow, joined_topic)
    assert "READ" in caught.value.next_step
    assert SECRET not in str(caught.value)
    assert independent.read_topic(secure.internal, pipe.target) == []


def doubled(record: onceflow.Record) -> bytes:
    return b"%d" % (2 * int(record.value or b""))


def test_privileges_of_dead_letters(secure: Secure, pipe: Any) -> None:
    letters = named(pipe)["LETTERS"]
    create_topic(secure.internal, letters, 1)
    grant(secure, rights(pipe, "a flow", "a flow with dead letters or late records, in addition"))
    independent.fill(secure.internal, pipe.source, [(b"k", b"no number")])
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
    with flow:
        calls = onceflow.concurrently(doubled, retries=0)
        rows = flow.enrich(flow.read(pipe.source), calls, topic=pipe.target, dead_letter_topic=letters)
        flow.write(rows).start().processAllAvailable()
    assert [seen.value for seen in independent.read_topic(secure.internal, letters, decided=True)] == [b"no number"]
    assert len(independent.read_topic(secure.internal, pipe.target, decided=True)) == 300


@pytest.mark.parametrize("missing", ["", "READ", "WRITE"])
def test_privileges_of_a_standby(secure: Secure, pipe: Any, missing: str) -> None:
    standby = table()["a flow with `standby=True`, in addition"]
    acls = rights(pipe, "a flow") + [right.acl for right in standby if right.operation != missing]
    create = [(ResourceType.TOPIC, name, AclOperation.CREATE) for name in (PROGRESS_TOPIC, HEARTBEATS_TOPIC)]
    grant(secure, [*acls, *create])
    flow = onceflow.Flow(
        pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options(), standby=True
    )
    refused = pytest.raises(onceflow.PermissionDeniedError, match=f"(?s){HEARTBEATS_TOPIC}.*grant {missing}")
    with flow, refused if missing else contextlib.nullcontext():
        df = flow.read(pipe.source).select("key", "value")
        flow.write(df, topic=pipe.target).start().processAllAvailable()
    if not missing:
        pipe.check()


def test_privileges_without_an_output_in_kafka(secure: Secure, pipe: Any, tmp_path: Path) -> None:
    database = tmp_path / "rows.db"
    with contextlib.closing(sqlite3.connect(database)) as made:
        made.execute("CREATE TABLE rows (v TEXT)")
    grant(secure, rights(pipe, "a flow that writes to another system"))
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
    with flow:
        rows = flow.read(pipe.source).selectExpr("CAST(value AS STRING) v")
        flow.write_external(rows, SqliteSink(str(database), "rows"), once=True).start().awaitTermination(60)
    with contextlib.closing(sqlite3.connect(database)) as read:
        assert read.execute("SELECT count(*) FROM rows").fetchone()[0] == 300


def test_privileges_of_a_weaker_guarantee(secure: Secure, pipe: Any) -> None:
    grant(secure, rights(pipe, "a flow"))
    run(secure, pipe, guarantee="at_least_once")
    pipe.check()


def test_privileges_of_a_look(secure: Secure, pipe: Any, tmp_path: Path) -> None:
    connection = {"bootstrap_servers": secure.servers, "options": secure.options()}
    grant(secure, rights(pipe, "onceflow.peek"))
    assert onceflow.peek(pipe.spark, pipe.source, last=7, **connection).count() == 7
    grant(secure, rights(pipe, "onceflow.Table"))
    with onceflow.Table(pipe.source, state_dir=tmp_path, **connection) as found:
        assert found.count() == 50


@pytest.mark.long
def test_missing_read_shows_at_the_first_start(secure: Secure, pipe: Any) -> None:
    """The progress topic is empty, so there is nothing to read yet. (Other tests have used all its partitions.)"""
    with contextlib.closing(Cluster(ClientSettings(secure.internal))) as cluster:
        progress_log.ensure_topic(cluster, Deadline(30, "a test"))
        admin = AdminClient({"bootstrap.servers": secure.internal})
        admin.delete_topics([PROGRESS_TOPIC])[PROGRESS_TOPIC].result(30)
        wait_until(
            lambda: PROGRESS_TOPIC not in admin.list_topics(timeout=10).topics, 30, "the deletion of the progress topic"
        )
        progress_log.ensure_topic(cluster, Deadline(30, "a test"))
    assert set(independent.end_offsets(secure.internal, PROGRESS_TOPIC).values()) == {0}
    acls = needed(pipe)
    acls.pop("progress-read")
    grant(secure, list(acls.values()))
    with pytest.raises(onceflow.PermissionDeniedError, match=PROGRESS_TOPIC):
        run(secure, pipe)
    assert independent.read_topic(secure.internal, pipe.target) == []


@pytest.mark.parametrize("missing", ["", "source", "progress-read", "transactional-id"])
def test_the_status_of_a_flow_names_missing_permissions(secure: Secure, pipe: Any, missing: str) -> None:
    """READ implies DESCRIBE, and so does WRITE. What is permitted is shown."""
    names = Names(pipe.flow)
    with contextlib.closing(Cluster(ClientSettings(secure.internal))) as cluster:
        deadline = Deadline(30, "a test")
        progress_log.ensure_topic(cluster, deadline)
        ids = {pipe.source: cluster.topic(pipe.source, deadline).topic_id}
        done = Progress(pipe.flow, 3, {pipe.source: dict.fromkeys(range(4), 0)}, ids, 1_700_000_000_000)
        progress_log.write_progress(cluster, None, names, done, {}, deadline)
    acls = {key: needed(pipe)[key] for key in ("source", "progress-read", "transactional-id") if key != missing}
    grant(secure, list(acls.values()))
    with contextlib.closing(connected(secure, secure.options())) as cluster:
        (found,) = StatusReader(cluster).read([pipe.flow], Deadline(30, "a test"))
        if missing == "progress-read":
            with pytest.raises(onceflow.PermissionDeniedError, match="may not be read"):
                StatusReader(cluster).read([], Deadline(30, "a test"))
    expected = {
        "": [],
        "source": [f"READ on topic {pipe.source}"],
        "progress-read": [f"READ on topic {PROGRESS_TOPIC}"],
        "transactional-id": [f"DESCRIBE on transactional id {names.transactional_id}"],
    }
    assert (found.missing, found.warnings) == (expected[missing], [])
    assert found.lag == (300 if missing in ("", "transactional-id") else None)
    assert found.batch == (None if missing == "progress-read" else 3)
    assert (found.transaction is None) is (missing == "transactional-id")


@pytest.mark.parametrize(
    "mechanism, user, password",
    [
        (SCRAM, "flow", "guessed-password"),
        (SCRAM, "nobody", SECRET),
        pytest.param("PLAIN", "flow", "guessed-password", marks=pytest.mark.long),
    ],
)
def test_wrong_credentials(
    secure: Secure, pipe: Any, monkeypatch: pytest.MonkeyPatch, mechanism: str, user: str, password: str
) -> None:
    monkeypatch.setattr("onceflow.driver.start.takeover.START_SECONDS", 90.0)
    options = secure.options(mechanism, user, password)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=options)
    with pytest.raises(onceflow.AuthenticationFailedError, match="refused the credentials") as caught:
        flow.read(pipe.source)
    assert password not in str(caught.value)


@pytest.mark.long
def test_plain_connection_to_a_tls_listener(secure: Secure, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.driver.start.takeover.START_SECONDS", 4.0)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers)
    with pytest.raises(onceflow.BrokerUnreachableError, match="did not complete the Kafka handshake as PLAINTEXT"):
        flow.read(pipe.source)


# ---- warnings, with the least privileges -----------------------------------------------------------------


def test_settings_that_may_not_be_read_are_no_reason_to_stop(
    secure: Secure, pipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """DESCRIBE_CONFIGS is missing, and Kafka's own topics may not be described: what is left is the copies."""
    grant(secure, list(needed(pipe).values()))
    cluster = connected(secure, secure.options())
    try:
        found, brokers = read_safety(cluster, [pipe.target], Deadline(30, "a test"))
        assert (found, brokers) == ([Safety(pipe.target, replicas=1)], 1)
        warn_of_settings(cluster, [pipe.target, None], Deadline(30, "a test"), flow=pipe.flow)
    finally:
        cluster.close()
    assert not [record for record in caplog.records if record.name == "onceflow"]


@pytest.mark.parametrize("may_describe", [False, True])
def test_an_open_transaction_of_somebody_else(secure: Secure, pipe: Any, may_describe: bool) -> None:
    """READ on the source shows whose producer id it is; its name needs DESCRIBE on the transactional id."""
    name = f"loader-{pipe.source}"
    more = [(ResourceType.TRANSACTIONAL_ID, name, AclOperation.DESCRIBE)] if may_describe else []
    grant(secure, [*needed(pipe).values(), *more])
    producer = Producer({"bootstrap.servers": secure.internal, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(pipe.source, b"undecided", partition=2)
    assert producer.flush(30) == 0
    now = [0.0]
    watch = StableOffsets(60.0, clock=lambda: now[0])
    cluster = connected(secure, secure.options())
    try:
        assert held_back(cluster, watch, {pipe.source: [0, 1, 2, 3]}, Deadline(30, "a test")) == []
        now[0] += 61.0
        (warning,) = held_back(cluster, watch, {pipe.source: [0, 1, 2, 3]}, Deadline(30, "a test"))
    finally:
        cluster.close()
        producer.abort_transaction(30)
    assert f" of {pipe.source}-2 " in warning
    assert re.search(r"producer id \d+, epoch \d+", warning)
    assert (repr(name) in warning) is may_describe
    assert ("lacks DESCRIBE on its transactional id" in warning) is not may_describe


@pytest.mark.long_but("True")
@pytest.mark.parametrize("may_read", [False, True])
def test_an_output_that_others_write_to(
    secure: Secure, pipe: Any, may_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their open transaction looks like a missing marker. Whose it is takes READ; nothing is lost without."""
    more = [(ResourceType.TOPIC, pipe.target, AclOperation.READ)] if may_read else []
    grant(secure, [*needed(pipe).values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE), *more])
    producer = Producer({"bootstrap.servers": secure.internal, "transactional.id": f"other-{pipe.target}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in range(4):
        producer.produce(pipe.target, b"never to be seen", partition=partition)
    assert producer.flush(30) == 0
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
    try:
        with caplog.at_level(logging.WARNING):
            df = flow.read(pipe.source, max_records_per_batch=100).select("key", "value")
            query = flow.write(df, topic=pipe.target).start()
            query.processAllAvailable()
    finally:
        flow.close()
        producer.abort_transaction(30)
    assert ("can only be seen with READ on the topic" in caplog.text) is not may_read
    assert "left out" not in caplog.text
    pipe.check()

"""TLS, SASL (SCRAM and PLAIN) and ACLs on a real broker: least privileges work, a missing one says which it is."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

import onceflow
from onceflow.broker.local import LocalBroker, free_ports
from onceflow.client.brokers import Safety, StableOffsets, held_back, read_safety, warn_of_settings
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.driver.progress_log import partition_of
from onceflow.host import java
from onceflow.protocol.progress import PROGRESS_TOPIC
from onceflow.testing import independent
from onceflow.testing.broker import create_topic

pytestmark = pytest.mark.integration

SECRET = "a-password-that-must-not-be-printed"
SCRAM = "SCRAM-SHA-512"


@dataclass(frozen=True)
class Secure:
    """A broker whose clients need TLS, a password and ACLs; ``internal`` is a listener without any."""

    servers: str
    internal: str
    certificate: Path

    def options(self, mechanism: str = SCRAM, user: str = "flow", password: str = SECRET) -> dict[str, str]:
        """User and password in either way that there is."""
        options = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificate),
        }
        if mechanism == SCRAM:
            return {**options, "sasl.username": user, "sasl.password": password}
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {**options, "sasl.jaas.config": f'{module} required username="{user}" password="{password}";'}


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A key store for the broker, and its self-signed certificate as PEM for clients."""
    keytool = str(Path(java.find_java()).with_name("keytool"))
    store, certificate = folder / "broker.p12", folder / "broker.pem"
    common = ["-keystore", str(store), "-storepass", "storepass", "-alias", "broker"]
    subprocess.run(
        [keytool, "-genkeypair", *common, "-keyalg", "EC", "-storetype", "PKCS12", "-validity", "30",
         "-dname", "CN=localhost", "-ext", "SAN=ip:127.0.0.1,dns:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(
        [keytool, "-exportcert", "-rfc", *common, "-file", str(certificate)], check=True, capture_output=True
    )
    return store, certificate


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    store, certificate = make_certificate(folder)
    port, internal = free_ports(2)
    security = "org.apache.kafka.common.security"
    plain = f'{security}.plain.PlainLoginModule required user_flow="{SECRET}";'
    properties = {
        "listeners": f"SASL_SSL://127.0.0.1:{port},INTERNAL://127.0.0.1:{internal}",
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "INTERNAL",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": "storepass",
        "ssl.key.password": "storepass",
        "sasl.enabled.mechanisms": f"{SCRAM},PLAIN",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{security}.scram.ScramLoginModule required;",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": plain,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with LocalBroker(folder / "broker", properties=properties, client_listener="INTERNAL") as broker:
        found = Secure(f"127.0.0.1:{port}", broker.bootstrap_servers, certificate)
        create_scram_user(found, "flow", SECRET)
        yield found


def create_scram_user(secure: Secure, user: str, password: str) -> None:
    """Return when the broker lets the user in: it learns of it a moment after the controller has answered."""
    credential = UserScramCredentialUpsertion(
        user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), password.encode()
    )
    admin = AdminClient({"bootstrap.servers": secure.internal})
    admin.alter_user_scram_credentials([credential])[user].result(30)
    connected(secure, secure.options(user=user, password=password)).close()


def connected(secure: Secure, options: dict[str, str]) -> Cluster:
    """Connections of a client with these options."""
    deadline = Deadline(30, "a test connects")
    attempt = 0
    while True:
        cluster = Cluster(ClientSettings(secure.servers, options))
        try:
            cluster.connect(deadline)
            return cluster
        except onceflow.AuthenticationFailedError as error:
            cluster.close()
            deadline.pause(attempt, error.what)
            attempt += 1


@pytest.fixture
def pipe(secure: Secure, make_pipe: Callable[..., Any]) -> Any:
    pipe = replace(make_pipe(), bootstrap=secure.internal)
    for topic in (pipe.source, pipe.target):
        create_topic(secure.internal, topic, 4)
    pipe.fill(300)
    return pipe


def needed(pipe: Any) -> dict[str, tuple[Any, str, Any]]:
    """The least privileges of a flow (docs/operations.md lists the same)."""
    return {
        "source": (ResourceType.TOPIC, pipe.source, AclOperation.READ),
        "target": (ResourceType.TOPIC, pipe.target, AclOperation.WRITE),
        "progress-read": (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.READ),
        "progress-write": (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.WRITE),
        "transactional-id": (ResourceType.TRANSACTIONAL_ID, f"onceflow.{pipe.flow}", AclOperation.WRITE),
        "group": (ResourceType.GROUP, pipe.flow, AclOperation.READ),
    }


def grant(secure: Secure, acls: list[tuple[Any, str, Any]]) -> None:
    admin = AdminClient({"bootstrap.servers": secure.internal})
    everything = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    for future in admin.delete_acls([everything]).values():
        future.result(30)
    bindings = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:flow", "*", operation, AclPermissionType.ALLOW)
        for kind, name, operation in acls
    ]
    if bindings:
        for future in admin.create_acls(bindings).values():
            future.result(30)


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


def test_the_progress_topic_cannot_be_created(secure: Secure, pipe: Any) -> None:
    """Runs first: no flow has made the topic on this broker yet."""
    grant(secure, list(needed(pipe).values()))
    with pytest.raises(onceflow.PermissionDeniedError, match=r"(?s)may not create it.*create it once: 8 partitions"):
        run(secure, pipe)


@pytest.mark.parametrize("mechanism, small_batch_rows", [(SCRAM, 0), ("PLAIN", 4000)])
def test_least_privileges_over_tls(secure: Secure, pipe: Any, mechanism: str, small_batch_rows: int) -> None:
    # CREATE on the one topic; without it an operator makes the topic (see the test above).
    grant(secure, [*needed(pipe).values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    run(secure, pipe, mechanism=mechanism, small_batch_rows=small_batch_rows)
    pipe.check()


@pytest.mark.parametrize(
    "missing, step",
    [
        ("source", "grant READ on sources"),
        ("target", "WRITE on outputs"),
        ("progress-read", "grant READ on the topic"),
        ("progress-write", "grant WRITE on the topic"),
        ("transactional-id", "grant WRITE and DESCRIBE on the transactional id"),
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
    assert step in caught.value.next_step
    assert SECRET not in text
    assert independent.read_topic(secure.internal, pipe.target) == []


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
    table = pipe.source.replace("in-", "table-", 1)
    acls = {
        f"{kind}-{operation.name}": (ResourceType.TOPIC, name, operation)
        for kind, name in (("table", table), ("internal", f"{table}-internal"))
        for operation in (AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE)
    }
    name = acls.pop(missing)[1] if missing else ""
    create = (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)
    grant(secure, [*needed(pipe).values(), *acls.values(), create])
    sent = ledger.inputs(0, 200)
    independent.fill(secure.internal, pipe.source, sent)

    def run_once() -> None:
        flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
        with flow:
            records = flow.read(pipe.source).where("string(value) like '{%'")
            output = flow.process(records, ledger.Ledger(), table=table, state_dir=tmp_path / "state")
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


def test_missing_read_shows_at_the_first_start(secure: Secure, pipe: Any) -> None:
    """The flow's partition of the progress topic is empty, so there is nothing to read yet."""
    ends = independent.end_offsets(secure.internal, PROGRESS_TOPIC)
    flows = (f"{pipe.flow}-{number}" for number in range(1000))
    fresh = replace(
        pipe,
        flow=next(name for name in flows if not ends[PROGRESS_TOPIC, partition_of(f"onceflow.{name}")]),
    )
    acls = needed(fresh)
    acls.pop("progress-read")
    grant(secure, list(acls.values()))
    with pytest.raises(onceflow.PermissionDeniedError, match=PROGRESS_TOPIC):
        run(secure, fresh)
    assert independent.read_topic(secure.internal, fresh.target) == []


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
    monkeypatch.setattr("onceflow.driver.startup.START_SECONDS", 90.0)
    options = secure.options(mechanism, user, password)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=options)
    with pytest.raises(onceflow.AuthenticationFailedError, match="refused the credentials") as caught:
        flow.read(pipe.source)
    assert password not in str(caught.value)


def test_plain_connection_to_a_tls_listener(secure: Secure, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.driver.startup.START_SECONDS", 4.0)
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

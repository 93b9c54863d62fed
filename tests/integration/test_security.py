"""TLS, SASL and ACLs on a real broker: least privileges work, and each missing one says which it is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

import onceflow
from onceflow import java
from onceflow.broker.local import LocalBroker, free_ports
from onceflow.sink.progress_log import partition_of
from onceflow.testing import independent
from onceflow.testing.broker import create_topic
from onceflow.wire.progress import PROGRESS_TOPIC

pytestmark = pytest.mark.integration

SECRET = "a-password-that-must-not-be-printed"


@dataclass(frozen=True)
class Secure:
    """A broker whose clients need TLS, a password and ACLs; ``internal`` is a listener without any."""

    servers: str
    internal: str
    certificate: Path

    def options(self, user: str = "flow", password: str = SECRET) -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'username="{user}" password="{password}";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificate),
        }


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
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    properties = {
        "listeners": f"SASL_SSL://127.0.0.1:{port},INTERNAL://127.0.0.1:{internal}",
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "INTERNAL",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": "storepass",
        "ssl.key.password": "storepass",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{module} user_flow="{SECRET}";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with LocalBroker(folder / "broker", properties=properties, client_listener="INTERNAL") as broker:
        yield Secure(f"127.0.0.1:{port}", broker.bootstrap_servers, certificate)


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


def run(secure: Secure, pipe: Any, **write: Any) -> Any:
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=secure.options())
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


@pytest.mark.parametrize("small_batch_rows", [0, 4000])
def test_least_privileges_over_tls(secure: Secure, pipe: Any, small_batch_rows: int) -> None:
    # CREATE on the one topic; without it an operator makes the topic (see the test above).
    grant(secure, [*needed(pipe).values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    run(secure, pipe, small_batch_rows=small_batch_rows)
    pipe.check()


@pytest.mark.parametrize(
    "missing", ["source", "target", "progress-read", "progress-write", "transactional-id", "group"]
)
def test_each_missing_privilege_is_named(secure: Secure, pipe: Any, missing: str) -> None:
    acls = needed(pipe)
    _, name, _ = acls.pop(missing)
    grant(secure, [*acls.values(), (ResourceType.TOPIC, PROGRESS_TOPIC, AclOperation.CREATE)])
    with pytest.raises((onceflow.PermissionDeniedError, onceflow.UnknownTopicError)) as caught:
        run(secure, pipe)
    text = str(caught.value)
    assert name in text, text
    assert "next step" in text
    assert SECRET not in text
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


def test_wrong_password(secure: Secure, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.flow._START_SECONDS", 30.0)
    options = secure.options(password="guessed-password")
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers, options=options)
    with pytest.raises(onceflow.AuthenticationFailedError, match="refused the credentials") as caught:
        flow.read(pipe.source)
    assert "guessed-password" not in str(caught.value)


def test_plain_connection_to_a_tls_listener(secure: Secure, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.flow._START_SECONDS", 4.0)
    flow = onceflow.Flow(pipe.flow, pipe.spark, bootstrap_servers=secure.servers)
    with pytest.raises(onceflow.BrokerUnreachableError, match="did not complete the Kafka handshake as PLAINTEXT"):
        flow.read(pipe.source)

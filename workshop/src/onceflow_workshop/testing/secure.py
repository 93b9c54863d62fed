"""A broker with TLS, SASL (SCRAM and PLAIN) and ACLs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import confluent_kafka.admin

from onceflow.broker.local import LocalBroker, free_ports
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.errors import AuthenticationFailedError
from onceflow.host import java
from onceflow.testing.waiting import wait_until

# Its types lack names, and that filters may have None.
admin: Any = confluent_kafka.admin

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


def create_scram_user(secure: Secure, user: str, password: str) -> None:
    """Return when the broker lets the user in: it learns of it a moment after the controller has answered."""
    credential = admin.UserScramCredentialUpsertion(
        user, admin.ScramCredentialInfo(admin.ScramMechanism.SCRAM_SHA_512, 4096), password.encode()
    )
    client = admin.AdminClient({"bootstrap.servers": secure.internal})
    client.alter_user_scram_credentials([credential])[user].result(30)
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
        except AuthenticationFailedError as error:
            cluster.close()
            deadline.pause(attempt, error.what)
            attempt += 1


@contextlib.contextmanager
def secure_broker(folder: Path) -> Iterator[Secure]:
    """Start it. The user "flow" has no privileges yet; see `grant`."""
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


def grant(secure: Secure, acls: Sequence[tuple[Any, str, Any]], *, user: str = "flow") -> None:
    """Give a user exactly these privileges: type and name of a resource, and operation. All others have none."""
    client = admin.AdminClient({"bootstrap.servers": secure.internal})
    everything = admin.AclBindingFilter(
        admin.ResourceType.ANY,
        None,
        admin.ResourcePatternType.ANY,
        None,
        None,
        admin.AclOperation.ANY,
        admin.AclPermissionType.ANY,
    )
    for future in client.delete_acls([everything]).values():
        future.result(30)
    bindings = [
        admin.AclBinding(
            kind, name, admin.ResourcePatternType.LITERAL, f"User:{user}", "*", operation, admin.AclPermissionType.ALLOW
        )
        for kind, name, operation in acls
    ]
    if bindings:
        for future in client.create_acls(bindings).values():
            future.result(30)

    # The controller has answered. The broker learns of it a moment later.
    def known() -> int:
        return len(client.describe_acls(everything).result(30))

    wait_until(lambda: known() == len(set(bindings)), 30, lambda: f"{known()} ACLs, of {len(set(bindings))}")

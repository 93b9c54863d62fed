"""Client options: from the Kafka and Spark names that users write to kafka-python's arguments.

Users give one dictionary, with the dotted names of the Java client (``security.protocol``), with or
without Spark's ``kafka.`` prefix. The same dictionary goes to Spark's reader (with the prefix) and to
our own connections, so it is translated here, once. Values may be secrets: they are never printed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.errors import OptionError

# Java client name -> kafka-python argument, for those that need no thought.
_PLAIN: dict[str, str] = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",  # librdkafka's names, for people who come from there
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "ssl.key.password": "ssl_password",
    "client.id": "client_id",
}
_MILLISECONDS: dict[str, str] = {
    "request.timeout.ms": "request_timeout_ms",
    "reconnect.backoff.ms": "reconnect_backoff_ms",
    "reconnect.backoff.max.ms": "reconnect_backoff_max_ms",
    "socket.connection.setup.timeout.ms": "socket_connection_setup_timeout_ms",
    "connections.max.idle.ms": "connections_max_idle_ms",
    "metadata.max.age.ms": "metadata_max_age_ms",
}
_SPECIAL = {
    "sasl.jaas.config",
    "ssl.truststore.location",
    "ssl.truststore.type",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.endpoint.identification.algorithm",
    "ssl.ca.location",
    "default.api.timeout.ms",
}
# Meant for Spark's reader alone; passed on to it and not used by our own connections.
_READER_ONLY = {
    "max.partition.fetch.bytes",
    "fetch.max.bytes",
    "fetch.min.bytes",
    "fetch.max.wait.ms",
    "receive.buffer.bytes",
    "send.buffer.bytes",
    "max.poll.records",
    "max.poll.interval.ms",
    "session.timeout.ms",
    "client.rack",
    "ssl.protocol",
    "ssl.enabled.protocols",
    "ssl.truststore.password",
    "ssl.keystore.password",
}
# Spark's consumer asks for the log's ends after every poll, on the connection that a fetch of the next records is
# under way on, and a broker answers one request of a connection after the other. At the end of the log that fetch
# is parked for fetch.max.wait.ms: 500 ms by default, in every batch that reads to the end. Nobody polls while no batch
# runs, so a short wait costs nothing. Larger polls need fewer of those questions.
_READER_DEFAULTS = {
    "kafka.fetch.max.wait.ms": "10",
    "kafka.max.poll.records": "5000",
    "kafka.max.partition.fetch.bytes": str(4 * 1024 * 1024),
}
# What onceflow itself decides; setting them would break a guarantee.
_OWNED = {
    "transactional.id": "it is built from the flow's name (see transactional_id_prefix)",
    "enable.idempotence": "the sink is always idempotent",
    "acks": "the sink always waits for all in-sync replicas",
    "isolation.level": "sources are always read with read_committed",
    "group.id": "it is built from the flow's name (see group_id_prefix)",
    "enable.auto.commit": "offsets are committed in the transaction",
    "auto.offset.reset": "use starting_offsets of Flow.read",
    "key.serializer": "rows are binary already",
    "value.serializer": "rows are binary already",
    "transaction.timeout.ms": "use transaction_timeout of Flow.write",
    "compression.type": "use compression of Flow.write",
    "bootstrap.servers": "use the bootstrap_servers argument",
}

# Java's tokenizer takes double quotes, single quotes and plain words; a backslash quotes the next character.
_JAAS_FIELD = re.compile(
    r"""(\w+)\s*=\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<word>[^\s;"']+))"""
)


@dataclass(frozen=True)
class ClientSettings:
    """How to reach the cluster. Pickles to tasks; its text shows no option values."""

    bootstrap_servers: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not str(self.bootstrap_servers or "").strip(" ,"):
            raise OptionError(
                "bootstrap_servers is empty", next_step='give for example bootstrap_servers="localhost:9092"'
            )
        object.__setattr__(self, "options", _normalised(self.options))
        self.kafka_python()  # translate once, so that a bad option fails where it was given

    def __repr__(self) -> str:
        names = ", ".join(sorted(self.options))
        return f"ClientSettings({self.bootstrap_servers!r}, options=<{names}>)"

    def kafka_python(self) -> dict[str, Any]:
        """Arguments of kafka-python's ``KafkaConnectionManager``."""
        out: dict[str, Any] = {
            "bootstrap_servers": [s.strip() for s in self.bootstrap_servers.split(",") if s.strip()],
            "client_id": "onceflow",
            # Fetch responses of the progress topic may be larger than kafka-python's default of 1 MB.
            "receive_message_max_bytes": 100_000_000,
        }
        for name, value in self.options.items():
            if name in _PLAIN:
                out[_PLAIN[name]] = value
            elif name in _MILLISECONDS:
                out[_MILLISECONDS[name]] = _whole_number(name, value)
        out.update(_sasl(self.options))
        out.update(_tls(self.options))
        return out

    def spark_reader(self) -> dict[str, str]:
        """Options of Spark's Kafka source."""
        out = {"kafka.bootstrap.servers": self.bootstrap_servers, **_READER_DEFAULTS}
        for name, value in self.options.items():
            if name == "ssl.ca.location":  # librdkafka's name; the Java client reads PEM files as trust stores
                out["kafka.ssl.truststore.type"], out["kafka.ssl.truststore.location"] = "PEM", value
            elif name not in ("sasl.username", "sasl.password"):
                out[f"kafka.{name}"] = value
        if "sasl.username" in self.options and "sasl.jaas.config" not in self.options:
            out["kafka.sasl.jaas.config"] = _jaas(self.options)
        return out


def _normalised(options: Mapping[str, object]) -> dict[str, str]:
    known = set(_PLAIN) | set(_MILLISECONDS) | _SPECIAL | _READER_ONLY
    out: dict[str, str] = {}
    for given, value in options.items():
        name = str(given).removeprefix("kafka.")
        if name in _OWNED:
            raise OptionError(f"option {given!r} is set by onceflow itself", next_step=_OWNED[name])
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(sorted(known))}"
            raise OptionError(f"unknown option {given!r}", next_step=hint)
        if not isinstance(value, (str, int, float)):
            raise OptionError(
                f"option {given!r} has a value of type {type(value).__name__}", next_step="give a string or a number"
            )
        out[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return out


def _whole_number(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise OptionError(f"option {name!r} must be a whole number of milliseconds", next_step="for example 30000")
    return number


def _sasl(options: Mapping[str, str]) -> dict[str, Any]:
    protocol = options.get("security.protocol", "PLAINTEXT")
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise OptionError(
            "option 'security.protocol' has an unknown value",
            next_step="use PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
        )
    if not protocol.startswith("SASL"):
        return {}
    mechanism = options.get("sasl.mechanism")
    if mechanism is None:
        raise OptionError(
            "security.protocol asks for SASL but 'sasl.mechanism' is not given",
            next_step="for example PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, GSSAPI or OAUTHBEARER",
        )
    if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        return {}
    jaas = options.get("sasl.jaas.config")
    fields = _jaas_fields(jaas or "")
    username = fields.get("username", options.get("sasl.username"))
    password = fields.get("password", options.get("sasl.password"))
    if username is None or password is None:
        raise OptionError(
            f"mechanism {mechanism} needs a user name and a password",
            next_step="give 'sasl.jaas.config' as for the Java client, or 'sasl.username' and 'sasl.password'",
        )
    return {"sasl_plain_username": username, "sasl_plain_password": password}


def _jaas_fields(text: str) -> dict[str, str]:
    fields = {}
    for match in _JAAS_FIELD.finditer(text):
        quoted = match["double"] if match["double"] is not None else match["single"]
        fields[match[1]] = match["word"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    return fields


def _jaas(options: Mapping[str, str]) -> str:
    module = (
        "org.apache.kafka.common.security.plain.PlainLoginModule"
        if options.get("sasl.mechanism") == "PLAIN"
        else "org.apache.kafka.common.security.scram.ScramLoginModule"
    )

    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"')

    return (
        f'{module} required username="{quoted(options["sasl.username"])}" '
        f'password="{quoted(options.get("sasl.password", ""))}";'
    )


def _tls(options: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if options.get("ssl.endpoint.identification.algorithm", "https") == "":
        out["ssl_check_hostname"] = False
    for store, argument in (("ssl.truststore", "ssl_cafile"), ("ssl.keystore", "ssl_certfile")):
        location = options.get(f"{store}.location")
        if location is None:
            continue
        if options.get(f"{store}.type", "JKS").upper() != "PEM":
            raise OptionError(
                f"{store}.location is read by Python too, which knows no Java key stores",
                next_step=f"convert it to a PEM file and set {store}.type to PEM (the Java client reads it, too)",
            )
        # A PEM key store holds certificate and key in one file, which Python's ssl reads as such.
        out[argument] = location
    if "ssl.ca.location" in options:
        if "ssl_cafile" in out:
            raise OptionError(
                "ssl.ca.location and ssl.truststore.location are both given", next_step="they mean the same: give one"
            )
        out["ssl_cafile"] = options["ssl.ca.location"]
    return out

"""Connection options: translates the names of the Java client and of Spark to arguments of kafka-python.

Users give one dictionary, with the dotted names of the Java client (``security.protocol``), with or
without Spark's ``kafka.`` prefix. Spark's reader (with the prefix) and onceflow's own connections both use it, so it
is translated here. Values may be secrets: they are never printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.client.addresses import parse_servers
from onceflow.client.auth import bearer_tokens
from onceflow.client.auth.jaas import OAUTH_MODULE, jaas, jaas_fields
from onceflow.client.auth.options import client_fields, msk_iam, oauthbearer
from onceflow.client.auth.sources import ClientCredentials
from onceflow.client.key_stores import is_pem, to_pem
from onceflow.errors import OptionError

# Java client name -> kafka-python argument, for options whose value is passed on unchanged.
_PLAIN: dict[str, str] = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",  # librdkafka's names, for users who are used to them
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
    # Tokens. The names with client.id, client.secret, scope, extensions and https are librdkafka's.
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.header.urlencode",
    "https.ca.location",
    "sasl.login.callback.handler.class",
    "sasl.client.callback.handler.class",
    "onceflow.token.provider",
}
# Not passed to the Java client: it would log a warning for unknown names.
_NOT_JAVA = {
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "https.ca.location",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions",
    "onceflow.token.provider",
}
# Passed to Spark's reader only. onceflow's own connections do not use them.
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
    "sasl.login.class",
    "sasl.login.connect.timeout.ms",
    "sasl.login.read.timeout.ms",
    "sasl.login.retry.backoff.ms",
    "sasl.login.retry.backoff.max.ms",
    "sasl.login.refresh.window.factor",
    "sasl.login.refresh.window.jitter",
    "sasl.login.refresh.min.period.seconds",
    "sasl.login.refresh.buffer.seconds",
    "sasl.oauthbearer.scope.claim.name",
    "sasl.oauthbearer.sub.claim.name",
}
# After every poll, Spark's consumer requests the end offsets of the log. It uses the same connection as the fetch of
# the next records, and a broker handles the requests of a connection one after the other. At the end of the log the
# broker delays the fetch for fetch.max.wait.ms, by default 500 ms, in every batch that reads to the end, and in each of
# its partitions. A short wait costs nothing, because nothing polls while no batch runs. With larger polls there are
# fewer of these requests.
#
# But between batches, Spark keeps for every partition the rest of the last poll and of the last fetch, for up to five
# minutes. So with many partitions both are smaller: else they fill the heap, of 1 GB by default.
_POLL_RECORDS_MAX, _POLL_RECORDS_MIN, _POLLED_RECORDS = 5_000, 200, 64_000
_FETCH_BYTES_MAX, _FETCH_BYTES_MIN, _FETCHED_BYTES = 4 << 20, 64 << 10, 32 << 20


def _reader_defaults(partitions: int) -> dict[str, str]:
    share = max(1, partitions)
    return {
        "kafka.fetch.max.wait.ms": "1",
        "kafka.max.poll.records": str(min(_POLL_RECORDS_MAX, max(_POLL_RECORDS_MIN, _POLLED_RECORDS // share))),
        "kafka.max.partition.fetch.bytes": str(min(_FETCH_BYTES_MAX, max(_FETCH_BYTES_MIN, _FETCHED_BYTES // share))),
    }


# How long a connection waits before it is tried again: kafka-python doubles the wait at each failure, up to 30 seconds
# by default. So long a service would stay away after its brokers are back.
_RECONNECT = {"reconnect_backoff_ms": 50, "reconnect_backoff_max_ms": 500}

# Options that onceflow sets itself. Other values would break a guarantee.
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
    "allow.auto.create.topics": "reading never creates a topic; use `onceflow topic create`",
}

_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
# Classes of the jar aws-msk-iam-auth, which the user adds.
_MSK_MODULE = "software.amazon.msk.auth.iam.IAMLoginModule"
_MSK_HANDLER = "software.amazon.msk.auth.iam.IAMClientCallbackHandler"


@dataclass(frozen=True)
class ClientSettings:
    """How to connect to the cluster. Can be pickled to send it to tasks. Its ``repr`` shows no option values."""

    bootstrap_servers: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_servers(self.bootstrap_servers)
        object.__setattr__(self, "options", _normalised(self.options))
        self.kafka_python()  # raises here, so that the error points to where a bad option was given

    def __repr__(self) -> str:
        names = ", ".join(sorted(self.options))
        return f"ClientSettings({self.bootstrap_servers!r}, options=<{names}>)"

    def kafka_python(self) -> dict[str, Any]:
        """Arguments of kafka-python's ``KafkaConnectionManager``."""
        out: dict[str, Any] = {
            "bootstrap_servers": [str(address) for address in parse_servers(self.bootstrap_servers)],
            "client_id": "onceflow",
            # Fetch responses of the progress topic may be larger than kafka-python's default of 1 MB.
            "receive_message_max_bytes": 100_000_000,
            **_RECONNECT,
        }
        for name, value in self.options.items():
            if name in _PLAIN:
                out[_PLAIN[name]] = value
            elif name in _MILLISECONDS:
                out[_MILLISECONDS[name]] = _whole_number(name, value)
        if "reconnect.backoff.max.ms" not in self.options:
            out["reconnect_backoff_max_ms"] = max(out["reconnect_backoff_max_ms"], out["reconnect_backoff_ms"])
        out.update(_sasl(self.options))
        out.update(_tls(self.options))
        return out

    @property
    def tokens(self) -> bearer_tokens.Tokens | None:
        """The tokens of onceflow's own connections, one object for each process. None: the mechanism needs none."""
        found: bearer_tokens.Tokens | None = self.kafka_python().get("sasl_oauth_token_provider")
        return found

    @property
    def java_needs_tokens(self) -> bool:
        """Whether the Java client cannot get tokens by itself, because they come from a function or a file."""
        own_login = {"sasl.login.class", "sasl.login.callback.handler.class"} & set(self.options)
        return (
            self.options.get("sasl.mechanism") == "OAUTHBEARER"
            and not own_login
            and self.tokens is not None
            and not isinstance(self.tokens.source, ClientCredentials)
        )

    def spark_reader(self, partitions: int = 1) -> dict[str, str]:
        """Options of Spark's Kafka source. If ``java_needs_tokens``, the options for its tokens are not included.

        Args:
            partitions: of the topic. The more there are, the less is fetched of each at a time.
        """
        out = {"kafka.bootstrap.servers": self.bootstrap_servers, **_reader_defaults(partitions)}
        # Java's default is true: then a topic that was deleted comes back when it is read (KIP-361).
        out["kafka.allow.auto.create.topics"] = "false"
        out.update({f"kafka.{name}": value for name, value in self.options.items() if name not in _NOT_JAVA})
        if "ssl.ca.location" in self.options:  # librdkafka's name; the Java client accepts a PEM file as trust store
            out["kafka.ssl.truststore.type"] = "PEM"
            out["kafka.ssl.truststore.location"] = self.options["ssl.ca.location"]
        out.update({f"kafka.{name}": value for name, value in _java_login(self.options).items()})
        return out


def uses(name: str) -> bool:
    """Whether ``name``, with or without the prefix ``kafka.``, is a connection option that may be given."""
    return name.removeprefix("kafka.") in _known()


def _known() -> set[str]:
    return set(_PLAIN) | set(_MILLISECONDS) | _SPECIAL | _READER_ONLY


def _normalised(options: Mapping[str, object]) -> dict[str, str]:
    known = _known()
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


def _uses_sasl(options: Mapping[str, str]) -> bool:
    return options.get("security.protocol", "PLAINTEXT").startswith("SASL")


def _sasl(options: Mapping[str, str]) -> dict[str, Any]:
    protocol = options.get("security.protocol", "PLAINTEXT")
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise OptionError(
            "option 'security.protocol' has an unknown value",
            next_step="use PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
        )
    if not _uses_sasl(options):
        return {}
    mechanism = options.get("sasl.mechanism")
    if mechanism is None:
        raise OptionError(
            "security.protocol asks for SASL but 'sasl.mechanism' is not given",
            next_step="for example PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, GSSAPI, OAUTHBEARER or AWS_MSK_IAM",
        )
    if mechanism == "OAUTHBEARER":
        return oauthbearer(options)
    if mechanism == "AWS_MSK_IAM":
        return msk_iam(options)
    if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        return {}
    fields = jaas_fields(options.get("sasl.jaas.config", ""))
    username = fields.get("username", options.get("sasl.username"))
    password = fields.get("password", options.get("sasl.password"))
    if username is None or password is None:
        raise OptionError(
            f"mechanism {mechanism} needs a user name and a password",
            next_step="give 'sasl.jaas.config' as for the Java client, or 'sasl.username' and 'sasl.password'",
        )
    return {"sasl_plain_username": username, "sasl_plain_password": password}


def _java_login(options: Mapping[str, str]) -> dict[str, str]:
    """The options that the Java client needs to log in, if the user has not given them under their Java names."""
    mechanism = options.get("sasl.mechanism") if _uses_sasl(options) else None
    if mechanism == "AWS_MSK_IAM":
        handler = {"sasl.client.callback.handler.class": _MSK_HANDLER, "sasl.jaas.config": jaas(_MSK_MODULE, {})}
        return {name: value for name, value in handler.items() if name not in options}
    if mechanism == "OAUTHBEARER":
        if "sasl.jaas.config" in options or "sasl.oauthbearer.client.id" not in options:
            return {}
        return {"sasl.jaas.config": jaas(OAUTH_MODULE, client_fields(options))}
    if "sasl.username" in options and "sasl.jaas.config" not in options:
        module = _PLAIN_MODULE if mechanism == "PLAIN" else _SCRAM_MODULE
        fields = {"username": options["sasl.username"], "password": options.get("sasl.password", "")}
        return {"sasl.jaas.config": jaas(module, fields)}
    return {}


def _tls(options: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if options.get("ssl.endpoint.identification.algorithm", "https") == "":
        out["ssl_check_hostname"] = False
    for store, argument in (("ssl.truststore", "ssl_cafile"), ("ssl.keystore", "ssl_certfile")):
        location = options.get(f"{store}.location")
        if location is None:
            continue
        if options.get(f"{store}.type", "JKS").upper() != "PEM":
            if is_pem(location):
                raise OptionError(f"{store}.location is a PEM file", next_step=f"set {store}.type to PEM")
            raise OptionError(
                f"{store}.location is read by Python too, which cannot read Java key stores",
                next_step=f"convert it to a PEM file, which the Java client reads, too, and set {store}.type to PEM: "
                + to_pem(trust=store == "ssl.truststore"),
            )
        # A PEM key store has certificate and key in one file. Python's ssl accepts such a file.
        out[argument] = location
    if "ssl.ca.location" in options:
        if "ssl_cafile" in out:
            raise OptionError(
                "ssl.ca.location and ssl.truststore.location are both given", next_step="they mean the same: give one"
            )
        out["ssl_cafile"] = options["ssl.ca.location"]
    return out

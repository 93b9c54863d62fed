"""Client options: translated once for both clients, wrong ones refused with a hint, secrets never shown."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.client.auth.sources import ClientCredentials, Provider, TokenFile
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError

PLAIN = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="{}" password="{}";'


def kafka_python(options: dict[str, Any], servers: str = "h:9092") -> dict[str, Any]:
    """The translated options, without what every connection has."""
    arguments = ClientSettings(servers, options).kafka_python()
    assert arguments.pop("bootstrap_servers") == [s.strip() for s in servers.split(",")]
    assert arguments.pop("receive_message_max_bytes") >= 10_000_000
    for name in ("reconnect_backoff_ms", "reconnect_backoff_max_ms"):
        if name.replace("_", ".") not in options:
            del arguments[name]
    if "client.id" not in options:
        assert arguments.pop("client_id") == "onceflow"
    return arguments


def refused(options: dict[str, Any]) -> OptionError:
    with pytest.raises(OptionError) as caught:
        ClientSettings("h:9092", options)
    assert caught.value.next_step
    return caught.value


# ---- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "kafka."])
def test_names_with_and_without_sparks_prefix(prefix: str) -> None:
    given = {f"{prefix}security.protocol": "SSL", f"{prefix}ssl.truststore.location": "/ca.pem"}
    client = ClientSettings("h:9092", {**given, f"{prefix}ssl.truststore.type": "PEM"})
    assert client.options == {
        "security.protocol": "SSL",
        "ssl.truststore.location": "/ca.pem",
        "ssl.truststore.type": "PEM",
    }


def test_the_prefix_is_taken_off_once() -> None:
    assert "unknown option 'kafka.kafka.client.id'" in str(refused({"kafka.kafka.client.id": "x"}))


@pytest.mark.parametrize(
    "name, suggestion",
    [
        ("security.protocl", "security.protocol"),
        ("kafka.security_protocol", "security.protocol"),
        ("sasl.mechanisms", "sasl.mechanism"),
        ("sasl.jaas.conf", "sasl.jaas.config"),
        ("request.timeout", "request.timeout.ms"),
    ],
)
def test_misspelled_names_get_a_suggestion(name: str, suggestion: str) -> None:
    error = refused({name: "x"})
    assert error.what == f"unknown option {name!r}"
    assert error.next_step == f"did you mean {suggestion!r}?"


def test_foreign_names_get_the_list() -> None:
    assert "security.protocol" in refused({"zzz": "x"}).next_step


@pytest.mark.parametrize("prefix", ["", "kafka."])
@pytest.mark.parametrize(
    "name, word",
    [
        ("transactional.id", "transactional_id_prefix"),
        ("enable.idempotence", "always"),
        ("acks", "in-sync"),
        ("isolation.level", "read_committed"),
        ("group.id", "group_id_prefix"),
        ("allow.auto.create.topics", "onceflow topic create"),
        ("enable.auto.commit", "transaction"),
        ("auto.offset.reset", "starting_offsets"),
        ("key.serializer", "binary"),
        ("value.serializer", "binary"),
        ("transaction.timeout.ms", "transaction_timeout"),
        ("compression.type", "compression"),
        ("bootstrap.servers", "bootstrap_servers"),
    ],
)
def test_owned_options(prefix: str, name: str, word: str) -> None:
    error = refused({prefix + name: "x"})
    assert error.what == f"option {prefix + name!r} is set by onceflow itself"
    assert word in error.next_step


@pytest.mark.parametrize("servers", ["", "  ", None, ",", " , ", ",,"])
def test_no_bootstrap_servers(servers: Any) -> None:
    with pytest.raises(OptionError, match="bootstrap_servers is empty"):
        ClientSettings(servers)


def test_several_bootstrap_servers() -> None:
    client = ClientSettings(" a:1, b:2 ,,c:3")
    assert client.kafka_python()["bootstrap_servers"] == ["a:1", "b:2", "c:3"]


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, text", [(True, "true"), (False, "false"), (5, "5"), ("x", "x"), (1.5, "1.5")])
def test_values_become_text(value: Any, text: str) -> None:
    assert ClientSettings("h:9092", {"client.rack": value}).options == {"client.rack": text}


@pytest.mark.parametrize("value", [None, b"secret", ["secret"], {"secret": 1}])
def test_values_of_other_types(value: Any) -> None:
    error = refused({"client.id": value})
    assert f"value of type {type(value).__name__}" in error.what
    assert "secret" not in str(error)


@pytest.mark.parametrize("value", ["30000", 30000])
def test_milliseconds(value: Any) -> None:
    assert kafka_python({"request.timeout.ms": value}) == {"request_timeout_ms": 30000}


@pytest.mark.parametrize("value", ["30s", "-1", "", "1.5", 1.5])
def test_bad_milliseconds(value: Any) -> None:
    assert refused({"request.timeout.ms": value}).what == (
        "option 'request.timeout.ms' must be a whole number of milliseconds"
    )


def test_client_id() -> None:
    assert kafka_python({"client.id": "mine"}) == {"client_id": "mine"}


# ---- SASL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"])
def test_protocols(protocol: str) -> None:
    options = {**PLAIN, "security.protocol": protocol, "sasl.username": "u", "sasl.password": "p"}
    assert kafka_python(options)["security_protocol"] == protocol


@pytest.mark.parametrize("protocol", ["sasl_ssl", "TLS", ""])
def test_unknown_protocol(protocol: str) -> None:
    assert "'security.protocol' has an unknown value" in refused({"security.protocol": protocol}).what


def test_sasl_needs_a_mechanism() -> None:
    assert "'sasl.mechanism' is not given" in refused({"security.protocol": "SASL_SSL"}).what


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_user_and_password_from_jaas(mechanism: str) -> None:
    options = {**PLAIN, "sasl.mechanism": mechanism, "sasl.jaas.config": JAAS.format("alice", "pa=ss;word x")}
    found = kafka_python(options)
    assert (found["sasl_mechanism"], found["sasl_plain_username"], found["sasl_plain_password"]) == (
        mechanism,
        "alice",
        "pa=ss;word x",
    )


def test_jaas_over_several_lines_and_with_other_fields() -> None:
    text = 'x.ScramLoginModule required\n  username = "alice"\n  tokenauth="true"\n  password\t=\t"s";'
    found = kafka_python({**PLAIN, "sasl.jaas.config": text})
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("alice", "s")


def test_jaas_wins_over_the_other_names_as_in_spark() -> None:
    client = ClientSettings(
        "h:1", {**PLAIN, "sasl.jaas.config": JAAS.format("a", "b"), "sasl.username": "x", "sasl.password": "y"}
    )
    found = client.kafka_python()
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("a", "b")
    assert client.spark_reader()["kafka.sasl.jaas.config"] == JAAS.format("a", "b")


@pytest.mark.parametrize(
    "written, meant", [(r"a\"b", 'a"b'), (r"a\\b", r"a\b"), (r"\\\"", r"\""), (r"\\\\", r"\\")], ids=range(4)
)
def test_jaas_escapes(written: str, meant: str) -> None:
    """As the Java client reads them (StreamTokenizer)."""
    found = kafka_python({**PLAIN, "sasl.jaas.config": JAAS.format(written, written)})
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == (meant, meant)


@pytest.mark.parametrize(
    "text, password",
    [
        ("x required username='u' password='p';", "p"),
        ("x required username=u password=p;", "p"),
        ("x required username=u password='p;\"= q';", 'p;"= q'),
        (r"x required username=u password='it\'s';", "it's"),
        ('x required username=u password="it\'s";', "it's"),
        ("x required username='u' password='';", ""),
        ("x required\n username = u\n password = 'p' ;", "p"),
    ],
    ids=range(7),
)
def test_jaas_in_the_other_notations_of_java(text: str, password: str) -> None:
    found = kafka_python({**PLAIN, "sasl.jaas.config": text})
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("u", password)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sasl.username": "secret-u"},
        {"sasl.password": "secret-p"},
        {"sasl.jaas.config": "secret"},
        {"sasl.jaas.config": 'x required username="secret-u";'},
        {"sasl.jaas.config": 'x required password="secret-p";'},
    ],
)
def test_incomplete_credentials(options: dict[str, str]) -> None:
    error = refused({**PLAIN, **options})
    assert "PLAIN needs a user name and a password" in error.what
    assert "secret" not in str(error)


def test_other_mechanisms_need_no_password() -> None:
    found = kafka_python(
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI", "sasl.kerberos.service.name": "k"}
    )
    assert found["sasl_kerberos_service_name"] == "k"
    assert "sasl_plain_password" not in found


# ---- TLS ---------------------------------------------------------------------------------------------


def test_pem_stores() -> None:
    found = kafka_python(
        {
            "security.protocol": "SSL",
            "ssl.truststore.location": "/ca.pem",
            "ssl.truststore.type": "pem",
            "ssl.keystore.location": "/me.pem",
            "ssl.keystore.type": "PEM",
            "ssl.key.password": "k",
        }
    )
    assert found == {
        "security_protocol": "SSL",
        "ssl_cafile": "/ca.pem",
        "ssl_certfile": "/me.pem",
        "ssl_password": "k",
    }


@pytest.mark.parametrize("kind", [{}, {"ssl.truststore.type": "JKS"}, {"ssl.truststore.type": "PKCS12"}])
def test_java_trust_stores(kind: dict[str, str]) -> None:
    error = refused({"ssl.truststore.location": "/t.jks", **kind})
    assert "ssl.truststore.location" in error.what
    assert "PEM" in error.next_step


@pytest.mark.parametrize("kind", [{}, {"ssl.keystore.type": "JKS"}])
def test_java_key_stores(kind: dict[str, str]) -> None:
    assert "ssl.keystore.location" in refused({"ssl.keystore.location": "/k.jks", **kind}).what


def test_certificate_authorities_by_librdkafkas_name() -> None:
    assert kafka_python({"ssl.ca.location": "/ca"}) == {"ssl_cafile": "/ca"}


@pytest.mark.parametrize("name", ["ssl.certificate.location", "ssl.key.location", "ssl.truststore.certificates"])
def test_names_that_the_java_client_has_nothing_for(name: str) -> None:
    """Spark would ignore them, or our own connections would."""
    assert refused({name: "/x"}).what == f"unknown option {name!r}"


@pytest.mark.parametrize("value, expected", [("", {"ssl_check_hostname": False}), ("https", {})])
def test_host_name_check(value: str, expected: dict[str, Any]) -> None:
    assert kafka_python({"ssl.endpoint.identification.algorithm": value}) == expected


# ---- Spark -------------------------------------------------------------------------------------------


def test_spark_reader_gets_everything_under_its_prefix() -> None:
    options = {
        "kafka.security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": JAAS.format("u", "p"),
        "ssl.truststore.location": "/ca.pem",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.password": "t",
        "max.partition.fetch.bytes": 1000,
        "request.timeout.ms": "30000",
    }
    found = ClientSettings("a:1,b:2", options).spark_reader()
    expected = {
        "kafka.bootstrap.servers": "a:1,b:2",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": JAAS.format("u", "p"),
        "kafka.ssl.truststore.location": "/ca.pem",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.password": "t",
        "kafka.max.partition.fetch.bytes": "1000",
        "kafka.request.timeout.ms": "30000",
    }
    assert {name: found.get(name) for name in expected} == expected
    ours = found.keys() - expected.keys()
    assert ours == ClientSettings("a:1").spark_reader().keys() - expected.keys(), "options from nowhere"


@pytest.mark.parametrize(
    "partitions, records, nbytes",
    [(1, 5000, 4 << 20), (8, 5000, 4 << 20), (64, 1000, 512 << 10), (256, 250, 128 << 10), (3000, 200, 64 << 10)],
)
def test_less_is_fetched_of_each_partition_when_there_are_many(partitions: int, records: int, nbytes: int) -> None:
    found = ClientSettings("h:1").spark_reader(partitions)
    assert found["kafka.max.poll.records"] == str(records)
    assert found["kafka.max.partition.fetch.bytes"] == str(nbytes)
    given = ClientSettings("h:1", {"max.poll.records": "7"}).spark_reader(partitions)
    assert given["kafka.max.poll.records"] == "7"


def test_what_the_user_sets_goes_before_our_defaults_for_spark() -> None:
    defaults = ClientSettings("h:1").spark_reader()
    ours = {name: defaults.pop(name) for name in ("kafka.bootstrap.servers", "kafka.allow.auto.create.topics")}
    given = dict.fromkeys(defaults, "7")
    assert ClientSettings("h:1", given).spark_reader() == {**ours, **given}


@pytest.mark.parametrize(
    "mechanism, module",
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "org.apache.kafka.common.security.scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
def test_spark_reader_gets_jaas_from_user_and_password(mechanism: str, module: str) -> None:
    options = {**PLAIN, "sasl.mechanism": mechanism, "sasl.username": 'al"ice', "sasl.password": "p\\w"}
    found = ClientSettings("h:9092", options).spark_reader()
    assert found["kafka.sasl.jaas.config"] == rf'{module} required username="al\"ice" password="p\\w";'
    assert not [name for name in found if name.endswith(("sasl.username", "sasl.password"))]


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12))
def test_spark_and_our_connections_get_the_same_password(password: str) -> None:
    client = ClientSettings("h:9092", {**PLAIN, "sasl.username": "u", "sasl.password": password})
    assert client.kafka_python()["sasl_plain_password"] == password
    text = client.spark_reader()["kafka.sasl.jaas.config"]
    match = re.fullmatch(r'\S+ required username="u" password="((?:[^"\\]|\\["\\])*)";', text)
    assert match is not None, "the value is not one quoted string"
    assert re.sub(r"\\(.)", r"\1", match[1]) == password


def test_spark_reader_trusts_what_our_connections_trust() -> None:
    found = ClientSettings("h:9092", {"security.protocol": "SSL", "ssl.ca.location": "/ca.pem"}).spark_reader()
    assert found["kafka.ssl.truststore.location"] == "/ca.pem"
    assert found["kafka.ssl.truststore.type"] == "PEM"
    assert "kafka.ssl.ca.location" not in found


# ---- secrets -----------------------------------------------------------------------------------------


def test_repr_shows_names_only() -> None:
    client = ClientSettings("h:9092", {**PLAIN, "sasl.username": "u", "sasl.password": "hush"})
    assert repr(client) == (
        "ClientSettings('h:9092', options=<sasl.mechanism, sasl.password, sasl.username, security.protocol>)"
    )


def test_pickles() -> None:
    options = {**PLAIN, "sasl.username": "u", "sasl.password": "hush", "request.timeout.ms": 5}
    client = ClientSettings("h:9092", options)
    copy = pickle.loads(pickle.dumps(client))
    assert copy == client
    assert copy.kafka_python() == client.kafka_python()
    assert copy.spark_reader() == client.spark_reader()


# Not a part of any text of ours by chance.
secrets = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=2, max_size=20).map(
    lambda text: f"§{text}§"
)


@settings(max_examples=100, deadline=None, derandomize="CI" in os.environ)
@given(secrets)
def test_secrets_are_not_shown(secret: str) -> None:
    quoted = secret.replace("\\", "\\\\").replace('"', '\\"')
    given = {
        **PLAIN,
        "sasl.username": "u",
        "sasl.password": secret,
        "sasl.jaas.config": JAAS.format("u", quoted),
        "ssl.key.password": secret,
        "ssl.truststore.password": secret,
        "ssl.keystore.password": secret,
    }
    client = ClientSettings("h:9092", given)
    for shown in (repr(client), str(client), f"{client}", f"{client!r}"):
        assert "§" not in shown
    wrong: list[dict[str, Any]] = [
        {**given, "securty.protocol": secret},
        {**given, "security.protocol": secret},
        {**given, "transactional.id": secret},
        {**given, "request.timeout.ms": secret},
        {**given, "client.id": [secret]},
        {**given, "client.id": {secret: secret}},
        {**given, "ssl.truststore.location": secret},
        {**given, "ssl.keystore.location": secret, "ssl.keystore.type": secret},
        {**PLAIN, "sasl.password": secret},
        {**PLAIN, "sasl.jaas.config": f"x required password={quoted};"},
        {"security.protocol": "SASL_SSL", "sasl.password": secret},
        {**OAUTH, "sasl.oauthbearer.client.secret": secret},
        {**OAUTH, **ENDPOINT, "sasl.oauthbearer.client.secret": secret},
        {**CLIENT, "sasl.oauthbearer.token.endpoint.url": secret, "sasl.oauthbearer.client.secret": secret},
        {**CLIENT, "sasl.oauthbearer.extensions": secret},
        {**OAUTH, "onceflow.token.provider": secret},
        {**MSK, "sasl.jaas.config": f"x required a={quoted};"},
    ]
    for options in wrong:
        error = refused(options)
        assert "§" not in str(error)
        assert "§" not in repr(error)
        # Without source lines: those show this test's own names only.
        assert "§" not in "".join(traceback.format_exception_only(error))
        cause: BaseException | None = error
        while cause is not None:
            assert "§" not in str(cause)
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


# ---- tokens ------------------------------------------------------------------------------------------------

OAUTH = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
ENDPOINT = {"sasl.oauthbearer.token.endpoint.url": "https://idp/token"}
CLIENT = {**OAUTH, **ENDPOINT, "sasl.oauthbearer.client.id": "me", "sasl.oauthbearer.client.secret": 'hu"sh'}
OAUTH_JAAS = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"


def source_of(options: dict[str, Any]) -> Any:
    tokens = ClientSettings("h:9092", options).tokens
    assert tokens is not None
    return tokens.source


def test_client_credentials_for_both_clients() -> None:
    client = ClientSettings("h:9092", {**CLIENT, "sasl.oauthbearer.scope": "kafka", "https.ca.location": "/ca.pem"})
    assert client.tokens is not None
    assert client.tokens.source == ClientCredentials(
        "https://idp/token", "me", 'hu"sh', scope="kafka", ca_file="/ca.pem", urlencode=False
    )
    assert client.kafka_python()["sasl_oauth_token_provider"] is client.tokens
    assert not client.java_needs_tokens
    found = client.spark_reader()
    assert found["kafka.sasl.oauthbearer.token.endpoint.url"] == "https://idp/token"
    assert found["kafka.sasl.jaas.config"] == (
        OAUTH_JAAS + r' clientId="me" clientSecret="hu\"sh" scope="kafka" '
        'ssl.truststore.type="PEM" ssl.truststore.location="/ca.pem";'
    )
    assert not [name for name in found if "client" in name or "https" in name or name.endswith("bearer.scope")]


def test_client_credentials_from_jaas() -> None:
    text = (
        f'{OAUTH_JAAS} clientId="me" clientSecret=\'hush\' scope=kafka extension_logicalCluster="lkc-1" '
        'ssl.truststore.type="PEM" ssl.truststore.location="/ca.pem";'
    )
    client = ClientSettings("h:9092", {**OAUTH, **ENDPOINT, "sasl.jaas.config": text})
    assert client.tokens is not None
    assert client.tokens.source == ClientCredentials("https://idp/token", "me", "hush", "kafka", "/ca.pem")
    assert client.tokens.extensions() == {"logicalCluster": "lkc-1"}
    assert client.spark_reader()["kafka.sasl.jaas.config"] == text


def test_extensions() -> None:
    client = ClientSettings("h:9092", {**CLIENT, "sasl.oauthbearer.extensions": "logicalCluster=lkc-1, poolId=p=2"})
    assert client.tokens is not None
    assert client.tokens.extensions() == {"logicalCluster": "lkc-1", "poolId": "p=2"}
    jaas = client.spark_reader()["kafka.sasl.jaas.config"]
    assert ' extension_logicalCluster="lkc-1" extension_poolId="p=2";' in jaas
    assert "letters only" in refused({**CLIENT, "sasl.oauthbearer.extensions": "a-b=c"}).next_step
    assert "letters only" in refused({**CLIENT, "sasl.oauthbearer.extensions": "abc"}).next_step


def test_a_function_gives_the_tokens() -> None:
    options = {**OAUTH, "onceflow.token.provider": "my.tokens:Provider.token"}
    client = ClientSettings("h:9092", options)
    assert source_of(options) == Provider("my.tokens:Provider.token")
    assert client.java_needs_tokens
    assert not [name for name in client.spark_reader() if "onceflow" in name or "jaas" in name]


def test_a_java_class_gives_the_tokens_of_the_reader() -> None:
    options = {**OAUTH, "onceflow.token.provider": "m:f", "sasl.login.callback.handler.class": "com.example.Login"}
    client = ClientSettings("h:9092", options)
    assert not client.java_needs_tokens
    assert client.spark_reader()["kafka.sasl.login.callback.handler.class"] == "com.example.Login"


def test_a_file_gives_the_tokens() -> None:
    options = {**OAUTH, "sasl.oauthbearer.token.endpoint.url": "file:///var/run/a%20token"}
    assert source_of(options) == TokenFile("/var/run/a token")
    assert ClientSettings("h:9092", options).java_needs_tokens


@pytest.mark.parametrize(
    "options, problem",
    [
        (OAUTH, "no option says where they come from"),
        ({**OAUTH, **ENDPOINT}, "the id and the secret of a client"),
        ({**OAUTH, **ENDPOINT, "sasl.oauthbearer.client.id": "me"}, "the id and the secret of a client"),
        ({**OAUTH, **ENDPOINT, "sasl.jaas.config": f'{OAUTH_JAAS} clientId="me";'}, "the id and the secret"),
        ({**CLIENT, "sasl.oauthbearer.token.endpoint.url": "idp/token"}, "no URL of a known kind"),
        ({**CLIENT, "sasl.oauthbearer.token.endpoint.url": "ftp://idp/token"}, "no URL of a known kind"),
        ({**OAUTH, "onceflow.token.provider": "my_tokens.token"}, "no import path of a function"),
        ({**OAUTH, "onceflow.token.provider": "import os; os:x"}, "no import path of a function"),
        ({**CLIENT, "onceflow.token.provider": "m:f"}, "both given"),
        (
            {
                **OAUTH,
                **ENDPOINT,
                "sasl.jaas.config": f'{OAUTH_JAAS} clientId="me" clientSecret="hush" ssl.truststore.location="/x.jks";',
            },
            "cannot read Java key stores",
        ),
    ],
    ids=range(10),
)
def test_options_that_give_no_tokens(options: dict[str, Any], problem: str) -> None:
    error = refused(options)
    assert problem in error.what
    assert "hush" not in str(error)
    assert "idp" not in str(error), "a URL may have a password in it"


def test_tokens_are_not_of_other_mechanisms() -> None:
    options = {**PLAIN, "sasl.username": "u", "sasl.password": "p", "onceflow.token.provider": "m:f"}
    assert ClientSettings("h:9092", options).tokens is None
    assert ClientSettings("h:9092", {"sasl.mechanism": "OAUTHBEARER", **ENDPOINT}).tokens is None


def test_settings_with_tokens_pickle() -> None:
    client = ClientSettings("h:9092", CLIENT)
    copy = pickle.loads(pickle.dumps(client))
    assert copy == client
    assert copy.tokens is client.tokens, "one process has one token"
    assert "hu" not in repr(copy).replace("h:9092", "")


# ---- Amazon MSK --------------------------------------------------------------------------------------------

MSK = {"security.protocol": "SASL_SSL", "sasl.mechanism": "AWS_MSK_IAM"}


def test_msk_with_a_signer_of_the_user() -> None:
    """Our own connections show a signed token; the Java client has a mechanism of its own."""
    client = ClientSettings("h:9092", {**MSK, "onceflow.token.provider": "m:f"})
    found = client.kafka_python()
    assert found["sasl_mechanism"] == "OAUTHBEARER"
    assert found["sasl_oauth_token_provider"].source == Provider("m:f")
    assert not client.java_needs_tokens
    reader = client.spark_reader()
    assert reader["kafka.sasl.mechanism"] == "AWS_MSK_IAM"
    assert reader["kafka.sasl.jaas.config"] == "software.amazon.msk.auth.iam.IAMLoginModule required;"
    assert reader["kafka.sasl.client.callback.handler.class"] == "software.amazon.msk.auth.iam.IAMClientCallbackHandler"


def test_msk_with_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "botocore" else found(name, *rest)
    )
    client = ClientSettings("h:9092", MSK)
    assert client.kafka_python()["sasl_mechanism"] == "AWS_MSK_IAM"
    assert client.tokens is None


@pytest.mark.parametrize(
    "options, problem, step",
    [
        (MSK, "no signer|none is installed", "install botocore"),
        ({**MSK, "security.protocol": "SASL_PLAINTEXT"}, "needs TLS", "SASL_SSL"),
        ({**MSK, "sasl.jaas.config": 'IAMLoginModule required awsProfileName="x";'}, "has fields", "AWS_PROFILE"),
    ],
    ids=range(3),
)
def test_msk_options(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], problem: str, step: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "botocore" else found(name, *rest)
    )
    error = refused(options)
    assert re.search(problem, error.what)
    assert step in error.next_step


def test_a_connection_is_tried_again_soon() -> None:
    """With the default of kafka-python a flow stayed away for up to 30 seconds after its brokers were back."""
    found = ClientSettings("localhost:9092").kafka_python()
    assert (found["reconnect_backoff_ms"], found["reconnect_backoff_max_ms"]) == (50, 500)
    given = ClientSettings("localhost:9092", {"reconnect.backoff.max.ms": "20000", "reconnect.backoff.ms": "700"})
    found = given.kafka_python()
    assert (found["reconnect_backoff_ms"], found["reconnect_backoff_max_ms"]) == (700, 20_000)


def test_reading_never_creates_a_topic() -> None:
    """With Java's default a topic that was deleted came back, empty, if the brokers have auto.create.topics.enable."""
    assert ClientSettings("localhost:9092").spark_reader()["kafka.allow.auto.create.topics"] == "false"

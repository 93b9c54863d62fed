"""Connection options in a file of the Java client: what is read, what goes before it, what is refused."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from onceflow.cli.connection import connection, settings_of
from onceflow.client.properties import read_properties
from onceflow.client.settings import ClientSettings
from onceflow.errors import OnceflowError, OptionError

JAVA = r"""
# As kafka-console-consumer takes it.
bootstrap.servers = one:9092,\
                    two:9092
security.protocol:SASL_SSL
! another comment
sasl.mechanism SCRAM-SHA-512
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \
  username="caf\u00e9" \
  password="a\\\\b=c#d";
ssl.truststore.type=PEM
ssl.truststore.location=/etc/kafka/ca.pem
acks=all
linger.ms=5
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONCEFLOW_BOOTSTRAP_SERVERS", "ONCEFLOW_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "client.properties"
    path.write_text(JAVA, encoding="latin-1")
    return path


def test_the_format_of_java(file: Path) -> None:
    found = read_properties(file)
    assert found.bootstrap_servers == "one:9092,two:9092"
    assert found.unused == ("acks", "linger.ms")
    settings = settings_of(None, (), str(file))
    arguments = settings.kafka_python()
    assert arguments["bootstrap_servers"] == ["one:9092", "two:9092"]
    assert (arguments["security_protocol"], arguments["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (arguments["sasl_plain_username"], arguments["sasl_plain_password"]) == ("café", "a\\b=c#d")
    assert arguments["ssl_cafile"] == "/etc/kafka/ca.pem"
    for shown in (repr(found), repr(settings)):
        assert "a\\b" not in shown
        assert "caf" not in shown


def test_bytes_are_latin_1_as_in_java(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"client.id=caf\xe9\r\nrequest.timeout.ms=1000  \r\n")
    assert read_properties(path).options == {"client.id": "café", "request.timeout.ms": "1000"}


def test_what_goes_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("three:1", ("client.id=x",), str(file)).bootstrap_servers == "three:1"
    assert settings_of(None, ("sasl.mechanism=PLAIN",), str(file)).options["sasl.mechanism"] == "PLAIN"
    monkeypatch.setenv("ONCEFLOW_BOOTSTRAP_SERVERS", "of-the-environment:1")
    assert settings_of(None, (), str(file)).bootstrap_servers == "one:9092,two:9092"
    monkeypatch.setenv("ONCEFLOW_CONFIG", str(file))
    assert settings_of(None, ()).options["sasl.mechanism"] == "SCRAM-SHA-512"
    bare = file.with_name("bare")
    bare.write_text("client.id=x\n")
    assert settings_of(None, (), str(bare)) == ClientSettings("of-the-environment:1", {"client.id": "x"})


@pytest.mark.parametrize(
    "line, error",
    [
        ("sasl.mechansim=PLAIN", "unknown option 'sasl.mechansim'"),
        ("ssl.engine.factory.class=x.Y", "unknown option 'ssl.engine.factory.class'"),
        ("ssl.truststore.location=/t.jks", "cannot read Java key stores"),
        ("security.protocol=TLS", "security.protocol"),
        (r"client.id=\u12", "wrong escape"),
        ("bootstrap.servers=localhost", "localhost"),
    ],
)
def test_what_is_wrong_in_the_file(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(line + "\n")
    with pytest.raises(OptionError, match=error) as raised:
        settings_of(None, (), str(path))
    assert raised.value.next_step


@pytest.mark.parametrize("name", ["gone.properties", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        settings_of(None, (), str(tmp_path / name))


def test_what_is_not_used_is_named_on_stderr(file: Path) -> None:
    seen: list[ClientSettings] = []

    @click.command()
    @connection
    def show(settings: ClientSettings) -> None:
        seen.append(settings)

    answer = CliRunner().invoke(show, ["--config", str(file)])
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert answer.stderr == f"{file}: not used by onceflow: acks, linger.ms\n"
    failed = CliRunner().invoke(show, ["--config", str(file.with_name("gone"))])
    assert isinstance(failed.exception, OnceflowError)
    assert len(seen) == 1

"""What ``onceflow table serve`` refuses before it serves anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from onceflow.cli.table_serve import serve
from onceflow.client.settings import ClientSettings
from onceflow.errors import OnceflowError
from onceflow.server.formats import Format
from onceflow.server.options import ServeOptions


def refused(**given: object) -> str:
    with pytest.raises(OnceflowError) as raised:
        ServeOptions({"t": Format()}, ClientSettings("127.0.0.1:1"), **given)  # type: ignore[arg-type]
    return f"{raised.value.what}; {raised.value.next_step}"


@pytest.mark.parametrize("given", [{"copies": 2}, {"advertise": "http://a:1"}])
def test_options_for_several_instances(given: dict[str, object]) -> None:
    (name,) = given
    wanted = f"--{name} is given, but there are no other instances; give all instances the same consumer group"
    assert refused(**given).startswith(wanted)
    secrets = ["a-secret-of-the-tests"]
    ServeOptions({"t": Format()}, ClientSettings("127.0.0.1:1"), instances="g", peer_secrets=secrets, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("secrets", [[], ["short"], ["a-secret-of-the-tests", ""]])
def test_instances_without_a_good_secret(secrets: list[str]) -> None:
    said = refused(instances="g", peer_secrets=secrets)
    assert "need a secret of their own" in said if not secrets else "is shorter than 16 characters" in said
    assert "--peer-secret-file" in said


@pytest.mark.parametrize(
    "url", ["foo", "foo:80", "ftp://a:1", "http://", "http://a:1/path", "http://[a", "http://a?x=1"]
)
def test_an_address_that_is_no_url(url: str) -> None:
    assert refused(instances="g", advertise=url).startswith(f"--advertise {url} is not the URL of an instance")


def test_tls_files(tmp_path: Path) -> None:
    no_pem, good, locked, other = (tmp_path / name for name in ("no.pem", "good.pem", "locked.pem", "other.pem"))
    no_pem.write_text("nothing\n")
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(good))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(other))
    # OpenSSL asks on the terminal for the password of a key. Here nobody could answer.
    password = serialization.BestAvailableEncryption(b"secret")
    key = ec.generate_private_key(ec.SECP256R1())
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
    ServeOptions({"t": Format()}, ClientSettings("127.0.0.1:1"), certificate=good, certificate_key=good)
    for certificate, key in ((no_pem, no_pem), (good, no_pem), (good, other), (good, locked), (tmp_path, tmp_path)):
        wanted = f"The certificate {certificate} and its key {key} cannot be used; give PEM files that belong together"
        assert refused(certificate=certificate, certificate_key=key).startswith(wanted)
    assert refused(authority=no_pem).startswith(f"--tls-authority {no_pem} cannot be used; give a PEM file")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_tokens_that_are_named_but_not_there(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would be open to everybody."""
    where = ["t", "--bootstrap-servers", "127.0.0.1:1"]
    file = tmp_path / "tokens.txt"
    file.write_text(text)
    done = CliRunner().invoke(serve, [*where, "--token-file", str(file)])
    assert (done.exit_code, "has no token" in done.output) == (2, True)
    monkeypatch.setenv("ONCEFLOW_SERVER_TOKENS", text)
    done = CliRunner().invoke(serve, where)
    assert (done.exit_code, "ONCEFLOW_SERVER_TOKENS is set, but has no token" in done.output) == (2, True)


def test_a_table_twice() -> None:
    done = CliRunner().invoke(serve, ["a", "b", "a,key=long", "--bootstrap-servers", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "table a is given twice" in done.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["t", "--value", "schema"], "--value schema needs a registry"),
        (["t,value=schema"], "--value schema needs a registry"),
        (["t", "--registry", "http://127.0.0.1:9"], "--registry is given, but no table has --value schema"),
        (["t", "--registry-config", "f"], "--registry-config needs --registry"),
        (["t", "--value", "avro"], "use one of json, text, base64, schema"),
    ],
)
def test_values_with_schemas_need_a_registry(arguments: list[str], said: str) -> None:
    found = CliRunner().invoke(serve, [*arguments, "--bootstrap-servers", "127.0.0.1:1"])
    assert said in found.output + str(found.exception) + str(getattr(found.exception, "next_step", ""))

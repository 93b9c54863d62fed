"""Files with certificates and keys: what only one of the two clients can read is refused, with what converts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from onceflow.client.key_stores import check_pem
from onceflow.client.settings import ClientSettings
from onceflow.errors import OptionError

FORMS = serialization.PrivateFormat
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
CERTIFICATE = trustme.CA().issue_cert("localhost").cert_chain_pems[0].bytes().decode()
PARAMETERS = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"


def key(private: Any, form: FORMS, password: bytes | None = None) -> str:
    cipher = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    found: bytes = private.private_bytes(serialization.Encoding.PEM, form, cipher)
    return found.decode()


def check(folder: Path, text: str, java: int = 17, **more: str) -> None:
    store, trust = folder / "store.pem", folder / "ca.pem"
    store.write_text(text)
    trust.write_text(CERTIFICATE)
    options = {
        "security.protocol": "SSL",
        "ssl.truststore.location": str(trust),
        "ssl.truststore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.keystore.type": "PEM",
        **{name.replace("_", "."): value for name, value in more.items()},
    }
    check_pem(ClientSettings("h:1", options).options, java)


def refused(folder: Path, text: str, java: int = 17, **more: str) -> str:
    with pytest.raises(OptionError) as caught:
        check(folder, text, java, **more)
    return str(caught.value)


@pytest.mark.parametrize("private", [RSA, EC], ids=["rsa", "ec"])
def test_what_both_can_read(tmp_path: Path, private: Any) -> None:
    pkcs8 = key(private, FORMS.PKCS8)
    check(tmp_path, pkcs8 + CERTIFICATE)
    check(tmp_path, CERTIFICATE + CERTIFICATE + pkcs8)


@pytest.mark.parametrize(
    "text, label",
    [
        (key(RSA, FORMS.TraditionalOpenSSL) + CERTIFICATE, "RSA PRIVATE KEY"),
        (CERTIFICATE + key(RSA, FORMS.TraditionalOpenSSL, b"secret"), "RSA PRIVATE KEY"),
        (key(EC, FORMS.TraditionalOpenSSL) + CERTIFICATE, "EC PRIVATE KEY"),
        (PARAMETERS + key(EC, FORMS.TraditionalOpenSSL) + CERTIFICATE, "EC PRIVATE KEY"),
    ],
)
def test_forms_that_java_cannot_read(tmp_path: Path, text: str, label: str) -> None:
    """Python read them, so the start went well, and the first batch of Spark's client failed."""
    said = refused(tmp_path, text)
    assert f"a form that Spark's Kafka client cannot read: BEGIN {label}" in said
    assert "openssl pkcs8 -topk8 -nocrypt" in said


def test_keys_that_are_encrypted(tmp_path: Path) -> None:
    text = key(RSA, FORMS.PKCS8, b"secret") + CERTIFICATE
    assert "its password is not given" in refused(tmp_path, text)
    said = refused(tmp_path, text, ssl_key_password="secret")
    assert "encrypted in a way that Java 17 cannot read (PBES2)" in said
    assert "-v1 PBE-SHA1-3DES" in said
    check(tmp_path, text, 21, ssl_key_password="secret")
    other = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMFAGCiqGSIb3DQEMAQMwGwYA\n-----END ENCRYPTED PRIVATE KEY-----\n"
    check(tmp_path, other + CERTIFICATE, ssl_key_password="secret")  # as of -v1 PBE-SHA1-3DES


@pytest.mark.parametrize(
    "text, says",
    [
        (CERTIFICATE, "There is no private key"),
        (key(RSA, FORMS.PKCS8), "There is no certificate"),
        ("not PEM", "ssl.keystore.location is no PEM file"),
        ("", "ssl.keystore.location is no PEM file"),
    ],
)
def test_files_that_lack_something(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


@pytest.mark.parametrize("name", ["ssl_truststore_location", "ssl_keystore_location"])
def test_files_that_are_not_there(tmp_path: Path, name: str) -> None:
    text = key(RSA, FORMS.PKCS8) + CERTIFICATE
    said = refused(tmp_path, text, **{name: str(tmp_path / "nowhere.pem")})
    assert "cannot be read" in said
    assert "nowhere.pem" in said


@pytest.mark.parametrize("store", ["truststore", "keystore"])
def test_passwords_that_pem_files_do_not_have(tmp_path: Path, store: str) -> None:
    text = key(RSA, FORMS.PKCS8) + CERTIFICATE
    said = refused(tmp_path, text, **{f"ssl_{store}_password": "secret"})
    assert f"ssl.{store}.password is given" in said
    assert "secret" not in said


def test_without_tls_nothing_is_read(tmp_path: Path) -> None:
    check_pem({"ssl.truststore.location": "/nowhere.pem"}, 17)
    check_pem({"security.protocol": "SASL_PLAINTEXT", "ssl.keystore.location": "/nowhere.pem"}, 17)


@pytest.mark.parametrize(
    "store, command", [("truststore", "keytool -list -rfc"), ("keystore", "keytool -importkeystore")]
)
def test_java_key_stores_are_refused_with_a_command(tmp_path: Path, store: str, command: str) -> None:
    file = tmp_path / "a store.jks"
    file.write_bytes(b"\xfe\xed\xfe\xed")
    with pytest.raises(OptionError) as caught:
        ClientSettings("h:1", {f"ssl.{store}.location": str(file)})
    assert command in caught.value.next_step
    file.write_text(CERTIFICATE)
    with pytest.raises(OptionError, match=f"ssl.{store}.location is a PEM file") as caught:
        ClientSettings("h:1", {f"ssl.{store}.location": str(file)})
    assert caught.value.next_step == f"set ssl.{store}.type to PEM"

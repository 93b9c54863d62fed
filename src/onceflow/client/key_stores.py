"""Checks of the files with certificates and keys: both Python and Spark's Kafka client in Java have to read them.

Kafka's client reads PEM key stores since KIP-651. It takes keys in the form PKCS#8 only, and encrypted ones only as far
as Java does (DefaultSslEngineFactory.PemStore).
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from onceflow.errors import OptionError

_LABEL = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_ENCRYPTED = re.compile(r"-----BEGIN ENCRYPTED PRIVATE KEY-----([^-]*)-----END")
# Forms of keys that OpenSSL reads, and Java does not: PKCS#1 and SEC1.
_OTHER_FORMS = ("RSA PRIVATE KEY", "EC PRIVATE KEY", "DSA PRIVATE KEY", "OPENSSH PRIVATE KEY")
# The identifier of PBES2 (RFC 8018) as it stands in a key. OpenSSL encrypts so by default.
_PBES2 = bytes.fromhex("06092a864886f70d01050d")
#: The last version of Java that is known not to read keys that are encrypted with PBES2.
_JAVA_WITHOUT_PBES2 = 18


def to_pem(*, trust: bool, location: str = "STORE.jks") -> str:
    """Commands that make a PEM file of a Java key store."""
    store = shlex.quote(location)
    if trust:
        return f"keytool -list -rfc -keystore {store} > STORE.pem"
    return (
        f"keytool -importkeystore -srckeystore {store} -destkeystore STORE.p12 -deststoretype PKCS12 && "
        "openssl pkcs12 -in STORE.p12 -nodes -out STORE.pem"
    )


def is_pem(location: str) -> bool:
    """Whether a file that is there has PEM blocks, whatever its type is said to be."""
    return bool(_LABEL.search(_text(location) or ""))


def check_pem(options: Mapping[str, str], java: int) -> None:
    """Check the files that connection options name, as far as they are on this machine.

    Args:
        options: by their Java names. java: major version of the Java that runs Spark.

    Raises:
        OptionError: a file is not there, or one of the two clients cannot read it.
    """
    if "SSL" not in options.get("security.protocol", "").upper():
        return
    for store in ("ssl.truststore", "ssl.keystore"):
        if f"{store}.password" in options and options.get(f"{store}.type", "").upper() == "PEM":
            raise OptionError(
                f"{store}.password is given, and PEM files have no password of their own",
                next_step="leave it out; the password of an encrypted key is ssl.key.password",
            )
    for name in ("ssl.truststore.location", "ssl.ca.location", "ssl.keystore.location"):
        if (location := options.get(name)) is not None:
            _check_file(name, location)
    if (location := options.get("ssl.keystore.location")) is not None:
        _check_key(location, options, java)


def _check_file(name: str, location: str) -> None:
    text = _text(location)
    if text is None:
        raise OptionError(
            f"{name} names a file that cannot be read: {location}",
            next_step="give a PEM file that is at this path on every machine that runs tasks",
        )
    if not _LABEL.search(text):
        raise OptionError(
            f"{name} is no PEM file: {location}",
            next_step=f"convert it: {to_pem(trust='keystore' not in name, location=location)}",
        )


def _check_key(location: str, options: Mapping[str, str], java: int) -> None:
    text = _text(location) or ""
    labels = _LABEL.findall(text)
    file = shlex.quote(location)
    made = shlex.quote(f"{location.rsplit('.', 1)[0]}-pkcs8.pem")
    convert = (
        f"(openssl pkcs8 -topk8 -nocrypt -in {file} && openssl x509 -in {file}) > {made}; with more certificates than "
        "one, append the others"
    )
    wrong = next((label for label in labels if label in _OTHER_FORMS), None)
    if wrong is not None:
        raise OptionError(
            f"The key in ssl.keystore.location ({location}) is in a form that Spark's Kafka client cannot read: "
            f"BEGIN {wrong}",
            next_step=f"convert it to PKCS#8: {convert}",
        )
    if not any(label in ("PRIVATE KEY", "ENCRYPTED PRIVATE KEY") for label in labels):
        raise OptionError(
            f"There is no private key in ssl.keystore.location ({location})",
            next_step="put the key and the certificates into one file: cat KEY.pem CERTIFICATE.pem > STORE.pem",
        )
    if "CERTIFICATE" not in labels:
        raise OptionError(
            f"There is no certificate in ssl.keystore.location ({location})",
            next_step="put the key and the certificates into one file: cat KEY.pem CERTIFICATE.pem > STORE.pem",
        )
    if "ENCRYPTED PRIVATE KEY" not in labels:
        return
    if "ssl.key.password" not in options:
        raise OptionError(
            f"The key in ssl.keystore.location ({location}) is encrypted, and its password is not given",
            next_step="give it as ssl.key.password",
        )
    if java <= _JAVA_WITHOUT_PBES2 and _is_pbes2(text):
        raise OptionError(
            f"The key in ssl.keystore.location ({location}) is encrypted in a way that Java {java} cannot read (PBES2)",
            next_step=f"encrypt it so that Java can: openssl pkcs8 -topk8 -v1 PBE-SHA1-3DES -in {file} -out KEY.pem, "
            "and put it into the file in place of the other one; or protect the file by its permissions, and leave it "
            f"unencrypted: {convert}",
        )


def _is_pbes2(text: str) -> bool:
    found = _ENCRYPTED.search(text)
    if found is None:
        return False
    try:
        return _PBES2 in base64.b64decode("".join(found[1].split()))[:64]
    except binascii.Error:
        return False


def _text(location: str) -> str | None:
    """What a file has; None: it cannot be read."""
    try:
        return Path(location).read_text(errors="replace")
    except (OSError, ValueError):  # ValueError: it cannot be the name of a file
        return None

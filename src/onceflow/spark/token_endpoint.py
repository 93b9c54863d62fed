"""Tokens of a function or a file for Spark's Kafka reader, which is a Java client and can call neither.

The Java client can ask a token endpoint. So the driver is one: a small HTTP server that gives out the token that our
own connections use. Executors reach the driver anyway. With a local master it listens on 127.0.0.1; otherwise on the
driver's address, with TLS and a certificate that is made for this run and that the reader's options pin. Who asks has
to know a secret that is made for this run, too.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.client.auth.bearer_tokens import Tokens
from onceflow.client.auth.jaas import OAUTH_MODULE, jaas
from onceflow.client.auth.sources import TokenRefusedError, TokenUnavailableError, claims
from onceflow.client.settings import ClientSettings
from onceflow.errors import AuthenticationFailedError, EnvironmentUnusableError
from onceflow.host.java import find_java
from onceflow.spark import jvm
from onceflow.spark.master import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("onceflow")

# The first is in every version that Spark 4.2 comes with, the second in older ones.
_HANDLERS = (
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
    "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
)
_PATH = "/token"
_CLIENT_ID = "onceflow"
_ALIAS = "onceflow"
_VALID_DAYS = 3650
_HANDLER_TIMEOUT_S = 20
_KEYTOOL_TIMEOUT_S = 60


def reader_options(spark: SparkSession, settings: ClientSettings) -> dict[str, str]:
    """What Spark's reader needs beyond ``ClientSettings.spark_reader`` to get tokens; nothing for other mechanisms.

    Raises:
        AuthenticationFailedError: there is no token, or none that the Java client takes.
    """
    options = settings.options
    if options.get("sasl.mechanism") != "OAUTHBEARER" or settings.tokens is None:
        return {}
    out: dict[str, str] = {}
    if not {"sasl.login.callback.handler.class", "sasl.login.class"} & set(options):
        out["kafka.sasl.login.callback.handler.class"] = _handler(spark)
    if settings.java_needs_tokens:
        check_for_java(settings.tokens)
        endpoint = endpoint_for(spark, settings.tokens)
        out["kafka.sasl.oauthbearer.token.endpoint.url"] = endpoint.url
        out["kafka.sasl.jaas.config"] = endpoint.jaas
    return out


def check_for_java(tokens: Tokens) -> None:
    """The Java client parses a token before it uses it, and takes only a JWT that has an expiry and a subject.

    Raises:
        AuthenticationFailedError: it would not take this one, or there is none.
    """
    try:
        found = claims(tokens.token())
    except (TokenUnavailableError, TokenRefusedError) as error:
        raise AuthenticationFailedError(error.what, next_step=error.next_step) from error
    missing = [name for name in ("exp", "sub") if not (found or {}).get(name)]
    if missing:
        what = "is no JWT" if found is None else f"is a JWT without {' and '.join(missing)}"
        raise AuthenticationFailedError(
            f"The token of {tokens.source.name} {what}, and Spark's Kafka reader does not take that",
            next_step="return a JWT; for other tokens give a Java class that gets them for the reader, as "
            "'sasl.login.callback.handler.class' (on Amazon MSK: mechanism AWS_MSK_IAM)",
        )


class TokenEndpoint:
    """A token endpoint on this machine; it runs until the process ends, or ``close``.

    Args:
        tokens: what it gives out. address: where it listens. host: by which name it is reached.
        tls: certificate chain and key as PEM; None for plain HTTP, on a loopback address only.
    """

    def __init__(
        self, tokens: Tokens, *, address: str = "127.0.0.1", host: str = "127.0.0.1", tls: tuple[str, str] | None = None
    ) -> None:
        self._tokens = tokens
        self._secret = secrets.token_urlsafe(32)
        self._certificate = tls[0] if tls else None
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = (_Server6 if ":" in address else _Server)((address, 0), handler)
        if tls:
            # The handshake belongs to the thread of the connection: it must not keep the others waiting.
            context = _server_context(*tls)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{name}:{self._server.server_address[1]}{_PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(0.1,),  # how long a stop may take, in seconds
            name="onceflow-token-endpoint",
            daemon=True,
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"TokenEndpoint({self.url})"

    @property
    def jaas(self) -> str:
        """``sasl.jaas.config`` of a Java client that asks here."""
        fields = {"clientId": _CLIENT_ID, "clientSecret": self._secret}
        if self._certificate:
            fields |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": self._certificate}
        fields |= {f"extension_{name}": value for name, value in self._tokens.extensions().items()}
        return jaas(OAUTH_MODULE, fields)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, authorization: str) -> tuple[int, Mapping[str, Any]]:
        """HTTP status and JSON body for one request."""
        expected = "Basic " + base64.b64encode(f"{_CLIENT_ID}:{self._secret}".encode()).decode()
        if path != _PATH or not hmac.compare_digest(authorization.encode(), expected.encode()):
            return 401, {"error": "invalid_client"}
        try:
            token = self._tokens.current()
        except (TokenUnavailableError, TokenRefusedError) as error:
            log.warning("no token for Spark's Kafka reader: %s", error.what)
            return 503, {"error": "temporarily_unavailable", "error_description": error.what}
        lifetime_s = max(0, int(token.expires_at - time.time()))
        return 200, {"access_token": token.text, "token_type": "Bearer", "expires_in": lifetime_s}


class _Handler(BaseHTTPRequestHandler):
    endpoint: TokenEndpoint
    timeout = _HANDLER_TIMEOUT_S

    def do_POST(self) -> None:
        # The body is a form that says client_credentials and nothing that matters here.
        self.rfile.read(min(int(self.headers.get("Content-Length") or 0), 65536))
        status, body = self.endpoint.answer(self.path, self.headers.get("Authorization") or "")
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: standard error belongs to the user's program."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        log.debug("a request to the token endpoint failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


_endpoints: dict[tuple[int, str], TokenEndpoint] = {}
_lock = threading.Lock()


def endpoint_for(spark: SparkSession, tokens: Tokens) -> TokenEndpoint:
    """The endpoint of these tokens in this process; executors of this session reach it."""

    conf = spark.sparkContext.getConf()
    is_local = local_cores(conf.get("spark.master") or "local") is not None
    host = "127.0.0.1" if is_local else conf.get("spark.driver.host") or "127.0.0.1"
    with _lock:
        found = _endpoints.get((id(tokens), host))
        if found is None:
            if is_local:
                found = TokenEndpoint(tokens)
            else:
                address = conf.get("spark.driver.bindAddress") or host
                tls = certificate_for(host, spark.sparkContext._gateway)
                found = TokenEndpoint(tokens, address=address, host=host, tls=tls)
            _endpoints[id(tokens), host] = found  # `shared` keeps the tokens, so the id stays theirs
        return found


def certificate_for(host: str, gateway: Any) -> tuple[str, str]:
    """A self-signed certificate for this host name or address, and its key, as PEM. Made by Java's keytool."""
    password = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="onceflow-tls-") as folder:
        store = Path(folder, "key.p12")
        _keytool(
            store, password,
            "-genkeypair", "-keyalg", "EC", "-groupname", "secp256r1", "-storetype", "PKCS12",
            "-startdate", "-1d", "-validity", str(_VALID_DAYS), "-dname", "CN=onceflow",
            "-ext", f"SAN={'ip' if _is_address(host) else 'dns'}:{host}",
        )  # fmt: skip
        certificate = _keytool(store, password, "-exportcert", "-rfc")
        return certificate, _private_key(store, password, gateway)


def _keytool(store: Path, password: str, *arguments: str) -> str:
    command = [str(find_java().with_name("keytool")), *arguments, "-alias", _ALIAS, "-keystore", str(store)]
    try:
        done = subprocess.run(
            [*command, "-storepass:env", "ONCEFLOW_STORE_PASSWORD"],
            env={**os.environ, "ONCEFLOW_STORE_PASSWORD": password},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_KEYTOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentUnusableError(
            "No certificate could be made for the token endpoint of the driver",
            detail=f"keytool: {type(error).__name__}",
            next_step="see that keytool is beside java on the driver, or use a token endpoint of your own "
            "(sasl.oauthbearer.token.endpoint.url)",
        ) from error
    return done.stdout


def _private_key(store: Path, password: str, gateway: Any) -> str:
    """The key as PEM. keytool does not hand out keys, and Python's ssl reads no PKCS12: the driver's JVM does."""
    java = gateway.jvm.java
    letters = gateway.new_array(gateway.jvm.char, len(password))
    for position, letter in enumerate(password):
        letters[position] = letter
    keys = java.security.KeyStore.getInstance("PKCS12")
    stream = java.io.FileInputStream(str(store))
    try:
        keys.load(stream, letters)
    finally:
        stream.close()
    # The key's own class is hidden in its module: its methods cannot be called from outside.
    encoded = java.lang.Class.forName("java.security.spec.PKCS8EncodedKeySpec")
    key = java.security.KeyFactory.getInstance("EC").getKeySpec(keys.getKey(_ALIAS, letters), encoded)
    text = base64.b64encode(bytes(key.getEncoded())).decode()
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])


def _server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    descriptor, path = tempfile.mkstemp(prefix="onceflow-tls-")  # only its owner may read it
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(certificate + key)
        context.load_cert_chain(path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return context


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _handler(spark: SparkSession) -> str:
    """Which class of the Kafka client that Spark runs with asks a token endpoint."""
    return next((name for name in _HANDLERS if jvm.has_class(spark.sparkContext._jvm, name)), _HANDLERS[0])

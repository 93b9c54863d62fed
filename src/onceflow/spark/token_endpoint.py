"""Gives tokens from a Python function or a file to Spark's Kafka reader, which is a Java client.

The Java client can ask a token endpoint. So the driver runs one: a small HTTP server that returns the token of
onceflow's own connections. Executors reach the driver anyway. With a local master the server listens on 127.0.0.1.
Otherwise it listens on the driver's address, with TLS; the certificate is made for this run, and the options of the
reader trust only that one. A client must also know a secret that is made for this run.
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

# The first one is in the Kafka client that comes with Spark 4.2, the second one in older clients.
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
    """Options that Spark's reader needs besides ``ClientSettings.spark_reader`` to get tokens; else none.

    Raises:
        AuthenticationFailedError: there is no token, or the Java client does not accept it.
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
    """Check a token: the Java client parses it, and accepts only a JWT that has an expiry and a subject.

    Raises:
        AuthenticationFailedError: it would not accept this token, or there is none.
    """
    try:
        found = claims(tokens.token())
    except (TokenUnavailableError, TokenRefusedError) as error:
        raise AuthenticationFailedError(error.what, next_step=error.next_step) from error
    missing = [name for name in ("exp", "sub") if not (found or {}).get(name)]
    if missing:
        what = "is no JWT" if found is None else f"is a JWT without {' and '.join(missing)}"
        raise AuthenticationFailedError(
            f"The token of {tokens.source.name} {what}, and Spark's Kafka reader does not accept that",
            next_step="return a JWT; for other tokens set 'sasl.login.callback.handler.class' to a Java class that "
            "gets them for the reader (on Amazon MSK: mechanism AWS_MSK_IAM)",
        )


class TokenEndpoint:
    """A token endpoint on this machine. It runs until the process ends, or until ``close``.

    Args:
        tokens: the tokens that it returns. address: where it listens. host: the name under which it is reached.
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
            # The thread of a connection makes the handshake, so that no other connection has to wait for it.
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
        """``sasl.jaas.config`` of a Java client that uses this endpoint."""
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
        # The body is a form with client_credentials, which is not needed here.
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
        """Write nothing: standard error belongs to the user's program."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        log.debug("a request to the token endpoint failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


_endpoints: dict[tuple[int, str], TokenEndpoint] = {}
_lock = threading.Lock()


def endpoint_for(spark: SparkSession, tokens: Tokens) -> TokenEndpoint:
    """The endpoint of these tokens in this process, which executors of this session can reach."""
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
            _endpoints[id(tokens), host] = found  # `shared` keeps the tokens, so their id is not used again
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
            next_step="make sure that keytool is in the folder of java on the driver, or use a token endpoint of your "
            "own (sasl.oauthbearer.token.endpoint.url)",
        ) from error
    return done.stdout


def _private_key(store: Path, password: str, gateway: Any) -> str:
    """The key as PEM. keytool does not export keys, and Python's ssl reads no PKCS12, so the driver's JVM reads it."""
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
    # The class of the key is hidden in its Java module, so its methods cannot be called from outside.
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
    """The class that asks a token endpoint, in the Kafka client of this Spark."""
    return next((name for name in _HANDLERS if jvm.has_class(spark.sparkContext._jvm, name)), _HANDLERS[0])

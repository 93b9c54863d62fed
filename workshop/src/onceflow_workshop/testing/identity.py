"""An identity provider for tests: a token endpoint on 127.0.0.1 that signs JWTs, and a broker's settings to check them.

The signatures are real (RS256), with a key that is made at the start. No package is needed. For tests only: the
arithmetic is not protected against side channels.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import secrets
import threading
import time
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

AUDIENCE = "kafka"
_BITS = 2048  # the least that RS256 allows
_EXPONENT = 65537
_KEY_ID = "test-key"
_SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")
_SECURITY = "org.apache.kafka.common.security.oauthbearer"


class SigningKey:
    """An RSA key."""

    def __init__(self) -> None:
        p, q = _prime(_BITS // 2), _prime(_BITS // 2)
        self.modulus = p * q
        self._private = pow(_EXPONENT, -1, (p - 1) * (q - 1))

    def sign(self, data: bytes) -> bytes:
        """RSASSA-PKCS1-v1_5 with SHA-256 (RFC 8017, 8.2)."""
        size = _BITS // 8
        digest = _SHA256_PREFIX + hashlib.sha256(data).digest()
        padded = b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest
        return pow(int.from_bytes(padded, "big"), self._private, self.modulus).to_bytes(size, "big")

    def jwks(self) -> dict[str, Any]:
        """The public half, as a JSON Web Key Set."""
        numbers = {"n": self.modulus, "e": _EXPONENT}
        key = {name: _base64(n.to_bytes((n.bit_length() + 7) // 8, "big")) for name, n in numbers.items()}
        return {"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": _KEY_ID, **key}]}


class IdentityProvider:
    """Issues tokens that are valid for ``lifetime_s``. Its HTTP server runs while it is used as a context manager.

    Args:
        folder: where the public keys for the broker are written.
        clients: client id -> secret, for the client credentials grant.

    ``issued`` contains all tokens so far; ``is_down`` makes it answer 503; ``lifetime_s`` may be changed.
    """

    def __init__(self, folder: Path, *, lifetime_s: float = 30.0, clients: Mapping[str, str] | None = None) -> None:
        self.lifetime_s = lifetime_s
        self.clients = dict(clients or {})
        self.issued: list[str] = []
        self.is_down = False
        self._key = SigningKey()
        self._jwks_file = folder / "jwks.json"
        self._jwks_file.write_text(json.dumps(self._key.jwks()))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"provider": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/token"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="identity-provider", daemon=True
        )

    def __enter__(self) -> IdentityProvider:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def issuer(self) -> str:
        return self.url.rpartition("/")[0]

    def token(self, subject: str, **claims: Any) -> str:
        """A signed token. ``claims`` replace the default ones; None leaves a claim out."""
        now = time.time()
        body = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": int(now),
            "exp": int(now + self.lifetime_s),
            "jti": secrets.token_hex(8),
            **claims,
        }
        parts = ({"alg": "RS256", "typ": "JWT", "kid": _KEY_ID}, {k: v for k, v in body.items() if v is not None})
        signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        token = f"{signed}.{_base64(self._key.sign(signed.encode()))}"
        self.issued.append(token)
        return token

    def broker_properties(self, listener: str = "SASL_PLAINTEXT") -> dict[str, str]:
        """Broker settings with which clients of a listener log in with these tokens, until a token expires."""
        prefix = f"listener.name.{listener.lower()}.oauthbearer"
        return {
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{prefix}.sasl.jaas.config": f"{_SECURITY}.OAuthBearerLoginModule required;",
            f"{prefix}.sasl.server.callback.handler.class": f"{_SECURITY}.OAuthBearerValidatorCallbackHandler",
            f"{prefix}.connections.max.reauth.ms": "3600000",
            "sasl.oauthbearer.jwks.endpoint.url": self._jwks_file.as_uri(),
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": self.issuer,
            "sasl.oauthbearer.clock.skew.seconds": "0",
        }

    @property
    def broker_environment(self) -> dict[str, str]:
        """Environment variables of the broker. Kafka 4 only reads keys from URLs that are allowed."""
        allowed = self._jwks_file.as_uri()
        return {"JAVA_TOOL_OPTIONS": f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={allowed}"}


class _Handler(BaseHTTPRequestHandler):
    provider: IdentityProvider
    timeout = 20

    def do_POST(self) -> None:
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        client, secret = _basic(self.headers.get("Authorization") or "")
        if self.provider.is_down:
            self._answer(503, {"error": "temporarily_unavailable"})
        elif form.get("grant_type") != ["client_credentials"]:
            self._answer(400, {"error": "unsupported_grant_type"})
        elif secret is None or self.provider.clients.get(client) != secret:
            self._answer(401, {"error": "invalid_client", "error_description": "Invalid client or client credentials"})
        else:
            token = self.provider.token(client, scope=" ".join(form.get("scope", [])) or None)
            lifetime_s = int(self.provider.lifetime_s)
            self._answer(200, {"access_token": token, "token_type": "Bearer", "expires_in": lifetime_s})

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _basic(header: str) -> tuple[str, str | None]:
    kind, _, text = header.partition(" ")
    try:
        client, colon, secret = base64.b64decode(text, validate=True).decode().partition(":")
    except ValueError:
        return "", None
    return client, secret if kind == "Basic" and colon else None


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _prime(bits: int) -> int:
    while True:
        # The two highest bits are set, so that the product of two primes has all its bits.
        candidate = secrets.randbits(bits) | (3 << (bits - 2)) | 1
        if candidate % _EXPONENT != 1 and _is_prime(candidate):
            return candidate


def _is_prime(number: int, rounds: int = 20) -> bool:
    """Miller-Rabin, after a few small divisors."""
    if any(number % small == 0 for small in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)):
        return False
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(rounds):
        power = pow(random.randrange(2, number - 1), odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = pow(power, 2, number)
            if power == number - 1:
                break
        else:
            return False
    return True

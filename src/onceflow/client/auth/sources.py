"""Sources of tokens for SASL OAUTHBEARER: a token endpoint, a file, or a function of the user.

No error message of this module contains a token or a client secret.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import importlib
import json
import re
import ssl
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import kafka.errors as kafka_errors

_RESPONSE_MAX = 1_000_000
_NOT_SAFE = re.compile(r"[^\x20-\x7e]")


class TokenUnavailableError(kafka_errors.KafkaConnectionError):  # type: ignore[misc]
    """No token could be obtained now; a retry may help. The message contains no secrets."""

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step


class TokenRefusedError(kafka_errors.SaslAuthenticationFailedError):  # type: ignore[misc]
    """No token can be obtained: wrong credentials, or no such function. The message contains no secrets."""

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step


@dataclass(frozen=True)
class Token:
    """A bearer token. ``expires_at`` is in seconds since the epoch, by this machine's clock."""

    text: str = field(repr=False)
    expires_at: float


class Source(Protocol):
    """A source of tokens. Hashable: equal sources share one token in a process."""

    @property
    def name(self) -> str:
        """A description, for errors."""

    def fetch(self, timeout_s: float) -> Token:
        """Fetch a new token.

        Raises:
            TokenUnavailableError: it failed, a retry may help. TokenRefusedError: it failed, a retry will not help.
        """


# ---- sources ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientCredentials:
    """The client credentials grant (RFC 6749, 4.4), as Kafka's ``OAuthBearerLoginCallbackHandler`` does it.

    Args:
        endpoint: URL of the token endpoint.
        ca_file: PEM file with the certificate authorities for an https endpoint. None: those of the machine.
        urlencode: whether id and secret are URL-encoded in the header (``sasl.oauthbearer.header.urlencode``).
    """

    endpoint: str = field(repr=False)
    client_id: str
    client_secret: str = field(repr=False)
    scope: str | None = None
    ca_file: str | None = None
    urlencode: bool = False

    @property
    def name(self) -> str:
        return f"the token endpoint {shown_url(self.endpoint)}"

    def fetch(self, timeout_s: float) -> Token:
        asked_at = time.time()
        answer = self._ask(timeout_s)
        text = answer.get("access_token")
        if not isinstance(text, str) or not text:
            raise TokenUnavailableError(
                f"The response of {self.name} has no access_token", "check sasl.oauthbearer.token.endpoint.url"
            )
        lifetime = answer.get("expires_in")
        if isinstance(lifetime, (int, float)) and not isinstance(lifetime, bool):
            return Token(text, asked_at + lifetime)  # does not depend on synchronised clocks
        return Token(text, _expiry(text, self.name, "let the endpoint return expires_in, or issue JWTs"))

    def _ask(self, timeout_s: float) -> dict[str, Any]:
        form = {"grant_type": "client_credentials", **({"scope": self.scope} if self.scope else {})}
        who = (self.client_id, self.client_secret)
        if self.urlencode:
            who = (urllib.parse.quote_plus(who[0]), urllib.parse.quote_plus(who[1]))
        request = urllib.request.Request(
            self.endpoint,
            data=urllib.parse.urlencode(form).encode(),
            headers={
                "Authorization": "Basic " + base64.b64encode(":".join(who).encode()).decode(),
                "Content-Type": "application/x-www-form-urlencoded",
                "Accept": "application/json",
                "Cache-Control": "no-cache",
            },
        )
        try:
            with _opener(self.endpoint, self.ca_file).open(request, timeout=timeout_s) as response:
                body = response.read(_RESPONSE_MAX)
            answer = json.loads(body)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise TokenUnavailableError(
                f"{capital(self.name)} cannot be reached: {type(reason).__name__}: {self._harmless(str(reason))}",
                "check sasl.oauthbearer.token.endpoint.url, the network from this machine, and for https the "
                "certificate (https.ca.location)",
            ) from None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise TokenUnavailableError(
                f"{capital(self.name)} returned something that is no JSON object",
                "check sasl.oauthbearer.token.endpoint.url",
            )
        return answer

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        """The endpoint's error in the format of RFC 6749, 5.2: a code and a readable description."""
        with error:
            try:
                answer = json.loads(error.read(_RESPONSE_MAX))
                reason = ": ".join(str(answer[key]) for key in ("error", "error_description") if key in answer)
            except (ValueError, TypeError, OSError, http.client.HTTPException):
                reason = ""
        text = f"{capital(self.name)} answered HTTP {error.code}"
        if reason:
            text += f" ({self._harmless(reason)})"
        if 300 <= error.code < 400:
            return TokenRefusedError(f"{text}: a redirect, which is not followed", "give the URL that it redirects to")
        if error.code in (408, 425, 429) or error.code >= 500:
            return TokenUnavailableError(text, "check that the identity provider is up")
        return TokenRefusedError(text, "check client id, client secret and scope, and the URL of the token endpoint")

    def _harmless(self, text: str) -> str:
        for secret in {self.client_secret, urllib.parse.quote_plus(self.client_secret)} - {""}:
            text = text.replace(secret, "***")
        return _NOT_SAFE.sub("?", text)[:200]


@dataclass(frozen=True)
class TokenFile:
    """A file with a JWT that another program renews, for example a projected token of Kubernetes."""

    path: str

    @property
    def name(self) -> str:
        return f"the token file {self.path}"

    def fetch(self, timeout_s: float) -> Token:
        try:
            text = Path(self.path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenUnavailableError(
                f"{capital(self.name)} cannot be read: {type(error).__name__}",
                "the file must be on the driver and on every machine that runs tasks",
            ) from None
        return Token(text, _expiry(text, self.name, "write a JWT to it"))


@dataclass(frozen=True)
class Provider:
    """A function of the user, called without arguments.

    Args:
        path: ``module:function``. The function returns a token, or a tuple of the token and its remaining lifetime in
            seconds. Without a lifetime, the ``exp`` claim of the token is used.
    """

    path: str

    @property
    def name(self) -> str:
        return f"the token provider {self.path!r}"

    def fetch(self, timeout_s: float) -> Token:
        function = self._load()
        asked_at = time.time()
        try:
            given = function()
        except Exception as error:
            # The message is not shown: it comes from user code and may contain the token or a password.
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise TokenUnavailableError(
                f"{capital(self.name)} raised {type(error).__name__} at {Path(last.filename).name}:{last.lineno}",
                "call it by itself in the same environment to see the whole error",
            ) from None
        text, lifetime = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if (
            not isinstance(text, str)
            or isinstance(lifetime, bool)
            or not isinstance(lifetime, (int, float, type(None)))
        ):
            raise TokenRefusedError(
                f"{capital(self.name)} returned {type(given).__name__}",
                "return the token as a string, or a tuple of the token and its lifetime in seconds",
            )
        if lifetime is None:
            return Token(text, _expiry(text, self.name, "return a tuple of the token and its lifetime in seconds"))
        return Token(text, asked_at + lifetime)

    def _load(self) -> Callable[[], Any]:
        module, _, function = self.path.partition(":")
        next_step = "it must be importable on the driver and in tasks (installed there, or sent with addPyFile)"
        try:
            found: Any = importlib.import_module(module)
            for part in function.split("."):
                found = getattr(found, part)
        except Exception as error:
            why = str(error) if isinstance(error, (ImportError, AttributeError)) else ""
            problem = f"{type(error).__name__}: {_NOT_SAFE.sub('?', why)[:200]}" if why else type(error).__name__
            raise TokenRefusedError(f"{capital(self.name)} cannot be imported: {problem}", next_step) from None
        if not callable(found):
            raise TokenRefusedError(f"{capital(self.name)} is not callable", "name a function: module:function")
        return found  # type: ignore[no-any-return]


def claims(text: str) -> dict[str, Any] | None:
    """The claims of a JWT, not verified; None if it is no JWT."""
    parts = text.split(".")
    if len(parts) != 3 or not all(parts):
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error):
        return None
    return found if isinstance(found, dict) else None


def shown_url(url: str) -> str:
    """A URL without user, password, query and fragment."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _expiry(text: str, name: str, next_step: str) -> float:
    expires_at = (claims(text) or {}).get("exp")
    if not isinstance(expires_at, (int, float)) or isinstance(expires_at, bool):
        raise TokenRefusedError(f"The token of {name} does not say when it expires: it is no JWT with exp", next_step)
    return float(expires_at)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a redirect would send the client's secret to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _opener(url: str, ca_file: str | None) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
    if parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127."):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def capital(text: str) -> str:
    """The text with a capital first letter, to begin a sentence."""
    return text[:1].upper() + text[1:]

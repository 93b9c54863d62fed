"""Provides a valid bearer token to every connection of a process.

kafka-python requests a token for every login: when a connection is made, and again before the broker's session for
that connection expires (KIP-368). A token is reused until most of its lifetime is over.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping

from kafka.net.sasl.oauth import AbstractTokenProvider

from onceflow.client.auth.sources import Source, Token, TokenRefusedError, TokenUnavailableError, capital

log = logging.getLogger("onceflow.client")

# The Java client requests a new token after 80 % of the lifetime of the old one, kafka-python after 85 %.
_RENEW_AFTER = 0.75
_PATIENCE_S = 10.0  # for a first token; well below the time limit for making a connection
_ONE_CALL_S = 8.0
_AGAIN_S = 2.0  # after a failed renewal, while the old token is still valid
_ONE_REFUSAL_S = 30.0
_BEARER = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, b64token


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Keeps a valid token, and fetches a new one as rarely as the lifetime allows. Thread-safe.

    Args:
        source: where tokens come from.
        extensions: SASL extensions to send with the token (``extension_`` fields of a JAAS configuration).
        clock: returns seconds since the epoch.
        sleep: how to wait.
        patience_s: how long to retry if there is no valid token.
    """

    def __init__(
        self,
        source: Source,
        extensions: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.source = source
        self._extensions = dict(extensions or {})
        self._clock = clock
        self._sleep = sleep
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._renew_at = 0.0
        self._refused_at = float("-inf")
        self._refusal: tuple[object, bool] = (None, False)

    def __repr__(self) -> str:
        return f"Tokens({self.source.name})"

    def extensions(self) -> dict[str, str]:
        return dict(self._extensions)

    def token(self) -> str:
        """A token that has not expired.

        Raises:
            TokenUnavailableError: no token within ``patience_s``. TokenRefusedError: retrying will not help.
        """
        return self.current().text

    def current(self) -> Token:
        """As `token`, with the expiry."""
        with self._lock:
            if self._token is None or self._clock() >= self._renew_at:
                self._token = self._renewed(self._token)
            return self._token

    def refused(self, refusal: object) -> bool:
        """Report that the broker has refused the token, which is then dropped. Returns whether to try a new one.

        Args:
            refusal: the error. If several requests wait for one login, all of them report the same error, and all of
                them get the same result.
        """
        with self._lock:
            if refusal is not self._refusal[0]:
                now = self._clock()
                self._refusal = (refusal, now - self._refused_at > _ONE_REFUSAL_S)
                self._token = None
                self._refused_at = now
            return self._refusal[1]

    def _renewed(self, old: Token | None) -> Token:
        if old is not None and old.expires_at <= self._clock():
            old = None
        try:
            token = self._fetched(patience_s=self._patience_s if old is None else 0.0)
        except (TokenUnavailableError, TokenRefusedError) as error:
            now = self._clock()
            if old is None or old.expires_at <= now:
                raise
            log.warning("token not renewed, the old one is valid for another %.0f s: %s", old.expires_at - now, error)
            self._renew_at = min(now + _AGAIN_S, old.expires_at)
            return old
        now = self._clock()
        self._renew_at = now + _RENEW_AFTER * (token.expires_at - now)
        return token

    def _fetched(self, *, patience_s: float) -> Token:
        end = self._clock() + patience_s
        pause_s = 0.1
        while True:
            left_s = end - self._clock()
            try:
                token = _bounded(self.source, min(_ONE_CALL_S, max(1.0, left_s)) if patience_s else _ONE_CALL_S / 2)
                return self._checked(token)
            except TokenUnavailableError:
                if self._clock() + pause_s >= end:
                    raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    def _checked(self, token: Token) -> Token:
        if not _BEARER.fullmatch(token.text):
            raise TokenRefusedError(
                f"What {self.source.name} returned is no bearer token: it is empty or has invalid characters",
                "return the token alone, without a prefix such as 'Bearer' and without line breaks",
            )
        age_s = self._clock() - token.expires_at
        if age_s >= 0:
            raise TokenUnavailableError(
                f"The token of {self.source.name} expired {age_s:.0f} s ago",
                "make sure that it is renewed in time, and that the clocks of this machine and of the issuer agree",
            )
        return token


_shared: dict[tuple[Source, tuple[tuple[str, str], ...]], Tokens] = {}
_shared_lock = threading.Lock()


def shared(source: Source, extensions: Mapping[str, str] | None = None) -> Tokens:
    """The `Tokens` object of a source. All connections of a process share it."""
    key = (source, tuple(sorted((extensions or {}).items())))
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Tokens(source, extensions)
        return _shared[key]


def _bounded(source: Source, timeout_s: float) -> Token:
    """Run ``source.fetch`` in its own thread, so that a slow function or server cannot exceed the time limit."""
    done: list[Token | BaseException] = []

    def run() -> None:
        try:
            done.append(source.fetch(timeout_s))
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run, name="onceflow-token", daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    if not done:
        raise TokenUnavailableError(
            f"{capital(source.name)} returned no token within {timeout_s:g} s", "find out why it takes so long"
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]

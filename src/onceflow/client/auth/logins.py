"""Handles logins that a broker or a token provider has refused."""

from __future__ import annotations

from kafka.errors import SaslAuthenticationFailedError

from onceflow.client.auth.sources import TokenRefusedError, TokenUnavailableError
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.errors import AuthenticationFailedError, OnceflowError

_TOKEN_PATIENCE_S = 20.0  # so that a new task survives a short outage of the token source


def await_token(settings: ClientSettings, deadline: Deadline) -> None:
    """Get a first token before connecting. If that fails, the error says more than that of a connection would.

    Raises:
        AuthenticationFailedError: no token could be obtained.
    """
    tokens = settings.tokens
    patience = Deadline(deadline.capped(_TOKEN_PATIENCE_S), "a first token")
    while tokens is not None:
        try:
            tokens.token()
            return
        except (TokenUnavailableError, TokenRefusedError) as error:
            if isinstance(error, TokenRefusedError) or patience.remaining < 1.0:
                raise authentication_failed(settings, error) from error


def may_log_in_again(settings: ClientSettings, error: Exception) -> bool:
    """Whether to log in again, with a new token, after a broker has refused a login. A second refusal is final."""
    tokens = settings.tokens
    refused = isinstance(error, SaslAuthenticationFailedError)
    return tokens is not None and refused and not isinstance(error, TokenRefusedError) and tokens.refused(error)


def authentication_failed(settings: ClientSettings, error: Exception) -> OnceflowError:
    if isinstance(error, (TokenUnavailableError, TokenRefusedError)):
        return AuthenticationFailedError(error.what, next_step=error.next_step)
    if settings.tokens is not None:
        next_step = (
            "compare the issuer, audience, scope and expiry of the token with what the broker expects "
            "(sasl.oauthbearer.expected.issuer and .audience), and the clocks of the machines"
        )
    else:
        next_step = "check sasl.mechanism, user name and password, and that the user exists on the broker"
    return AuthenticationFailedError(
        f"The broker at {settings.bootstrap_servers} refused the credentials", detail=str(error), next_step=next_step
    )

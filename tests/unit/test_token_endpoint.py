"""The driver's token endpoint: it serves who knows its secret, and nobody else; the Java client finds it by options."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.client.auth.bearer_tokens import Tokens
from onceflow.client.auth.jaas import jaas_fields
from onceflow.client.auth.sources import ClientCredentials, Token, TokenRefusedError, TokenUnavailableError
from onceflow.client.settings import ClientSettings
from onceflow.errors import AuthenticationFailedError
from onceflow.spark import token_endpoint
from onceflow.spark.token_endpoint import TokenEndpoint, check_for_java, reader_options

JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJtZSIsImV4cCI6NDEwMjQ0NDgwMH0.c2ln"  # {"sub": "me", "exp": 4102444800}
NO_SUBJECT = "eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDB9.c2ln"
OAUTH = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}


class Source:
    name = "the test's source"

    def __init__(self, text: str = JWT) -> None:
        self.text = text
        self.error: Exception | None = None

    def fetch(self, timeout_s: float) -> Token:
        if self.error is not None:
            raise self.error
        return Token(self.text, time.time() + 60)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def endpoint(source: Source) -> Iterator[TokenEndpoint]:
    endpoint = TokenEndpoint(Tokens(source, {"pool": "p 1"}, patience_s=0.1))
    yield endpoint
    endpoint.close()


def client_of(endpoint: TokenEndpoint, **changed: str) -> ClientCredentials:
    fields = {**jaas_fields(endpoint.jaas), **changed}
    return ClientCredentials(endpoint.url, fields["clientId"], fields["clientSecret"])


def test_a_client_with_the_options_gets_the_token(endpoint: TokenEndpoint) -> None:
    token = client_of(endpoint).fetch(5)
    assert token.text == JWT
    assert 55 < token.expires_at - time.time() <= 60
    fields = jaas_fields(endpoint.jaas)
    assert fields["extension_pool"] == "p 1"
    assert len(fields["clientSecret"]) > 40
    assert fields["clientSecret"] not in repr(endpoint)


@pytest.mark.parametrize("changed", [{"clientSecret": "guess"}, {"clientId": "other"}, {"clientSecret": "gu\u00e9ss"}])
def test_others_get_nothing(endpoint: TokenEndpoint, changed: dict[str, str]) -> None:
    with pytest.raises(TokenRefusedError, match="HTTP 401"):
        client_of(endpoint, **changed).fetch(5)


def test_requests_of_another_kind(endpoint: TokenEndpoint) -> None:
    where = urllib.parse.urlsplit(endpoint.url)
    assert where.hostname == "127.0.0.1"
    for method, path, expected in (("POST", "/token", 401), ("POST", "/other", 401), ("GET", "/token", 501)):
        connection = http.client.HTTPConnection("127.0.0.1", where.port or 0, timeout=5)
        connection.request(method, path, body="x" * 100 if method == "POST" else None)
        response = connection.getresponse()
        assert response.status == expected
        assert JWT.encode() not in response.read()
        connection.close()


def test_no_token_to_give(endpoint: TokenEndpoint, source: Source, caplog: pytest.LogCaptureFixture) -> None:
    source.error = TokenUnavailableError("the provider is down")
    with pytest.raises(TokenUnavailableError, match=r"HTTP 503 .*the provider is down"):
        client_of(endpoint).fetch(5)
    assert "the provider is down" in caplog.text


@pytest.mark.parametrize(
    "text, problem", [("opaque", "is no JWT"), (NO_SUBJECT, "a JWT without sub"), ("a.b.c", "is no JWT")]
)
def test_tokens_that_the_java_client_does_not_take(text: str, problem: str) -> None:
    with pytest.raises(AuthenticationFailedError, match=problem) as caught:
        check_for_java(Tokens(Source(text)))
    assert "sasl.login.callback.handler.class" in caught.value.next_step
    assert text not in str(caught.value)


def test_no_token_for_the_reader(source: Source) -> None:
    source.error = TokenRefusedError("wrong secret", "see the secret")
    with pytest.raises(AuthenticationFailedError, match="wrong secret") as caught:
        check_for_java(Tokens(source))
    assert caught.value.next_step == "see the secret"


# ---- options of the reader -------------------------------------------------------------------------------


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session with a local master whose JVM has the classes of Spark 4.2."""
    monkeypatch.setattr("onceflow.spark.jvm.has_class", lambda jvm, name: ".secured." not in name)
    conf = {"spark.master": "local[2]", "spark.driver.host": "192.0.2.1"}
    context = SimpleNamespace(getConf=lambda: conf, _jvm=None)
    return SimpleNamespace(sparkContext=context)


def test_the_reader_gets_tokens_of_a_function_from_the_driver(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClientSettings("h:1", {**OAUTH, "onceflow.token.provider": "no_module_yet:token"})
    assert settings.tokens is not None
    monkeypatch.setattr(settings.tokens, "source", Source())
    found = reader_options(spark, settings)
    endpoint = token_endpoint.endpoint_for(spark, settings.tokens)
    try:
        assert found == {
            "kafka.sasl.login.callback.handler.class": token_endpoint._HANDLERS[0],
            "kafka.sasl.oauthbearer.token.endpoint.url": endpoint.url,
            "kafka.sasl.jaas.config": endpoint.jaas,
        }
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert reader_options(spark, settings) == found, "one endpoint for all flows of a process"
    finally:
        endpoint.close()


def test_the_reader_asks_a_token_endpoint_itself(spark: Any) -> None:
    options = {
        **OAUTH,
        "sasl.oauthbearer.token.endpoint.url": "https://idp/",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": "hush",
    }
    found = reader_options(spark, ClientSettings("h:1", options))
    assert found == {"kafka.sasl.login.callback.handler.class": token_endpoint._HANDLERS[0]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "p"},
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "AWS_MSK_IAM", "onceflow.token.provider": "m:f"},
        {**OAUTH, "onceflow.token.provider": "m:f", "sasl.login.callback.handler.class": "com.example.Login"},
    ],
    ids=range(4),
)
def test_readers_that_need_nothing_more(options: dict[str, str]) -> None:
    assert reader_options(None, ClientSettings("h:1", options)) == {}  # type: ignore[arg-type]

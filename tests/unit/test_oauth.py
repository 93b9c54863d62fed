"""Tokens: fetched from each kind of source, kept while valid, never shown, and never waited for without end."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onceflow.client.auth import bearer_tokens
from onceflow.client.auth.bearer_tokens import Tokens
from onceflow.client.auth.sources import (
    ClientCredentials,
    Provider,
    Token,
    TokenFile,
    TokenRefusedError,
    TokenUnavailableError,
    shown_url,
)

SECRET = "s3cret/+ not to be shown"


def jwt(**claims: Any) -> str:
    def part(content: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part(claims)}.c2lnbmF0dXJl"


# ---- the token endpoint ----------------------------------------------------------------------------------


class Endpoint:
    """Answers POST requests with what ``answer`` says, and remembers them."""

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[int, dict[str, str], bytes]] = lambda: (200, {}, b"{}")
        self.requests: list[tuple[str, dict[str, str], str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                outer.requests.append((self.path, dict(self.headers), body))
                status, headers, data = outer.answer()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                outer.requests.append(("GET " + self.path, dict(self.headers), ""))
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/oauth/token"

    def gives(self, status: int = 200, **body: Any) -> None:
        self.answer = lambda: (status, {}, json.dumps(body).encode())

    def client(self, **changed: Any) -> ClientCredentials:
        return ClientCredentials(**{"endpoint": self.url, "client_id": "me", "client_secret": SECRET, **changed})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.01,))
    thread.start()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()
    thread.join()


def test_the_request_is_as_the_java_client_sends_it(endpoint: Endpoint) -> None:
    endpoint.gives(access_token="abc", expires_in=30)
    before = time.time()
    token = endpoint.client(scope="kafka write").fetch(5)
    assert token.text == "abc"
    assert 29 < token.expires_at - before <= 31
    ((path, headers, body),) = endpoint.requests
    assert path == "/oauth/token"
    assert urllib.parse.parse_qs(body) == {"grant_type": ["client_credentials"], "scope": ["kafka write"]}
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode() == f"me:{SECRET}"
    assert headers["Content-Type"] == "application/x-www-form-urlencoded"


def test_encoded_credentials(endpoint: Endpoint) -> None:
    endpoint.gives(access_token="abc", expires_in=30)
    endpoint.client(client_id="a:b", urlencode=True).fetch(5)
    sent = base64.b64decode(endpoint.requests[0][1]["Authorization"].removeprefix("Basic ")).decode()
    assert sent == "a%3Ab:s3cret%2F%2B+not+to+be+shown"


def test_the_expiry_of_a_jwt_counts_where_the_endpoint_says_none(endpoint: Endpoint) -> None:
    endpoint.gives(access_token=jwt(exp=1234.5))
    assert endpoint.client().fetch(5).expires_at == 1234.5
    endpoint.gives(access_token="opaque")
    with pytest.raises(TokenRefusedError, match="does not say when it expires"):
        endpoint.client().fetch(5)


@pytest.mark.parametrize(
    "status, kind, step",
    [
        (400, TokenRefusedError, "client id"),
        (401, TokenRefusedError, "client id"),
        (403, TokenRefusedError, "client id"),
        (404, TokenRefusedError, "URL of the token endpoint"),
        (429, TokenUnavailableError, "is up"),
        (500, TokenUnavailableError, "is up"),
        (503, TokenUnavailableError, "is up"),
    ],
)
def test_what_the_endpoint_refuses(endpoint: Endpoint, status: int, kind: type[Any], step: str) -> None:
    endpoint.gives(status, error="invalid_client", error_description=f"no\n{SECRET}")
    with pytest.raises(kind) as caught:
        endpoint.client().fetch(5)
    assert f"answered HTTP {status} (invalid_client: no?***)" in caught.value.what
    assert endpoint.url in caught.value.what
    assert step in caught.value.next_step


def test_a_refusal_without_json(endpoint: Endpoint) -> None:
    endpoint.answer = lambda: (401, {}, b"<html>")
    with pytest.raises(TokenRefusedError, match=r"answered HTTP 401$"):
        endpoint.client().fetch(5)


def test_redirects_are_not_followed(endpoint: Endpoint) -> None:
    """The secret would go to whoever the endpoint names."""
    endpoint.answer = lambda: (302, {"Location": "/elsewhere"}, b"")
    with pytest.raises(TokenRefusedError, match="a redirect"):
        endpoint.client().fetch(5)
    assert [path for path, _, _ in endpoint.requests] == ["/oauth/token"]


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'"x"', b"{}", b'{"access_token": 7}', b'{"access_token": ""}']
)
def test_answers_without_a_token(endpoint: Endpoint, body: bytes) -> None:
    endpoint.answer = lambda: (200, {}, body)
    with pytest.raises(TokenUnavailableError) as caught:
        endpoint.client().fetch(5)
    assert "token.endpoint.url" in caught.value.next_step


def test_nobody_listens() -> None:
    source = ClientCredentials("http://127.0.0.1:1/token", "me", SECRET)
    with pytest.raises(TokenUnavailableError, match="cannot be reached: ConnectionRefusedError") as caught:
        source.fetch(5)
    assert "https.ca.location" in caught.value.next_step


def test_a_plain_server_behind_an_https_url(endpoint: Endpoint) -> None:
    endpoint.gives(access_token="abc", expires_in=30)
    with pytest.raises(TokenUnavailableError, match="cannot be reached: SSLError"):
        endpoint.client(endpoint=endpoint.url.replace("http:", "https:")).fetch(5)


def test_a_missing_file_of_authorities(endpoint: Endpoint) -> None:
    with pytest.raises(TokenUnavailableError, match="cannot be reached: FileNotFoundError"):
        endpoint.client(endpoint="https://127.0.0.1:1/", ca_file="/no/such/ca.pem").fetch(5)


def test_urls_are_shown_without_what_may_be_secret() -> None:
    assert shown_url("https://user:pw@host:1/a/b?key=secret#x") == "https://host:1/a/b"
    source = ClientCredentials("https://user:pw@host:1/a?key=secret", "me", SECRET)
    assert source.name == "the token endpoint https://host:1/a"
    assert SECRET not in repr(source)
    assert "pw" not in repr(source)


# ---- files and functions ---------------------------------------------------------------------------------


def test_a_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(jwt(exp=10) + "\n")
    source = TokenFile(str(file))
    assert source.fetch(1).expires_at == 10
    file.write_text(jwt(exp=20))
    assert source.fetch(1) == Token(jwt(exp=20), 20.0)


@pytest.mark.parametrize("content", [None, b"\xff", b"opaque", b""])
def test_files_without_a_token(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises((TokenUnavailableError, TokenRefusedError), match=str(file)):
        TokenFile(str(file)).fetch(1)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Provider]:
    """``function(f)``: a provider that calls it."""

    def make(called: Callable[[], Any]) -> Provider:
        module = ModuleType("users_tokens")
        module.token = called  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_tokens", module)
        return Provider("users_tokens:token")

    return make


def test_what_a_function_may_return(function: Any) -> None:
    assert function(lambda: jwt(exp=77)).fetch(1).expires_at == 77
    before = time.time()
    token = function(lambda: ("opaque", 60)).fetch(1)
    assert token.text == "opaque"
    assert 59 < token.expires_at - before < 62


@pytest.mark.parametrize("given", [None, b"bytes", 7, ("a", "b"), ("a", True), (1, 2), ("a", 1, 2), "opaque", ""])
def test_what_a_function_may_not_return(function: Any, given: Any) -> None:
    with pytest.raises(TokenRefusedError) as caught:
        function(lambda: given).fetch(1)
    assert "users_tokens:token" in caught.value.what
    assert "return" in caught.value.next_step


def test_what_a_function_raises_is_not_quoted(function: Any) -> None:
    def fails() -> str:
        raise KeyError(SECRET)

    with pytest.raises(TokenUnavailableError, match=r"raised KeyError at test_oauth.py:\d+") as caught:
        function(fails).fetch(1)
    assert SECRET not in str(caught.value) + caught.value.next_step
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "path, problem",
    [
        ("no_such_module:token", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_function", "AttributeError"),
        ("json:__doc__", "is not callable"),
        ("json:", "AttributeError"),
    ],
)
def test_functions_that_cannot_be_found(path: str, problem: str) -> None:
    with pytest.raises(TokenRefusedError, match=problem) as caught:
        Provider(path).fetch(1)
    assert repr(path) in caught.value.what


# ---- one valid token -------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


class Numbered:
    """Tokens ``t1``, ``t2``, ... that live for ``lifetime_s``, or an error."""

    name = "the test's source"

    def __init__(self, clock: Clock, lifetime_s: float = 100.0) -> None:
        self.clock, self.lifetime_s, self.count = clock, lifetime_s, 0
        self.error: Exception | None = None

    def fetch(self, timeout_s: float) -> Token:
        self.count += 1
        if self.error is not None:
            raise self.error
        return Token(f"t{self.count}", self.clock.now + self.lifetime_s)


def make(lifetime_s: float = 100.0) -> tuple[Clock, Numbered, Tokens]:
    clock = Clock()
    source = Numbered(clock, lifetime_s)
    return clock, source, Tokens(source, clock=clock, sleep=clock.sleep)


def test_a_token_is_kept_until_three_quarters_of_its_life() -> None:
    clock, source, tokens = make()
    assert [tokens.token() for _ in range(3)] == ["t1"] * 3
    clock.now += 74.9
    assert tokens.token() == "t1"
    clock.now += 0.2
    assert tokens.token() == "t2"
    assert source.count == 2


def test_a_source_that_repeats_its_token_is_not_asked_all_the_time() -> None:
    clock = Clock()
    asked = []

    class Same:
        name = "a cache"

        def fetch(self, timeout_s: float) -> Token:
            asked.append(clock.now)
            return Token("same", 1100.0)

    tokens = Tokens(Same(), clock=clock, sleep=clock.sleep)
    while clock.now < 1099:
        assert tokens.token() == "same"
        clock.now += 0.1
    assert len(asked) < 8


def test_a_failed_renewal_leaves_the_old_token() -> None:
    clock, source, tokens = make()
    tokens.token()
    source.error = TokenUnavailableError("down")
    clock.now += 80
    assert tokens.token() == "t1"
    assert tokens.token() == "t1"
    assert (source.count, clock.slept) == (2, 0), "asked once, and nobody waits"
    clock.now += 3
    assert tokens.token() == "t1"
    assert source.count == 3
    source.error = None
    clock.now += 3
    assert tokens.token() == "t4"


def test_without_a_valid_token_it_waits_for_a_while() -> None:
    clock, source, tokens = make()
    tokens.token()
    source.error = TokenUnavailableError("down")
    clock.now += 100
    with pytest.raises(TokenUnavailableError, match="down"):
        tokens.token()
    assert 8 < clock.slept <= 10
    assert source.count < 15


def test_a_refusal_of_the_source_is_not_repeated() -> None:
    clock, source, tokens = make()
    source.error = TokenRefusedError("wrong secret")
    with pytest.raises(TokenRefusedError, match="wrong secret"):
        tokens.token()
    assert (source.count, clock.slept) == (1, 0)


def test_an_expired_token_is_no_token() -> None:
    _, _, tokens = make(lifetime_s=-5.0)
    with pytest.raises(TokenUnavailableError, match="expired 5 s ago") as caught:
        tokens.token()
    assert "clocks" in caught.value.next_step


@pytest.mark.parametrize("text", ["", "Bearer abc", "abc\n", "abc\x01host=x", "äbc", "a,b"])
def test_what_is_no_bearer_token(text: str) -> None:
    class Odd:
        name = "odd"

        def fetch(self, timeout_s: float) -> Token:
            return Token(text, time.time() + 60)

    with pytest.raises(TokenRefusedError, match="no bearer token") as caught:
        Tokens(Odd()).token()
    assert not text or text not in str(caught.value)


def test_a_refused_token_is_replaced_once() -> None:
    clock, _, tokens = make()
    assert tokens.token() == "t1"
    refusal = ValueError()
    assert tokens.refused(refusal)
    assert tokens.refused(refusal), "others that waited for the same login get the same answer"
    assert tokens.token() == "t2"
    assert not tokens.refused(ValueError())
    clock.now += 31
    assert tokens.refused(ValueError())


def test_many_threads_ask_the_source_once() -> None:
    asked = []

    class Slow:
        name = "slow"

        def fetch(self, timeout_s: float) -> Token:
            asked.append(1)
            time.sleep(0.1)
            return Token("t", time.time() + 60)

    tokens = Tokens(Slow())
    threads = [threading.Thread(target=tokens.token) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]


def test_a_source_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bearer_tokens, "_ONE_CALL_S", 0.1)
    release = threading.Event()

    class Stuck:
        name = "stuck"

        def fetch(self, timeout_s: float) -> Token:
            release.wait(30)
            raise TokenUnavailableError("late")

    began = time.monotonic()
    with pytest.raises(TokenUnavailableError, match=r"Stuck returned no token within 0\.1 s"):
        Tokens(Stuck(), patience_s=0.3).token()
    release.set()
    assert time.monotonic() - began < 5


def test_equal_sources_share_their_token() -> None:
    source = ClientCredentials("http://h/", "me", SECRET)
    tokens = bearer_tokens.shared(source, {"a": "b"})
    assert bearer_tokens.shared(ClientCredentials("http://h/", "me", SECRET), {"a": "b"}) is tokens
    assert bearer_tokens.shared(source) is not tokens
    assert bearer_tokens.shared(ClientCredentials("http://h/", "me", SECRET, scope="x"), {"a": "b"}) is not tokens
    assert tokens.extensions() == {"a": "b"}
    assert SECRET not in repr(tokens)

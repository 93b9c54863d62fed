"""The downloads of the service `files`, from servers that err."""

from __future__ import annotations

import gzip
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from downloads import Download, Downloads, Failure, Limits, Places

PACKED = gzip.compress(b"content" * 1000)
LIMITS = Limits(attempts=3, backoff_s=0.01, timeout_s=0.3, deadline_s=2.0)
Answer = Callable[[BaseHTTPRequestHandler, int], None]


@contextmanager
def serve(answer: Answer) -> Iterator[str]:
    """A server for one test: ``answer(handler, n)`` answers the nth request. Its host and port."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            requests.append(self.path)
            try:
                answer(self, len(requests))
            except OSError:
                pass

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.block_on_close = False


def reply(to: BaseHTTPRequestHandler, content: bytes = b"", status: int = 200, **headers: str) -> None:
    to.send_response(status)
    for name, value in {"Content_Length": str(len(content)), **headers}.items():
        if value:
            to.send_header(name.replace("_", "-"), value)
    to.end_headers()
    to.wfile.write(content)


def get(
    answer: Answer, link: str = "/a.csv", *, limits: Limits = LIMITS, folder: Path | None = None
) -> bytes | Failure:
    """The content, or why there is none."""
    with serve(answer) as place:
        source = Downloads(Places(frozenset({place})), limits, None if folder is None else str(folder))
        return content_of(source.get(f"http://{place}{link}"))


def content_of(result: Download | Failure) -> bytes | Failure:
    if isinstance(result, Failure):
        return result
    with result.file as file:
        return file.read()


def content_at(root: Path, link: str) -> bytes | Failure:
    """As `get`, of a link that is a path in a folder."""
    return content_of(Downloads(Places(root=str(root)), LIMITS).get(link))


def problem_of(result: bytes | Failure) -> tuple[str, str, int]:
    assert isinstance(result, Failure), result
    return type(result.error).__name__, str(result.error), result.attempts


def test_a_download() -> None:
    asked = []

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        asked.append(to.path)
        reply(to, b"content")

    assert get(answer, "/a.csv?day=1") == b"content"
    assert asked == ["/a.csv?day=1"]


def test_a_server_that_recovers_is_asked_again() -> None:
    assert get(lambda to, n: reply(to, b"content", 503 if n < 3 else 200)) == b"content"


@pytest.mark.parametrize("status, attempts", [(500, 3), (503, 3), (429, 3), (404, 1), (403, 1), (410, 1), (206, 1)])
def test_which_status_is_worth_another_try(status: int, attempts: int) -> None:
    answer = get(lambda to, n: reply(to, b"sorry", status))
    assert problem_of(answer) == ("StatusError", f"HTTP status {status}", attempts)


def test_a_truncated_file_is_nothing() -> None:
    answer = get(lambda to, n: reply(to, b"half", Content_Length="8"))
    assert problem_of(answer) == ("TruncatedError", "4 bytes are missing", 3)


def test_two_contents_are_never_mixed() -> None:
    """The first answer is cut; the second one has another content, which is all there is afterwards."""

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"old o" if n == 1 else b"new new", Content_Length="7")

    assert get(answer) == b"new new"


def test_chunks() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"", Content_Length="", Transfer_Encoding="chunked")
        to.wfile.write(b"5\r\nhello\r\n6\r\n world\r\n" + (b"0\r\n\r\n" if n > 1 else b""))  # the first one is cut

    assert get(answer) == b"hello world"


@pytest.mark.parametrize("link", ["/a.csv", "/a.csv.gz"])
def test_a_file_without_a_length_is_refused(link: str) -> None:
    """Packed, too: gzip has a checksum of what is there, and may have a further part that is not."""
    name, message, attempts = problem_of(get(lambda to, n: reply(to, PACKED, Content_Length=""), link))
    assert (name, attempts) == ("NoLengthError", 1)
    assert "Content-Length" in message


@pytest.mark.parametrize("link, headers", [("/a.csv.gz", {}), ("/a", {"Content_Type": "application/gzip"}),
                                           ("/a.csv", {"Content_Encoding": "gzip"})])  # fmt: skip
def test_gzip(link: str, headers: dict[str, str]) -> None:
    assert get(lambda to, n: reply(to, PACKED, **headers), link) == b"content" * 1000


def test_gzip_of_several_parts() -> None:
    assert get(lambda to, n: reply(to, PACKED + gzip.compress(b"more")), "/a.gz") == b"content" * 1000 + b"more"


@pytest.mark.parametrize(
    "content, error",
    [
        (PACKED[:-9], "EOFError"),
        (PACKED[:-8] + b"\0" * 8, "BadGzipFile"),
        (b"id,account", "BadGzipFile"),
        (PACKED[:20] + b"\xff" * 10 + PACKED[30:], "error"),
    ],
    ids=["no end", "zeros at the end", "plain text", "damaged"],  # the bytes carry the time, which differs per process
)
def test_damaged_gzip_is_nothing(content: bytes, error: str) -> None:
    assert problem_of(get(lambda to, n: reply(to, content), "/a.csv.gz"))[::2] == (error, 3)


def test_an_unknown_encoding_is_refused() -> None:
    assert "br" in problem_of(get(lambda to, n: reply(to, b"x", Content_Encoding="br")))[1]


def test_a_file_that_is_too_large() -> None:
    limits = Limits(max_bytes=100)
    assert problem_of(get(lambda to, n: reply(to, b"x" * 101), limits=limits))[::2] == ("TooLargeError", 1)
    assert get(lambda to, n: reply(to, b"x" * 100), limits=limits) == b"x" * 100


def test_a_small_file_that_is_large_when_it_is_unpacked(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    limits = Limits(max_bytes=1_000_000)
    assert problem_of(get(lambda to, n: reply(to, bomb), "/a.gz", limits=limits))[0] == "TooLargeError"


def test_redirects_are_followed() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"here" if n == 3 else b"", 200 if n == 3 else 302, Location=f"/next-{n}")

    assert get(answer) == b"here"


@pytest.mark.parametrize(
    "location, error",
    [
        ("/a.csv", "FinalError"),  # in circles
        ("http://169.254.169.254/", "RefusedError"),
        ("http://localhost:1/", "RefusedError"),
        ("file:///etc/passwd", "RefusedError"),
        ("http://[bad", "RefusedError"),
        ("/\xe4.csv", "RefusedError"),
    ],
)
def test_redirects_lead_nowhere_else(location: str, error: str) -> None:
    assert problem_of(get(lambda to, n: reply(to, b"", 302, Location=location)))[::2] == (error, 1)


def patiently(to: BaseHTTPRequestHandler, parts: Iterator[bytes], pause_s: float) -> None:
    for part in parts:
        to.wfile.write(part)
        time.sleep(pause_s)


def test_a_server_that_stalls_is_asked_again() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"ha" if n == 1 else b"half", Content_Length="4")
        if n == 1:
            time.sleep(1)

    assert get(answer) == b"half"


@pytest.mark.parametrize("link", ["/a.csv", "/a.csv.gz"])
def test_a_byte_now_and_then_does_not_hold_a_batch(link: str) -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        reply(to, b"", Content_Length="1000")
        patiently(to, (bytes([byte]) for byte in islice(PACKED, 40)), 0.1)

    began = time.monotonic()
    limits = Limits(timeout_s=0.5, deadline_s=1.0)
    assert problem_of(get(answer, link, limits=limits)) == ("TooSlowError", "not complete after 1 s", 1)
    assert time.monotonic() - began < 3


def test_headers_that_never_end_do_not_hold_a_batch() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\n")
        patiently(to, (b"X" for _ in range(40)), 0.1)

    began = time.monotonic()
    assert problem_of(get(answer, limits=Limits(timeout_s=0.5, deadline_s=1.0)))[0] == "TooSlowError"
    assert time.monotonic() - began < 3


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    result = Downloads(Places(frozenset({place})), LIMITS).get(f"http://{place}/a.csv")
    assert problem_of(content_of(result))[::2] == ("ConnectionRefusedError", 3)


def test_https_checks_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except OSError:
        pytest.skip("there is no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply(self, b"secret")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda request, client: None  # type: ignore[assignment,misc]  # a client that hangs up
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            link = f"https://localhost:{server.server_port}/a.csv"
            source = Downloads(Places(frozenset({f"localhost:{server.server_port}"})), LIMITS)
            assert problem_of(content_of(source.get(link)))[::2] == ("SSLCertVerificationError", 3)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            assert content_of(source.get(link)) == b"secret"
        finally:
            server.shutdown()
            thread.join()

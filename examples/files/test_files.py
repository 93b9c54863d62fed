"""The service `files`: its parts without Spark and Kafka, then the whole demo."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import downloads
import pyarrow as pa
import pytest
from bank_rows import BadFileError, format_of, read_rows
from downloads import Download, Downloads, Failure, Limits, Places, RefusedError
from fetch import Fetch, LinkError, link_of
from files import Once

from onceflow import Record
from onceflow.testing.processor_driver import ProcessorDriver

PACKED = gzip.compress(b"content" * 1000)
LIMITS = Limits(attempts=3, backoff_s=0.01, timeout_s=0.3, deadline_s=2.0)
Answer = Callable[[BaseHTTPRequestHandler, int], None]


# ---- a link passes once ------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> ProcessorDriver:
    places = Places(frozenset({"example.com", "127.0.0.1:8080"}), str(tmp_path))
    return ProcessorDriver(Once(places, "skipped"), on_error="dead-letter", dead_letter_topic="failed")


def _record(link: object, **more: object) -> bytes:
    return json.dumps({"link": link, **more}).encode()


LINK = "https://example.com/a.csv"


def test_a_link_passes_once(driver: ProcessorDriver) -> None:
    first, copy = _record(LINK), _record(LINK, note="once more")
    assert [record.value for record in driver.send(LINK.encode(), first)] == [first]
    assert driver.send(LINK.encode(), copy) == [Record(LINK.encode(), copy, topic="skipped")]
    assert driver.state(LINK.encode()) == 2


def test_two_copies_in_one_batch_pass_once(driver: ProcessorDriver) -> None:
    outputs = driver.send_many([(LINK.encode(), _record(LINK)), (LINK.encode(), _record(LINK))])
    assert [record.topic == "skipped" for record in outputs] == [False, True]


def test_again_passes_again(driver: ProcessorDriver) -> None:
    driver.send(LINK.encode(), _record(LINK))
    assert [record.topic for record in driver.send(LINK.encode(), _record(LINK, again=True))] != ["skipped"]
    assert [record.topic for record in driver.send(LINK.encode(), _record(LINK, again="yes"))] == ["skipped"]


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "no value"),
        (b"http://example.com/a.csv", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"[]", "not like"),
        (b"{}", "not like"),
        (_record(17), "not like"),
        (_record(None), "not like"),
        (_record("https://example.com/\n"), "printable"),
        (_record("https://example.com/\ud800"), "printable"),
        (_record(LINK, note="x" * 300_000), "more than 10000 bytes"),
        (b'{"link": "https://example.com/a", "link": "https://example.com/b"}', "more than one link"),
    ],
)
def test_a_bad_record_is_a_dead_letter(driver: ProcessorDriver, value: bytes | None, message: str) -> None:
    assert driver.send(b"https://example.com/a", value) == []
    [dead_letter] = driver.dead_letters
    assert dead_letter.value == value
    headers = dict(dead_letter.headers)
    assert headers["onceflow.error.class"] == b"LinkError"
    assert message in (headers["onceflow.error.message"] or b"").decode()
    assert driver.states == {}


def test_a_bad_record_does_no_harm_to_others(driver: ProcessorDriver) -> None:
    good = (LINK.encode(), _record(LINK))
    assert len(driver.send_many([(LINK.encode(), b"no JSON"), good, (b"", None)])) == 1
    assert len(driver.dead_letters) == 2


@pytest.mark.parametrize(
    "link",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost/a.csv",
        "http://127.0.0.1/a.csv",
        "http://127.0.0.1:8081/a.csv",
        "http://[::1]:8080/a.csv",
        "https://example.com.evil.org/a.csv",
        "https://example.com@evil.org/a.csv",
        "https://user:secret@example.com/a.csv",
        "https://example.com:8443/a.csv",
        "https://example.com:99999/a.csv",
        "https://example.com/ä.csv",
        "https:///a.csv",
        "file:///etc/passwd",
        "ftp://example.com/a.csv",
        "data:text/csv,id",
        "//example.com/a.csv",
        "/etc/passwd",
        "../outside.csv",
        "sub/../../outside.csv",
        "",
    ],
)
def test_a_link_to_elsewhere_is_refused(driver: ProcessorDriver, link: str) -> None:
    assert driver.send(link.encode(), _record(link)) == []
    assert dict(driver.dead_letters[0].headers)["onceflow.error.class"] == b"RefusedError"


def test_nothing_is_allowed_unless_it_is_named() -> None:
    for link in (LINK, "a.csv"):
        with pytest.raises(RefusedError):
            Places().check(link)


def test_a_symbolic_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.csv").write_text("secret")
    (inside / "a.csv").symlink_to(tmp_path / "secret.csv")
    with pytest.raises(RefusedError, match="out of the folder"):
        Places(root=str(inside)).check("a.csv")


def test_a_symbolic_link_in_circles_leads_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("b.csv")
    (tmp_path / "b.csv").symlink_to("a.csv")
    assert isinstance(_path(tmp_path, "a.csv"), Failure)


@pytest.mark.parametrize("link", ["a.csv", "sub/../a.csv", "https://example.com", "HTTPS://EXAMPLE.COM/a?b=c"])
def test_what_is_named_is_allowed(tmp_path: Path, link: str) -> None:
    Places(frozenset({"example.com"}), str(tmp_path)).check(link)


def test_what_a_link_says() -> None:
    assert link_of(_record("a.csv")) == ("a.csv", False)
    assert link_of(_record("a.csv", again=True)) == ("a.csv", True)
    with pytest.raises(LinkError):
        link_of(None)


# ---- downloads ---------------------------------------------------------------------------------------


@contextmanager
def _server(answer: Answer) -> Iterator[str]:
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


def _reply(to: BaseHTTPRequestHandler, content: bytes = b"", status: int = 200, **headers: str) -> None:
    to.send_response(status)
    for name, value in {"Content_Length": str(len(content)), **headers}.items():
        if value:
            to.send_header(name.replace("_", "-"), value)
    to.end_headers()
    to.wfile.write(content)


def _get(
    answer: Answer, link: str = "/a.csv", *, limits: Limits = LIMITS, folder: Path | None = None
) -> bytes | Failure:
    """The content, or why there is none."""
    with _server(answer) as place:
        source = Downloads(Places(frozenset({place})), limits, None if folder is None else str(folder))
        return _content(source.get(f"http://{place}{link}"))


def _content(result: Download | Failure) -> bytes | Failure:
    if isinstance(result, Failure):
        return result
    with result.file as file:
        return file.read()


def _problem(result: bytes | Failure) -> tuple[str, str, int]:
    assert isinstance(result, Failure), result
    return type(result.error).__name__, str(result.error), result.attempts


def test_a_download() -> None:
    asked = []

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        asked.append(to.path)
        _reply(to, b"content")

    assert _get(answer, "/a.csv?day=1") == b"content"
    assert asked == ["/a.csv?day=1"]


def test_a_server_that_recovers_is_asked_again() -> None:
    assert _get(lambda to, n: _reply(to, b"content", 503 if n < 3 else 200)) == b"content"


@pytest.mark.parametrize("status, attempts", [(500, 3), (503, 3), (429, 3), (404, 1), (403, 1), (410, 1), (206, 1)])
def test_which_status_is_worth_another_try(status: int, attempts: int) -> None:
    answer = _get(lambda to, n: _reply(to, b"sorry", status))
    assert _problem(answer) == ("StatusError", f"HTTP status {status}", attempts)


def test_a_truncated_file_is_nothing() -> None:
    answer = _get(lambda to, n: _reply(to, b"half", Content_Length="8"))
    assert _problem(answer) == ("TruncatedError", "4 bytes are missing", 3)


def test_two_contents_are_never_mixed() -> None:
    """The first answer is cut; the second one has another content, which is all there is afterwards."""

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"old o" if n == 1 else b"new new", Content_Length="7")

    assert _get(answer) == b"new new"


def test_chunks() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"", Content_Length="", Transfer_Encoding="chunked")
        to.wfile.write(b"5\r\nhello\r\n6\r\n world\r\n" + (b"0\r\n\r\n" if n > 1 else b""))  # the first one is cut

    assert _get(answer) == b"hello world"


@pytest.mark.parametrize("link", ["/a.csv", "/a.csv.gz"])
def test_a_file_without_a_length_is_refused(link: str) -> None:
    """Packed, too: gzip has a checksum of what is there, and may have a further part that is not."""
    name, message, attempts = _problem(_get(lambda to, n: _reply(to, PACKED, Content_Length=""), link))
    assert (name, attempts) == ("NoLengthError", 1)
    assert "Content-Length" in message


@pytest.mark.parametrize("link, headers", [("/a.csv.gz", {}), ("/a", {"Content_Type": "application/gzip"}),
                                           ("/a.csv", {"Content_Encoding": "gzip"})])  # fmt: skip
def test_gzip(link: str, headers: dict[str, str]) -> None:
    assert _get(lambda to, n: _reply(to, PACKED, **headers), link) == b"content" * 1000


def test_gzip_of_several_parts() -> None:
    assert _get(lambda to, n: _reply(to, PACKED + gzip.compress(b"more")), "/a.gz") == b"content" * 1000 + b"more"


@pytest.mark.parametrize(
    "content, error",
    [
        (PACKED[:-9], "EOFError"),
        (PACKED[:-8] + b"\0" * 8, "BadGzipFile"),
        (b"id,account", "BadGzipFile"),
        (PACKED[:20] + b"\xff" * 10 + PACKED[30:], "error"),
    ],
)
def test_damaged_gzip_is_nothing(content: bytes, error: str) -> None:
    assert _problem(_get(lambda to, n: _reply(to, content), "/a.csv.gz"))[::2] == (error, 3)


def test_an_unknown_encoding_is_refused() -> None:
    assert "br" in _problem(_get(lambda to, n: _reply(to, b"x", Content_Encoding="br")))[1]


def test_a_file_that_is_too_large() -> None:
    limits = Limits(max_bytes=100)
    assert _problem(_get(lambda to, n: _reply(to, b"x" * 101), limits=limits))[::2] == ("TooLargeError", 1)
    assert _get(lambda to, n: _reply(to, b"x" * 100), limits=limits) == b"x" * 100


def test_a_small_file_that_is_large_when_it_is_unpacked(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    limits = Limits(max_bytes=1_000_000)
    assert _problem(_get(lambda to, n: _reply(to, bomb), "/a.gz", limits=limits))[0] == "TooLargeError"


def test_redirects_are_followed() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"here" if n == 3 else b"", 200 if n == 3 else 302, Location=f"/next-{n}")

    assert _get(answer) == b"here"


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
    assert _problem(_get(lambda to, n: _reply(to, b"", 302, Location=location)))[::2] == (error, 1)


def _patiently(to: BaseHTTPRequestHandler, parts: Iterator[bytes], pause_s: float) -> None:
    for part in parts:
        to.wfile.write(part)
        time.sleep(pause_s)


def test_a_server_that_stalls_is_asked_again() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"ha" if n == 1 else b"half", Content_Length="4")
        if n == 1:
            time.sleep(1)

    assert _get(answer) == b"half"


@pytest.mark.parametrize("link", ["/a.csv", "/a.csv.gz"])
def test_a_byte_now_and_then_does_not_hold_a_batch(link: str) -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"", Content_Length="1000")
        _patiently(to, (bytes([byte]) for byte in islice(PACKED, 40)), 0.1)

    began = time.monotonic()
    limits = Limits(timeout_s=0.5, deadline_s=1.0)
    assert _problem(_get(answer, link, limits=limits)) == ("TooSlowError", "not complete after 1 s", 1)
    assert time.monotonic() - began < 3


def test_headers_that_never_end_do_not_hold_a_batch() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\n")
        _patiently(to, (b"X" for _ in range(40)), 0.1)

    began = time.monotonic()
    assert _problem(_get(answer, limits=Limits(timeout_s=0.5, deadline_s=1.0)))[0] == "TooSlowError"
    assert time.monotonic() - began < 3


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    result = Downloads(Places(frozenset({place})), LIMITS).get(f"http://{place}/a.csv")
    assert _problem(_content(result))[::2] == ("ConnectionRefusedError", 3)


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
            _reply(self, b"secret")

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
            assert _problem(_content(source.get(link)))[::2] == ("SSLCertVerificationError", 3)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            assert _content(source.get(link)) == b"secret"
        finally:
            server.shutdown()
            thread.join()


# ---- files of a folder -------------------------------------------------------------------------------


def _path(root: Path, link: str) -> bytes | Failure:
    return _content(Downloads(Places(root=str(root)), LIMITS).get(link))


def test_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"content")
    (tmp_path / "a.csv.gz").write_bytes(PACKED)
    assert _path(tmp_path, "a.csv") == b"content"
    assert _path(tmp_path, str(tmp_path / "a.csv")) == b"content"
    assert _path(tmp_path, "a.csv.gz") == b"content" * 1000


def test_a_path_without_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for link in ("nothing.csv", ".", "pipe.csv"):
        assert _problem(_path(tmp_path, link)) == ("FinalError", "there is no such file", 1)
    assert isinstance(_path(tmp_path, "x" * 400), Failure)


def test_a_file_that_is_written_to_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"content")
    make = downloads.tempfile.TemporaryFile
    times = iter(range(10))

    def grow(**options: Any) -> Any:
        # Called before the file is opened; the last part of it is written when that has happened.
        number = next(times)
        file = make(**options)
        if number < 2:
            write = file.write
            file = _Wrapped(file, lambda chunk: (path.write_bytes(b"content, more" * (number + 1)), write(chunk)))
        return file

    monkeypatch.setattr(downloads.tempfile, "TemporaryFile", grow)
    assert _path(tmp_path, "a.csv") == b"content, more" * 2


class _Wrapped:
    """A file whose ``write`` is another one."""

    def __init__(self, file: Any, write: Callable[[bytes], Any]) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


# ---- many at a time ----------------------------------------------------------------------------------


def test_no_more_than_allowed_are_under_work(tmp_path: Path) -> None:
    for n in range(20):
        (tmp_path / f"{n}.csv").write_bytes(b"%d" % n)
    taken = []

    def items() -> Iterator[str]:
        for n in range(20):
            taken.append(n)
            yield f"{n}.csv"

    found = []
    for item, result in Downloads(Places(root=str(tmp_path)), Limits(parallel=3)).each(items(), str):
        assert isinstance(result, Download)
        assert len(taken) - len(found) <= 3
        found.append((item, result.file.read()))
    assert sorted(found) == sorted((f"{n}.csv", b"%d" % n) for n in range(20))


def test_downloads_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=5)

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        together.wait()
        _reply(to, b"content")

    with _server(answer) as place:
        links = [f"http://{place}/{n}.csv" for n in range(3)]
        results = Downloads(Places(frozenset({place})), Limits(parallel=3)).each(links, str)
        assert all(isinstance(result, Download) for _, result in results)


def test_files_are_closed(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"{n}.csv").write_bytes(b"content")
    before = len(os.listdir("/dev/fd"))
    files = []
    results = Downloads(Places(root=str(tmp_path)), LIMITS).each([f"{n}.csv" for n in range(5)], str)
    for _, result in results:
        assert isinstance(result, Download)
        files.append(result.file)
    assert all(file.closed for file in files)
    unfinished = Downloads(Places(root=str(tmp_path)), LIMITS).each([f"{n}.csv" for n in range(5)], str)
    next(unfinished)
    unfinished.close()
    assert len(os.listdir("/dev/fd")) == before


def test_leaving_does_not_wait_for_slow_servers() -> None:
    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        if to.path == "/fast.csv":
            _reply(to, b"content")
        else:
            _reply(to, b"", Content_Length="1000")
            _patiently(to, (b"x" for _ in range(50)), 0.1)

    with _server(answer) as place:
        links = [f"http://{place}/{name}.csv" for name in ("slow", "fast")]
        results = Downloads(Places(frozenset({place})), Limits(parallel=2)).each(links, str)
        next(results)
        began = time.monotonic()
        results.close()
        assert time.monotonic() - began < 2


def test_a_full_disk_is_not_the_fault_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails and is run again: the link must not be given up."""
    (tmp_path / "a.csv").write_bytes(b"content")

    def full(chunk: bytes) -> None:
        raise OSError(28, "No space left on device")

    make = downloads.tempfile.TemporaryFile
    monkeypatch.setattr(downloads.tempfile, "TemporaryFile", lambda **options: _Wrapped(make(**options), full))
    with pytest.raises(RuntimeError, match="No space left"):
        list(Downloads(Places(root=str(tmp_path)), LIMITS).each(["a.csv"], str))


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    """A file being downloaded has no name, so nobody has to clean up."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sent = threading.Event()

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"x" * 500_000, Content_Length="1000000")
        sent.set()
        time.sleep(3)

    with _server(answer) as place:
        code = f"""
from downloads import Downloads, Places
Downloads(Places(frozenset({{"{place}"}})), folder="{scratch}").get("http://{place}/a.csv")
"""
        child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
        try:
            assert sent.wait(10)
            time.sleep(0.1)
            assert child.poll() is None
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert list(scratch.iterdir()) == []


# ---- rows --------------------------------------------------------------------------------------------

HEAD = "id,account,amount,date,text\n"
GOOD = {"id": "1", "account": "a", "amount": 1250, "date": "2024-02-29", "text": "rent"}


def _rows(content: str | bytes, form: str = "csv") -> list[dict[str, Any] | str]:
    raw = content.encode() if isinstance(content, str) else content
    return [row.cause if row.transaction is None else row.transaction for row in read_rows(BytesIO(raw), form)]


@pytest.mark.parametrize(
    "content",
    [
        HEAD + "1,a,12.50,2024-02-29,rent\n",
        HEAD + "1,a,12.50,2024-02-29,rent",  # no newline at the end
        HEAD.replace("\n", "\r\n") + '"1","a",12.50,2024-02-29,"rent"\r\n',
        "\ufeff" + HEAD + "\n1,a,+12.50,2024-02-29,rent\n\n",
        "text,date,amount,account,id\nrent,2024-02-29,12.50,a,1\n",
    ],
)
def test_csv(content: str) -> None:
    assert _rows(content) == [GOOD]


def test_json_lines() -> None:
    assert _rows('{"id": "1", "account": "a", "amount": 12.50, "date": "2024-02-29", "text": "rent", "more": []}\n',
                 "jsonl") == [GOOD]  # fmt: skip


@pytest.mark.parametrize("text, cents", [("0.29", 29), ("-0.05", -5), ("7", 700), ("999999999999999.99", 10**17 - 1)])
def test_amounts_are_exact(text: str, cents: int) -> None:
    for row in (
        *_rows(f"{HEAD}1,a,{text},2024-01-01,\n"),
        *_rows(f'{{"id": "1", "account": "a", "amount": {text}, "date": "2024-01-01", "text": ""}}', "jsonl"),
    ):
        assert isinstance(row, dict)
        assert row["amount"] == cents


@pytest.mark.parametrize("amount", ["", "1.5", "1e3", "0x10", "1 000", "٣", "9" * 16, "--1", "NaN"])
def test_what_is_no_amount(amount: str) -> None:
    assert _rows(f"{HEAD}1,a,{amount},2024-01-01,\n") == ["amount is not a number with two decimals, or too large"]


@pytest.mark.parametrize("day", ["", "2024-02-30", "2024-13-01", "20240101", "2024-W01-1", "0000-00-00", "01.02.2024"])
def test_what_is_no_date(day: str) -> None:
    assert _rows(f"{HEAD}1,a,1,{day},\n") == ["date is not a date"]


def test_bad_rows_do_no_harm_to_the_next() -> None:
    """Also a lost quote, and a line of megabytes."""
    lines = [b'1,a,1.00,2024-01-01,"lost', b"\xff\xfe", b"1,2", b"x" * 3_000_000, b"1,a,1,2024-01-01,\0"]
    good = b"1,a,12.50,2024-02-29,rent"
    found = _rows(HEAD.encode() + b"\n".join(line for bad in lines for line in (bad, good)))
    assert found[1::2] == [GOOD] * 5
    assert found[::2] == ["not CSV", "not UTF-8", "2 columns in place of 5", "more than 10000 bytes in a line",
                          "a null character"]  # fmt: skip


def test_rows_know_their_line_and_their_bytes() -> None:
    content = f"{HEAD}\n1,a,12.50,2024-02-29,rent\n{'x' * 20_000}\n".encode()
    [good, bad] = read_rows(BytesIO(content), "csv")
    assert (good.line, good.raw) == (3, b"1,a,12.50,2024-02-29,rent")
    assert (bad.line, bad.raw) == (4, b"x" * 10_000)


@pytest.mark.parametrize("head", ["id,account,amount,date\n", "1,a,12.50,2024-02-29,rent\n", "\n", "PNG\0\xff\n"])
def test_csv_without_its_columns_has_no_rows(head: str) -> None:
    with pytest.raises(BadFileError):
        _rows(head + "1,a,12.50,2024-02-29,rent\n")


def test_an_empty_file_has_no_rows() -> None:
    assert _rows("") == _rows(HEAD) == _rows("", "jsonl") == []


@pytest.mark.parametrize(
    "name, content_type, form",
    [("a.csv", "", "csv"), ("a.csv.gz", "", "csv"), ("a.jsonl", "text/csv", "jsonl"), ("a.ndjson.gz", "", "jsonl"),
     ("a", "text/csv", "csv"), ("a.gz", "application/x-ndjson", "jsonl")],
)  # fmt: skip
def test_formats(name: str, content_type: str, form: str) -> None:
    assert format_of(name, content_type) == form


def test_an_unknown_format() -> None:
    with pytest.raises(BadFileError):
        format_of("a.pdf", "application/octet-stream")


# ---- from links to rows ------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


def _fetched(root: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    batch = pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)
    return [row for out in Fetch(Downloads(Places(root=str(root)), LIMITS), "-x")([batch]) for row in out.to_pylist()]


def test_a_file_becomes_records(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{HEAD}1,a,12.50,2024-02-29,rent\nbad\n")
    good, bad, loaded = _fetched(tmp_path, {"key": b"a.csv", "value": _record("a.csv")})
    assert (good["topic"], good["key"], json.loads(good["value"])) == (
        "transactions-x",
        b"a",
        {**GOOD, "link": "a.csv"},
    )
    assert (bad["topic"], bad["key"], bad["value"]) == ("bad-rows-x", b"a.csv", b"bad")
    assert {each["key"]: each["value"] for each in bad["headers"]} == {
        "link": b"a.csv",
        "line": b"3",
        "cause": b"1 columns in place of 5",
    }
    assert (loaded["topic"], json.loads(loaded["value"])) == ("loaded-x", {"link": "a.csv", "rows": 1, "bad_rows": 1})


def test_a_link_that_leads_to_nothing_is_not_lost(tmp_path: Path) -> None:
    value = _record("a.csv", id=17)
    [failed] = _fetched(tmp_path, {"key": b"a.csv", "value": value, "headers": [{"key": "from", "value": b"me"}]})
    assert (failed["topic"], failed["key"], failed["value"]) == ("failed-x", b"a.csv", value)
    assert {each["key"]: each["value"] for each in failed["headers"]} == {
        "from": b"me",
        "onceflow.error.class": b"FinalError",
        "onceflow.error.message": b"there is no such file",
        "link": b"a.csv",
        "attempts": b"1",
    }


@pytest.mark.long
def test_a_file_of_a_gigabyte_is_never_in_memory() -> None:
    """Download, parse and Arrow batches in a process of their own, which says how much memory it ever had.

    Linux hands ``ru_maxrss`` on: that of a new program begins at what the process had that started it. ``VmHWM`` is of
    the program's own memory.
    """
    from onceflow.demos.files_data import HEAD as BIG_HEAD
    from onceflow.demos.files_data import big_bytes, big_parts

    rows = 10**9 // (big_bytes(1) - big_bytes(0))

    def answer(to: BaseHTTPRequestHandler, n: int) -> None:
        _reply(to, b"", Content_Length=str(big_bytes(rows)))
        to.wfile.write(BIG_HEAD)
        for part in big_parts(rows):
            to.wfile.write(part)

    code = """
import json, resource, sys
from pathlib import Path
import pyarrow as pa
from downloads import Downloads, Limits, Places
from fetch import Fetch
from test_files import SCHEMA

link = f"http://{sys.argv[1]}/big.csv"
def most_kib():
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

batch = pa.RecordBatch.from_pylist([{"value": json.dumps({"link": link}).encode()}], schema=SCHEMA)
source = Downloads(Places(frozenset({sys.argv[1]})), Limits(deadline_s=170))
before = most_kib()
counts = {}
for out in Fetch(source)([batch]):
    for topic in out["topic"].to_pylist():
        counts[topic] = counts.get(topic, 0) + 1
print(json.dumps([counts, before, most_kib()]))
"""
    with _server(answer) as place:
        child = subprocess.run(
            [sys.executable, "-c", code, place], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    counts, before_kib, most_kib = json.loads(child.stdout)
    assert counts == {"transactions": rows, "loaded": 1}
    assert most_kib < 300 * 1024
    assert most_kib - before_kib < 150 * 1024


# ---- the whole ---------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_files_survive_kills(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("files", "--seed", "3", records=45, kills=1)
    assert result["in"] == 45
    assert result["files"] > 20
    assert result["out"] > 2000
    assert result["dead_letters"] > 20


@pytest.mark.integration
@pytest.mark.faults
@pytest.mark.long
def test_many_files_survive_many_kills(run_demo: Callable[..., dict[str, Any]]) -> None:
    result = run_demo("files", records=300, kills=3)
    assert result["state_deleted"] >= 1

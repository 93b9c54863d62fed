"""Many downloads of the service `files` at a time, and files of a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import downloads
import pytest
from downloads import Download, Downloads, Failure, Limits, Places
from test_downloads import LIMITS, PACKED, content_at, patiently, problem_of, reply, serve


def test_acontent_at(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"content")
    (tmp_path / "a.csv.gz").write_bytes(PACKED)
    assert content_at(tmp_path, "a.csv") == b"content"
    assert content_at(tmp_path, str(tmp_path / "a.csv")) == b"content"
    assert content_at(tmp_path, "a.csv.gz") == b"content" * 1000


def test_a_path_without_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for link in ("nothing.csv", ".", "pipe.csv"):
        assert problem_of(content_at(tmp_path, link)) == ("FinalError", "there is no such file", 1)
    assert isinstance(content_at(tmp_path, "x" * 400), Failure)


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
    assert content_at(tmp_path, "a.csv") == b"content, more" * 2


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
        reply(to, b"content")

    with serve(answer) as place:
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
            reply(to, b"content")
        else:
            reply(to, b"", Content_Length="1000")
            patiently(to, (b"x" for _ in range(50)), 0.1)

    with serve(answer) as place:
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
        reply(to, b"x" * 500_000, Content_Length="1000000")
        sent.set()
        time.sleep(3)

    with serve(answer) as place:
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

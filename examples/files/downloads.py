"""Downloads files, several at a time, and hands on none that is not complete. Knows nothing of Kafka or Spark.

A file goes to disk first, decompressed on the way. It is handed on when all of it has come: the length is the announced
one, and the checksum of gzip is right. So whoever reads it has nothing to take back.
"""

from __future__ import annotations

import gzip
import http.client
import io
import os
import re
import socket
import ssl
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

import onceflow

CHUNK = 64 * 1024
MAX_REDIRECTS = 5
PORTS = {"http": 80, "https": 443}
_GRACE_S = 5.0
T = TypeVar("T")


class DownloadError(Exception):
    """There is no complete file. ``again``: whether another try may help."""

    again = True


class TruncatedError(DownloadError):
    """The file has ended before its announced length."""


class ChangedError(DownloadError):
    """A local file was written to while it was read."""


class StatusError(DownloadError):
    """The server has answered with something else than the file."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.again = status >= 500 or status in (408, 429)


class FinalError(DownloadError):
    """Another try would not help."""

    again = False


class RefusedError(FinalError):
    """The link leads to where no file may be had from."""


class TooLargeError(FinalError):
    """The file has more bytes than allowed, perhaps only when it is decompressed."""


class NoLengthError(FinalError):
    """The server does not say where the file ends, so nobody can tell whether all of it has come."""


class TooSlowError(FinalError):
    """The time for this link is over, all tries included."""


@dataclass(frozen=True)
class Places:
    """Where files may come from; nothing else is asked. Links are input: they must not open every door.

    Args:
        hosts: ``example.com``, or ``example.com:8080`` for another port than the default one. Without any: no HTTP.
        root: the folder that paths are relative to, and must stay in. None: no paths.
    """

    hosts: frozenset[str] = frozenset()
    root: str | None = None

    def check(self, link: str) -> SplitResult | Path:
        """What a link leads to: a URL or a path.

        Raises:
            RefusedError: not to one of these places.
        """
        try:
            url = urlsplit(link)
            if url.scheme not in PORTS:
                return self._path(link, url.scheme)
            host, port = url.hostname or "", url.port or PORTS[url.scheme]
        except ValueError as error:
            raise RefusedError(f"not a link: {error}") from error
        if not re.fullmatch(r"[!-~]+", link):
            raise RefusedError("a URL has printable ASCII characters only")
        if url.username is not None:
            raise RefusedError("a URL with a password: topics are no place for it")
        if f"{host}:{port}" not in self.hosts and not (host in self.hosts and port == PORTS[url.scheme]):
            raise RefusedError("this host is not allowed")
        return url

    def _path(self, link: str, scheme: str) -> Path:
        if scheme or not link:
            raise RefusedError(f"scheme {scheme!r} is not http or https" if scheme else "the link is empty")
        if self.root is None:
            raise RefusedError("paths are not allowed")
        root = Path(self.root).resolve()
        try:
            path = (root / link).resolve()  # follows symbolic links, too
        except (OSError, RuntimeError, ValueError) as error:
            raise RefusedError("the path cannot be resolved") from error
        if not path.is_relative_to(root):
            raise RefusedError("the path leads out of the folder")
        return path


@dataclass(frozen=True)
class Limits:
    """How much is spent on a link.

    Args:
        parallel: links under work at a time, those included whose file waits on disk.
        attempts: at most. backoff_s: pause before the second one; it doubles each time.
        timeout_s: for a connection, and between two bytes.
        deadline_s: for a link, all attempts included. A server that sends a byte now and then comes to this.
        max_bytes: of a file, decompressed.
    """

    parallel: int = 4
    attempts: int = 4
    backoff_s: float = 0.5
    timeout_s: float = 10.0
    deadline_s: float = 120.0
    max_bytes: int = 4 * 2**30


class Download(NamedTuple):
    """A complete file, at its beginning. It has no name, and so is gone when it is closed or its process dies."""

    file: IO[bytes]
    content_type: str

    def close(self) -> None:
        self.file.close()


class Failure(NamedTuple):
    """Why there is no file, and how often it was tried."""

    error: Exception
    attempts: int

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Downloads:
    """Gets files from ``places`` within ``limits``.

    Args:
        folder: for what is being downloaded; None: the system's folder for temporary files.
    """

    places: Places
    limits: Limits = Limits()
    folder: str | None = None

    def each(self, items: Iterable[T], link_of: Callable[[T], str]) -> Iterator[tuple[T, Download | Failure]]:
        """Every item with its file or failure, in the order in which they are done. The file is closed afterwards.

        Items are taken one by one, when there is room for them: their number does not matter.
        """
        with closing(self._results(items, link_of)) as results:
            for item, result in results:
                with closing(result):
                    yield item, result

    def get(self, link: str) -> Download | Failure:
        """One file. Every attempt begins at the beginning: two halves may be of two different files."""
        with closing(self._results([link], str)) as results:
            return next(results)[1]

    def _results(
        self, items: Iterable[T], link_of: Callable[[T], str]
    ) -> Generator[tuple[T, Download | Failure], None, None]:
        limits, leave = self.limits, threading.Event()
        calls = onceflow.concurrently(
            lambda wanted: self._in_time(wanted.link, wanted.end, leave),
            limit=limits.parallel,
            timeout=limits.deadline_s + _GRACE_S,  # an attempt notices by itself that the time is over
            retries=limits.attempts - 1,
            backoff=limits.backoff_s,
            transient=_may_help,
        )
        wanted = (_Wanted(item, link_of(item), time.monotonic() + limits.deadline_s) for item in items)
        try:
            for one, (file, error, attempts) in calls.each(wanted, discard=Download.close):
                if error is not None and not isinstance(error, _OF_LINKS):
                    raise error  # it is not the link's fault
                yield one.item, file if error is None else Failure(error, attempts)
        finally:  # also when the caller takes no more
            leave.set()

    def _in_time(self, link: str, end: float, leave: threading.Event) -> Download:
        """An attempt. When the time is over, that is what has gone wrong, and there is no other one."""
        try:
            return self._attempt(link, end, leave)
        except _OF_LINKS as error:
            if time.monotonic() < end:
                raise
            raise TooSlowError(f"not complete after {self.limits.deadline_s:g} s") from error

    def _attempt(self, link: str, end: float, leave: threading.Event) -> Download:
        found = self.places.check(link)
        with ExitStack() as unless_complete:
            with _own_disk():
                file = unless_complete.enter_context(tempfile.TemporaryFile(dir=self.folder))
            with self._local(found) if isinstance(found, Path) else self._http(found, end) as source:
                if (source.length or 0) > self.limits.max_bytes:
                    raise TooLargeError(f"{source.length} bytes, at most {self.limits.max_bytes} are allowed")
                body = _Body(source, end, leave)
                stream: Any = gzip.GzipFile(fileobj=io.BufferedReader(body, CHUNK)) if source.zipped else body
                size = 0
                while chunk := stream.read(CHUNK):
                    size += len(chunk)
                    if size > self.limits.max_bytes:
                        raise TooLargeError(f"more than {self.limits.max_bytes} bytes")
                    with _own_disk():
                        file.write(chunk)
            with _own_disk():
                file.seek(0)  # writes what is still in the buffer
            unless_complete.pop_all()
            return Download(file, source.content_type)

    @contextmanager
    def _local(self, path: Path) -> Iterator[_Source]:
        try:
            if not path.is_file():
                raise FinalError("there is no such file")
            file = path.open("rb", buffering=0)
        except PermissionError as error:
            raise FinalError("the file may not be read") from error
        with file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise FinalError("there is no such file")
            yield _Source(file.read, before.st_size, path.suffix == ".gz", "")
            after = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise ChangedError("the file was changed while it was read")

    @contextmanager
    def _http(self, url: SplitResult, end: float) -> Iterator[_Source]:
        for _ in range(1 + MAX_REDIRECTS):
            with self._answer(url, end) as answer:
                if answer.status not in (301, 302, 303, 307, 308):
                    yield _source_of(url, answer)
                    return
                target = answer.headers.get("Location", "")
            # A server must not lead to where links must not.
            try:
                found = self.places.check(urljoin(url.geturl(), target))
            except ValueError as error:
                raise RefusedError(f"redirected to what is no link: {error}") from error
            if isinstance(found, Path):
                raise RefusedError("redirected to a path")
            url = found
        raise FinalError(f"more than {MAX_REDIRECTS} redirects")

    @contextmanager
    def _answer(self, url: SplitResult, end: float) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET request, its body unread. No proxy is asked, whatever the environment says."""
        host, port = url.hostname or "", url.port or PORTS[url.scheme]
        limit = min(self.limits.timeout_s, max(0.01, end - time.monotonic()))
        sock = socket.create_connection((host, port), timeout=limit)
        sock.settimeout(self.limits.timeout_s)
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if url.scheme == "https":
            kind = http.client.HTTPSConnection
            tls = ssl.create_default_context()
            sock = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        # A byte now and then keeps every single read within its timeout: only cutting the line ends that.
        watchdog = threading.Timer(max(0.0, end - time.monotonic()), _cut, (sock,))
        watchdog.daemon = True
        watchdog.start()
        try:
            with sock, closing(kind(host, port)) as connection:
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                connection.sock = sock
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", target, headers={"Connection": "close", "User-Agent": "onceflow-example"})
                with connection.getresponse() as answer:
                    yield answer
        finally:
            watchdog.cancel()


class _Source(NamedTuple):
    """Bytes to be read: ``read`` returns some, at most so many; ``length`` is None where chunks tell the end."""

    read: Callable[[int], bytes]
    length: int | None
    zipped: bool
    content_type: str


def _source_of(url: SplitResult, answer: http.client.HTTPResponse) -> _Source:
    if answer.status != 200:
        raise StatusError(answer.status)
    content_type = answer.headers.get_content_type()
    encoding = answer.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise FinalError(f"content encoding {encoding!r} is not known")
    zipped = (
        encoding == "gzip" or url.path.endswith(".gz") or content_type in ("application/gzip", "application/x-gzip")
    )
    if answer.length is None and not answer.chunked:  # gzip may have several parts, and one may be missing
        raise NoLengthError("no Content-Length: nobody can tell whether all of it has come")
    return _Source(answer.read1, answer.length, zipped, content_type)


class _Body(io.RawIOBase):
    """A source as a stream of as many bytes as were announced; fewer are an error."""

    def __init__(self, source: _Source, end: float, leave: threading.Event) -> None:
        self._read, self._left = source.read, source.length
        self._end, self._leave = end, leave

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._leave.is_set():
            raise FinalError("nobody waits for it any more")
        if time.monotonic() >= self._end:
            raise TooSlowError("the time is over")
        if self._left == 0:
            return 0
        data = self._read(len(buffer) if self._left is None else min(len(buffer), self._left))
        if self._left is not None:
            if not data:
                raise TruncatedError(f"{self._left} bytes are missing")
            self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _own_disk() -> Iterator[None]:
    """That a temporary file cannot be written is not the link's fault: such an error ends the batch."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"the temporary file cannot be written: {error}") from error


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed meanwhile


@dataclass(frozen=True)
class _Wanted(Generic[T]):
    """A link, and when the time for it is over."""

    item: T
    link: str
    end: float


_OF_LINKS = (DownloadError, OSError, http.client.HTTPException, EOFError, zlib.error, onceflow.CallTimeoutError)


def _may_help(error: Exception) -> bool:
    """Whether another attempt may help."""
    return isinstance(error, _OF_LINKS) and getattr(error, "again", True)

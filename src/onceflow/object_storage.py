"""Objects in a local folder or in a bucket: written as a whole or not at all, and read in pieces.

Buckets are behind obstore, which is the library that deltalake has inside: the options of a bucket have the same names
in ``ClaimCheck`` and in ``DeltaSink``. Local files are written here, because a file has to last through a power failure
when its name is in Kafka: no library brings both the file and its folder to disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import urlsplit

from onceflow.errors import EnvironmentUnusableError, OptionError
from onceflow.options.column_names import did_you_mean

CHUNK_BYTES = 8 << 20
"""How much is read or written at once."""

_UPLOADS_AT_ONCE = 4
#: Of what is sent and received; obstore's own are three minutes for repetitions, and 30 seconds for a request.
_LIMITS = {"connect_timeout": "10 seconds", "timeout": "120 seconds"}
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
#: What users write, and what obstore calls it.
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfss"}
_SECRET = re.compile(r"secret|key|token|sas|password|credential|account", re.IGNORECASE)
_SECRET_LENGTH = 6  # shorter values are no secrets, and would hide parts of other words
#: Options that are not of a kind of bucket, but of the connection; deltalake takes them in the same place.
_CONNECTION = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_url", "timeout", "user_agent",
)  # fmt: skip
_KINDS = re.compile(r"(aws|azure|google)_")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

#: The process that has used a bucket: the threads of obstore do not live on in a process that is forked from it.
_used_by: int | None = None


#: What the system says of hard links that a file system does not have.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_NO_RENAMES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
#: Of renameat2(2).
_HERE, _RENAME_NOREPLACE = -100, 1


class FileChangedError(OSError):
    """A file is not any more what its writer expected."""


class Entry(NamedTuple):
    """What a folder has.

    Args:
        size: of an object, in bytes; None: it is a folder.
    """

    name: str
    size: int | None


class Storage(ABC):
    """Names are relative to the root, and have slashes. Every method raises what the system raises; a missing object is
    always a FileNotFoundError."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The size of an object, in bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a small object."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """The content of an object, in pieces: it has `read` and `close`."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it. It lasts when this returns."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """As `write`, on the condition that there is no such object. Returns whether it was written."""

    @abstractmethod
    def write_file(self, name: str, path: str, checksum: str) -> None:
        """As `write`, from a local file, in bounded memory.

        Args:
            checksum: SHA-256 of the content, as hexadecimal digits.

        Raises:
            FileChangedError: its content is another one. Nothing is written then: what another writer has stored under
                this name stays.
        """

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """What is in a folder; nothing if there is no such folder. ``""`` is the root."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. One that is gone already is no error."""

    def settle(self, name: str) -> None:  # noqa: B027 (only folders have something to do)
        """Make an object last that another writer may not have brought so far."""


class Folder(Storage):
    """A folder of this machine, or one that several machines share."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")

    def write(self, name: str, data: bytes) -> None:
        with self._draft(name, [data]) as draft:
            draft.replace(self.root / name)

    def create(self, name: str, data: bytes) -> bool:
        with self._draft(name, [data]) as draft:
            return _appear(draft, self.root / name)

    def write_file(self, name: str, path: str, checksum: str) -> None:
        with Path(path).open("rb") as file, self._draft(name, _verified(file, checksum)) as draft:
            draft.replace(self.root / name)

    @contextlib.contextmanager
    def _draft(self, name: str, chunks: Iterable[bytes]) -> Iterator[Path]:
        """A file of another name that is on the disk. At the end its folder is brought to disk, too."""
        target = self.root / name
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            sync(target.parent.parent)
        draft = target.with_name(f".unfinished-{uuid.uuid4().hex}")
        try:
            with draft.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:
            draft.unlink(missing_ok=True)
        sync(target.parent)

    def entries(self, folder: str) -> list[Entry]:
        found = []
        try:
            with os.scandir(self.root / folder) as listed:
                for each in listed:
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        found.append(Entry(each.name, None if each.is_dir() else each.stat().st_size))
        except FileNotFoundError:
            pass
        return found

    def delete(self, names: Sequence[str]) -> None:
        paths = [self.root / name for name in names]
        for path in paths:
            path.unlink(missing_ok=True)
        for parent in {path.parent for path in paths}:
            with contextlib.suppress(OSError):  # it has other files
                parent.rmdir()

    def settle(self, name: str) -> None:
        sync((self.root / name).parent)


class Bucket(Storage):
    """A place in a bucket.

    Args:
        url: ``s3://bucket/prefix``, or another scheme of `is_bucket`.
        options: of object_store, as for deltalake: ``{"aws_access_key_id": ..., "aws_endpoint_url": ...}``.

    Raises:
        OptionError: an option is not known.
        EnvironmentUnusableError: obstore is not installed, or this process was forked from one that has used a bucket.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        global _used_by
        try:
            import obstore
            from obstore import store
            from obstore.exceptions import BaseError, UnknownConfigurationKeyError
        except ImportError as error:
            raise EnvironmentUnusableError(
                f"{url} cannot be used without the package obstore",
                detail=str(error),
                next_step="pip install 'onceflow[s3]', on executors, too",
            ) from error
        if _used_by not in (None, os.getpid()):
            raise EnvironmentUnusableError(
                f"{url} cannot be used in a process that was forked after its parent has used a bucket",
                next_step="start processes with multiprocessing's method 'spawn', or use it in one of them only",
            )
        _used_by = os.getpid()
        scheme, _, rest = url.partition("://")
        config, connection = _divided(options)
        try:
            opened: Any = store.from_url  # its types name each option
            self._store = opened(
                f"{_SCHEMES[scheme]}://{rest}", config=config, client_options=connection, retry_config=_RETRIES
            )
        except UnknownConfigurationKeyError as error:
            raise OptionError(
                f"An option of {url} is not known",
                detail=said(error, options).partition(" Debug source")[0],
                next_step="the names are those of object_store, for example aws_access_key_id, aws_endpoint_url",
            ) from None
        except BaseError as error:
            raise OptionError(f"The options of {url} cannot be used", detail=said(error, options)) from None
        self._client = obstore

    def size(self, name: str) -> int:
        return int(self._client.head(self._store, name)["size"])

    def read(self, name: str) -> bytes:
        return bytes(self._client.get(self._store, name).bytes())

    def open(self, name: str) -> IO[bytes]:
        return cast(IO[bytes], _Reader(self._client.open_reader(self._store, name, buffer_size=CHUNK_BYTES)))

    def write(self, name: str, data: bytes) -> None:
        self._client.put(self._store, name, data, chunk_size=CHUNK_BYTES, max_concurrency=_UPLOADS_AT_ONCE)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._client.put(self._store, name, data, mode="create")
        except self._client.exceptions.AlreadyExistsError:
            return False
        return True

    def write_file(self, name: str, path: str, checksum: str) -> None:
        with Path(path).open("rb") as file:
            # An upload is completed when the iterator ends, and given up when it raises an error.
            chunks = _verified(file, checksum)
            self._client.put(self._store, name, chunks, chunk_size=CHUNK_BYTES, max_concurrency=_UPLOADS_AT_ONCE)

    def entries(self, folder: str) -> list[Entry]:
        listed = self._client.list_with_delimiter(self._store, folder or None)
        folders = [Entry(path.rstrip("/").rpartition("/")[2], None) for path in listed["common_prefixes"]]
        return folders + [Entry(each["path"].rpartition("/")[2], int(each["size"])) for each in listed["objects"]]

    def delete(self, names: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._client.delete(self._store, list(names))


class _Reader:
    """An object as a stream of bytes."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, size: int = -1) -> bytes:
        return bytes(self._reader.read() if size < 0 else self._reader.read(size))

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_bucket(url: str) -> bool:
    """Whether an URL names a place in a bucket of a kind that is known."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in _SCHEMES


def schemes() -> list[str]:
    """The beginnings of URLs that are known."""
    return [f"{scheme}://" for scheme in _SCHEMES]


def check_place(argument: str, place: str) -> None:
    """Check that a folder or URL is of a kind in which an object can be created on the condition that there is none.

    Other stores have no such condition: of two drivers, one could overwrite what the other has committed. ``s3:/b`` is
    what `pathlib.Path` makes of ``s3://b``: it would be a local folder.

    Args:
        argument: its name, for the error.

    Raises:
        OptionError: it is not.
    """
    scheme, separator, rest = place.partition("://")
    if separator and urlsplit(place).password is not None:
        raise OptionError(
            f"{argument}= contains a password", next_step="give credentials in the environment or in storage_options="
        )
    if not separator:
        # `file:/x` is how Hadoop writes a folder, and `dbfs:/x` is no folder: here, both were below the current one.
        start = re.match(r"(\w\w+)(:/|//)", place)
        if start is None or (start[2] == "//" and start[1].lower() not in _SCHEMES):
            return
        scheme = start[1]
        is_bucket = scheme.lower() in _SCHEMES
        problem = f"is a local folder, and no URL of {f'a {scheme.lower()} bucket' if is_bucket else 'a store'}"
    elif scheme == "file" and rest and not rest.startswith("/"):
        problem = f"names a host: {rest.partition('/')[0]}"
    elif scheme in (*_SCHEMES, "file"):
        if rest.strip("/"):
            return
        problem = "names no folder or bucket"
    else:
        problem = f"cannot be used: {scheme}:// is not known to create an object only if there is none"
    known = [*schemes(), "file://"]
    raise OptionError(
        f"{argument}={place!r} {problem}",
        next_step=f"{did_you_mean(f'{scheme}://', known)}Use one of {', '.join(known)} as text, or a local folder",
    )


def chunks_of(file: IO[bytes]) -> Iterator[bytes]:
    """What is left of a file, in pieces."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def said(error: BaseException, options: Mapping[str, Any]) -> str:
    """The text of an error in one line, without secrets."""
    text = " ".join(str(error).split())
    for name, value in options.items():
        if _SECRET.search(name) and len(str(value)) >= _SECRET_LENGTH:
            text = text.replace(str(value), "***")
    return text


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, survive a crash of the machine."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Options of the bucket, and of the connection to it."""
    connection = {**_LIMITS, "allow_http": "true" if _is_plain_http(options) else "false"}
    config = {}
    for name, value in options.items():
        plain = _KINDS.sub("", name.lower(), count=1)
        if plain in _CONNECTION:
            connection[plain] = str(value)
        else:
            config[name] = str(value)
    return config, connection


def _is_plain_http(options: Mapping[str, Any]) -> bool:
    given = [str(value) for name, value in options.items() if "endpoint" in name.lower()]
    return any(url.startswith("http://") for url in (*given, *(os.environ.get(name, "") for name in _ENDPOINTS)))


def _verified(file: IO[bytes], checksum: str) -> Iterator[bytes]:
    """What is left of a file, in pieces. At its end it is an error if its content is not the one that is expected.

    Raises:
        FileChangedError: its SHA-256 is another one.
    """
    found = hashlib.sha256()
    for chunk in chunks_of(file):
        found.update(chunk)
        yield chunk
    if found.hexdigest() != checksum:
        raise FileChangedError("the file was changed while it was read")


def _appear(draft: Path, target: Path) -> bool:
    """Give a file its name, unless there is a file of this name. Returns whether it was given.

    Nobody ever sees a part of the file. Where neither hard links nor Linux can make the condition part of the same
    step, it is looked at just before.
    """
    try:
        os.link(draft, target)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    moved = _renamed(draft, target)
    if moved is None:
        moved = not target.exists()
        if moved:
            draft.replace(target)
    return moved


def _renamed(draft: Path, target: Path) -> bool | None:
    """Whether Linux has renamed a file to a new name: False if there was a file of this name, None if it cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return None
    if not rename(_HERE, os.fsencode(draft), _HERE, os.fsencode(target), _RENAME_NOREPLACE):
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code in _NO_RENAMES:
        return None
    raise OSError(code, os.strerror(code), os.fspath(target))

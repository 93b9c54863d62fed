"""The objects of a store: a local folder, or a bucket, behind fsspec.

An object is written as a whole or not at all, and is never changed. Its name is the day on which it was stored and the
hash of its content. A writer reuses an object only on its day. So nothing refers anew to an object that is older, and
one that is old enough may be deleted when nobody refers to it. An object whose content may have references itself has a
name that says so: whoever looks for references reads it, too.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from onceflow.claim_check.reference import NAME, REFERS, Reference
from onceflow.claim_check.scan import MARK_BYTES, may_refer
from onceflow.clock import clock_ms
from onceflow.errors import ClaimCheckError, EnvironmentUnusableError, OptionError, StorageUnavailableError

CHUNK_BYTES = 8 << 20
"""How much is read or written at once."""

MARKER = "onceflow-claim-check.json"
"""A file in every store. Without it, it is the wrong folder, or one that is not mounted."""

DAY_MS = 86_400_000
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_UNFINISHED = re.compile(r"\.unfinished-[0-9a-f]{32}")
_LOCAL = ("file", "local")
_PROTOCOLS = {"file": "file", "local": "file", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az",
              "abfs": "abfs", "abfss": "abfss", "memory": "memory"}  # fmt: skip
_UPLOADS_AT_ONCE = 4
_CHANGED = "the file was changed while it was read"
# Of botocore: its own are a minute each, several times.
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}


class Remembered(NamedTuple):
    """Where a collection has looked for references.

    Args:
        topics: those that were given to it. flows: those whose rows in other systems it has read.
        found: further topics in which there were references.
    """

    topics: tuple[str, ...] = ()
    flows: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class ObjectStore:
    """See the module.

    Args:
        url: ``file:///folder``, a local path, ``s3://bucket/prefix``, or another object store that fsspec knows.
        options: of fsspec for this store, for example credentials. They appear in no text.

    Raises:
        OptionError: the URL cannot be used.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.url = _checked(os.fspath(url))
        self._options = dict(options or {})
        self.local = "://" not in self.url or self.url.partition("://")[0] in _LOCAL
        self._opened: tuple[int, Any, str] | None = None
        self._marked = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_marked": False}

    def __repr__(self) -> str:
        return f"<objects at {self.url}>"

    # ---- writing -------------------------------------------------------------------------------------

    def put(self, data: bytes) -> Reference:
        """Store a value. When it returns, the object survives a crash of this machine (or the service has it).

        Raises:
            StorageUnavailableError: the store cannot be written.
        """
        reference = _reference(hashlib.sha256(data).hexdigest(), len(data), may_refer(data))
        with self._storing(reference.name):
            if not self._has(reference):
                if self.local:
                    self._write(reference.name, [data])
                else:
                    self._files.pipe_file(self._path(reference.name), data, **self._upload_options())
        return reference

    def put_file(self, path: str | os.PathLike[str]) -> Reference:
        """Store the content of a local file, in bounded memory. As `put`."""
        checksum, size, refers, last = hashlib.sha256(), 0, False, b""
        with Path(path).open("rb") as file:
            for chunk in _chunks(file):
                checksum.update(chunk)
                size += len(chunk)
                refers = refers or may_refer(last + chunk)
                last = chunk[-MARK_BYTES:]
            reference = _reference(checksum.hexdigest(), size, refers)
            with self._storing(reference.name):
                if not self._has(reference):
                    file.seek(0)
                    if self.local:
                        self._write(reference.name, _chunks(file), checksum=reference.sha256)
                    else:
                        self._upload(os.fspath(path), os.fstat(file.fileno()), reference)
        return reference

    def _upload(self, path: str, before: os.stat_result, reference: Reference) -> None:
        self._files.put_file(path, self._path(reference.name), **self._upload_options())
        after = os.stat(path)
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            self._files.rm_file(self._path(reference.name))
            raise OSError(_CHANGED)

    def _has(self, reference: Reference) -> bool:
        """Whether the object is there already: another attempt has stored it today, or another record has this value.

        Objects appear as a whole, so the size is enough: one of another size was damaged, and is replaced. The content
        is verified by whoever reads it.
        """
        self._mark()
        try:
            found = bool(self._files.info(self._path(reference.name))["size"] == reference.size)
        except FileNotFoundError:
            return False
        if found and self.local:  # its writer may not have come that far
            _sync_folder(Path(self._path(reference.name)).parent)
        return found

    def _write(self, name: str, chunks: Any, checksum: str | None = None) -> None:
        """Write a local file under another name, and rename it when it is on the disk."""
        target = Path(self._path(name))
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            _sync_folder(target.parent.parent)
        unfinished = target.with_name(f".unfinished-{uuid.uuid4().hex}")
        written = hashlib.sha256()
        try:
            with unfinished.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    if checksum:
                        written.update(chunk)
                file.flush()
                os.fsync(file.fileno())
            if checksum and written.hexdigest() != checksum:
                raise OSError(_CHANGED)
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    def _mark(self) -> None:
        if self._marked:
            return
        if not self._files.exists(self._path(MARKER)):
            self._write_marker({"format": 1})
        self._marked = True

    def _write_marker(self, document: Mapping[str, Any]) -> None:
        content = json.dumps(document).encode()
        if self.local:
            Path(self._path("")).mkdir(parents=True, exist_ok=True)
            self._write(MARKER, [content])
        else:
            self._files.pipe_file(self._path(MARKER), content)

    # ---- reading -------------------------------------------------------------------------------------

    def open(self, reference: Reference) -> IO[bytes]:
        """The content of an object, not yet verified but for its size.

        Raises:
            ClaimCheckError: the object is missing, or has another size.
            StorageUnavailableError: the store cannot be read.
        """
        path = self._path(reference.name)
        try:
            size = self._files.info(path)["size"]
            if size != reference.size:
                raise altered(self.url, reference, f"it has {size:,} bytes instead of {reference.size:,}")
            if self.local:
                return Path(path).open("rb")
            file: IO[bytes] = self._files.open(path, "rb", block_size=CHUNK_BYTES, cache_type="readahead")
            return file
        except FileNotFoundError:
            self.check()
            raise ClaimCheckError(
                f"Object {reference.name} is missing in {self.url}",
                detail=f"it had {reference.size:,} bytes; the store itself is there",
                next_step="check that this is the store it was written to. If so, it was collected too early (the "
                "topic of its reference was not given to `onceflow claim-check collect`, or that was written after "
                "--older-than), or somebody else has deleted it: restore it from a backup",
            ) from None
        except (ClaimCheckError, EnvironmentUnusableError):
            raise
        except Exception as error:
            raise self.failed("read", reference.name, error) from error

    def check(self) -> Remembered:
        """Check that this is a store, and that it can be reached.

        Returns:
            Where the last collection has looked for references.

        Raises:
            StorageUnavailableError: it is not.
        """
        try:
            document = json.loads(self._files.cat_file(self._path(MARKER)))
            return Remembered(*(tuple(map(str, document.get(what, ()))) for what in Remembered._fields))
        except FileNotFoundError:
            raise StorageUnavailableError(
                f"There is no store of a claim check at {self.url}: the object {MARKER} is not there",
                next_step="check the name of the folder or bucket, and whether it is mounted. A store is made when the "
                "first value is stored",
            ) from None
        except Exception as error:
            raise self.failed("read", MARKER, error) from error

    def remember(self, found: Remembered) -> None:
        """Keep in the store where a collection has looked, so that a later one does not forget any of it."""
        with self._storing(MARKER):
            self._write_marker({"format": 1, **{what: sorted(names) for what, names in found._asdict().items()}})

    def content(self, name: str) -> Iterator[bytes]:
        """The bytes of an object in pieces, not verified; none if it was deleted meanwhile.

        Raises:
            StorageUnavailableError: the store cannot be read.
        """
        try:
            with self._files.open(self._path(name), "rb", block_size=CHUNK_BYTES) as file:
                yield from _chunks(file)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self.failed("read", name, error) from error

    # ---- collecting ----------------------------------------------------------------------------------

    def days(self, until_ms: float = float("inf")) -> list[str]:
        """The days whose objects were all stored before a time (epoch milliseconds), the earliest first."""
        names = (entry["name"].rstrip("/").rpartition("/")[2] for entry in self._listed(""))
        return sorted(name for name in names if _DAY.fullmatch(name) and _end_ms(name) <= until_ms)

    def names(self, day: str) -> Iterator[tuple[str, int]]:
        """Names and sizes of a day's objects. Other files are left out, but not what a killed writer has left."""
        for entry in self._listed(day):
            base = entry["name"].rpartition("/")[2]
            if entry["type"] == "file" and (NAME.fullmatch(f"{day}/{base}") or _UNFINISHED.fullmatch(base)):
                yield f"{day}/{base}", int(entry["size"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, at most a thousand. One that is gone already is no error."""
        try:
            paths = [self._path(name) for name in names]
            if not self.local:
                self._files.rm(paths)
                return
            for path in paths:
                Path(path).unlink(missing_ok=True)
            for folder in {Path(path).parent for path in paths}:
                with contextlib.suppress(OSError):  # it has other files
                    folder.rmdir()
        except Exception as error:
            raise self.failed("delete", names[0] if names else "", error) from error

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._files.ls(self._path(folder), detail=True)
            return found
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self.failed("list", folder, error) from error

    # ---- inside --------------------------------------------------------------------------------------

    @property
    def _files(self) -> Any:
        return self._open()[1]

    def _path(self, name: str) -> str:
        return f"{self._open()[2]}/{name}".rstrip("/")

    def _open(self) -> tuple[int, Any, str]:
        """Process id, file system, and the path of the store in it. A process that was forked opens its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            protocol, separator, rest = self.url.partition("://")
            url = f"{_PROTOCOLS[protocol]}://{rest}" if separator else self.url
            options = dict(self._options)
            if _PROTOCOLS.get(protocol) == "s3":
                options["config_kwargs"] = {**_S3_TIMEOUTS, **options.get("config_kwargs", {})}
            if not self.local:
                options.setdefault("use_listings_cache", False)
            try:
                files, path = fsspec.core.url_to_fs(url, **options)
            except ImportError as error:
                raise EnvironmentUnusableError(
                    f"A store at {self.url} needs a package that is missing: {error}",
                    next_step="pip install 'onceflow[s3]' for S3, on executors, too; other stores name theirs",
                ) from error
            self._opened = (os.getpid(), files, path.rstrip("/"))
        return self._opened

    def _upload_options(self) -> dict[str, int]:
        if self.url.startswith(("s3://", "s3a://")):  # the memory of an upload is limited by these
            return {"chunksize": CHUNK_BYTES, "max_concurrency": _UPLOADS_AT_ONCE}
        return {}

    @contextlib.contextmanager
    def _storing(self, name: str) -> Iterator[None]:
        try:
            yield
        except EnvironmentUnusableError:
            raise
        except Exception as error:
            raise self.failed("write", name, error) from error

    def failed(self, what: str, name: str, error: Exception) -> StorageUnavailableError:
        """The error for a store that refuses a request or does not answer. No record is to blame for it."""
        return StorageUnavailableError(
            f"The store at {self.url} cannot be used",
            detail=f"to {what} {name or 'it'}: {type(error).__name__}: {str(error)[:300]}",
            next_step="check network, credentials, permissions and free space, for executors, too",
        )


def altered(url: str, reference: Reference, how: str) -> ClaimCheckError:
    """The error for an object that is not what was stored."""
    return ClaimCheckError(
        f"Object {reference.name} in {url} was altered",
        detail=how,
        next_step="restore it from a backup, and find out who has changed it: onceflow never changes an object",
    )


def _reference(checksum: str, size: int, refers: bool) -> Reference:
    day = datetime.datetime.fromtimestamp(clock_ms() / 1000, datetime.timezone.utc).date()
    return Reference.of(f"{day.isoformat()}/{checksum}{REFERS if refers else ''}", size, checksum)


def _end_ms(day: str) -> float:
    """When a day ends, in epoch milliseconds. A day that does not exist never does."""
    try:
        start = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        return float("inf")
    return start.timestamp() * 1000 + DAY_MS


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _sync_folder(folder: Path) -> None:
    """A new name in a folder survives a crash of the machine only then."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _checked(url: str) -> str:
    protocol, separator, rest = url.partition("://")
    if separator and protocol not in _PROTOCOLS:
        raise OptionError(
            f"store={protocol}://... cannot be used: an object has to appear there as a whole or not at all",
            next_step=f"use one of {', '.join(f'{known}://' for known in _PROTOCOLS)}, or a local folder",
        )
    if not (rest if separator else url).strip("/"):
        raise OptionError(f"store={url!r} names no folder or bucket", next_step="for example s3://bucket/prefix")
    if separator and urlsplit(url).password is not None:
        raise OptionError(
            "store= contains a password", next_step="give credentials in the environment or in storage_options="
        )
    return url.rstrip("/") if separator else os.path.abspath(url)

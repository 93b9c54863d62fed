"""Files of a local folder or of an S3 bucket, as far as a log of numbered files needs them.

A file can be created on the condition that it does not exist: with a hard link in a folder, and with
``If-None-Match: *`` in a bucket. Readers see a file whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from onceflow.errors import EnvironmentUnusableError, OptionError


@dataclass(frozen=True)
class Stored:
    """A file: its path below the root, and when it was changed (seconds since 1970)."""

    path: str
    modified_s: float


def dataset_of(root: str) -> tuple[str, str]:
    """Namespace and name of a folder or a place in a bucket, as OpenLineage's specification of names says."""
    scheme, found, rest = root.partition("://")
    if not found or scheme == "file":
        return "file", str(Path(rest if found else root).absolute())
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path.strip("/") or "/"


class Storage(ABC):
    """Paths are relative to a root and have slashes.

    Args:
        root: the folder, or the URL, as a user has given it.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    @abstractmethod
    def full(self, path: str) -> str:
        """The path as other tools take it."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Create a folder, if this storage has folders."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Create a file that lasts, unless one of this name exists. Returns whether it was created.

        ``False`` may also mean that an earlier try of this call has created it, and its answer was lost.
        """

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """The content; None: there is no such file."""

    @abstractmethod
    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """A new file that nobody else writes. It lasts when the block has ended without an error."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def below(self, folder: str) -> Iterator[Stored]:
        """All files below a folder."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove_folders(self, folder: str, prefix: str) -> None:
        """Remove the folders in a folder whose names, with a slash at the end, begin so."""

    @abstractmethod
    def arrow(self) -> tuple[Any, str]:
        """A filesystem of pyarrow, and the root in it."""


class LocalFolder(Storage):
    """A folder of this machine, or one that several machines share."""

    def full(self, path: str) -> str:
        return os.path.join(self.root, *path.split("/"))

    def make_folder(self, path: str) -> None:
        missing = Path(self.full(path))
        made = []
        while not missing.exists():
            made.append(missing)
            missing = missing.parent
        Path(self.full(path)).mkdir(parents=True, exist_ok=True)
        for folder in made:
            _sync_folder(folder.parent)

    def create(self, path: str, content: bytes) -> bool:
        full = self.full(path)
        folder, name = os.path.split(full)
        self.make_folder(os.path.dirname(path))
        draft = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, full)
            except FileExistsError:
                return False
            except PermissionError as error:
                raise EnvironmentUnusableError(
                    f"The file system of {self.root} has no hard links",
                    detail=str(error),
                    next_step="use another file system, or a bucket",
                ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        _sync_folder(Path(folder))
        return True

    def read(self, path: str) -> bytes | None:
        try:
            return Path(self.full(path)).read_bytes()
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        self.make_folder(os.path.dirname(path))
        with open(self.full(path), "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(Path(self.full(path)).parent)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.full(folder)))
        except FileNotFoundError:
            return []

    def below(self, folder: str) -> Iterator[Stored]:
        for where, _, names in os.walk(self.full(folder)):
            for name in names:
                full = os.path.join(where, name)
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.relpath(full, self.root).replace(os.sep, "/")
                    yield Stored(path, os.stat(full).st_mtime)

    def remove(self, path: str) -> None:
        Path(self.full(path)).unlink(missing_ok=True)

    def remove_folders(self, folder: str, prefix: str) -> None:
        for name in self.names(folder):
            if f"{name}/".startswith(prefix):
                shutil.rmtree(self.full(f"{folder}/{name}"), ignore_errors=True)

    def arrow(self) -> tuple[Any, str]:
        from pyarrow import fs

        return fs.LocalFileSystem(), self.root


class Bucket(Storage):
    """A prefix of an S3 bucket.

    Args:
        root: ``s3://bucket/prefix``.
        options: of s3fs, for example ``{"key": ..., "secret": ..., "endpoint_url": ...}``.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root)
        self._base = root.removeprefix("s3://")
        try:
            import fsspec
            from botocore import exceptions

            self._unreachable = (exceptions.HTTPClientError, exceptions.ConnectionError)
            # Its cache of listings would hide what others have written.
            self._s3 = fsspec.filesystem("s3", use_listings_cache=False, **options)
        except ImportError as error:
            raise EnvironmentUnusableError(
                f"{root} cannot be used without s3fs",
                detail=str(error),
                next_step="pip install 'onceflow[s3]', on executors, too",
            ) from error

    def full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _key(self, path: str) -> str:
        return f"{self._base}/{path}"

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except self._unreachable as error:
            raise ConnectionError(str(error)) from error

    def make_folder(self, path: str) -> None:
        """A bucket has none."""

    def create(self, path: str, content: bytes) -> bool:
        try:
            with self._reached():
                self._s3.pipe_file(self._key(path), content, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes | None:
        try:
            with self._reached():
                content: bytes = self._s3.cat_file(self._key(path))
        except FileNotFoundError:
            return None
        return content

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        file = self._s3.open(self._key(path), "wb")
        try:
            yield file
        except BaseException:
            file.discard()
            file.closed = True  # or it would be written when it is collected
            raise
        file.close()

    def names(self, folder: str) -> list[str]:
        try:
            with self._reached():
                found = self._s3.ls(self._key(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def below(self, folder: str) -> Iterator[Stored]:
        for key, facts in self._s3.find(self._key(folder), detail=True).items():
            yield Stored(key.removeprefix(f"{self._base}/"), facts["LastModified"].timestamp())

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._s3.rm_file(self._key(path))

    def remove_folders(self, folder: str, prefix: str) -> None:
        found = self._s3.find(self._key(folder), prefix=prefix)
        if found:
            self._s3.rm(found)

    def arrow(self) -> tuple[Any, str]:
        from pyarrow import fs

        return fs.PyFileSystem(fs.FSSpecHandler(self._s3)), self._base


def check_storage(root: str, options: Mapping[str, Any]) -> None:
    """Check what a user has given.

    Raises:
        OptionError: an URL of an unknown kind, or options for a folder.
    """
    if "://" in root and not root.startswith("s3://"):
        raise OptionError(
            f"{root.partition('://')[0]}:// is not known", next_step="use a folder, or s3://bucket/prefix"
        )
    if options and "://" not in root:
        raise OptionError("storage_options= is for buckets", next_step="leave it out")


def storage_of(root: str, options: Mapping[str, Any]) -> Storage:
    """The storage of a folder, or of an URL that begins with ``s3://``.

    Raises:
        EnvironmentUnusableError: s3fs is not installed.
    """
    return Bucket(root, options) if "://" in root else LocalFolder(root)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

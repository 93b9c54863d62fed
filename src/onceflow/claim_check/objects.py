"""The objects of a store: a local folder, or a bucket.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from onceflow.claim_check.reference import NAME, REFERS, Reference
from onceflow.claim_check.scan import PIECE_BYTES, pieces_of, refers
from onceflow.clock import clock_ms
from onceflow.errors import (
    ClaimCheckError,
    EnvironmentUnusableError,
    OnceflowError,
    OptionError,
    StorageUnavailableError,
)
from onceflow.object_storage import (
    Bucket,
    Entry,
    FileChangedError,
    Folder,
    Storage,
    check_place,
    chunks_of,
    is_bucket,
    said,
)

MARKER = "onceflow-claim-check.json"
"""A file in every store. Without it, it is the wrong folder, or one that is not mounted."""

DAY_MS = 86_400_000
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_UNFINISHED = re.compile(r"\.unfinished-[0-9a-f]{32}")
_CREDENTIAL = re.compile("key|secret|token|password|credential|client|sas|certificate|expir")
_FILE = "file://"
_SAID_BYTES = 300


class Remembered(NamedTuple):
    """Where a collection has looked for references.

    Args:
        topics: those that were given to it. flows: those whose rows in other systems it has read.
        found: further topics in which there were references.
        referring: those of the flows whose rows had references.
    """

    topics: tuple[str, ...] = ()
    flows: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    referring: tuple[str, ...] = ()


class ObjectStore:
    """See the module.

    Args:
        url: ``file:///folder``, a local path, ``s3://bucket/prefix``, or another bucket (`object_storage.Bucket`).
        options: of the bucket, for example credentials. They appear in no text.

    Raises:
        OptionError: the URL cannot be used.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.url = _checked(os.fspath(url))
        self._options = dict(options or {})
        self.local = not is_bucket(self.url)
        self._opened: tuple[int, Storage] | None = None
        self._marked = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_marked": False}

    def __repr__(self) -> str:
        return f"<objects at {self.url}>"

    @property
    def place(self) -> str:
        """Where the objects are: two stores with the same URL may be in two services, or accounts. Options that are no
        credentials count, also those that make no difference: then a value is copied, although it is there."""
        options = {name: str(value) for name, value in self._options.items() if not _CREDENTIAL.search(name.lower())}
        return f"{self.url} {json.dumps(options, sort_keys=True)}" if options else self.url

    # ---- writing -------------------------------------------------------------------------------------

    def put(self, data: bytes) -> Reference:
        """Store a value. When it returns, the object survives a crash of this machine (or the service has it).

        Raises:
            StorageUnavailableError: the store cannot be written.
        """
        reference = _reference(hashlib.sha256(data).hexdigest(), len(data), refers(pieces_of(data)))
        with self._storing(reference.name):
            if not self._has(reference):
                self._storage.write(reference.name, data)
        reference.place = self.place
        return reference

    def put_file(self, path: str | os.PathLike[str]) -> Reference:
        """Store the content of a local file, in bounded memory. As `put`.

        Raises:
            StorageUnavailableError: the store cannot be written, or the file was changed meanwhile.
        """
        checksum, size = hashlib.sha256(), 0

        def read() -> Iterator[bytes]:
            nonlocal size
            while piece := file.read(PIECE_BYTES):
                checksum.update(piece)
                size += len(piece)
                yield piece

        with Path(path).open("rb") as file:
            pieces = read()
            found = refers(pieces)
            for _ in pieces:  # the scan ends with the first name
                pass
        reference = _reference(checksum.hexdigest(), size, found)
        with self._storing(reference.name):
            if not self._has(reference):
                try:
                    self._storage.write_file(reference.name, os.fspath(path), reference.sha256)
                except FileChangedError as error:
                    raise StorageUnavailableError(
                        f"The file {os.fspath(path)} was changed while it was stored",
                        detail=f"object {reference.name} was not written to {self.url}",
                        next_step="give files that nobody writes any more, for example by renaming them when they are "
                        "complete",
                    ) from error
        reference.place = self.place
        return reference

    def _has(self, reference: Reference) -> bool:
        """Whether the object is there already: another attempt has stored it today, or another record has this value.

        Objects appear as a whole, so the size is enough: one of another size was damaged, and is replaced. The content
        is verified by whoever reads it.
        """
        self._mark()
        try:
            found = self._storage.size(reference.name) == reference.size
        except FileNotFoundError:
            return False
        if found:  # its writer may not have come that far
            self._storage.settle(reference.name)
        return found

    def _mark(self) -> None:
        """Make this a store. On a condition: a collection may write down at the same moment where it has looked."""
        if self._marked:
            return
        try:
            self._storage.size(MARKER)
        except FileNotFoundError:
            self._storage.create(MARKER, json.dumps({"format": 1}).encode())
        self._marked = True

    def _write_marker(self, document: Mapping[str, Any]) -> None:
        self._storage.write(MARKER, json.dumps(document).encode())

    # ---- reading -------------------------------------------------------------------------------------

    def open(self, reference: Reference) -> IO[bytes]:
        """The content of an object, not yet verified but for its size.

        Raises:
            ClaimCheckError: the object is missing, or has another size.
            StorageUnavailableError: the store cannot be read.
        """
        try:
            size = self._storage.size(reference.name)
            if size != reference.size:
                raise altered(self.url, reference, f"it has {size:,} bytes instead of {reference.size:,}")
            return self._storage.open(reference.name)
        except FileNotFoundError:
            self.check()
            raise ClaimCheckError(
                f"Object {reference.name} is missing in {self.url}",
                detail=f"it had {reference.size:,} bytes; the store itself is there",
                next_step="check that this is the store it was written to. If so, it was collected too early (the "
                "topic of its reference was not given to `onceflow claim-check collect`, or that was written after "
                "--older-than), or somebody else has deleted it: restore it from a backup",
            ) from None
        except OnceflowError:
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
            document = json.loads(self._storage.read(MARKER))
            return Remembered(*(tuple(map(str, document.get(what, ()))) for what in Remembered._fields))
        except FileNotFoundError:
            raise StorageUnavailableError(
                f"There is no store of a claim check at {self.url}: the object {MARKER} is not there",
                next_step="check the name of the folder or bucket, and whether it is mounted. A store is made when the "
                "first value is stored",
            ) from None
        except OnceflowError:
            raise
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
            with self._storage.open(name) as file:
                yield from chunks_of(file)
        except FileNotFoundError:
            return
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failed("read", name, error) from error

    # ---- collecting ----------------------------------------------------------------------------------

    def days(self, until_ms: float = float("inf")) -> list[str]:
        """The days whose objects were all stored before a time (epoch milliseconds), the earliest first."""
        names = (entry.name for entry in self._listed(""))
        return sorted(name for name in names if _DAY.fullmatch(name) and _end_ms(name) <= until_ms)

    def names(self, day: str) -> Iterator[tuple[str, int]]:
        """Names and sizes of a day's objects. Other files are left out, but not what a killed writer has left."""
        for entry in self._listed(day):
            ours = NAME.fullmatch(f"{day}/{entry.name}") or _UNFINISHED.fullmatch(entry.name)
            if entry.size is not None and ours:
                yield f"{day}/{entry.name}", entry.size

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, at most a thousand. One that is gone already is no error."""
        try:
            self._storage.delete(names)
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failed("delete", names[0] if names else "", error) from error

    def _listed(self, folder: str) -> list[Entry]:
        try:
            return self._storage.entries(folder)
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failed("list", folder, error) from error

    # ---- inside --------------------------------------------------------------------------------------

    @property
    def _storage(self) -> Storage:
        """Each process opens its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            if self.local:
                storage: Storage = Folder(self.url.removeprefix(_FILE))
            else:
                storage = Bucket(self.url, self._options)
            self._opened = (os.getpid(), storage)
        return self._opened[1]

    @contextlib.contextmanager
    def _storing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OnceflowError:
            raise
        except Exception as error:
            raise self.failed("write", name, error) from error

    def failed(self, what: str, name: str, error: Exception) -> EnvironmentUnusableError:
        """The error for a store that refuses a request or does not answer. No record is to blame for it."""
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            return EnvironmentUnusableError(
                f"{self.url} cannot be a store",
                detail=f"to {what} {name or 'it'}: {said(error, self._options)[:_SAID_BYTES]}",
                next_step="give store= a folder, not a file, in which all hosts may write",
            )
        return StorageUnavailableError(
            f"The store at {self.url} cannot be used",
            detail=f"to {what} {name or 'it'}: {type(error).__name__}: {said(error, self._options)[:_SAID_BYTES]}",
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


def _checked(url: str) -> str:
    if url.startswith("local://"):
        url = _FILE + url.removeprefix("local://")
    check_place("store", url)
    if not url.strip("/"):
        raise OptionError(f"store={url!r} names no folder or bucket", next_step="for example s3://bucket/prefix")
    return url.rstrip("/") if "://" in url else os.path.abspath(url)

"""A log of what was committed: numbered files, each created only if it does not exist.

    _onceflow/<flow>/<thousand>/<number>.json                  an entry: a driver has taken the flow over, or a batch
    _onceflow/<flow>/<thousand>/<number>.checkpoint.parquet    the files of all entries up to this one
    _onceflow/schema.arrow                                     of all files, written before the first of them

Of two drivers that create the same number, one fails. A takeover is an entry, too, so it fences older drivers: their
next number is taken. Entries are never changed, and a file is committed if and only if an entry names it.
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.errors import EnvironmentUnusableError, ProtocolError
from onceflow.external.storage import Storage

log = logging.getLogger("onceflow.sink")

LOGS = "_onceflow"
#: The driver writes a checkpoint after so many entries, so a reader reads at most about so many of them.
CHECKPOINT_EVERY = 100
_PER_FOLDER = 1000
_VERSION = 1
_READERS = 16
_CHECKPOINT_ENDING = ".checkpoint.parquet"
_ENTRY = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_FILES = pa.schema(
    [
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("crc32c", pa.string()),
        ("partition", pa.string()),
        ("number", pa.int64()),
    ]
)


@dataclass(frozen=True)
class DataFile:
    """A file with rows.

    Args:
        path: below the root. bytes: its size. crc32c: of its content, as eight hexadecimal digits.
        partition: values of the columns of ``partition_by``, as text; None: null.
    """

    path: str
    rows: int
    bytes: int
    crc32c: str
    partition: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An entry of the log.

    Args:
        number: its place. generation: the number of the takeover under which it was written.
        progress: the progress row from this entry on; None: nothing was committed so far.
        batch: the last one that was committed. attempt: the one that this entry commits; "": it is a takeover.
        writer: different for all that create entries, so that a writer whose answer was lost knows its own.
    """

    number: int
    generation: int
    progress: str | None
    batch: int
    attempt: str
    writer: str
    files: tuple[DataFile, ...] = ()
    time_ms: int = 0

    def encoded(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()


def decoded(content: bytes, path: str) -> Entry:
    """Read an entry.

    Raises:
        ProtocolError: it is none, or was written by a newer version.
    """
    try:
        fields = json.loads(content)
        version = fields.pop("version")
        if version == _VERSION:
            return Entry(**{**fields, "files": tuple(DataFile(**each) for each in fields["files"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"{path} is no entry of a log of onceflow", detail=str(error), next_step="restore it from a backup"
        ) from error
    raise ProtocolError(f"{path} has version {version}", next_step="use a newer version of onceflow")


class BatchLog:
    """The log of one flow."""

    def __init__(self, storage: Storage, flow: str) -> None:
        self.storage = storage
        self.flow = flow

    def last(self) -> Entry | None:
        """The last entry; None: there is none."""
        for folder in reversed(_folders(self.storage, self.flow)):
            numbers = self._numbers(folder, _ENTRY)
            if numbers:
                return self.entry(max(numbers))
        return None

    def entry(self, number: int) -> Entry:
        path = self._path(number, ".json")
        content = self.storage.read(path)
        if content is None:
            raise ProtocolError(f"{self.storage.full(path)} is missing", next_step="restore it from a backup")
        return decoded(content, self.storage.full(path))

    def has(self, entry: Entry) -> bool:
        content = self.storage.read(self._path(entry.number, ".json"))
        return content is not None and decoded(content, self.storage.root).writer == entry.writer

    def create(self, entry: Entry) -> Entry:
        """Create an entry. Returns the one that has its number then: this one, or the one of another writer."""
        if self.storage.create(self._path(entry.number, ".json"), entry.encoded()):
            written = entry
        else:
            written = self.entry(entry.number)
        if written.writer == entry.writer and entry.number % CHECKPOINT_EVERY == 0:
            self._write_checkpoint(entry.number)
        return written

    def check_condition(self, entry: Entry) -> None:
        """Check that the storage refuses to create an entry again: everything depends on it.

        Raises:
            EnvironmentUnusableError: it does not.
        """
        if self.storage.create(self._path(entry.number, ".json"), entry.encoded()):
            raise EnvironmentUnusableError(
                f"{self.storage.root} does not refuse to create a file that exists, so two drivers could both write",
                flow=self.flow,
                next_step="use a storage that knows If-None-Match for PutObject, for example a newer version of it",
            )

    def files(self, end: int, after: int = 0) -> list[DataFile]:
        """The files that the entries after one, up to another one, have committed."""
        files, numbers = self._numbered(end, after)
        return [file for file, number in zip(files, numbers, strict=True) if number > after]

    def _numbered(self, end: int, after: int = 0) -> tuple[list[DataFile], list[int]]:
        """At least these files, and for each of them the number of its entry."""
        found: list[DataFile] = []
        numbers: list[int] = []
        begin = self._last_checkpoint(end)
        if begin > after:
            found, numbers = _read_checkpoint(self.storage.read(self._path(begin, _CHECKPOINT_ENDING)) or b"")
        with ThreadPoolExecutor(_READERS) as pool:
            for entry in pool.map(self.entry, range(max(begin, after) + 1, end + 1)):
                found += entry.files
                numbers += [entry.number] * len(entry.files)
        return found, numbers

    def _last_checkpoint(self, end: int) -> int:
        for folder in reversed(_folders(self.storage, self.flow)):
            numbers = [number for number in self._numbers(folder, _CHECKPOINT) if number <= end]
            if numbers:
                return max(numbers)
        return 0

    def _write_checkpoint(self, number: int) -> None:
        """Nothing depends on it but the time that readers take, so a failure is only logged."""
        try:
            files, numbers = self._numbered(number)
            self.storage.create(self._path(number, _CHECKPOINT_ENDING), _checkpoint(files, numbers))
        except Exception as error:
            log.warning("flow %s: no checkpoint was written in %s: %s", self.flow, self.storage.root, error)

    def _numbers(self, folder: str, pattern: re.Pattern[str]) -> list[int]:
        names = self.storage.names(f"{LOGS}/{self.flow}/{folder}")
        return [int(match[1]) for match in map(pattern.fullmatch, names) if match]

    def _path(self, number: int, ending: str) -> str:
        return f"{LOGS}/{self.flow}/{number // _PER_FOLDER:017d}/{number:020d}{ending}"


def flows_of(storage: Storage) -> list[str]:
    """The flows that have a log."""
    return [name for name in storage.names(LOGS) if name != _SCHEMA_NAME and not name.startswith(".")]


def next_entry(last: Entry | None, writer: str) -> Entry:
    """The entry with which a driver takes the flow over."""
    number = 1 if last is None else last.number + 1
    progress, batch = (None, 0) if last is None else (last.progress, last.batch)
    return Entry(number, number, progress, batch, "", writer, time_ms=int(time.time() * 1000))


# ---- the schema --------------------------------------------------------------------------------------

_SCHEMA_NAME = "schema.arrow"


def read_schema(storage: Storage) -> pa.Schema | None:
    """The schema of all files; None: no rows were written so far."""
    content = storage.read(f"{LOGS}/{_SCHEMA_NAME}")
    return None if content is None else pa.ipc.read_schema(pa.py_buffer(content))


def keep_schema(storage: Storage, schema: pa.Schema) -> pa.Schema:
    """Returns the schema that holds from now on: this one, or the one that was first."""
    if storage.create(f"{LOGS}/{_SCHEMA_NAME}", schema.serialize().to_pybytes()):
        return schema
    return read_schema(storage) or schema


# ---- checkpoints -------------------------------------------------------------------------------------


def _folders(storage: Storage, flow: str) -> list[str]:
    return [name for name in storage.names(f"{LOGS}/{flow}") if name.isdigit()]


def _checkpoint(files: Sequence[DataFile], numbers: Sequence[int]) -> bytes:
    rows: list[dict[str, Any]] = [
        {**asdict(file), "partition": json.dumps(file.partition), "number": number}
        for file, number in zip(files, numbers, strict=True)
    ]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, _FILES), out, compression="zstd")
    return out.getvalue()


def _read_checkpoint(content: bytes) -> tuple[list[DataFile], list[int]]:
    rows = pq.read_table(io.BytesIO(content)).to_pylist()
    numbers = [row.pop("number") for row in rows]
    return [DataFile(**{**row, "partition": json.loads(row["partition"])}) for row in rows], numbers

"""Formats of a local copy of a table partition: its commit record and pending changes."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import quote

import orjson

from onceflow.host.private_folders import in_home, make_private, own_folder, private_temporary
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.state.format import rows
from onceflow.state.stores.base import StoreCorruptError

if TYPE_CHECKING:
    from onceflow.protocol.record_columns import RecordColumns  # needs Arrow, which `onceflow doctor` does without

#: Names of blobs. The commit record was called marker earlier, and its blob still has that name.
COMMIT_RECORD, PENDING = "marker", "pending"
#: Kinds of rows that come from Kafka. Rows of the other kinds (indexes) are computed from them.
KINDS = (rows.VALUE, rows.MAP, rows.TIMER)

_FORMAT = 1
_DELETED = 0xFFFF_FFFF
# The smallest size of a row by its flags (see `rows.pack`).
_MIN_ROW_BYTES = {row[:1]: len(row) for row in (rows.pack(b"", e, v) for e in (None, 0) for v in (0, 1))}
DUE_ROW_BYTES = 1 + 8 + 1
"""The smallest size of a row that is due: flags, time, marks (``waiting_rows.py``)."""
_MIN_ROW_BYTES[bytes((rows.IS_DUE,))] = DUE_ROW_BYTES
TIMER_ROW_BYTES = len(rows.pack(rows.timer_payload(b"e", 0)))


AHEAD = "it is ahead of what is committed"
"""What `CommitRecord.misfit` returns for a copy that is ahead of the goal. Either Kafka has lost records, or a newer
driver has committed more than this one knows of."""


class CommitId(NamedTuple):
    """Identifies a transaction by batch id, producer id and producer epoch."""

    batch: int
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True)
class Goal:
    """What the driver knows is committed.

    Args:
        table_id, internal_id: Kafka's ids of the two topics. A topic that was deleted and created again has a new id.
        table_end, internal_end: the offset after the last committed record of each topic.
        last: the transaction that committed last, if it is known.
        changelog: False: the table has no topics. ``table_end`` is the number of the batch that has changed the
            partition last (0: none), ``internal_end`` is 0.
        open_ended: see `TableProgress`. Who reads the topics reads them to their ends.
    """

    flow: str
    table: str
    partition: int
    table_id: str
    internal_id: str
    table_end: int
    internal_end: int
    last: CommitId | None = None
    changelog: bool = True
    open_ended: bool = False

    @property
    def internal(self) -> str:
        """Name of the internal topic."""
        return self.table + INTERNAL_SUFFIX


@dataclass(frozen=True)
class CommitRecord:
    """What a local store contains: the rows of which flow and table partition, up to which offsets.

    Args:
        time_ms: when the store contained all that was committed, in epoch milliseconds. Kafka may have removed
            tombstones since then.
    """

    flow: str
    table: str
    partition: int
    table_id: str
    internal_id: str
    table_end: int
    internal_end: int
    time_ms: int

    def encode(self) -> bytes:
        return orjson.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, raw: bytes) -> CommitRecord | None:
        """The commit record in these bytes; None: unreadable, or of another format."""
        try:
            read = orjson.loads(raw)
            if read.pop("format") != _FORMAT:
                return None
            commit_record = cls(**read)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        numbers = (commit_record.partition, commit_record.table_end, commit_record.internal_end, commit_record.time_ms)
        return commit_record if all(isinstance(number, int) for number in numbers) else None

    @classmethod
    def of(cls, goal: Goal, time_ms: int) -> CommitRecord:
        fields = asdict(goal)
        for name in ("last", "changelog", "open_ended"):
            del fields[name]
        return cls(**fields, time_ms=time_ms)

    def at(self, goal: Goal) -> bool:
        return (self.table_end, self.internal_end) == (goal.table_end, goal.internal_end)

    def misfit(self, goal: Goal) -> str:
        """Why the copy cannot be continued; empty if it can."""
        if (self.flow, self.table, self.partition) != (goal.flow, goal.table, goal.partition):
            return f"it belongs to {self.table}-{self.partition} of flow {self.flow}"
        if (self.table_id, self.internal_id) != (goal.table_id, goal.internal_id):
            if not goal.changelog:
                return "it is of an earlier life of the flow, or of a table with a changelog"
            return "its topics were deleted and created again"
        if self.table_end > goal.table_end or self.internal_end > goal.internal_end:
            return AHEAD
        return ""


class Pending(NamedTuple):
    """Changes of a batch whose outcome is not known to this store.

    Args:
        ends: end offsets of the two topics when the batch is committed.
        base: end offsets of the two topics before the batch.
        changes: last row per row key, without index rows; None deletes the row.
    """

    commit: CommitId
    ends: tuple[int, int]
    base: tuple[int, int]
    changes: Sequence[tuple[bytes, bytes | None]]

    def follows(self, commit_record: CommitRecord) -> bool:
        return self.base == (commit_record.table_end, commit_record.internal_end)

    def encode(self) -> bytes:
        """First the sizes of a header, of all keys and of all rows, then header, keys and rows.

        This format needs no loop over rows in Python.
        """
        head = orjson.dumps({"format": _FORMAT, "commit": list(self.commit), "ends": self.ends, "base": self.base})
        keys = [key for key, _ in self.changes]
        values = [row or b"" for _, row in self.changes]
        sizes = [_DELETED if row is None else len(row) for _, row in self.changes]
        counts = struct.pack(f"<II{2 * len(keys)}I", len(head), len(keys), *map(len, keys), *sizes)
        return b"".join((counts, head, *keys, *values))

    @classmethod
    def decode(cls, raw: bytes | None) -> Pending | None:
        """The pending changes in these bytes; None: there are none, or they are of another format.

        Raises:
            StoreCorruptError: the bytes are damaged.
        """
        if raw is None:
            return None
        try:
            head_size, count = struct.unpack_from("<II", raw)
            sizes = struct.unpack_from(f"<{2 * count}I", raw, 8)
            head_at = 8 + 8 * count
            header = orjson.loads(raw[head_at : head_at + head_size])
            if header["format"] != _FORMAT:
                return None
            lengths = [0 if size == _DELETED else size for size in sizes]
            ends = list(accumulate(lengths, initial=head_at + head_size))
            parts = [raw[start:end] for start, end in pairwise(ends)]
            if ends[-1] != len(raw):
                raise ValueError("its size is wrong")
            changes = [
                (key, None if size == _DELETED else row)
                for key, row, size in zip(parts[:count], parts[count:], sizes[count:], strict=True)
            ]
            return cls(CommitId(*header["commit"]), tuple(header["ends"]), tuple(header["base"]), changes)
        except (ValueError, TypeError, KeyError, struct.error) as unreadable:
            raise StoreCorruptError(f"its pending changes cannot be read: {unreadable}") from unreadable


# ---- records -----------------------------------------------------------------------------------------


class Chunk(Protocol):
    """Consecutive committed records (``client.committed.Chunk``)."""

    keys: list[bytes | None]
    values: list[bytes | None]
    headers: dict[int, list[tuple[str, bytes | None]]]
    next_offset: int
    whole: bool


class Columns(Protocol):
    """The same in columns (``client.column_chunks.ColumnChunk``)."""

    @property
    def records(self) -> RecordColumns: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def whole(self) -> bool: ...


Changes = dict[bytes, bytes | None]


def table_changes(chunk: Chunk, changes: Changes) -> int:
    """Adds the rows of records of the table topic. Returns how many records were not written by a processor."""
    keys, packed = chunk.keys, packed_values(chunk)
    if None not in keys:
        changes.update(zip([rows.VALUE + key for key in keys], packed, strict=True))  # type: ignore[operator]
        return 0
    fit = [(at, key) for at, key in enumerate(keys) if key is not None]
    changes.update({rows.VALUE + key: packed[at] for at, key in fit})
    return len(keys) - len(fit)


def packed_values(chunk: Chunk) -> list[bytes | None]:
    """The row of each record of the table topic; None for a tombstone."""
    packed = [None if value is None else b"\0" + value for value in chunk.values]
    fields: dict[int, bytes] = {}  # what the rows begin with; many records share one list of headers
    for at, headers in chunk.headers.items():
        value = chunk.values[at]
        if value is not None:
            begin = fields.get(id(headers))
            if begin is None:
                begin = fields[id(headers)] = rows.from_record(b"", headers)
            packed[at] = begin + value
    return packed


def is_internal_row(key: bytes, row: bytes | None) -> bool:
    """Whether a processor can have written this row. A restore must not fail because of records of other programs."""
    kind = key[:1]
    if kind not in (rows.MAP, rows.TIMER):
        return False
    if row is None or kind == rows.MAP:
        return row is None or (row[:1] in _MIN_ROW_BYTES and len(row) >= _MIN_ROW_BYTES[row[:1]])
    return len(row) == TIMER_ROW_BYTES and not row[0]


# ---- folders -----------------------------------------------------------------------------------------


def default_state_dir() -> Path:
    """``ONCEFLOW_STATE_DIR``, else a folder in the user's home, else (if that is not writable) a temporary folder.

    Raises:
        EnvironmentUnusableError: the folder belongs to another user.
    """
    named = os.environ.get("ONCEFLOW_STATE_DIR")
    if named:
        return Path(named)
    earlier = Path(tempfile.gettempdir(), f"onceflow-state-{os.getuid()}")
    folder = in_home(".local", "state", "onceflow")
    if folder.is_relative_to(tempfile.gettempdir()) and earlier.exists():  # of an earlier version: it has the state
        return own_folder(earlier, "ONCEFLOW_STATE_DIR")
    try:
        return make_private(folder)
    except OSError:
        return make_private(private_temporary() / "state")


def partition_folder(state_dir: Path, flow: str, table: str, partition: int) -> Path:
    """``<state_dir>/<flow>/<table>/<partition>``. Names are escaped, so that each is the name of one folder."""
    return state_dir / folder_name(flow) / folder_name(table) / str(partition)


def folder_name(name: str) -> str:
    """A name as the name of one folder."""
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted

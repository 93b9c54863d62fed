"""Writes the data files of one task of an attempt for a table of Delta Lake."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as types

from onceflow.external.delta_storage import DeltaStorage

#: Rows are kept in memory until there are so many bytes; then each open file gets a row group.
_BUFFER_BYTES = 64 << 20
#: How Delta's readers write null as a value of a partition column.
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
#: Tells Spark that days are those of the Gregorian calendar. Without it, Spark 3 refuses to read days before 1582-10-15
#: and times before 1900, or moves them, depending on ``spark.sql.parquet.datetimeRebaseModeInRead``. (Spark's
#: ``DataSourceUtils.datetimeRebaseSpec``: files of Spark 3.0 and later need no conversion.)
_CALENDAR = {"org.apache.spark.version": "3.0.0"}
#: Bytes of the name of one folder, and of all that a file is in. File systems take 255 in a name, S3 1,024 in a path.
_NAME_MAX, _NAMES_MAX = 250, 500


@dataclass(frozen=True)
class DataFile:
    """A file with rows.

    Args:
        path: below the root. bytes: its size.
        partition: values of the partition columns, as Delta's protocol serializes them; None: null.
    """

    path: str
    rows: int
    bytes: int
    partition: dict[str, str | None] = field(default_factory=dict)


class _Counted(io.RawIOBase):
    """Passes on what is written, as bytes, and knows how much it was."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def write(self, content: Any) -> int:
        given = bytes(content)
        self._file.write(given)
        self.bytes += len(given)
        return len(given)


@dataclass
class _Open:
    """A file, and its rows that are not written yet."""

    path: str
    partition: dict[str, str | None]
    out: _Counted
    writer: Any
    rows: list[pa.RecordBatch] = field(default_factory=list)
    count: int = 0


class TaskFiles:
    """One file for each combination of values of the partition columns.

    Args:
        stack: closes the files. They last when its block has ended without an error.
        folder: of the attempt. Files are in folders below it that have the values, such as ``day=2026-01-01``: Polars
            takes them from there, and not from the table's log. Names of files do not depend on these folders, because
            file systems do not tell all of them apart.
        name: of the files, without its ending.
    """

    def __init__(
        self, stack: contextlib.ExitStack, storage: DeltaStorage, folder: str, name: str, partition_by: Sequence[str]
    ) -> None:
        self._stack = stack
        self._storage = storage
        self._folder, self._name = folder, name
        self._partition_by = partition_by
        self._open: dict[tuple[str | None, ...], _Open] = {}
        self._buffered = 0

    def write(self, batch: pa.RecordBatch) -> None:
        for values, rows in divided(batch, self._partition_by):
            rows = rows.drop_columns(list(self._partition_by))
            file = self._open.get(values) or self._new(values, rows.schema)
            file.rows.append(rows)
            file.count += rows.num_rows
        self._buffered += batch.nbytes
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def finished(self) -> list[DataFile]:
        """Write what is left. Returns the files."""
        self._flush()
        for each in self._open.values():
            each.writer.close()
        return [DataFile(each.path, each.count, each.out.bytes, each.partition) for each in self._open.values()]

    def _new(self, values: tuple[str | None, ...], schema: pa.Schema) -> _Open:
        partition = dict(zip(self._partition_by, values, strict=True))
        path = "/".join([self._folder, *_folders(partition), f"{self._name}-{len(self._open)}.parquet"])
        out = _Counted(self._stack.enter_context(self._storage.writing(path)))
        writer = pq.ParquetWriter(out, schema.with_metadata(_CALENDAR), compression="snappy")
        self._stack.callback(_give_up, writer)
        self._open[values] = _Open(path, partition, out, writer)
        return self._open[values]

    def _flush(self) -> None:
        for each in self._open.values():
            if each.rows:
                each.writer.write_table(pa.Table.from_batches(each.rows).combine_chunks())
                each.rows.clear()
        self._buffered = 0


def divided(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """The rows by the values of these columns, as Delta serializes them. Rows keep their order."""
    if not batch.num_rows:
        return
    if not names:
        yield (), batch
        return
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for name in names:
        column = batch.column(name).dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(column.dictionary)) + column.indices.to_numpy(zero_copy_only=False)
        _, codes = np.unique(codes, return_inverse=True)  # so that they stay small
    order = np.argsort(codes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        first = int(rows[0])
        yield tuple(_text(batch.column(name)[first].as_py()) for name in names), batch.take(pa.array(rows))


def can_divide_by(kind: pa.DataType) -> bool:
    """Whether each value of a type has a text of its own. Of the others, ``-0.0`` and ``0.0`` are equal and have two
    texts, NaN has many values, and writers do not agree on the texts of timestamps and bytes."""
    return bool(types.is_string(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind))


def _folders(partition: Mapping[str, str | None]) -> list[str]:
    """Folders with the values, as Hive names them; none if the names would be too long for file systems and stores."""
    named = [
        f"{quote(name, safe='')}={NULL_PARTITION if value is None else quote(value, safe='')}"
        for name, value in partition.items()
    ]
    fits = all(len(each) <= _NAME_MAX for each in named) and len("/".join(named)) <= _NAMES_MAX
    return named if fits else []


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def _give_up(writer: Any) -> None:
    """Has no effect on a writer that is closed. Otherwise the task fails, and its file is not used."""
    with contextlib.suppress(Exception):
        writer.close()

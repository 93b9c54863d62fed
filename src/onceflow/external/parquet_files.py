"""Writes the Parquet files of one task of an attempt."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.external.batch_log import DataFile
from onceflow.external.parquet_columns import divided, folder_name, written_schema
from onceflow.external.storage import Storage

#: Rows are kept in memory until there are so many bytes; then each open file gets a row group.
_BUFFER_BYTES = 64 << 20


class _Counted(io.RawIOBase):
    """Passes on what is written, and knows how much it was, and its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.bytes = 0
        self.crc = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def write(self, content: Any) -> int:
        given = bytes(content)
        self._file.write(given)
        self.bytes += len(given)
        self.crc = google_crc32c.extend(self.crc, given)
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
    """One file for each combination of values of ``partition_by``.

    Args:
        stack: closes the files. They last when its block has ended without an error.
        folder: of the attempt. name: of the files.
    """

    def __init__(self, stack: contextlib.ExitStack, storage: Storage, folder: str, name: str) -> None:
        self._stack = stack
        self._storage = storage
        self._folder = folder
        self._name = name
        self._open: dict[tuple[str | None, ...], _Open] = {}
        self._schema: Any = None  # None: there were no rows so far
        self._buffered = 0
        self.partition_by: Sequence[str] = ()
        self.compression = "zstd"
        self.keeps_partitions = True  # whether files have the columns of ``partition_by``, too

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._schema is None:
            self._schema = written_schema(batch.schema)
        if batch.schema != self._schema:
            (batch,) = pa.Table.from_batches([batch]).cast(self._schema).combine_chunks().to_batches()
        for values, rows in divided(batch, self.partition_by):
            if not self.keeps_partitions:
                rows = rows.drop_columns(list(self.partition_by))
            file = self._open.get(values) or self._new(values)
            file.rows.append(rows)
            file.count += rows.num_rows
        self._buffered += batch.nbytes
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def finished(self) -> tuple[pa.Schema, list[DataFile]]:
        """Write what is left. Returns the schema of the files, and the files."""
        self._flush()
        for each in self._open.values():
            each.writer.close()
        return self._schema, [
            DataFile(each.path, each.count, each.out.bytes, f"{each.out.crc:08x}", each.partition)
            for each in self._open.values()
        ]

    def _new(self, values: tuple[str | None, ...]) -> _Open:
        partition = dict(zip(self.partition_by, values, strict=True))
        folders = [folder_name(name, value) for name, value in partition.items()]
        path = "/".join([self._folder, *folders, self._name])
        out = _Counted(self._stack.enter_context(self._storage.writing(path)))
        writer = pq.ParquetWriter(out, self._kept(), compression=self.compression)
        self._stack.callback(_give_up, writer)
        self._open[values] = _Open(path, partition, out, writer)
        return self._open[values]

    def _kept(self) -> pa.Schema:
        dropped = () if self.keeps_partitions else self.partition_by
        return pa.schema([field for field in self._schema if field.name not in dropped])

    def _flush(self) -> None:
        for each in self._open.values():
            if each.rows:
                each.writer.write_table(pa.Table.from_batches(each.rows, self._kept()).combine_chunks())
                each.rows.clear()
        self._buffered = 0


def _give_up(writer: Any) -> None:
    """Has no effect on a writer that is closed. Otherwise the task fails, and its file is not used."""
    with contextlib.suppress(Exception):
        writer.close()

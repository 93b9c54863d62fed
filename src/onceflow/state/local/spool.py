"""Collects rows on disk until there are enough for one commit, so that few of them are in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, TypeVar

import pyarrow as pa

from onceflow.host.private_folders import make_private
from onceflow.state.local.row_columns import RowColumns
from onceflow.state.local.sorted_rows import merged
from onceflow.state.stores.base import unusable

_T = TypeVar("_T")
_SCHEMA = pa.schema([("key", pa.binary()), ("row", pa.binary())])
_BLOCK_ROWS, _BLOCK_BYTES = 50_000, 2 << 20  # at once, of a part; they become Python objects together


class Spool(Generic[_T]):
    """Parts in the order in which they were added. The last part stays in memory, and often there is only one.

    Args:
        folder: where an unnamed temporary file is created when a second part is added. Nothing remains of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._on_disk: list[tuple[_T, list[tuple[int, int]]]] = []  # with the place and the size of each block
        self._size = 0  # of the file
        self._last: tuple[_T, RowColumns] | None = None
        self.rows = self.nbytes = 0

    def __enter__(self) -> Spool[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # what the disk did not take is written again now; nobody needs it any more
                self._file.close()

    def add(self, mark: _T, part: RowColumns) -> None:
        """Add a part and its mark. Its rows are sorted by `sorted_rows`.

        Raises:
            EnvironmentUnusableError: the disk is full, or the folder cannot be written.
        """
        if self._last is not None:
            before, columns = self._last
            try:
                self._on_disk.append((before, [self._written(block) for block in _blocks(columns)]))
            except OSError as refused:
                raise unusable(self._folder, "The local state cannot be written", refused) from refused
        self._last = (mark, part)
        self.rows += len(part.keys)
        self.nbytes += part.nbytes

    def take(self) -> Iterator[tuple[_T, Iterator[RowColumns]]]:
        """Return all parts in blocks, and remove them from the spool."""
        for mark, places in self._on_disk:
            yield mark, map(self._read, places)
        if self._last is not None:
            mark, columns = self._last
            yield mark, _blocks(columns)
        self._on_disk, self._last, self._size, self.rows, self.nbytes = [], None, 0, 0, 0

    def take_merged(self) -> tuple[_T, Iterator[RowColumns]] | None:
        """As `take`, as if it were one part with the last mark. None: nothing was added."""
        parts = list(self.take())
        return (parts[-1][0], merged(blocks for _, blocks in parts)) if parts else None

    def _written(self, block: RowColumns) -> tuple[int, int]:
        if self._file is None:
            make_private(self._folder)  # not every store has files there
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed with the spool)
        raw = memoryview(pa.RecordBatch.from_arrays([block.keys, block.rows], schema=_SCHEMA).serialize())
        at = self._size
        while raw:
            count = os.pwrite(self._file.fileno(), raw, self._size)
            self._size, raw = self._size + count, raw[count:]
        return at, self._size - at

    def _read(self, place: tuple[int, int]) -> RowColumns:
        assert self._file is not None
        at, size = place
        try:
            raw = os.pread(self._file.fileno(), size, at)
            if len(raw) != size:
                raise OSError(f"{len(raw)} bytes of {size} in a temporary file")
        except OSError as refused:
            raise unusable(self._folder, "The local state cannot be read", refused) from refused
        return RowColumns(*pa.ipc.read_record_batch(pa.py_buffer(raw), _SCHEMA).columns)


def _blocks(part: RowColumns) -> Iterator[RowColumns]:
    count = len(part.keys)
    at_once = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * count // max(1, part.nbytes)))
    for at in range(0, count, at_once):
        yield RowColumns(part.keys.slice(at, at_once), part.rows.slice(at, at_once))

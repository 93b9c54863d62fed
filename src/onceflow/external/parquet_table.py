"""``ParquetTable``: reads what flows have committed to a folder or a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from onceflow.durations import duration_ms
from onceflow.errors import DataLossError
from onceflow.external.batch_log import BatchLog, DataFile, flows_of, read_schema
from onceflow.external.parquet import DATA
from onceflow.external.storage import Storage, check_storage, storage_of


@dataclass(frozen=True)
class ParquetSnapshot:
    """What was committed at one moment: for each flow all batches up to one, and nothing of later ones.

    Args:
        entries: the files, with their sizes, checksums and values of ``partition_by``.
        position: the last entry of the log of each flow. See ``ParquetTable.snapshot``.
        schema: of all files; None: there are no rows.
    """

    entries: tuple[DataFile, ...]
    position: Mapping[str, int]
    schema: pa.Schema | None
    _storage: Storage = field(repr=False)

    @property
    def files(self) -> list[str]:
        """Paths or URLs, for example for ``spark.read.parquet(*files)``."""
        return [self._storage.full(file.path) for file in self.entries]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.entries)

    def where(self, **partition: str | None) -> ParquetSnapshot:
        """Only the files with these values of columns of ``partition_by``, as text; None: null."""
        wanted = tuple(
            file for file in self.entries if all(file.partition.get(k, "") == v for k, v in partition.items())
        )
        return ParquetSnapshot(wanted, self.position, self.schema, self._storage)

    def dataset(self) -> Any:
        """A ``pyarrow.dataset.Dataset`` of the files."""
        from pyarrow import dataset

        if self.schema is None:
            return dataset.dataset(pa.table({}))
        filesystem, root = self._storage.arrow()
        paths = [f"{root}/{file.path}" for file in self.entries]
        return dataset.dataset(paths, schema=self.schema, format="parquet", filesystem=filesystem)

    def to_table(self, **arguments: Any) -> pa.Table:
        """All rows as an Arrow table. The arguments are those of ``pyarrow.dataset.Dataset.to_table``."""
        return self.dataset().to_table(**arguments)

    def verify(self) -> None:
        """Read all files, and compare their sizes and checksums with those in the log.

        Raises:
            DataLossError: a file is missing, or has changed.
        """
        for file in self.entries:
            content = self._storage.read(file.path)
            if content is None or len(content) != file.bytes:
                found = "is missing" if content is None else f"has {len(content)} bytes instead of {file.bytes}"
            elif f"{google_crc32c.value(content):08x}" != file.crc32c:
                found = "has changed"
            else:
                continue
            raise DataLossError(
                f"A committed file {found}",
                detail=self._storage.full(file.path),
                next_step="restore it from a backup; only a vacuum of onceflow may remove files",
            )


class ParquetTable:
    """What flows have committed with a `ParquetSink`.

    Args:
        root: its folder, or ``s3://bucket/prefix``. storage_options: of s3fs.

    Raises:
        OptionError: arguments that do not go together.
        EnvironmentUnusableError: s3fs is not installed.
    """

    def __init__(self, root: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> None:
        given = str(root)
        self.root = given.rstrip("/") if "://" in given else os.path.abspath(given)
        check_storage(self.root, storage_options or {})
        self._storage = storage_of(self.root, storage_options or {})

    def snapshot(self, *, after: ParquetSnapshot | None = None) -> ParquetSnapshot:
        """What is committed now.

        Args:
            after: an earlier snapshot: only the files that were committed since then.
        """
        known = {} if after is None else after.position
        found: list[DataFile] = []
        position: dict[str, int] = {}
        for flow in flows_of(self._storage):
            log = BatchLog(self._storage, flow)
            last = log.last()
            if last is not None:
                found += log.files(last.number, known.get(flow, 0))
                position[flow] = last.number
        return ParquetSnapshot(tuple(found), position, read_schema(self._storage), self._storage)

    def vacuum(self, *, older_than: str = "7 days", dry_run: bool = False) -> list[str]:
        """Remove files of attempts that were never committed, for example of tasks that outlived their driver.

        Args:
            older_than: files that are younger stay. It must be longer than any batch takes.

        Returns:
            The paths or URLs of these files.
        """
        oldest = time.time() - duration_ms(older_than) / 1000
        # Listed first: what is committed meanwhile is in the snapshot.
        present = [file.path for file in self._storage.below(DATA) if file.modified_s < oldest]
        committed = {file.path for file in self.snapshot().entries}
        unused = [path for path in present if path not in committed]
        if not dry_run:
            for path in unused:
                self._storage.remove(path)
        return [self._storage.full(path) for path in unused]

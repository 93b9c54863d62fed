"""``ParquetSink``: Parquet files in a folder or a bucket, and a log that says which of them are committed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.errors import OptionError
from onceflow.external.batch_log import BatchLog, DataFile, Entry, keep_schema, next_entry, read_schema
from onceflow.external.parquet_columns import check_partition_by, check_same, written_schema
from onceflow.external.parquet_files import TaskFiles
from onceflow.external.sink import BatchAttempt, ExternalSink, Opened, fenced, older_state
from onceflow.external.storage import Storage, check_storage, dataset_of, storage_of

DATA = "data"
_COMPRESSIONS = ("zstd", "snappy", "gzip", "none")


class ParquetSink(ExternalSink):
    """Writes rows to Parquet files in a folder or an S3 bucket. Read them with `ParquetTable`, which knows those that
    are committed.

    Tasks write files that nobody else writes. The driver commits a batch by creating the next entry of the flow's log,
    on the condition that nobody else has; the entry has the progress and the names of the files. Several flows may
    write the same folder, if their columns are the same.

    Args:
        root: a folder, or ``s3://bucket/prefix``. It is created.
        partition_by: columns by whose values rows are divided into files. Files keep these columns.
        compression: of the files: ``zstd``, ``snappy``, ``gzip`` or ``none``.
        storage_options: of s3fs, for example ``{"key": ..., "secret": ..., "endpoint_url": ...}``. They are sent to the
            tasks. None: s3fs takes them from the environment.
        shared: whether the executors of a cluster have this folder, too. Otherwise tasks must run on the driver's
            machine. Has no meaning for buckets.

    Raises:
        OptionError: arguments that do not go together.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        partition_by: Sequence[str] = (),
        compression: str = "zstd",
        storage_options: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> None:
        given = str(root)
        self.root = given.rstrip("/") if "://" in given else os.path.abspath(given)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.compression = compression
        self.local_only = "://" not in given and not shared
        self._options = dict(storage_options or {})
        self._storage: Storage | None = None
        self._last: dict[str, Entry] = {}
        self._unanswered: dict[tuple[str, int | None], str] = {}  # writers of takeovers that have raised
        self._schema: pa.Schema | None = None
        check_storage(self.root, self._options)
        if compression not in _COMPRESSIONS:
            raise OptionError(
                f"compression={compression!r} is unknown", next_step=f"use one of {', '.join(_COMPRESSIONS)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_storage": None, "_last": {}, "_unanswered": {}, "_schema": None}

    @property
    def target(self) -> str:
        return self.root

    @property
    def dataset(self) -> tuple[str, str]:
        return dataset_of(self.root)

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            self._storage = storage_of(self.root, self._options)
        return self._storage

    def check(self, schema: pa.Schema) -> None:
        schema = written_schema(schema)
        check_partition_by(self.partition_by, schema)
        known = read_schema(self.storage)
        if known is not None:
            check_same(known, schema, self.root)

    def open(self, flow: str, generation: int | None) -> Opened:
        log = BatchLog(self.storage, flow)
        while True:
            last = log.last()
            if generation is not None:
                found = 0 if last is None else last.generation
                # An earlier call may have taken it over, and its answer was lost.
                ours = last is not None and last.writer == self._unanswered.get((flow, generation))
                if generation != found and not ours:
                    raise fenced(self.root, flow, generation, found)
            entry = next_entry(last, uuid.uuid4().hex)
            self._unanswered[flow, generation] = entry.writer
            if log.create(entry).writer == entry.writer:
                break
        del self._unanswered[flow, generation]
        log.check_condition(entry)
        if last is not None:  # what the last driver has left of the batch after
            self.storage.remove_folders(f"{DATA}/{flow}", f"{last.generation}-{last.batch + 1}-")
        self._last[flow] = entry
        return Opened(entry.generation, entry.progress)

    def begin(self, attempt: BatchAttempt) -> None:
        self.storage.make_folder(f"{DATA}/{attempt.flow}")
        if attempt.attempt > 1:  # the last one may have failed because the storage cannot be reached
            BatchLog(self.storage, attempt.flow).last()

    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        # Two tasks never have the same name; if they did by mistake, neither would change the other's file.
        name = f"{task}-{uuid.uuid4().hex[:8]}.parquet"
        with contextlib.ExitStack() as stack:
            files = TaskFiles(stack, self.storage, f"{DATA}/{attempt.flow}/{attempt}", name)
            files.partition_by, files.compression = self.partition_by, self.compression
            for batch in batches:
                files.write(batch)
            schema, written = files.finished()
        if not written:
            return b""
        text = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return json.dumps({"schema": text, "files": [asdict(file) for file in written]}).encode()

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        flow, log = attempt.flow, BatchLog(self.storage, attempt.flow)
        last = self._last.get(flow) or log.last()
        if last is None or last.generation != attempt.generation:
            raise fenced(self.root, flow, attempt.generation, 0 if last is None else last.generation)
        if not log.has(last):
            raise older_state(self.root, flow, f"entry {last.number} of the log is not there any more")
        entry = Entry(
            last.number + 1,
            attempt.generation,
            progress,
            attempt.batch,
            str(attempt),
            uuid.uuid4().hex,
            tuple(self._files(receipts)),
            int(time.time() * 1000),
        )
        while (written := log.create(entry)).writer != entry.writer:
            if written.generation != attempt.generation:
                raise fenced(self.root, flow, attempt.generation, written.generation)
            entry = replace(entry, number=entry.number + 1)
        self._last[flow] = entry

    def _files(self, receipts: Sequence[bytes]) -> Iterator[DataFile]:
        for receipt in filter(None, receipts):
            found = json.loads(receipt)
            if self._schema is None:
                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
                self._schema = keep_schema(self.storage, schema)
                check_same(self._schema, schema, self.root)
            yield from (DataFile(**file) for file in found["files"])

    def abort(self, attempt: BatchAttempt) -> None:
        self.storage.remove_folders(f"{DATA}/{attempt.flow}", f"{attempt}/")

    def close(self) -> None:
        self._storage = None

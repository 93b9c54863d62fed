"""``DeltaSink``: rows in a table of Delta Lake, whose log decides what is committed."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, SchemaError
from onceflow.external.batch_log import BatchLog, DataFile, Entry, next_entry
from onceflow.external.parquet_columns import check_partition_by, written_schema
from onceflow.external.parquet_files import TaskFiles
from onceflow.external.sink import BatchAttempt, ExternalSink, Opened, fenced, older_state
from onceflow.external.storage import LocalFolder, dataset_of

_FILES = "onceflow"
#: What a table may ask of its writers, so that files can be added without looking at their rows.
_FEATURES = {"appendOnly", "invariants", "timestampNtz", "inCommitTimestamp", "domainMetadata", "v2Checkpoint"}
_TRIES = 20


class DeltaSink(ExternalSink):
    """Appends rows to a table of Delta Lake in a folder.

    Tasks write files. The driver adds them in one commit of the table, which also has a transaction identifier
    (``txnAppId`` ``onceflow.<flow>``) whose version grows with each takeover and each batch. Of two commits that were
    prepared for the same version of the table and have the same identifier, Delta refuses the second one: so an older
    driver is fenced. The version names an entry of a log beside the table (``_onceflow``), which has the progress row.
    Other applications may write the table meanwhile.

    Args:
        root: the folder of the table. A table that does not exist is created with the columns of the rows.
        partition_by: partition columns of a table that is created. A table that exists has its own.
        shared: whether the executors of a cluster have this folder, too.
    """

    def __init__(self, root: str | Path, *, partition_by: Sequence[str] = (), shared: bool = False) -> None:
        self.root = str(Path(root).absolute())
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.local_only = not shared
        self._storage = LocalFolder(self.root)
        self._last: dict[str, int] = {}  # the last entry that this driver has committed

    @property
    def target(self) -> str:
        return self.root

    @property
    def dataset(self) -> tuple[str, str]:
        return dataset_of(self.root)

    def check(self, schema: pa.Schema) -> None:
        given = written_schema(schema)
        delta = _delta()
        if not delta.DeltaTable.is_deltatable(self.root):
            check_partition_by(self.partition_by, given)
            delta.DeltaTable.create(self.root, given, mode="ignore", partition_by=list(self.partition_by) or None)
        table = self._table()
        _check_features(table, self.root)
        check_partition_by(table.metadata().partition_columns, given)
        known = {field.name: field for field in _schema(table)}
        for field in given:
            if field.name not in known or str(known[field.name].type) != str(field.type):
                raise SchemaError(
                    f"Column {field.name} does not fit the table in {self.root}",
                    detail=f"the rows have {field.type}, "
                    f"the table has {known[field.name].type if field.name in known else 'no such column'}",
                    next_step="cast it, leave it out, or add it to the table",
                )
        missing = [name for name, field in known.items() if not field.nullable and name not in given.names]
        if missing:
            raise SchemaError(
                f"Columns {', '.join(missing)} of the table in {self.root} must not be null",
                next_step="select them",
            )

    def open(self, flow: str, generation: int | None) -> Opened:
        log = BatchLog(self._storage, flow)
        for _ in range(_TRIES):
            last = log.last()
            found = 0 if last is None else last.generation
            if generation is not None and generation != found:
                raise fenced(self.root, flow, generation, found)
            table = self._table()
            committed = self._committed(table, log)
            entry = next_entry(committed, uuid.uuid4().hex)
            number = 1 if last is None else last.number + 1
            entry = Entry(number, number, entry.progress, entry.batch, "", entry.writer, time_ms=entry.time_ms)
            if log.create(entry).writer != entry.writer:
                continue
            generation = None if generation is None else entry.generation
            with _conflicts() as conflict:
                self._add(table, flow, entry)
            if not conflict:
                log.check_condition(entry)
                self._last[flow] = entry.number
                return Opened(entry.generation, entry.progress)
        raise ConnectionError(f"{self.root} is written by too many others at once")

    def begin(self, attempt: BatchAttempt) -> None:
        self._storage.make_folder(f"{_FILES}/{attempt.flow}")

    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        columns = list(self._table().metadata().partition_columns)
        name = f"{task}-{uuid.uuid4().hex[:8]}.parquet"
        with contextlib.ExitStack() as stack:
            files = TaskFiles(stack, self._storage, f"{_FILES}/{attempt.flow}/{attempt}", name)
            files.partition_by, files.compression, files.keeps_partitions = columns, "snappy", False
            for batch in batches:
                files.write(batch)
            _, written = files.finished()
        return json.dumps([vars(file) for file in written]).encode()

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        flow, log = attempt.flow, BatchLog(self._storage, attempt.flow)
        files = tuple(DataFile(**file) for receipt in receipts for file in json.loads(receipt))
        table = self._table()
        last = log.last()
        if last is None or last.generation != attempt.generation:
            raise fenced(self.root, flow, attempt.generation, 0 if last is None else last.generation)
        committed = self._committed(table, log)
        number = 0 if committed is None else committed.number
        if number != self._last.get(flow, number) or committed is None or committed.generation != attempt.generation:
            raise older_state(self.root, flow, f"the table is at entry {number}, not at that of the last commit")
        now_ms = int(time.time() * 1000)
        entry = Entry(
            last.number + 1, last.generation, progress, attempt.batch, str(attempt), uuid.uuid4().hex, files, now_ms
        )
        written = log.create(entry)
        if written.writer != entry.writer:
            raise fenced(self.root, flow, attempt.generation, written.generation)
        with _conflicts() as conflict:
            self._add(table, flow, entry)
        if conflict:
            table = self._table()
            newest = self._committed(table, log)
            if newest is None or newest.generation != attempt.generation:
                raise fenced(self.root, flow, attempt.generation, newest.generation if newest else 0)
            raise BatchAbortedError(
                f"The table in {self.root} was changed by others in a way that does not go with the batch",
                detail=str(conflict[0]),
                next_step="none: the batch is run again",
            )
        self._last[flow] = entry.number

    def abort(self, attempt: BatchAttempt) -> None:
        self._storage.remove_folders(f"{_FILES}/{attempt.flow}", f"{attempt}/")

    # ---- the table -----------------------------------------------------------------------------------

    def _table(self) -> Any:
        return _delta().DeltaTable(self.root)

    def _committed(self, table: Any, log: BatchLog) -> Entry | None:
        """The last entry that the table has committed."""
        version = table.transaction_version(_app(log.flow))
        return None if version is None else log.entry(version)

    def _add(self, table: Any, flow: str, entry: Entry) -> None:
        from deltalake.transaction import AddAction

        delta = _delta()
        actions = [
            AddAction(file.path, file.bytes, file.partition, entry.time_ms, True, json.dumps({"numRecords": file.rows}))
            for file in entry.files
        ]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(table.metadata().partition_columns),
            commit_properties=delta.CommitProperties(
                app_transactions=[delta.Transaction(_app(flow), entry.number)],
                custom_metadata={"onceflow.flow": flow, "onceflow.batch": entry.batch},
            ),
        )


def _app(flow: str) -> str:
    return f"onceflow.{flow}"


@contextlib.contextmanager
def _conflicts() -> Iterator[list[Exception]]:
    """The commit that Delta has refused, if it has. Nothing of it took effect."""
    from deltalake.exceptions import CommitFailedError

    found: list[Exception] = []
    try:
        yield found
    except CommitFailedError as error:
        found.append(error)


def _check_features(table: Any, root: str) -> None:
    protocol = table.protocol()
    asked = set(protocol.writer_features or ()) - _FEATURES
    constraints = [name for name in table.metadata().configuration if name.startswith("delta.constraints.")]
    if asked or constraints or (protocol.min_writer_version > 2 and protocol.writer_features is None):
        raise SchemaError(
            f"The table in {root} asks more of its writers than adding files",
            detail=f"writer version {protocol.min_writer_version}, {', '.join([*sorted(asked), *constraints])}",
            next_step="use a table without these features",
        )


def _schema(table: Any) -> pa.Schema:
    return written_schema(pa.schema(table.schema().to_arrow()))


def _delta() -> Any:
    try:
        import deltalake
    except ImportError as error:
        raise EnvironmentUnusableError(
            "Tables of Delta Lake need the package deltalake",
            detail=str(error),
            next_step="pip install 'onceflow[delta]', on executors, too",
        ) from error
    return deltalake

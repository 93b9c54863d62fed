"""``DeltaSink``: rows in a table of Delta Lake, whose log decides what is committed."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.errors import BadRecordError, BatchAbortedError, EnvironmentUnusableError, OnceflowError, SchemaError
from onceflow.external.delta_files import DataFile, TaskFiles
from onceflow.external.delta_log import BATCH, ENTRY, FLOW, DeltaLog, Entry, folder_of, next_entry
from onceflow.external.delta_rows import (
    TableFacts,
    check_columns,
    check_expressions,
    check_partition_by,
    check_written,
    facts_of,
    new_table_schema,
    row_checks,
)
from onceflow.external.delta_storage import DeltaStorage, load_deltalake
from onceflow.external.receipts import packed, refused_rows, unpacked, with_reasons
from onceflow.external.sink import (
    RECORD_COLUMNS,
    BatchAttempt,
    ExternalSink,
    ProgressRow,
    RefusedRow,
    check_owner,
    columns_of_record,
    next_generation,
    older_state,
)
from onceflow.options.arguments import checked_arguments

_FILES = "onceflow"
_TRIES = 20
#: Transaction identifiers are removed by writers of the table when they are older than its property
#: ``delta.setTransactionRetentionDuration`` (or have no time, with Delta's own writer). That would be the flow's
#: progress. So theirs is the last moment of the year 9999.
_NEVER_EXPIRES_MS = 253_402_300_799_000


class DeltaSink(ExternalSink):
    """Appends rows to a table of Delta Lake, in a folder or in an object store. It needs the extra ``delta``.

    Tasks write files. The driver adds them in one commit of the table, which also has a transaction identifier (``txn``
    of Delta's protocol; its application is the identity of the flow) whose version grows with each takeover and each
    batch. Of two commits that were prepared for the same version of the table and have the same identifier, Delta
    refuses the second one: so an older driver is fenced. The version names a file beside the table (in ``_onceflow``),
    which has the progress row. Other applications may write the table meanwhile.

    Args:
        root: the folder of a table, or the URL of a bucket, such as ``s3://bucket/table``; it is created if it does not
            exist.
        partition_by: partition columns of a table that is created. A table that exists has its own.
        shared: whether the executors of a cluster have this folder, too.
        storage_options: of deltalake, for an object store: for example ``AWS_REGION``, ``AWS_ENDPOINT_URL``.

    Raises:
        OptionError: a URL of another kind, or options with which two drivers could overwrite each other's commits.
    """

    @checked_arguments
    def __init__(
        self,
        root: str | Path,
        *,
        partition_by: Sequence[str] = (),
        shared: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._storage = DeltaStorage(root, storage_options or {})
        self.root = self._storage.root
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.local_only = self._storage.is_local and not shared
        self._sets_aside = False
        self._new: pa.Schema | None = None  # of a table that is created when the flow is taken over
        self._facts: TableFacts | None = None  # as they were at the begin of the attempt
        self._last: dict[str, Entry] = {}  # the last entry of a flow that this driver has committed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": {}}  # tasks do not need it

    def __repr__(self) -> str:
        return f"DeltaSink({self.root!r})"

    @property
    def target(self) -> str:
        return self.root

    @property
    def dataset(self) -> tuple[str, str]:
        if self._storage.is_local:
            return "file", self.root
        scheme, _, rest = self.root.partition("://")
        bucket, _, path = rest.partition("/")
        return f"{scheme}://{bucket}", path or "/"

    def set_aside(self) -> None:
        self._sets_aside = True

    def check(self, schema: pa.Schema) -> None:
        with self._storage.reached():
            if not self._storage.has_table():
                self._new = self._checked_new(schema)
                return
            facts = facts_of(self._storage.table(), self.root)
        check_columns(facts, self._of_table(schema, facts))
        check_expressions(facts)

    def progress_row(self, flow: str) -> ProgressRow | None:
        with self._storage.reached():
            if not self._storage.has_table():
                return None
            found = DeltaLog(self._storage, flow).committed(self._storage.table())
        return None if found is None else found.row

    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        log = DeltaLog(self._storage, flow)
        with self._storage.reached():
            if self._new is not None and generation is None:
                self._create(self._new)
            for _ in range(_TRIES):
                table = self._storage.table()
                last = log.committed(table)
                found = None if last is None else last.row
                opened = next_generation(self.root, flow, found, owner, generation)
                if found is None and not self._storage.is_local:
                    self._check_condition()
                row = ProgressRow(opened, owner, None if found is None else found.progress)
                entry = next_entry(flow, last, row, table)
                conflict = self._commit_entry(table, log, entry)
                if conflict is None:
                    return row
                if self._storage.table().version() == table.version():
                    raise EnvironmentUnusableError(
                        f"The table in {self.root} does not take a commit of deltalake",
                        detail=self._storage.said(conflict),
                        next_step="use a newer version of deltalake, or a table without the features that it lacks",
                    )
        raise ConnectionError(f"{self.root} is written by too many others at once")

    def begin(self, attempt: BatchAttempt) -> None:
        with self._storage.reached():
            self._facts = facts_of(self._storage.table(), self.root)

    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        facts = self._facts or facts_of(self._storage.table(), self.root)
        folder, name = self._folder(attempt), f"{task}-{uuid.uuid4().hex[:8]}"
        refused: list[pa.Table] = []
        with row_checks(facts) as checks, contextlib.ExitStack() as stack:
            files = TaskFiles(stack, self._storage, folder, name, facts.partition_by)
            columns: list[str] | None = None
            for batch in batches:
                if columns is None:  # the table may have been changed since the start
                    own = self._of_table(batch.schema, facts)
                    check_columns(facts, own)
                    columns = own.names
                taken, others = checks.divided(batch.select(columns))
                files.write(taken)
                if others:
                    refused.append(with_reasons(batch, others))
                    if not self._sets_aside:
                        raise self._refusal(refused[0], facts)
            written = files.finished()
        return json.dumps({"files": [vars(file) for file in written], "refused": packed(refused)}).encode()

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        self._commit(attempt, receipts, lambda _: progress)

    def commit_accepted(
        self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: Callable[[Sequence[RefusedRow]], str]
    ) -> None:
        self._commit(attempt, receipts, progress)

    def abort(self, attempt: BatchAttempt) -> None:
        self._storage.remove_folder(self._folder(attempt))

    # ---- commits -------------------------------------------------------------------------------------

    def _commit(
        self,
        attempt: BatchAttempt,
        receipts: Sequence[bytes],
        progress: Callable[[Sequence[RefusedRow]], str],
    ) -> None:
        given = [json.loads(receipt) for receipt in receipts]
        files = [DataFile(**file) for receipt in given for file in receipt["files"]]
        log, table = DeltaLog(self._storage, attempt.flow), self._storage.table()
        mine = self._last.get(attempt.flow)
        is_mine = mine is not None and table.transaction_version(attempt.flow) == mine.version
        last = mine if is_mine else log.committed(table)
        check_owner(self.root, attempt, None if last is None else last.row)
        assert last is not None
        if mine is not None and last.version != mine.version:
            raise older_state(self.root, attempt.flow, f"the table is at entry {last.version}, not at the last one")
        if self._facts is not None and facts_of(table, self.root) != self._facts:
            raise self._changed("its columns, constraints or features are other ones now")
        facts = self._facts or facts_of(table, self.root)
        self._check_files(files)
        text = progress([row for receipt in given for row in self._refused_rows(receipt["refused"], facts)])
        row = ProgressRow(attempt.generation, attempt.owner, text)
        entry = next_entry(attempt.flow, last, row, table, batch=attempt.batch, files=[file.path for file in files])
        conflict = self._commit_entry(table, log, entry, files)
        if conflict is not None:
            newest = log.committed(self._storage.table())
            check_owner(self.root, attempt, None if newest is None else newest.row)
            raise self._changed(self._storage.said(conflict))

    def _commit_entry(
        self, table: Any, log: DeltaLog, entry: Entry, files: Sequence[DataFile] = ()
    ) -> Exception | None:
        """Commit the entry with these files.

        Returns:
            None: it is committed. Otherwise why Delta has refused it, and nothing of it took effect.

        Raises:
            Exception: the outcome is not known.
        """
        from deltalake.exceptions import CommitFailedError

        log.write(entry)
        try:
            self._add(table, entry, files)
        except CommitFailedError as error:
            # If the store has created the commit, and its answer was lost, deltalake has tried again, and has then
            # found this commit in its way.
            if self._storage.table().transaction_version(entry.flow) != entry.version:
                log.remove(entry)
                return error
        self._last[entry.flow] = entry
        log.prune(entry)
        return None

    def _add(self, table: Any, entry: Entry, files: Sequence[DataFile]) -> None:
        from deltalake.transaction import AddAction

        delta = load_deltalake()
        actions = [
            AddAction(file.path, file.bytes, file.partition, entry.time_ms, True, json.dumps({"numRecords": file.rows}))
            for file in files
        ]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(table.metadata().partition_columns),
            commit_properties=delta.CommitProperties(
                app_transactions=[delta.Transaction(entry.flow, entry.version, _NEVER_EXPIRES_MS)],
                custom_metadata={FLOW: entry.flow, ENTRY: entry.version, BATCH: entry.batch},
            ),
        )
        if self._storage.is_local:
            self._sync_log(table.version() + 1)

    def _sync_log(self, version: int) -> None:
        """Make the commits from this version on last."""
        while os.path.exists(f"{self.root}/_delta_log/{version:020d}.json"):
            self._storage.sync(f"_delta_log/{version:020d}.json")
            version += 1

    def _check_files(self, files: Sequence[DataFile]) -> None:
        """Check that the files of all tasks are here. A table with a file that is missing cannot be read."""
        for file in files if self._storage.is_local else ():
            path = Path(self.root, file.path)
            if not path.exists() or path.stat().st_size != file.bytes:
                raise EnvironmentUnusableError(
                    f"A task has written {path}, which is not there for the driver",
                    next_step=f"with shared=True, {self.root} must be the same folder on the driver and all executors",
                )

    def _changed(self, detail: str) -> BatchAbortedError:
        return BatchAbortedError(
            f"The table in {self.root} was changed by others in a way that does not go with the batch",
            detail=detail,
            next_step="none: the batch is run again",
        )

    # ---- the table -----------------------------------------------------------------------------------

    def _checked_new(self, schema: pa.Schema) -> pa.Schema:
        """The schema of a table that does not exist yet.

        Raises:
            SchemaError: it cannot have these columns.
        """
        given = new_table_schema(schema)
        record = [name for name in RECORD_COLUMNS if self._sets_aside and name in given.names]
        check_partition_by(self.partition_by, given)
        check_written(given, self.partition_by, self.root)
        if record:
            raise SchemaError(
                f"There is no table in {self.root} yet, so nobody knows which columns are its own, and which are those "
                "of records, for dead letters",
                detail=f"columns of records: {', '.join(record)}",
                next_step="create the table before, or leave these columns out",
            )
        return given

    def _create(self, given: pa.Schema) -> None:
        """Create the table, unless another driver has done so."""
        try:
            load_deltalake().DeltaTable.create(
                self.root,
                given,
                mode="ignore",
                partition_by=list(self.partition_by) or None,
                storage_options=self._storage.options,
            )
        except (OSError, OnceflowError):
            raise
        except Exception as error:
            raise SchemaError(
                f"No table can be created in {self.root}",
                detail=self._storage.said(error),
                next_step="create it yourself, or change what the detail names: names with alias(), types with cast()",
            ) from error

    def _of_table(self, schema: pa.Schema, facts: TableFacts) -> pa.Schema:
        """The columns of rows that are meant for the table."""
        record = self._record(schema.names, facts)
        return pa.schema([column for column in schema if column.name not in record])

    def _record(self, names: Sequence[str], facts: TableFacts) -> list[str]:
        """Columns of the rows that are of the Kafka records, for dead letters."""
        return columns_of_record(names, facts.arrow.names, f"the table in {self.root}") if self._sets_aside else []

    def _folder(self, attempt: BatchAttempt) -> str:
        return f"{_FILES}/{folder_of(attempt.flow)}/{attempt}"

    def _check_condition(self) -> None:
        """Check that the store refuses to create a commit that exists: everything depends on it.

        Two commits are prepared for the same version of a table that is made for this, and deleted.

        Raises:
            EnvironmentUnusableError: the second one has replaced the first one.
        """
        delta = load_deltalake()
        probe = DeltaStorage(f"{self.root}/_onceflow/probe-{uuid.uuid4().hex}", self._storage.options)
        delta.DeltaTable.create(probe.root, pa.schema([("probe", pa.int64())]), storage_options=probe.options)
        try:
            tables = [probe.table(), probe.table()]
            for number, table in enumerate(tables):
                table.create_write_transaction(
                    [],
                    "append",
                    table.schema(),
                    commit_properties=delta.CommitProperties(app_transactions=[delta.Transaction(f"{number}", 1)]),
                )
            found = probe.table()
            kept = [found.transaction_version(f"{number}") for number in range(len(tables))]
        finally:
            self._storage.remove_folder(probe.root.removeprefix(f"{self.root}/"))
        if kept != [1, 1]:
            raise EnvironmentUnusableError(
                f"{self.root} does not refuse to create a file that exists, so two drivers could both write",
                next_step="use a store that knows If-None-Match for PutObject, for example a newer version of it, or "
                "configure a lock of deltalake (AWS_S3_LOCKING_PROVIDER)",
            )

    # ---- rows that are refused -----------------------------------------------------------------------

    def _refusal(self, refused: pa.Table, facts: TableFacts) -> BadRecordError:
        (row,) = self._rows(refused.slice(0, 1), facts)
        return BadRecordError(
            f"The table in {self.root} does not take a row",
            detail=f"{row.message}: {dict(row.row)!s:.500}",
            next_step="correct the row in the query, or the table; with dead_letter_topic= it becomes a dead letter",
        )

    def _refused_rows(self, text: str, facts: TableFacts) -> Iterator[RefusedRow]:
        for refused in unpacked(text):
            yield from self._rows(refused, facts)

    def _rows(self, refused: pa.Table, facts: TableFacts) -> Iterator[RefusedRow]:
        return refused_rows(refused, self._record(refused.schema.names, facts))

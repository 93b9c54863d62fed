"""``SqliteSink``: a table of an SQLite database on the driver's machine."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.errors import BadRecordError, EnvironmentUnusableError, SchemaError
from onceflow.external.rows import DELETE_BY_FLAG, INSERT, NullKeyError, TableWrite
from onceflow.external.sink import (
    RECORD_COLUMNS,
    BatchAttempt,
    ExternalSink,
    Opened,
    RefusedRow,
    fenced,
    older_state,
)

#: What means that the table does not take a row.
_REFUSALS = (sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError, NullKeyError, UnicodeDecodeError)
_PROGRESS = "onceflow_progress"
_BUSY_S = 60.0


class SqliteSink(ExternalSink):
    """Writes rows to a table of an SQLite database.

    Tasks write their rows to files beside the database; the driver moves them into the table, in one transaction with
    the progress row (table ``onceflow_progress``). So all tasks must run on the driver's machine.

    Args:
        path: the database file. table: an existing table of it.
        mode: ``insert``; ``upsert``: a row replaces the columns of the row with its key; ``delete-by-flag``: likewise,
            but a row whose ``flag`` is true deletes the row with its key.
        key: the columns of a primary key or unique index, for ``upsert`` and ``delete-by-flag``.
        flag: name of the boolean column for ``delete-by-flag``. It is no column of the table.

    Raises:
        OptionError: arguments that do not go together.
    """

    local_only = True

    def __init__(
        self, path: str | Path, table: str, *, mode: str = INSERT, key: Sequence[str] = (), flag: str = "deleted"
    ) -> None:
        self.path = Path(path).absolute()
        self._write = TableWrite(table, mode, (key,) if isinstance(key, str) else tuple(key), flag)
        self._sets_aside = False
        self._record: list[str] = []  # columns of the records, for dead letters
        self._progress: dict[str, str | None] = {}  # the progress row of a flow, as this driver has left it

    @property
    def target(self) -> str:
        return f"{self.path.name}:{self._write.table}"

    @property
    def dataset(self) -> tuple[str, str]:
        return "file", f"{self.path}:{self._write.table}"

    def set_aside(self) -> None:
        self._sets_aside = True

    def check(self, schema: pa.Schema) -> None:
        with self._connected() as connection:
            known = {row[1]: row for row in connection.execute(f"PRAGMA table_info({_quoted(self._write.table)})")}
            if not known:
                raise SchemaError(f"There is no table {self._write.table!r}", next_step=f"create it in {self.path}")
            spare = RECORD_COLUMNS if self._sets_aside else ()
            self._record = [name for name in schema.names if name in spare and name not in known]
            columns = self._columns(schema)
            self._write.check_flag(schema)
            needed = [name for name, row in known.items() if row[3] and row[4] is None]
            self._write.check_table(columns, list(known), needed)
            for statement in self._statements(columns):
                try:
                    connection.execute("EXPLAIN " + statement, [None] * statement.count("?"))
                except sqlite3.OperationalError as error:
                    raise SchemaError(
                        f"Rows cannot be written to table {self._write.table} with mode={self._write.mode!r}",
                        detail=str(error),
                        next_step="key= must name the columns of its primary key, or of a unique index",
                    ) from error

    def open(self, flow: str, generation: int | None) -> Opened:
        with self._connected() as connection, _transaction(connection):
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {_PROGRESS} "
                "(flow TEXT PRIMARY KEY, generation INTEGER NOT NULL, progress TEXT)"
            )
            row = connection.execute(f"SELECT generation, progress FROM {_PROGRESS} WHERE flow = ?", [flow]).fetchone()
            last, progress = row or (0, None)
            if generation is not None and generation != last:
                raise fenced(self.target, flow, generation, last)
            connection.execute(f"INSERT OR REPLACE INTO {_PROGRESS} VALUES (?, ?, ?)", [flow, last + 1, progress])
        self._progress[flow] = progress
        shutil.rmtree(self._staging(flow), ignore_errors=True)
        return Opened(last + 1, progress)

    def begin(self, attempt: BatchAttempt) -> None:
        self._staging(attempt.flow).mkdir(parents=True, exist_ok=True)

    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        first = next(batches, None)
        if first is None:
            return b""
        path = self._staging(attempt.flow) / f"{attempt}-{task}.arrow"
        with pa.OSFile(os.fspath(path), "wb") as file, pa.ipc.new_stream(file, first.schema) as stream:
            stream.write_batch(first)
            for batch in batches:
                stream.write_batch(batch)
        return path.name.encode()

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        def stop(refused: RefusedRow) -> None:
            raise BadRecordError(
                f"Table {self._write.table} does not take a row",
                detail=f"{refused.message}: {dict(refused.row)!s:.500}",
                next_step="correct the row in the query, or the table's constraints; with dead_letter_topic= it "
                "becomes a dead letter",
            )

        self._commit(attempt, receipts, stop, lambda: progress)

    def commit_accepted(
        self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: Callable[[Sequence[RefusedRow]], str]
    ) -> None:
        refused: list[RefusedRow] = []
        self._commit(attempt, receipts, refused.append, lambda: progress(refused))

    def _commit(
        self,
        attempt: BatchAttempt,
        receipts: Sequence[bytes],
        refuse: Callable[[RefusedRow], None],
        progress: Callable[[], str],
    ) -> None:
        with self._connected() as connection, _transaction(connection):
            row = connection.execute(
                f"SELECT generation, progress FROM {_PROGRESS} WHERE flow = ?", [attempt.flow]
            ).fetchone()
            if row is None or row[0] != attempt.generation:
                raise fenced(self.target, attempt.flow, attempt.generation, row and row[0])
            if row[1] != self._progress.get(attempt.flow, row[1]):
                raise older_state(self.target, attempt.flow, "its progress row is not the one of the last commit")
            for receipt in filter(None, receipts):
                self._move(connection, self._staging(attempt.flow) / receipt.decode(), refuse)
            text = progress()
            connection.execute(f"UPDATE {_PROGRESS} SET progress = ? WHERE flow = ?", [text, attempt.flow])
        self._progress[attempt.flow] = text
        self.abort(attempt)

    def abort(self, attempt: BatchAttempt) -> None:
        for path in self._staging(attempt.flow).glob(f"{attempt}-*.arrow"):
            path.unlink(missing_ok=True)

    # ---- inside --------------------------------------------------------------------------------------

    def _staging(self, flow: str) -> Path:
        return self.path.with_name(f"{self.path.name}-onceflow") / flow

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            raise EnvironmentUnusableError(f"There is no database {self.path}", next_step="create it with its table")
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as connection:
            yield connection

    def _statements(self, columns: Sequence[str]) -> tuple[str, str]:
        """How a row is written, and how it is deleted."""
        table, key = _quoted(self._write.table), [_quoted(name) for name in self._write.key]
        names, places = ", ".join(map(_quoted, columns)), ", ".join("?" * len(columns))
        written = f"INSERT INTO {table} ({names}) VALUES ({places})"
        if key:
            others = [_quoted(name) for name in columns if name not in self._write.key]
            change = ", ".join(f"{name} = excluded.{name}" for name in others)
            written += f" ON CONFLICT ({', '.join(key)}) DO " + (f"UPDATE SET {change}" if others else "NOTHING")
        deleted = f"DELETE FROM {table} WHERE {' AND '.join(f'{name} IS ?' for name in key) or '0'}"
        return written, deleted

    def _columns(self, schema: pa.Schema) -> list[str]:
        """The columns of the table that are written."""
        return self._write.columns([name for name in schema.names if name not in self._record])

    def _move(self, connection: sqlite3.Connection, path: Path, refuse: Callable[[RefusedRow], None]) -> None:
        with pa.OSFile(os.fspath(path)) as file, pa.ipc.open_stream(file) as stream:
            columns = self._columns(stream.schema)
            written, deleted = self._statements(columns)
            for batch in stream:
                for row, problem in _rows_of(batch):
                    try:
                        if problem is not None:
                            raise problem
                        self._write.check_key(row)
                        if self._write.mode == DELETE_BY_FLAG and row[self._write.flag]:
                            connection.execute(deleted, [_stored(row[name]) for name in self._write.key])
                        else:
                            connection.execute(written, [_stored(row[name]) for name in columns])
                    except _REFUSALS as error:
                        record = {name: row.pop(name) for name in self._record}
                        kind = "NotNullViolation" if isinstance(error, NullKeyError) else type(error).__name__
                        refuse(RefusedRow(row, kind, str(error), record))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _rows_of(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], UnicodeDecodeError | None]]:
    """The rows, and what is wrong with each. Spark's ``string(value)`` keeps bytes that are not text."""
    try:
        yield from ((row, None) for row in batch.to_pylist())
        return
    except UnicodeDecodeError:
        pass
    for one in (batch.slice(place, 1) for place in range(batch.num_rows)):
        row, problem = {}, None
        for name, column in zip(batch.schema.names, one.columns, strict=True):
            try:
                (row[name],) = column.to_pylist()
            except UnicodeDecodeError as error:
                problem = error
                row[name] = error.object.decode(errors="replace")
        yield row, problem


def _stored(value: Any) -> Any:
    """A value as SQLite keeps it: what it has no type for is text."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, list | dict | tuple):
        return json.dumps(value, default=str)
    return value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""``SqliteSink``: a table of an SQLite database on the driver's machine, written exactly once.

This is a whole sink of your own: copy it, and put your system in the place of SQLite. The parts that every sink has:

- ``open`` takes the flow over in **one transaction**. ``commit`` does everything else in one: it checks that the driver
  still has the flow, moves the rows, and keeps the progress row.
- Tasks bring their rows to files beside the database (the *staging area*). A receipt names the file, and only files
  with a receipt are ever moved into the table.
- A row that SQLite does not take exactly as it is makes a `RefusedRow`: a dead letter, or the end of the flow.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow import BadRecordError, EnvironmentUnusableError, ExternalSink, OptionError, SchemaError
from onceflow.external.rows import DELETE_BY_FLAG, INSERT, TableWrite
from onceflow.external.sink import (
    BatchAttempt,
    ProgressRow,
    RefusedRow,
    check_owner,
    columns_of_record,
    next_generation,
    older_state,
)

_PROGRESS = "onceflow_progress"
_BUSY_S = 60.0
_SQLITE = (3, 35)  # the first one with RETURNING
#: Errors of one statement for which its row is to blame. Other errors say that the database cannot be used now.
_ROW_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    OverflowError,
    ValueError,
)


class SqliteSink(ExternalSink):
    """Writes rows to a table of an SQLite database.

    All tasks must run on the driver's machine. The table has its own rules: what ``ON CONFLICT`` and triggers of the
    table do with a row is done. But a value that the table would change is refused: NaN, which SQLite keeps as null,
    and numbers that do not fit into the column.

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
        _check_name(table)
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
        if sqlite3.sqlite_version_info < _SQLITE:
            raise EnvironmentUnusableError(
                f"SQLite {sqlite3.sqlite_version} is too old", next_step="use a Python with SQLite 3.35 or later"
            )
        with self._connected() as connection:
            known = {row[1]: row for row in connection.execute(f"PRAGMA table_info({_quoted(self._write.table)})")}
            if not known:
                raise SchemaError(f"There is no table {self._write.table!r}", next_step=f"create it in {self.path}")
            table = f"table {self._write.table}"
            self._record = columns_of_record(schema.names, known, table) if self._sets_aside else []
            columns = self._written_columns(schema.names)
            self._write.check_flag(schema)
            needed = [name for name, row in known.items() if row[3] and row[4] is None]
            self._write.check_table(columns, list(known), needed)
            _check_types(schema, columns)
            self._check_statements(connection, columns)

    def progress_row(self, flow: str) -> ProgressRow | None:
        with self._connected() as connection:
            return _progress_row(connection, flow)

    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        with self._connected() as connection, _transaction(connection):
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {_PROGRESS} "
                "(flow TEXT PRIMARY KEY, generation INTEGER NOT NULL, owner TEXT NOT NULL, progress TEXT)"
            )
            found = _progress_row(connection, flow)
            opened = next_generation(self.target, flow, found, owner, generation)
            progress = None if found is None else found.progress
            connection.execute(
                f"INSERT OR REPLACE INTO {_PROGRESS} VALUES (?, ?, ?, ?)", [flow, opened, owner, progress]
            )
        self._progress[flow] = progress
        shutil.rmtree(self._staging(flow), ignore_errors=True)
        return ProgressRow(opened, owner, progress)

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

        self._commit(attempt, receipts, lambda refused: progress, stop)

    def commit_accepted(
        self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: Callable[[Sequence[RefusedRow]], str]
    ) -> None:
        self._commit(attempt, receipts, progress, lambda refused: None)

    def abort(self, attempt: BatchAttempt) -> None:
        for path in self._staging(attempt.flow).glob(f"{attempt}-*.arrow"):
            path.unlink(missing_ok=True)

    # ---- inside --------------------------------------------------------------------------------------

    def _commit(
        self,
        attempt: BatchAttempt,
        receipts: Sequence[bytes],
        progress: Callable[[Sequence[RefusedRow]], str],
        refuse: Callable[[RefusedRow], None],
    ) -> None:
        refused: dict[int, RefusedRow] = {}
        done = False
        while not done:  # otherwise a row has rolled back the whole transaction: it is known now, and left out
            done = self._try_commit(attempt, receipts, progress, refused, refuse)
        self.abort(attempt)

    def _try_commit(
        self,
        attempt: BatchAttempt,
        receipts: Sequence[bytes],
        progress: Callable[[Sequence[RefusedRow]], str],
        refused: dict[int, RefusedRow],
        refuse: Callable[[RefusedRow], None],
    ) -> bool:
        """Returns False if nothing has changed, because a row has ended the transaction: it is in ``refused`` now.

        Args:
            refused: the rows that the table does not take, by their place in the batch.
            refuse: called with each of them when it is found. What it raises ends the commit.
        """
        with self._connected() as connection, _transaction(connection):
            self._check_progress(connection, attempt)
            for place, row in enumerate(self._rows(attempt, receipts)):
                if place == 0:  # a table that was dropped or altered is not the fault of a row
                    self._check_statements(connection, self._written_columns(row))
                if place in refused:
                    continue
                problem = self._written(connection, row)
                if problem is not None:
                    refused[place] = problem
                    refuse(problem)
                    if not connection.in_transaction:
                        return False
            text = progress([refused[place] for place in sorted(refused)])
            connection.execute(f"UPDATE {_PROGRESS} SET progress = ? WHERE flow = ?", [text, attempt.flow])
        self._progress[attempt.flow] = text
        return True

    def _check_progress(self, connection: sqlite3.Connection, attempt: BatchAttempt) -> None:
        """Check that no other driver has taken the flow over, and that the database has not forgotten a commit."""
        found = _progress_row(connection, attempt.flow)
        check_owner(self.target, attempt, found)
        before = None if found is None else found.progress
        if before != self._progress.get(attempt.flow, before):
            raise older_state(self.target, attempt.flow, "its progress row is not the one of the last commit")

    def _rows(self, attempt: BatchAttempt, receipts: Sequence[bytes]) -> Iterator[Mapping[str, Any]]:
        """The staged rows, as Arrow's scalars: not every value of Arrow can be a Python object."""
        for receipt in filter(None, receipts):
            with pa.OSFile(os.fspath(self._staging(attempt.flow) / receipt.decode())) as file:
                for batch in pa.ipc.open_stream(file):
                    names = batch.schema.names
                    for number in range(batch.num_rows):
                        yield {name: batch.column(at)[number] for at, name in enumerate(names)}

    def _written(self, connection: sqlite3.Connection, row: Mapping[str, Any]) -> RefusedRow | None:
        """Write a row, or delete the one with its key. Returns it if the table does not take it."""
        columns = self._written_columns(row)
        written, deleted = self._statements(columns)
        connection.execute("SAVEPOINT one_row")  # a statement that fails may have done a part of its work
        try:
            self._write.check_key({name: row[name].as_py() for name in self._write.key})
            if self._write.mode == DELETE_BY_FLAG and row[self._write.flag].as_py():
                connection.execute(deleted, [_stored(row[name]) for name in self._write.key])
            else:
                values = [_stored(row[name]) for name in columns]
                for kept in connection.execute(written, values).fetchall():
                    _check_kept(columns, values, kept, self._write.key)
        except Exception as error:
            if not _is_of_the_row(error):
                raise
            if connection.in_transaction:  # ON CONFLICT ROLLBACK and RAISE(ROLLBACK) end it
                connection.execute("ROLLBACK TO one_row")
                connection.execute("RELEASE one_row")
            record = {name: _shown(row[name]) for name in self._record}
            shown = {name: _shown(value) for name, value in row.items() if name not in self._record}
            return RefusedRow(shown, type(error).__name__, str(error), record)
        connection.execute("RELEASE one_row")
        return None

    def _staging(self, flow: str) -> Path:
        # The identity of a flow may be longer than the name of a folder.
        return self.path.with_name(f"{self.path.name}-onceflow") / hashlib.sha256(flow.encode()).hexdigest()[:32]

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            raise EnvironmentUnusableError(f"There is no database {self.path}", next_step="create it with its table")
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as connection:
            yield connection

    def _statements(self, columns: Sequence[str]) -> tuple[str, str]:
        """How a row is written, and how it is deleted. The first one takes ``columns``, the second one the key."""
        table, key = _quoted(self._write.table), [_quoted(name) for name in self._write.key]
        names, places = ", ".join(map(_quoted, columns)), ", ".join("?" * len(columns))
        # The alias is for a table that is named excluded: that name is taken for the new row.
        written = f"INSERT INTO {table} AS onceflow_old ({names}) VALUES ({places})"
        if key:
            others = [_quoted(name) for name in columns if name not in self._write.key]
            change = ", ".join(f"{name} = excluded.{name}" for name in others)
            written += f" ON CONFLICT ({', '.join(key)}) DO " + (f"UPDATE SET {change}" if others else "NOTHING")
        written += f" RETURNING {names}"
        deleted = f"DELETE FROM {table} WHERE {' AND '.join(f'{name} IS ?' for name in key) or '0'}"
        return written, deleted

    def _check_statements(self, connection: sqlite3.Connection, columns: Sequence[str]) -> None:
        """Check that the table takes rows with these columns."""
        counts = len(columns), len(self._write.key)
        for statement, count in zip(self._statements(columns), counts, strict=True):
            try:
                connection.execute("EXPLAIN " + statement, [None] * count)
            except sqlite3.OperationalError as error:
                raise SchemaError(
                    f"Rows cannot be written to table {self._write.table} with mode={self._write.mode!r}",
                    detail=str(error),
                    next_step="write only ordinary columns; key= must name the columns of the primary key, or of a "
                    "unique index",
                ) from error

    def _written_columns(self, names: Iterable[str]) -> list[str]:
        """The columns of the table that are written, of those of the rows."""
        return self._write.columns([name for name in names if name not in self._record])


def _progress_row(connection: sqlite3.Connection, flow: str) -> ProgressRow | None:
    there = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(there, [_PROGRESS]).fetchone():
        return None
    row = connection.execute(f"SELECT generation, owner, progress FROM {_PROGRESS} WHERE flow = ?", [flow]).fetchone()
    return None if row is None else ProgressRow(*row)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction. When a row has ended it, nothing has changed, and there is nothing to commit."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        if connection.in_transaction:
            connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError):  # of COMMIT: the check of a deferred foreign key
                raise BadRecordError(
                    "The rows of a batch do not fit together", detail=str(error), next_step="correct them in the query"
                ) from error
        raise


def _is_of_the_row(error: Exception) -> bool:
    """Whether the row is to blame for the error of a statement, and not the disk or another connection."""
    if isinstance(error, sqlite3.OperationalError):  # for example of a function in a CHECK: "malformed JSON"
        return getattr(error, "sqlite_errorcode", None) == getattr(sqlite3, "SQLITE_ERROR", 1)
    return isinstance(error, _ROW_ERRORS)


def _check_name(table: str) -> None:
    if table.casefold() == _PROGRESS:
        raise OptionError(
            f"The table {table!r} has the progress of flows, so rows cannot go there",
            next_step="give the rows a table of their own",
        )
    if "\0" in table or any("\ud800" <= each <= "\udfff" for each in table):
        raise OptionError(f"{table!r} is no name of a table", next_step="give the name without characters of no text")


def _check_types(schema: pa.Schema, columns: Sequence[str]) -> None:
    for name in columns:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
            raise SchemaError(
                f"SQLite has no type for column {name}, which is {kind}",
                next_step=f"select to_json({name}), or cast it to a string or a number",
            )


def _stored(scalar: Any) -> Any:
    """A value as SQLite keeps it: what it has no type for is text.

    Raises:
        ValueError, OverflowError: SQLite cannot keep it.
    """
    value = scalar.as_py()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("SQLite keeps NaN as null")
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value


def _check_kept(columns: Sequence[str], values: Sequence[Any], kept: Sequence[Any], key: Sequence[str]) -> None:
    """Check that the row has the values that were written: a column's affinity converts texts and numbers.

    Raises:
        ValueError: one was changed.
    """
    for name, value, found in zip(columns, values, kept, strict=True):
        if type(found) is type(value) and (found == value or (name in key and isinstance(value, str))):
            continue  # a text of a key may be another one that is equal to it, as the column's collation says
        if not (value == found if value is None or found is None else _number(value) == _number(found) is not None):
            raise ValueError(f"column {name} would have {found!r} in place of {value!r}")


def _number(value: Any) -> Decimal | None:
    """The number that a value is, or that a text spells."""
    try:
        return None if isinstance(value, bytes) else Decimal(str(int(value) if isinstance(value, bool) else value))
    except ArithmeticError:
        return None


def _shown(scalar: Any) -> Any:
    """A value for an error or a dead letter."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")
    except (ValueError, OverflowError):
        return scalar.cast(pa.string()).as_py()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""``PostgresSink``: a table of a PostgreSQL database.

Tasks bring their rows to a staging table with COPY, in binary, through ADBC: it encodes Arrow's columns without a
Python object for each value. The driver moves the rows of the successful tasks into the table, in one transaction with
the progress row. The staging table is not logged, and belongs to one generation of the flow: what an older driver's
tasks still copy reaches nothing.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from onceflow.errors import (
    BadRecordError,
    BatchAbortedError,
    EnvironmentUnusableError,
    OnceflowError,
    PermissionDeniedError,
    SchemaError,
    counted,
)
from onceflow.external.postgres_columns import (
    Column,
    Relation,
    check_lasting,
    check_taken,
    check_whole,
    columns_of,
    definition_of,
    named,
    quoted_name,
    relation_of,
    shows_order,
    staged_types,
)
from onceflow.external.postgres_connection import (
    Trouble,
    answers,
    code_of,
    completed,
    connect,
    dataset_of,
    holders,
    in_line,
    kept_alive,
    may_be_of_a_row,
    pin,
    said,
    trouble_of,
)
from onceflow.external.postgres_key import Key, key_of
from onceflow.external.postgres_moves import Moves, Staged, not_taken
from onceflow.external.postgres_progress import ProgressTable, progress_table_of
from onceflow.external.postgres_staging import (
    HEADERS,
    PROBLEM,
    RECEIPT,
    ROW,
    Copy,
    TaskRows,
    check_driver,
    only_staged,
    record_columns,
)
from onceflow.external.receipts import packed, refused_rows, unpacked
from onceflow.external.rows import DELETE_BY_FLAG, INSERT, TableWrite
from onceflow.external.sink import (
    BatchAttempt,
    ExternalSink,
    ProgressRow,
    RefusedRow,
    UnavailableError,
    check_owner,
    columns_of_record,
    next_generation,
    older_state,
)
from onceflow.options.arguments import checked_arguments

if TYPE_CHECKING:  # the extra is needed where it is used only
    import psycopg

log = logging.getLogger("onceflow.sink")

_LOCK_S = 60  # how long a transaction waits for a row that another one has locked
_CHECK_S = 2  # how long the check of a start waits for the table
_CLEAN_MS = 200


@dataclass(frozen=True)
class _Fit:
    """How rows fit the table. It is exchanged as a whole, when all checks have passed.

    Args:
        definition: of the table for which that was found.
        columns: of the table, as far as they are written; in mode ``delete-by-flag`` also the flag.
        record: of the records, for dead letters.
        key: how the key of rows is compared; None: they have none.
        ordered: whether one can see in which order rows were inserted.
    """

    relation: Relation
    definition: tuple[Any, ...]
    columns: Sequence[Column]
    record: Sequence[Column]
    key: Key | None
    ordered: bool

    @property
    def staged(self) -> list[tuple[str, str, str]]:
        """The columns of the staging table."""
        return [(each.name, each.staged_as, each.staged_in) for each in [*self.columns, *self.record]]


class PostgresSink(ExternalSink):
    """Writes rows to a table of a PostgreSQL database. It needs the extra ``postgres``.

    The user needs ``INSERT`` on the table (``UPDATE``, ``DELETE`` and ``SELECT`` for the other modes), and ``CREATE``
    on the first schema of its ``search_path``, where the staging tables are. The table ``onceflow_progress`` is made
    there, too, unless another schema of the path has it.

    Args:
        dsn: how to connect: ``postgresql://user:password@host/database``, or libpq's ``host=... dbname=...``.
        table: an existing table, ``name`` or ``schema.name``.
        mode: ``insert``, ``upsert`` or ``delete-by-flag``. ``upsert``: a row replaces the columns of the row with its
            key. ``delete-by-flag``: likewise, but a row whose ``flag`` is true deletes the row with its key. A flag
            that is null counts as false.
        key: the columns of a primary key or unique index, for ``upsert`` and ``delete-by-flag``.
        flag: the boolean column for ``delete-by-flag``, which is no column of the table.

    Raises:
        OptionError: arguments that do not go together.
        EnvironmentUnusableError: the extra is not installed.
    """

    @checked_arguments
    def __init__(
        self, dsn: str, table: str, *, mode: str = INSERT, key: Sequence[str] = (), flag: str = "deleted"
    ) -> None:
        try:
            import adbc_driver_postgresql.dbapi  # noqa: F401
            import psycopg  # noqa: F401
        except ImportError as error:
            raise EnvironmentUnusableError(
                f"PostgresSink needs packages that are not installed: {error.name}",
                next_step="pip install 'onceflow[postgres]', on executors, too",
            ) from error
        self._dsn = completed(dsn)
        self._write = TableWrite(table, mode, (key,) if isinstance(key, str) else tuple(key), flag)
        self._sets_aside = False
        # What a start has found. Names without a schema, and text, would else depend on the settings of each session.
        self._pinned: dict[str, str] = {}
        self._path: list[str] = []  # the schemas that are searched
        self._schema = ""  # of the staging tables
        self._tables: dict[str, ProgressTable] = {}  # which one has the progress row of a flow
        self._encoding = "utf-8"  # of the database
        self._relation: Relation | None = None
        self._rows: pa.Schema = pa.schema([])
        self._found: _Fit | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._progress: dict[str, str | None] = {}  # the progress row of a flow, as this driver has left it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def __repr__(self) -> str:
        return f"PostgresSink(..., {self._write.table!r}, mode={self._write.mode!r})"

    @property
    def target(self) -> str:
        return f"PostgreSQL table {self._write.table}"

    @property
    def dataset(self) -> tuple[str, str]:
        return dataset_of(self._dsn, self._write.table)

    def set_aside(self) -> None:
        self._sets_aside = True

    def check(self, schema: pa.Schema) -> None:
        with self._starting() as connection:
            self._check(connection, schema)

    def _check(self, connection: psycopg.Connection[Any], schema: pa.Schema) -> None:
        self._relation, self._rows = relation_of(connection, self._write.table), schema
        self._find_session(connection)
        check_driver(self._dsn)
        self._found = self._fit_of(connection, self._relation, schema)

    def _fit_of(self, connection: psycopg.Connection[Any], relation: Relation, schema: pa.Schema) -> _Fit:
        """How rows fit the table, as it is now.

        Raises:
            SchemaError: they do not.
        """
        definition = definition_of(connection, relation)  # first: what is altered from here on is noticed later
        relation = replace(relation, oid=definition[0])
        check_lasting(connection, relation)
        columns = columns_of(connection, relation)
        known = {name: column for name, column in columns.items() if not column.always}
        record = columns_of_record(schema.names, known, f"table {self._write.table}") if self._sets_aside else []
        rows = pa.schema([column for column in schema if column.name not in record])
        check_taken(columns, rows.names, self._write.key, self._write.table)
        self._write.check_flag(rows)
        written = self._write.columns(rows.names)
        needed = [name for name, column in known.items() if column.needed]
        self._write.check_table(written, list(known), needed)
        if not written:
            raise SchemaError(
                f"The rows have no columns of table {self._write.table}",
                detail=f"they have {', '.join(schema.names)}; it has {', '.join(known)}",
                next_step="select some of them",
            )
        staged = staged_types(rows)
        check_whole(known, staged, written, self._write.table)
        fitting = [known[name].staged(staged[name], f"c{number}") for number, name in enumerate(written)]
        if self._write.mode == DELETE_BY_FLAG:
            fitting.append(only_staged(self._write.flag, "boolean", "flag"))
        kinds = staged_types(pa.schema([schema.field(name) for name in record if name != "headers"]))
        kinds.update(HEADERS if "headers" in record else {})
        found = _Fit(
            relation,
            definition,
            fitting,
            record_columns(kinds),
            key_of(connection, relation, self._write.key, self._write.table) if self._write.key else None,
            shows_order(connection, relation, written),
        )
        self._check_moves(connection, found)
        return found

    def _fit_again(self, connection: psycopg.Connection[Any]) -> None:
        """The same, if the table has been altered since.

        Raises:
            SchemaError: rows do not fit it any more.
        """
        before = self._fit
        if definition_of(connection, before.relation) == before.definition:
            return
        log.info("%s has been altered", self.target)
        found = self._fit_of(connection, before.relation, self._rows)
        if found.staged != before.staged:
            raise SchemaError(
                f"Table {self._write.table} was altered while the flow was running: other columns are written to it",
                next_step="start the flow again: it continues at this batch",
            )
        self._found = found  # if anything has failed before, the next attempt checks all of it again

    @property
    def _fit(self) -> _Fit:
        assert self._found is not None, "check comes first"
        return self._found

    def _check_unaltered(self, connection: psycopg.Connection[Any]) -> None:
        """Check that the table is what the attempt's rows were checked for. The locks of its statements keep it so.

        Raises:
            BatchAbortedError: it is not.
        """
        if definition_of(connection, self._fit.relation) != self._fit.definition:
            raise BatchAbortedError(
                f"{self.target} was altered while a batch was written", next_step="none: the batch is run again"
            )

    def _find_session(self, connection: psycopg.Connection[Any]) -> None:
        """Find what names mean in a session of this user, and in which encoding the database keeps text."""
        found = connection.execute(
            "SELECT current_schemas(false)::text[], current_setting('search_path'), current_setting('server_encoding')"
        ).fetchone()
        schemas, path, encoding = found or ([], "", "UTF8")
        # Schemas of temporary tables are of this session alone.
        self._path = [schema for schema in schemas if not schema.startswith("pg_temp")]
        places = [schema for schema in self._path if schema != "pg_catalog"]
        if not places:
            raise SchemaError(
                f"{self.target}: the user has no schema for the progress row and the staging tables",
                detail=f"no schema of its search_path exists, or the user may not use it: {path}",
                next_step="create one, or set another search_path: ALTER ROLE ... SET search_path = ...",
            )
        # Not the text of the path: a schema that it names may be created while the flow runs.
        self._pinned = {"search_path": ", ".join(map(quoted_name, self._path))}
        self._schema, self._tables, self._progress = places[0], {}, {}
        self._encoding = _python_name(connection, encoding)

    def progress_row(self, flow: str) -> ProgressRow | None:
        with self._starting() as connection:
            table = progress_table_of(connection, flow, self._path)
            return None if table is None else table.row(connection, flow)

    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        with self._starting() as connection:
            if flow not in self._tables:
                found = progress_table_of(connection, flow, self._path)
                self._tables[flow] = found or ProgressTable(self._schema)
            table = self._tables[flow]
            table.create(connection)
            with self._transaction(connection):
                last = table.locked(connection, flow)
                opened = next_generation(self.target, flow, last, owner, generation)
                table.take(connection, flow, owner, opened)
            progress = None if last is None else last.progress
            self._progress[flow] = progress
            self._drop_staging(connection, flow)
        return ProgressRow(opened, owner, progress)

    def begin(self, attempt: BatchAttempt) -> None:
        with self._connected() as connection, self._rolled_back(connection, "Staging for", waits=True):
            self._fit_again(connection)
            self._make_staging(connection, attempt, self._fit)

    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        from adbc_driver_postgresql import dbapi

        first = next(batches, None)
        if first is None:
            return b""
        receipt = f"{attempt}-{task}"
        fit = self._fit
        required = () if fit.key is None or fit.key.nulls_equal else self._write.key
        rows = TaskRows(receipt, fit.columns, fit.record, required=required, encoding=self._encoding)
        copy = Copy(self._dsn, self._schema, _staging(attempt), rows)
        try:
            check_driver(self._dsn)
            # COPY fails as a whole, and rows come only once. So what it does not take is found by the next attempt.
            refused = (copy.all_of if attempt.attempt == 1 else copy.taken)(first, batches)
        except dbapi.Error as error:
            text = in_line(error)
            trouble = trouble_of(code_of(error.sqlstate, text), text)
            raise BatchAbortedError(
                f"Rows could not be staged for {self.target}", detail=trouble.what, next_step=trouble.next_step
            ) from error
        if refused and not self._sets_aside:
            raise not_taken(self._write, next(self._refused_rows(refused[0])))
        return json.dumps([receipt, rows.total, packed(refused)]).encode()

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        def move(connection: psycopg.Connection[Any], staged: Staged) -> list[RefusedRow]:
            try:
                self._moves(self._fit).all_or_none(connection, staged)
            except BadRecordError:
                self._check_unaltered(connection)
                raise
            return []

        self._commit(attempt, receipts, move, lambda _: progress)

    def commit_accepted(
        self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: Callable[[Sequence[RefusedRow]], str]
    ) -> None:
        self._commit(attempt, receipts, self._moves(self._fit).all_accepted, progress)

    def _commit(
        self,
        attempt: BatchAttempt,
        receipts: Sequence[bytes],
        move: Callable[[psycopg.Connection[Any], Staged], list[RefusedRow]],
        progress: Callable[[Sequence[RefusedRow]], str],
    ) -> None:
        given = [json.loads(receipt) for receipt in receipts if receipt]
        staged = Staged(self._schema, _staging(attempt), [name for name, *_ in given])
        unstaged = [row for *_, text in given for refused in unpacked(text) for row in self._refused_rows(refused)]
        with self._connected() as connection:
            with self._rolled_back(connection, "The transaction of"), self._transaction(connection):
                table = self._tables[attempt.flow]
                found = table.row(connection, attempt.flow, lock=True)
                check_owner(self.target, attempt, found)
                before = None if found is None else found.progress
                if before != self._progress.get(attempt.flow, before):
                    raise older_state(self.target, attempt.flow, "its progress row is not the one of the last commit")
                staged = self._checked(connection, staged, sum(rows for _, rows, _ in given))
                with kept_alive(connection, _LOCK_S / 4):  # a million refused rows take this process a minute
                    refused = [*move(connection, staged), *unstaged]
                    self._check_unaltered(connection)
                    text = progress(refused)
                table.keep(connection, attempt.flow, text)
            self._progress[attempt.flow] = text
            self._empty_staging(connection, attempt)

    def abort(self, attempt: BatchAttempt) -> None:
        with self._connected() as connection:
            self._empty_staging(connection, attempt)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _refused_rows(self, refused: pa.Table) -> Iterator[RefusedRow]:
        """Rows that could not be staged."""
        names = ["headers" if each.name in HEADERS else each.name for each in self._fit.record]
        return refused_rows(refused, dict.fromkeys(names))

    def _moves(self, fit: _Fit) -> Moves:
        return Moves(self._write, fit.relation, fit.columns, fit.record, key=fit.key, ordered=fit.ordered)

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """The driver's connection; a new one if the last one has failed, or was ended while it was idle.

        Raises:
            ConnectionError: the server cannot be reached, or the connection was lost.
        """
        import psycopg

        if self._connection is None or not answers(self._connection):
            self._connection = connect(self._dsn)
            weakref.finalize(self, self._connection.close)  # also if a start fails
        try:
            yield self._connection
        except psycopg.errors.InsufficientPrivilege as error:
            raise PermissionDeniedError(
                f"{self.target}: a permission is missing",
                detail=str(error).splitlines()[0],
                next_step="grant it; docs/external.md lists what the user needs",
            ) from error
        except BaseException as error:
            if isinstance(error, OnceflowError):
                raise
            lost = self._connection.closed
            self._connection.close()  # what it has begun is rolled back
            if lost and isinstance(error, psycopg.Error):  # some of its limits end a session with an InternalError
                raise ConnectionError(trouble_of(error.sqlstate, in_line(error)).what) from error
            raise

    @contextmanager
    def _starting(self) -> Iterator[psycopg.Connection[Any]]:
        """The same, for what a start asks.

        Raises:
            UnavailableError: the server cannot do it at the moment.
            EnvironmentUnusableError: nor later.
        """
        import psycopg
        from adbc_driver_postgresql import dbapi

        with self._connected() as connection:
            try:
                yield connection
            except dbapi.Error as error:
                text = in_line(error)
                trouble = trouble_of(code_of(error.sqlstate, text), text)
                if not trouble.passes:
                    raise
                raise UnavailableError(trouble.what, trouble.next_step) from error
            except psycopg.Error as error:
                if connection.closed or isinstance(error, psycopg.errors.InsufficientPrivilege):
                    raise
                trouble = self._trouble(connection, error)
                if trouble.passes:
                    raise UnavailableError(trouble.what, trouble.next_step) from error
                raise EnvironmentUnusableError(
                    f"{self.target} cannot be used", detail=trouble.what, next_step=trouble.next_step
                ) from error

    def _trouble(self, connection: psycopg.Connection[Any], error: psycopg.Error) -> Trouble:
        import psycopg

        trouble = trouble_of(error.sqlstate, said(error))
        if not isinstance(error, (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)):
            return trouble
        tables = [(each.schema, each.name) for each in self._tables.values()]
        if self._relation is not None:
            tables.append((self._relation.schema, self._relation.name))
        found = holders(connection, tables)
        return replace(trouble, what=f"{trouble.what}; locks are held by {found}") if found else trouble

    @contextmanager
    def _rolled_back(self, connection: psycopg.Connection[Any], what: str, *, waits: bool = False) -> Iterator[None]:
        """If the server has answered that a statement or the commit failed, all is rolled back.

        Args:
            waits: whether the driver waits for what passes. Else all attempts of a batch would fail within a second.

        Raises:
            UnavailableError: that is so, and it may be over soon.
            BatchAbortedError: that is so, and another attempt may help.
        """
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                raise
            trouble = self._trouble(connection, error)
            if waits and trouble.passes:
                raise UnavailableError(trouble.what, trouble.next_step) from error
            raise BatchAbortedError(
                f"{what} {self.target} was rolled back", detail=trouble.what, next_step=trouble.next_step
            ) from error

    @contextmanager
    def _transaction(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        with connection.transaction():
            # A driver that is stopped in the middle must not hold the row for ever.
            limits = {"lock_timeout": f"{_LOCK_S}s", "idle_in_transaction_session_timeout": f"{_LOCK_S}s"}
            pin(connection, {**self._pinned, **limits})
            yield

    def _check_moves(self, connection: psycopg.Connection[Any], fit: _Fit) -> None:
        """Try everything without rows: it needs the same permissions, types and index."""
        import psycopg

        attempt = BatchAttempt("onceflow check", "", 0, 0, 0)
        try:
            with connection.transaction(force_rollback=True):
                pin(connection, {**self._pinned, "lock_timeout": f"{_CHECK_S}s"})
                self._make_staging(connection, attempt, fit)
                self._moves(fit).all_of(connection, Staged(self._schema, _staging(attempt), []))
        except psycopg.errors.LockNotAvailable:
            log.warning("%s is locked by another session; it is not tried before the first batch", self.target)
        except psycopg.errors.InvalidColumnReference as error:
            raise SchemaError(
                f"Rows cannot be written to table {self._write.table} with mode={self._write.mode!r}",
                detail=str(error).splitlines()[0],
                next_step="key= must name the columns of its primary key, or of a unique index",
            ) from error
        except psycopg.Error as error:
            if not may_be_of_a_row(error):
                raise
            raise SchemaError(
                f"Rows cannot be written to table {self._write.table}",
                detail=str(error).splitlines()[0],
                next_step=_cure(error),
            ) from error

    def _checked(self, connection: psycopg.Connection[Any], staged: Staged, expected: int) -> Staged:
        """Check that all rows are there. A server that has crashed empties tables that are not logged.

        Returns:
            The same with the number of rows that have a problem.
        """
        from psycopg import sql

        count = sql.SQL("SELECT count(*), count({}) FROM {} WHERE {} = ANY(%s)").format(
            named(PROBLEM), named(staged.schema, staged.table), named(RECEIPT)
        )
        found = connection.execute(count, [list(staged.receipts)]).fetchone()
        rows, problems = found or (0, 0)
        if rows != expected:
            raise RuntimeError(f"{counted(expected, 'row')} staged, and {rows} there")
        return replace(staged, problems=problems)

    def _make_staging(self, connection: psycopg.Connection[Any], attempt: BatchAttempt, fit: _Fit) -> None:
        from psycopg import sql

        columns = [
            sql.SQL("{} {}").format(sql.Identifier(each.staged_in), sql.SQL(each.staged_as))
            for each in [*fit.columns, *fit.record]
        ]
        connection.execute(
            sql.SQL("CREATE UNLOGGED TABLE IF NOT EXISTS {} ({} text, {} bigint, {} text, {})").format(
                sql.Identifier(self._schema, _staging(attempt)),
                sql.Identifier(RECEIPT),
                sql.Identifier(ROW),
                sql.Identifier(PROBLEM),
                sql.SQL(", ").join(columns),
            )
        )

    def _empty_staging(self, connection: psycopg.Connection[Any], attempt: BatchAttempt) -> None:
        """Remove all staged rows, unless a task that does not know of the end still copies."""
        self._cleaned(connection, "TRUNCATE {}", self._schema, _staging(attempt))

    def _drop_staging(self, connection: psycopg.Connection[Any], flow: str) -> None:
        """Remove the staging tables of earlier generations, in whichever schema they are."""
        pattern = _staging_prefix(flow).replace("_", r"\_") + "%"
        found = connection.execute(
            "SELECT nspname, relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace "
            "WHERE relname LIKE %s AND relkind = 'r' AND pg_has_role(relowner, 'USAGE')",
            [pattern],
        ).fetchall()
        for schema, name in found:
            self._cleaned(connection, "DROP TABLE IF EXISTS {}", schema, name)

    def _cleaned(self, connection: psycopg.Connection[Any], statement: str, schema: str, table: str) -> None:
        import psycopg
        from psycopg import sql

        with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable), connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{_CLEAN_MS}ms'")
            connection.execute(sql.SQL(statement).format(sql.Identifier(schema, table)))


def _python_name(connection: psycopg.Connection[Any], encoding: str) -> str:
    """Python's name for an encoding of PostgreSQL. Its ``SQL_ASCII`` takes all bytes."""
    import psycopg

    if encoding in ("UTF8", "SQL_ASCII"):
        return "utf-8"
    with suppress(psycopg.Error, LookupError), connection.transaction(force_rollback=True):
        connection.execute("SELECT set_config('client_encoding', %s, true)", [encoding])
        return codecs.lookup(connection.info.encoding).name
    return "utf-8"  # none that Python knows: COPY finds what cannot be stored


def _staging_prefix(flow: str) -> str:
    return f"onceflow_staging_{hashlib.sha256(flow.encode()).hexdigest()[:16]}_"


def _staging(attempt: BatchAttempt) -> str:
    """The staging table of a driver."""
    return f"{_staging_prefix(attempt.flow)}{attempt.generation}_{attempt.owner[:8]}"


# What to do if a table does not take the columns of a query, by the beginning of the SQLSTATE.
_CURES = {
    "42804": "cast the columns in the query to the types of the table",
    "42883": "cast the columns in the query to the types of the table",
    "42846": "cast the columns in the query to the types of the table",
    "22": "cast the columns in the query to the types of the table",
    "42703": "rename the columns in the query to those of the table",
    "42601": "rename the column, or report this with the table's definition",
    "42602": "rename the column: this is no name in PostgreSQL",
    "42622": "rename the column: its name is too long for PostgreSQL",
    "23": "see the rules of the table that the detail names: a check, a default, a trigger",
    "P0": "see the trigger or the function that has raised it",
    "39": "see the trigger or the function that has raised it",
    "38": "see the trigger or the function that has raised it",
}


def _cure(error: psycopg.Error) -> str:
    """What to do if a table does not take the columns of a query."""
    code = error.sqlstate or ""
    found = next((_CURES[code[:n]] for n in (5, 2) if code[:n] in _CURES), None)
    return found or "see what the server says, in its log, too"

"""How staged rows get into a table of a PostgreSQL database, and which of them it does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.errors import BadRecordError
from onceflow.external.postgres_columns import Column
from onceflow.external.rows import INSERT, UPSERT, TableWrite
from onceflow.external.sink import RefusedRow

if TYPE_CHECKING:  # the extra is needed where it is used only
    import psycopg
    from psycopg import sql

#: Columns of a staging table: which task has staged the row, and where it stands in the task's rows.
RECEIPT, ROW = "onceflow_receipt", "onceflow_row"
#: Another one: why the row cannot be in the table, which only tasks could see; mostly null.
PROBLEM = "onceflow_problem"
#: The headers of a record as two arrays, because structs cannot be staged.
HEADERS = {"onceflow_header_names": "text[]", "onceflow_header_values": "bytea[]"}

_PLACE = "onceflow_place"
# Rows are tried in ranges of this many, which are divided until the refused rows are found.
_RANGE = 1_000
# A row with a problem makes the statement fail, as one does that the table refuses.
_SOUND = " AND ({0} IS NULL OR {0}::int IS NULL)"
UNTRANSLATABLE = "UntranslatableCharacter"  # PostgreSQL's class for it


@dataclass(frozen=True)
class Staged:
    """Rows of one attempt in its staging table.

    Args:
        table: name of the staging table. receipts: of the tasks, in their order.
    """

    table: str
    receipts: Sequence[str]


class Moves:
    """Moves staged rows into the table.

    Args:
        columns: of the table, as far as they are written; in mode ``delete-by-flag`` also the flag.
        record: staged columns of the rows' records, which the table does not have.
        ordered: whether the table shows in which order rows are inserted, see `shows_order`.
    """

    def __init__(
        self, write: TableWrite, columns: Sequence[Column], record: Sequence[Column], *, ordered: bool = True
    ) -> None:
        self._write = write
        self._ordered = ordered
        self._columns = {each.name: each for each in columns}
        self._record = [each.name for each in record]

    def all_of(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        """Move all rows. They are in the transaction, or it is as it was before."""
        from psycopg import sql

        rows = sql.SQL("{} WHERE {} = ANY(%(receipts)s)").format(sql.Identifier(staged.table), sql.Identifier(RECEIPT))
        rows += sql.SQL(_SOUND).format(sql.Identifier(PROBLEM))
        with connection.transaction():
            order = _in_order_of_tasks(sql.SQL("%(receipts)s"))
            self._run(connection, self._statements(rows, order), {"receipts": list(staged.receipts)})

    def all_accepted(self, connection: psycopg.Connection[Any], staged: Staged) -> list[RefusedRow]:
        """Move the rows that the table takes. Returns the others."""
        try:
            self.all_of(connection, staged)
            return []
        except refusals():
            with _Numbered(connection, staged) as numbered:
                found = dict(self._refused(connection, *numbered))
                return self._rows(connection, numbered[0], found)

    def explained(
        self, connection: psycopg.Connection[Any], staged: Staged, error: psycopg.DatabaseError
    ) -> BadRecordError:
        """The error for a row that the table does not take, with the first such row."""
        with _Numbered(connection, staged) as numbered:
            found = dict([next(self._refused(connection, *numbered), (0, error))])
            rows = self._rows(connection, numbered[0], found)
        return BadRecordError(
            f"Table {self._write.table} does not take a row",
            detail=f"{rows[0].message}; the row: {dict(rows[0].row)!s:.500}" if rows else _message(error),
            next_step="correct the row in the query, or the table's constraints; with dead_letter_topic= it becomes a "
            "dead letter",
        )

    # ---- inside --------------------------------------------------------------------------------------

    def _run(
        self, connection: psycopg.Connection[Any], statements: Sequence[sql.Composed], values: Mapping[str, Any]
    ) -> None:
        for statement in statements:
            connection.execute(statement, values)
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # else deferred ones would fail in the commit

    def _statements(self, rows: sql.Composed, order: Sequence[sql.Composed]) -> list[sql.Composed]:
        """How rows are moved.

        Args:
            rows: a table and a condition. order: what says in which order they apply.
        """
        from psycopg import sql

        names = self._write.columns([*self._columns])
        table = sql.Identifier(*self._write.table.split(".", 1))
        key = _listed(self._write.key)
        values = sql.SQL(", ").join(self._columns[name].moved() for name in names)
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ").format(table, _listed(names), values)
        if self._write.mode == INSERT:
            # To sort them takes a third of the time of the whole transaction.
            shown = order if self._ordered else ()
            return [insert + rows + sql.SQL(" ORDER BY " if self._ordered else "") + sql.SQL(", ").join(shown)]
        newest = sql.SQL(", ").join(each + sql.SQL(" DESC") for each in order)
        last = sql.SQL("(SELECT DISTINCT ON ({}) * FROM {} ORDER BY {}, {}) AS last").format(key, rows, key, newest)
        others = [name for name in names if name not in self._write.key]
        change = sql.SQL(", ").join(
            sql.SQL("{} = excluded.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in others
        )
        conflict = sql.SQL(" ON CONFLICT ({}) DO ").format(key)
        conflict += sql.SQL("UPDATE SET ") + change if others else sql.SQL("NOTHING")
        if self._write.mode == UPSERT:
            return [insert + last + conflict]
        flag = sql.Identifier(self._write.flag)
        same = sql.SQL(" AND ").join(
            sql.SQL("t.{} = {}").format(sql.Identifier(name), self._columns[name].moved("last"))
            for name in self._write.key
        )
        delete = sql.SQL("DELETE FROM {} AS t USING {} WHERE last.{} IS TRUE AND {}").format(table, last, flag, same)
        return [delete, insert + last + sql.SQL(" WHERE {} IS NOT TRUE").format(flag) + conflict]

    def _refused(
        self, connection: psycopg.Connection[Any], table: str, total: int
    ) -> Iterator[tuple[int, psycopg.DatabaseError]]:
        """Move numbered rows. Yields the numbers of those that are not taken, and why."""
        from psycopg import sql

        rows = sql.SQL("{} WHERE {} BETWEEN %(low)s AND %(high)s").format(sql.Identifier(table), sql.Identifier(_PLACE))
        rows += sql.SQL(_SOUND).format(sql.Identifier(PROBLEM))
        statements = self._statements(rows, [sql.Composed([sql.Identifier(_PLACE)])])
        left = [(low, min(low + _RANGE - 1, total)) for low in range(1, total + 1, _RANGE)][::-1]
        while left:
            low, high = left.pop()
            try:
                with connection.transaction():
                    self._run(connection, statements, {"low": low, "high": high})
            except refusals() as error:
                if low == high:
                    yield low, error
                else:
                    middle = (low + high) // 2
                    left += [(middle + 1, high), (low, middle)]

    def _rows(
        self, connection: psycopg.Connection[Any], table: str, found: Mapping[int, psycopg.DatabaseError]
    ) -> list[RefusedRow]:
        from psycopg import sql

        names = [PROBLEM, *self._columns, *self._record]
        select = sql.SQL("SELECT {}, {} FROM {} WHERE {} = ANY(%s) ORDER BY 1").format(
            sql.Identifier(_PLACE), _listed(names), sql.Identifier(table), sql.Identifier(_PLACE)
        )
        rows = []
        for number, problem, *values in connection.execute(select, [[*found]]):
            error = found[number]
            row = dict(zip(names[1:], values, strict=True))
            record = {name: row.pop(name) for name in self._record}
            headers = [record.pop(name, None) or () for name in HEADERS]
            if headers[0]:
                record["headers"] = [{"key": key, "value": value} for key, value in zip(*headers, strict=True)]
            kind = type(error).__name__ if problem is None else UNTRANSLATABLE
            rows.append(RefusedRow(row, kind, problem or _message(error), record))
        return rows


class _Numbered:
    """The staged rows of an attempt in a table of their own, numbered in their order, for as long as it is open."""

    def __init__(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        self._connection = connection
        self._staged = staged
        self._table = f"{staged.table}_numbered"

    def __enter__(self) -> tuple[str, int]:
        from psycopg import sql

        # A statement that creates a table takes no parameters.
        receipts = sql.Literal(list(self._staged.receipts))
        made = self._connection.execute(
            sql.SQL(
                "CREATE UNLOGGED TABLE {} AS SELECT row_number() OVER (ORDER BY {}) AS {}, * FROM {} WHERE {} = ANY({})"
            ).format(
                sql.Identifier(self._table),
                sql.SQL(", ").join(_in_order_of_tasks(receipts)),
                sql.Identifier(_PLACE),
                sql.Identifier(self._staged.table),
                sql.Identifier(RECEIPT),
                receipts,
            )
        )
        self._connection.execute(
            sql.SQL("CREATE INDEX ON {} ({})").format(sql.Identifier(self._table), sql.Identifier(_PLACE))
        )
        self._connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(self._table)))
        return self._table, made.rowcount

    def __exit__(self, kind: object, *_: object) -> None:
        from psycopg import sql

        if kind is None:
            self._connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._table)))


def refusals() -> tuple[type[psycopg.DatabaseError], ...]:
    """Errors that mean that the table does not take a row. A trigger may raise one, too."""
    import psycopg

    return psycopg.IntegrityError, psycopg.DataError, psycopg.errors.RaiseException


def _message(error: psycopg.DatabaseError) -> str:
    detail = error.diag.message_detail
    return f"{error.diag.message_primary}{f'; {detail:.500}' if detail else ''}"


def _in_order_of_tasks(receipts: sql.Composable) -> list[sql.Composed]:
    """What staged rows are ordered by: tasks have the order of their receipts, and names of receipts have another."""
    from psycopg import sql

    place = sql.SQL("array_position({}::text[], {})").format(receipts, sql.Identifier(RECEIPT))
    return [place, sql.Composed([sql.Identifier(ROW)])]


def _listed(names: Sequence[str]) -> sql.Composed:
    from psycopg import sql

    return sql.SQL(", ").join(map(sql.Identifier, names))

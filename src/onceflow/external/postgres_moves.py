"""How staged rows get into a table of a PostgreSQL database, and which of them it does not take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from onceflow.errors import BadRecordError
from onceflow.external.postgres_columns import Column, Relation, named
from onceflow.external.postgres_connection import kind_of, may_be_of_a_row
from onceflow.external.postgres_key import Key
from onceflow.external.postgres_staging import HEADERS, PROBLEM, RECEIPT, ROW
from onceflow.external.rows import UPSERT, TableWrite
from onceflow.external.sink import RefusedRow

if TYPE_CHECKING:  # the extra is needed where it is used only
    import psycopg
    from psycopg import sql

_PLACE = "place"
# Rows are tried in ranges of this many, which are divided until the refused rows are found.
_RANGE = 1_000
_LACKS_ANOTHER = "ForeignKeyViolation"  # the error of a row that another row may cure
_CHECK_CONSTRAINTS = "SET CONSTRAINTS ALL IMMEDIATE"  # else deferred ones would fail in the commit


@dataclass(frozen=True)
class Staged:
    """Rows of one attempt in its staging table.

    Args:
        schema: of the staging table. table: its name.
        receipts: of the tasks, in their order.
        problems: how many rows have one.
    """

    schema: str
    table: str
    receipts: Sequence[str]
    problems: int = 0


@dataclass(frozen=True)
class _Refusal:
    """Why a row is not taken, with the name of the class of the error."""

    kind: str
    message: str


class Moves:
    """Moves staged rows into the table.

    Args:
        columns: of the table, as far as they are written; in mode ``delete-by-flag`` also the flag.
        record: staged columns of the rows' records, which the table does not have.
        key: how the key of rows is compared; None: they have none.
        ordered: whether the table shows in which order rows are inserted, see `shows_order`.
    """

    def __init__(
        self,
        write: TableWrite,
        relation: Relation,
        columns: Sequence[Column],
        record: Sequence[Column],
        *,
        key: Key | None,
        ordered: bool = True,
    ) -> None:
        self._write = write
        self._relation = relation
        self._ordered = ordered
        self._columns = {each.name: each for each in columns}
        self._record = list(record)
        self._key = key

    def all_of(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        """Move all rows, none of which has a problem. They are in the transaction, or it is as it was before."""
        with connection.transaction():
            self._all_of(connection, staged)

    def all_accepted(self, connection: psycopg.Connection[Any], staged: Staged) -> list[RefusedRow]:
        """Move the rows that the table takes. Returns the others.

        Raises:
            psycopg.Error: no row is to blame.
        """
        if self._took_all(connection, staged):
            return []
        with _Numbered(connection, staged) as numbered:
            return self._rows(connection, numbered.sql, self._moved(connection, numbered))

    def all_or_none(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        """Move all rows.

        Raises:
            BadRecordError: the table does not take one; it is the first such row.
            psycopg.Error: no row is to blame.
        """
        if self._took_all(connection, staged):
            return
        with _Numbered(connection, staged) as numbered:
            found = self._moved(connection, numbered, only_first=True)
            rows = self._rows(connection, numbered.sql, found)
        # Without one, rows disturbed each other in one statement only, and have been moved in several.
        for row in rows:
            raise not_taken(self._write, row)

    # ---- inside --------------------------------------------------------------------------------------

    def _all_of(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        from psycopg import sql

        rows = sql.SQL("{} WHERE {} = ANY(%(receipts)s)").format(named(staged.schema, staged.table), named(RECEIPT))
        order = _in_order_of_tasks(sql.SQL("%(receipts)s"))
        self._run(connection, self._statements(rows, order), {"receipts": list(staged.receipts)})
        connection.execute(_CHECK_CONSTRAINTS)

    def _took_all(self, connection: psycopg.Connection[Any], staged: Staged) -> bool:
        """Whether the rows are moved. If not, a row is to blame.

        Raises:
            psycopg.Error: no row is to blame: nothing can be written at all.
        """
        import psycopg

        failed = None
        if not staged.problems:
            try:
                self.all_of(connection, staged)
                return True
            except psycopg.Error as error:
                if not may_be_of_a_row(error):
                    raise
                failed = error
        try:
            # In one savepoint: if it is rolled back, and only then, constraints are deferred again. (What a savepoint
            # in it has set, and kept, stays.)
            with connection.transaction(force_rollback=True):
                self._all_of(connection, replace(staged, receipts=[]))
        except psycopg.Error as error:
            raise failed or error from None
        return False

    def _moved(
        self, connection: psycopg.Connection[Any], numbered: _Numbered, *, only_first: bool = False
    ) -> dict[int, _Refusal]:
        """Move numbered rows that the table takes. Returns the numbers of the others; or only the first one.

        A row may need a later one, by a foreign key or by a constraint that is deferred. So constraints are checked
        when all rows were tried, and rows that lack others are tried once more, together with these. If that fails,
        there is no way to know for which row, and each range of rows is checked by itself.
        """
        import psycopg

        found: dict[int, _Refusal] = {}
        try:
            with connection.transaction() as transaction:
                for number, refusal in self._refused(connection, numbered, checked=False):
                    found[number] = refusal
                    if only_first and refusal.kind != _LACKS_ANOTHER:
                        return {number: refusal}
                connection.execute(_CHECK_CONSTRAINTS)
                if all(each.kind != _LACKS_ANOTHER for each in found.values()):
                    return found
                raise psycopg.Rollback(transaction)
        except psycopg.Error as error:
            if not may_be_of_a_row(error):
                raise
        bad = {number: each for number, each in found.items() if each.kind != _LACKS_ANOTHER}
        if self._took_others(connection, numbered, bad):
            return bad
        with connection.transaction():
            refused = self._refused(connection, numbered, checked=True)
            return dict([each] if only_first and (each := next(refused, None)) else refused)

    def _took_others(
        self, connection: psycopg.Connection[Any], numbered: _Numbered, bad: Mapping[int, _Refusal]
    ) -> bool:
        """Move all rows but these at once. Returns whether the table takes them."""
        import psycopg
        from psycopg import sql

        rows = sql.SQL("{} WHERE {} <> ALL(%(bad)s::bigint[])").format(numbered.sql, named(_PLACE))
        try:
            with connection.transaction():
                self._run(connection, self._statements(rows, [sql.Composed([named(_PLACE)])]), {"bad": [*bad]})
                connection.execute(_CHECK_CONSTRAINTS)
            return True
        except psycopg.Error as error:
            if not may_be_of_a_row(error):
                raise
            return False

    def _refused(
        self, connection: psycopg.Connection[Any], numbered: _Numbered, *, checked: bool
    ) -> Iterator[tuple[int, _Refusal]]:
        """Move numbered rows. Yields the numbers of those that are not taken, and why."""
        import psycopg
        from psycopg import sql

        rows = sql.SQL("{0} WHERE {1} BETWEEN %(low)s AND %(high)s AND {2} IS NULL").format(
            numbered.sql, named(_PLACE), named(PROBLEM)
        )
        statements = self._statements(rows, [sql.Composed([named(_PLACE)])])
        if checked:
            statements.append(sql.Composed([sql.SQL(_CHECK_CONSTRAINTS)]))
        problems = numbered.problems()
        left = [(low, min(low + _RANGE - 1, numbered.total)) for low in range(1, numbered.total + 1, _RANGE)][::-1]
        while left:
            low, high = left.pop()
            try:
                with connection.transaction():
                    self._run(connection, statements, {"low": low, "high": high})
            except psycopg.Error as error:
                if not may_be_of_a_row(error):
                    raise
                if low == high:
                    yield low, _Refusal(kind_of(error.sqlstate or ""), _message(error))
                else:
                    middle = (low + high) // 2
                    left += [(middle + 1, high), (low, middle)]
                continue
            while problems and problems[0][0] <= high:
                yield problems.popleft()

    def _run(
        self, connection: psycopg.Connection[Any], statements: Sequence[sql.Composed], values: Mapping[str, Any]
    ) -> None:
        for statement in statements:
            connection.execute(statement, values)

    def _statements(self, rows: sql.Composed, order: Sequence[sql.Composed]) -> list[sql.Composed]:
        """How rows are moved.

        Args:
            rows: a table and a condition. order: what says in which order they apply.
        """
        from psycopg import sql

        names = self._write.columns([*self._columns])
        table = self._relation.sql
        values = sql.SQL(", ").join(self._columns[name].moved() for name in names)
        # Without another name, a table could be called like the rows that conflict: "excluded".
        insert = sql.SQL("INSERT INTO {} AS target ({}) SELECT {} FROM ").format(table, _listed(names), values)
        if self._key is None:
            # To sort them takes a third of the time of the whole transaction.
            shown = order if self._ordered else ()
            return [insert + rows + sql.SQL(" ORDER BY " if self._ordered else "") + sql.SQL(", ").join(shown)]
        last = self._last_of_each_key(rows, order, self._key)
        conflict = self._conflict(names, self._key)
        if self._write.mode == UPSERT:
            return [insert + last + conflict]
        flag = named(self._columns[self._write.flag].staged_in)
        # Also where a later row of the key is inserted: it must not get what the deleted one had in other columns.
        deleting = self._with_keys(rows + sql.SQL(" AND {} IS TRUE").format(flag))
        deletes = [
            sql.SQL("DELETE FROM {} AS t USING ({}) AS deleting WHERE {}").format(table, deleting, same)
            for same in self._same_keys(self._key)
        ]
        return [*deletes, insert + last + sql.SQL(" WHERE {} IS NOT TRUE").format(flag) + conflict]

    def _with_keys(self, rows: sql.Composed) -> sql.Composed:
        """Rows with the values that the columns of their keys get."""
        from psycopg import sql

        values = sql.SQL(", ").join(
            sql.SQL("{} AS {}").format(self._columns[name].assigned(), each) for each, name in self._key_columns
        )
        return sql.SQL("SELECT *, {} FROM {}").format(values, rows)

    def _last_of_each_key(self, rows: sql.Composed, order: Sequence[sql.Composed], key: Key) -> sql.Composed:
        """Rows that no later one has the key of, by the comparison of the unique index."""
        from psycopg import sql

        comma = sql.SQL(", ")
        columns = [(each, key.columns[name]) for each, name in self._key_columns]
        return sql.SQL("(SELECT DISTINCT ON ({}) * FROM ({}) AS keyed ORDER BY {}, {}) AS last").format(
            comma.join(how.collated(each) for each, how in columns),
            self._with_keys(rows),
            comma.join(how.sorted_by(each) for each, how in columns),
            comma.join(each + sql.SQL(" DESC") for each in order),
        )

    def _conflict(self, names: Sequence[str], key: Key) -> sql.Composed:
        """What replaces a row of the table. A key that may look different is replaced, too: it has the last spelling,
        wherever batches end. One that cannot is left: to change it takes a stronger lock."""
        from psycopg import sql

        changed = [name for name in names if name not in key.columns or not self._always_looks_the_same(name, key)]
        conflict = sql.SQL(" ON CONFLICT ({}) DO ").format(_listed(self._write.key))
        if not changed:
            return conflict + sql.SQL("NOTHING")
        return (
            conflict
            + sql.SQL("UPDATE SET ")
            + sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(named(name)) for name in changed)
        )

    def _always_looks_the_same(self, name: str, key: Key) -> bool:
        column = self._columns[name]
        return key.columns[name].is_exact or (column.base.name == "numeric" and column.size != -1)

    def _same_keys(self, key: Key) -> list[sql.Composed]:
        """Conditions for rows ``t`` that have the key of ``deleting``. Nulls have one of their own: a join with ``OR``
        cannot use the index, and few rows need it."""
        from psycopg import sql

        both = sql.SQL(" AND ")
        equal, either, nulls = [], [], []
        for each, name in self._key_columns:
            old, new = sql.SQL("t.{}").format(named(name)), sql.SQL("deleting.{}").format(each)
            equal.append(key.columns[name].equals(old, new))
            either.append(sql.SQL("({} OR {} IS NULL AND {} IS NULL)").format(equal[-1], old, new))
            nulls.append(sql.SQL("{} IS NULL").format(new))
        if not key.nulls_equal:
            return [both.join(equal)]
        return [both.join(equal), both.join([sql.SQL("({})").format(sql.SQL(" OR ").join(nulls)), *either])]

    @property
    def _key_columns(self) -> list[tuple[sql.SQL, str]]:
        """How statements name the values of the key, and the columns of the table."""
        return [(named(f"key_{number}"), name) for number, name in enumerate(self._write.key)]

    def _rows(
        self, connection: psycopg.Connection[Any], numbered: sql.SQL, found: Mapping[int, _Refusal]
    ) -> list[RefusedRow]:
        from psycopg import sql

        if not found:
            return []
        columns = [*self._columns.values(), *self._record]
        select = sql.SQL("SELECT {0}, {1} FROM {2} WHERE {0} = ANY(%s) ORDER BY 1").format(
            named(_PLACE), _listed([each.staged_in for each in columns]), numbered
        )
        rows = []
        with connection.cursor() as cursor:
            for name, loader in _loaders().items():
                cursor.adapters.register_loader(name, loader)
            for number, *values in cursor.execute(select, [[*found]]):
                row = dict(zip([each.name for each in columns], values, strict=True))
                record = {each.name: row.pop(each.name) for each in self._record}
                headers = [record.pop(name, None) or () for name in HEADERS]
                if headers[0]:
                    record["headers"] = [
                        {"key": key.decode(errors="replace"), "value": value}
                        for key, value in zip(*headers, strict=True)
                    ]
                rows.append(RefusedRow(row, found[number].kind, found[number].message, record))
        return rows


def not_taken(write: TableWrite, row: RefusedRow) -> BadRecordError:
    """The error for a row that the table does not take."""
    key = ", ".join(f"{name}={row.row[name]!r:.200}" for name in write.key)
    return BadRecordError(
        f"Table {write.table} does not take a row{f' with the key {key}' if key else ''}",
        detail=f"{row.message}; the row: {dict(row.row)!s:.500}",
        next_step="correct the row in the query, or the table's constraints; with dead_letter_topic= it becomes a "
        "dead letter",
    )


class _Numbered:
    """The staged rows of an attempt in a table of their own, numbered in their order, for as long as it is open."""

    def __init__(self, connection: psycopg.Connection[Any], staged: Staged) -> None:
        self._connection = connection
        self._staged = staged
        self.sql = named(staged.schema, f"{staged.table}_numbered")
        self.total = 0

    def __enter__(self) -> _Numbered:
        from psycopg import sql

        # A statement that creates a table takes no parameters of the server.
        receipts = sql.Literal(list(self._staged.receipts))
        self.total = self._connection.execute(
            sql.SQL(
                "CREATE UNLOGGED TABLE {} AS SELECT row_number() OVER (ORDER BY {}) AS {}, * FROM {} WHERE {} = ANY({})"
            ).format(
                self.sql,
                sql.SQL(", ").join(_in_order_of_tasks(receipts)),
                named(_PLACE),
                named(self._staged.schema, self._staged.table),
                named(RECEIPT),
                receipts,
            ),
            (),
        ).rowcount
        self._connection.execute(sql.SQL("CREATE INDEX ON {} ({})").format(self.sql, named(_PLACE)), ())
        self._connection.execute(sql.SQL("ANALYZE {}").format(self.sql), ())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        from psycopg import sql

        if kind is None:
            self._connection.execute(sql.SQL("DROP TABLE {}").format(self.sql), ())

    def problems(self) -> deque[tuple[int, _Refusal]]:
        """What tasks have found, with the numbers of the rows, in their order."""
        from psycopg import sql

        if not self._staged.problems:
            return deque()
        found = self._connection.execute(
            sql.SQL("SELECT {0}, {1} FROM {2} WHERE {1} IS NOT NULL ORDER BY 1").format(
                named(_PLACE), named(PROBLEM), self.sql
            ),
            (),
        )
        parts = ((number, problem.partition(": ")) for number, problem in found)
        return deque((number, _Refusal(kind, message)) for number, (kind, _, message) in parts)


@cache
def _loaders() -> dict[str, Any]:
    """Python's dates and intervals end earlier than PostgreSQL's: what they cannot have is text in a dead letter."""
    from psycopg import DataError
    from psycopg.types import datetime as types

    def lenient(base: Any) -> Any:
        class Loader(base):  # type: ignore[misc]
            def load(self, data: Any) -> Any:
                try:
                    return super().load(data)
                except DataError:
                    return bytes(data).decode()

        return Loader

    return {
        "date": lenient(types.DateLoader),
        "timestamp": lenient(types.TimestampLoader),
        "timestamptz": lenient(types.TimestamptzLoader),
        "interval": lenient(types.IntervalLoader),
    }


def _message(error: psycopg.Error) -> str:
    detail = error.diag.message_detail
    return f"{error.diag.message_primary}{f'; {detail:.500}' if detail else ''}"


def _in_order_of_tasks(receipts: sql.Composable) -> list[sql.Composed]:
    """What staged rows are ordered by: tasks have the order of their receipts, and names of receipts have another."""
    from psycopg import sql

    place = sql.SQL("array_position({}::text[], {})").format(receipts, named(RECEIPT))
    return [place, sql.Composed([named(ROW)])]


def _listed(names: Sequence[str]) -> sql.Composed:
    from psycopg import sql

    return sql.SQL(", ").join(map(named, names))

"""The table ``onceflow_progress`` of a PostgreSQL database, with a row for each flow.

A start finds it in the search path, and all statements name it with its schema from then on: a schema that is put in
front of it later, by somebody else or by another session's settings, may have a table of this name, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.errors import EnvironmentUnusableError, ProgressConflictError, SchemaError
from onceflow.external.postgres_columns import named
from onceflow.external.postgres_connection import suppress_race
from onceflow.external.sink import ProgressRow

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import SQL, Composed

_NAME = "onceflow_progress"


@dataclass(frozen=True)
class ProgressTable:
    """The table, in one schema."""

    schema: str
    name: str = _NAME

    @property
    def sql(self) -> SQL:
        return named(self.schema, self.name)

    def create(self, connection: psycopg.Connection[Any]) -> None:
        """Make the table, if it does not exist.

        ``CREATE TABLE IF NOT EXISTS`` alone would ask for CREATE on the schema also where the table is.
        """
        exists = "SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
        if connection.execute(exists + "WHERE nspname = %s AND relname = %s", [self.schema, self.name]).fetchone():
            return
        columns = "flow text PRIMARY KEY, generation bigint NOT NULL, owner text NOT NULL, progress text"
        with suppress_race():
            connection.execute(self._statement(f"CREATE TABLE IF NOT EXISTS {{}} ({columns})"), ())

    def row(self, connection: psycopg.Connection[Any], flow: str, *, lock: bool = False) -> ProgressRow | None:
        """The progress row of a flow. ``lock``: nobody else can change it until the transaction ends."""
        found = connection.execute(
            self._statement(
                "SELECT generation, owner, progress FROM {} WHERE flow = %s" + (" FOR UPDATE" if lock else "")
            ),
            [flow],
        ).fetchone()
        return None if found is None else ProgressRow(int(found[0]), found[1], found[2])

    def locked(self, connection: psycopg.Connection[Any], flow: str) -> ProgressRow | None:
        """The progress row, which nobody else can change until the transaction ends, also if there is none: the lock
        of a row that is not there yet is that of its insertion."""
        insert = "INSERT INTO {} VALUES (%s, 0, '', NULL) ON CONFLICT (flow) DO NOTHING"
        connection.execute(self._statement(insert), [flow])
        found = self.row(connection, flow, lock=True)
        return None if found is None or not found.generation else found

    def take(self, connection: psycopg.Connection[Any], flow: str, owner: str, generation: int) -> None:
        """Give the flow to another driver."""
        update = "UPDATE {} SET generation = %s, owner = %s WHERE flow = %s RETURNING generation, owner"
        done = connection.execute(self._statement(update), [generation, owner, flow])
        self._check_kept(flow, done.fetchall(), (generation, owner))

    def keep(self, connection: psycopg.Connection[Any], flow: str, progress: str) -> None:
        """Change the progress of a flow."""
        update = "UPDATE {} SET progress = %s WHERE flow = %s RETURNING progress"
        done = connection.execute(self._statement(update), [progress, flow])
        self._check_kept(flow, done.fetchall(), (progress,))

    def _check_kept(self, flow: str, found: Sequence[tuple[Any, ...]], expected: tuple[Any, ...]) -> None:
        """Check that the row has what was written: rows without their progress would be written again.

        Raises:
            EnvironmentUnusableError: it has not. The transaction must not be committed.
        """
        if found != [expected]:
            raise EnvironmentUnusableError(
                f"The table {self.schema}.{self.name} does not keep the progress of flow {flow!r} as it is written",
                detail="a trigger or rule of the table leaves the row as it was, or its columns have other types",
                next_step="remove what changes it; its columns are flow text, generation bigint, owner text and "
                "progress text. Nothing of the batch was written",
            )

    def _statement(self, text: str) -> Composed:
        from psycopg import sql

        return sql.SQL(text).format(self.sql)


def progress_table_of(connection: psycopg.Connection[Any], flow: str, path: Sequence[str]) -> ProgressTable | None:
    """The table that has the row of a flow. If none has, the first one that may be read, or else the first one; None:
    there is no such table.

    Args:
        path: the schemas in which to look.

    Raises:
        ProgressConflictError: several tables have a row of the flow.
        SchemaError: a crash of the server empties the table.
    """
    found = connection.execute(
        "SELECT nspname, has_table_privilege(c.oid, 'SELECT'), relpersistence FROM unnest(%s::text[]) WITH ORDINALITY "
        "AS path (schema, place) JOIN pg_namespace AS n ON nspname = path.schema "
        "JOIN pg_class AS c ON relnamespace = n.oid WHERE relname = %s ORDER BY place",
        [[*path], _NAME],
    ).fetchall()
    tables = [ProgressTable(schema) for schema, *_ in found]
    # One that may not be read is that of other users, unless it is the only one: then the server says what is missing.
    readable = [table for table, (_, may_be_read, _) in zip(tables, found, strict=True) if may_be_read]
    having = [table for table in readable if len(readable) > 1 and table.row(connection, flow) is not None]
    if len(having) > 1:
        raise ProgressConflictError(
            f"The database has {len(having)} progress rows of flow {flow!r}",
            detail=f"in the tables {_NAME} of the schemas {', '.join(table.schema for table in having)}",
            next_step="delete those that are not the flow's: usually only one of them still changes",
        )
    chosen = next(iter([*having, *readable, *tables]), None)
    if chosen is not None and ("u" in {kept for schema, _, kept in found if schema == chosen.schema}):
        raise SchemaError(
            f"The table {chosen.schema}.{chosen.name} is UNLOGGED: a crash of the server empties it, and the progress "
            "of flows would be gone, but not their rows",
            next_step=f"ALTER TABLE {chosen.schema}.{chosen.name} SET LOGGED",
        )
    return chosen

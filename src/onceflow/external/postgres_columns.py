"""Columns of a PostgreSQL table, and the types in which rows are staged for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from onceflow.errors import SchemaError

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

_TEXTS = ("text", "character", "name", "citext")
_WHOLE = ("smallint", "integer", "bigint")
_ROUNDED = ("numeric", "double precision", "real")

#: The types in which Arrow's are staged, as ADBC encodes them.
_SIMPLE: tuple[tuple[Any, str], ...] = (
    (kinds.is_boolean, "boolean"),
    (kinds.is_int8, "smallint"),
    (kinds.is_int16, "smallint"),
    (kinds.is_int32, "integer"),
    (kinds.is_int64, "bigint"),
    (kinds.is_float32, "real"),
    (kinds.is_float64, "double precision"),
    (kinds.is_decimal, "numeric"),
    (kinds.is_string, "text"),
    (kinds.is_large_string, "text"),
    (kinds.is_binary, "bytea"),
    (kinds.is_large_binary, "bytea"),
    (kinds.is_date32, "date"),
)


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        type: as PostgreSQL writes it, for example ``numeric(10,2)``.
        needed: whether a row must have a value for it.
        staged_as: the type of the staging table's column.
    """

    name: str
    type: str
    needed: bool
    staged_as: str = ""

    def staged(self, staged_as: str) -> Column:
        """The same column, for rows that are staged in this type."""
        return replace(self, staged_as=staged_as)

    def moved(self, source: str = "") -> sql.Composed:
        """The staged value, as a value of the column.

        PostgreSQL converts it as in any INSERT, which refuses what does not fit. Only text is converted as if it stood
        in a statement: so it may become a jsonb, a uuid or a point in time.
        """
        from psycopg import sql

        value = sql.Identifier(source, self.name) if source else sql.Identifier(self.name)
        if self.staged_as == "text" and not self.type.startswith(_TEXTS):
            return sql.SQL("CAST({} AS {})").format(value, sql.SQL(self.type))
        return sql.Composed([value])


def columns_of(connection: psycopg.Connection[Any], table: str) -> dict[str, Column]:
    """The columns of a table that can be written, by name.

    Raises:
        SchemaError: there is no such table.
    """
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split(".", 1))
    found = connection.execute(
        "SELECT attname, format_type(atttypid, atttypmod), "
        "attnotnull AND NOT atthasdef AND attidentity = '', attgenerated = '' AND attidentity <> 'a' "
        "FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [quoted],
    ).fetchall()
    if not found:
        raise SchemaError(f"There is no table {table!r}", next_step="create it, or check the search_path of the user")
    return {name: Column(name, kind, needed) for name, kind, needed, writable in found if writable}


def shows_order(connection: psycopg.Connection[Any], table: str, written: Sequence[str]) -> bool:
    """Whether one can see in which order rows were inserted: by a trigger, a rule, or the default of another column,
    such as a number that counts up. Otherwise rows of a table have no order."""
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split(".", 1))
    found = connection.execute(
        "SELECT c.relkind <> 'r' OR c.relhasrules OR c.relispartition "
        "OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal) "
        "OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped "
        "AND (atthasdef OR attidentity <> '') AND attname <> ALL(%s)) "
        "FROM pg_class AS c WHERE c.oid = to_regclass(%s)",
        [list(written), quoted],
    ).fetchone()
    return found is None or bool(found[0])


def check_digits(known: Mapping[str, Column], staged: Mapping[str, str], written: Sequence[str], table: str) -> None:
    """Check that no digits get lost.

    Raises:
        SchemaError: they would, because the column is a whole number.
    """
    for name in written:
        if staged[name] in _ROUNDED and known[name].type in _WHOLE:
            raise SchemaError(
                f"Column {name} of table {table} is {known[name].type}, but {staged[name]} in the rows",
                detail="digits would get lost",
                next_step=f"cast it in the query, for example CAST({name} AS BIGINT)",
            )


def staged_types(schema: pa.Schema) -> dict[str, str]:
    """The type of each column of the staging table.

    Raises:
        SchemaError: a column has a type that cannot be staged.
    """
    found = {}
    for column in schema:
        kind = _staged(column.type)
        if kind is None:
            raise SchemaError(
                f"Column {column.name} is {column.type}, which PostgreSQL has no type for",
                next_step=f"select to_json({column.name}), for a column of type jsonb or text",
            )
        found[column.name] = kind
    return found


def _staged(kind: pa.DataType) -> str | None:
    if kinds.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        inner = _staged(kind.value_type)
        return None if inner is None or inner.endswith("[]") else f"{inner}[]"
    return next((name for is_kind, name in _SIMPLE if is_kind(kind)), None)


def without_nul(columns: Sequence[pa.Array], names: Sequence[str]) -> tuple[pa.Array, list[pa.Array]]:
    """Text without the character 0x00, which PostgreSQL has no place for: COPY would fail, and not name the row.

    Returns:
        What is wrong with each row (mostly null), and the columns with another character (U+FFFD) in its place.
    """
    problems = pa.nulls(len(columns[0]) if columns else 0, pa.string())
    sound = []
    for name, column in zip(names, columns, strict=True):
        if kinds.is_string(column.type) or kinds.is_large_string(column.type):
            bad = pc.fill_null(pc.match_substring(column, "\0"), False)
            if pc.any(bad).as_py():
                text = f"column {name} has the character 0x00, which PostgreSQL cannot store"
                problems = pc.if_else(bad, text, problems)
                column = pc.replace_substring(column, "\0", "\ufffd")
        sound.append(column)
    return problems, sound

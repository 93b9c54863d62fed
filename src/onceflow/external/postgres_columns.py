"""Columns of a PostgreSQL table, and the types in which rows are staged for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as kinds

from onceflow.errors import SchemaError

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

_WHOLE = ("smallint", "integer", "bigint")
_TIMES = ("time without time zone", "time with time zone")
#: What an assignment takes away, without an error: from values of these staged types, in columns of these types; and
#: what is selected in their place.
_LESS: tuple[tuple[tuple[str, ...], tuple[str, ...], str, str], ...] = (
    (("numeric", "double precision", "real"), _WHOLE, "digits would get lost", "CAST({} AS BIGINT)"),
    (("interval",), _TIMES, "whole days would get lost", "date_format(timestamp '1970-01-01' + {}, 'HH:mm:ss.SSSSSS')"),
)
#: The time of day of a text in UTC. AT TIME ZONE makes 0:00 of 24:00, which is another value of a ``time``.
_TIME_IN_UTC = (
    "CASE CAST({0} AS time with time zone) WHEN time with time zone '24:00+00' THEN time '24:00' "
    "ELSE CAST(CAST({0} AS time with time zone) AT TIME ZONE 'UTC' AS time) END"
)
#: Intervals that leave out parts of a value (``AdjustIntervalForTypmod`` in PostgreSQL's timestamp.c).
_FIELDS = re.compile(r"interval (?:(?:year|month|day|hour|minute)(?: to (?:month|hour|minute))?)(?=$|\[)")
#: Types that cut a text which is too long, and the bytes that they keep (``namein`` and ``charin``).
CUTTING = {"name": 63, '"char"': 1}
_MAX_ALIKE = 3
_FLOATS = ("double precision", "real")

#: The types in which Arrow's are staged, as ADBC encodes them.
_SIMPLE: tuple[tuple[Any, str], ...] = (
    (kinds.is_boolean, "boolean"),
    (kinds.is_int8, "smallint"),
    (kinds.is_int16, "smallint"),
    (kinds.is_int32, "integer"),
    (kinds.is_int64, "bigint"),
    (kinds.is_float32, "real"),
    (kinds.is_float64, "double precision"),
    (kinds.is_string, "text"),
    (kinds.is_large_string, "text"),
    (kinds.is_binary, "bytea"),
    (kinds.is_large_binary, "bytea"),
    (kinds.is_date32, "date"),
    (kinds.is_duration, "interval"),
)


@dataclass(frozen=True)
class Relation:
    """The table, as it was found at the start. Statements name it with its schema: what is put in front of it in the
    search path later, or by another session's settings, is another table.

    Args:
        oid: PostgreSQL's number of it.
    """

    oid: int
    schema: str
    name: str

    @property
    def sql(self) -> sql.SQL:
        return named(self.schema, self.name)


@dataclass(frozen=True)
class Type:
    """A type of the database. Of a domain: the type below it.

    Args:
        name: as a cast writes it, without a length.
        takes_text: whether text is assigned to it without a cast.
        sized: the function that gives a value its length, if that depends on whether it is cast or assigned: a cast to
            ``varchar(3)`` cuts a text, and an assignment refuses it.
        element: of an array.
    """

    name: str
    takes_text: bool
    sized: tuple[str, str] | None = None
    element: Type | None = None


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        type: as PostgreSQL writes it, for example ``numeric(10,2)``.
        base: its type without a length. sized_base: with it. size: the length, in PostgreSQL's own number; -1: none.
        is_domain: whether it is a domain over ``base``.
        needed: whether a row must have a value for it.
        always: how PostgreSQL makes its values if it takes none from a row, for example
            ``GENERATED ALWAYS AS IDENTITY``; "": it takes values.
        staged_as: the type of the staging table's column. staged_in: its name. Staging tables have names of their own,
            so no column's name can be in the way of another.
    """

    name: str
    type: str
    base: Type
    sized_base: str = ""
    size: int = -1
    is_domain: bool = False
    needed: bool = False
    always: str = ""
    staged_as: str = ""
    staged_in: str = ""

    def staged(self, staged_as: str, staged_in: str) -> Column:
        """The same column, for rows that are staged in this type, and under this name."""
        return replace(self, staged_as=staged_as, staged_in=staged_in)

    @property
    def cuts_text(self) -> int:
        """The bytes that the column keeps of a text which is longer, or of those in an array; 0: it cuts none."""
        kind, _, item = _item(self.staged_as, self.base)
        return CUTTING.get(item.name, 0) if kind == "text" and item is not None else 0

    def moved(self) -> sql.Composed:
        """The staged value, as INSERT takes it for the column.

        PostgreSQL converts it as in any INSERT, which refuses what does not fit. Only text is converted as if it stood
        in a statement: so it may become a jsonb, a uuid or a point in time. That cast gives no length, because a cast
        cuts what is too long. A text that names a time zone is its moment in UTC, also in a ``timestamp``, a ``date``
        or a ``time``, for which PostgreSQL would leave out the zone. Floats become ``numeric`` by way of their text,
        which tells every float from every other: PostgreSQL's own conversion keeps 15 digits of a double and 6 of a
        real (``float8_numeric`` in its numeric.c).
        """
        from psycopg import sql

        value = sql.Composed([named(self.staged_in)])
        kind, brackets, item = _item(self.staged_as, self.base)
        if item is None:
            return value
        if kind in _FLOATS and item.name == "numeric":
            value = sql.SQL("CAST({} AS text{})").format(value, plain(brackets))
        elif kind == "text" and item.name in ("timestamp without time zone", "date"):
            value = sql.SQL("CAST({} AS timestamp with time zone{})").format(value, plain(brackets))
        elif kind == "text" and item.name == _TIMES[0]:
            value = _for_each(_TIME_IN_UTC, value) if brackets else sql.SQL(_TIME_IN_UTC).format(value)
        elif kind != "text" or item.takes_text:
            return value
        return sql.SQL("CAST({} AS {}{})").format(value, plain(item.name), plain(brackets))

    def assigned(self) -> sql.Composed:
        """What the column has when the staged value was inserted, by the rules of PostgreSQL's assignments."""
        from psycopg import sql

        value = self.moved()
        if self.staged_as != self.base.name:
            value = sql.SQL("CAST({} AS {})").format(value, plain(self.base.name))
        element = self.base.element
        if self.size != -1 and self.base.sized:
            value = sql.SQL("{}({}, {}, false)").format(named(*self.base.sized), value, sql.Literal(self.size))
        elif self.size != -1 and element is not None and element.sized and self.staged_as.endswith("[]"):
            value = _for_each("{1}({0}, {2}, false)", value, named(*element.sized), sql.Literal(self.size))
        elif self.size != -1:
            value = sql.SQL("CAST({} AS {})").format(value, plain(self.sized_base))
        return sql.SQL("CAST({} AS {})").format(value, plain(self.type)) if self.is_domain else value


def _for_each(change: str, array: sql.Composed, *parts: sql.Composable) -> sql.Composed:
    """An array with each of its items changed.

    Args:
        change: of one item, which is ``{0}``. parts: what else it has places for, from ``{1}`` on.
    """
    from psycopg import sql

    return sql.SQL(
        "CASE WHEN {0} IS NULL THEN NULL ELSE ARRAY(SELECT {1} "
        "FROM unnest({0}) WITH ORDINALITY AS each (item, place) ORDER BY each.place) END"
    ).format(array, sql.SQL(change).format(sql.SQL("each.item"), *parts))


def _item(staged_as: str, base: Type) -> tuple[str, str, Type | None]:
    """The type in which values are staged, without its size; ``[]`` for arrays of it, else ""; and the type of the
    column or of its elements, if it has some."""
    kind = staged_as.removesuffix("[]")
    brackets = staged_as[len(kind) :]
    return kind.partition("(")[0], brackets, base.element if brackets else base


def named(*names: str) -> sql.SQL:
    """A name in a statement that has parameters. psycopg's ``Identifier`` leaves ``%`` as it is, which the statement
    would then take for a parameter."""
    return plain(".".join(map(quoted_name, names)))


def plain(text: str) -> sql.SQL:
    """A part of a statement that has parameters."""
    from psycopg import sql

    return sql.SQL(text.replace("%", "%%"))


def relation_of(connection: psycopg.Connection[Any], table: str) -> Relation:
    """The table of this name.

    Raises:
        SchemaError: there is no such table.
    """
    found = connection.execute(
        "SELECT c.oid, nspname, relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
        "WHERE c.oid = coalesce(to_regclass(%s), to_regclass(%s))",
        [_quoted(table), quoted_name(table)],  # a name may have a dot
    ).fetchone()
    if found is None:
        raise _no_table(connection, table)
    return Relation(*found)


#: The table or view that a view selects from, if it is one.
_BELOW_A_VIEW = """
SELECT min(d.refobjid::bigint)::oid AS oid FROM pg_class AS v JOIN pg_rewrite AS r ON r.ev_class = v.oid
JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
WHERE v.oid = {view} AND v.relkind = 'v' AND d.refobjid <> v.oid HAVING count(DISTINCT d.refobjid) = 1
"""
#: A table, and those that get its rows: its partitions, and that of a view.
_BELOW = f"""
WITH RECURSIVE named AS (SELECT {{table}}::oid AS oid),
below AS (SELECT oid FROM named UNION SELECT next.oid FROM below CROSS JOIN LATERAL (
    SELECT inhrelid AS oid FROM pg_inherits JOIN pg_class AS p ON p.oid = inhparent
    WHERE inhparent = below.oid AND p.relkind = 'p'
    UNION ALL {_BELOW_A_VIEW.format(view="below.oid")}
) AS next)
"""
#: Every row of the catalog that says what such a table is, with the transaction that has written it. Of the table
#: itself, its settings: a trigger that makes child tables for rows (as TimescaleDB does) changes its row of the
#: catalog, too, which would look like an alteration in each attempt.
_PARTS = """
SELECT 'table' AS kind, c.oid, 0 AS place, concat_ws(' ', relkind, relpersistence, relispartition, relrowsecurity,
    relforcerowsecurity, relchecks, relnamespace, relname) AS version FROM below JOIN pg_class AS c USING (oid)
UNION ALL SELECT 'column', attrelid, attnum, a.xmin::text FROM below JOIN pg_attribute AS a ON attrelid = below.oid
UNION ALL SELECT 'index', indexrelid, 0, i.xmin::text FROM below JOIN pg_index AS i ON indrelid = below.oid
UNION ALL SELECT 'rule', r.oid, 0, r.xmin::text FROM below JOIN pg_rewrite AS r ON ev_class = below.oid
UNION ALL SELECT 'trigger', t.oid, 0, t.xmin::text FROM below JOIN pg_trigger AS t ON tgrelid = below.oid
"""
_NAMED = (
    "(SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
    "WHERE nspname = %s AND relname = %s)"
)
#: As a digest: a table may have thousands of partitions.
_DEFINITION = f"""
{_BELOW.format(table=_NAMED)}
SELECT (SELECT oid FROM named), encode(sha256(string_agg(part, ',' ORDER BY part)::bytea), 'hex')
FROM (SELECT concat_ws(' ', kind, oid, place, version) AS part FROM ({_PARTS}) AS parts) AS texts
"""
#: Tables that do not keep rows, or do not commit them with the progress row.
_NOT_LASTING = f"""
{_BELOW.format(table="%s")}
SELECT c.oid::regclass::text, relkind = 'f' FROM below JOIN pg_class AS c USING (oid)
WHERE relkind = 'f' OR relpersistence = 'u' ORDER BY 1
"""


def definition_of(connection: psycopg.Connection[Any], relation: Relation) -> tuple[Any, ...]:
    """What is different if the table of this name, or one that gets its rows, has been altered, or is another one. Its
    first part is the number of the table.

    Raises:
        SchemaError: there is no such table any more.
    """
    found: tuple[Any, ...] | None = connection.execute(_DEFINITION, [relation.schema, relation.name]).fetchone()
    if found is None or found[0] is None:
        raise _no_table(connection, f"{relation.schema}.{relation.name}")
    return found


def below_views(connection: psycopg.Connection[Any], oid: int) -> int:
    """The table below a view; of a table, itself."""
    below: Any = (oid,)
    while below:
        oid, below = below[0], connection.execute(_BELOW_A_VIEW.format(view="%s"), below).fetchone()
    return oid


def check_lasting(connection: psycopg.Connection[Any], relation: Relation) -> None:
    """Check that rows are committed with the progress row, and stay.

    Raises:
        SchemaError: the table, or one that gets its rows, is a foreign one, or a crash of the server empties it.
    """
    found = connection.execute(_NOT_LASTING, [relation.oid]).fetchone()
    if found is None:
        return
    name, is_foreign = found
    if is_foreign:
        raise SchemaError(
            f"{name} is a foreign table: another server commits its rows, before or after the progress row",
            next_step="write with a sink that is connected to that server",
        )
    raise SchemaError(
        f"{name} is UNLOGGED: a crash of the server empties it, and no flow writes its rows again",
        next_step=f"ALTER TABLE {name} SET LOGGED",
    )


def columns_of(connection: psycopg.Connection[Any], relation: Relation) -> dict[str, Column]:
    """The columns of a table, by name."""
    # Without a search path, types have their schemas: none that comes earlier in the path later can take their place.
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL search_path = ''")
        return _columns_of(connection, relation)


def _columns_of(connection: psycopg.Connection[Any], relation: Relation) -> dict[str, Column]:
    types = _types_of(connection, relation)
    columns, sized = {}, []
    for name, shown, oid, size, not_null, has_default, always in connection.execute(
        "SELECT attname, format_type(atttypid, atttypmod), atttypid, atttypmod, "
        "attnotnull, atthasdef OR attidentity <> '', CASE WHEN attidentity = 'a' THEN "
        "'GENERATED ALWAYS AS IDENTITY' WHEN attgenerated <> '' THEN 'a generated column' ELSE '' END "
        "FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [relation.oid],
    ).fetchall():
        domains = _domains(types, oid)
        needed = not has_default and (not_null or any(types[each].typnotnull for each in domains))
        needed = needed and not any(types[each].has_default for each in domains[:1])
        base, size = _below(types, oid, size)
        columns[name] = Column(name, shown, _type(types, base), "", size, base != oid, needed, always)
        sized.append((name, base, size))
    for name, text in connection.execute(
        "SELECT name, format_type(t, size) FROM unnest(%s::text[], %s::oid[], %s::int[]) AS given (name, t, size)",
        [[each[part] for each in sized] for part in range(3)],
    ):
        columns[name] = replace(columns[name], sized_base=text)
    return columns


def _types_of(connection: psycopg.Connection[Any], relation: Relation) -> dict[int, Any]:
    """The types of a table's columns, those below domains, and those of the elements of arrays, by their numbers."""
    from psycopg.rows import namedtuple_row

    with connection.cursor(row_factory=namedtuple_row) as cursor:
        found: list[Any] = cursor.execute(
            "WITH RECURSIVE below AS (SELECT atttypid AS oid FROM pg_attribute WHERE attrelid = %s AND attnum > 0 "
            "AND NOT attisdropped UNION SELECT CASE typtype WHEN 'd' THEN typbasetype ELSE typelem END "
            "FROM below JOIN pg_type USING (oid) WHERE typtype = 'd' OR typcategory = 'A' AND typelem <> 0) "
            "SELECT t.oid, typtype = 'd' AS is_domain, typbasetype, typtypmod, typnotnull, "
            "typdefault IS NOT NULL AS has_default, "
            "CASE typcategory WHEN 'A' THEN typelem ELSE 0 END AS element, format_type(t.oid, -1) AS shown, "
            "t.oid = 'pg_catalog.text'::regtype OR typcategory = 'S' OR EXISTS (SELECT FROM pg_cast "
            "WHERE castsource = 'pg_catalog.text'::regtype AND casttarget = t.oid AND castcontext IN ('a', 'i')) "
            "AS takes_text, (SELECT ARRAY[nspname::text, proname::text] FROM pg_cast "
            "JOIN pg_proc AS p ON p.oid = castfunc JOIN pg_namespace AS n ON n.oid = pronamespace "
            "WHERE castsource = t.oid AND casttarget = t.oid AND pronargs = 3) AS sized "
            "FROM below JOIN pg_type AS t USING (oid)",
            [relation.oid],
        ).fetchall()
    return {each.oid: each for each in found}


def _domains(types: Mapping[int, Any], oid: int) -> list[int]:
    """A type, and those below it, as long as they are domains. The first one has the defaults of the others."""
    found = []
    while types[oid].is_domain:
        found.append(oid)
        oid = types[oid].typbasetype
    return found


def _below(types: Mapping[int, Any], oid: int, size: int) -> tuple[int, int]:
    """The type below domains, and its length."""
    while types[oid].is_domain:
        oid, size = types[oid].typbasetype, types[oid].typtypmod
    return oid, size


def _type(types: Mapping[int, Any], oid: int) -> Type:
    each = types[_below(types, oid, -1)[0]]
    element = _type(types, each.element) if each.element else None
    return Type(each.shown, each.takes_text, each.sized and tuple(each.sized), element)


def check_taken(known: Mapping[str, Column], names: Sequence[str], key: Collection[str], table: str) -> None:
    """Check that PostgreSQL takes values for columns.

    Args:
        names: of the rows' columns. key: the columns of ``key=``.

    Raises:
        SchemaError: it makes the values of one always.
    """
    for name in [*key, *names]:
        if name not in known or not known[name].always:
            continue
        next_step = "leave it out of the DataFrame"
        if name in key:
            next_step = "name other columns of a unique index in key="
        if known[name].always.endswith("IDENTITY"):
            next_step += (
                f", or let it take values: ALTER TABLE {_quoted(table)} ALTER COLUMN {quoted_name(name)} "
                "SET GENERATED BY DEFAULT"
            )
        raise SchemaError(
            f"Column {name} of table {table} is {known[name].always}: PostgreSQL takes no value for it",
            next_step=next_step,
        )


def _no_table(connection: psycopg.Connection[Any], table: str) -> SchemaError:
    """The error for a table that is not there, with those that have a similar name."""
    found = connection.execute(
        "SELECT nspname, relname, pg_table_is_visible(c.oid), has_schema_privilege(n.oid, 'USAGE') "
        "FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
        "WHERE relkind IN ('r', 'p', 'v', 'f') AND nspname !~ '^pg_' AND nspname <> 'information_schema' "
        "AND relname !~ '^onceflow_' ORDER BY 3 DESC, 1, 2"
    ).fetchall()
    by_name: dict[str, list[tuple[str, str, bool, bool]]] = {}
    for each in found:
        by_name.setdefault(_plain(each[1]), []).append(each)
    wanted = _plain(table.rsplit(".", 1)[-1])
    close = difflib.get_close_matches(wanted, by_name, _MAX_ALIKE)
    alike = [each for name in close for each in by_name[name]][:_MAX_ALIKE]
    names = [name if visible else f"{schema}.{name}" for schema, name, visible, _ in alike]
    next_step = "create it, or check the search_path of the user"
    if not alike:
        return SchemaError(f"There is no table {table!r}", next_step=next_step)
    schema, _, _, usable = alike[0]
    if table == alike[0][1] and not usable:
        next_step = f"the user may not use the schema {schema}: GRANT USAGE ON SCHEMA {quoted_name(schema)} TO it"
    else:
        next_step = f"did you mean table={names[0]!r}? Names are taken as they are, without quotes. If not, {next_step}"
    return SchemaError(
        f"There is no table {table!r}", detail=f"tables of a similar name: {', '.join(names)}", next_step=next_step
    )


def _plain(name: str) -> str:
    return name.strip('"').lower().replace("-", "_")


def _quoted(table: str) -> str:
    return ".".join(map(quoted_name, table.split(".", 1)))


def quoted_name(name: str) -> str:
    """A name as a statement has it."""
    return '"' + name.replace('"', '""') + '"'


def shows_order(connection: psycopg.Connection[Any], relation: Relation, written: Sequence[str]) -> bool:
    """Whether one can see in which order rows were inserted: by a trigger, a rule, or the default of another column,
    such as a number that counts up. Otherwise rows of a table have no order."""
    found = connection.execute(
        "SELECT c.relkind <> 'r' OR c.relhasrules OR c.relispartition "
        "OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal) "
        "OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped "
        "AND (atthasdef OR attidentity <> '') AND attname <> ALL(%s)) "
        "FROM pg_class AS c WHERE c.oid = %s",
        [list(written), relation.oid],
    ).fetchone()
    return found is None or bool(found[0])


def check_whole(known: Mapping[str, Column], staged: Mapping[str, str], written: Sequence[str], table: str) -> None:
    """Check that no column takes only a part of its values. (Numbers may be rounded to the digits of a column.)

    Raises:
        SchemaError: one would: digits of a number for a whole number, the days of an interval for a time, ...; also
            in arrays.
    """
    for name in written:
        kind, is_array, base = _item(staged[name], known[name].base)
        if base is None:
            continue
        for given, columns, lost, instead in _LESS:
            if kind in given and base.name in columns:
                wanted = f"transform({name}, each -> {instead.format('each')})" if is_array else instead.format(name)
                raise SchemaError(
                    f"Column {name} of table {table} is {known[name].type}, but {staged[name]} in the rows",
                    detail=lost,
                    next_step=f"cast it in the query, for example {wanted} AS {name}",
                )
        if base.name == "interval" and (fields := _FIELDS.match(known[name].sized_base)):
            raise SchemaError(
                f"Column {name} of table {table} is {known[name].type}",
                detail=f"smaller parts than those of {fields[0]} would get lost, without an error of PostgreSQL",
                next_step="make the column an interval without fields, or one to second",
            )
        if base.name in CUTTING and kind not in ("text", "boolean"):
            raise SchemaError(
                f"Column {name} of table {table} is {known[name].type}, which cuts values that are too long",
                detail=f"it is {staged[name]} in the rows",
                next_step=f"select string({name}) AS {name}: then such a row is not taken; or make the column a text",
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
                next_step=_instead(column),
            )
        found[column.name] = kind
    return found


def _instead(column: pa.Field) -> str:
    """What can be selected in place of a column that cannot be staged."""
    name, kind = column.name, column.type
    if kinds.is_null(kind) or (kinds.is_list(kind) and kinds.is_null(kind.value_type)):
        return f"cast it to the type of the table's column, for example CAST({name} AS STRING), or leave it out"
    if kinds.is_nested(kind):
        return f"select to_json({name}) AS {name}, for a column of type jsonb or text"
    return f"select string({name}) AS {name}: PostgreSQL converts text to the type of the table's column"


def _staged(kind: pa.DataType) -> str | None:
    if kinds.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if kinds.is_decimal(kind):
        # With its digits: a numeric without them does not show the zeros at the end, which a text column would keep.
        return f"numeric({kind.precision - min(kind.scale, 0)},{max(kind.scale, 0)})"
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        inner = _staged(kind.value_type)
        return None if inner is None or inner.endswith(("[]", "interval")) else f"{inner}[]"
    return next((name for is_kind, name in _SIMPLE if is_kind(kind)), None)

"""Which rows of a PostgreSQL table have the same key: the unique index of the key decides.

An index compares values of the column's type, with its own operators and collations. So a uuid has many spellings, two
numbers are equal after they were rounded, and ``ada`` may be ``Ada``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onceflow.errors import SchemaError
from onceflow.external.postgres_columns import Relation, below_views, named, plain

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

#: A B-tree's operators of its strategies 1 and 3, and the function 4, which a class of operators has if equal values
#: have equal bytes (PostgreSQL's manual, "B-Tree Indexes"). Settings that older servers lack are read from JSON.
_INDEXES = """
SELECT c.relname AS index, i.indimmediate AS immediate, i.indpred IS NOT NULL AS partial,
    coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false) AS nulls_equal,
    a.attname AS column, ARRAY[eqn.nspname, eq.oprname]::text[] AS equal,
    ARRAY[ltn.nspname, lt.oprname]::text[] AS less,
    ARRAY[cn.nspname, co.collname]::text[] AS collation, co.oid IS NOT NULL AS collates,
    coalesce((to_jsonb(co) ->> 'collisdeterministic')::boolean, true) AS is_deterministic,
    EXISTS (SELECT FROM pg_amproc WHERE amprocfamily = oc.opcfamily AND amproclefttype = oc.opcintype
        AND amprocrighttype = oc.opcintype AND amprocnum = 4) AS is_exact
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_am AS am ON am.oid = c.relam
CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[], i.indcollation::oid[])
    WITH ORDINALITY AS k (attnum, opclass, coll, place)
JOIN pg_opclass AS oc ON oc.oid = k.opclass
JOIN pg_amop AS eqo ON eqo.amopfamily = oc.opcfamily AND eqo.amopstrategy = 3
    AND eqo.amoplefttype = oc.opcintype AND eqo.amoprighttype = oc.opcintype
JOIN pg_operator AS eq ON eq.oid = eqo.amopopr JOIN pg_namespace AS eqn ON eqn.oid = eq.oprnamespace
JOIN pg_amop AS lto ON lto.amopfamily = oc.opcfamily AND lto.amopstrategy = 1
    AND lto.amoplefttype = oc.opcintype AND lto.amoprighttype = oc.opcintype
JOIN pg_operator AS lt ON lt.oid = lto.amopopr JOIN pg_namespace AS ltn ON ltn.oid = lt.oprnamespace
LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.attnum > 0
LEFT JOIN pg_collation AS co ON co.oid = k.coll LEFT JOIN pg_namespace AS cn ON cn.oid = co.collnamespace
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND am.amname = 'btree' AND k.place <= i.indnkeyatts
ORDER BY c.relname, k.place
"""
_DEFAULT_COLLATION = ("pg_catalog", "default")


@dataclass(frozen=True)
class KeyColumn:
    """How values of a column of the key are compared.

    Args:
        equal: operator, with its schema. less: the one that sorts equal values together.
        collation: with its schema; (): the type has none, or the database's own.
        is_exact: whether equal values always look the same.
    """

    equal: tuple[str, ...] = ()
    less: tuple[str, ...] = ()
    collation: tuple[str, ...] = ()
    is_exact: bool = False

    def collated(self, value: sql.Composable) -> sql.Composed:
        from psycopg import sql

        return (
            sql.SQL("({} COLLATE {})").format(value, named(*self.collation))
            if self.collation
            else sql.Composed([value])
        )

    def sorted_by(self, value: sql.Composable) -> sql.Composed:
        """What rows are ordered by so that those with equal values are neighbours."""
        from psycopg import sql

        using = sql.SQL(" USING {}").format(_operator(self.less)) if self.less else sql.SQL("")
        return self.collated(value) + using

    def equals(self, left: sql.Composable, right: sql.Composable) -> sql.Composed:
        from psycopg import sql

        return sql.SQL("{} {} {}").format(
            left, _operator(self.equal) if self.equal else sql.SQL("="), self.collated(right)
        )


@dataclass(frozen=True)
class Key:
    """How the key of rows is compared.

    Args:
        columns: by name. nulls_equal: whether null is a value like others (NULLS NOT DISTINCT).
    """

    columns: Mapping[str, KeyColumn]
    nulls_equal: bool = False


def key_of(connection: psycopg.Connection[Any], relation: Relation, names: Sequence[str], table: str) -> Key:
    """How the unique indexes of these columns compare. Those of a view are its table's.

    Raises:
        SchemaError: an index cannot be used, or two of them compare differently.
    """
    fitting = _fitting(connection, below_views(connection, relation.oid), names)
    for index, parts in fitting.items():
        if not parts[0].immediate:  # ON CONFLICT does not take it
            raise SchemaError(
                f"The unique constraint {index} of table {table} is DEFERRABLE: it cannot be used for key=",
                next_step="make it NOT DEFERRABLE, or name the columns of another unique index",
            )
    if not fitting:  # the check of the statements says so; of a view that renames columns, types decide
        return Key({name: KeyColumn() for name in names})
    keys = {
        index: Key({part.column: _compared(part) for part in parts}, parts[0].nulls_equal)
        for index, parts in fitting.items()
    }
    first, *others = keys
    for other in others:
        if _equality(fitting[other]) != _equality(fitting[first]):
            raise SchemaError(
                f"The unique indexes {first} and {other} of table {table} compare {', '.join(names)} differently",
                detail="so rows may have the same key for one of them only",
                next_step="drop one of the two, or name the columns of another unique index in key=",
            )
    return replace(keys[first], nulls_equal=any(key.nulls_equal for key in keys.values()))


def _fitting(connection: psycopg.Connection[Any], oid: int, names: Sequence[str]) -> dict[str, list[Any]]:
    """The unique indexes that have these columns, and no others, for all rows: by name, with their columns."""
    from psycopg.rows import namedtuple_row

    with connection.cursor(row_factory=namedtuple_row) as cursor:
        found: list[Any] = cursor.execute(_INDEXES, [oid]).fetchall()
    indexes: dict[str, list[Any]] = {}
    for each in found:
        indexes.setdefault(each.index, []).append(each)
    return {
        index: parts
        for index, parts in indexes.items()
        if {part.column for part in parts} == {*names} and not parts[0].partial
    }


def _compared(part: Any) -> KeyColumn:
    collation = tuple(part.collation) if part.collates and tuple(part.collation) != _DEFAULT_COLLATION else ()
    return KeyColumn(tuple(part.equal), tuple(part.less), collation, part.is_exact and part.is_deterministic)


def _equality(parts: Sequence[Any]) -> dict[str, Any]:
    """What decides whether values are equal. All collations that are deterministic find the same ones equal."""
    return {
        part.column: (tuple(part.equal), None if part.is_deterministic else tuple(part.collation)) for part in parts
    }


def _operator(name: Sequence[str]) -> sql.Composed:
    from psycopg import sql

    schema, operator = name
    return sql.SQL("OPERATOR({}.{})").format(named(schema), plain(operator))

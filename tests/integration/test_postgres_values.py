"""What values mean to the PostgreSQL sink, on a real server: the columns of the table and their indexes decide.

Most tests compare a table that the sink has written, in batches of any size, with one that got the same rows one by
one from another client.
"""

from __future__ import annotations

import datetime as dt
import itertools
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from onceflow import BadRecordError, PostgresSink, SchemaError
from onceflow.testing.postgres import LocalPostgres

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import Written, run
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: A class of operators for which texts are equal that differ in case only. (The server of the tests has no ICU, whose
#: collations can do that, too.)
_CASELESS = """
CREATE FUNCTION ci_lt(text, text) RETURNS bool IMMUTABLE STRICT RETURN lower($1) < lower($2);
CREATE FUNCTION ci_le(text, text) RETURNS bool IMMUTABLE STRICT RETURN lower($1) <= lower($2);
CREATE FUNCTION ci_eq(text, text) RETURNS bool IMMUTABLE STRICT RETURN lower($1) = lower($2);
CREATE FUNCTION ci_ge(text, text) RETURNS bool IMMUTABLE STRICT RETURN lower($1) >= lower($2);
CREATE FUNCTION ci_gt(text, text) RETURNS bool IMMUTABLE STRICT RETURN lower($1) > lower($2);
CREATE FUNCTION ci_cmp(text, text) RETURNS int IMMUTABLE STRICT RETURN bttextcmp(lower($1), lower($2));
CREATE OPERATOR <% (LEFTARG = text, RIGHTARG = text, FUNCTION = ci_lt);
CREATE OPERATOR <=% (LEFTARG = text, RIGHTARG = text, FUNCTION = ci_le);
CREATE OPERATOR =% (LEFTARG = text, RIGHTARG = text, FUNCTION = ci_eq);
CREATE OPERATOR >=% (LEFTARG = text, RIGHTARG = text, FUNCTION = ci_ge);
CREATE OPERATOR >% (LEFTARG = text, RIGHTARG = text, FUNCTION = ci_gt);
CREATE OPERATOR CLASS caseless FOR TYPE text USING btree AS OPERATOR 1 <%, OPERATOR 2 <=%, OPERATOR 3 =%,
    OPERATOR 4 >=%, OPERATOR 5 >%, FUNCTION 1 ci_cmp(text, text);
"""


# ---- keys ------------------------------------------------------------------------------------------------

_TEXT, _TEXTS = pa.string(), pa.list_(pa.string())
_UUID = "0a1b2c3d-0000-4000-8000-00000000abcd"
_DAY = dt.datetime(2026, 1, 1)
_FRACTIONS = [_DAY + dt.timedelta(microseconds=n) for n in (0, 100_000, 400_000, 500_000, 1_500_000)]
_FLAGGED = pa.schema([("k", pa.int32()), ("v", pa.string()), ("deleted", pa.bool_())])
#: The column, Arrow's type of the rows' keys, how another client writes them, and keys of which some are equal or no
#: values of the column at all.
_KEYS: dict[str, tuple[str, pa.DataType, str, list[Any]]] = {
    "uuid": ("uuid", _TEXT, "%s::text::uuid", [_UUID, _UUID.upper(), f"{{{_UUID}}}", "no uuid"]),
    "numeric": ("numeric(10,2)", pa.decimal128(18, 3), "%s", [*map(Decimal, ("1.001", "1.002", "1", "123456789"))]),
    "any numeric": ("numeric", _TEXT, "%s::text::numeric", ["1.0", "1.00", "1e0", "2", "x"]),
    "rounded": ("numeric(4,1)", _TEXT, "%s::text::numeric", ["1.01", "1.04", "1.05", "1000", "x"]),
    "char": ("char(3)", _TEXT, "%s::text", ["a", "a  ", "A", "abcd", "abc   "]),
    "varchar": ("varchar(3)", _TEXT, "%s::text", ["abc", "abc  ", "abcd", "abce", "ab", "ab "]),
    "bit": ("bit(3)", _TEXT, '%s::text::pg_catalog."bit"', ["101", "1010", "B101", "10"]),
    "name": ("name", _TEXT, "%s::text", ["a" * 63, "a" * 62, "b"]),
    "double": ("numeric", pa.float64(), "%s::float8::text::numeric", [0.3, 0.1 + 0.2, 2.0**53, 2.0**53 - 1]),
    "float": ("numeric(20,4)", pa.float32(), "%s::real::text::numeric", [2.0**24, 2.0**24 - 1, 1234.5677, 1e30]),
    "doubles": ("numeric[]", pa.list_(pa.float64()), "%s::float8[]::text[]::numeric[]", [[0.3], [0.1 + 0.2], [None]]),
    "price": ("text", pa.decimal128(12, 2), "%s::numeric(12,2)", [*map(Decimal, ("1.50", "100.00", "1.5", "0"))]),
    "prices": ("text[]", pa.list_(pa.decimal128(12, 2)), "%s::numeric(12,2)[]", [[Decimal("1.50"), None], []]),
    "real": ("real", pa.float64(), "%s::float8", [0.1, 0.10000000001, 0.0, -0.0, float("nan"), 1e300]),
    "time": ("timestamp(0)", pa.timestamp("us"), "%s::timestamp", _FRACTIONS),
    "zone": ("timestamptz", _TEXT, "%s::text::timestamptz", ["2026-01-01T00:00Z", "2026-01-01 01:00+1", "x"]),
    "day": ("date", pa.timestamp("us"), "%s::timestamp", [_DAY, _DAY.replace(hour=9), _DAY.replace(day=2)]),
    "interval": ("interval", _TEXT, "%s::text::interval", ["1 day", "24 hours", "1 month", "30 days", "x"]),
    "json": ("jsonb", _TEXT, "%s::text::jsonb", ['{"a": 1}', '{"a":1}', '{"a": 1.0}', "{", "1"]),
    "inet": ("inet", _TEXT, "%s::text::inet", ["::1", "0:0::1", "10.0.0.1", "10.0.0.1/32", "x"]),
    "mac": ("macaddr", _TEXT, "%s::text::macaddr", ["08:00:2b:01:02:03", "08002b010203", "08-00-2B-01-02-03"]),
    "int": ("int", _TEXT, "%s::text::int", ["7", "07", " 7", "99999999999"]),
    "small": ("smallint", pa.int64(), "%s::bigint", [1, 2, 70_000]),
    "bytes": ("bytea", _TEXT, "%s::text::bytea", ["\\x41", "A", "\\101", "\\x4"]),
    "bool": ("boolean", _TEXT, "%s::text::boolean", ["true", "t", "1", "off", "x"]),
    "array": ("numeric(5,1)[]", _TEXTS, "%s::text[]::numeric[]", [["1.01"], ["1.04"], ["1.0", None], [], ["x"]]),
    "texts": ("varchar(2)[]", _TEXTS, "%s::text[]", [["ab"], ["ab "], ["abc"], ["b", "a"], ["a", "b"], []]),
    "array of text": ("int[]", _TEXT, "%s::text::int[]", ["{1,2}", "{ 1, 02}", "{{1,2}}", "1"]),
    "text": ("text", _TEXT, "%s::text", ["a", "A", "a ", "\u00e4", "a\u0308", "a\0", ""]),
    "caseless": ("text", _TEXT, "%s::text", ["ada", "Ada", "ADA", "bob", "a%s{}"]),
    "enum": ("mood", _TEXT, "%s::text::mood", ["sad", "ok", "Sad"]),
    "domain": ("short", _TEXT, "%s::text", ["ab", "ab ", "abc", "no", ""]),
    "domain of whole": ("positive", pa.int64(), "%s::bigint", [1, 2, 0, 70_000]),
    "composite": ("pair", _TEXT, "%s::text::pair", ["(1,a)", "(01,a)", "(1,b)", "(x,b)"]),
}  # fmt: skip
_TYPES = (
    _CASELESS + "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE pair AS (a int, b text);"
    "CREATE DOMAIN short AS varchar(2) CHECK (value <> 'no'); CREATE DOMAIN positive AS smallint CHECK (value > 0)"
)


@pytest.fixture(scope="module")
def with_keys(postgres: LocalPostgres) -> str:
    """The DSN of a schema with a table, and one for comparison, for each kind of key."""
    dsn = postgres.schema()
    run(dsn, _TYPES)
    for name, (column, *_) in _KEYS.items():
        for table in (f'"t {name}"', f'"other {name}"'):
            run(dsn, f"CREATE TABLE {table} (k {column} NOT NULL, v int)")
            run(dsn, f"CREATE UNIQUE INDEX ON {table} (k{' caseless' if name == 'caseless' else ''})")
    return dsn


def one_by_one(dsn: str, name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[int]]:
    """The same rows from another client, each in a transaction. Returns the table, and the rows that it refuses."""
    other = sql.Identifier(f"other {name}")
    equal = "OPERATOR(=%%)" if name == "caseless" else "="
    refused = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(sql.SQL("CREATE TEMP TABLE one AS SELECT k FROM {} LIMIT 0").format(other))
        connection.execute(sql.SQL("TRUNCATE {}").format(other))
        for row in rows:
            statement = f"DELETE FROM {{}} AS t USING one WHERE t.k {equal} one.k AND %s IS NOT NULL"
            if not row.get("deleted"):
                statement = (
                    "INSERT INTO {} SELECT k, %s FROM one ON CONFLICT (k) DO UPDATE SET k = excluded.k, v = excluded.v"
                )
            try:
                with connection.transaction():
                    connection.execute("TRUNCATE one")
                    connection.execute(f"INSERT INTO one SELECT {_KEYS[name][2]}", [row["k"]])
                    connection.execute(sql.SQL(statement).format(other), [row["v"]])
            except (psycopg.DataError, psycopg.IntegrityError):
                refused.append(row["v"])
        found = connection.execute(sql.SQL("SELECT k::text, v FROM {} ORDER BY v").format(other)).fetchall()
    return found, refused


def check_keys(dsn: str, name: str, mode: str, given: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write batches, and compare."""
    schema = pa.schema([("k", _KEYS[name][1]), ("v", pa.int32()), ("deleted", pa.bool_())])
    if mode == "upsert":
        schema = schema.remove(2)
    written = _WRITTEN.get((name, mode)) or Written(dsn, f"t {name}", mode=mode, key=["k"])
    _WRITTEN[name, mode] = written
    run(dsn, f'TRUNCATE "t {name}"')
    written.refused.clear()
    for rows in given:
        written.write(rows, schema)
    found = run(dsn, f'SELECT k::text, v FROM "t {name}" ORDER BY v')
    every = [row for rows in given for row in rows]
    assert (found, [each.row["v"] for each in written.refused]) == one_by_one(dsn, name, every)


_WRITTEN: dict[tuple[str, str], Written] = {}


@pytest.mark.parametrize("name", _KEYS)
def test_rows_have_the_same_key_if_the_index_says_so(with_keys: str, name: str) -> None:
    """All keys are written, each is deleted or replaced by the next one, and in the end some are deleted."""
    keys = [*_KEYS[name][-1], *reversed(_KEYS[name][-1])]
    rows = [{"k": key, "v": v, "deleted": v % 3 == 1} for v, key in enumerate(keys)]
    check_keys(with_keys, name, "delete-by-flag", [rows])
    check_keys(with_keys, name, "delete-by-flag", [rows[:3], rows[3:]])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_keys_do_not_depend_on_where_batches_end(with_keys: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*_KEYS]))
    mode = data.draw(st.sampled_from(["upsert", "delete-by-flag"]))
    picked = data.draw(st.lists(st.sampled_from(_KEYS[name][-1]), min_size=1, max_size=12))
    rows = [{"k": key, "v": v} for v, key in enumerate(picked)]
    if mode == "delete-by-flag":
        rows = [{**row, "deleted": data.draw(st.booleans())} for row in rows]
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, len(rows)), max_size=2)), len(rows)})
    check_keys(with_keys, name, mode, [rows[start:end] for start, end in itertools.pairwise(cuts)])


# ---- keys with null --------------------------------------------------------------------------------------

_PAIR = pa.schema([("a", pa.string()), ("b", pa.string()), ("v", pa.int32()), ("deleted", pa.bool_())])


def pairs(*rows: tuple[str | None, str | None, int, bool]) -> list[dict[str, Any]]:
    return [dict(zip(_PAIR.names, row, strict=True)) for row in rows]


@pytest.mark.parametrize("per_batch", [1, 9])
@pytest.mark.parametrize("mode", ["upsert", "delete-by-flag"])
def test_a_key_with_null_is_refused(dsn: str, mode: str, per_batch: int) -> None:
    """In every batch, and whether or not there is a row already: null is different from null."""
    run(dsn, "CREATE TABLE t (a text, b text, v int, UNIQUE (a, b))", "INSERT INTO t VALUES ('x', null, 0)")
    rows = pairs(("x", None, 1, False), ("x", "y", 2, False), ("x", None, 3, True), (None, None, 4, False))
    schema = _PAIR if mode == "delete-by-flag" else _PAIR.remove(3)
    written = Written(dsn, mode=mode, key=["a", "b"])
    for start in range(0, len(rows), per_batch):
        written.write([{name: row[name] for name in schema.names} for row in rows[start : start + per_batch]], schema)
    assert run(dsn, "SELECT * FROM t ORDER BY v") == [("x", None, 0), ("x", "y", 2)]
    assert [(each.row["v"], each.kind, each.message) for each in written.refused] == [
        (1, "NotNullViolation", "column b of the key is null, so no row has this key"),
        (3, "NotNullViolation", "column b of the key is null, so no row has this key"),
        (4, "NotNullViolation", "column a of the key is null, so no row has this key"),
    ]
    strict = Written(dsn, mode=mode, key=["a", "b"], sets_aside=False)
    with pytest.raises(BadRecordError, match=r"with the key a='x', b=None\n.*column b of the key is null"):
        strict.write([{name: rows[0][name] for name in schema.names}], schema)


@pytest.mark.parametrize("per_batch", [1, 9])
def test_a_key_with_null_where_nulls_are_not_distinct(dsn: str, per_batch: int) -> None:
    run(dsn, "CREATE TABLE t (a text, b text, v int, UNIQUE NULLS NOT DISTINCT (a, b))")
    rows = pairs(
        ("x", None, 1, False), (None, None, 2, False), ("x", None, 3, False), (None, "y", 4, False),
        ("x", "y", 5, False), (None, None, 6, True), (None, "y", 7, False), ("z", None, 8, True),
    )  # fmt: skip
    written = Written(dsn, mode="delete-by-flag", key=["a", "b"])
    for start in range(0, len(rows), per_batch):
        written.write(rows[start : start + per_batch], _PAIR)
    assert run(dsn, "SELECT * FROM t ORDER BY v") == [("x", None, 3), ("x", "y", 5), (None, "y", 7)]
    assert written.refused == []


@pytest.mark.parametrize("index", ["PRIMARY KEY (k)", "UNIQUE NULLS NOT DISTINCT (k)"])
def test_a_row_that_was_deleted_has_left_nothing_behind(dsn: str, index: str) -> None:
    """Rows whose keys come again after a deletion are new ones, wherever batches end: other columns have their
    defaults, and what hung on the old row is gone."""
    run(dsn, f"CREATE TABLE t (k int, v text, others text DEFAULT 'default', {index})",
        "CREATE TABLE child (k int REFERENCES t (k) ON DELETE CASCADE)")  # fmt: skip
    keys = [1, 2, 3, 4, None] if "NULLS" in index else [1, 2, 3, 4]
    every = [(1, True), (1, False), (2, False), (2, True), (2, False), (3, False), (4, False), (4, True)]
    every += [(None, True), (None, False)] if "NULLS" in index else []
    rows = [{"k": k, "v": f"new {n}", "deleted": deleted} for n, (k, deleted) in enumerate(every)]
    written = Written(dsn, mode="delete-by-flag", key=["k"])
    found = set()
    for per_batch in range(1, len(rows) + 1):
        run(dsn, "TRUNCATE t CASCADE")
        with psycopg.connect(dsn, autocommit=True) as connection:
            for k in keys:
                connection.execute("INSERT INTO t VALUES (%s, 'old', 'of others')", [k])
                connection.execute("INSERT INTO child VALUES (%s)", [k])
        for start in range(0, len(rows), per_batch):
            written.write(rows[start : start + per_batch], _FLAGGED)
        table = run(dsn, "SELECT t.*, EXISTS (SELECT FROM child WHERE child.k = t.k) FROM t ORDER BY k")
        found.add(tuple(map(tuple, table)))
    expected = [(1, "new 1", "default", False), (2, "new 4", "default", False), (3, "new 5", "of others", True)]
    expected += [(None, "new 9", "default", False)] if "NULLS" in index else []
    assert found == {tuple(expected)}
    assert written.refused == []


@pytest.mark.parametrize(
    "indexes, message",
    [
        ("UNIQUE (k) DEFERRABLE", "t_k_key of table t is DEFERRABLE"),
        ("PRIMARY KEY (k)); CREATE UNIQUE INDEX other ON t (k caseless", "other and t_pkey of table t compare k diff"),
        ("v2 int); CREATE UNIQUE INDEX ON t (k) WHERE (v > 0", "primary key, or of a unique index"),
        ("v2 int); CREATE UNIQUE INDEX ON t (lower(k)", "primary key, or of a unique index"),
    ],
)
def test_an_index_that_cannot_be_used(dsn: str, indexes: str, message: str) -> None:
    run(dsn, _CASELESS, f"CREATE TABLE t (k text, v int, {indexes})")
    with pytest.raises(SchemaError, match=message):
        PostgresSink(dsn, "t", mode="upsert", key="k").check(pa.schema([("k", pa.string()), ("v", pa.int32())]))


def test_several_indexes_of_one_key(dsn: str) -> None:
    """They find the same values equal, in one order of columns or another; one has more columns, which are no key."""
    run(dsn, "CREATE TABLE t (a text, b text, v int, PRIMARY KEY (a, b))")
    run(dsn, 'CREATE UNIQUE INDEX ON t (b COLLATE "C", a text_pattern_ops) INCLUDE (v)')
    written = Written(dsn, mode="delete-by-flag", key=["b", "a"])
    written.write(pairs(("x", "y", 1, False), ("x", "y", 2, False), ("y", "x", 3, False), ("y", "x", 4, True)), _PAIR)
    assert run(dsn, "SELECT * FROM t") == [("x", "y", 2)]


def test_a_view_has_the_keys_of_its_table(dsn: str) -> None:
    run(dsn, "CREATE TABLE base (k numeric(10,2), v int, w int, UNIQUE NULLS NOT DISTINCT (k))")
    run(dsn, "CREATE VIEW middle AS SELECT * FROM base WHERE v >= 0", "CREATE VIEW t AS SELECT k, v FROM middle")
    schema = pa.schema([("k", pa.string()), ("v", pa.int32()), ("deleted", pa.bool_())])
    written = Written(dsn, mode="delete-by-flag", key=["k"])
    written.write([{"k": f"1.00{n}", "v": n, "deleted": False} for n in range(4)], schema)
    written.write([{"k": "2", "v": 9, "deleted": False}, {"k": "1.003", "v": 10, "deleted": True}], schema)
    assert run(dsn, "SELECT k, v FROM base") == [(Decimal("2.00"), 9)]
    for v, deleted in (11, False), (12, False), (13, True):
        written.write([{"k": None, "v": v, "deleted": deleted}], schema)
        assert run(dsn, "SELECT v FROM base WHERE k IS NULL") == ([] if deleted else [(v,)])


# ---- settings of the session -----------------------------------------------------------------------------

_ODD = {
    "timezone": "America/New_York", "datestyle": "SQL, DMY", "extra_float_digits": "-5", "array_nulls": "off",
    "intervalstyle": "sql_standard", "bytea_output": "escape", "standard_conforming_strings": "off",
    "timezone_abbreviations": "India", "xmloption": "document", "lc_monetary": "POSIX",
}  # fmt: skip
_SHOWN = (
    "CREATE TABLE t (given text, a timestamp, b timestamptz, c timestamptz, d timestamptz, e date, f time, g text, "
    "h text, i date, j interval, k text, l text, m timestamp[], n text[], o text, p timestamptz, q money, "
    "r text DEFAULT current_setting('lc_monetary'))"
)


def settings_row(dsn: str, sink_dsn: str) -> Any:
    run(dsn, "DROP TABLE IF EXISTS t", _SHOWN)
    utc = dt.datetime(2025, 3, 9, 7, 30, tzinfo=dt.timezone.utc)
    at, day = pa.timestamp("us", tz="UTC"), dt.timedelta(days=-1, hours=-2)
    given = {
        "given": ("it's \\ here", pa.string()), "a": (utc, at), "b": (utc.replace(tzinfo=None), pa.timestamp("us")),
        "c": ("2025-03-09 07:30", pa.string()), "d": (utc, at), "e": (utc, at), "f": (utc, at), "g": (utc, at),
        "h": (0.12345678901234567, pa.float64()), "i": ("03/04/2025", pa.string()), "j": ("-1 2:03:04", pa.string()),
        "k": (day, pa.duration("us")), "l": (b"a\\b\xff", pa.binary()), "m": ([utc], pa.list_(at)),
        "n": ("{NULL,a}", pa.string()), "o": (utc.date(), pa.date32()), "p": ("2025-03-09 07:30 IST", pa.string()),
        "q": ("1,234.50", pa.string()),
    }  # fmt: skip
    schema = pa.schema([(name, kind) for name, (_, kind) in given.items()])
    Written(sink_dsn, sets_aside=False).write([{name: value for name, (value, _) in given.items()}], schema)
    return run(dsn, "SELECT t::text FROM t")


@pytest.mark.parametrize("where", ["role", "database", "dsn", "PGTZ"])
def test_settings_of_a_session_change_no_value(
    dsn: str, postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of its role, its database, its DSN, or the environment."""
    expected = settings_row(dsn, dsn)
    assert "07:30:00" in str(expected)
    assert '"$1,234.50",C' in str(expected)
    odd = dsn
    if where in ("role", "database"):
        run(dsn, f"CREATE ROLE odd_{where} LOGIN SUPERUSER")
        for name, value in _ODD.items():
            run(dsn, f"ALTER ROLE odd_{where} {'IN DATABASE postgres' * (where == 'database')} SET {name} = '{value}'")
        odd = f"{dsn}&user=odd_{where}"
    elif where == "dsn":
        odd += "".join(f"%20-c{name}%3D{value.replace(' ', '%5C%20')}" for name, value in _ODD.items())
        odd += "&client_encoding=LATIN1"
    else:
        monkeypatch.setenv("PGTZ", "America/New_York")
        monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    assert settings_row(dsn, odd) == expected


def test_names_mean_what_they_have_meant_at_the_start(dsn: str, postgres: LocalPostgres) -> None:
    """Then somebody puts another table, another type and another schema in front of them in the search path."""
    first, second = (postgres.schema().rsplit("%3D")[-1] for _ in range(2))
    path = f"{dsn}&user=mover_{first}"
    run(dsn, f"CREATE ROLE mover_{first} LOGIN SUPERUSER", f"CREATE TYPE {first}.mood AS ENUM ('sad', 'ok')")
    run(dsn, f"CREATE TABLE {first}.t (k {first}.mood)")
    run(dsn, f"ALTER ROLE mover_{first} SET search_path = {second}, {first}")
    written = Written(path.replace("options", "application_name"), sets_aside=False)
    rows = pa.schema([("k", pa.string())])
    written.write([{"k": "sad"}], rows)
    run(dsn, f"CREATE TYPE {second}.mood AS ENUM ('other')", f"CREATE TABLE {second}.t (k {second}.mood)")
    run(dsn, f"ALTER ROLE mover_{first} SET search_path = public")
    written.sink.close()
    written.write([{"k": "ok"}], rows)
    assert run(dsn, f"SELECT k FROM {first}.t ORDER BY k") == [("sad",), ("ok",)]
    assert run(dsn, f"SELECT k FROM {second}.t") == []


# ---- arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int", "bigint", "whole"])
@pytest.mark.parametrize("arrow", [pa.decimal128(5, 2), pa.float64(), pa.float32()])
def test_digits_are_not_lost_in_whole_numbers(dsn: str, kind: str, arrow: pa.DataType) -> None:
    """Neither in a column, nor in an array, nor below a domain."""
    run(dsn, "CREATE DOMAIN whole AS int", f"CREATE TABLE t (v {kind}, w {kind}[])")
    for schema in pa.schema([("v", arrow)]), pa.schema([("w", pa.list_(arrow))]):
        with pytest.raises(SchemaError, match="digits would get lost"):
            PostgresSink(dsn, "t").check(schema)


@pytest.mark.parametrize(
    "kind, arrow, lost",
    [
        ("time", pa.duration("us"), "whole days would get lost"),
        ("name", pa.binary(), "cuts values that are too long"),
        ('"char"', pa.int64(), "cuts values that are too long"),
        *(
            (f"interval {fields}", pa.duration("us"), "smaller parts than those of interval")
            for fields in ("year", "month", "year to month", "day", "hour", "day to hour", "hour to minute")
        ),
    ],
)
def test_parts_of_values_are_not_lost(dsn: str, kind: str, arrow: pa.DataType, lost: str) -> None:
    """PostgreSQL would leave them out without an error. As with digits, also in an array and below a domain."""
    run(dsn, f"CREATE DOMAIN part AS {kind}", f"CREATE TABLE t (v {kind}, w part, x {kind}[])")
    schemas = [pa.schema([(name, arrow)]) for name in "vw"]
    if not pa.types.is_duration(arrow):
        schemas.append(pa.schema([("x", pa.list_(arrow))]))
    for schema in schemas:
        with pytest.raises(SchemaError, match=lost):
            PostgresSink(dsn, "t").check(schema)


def test_texts_that_a_type_would_cut_are_not_taken(dsn: str) -> None:
    """``name`` keeps 63 bytes and ``"char"`` one: texts that differ behind that would even be one key."""
    run(dsn, 'CREATE DOMAIN short_name AS name; CREATE TABLE t (k short_name PRIMARY KEY, c "char", l name[])')
    long = "x" * 63
    schema = pa.schema([("k", _TEXT), ("c", _TEXT), ("l", _TEXTS)])
    rows = [
        {"k": long, "c": "a", "l": [long, None]},
        {"k": long + "a", "c": "b", "l": None},
        {"k": "\u00e4" * 32, "c": "c", "l": None},
        {"k": "b", "c": "ab", "l": []},
        {"k": "c", "c": "\u00e4", "l": []},
        {"k": "d", "c": "", "l": ["a", long + "b"]},
        {"k": "e", "c": None, "l": []},
    ]
    for mode in "upsert", "delete-by-flag":
        given = schema if mode == "upsert" else schema.append(pa.field("deleted", pa.bool_()))
        written = Written(dsn, mode=mode, key="k")
        written.write(rows, given)
        assert [rows.index({name: each.row[name] for name in "kcl"}) for each in written.refused] == [1, 2, 3, 4, 5]
        assert {each.kind for each in written.refused} == {"StringDataRightTruncation"}
        assert run(dsn, "SELECT k::text, c::text, l::text[] FROM t ORDER BY k") == [
            ("e", None, []), (long, "a", [long, None]),
        ]  # fmt: skip


def test_a_text_with_a_zone_is_its_moment(dsn: str) -> None:
    """Also in a column without a zone. PostgreSQL leaves it out there: the text would be another moment."""
    run(dsn, "CREATE TABLE t (k timestamp(0) PRIMARY KEY, l timestamp[], n int, d date, e date[])")
    schema = pa.schema([("k", _TEXT), ("l", _TEXTS), ("n", pa.int32()), ("d", _TEXT), ("e", _TEXTS)])
    texts = ["2026-01-01T02:00:00+02:00", "2026-01-01 00:00:00", "2025-12-31 19:00 America/New_York", "infinity"]
    written = Written(dsn, mode="upsert", key="k")
    rows = [{"k": text, "l": [text, None], "n": n, "d": text, "e": [text]} for n, text in enumerate(texts)]
    written.write(rows, schema)
    assert written.refused == []
    assert run(dsn, "SELECT k::text, l::text, n, d::text, e::text FROM t ORDER BY n") == [
        ("2026-01-01 00:00:00", '{"2026-01-01 00:00:00",NULL}', 2, "2026-01-01", "{2026-01-01}"),
        ("infinity", "{infinity,NULL}", 3, "infinity", "{infinity}"),
    ]
    days = ["2025-01-01T23:30:00-05:00", "2025-01-02", "0044-03-15 BC", "20250103", "epoch"]
    written.write([{"k": f"2030-01-{n + 1:02}", "n": 10 + n, "d": day} for n, day in enumerate(days)], schema)
    assert written.refused == []
    found = run(dsn, "SELECT d::text FROM t WHERE n >= 10 ORDER BY n")
    assert [day for (day,) in found] == ["2025-01-02", "2025-01-02", "0044-03-15 BC", "2025-01-03", "1970-01-01"]


def test_a_text_with_a_zone_is_its_time_of_day_in_utc(dsn: str) -> None:
    """In a ``time``, also as the key, in an array and below a domain. Texts without a zone stay as they are."""
    run(dsn, "CREATE DOMAIN at AS time(0)", "CREATE TABLE t (k time PRIMARY KEY, l time(3)[], d at, n int)")
    schema = pa.schema([("k", _TEXT), ("l", _TEXTS), ("d", _TEXT), ("n", pa.int32())])
    told = {
        "10:00+02": "08:00:00", "01:00+02": "23:00:00", "23:30-01": "00:30:00", "24:00": "24:00:00",
        "2026-07-01 09:00 Europe/Berlin": "07:00:00", "2026-01-01 09:00:00.0005Z": "09:00:00.0005",
        "03:04:05.6": "03:04:05.6", "11:00:00": "11:00:00", "9:00 PM": "21:00:00",
    }  # fmt: skip
    rows = [{"k": text, "l": [text, None], "d": text, "n": n} for n, text in enumerate([*told, "25:00", "8:00"])]
    written = Written(dsn, mode="upsert", key="k")
    written.write(rows, schema)
    assert [each.row["n"] for each in written.refused] == [9]
    found = run(dsn, "SELECT k::text, l::text[], d = k::time(0), n FROM t ORDER BY n")
    sound = [(at, [at.replace(".0005", ".001"), None], True, n) for n, at in enumerate(told.values()) if n]
    assert found == [*sound, ("08:00:00", ["08:00:00", None], True, 10)]


def test_arrays_follow_the_rules_of_scalars(dsn: str) -> None:
    columns = "a uuid[], b jsonb[], c mood[], d numeric(5,1)[], e varchar(3)[], f text[], g short[], h timestamptz[]"
    run(dsn, _TYPES, f"CREATE TABLE t (n int, {columns}, i varchar(3)[])")
    row = {
        "n": 1, "a": [_UUID.upper(), None], "b": ['{"a":1}'], "c": ["sad"], "d": ["1.25"], "e": ["abc", None, ""],
        "f": "{a,NULL}", "g": ["ab"], "h": ["2025-03-09 07:30"], "i": "{abc}",
    }  # fmt: skip
    schema = pa.schema(
        [("n", pa.int32()), *((name, _TEXT if isinstance(row[name], str) else _TEXTS) for name in "abcdefghi")]
    )
    written = Written(dsn)
    bad = {"a": ["x"], "b": ["{"], "c": ["Sad"], "e": ["abcd"], "f": "a", "g": ["no"], "h": ["x"], "i": "{abcd}"}
    rows = [row, *({**row, "n": number, name: value} for number, (name, value) in enumerate(bad.items(), 2))]
    written.write([*rows, {**dict.fromkeys(row), "n": 20}, {**row, "n": 21, "e": []}], schema)
    assert [each.row["n"] for each in written.refused] == [*range(2, 2 + len(bad))]
    found = run(dsn, "SELECT a::text, b::text, c::text, d::text, e::text, f, g::text, h::text, i FROM t ORDER BY n")
    sound = (f"{{{_UUID},NULL}}", '{"{\\"a\\": 1}"}', "{sad}", "{1.3}", '{abc,NULL,""}', ["a", None], "{ab}",
             '{"2025-03-09 07:30:00+00"}', ["abc"])  # fmt: skip
    assert found == [sound, (None,) * 9, (*sound[:4], "{}", *sound[5:])]


# ---- values ----------------------------------------------------------------------------------------------


@st.composite
def decimals(draw: st.DrawFn) -> tuple[pa.DataType, list[Decimal | None]]:
    """A type of decimals, and some of them. Few digits that are not 0 are where drivers had faults."""
    digits = draw(st.integers(1, 38))
    scale = draw(st.integers(0, digits))
    most = 10**digits - 1
    sparse = st.builds(lambda a, b, sign: sign * min(most, 10**a + 10**b), st.integers(0, digits - 1),
                       st.integers(0, digits - 1), st.sampled_from([1, -1]))  # fmt: skip
    numbers = draw(st.lists(st.none() | st.integers(-most, most) | sparse, min_size=1, max_size=20))
    with localcontext(prec=40):
        return pa.decimal128(digits, scale), [
            None if each is None else Decimal(each).scaleb(-scale) for each in numbers
        ]


_TIMES = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999))
_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
_VALUES: dict[str, tuple[str, pa.DataType, st.SearchStrategy[Any]]] = {
    "f": ("float8", pa.float64(), st.floats(allow_nan=False)),
    "r": ("real", pa.float32(), st.floats(width=32, allow_nan=False)),
    "i": ("bigint", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "x": ("text", pa.string(), _WORDS),
    "y": ("bytea", pa.binary(), st.binary(max_size=8)),
    "w": ("text[]", pa.list_(pa.string()), st.lists(st.none() | _WORDS, max_size=3)),
    "b": ("boolean[]", pa.list_(pa.bool_()), st.lists(st.none() | st.booleans(), max_size=3)),
    "e": ("date", pa.date32(), st.dates()),
    "t": ("timestamp", pa.timestamp("us"), _TIMES),
    "z": ("timestamptz", pa.timestamp("us", tz="UTC"), _TIMES.map(lambda at: at.replace(tzinfo=dt.timezone.utc))),
    "u": ("timestamp[]", pa.list_(pa.timestamp("us")), st.lists(st.none() | _TIMES, max_size=3)),
    "v": ("interval", pa.duration("us"), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
}


@pytest.fixture(scope="module")
def with_values(postgres: LocalPostgres) -> str:
    dsn = postgres.schema()
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in _VALUES.items())
    run(dsn, f"CREATE TABLE t (n int, d numeric, a numeric[], {columns})")
    return dsn


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_values_are_stored_as_they_are(with_values: str, data: st.DataObject) -> None:
    kind, numbers = data.draw(decimals())
    rows = [
        {"n": n, "d": number, "a": [number, number] if n % 2 else [],
         **{name: data.draw(st.none() | values) for name, (_, _, values) in _VALUES.items()}}
        for n, number in enumerate(numbers)
    ]  # fmt: skip
    schema = pa.schema([("n", pa.int32()), ("d", kind), ("a", pa.list_(kind)),
                        *((name, arrow) for name, (_, arrow, _) in _VALUES.items())])  # fmt: skip
    run(with_values, "TRUNCATE t")
    Written(with_values, sets_aside=False).write(rows, schema)
    exact = ", ".join(f"{name}::float8" if name == "r" else name for name in schema.names)
    assert run(with_values, f"SELECT {exact} FROM t ORDER BY n") == [tuple(row.values()) for row in rows]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_floats_and_decimals_become_the_numbers_and_texts_that_are_written_for_them(
    with_texts: str, data: st.DataObject
) -> None:
    """A float is a number of few digits that is read back as the same float. A decimal has all digits of its type."""
    doubles, singles = st.floats(allow_nan=False), st.floats(width=32, allow_nan=False)
    kind, decimal_numbers = data.draw(decimals())
    numbers = [number for number in decimal_numbers if number is not None]
    rows = [{"n": n, "f": data.draw(doubles), "r": data.draw(singles), "d": number} for n, number in enumerate(numbers)]
    rows = [{**row, **{f"{name}s": [row[name], None] for name in "frd"}} for row in rows]
    types = {"f": pa.float64(), "r": pa.float32(), "d": kind}
    schema = pa.schema([("n", pa.int32()), *types.items(), *((f"{name}s", pa.list_(types[name])) for name in "frd")])
    run(with_texts, "TRUNCATE t")
    Written(with_texts, sets_aside=False).write(rows, schema)
    found = run(with_texts, "SELECT f, r, d, fs::numeric[], rs, ds FROM t ORDER BY n")
    for row, (double, single, decimal, *lists) in zip(rows, found, strict=True):
        assert float(double) == row["f"]
        assert np.float32(str(single)) == np.float32(row["r"])
        assert (digits(double) <= 17, digits(single) <= 9) == (True, True)
        assert decimal == f"{row['d']:f}"
        assert lists == [[double, None], [single, None], [decimal, None]]


def digits(number: Decimal) -> int:
    """How many digits a number has, without zeros at its beginning and end."""
    return len("".join(map(str, number.as_tuple().digits)).strip("0"))


@pytest.fixture(scope="module")
def with_texts(postgres: LocalPostgres) -> str:
    dsn = postgres.schema()
    run(dsn, "CREATE DOMAIN exact AS numeric", "CREATE DOMAIN word AS varchar(80)")
    run(dsn, "CREATE TABLE t (n int, f numeric, r exact, d word, fs exact[], rs numeric[], ds text[])")
    return dsn

"""What values mean to the PostgreSQL sink, on a real server: the columns of the table and their indexes decide.

Most tests compare a table that the sink has written, in batches of any size, with one that got the same rows one by
one from another client.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from onceflow import PostgresSink
from onceflow.external.sink import BatchAttempt, RefusedRow
from onceflow.testing.postgres import LocalPostgres

pytestmark = pytest.mark.integration

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


@pytest.fixture(scope="module")
def postgres() -> Iterator[LocalPostgres]:
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def dsn(postgres: LocalPostgres) -> str:
    """Of an empty schema."""
    return postgres.schema()


def run(dsn: str, *statements: str) -> list[Any]:
    """The rows of the last statement."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for statement in statements:
            done = connection.execute(statement)
        return done.fetchall() if done.description else []


class Written:
    """A sink, and the batches that are written to it. Rows that are not taken are in ``refused``."""

    def __init__(self, dsn: str, table: str = "t", *, sets_aside: bool = True, **options: Any) -> None:
        self.sink = PostgresSink(dsn, table, **options)
        if sets_aside:
            self.sink.set_aside()
        self.sets_aside = sets_aside
        self.refused: list[RefusedRow] = []
        self._flow = f"{table} {options}"
        self._batch = 0
        self._generation = 0

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
        """One batch."""
        if not self._generation:
            self.sink.check(schema)
            self._generation = self.sink.open(self._flow, None).generation
        self._batch += 1
        attempt = BatchAttempt(self._flow, self._generation, self._batch, 1)
        self.sink.begin(attempt)
        receipt = self.sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist([*rows], schema=schema)]))
        if self.sets_aside:
            self.sink.commit_accepted(attempt, [receipt], self._put_aside)
        else:
            self.sink.commit(attempt, [receipt], "{}")

    def _put_aside(self, refused: Sequence[RefusedRow]) -> str:
        self.refused += refused
        return "{}"


# ---- keys ------------------------------------------------------------------------------------------------

_TEXT, _TEXTS = pa.string(), pa.list_(pa.string())
_UUID = "0a1b2c3d-0000-4000-8000-00000000abcd"
_DAY = dt.datetime(2026, 1, 1)
_FRACTIONS = [_DAY + dt.timedelta(microseconds=n) for n in (0, 100_000, 400_000, 500_000, 1_500_000)]
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
    "name": ("name", _TEXT, "%s::text", ["a" * 63, "a" * 64, "b"]),
    "real": ("real", pa.float64(), "%s::float8", [0.1, 0.10000000001, 0.0, -0.0, float("nan"), 1e300]),
    "time": ("timestamp(0)", pa.timestamp("us"), "%s::timestamp", _FRACTIONS),
    "zone": ("timestamptz", _TEXT, "%s::text::timestamptz", ["2026-01-01T00:00Z", "2026-01-01 01:00+01", "2026-01-01", "x"]),
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


def one_by_one(
    dsn: str, name: str, rows: Sequence[Mapping[str, Any]], kind: pa.DataType
) -> tuple[list[Any], list[int]]:
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_keys_do_not_depend_on_where_batches_end(with_keys: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*_KEYS]))
    mode = data.draw(st.sampled_from(["upsert", "delete-by-flag"]))
    picked = data.draw(st.lists(st.sampled_from(_KEYS[name][-1]), min_size=1, max_size=12))
    rows = [{"k": key, "v": v} for v, key in enumerate(picked)]
    if mode == "delete-by-flag":
        rows = [{**row, "deleted": data.draw(st.booleans())} for row in rows]
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, len(rows)), max_size=2)), len(rows)})
    check_keys(with_keys, name, mode, [rows[start:end] for start, end in zip(cuts, cuts[1:], strict=False)])

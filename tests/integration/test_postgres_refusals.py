"""Rows that the server does not take: whatever it says, the row is found, named or put aside, and the others are
written."""

from __future__ import annotations

import base64
import datetime as dt
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from onceflow import BadRecordError, BatchAbortedError, EnvironmentUnusableError, PermissionDeniedError, PostgresSink
from onceflow.external import postgres_staging
from onceflow.external.sink import BatchAttempt
from onceflow.testing.postgres import LocalPostgres

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import committed, run, written
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.integration, pytest.mark.long]

_SCHEMA = pa.schema([("n", pa.int32()), ("url", pa.string())])
_ROWS = 300
_BAD = (3, 170, _ROWS - 1)
#: 8 kB that do not compress.
_LONG = base64.b64encode(os.urandom(6000)).decode()


def rows(odd: str = "odd") -> pa.RecordBatch:
    given = [{"n": n, "url": odd if n in _BAD else f"[{n}]"} for n in range(_ROWS)]
    return pa.RecordBatch.from_pylist(given, schema=_SCHEMA)


def trigger(body: str, *, deferred: bool = False) -> list[str]:
    """A table with a trigger; what it does with rows that are odd."""
    kind = (
        "CONSTRAINT TRIGGER g AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED"
        if deferred
        else "TRIGGER g BEFORE INSERT ON t"
    )
    body = f"DECLARE x int; BEGIN IF NEW.url = 'odd' THEN {body}; END IF; RETURN NEW; END"
    return [
        "CREATE TABLE t (n int, url text)",
        f"CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
        f"CREATE {kind} FOR EACH ROW EXECUTE FUNCTION f()",
    ]


_DEEP = "CREATE FUNCTION deep(n int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN RETURN deep(n + 1); END $$"
#: What odd rows have, the table, and the class of the error.
_REFUSALS: dict[str, tuple[str, list[str], str]] = {
    "index": (_LONG, ["CREATE TABLE t (n int, url text)", "CREATE INDEX ON t (url)"], "ProgramLimitExceeded"),
    "primary key": (_LONG, ["CREATE TABLE t (n int, url text PRIMARY KEY)"], "ProgramLimitExceeded"),
    "exclusion": ("odd", ["CREATE TABLE t (n int, url text, EXCLUDE USING spgist (url WITH =))"], "ExclusionViolation"),
    "nesting": ("[" * 20000 + "]" * 20000, ["CREATE TABLE t (n int, url jsonb)"], "StatementTooComplex"),
    "view": (
        "odd",
        ["CREATE TABLE base (n int, url text)",
         "CREATE VIEW t AS SELECT * FROM base WHERE url <> 'odd' WITH CHECK OPTION"],
        "WithCheckOptionViolation",
    ),
    "division": ("odd", ["CREATE TABLE t (n int, url text, CHECK (1 / (length(url) - 3 * (url = 'odd')::int) < 9))"],
                 "DivisionByZero"),
    "tsquery": ("a b", ["CREATE TABLE t (n int, url tsquery)"], "SyntaxError"),
    "class": ("nothing", ["CREATE TABLE t (n int, url regclass)", 'CREATE TABLE "1" ()'], "UndefinedTable"),
    "partition": (
        "odd",
        ["CREATE TABLE t (n int, url text) PARTITION BY LIST (left(url, 1))",
         "CREATE TABLE p PARTITION OF t FOR VALUES IN ('[')"],
        "CheckViolation",
    ),
    # As extensions raise it that are written in C.
    "internal": ("odd", ["CREATE TABLE t (n int, url text, CHECK (amvalidate(1978 * (url <> 'odd')::int)))"],
                 "InternalError_"),
    "nothing found": ("odd", trigger("SELECT 1 INTO STRICT x WHERE false"), "NoDataFound"),
    "too many found": ("odd", trigger("SELECT v INTO STRICT x FROM generate_series(1, 2) AS v"), "TooManyRows"),
    "two rows": ("odd", trigger("x := (SELECT v FROM generate_series(1, 2) AS v)"), "CardinalityViolation"),
    "dynamic": ("odd", trigger("EXECUTE 'SELECT ' || NEW.url"), "UndefinedColumn"),
    "assertion": ("odd", trigger("ASSERT false"), "AssertFailure"),
    "deferred": ("odd", trigger("RAISE EXCEPTION 'odd' USING ERRCODE = 'P0002'", deferred=True), "NoDataFound"),
    "recursion": ("odd", [*trigger("PERFORM deep(1)"), _DEEP], "StatementTooComplex"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSALS)
def test_whatever_the_server_says_the_row_is_found(dsn: str, name: str) -> None:
    odd, statements, kind = _REFUSALS[name]
    run(dsn, *statements)
    batch = rows(odd)
    if name in ("tsquery", "class"):
        plain = [{"n": each["n"], "url": odd if each["n"] in _BAD else "1"} for each in batch.to_pylist()]
        batch = pa.RecordBatch.from_pylist(plain, schema=_SCHEMA)
    bad = [n for n in _BAD if name != "exclusion" or n != _BAD[0]]  # there, the first one is taken
    with pytest.raises(BadRecordError, match=rf"(?s)Table t does not take a row.*the row: {{'n': {bad[0]}, 'url': "):
        written(PostgresSink(dsn, "t"), batch, sets_aside=False)
    assert run(dsn, "SELECT count(*) FROM t") == [(0,)]
    found = written(PostgresSink(dsn, "t"), batch)
    assert [each.row["n"] for each in found] == bad
    assert run(dsn, "SELECT count(*) FROM t") == [(_ROWS - len(bad),)]
    assert {each.kind for each in found} == {kind}


#: Also those that PostgreSQL itself has for faults of connections, of the server, and for missing permissions.
_CODES = ["P0001", "P0002", "42501", "54000", "55000", "0A000", "21000", "2F005", "38001", "44000", "57014", "58030",
          "HV001", "XX000", "ZZ999", "42P01", "08000", "53100", "25006"]  # fmt: skip


def test_a_trigger_may_raise_any_code(dsn: str) -> None:
    run(dsn, *[each.replace("IF NEW.url = 'odd'", "IF NEW.url <> ''") for each in trigger(
        "RAISE EXCEPTION 'code %', NEW.url USING ERRCODE = NEW.url")])  # fmt: skip
    batch = pa.RecordBatch.from_pylist([{"n": n, "url": code} for n, code in enumerate(["", *_CODES, ""])])
    found = written(PostgresSink(dsn, "t"), batch)
    assert [each.message for each in found] == [f"code {code}" for code in _CODES]
    assert [each.kind for each in found][-5:] == [
        "SQLSTATE ZZ999", "UndefinedTable", "ConnectionException", "DiskFull", "ReadOnlySqlTransaction",
    ]  # fmt: skip
    assert run(dsn, "SELECT n FROM t") == [(0,), (len(_CODES) + 1,)]


def test_row_level_security(dsn: str) -> None:
    """It has the code of a missing permission, and is about the row."""
    ((schema,),) = run(dsn, "SELECT current_schema()")
    user = f"ada_{schema}"
    run(
        dsn,
        f"CREATE ROLE {user} LOGIN",
        f"GRANT ALL ON SCHEMA {schema} TO {user}",
        "CREATE TABLE t (n int, url text)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        f"GRANT ALL ON t TO {user}",
        "CREATE POLICY p ON t USING (true) WITH CHECK (url <> 'odd')",
    )
    found = written(PostgresSink(f"{dsn}&user={user}", "t"), rows())
    assert [(each.row["n"], each.kind) for each in found] == [(n, "InsufficientPrivilege") for n in _BAD]
    assert "row-level security" in found[0].message


def test_a_missing_permission_is_no_row_s_fault(dsn: str) -> None:
    """Not even if only some rows need it: a grant cures it, so no row may be put aside."""
    ((schema,),) = run(dsn, "SELECT current_schema()")
    user = f"eve_{schema}"
    run(
        dsn,
        f"CREATE ROLE {user} LOGIN",
        f"GRANT ALL ON SCHEMA {schema} TO {user}",
        *trigger("INSERT INTO log VALUES (1)"),
        "CREATE TABLE log (n int)",
        f"GRANT ALL ON t TO {user}",
    )
    with pytest.raises((PermissionDeniedError, BatchAbortedError), match="permission denied for table log"):
        written(PostgresSink(f"{dsn}&user={user}", "t"), rows())
    assert run(dsn, "SELECT count(*) FROM t") == [(0,)]


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_trigger_that_asks_for_another_attempt(dsn: str, code: str) -> None:
    run(dsn, *trigger(f"RAISE EXCEPTION 'odd' USING ERRCODE = '{code}'"))
    with pytest.raises(BatchAbortedError, match="odd"):
        written(PostgresSink(dsn, "t"), rows())


@pytest.mark.parametrize(
    "change",
    ["ALTER TABLE t DROP COLUMN url", "DROP TABLE t", "ALTER TABLE t ALTER url TYPE int USING 1",
     "CREATE TRIGGER s BEFORE INSERT ON t EXECUTE FUNCTION f()"],
)  # fmt: skip
def test_a_table_that_takes_nothing_is_no_row_s_fault(dsn: str, change: str) -> None:
    """It was changed while the flow ran. Statements fail without rows, too, so no row is put aside: neither those that
    were sound, nor those that were found before."""
    run(dsn, "CREATE TABLE t (n int, url text)",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'closed'; END $$")  # fmt: skip
    sink = PostgresSink(dsn, "t")
    sink.set_aside()
    sink.check(_SCHEMA)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    receipts = [sink.write(attempt, str(n), iter([rows(odd)])) for n, odd in enumerate(["odd", "0x00: \0"])]
    run(dsn, change)
    for receipt in receipts:
        with pytest.raises(BatchAbortedError, match=r"does not exist|is of type integer|closed"):
            sink.commit_accepted(attempt, [receipt], lambda _: pytest.fail("rows were put aside"))


def test_rows_that_disturb_each_other_in_one_statement_only(dsn: str) -> None:
    """A trigger changes keys, so one statement would change a row twice (21000). No row is to blame."""
    run(dsn, "CREATE TABLE t (k text PRIMARY KEY, n int)",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.k := lower(NEW.k); RETURN NEW; END $$",
        "CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")  # fmt: skip
    batch = pa.RecordBatch.from_pylist([{"k": k, "n": n} for n, k in enumerate(["a", "B", "A", "c", "b", "aB"])])
    for sets_aside in False, True:
        assert written(PostgresSink(dsn, "t", mode="upsert", key="k"), batch, sets_aside=sets_aside) == []
        assert sorted(run(dsn, "DELETE FROM t RETURNING k, n")) == [("a", 2), ("ab", 5), ("b", 4), ("c", 3)]


@pytest.mark.parametrize("deferred", ["DEFERRABLE INITIALLY DEFERRED", ""])
def test_a_row_may_need_a_later_one(dsn: str, deferred: str) -> None:
    """By a foreign key. Another row is bad, so rows are tried in parts: none but this one is refused."""
    run(dsn, f"CREATE TABLE t (n int PRIMARY KEY, parent int REFERENCES t {deferred}, url text CHECK (url <> 'odd'))")
    given: list[dict[str, Any]] = [
        {"n": n, "parent": (n + 40) % 60, "url": "odd" if n == 7 else "x"} for n in range(60)
    ]
    given[27]["parent"] = 1  # nobody's parent is the bad row
    batch = pa.RecordBatch.from_pylist(given)
    with pytest.raises(BadRecordError, match=r"the row: \{'n': 7,"):
        written(PostgresSink(dsn, "t"), batch, sets_aside=False)
    assert [each.row["n"] for each in written(PostgresSink(dsn, "t"), batch)] == [7]
    run(dsn, "DELETE FROM t")
    given[1]["parent"] = 9999  # which nobody has
    found = written(PostgresSink(dsn, "t"), pa.RecordBatch.from_pylist(given))
    assert {1: "ForeignKeyViolation", 7: "CheckViolation"}.items() <= {e.row["n"]: e.kind for e in found}.items()
    assert run(dsn, "SELECT count(*) FROM t") == [(60 - len(found),)]


# ---- what COPY would not take ----------------------------------------------------------------------------


def test_what_cannot_be_staged(dsn: str) -> None:
    """COPY fails as a whole, so such rows must be found before. They have problems of all kinds, in lists, too."""
    run(dsn, "CREATE TABLE t (n int, a text, b text[], c date, d timestamp, e timestamptz[])")
    day, at, zone = pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")
    invalid = pa.array([b"x\xffy"]).view(pa.string())
    good = {"a": pa.array(["x"]), "b": pa.array([["x", None]]), "c": pa.array([0], pa.int32()).cast(day),
            "d": pa.array([0]).cast(at), "e": pa.array([[0, None]]).cast(pa.list_(zone))}  # fmt: skip
    bad = [
        {"a": pa.array(["a\0b"])}, {"a": invalid}, {"b": pa.array([["a", None, "b\0"]])},
        {"b": pa.ListArray.from_arrays([0, 1], invalid)},
        {"c": pa.array([-2_440_589], pa.int32()).cast(day)}, {"c": pa.array([2**31 - 1], pa.int32()).cast(day)},
        {"d": pa.array([-(2**63) + 1]).cast(at)}, {"e": pa.array([[5, -210_866_803_200_000_001]]).cast(pa.list_(zone))},
    ]  # fmt: skip
    first = {"c": pa.array([-2_440_588], pa.int32()).cast(day), "d": pa.array([-210_866_803_200_000_000]).cast(at)}
    last = {"c": pa.array([2_145_042_905], pa.int32()).cast(day), "d": pa.array([2**63 - 1]).cast(at)}
    every = [{**good, **each} for each in ({}, *bad, {**first, "b": pa.array([[]], pa.list_(pa.string()))}, last)]
    columns = {name: pa.concat_arrays([row[name] for row in every]) for name in good}
    batch = pa.RecordBatch.from_pydict({"n": pa.array(range(len(every)), pa.int32()), **columns})
    found = written(PostgresSink(dsn, "t"), batch)
    assert [(each.row["n"], each.kind, each.message.split(",")[0]) for each in found] == [
        (1, "UntranslatableCharacter", "column a has the character 0x00"),
        (2, "CharacterNotInRepertoire", "column a has bytes that are not text in UTF-8"),
        (3, "UntranslatableCharacter", "column b has the character 0x00"),
        (4, "CharacterNotInRepertoire", "column b has bytes that are not text in UTF-8"),
        (5, "DatetimeFieldOverflow", "column c has the day -2"),
        (6, "DatetimeFieldOverflow", "column c has the day 2"),
        (7, "DatetimeFieldOverflow", "column d has the time -9"),
        (8, "DatetimeFieldOverflow", "column e has the time -210"),
    ]
    assert [found[0].row["a"], found[1].row["a"], found[2].row["b"]] == ["a\ufffdb", "x\ufffdy", ["a", None, "b\ufffd"]]
    assert run(dsn, "SELECT n, a, b FROM t ORDER BY n") == [(0, "x", ["x", None]), (9, "x", []), (10, "x", ["x", None])]
    assert run(dsn, "SELECT c::text, d::text FROM t WHERE n > 8 ORDER BY n") == [
        ("4714-11-24 BC", "4714-11-24 00:00:00 BC"), ("5874897-12-31", "294247-01-10 04:00:54.775807"),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_rows_that_copy_does_not_take(dsn: str, mode: str) -> None:
    """Without their large parts, they do not fit a page of the server. COPY fails for all rows then, and does not say
    for which one."""
    names = [f"c{n}" for n in range(500)]
    run(dsn, f"CREATE TABLE t (k int PRIMARY KEY, {', '.join(f'{name} text' for name in names)})")
    columns = [("k", pa.int32()), *((name, pa.string()) for name in names)]
    record = [("value", pa.binary()), ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))]
    schema = pa.schema([*columns, *record])
    given = [{"k": k, "value": b"v%d" % k, "headers": [{"key": "h", "value": b"%d" % k}]} for k in range(40)]
    large = {3, 17, 39}
    rows = [{**row, **dict.fromkeys(names, "x" * 20 if row["k"] in large else None)} for row in given]
    rows[8]["c0"] = "\0"  # this one is found before
    options: dict[str, Any] = {} if mode == "insert" else {"mode": mode, "key": "k"}
    for sets_aside in False, True:
        sink = PostgresSink(dsn, "t", **options)
        if sets_aside:
            sink.set_aside()
        shape = schema if sets_aside else pa.schema(columns)
        batch = pa.RecordBatch.from_pylist(rows, schema).select(shape.names)
        sink.check(shape)
        first = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
        sink.begin(first)
        with pytest.raises(BatchAbortedError, match="row is too big"):
            sink.write(first, "0", iter([batch[:20], batch[20:]]))
        sink.abort(first)
        second = BatchAttempt("f", "o", first.generation, 1, 2)
        sink.begin(second)
        if not sets_aside:
            message = r"(?s)does not take a row.*row is too big: size \d+, maximum size 8160; the row: \{'k': 3"
            with pytest.raises(BadRecordError, match=message):
                sink.write(second, "0", iter([batch[:20], batch[20:]]))
            sink.close()
            continue
        receipts = [sink.write(second, f"{n}", iter([batch[n * 20 : n * 20 + 20]])) for n in range(2)]
        refused = committed(sink, second, receipts)
        sink.close()
    assert [(each.row["k"], each.kind) for each in refused] == [
        (8, "UntranslatableCharacter"), *((k, "ProgramLimitExceeded") for k in sorted(large)),
    ]  # fmt: skip
    assert [each.record["value"] for each in refused] == [b"v%d" % k for k in (8, *sorted(large))]
    assert [each.record["headers"] for each in refused] == [
        [{"key": "h", "value": b"%d" % k}] for k in (8, *sorted(large))
    ]
    assert refused[1].row["c499"] == "x" * 20
    assert run(dsn, "SELECT k FROM t ORDER BY k") == [(k,) for k in range(40) if k not in large | {8}]


#: Staging tables of this test. Those of others are in other schemas.
STAGING = (
    "SELECT relname FROM pg_class WHERE relname LIKE 'onceflow_staging%' AND relkind = 'r' "
    "AND relnamespace = current_schema()::regnamespace"
)


def test_a_task_that_can_stage_nothing_blames_no_row(dsn: str) -> None:
    """Also in an attempt that looks for rows that cannot be staged."""
    run(dsn, "CREATE TABLE t (n int, url text)")
    sink = PostgresSink(dsn, "t")
    sink.set_aside()
    sink.check(_SCHEMA)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 2)
    sink.begin(attempt)
    ((name,),) = run(dsn, STAGING)
    run(dsn, f"DROP TABLE {name}")
    with pytest.raises(BatchAbortedError, match="Rows could not be staged"):
        sink.write(attempt, "0", iter([rows()]))
    sink.close()


def test_refused_rows_have_values_that_python_lacks(dsn: str) -> None:
    """Such as days in the year 12,000."""
    run(dsn, "CREATE TABLE t (n int CHECK (n < 0), c date, d timestamp, e timestamptz, f interval, g date[])")
    micros = 400_000_000_000_000_000
    batch = pa.RecordBatch.from_pydict({
        "n": pa.array([1], pa.int32()), "c": pa.array([4_000_000], pa.int32()).cast(pa.date32()),
        "d": pa.array([micros]).cast(pa.timestamp("us")),
        "e": pa.array([-micros // 4]).cast(pa.timestamp("us", tz="UTC")),
        "f": pa.array([dt.timedelta(1)], pa.duration("us")),
        "g": pa.array([[4_000_000]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
    })  # fmt: skip
    (found,) = written(PostgresSink(dsn, "t"), batch)
    assert found.row == {"n": 1, "c": "12921-08-18", "d": "14645-06-30 15:06:40", "e": "1200-02-15 14:13:20+00 BC",
                         "f": dt.timedelta(1), "g": ["12921-08-18"]}  # fmt: skip


def test_what_only_a_record_has_refuses_no_row(dsn: str) -> None:
    """Its key, value and headers may have what PostgreSQL cannot store as text. Dead letters have them exactly."""
    run(dsn, "CREATE TABLE t (n int CHECK (n > 0))")
    odd = pa.array([b"a\0\xff"] * 2).view(pa.string())
    names = pa.StructArray.from_arrays([pa.array(["\0h"] * 2), pa.array([b"\0\xff"] * 2)], ["key", "value"])
    batch = pa.RecordBatch.from_pydict({
        "n": pa.array([0, 1], pa.int32()), "key": odd, "value": odd,
        "headers": pa.ListArray.from_arrays([0, 1, 2], names),
        "topic": ["a", "b"], "timestamp": pa.array([-(2**63) + 1] * 2).cast(pa.timestamp("us", tz="UTC")),
    })  # fmt: skip
    (found,) = written(PostgresSink(dsn, "t"), batch)
    assert run(dsn, "SELECT n FROM t") == [(1,)]
    assert found.row == {"n": 0}
    assert found.record == {"key": b"a\0\xff", "value": b"a\0\xff", "topic": "a", "timestamp": None,
                            "headers": [{"key": "\0h", "value": b"\0\xff"}]}  # fmt: skip


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP", "SQL_ASCII"])
def test_a_database_with_another_encoding(postgres: LocalPostgres, encoding: str) -> None:
    name = f"d_{encoding.lower()}"
    run(postgres.dsn, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    dsn = postgres.dsn.rsplit("/", 1)[0] + f"/{name}"
    run(dsn, "CREATE TABLE t (n int, a text, b text[])")
    texts = ["plain", "\u00e4", "\u65e5\u672c", "\u20ac", "\U0001f600"]
    batch = pa.RecordBatch.from_pylist([{"n": n, "a": text, "b": [text]} for n, text in enumerate(texts)])
    found = written(PostgresSink(dsn, "t"), batch)
    codec = {"LATIN1": "latin-1", "EUC_JP": "euc_jp", "SQL_ASCII": "utf-8"}[encoding]
    storable = [text for text in texts if text.encode(codec, "ignore")]
    with psycopg.connect(dsn, client_encoding="UTF8") as connection:
        assert connection.execute("SELECT a, b FROM t ORDER BY n").fetchall() == [(text, [text]) for text in storable]
    assert [each.row["n"] for each in found] == [n for n, text in enumerate(texts) if text not in storable]
    assert all("encoding" in each.message and each.row["a"].startswith("\\") for each in found)


# ---- the driver ------------------------------------------------------------------------------------------


def test_a_driver_that_sends_other_decimals(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before 1.12 did: 5000000000.000001 became 5000000100.000000."""
    from adbc_driver_postgresql import dbapi

    run(dsn, "CREATE TABLE t (n int)")
    good = dbapi.Cursor.fetchall
    monkeypatch.setattr(
        dbapi.Cursor, "fetchall", lambda self: [(text.replace("000001", "0001"),) for (text,) in good(self)]
    )
    postgres_staging.check_driver.cache_clear()
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)stores wrong decimals.*sent 5000000000\.000001"):
        PostgresSink(dsn, "t").check(pa.schema([("n", pa.int32())]))
    monkeypatch.undo()
    PostgresSink(dsn, "t").check(pa.schema([("n", pa.int32())]))


# ---- names -----------------------------------------------------------------------------------------------

#: Words of SQL, names that the sink's statements have, and what means something to psycopg or in quotes.
_ODD_NAMES = [
    "select", "user", "row", "receipt", "problem", "place", "key_0", "c0", "flag", "t", "last", "keyed", "excluded",
    "%s", "%(receipts)s", "{}", "{0}", '"', "a b", "a.b", "'", ";--", "$1", "K", "k", "\u00e4", "onceflow_row",
    "onceflow_receipt", "x" * 63, "\\", "%", "ON CONFLICT",
]  # fmt: skip
_NAMES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=15), st.sampled_from(_ODD_NAMES)
).filter(lambda name: len(name.encode()) <= 63)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=_NAMES, table=_NAMES, names=st.lists(_NAMES, min_size=3, max_size=3, unique=True), flag=_NAMES)
@example('%s{}"', 'a.b%(receipts)s"{0}', ["receipt", "%s%%", "key_0"], "row")
@example("select", "t", ["last", "excluded", "c0"], "\\'; --")
@example("target", "excluded", ["target", "excluded", "t"], "x")
def test_names_of_any_kind(postgres: LocalPostgres, schema: str, table: str, names: list[str], flag: str) -> None:
    """Of a schema, a table, its columns, its type, and the flag."""
    schema = schema.replace(".", "_") if not schema.startswith("pg_") else "schema"
    if flag in names:
        flag = "deleted" if "deleted" not in names else "deleted2"
    quoted = ['"' + name.replace('"', '""') + '"' for name in (schema, table, *names, flag)]
    home, tab, k, j, v, kind = quoted
    run(
        postgres.dsn,
        f"DROP SCHEMA IF EXISTS {home} CASCADE",
        f"CREATE SCHEMA {home}",
        f"CREATE TYPE {home}.{kind if kind != tab else 'mood'} AS ENUM ('x', 'y')",
        f"CREATE TABLE {home}.{tab} ({k} {home}.{kind if kind != tab else 'mood'}, {j} varchar(5), "
        f"{v} int CHECK ({v} < 9), PRIMARY KEY ({k}, {j}))",
    )
    given = [
        ("x", "a", 1, False),
        ("y", "a", 2, False),
        ("x", "a", 3, False),
        ("y", "b", 9, False),
        ("y", "a", 4, True),
    ]
    batch = pa.RecordBatch.from_pylist([dict(zip([*names, flag], each, strict=True)) for each in given])
    sink = PostgresSink(postgres.dsn, f"{schema}.{table}", mode="delete-by-flag", key=names[:2], flag=flag)
    found = written(sink, batch)
    assert [each.row for each in found] == [dict(zip([*names, flag], given[3], strict=True))]
    assert run(postgres.dsn, f"SELECT * FROM {home}.{tab}") == [("x", "a", 3)]
    inserted = batch.drop_columns([flag])[:1]
    run(postgres.dsn, f"DELETE FROM {home}.{tab}")
    written(PostgresSink(postgres.dsn, f"{schema}.{table}"), inserted)
    assert run(postgres.dsn, f"SELECT * FROM {home}.{tab}") == [("x", "a", 1)]

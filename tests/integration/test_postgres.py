"""The PostgreSQL sink, on a real server."""

from __future__ import annotations

import datetime as dt
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

from onceflow import (
    BadRecordError,
    DeadLetterLimitError,
    PermissionDeniedError,
    PostgresSink,
    SchemaError,
    UnsupportedQueryError,
)
from onceflow.external.postgres_columns import relation_of, shows_order
from onceflow.external.sink import BatchAttempt
from onceflow.spark.collect import arrow_schema
from onceflow.testing import faults, independent
from onceflow.testing.external_sink_suite import SCHEMA, ExternalSinkSuite, Writer
from onceflow.testing.postgres import LocalPostgres
from onceflow_workshop.testing.postgres_proxy import PostgresProxy

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import run, written
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


@pytest.fixture
def made(dsn: str) -> Callable[..., str]:
    def make(*statements: str) -> str:
        run(dsn, *statements)
        return dsn

    return make


class TestPostgres(ExternalSinkSuite):
    @pytest.fixture
    def sink(self, made: Callable[..., str]) -> Iterator[PostgresSink]:
        self.dsn = made("CREATE TABLE ledger (id bigint PRIMARY KEY, text text)")
        sink = PostgresSink(self.dsn, "ledger")
        sink.check(pa.schema([("id", pa.int64()), ("text", pa.string())]))
        yield sink
        sink.close()

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return [{"id": number, "text": text} for number, text in run(self.dsn, "SELECT id, text FROM ledger")]

    def backup(self, sink: Any) -> Callable[[], Any]:
        kept = ("ledger", "onceflow_progress")
        run(self.dsn, *(f"CREATE TABLE {name}_saved AS TABLE {name}" for name in kept))
        back = "".join(f"DELETE FROM {name}; INSERT INTO {name} TABLE {name}_saved; " for name in kept)
        return lambda: run(self.dsn, f"BEGIN; {back}COMMIT")


def write(sink: PostgresSink, rows: list[dict[str, Any]]) -> None:
    """Write one batch. A row that is not taken is an error."""
    written(sink, pa.RecordBatch.from_pylist(rows), sets_aside=False)


@pytest.mark.long_but("before")
@pytest.mark.parametrize("when", ["before", "after"])
def test_answers_are_lost(made: Callable[..., str], postgres: LocalPostgres, when: str) -> None:
    """Of a commit, and of the takeovers that find out how it has ended. The owner tells that these were its own."""
    direct = made("CREATE TABLE ledger (id bigint PRIMARY KEY, text text)")
    with PostgresProxy(postgres.port) as proxy:
        through = direct.replace(f":{postgres.port}/", f":{proxy.port}/")
        sink = PostgresSink(through, "ledger")
        sink.check(SCHEMA)
        writer = Writer(sink).open()
        for turn in range(3):
            attempt, receipts = writer.staged()
            proxy.cut(when, 1 + turn)
            with pytest.raises((ConnectionError, psycopg.OperationalError)):
                writer.sink.commit(attempt, receipts, json.dumps({"batch": attempt.batch}))
            for _ in range(turn):
                with pytest.raises((ConnectionError, psycopg.OperationalError)):
                    writer.open(attempt.generation)
            writer.open(attempt.generation)
            assert writer.batch == attempt.batch - (when == "before")
            if when == "before":
                writer.commit(*writer.staged())
        writer.sink.close()
    assert run(direct, "SELECT count(*), count(DISTINCT id) FROM ledger") == [(120, 120)]


def test_modes(made: Callable[..., str]) -> None:
    dsn = made("CREATE TABLE t (k text PRIMARY KEY, a int, b int DEFAULT 7)")
    upsert = PostgresSink(dsn, "t", mode="upsert", key=["k"])
    write(upsert, [{"k": "x", "a": 1}, {"k": "y", "a": 2}, {"k": "x", "a": 3}])
    assert run(dsn, "SELECT * FROM t ORDER BY k") == [("x", 3, 7), ("y", 2, 7)]
    by_flag = PostgresSink(dsn, "t", mode="delete-by-flag", key=["k"])
    write(by_flag, [{"k": "x", "a": 0, "deleted": True}, {"k": "z", "a": 9, "deleted": None}])
    assert run(dsn, "SELECT * FROM t ORDER BY k") == [("y", 2, 7), ("z", 9, 7)]


@pytest.mark.parametrize(
    "more, ordered",
    [
        ("", False),
        ("b int DEFAULT 7", True),
        ("n serial", True),
        ("n int GENERATED ALWAYS AS IDENTITY", True),
        ("a_twice int GENERATED ALWAYS AS (a * 2) STORED", True),
    ],
)
def test_rows_are_inserted_in_order_where_that_shows(made: Callable[..., str], more: str, ordered: bool) -> None:
    dsn = made(f"CREATE TABLE t (a int{', ' if more else ''}{more})")
    with psycopg.connect(dsn) as connection:
        assert shows_order(connection, relation_of(connection, "t"), ["a"]) == ordered
        connection.execute("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        connection.execute("CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
        assert shows_order(connection, relation_of(connection, "t"), ["a"])
    sink = PostgresSink(dsn, "t")
    sink.check(pa.schema([("a", pa.int64())]))
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    parts = [[{"a": n} for n in range(start, start + 50)] for start in (50, 0)]
    receipts = [
        sink.write(attempt, str(9 - n), iter([pa.RecordBatch.from_pylist(part)])) for n, part in enumerate(parts)
    ]
    sink.commit(attempt, receipts[::-1], "{}")
    order = "n" if more.startswith("n ") else "a"
    assert run(dsn, f"SELECT a FROM t ORDER BY {order}") == [(n,) for n in range(100)]


@pytest.mark.long_but("False")
@pytest.mark.parametrize("sets_aside", [False, True])
def test_tasks_have_the_order_of_their_receipts(made: Callable[..., str], sets_aside: bool) -> None:
    """Task 10 comes after task 2, although its name is smaller. They may read one partition, with minPartitions."""
    dsn = made("CREATE TABLE t (n serial, id bigint PRIMARY KEY, text text CHECK (text <> 'bad'))")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    given = {f"7-{task}": [{"id": 1, "text": f"task {task}"}, {"id": 2 + task, "text": "new"}] for task in range(12)}
    if sets_aside:
        given["7-3"].append({"id": 99, "text": "bad"})
    for sink in PostgresSink(dsn, "t", mode="upsert", key="id"), PostgresSink(dsn, "t"):
        if sets_aside:
            sink.set_aside()
        sink.check(schema)
        at = BatchAttempt("orders", "o", sink.open("orders", "o", None).generation, 1, 1)
        sink.begin(at)
        receipts = [sink.write(at, task, iter([pa.RecordBatch.from_pylist(r, schema)])) for task, r in given.items()]
        if sets_aside:
            sink.commit_accepted(at, receipts, lambda refused: str(len(refused)))
        else:
            sink.commit(at, receipts, "{}")
        sink.close()
        if sink._write.mode == "upsert":
            assert run(dsn, "SELECT text FROM t WHERE id = 1") == [("task 11",)]
            made("DELETE FROM t")
            given = {task: rows[1:] for task, rows in given.items()}
    assert [id_ for (id_,) in run(dsn, "SELECT id FROM t ORDER BY n")] == [*range(2, 14)]


def test_types(made: Callable[..., str]) -> None:
    dsn = made(
        "CREATE TABLE t (a numeric(10,2), b timestamptz, c jsonb, d bytea, e int[], f uuid, g smallint, h date, "
        "i text[], j varchar(5), k boolean, l real, m timestamp)"
    )
    noon = dt.datetime(2026, 1, 2, 12, tzinfo=dt.timezone.utc)
    one = uuid.uuid4()
    row = {
        "a": Decimal("1.50"), "b": noon, "c": '{"x": [1]}', "d": b"\0\xff", "e": [1, None, 3], "f": str(one), "g": 7,
        "h": noon.date(), "i": ["x", ""], "j": "12345", "k": True, "l": 1.5, "m": noon.replace(tzinfo=None),
    }  # fmt: skip
    write(PostgresSink(dsn, "t"), [row, dict.fromkeys(row)])
    (found,) = run(dsn, "SELECT * FROM t WHERE a IS NOT NULL")
    assert found == tuple({**row, "c": {"x": [1]}, "f": one}.values())
    assert run(dsn, "SELECT count(*) FROM t WHERE a IS NULL AND m IS NULL") == [(1,)]


@pytest.mark.parametrize(
    "table, row, message",
    [
        ("k int PRIMARY KEY", {"k": 1}, r"duplicate key.*Key \(k\)=\(1\) already exists"),
        ("k int CHECK (k < 1)", {"k": 1}, r"check constraint.*Failing row contains \(1\)"),
        ("k smallint", {"k": 70_000}, "smallint out of range.*'k': 70000"),
        ("k jsonb", {"k": "{"}, "invalid input syntax for type json"),
        ("k varchar(2)", {"k": "abc"}, "value too long"),
        ("k text", {"k": "a\0b"}, "column k has the character 0x00.*'k': 'a.b'"),
    ],
)
def test_a_row_that_the_table_does_not_take(
    made: Callable[..., str], table: str, row: dict[str, Any], message: str
) -> None:
    dsn = made(f"CREATE TABLE t ({table})")
    with pytest.raises(BadRecordError, match=message):
        write(PostgresSink(dsn, "t"), [row, row])
    assert run(dsn, "SELECT * FROM t") == []


@pytest.mark.parametrize(
    "arguments, names, message",
    [
        ({"table": "tt"}, ["k"], "no table 'tt'"),
        ({"table": "T"}, ["k"], "(?s)no table 'T'.*did you mean table='t'"),
        ({"table": '"t"'}, ["k"], "did you mean table='t'"),
        ({"table": "other.t"}, ["k"], "did you mean table='t'"),
        ({"table": "zebra"}, ["k"], "create it, or check the search_path"),
        ({"table": "t"}, ["k", "amuont"], "(?s)no columns amuont.*did you mean amount for amuont"),
        ({"table": "t"}, ["k", "x"], r"(?s)has no columns x.*next step: add them"),
        ({"table": "t"}, ["k", "a", "a"], "have several columns a"),
        (
            {"table": "t"},
            ["k", "n"],
            r"n of table t is GENERATED ALWAYS AS IDENTITY: .*\n.*leave it out .*\"n\" SET GEN",
        ),
        (
            {"table": "t"},
            ["k", "twice"],
            "twice of table t is a generated column: .*\n.*leave it out of the DataFrame$",
        ),
        ({"table": "t", "mode": "upsert", "key": ["n"]}, ["k"], r"n of table t is GENERATED ALWAYS.*\n.*other columns"),
        (
            {"table": "t", "mode": "delete-by-flag", "key": ["k"]},
            ["k", "deleted"],
            "flag deleted .* is int64, not bool",
        ),
        ({"table": "t"}, ["a"], "Columns k of table t must not be null"),
        ({"table": "t", "mode": "upsert", "key": ["a"]}, ["k", "a"], "primary key, or of a unique index"),
        ({"table": "t", "mode": "upsert", "key": ["q"]}, ["k", "a"], "lack the columns q"),
    ],
)
def test_what_does_not_fit_is_found_at_the_start(
    made: Callable[..., str], arguments: dict[str, Any], names: list[str], message: str
) -> None:
    dsn = made(
        "CREATE TABLE t (k int NOT NULL PRIMARY KEY, a int, amount int, n int GENERATED ALWAYS AS IDENTITY, "
        "twice int GENERATED ALWAYS AS (a * 2) STORED)"
    )
    with pytest.raises(SchemaError, match=message):
        PostgresSink(dsn, **arguments).check(pa.schema([(name, pa.int64()) for name in names]))


def test_types_that_do_not_fit(made: Callable[..., str]) -> None:
    sink = PostgresSink(made("CREATE TABLE t (k int, s text)"), "t")
    with pytest.raises(SchemaError, match="digits would get lost"):
        sink.check(pa.schema([("k", pa.float64())]))
    for kind, message in (
        (pa.struct([("x", pa.int64())]), r"no type for\n.*select to_json\(s\)"),
        (pa.null(), r"no type for\n.*CAST\(s AS STRING\), or leave it out"),
        (pa.list_(pa.null()), r"CAST\(s AS STRING\)"),
        (pa.time64("us"), r"select string\(s\)"),
    ):
        with pytest.raises(SchemaError, match=message):
            sink.check(pa.schema([("s", kind)]))


def test_a_table_in_a_schema_that_is_not_searched(made: Callable[..., str], postgres: LocalPostgres) -> None:
    """The table is found, and named as it has to be given; or the permission that is missing."""
    name = f"ledger_{uuid.uuid4().hex[:8]}"
    other = f"other_{uuid.uuid4().hex[:8]}"
    dsn = made(f"CREATE SCHEMA {other}", f"CREATE TABLE {other}.{name} (k int)", f"CREATE ROLE u_{other} LOGIN")
    rows = pa.schema([("k", pa.int32())])
    with pytest.raises(SchemaError, match=f"did you mean table='{other}.{name}'"):
        PostgresSink(dsn, name).check(rows)
    with pytest.raises(SchemaError, match=f'GRANT USAGE ON SCHEMA "{other}"'):
        PostgresSink(f"{dsn}&user=u_{other}", name).check(rows)


def test_what_postgresql_converts(made: Callable[..., str]) -> None:
    """Numbers are rounded to the digits of the column, as with COPY and JDBC. Day-time intervals are intervals."""
    dsn = made("CREATE TABLE t (a numeric(10,2), b real, c interval, d time)")
    day = dt.timedelta(days=-1, hours=2, microseconds=3)
    write(PostgresSink(dsn, "t"), [{"a": Decimal("1.005"), "b": 0.1, "c": day, "d": "12:30"}, {"a": Decimal("-1.004")}])
    assert run(dsn, "SELECT a, c, d FROM t ORDER BY a DESC") == [
        (Decimal("1.01"), day, dt.time(12, 30)),
        (Decimal("-1.00"), None, None),
    ]


def test_columns_of_a_query(make_pipe: Callable[..., Any], made: Callable[..., str]) -> None:
    """Those that Arrow has no type for are named, with what can be selected."""
    spark = make_pipe().spark
    rows = spark.sql("SELECT 1 AS k, INTERVAL '1-2' YEAR TO MONTH AS y")
    with pytest.raises(SchemaError, match=r"Column y is interval year to month") as refused:
        arrow_schema(rows)
    advised = refused.value.next_step.removeprefix("select ").removesuffix(", or leave it out")
    dsn = made("CREATE TABLE t (y interval)")
    write(PostgresSink(dsn, "t"), [row.asDict() for row in rows.selectExpr(advised).collect()])
    assert run(dsn, "SELECT y = INTERVAL '14 months' FROM t") == [(True,)]
    found = arrow_schema(spark.sql("SELECT 1 AS k, INTERVAL '1' HOUR AS d, null AS n, map('a', 1) AS m"))
    assert (found.field("d").type, found.field("n").type) == (pa.duration("us"), pa.null())


def test_a_query_with_state_in_spark(make_pipe: Callable[..., Any], made: Callable[..., str]) -> None:
    dsn = made("CREATE TABLE t (key text, count bigint)")
    pipe = make_pipe()
    with pipe.open() as flow:
        counts = flow.read(pipe.source).groupBy("key").count()
        with pytest.raises(
            UnsupportedQueryError, match=r"(?s)takes no checkpoint.*two flows.*Flow.write\(\.\.\., check"
        ):
            flow.write_external(counts, PostgresSink(dsn, "t"))


def test_a_flow(
    make_pipe: Callable[..., Any], make_topic: Callable[..., str], made: Callable[..., str], inject: Any
) -> None:
    """The driver dies when the database has committed, and Kafka's progress and dead letters have not followed."""
    pipe, dead = make_pipe(), make_topic()
    pipe.fill(1500)
    dsn = made(
        'CREATE TABLE ledger ("partition" int, "offset" bigint CHECK ("offset" % 10 <> 3), value text, '
        'PRIMARY KEY ("partition", "offset"))'
    )

    def run_flow(**options: Any) -> Any:
        with pipe.open() as flow:
            rows = flow.read(pipe.source, max_records_per_batch=500, include_headers=True).selectExpr(
                "key", "headers", "topic", "timestamp", "timestampType", "partition", "offset", "string(value) AS value"
            )
            options = {"dead_letter_topic": dead, "once": True, **options}
            query = flow.write_external(rows, PostgresSink(dsn, "ledger"), **options).start()
            query.awaitTermination(120)
            return query

    inject("commit", "raise", batch=2)
    with pytest.raises((StreamingQueryException, faults.InjectedFaultError), match="injected at"):
        run_flow(engine="tasks")
    assert pipe.committed_progress()[-1].batch_id == 1
    with pytest.raises(DeadLetterLimitError, match="max_dead_letters is 0"):
        run_flow(max_dead_letters=0)
    query = run_flow()
    sent = independent.read_topic(pipe.bootstrap, pipe.source)
    assert sorted(run(dsn, 'SELECT "partition", "offset", value FROM ledger')) == sorted(
        (each.partition, each.offset, (each.value or b"").decode()) for each in sent if each.offset % 10 != 3
    )
    letters = independent.read_topic(pipe.bootstrap, dead, decided=True)
    refused = {(each.partition, each.offset): each for each in sent if each.offset % 10 == 3}
    assert len(letters) == len(refused)
    for letter in letters:
        headers = dict(letter.headers)
        names = ("onceflow.error.partition", "onceflow.error.offset")
        origin = refused.pop(tuple(int(headers[name] or b"") for name in names))  # type: ignore[arg-type]
        assert (letter.key, letter.timestamp_ms) == (origin.key, origin.timestamp_ms)
        assert json.loads(letter.value or b"")["value"] == (origin.value or b"").decode()
        assert headers["onceflow.error.class"] == b"CheckViolation"
        assert headers["onceflow.origin.topic"] == pipe.source.encode()
    assert sum(batch.dead_letters for batch in query.batches) < len(letters)
    assert pipe.committed_progress()[-1].batch_id == 3


@pytest.mark.long
def test_one_sink_for_two_flows(
    make_pipe: Callable[..., Any], make_topic: Callable[..., str], made: Callable[..., str]
) -> None:
    """With other columns, and without dead letters. Each run has a sink of its own, made from the user's."""
    dsn = made('CREATE TABLE t (flow text DEFAULT \'second\', "offset" bigint CHECK ("offset" <> 3), value text)')
    first, second, dead = make_pipe(partitions=1), make_pipe(partitions=1), make_topic()
    sink = PostgresSink(dsn, "t")
    with first.open() as one, second.open() as other:
        rows = one.read(first.source).selectExpr("'first' AS flow", "offset", "string(value) AS value", "key")
        letters = one.write_external(rows, sink, dead_letter_topic=dead).start()
        strict = other.write_external(other.read(second.source).selectExpr("offset"), sink).start()
        for pipe, query in (first, letters), (second, strict), (first, letters):
            pipe.fill(3)
            query.processAllAvailable()
        assert run(dsn, 'SELECT flow, "offset", value IS NULL FROM t ORDER BY 1, 2') == [
            *(("first", offset, False) for offset in (0, 1, 2, 4, 5)),
            *(("second", offset, True) for offset in (0, 1, 2)),
        ]
        assert len(independent.read_topic(first.bootstrap, dead, decided=True)) == 1
        second.fill(1)
        with pytest.raises((BadRecordError, StreamingQueryException), match="does not take a row"):
            strict.processAllAvailable()
        letters.stop()


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_rows_that_are_set_aside(made: Callable[..., str], mode: str) -> None:
    """Rows that different constraints refuse, among others; the others are in the table."""
    dsn = made(
        "CREATE TABLE t (k int PRIMARY KEY, a smallint CHECK (a <> 5), j jsonb, u int UNIQUE DEFERRABLE INITIALLY "
        "DEFERRED)",
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.k = 77 THEN RAISE EXCEPTION 'never'; "
        "END IF; RETURN new; END $$",
        "CREATE TRIGGER no BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION no()",
    )
    rows = [{"k": n, "a": 1, "j": "1", "u": n} for n in range(5000)]
    rows[10]["a"], rows[11]["a"], rows[3000]["j"], rows[4999]["u"] = 70_000, 5, "{", 1
    rows[20]["j"] = "\0"
    bad = {10: "NumericValueOutOfRange", 11: "CheckViolation", 77: "RaiseException"}
    bad |= {20: "UntranslatableCharacter", 3000: "InvalidTextRepresentation", 4999: "UniqueViolation"}
    sink = PostgresSink(dsn, "t", mode=mode, key=["k"] if mode == "upsert" else [])
    found = written(sink, pa.RecordBatch.from_pylist(rows))
    assert {each.row["k"]: each.kind for each in found} == bad
    rows[20]["j"] = "\ufffd"
    assert [each.row for each in found] == [rows[number] for number in sorted(bad)]
    assert "Key (u)=(1) already exists" in found[-1].message
    assert run(dsn, "SELECT k FROM t ORDER BY k") == [(n,) for n in range(5000) if n not in bad]
    assert run(dsn, "SELECT count(*) FROM pg_tables WHERE tablename LIKE '%numbered'") == [(0,)]


def test_all_rows_are_set_aside(made: Callable[..., str]) -> None:
    """The table's own column ``value`` is written; the record's other columns come back as they were."""
    dsn = made("CREATE TABLE t (value int CHECK (value < 0))")
    headers = [[{"key": "a", "value": b"\0"}, {"key": "b", "value": None}], [], None]
    schema = pa.schema(
        [("value", pa.int32()), ("key", pa.binary()), ("headers", pa.list_(pa.struct([("key", pa.string()),
         ("value", pa.binary())]))), ("topic", pa.string()), ("offset", pa.int64()),
         ("timestamp", pa.timestamp("us", tz="UTC"))]
    )  # fmt: skip
    noon = dt.datetime(2026, 1, 2, 12, tzinfo=dt.timezone.utc)
    rows = [
        {"value": n, "key": b"k%d" % n, "headers": headers[n % 3], "topic": "in", "offset": n, "timestamp": noon}
        for n in range(300)
    ]
    found = written(PostgresSink(dsn, "t"), pa.RecordBatch.from_pylist(rows, schema=schema))
    assert [each.row for each in found] == [{"value": n} for n in range(300)]
    assert found[0].record == {name: rows[0][name] for name in ("key", "headers", "topic", "offset", "timestamp")}
    assert "headers" not in found[1].record
    assert found[2].record["key"] == b"k2"


def test_what_the_user_needs(made: Callable[..., str]) -> None:
    """The permissions in docs/external.md are enough, and none of them can be left out."""
    dsn = made("CREATE TABLE t (k int PRIMARY KEY, a int)")
    ((schema,),) = run(dsn, "SELECT current_schema()")
    user = f"ada_{schema}"
    grants = [
        f"GRANT USAGE ON SCHEMA {schema} TO {user}",
        f"GRANT CREATE ON SCHEMA {schema} TO {user}",
        f"GRANT INSERT ON {schema}.t TO {user}",
        f"GRANT SELECT, UPDATE ON {schema}.t TO {user}",
        f"GRANT DELETE ON {schema}.t TO {user}",
    ]
    made(f"CREATE ROLE {user} LOGIN PASSWORD 'secret'")
    for number, (mode, message) in enumerate(
        [("insert", "no table"), ("insert", "permission is missing"), ("insert", "permission is missing"),
         ("upsert", "permission is missing"), ("delete-by-flag", "permission is missing")]
    ):  # fmt: skip
        key = [] if mode == "insert" else ["k"]
        sink = PostgresSink(f"{dsn}&user={user}&password=secret", "t", mode=mode, key=key)
        row = {"k": number, "a": 1, **({"deleted": False} if mode == "delete-by-flag" else {})}
        with pytest.raises((PermissionDeniedError, SchemaError), match=message):
            write(sink, [row])
        made(grants[number])
        if number > 1:
            write(sink, [row])
    assert run(dsn, "SELECT k FROM t ORDER BY k") == [(2,), (3,), (4,)]


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="No such file"):
        PostgresSink(f"postgresql:///x?host={tmp_path}", "t").check(pa.schema([("k", pa.int32())]))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    sink = PostgresSink("postgresql://ada:secret@localhost/x", "t")
    assert "secret" not in repr(sink) + sink.target

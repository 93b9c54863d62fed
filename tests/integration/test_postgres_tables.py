"""Tables of the PostgreSQL sink that are altered while a flow runs, or cannot keep its rows."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from onceflow import BatchAbortedError, PostgresSink, SchemaError
from onceflow.external import postgres as postgres_sink
from onceflow.external.postgres_moves import Moves
from onceflow.external.sink import BatchAttempt

sys.path.insert(0, str(Path(__file__).parent))
try:
    from postgres_rows import Written, committed, run
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

_KEY, _TEXT = ("k", pa.int64()), ("v", pa.string())
_NUMBER = ("k", pa.decimal128(6, 2))


@pytest.mark.parametrize("sets_aside", [False, True])
@pytest.mark.parametrize(
    "change, message",
    [
        ("TRUNCATE t; ALTER TABLE t ADD n int NOT NULL", "Columns n of table t must not be null, and are not written"),
        ("ALTER TABLE t DROP v", "Table t has no columns v"),
        ("ALTER TABLE t ALTER k TYPE int", "digits would get lost"),
        ("ALTER TABLE t DROP v, ADD v text GENERATED ALWAYS AS ('g') STORED", "v of table t is a generated column"),
        ("DROP TABLE t", "There is no table"),
        ("DROP TABLE t; CREATE TABLE t (k int, v text)", "digits would get lost"),
        ("ALTER TABLE t SET UNLOGGED", "t is UNLOGGED"),
    ],
)
def test_a_table_is_altered_between_batches(dsn: str, change: str, message: str, sets_aside: bool) -> None:
    """Rows that would not be taken at a start are not taken later, either. No row is to blame."""
    run(dsn, "CREATE TABLE t (k numeric, v text)")
    sink = Written(dsn, sets_aside=sets_aside)
    schema = pa.schema([_NUMBER, _TEXT])
    sink.write([{"k": Decimal("1.00"), "v": "a"}], schema)
    run(dsn, *change.split(";"))
    with pytest.raises(SchemaError, match=message):
        sink.write([{"k": Decimal("2.50"), "v": "b"}], schema)
    assert sink.refused == []
    if "DROP TABLE" not in change:
        assert run(dsn, "SELECT * FROM t WHERE k > 1") == []
    sink.sink.close()


@pytest.mark.parametrize(
    "change, expected",
    [
        ("ALTER TABLE t ALTER k TYPE int USING k::int", [(1, "d"), (7, "c")]),
        ("ALTER TABLE t ADD n int, ADD UNIQUE (v)", [("07", "b", None), ("1", "d", None), ("7", "c", None)]),
        ("CREATE INDEX ON t (v); ANALYZE t; VACUUM FULL t", [("07", "b"), ("1", "d"), ("7", "c")]),
        ("DROP TABLE t; CREATE TABLE t (v text, k varchar(2) PRIMARY KEY)", [("b", "07"), ("d", "1"), ("c", "7")]),
    ],
)  # fmt: skip
def test_a_table_is_altered_and_takes_rows(dsn: str, change: str, expected: list[Any]) -> None:
    """The columns and indexes that it has now decide."""
    run(dsn, "CREATE TABLE t (k text PRIMARY KEY, v text)")
    sink = Written(dsn, mode="upsert", key="k")
    schema = pa.schema([("k", pa.string()), _TEXT])
    sink.write([{"k": "1", "v": "a"}], schema)
    run(dsn, *change.split(";"))
    sink.write([{"k": k, "v": v} for k, v in (("07", "b"), ("7", "c"), ("1", "d"))], schema)
    assert (run(dsn, "SELECT * FROM t ORDER BY k"), sink.refused) == (expected, [])
    sink.sink.close()


@pytest.mark.parametrize("sets_aside", [False, True])
def test_a_table_is_altered_while_a_batch_is_written(dsn: str, sets_aside: bool) -> None:
    """The batch is run again, and then it meets the table as it is. Rows do not become dead letters for that."""
    run(dsn, "CREATE TABLE t (k bigint, v text)")
    sink = PostgresSink(dsn, "t")
    if sets_aside:
        sink.set_aside()
    rows = pa.RecordBatch.from_pylist([{"k": 1, "v": "a"}], pa.schema([_KEY, _TEXT]))
    sink.check(rows.schema)
    generation = sink.open("f", "o", None).generation

    def attempt(number: int, change: str = "SELECT") -> list[Any]:
        at = BatchAttempt("f", "o", generation, 1, number)
        sink.begin(at)
        receipt = sink.write(at, "0", iter([rows]))
        run(dsn, change)
        return committed(sink, at, [receipt], sets_aside=sets_aside)

    with pytest.raises(BatchAbortedError, match="was altered while a batch was written"):
        attempt(1, "ALTER TABLE t ADD n int NOT NULL")
    with pytest.raises(SchemaError, match="Columns n of table t must not be null"):
        attempt(2)
    run(dsn, "ALTER TABLE t ALTER n DROP NOT NULL")
    with pytest.raises(BatchAbortedError, match="was altered while a batch was written"):
        attempt(3, "ALTER TABLE t ADD m int")
    assert run(dsn, "SELECT * FROM t") == []
    assert attempt(4) == []
    assert run(dsn, "SELECT k, v FROM t") == [(1, "a")]
    sink.close()


@pytest.mark.parametrize(
    "step, change, message",
    [
        ("check_lasting", "ALTER TABLE t SET UNLOGGED", "t is UNLOGGED"),
        (
            "columns_of",
            "ALTER TABLE t ADD n int NOT NULL DEFAULT 1; ALTER TABLE t ALTER n DROP DEFAULT",
            "Columns n of",
        ),
        ("shows_order", "ALTER TABLE t ADD topic text", "other columns are written to it"),
        (
            "key_of",
            "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD UNIQUE (k) DEFERRABLE",
            "t_k_key of table t is DEFERRABLE",
        ),
    ],
)
def test_a_check_of_an_altered_table_is_cut_off(
    dsn: str, monkeypatch: pytest.MonkeyPatch, step: str, change: str, message: str
) -> None:
    """Its connection is lost, for example. The next attempt checks all of it, whatever had been checked by then."""
    run(dsn, "CREATE TABLE t (k bigint PRIMARY KEY, v text)")
    sink = Written(dsn, mode="upsert", key="k")
    schema = pa.schema([_KEY, _TEXT, ("topic", pa.string())])
    sink.write([{"k": 1, "v": "a"}], schema)
    run(dsn, *change.split(";"))

    def lost(connection: psycopg.Connection[Any], *_: Any) -> None:
        run(dsn, f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        connection.execute("SELECT")

    monkeypatch.setattr(postgres_sink, step, lost)
    with pytest.raises(ConnectionError, match="terminating connection"):
        sink.write([{"k": 2, "v": "b"}], schema)
    monkeypatch.undo()
    with pytest.raises(SchemaError, match=message):
        sink.write([{"k": 2, "v": "b"}], schema)
    assert run(dsn, "SELECT k FROM t") == [(1,)]
    sink.sink.close()


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_table_is_altered_within_the_transaction(dsn: str, monkeypatch: pytest.MonkeyPatch, isolation: str) -> None:
    """After it has begun, and before it has written: whatever isolation the role has."""
    run(dsn, "CREATE TABLE t (k bigint)")
    sink = PostgresSink(f"{dsn}%20-cdefault_transaction_isolation%3D{isolation.replace(' ', '%5C%20')}", "t")
    rows = pa.RecordBatch.from_pylist([{"k": 1}], pa.schema([_KEY]))
    sink.check(rows.schema)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([rows]))
    move = Moves.all_or_none

    def altered(self: Moves, *given: Any) -> None:
        run(dsn, "ALTER TABLE t SET UNLOGGED")
        move(self, *given)

    monkeypatch.setattr(Moves, "all_or_none", altered)
    with pytest.raises(BatchAbortedError, match="was altered while a batch was written"):
        sink.commit(attempt, [receipt], "{}")
    assert run(dsn, "SELECT * FROM t") == []
    sink.close()


_PARTITIONED = ["CREATE TABLE t (k bigint) PARTITION BY LIST (k)", "CREATE TABLE one PARTITION OF t FOR VALUES IN (1)"]
_WRAPPER = "CREATE FOREIGN DATA WRAPPER w_{0}; CREATE SERVER s_{0} FOREIGN DATA WRAPPER w_{0}"
_VIEW = ["CREATE TABLE u (k bigint)", "CREATE VIEW t AS SELECT * FROM u"]


@pytest.mark.parametrize(
    "statements, change, message",
    [
        (_PARTITIONED, "CREATE UNLOGGED TABLE two PARTITION OF t FOR VALUES IN (2)", "two is UNLOGGED"),
        (_PARTITIONED, "ALTER TABLE one SET UNLOGGED", "one is UNLOGGED"),
        (
            _PARTITIONED,
            f"{_WRAPPER}; CREATE FOREIGN TABLE two PARTITION OF t FOR VALUES IN (2) SERVER s_{{0}}",
            "two is a foreign table",
        ),
        (_VIEW, "ALTER TABLE u SET UNLOGGED", "u is UNLOGGED"),
        (
            ["CREATE TABLE u (k bigint) PARTITION BY LIST (k)", "CREATE TABLE one PARTITION OF u FOR VALUES IN (1)",
             "CREATE VIEW v AS SELECT * FROM u", "CREATE VIEW t AS SELECT * FROM v"],
            "CREATE UNLOGGED TABLE two PARTITION OF u FOR VALUES IN (2)",
            "two is UNLOGGED",
        ),
        (_VIEW, "CREATE UNLOGGED TABLE w (k bigint); CREATE OR REPLACE VIEW t AS SELECT * FROM w", "w is UNLOGGED"),
    ],
)  # fmt: skip
def test_a_table_below_is_altered(dsn: str, statements: list[str], change: str, message: str) -> None:
    """A partition, or the table of a view. The batch that is written meanwhile is run again, and the next one meets it
    as it is now."""
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, *statements)
    sink = PostgresSink(dsn, "t")
    rows = pa.RecordBatch.from_pylist([{"k": 1}], pa.schema([_KEY]))
    sink.check(rows.schema)
    generation = sink.open("f", "o", None).generation
    attempts = [BatchAttempt("f", "o", generation, 1, number) for number in (1, 2, 3)]
    for attempt in attempts[:2]:
        sink.begin(attempt)
        receipt = sink.write(attempt, "0", iter([rows]))
        if attempt.attempt == 1:
            sink.commit(attempt, [receipt], "{}")
    run(dsn, *change.format(schema).split(";"))
    with pytest.raises(BatchAbortedError, match="was altered while a batch was written"):
        sink.commit(attempts[1], [receipt], "{}")
    with pytest.raises(SchemaError, match=message):
        sink.begin(attempts[2])
    sink.close()


def test_an_index_below_a_view_is_replaced(dsn: str) -> None:
    """The one that is there decides which rows have the same key."""
    run(dsn, "CREATE TABLE u (k bigint UNIQUE, v text)", "CREATE VIEW t AS SELECT * FROM u")
    sink = Written(dsn, mode="upsert", key="k")
    schema = pa.schema([_KEY, _TEXT])
    sink.write([{"k": None, "v": "a"}], schema)
    assert [each.kind for each in sink.refused] == ["NotNullViolation"]
    run(dsn, "ALTER TABLE u DROP CONSTRAINT u_k_key, ADD UNIQUE NULLS NOT DISTINCT (k)")
    sink.write([{"k": None, "v": "b"}, {"k": None, "v": "c"}], schema)
    assert len(sink.refused) == 1
    assert run(dsn, "SELECT * FROM u") == [(None, "c")]
    sink.sink.close()


@pytest.mark.parametrize(
    "statements, message",
    [
        (["CREATE UNLOGGED TABLE t (k bigint)"], r"(?s)t is UNLOGGED.*ALTER TABLE .*t SET LOGGED"),
        (
            ["CREATE TABLE t (k bigint) PARTITION BY LIST (k)", "CREATE UNLOGGED TABLE u PARTITION OF t DEFAULT"],
            "u is UNLOGGED",
        ),
        (["CREATE UNLOGGED TABLE u (k bigint)", "CREATE VIEW t AS SELECT * FROM u"], "u is UNLOGGED"),
        (
            ["CREATE FOREIGN DATA WRAPPER w_{0}", "CREATE SERVER s_{0} FOREIGN DATA WRAPPER w_{0}",
             "CREATE FOREIGN TABLE t (k bigint) SERVER s_{0}"],
            "t is a foreign table",
        ),
        (["CREATE TABLE t (value bigint)"], "The rows have no columns of table t"),
        (["CREATE DOMAIN never AS text NOT NULL", "CREATE TABLE t (k bigint, d never)"], "Columns d of table t must"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_keep_rows(dsn: str, statements: list[str], message: str) -> None:
    ((schema,),) = run(dsn, "SELECT current_schema()")
    run(dsn, *(statement.format(schema) for statement in statements))
    sink = PostgresSink(dsn, "t")
    sink.set_aside()
    columns = [("topic", pa.string())] if "value" in statements[0] else [_KEY]
    with pytest.raises(SchemaError, match=message):
        sink.check(pa.schema(columns))
    sink.close()


def test_a_domain_has_a_default(dsn: str) -> None:
    run(dsn, "CREATE DOMAIN x AS text DEFAULT 'x' NOT NULL", "CREATE TABLE t (k bigint, d x NOT NULL)")
    Written(dsn).write([{"k": 1}], pa.schema([_KEY]))
    assert run(dsn, "SELECT * FROM t") == [(1, "x")]


def test_a_trigger_makes_tables_below(dsn: str) -> None:
    """They are made within the transaction, by rows that need them. The table itself is as it was."""
    run(
        dsn,
        "CREATE TABLE t (k int)",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "EXECUTE format('CREATE TABLE IF NOT EXISTS t_%s () INHERITS (t)', NEW.k % 2); "
        "EXECUTE format('INSERT INTO t_%s VALUES ($1.*)', NEW.k % 2) USING NEW; RETURN NULL; END $$",
        "CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
    )
    written = Written(dsn)
    for k in range(4):
        written.write([{"k": k}], pa.schema([("k", pa.int32())]))
    assert run(dsn, "SELECT tableoid::regclass::text, k FROM t ORDER BY k") == [(f"t_{k % 2}", k) for k in range(4)]
    assert written.refused == []

"""The sink against the contract of all sinks, what SQLite takes and what it does not, and the service."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ledger_file import ledger
from sqlite_sink import SqliteSink

from onceflow import (
    BadRecordError,
    EnvironmentUnusableError,
    FencedError,
    OptionError,
    ProgressConflictError,
    SchemaError,
)
from onceflow.external.sink import BatchAttempt, ProgressRow, RefusedRow
from onceflow.testing.external_sink_suite import ExternalSinkSuite, Writer
from onceflow.testing.flow_driver import FlowDriver


def database(folder: Path, script: str) -> Path:
    path = folder / "test.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def rows_of(path: Path, select: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(select).fetchall()


# ---- the contract ------------------------------------------------------------------------------------


class TestSqlite(ExternalSinkSuite):
    rounds = 6

    @pytest.fixture
    def sink(self, tmp_path: Path) -> SqliteSink:
        return SqliteSink(database(tmp_path, "CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)"), "ledger")

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return [{"id": number, "text": text} for number, text in rows_of(sink.path, "SELECT id, text FROM ledger")]

    def backup(self, sink: Any) -> Callable[[], Any]:
        saved = sink.path.read_bytes()
        return lambda: sink.path.write_bytes(saved)


class NeverFences(SqliteSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        ((last, owner),) = rows_of(self.path, "SELECT generation, owner FROM onceflow_progress")
        receipts = [each for each in receipts if (self._staging(attempt.flow) / each.decode()).exists()]
        super().commit(replace(attempt, generation=last, owner=owner), receipts, progress)


class KnowsOnlyTheGeneration(SqliteSink):
    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        found = self.progress_row(flow)
        if generation is not None and found is not None and found.generation != generation:
            raise FencedError("it has another generation")
        return super().open(flow, owner, generation)


class NoticesNoRestore(SqliteSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        self._progress.clear()
        super().commit(attempt, receipts, progress)


class LooksByTakingOver(SqliteSink):
    def progress_row(self, flow: str) -> ProgressRow | None:
        return super().open(flow, "somebody", None)


class KnowsOnlyTheName(SqliteSink):
    def open(self, flow: str, owner: str, generation: int | None) -> ProgressRow:
        return super().open("suite" if "suite" in flow else flow, owner, generation)

    def progress_row(self, flow: str) -> ProgressRow | None:
        return super().progress_row("suite" if "suite" in flow else flow)


class MovesAllThatIsStaged(SqliteSink):
    def begin(self, attempt: BatchAttempt) -> None:
        self.staging = self._staging(attempt.flow)
        super().begin(attempt)

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        receipts = [path.name.encode() for path in sorted(self.staging.glob("*.arrow"))]
        super().commit(attempt, receipts, progress)


class TwoTransactions(SqliteSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, [], progress)
        super().commit(attempt, receipts, progress)


class ShowsRowsAtOnce(SqliteSink):
    def write(self, attempt: BatchAttempt, task: str, batches: Iterator[pa.RecordBatch]) -> bytes:
        receipt = super().write(attempt, task, batches)
        super().commit(attempt, [receipt], json.dumps({"batch": attempt.batch - 1}))
        return b""


@pytest.mark.parametrize(
    "mutant, test",
    [
        (NeverFences, "test_an_older_driver_is_fenced"),
        (MovesAllThatIsStaged, "test_only_rows_with_a_receipt_are_committed"),
        (KnowsOnlyTheGeneration, "test_the_answers_of_takeovers_are_lost"),
        (KnowsOnlyTheGeneration, "test_a_takeover_is_killed_at_any_moment"),
        (NoticesNoRestore, "test_a_restored_backup_is_not_continued"),
        (LooksByTakingOver, "test_looking_changes_nothing"),
        (KnowsOnlyTheName, "test_flows_of_one_name_do_not_meet"),
        pytest.param(TwoTransactions, "test_processes_are_killed_at_any_moment", marks=pytest.mark.faults),
        (ShowsRowsAtOnce, "test_rows_are_seen_with_the_progress_and_not_before"),
    ],
)
def test_a_wrong_sink_is_caught(tmp_path: Path, mutant: Any, test: str) -> None:
    suite = TestSqlite()
    sink = mutant(database(tmp_path, "CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)"), "ledger")
    more = {"committed": False} if test == "test_the_answers_of_takeovers_are_lost" else {}
    with pytest.raises((AssertionError, pytest.fail.Exception, BadRecordError, ProgressConflictError, FencedError)):
        getattr(suite, test)(sink, **more)


def test_an_older_state_is_not_continued(tmp_path: Path) -> None:
    """A commit was forgotten while the driver ran: its next batch would leave a gap."""
    path = database(tmp_path, "CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)")
    writer = Writer(SqliteSink(path, "ledger")).open()
    begun = path.read_bytes()
    writer.commit(*writer.staged())
    path.write_bytes(begun)
    attempt, receipts = writer.staged()
    with pytest.raises(ProgressConflictError, match="gone back to an older state"):
        writer.commit(attempt, receipts)
    assert rows_of(path, "SELECT * FROM ledger") == []
    path.write_bytes(b"")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)")
    with pytest.raises(ProgressConflictError, match="has generation 1, there is none"):
        writer.open(attempt.generation)


# ---- what the table takes ----------------------------------------------------------------------------


def written(
    sink: SqliteSink, rows: list[dict[str, Any]] | pa.RecordBatch, batch: int = 1, *, letters: bool = False
) -> list[RefusedRow]:
    """Commit a batch. Returns the rows that have become dead letters."""
    given = rows if isinstance(rows, pa.RecordBatch) else pa.RecordBatch.from_pylist(rows)
    if letters:
        sink.set_aside()
    sink.check(given.schema)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, batch, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([given]))
    refused: list[RefusedRow] = []

    def progress(found: Sequence[RefusedRow]) -> str:
        refused[:] = found
        return f'{{"batch": {batch}}}'

    if letters:
        sink.commit_accepted(attempt, [receipt], progress)
    else:
        sink.commit(attempt, [receipt], progress([]))
    return refused


def test_modes(tmp_path: Path) -> None:
    path = database(tmp_path, "CREATE TABLE t (k TEXT PRIMARY KEY, a INT, b INT DEFAULT 7) WITHOUT ROWID")
    upsert = SqliteSink(path, "t", mode="upsert", key=["k"])
    written(upsert, [{"k": "x", "a": 1}, {"k": "y", "a": 2}, {"k": "x", "a": 3}])
    assert rows_of(path, "SELECT * FROM t ORDER BY k") == [("x", 3, 7), ("y", 2, 7)]
    by_flag = SqliteSink(path, "t", mode="delete-by-flag", key=["k"])
    written(by_flag, [{"k": "x", "a": None, "deleted": True}, {"k": "z", "a": 9, "deleted": None}], batch=2)
    assert rows_of(path, "SELECT * FROM t ORDER BY k") == [("y", 2, 7), ("z", 9, 7)]


@pytest.mark.parametrize("mode", ["upsert", "delete-by-flag"])
def test_a_key_with_null_is_refused(tmp_path: Path, mode: str) -> None:
    """Null is different from null, so it would neither replace a row nor delete one."""
    path = database(tmp_path, "CREATE TABLE t (a TEXT, b TEXT, UNIQUE (a, b)); INSERT INTO t VALUES ('x', NULL)")
    sink = SqliteSink(path, "t", mode=mode, key=["a", "b"])
    sink.set_aside()
    schema = pa.schema([("a", pa.string()), ("b", pa.string()), ("deleted", pa.bool_())])
    rows = [{"a": "x", "b": None, "deleted": n == 1} for n in range(2)] + [{"a": "x", "b": "y", "deleted": False}]
    if mode == "upsert":
        schema = schema.remove(2)
    attempt = BatchAttempt("f", "me", sink.open("f", "me", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema=schema)]))
    found: list[tuple[str, str]] = []

    def progress(refused: Sequence[RefusedRow]) -> str:
        found.extend((each.kind, each.message) for each in refused)
        return "{}"

    sink.commit_accepted(attempt, [receipt], progress)
    assert found == [("NullKeyError", "column b of the key is null, so no row has this key")] * 2
    assert rows_of(path, "SELECT * FROM t ORDER BY b") == [("x", None), ("x", "y")]


@pytest.mark.parametrize("collation, other", [("NOCASE", "ada"), ("RTRIM", "Ada  ")])
@pytest.mark.parametrize("together", [True, False])
def test_the_column_says_which_keys_are_equal(tmp_path: Path, collation: str, other: str, together: bool) -> None:
    """Also of two rows of one batch."""
    path = database(tmp_path, f"CREATE TABLE t (k TEXT COLLATE {collation} PRIMARY KEY, v INT)")
    rows: list[dict[str, Any]] = [{"k": "Ada", "v": 1}, {"k": other, "v": 2}]
    for number, batch in enumerate([rows] if together else [rows[:1], rows[1:]], 1):
        assert written(SqliteSink(path, "t", mode="upsert", key=["k"]), batch, number, letters=True) == []
    assert rows_of(path, "SELECT * FROM t") == [("Ada", 2)]
    by_flag = SqliteSink(path, "t", mode="delete-by-flag", key=["k"])
    written(by_flag, [{"k": other, "v": None, "deleted": True}], batch=3)
    assert rows_of(path, "SELECT * FROM t") == []


def test_types(tmp_path: Path) -> None:
    path = database(tmp_path, "CREATE TABLE t (a, b, c, d, e, f)")
    noon = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
    row = {"a": True, "b": Decimal("0.0000000000"), "c": noon, "d": date(2026, 1, 2), "e": "x\0y", "f": b"\0"}
    written(SqliteSink(path, "t"), [row])
    assert rows_of(path, "SELECT * FROM t") == [
        (1, "0.0000000000", "2026-01-02T12:00:00+00:00", "2026-01-02", "x\0y", b"\0")
    ]


def same(given: Any, found: Any) -> bool:
    """Whether a value of a row is the one that was written, as a reader of SQLite would say."""
    if (isinstance(given, str) and isinstance(found, str)) or given is None or found is None:
        return bool(given == found)
    if isinstance(given, bytes) or isinstance(found, bytes):
        return type(given) is type(found) and bool(given == found)
    # What a number of the database is, is what it prints.
    return Decimal(str(int(given) if isinstance(given, bool) else given)) == Decimal(str(found))


VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats(),
    pa.bool_(): st.booleans(),
    pa.string(): st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(["07", "1e5", "nan", "Infinity", "9223372036854775808", " 12", "0x10", "1.10", "a\0b", "+1"]),
        st.integers().map(str),
    ),
    pa.binary(): st.binary(max_size=6),
    pa.decimal128(38, 9): st.decimals(-(10**29) + 1, 10**29 - 1, places=9),
}
AFFINITIES = ("INTEGER", "REAL", "NUMERIC", "TEXT", "BLOB", "")


@st.composite
def cells(draw: Any) -> tuple[str, Any, list[Any]]:
    """The affinity of a column, the type of its values, and some of them."""
    kind = draw(st.sampled_from(list(VALUES)))
    return draw(st.sampled_from(AFFINITIES)), kind, draw(st.lists(st.none() | VALUES[kind], max_size=5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(("REAL", pa.float64(), [1.5, math.nan, math.inf]))
@example(("REAL", pa.int64(), [2**53 + 1, 1]))
@example(("NUMERIC", pa.decimal128(38, 9), [Decimal("12345678901234567890.123456789"), Decimal("1.5")]))
@example(("INTEGER", pa.uint64(), [2**64 - 1, 2**63 - 1]))
@given(cells())
def test_every_value_is_kept_as_it_is_or_refused(
    tmp_path_factory: pytest.TempPathFactory, cell: tuple[str, Any, list[Any]]
) -> None:
    affinity, kind, values = cell
    path = database(tmp_path_factory.mktemp("values"), f"CREATE TABLE t (n INTEGER, v {affinity})")
    batch = pa.RecordBatch.from_arrays([pa.array(range(len(values)), pa.int64()), pa.array(values, kind)], ["n", "v"])
    refused = written(SqliteSink(path, "t"), batch, letters=True)
    kept = dict(rows_of(path, "SELECT n, v FROM t"))
    letters = {letter.row["n"] for letter in refused}
    assert (len(kept) + len(letters), kept.keys() & letters) == (len(values), set())
    for number, found in kept.items():
        assert same(values[number], found), (affinity, kind, values[number], found)
    if affinity in ("TEXT", "BLOB", "") and kind not in (pa.uint64(), pa.float64()):
        assert not letters


def test_a_time_that_python_does_not_know(tmp_path: Path) -> None:
    """Only its row is refused, not the batch."""
    path = database(tmp_path, "CREATE TABLE t (k INTEGER, at TEXT)")
    at = pa.array([0, 2**62], pa.timestamp("us", "UTC"))
    (refused,) = written(
        SqliteSink(path, "t"), pa.RecordBatch.from_arrays([pa.array([1, 2]), at], ["k", "at"]), letters=True
    )
    assert rows_of(path, "SELECT * FROM t") == [(1, "1970-01-01T00:00:00+00:00")]
    assert refused.row["k"] == 2


@pytest.mark.parametrize("rows", [[{"k": 1}, {"k": 1}], [{"k": 1}, {"k": None}]])
def test_a_row_that_the_table_does_not_take(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = database(tmp_path, "CREATE TABLE t (k INT NOT NULL UNIQUE)")
    with pytest.raises(BadRecordError, match=r"(UNIQUE|NOT NULL) constraint failed: t\.k: \{'k': (1|None)\}"):
        written(SqliteSink(path, "t"), rows)
    assert rows_of(path, "SELECT * FROM t") == []


#: Every way in which a table can refuse a row, with what it does to the statement or to the transaction.
TABLES = {
    "unique": "CREATE TABLE t (k INT UNIQUE, v INT)",
    **{
        f"conflict-{what}": f"CREATE TABLE t (k INT UNIQUE ON CONFLICT {what}, v INT)"
        for what in ("ROLLBACK", "ABORT", "FAIL")
    },
    **{
        f"raise-{what}-{when}": "CREATE TABLE t (k INT, v INT); CREATE TABLE log (k); "
        f"CREATE TRIGGER g {when} INSERT ON t BEGIN INSERT INTO log VALUES (NEW.k); "
        f"SELECT RAISE({what}, 'no') FROM t WHERE k = NEW.k {'AND v <> NEW.v' if when == 'AFTER' else ''}; END"
        for what in ("ROLLBACK", "ABORT", "FAIL")
        for when in ("BEFORE", "AFTER")
    },
    "check-with-an-error": "CREATE TABLE t (k INT UNIQUE, v INT, "
    "CHECK (CASE v WHEN 3 THEN json_extract('{', '$') ELSE 1 END))",
}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=8))
@pytest.mark.parametrize("table", TABLES)
def test_a_refused_row_takes_no_other_with_it(
    tmp_path_factory: pytest.TempPathFactory, table: str, keys: list[int]
) -> None:
    """Whatever the table does to the statement or the transaction when it refuses a row."""
    path = database(tmp_path_factory.mktemp("refused"), TABLES[table])
    sink = SqliteSink(path, "t")
    rows = [{"k": key, "v": number} for number, key in enumerate(keys)]
    errors = {3} if table == "check-with-an-error" and hasattr(sqlite3, "SQLITE_ERROR") else set()
    expected: dict[int, int] = {}
    for number, key in enumerate(keys):
        if number not in errors:
            expected.setdefault(key, number)
    if table == "check-with-an-error" and not errors and len(keys) > 3:
        return  # before Python 3.11, SQLite's errors have no codes: the flow stops
    refused = written(sink, rows, letters=True)
    assert dict(rows_of(path, "SELECT k, v FROM t")) == expected
    assert [letter.row["v"] for letter in refused] == [n for n in range(len(keys)) if n not in expected.values()]
    if table.startswith("raise"):
        logged = sorted(key for (key,) in rows_of(path, "SELECT k FROM log"))
        assert logged == sorted(expected), "a statement that failed has left something behind"
    assert rows_of(path, "SELECT progress FROM onceflow_progress") == [('{"batch": 1}',)]


def test_what_the_table_does_with_rows_is_done(tmp_path: Path) -> None:
    path = database(tmp_path, "CREATE TABLE t (k INT UNIQUE ON CONFLICT REPLACE, v INT)")
    assert written(SqliteSink(path, "t"), [{"k": 1, "v": 1}, {"k": 1, "v": 2}], letters=True) == []
    assert rows_of(path, "SELECT * FROM t") == [(1, 2)]


def test_rows_that_refer_to_others_are_checked_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and the flow stops with an error that says why."""
    path = database(tmp_path, "CREATE TABLE t (k INT PRIMARY KEY, up INT REFERENCES t DEFERRABLE INITIALLY DEFERRED)")
    connect = sqlite3.connect

    def strict(*arguments: Any, **options: Any) -> Any:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    monkeypatch.setattr(sqlite3, "connect", strict)
    with pytest.raises(BadRecordError, match="FOREIGN KEY constraint failed"):
        written(SqliteSink(path, "t"), [{"k": 1, "up": 2}])
    assert rows_of(path, "SELECT * FROM t") == []


@pytest.mark.parametrize(
    "arguments, names, message",
    [
        ({"table": "tt"}, ["k"], "no table 'tt'"),
        ({"table": "t"}, ["k", "x"], "has no columns x"),
        ({"table": "t"}, ["k", "a", "a"], "have several columns a\n.*different names"),
        ({"table": "t"}, ["a"], "Columns k of table t must not be null"),
        ({"table": "t", "mode": "upsert", "key": ["a"]}, ["k", "a"], "primary key, or of a unique index"),
        ({"table": "t", "mode": "upsert", "key": ["q"]}, ["k", "a"], "lack the columns q"),
        ({"table": "t", "mode": "delete-by-flag", "key": ["k"]}, ["k", "a"], "lack the columns deleted"),
        ({"table": "t", "mode": "delete-by-flag", "key": ["k"]}, ["k", "deleted"], "deleted of .* int64, not boolean"),
    ],
)
def test_what_does_not_fit_is_found_at_the_start(
    tmp_path: Path, arguments: dict[str, Any], names: list[str], message: str
) -> None:
    path = database(tmp_path, "CREATE TABLE t (k INT NOT NULL PRIMARY KEY, a INT)")
    with pytest.raises(SchemaError, match=message):
        SqliteSink(path, **arguments).check(pa.schema([(name, pa.int64()) for name in names]))


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("x", pa.int64())]), pa.duration("us")])
def test_types_that_sqlite_has_not(tmp_path: Path, kind: Any) -> None:
    path = database(tmp_path, "CREATE TABLE t (a)")
    with pytest.raises(SchemaError, match="no type for column a"):
        SqliteSink(path, "t").check(pa.schema([("a", kind)]))


def test_arguments() -> None:
    with pytest.raises(OptionError, match="mode='replace' is unknown"):
        SqliteSink("x.db", "t", mode="replace")
    with pytest.raises(OptionError, match="needs key="):
        SqliteSink("x.db", "t", mode="upsert")
    with pytest.raises(OptionError, match="no meaning"):
        SqliteSink("x.db", "t", key=["a"])
    with pytest.raises(EnvironmentUnusableError, match=r"no database .*x\.db"):
        SqliteSink("/nowhere/x.db", "t").open("f", "o", None)


# ---- the service -------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_flow_on_topics_in_memory(onceflow_spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    flow = FlowDriver(lambda flow: ledger(flow, path, "deposits", "failed"), partitions=2)
    flow.send("deposits", "ada", {"amount": "12.50"}, partition=1)
    flow.send_many("deposits", [("bob", {"amount": "-1"}), ("bob", {"amount": "3"})])
    assert rows_of(path, "SELECT account, amount FROM ledger ORDER BY amount") == [("ada", "12.50"), ("bob", "3.00")]
    assert [each.value for each in flow.read("failed")] == [{"amount": "-1"}]
    flow.restart()
    flow.send("deposits", "eve", {"amount": "4"})
    assert rows_of(path, "SELECT count(*) FROM ledger") == [(3,)]


@pytest.mark.integration
def test_a_chain_on_topics_in_memory(onceflow_spark: Any, tmp_path: Path) -> None:
    """First to a topic, from there to the table."""
    path = database(tmp_path, "CREATE TABLE t (account TEXT, cents INTEGER)")
    cents = "CAST(get_json_object(string(value), '$.cents') AS INT)"

    def chained(flow: Any) -> Any:
        rows = flow.read("deposits").where(f"{cents} > 0").select("key", "value")
        return flow.write_chain(
            rows,
            SqliteSink(path, "t"),
            topic="validated",
            rows=lambda records: records.selectExpr("string(key) AS account", f"{cents} AS cents"),
        )

    chain = FlowDriver(chained)
    chain.send_many("deposits", [("ada", {"cents": 5}), ("bob", {"cents": -1})])
    chain.send("deposits", "eve", {"cents": 7})
    assert [each.key for each in chain.read("validated")] == ["ada", "eve"]
    assert rows_of(path, "SELECT * FROM t ORDER BY account") == [("ada", 5), ("eve", 7)]


@pytest.mark.integration
def test_the_service(onceflow_broker: str, onceflow_spark: Any, make_topic: Callable[..., str], tmp_path: Path) -> None:
    """A good deposit, one that the table refuses, and one that is no JSON."""
    import ledger_file

    import onceflow
    from onceflow.testing import independent

    source, failed = make_topic("deposits", 2), make_topic("failed", 1)
    values = [b'{"amount": "12.50"}', b'{"amount": "-3.00"}', b"no JSON"]
    independent.fill(onceflow_broker, source, [(b"ada", value) for value in values])
    flow = onceflow.Flow(f"flow-{source}", onceflow_spark, bootstrap_servers=onceflow_broker)
    writer = ledger_file.ledger(flow, tmp_path / "ledger.db", source, failed, once=True)
    writer.start().awaitTermination(60)
    assert rows_of(tmp_path / "ledger.db", "SELECT account, amount FROM ledger") == [("ada", "12.50")]
    letters = independent.read_topic(onceflow_broker, failed, decided=True)
    assert sorted(letter.value or b"" for letter in letters) == sorted(values[1:])


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE t",
        "ALTER TABLE t RENAME TO other",
        "ALTER TABLE t RENAME COLUMN a TO other",
        "DROP INDEX keys",
        "CREATE TRIGGER broken AFTER INSERT ON t BEGIN INSERT INTO audit VALUES (new.a); END",
    ],
)
def test_a_table_that_was_altered_is_no_fault_of_its_rows(tmp_path: Path, change: str) -> None:
    """While the flow runs. No row becomes a dead letter, and the batch is not committed."""
    path = database(tmp_path, "CREATE TABLE t (a TEXT); CREATE UNIQUE INDEX keys ON t (a)")
    sink = SqliteSink(path, "t", mode="upsert", key=["a"])
    assert written(sink, [{"a": "x"}], letters=True) == []
    generation = sink.open("f", "o", None).generation
    attempt = BatchAttempt("f", "o", generation, 2, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist([{"a": "y"}, {"a": "z"}])]))
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(change)
    with pytest.raises(SchemaError, match="Rows cannot be written to table t"):
        sink.commit_accepted(attempt, [receipt], lambda refused: pytest.fail("rows were put aside"))
    assert sink.progress_row("f") == ProgressRow(generation, "o", '{"batch": 1}')


def test_bytes_that_are_no_text_are_a_fault_of_their_row(tmp_path: Path) -> None:
    """Spark's ``string(value)`` keeps them."""
    path = database(tmp_path, "CREATE TABLE t (a TEXT PRIMARY KEY)")
    text = pa.array([b"x", b"y\xff", b"z"]).view(pa.string())
    sink = SqliteSink(path, "t", mode="upsert", key=["a"])
    sink.set_aside()
    attempt = BatchAttempt("f", "me", sink.open("f", "me", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_arrays([text], ["a"])]))
    found: list[str] = []

    def progress(refused: Sequence[RefusedRow]) -> str:
        found.extend(each.kind for each in refused)
        return "{}"

    sink.commit_accepted(attempt, [receipt], progress)
    assert found == ["UnicodeDecodeError"]
    assert rows_of(path, "SELECT * FROM t") == [("x",), ("z",)]

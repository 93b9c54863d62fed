"""The sinks that come with onceflow, against the contract of all sinks, and what a start decides."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow import (
    BadRecordError,
    EnvironmentUnusableError,
    OptionError,
    ProgressConflictError,
    SchemaError,
    SqliteSink,
)
from onceflow.external.sink import BatchAttempt, RefusedRow
from onceflow.planning.external_start import plan_external
from onceflow.protocol.progress import Progress
from onceflow.testing.external_sink_suite import ExternalSinkSuite, Writer


def database(folder: Path, script: str) -> Path:
    path = folder / "test.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def rows_of(path: Path, select: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(select).fetchall()


class TestSqlite(ExternalSinkSuite):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> SqliteSink:
        return SqliteSink(database(tmp_path, "CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)"), "ledger")

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return [{"id": number, "text": text} for number, text in rows_of(sink.path, "SELECT id, text FROM ledger")]


class NeverFences(SqliteSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        ((last,),) = rows_of(self.path, "SELECT generation FROM onceflow_progress")
        receipts = [each for each in receipts if (self._staging(attempt.flow) / each.decode()).exists()]
        super().commit(replace(attempt, generation=last), receipts, progress)


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
        pytest.param(TwoTransactions, "test_processes_are_killed_at_any_moment", marks=pytest.mark.faults),
        (ShowsRowsAtOnce, "test_rows_are_seen_with_the_progress_and_not_before"),
    ],
)
def test_a_wrong_sink_is_caught(tmp_path: Path, mutant: Any, test: str) -> None:
    suite = TestSqlite()
    sink = mutant(database(tmp_path, "CREATE TABLE ledger (id INTEGER PRIMARY KEY, text TEXT)"), "ledger")
    with pytest.raises((AssertionError, pytest.fail.Exception, BadRecordError, ProgressConflictError)):
        getattr(suite, test)(sink)


def written(sink: SqliteSink, rows: list[dict[str, Any]], batch: int = 1, schema: pa.Schema | None = None) -> None:
    attempt = BatchAttempt("f", sink.open("f", None).generation, batch, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema=schema)]))
    sink.commit(attempt, [receipt], "{}")


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
    with pytest.raises(ProgressConflictError, match="has generation 1, the last one there is 0"):
        writer.open(attempt.generation)


def test_modes(tmp_path: Path) -> None:
    path = database(tmp_path, "CREATE TABLE t (k TEXT PRIMARY KEY, a INT, b INT DEFAULT 7) WITHOUT ROWID")
    upsert = SqliteSink(path, "t", mode="upsert", key=["k"])
    written(upsert, [{"k": "x", "a": 1}, {"k": "y", "a": 2}, {"k": "x", "a": 3}])
    assert rows_of(path, "SELECT * FROM t ORDER BY k") == [("x", 3, 7), ("y", 2, 7)]
    by_flag = SqliteSink(path, "t", mode="delete-by-flag", key=["k"])
    written(by_flag, [{"k": "x", "a": None, "deleted": True}, {"k": "z", "a": 9, "deleted": None}], batch=2)
    assert rows_of(path, "SELECT * FROM t ORDER BY k") == [("y", 2, 7), ("z", 9, 7)]


def test_bytes_that_are_no_text_are_a_row_s_fault(tmp_path: Path) -> None:
    """Spark's ``string(value)`` keeps them."""
    path = database(tmp_path, "CREATE TABLE t (a TEXT, b TEXT)")
    text = pa.array([b"x", b"y\xff", b"z"]).view(pa.string())
    batch = pa.RecordBatch.from_arrays([text, pa.ListArray.from_arrays([0, 1, 2, 3], text)], ["a", "b"])
    sink = SqliteSink(path, "t")
    sink.set_aside()
    attempt = BatchAttempt("f", sink.open("f", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([batch]))
    found: list[RefusedRow] = []

    def progress(refused: Sequence[RefusedRow]) -> str:
        found.extend(refused)
        return "{}"

    sink.commit_accepted(attempt, [receipt], progress)
    assert [(each.kind, each.row) for each in found] == [("UnicodeDecodeError", {"a": "y\ufffd", "b": "y\ufffd"})]
    assert rows_of(path, "SELECT * FROM t") == [("x", '["x"]'), ("z", '["z"]')]
    with pytest.raises(BadRecordError, match="can't decode byte 0xff"):
        sink.commit(attempt, [sink.write(attempt, "1", iter([batch]))], "{}")


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
    attempt = BatchAttempt("f", sink.open("f", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema=schema)]))
    found: list[tuple[str, str]] = []

    def progress(refused: Sequence[RefusedRow]) -> str:
        found.extend((each.kind, each.message) for each in refused)
        return "{}"

    sink.commit_accepted(attempt, [receipt], progress)
    assert found == [("NotNullViolation", "column b of the key is null, so no row has this key")] * 2
    assert rows_of(path, "SELECT * FROM t ORDER BY b") == [("x", None), ("x", "y")]


def test_types(tmp_path: Path) -> None:
    path = database(tmp_path, "CREATE TABLE t (a, b, c, d, e, f, g)")
    noon = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
    row = {"a": True, "b": Decimal("1.50"), "c": noon, "d": date(2026, 1, 2), "e": [1, 2], "f": {"x": "y"}, "g": b"\0"}
    written(SqliteSink(path, "t"), [row])
    assert rows_of(path, "SELECT * FROM t") == [
        (1, "1.50", "2026-01-02T12:00:00+00:00", "2026-01-02", "[1, 2]", '{"x": "y"}', b"\0")
    ]


@pytest.mark.parametrize("rows", [[{"k": 1}, {"k": 1}], [{"k": 1}, {"k": None}]])
def test_a_row_that_the_table_does_not_take(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = database(tmp_path, "CREATE TABLE t (k INT NOT NULL UNIQUE)")
    with pytest.raises(BadRecordError, match=r"(UNIQUE|NOT NULL) constraint failed: t\.k: \{'k': (1|None)\}"):
        written(SqliteSink(path, "t"), rows)
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


def test_arguments() -> None:
    with pytest.raises(OptionError, match="mode='replace' is unknown"):
        SqliteSink("x.db", "t", mode="replace")
    with pytest.raises(OptionError, match="needs key="):
        SqliteSink("x.db", "t", mode="upsert")
    with pytest.raises(OptionError, match="no meaning"):
        SqliteSink("x.db", "t", key=["a"])
    with pytest.raises(EnvironmentUnusableError, match=r"no database .*x\.db"):
        SqliteSink("/nowhere/x.db", "t").open("f", None)


def progress(batch: int, **offsets: int) -> Progress:
    ids = {topic: f"id-{topic}" for topic in offsets}
    return Progress("f", batch, {topic: {0: offset} for topic, offset in offsets.items()}, ids, 1)


def planned(kafka: Progress, row: Progress | None) -> Any:
    return plan_external(kafka, row, ["a", "b"], target="t", flow="f")


def test_where_a_flow_with_an_external_sink_starts() -> None:
    assert planned(progress(0, a=5), None).progress.offsets == {"a": {0: 5}}
    with pytest.raises(ProgressConflictError, match="committed 3 batches, but t has no progress row"):
        planned(progress(3, a=5), None)
    # The last driver died before Kafka's progress had followed.
    start = planned(progress(2, a=5, b=1), progress(3, a=9))
    assert (start.progress, start.follows, start.warning) == (progress(3, a=9, b=1), True, "")
    # Starts have moved Kafka's progress: expired records were skipped, or the flow was reset.
    start = planned(progress(3, a=12, b=0), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=12, b=0), False)
    # An older state of the database was restored.
    start = planned(progress(5, a=20), progress(3, a=9))
    assert (start.progress, start.follows) == (progress(3, a=9), True)
    assert "an older state of t was restored" in start.warning

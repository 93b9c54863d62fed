"""``DeltaSink``: the contract of all sinks, other writers of the table, and what does not fit."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Field, QueryBuilder, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import ArrayType, MapType, PrimitiveType, StructType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import dataset

from onceflow import (
    BadRecordError,
    BatchAbortedError,
    DeltaSink,
    EnvironmentUnusableError,
    FencedError,
    ProgressConflictError,
    SchemaError,
)
from onceflow.errors import ProtocolError
from onceflow.external import delta_log
from onceflow.external.sink import BatchAttempt, RefusedRow
from onceflow.testing.external_sink_suite import FLOW, SCHEMA, ExternalSinkSuite, Writer

pytestmark = pytest.mark.slow  # Delta's engine takes seconds

sys.path.insert(0, str(Path(__file__).parent))
try:
    from delta_tables import kept, rows_of
finally:
    sys.path.pop(0)

LONG, TEXT = PrimitiveType("long"), PrimitiveType("string")


class TestDelta(ExternalSinkSuite):
    rounds = 6

    @pytest.fixture
    def sink(self, tmp_path: Path) -> DeltaSink:
        sink = DeltaSink(tmp_path / "table")
        sink.check(SCHEMA)
        return sink

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return rows_of(sink.root)

    def backup(self, sink: Any) -> Callable[[], Any]:
        saved = shutil.copytree(sink.root, f"{sink.root}-saved")

        def restore() -> None:
            shutil.rmtree(sink.root)
            shutil.copytree(saved, sink.root)

        return restore


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    sink = DeltaSink(tmp_path / "table")
    sink.check(SCHEMA)
    return sink


# ---- commits and takeovers ---------------------------------------------------------------------------


def test_a_commit_that_was_prepared_before_a_takeover_is_refused(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older driver has checked everything, and stops; only Delta itself can refuse its commit then."""
    old = Writer(sink).open()
    attempt, receipts = old.staged()
    add, new = DeltaSink._add, Writer(sink)

    def late(self: Any, *arguments: Any) -> None:
        monkeypatch.undo()
        new.open()
        add(self, *arguments)

    monkeypatch.setattr(DeltaSink, "_add", late)
    with pytest.raises(FencedError):
        old.commit(attempt, receipts)
    assert (new.batch, rows_of(sink.root)) == (0, [])
    new.commit(*new.staged())
    assert len(rows_of(sink.root)) == 40


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("takeovers", [0, 2])
def test_the_storage_fails(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, applied: bool, takeovers: int) -> None:
    """At the commit, and at the takeovers that find out how it has ended: before or after it was done."""
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    add = DeltaSink._add

    def fails(self: Any, *arguments: Any) -> None:
        if applied:
            add(self, *arguments)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DeltaSink, "_add", fails)
    with pytest.raises(OSError, match="Input/output"):
        writer.sink.commit(attempt, receipts, json.dumps({"batch": 1}))
    for _ in range(takeovers):
        with pytest.raises(OSError, match="Input/output"):
            writer.open(attempt.generation)
    monkeypatch.undo()
    writer.open(attempt.generation)
    assert writer.batch == int(applied)
    assert len(rows_of(sink.root)) == 40 * applied
    writer.commit(*writer.staged())
    assert len(rows_of(sink.root)) == 40 * applied + 40


def test_the_store_has_created_a_commit_and_its_answer_was_lost(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake tries again by itself, and reports that its own commit is in its way."""
    add = DeltaSink._add

    def twice(self: Any, *arguments: Any) -> None:
        add(self, *arguments)
        raise CommitFailedError("Concurrent transaction failed")

    monkeypatch.setattr(DeltaSink, "_add", twice)
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 2
    assert len(rows_of(sink.root)) == 80


def test_two_drivers_with_the_same_generation(sink: DeltaSink, tmp_path: Path) -> None:
    """The table is put back to before the first one: the second one gets its generation, but not its attempts."""
    DeltaTable.create(sink.root, SCHEMA)
    shutil.copytree(sink.root, tmp_path / "backup")
    old = Writer(sink).open()
    attempt, receipts = old.staged()
    shutil.rmtree(sink.root)
    shutil.copytree(tmp_path / "backup", sink.root)
    new = Writer(sink).open()
    assert new.generation == old.generation
    other, _ = new.staged()
    assert str(other) != str(attempt)
    with pytest.raises(FencedError):
        old.commit(attempt, receipts)
    assert rows_of(sink.root) == []


def test_other_applications_write_the_table(sink: DeltaSink) -> None:
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    write_deltalake(sink.root, pa.table({"id": [1], "text": ["other"]}, SCHEMA), mode="append")
    writer.commit(attempt, receipts)
    write_deltalake(sink.root, pa.table({"id": [2], "text": ["other"]}, SCHEMA), mode="append")
    DeltaTable(sink.root).optimize.compact()
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 2
    assert len(rows_of(sink.root)) == 82


def test_the_table_alone_is_restored(sink: DeltaSink) -> None:
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    last = sorted(Path(sink.root, "_delta_log").glob("*.json"))[-1]
    last.unlink()
    with pytest.raises(ProgressConflictError, match="gone back to an older state"):
        writer.commit(*writer.staged())
    again = Writer(sink).open()
    assert again.batch == 0
    again.commit(*again.staged())
    assert len(rows_of(sink.root)) == 40


def test_old_entries_are_removed(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_log, "KEPT", 5)
    monkeypatch.setattr(delta_log, "_PRUNE_EVERY", 4)
    writer = Writer(sink).open()
    for _ in range(12):
        writer.commit(*writer.staged(of_tasks=1))
    entries = list(Path(sink.root, "_onceflow").glob("*/*.json"))
    assert len(entries) <= 5 + 4
    last = max(entries, key=lambda path: path.name)
    assert Writer(sink).open().batch == 12
    content = last.read_bytes()
    last.unlink()
    for log in sorted(Path(sink.root, "_delta_log").glob("*.json"))[-1:]:
        log.unlink()
    with pytest.raises(ProtocolError, match="the table has committed it, but it is missing"):
        Writer(sink).open()
    last.write_bytes(content)
    assert Writer(sink).open().batch == 12


# ---- transaction identifiers that are gone -----------------------------------------------------------


def without_identifiers(root: str, *, logs: bool = False) -> None:
    """What a writer does that removes them, and old logs (``logs``): the next checkpoint has none."""
    write_deltalake(root, pa.table({"id": [-1], "text": ["other"]}, SCHEMA), mode="append")
    table = DeltaTable(root)
    table.create_checkpoint()
    log = Path(root, "_delta_log")
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    import pyarrow.parquet as pq

    rows = pq.read_table(checkpoint)
    kept = pa.Table.from_pylist([row for row in rows.to_pylist() if row["txn"] is None], rows.schema)
    pq.write_table(kept, checkpoint)
    (log / "_last_checkpoint").unlink(missing_ok=True)
    if logs:
        for path in log.glob("*.json"):
            if path.stem.isdigit() and int(path.stem) < table.version():
                path.unlink()


def test_an_identifier_outlives_the_retention_of_the_table(tmp_path: Path) -> None:
    """Its time is so late that no retention of the table removes it."""
    root = str(tmp_path)
    DeltaTable.create(root, SCHEMA, configuration={"delta.setTransactionRetentionDuration": "interval 0 seconds"})
    sink = DeltaSink(root)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    table = DeltaTable(root)
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=CommitProperties(app_transactions=[Transaction("other", 1, 1)]),
    )
    DeltaTable(root).create_checkpoint()
    assert DeltaTable(root).transaction_version("other") is None, "the property has no effect"
    assert DeltaTable(root).transaction_version(FLOW) is not None
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 2


@pytest.mark.parametrize("logs", [False, True])
def test_another_writer_removes_the_identifier(sink: DeltaSink, caplog: pytest.LogCaptureFixture, logs: bool) -> None:
    """The commits say what was committed; without them, the files of the last batch do."""
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    writer.commit(*writer.staged())
    without_identifiers(sink.root, logs=logs)
    assert DeltaTable(sink.root).transaction_version(FLOW) is None
    found = DeltaSink(sink.root).progress_row(FLOW)
    assert found is not None
    assert found.progress == json.dumps({"batch": 2})
    assert "has lost its transaction identifier" in caplog.text
    writer.commit(*writer.staged())  # while it runs
    assert DeltaTable(sink.root).transaction_version(FLOW) is not None
    again = Writer(sink).open()
    assert again.batch == 3
    assert len(rows_of(sink.root)) == 121


@pytest.mark.parametrize("applied", [True, False])
def test_the_identifier_is_removed_after_a_commit_whose_answer_was_lost(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    attempt, receipts = writer.staged()
    add = DeltaSink._add

    def fails(self: Any, *arguments: Any) -> None:
        if applied:
            add(self, *arguments)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaSink, "_add", fails)
        with pytest.raises(OSError, match="Input/output"):
            writer.sink.commit(attempt, receipts, json.dumps({"batch": 2}))
    without_identifiers(sink.root)
    assert Writer(sink).open().batch == 1 + applied


def test_nothing_tells_whether_a_batch_was_committed(sink: DeltaSink) -> None:
    """Identifier and commits are gone, and its files were compacted. The flow must not begin again."""
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    DeltaTable(sink.root).optimize.compact()
    without_identifiers(sink.root, logs=True)
    with pytest.raises(ProgressConflictError, match="does not tell any more whether it has batch 1") as refused:
        Writer(sink).open()
    # What the error and docs/external.md say: the rows are there, so the identifier is committed again.
    version = int(str(refused.value).partition("identifier with version ")[2].split()[0])
    table = DeltaTable(sink.root)
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=CommitProperties(app_transactions=[Transaction(FLOW, version, 253_402_300_799_000)]),
    )
    assert Writer(sink).open().batch == 1


def test_nothing_tells_whether_a_batch_was_committed_that_was_not(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are not there, so the entry is removed, as the error says."""
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    attempt, receipts = writer.staged()
    with monkeypatch.context() as patch:
        fails_at(patch, applied=False, kind=OSError)
        with pytest.raises(OSError, match="failed"):
            writer.commit(attempt, receipts)
    write_deltalake(sink.root, pa.table({"id": [-2], "text": ["other"]}, SCHEMA), mode="append")
    without_identifiers(sink.root, logs=True)
    with pytest.raises(ProgressConflictError, match="does not tell any more whether it has batch 2") as refused:
        Writer(sink).open()
    Path(sink.root, str(refused.value).partition("remove the file ")[2].partition(";")[0]).unlink()
    again = Writer(sink).open()
    assert again.batch == 1
    again.commit(*again.staged())
    assert len([row for row in rows_of(sink.root) if row["id"] >= 0]) == 80


def test_a_table_that_was_created_again_has_no_progress(sink: DeltaSink) -> None:
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    shutil.rmtree(Path(sink.root, "_delta_log"))
    DeltaTable.create(sink.root, SCHEMA)
    assert sink.progress_row(FLOW) is None
    assert Writer(sink).open().batch == 0


STEPS = [
    "start",
    "commit",
    "commit",
    "commit",
    "staged",
    "zombie",
    "lost",
    "refused",
    "other",
    "compact",
    "expire",
    "forget",
]


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=14), applied=st.booleans())
def test_any_order_of_faults(tmp_path_factory: pytest.TempPathFactory, steps: list[str], applied: bool) -> None:
    """Whatever happens: each batch up to that in the progress row is in the table, once, and of one attempt."""
    sink = DeltaSink(tmp_path_factory.mktemp("table"))
    sink.check(SCHEMA)
    writer, batch = Writer(sink).open(), 0
    zombies: list[tuple[Writer, BatchAttempt, list[bytes]]] = []
    for step in steps:
        if step == "start":
            zombies.append((writer, *writer.staged()))
            writer = Writer(sink).open()
        elif step == "commit":
            writer.commit(*writer.staged())
            batch += 1
        elif step == "staged":
            writer.staged()
        elif step == "zombie" and zombies:
            old, attempt, receipts = zombies.pop()
            with pytest.raises(FencedError):
                old.commit(attempt, receipts)
            with pytest.raises(FencedError):
                old.open(attempt.generation)
        elif step in ("lost", "refused"):
            attempt, receipts = writer.staged()
            with pytest.MonkeyPatch.context() as patch:
                fails_at(patch, applied=applied, kind=OSError if step == "lost" else CommitFailedError)
                try:
                    writer.commit(attempt, receipts)
                except (OSError, BatchAbortedError):
                    pass
            writer.open(attempt.generation)
            batch += applied
        elif step == "other":
            write_deltalake(sink.root, pa.table({"id": [-1], "text": ["other"]}, SCHEMA), mode="append")
        elif step == "compact":
            DeltaTable(sink.root).optimize.compact()
        elif step == "expire":
            without_identifiers(sink.root)
        elif step == "forget":
            sink = DeltaSink(sink.root)  # a driver on another machine
        assert writer.batch == batch
    found = sink.progress_row(FLOW)
    assert found is not None
    assert json.loads(found.progress or '{"batch": 0}') == {"batch": batch}
    rows = [row for row in rows_of(sink.root) if row["id"] >= 0]
    assert sorted(row["id"] for row in rows) == list(range(40, 40 * (batch + 1)))
    assert len({(row["id"] // 40, row["text"]) for row in rows}) == batch


def fails_at(patch: pytest.MonkeyPatch, *, applied: bool, kind: type[Exception]) -> None:
    """The next commits fail, before or after they were done."""
    add = DeltaSink._add

    def fails(self: Any, *arguments: Any) -> None:
        if applied:
            add(self, *arguments)
        raise kind("failed")

    patch.setattr(DeltaSink, "_add", fails)


# ---- rows that the table does not take ---------------------------------------------------------------


def written(
    root: Any, rows: list[dict[str, Any]], schema: pa.Schema, *, sets_aside: bool = False
) -> tuple[list[RefusedRow], list[dict[str, Any]]]:
    """Write rows as one batch. Returns those that were refused, and what is in the table."""
    sink = DeltaSink(root)
    if sets_aside:
        sink.set_aside()
    sink.check(schema)
    opened = sink.open("f", "o", None)
    attempt = BatchAttempt("f", "o", opened.generation, opened.generation, 1)
    sink.begin(attempt)
    half = (len(rows) + 1) // 2
    halves = [pa.RecordBatch.from_pylist(part, schema) for part in (rows[:half], rows[half:])]
    receipt = sink.write(attempt, "0", iter(halves))
    refused: list[RefusedRow] = []
    if sets_aside:
        sink.commit_accepted(attempt, [receipt], kept(refused))
    else:
        sink.commit(attempt, [receipt], "{}")
    return refused, rows_of(root)


STRUCT = StructType([Field("a", TEXT, nullable=False)])
NOT_NULL: dict[str, tuple[list[Field], pa.DataType, list[Any], list[Any]]] = {
    "plain": ([Field("v", TEXT, nullable=False)], pa.string(), ["x", ""], [None]),
    "struct": ([Field("v", STRUCT)], pa.struct([("a", pa.string())]), [{"a": "x"}, None], [{"a": None}]),
    "struct itself": (
        [Field("v", STRUCT, nullable=False)],
        pa.struct([("a", pa.string())]),
        [{"a": "x"}],
        [{"a": None}, None],
    ),
    "array": (
        [Field("v", ArrayType(TEXT, contains_null=False))],
        pa.list_(pa.string()),
        [["x"], [], None],
        [[None], ["x", None]],
    ),
    "map": (
        [Field("v", MapType(TEXT, TEXT, value_contains_null=False))],
        pa.map_(pa.string(), pa.string()),
        [[("a", "b")], [], None],
        [[("a", None)], [("a", "b"), ("c", None)]],
    ),
    "struct in array in map": (
        [Field("v", MapType(TEXT, ArrayType(STRUCT, contains_null=True)))],
        pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.string())]))),
        [[("k", [{"a": "x"}, None])], [("k", None)]],
        [[("k", [{"a": "x"}, {"a": None}])]],
    ),
}


@pytest.mark.parametrize("sets_aside", [False, True])
@pytest.mark.parametrize("kind", NOT_NULL)
def test_nulls_where_there_must_be_none(tmp_path: Path, kind: str, sets_aside: bool) -> None:
    fields, arrow, good, bad = NOT_NULL[kind]
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    DeltaTable.create(tmp_path, Schema([Field("id", LONG), *fields]))
    rows = [{"id": number, "v": value} for number, value in enumerate([*good, *bad, *good, *bad, *good])]
    if not sets_aside:
        with pytest.raises(BadRecordError, match=r"must not be null: \{'id'"):
            written(tmp_path, rows, schema)
        assert rows_of(tmp_path) == []
        return
    refused, there = written(tmp_path, rows, schema, sets_aside=True)
    assert [row.row for row in refused] == [row for row in rows if row["v"] in bad]
    assert {row.kind for row in refused} == {"NotNullViolation"}
    assert sorted(there, key=lambda row: row["id"]) == [row for row in rows if row["v"] in good]


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any, Callable[[], tuple[Any, bool]]]:
    """A type of Delta and of Arrow, and a function that draws a value, and whether it is allowed."""
    kinds = ["text", "struct", "array", "map"] if depth else ["text"]
    kind = draw(st.sampled_from(kinds))
    if kind == "text":
        return TEXT, pa.string(), lambda: (draw(st.sampled_from(["", "x"])), True)
    inner, arrow, value = draw(typed_values(depth - 1))
    nullable = draw(st.booleans())

    def child() -> tuple[Any, bool]:
        if draw(st.integers(0, 3)) == 0:
            return None, nullable
        return value()

    def several(make: Callable[[int, Any], Any]) -> Callable[[], tuple[Any, bool]]:
        def drawn() -> tuple[Any, bool]:
            found = [child() for _ in range(draw(st.integers(0, 2)))]
            return [make(n, each) for n, (each, _) in enumerate(found)], all(fits for _, fits in found)

        return drawn

    if kind == "array":
        return ArrayType(inner, contains_null=nullable), pa.list_(arrow), several(lambda _, each: each)
    if kind == "map":
        made = MapType(TEXT, inner, value_contains_null=nullable)
        return made, pa.map_(pa.string(), arrow), several(lambda n, each: (str(n), each))

    def struct() -> tuple[Any, bool]:
        each, fits = child()
        return {"a": each}, fits

    return StructType([Field("a", inner, nullable=nullable)]), pa.struct([("a", arrow)]), struct


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nulls_in_any_type(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    delta, arrow, value = data.draw(typed_values())
    nullable = data.draw(st.booleans())
    root = tmp_path_factory.mktemp("table")
    DeltaTable.create(root, Schema([Field("id", LONG), Field("v", delta, nullable=nullable)]))
    rows: list[dict[str, Any]] = []
    fit: list[int] = []
    for number in range(6):
        found, fits = (None, nullable) if data.draw(st.integers(0, 4)) == 0 else value()
        rows.append({"id": number, "v": found})
        fit += [number] if fits else []
    refused, there = written(root, rows, pa.schema([("id", pa.int64()), ("v", arrow)]), sets_aside=True)
    assert [row.row["id"] for row in refused] == [n for n in range(6) if n not in fit]
    assert sorted(there, key=lambda row: row["id"]) == [rows[n] for n in fit]


CONSTRAINTS: dict[str, Any] = {
    "check": ([Field("id", LONG), Field("n", LONG)], {"positive": "n > 0"}),
    "two checks": ([Field("id", LONG), Field("n", LONG)], {"positive": "n > 0", "small": "n < 1000000"}),
    "invariant": (
        [
            Field("id", LONG),
            Field("n", LONG, metadata={"delta.invariants": json.dumps({"expression": {"expression": "n > 0"}})}),
        ],
        {},
    ),
    "generated": (
        [Field("id", LONG), Field("n", LONG, metadata={"delta.generationExpression": "abs(id)"})],
        {},
    ),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_expressions_of_the_table(tmp_path: Path, kind: str) -> None:
    fields, constraints = CONSTRAINTS[kind]
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    table = DeltaTable.create(tmp_path, Schema(fields))
    if constraints:
        table.alter.add_constraint(constraints)
    rows = [{"id": n, "n": n} for n in range(1, 40)]
    for number, wrong in ((3, -3), (17, None), (18, -1), (38, -38)):
        rows[number]["n"] = wrong  # type: ignore[assignment]
    with pytest.raises(BadRecordError, match=r"not all of this holds: .*: \{'id': 4, 'n': -3\}"):
        written(tmp_path, rows, schema)
    refused, there = written(tmp_path, rows, schema, sets_aside=True)
    assert [row.row for row in refused] == [rows[n] for n in (3, 17, 18, 38)]
    assert {row.kind for row in refused} == {"CheckViolation"}
    assert sorted(there, key=lambda row: row["id"]) == [row for n, row in enumerate(rows) if n not in (3, 17, 18, 38)]


def test_no_row_is_to_blame_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """delta-rs tells it in the text of its own errors."""
    DeltaTable.create(tmp_path, Schema([Field("id", LONG)])).alter.add_constraint({"positive": "id > 0"})

    def full(self: Any, rows: pa.Table) -> None:
        if rows.num_rows:
            raise DeltaError("Generic LocalFileSystem error: Unable to write: No space left on device (os error 28)")

    monkeypatch.setattr("onceflow.external.delta_rows.RowChecks._write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, [{"id": 1}, {"id": 2}], pa.schema([("id", pa.int64())]), sets_aside=True)


def test_expressions_are_known_at_the_start(tmp_path: Path) -> None:
    generated = Field("n", LONG, metadata={"delta.generationExpression": "abs(id)"})
    DeltaTable.create(tmp_path / "generated", Schema([Field("id", LONG), generated]))
    with pytest.raises(SchemaError, match=r"select it: abs\(id\) AS n"):
        DeltaSink(tmp_path / "generated").check(pa.schema([("id", pa.int64())]))
    DeltaTable.create(tmp_path / "unknown", Schema([Field("id", LONG)]))
    log = tmp_path / "unknown" / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"]["delta.constraints.odd"] = "only_spark_knows(id) > 0"
        if "protocol" in action:
            action["protocol"]["minWriterVersion"] = 3
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(SchemaError, match="delta-rs cannot check the constraints"):
        DeltaSink(tmp_path / "unknown").check(pa.schema([("id", pa.int64())]))


def test_the_table_is_changed_while_a_batch_is_written(sink: DeltaSink) -> None:
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    DeltaTable(sink.root).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(BatchAbortedError, match="changed by others"):
        writer.commit(attempt, receipts)
    writer.commit(*writer.staged())
    assert len(rows_of(sink.root)) == 40


def test_another_table_is_there_than_at_the_start(tmp_path: Path) -> None:
    """Its columns are checked again: none of the rows' columns is left out, and none of the table's is null."""
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    DeltaTable.create(tmp_path, pa.schema([("id", pa.int64())]))
    writer = Writer(sink).open()
    with pytest.raises(SchemaError, match="Column text does not fit the table"):
        writer.staged()
    assert rows_of(tmp_path) == []


def test_a_partition_column_is_not_written(tmp_path: Path) -> None:
    """A column that may be null can be left out, also one by which files are divided."""
    partitioned(tmp_path, "string")
    _, there = written(tmp_path, [{"id": 1}], pa.schema([("id", pa.int64())]))
    assert there == [{"id": 1, "p": None}]


@pytest.mark.parametrize("kind", ["varchar(3)", "char(3)"])
@pytest.mark.parametrize("partition_by", [None, ["v"]])
def test_strings_whose_length_is_limited(tmp_path: Path, kind: str, partition_by: list[str] | None) -> None:
    """Spark keeps the length in the metadata of a column. It counts characters, and not bytes."""
    sized = Field("v", TEXT, metadata={"__CHAR_VARCHAR_TYPE_STRING": kind})
    DeltaTable.create(tmp_path, Schema([Field("id", LONG), sized]), partition_by=partition_by)
    values = ["abc", "abcd", None, "äöü", "äöüß", "abc ", "a"]
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    rows = [{"id": n, "v": value} for n, value in enumerate(values)]
    with pytest.raises(BadRecordError, match=re.escape(f"v is {kind}, and has 4 characters")):
        written(tmp_path, rows, schema)
    found, there = written(tmp_path, rows, schema, sets_aside=True)
    assert found[0] == RefusedRow({"id": 1, "v": "abcd"}, "CheckViolation", f"v is {kind}, and has 4 characters")
    assert [each.row["id"] for each in found] == [1, 4, 5]
    assert sorted(each["id"] for each in there) == [0, 2, 3, 6]


@pytest.mark.parametrize("place", ["column", "field"])
def test_strings_within_values_whose_length_is_limited(tmp_path: Path, place: str) -> None:
    metadata = {"__CHAR_VARCHAR_TYPE_STRING": "array<varchar(3)>" if place == "column" else "varchar(3)"}
    column = Field("v", ArrayType(TEXT), metadata=metadata)
    if place == "field":
        column = Field("v", StructType([Field("a", TEXT, metadata=metadata)]))
    DeltaTable.create(tmp_path, Schema([Field("id", LONG), column]))
    with pytest.raises(SchemaError, match="a length of strings within column v"):
        DeltaSink(tmp_path).check(pa.schema([("id", pa.int64())]))


def test_files_tell_spark_their_calendar(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    writer.commit(*writer.staged(of_tasks=1))
    (path,) = tmp_path.rglob("*.parquet")
    assert pq.read_metadata(path).metadata[b"org.apache.spark.version"] == b"3.0.0"


def test_texts_that_are_none(tmp_path: Path) -> None:
    """Spark passes on bytes of a record as a string. A file with them could not be read any more, with all its rows."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("more", pa.list_(pa.string()))])
    sink = DeltaSink(tmp_path)
    sink.set_aside()
    sink.check(schema)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    wrong = pa.array([b"x", b"\xff\x00", b"\xc3\xa4", None]).view(pa.string())
    nested = pa.ListArray.from_arrays(
        pa.array([0, 1, 1, 1, 2], pa.int32()), pa.array([b"y", b"\xc3"]).view(pa.string())
    )
    batch = pa.RecordBatch.from_arrays([pa.array(range(4)), wrong, nested], schema=schema)
    receipt = sink.write(attempt, "0", iter([batch]))
    refused: list[RefusedRow] = []
    sink.commit_accepted(attempt, [receipt], kept(refused))
    assert [(row.row["id"], row.row["text"], row.kind) for row in refused] == [
        (1, b"\xff\x00", "InvalidText"),
        (3, None, "InvalidText"),
    ]
    assert [row["text"] for row in rows_of(tmp_path)] == ["x", "ä"]


# ---- partitions --------------------------------------------------------------------------------------


def partitioned(root: Path, kind: str, nullable: bool = True) -> None:
    fields = [Field("id", LONG), Field("p", PrimitiveType(kind), nullable=nullable)]
    DeltaTable.create(root, Schema(fields), partition_by=["p"])


TEXTS = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.sampled_from(
        ["", " ", "a/b", "a=b", "%41", "null", "__HIVE_DEFAULT_PARTITION__", "A", "a", "é", "é", "x" * 300]
    ),
)
PARTITIONS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "string": (pa.string(), TEXTS),
    "integer": (pa.int32(), st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1))),
    "long": (pa.int64(), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
    "boolean": (pa.bool_(), st.one_of(st.none(), st.booleans())),
    "date": (pa.date32(), st.one_of(st.none(), st.dates())),
}


@pytest.mark.parametrize("kind", PARTITIONS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_partition_values_are_read_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """Those that would be read as other ones are refused, whether or not the column may be null."""
    arrow, values = PARTITIONS[kind]
    root, nullable = tmp_path_factory.mktemp("table"), data.draw(st.booleans())
    partitioned(root, kind, nullable)
    drawn = data.draw(st.lists(values, min_size=1, max_size=6))
    rows = [{"id": number, "p": value} for number, value in enumerate(drawn)]
    refused, there = written(root, rows, pa.schema([("id", pa.int64()), ("p", arrow)]), sets_aside=True)
    lost = ("", "__HIVE_DEFAULT_PARTITION__", *(() if nullable else (None,)))
    assert [row.row for row in refused] == [row for row in rows if row["p"] in lost]
    expected = [row for row in rows if row["p"] not in lost]
    assert sorted(there, key=lambda row: row["id"]) == expected
    other = pa.table(QueryBuilder().register("t", DeltaTable(root)).execute("SELECT * FROM t ORDER BY id").read_all())
    assert other.select(["id", "p"]).to_pylist() == expected
    assert in_folders(root, arrow) == [
        {**row, "p": None} if isinstance(row["p"], str) and len(quote(row["p"], safe="")) > 248 else row
        for row in expected
    ]
    DeltaTable(root).optimize.compact()
    assert sorted(rows_of(root), key=lambda row: row["id"]) == expected


def in_folders(root: Path, kind: pa.DataType) -> list[dict[str, Any]]:
    """The rows, with the values that the names of folders have: Polars takes them from there."""
    files = [
        f"{root}/{unquote(path)}" for path in pa.table(DeltaTable(root).get_add_actions()).column("path").to_pylist()
    ]
    hive = dataset.partitioning(pa.schema([("p", kind)]), flavor="hive")
    schema = pa.schema([("id", pa.int64()), ("p", kind)])
    rows = dataset.dataset(files, schema=schema, partitioning=hive, format="parquet").to_table().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def test_files_in_odd_folders_tell_that_a_batch_was_committed(tmp_path: Path) -> None:
    """When the identifier and the commits are gone."""
    sink = DeltaSink(tmp_path, partition_by="text")
    sink.check(SCHEMA)
    attempt = BatchAttempt(FLOW, "o", sink.open(FLOW, "o", None).generation, 1, 1)
    sink.begin(attempt)
    batch = pa.RecordBatch.from_pylist([{"id": 1, "text": "a b%/\u00e4"}], SCHEMA)
    sink.commit(attempt, [sink.write(attempt, "0", iter([batch]))], json.dumps({"batch": 1}))
    without_identifiers(sink.root, logs=True)
    found = DeltaSink(sink.root).progress_row(FLOW)
    assert found is not None
    assert found.progress == json.dumps({"batch": 1})


def test_an_aborted_batch_leaves_no_folders(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path, partition_by="text")
    sink.check(SCHEMA)
    attempt = BatchAttempt(FLOW, "o", sink.open(FLOW, "o", None).generation, 1, 1)
    sink.begin(attempt)
    sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist([{"id": 1, "text": "a b"}], SCHEMA)]))
    assert [*tmp_path.glob("onceflow/*/*/text=*")]
    sink.abort(attempt)
    assert not [*tmp_path.glob("onceflow/*/*")]


def test_a_date_that_is_no_partition(tmp_path: Path) -> None:
    partitioned(tmp_path, "date")
    sink = DeltaSink(tmp_path)
    sink.set_aside()
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    days = pa.array([0, 3_000_000, -800_000, None], pa.int32()).cast(pa.date32())
    batch = pa.RecordBatch.from_arrays([pa.array(range(4)), days], names=["id", "p"])
    refused: list[RefusedRow] = []
    receipt = sink.write(attempt, "0", iter([batch]))
    sink.commit_accepted(attempt, [receipt], kept(refused))
    assert [(row.row["id"], row.kind) for row in refused] == [
        (1, "InvalidPartitionValue"),
        (2, "InvalidPartitionValue"),
    ]
    assert sorted(row["id"] for row in rows_of(tmp_path)) == [0, 3]


@pytest.mark.parametrize("kind", ["float", "double", "timestamp", "timestamp_ntz", "decimal(10,2)", "binary"])
def test_partition_columns_whose_values_cannot_be_told_apart(tmp_path: Path, kind: str) -> None:
    partitioned(tmp_path, kind)
    given = pa.schema(DeltaTable(tmp_path).schema().to_arrow())
    with pytest.raises(SchemaError, match="Files cannot be divided by column p"):
        DeltaSink(tmp_path).check(given)
    with pytest.raises(SchemaError, match="Files cannot be divided by column p"):
        DeltaSink(tmp_path / "new", partition_by="p").check(given)


def test_partitions(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path, partition_by="day")
    schema = pa.schema([("day", pa.string()), ("id", pa.int64())])
    sink.check(schema)
    rows: list[dict[str, Any]] = [{"day": "a/b", "id": 1}, {"day": None, "id": 2}, {"day": "a/b", "id": 3}]
    written(tmp_path, rows, schema)
    assert sorted(rows_of(tmp_path), key=lambda row: row["id"]) == rows
    found = DeltaTable(tmp_path).to_pyarrow_table(filters=[("day", "=", "a/b")])
    assert found.column("id").to_pylist() == [1, 3]


# ---- columns, features, options ----------------------------------------------------------------------


def test_types(tmp_path: Path) -> None:
    noon = datetime(2026, 1, 2, 12, 0, 0, 1, tzinfo=timezone.utc)
    schema = pa.schema(
        [
            ("a", pa.bool_()),
            ("b", pa.decimal128(12, 2)),
            ("c", pa.timestamp("us", "Europe/Vienna")),
            ("d", pa.timestamp("us")),
            ("e", pa.date32()),
            ("f", pa.list_(pa.int8())),
            ("g", pa.struct([("x", pa.int16()), ("y", pa.large_string())])),
            ("h", pa.map_(pa.string(), pa.float32())),
            ("i", pa.binary()),
            ("j", pa.float64()),
        ]
    )
    row = {
        "a": True,
        "b": Decimal("1.50"),
        "c": noon,
        "d": noon.replace(tzinfo=None),
        "e": date(2026, 1, 2),
        "f": [1, None],
        "g": {"x": 1, "y": "z"},
        "h": [("k", 0.5)],
        "i": b"\0",
        "j": float("-inf"),
    }
    empty = dict.fromkeys(row)
    _, there = written(tmp_path, [row, empty], schema)
    assert there == [row, empty]


@pytest.mark.parametrize(
    "kind", [pa.null(), pa.duration("us"), pa.time64("us"), pa.uint8(), pa.month_day_nano_interval()]
)
def test_types_that_delta_does_not_know(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"Column x has the type .*, which Delta Lake does not know"):
        DeltaSink(tmp_path).check(pa.schema([("x", pa.list_(kind))]))


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "", "a\nb", "{"])
def test_names_that_spark_cannot_read(tmp_path: Path, name: str) -> None:
    for schema in (pa.schema([(name, pa.int64())]), pa.schema([("x", pa.list_(pa.struct([(name, pa.int64())])))])):
        with pytest.raises(SchemaError, match=re.escape(f"cannot be named {name!r}")):
            DeltaSink(tmp_path).check(schema)
    DeltaTable.create(tmp_path, pa.schema([(name, pa.int64())]))
    _, there = written(tmp_path, [{name: 1}], pa.schema([(name, pa.int64())]))
    assert there == [{name: 1}]


def test_a_table_is_created_when_the_flow_is_taken_over(tmp_path: Path) -> None:
    """A start that is refused leaves nothing in a place that was a mistake."""
    sink = DeltaSink(tmp_path / "table")
    sink.check(SCHEMA)
    assert sink.progress_row(FLOW) is None
    assert not (tmp_path / "table").exists()
    Writer(sink).open()
    assert rows_of(sink.root) == []


def test_what_does_not_fit_is_found_at_the_start(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, SCHEMA)
    sink = DeltaSink(tmp_path)
    with pytest.raises(SchemaError, match="Column id does not fit"):
        sink.check(pa.schema([("id", pa.string())]))
    with pytest.raises(SchemaError, match="Column other does not fit"):
        sink.check(pa.schema([("other", pa.string())]))
    with pytest.raises(SchemaError, match="Several columns are named id"):
        sink.check(pa.schema([("id", pa.int64()), ("ID", pa.int64())]))
    sink.check(pa.schema([("text", pa.string())]))
    DeltaTable.create(tmp_path / "needed", Schema([Field("id", LONG, nullable=False), Field("text", TEXT)]))
    with pytest.raises(SchemaError, match=r"Columns id of the table in .* must not be null"):
        DeltaSink(tmp_path / "needed").check(pa.schema([("text", pa.string())]))


def with_protocol(root: Path, protocol: dict[str, Any], **configuration: str) -> None:
    """A table that asks for something of its writers."""
    DeltaTable.create(root, SCHEMA)
    log = root / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = protocol
        if "metaData" in action:
            action["metaData"]["configuration"].update(configuration)
    log.write_text("\n".join(map(json.dumps, actions)))


def listed(feature: str, *, for_readers: bool) -> dict[str, Any]:
    readers = {"minReaderVersion": 3, "readerFeatures": [feature]} if for_readers else {"minReaderVersion": 1}
    return {**readers, "minWriterVersion": 7, "writerFeatures": [feature]}


@pytest.mark.parametrize(
    "feature, for_readers, configuration",
    [
        ("appendOnly", False, {"delta.appendOnly": "true"}),
        ("changeDataFeed", False, {"delta.enableChangeDataFeed": "true"}),
        ("checkConstraints", False, {}),
        ("deletionVectors", True, {"delta.enableDeletionVectors": "true"}),
        ("generatedColumns", False, {}),
        ("invariants", False, {}),
        ("timestampNtz", True, {}),
        ("v2Checkpoint", True, {"delta.checkpointPolicy": "v2"}),
    ],
)
def test_features_of_tables(tmp_path: Path, feature: str, for_readers: bool, configuration: dict[str, str]) -> None:
    """Checkpoints are written, too: one for ten commits."""
    with_protocol(tmp_path, listed(feature, for_readers=for_readers), **configuration)
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    for _ in range(11):
        writer.commit(*writer.staged(of_tasks=1))
    count = QueryBuilder().register("t", DeltaTable(tmp_path)).execute("SELECT count(*) AS n FROM t").read_all()
    assert pa.table(count).to_pylist() == [{"n": 440}]
    assert Writer(sink).open().batch == 11


@pytest.mark.parametrize(
    "protocol, detail",
    [
        *(
            (listed(feature, for_readers=False), f"the feature {feature}")
            for feature in ("identityColumns", "rowTracking", "allowColumnDefaults", "clustering", "inCommitTimestamp")
        ),
        (listed("columnMapping", for_readers=True), "the feature columnMapping"),
        ({"minReaderVersion": 1, "minWriterVersion": 6}, "writer version 6"),
    ],
)
def test_tables_that_ask_for_more(tmp_path: Path, protocol: dict[str, Any], detail: str) -> None:
    with_protocol(tmp_path, protocol)
    with pytest.raises(SchemaError, match=f"asks more of its writers than onceflow does\n.*{detail}"):
        DeltaSink(tmp_path).check(SCHEMA)


def test_deltalake_does_not_know_a_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.external.delta_rows._FEATURES", {"domainMetadata"})
    with_protocol(tmp_path, listed("domainMetadata", for_readers=False))
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    with pytest.raises(EnvironmentUnusableError, match=r"(?s)does not take a commit of deltalake.*DomainMetadata"):
        sink.open(FLOW, "o", None)


def test_columns_of_the_record_are_for_dead_letters(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, Schema([Field("id", LONG, nullable=False), Field("offset", LONG)]))
    schema = pa.schema([("id", pa.int64()), ("offset", pa.int64()), ("value", pa.binary()), ("key", pa.binary())])
    with pytest.raises(SchemaError, match="Column value does not fit"):
        written(tmp_path, [], schema)
    rows: list[dict[str, Any]] = [{"id": n or None, "offset": n, "value": b"v%d" % n, "key": b"k"} for n in range(3)]
    refused, there = written(tmp_path, rows, schema, sets_aside=True)
    assert refused == [
        RefusedRow({"id": None, "offset": 0}, "NotNullViolation", "id must not be null", {"value": b"v0", "key": b"k"})
    ]
    assert there == [{"id": 1, "offset": 1}, {"id": 2, "offset": 2}]
    sink = DeltaSink(tmp_path / "new")
    sink.set_aside()
    with pytest.raises(SchemaError, match="create the table before"):
        sink.check(schema)

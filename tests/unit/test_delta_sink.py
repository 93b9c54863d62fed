"""``DeltaSink``: the contract of all sinks, other writers of the table, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from onceflow import DeltaSink, FencedError, ProgressConflictError, SchemaError
from onceflow.external.sink import BatchAttempt
from onceflow.testing.external_sink_suite import SCHEMA, ExternalSinkSuite, Writer


def rows_of(root: Any) -> list[dict[str, Any]]:
    return DeltaTable(root).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]


class TestDelta(ExternalSinkSuite):
    rounds = 6

    @pytest.fixture
    def sink(self, tmp_path: Path) -> DeltaSink:
        sink = DeltaSink(tmp_path / "table")
        sink.check(SCHEMA)
        return sink

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return rows_of(sink.root)


def test_a_commit_that_was_prepared_before_a_takeover_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older driver has checked everything, and stops; only Delta itself can refuse its commit then."""
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
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
    assert (new.batch, rows_of(tmp_path)) == (0, [])
    new.commit(*new.staged())
    assert len(rows_of(tmp_path)) == 40


def test_other_applications_write_the_table(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    write_deltalake(tmp_path, pa.table({"id": [1], "text": ["other"]}, SCHEMA), mode="append")
    writer.commit(attempt, receipts)
    write_deltalake(tmp_path, pa.table({"id": [2], "text": ["other"]}, SCHEMA), mode="append")
    DeltaTable(tmp_path).optimize.compact()
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 2
    assert len(rows_of(tmp_path)) == 82


def test_the_table_alone_is_restored(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    last = sorted((tmp_path / "_delta_log").glob("*.json"))[-1]
    last.unlink()
    with pytest.raises(ProgressConflictError, match="gone back to an older state"):
        writer.commit(*writer.staged())
    again = Writer(sink).open()
    assert again.batch == 0
    again.commit(*again.staged())
    assert len(rows_of(tmp_path)) == 40


def test_partitions(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path, partition_by="day")
    schema = pa.schema([("day", pa.string()), ("id", pa.int64())])
    sink.check(schema)
    attempt = BatchAttempt("f", sink.open("f", None).generation, 1, 1)
    rows = [{"day": "a/b", "id": 1}, {"day": None, "id": 2}, {"day": "a/b", "id": 3}]
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema)]))
    sink.commit(attempt, [receipt], "{}")
    assert sorted(rows_of(tmp_path), key=lambda row: row["id"]) == rows
    found = DeltaTable(tmp_path).to_pyarrow_table(filters=[("day", "=", "a/b")])
    assert found.column("id").to_pylist() == [1, 3]


def test_what_does_not_fit_is_found_at_the_start(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    with pytest.raises(SchemaError, match="Column id does not fit"):
        sink.check(pa.schema([("id", pa.string())]))
    with pytest.raises(SchemaError, match="Column other does not fit"):
        sink.check(pa.schema([("other", pa.string())]))
    sink.check(pa.schema([("text", pa.string())]))
    DeltaTable(tmp_path).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(SchemaError, match=r"asks more of its writers.*"):
        sink.check(SCHEMA)

"""``ParquetSink`` and ``ParquetTable`` on a folder: the contract of all sinks, and what readers see."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onceflow import (
    DataLossError,
    EnvironmentUnusableError,
    FencedError,
    OptionError,
    ParquetSink,
    ParquetTable,
    ProgressConflictError,
    ProtocolError,
    SchemaError,
)
from onceflow.external import batch_log
from onceflow.external.batch_log import BatchLog, DataFile, Entry, next_entry
from onceflow.external.sink import BatchAttempt
from onceflow.external.storage import LocalFolder
from onceflow.testing.external_sink_suite import SCHEMA, ExternalSinkSuite, Writer


class TestParquet(ExternalSinkSuite):
    rounds = 8

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ParquetSink:
        return ParquetSink(tmp_path / "table")

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        found = ParquetTable(sink.root).snapshot()
        found.verify()
        return found.to_table().to_pylist()


class TestPartitioned(TestParquet):
    rounds = 2

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ParquetSink:
        return ParquetSink(tmp_path / "table", partition_by="text")


class NeverFences(ParquetSink):
    def open(self, flow: str, generation: int | None) -> Any:
        opened = super().open(flow, generation)
        self._last.clear()
        return opened

    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        last = BatchLog(self.storage, attempt.flow).last()
        assert last is not None
        super().commit(BatchAttempt(attempt.flow, last.generation, attempt.batch, 1), receipts, progress)


class CommitsAllThatIsThere(ParquetSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        found = [DataFile(each.path, 0, 0, "") for each in self.storage.below("data")]
        known = {file.path for file in ParquetTable(self.root).snapshot().entries}
        last = BatchLog(self.storage, attempt.flow).last()
        assert last is not None
        files = tuple(file for file in found if file.path not in known)
        entry = Entry(last.number + 1, last.generation, progress, attempt.batch, str(attempt), "w", files)
        BatchLog(self.storage, attempt.flow).create(entry)


class TwoEntries(ParquetSink):
    def commit(self, attempt: BatchAttempt, receipts: Sequence[bytes], progress: str) -> None:
        super().commit(attempt, [], progress)
        time.sleep(0.05)  # so that it is killed here
        super().commit(attempt, receipts, progress)


class Overwrites(LocalFolder):
    def create(self, path: str, content: bytes) -> bool:
        super().create(path, content)
        Path(self.full(path)).write_bytes(content)
        return True


class DoesNotAskForTheCondition(ParquetSink):
    @property
    def storage(self) -> Any:
        return Overwrites(self.root)


@pytest.mark.parametrize(
    "mutant, test",
    [
        (NeverFences, "test_an_older_driver_is_fenced"),
        (CommitsAllThatIsThere, "test_only_rows_with_a_receipt_are_committed"),
        pytest.param(TwoEntries, "test_processes_are_killed_at_any_moment", marks=pytest.mark.faults),
    ],
)
def test_a_wrong_sink_is_caught(tmp_path: Path, mutant: Any, test: str) -> None:
    class Suite(TestParquet):
        def rows(self, sink: Any) -> list[dict[str, Any]]:
            return ParquetTable(sink.root).snapshot().to_table().to_pylist()

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Suite(), test)(mutant(tmp_path / "table"))


def test_a_storage_that_overwrites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusableError, match="does not refuse to create a file that exists"):
        DoesNotAskForTheCondition(tmp_path).open("f", None)


def written(sink: ParquetSink, rows: list[dict[str, Any]], schema: pa.Schema | None = None, batch: int = 1) -> None:
    attempt = BatchAttempt("f", sink.open("f", None).generation, batch, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema=schema)]))
    sink.commit(attempt, [receipt], "{}")


def test_files_by_values(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, partition_by=["day", "n"])
    values: list[tuple[Any, Any]] = [(date(2026, 1, 2), 1), (None, 1), (date(2026, 1, 2), 2), (date(2026, 1, 2), 1)]
    rows = [{"day": day, "n": n, "id": place} for place, (day, n) in enumerate(values)]
    written(sink, rows)
    found = ParquetTable(tmp_path).snapshot()
    assert sorted(len(pq.read_table(file)) for file in found.files) == [1, 1, 2]
    assert found.where(day="2026-01-02", n="1").to_table().to_pylist() == [rows[0], rows[3]]
    assert found.where(day=None).to_table().to_pylist() == [rows[1]]
    assert found.where(day="2027-01-01").rows == 0
    assert sorted(found.to_table().to_pylist(), key=lambda row: row["id"]) == rows
    assert any("day=2026-01-02/n=2/" in file for file in found.files)


@pytest.mark.parametrize("value", ["a/b", "..", "", "ä=ö", "x" * 1000, "50%", "a\nb"])
def test_any_text_can_divide_files(tmp_path: Path, value: str) -> None:
    written(ParquetSink(tmp_path, partition_by="text"), [{"text": value}, {"text": "other"}])
    found = ParquetTable(tmp_path).snapshot()
    assert found.where(text=value).to_table().to_pylist() == [{"text": value}]
    assert found.rows == 2
    found.verify()


def test_types(tmp_path: Path) -> None:
    zone = pa.timestamp("us", "Europe/Berlin")
    schema = pa.schema([
        pa.field("at", zone, nullable=False),
        ("text", pa.large_string()),
        ("inner", pa.struct([("at", zone), ("texts", pa.list_(pa.large_string()))])),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("money", pa.decimal128(12, 2)),
        ("bytes", pa.binary()),
    ])  # fmt: skip
    noon = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
    row = {"at": noon, "text": "a", "inner": {"at": noon, "texts": ["b"]}, "map": [("c", 1)], "money": Decimal("1.50"),
           "bytes": b"\0"}  # fmt: skip
    sink = ParquetSink(tmp_path)
    sink.check(schema)
    written(sink, [row], schema)
    snapshot = ParquetTable(tmp_path).snapshot()
    assert snapshot.to_table().to_pylist() == [row]
    assert str(snapshot.schema.field("at").type) == "timestamp[us, tz=UTC]"
    # Settings of Spark change how rows come to the sink, not what is written.
    other = pa.schema([pa.field("at", pa.timestamp("us", "Asia/Tokyo")), *(field for field in list(schema)[1:])])
    sink.check(other)
    written(sink, [row], other, batch=2)
    assert ParquetTable(tmp_path).snapshot().to_table().to_pylist() == [row, row]


@pytest.mark.parametrize(
    "arguments, columns, message",
    [
        ({}, {"a": pa.duration("us")}, "Column a has the type duration"),
        ({}, {"a": pa.list_(pa.null())}, "Column a has the type null"),
        ({}, {"a": pa.int64(), "A": pa.int64()}, "Several columns are named a"),
        ({"partition_by": "b"}, {"a": pa.int64()}, "no column b, by which"),
        ({"partition_by": "a"}, {"a": pa.float64()}, "cannot be divided by column a"),
    ],
)
def test_what_does_not_fit_is_found_at_the_start(
    tmp_path: Path, arguments: dict[str, Any], columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        ParquetSink(tmp_path, **arguments).check(pa.schema(list(columns.items())))


def test_the_columns_of_a_folder_stay(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.check(pa.schema([("whatever", pa.int64())]))
    written(sink, [{"a": 1, "b": "x"}])
    ParquetSink(tmp_path).check(pa.schema([("b", pa.string()), ("a", pa.int64())]))
    with pytest.raises(SchemaError, match=r"(?s)other columns.*a was int64, is int32; c was missing, is string"):
        ParquetSink(tmp_path).check(pa.schema([("b", pa.string()), ("a", pa.int32()), ("c", pa.string())]))
    with pytest.raises(SchemaError, match="a was int64, is string"):  # a flow that started before there were columns
        written(ParquetSink(tmp_path), [{"a": "x", "b": "x"}], batch=2)
    assert ParquetTable(tmp_path).snapshot().rows == 1


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="gs:// is not known"):
        ParquetSink("gs://bucket/prefix")
    with pytest.raises(OptionError, match="storage_options= is for buckets"):
        ParquetSink(tmp_path, storage_options={"key": "k"})
    with pytest.raises(OptionError, match="compression='lz77' is unknown"):
        ParquetSink(tmp_path, compression="lz77")
    with pytest.raises(OptionError, match="names a column twice"):
        ParquetSink(tmp_path, partition_by=["a", "a"]).check(SCHEMA)
    sink = ParquetSink("s3://bucket/prefix/", storage_options={"key": "k", "secret": "hidden"})
    assert (sink.target, sink.local_only) == ("s3://bucket/prefix", False)
    assert (ParquetSink(tmp_path).local_only, ParquetSink(tmp_path, shared=True).local_only) == (True, False)


def test_nothing_was_written(tmp_path: Path) -> None:
    found = ParquetTable(tmp_path / "nowhere").snapshot()
    assert (found.files, found.rows, found.schema, found.to_table().num_rows) == ([], 0, None, 0)
    written(ParquetSink(tmp_path), [], SCHEMA)
    found = ParquetTable(tmp_path).snapshot()
    assert (found.files, found.schema, found.position) == ([], None, {"f": 2})


def commit_batches(writer: Writer, count: int) -> Iterator[BatchAttempt]:
    for _ in range(count):
        attempt, receipts = writer.staged()
        writer.commit(attempt, receipts)
        yield attempt


def test_readers_follow(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path)
    writer = Writer(ParquetSink(tmp_path)).open()
    before = table.snapshot()
    (attempt,) = commit_batches(writer, 1)
    first = table.snapshot()
    assert table.snapshot(after=before).files == first.files
    (attempt,) = commit_batches(writer, 1)
    news = table.snapshot(after=first)
    assert sorted(news.to_table().to_pylist(), key=lambda row: row["id"]) == writer.rows(attempt)
    assert table.snapshot(after=news).files == []
    assert len(first.files) + len(news.files) == len(table.snapshot().files)


def test_readers_need_few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, folders of the log, and a checkpoint that was not written."""
    monkeypatch.setattr(batch_log, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(batch_log, "_PER_FOLDER", 8)
    writer = Writer(ParquetSink(tmp_path)).open()
    expected = [row for attempt in commit_batches(writer, 23) for row in writer.rows(attempt)]
    read = []
    monkeypatch.setattr(BatchLog, "entry", lambda log, n, real=BatchLog.entry: (read.append(n), real(log, n))[1])

    def seen() -> Any:
        read.clear()
        return sorted(ParquetTable(tmp_path).snapshot().to_table().to_pylist(), key=lambda row: row["id"])

    assert seen() == expected
    assert read == [24, 21, 22, 23, 24]
    checkpoints = sorted(tmp_path.glob("_onceflow/suite/*/*.checkpoint.parquet"))
    assert len(checkpoints) == 4
    checkpoints[-1].unlink()
    assert seen() == expected
    assert read == [24, *range(16, 25)]
    assert Writer(ParquetSink(tmp_path)).open().batch == 23
    # A folder of the log that a driver has created right before it was killed.
    (tmp_path / "_onceflow/suite/00000000000000099").mkdir()
    assert seen() == expected


def test_a_checkpoint_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(batch_log, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(batch_log, "_checkpoint", lambda *arguments: 1 / 0)
    writer = Writer(ParquetSink(tmp_path)).open()
    list(commit_batches(writer, 3))
    assert "no checkpoint was written" in caplog.text
    assert ParquetTable(tmp_path).snapshot().rows == 120


class Answers(LocalFolder):
    """Loses answers: creates a file, and says something else."""

    def __init__(self, root: str, *plan: str) -> None:
        super().__init__(root)
        self.plan = list(plan)

    def create(self, path: str, content: bytes) -> bool:
        done = super().create(path, content)
        what = self.plan.pop(0) if self.plan and path.endswith(".json") else ""
        if what == "raise":
            raise ConnectionError("reset by peer")
        return done and what != "exists"


def test_a_client_that_repeats_a_request_knows_its_own_entry(tmp_path: Path) -> None:
    """The first request was applied, its answer was lost, and the second one says that the file exists."""
    sink = ParquetSink(tmp_path)
    sink._storage = Answers(sink.root, "exists")
    generation = sink.open("f", None).generation
    sink._storage = Answers(sink.root, "exists")
    sink.commit(BatchAttempt("f", generation, 1, 1), [], "{}")
    last = BatchLog(LocalFolder(sink.root), "f").last()
    assert last is not None
    assert (last.number, last.batch) == (2, 1)


def test_a_takeover_whose_answer_is_lost_can_be_repeated(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    generation = sink.open("f", None).generation
    sink._storage = Answers(sink.root, "raise")
    with pytest.raises(ConnectionError):
        sink.open("f", generation)
    assert sink.open("f", generation).generation == generation + 2
    with pytest.raises(FencedError):  # the other flow of the process with the same sink
        sink.open("f", generation)


def test_an_older_state_is_not_continued(tmp_path: Path) -> None:
    """A backup of the folder was restored while the driver ran: its next entry would leave a gap."""
    writer = Writer(ParquetSink(tmp_path)).open()
    attempts = list(commit_batches(writer, 2))
    next(tmp_path.glob("_onceflow/suite/*/*3.json")).unlink()
    with pytest.raises(ProgressConflictError, match="gone back to an older state"):
        writer.commit(*writer.staged())
    shutil.rmtree(tmp_path)
    with pytest.raises(ProgressConflictError, match="has generation 1, the last one there is 0"):
        writer.open(attempts[0].generation)


def test_what_is_left_of_attempts(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    writer = Writer(sink).open()
    list(commit_batches(writer, 1))
    for _ in range(12):
        attempt, _receipts = writer.staged()
    sink.abort(BatchAttempt("suite", writer.generation, 2, 1))
    left = [path.name for path in (tmp_path / "data/suite").iterdir()]
    assert sorted(left) == sorted(["1-1-1", *(f"1-2-{n}" for n in range(2, 13))])
    new = Writer(ParquetSink(tmp_path)).open()
    assert [path.name for path in (tmp_path / "data/suite").iterdir()] == ["1-1-1"]
    writer.task(attempt, "late", writer.rows(attempt))  # of the driver that was replaced
    list(commit_batches(new, 1))
    table = ParquetTable(tmp_path)
    assert table.vacuum() == []
    assert len(table.vacuum(older_than="0 s", dry_run=True)) == 1
    assert len(table.vacuum(older_than="0 s")) == 1
    assert table.vacuum(older_than="0 s") == []
    table.snapshot().verify()
    assert table.snapshot().rows == 80


def test_damage_is_seen(tmp_path: Path) -> None:
    written(ParquetSink(tmp_path), [{"a": 1}])
    snapshot = ParquetTable(tmp_path).snapshot()
    (file,) = map(Path, snapshot.files)
    content = file.read_bytes()
    for damaged, message in ((content[:-9] + b"x" + content[-8:], "has changed"), (b"", "has 0 bytes instead of")):
        file.write_bytes(damaged)
        with pytest.raises(DataLossError, match=message):
            snapshot.verify()
    file.unlink()
    with pytest.raises(DataLossError, match="is missing"):
        snapshot.verify()


def test_a_log_of_a_newer_version(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open("f", None)
    (entry,) = tmp_path.glob("_onceflow/f/*/*.json")
    fields = json.loads(entry.read_text())
    entry.write_text(json.dumps({**fields, "version": 2}))
    with pytest.raises(ProtocolError, match="has version 2"):
        sink.open("f", None)
    entry.write_text("[]")
    with pytest.raises(ProtocolError, match="is no entry"):
        ParquetTable(tmp_path).snapshot()


def test_a_file_is_created_once_and_whole(tmp_path: Path) -> None:
    storage = LocalFolder(os.fspath(tmp_path))
    assert storage.create("a/b/c.json", b"1")
    assert not storage.create("a/b/c.json", b"2")
    assert (storage.read("a/b/c.json"), storage.names("a/b"), storage.read("a/d")) == (b"1", ["c.json"], None)


def test_the_generation_is_the_number_of_the_takeover() -> None:
    first = next_entry(None, "w")
    assert (first.number, first.generation, first.progress, first.batch) == (1, 1, None, 0)
    batch = Entry(7, 3, "p", 4, "3-4-1", "w")
    assert next_entry(batch, "v").generation == 8
    assert (next_entry(batch, "v").progress, next_entry(batch, "v").batch) == ("p", 4)

"""``DeltaSink`` on a server with the S3 protocol, through deltalake's own storage options."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from onceflow import DeltaSink, EnvironmentUnusableError
from onceflow.external.sink import BatchAttempt, RefusedRow
from onceflow.testing.external_sink_suite import FLOW, SCHEMA, ExternalSinkSuite, Writer
from onceflow_workshop.testing.s3 import S3Server

pytestmark = pytest.mark.integration


def options_of(s3: S3Server) -> dict[str, str]:
    return {**s3.environment, "AWS_ALLOW_HTTP": "true"}


def sink_of(s3: S3Server, **more: Any) -> DeltaSink:
    return DeltaSink(f"s3://{s3.make_bucket()}/some/table", storage_options=options_of(s3), **more)


def rows_of(sink: DeltaSink) -> list[dict[str, Any]]:
    return DeltaTable(sink.root, storage_options=sink._storage.options).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]


def names(s3: S3Server, sink: DeltaSink) -> list[str]:
    root = sink.root.removeprefix("s3://")
    return [name.removeprefix(f"{root}/") for name in s3.filesystem().find(root)]


@pytest.mark.long
class TestS3(ExternalSinkSuite):
    rounds = 3

    @pytest.fixture
    def sink(self, s3: S3Server) -> DeltaSink:
        self.server = s3
        sink = sink_of(s3)
        sink.check(SCHEMA)
        return sink

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        return rows_of(sink)

    def backup(self, sink: Any) -> Callable[[], Any]:
        files, root = self.server.filesystem(), sink.root.removeprefix("s3://")
        saved = {name: files.cat_file(name) for name in files.find(root)}

        def restore() -> None:
            for name in {*files.find(root)} - saved.keys():
                files.rm_file(name)
            for name, content in saved.items():
                files.pipe_file(name, content)

        return restore


@pytest.mark.long
def test_what_is_left_is_removed(s3: S3Server) -> None:
    sink = sink_of(s3, partition_by="text")
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    writer.commit(attempt, receipts)
    aborted, _ = writer.staged()
    assert any(str(aborted) in name for name in names(s3, sink))
    sink.abort(aborted)
    found = names(s3, sink)
    assert not any(str(aborted) in name or "probe" in name for name in found)
    assert len([name for name in found if name.startswith("onceflow/")]) == 2
    assert len(rows_of(sink)) == 40


@pytest.mark.long
def test_names_of_files_are_those_of_the_log(s3: S3Server) -> None:
    """Whatever characters the values of partition columns have: other readers look for them there."""
    sink = sink_of(s3, partition_by="text")
    sink.check(SCHEMA)
    attempt = BatchAttempt(FLOW, "o", sink.open(FLOW, "o", None).generation, 1, 1)
    sink.begin(attempt)
    rows = [
        {"id": n, "text": text} for n, text in enumerate(["a", "b c", "a%20", "\u00e4", "a/b", "x:y", "q?w#", ".."])
    ]
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    sink.commit(attempt, [sink.write(attempt, "0", iter([batch]))], "{}")
    table = DeltaTable(sink.root, storage_options=sink._storage.options)
    listed = map(unquote, pa.table(table.get_add_actions()).column("path").to_pylist())
    assert sorted(listed) == sorted(name for name in names(s3, sink) if name.startswith("onceflow/"))
    assert sorted(rows_of(sink), key=lambda row: row["id"]) == rows


def test_rows_that_are_set_aside(s3: S3Server) -> None:
    sink = sink_of(s3, partition_by="text")
    sink.check(SCHEMA)
    sink.set_aside()
    writer = Writer(sink).open()
    attempt, _ = writer.staged()
    rows: list[dict[str, Any]] = [
        {"id": 1, "text": "a"},
        {"id": 2, "text": ""},
        {"id": 3, "text": None},
        {"id": 4, "text": "a/ü b"},
    ]
    refused: list[RefusedRow] = []

    def progress(found: Sequence[RefusedRow]) -> str:
        refused.extend(found)
        return "{}"

    receipt = writer.task(attempt, "more", rows)
    writer.sink.commit_accepted(attempt, [receipt], progress)
    assert [(row.row["id"], row.kind) for row in refused] == [(2, "InvalidPartitionValue")]
    assert sorted(rows_of(sink), key=lambda row: row["id"]) == [rows[0], *rows[2:]]


@pytest.mark.long
def test_a_large_file_has_several_parts(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.external.delta_files._BUFFER_BYTES", 4 << 20)
    sink = sink_of(s3)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    attempt, _ = writer.staged()
    text = "".join(chr(33 + n * n % 89) for n in range(1 << 16))
    many = [{"id": n, "text": f"{n}{text[n:]}{text[:n]}"} for n in range(160)]
    batches = [pa.RecordBatch.from_pylist(many[n : n + 20], SCHEMA) for n in range(0, 160, 20)]
    receipt = writer.sink.write(attempt, "big", iter(batches))
    writer.commit(attempt, [receipt])
    assert sorted(rows_of(sink), key=lambda row: row["id"]) == many


def test_other_applications_write_the_table(s3: S3Server) -> None:
    sink = sink_of(s3)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    options = options_of(s3)
    write_deltalake(sink.root, pa.table({"id": [1], "text": ["other"]}, SCHEMA), mode="append", storage_options=options)
    writer.commit(attempt, receipts)
    DeltaTable(sink.root, storage_options=options).optimize.compact()
    assert Writer(sink).open().batch == 1
    assert len(rows_of(sink)) == 41


def test_the_server_cannot_be_reached(s3: S3Server) -> None:
    """The driver waits for it: see ``ExternalSink``."""
    options = {**options_of(s3), "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "max_retries": "1"}
    sink = DeltaSink("s3://bucket/table", storage_options=options)
    began = time.monotonic()
    for call in (
        lambda: sink.check(SCHEMA),
        lambda: sink.progress_row(FLOW),
        lambda: sink.open(FLOW, "o", None),
        lambda: Writer(sink).staged(),
    ):
        with pytest.raises(ConnectionError):
            call()
    assert time.monotonic() - began < 60
    missing = DeltaSink(f"s3://no-such-{s3.make_bucket()}/table", storage_options=options_of(s3))
    with pytest.raises((ConnectionError, EnvironmentUnusableError), match=r"NoSuchBucket|404"):
        missing.check(SCHEMA)


def test_a_store_that_ignores_the_condition_is_refused(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older servers with the S3 protocol do not know If-None-Match for PutObject, and overwrite: the table, which was
    read before, has the second commit in the place of the first one."""
    sink = sink_of(s3)
    sink.check(SCHEMA)
    table = sink._storage.table
    writes = DeltaTable.create_write_transaction

    def overwrites(self: Any, *arguments: Any, **more: Any) -> None:
        root = self.table_uri.removeprefix("s3://").rstrip("/")
        if "/probe-" in root and any(name.endswith("1.json") for name in s3.filesystem().find(root)):
            s3.filesystem().rm_file(f"{root}/_delta_log/{1:020d}.json")
        writes(self, *arguments, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overwrites)
    with pytest.raises(EnvironmentUnusableError, match="does not refuse to create a file that exists"):
        sink.open(FLOW, "o", None)
    assert table().transaction_version(FLOW) is None
    assert not any("probe" in name for name in names(s3, sink))


def test_local_files_have_the_same_names(s3: S3Server, tmp_path: Path) -> None:
    """A table may be copied from a folder to a bucket, with its progress."""
    local = DeltaSink(tmp_path / "table")
    local.check(SCHEMA)
    writer = Writer(local).open()
    writer.commit(*writer.staged())
    sink = sink_of(s3)
    s3.filesystem().put(f"{local.root}/", f"{sink.root}/", recursive=True)
    moved = Writer(sink).open()
    assert moved.batch == 1
    moved.commit(*moved.staged())
    assert len(rows_of(sink)) == 80

"""``ParquetSink`` and ``ParquetTable`` on a server with the S3 protocol."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from onceflow import EnvironmentUnusableError, ParquetSink, ParquetTable
from onceflow.external import batch_log
from onceflow.testing.external_sink_suite import ExternalSinkSuite, Writer
from onceflow.testing.s3 import S3Server

pytestmark = pytest.mark.integration


class TestS3(ExternalSinkSuite):
    rounds = 4

    @pytest.fixture
    def sink(self, s3: S3Server) -> ParquetSink:
        return ParquetSink(f"s3://{s3.make_bucket()}/some/table", storage_options=s3.options)

    def rows(self, sink: Any) -> list[dict[str, Any]]:
        found = ParquetTable(sink.root, storage_options=sink._options).snapshot()
        found.verify()
        return found.to_table().to_pylist()


def test_what_is_left_is_removed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_log, "CHECKPOINT_EVERY", 3)
    root = f"s3://{s3.make_bucket()}/table"
    sink = ParquetSink(root, storage_options=s3.options, partition_by="text")
    table = ParquetTable(root, storage_options=s3.options)
    writer = Writer(sink).open()
    for _ in range(4):
        writer.commit(*writer.staged())
    aborted, _ = writer.staged()
    sink.abort(aborted)
    assert table.vacuum(older_than="0 s", dry_run=True) == []
    left, _ = writer.staged()
    assert len(table.vacuum(older_than="0 s", dry_run=True)) == 2
    Writer(sink).open()
    assert table.vacuum(older_than="0 s", dry_run=True) == []
    writer.task(left, "late", writer.rows(left))
    (late,) = table.vacuum(older_than="0 s")
    assert late.startswith(f"{root}/data/suite/{left}/text=")
    snapshot = table.snapshot()
    snapshot.verify()
    assert snapshot.rows == 160
    assert len([name for name in s3.filesystem().find(root.removeprefix("s3://")) if "checkpoint" in name]) == 2


def test_a_large_file_has_several_parts(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there as a whole, or, if the task fails, not at all."""
    monkeypatch.setattr("onceflow.external.parquet_files._BUFFER_BYTES", 4 << 20)
    root = f"s3://{s3.make_bucket()}/table"
    sink = ParquetSink(root, compression="none", storage_options={**s3.options, "default_block_size": 5 << 20})
    writer = Writer(sink).open()
    attempt, _ = writer.staged()
    big = pa.RecordBatch.from_pydict({"id": list(range(9)), "text": [str(n) * (2 << 20) for n in range(9)]})

    def fails() -> Any:
        yield from [big.slice(0, 7)]
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        sink.write(attempt, "fails", fails())
    assert not any("fails" in name for name in s3.filesystem().find(root.removeprefix("s3://")))
    receipt = sink.write(attempt, "big", (big.slice(n, 1) for n in range(9)))
    writer.commit(attempt, [receipt])
    found = ParquetTable(root, storage_options=s3.options).snapshot()
    found.verify()
    assert found.entries[0].bytes > 18 << 20
    assert found.to_table().equals(pa.Table.from_batches([big]))


def test_the_server_cannot_be_reached() -> None:
    """The driver waits for it: see ``ExternalSink``."""
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}
    sink = ParquetSink(
        "s3://bucket/table", storage_options={**options, "config_kwargs": {"retries": {"max_attempts": 1}}}
    )
    with pytest.raises(ConnectionError):
        sink.check(pa.schema([("id", pa.int64())]))
    with pytest.raises(ConnectionError):
        sink.open("f", None)


def test_a_storage_that_ignores_the_condition_is_refused(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older servers with the S3 protocol do not know If-None-Match for PutObject, and overwrite."""
    import s3fs

    put = s3fs.S3FileSystem._pipe_file

    async def ignores(self: Any, path: str, data: bytes, *, mode: str = "overwrite", **more: Any) -> Any:
        return await put(self, path, data, **more)

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", ignores)
    sink = ParquetSink(f"s3://{s3.make_bucket()}/table", storage_options=s3.options)
    with pytest.raises(EnvironmentUnusableError, match="does not refuse to create a file that exists"):
        sink.open("f", None)

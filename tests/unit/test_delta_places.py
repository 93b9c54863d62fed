"""Where a table of Delta Lake may be, and with which options."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from onceflow import DeltaSink, EnvironmentUnusableError, OptionError
from onceflow.testing.external_sink_suite import SCHEMA, Writer

sys.path.insert(0, str(Path(__file__).parent))
try:
    from delta_tables import rows_of
finally:
    sys.path.pop(0)


def test_a_file_of_a_task_is_not_there(tmp_path: Path) -> None:
    """The executor has another folder of this name. The table could not be read any more."""
    sink = DeltaSink(tmp_path / "table")
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    attempt, receipts = writer.staged()
    next(Path(sink.root).glob(f"onceflow/*/{attempt}/*.parquet")).unlink()
    with pytest.raises(EnvironmentUnusableError, match="must be the same folder on the driver and all executors"):
        writer.commit(attempt, receipts)
    assert rows_of(sink.root) == []


def test_options_with_which_drivers_could_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, {"aws_conditional_put": "disabled"}):
        with pytest.raises(OptionError, match="overwrite each other"):
            DeltaSink("s3://bucket/table", storage_options=options)
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "1")
    with pytest.raises(OptionError, match="overwrite each other"):
        DeltaSink("s3://bucket/table")


@pytest.mark.parametrize(
    "root, said",
    [
        ("s4://bucket/table", "did you mean 's3://'"),
        ("S3://bucket/table", "did you mean 's3://'"),
        ("memory://table", "not known to create an object only if there is none"),
        ("hdfs://host/table", "not known to create an object only if there is none"),
        ("s3://", "names no folder or bucket"),
        ("file:///", "names no folder or bucket"),
        ("s3://user:hidden@bucket/table", "contains a password"),
        # A local folder of each machine is no bucket.
        (Path("s3://bucket/table"), "is a local folder, and no URL of a s3 bucket"),
        ("s3//bucket/table", "is a local folder, and no URL of a s3 bucket"),
        ("gs:/bucket/table", "is a local folder, and no URL of a gs bucket"),
        ("file:/lake/table", "file:// as text, or a local folder"),
        ("dbfs:/lake/table", "is a local folder, and no URL of a store"),
        ("file://localhost/lake/table", "names a host: localhost"),
    ],
)
def test_places_that_are_refused(root: Any, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)) as caught:
        DeltaSink(root)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("root", ["s3", "s3a/b", "/s3:/b", "s3.old/t", "s3-b/t", "az/x", "C:/x"])
def test_folders_that_look_like_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert DeltaSink(root).root == str(Path(root).absolute())


@pytest.mark.parametrize("name", ["a b", "a#b", "a?b", "a%b", "é ö", "a'b", "a&b=c", ".a", "x" * 200])
def test_names_of_folders(tmp_path: Path, name: str) -> None:
    sink = DeltaSink(tmp_path / name)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    writer.commit(*writer.staged(of_tasks=1))
    sink.abort(writer.staged(of_tasks=1)[0])
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(rows_of(tmp_path / name)) == 40
    assert Writer(sink).open().batch == 1


@pytest.mark.parametrize("name", ["a%20b", "a\\b"])
def test_names_of_folders_that_deltalake_reads_otherwise(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="cannot have a table of Delta Lake"):
        DeltaSink(tmp_path / name)


def test_secrets_are_not_shown() -> None:
    sink = DeltaSink("s3://bucket/table", storage_options={"AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_REGION": "eu"})
    assert "hush" not in repr(sink) + str(sink) + sink.target
    said = sink._storage.said(OSError("https://x?sig=abc%2B&X-Amz-Signature=dead hush-hush in eu"))
    assert said == "https://x?sig=***&X-Amz-Signature=*** *** in eu"

"""Spark, with Delta Lake's own writer and reader, and ``DeltaSink`` share a table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from deltalake import DeltaTable

from onceflow import DeltaSink
from onceflow.external.sink import BatchAttempt, RefusedRow
from onceflow.host import jars
from onceflow.testing.external_sink_suite import FLOW, SCHEMA, Writer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not pyspark.__version__.startswith("4.2"), reason="the artifact is for Spark 4.2"),
]

#: The newest artifact of Delta Lake for the Spark of the tests.
DELTA = jars.Coordinate("io.delta", "delta-spark_4.2_2.13", "4.4.0")
SPARK = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.jars", sys.argv[1])
builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
builder = builder.config("spark.sql.session.timeZone", "UTC")
builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1")
builder = builder.config("spark.databricks.delta.snapshotPartitions", "1")
catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
spark = builder.config("spark.sql.catalog.spark_catalog", catalog).getOrCreate()
spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
found = [[row.asDict() for row in spark.sql(statement).collect()] for statement in json.loads(sys.argv[2])]
print(json.dumps(found, default=str))
"""


def run(*statements: str) -> list[list[dict[str, Any]]]:
    """The rows that Spark returns for each statement."""
    found = ",".join(map(str, jars.resolve([DELTA], transitive=True)))
    command = [sys.executable, "-c", SPARK, found, json.dumps(statements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def partitioned(root: Path, texts: list[str | None]) -> str:
    """A table whose files are divided by these texts."""
    sink = DeltaSink(root, partition_by="text")
    sink.check(SCHEMA)
    attempt = BatchAttempt(FLOW, "o", sink.open(FLOW, "o", None).generation, 1, 1)
    sink.begin(attempt)
    rows = pa.RecordBatch.from_pylist([{"id": n, "text": text} for n, text in enumerate(texts)], SCHEMA)
    sink.commit(attempt, [sink.write(attempt, "0", iter([rows]))], "{}")
    return f"delta.`{root}`"


def test_spark_reads_writes_and_compacts_the_table(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    expected = []
    for _ in range(2):
        attempt, receipts = writer.staged()
        writer.commit(attempt, receipts)
        expected += writer.rows(attempt)
    aborted, _ = writer.staged()
    table = f"delta.`{tmp_path}`"
    texts = ["a", "b c", "a%20", "\u00e4", "a/b", "x:y", "q?w#", "..", None]
    odd = partitioned(tmp_path_factory.mktemp("odd"), texts)
    before, divided, one, *_, rows = run(
        f"SELECT count(*) AS n FROM {table}",
        f"SELECT text FROM {odd} ORDER BY id",
        f"SELECT id FROM {odd} WHERE text = 'a%20'",
        f"INSERT INTO {table} VALUES (7, 'spark')",
        f"OPTIMIZE {table}",
        f"VACUUM {table} RETAIN 0 HOURS",
        f"SELECT * FROM {table} ORDER BY id",
    )
    assert before == [{"n": 80}]
    assert ([row["text"] for row in divided], one) == (texts, [{"id": 2}])
    assert rows == [{"id": 7, "text": "spark"}, *expected]
    assert not list(tmp_path.glob(f"onceflow/*/{aborted}/*.parquet")), "Delta's VACUUM removes what is not committed"
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 3
    assert DeltaTable(tmp_path).to_pyarrow_table().num_rows == 121


def test_spark_removes_old_transaction_identifiers(tmp_path: Path) -> None:
    """Also those without a time. The flow's are not removed."""
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    writer.commit(*writer.staged())
    table = f"delta.`{tmp_path}`"
    time.sleep(2)  # the retention is in seconds of the clock
    properties = "'delta.setTransactionRetentionDuration' = 'interval 1 second', 'delta.checkpointInterval' = '1'"
    run(
        f"ALTER TABLE {table} SET TBLPROPERTIES ({properties})",
        *(f"INSERT INTO {table} VALUES ({-n}, 'spark')" for n in (1, 2, 3)),
    )
    assert len(list(tmp_path.glob("_delta_log/*.checkpoint*.parquet"))) >= 3
    assert DeltaTable(tmp_path).transaction_version(FLOW) is not None
    again = Writer(sink).open()
    assert again.batch == 1
    again.commit(*again.staged())
    assert DeltaTable(tmp_path).to_pyarrow_table().num_rows == 83


def test_a_table_that_spark_has_made(tmp_path: Path) -> None:
    """Columns that must not be null, a check, a length of strings, and a partition column that is generated."""
    table = f"delta.`{tmp_path}`"
    run(
        f"CREATE TABLE {table} (id BIGINT NOT NULL, s STRUCT<a: STRING NOT NULL, b: ARRAY<INT>>, at TIMESTAMP, "
        "day DATE GENERATED ALWAYS AS (CAST(at AS DATE)), name STRING NOT NULL, code VARCHAR(3)) "
        "USING delta PARTITIONED BY (day, name)",
        f"ALTER TABLE {table} ADD CONSTRAINT positive CHECK (id > 0)",
    )
    at = datetime(2026, 1, 2, 23, 59, 59, 999_999, timezone.utc)
    good = {
        "id": 1,
        "s": {"a": "x", "b": [1, None]},
        "at": at,
        "day": date(2026, 1, 2),
        "name": "a/b=c%20",
        "code": "äöü",
    }
    rows = [
        good,
        {**good, "id": 2, "s": None, "at": None, "day": None, "name": "__null__"},
        {**good, "id": -3},
        {**good, "id": None},
        {**good, "id": 5, "s": {"a": None, "b": []}},
        {**good, "id": 6, "day": date(2026, 1, 3)},
        {**good, "id": 7, "name": ""},
        {**good, "id": 8, "name": None},
        {**good, "id": 9, "name": " é"},
        {**good, "id": 10, "code": "abcd"},
    ]
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("s", pa.struct([("a", pa.string()), ("b", pa.list_(pa.int32()))])),
            ("at", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("name", pa.string()),
            ("code", pa.string()),
        ]
    )
    sink = DeltaSink(tmp_path)
    sink.set_aside()
    sink.check(schema)
    attempt = BatchAttempt("f", "o", sink.open("f", "o", None).generation, 1, 1)
    sink.begin(attempt)
    receipt = sink.write(attempt, "0", iter([pa.RecordBatch.from_pylist(rows, schema)]))
    refused: list[RefusedRow] = []

    def progress(found: Any) -> str:
        refused.extend(found)
        return "{}"

    sink.commit_accepted(attempt, [receipt], progress)
    assert [row.row["id"] for row in refused] == [-3, None, 5, 6, 7, 8, 10]
    (seen,) = run(f"SELECT id, to_json(s) AS s, at, day, name FROM {table} ORDER BY id")
    assert seen == [
        {"id": 1, "s": '{"a":"x","b":[1,null]}', "at": str(at.replace(tzinfo=None)), "day": "2026-01-02",
         "name": "a/b=c%20"},
        {"id": 2, "s": None, "at": None, "day": None, "name": "__null__"},
        {"id": 9, "s": '{"a":"x","b":[1,null]}', "at": str(at.replace(tzinfo=None)), "day": "2026-01-02", "name": " é"},
    ]  # fmt: skip

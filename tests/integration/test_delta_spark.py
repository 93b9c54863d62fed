"""Spark, with Delta Lake's own writer and reader, and ``DeltaSink`` share a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from deltalake import DeltaTable

from onceflow import DeltaSink
from onceflow.testing.external_sink_suite import SCHEMA, Writer

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: The newest artifact of Delta Lake for the Spark of the tests.
PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
SPARK = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.jars.packages", sys.argv[2])
builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
spark = builder.config("spark.sql.catalog.spark_catalog", catalog).getOrCreate()
table = sys.argv[1]
before = spark.read.format("delta").load(table).count()
spark.createDataFrame([(7, "spark")], "id long, text string").write.format("delta").mode("append").save(table)
spark.sql(f"OPTIMIZE delta.`{table}`")
spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
spark.sql(f"VACUUM delta.`{table}` RETAIN 0 HOURS")
rows = [row.asDict() for row in spark.read.format("delta").load(table).orderBy("id").collect()]
print(json.dumps({"before": before, "rows": rows}))
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(not pyspark.__version__.startswith("4.2"), reason="the artifact is for Spark 4.2")
def test_spark_reads_writes_and_compacts_the_table(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path)
    sink.check(SCHEMA)
    writer = Writer(sink).open()
    expected = []
    for _ in range(2):
        attempt, receipts = writer.staged()
        writer.commit(attempt, receipts)
        expected += writer.rows(attempt)
    aborted, _ = writer.staged()
    command = [sys.executable, "-c", SPARK, str(tmp_path), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"before": 80, "rows": [{"id": 7, "text": "spark"}, *expected]}
    assert not list(tmp_path.glob(f"onceflow/*/{aborted}/*.parquet")), "Delta's VACUUM removes what is not committed"
    writer.commit(*writer.staged())
    assert Writer(sink).open().batch == 3
    assert DeltaTable(tmp_path).to_pyarrow_table().num_rows == 121

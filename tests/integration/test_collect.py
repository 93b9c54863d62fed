"""Small batches come to the driver as ``toArrow`` would bring them: all rows, in order, once; failures as Spark's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from onceflow.spark import collect as module
from onceflow.spark.collect import collect
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.query_facts import facts_of

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("padding", [0, 2000])  # joined, and too large for that
def test_rows_keep_their_order(onceflow_spark: Any, interpreted: bool, padding: int) -> None:
    rows = onceflow_spark.range(0, 1000, 1, 7).select("id", F.lit("x" * padding).cast("binary").alias("value"))
    batches = collect(rows, interpreted=interpreted)
    table = pa.Table.from_batches(batches)
    assert table.column("id").to_pylist() == list(range(1000))
    assert table.column("value").to_pylist() == [b"x" * padding] * 1000
    assert (len(batches) == 1) == (padding == 0)
    assert sum(batch.num_rows for batch in collect(rows.where("id < 0"), interpreted=interpreted)) == 0


def test_the_columns_are_known_before_there_are_rows(onceflow_spark: Any) -> None:
    rows = onceflow_spark.sql(
        "SELECT 1 AS a, 'b' AS b, X'63' AS c, 1.5D AS d, 1.50BD AS e, true AS f, DATE'2026-01-02' AS g, "
        "TIMESTAMP'2026-01-02 03:04:05' AS h, TIMESTAMP_NTZ'2026-01-02 03:04:05' AS i, array(1) AS j, "
        "array(TIMESTAMP'2026-01-02 03:04:05') AS k"
    )
    (batch,) = collect(rows, interpreted=False)
    known = module.arrow_schema(rows)
    assert known.names == batch.schema.names
    for one, other in zip(known.types, batch.schema.types, strict=True):
        assert one == other or (pa.types.is_timestamp(one) and one.tz and other.tz) or pa.types.is_list(one)


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_failure_is_raised_as_sparks(onceflow_spark: Any, interpreted: bool) -> None:
    rows = onceflow_spark.range(0, 100, 1, 4).select(
        F.when(F.col("id") == 60, F.raise_error(F.lit("no sixty"))).otherwise(F.lit("x")).alias("value")
    )
    with pytest.raises(SPARK_ERRORS, match="no sixty"):
        collect(rows, interpreted=interpreted)
    assert onceflow_spark.sparkContext.getLocalProperty(module._PROJECTIONS) is None


def _what_tasks_see(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"seen": [context.getLocalProperty("spark.sql.codegen.factoryMode")]})


@pytest.mark.long
def test_the_setting_is_of_one_job_and_the_users_wins(onceflow_spark: Any) -> None:
    seen = onceflow_spark.range(0, 10, 1, 1).mapInArrow(_what_tasks_see, "seen string")

    def saw(*, interpreted: bool) -> object:
        return collect(seen, interpreted=interpreted)[0].column("seen").to_pylist()

    assert saw(interpreted=False) == [None]
    assert saw(interpreted=True) == ["NO_CODEGEN"]
    assert saw(interpreted=False) == [None]
    onceflow_spark.conf.set(module._PROJECTIONS, "CODEGEN_ONLY")
    try:
        assert saw(interpreted=True) == ["CODEGEN_ONLY"]
    finally:
        onceflow_spark.conf.unset(module._PROJECTIONS)


def test_which_queries_read_little(onceflow_spark: Any) -> None:
    stream = onceflow_spark.readStream.format("rate").load()
    assert facts_of(stream.where("value > 1").selectExpr("cast(value as string) as value")).reads_little
    assert facts_of(stream.union(stream)).reads_little
    assert not facts_of(stream.groupBy("value").count()).reads_little
    assert not facts_of(stream.join(onceflow_spark.range(10), F.col("value") == F.col("id"))).reads_little
    assert not facts_of(stream.select("value").union(onceflow_spark.range(10))).reads_little

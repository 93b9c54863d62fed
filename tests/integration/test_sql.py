"""SQL in the direct engine: the driver and tasks make the same records as a batch query of Spark."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow import Flow, Processor, Record, serdes
from onceflow.spark import versions
from onceflow.testing import independent

sys.path.insert(0, str(Path(__file__).parent))
try:
    from both_engines import PLACES, Engines, MakeTopic, filled, whole
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration


# In short, test_crashes.py shows that tasks read.
@pytest.fixture(params=["driver", pytest.param("tasks", marks=pytest.mark.long)])
def engines(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic, request: Any) -> Engines:
    return Engines(onceflow_broker, onceflow_spark, make_topic, by_tasks=request.param == "tasks")


def _shouted(text):  # type: ignore[no-untyped-def]  # Spark would take hints for those of an Arrow function
    return None if text is None else text.upper() + "!"


def _doubled(numbers: pd.Series) -> pd.Series:
    return numbers * 2


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


shouted = F.udf(_shouted, T.StringType())
doubled = F.pandas_udf(_doubled, T.LongType())


def _limits(df: DataFrame) -> DataFrame:
    return df.sparkSession.createDataFrame([(0, "none"), (1, "one"), (2, "two")], "remainder long, name string")


def _with(df: DataFrame) -> DataFrame:
    df.createOrReplaceTempView("onceflow_rows")
    return df.sparkSession.sql(
        "WITH even AS (SELECT *, offset % 2 = 0 AS yes FROM onceflow_rows) "
        "SELECT key, value, timestamp FROM even WHERE yes"
    )


def _subquery(df: DataFrame) -> DataFrame:
    _limits(df).createOrReplaceTempView("onceflow_limits")
    df.createOrReplaceTempView("onceflow_rows")
    return df.sparkSession.sql(
        "SELECT key, value, timestamp FROM onceflow_rows WHERE offset % 5 IN (SELECT remainder FROM onceflow_limits)"
    )


#: Each has the columns key, value and timestamp.
QUERIES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "as they are": lambda df: df.select("key", "value", "timestamp"),
    "where": lambda df: df.where("offset % 3 = 0").select("key", "value", "timestamp"),
    "nothing": lambda df: df.where("false").select("key", "value", "timestamp"),
    "text": lambda df: df.select("key", F.upper(F.decode("value", "ISO-8859-1")).alias("value"), "timestamp"),
    "a constant of another type": lambda df: df.select("key", F.lit(1.5).cast("string").alias("value"), "timestamp"),
    "columns of the source": lambda df: df.select(
        "key",
        F.to_json(F.struct("topic", "partition", "offset", "timestampType", F.hex("value").alias("hex"))).alias(
            "value"
        ),
        "timestamp",
    ),
    "explode": lambda df: df.select("key", F.explode(F.array(F.lit("a"), F.lit("b"))).alias("value"), "timestamp"),
    "udf": lambda df: df.select("key", shouted(F.hex("value")).alias("value"), "timestamp"),
    "pandas_udf": lambda df: df.select("key", doubled("offset").cast("string").alias("value"), "timestamp"),
    "mapInArrow": lambda df: df.select("key", "value", "timestamp").mapInArrow(
        _same, "key binary, value binary, timestamp timestamp"
    ),
    "another key": lambda df: df.select(F.expr("CAST(offset % 7 AS STRING)").alias("key"), "value", "timestamp"),
    "with": _with,
    "what only places rows": lambda df: (
        df.withWatermark("timestamp", "1 hour").repartition(2, "key").coalesce(1).select("key", "value", "timestamp")
    ),
}
#: Those that need a job for each batch.
JOBS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "join": lambda df: (
        df.withColumn("remainder", F.expr("offset % 4"))
        .join(F.broadcast(_limits(df)), "remainder", "left")
        .select("key", F.coalesce("name", F.lit("?")).alias("value"), "timestamp")
    ),
    "subquery": _subquery,
}


def _all(df: DataFrame, queries: dict[str, Callable[[DataFrame], DataFrame]]) -> DataFrame:
    """The rows of all queries in one, each with its name in a header."""
    made = []
    for name, query in queries.items():
        rows = query(df).selectExpr("CAST(key AS BINARY) AS key", "CAST(value AS BINARY) AS value", "timestamp")
        made.append(
            rows.withColumn("headers", F.expr(f"array(struct('{name}' AS key, CAST(NULL AS BINARY) AS value))"))
        )
    return functools.reduce(DataFrame.union, made)


SOME = ("where", "columns of the source", "udf", "another key")


@pytest.mark.parametrize(
    "queries",
    [
        {name: QUERIES[name] for name in SOME},
        pytest.param({n: q for n, q in QUERIES.items() if n not in SOME}, marks=pytest.mark.long),
        pytest.param(JOBS, marks=pytest.mark.long),  # test_sql_edges.py has some
    ],
    ids=["some", "others", "with jobs"],
)
def test_the_same_records_as_a_batch_query(engines: Engines, queries: dict[str, Any]) -> None:
    """The topic is read once, whatever the number of queries."""
    source = filled(engines, partitions=3)
    result = engines.run("direct", lambda flow: _all(flow.read(source.topic), queries))
    kafka = {"kafka.bootstrap.servers": engines.bootstrap, "kafka.isolation.level": "read_committed"}
    batch = engines.spark.read.format("kafka").options(**kafka, subscribe=source.topic).load()
    expected = Counter(
        (_bytes(row.key), _bytes(row.value), tuple((h.key, h.value) for h in row.headers), row.ms)
        for row in _all(batch, queries).withColumn("ms", F.expr("unix_millis(timestamp)")).collect()
    )
    assert sum(expected.values()) > 500
    found = Counter({(k, v, tuple(h), ms): n for (k, v, h, ms), n in whole(result).items()})
    assert found == expected
    assert sum(result.read.values()) == sum(
        result.covered[1][source.topic][n] - result.covered[0][source.topic][n] for n in range(3)
    ), "read once"
    # Before Spark 4 the plan of a Python function cannot be computed outside of a job.
    with_job = queries is JOBS or not versions.has("classic") or engines.by_tasks
    assert ("Spark job" in result.query.engine_reason) == with_job


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


# ---- with process steps ------------------------------------------------------------------------------------


class Sums(Processor):
    """Counts the records of each key, and adds up their numbers. It yields the new number."""

    key = serdes.STRING
    value = state = output = serdes.JSON

    def process(self, key: str, records: Any, state: Any) -> Iterator[Record]:
        kept = state.get() or {"count": 0, "sum": 0}
        for record in records:
            kept = {"count": kept["count"] + 1, "sum": kept["sum"] + record.value["n"]}
            yield Record(key=key, value={"n": record.value["n"] * 10})
        state.put(kept)


def _chain(flow: Flow, topic: str, other: str, tables: list[str]) -> DataFrame:
    """SQL, a step, SQL that changes the key, another step, SQL; beside it records of another topic."""
    numbers = flow.read(topic).select(
        F.expr("CONCAT('k', offset % 13)").alias("key"), F.expr("TO_JSON(STRUCT(offset AS n))").alias("value")
    )
    first = flow.process(numbers.where("key <> 'k7'"), Sums(), table=tables[0])
    parsed = first.withColumn("n", F.from_json(F.col("value").cast("string"), "n long").getField("n"))
    moved = parsed.where("n % 20 = 0").select(F.expr("CONCAT('m', n % 7)").alias("key"), "value")
    second = flow.process(moved, Sums(), table=tables[1])
    done = second.select("key", F.concat(F.lit("second "), F.col("value").cast("string")).cast("binary").alias("value"))
    return done.union(flow.read(other).where("offset % 50 = 0").select("key", "value"))


@pytest.mark.long
@pytest.mark.parametrize("engines", ["driver"], indirect=True)  # it compares with tasks by itself
def test_a_chain_of_steps_and_sql(engines: Engines) -> None:
    source, other = filled(engines, partitions=3), filled(engines)
    tables = {engine: [engines.make_topic("t", 4, cleanup_policy="compact") for _ in range(2)] for engine in PLACES}
    driver, tasks = (
        engines.run(engine, lambda flow, own=tables[engine]: _chain(flow, source.topic, other.topic, own))
        for engine in PLACES
    )
    assert whole(driver, timestamp=False) == whole(tasks, timestamp=False)
    assert any(seen.value is not None and seen.value.startswith(b"second") for seen in driver.records)
    rows = {
        engine: [
            {each.key: each.value for each in independent.read_topic(engines.bootstrap, table, decided=True)}
            for table in tables[engine]
        ]
        for engine in PLACES
    }
    assert rows["driver"] == rows["tasks"]
    assert [len(each) for each in rows["driver"]] == [12, 7]

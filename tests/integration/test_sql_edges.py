"""Operators and values at the edges of SQL: the driver and tasks make the rows that a batch query of Spark makes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow import Flow, UnsupportedQueryError

sys.path.insert(0, str(Path(__file__).parent))
try:
    from both_engines import PLACES, Engines, MakeTopic
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.integration

#: A value that is null in half of the rows, where the type says that what is in it is never null.
NESTED = {
    "struct": "IF(offset % 2 = 0, named_struct('a', 1, 'b', 'x'), NULL)",
    "list of structs": "transform(sequence(1, 2), x -> IF(x = 1, named_struct('a', x), NULL))",
    "struct of structs": "named_struct('outer', IF(offset % 2 = 0, named_struct('a', 1), NULL))",
    "map": "IF(offset % 2 = 0, map('k', named_struct('a', 1)), NULL)",
    "map with a null": "map('k', IF(offset % 2 = 0, named_struct('a', 1), NULL))",
    "list": "IF(offset % 2 = 0, array(1, 2), NULL)",
}
QUERIES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "nulls": lambda df: (
        df.selectExpr("key", "timestamp", *(f"{column} AS `{name}`" for name, column in NESTED.items()))
        .withWatermark("timestamp", "1 hour")
        .selectExpr("key", f"to_json(struct({', '.join(f'`{name}`' for name in NESTED)})) AS text")
    ),
    "windows that overlap": lambda df: df.select(
        "key", F.window("timestamp", "10 minutes", "5 minutes").start.cast("string").alias("text")
    ),
    "unpivot": lambda df: (
        df.selectExpr("key", "CAST(offset AS STRING) a", "CAST(value AS STRING) b")
        .unpivot("key", ["a", "b"], "name", "v")
        .selectExpr("key", "concat(name, '=', v) AS text")
    ),
    "lateral explode": lambda df: _sql(
        df, "SELECT key, word AS text FROM {df}, LATERAL explode(split(CAST(value AS STRING), '-')) AS t(word)"
    ),
    "lateral subquery": lambda df: _sql(
        df, "SELECT key, text FROM {df}, LATERAL (SELECT concat(CAST(value AS STRING), '!') AS text)"
    ),
    "the time in a subquery": lambda df: _sql(
        df,
        "SELECT key, CAST(value AS STRING) AS text FROM {df} "
        "WHERE current_timestamp() = (SELECT max(current_timestamp()) FROM range(3))",
    ),
}


def _sql(df: DataFrame, text: str) -> DataFrame:
    return df.sparkSession.sql(text, df=df)


@pytest.fixture(params=["driver", pytest.param("tasks", marks=pytest.mark.long)])
def engines(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic, request: Any) -> Engines:
    return Engines(onceflow_broker, onceflow_spark, make_topic, by_tasks=request.param == "tasks")


@pytest.fixture
def topic(engines: Engines) -> str:
    found = engines.make_topic("in", 2)
    producer = confluent_kafka.Producer({"bootstrap.servers": engines.bootstrap})
    for n in range(12):
        producer.produce(found, b"a%d-b%d" % (n, n), b"k%d" % n, n % 2, timestamp=1_700_000_000_000 + 60_000 * n)
    assert producer.flush(30) == 0
    return found


def compare(engines: Engines, topic: str, queries: dict[str, Callable[[DataFrame], DataFrame]]) -> None:
    """All queries in one flow, which is their union."""

    def every(df: DataFrame) -> DataFrame:
        made = (
            query(df).select("key", F.concat(F.lit(f"{name}: "), F.coalesce("text", F.lit("null"))).alias("value"))
            for name, query in queries.items()
        )
        return reduce(DataFrame.union, made)

    kafka = {"kafka.bootstrap.servers": engines.bootstrap, "subscribe": topic}
    batch = engines.spark.read.format("kafka").options(**kafka).load()
    wanted = Counter((bytes(row.key), row.value.encode()) for row in every(batch).collect())
    result = engines.run("direct", lambda flow: every(flow.read(topic)))
    assert Counter((seen.key, seen.value) for seen in result.records) == wanted
    assert {value.partition(b":")[0].decode() for _, value in wanted} == {*queries}, "a comparison of nothing"


@pytest.mark.long
@pytest.mark.short_form
def test_operators_and_nulls(engines: Engines, topic: str) -> None:
    compare(engines, topic, QUERIES)


@pytest.mark.long
def test_functions_with_broadcast_variables(engines: Engines, topic: str) -> None:
    """PySpark also broadcasts every function of more than 1 MB."""
    names = {f"k{n}": f"name {n}" for n in range(12)}
    sent = engines.spark.sparkContext.broadcast(names)
    large = {**names, "more": "x" * 1_500_000}

    @F.udf("string")
    def named(key):  # type: ignore[no-untyped-def]  # Spark would take hints for those of an Arrow function
        return sent.value[bytes(key).decode()]

    @F.udf("string")
    def named_by_a_large_function(key):  # type: ignore[no-untyped-def]
        return large[bytes(key).decode()]

    def in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys = batch.column("key")
            texts = pa.array([sent.value[each.as_py().decode()] for each in keys], pa.string())
            yield pa.RecordBatch.from_arrays([keys, texts], ["key", "text"])

    compare(
        engines,
        topic,
        {
            "a variable": lambda df: df.select("key", named("key").alias("text")),
            "a large function": lambda df: df.select("key", named_by_a_large_function("key").alias("text")),
            "a variable in Arrow": lambda df: df.select("key").mapInArrow(in_arrow, "key binary, text string"),
        },
    )


def test_settings_are_those_of_the_start(engines: Engines, topic: str) -> None:
    """Of the session of the DataFrame, whichever is active; also if they are changed before the first batch."""
    engines.spark = engines.spark.newSession()
    policy = "spark.sql.mapKeyDedupPolicy"
    target = engines.make_topic("out", 1)
    engines.spark.conf.set(policy, "LAST_WIN")
    flow = Flow(f"settings-{target}", engines.spark, bootstrap_servers=engines.bootstrap)
    empty = engines.make_topic("in", 1)
    made = flow.read(empty).selectExpr("key", "to_json(map_from_arrays(array('x', 'x'), array(1, offset))) AS value")
    query = flow.write(made, topic=target, engine=PLACES[engines.by_tasks]).start()
    try:
        engines.spark.conf.set(policy, "EXCEPTION")
        producer = confluent_kafka.Producer({"bootstrap.servers": engines.bootstrap})
        producer.produce(empty, b"v", b"k")
        assert producer.flush(30) == 0
        query.processAllAvailable()
        assert query.batches
    finally:
        query.stop()


@pytest.mark.long
def test_what_is_refused_is_named(onceflow_broker: str, onceflow_spark: Any, make_topic: MakeTopic) -> None:
    topic, out = make_topic("in", 1), make_topic("out", 1)
    flow = Flow("refused", onceflow_spark, bootstrap_servers=onceflow_broker)
    df = flow.read(topic)
    in_lateral = (
        "SELECT {a}.key, s.value FROM {a}, LATERAL (SELECT max(value) AS value FROM {b} b WHERE b.key = {a}.key) s"
    )
    in_exists = "SELECT key, value FROM {a} a WHERE EXISTS (SELECT 1 FROM {b} b WHERE b.key = a.key)"
    deep = df
    for _ in range(600):
        deep = deep.where("offset >= 0")
    for made, why in ((df.observe("n", F.count(F.lit(1)).alias("n")), "observe"), (deep, "too many operators")):
        with pytest.raises(UnsupportedQueryError, match=why):
            flow.write(made, topic=out).start()
    for text in (in_lateral, in_exists):  # newer versions of Spark refuse some of it themselves
        with pytest.raises((UnsupportedQueryError, AnalysisException), match=r"A stream is|STREAMING_QUERY"):
            flow.write(onceflow_spark.sql(text, a=df, b=flow.read(topic)), topic=out).start()

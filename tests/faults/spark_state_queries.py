"""Queries with state in Spark, each as a function of DataFrames: streaming in the flow, batch for what is expected.

A record's value is its number; its event time is that many seconds after ``BASE``.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BASE = 1_700_000_000
SENTINEL = 1_000_000  # the event time of a record that closes every window before it


def events(df: DataFrame, name: str = "n") -> DataFrame:
    """Number and event time of Kafka's records."""
    number = F.col("value").cast("string").cast("long")
    return df.select(F.col("key").cast("string"), number.alias(name)).withColumn(
        f"{name}_at", F.timestamp_seconds(F.lit(BASE) + F.col(name))
    )


def aggregation(left: DataFrame, _: DataFrame) -> DataFrame:
    """Count and sum per key in windows of five minutes, when they close."""
    windows = (
        events(left)
        .withWatermark("n_at", "10 minutes")
        .groupBy(F.window("n_at", "5 minutes"), "key")
        .agg(F.count("*").alias("count"), F.sum("n").alias("sum"))
    )
    key = F.concat_ws("/", "key", F.unix_seconds(F.col("window.start")).cast("string"))
    return windows.select(key.alias("key"), F.concat_ws(",", "count", "sum").alias("value"))


def outer_join(left: DataFrame, right: DataFrame) -> DataFrame:
    """Every left record with the right one of the same number within a minute, or with none once that is over."""
    ours = events(left, "n").withWatermark("n_at", "10 minutes").select("n", "n_at")
    theirs = events(right, "m").withWatermark("m_at", "10 minutes").select("m", "m_at")
    joined = ours.join(theirs, F.expr("n = m AND m_at >= n_at AND m_at <= n_at + INTERVAL 1 MINUTE"), "leftOuter")
    return joined.select(
        F.col("n").cast("string").alias("key"), F.coalesce(F.col("m").cast("string"), F.lit("alone")).alias("value")
    )


def tokens(left: DataFrame, _: DataFrame) -> DataFrame:
    """A random token per key, drawn with its first record and kept: user code that is not deterministic."""
    drawn = (
        events(left).withColumn("token", F.expr("uuid()")).groupBy("key").agg(F.min(F.struct("n", "token")).alias("f"))
    )
    return drawn.select("key", F.col("f.token").alias("value"))


QUERIES: dict[str, Any] = {"aggregation": aggregation, "outer_join": outer_join, "tokens": tokens}

"""Spark's Kafka source, as ``Flow.read`` uses it."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from onceflow.client.settings import ClientSettings
from onceflow.spark import query_listener, token_endpoint


def load_source(
    spark: SparkSession,
    settings: ClientSettings,
    options: Mapping[str, str],
    until: Mapping[int, int] | None = None,
    *,
    partitions: int = 1,
) -> DataFrame:
    """A streaming DataFrame of the source.

    Args:
        options: of the source, without those of the connection.
        partitions: how many the topic has.
        until: by partition, the first offset that is not read; None: all are read. Spark's source itself only ends
            at the end of a topic.
    """
    query_listener.watch(spark)
    connection = {**settings.spark_reader(partitions), **token_endpoint.reader_options(spark, settings)}
    df = spark.readStream.format("kafka").options(**connection).options(**options).load()
    if until is None:
        return df
    # Partitions are numbered from 0. One that is not in the array was added since: `get` returns null for it.
    ends = ", ".join(f"{until.get(partition, 0)}L" for partition in range(max(until) + 1))
    return df.where(f"offset < get(array({ends}), partition)")

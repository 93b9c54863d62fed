"""Spark's Kafka source, as ``Flow.read`` uses it."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from onceflow.client.settings import ClientSettings
from onceflow.spark import query_listener, token_endpoint


def load_source(spark: SparkSession, settings: ClientSettings, options: Mapping[str, str]) -> DataFrame:
    """A streaming DataFrame of the source.

    Args:
        options: of the source, without those of the connection.
    """
    query_listener.watch(spark)
    connection = {**settings.spark_reader(), **token_endpoint.reader_options(spark, settings)}
    return spark.readStream.format("kafka").options(**connection).options(**options).load()

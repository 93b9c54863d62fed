"""Spark's Kafka source, as ``Flow.read`` uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from onceflow.client.settings import ClientSettings
from onceflow.spark import jvm, query_listener, token_endpoint


def load_source(
    spark: SparkSession, settings: ClientSettings, options: Mapping[str, str], until: Mapping[int, int] | None = None
) -> DataFrame:
    """A streaming DataFrame of the source.

    Args:
        options: of the source, without those of the connection.
        until: by partition, the first offset that is not read; None: all are read. Spark's source itself only ends
            at the end of a topic.
    """
    query_listener.watch(spark)
    connection = {**settings.spark_reader(), **token_endpoint.reader_options(spark, settings)}
    df = spark.readStream.format("kafka").options(**connection).options(**options).load()
    if until is None:
        return df
    # Partitions are numbered from 0. One that is not in the array was added since: `get` returns null for it.
    ends = ", ".join(f"{until.get(partition, 0)}L" for partition in range(max(until) + 1))
    return df.where(f"offset < get(array({ends}), partition)")


def put_starting_offsets(df: DataFrame, checkpoint: Path, starts: Mapping[str, Mapping[int, int]]) -> None:
    """Make a new query start at these offsets, whatever ``startingOffsets`` its sources were given.

    They are written where Spark itself keeps the first offsets of a source (KafkaSourceInitialOffsetWriter).

    Args:
        checkpoint: the folder of its checkpoint, which is empty.
        starts: by topic and partition.
    """
    topics = dict.fromkeys(_topics_in_order(df._jdf.queryExecution().analyzed()))  # as MicroBatchExecution counts them
    for number, topic in enumerate(topics):
        folder = checkpoint / "sources" / str(number)
        folder.mkdir(parents=True)
        offsets = json.dumps({topic: {str(partition): offset for partition, offset in starts[topic].items()}})
        (folder / "0").write_bytes(b"\0v1\n" + offsets.encode())


def _topics_in_order(plan: Any) -> Iterator[str]:
    if jvm.kind(plan) == "StreamingRelationV2":
        yield str(plan.extraOptions().get("subscribe"))
    children = plan.children()
    for number in range(children.size()):
        yield from _topics_in_order(children.apply(number))

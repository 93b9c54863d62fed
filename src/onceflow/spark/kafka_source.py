"""Spark's Kafka source, as ``Flow.read`` uses it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from onceflow.client.settings import ClientSettings
from onceflow.spark import jvm, query_listener, token_endpoint

# Spark logs these settings with the offsets of a batch, and warns of each that is missing (OffsetSeqMetadata).
_LOGGED_SETTINGS = (
    "spark.sql.shuffle.partitions",
    "spark.sql.streaming.stateStore.providerClass",
    "spark.sql.streaming.multipleWatermarkPolicy",
    "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion",
    "spark.sql.streaming.aggregation.stateFormatVersion",
    "spark.sql.streaming.join.stateFormatVersion",
    "spark.sql.streaming.stateStore.compression.codec",
    "spark.sql.streaming.stateStore.rocksdb.formatVersion",
    "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion",
    "spark.sql.streaming.statefulOperator.useStrictDistribution",
    "spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan",
    "spark.sql.streaming.stateStore.encodingFormat",
    "spark.sql.streaming.stateStore.rowChecksum.enabled",
    "spark.sql.function.protobufExtensions.enabled",
    "spark.sql.streaming.queryEvolution.enableSourceEvolution",
    "spark.sql.streaming.internal.stateStore.partitions",
)


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


def put_starting_offsets(df: DataFrame, checkpoint: Path, starts: Mapping[str, Mapping[int, int]]) -> None:
    """Make a new query start at these offsets, whatever ``startingOffsets`` its sources were given.

    They are written where Spark itself keeps the first offsets of a source (KafkaSourceInitialOffsetWriter).

    Args:
        checkpoint: the folder of its checkpoint, which is empty.
        starts: by topic and partition.
    """
    for number, topic in enumerate(_topics_in_order(df)):
        folder = checkpoint / "sources" / str(number)
        folder.mkdir(parents=True)
        offsets = json.dumps({topic: {str(partition): offset for partition, offset in starts[topic].items()}})
        (folder / "0").write_bytes(b"\0v1\n" + offsets.encode())


def put_first_batch(df: DataFrame, checkpoint: Path, ends: Mapping[str, Mapping[int, int]], now_ms: int) -> None:
    """Make the first batch of a new query end at these offsets, and run it even if they are old.

    They are written where Spark itself logs the end offsets of a batch, as if the query had stopped during its first
    batch (OffsetSeqLog). Sources that are no topics have no offset in it.

    Args:
        checkpoint: the folder of its checkpoint, which is empty.
        ends: by topic and partition.
        now_ms: the time of the batch, epoch milliseconds.
    """
    metadata = {"batchWatermarkMs": 0, "batchTimestampMs": now_ms, "conf": _logged_settings(df.sparkSession)}
    lines = ["v1", json.dumps(metadata)]
    for topic in _topics_in_order(df):
        known = ends.get(topic)
        places = None if known is None else {str(partition): offset for partition, offset in known.items()}
        lines.append("-" if places is None else json.dumps({topic: places}))
    folder = checkpoint / "offsets"
    folder.mkdir(parents=True)
    (folder / "0").write_text("\n".join(lines))
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid4())}))  # Spark refuses offsets without it


def _logged_settings(spark: SparkSession) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _LOGGED_SETTINGS:
        with contextlib.suppress(PySparkException, Py4JError):  # it has no value, or this version does not know it
            found[name] = str(spark.conf.get(name))
    return found


def _topics_in_order(df: DataFrame) -> list[str]:
    """The topics of the sources, as MicroBatchExecution counts them; ``None`` as a text for a source that is no
    topic."""
    return list(dict.fromkeys(_topics(df._jdf.queryExecution().analyzed())))


def _topics(plan: Any) -> Iterator[str]:
    if jvm.kind(plan) == "StreamingRelationV2":
        yield str(plan.extraOptions().get("subscribe"))
    children = plan.children()
    for number in range(children.size()):
        yield from _topics(children.apply(number))

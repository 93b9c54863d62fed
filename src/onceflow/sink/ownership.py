"""Which task writes which partition: every output partition has exactly one writer (I4).

The DataFrame of a batch is brought to the columns that tasks take, and its rows to the tasks that own their
partitions. Who owns what is a function of (topic, partition) alone, so it cannot disagree with itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import OptionError, SchemaError
from onceflow.sink import jvm
from onceflow.sink.tasks import PARTITION, STAGE_ATTEMPT, Target

_EXPECTED = (
    "the sink takes value (string or binary), and optionally key (string or binary), topic (string), partition (int), "
    "headers (array<struct<key: string, value: binary>>), timestamp (timestamp)"
)
# Above this number of topics, rows of a topic column are divided by topic only (see _group).
TOPICS_IN_PLAN_MAX = 200


@dataclass(frozen=True)
class Columns:
    """Which of the sink's columns a DataFrame has, checked."""

    key: bool
    value: bool
    headers: bool
    timestamp: bool
    topic: bool
    partition: bool
    ignored: tuple[str, ...]


def check_columns(schema: T.StructType, *, topic: str | None, flow: str) -> Columns:
    """Column names and types, as Spark's own Kafka sink takes them, plus ``timestamp``.

    Raises:
        SchemaError: a column is missing, of a wrong type, or there twice.
    """
    types: dict[str, T.DataType] = {}
    for column in schema.fields:
        if column.name in types:
            raise _schema(f"column {column.name!r} is there twice", flow)
        types[column.name] = column.dataType
    if "value" not in types:
        raise _schema(f"column 'value' is missing; there are: {', '.join(types) or 'none'}", flow)
    if topic is None and "topic" not in types:
        raise _schema("there is neither a topic= argument nor a 'topic' column", flow)
    for name, kinds in _TYPES.items():
        if name in types and not isinstance(types[name], kinds):
            wanted = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in kinds)
            raise _schema(f"column {name!r} is {types[name].simpleString()}, it must be {wanted}", flow)
    if "headers" in types:
        _check_headers(types["headers"], flow)
    used = set(_TYPES) | {"headers"}
    return Columns(
        key="key" in types,
        value=True,
        headers="headers" in types,
        timestamp="timestamp" in types,
        topic=topic is None,
        partition="partition" in types,
        ignored=tuple(name for name in types if name not in used),
    )


_TYPES: dict[str, tuple[type[T.DataType], ...]] = {
    "key": (T.StringType, T.BinaryType),
    "value": (T.StringType, T.BinaryType),
    "topic": (T.StringType,),
    "partition": (T.IntegerType,),
    "timestamp": (T.TimestampType,),
}


def _check_headers(kind: T.DataType, flow: str) -> None:
    element = kind.elementType if isinstance(kind, T.ArrayType) else None
    fields = element.fields if isinstance(element, T.StructType) else []
    right = (
        len(fields) == 2
        and fields[0].name == "key"
        and isinstance(fields[0].dataType, T.StringType)
        and fields[1].name == "value"
        and isinstance(fields[1].dataType, T.BinaryType)
    )
    if not right:
        raise _schema(
            f"column 'headers' is {kind.simpleString()}, it must be array<struct<key:string,value:binary>>", flow
        )


def _schema(what: str, flow: str) -> SchemaError:
    return SchemaError(f"The DataFrame cannot be written: {what}", flow=flow, next_step=_EXPECTED)


@dataclass(frozen=True)
class Prepared:
    """A DataFrame ready for ``mapInArrow(WriteTask)``.

    Args:
        tasks: how many tasks the job will have.
        spread: rows carry no partition, see ``WriteOrder.spread``.
    """

    df: DataFrame
    tasks: int
    spread: bool


def prepare(
    df: DataFrame,
    columns: Columns,
    *,
    partitioner: str,
    topic: str | None,
    targets: Mapping[str, Target],
    source: Mapping[str, int] | None,
    tasks_most: int,
    on_driver: bool,
) -> Prepared:
    """Select the columns tasks take, and bring every row to the task that owns its partition.

    Args:
        partitioner: ``key``, ``source`` or ``spread``; a ``partition`` column goes before ``key``.
        targets: output topics with known partition counts.
        source: partition count of every source topic, for ``source``.
        tasks_most: how many write tasks a batch of this size is worth.
        on_driver: the driver will write: nothing is moved between tasks.
    """
    spark = df.sparkSession
    selected = [_binary("value").alias("value")]
    if columns.key:
        selected.append(_binary("key").alias("key"))
    if columns.headers:
        selected.append(F.col("headers"))
    if columns.timestamp:
        selected.append(F.unix_millis("timestamp").alias("timestamp"))
    if columns.topic:
        selected.append(F.col("topic"))
    by_key = columns.topic or (partitioner == "key" and (columns.key or columns.partition))
    if partitioner == "source":
        tasks = _task_partitions(df, topic, targets, source)
        mapping = F.array(*[F.lit(p) for p in tasks]) if tasks else F.array(F.lit(0))
        where = F.element_at(mapping, F.spark_partition_id() + 1)
        return Prepared(df.select(*selected, where.alias(PARTITION)), len(tasks), spread=False)
    if columns.partition and partitioner == "spread":
        raise OptionError(
            'partitioner="spread" and a partition column contradict each other',
            next_step='drop the column, or use partitioner="key", which follows it',
        )
    if not by_key and topic is not None:
        return _spread(df.select(*selected), topic, targets, tasks_most, on_driver)
    hash_key = columns.key and partitioner == "key"
    count = _partition_count(topic, targets)
    partition = _partition(spark, columns, hash_key, count)
    keyed = df.select(*selected, partition.alias(PARTITION))
    if on_driver:
        return Prepared(keyed, 1, spread=False)
    widest = max((t.partitions for t in targets.values()), default=1)
    tasks_wanted = max(1, min(tasks_most, widest if topic is not None else tasks_most))
    if tasks_wanted == 1:
        moved = keyed.coalesce(1)
    else:
        moved = keyed.repartitionById(tasks_wanted, _group(columns, count, tasks_wanted))
    return Prepared(moved.withColumn(STAGE_ATTEMPT, jvm.stage_attempt(spark)), tasks_wanted, spread=False)


def _binary(name: str) -> Column:
    return F.col(name).cast("binary")


def _spread(df: DataFrame, topic: str, targets: Mapping[str, Target], tasks_most: int, on_driver: bool) -> Prepared:
    """No shuffle: a task keeps its rows and spreads them over the partitions it owns."""
    if on_driver:
        return Prepared(df, 1, spread=True)
    present = int(df._jdf.queryExecution().toRdd().getNumPartitions())
    tasks = max(1, min(present, tasks_most, targets[topic].partitions))
    moved = df.coalesce(tasks) if tasks < present else df
    return Prepared(moved.withColumn(STAGE_ATTEMPT, jvm.stage_attempt(df.sparkSession)), tasks, spread=True)


def _task_partitions(
    df: DataFrame, topic: str | None, targets: Mapping[str, Target], source: Mapping[str, int] | None
) -> list[int]:
    """Output partition of each task when it is the source's: checks that both have the same partitions."""
    if topic is None:
        raise OptionError(
            'partitioner="source" writes to one topic', next_step="use the topic= argument instead of a topic column"
        )
    found = jvm.source_partitions(df)
    if len({name for name, _ in found}) > 1 or len(source or {}) > 1:
        raise OptionError(
            'partitioner="source" needs one source topic',
            detail=f"this query reads {', '.join(sorted(source or {}))}",
            next_step='use partitioner="key"',
        )
    for name, count in (source or {}).items():
        if count != targets[topic].partitions:
            raise OptionError(
                f'partitioner="source" needs as many partitions in {topic} as in {name}',
                topic=topic,
                detail=f"{topic} has {targets[topic].partitions}, {name} has {count}",
                next_step='use partitioner="key", or give the topics the same partition count',
            )
    return [partition for _, partition in found]


def _partition_count(topic: str | None, targets: Mapping[str, Target]) -> Column:
    """Partition count of the row's topic; null where it is not known here (the task finds it out)."""
    if topic is not None:
        return F.lit(targets[topic].partitions)
    if 0 < len(targets) <= TOPICS_IN_PLAN_MAX:
        pairs = [F.lit(x) for name, t in sorted(targets.items()) for x in (name, t.partitions)]
        return F.element_at(F.create_map(*pairs), F.col("topic"))
    return F.lit(None).cast("int")


def _partition(spark: SparkSession, columns: Columns, hash_key: bool, count: Column) -> Column:
    """The row's partition; null where the count is null and no partition is given."""
    # Without a key any partition will do; runs of 1024 rows make for large batches.
    anywhere = (F.shiftright(F.monotonically_increasing_id(), 10) % count).cast("int")
    if hash_key:
        hashed = jvm.murmur2(spark, _binary("key")).bitwiseAND(F.lit(0x7FFFFFFF))
        chosen = F.when(F.col("key").isNull(), anywhere).otherwise(hashed % count)
    else:
        chosen = anywhere
    return F.coalesce(F.col("partition"), chosen) if columns.partition else chosen


def _group(columns: Columns, count: Column, tasks: int) -> Column:
    """The task that owns a row's (topic, partition): a function of just these two."""
    if not columns.topic:
        return F.pmod(F.col(PARTITION), F.lit(tasks)).cast("int")
    # A topic of unknown count goes to one task as a whole.
    partition = F.when(count.isNull(), F.lit(0)).otherwise(F.col(PARTITION))
    return F.pmod(F.pmod(F.hash("topic"), F.lit(tasks)) + partition, F.lit(tasks)).cast("int")

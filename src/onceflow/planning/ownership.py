"""Which task writes which partition: every output partition has exactly one writer (I4).

`prepare` selects the columns that tasks take, and moves the rows of a batch to the tasks that own their partitions.
The owner is a function of (topic, partition) alone, so a partition cannot have two owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import OptionError, SchemaError
from onceflow.messages import OutputTopic, Routing
from onceflow.options.column_names import check_reserved
from onceflow.spark import expressions, jvm
from onceflow.spark.task_shuffle import repartition_by_task

_EXPECTED = (
    "the sink takes value (string or binary), and optionally key (string or binary), topic (string), partition (int), "
    "headers (array<struct<key: string, value: binary>>), timestamp (timestamp)"
)
# With more topics than this, all rows of a topic go to one task when there is a topic column (see _group).
TOPICS_IN_PLAN_MAX = 200


@dataclass(frozen=True)
class Columns:
    """Which columns of the sink a DataFrame has. They have been checked.

    Args:
        taken: columns to select, in the order of the DataFrame.
        cast: those of them that are strings and must be cast to binary.
        ignored: columns that the sink does not know.
        has_topic: whether there is a topic column, taken or not.
        whole: whether the sink knows all columns of the DataFrame.
    """

    key: bool
    topic: bool
    partition: bool
    taken: tuple[str, ...]
    cast: tuple[str, ...]
    ignored: tuple[str, ...]
    whole: bool
    has_topic: bool = False


@dataclass(frozen=True)
class Outgoing:
    """Rows that write tasks, or the driver, are to write.

    Args:
        topic: the topic of all rows; None: each row names its own.
        in_front: how many tasks the process steps before them have, as a text; empty: there is no step.
    """

    df: DataFrame
    columns: Columns
    topic: str | None
    in_front: str = ""


def check_columns(schema: T.StructType, *, topic: str | None, flow: str, case_sensitive: bool = False) -> Columns:
    """Column names and types, as Spark's own Kafka sink takes them, plus ``timestamp``.

    Columns of other names are ignored. But one whose name is almost that of the sink's is refused.

    Args:
        case_sensitive: whether names that differ in case alone are different ones (``spark.sql.caseSensitive``).

    Raises:
        SchemaError: a column is missing, has a wrong type or almost the name of another one, or there are two of the
            same name.
    """
    types: dict[str, T.DataType] = {}
    for column in schema.fields:
        if column.name in types:
            raise _schema(f"there are two columns {column.name!r}", flow)
        types[column.name] = column.dataType
    used = SINK_COLUMNS if topic is None else SINK_COLUMNS - {"topic"}
    check_reserved(list(types), used, caller="Flow.write", flow=flow, case_sensitive=case_sensitive)
    if "value" not in types:
        raise _schema(f"column 'value' is missing; its columns: {', '.join(types) or 'none'}", flow)
    if topic is None and "topic" not in types:
        raise _schema(
            "there is neither a topic= argument nor a 'topic' column",
            flow,
            next_step='give flow.write(..., topic="NAME"), or a column "topic" (string) with the topic of each row',
        )
    for name, kinds in _TYPES.items():
        if name in types and not isinstance(types[name], kinds):
            wanted = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in kinds)
            raise _schema(f"column {name!r} is {types[name].simpleString()}, it must be {wanted}", flow)
    if "headers" in types and not is_headers(types["headers"]):
        raise _schema(f"column 'headers' is {types['headers'].simpleString()}, it must be {HEADERS}", flow)
    return Columns(
        key="key" in types,
        topic=topic is None,
        partition="partition" in types,
        taken=tuple(name for name in types if name in used),
        cast=tuple(name for name in ("key", "value") if isinstance(types.get(name), T.StringType)),
        ignored=tuple(name for name in types if name not in used and name != "topic"),
        whole=all(name in used for name in types),
        has_topic="topic" in types,
    )


_TYPES: dict[str, tuple[type[T.DataType], ...]] = {
    "key": (T.StringType, T.BinaryType),
    "value": (T.StringType, T.BinaryType),
    "topic": (T.StringType,),
    "partition": (T.IntegerType,),
    "timestamp": (T.TimestampType,),
}


#: The names of all columns that the sink knows.
SINK_COLUMNS = frozenset({*_TYPES, "headers"})

#: The type that Spark's Kafka source gives to headers.
HEADERS = "array<struct<key:string,value:binary>>"


def is_headers(kind: T.DataType) -> bool:
    """Whether a column has the type `HEADERS`; whether its fields may be null does not matter."""
    element = kind.elementType if isinstance(kind, T.ArrayType) else None
    fields = element.fields if isinstance(element, T.StructType) else []
    return (
        len(fields) == 2
        and fields[0].name == "key"
        and isinstance(fields[0].dataType, T.StringType)
        and fields[1].name == "value"
        and isinstance(fields[1].dataType, T.BinaryType)
    )


def _schema(what: str, flow: str, *, next_step: str = _EXPECTED) -> SchemaError:
    return SchemaError(f"The DataFrame cannot be written: {what}", flow=flow, next_step=next_step)


@dataclass(frozen=True)
class Prepared:
    """A DataFrame ready for ``mapInArrow(WriteTask)``.

    Args:
        routing: how a task finds the partition of a row, see `Routing`.
        shuffled: whether a lost shuffle file could make Spark attempt the write stage again.
    """

    df: DataFrame
    routing: Routing
    shuffled: bool


def prepare(
    df: DataFrame,
    columns: Columns,
    *,
    partitioner: str,
    topic: str | None,
    targets: Mapping[str, OutputTopic],
    source: Mapping[str, int],
    max_tasks: int,
    on_driver: bool,
    read_tasks: int | None = None,
    keep_tasks: bool = False,
) -> Prepared:
    """Select the columns that tasks take, and move every row to the task that owns its partition.

    The partition of a row is not added as a column, because every projection copies the values once more. So the
    tasks compute it again (``task/row_writer.py``), from the same topic and key as the shuffle.

    Args:
        partitioner: ``key``, ``source`` or ``round_robin``; a ``partition`` column goes before ``key``.
        targets: output topics with known partition counts.
        source: partition count of every source topic, for ``source``.
        max_tasks: how many write tasks suit a batch of this size.
        on_driver: whether the driver will write: then no rows are moved between tasks.
        read_tasks: how many tasks shall read the sources; None: as many as there are partitions with new records.
        keep_tasks: whether the tasks that make the rows must not be merged (a process step knows its partitions by its
            task). Then a shuffle replaces a coalesce.
    """
    selected = _selected(df, columns)
    hash_key = columns.key and partitioner == "key"
    if partitioner == "source":
        partitions = tuple(_task_partitions(df, topic, targets, source))
        if not on_driver and read_tasks is None:
            return Prepared(selected, Routing("source", len(partitions), False, partitions), shuffled=False)
        mapping = F.array(*[F.lit(p) for p in partitions or (0,)])
        where = F.element_at(mapping, F.spark_partition_id() + 1).alias("partition")
        merged = _merged(selected.withColumn("partition", where), read_tasks)
        return Prepared(merged, Routing("key", 1 if on_driver else jvm.task_total(merged), False), shuffled=False)
    selected = _merged(selected, read_tasks)
    if on_driver:
        return Prepared(selected, Routing("key", 1, hash_key), shuffled=False)
    by_key = topic is None or hash_key or columns.partition
    if not by_key and topic is not None:
        return _round_robin(selected, targets[topic], max_tasks, keep_tasks)
    most = max_tasks if topic is None else min(max_tasks, targets[topic].partitions)
    if most == 1:
        return Prepared(_fewer(selected, 1, keep_tasks), Routing("key", 1, hash_key), keep_tasks or jvm.has_shuffle(df))
    group = _group(df, columns, hash_key, topic, targets, most)
    return Prepared(repartition_by_task(selected, most, group), Routing("key", most, hash_key), shuffled=True)


def _selected(df: DataFrame, columns: Columns) -> DataFrame:
    """The sink's columns, in their order; the DataFrame itself when it has only these, with the right types."""
    if columns.whole and not columns.cast and "timestamp" not in columns.taken:
        return df
    wanted: list[Column] = []
    for name in columns.taken:
        if name in columns.cast:
            wanted.append(F.col(name).cast("binary").alias(name))
        elif name == "timestamp":
            wanted.append(F.unix_millis("timestamp").alias("timestamp"))
        else:
            wanted.append(F.col(name))
    return df.select(*wanted)


def _merged(df: DataFrame, tasks: int | None) -> DataFrame:
    """The same rows in so many tasks, without a shuffle. Rows of a source partition stay together and in order."""
    return df if tasks is None else df.coalesce(tasks)


def _fewer(df: DataFrame, tasks: int, keep_tasks: bool) -> DataFrame:
    return df.repartition(tasks) if keep_tasks else df.coalesce(tasks)


def _round_robin(df: DataFrame, target: OutputTopic, max_tasks: int, keep_tasks: bool) -> Prepared:
    """No shuffle: a task keeps its rows and spreads them over the partitions it owns."""
    present = jvm.task_total(df)
    tasks = max(1, min(present, max_tasks, target.partitions))
    moved = _fewer(df, tasks, keep_tasks) if tasks < present else df
    return Prepared(moved, Routing("key", tasks, False), keep_tasks or jvm.has_shuffle(df))


def _task_partitions(
    df: DataFrame, topic: str | None, targets: Mapping[str, OutputTopic], source: Mapping[str, int]
) -> list[int]:
    """Output partition of each task with ``partitioner="source"``."""
    check_source_partitions(topic, targets, source)
    return [partition for _, partition in jvm.source_partitions(df)]


def check_source_partitions(topic: str | None, targets: Mapping[str, OutputTopic], source: Mapping[str, int]) -> None:
    """Check that ``partitioner="source"`` can be used: one source and one output, with equally many partitions.

    Args:
        source: partition count of every source topic.

    Raises:
        OptionError: it cannot.
    """
    if topic is None:
        raise OptionError(
            'partitioner="source" writes to one topic', next_step="use the topic= argument instead of a topic column"
        )
    if len(source) > 1:
        raise OptionError(
            'partitioner="source" needs one source topic',
            detail=f"this query reads {', '.join(sorted(source))}",
            next_step='use partitioner="key"',
        )
    for name, count in source.items():
        if count != targets[topic].partitions:
            raise OptionError(
                f'partitioner="source" needs as many partitions in {topic} as in {name}',
                topic=topic,
                detail=f"{topic} has {targets[topic].partitions}, {name} has {count}",
                next_step='use partitioner="key", or give the topics the same partition count',
            )


def _group(
    df: DataFrame, columns: Columns, hash_key: bool, topic: str | None, targets: Mapping[str, OutputTopic], tasks: int
) -> Column:
    """The task that owns a row's (topic, partition); ``row_writer.owner_of`` is the same function in Python."""
    count = _partition_count(topic, targets)
    # Rows without a key may go to any partition. 1024 rows in a row go to the same one, which makes large batches.
    partition = (F.shiftright(F.monotonically_increasing_id(), 10) % count).cast("int")
    if hash_key:
        hashed = expressions.murmur2(df.sparkSession, F.col("key").cast("binary")).bitwiseAND(F.lit(0x7FFFFFFF))
        partition = F.when(F.col("key").isNull(), partition).otherwise(hashed % count)
    if columns.partition:
        partition = F.coalesce(F.col("partition"), partition)
    if topic is not None:
        return F.pmod(partition, F.lit(tasks)).cast("int")
    # If the partition count of a topic is not known here, all its rows go to one task, which finds it out.
    partition = F.when(count.isNull(), F.lit(0)).otherwise(partition)
    return F.pmod(F.crc32("topic") + partition, F.lit(tasks)).cast("int")


def _partition_count(topic: str | None, targets: Mapping[str, OutputTopic]) -> Column:
    """Partition count of the row's topic; null where it is not known here."""
    if topic is not None:
        return F.lit(targets[topic].partitions)
    if 0 < len(targets) <= TOPICS_IN_PLAN_MAX:
        pairs = [F.lit(x) for name, t in sorted(targets.items()) for x in (name, t.partitions)]
        return F.element_at(F.create_map(*pairs), F.col("topic"))
    return F.lit(None).cast("int")

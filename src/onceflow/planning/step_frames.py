"""DataFrames around a process step: its input columns, the partition of a row, the clock, its output columns."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import SchemaError
from onceflow.options.column_names import check_reserved, is_case_sensitive
from onceflow.planning.ownership import HEADERS, Columns, is_headers
from onceflow.spark import expressions
from onceflow.state.api.deduplication import SOURCE_COLUMNS

_OPTIONAL: dict[str, type[T.DataType]] = {
    "topic": T.StringType,
    "partition": T.IntegerType,
    "offset": T.LongType,
    "timestamp": T.TimestampType,
}


def state_columns(df: DataFrame, flow: str, *, one_topic: bool, caller: str = "Flow.process") -> DataFrame:
    """Only the columns that a process step takes, because every column is copied several times on its way.

    Args:
        one_topic: whether all rows come from one topic: then no topic column is needed.
        caller: what the user has called, for messages.

    Raises:
        SchemaError: key or value is missing, or a column has a wrong type or almost the name of one of these.
    """
    check_step_names(df, flow, caller)
    types = {field.name: field.dataType for field in df.schema.fields}
    for name, kind in _OPTIONAL.items():
        if name in types and not isinstance(types[name], kind):
            raise _wrong_type(name, types[name], kind.typeName(), flow, caller)
    if "headers" in types and not is_headers(types["headers"]):
        raise _wrong_type("headers", types["headers"], HEADERS, flow, caller)
    for name in ("key", "value"):
        if not isinstance(types.get(name), (T.StringType, T.BinaryType)):
            there = types[name].simpleString() if name in types else "missing"
            select = "select key and value (and topic, partition, offset, timestamp, headers if they exist)"
            cast = f"for example .withColumn({name!r}, col({name!r}).cast('string'))"
            raise SchemaError(
                f"{caller} needs the column {name!r} as string or binary; it is {there}",
                flow=flow,
                next_step=f"convert it, {cast}" if name in types else select,
            )
    wanted: list[Column] = []
    for name in types:
        if name in ("key", "value"):
            binary = isinstance(types[name], T.BinaryType)
            wanted.append(F.col(name) if binary else F.col(name).cast("binary").alias(name))
    return df.select(*wanted, *optional_columns(types, one_topic=one_topic))


def check_step_names(df: DataFrame, flow: str, caller: str) -> None:
    """Check that a step does not ignore a column because of its spelling.

    Raises:
        SchemaError: it would.
    """
    reserved = {"key", "value", "headers", *_OPTIONAL, *SOURCE_COLUMNS.values()}
    exact = is_case_sensitive(df.sparkSession)
    check_reserved(df.schema.names, reserved, caller=caller, flow=flow, case_sensitive=exact)


def optional_columns(types: Mapping[str, T.DataType], *, one_topic: bool) -> list[Column]:
    """What a step takes besides key and value.

    Where a record was read is also known behind ``Flow.deduplicate``, in columns of other names. A union may have rows
    with either.

    Args:
        types: of the columns of its rows, which have been checked.
    """
    read = {name: source for name, source in SOURCE_COLUMNS.items() if isinstance(types.get(source), _OPTIONAL[name])}
    if len(read) < len(SOURCE_COLUMNS):
        read = {}
    names = [name for name in types if name == "headers" or name in _OPTIONAL]
    names += [name for name in read if name not in types]
    wanted = []
    for name in names:
        if name == "topic" and one_topic:
            continue
        given = [F.col(each) for each in (name, SOURCE_COLUMNS.get(name, name)) if each in types]
        wanted.append(F.coalesce(*given).alias(name) if name in read else F.col(name))
    return wanted


def _wrong_type(name: str, kind: T.DataType, wanted: str, flow: str, caller: str) -> SchemaError:
    return SchemaError(
        f"{caller} takes the column {name!r} as {wanted}; it is {kind.simpleString()}",
        flow=flow,
        next_step="cast it, give it another name, or leave it out with select",
    )


def partition_of_key(df: DataFrame, partitions: int) -> Column:
    """The partition of a row's key, as Kafka's default partitioner chooses it; 0 for rows without a key."""
    hashed = expressions.murmur2(df.sparkSession, F.col("key")).bitwiseAND(F.lit(0x7FFFFFFF))
    return F.coalesce(hashed % F.lit(partitions), F.lit(0)).cast("int")


def with_default_topic(df: DataFrame, topic: str | None) -> DataFrame:
    """The rows; those that name no topic get the default one."""
    return df if topic is None else df.withColumn("topic", F.coalesce(F.col("topic"), F.lit(topic)))


def sink_columns(df: DataFrame, columns: Columns, topic: str | None) -> DataFrame:
    """The columns of a query that the sink takes, with the types of a process step's outputs.

    Args:
        columns: those of the query, which have been checked.
        topic: where all rows go; None: each row names its own.
    """
    wanted: list[Column] = []
    for name in columns.taken:
        if name in columns.cast:
            wanted.append(F.col(name).cast("binary").alias(name))
        elif name != "topic":
            wanted.append(F.col(name))
    return df.select(*wanted, (F.col("topic") if topic is None else F.lit(topic)).alias("topic"))

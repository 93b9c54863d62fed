"""``Flow.map``: its arguments, checked, and what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from onceflow.arrow_types import nullable
from onceflow.errors import OptionError, SchemaError
from onceflow.options.column_names import is_case_sensitive, twice
from onceflow.spark.collect import arrow_schema_of
from onceflow.spark.pickling import pickled
from onceflow.task.map_rows import RowsMap, Sent


def map_of(
    df: DataFrame, function: Callable[..., Any], schema: str | T.StructType | None, *, number: int, flow: str
) -> tuple[RowsMap, T.StructType]:
    """What tasks run for ``Flow.map``, and the columns of its rows.

    Args:
        number: of the function in its flow.

    Raises:
        OptionError: the function cannot be called or sent to tasks; the schema cannot be read.
        SchemaError: the schema has no columns, two of one name, or a type that Arrow does not have.
    """
    given: Any = function
    if not callable(given) or isinstance(given, type):
        raise OptionError(
            f"Flow.map takes a function, not {given!r:.100}",
            flow=flow,
            next_step="for example flow.map(df, lambda batch: batch.filter(...)): it gets and returns a RecordBatch",
        )
    name = _name_of(function)
    for is_kind, kind in ((inspect.isgeneratorfunction, "yields"), (inspect.iscoroutinefunction, "is asynchronous")):
        if is_kind(function):
            raise OptionError(
                f"Flow.map takes a function that returns a batch; {name} {kind}",
                flow=flow,
                next_step="return one pyarrow.RecordBatch for each one that the function gets",
            )
    sent = Sent(pickled(function, flow=flow))  # an error is raised at this line of user code
    columns = _struct(df.sparkSession, df.schema if schema is None else schema, flow)
    _check_names(columns.names, flow, case_sensitive=is_case_sensitive(df.sparkSession))
    types = nullable(arrow_schema_of(df.sparkSession, columns, "which Python code in tasks cannot have"))
    return RowsMap(sent, name, number, types, flow), columns


def _struct(spark: SparkSession, schema: str | T.StructType, flow: str) -> T.StructType:
    """The columns of a schema. All of them may be null: the function is free to leave values out."""
    if isinstance(schema, str):
        try:
            schema = spark.createDataFrame([], schema).schema
        except (PySparkException, ValueError) as error:
            raise OptionError(
                f"The schema of Flow.map is not understood: {schema!r:.200}",
                flow=flow,
                detail=str(error).strip().splitlines()[0],
                next_step='give names and types as in SQL, for example "key binary, value binary", or a StructType',
            ) from error
    if not isinstance(schema, T.StructType):
        raise OptionError(
            f"schema= of Flow.map is {type(schema).__name__}",
            flow=flow,
            next_step='give names and types as in SQL, for example "key binary, value binary", or a StructType',
        )
    found = _nullable(schema)
    assert isinstance(found, T.StructType)
    return found


def _check_names(names: Sequence[str], flow: str, *, case_sensitive: bool) -> None:
    double = twice(names, case_sensitive=case_sensitive)
    if not names or double is not None:
        raise SchemaError(
            "The rows of Flow.map have " + ("no columns" if double is None else f"two columns {double!r}"),
            flow=flow,
            detail="" if double is None or names.count(double) > 1 else "Spark ignores case: spark.sql.caseSensitive",
            next_step="give schema= at least one column" if double is None else "give schema=, with names that differ",
        )


def _nullable(kind: T.DataType) -> T.DataType:
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(each.name, _nullable(each.dataType), True) for each in kind.fields])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, T.MapType):
        return T.MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]

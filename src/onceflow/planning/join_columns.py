"""The columns of the DataFrame that ``Flow.join_table`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from onceflow.errors import OptionError, SchemaError
from onceflow.options.column_names import did_you_mean, is_case_sensitive, twice
from onceflow.state.api import serdes
from onceflow.state.joins.spec import JoinSpec

HOW = ("inner", "left")

# Names of types, as Spark and as Arrow write them.
_TYPES: dict[str, tuple[T.DataType, pa.DataType]] = {
    "boolean": (T.BooleanType(), pa.bool_()),
    "tinyint": (T.ByteType(), pa.int8()),
    "smallint": (T.ShortType(), pa.int16()),
    "int": (T.IntegerType(), pa.int32()),
    "bigint": (T.LongType(), pa.int64()),
    "float": (T.FloatType(), pa.float32()),
    "double": (T.DoubleType(), pa.float64()),
    "string": (T.StringType(), pa.string()),
    "binary": (T.BinaryType(), pa.binary()),
}
_ALIASES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "integer": "int",
    "int64": "bigint",
    "long": "bigint",
    "float32": "float",
    "float64": "double",
    "str": "string",
    "bytes": "binary",
}
# By the serde of a table's keys: what they are, the type to cast to, and the types of columns that can be written so.
_Keys = tuple[str, str, tuple[type[T.DataType], ...]]
_WHOLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_KEYS: dict[Any, _Keys] = {
    **dict.fromkeys((None, serdes.STRING, serdes.BYTES), ("bytes or text", "string", (T.StringType, T.BinaryType))),
    serdes.LONG: ("64-bit integers", "bigint", _WHOLE),
    serdes.DOUBLE: ("floats", "double", (T.FloatType, T.DoubleType, *_WHOLE)),
}
_ANY: _Keys = ("", "", ())
_RAW: dict[Any, str] = {serdes.STRING: "string", serdes.LONG: "bigint", serdes.DOUBLE: "double"}


def columns_of_join(
    df: DataFrame,
    spec: JoinSpec,
    *,
    on: str,
    how: str,
    columns: str | Mapping[str, str],
    flow: str,
    corrupt: str | None = None,
) -> tuple[T.StructType, pa.Schema]:
    """All columns of the joined rows for Spark, and those that are read from the table for Arrow.

    Args:
        corrupt: the name of a further column, for values that cannot be read.

    Raises:
        OptionError, SchemaError: the arguments or columns do not fit.
    """
    if how not in HOW:
        raise OptionError(f"how={how!r} is unknown", flow=flow, next_step=f"use one of {', '.join(HOW)}")
    names = df.schema.fieldNames()
    exact = is_case_sensitive(df.sparkSession)
    double = twice(names, case_sensitive=True)
    if double is not None:
        raise SchemaError(
            f"The DataFrame has two columns {double!r}", flow=flow, next_step="drop or rename one of them"
        )
    _check_key(on, {field.name: field.dataType for field in df.schema.fields}, spec, flow)
    added, schema = _added(columns, spec, flow)
    if corrupt is not None:
        if not isinstance(corrupt, str) or not corrupt:  # type: ignore[redundant-expr]
            raise OptionError(f"corrupt_column={corrupt!r:.100} names no column", flow=flow, next_step="give a name")
        added = T.StructType([*added.fields, T.StructField(corrupt, T.BinaryType())])
    if (same := twice(added.fieldNames(), case_sensitive=exact)) is not None:
        raise OptionError(
            f"columns= would add two columns {same!r}, because Spark ignores case",
            flow=flow,
            next_step="add one of them, or set spark.sql.caseSensitive to true",
        )
    known = {name if exact else name.lower(): name for name in names}
    for name in added.fieldNames():
        same = known.get(name if exact else name.lower())
        if same is not None:
            raise OptionError(
                f"The DataFrame has a column {same!r} already",
                flow=flow,
                next_step="give the column of the table another name, or drop or rename the other one",
            )
    return T.StructType([*df.schema.fields, *added.fields]), schema


def _check_key(on: str, fields: Mapping[str, T.DataType], spec: JoinSpec, flow: str) -> None:
    if on not in fields:
        nested = f'; for a field of a struct, first .withColumn("{on.split(".")[-1]}", col("{on}"))' * ("." in on)
        raise SchemaError(
            f"The DataFrame has no column {on!r}",
            flow=flow,
            next_step=f"{did_you_mean(on, fields)}on= is one of {', '.join(sorted(fields))}{nested}",
        )
    what, cast, types = _KEYS.get(spec.key, _ANY) if spec.key is None or isinstance(spec.key, serdes.Serde) else _ANY
    if isinstance(spec.key, serdes.Struct):
        what, cast, types = f"dicts for {spec.key!r}", "", (T.StructType,)
    if types and not isinstance(fields[on], (*types, T.NullType)):
        steps = [
            *([f"cast it, .withColumn({on!r}, col({on!r}).cast({cast!r}))"] if cast else []),
            "give the table the serde that its keys are written with: JoinTable(topic, key=serdes.LONG)",
        ]
        raise SchemaError(
            f"Keys of table {spec.topic} are {what}; column {on!r} is {fields[on].simpleString()}",
            flow=flow,
            next_step=", or ".join(steps),
        )


def _added(columns: Any, spec: JoinSpec, flow: str) -> tuple[T.StructType, pa.Schema]:
    """The columns to add, for Spark and for Arrow."""
    if isinstance(columns, str) and columns:
        kind = _RAW.get(spec.value, "binary") if isinstance(spec.value, serdes.Serde) else "binary"
        listed = {columns: kind}
    elif isinstance(columns, Mapping) and columns and all(isinstance(name, str) for name in columns):
        listed = dict(columns)
        if not (spec.value == serdes.JSON or isinstance(spec.value, serdes.Struct)):
            raise OptionError(
                f"Fields of table {spec.topic} are asked for, but its values are no documents with fields",
                flow=flow,
                next_step="give JoinTable(topic, value=serdes.JSON) or a struct, or columns='name' for the whole value",
            )
        if isinstance(spec.value, serdes.Struct) and (unknown := sorted(set(listed) - set(spec.value.fields))):
            raise OptionError(
                f"Values of table {spec.topic} have no field {unknown[0]!r}",
                flow=flow,
                next_step=f"{did_you_mean(unknown[0], spec.value.fields)}Their fields are "
                f"{', '.join(spec.value.fields)}",
            )
    else:
        raise OptionError(
            f"columns={columns!r:.100} names no columns",
            flow=flow,
            next_step='give names and types of fields, columns={"name": "string", "tier": "int"}, or one name for the '
            "whole value",
        )
    spark, arrow = [], []
    for name, given in listed.items():
        known = _TYPES.get(_ALIASES.get(str(given).lower(), str(given).lower()))
        if known is None:
            raise OptionError(
                f"columns= gives {name!r} the type {given!r}, which is not supported",
                flow=flow,
                next_step=f"use one of {', '.join(_TYPES)}",
            )
        spark.append(T.StructField(name, known[0]))
        arrow.append(pa.field(name, known[1]))
    return T.StructType(spark), pa.schema(arrow)

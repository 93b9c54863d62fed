"""``Flow.join_foreign_key``: its arguments, checked, and the columns of its steps."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import OptionError, SchemaError
from onceflow.options.column_names import did_you_mean
from onceflow.planning.step_frames import state_columns
from onceflow.spark.arrow_maps import quoted
from onceflow.state.foreign_keys import messages

HOW = ("inner", "left")
CALLER = "Flow.join_foreign_key"
TABLES = ("-left", "-right", "-result")
"""What the names of its three tables end with."""


def check_foreign_key_join(how: str, flow: str) -> bool:
    """Whether left rows without a right one are in the result.

    Raises:
        OptionError: an unknown kind of join.
    """
    if how not in HOW:
        raise OptionError(f"how={how!r} of {CALLER} is unknown", flow=flow, next_step=f"use one of {', '.join(HOW)}")
    return how == "left"


def left_rows(df: DataFrame, foreign_key: str, flow: str) -> DataFrame:
    """The rows of the first step: in place of the value what `messages.left_row` reads.

    Raises:
        SchemaError: a column is missing, or has a type that cannot be used.
    """
    types = {field.name: field.dataType for field in df.schema.fields}
    kind = types.get(foreign_key)
    if not isinstance(kind, T.StringType | T.BinaryType):
        there = "missing" if kind is None else kind.simpleString()
        meant = did_you_mean(foreign_key, types) if kind is None else ""
        raise SchemaError(
            f"{CALLER} takes the right row's key from the column {foreign_key!r} (string or binary); it is {there}",
            flow=flow,
            next_step=f"{meant}Make a column with the bytes of the key, for example by get_json_object or cast",
        )
    state_columns(df, flow, one_topic=False, caller=f"{CALLER} (left)")  # for its checks
    key, value = F.col(quoted(foreign_key)).cast("binary"), F.col("value").cast("binary")
    length = F.unhex(F.lpad(F.hex(F.length(key)), 8, "0"))
    message = (
        F.when(value.isNull(), _bytes(messages.DELETED))
        .when(key.isNull(), F.concat(_bytes(messages.WITHOUT_KEY), value))
        .otherwise(F.concat(_bytes(messages.WITH_KEY), length, key, value))
    )
    return state_columns(df.withColumn("value", message), flow, one_topic=False, caller=f"{CALLER} (left)")


def right_rows(df: DataFrame, flow: str) -> DataFrame:
    """The rows of right records for the second step.

    Raises:
        SchemaError: a column is missing, or has a type that cannot be used.
    """
    rows = state_columns(df, flow, one_topic=False, caller=f"{CALLER} (right)")
    value = F.col("value")
    message = F.when(value.isNull(), _bytes(messages.RIGHT_DELETED)).otherwise(F.concat(_bytes(messages.RIGHT), value))
    return rows.withColumn("value", message)


def result_columns(rows: DataFrame) -> DataFrame:
    """What the last step yields, as columns: see `messages.joined`."""
    value = F.col("value")
    has_right = F.substring(value, 1, 1) == _bytes(b"\1")
    length = "int(conv(hex(substring(value, 2, 4)), 16, 10))"
    left, right = F.expr(f"substring(value, 6, {length})"), F.expr(f"substring(value, 6 + {length})")
    return rows.select("key", left.alias("left_value"), F.when(has_right, right).alias("right_value"))


def _bytes(raw: bytes) -> Column:
    return F.unhex(F.lit(raw.hex()))

"""``Flow.join_interval`` and ``Flow.join_as_of``: their arguments, checked, and the columns that their step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from onceflow.errors import OptionError, SchemaError
from onceflow.options.durations import duration_ms
from onceflow.planning.step_frames import state_columns
from onceflow.protocol.timestamps import LATEST_MS
from onceflow.spark.queries import check_query
from onceflow.spark.query_facts import topics_read
from onceflow.state.api.time_joins import IS_RIGHT, JOINED_COLUMNS, AsOfJoin, IntervalJoin, TimeJoin

INTERVAL_HOW = ("inner", "left", "right", "full")
AS_OF_HOW = ("inner", "left")
RESULT = ("key", *JOINED_COLUMNS, "timestamp")
"""The columns of the results."""


@dataclass(frozen=True)
class TimeJoinOptions:
    """Arguments of a join by time that other steps do not have, as given."""

    caller: str
    how: str
    allowed_lateness: str | float
    max_ahead: Any


def interval_join(options: TimeJoinOptions, before: Any, after: Any, flow: str) -> IntervalJoin:
    """What the step of ``Flow.join_interval`` runs.

    Raises:
        OptionError: see its text.
    """
    _check_how(options, INTERVAL_HOW, flow)
    bounds = [_milliseconds(name, given, flow) for name, given in (("before", before), ("after", after))]
    return IntervalJoin(*bounds, options.how, options.allowed_lateness, options.max_ahead)


def as_of_join(options: TimeJoinOptions, tolerance: Any, flow: str) -> AsOfJoin:
    """What the step of ``Flow.join_as_of`` runs.

    Raises:
        OptionError: see its text.
    """
    _check_how(options, AS_OF_HOW, flow)
    tolerance_ms = None if tolerance is None else _milliseconds("tolerance", tolerance, flow)
    return AsOfJoin(tolerance_ms, options.how, options.allowed_lateness, options.max_ahead)


def _check_how(options: TimeJoinOptions, known: tuple[str, ...], flow: str) -> None:
    if options.how not in known:
        raise OptionError(
            f"how={options.how!r} of {options.caller} is unknown", flow=flow, next_step=f"use one of {', '.join(known)}"
        )


def _milliseconds(name: str, given: Any, flow: str) -> int:
    try:
        found = duration_ms(given)
        if found > LATEST_MS:
            raise ValueError("it is longer than any time that a record can have")
        return found
    except (ValueError, TypeError) as error:
        raise OptionError(f"{name}={given!r}: {error}", flow=flow, next_step='for example "5 minutes", or 0') from None


def both_streams(left: DataFrame, right: DataFrame, join: TimeJoin, caller: str, flow: str) -> DataFrame:
    """The rows of both streams, with the columns that a step takes, and one that says which stream a row is of.

    Args:
        join: is told which topics the streams are from.

    Raises:
        SchemaError: a column is missing, or has a type that cannot be used.
        UnsupportedQueryError: one of them is no stream of the flow.
    """
    sides, names = [], []
    for name, df in (("left", left), ("right", right)):
        facts = check_query(df, flow, call=caller, columns=False)
        if not facts.has_step and (lacking := [each for each in ("topic", "partition") if each not in df.columns]):
            raise SchemaError(
                f"{caller} has to know the partition of a record, and the {name} stream has no column {lacking[0]!r}",
                flow=flow,
                detail="without it, event time would follow the partition that is furthest ahead, and good records of "
                "the others would be late",
                next_step="keep topic, partition and offset: .selectExpr('... AS key', 'value', 'timestamp', 'topic', "
                "'partition', 'offset')",
            )
        rows = state_columns(df, flow, one_topic=False, caller=f"{caller} ({name})")
        if "timestamp" not in rows.columns:
            raise SchemaError(
                f"{caller} takes the event time of a record from the column 'timestamp'; the {name} stream has none",
                flow=flow,
                next_step="keep the column timestamp of Flow.read, or select another one as timestamp",
            )
        sides.append(rows.withColumn(IS_RIGHT, F.lit(name == "right")))
        names.append(", ".join(sorted(topics_read(facts.root))))
    join.streams = (names[0], names[1])
    return sides[0].unionByName(sides[1], allowMissingColumns=True)

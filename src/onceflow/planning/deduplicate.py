"""``Flow.deduplicate``: its arguments, checked, and the columns that its step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from onceflow.errors import OptionError, SchemaError, counted
from onceflow.options.column_names import did_you_mean, is_case_sensitive
from onceflow.options.durations import duration_ms
from onceflow.planning.step_frames import check_step_names, optional_columns, state_columns
from onceflow.spark.arrow_maps import quoted
from onceflow.state.api.deduplication import EVENT_TIME, RECORD_KEY, Deduplication
from onceflow.state.api.processor import MAX_AHEAD

DROP = "drop"
HASHED = "sha256:"
"""What the state's key of a long id begins with. An id that is such a key by itself is replaced like a long one, or it
would be taken for one."""

_AS_TEXT = (
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.DecimalType,
    T.BooleanType,
    T.DateType,
)
_RECORDS_MAX = 1 << 40
_ID_BYTES_MAX = 470
_HEX_DIGITS = 64


@dataclass(frozen=True)
class DedupOptions:
    """Arguments of ``Flow.deduplicate`` that other steps do not have, as given."""

    id: str
    within: Any
    records: Any
    late: Any
    duplicates_topic: str | None
    event_time: str | None
    max_ahead: Any = MAX_AHEAD

    @property
    def late_topic(self) -> str | None:
        return None if self.late == DROP else str(self.late)


def check_deduplication(options: DedupOptions, flow: str) -> Deduplication:
    """Check the arguments that need no DataFrame.

    Raises:
        OptionError: see its text.
    """
    if (options.within is None) == (options.records is None):
        given = "both are given" if options.records is not None else "neither is given"
        raise OptionError(
            f"Flow.deduplicate takes either within= or records=; {given}",
            flow=flow,
            next_step='give within="24 hours" (of stream time), or records=1_000_000 (the last ids of each partition)',
        )
    if options.records is not None:
        _check_records(options, flow)
    if not isinstance(options.late, str) or not options.late:
        raise OptionError(
            f"late={options.late!r} is no topic", flow=flow, next_step='give the name of a topic, or late="drop"'
        )
    return Deduplication(
        within_ms=None if options.within is None else _milliseconds(options.within, flow),
        records=options.records,
        duplicates_topic=options.duplicates_topic,
        id_name=options.id,
        id_is_key=options.id == "key",
        max_ahead=options.max_ahead,
    )


def _check_records(options: DedupOptions, flow: str) -> None:
    if isinstance(options.records, bool) or not isinstance(options.records, int) or options.records < 1:
        raise OptionError(f"records={options.records!r} is no count", flow=flow, next_step="give at least 1")
    if options.records > _RECORDS_MAX:
        raise OptionError(f"records={options.records} is too many", flow=flow, next_step=f"give at most {_RECORDS_MAX}")
    for name, value, default in (
        ("late", options.late, DROP),
        ("event_time", options.event_time, None),
        ("max_ahead", options.max_ahead, MAX_AHEAD),
    ):
        if value != default:
            raise OptionError(
                f"{name}= cannot be combined with records=: no record is late where time does not matter",
                flow=flow,
                next_step=f"leave {name}= out, or give within= in place of records=",
            )


def _milliseconds(within: Any, flow: str) -> int:
    try:
        milliseconds = duration_ms(within)
        if milliseconds <= 0:
            raise ValueError("it must be positive")
    except (ValueError, TypeError) as error:
        raise OptionError(f"within={within!r}: {error}", flow=flow, next_step='for example "24 hours"') from None
    return milliseconds


def dedup_columns(df: DataFrame, options: DedupOptions, flow: str, *, one_topic: bool) -> DataFrame:
    """The rows of the step: those of every step, with the id in place of the key, and the record's key beside it.

    A long id is replaced by its SHA-256, so that the state of a key stays small; so is one that is such a digest.

    Args:
        one_topic: whether all rows come from one topic: then no topic column is needed.

    Raises:
        SchemaError: a column is missing, or has a type that cannot be used.
    """
    check_step_names(df, flow, "Flow.deduplicate")
    types = {field.name: field.dataType for field in df.schema.fields}
    _check_once(df, options, flow)
    id_ = _id_column(options.id, types, flow)
    plain = df.select(*[F.col(quoted(name)) for name in types if name in _KAFKA])
    state_columns(plain, flow, one_topic=one_topic, caller="Flow.deduplicate")  # for its checks
    further = [_event_time(options, types, flow)] if options.within is not None else []
    # One projection, in which every expression sees the columns of ``df``.
    binary_key = F.col("key") if isinstance(types["key"], T.BinaryType) else F.col("key").cast("binary")
    marker = F.lit(HASHED).cast("binary")
    is_digest = (F.length(id_) == F.lit(len(HASHED) + _HEX_DIGITS)) & F.startswith(id_, marker)
    is_hashed = (F.length(id_) > F.lit(_ID_BYTES_MAX)) | is_digest
    hashed = F.concat(F.lit(HASHED), F.sha2(id_, 256)).cast("binary")
    wanted: list[Column] = [F.when(is_hashed, hashed).otherwise(id_).alias("key")]
    wanted.append((F.when(is_hashed, id_) if options.id == "key" else binary_key).alias(RECORD_KEY))
    value = F.col("value") if isinstance(types["value"], T.BinaryType) else F.col("value").cast("binary")
    wanted.append(value.alias("value"))
    wanted += optional_columns(types, one_topic=one_topic)
    return df.select(*wanted, *[column for column in further if column is not None])


_KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")


def _check_once(df: DataFrame, options: DedupOptions, flow: str) -> None:
    """Check that the columns that are named are there only once.

    Raises:
        SchemaError: one of them is there twice, so nobody knows which one is meant.
    """
    exact = is_case_sensitive(df.sparkSession)
    for argument, wanted in (("id", options.id), ("event_time", options.event_time)):
        same = [
            each for each in df.schema.names if each == wanted or (not exact and each.lower() == str(wanted).lower())
        ]
        if wanted in same and len(same) > 1:
            raise SchemaError(
                f"Flow.deduplicate({argument}={wanted!r}): for Spark, there are {counted(len(same), 'column')} of "
                "this name",
                flow=flow,
                detail=f"the columns {', '.join(map(repr, same))}",
                next_step="drop or rename the other ones",
            )


def _id_column(name: str, types: dict[str, T.DataType], flow: str) -> Column:
    """The id as binary."""
    kind = types.get(name)
    if kind is None:
        raise SchemaError(
            f"Flow.deduplicate takes the id from the column {name!r}, which does not exist",
            flow=flow,
            detail=f"there are {', '.join(types)}",
            next_step=f'{did_you_mean(name, types)}Name a column of the DataFrame, or "key"',
        )
    column = F.col(quoted(name))
    if isinstance(kind, T.BinaryType):
        return column
    if isinstance(kind, T.StringType):
        return column.cast("binary")
    if isinstance(kind, _AS_TEXT):
        return column.cast("string").cast("binary")
    raise SchemaError(
        f"Flow.deduplicate cannot take ids of the type {kind.simpleString()} from the column {name!r}",
        flow=flow,
        detail="their text depends on settings, or is not the same for equal values",
        next_step="make a string or binary column, for example with cast, date_format, to_json or concat_ws",
    )


def _event_time(options: DedupOptions, types: dict[str, T.DataType], flow: str) -> Column | None:
    """The column of event times in milliseconds; None: the record's timestamp, which the rows have anyway."""
    name = options.event_time or "timestamp"
    kind = types.get(name)
    if isinstance(kind, T.TimestampType):
        return None if name == "timestamp" else F.unix_millis(F.col(quoted(name))).alias(EVENT_TIME)
    if isinstance(kind, T.LongType):
        return F.col(quoted(name)).alias(EVENT_TIME)
    there = "missing" if kind is None else kind.simpleString()
    meant = did_you_mean(name, types) if kind is None else ""
    raise SchemaError(
        f"Flow.deduplicate(within=...) takes the time of a record from the column {name!r} as a timestamp or as epoch "
        f"milliseconds (bigint); it is {there}",
        flow=flow,
        next_step=f"{meant}Keep the column timestamp of Flow.read, or name another one with event_time=",
    )

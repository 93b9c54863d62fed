"""``peek``: some records of a topic as a batch DataFrame, to look at while flows run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from onceflow.admin.records.topic_excerpt import MAX_RECORDS, Excerpt, take
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.topics import topic_config
from onceflow.clock import clock_ms
from onceflow.errors import OptionError
from onceflow.options.arguments import checked_arguments
from onceflow.options.durations import duration_ms
from onceflow.protocol.timestamps import as_datetime
from onceflow.state.api.record import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SERVERS_VARIABLE = "ONCEFLOW_BOOTSTRAP_SERVERS"
DEFAULT_LAST = 1000
# As Flow.read with include_headers=True.
SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key: string, value: binary>>"
)
_SETTINGS_S = 30.0
_TIMESTAMP_TYPES = {"CreateTime": 0, "LogAppendTime": 1}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@checked_arguments
def peek(
    spark: SparkSession,
    topic: str,
    *,
    last: int | None = None,
    first: int | None = None,
    since: str | float | datetime | None = None,
    partitions: Sequence[int] | None = None,
    bootstrap_servers: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Some committed records of a topic as a batch DataFrame. No flow is fenced and no consumer group is used.

    The records are read by this call, into the memory of the driver: those that are committed now, up to the first
    open transaction. The rows have the oldest record first. Within a partition they are in the order of their offsets.
    Timestamps decide between partitions.

    Args:
        spark: any session.
        topic: the topic to look at.
        last: its last records, at most this many in all partitions together; None: 1000, without ``first`` and
            ``since``.
        first: the first records instead.
        since: only records from this time on: a duration before now (``"1 hour"``, or seconds) or a datetime with a
            time zone. Without ``last`` and ``first`` all of them, at most 1,000,000.
        partitions: only these, for example ``[0, 1]``; None: all.
        bootstrap_servers: as of `Flow`; None: ``$ONCEFLOW_BOOTSTRAP_SERVERS``.
        options: as of `Flow`.

    Returns:
        The columns of ``Flow.read(..., include_headers=True)``. ``timestamp`` is null if the record has none, or one
        after the year 9999. ``timestampType`` is that of the topic's settings now; null if they may not be read.

    Raises:
        OptionError: an argument is invalid, there is no such partition, or there are more than 1,000,000 records.
        UnknownTopicError: there is no such topic; it names those of a similar name.
        OnceflowError: the brokers do not answer, or refuse a request.
    """
    wanted = _excerpt(topic, last=last, first=first, since=since, partitions=partitions)
    servers = os.environ.get(SERVERS_VARIABLE, "").strip() if bootstrap_servers is None else bootstrap_servers
    if not servers:
        raise OptionError(
            "No bootstrap servers are given",
            topic=topic,
            next_step=f"give bootstrap_servers=, or set {SERVERS_VARIABLE}",
        )
    return _frame(spark, ClientSettings(servers, options or {}), topic, wanted)


def _excerpt(
    topic: str,
    *,
    last: int | None,
    first: int | None,
    since: str | float | datetime | None,
    partitions: Sequence[int] | None,
) -> Excerpt:
    """The arguments of `peek`, checked.

    Raises:
        OptionError: an argument is invalid.
    """
    if last is not None and first is not None:
        raise OptionError("Both last= and first= are given", topic=topic, next_step="give one of them")
    for name, count in (("last", last), ("first", first)):
        if count is not None and not (_is_number(count) and count >= 1):
            raise OptionError(f"{name}={count!r} is not a number of records", topic=topic, next_step="for example 1000")
    if partitions is not None and not _are_numbers(partitions):
        raise OptionError(
            f"partitions={partitions!r} is not a list of partitions", topic=topic, next_step="for example [0, 1]"
        )
    since_ms = None if since is None else _since_ms(since, topic)
    count = last if first is None else first
    everything = count is None and since is not None
    return Excerpt(
        count or (MAX_RECORDS if everything else DEFAULT_LAST),
        newest=first is None,
        since_ms=since_ms,
        partitions=partitions,
        fails_beyond=everything,
    )


def _frame(spark: SparkSession, settings: ClientSettings, topic: str, wanted: Excerpt) -> DataFrame:
    """The records of an excerpt as a DataFrame. Errors as of `peek`."""
    with contextlib.closing(Cluster(settings)) as cluster:
        records = take(cluster, topic, wanted)
        setting = topic_config(cluster, topic, "message.timestamp.type", Deadline(_SETTINGS_S, f"reading {topic}"))
    kind = _TIMESTAMP_TYPES.get(setting or "")
    # Rows work with every version of Spark; Arrow tables are taken from 4.0 on. The values have the right types.
    return spark.createDataFrame([_row(record, kind) for record in records], SCHEMA, verifySchema=False)


def _row(record: Record, kind: int | None) -> tuple[Any, ...]:
    at = as_datetime(record.timestamp_ms)
    headers = list(record.headers) or None  # Spark's source has null where there are none
    return record.key, record.value, record.topic, record.partition, record.offset, at, kind, headers


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _are_numbers(given: object) -> bool:
    return isinstance(given, Sequence) and len(given) > 0 and all(map(_is_number, given))


def _since_ms(since: str | float | datetime, topic: str) -> int:
    if isinstance(since, datetime):
        if since.tzinfo is None:
            raise OptionError(
                f"since={since!r} has no time zone",
                topic=topic,
                next_step="for example datetime(2025, 1, 31, 8, tzinfo=timezone.utc)",
            )
        return max(0, (since - _EPOCH) // timedelta(milliseconds=1))
    try:
        return max(0, clock_ms() - duration_ms(since))
    except ValueError as error:
        raise OptionError(
            f"since={since!r} is neither a duration nor a datetime",
            topic=topic,
            detail=str(error),
            next_step='for example "1 hour"',
        ) from None

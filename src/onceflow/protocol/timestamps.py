"""What the times of records mean. Everything that reads, compares, writes or shows them follows this module.

- **Unknown**: a time before 1970, such as the -1 of clients without timestamps (Kafka: RecordBatch.NO_TIMESTAMP). The
  record has no time then: user code sees None, it moves no watermark, and copies of it get the time of writing.
- **Far ahead**: an event time further ahead of the clock than a processor's ``max_ahead``. The record is a bad one.
- **Refused**: a topic accepts only times near the clock of its brokers (KIP-937: ``message.timestamp.before.max.ms``,
  ``message.timestamp.after.max.ms``). A record with another time gets the time of writing, and its own in a header.
- **Not representable**: times are microseconds in 64 bits in Spark and Arrow. Later ones count as the latest of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.protocol.headers import HEADERS

NO_TIMESTAMP = -1
"""Kafka's timestamp of a record that has none."""

LATEST_MS = (2**63 - 1) // 1000
"""The latest time that a timestamp of Spark and Arrow can have, in the year 294247."""

ORIGINAL_TIMESTAMP = "onceflow.timestamp"
"""Header with the timestamp, in epoch milliseconds, that the topic has refused."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# The Gregorian calendar repeats itself after so many years.
_DAY_MS = 86_400_000
_CYCLE_YEARS, _CYCLE_MS = 400, 146_097 * _DAY_MS
_LAST_OF_PYTHON_MS = 253_402_300_799_999

# The clocks of tasks and brokers differ, and a record is appended some time after its task has looked at the clock. So
# times near a bound count as refused: within this time, or within this part of a bound that is short.
_MARGIN_MS, _MARGIN_PART = 600_000, 6
# How long before and after this moment the time of writing may be: for clocks that differ, and for a batch that runs.
_EARLIER_MS, _LATER_MS = 60_000, 600_000
_UNLIMITED_MS = 2**63 - 1
_DEFAULT_AFTER_MS = 3_600_000  # Kafka's default since 4.0 (KIP-1030)

ACCEPTED_TIMES_SETTINGS = (
    "message.timestamp.type",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
    "message.timestamp.difference.max.ms",  # until 3.6
)


class FarAheadRecord(ValueError):
    """The event time of a record is too far ahead of the clock: no clock in order has written it."""

    def __init__(self, at_ms: int, now_ms: int, max_ahead: object) -> None:
        super().__init__(at_ms, now_ms, max_ahead)
        self.at_ms, self.now_ms, self.max_ahead = at_ms, now_ms, max_ahead

    def __str__(self) -> str:
        shown = f"event time {self.at_ms}"
        if self.max_ahead is None:
            return f"{shown} is no time in milliseconds since 1970"
        return (
            f"{shown} ({in_utc(self.at_ms)}) is ahead of the clock ({in_utc(self.now_ms)}) by more than "
            f"max_ahead={self.max_ahead!r}; an event time is in milliseconds since 1970"
        )


def known_ms(timestamp_ms: int | None) -> int | None:
    """The time of a record; None: it is unknown.

    Args:
        timestamp_ms: epoch milliseconds, as in Kafka.
    """
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    return min(timestamp_ms, LATEST_MS)


def whole_ms(given: Any) -> int:
    """A number of milliseconds that user code has given, as an int.

    Raises:
        TypeError: it is no whole number. True and False are none, although Python counts with them.
    """
    if isinstance(given, bool):
        raise TypeError(f"{given!r} is no number of milliseconds")
    return index(given)


def known_times(column: Any) -> Any:
    """As `known_ms`, for an int64 Arrow array of epoch milliseconds. The array itself, if it has nothing to change."""
    low, high = pc.min_max(column).as_py().values()
    if low is not None and low < 0:
        column = pc.if_else(pc.less(column, 0), pa.scalar(None, pa.int64()), column)
    if high is not None and high > LATEST_MS:
        column = pc.min_element_wise(column, pa.scalar(LATEST_MS, pa.int64()), skip_nulls=False)
    return column


def in_utc(epoch_ms: int | None) -> str:
    """A time as text in ISO 8601, in UTC, to the second: years beyond 9999 have a sign and more digits."""
    if epoch_ms is None or epoch_ms < 0:
        return "unknown"
    cycles = 0
    if epoch_ms > _LAST_OF_PYTHON_MS:
        cycles = (epoch_ms - _LAST_OF_PYTHON_MS) // _CYCLE_MS + 1
    at = _EPOCH + timedelta(milliseconds=epoch_ms - cycles * _CYCLE_MS)
    text = at.isoformat(timespec="seconds")
    return text if not cycles else f"+{at.year + cycles * _CYCLE_YEARS}{text[4:]}"


def as_datetime(epoch_ms: int | None) -> datetime | None:
    """The time as a datetime in UTC; None: it is unknown, or later than Python can express it in every time zone."""
    if epoch_ms is None or not 0 <= epoch_ms <= _LAST_OF_PYTHON_MS - _DAY_MS:
        return None
    return _EPOCH + timedelta(milliseconds=epoch_ms)


def of_datetime(at: datetime) -> int | None:
    """Epoch milliseconds of a datetime; without a time zone, it is local time. None: the time is unknown."""
    try:
        return known_ms((at.astimezone(timezone.utc) - _EPOCH) // timedelta(milliseconds=1))
    except (OverflowError, ValueError, OSError):  # at the edges of what Python can express
        return None


def age_ms(epoch_ms: int | None, now_ms: int) -> int | None:
    """How long ago a time was, at least 0; None: it is unknown, or so far ahead that it cannot be right."""
    if epoch_ms is None or epoch_ms < 0 or epoch_ms - now_ms > _DAY_MS:
        return None
    return max(0, now_ms - epoch_ms)


class AcceptedTimes(NamedTuple):
    """Which timestamps a topic accepts.

    Args:
        before_ms, after_ms: how far before and after the clock of its brokers they may be, in milliseconds.
    """

    before_ms: int = _UNLIMITED_MS
    after_ms: int = _UNLIMITED_MS

    @classmethod
    def of(cls, settings: Mapping[str, str | None]) -> AcceptedTimes:
        """What a topic with these `ACCEPTED_TIMES_SETTINGS` accepts.

        Args:
            settings: None, or missing: the setting does not exist, or may not be read. If none may be read, it is
                Kafka's default.
        """
        if settings.get("message.timestamp.type") == "LogAppendTime":
            return cls()
        older = _limit(settings, "message.timestamp.difference.max.ms")
        before, after = (_limit(settings, f"message.timestamp.{side}.max.ms") for side in ("before", "after"))
        if before is None and after is None and older is None:
            return cls(after_ms=_DEFAULT_AFTER_MS)
        # Brokers from 3.6 to 3.9 have all three. A side that is not limited has the limit of the older setting there.
        return cls(*(_unlimited(older) if ms == _UNLIMITED_MS else ms for ms in map(_unlimited, (before, after))))

    def refused(self, times: Any, now_ms: int) -> npt.NDArray[np.bool_] | None:
        """Which of the times the topic does, or may, refuse; None: none of them.

        Args:
            times: int64 Arrow array of epoch milliseconds; null: the time of writing.
        """
        if self.before_ms == self.after_ms == _UNLIMITED_MS or len(times) == times.null_count:
            return None
        first, last = self._span(now_ms)
        low, high = pc.min_max(times).as_py().values()
        if low >= first and high <= last:
            return None
        outside = pc.or_(pc.less(times, first), pc.greater(times, last))
        found: npt.NDArray[np.bool_] = outside.fill_null(False).to_numpy(zero_copy_only=False)
        return found

    def accepts(self, timestamp_ms: int, now_ms: int) -> bool:
        """As `refused`, for one time."""
        first, last = self._span(now_ms)
        return first <= timestamp_ms <= last

    def may_refuse(self, timestamp_ms: int, now_ms: int) -> bool:
        """Whether the topic refuses a time, or will have begun to when the record of a batch that runs is written."""
        return not (self.accepts(timestamp_ms, now_ms - _EARLIER_MS) and self.accepts(timestamp_ms, now_ms + _LATER_MS))

    def _span(self, now_ms: int) -> tuple[int, int]:
        before = self.before_ms - min(_MARGIN_MS, self.before_ms // _MARGIN_PART)
        after = self.after_ms - min(_MARGIN_MS, self.after_ms // _MARGIN_PART)
        return max(0, now_ms - before), min(_UNLIMITED_MS, now_ms + after)


ANY_TIME = AcceptedTimes()


class Fitted(NamedTuple):
    """Timestamps and headers of records, as the topic accepts them.

    Args:
        times: epoch milliseconds; null: the time of writing.
        headers: with `ORIGINAL_TIMESTAMP` where the topic refuses a timestamp; None: no record has any.
        refused: how many it refuses.
        example_ms: one of those.
    """

    times: Any
    headers: Any
    refused: int = 0
    example_ms: int = 0


def fitted(times: Any, headers: Any, accepted: AcceptedTimes, now_ms: int) -> Fitted:
    """Replace timestamps that a topic refuses by the time of writing, and keep them in a header.

    Args:
        times: int64 Arrow array of epoch milliseconds; negative or null: the time of writing.
        headers: Arrow array of lists of structs of name and value; None: no record has any.
    """
    given, times = times, known_times(times)
    refused = accepted.refused(times, now_ms)
    if refused is None or not refused.any():
        return Fitted(times, headers)
    mask = pa.array(refused)
    own = given.filter(mask)
    headers = _with_original(pa.nulls(len(times), HEADERS) if headers is None else headers, own, refused)
    return Fitted(pc.if_else(mask, pa.scalar(None, pa.int64()), times), headers, len(own), own[0].as_py())


def _with_original(headers: Any, times: Any, refused: npt.NDArray[np.bool_]) -> Any:
    """The headers of records, with `ORIGINAL_TIMESTAMP` as the last one of those whose times are refused.

    Args:
        times: those that are refused.
    """
    name, value = headers.type.value_type
    names = pa.array([ORIGINAL_TIMESTAMP], name.type).take(pa.array(np.zeros(len(times), np.int64)))
    own = pa.StructArray.from_arrays([names, times.cast(pa.string()).cast(value.type)], fields=[name, value])
    entries = pa.concat_arrays([headers.flatten(), own])
    lengths = pc.list_value_length(headers).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths + refused, dtype=np.int32)
    last = np.zeros(len(entries), dtype=bool)
    last[ends[refused] - 1] = True
    order = np.empty(len(entries), np.int64)
    order[last] = np.arange(len(entries) - len(own), len(entries))
    order[~last] = np.arange(len(entries) - len(own))
    # A null offset is a null list.
    none = np.append(headers.is_null().to_numpy(zero_copy_only=False) & ~refused, False)
    offsets = pa.array(np.concatenate(([0], ends)).astype(np.int32), pa.int32(), mask=none)
    return pa.ListArray.from_arrays(offsets, entries.take(pa.array(order))).cast(headers.type)


def _limit(settings: Mapping[str, str | None], name: str) -> int | None:
    value = settings.get(name)
    return None if value is None else int(value)


def _unlimited(limit_ms: int | None) -> int:
    return _UNLIMITED_MS if limit_ms is None else limit_ms

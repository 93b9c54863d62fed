"""``IntervalJoin`` and ``AsOfJoin``: what ``Flow.join_interval`` and ``Flow.join_as_of`` give to their engines in place
of user code."""

from __future__ import annotations

import re
from typing import Any, Literal

from onceflow.state.api.processor import MAX_AHEAD, ColumnProcessor

IS_RIGHT = "is_right"
"""A column of the rows of a join by time: whether a row is one of the right stream."""

JOINED_COLUMNS = ("left_value", "right_value", "left_timestamp", "right_timestamp")
"""Columns of the results, besides those of every step: the values, and the event times. An event time is null where
there is no record of that side."""

How = Literal["inner", "left", "right", "full"]
_KEPT = re.compile(r"(inner|left|right|full) (as-of |foreign-key )?join with")


def of_time_join(kept: str | None) -> bool:
    """Whether this is the `TimeJoin.kept` of some join, and not what other processors declare."""
    return kept is not None and _KEPT.match(kept) is not None


class TimeJoin(ColumnProcessor):
    """A join of two streams by key and event time.

    Args:
        how: ``inner``, ``left``, ``right`` or ``full``: of which streams also records without a match are in the
            results.
        allowed_lateness, max_ahead: as in `Processor`.
    """

    def __init__(self, how: How, allowed_lateness: str | float, max_ahead: str | float | None = MAX_AHEAD) -> None:
        self.how = how
        self.streams = ("", "")
        """The topics that each stream is from, as text."""
        self.allowed_lateness = allowed_lateness
        self.max_ahead = max_ahead

    @property
    def kept(self) -> str:
        """What decides which rows are kept, as text. A start with another one than that of the table is refused."""
        raise NotImplementedError

    def keeps_unmatched(self, *, right: bool) -> bool:
        """Whether the results have records of a stream that have no match."""
        return self.how in ("full", "right" if right else "left")


class IntervalJoin(TimeJoin):
    """Pairs of records with the same key, of which the right one is at most so much earlier or later.

    A pair is in the results if ``left - before <= right <= left + after``. A row is kept until no record that is in
    time can be its partner.

    Args:
        before_ms, after_ms: the bounds in milliseconds, not negative.
    """

    def __init__(self, before_ms: int, after_ms: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before_ms, self.after_ms = before_ms, after_ms

    @property
    def kept(self) -> str:
        interval = f"the interval from {-self.before_ms} to {self.after_ms} ms"
        return f"{self.how} join with {interval} of {' and '.join(self.streams)}"

    def last_partner_ms(self, *, right: bool) -> int:
        """How much later than a record of a stream its last possible partner is."""
        return self.before_ms if right else self.after_ms


class AsOfJoin(TimeJoin):
    """Each left record with the last right one of its key that is not later.

    Of right records with the same time, the one that arrived last counts. A tombstone says that there is none from its
    time on.

    Args:
        tolerance_ms: how much earlier the right record may be, in milliseconds; None: as much as it likes.
    """

    def __init__(self, tolerance_ms: int | None, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tolerance_ms = tolerance_ms

    @property
    def kept(self) -> str:
        tolerance = "no tolerance" if self.tolerance_ms is None else f"a tolerance of {self.tolerance_ms} ms"
        return f"{self.how} as-of join with {tolerance} of {' and '.join(self.streams)}"

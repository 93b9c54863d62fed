"""The watermark: event time over several partitions.

The watermark is the smallest of the latest event times of all active partitions, minus the allowed lateness. It never
goes back. A partition without records for ``idle_s`` seconds is idle, and the watermark ignores it. If all are idle, it
is that of the partition that had records last: as if they had become idle one after the other, however rarely somebody
looks. (Flink's StatusWatermarkValve does the same for the same reason, with the largest watermark of all. Spark's
watermark uses the *largest* event time, which makes records of slow partitions late.)

If a flow asks for it (``clock_after``), event time goes on by the clock when all partitions have been idle for so long:
windows close, though nothing comes any more. It never passes the time of day, and what comes later with an earlier time
is late.

How long a partition is idle counts in wall-clock time over the runs of a flow, so that runs that end soon do not wait
for it for ever.

A step behind another step knows only the partitions of that step that have brought records; it finds them in progress
again. They have no records that wait in Kafka. So the time in which no flow ran counts only if nothing has come to the
flow's sources meanwhile, and none is silent before a batch has read what has come to them. The same goes for rows that
do not tell from which partition of a source they are: they count for the partition of the step's table, under the name
of the source if there is only one.

What records mean for it (the engines decide, see `BaseEngine._note_times`; docs: state.md):

- A record with an event time counts for its partition, also one that is late, or a duplicate.
- A record without one, processed or rejected for that, says that its partition may never have any: a partition with
  only such records is not waited for.
- A record that is rejected for another reason has no effect. Nor has one that a query drops before the step. Until
  they are read, both are records that arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from onceflow.clock import clock_ms, passing_s
from onceflow.protocol.progress import EventTime, Origin

__all__ = ["Origin", "Watermark"]

_NOTHING: frozenset[Origin] = frozenset()


class Watermark:
    """The driver's view of event time.

    Args:
        origins: partitions that the watermark waits for from the start, until they are idle.
        lateness_ms: how far the event time of a record may be behind the latest one of its partition.
        idle_s: seconds without records after which a partition is idle.
        clock_s: seconds without records in any partition after which event time goes on by the clock; None: never.
        value_ms: the committed watermark; None: not known yet.
        known: what earlier runs have committed about partitions.
        known_at_ms: as of when that is (see `kept`), epoch milliseconds.
        chained: whether the step is behind another one. It knows no partitions but those of ``known``.
        clock, wall_ms: seconds as of `passing_s`, and the time of day in epoch milliseconds.
    """

    def __init__(
        self,
        origins: Iterable[Origin],
        *,
        lateness_ms: int,
        idle_s: float,
        clock_s: float | None = None,
        value_ms: int | None,
        known: Mapping[Origin, EventTime] = MappingProxyType({}),
        known_at_ms: int = 0,
        chained: bool = False,
        clock: Callable[[], float] = passing_s,
        wall_ms: Callable[[], int] = clock_ms,
    ) -> None:
        self._lateness_ms = lateness_ms
        self._idle_s = idle_s
        self._clock_s = math.inf if clock_s is None else max(clock_s, idle_s)
        self._clock = clock
        self.value_ms = value_ms
        self._wall_ms = wall_ms
        started = clock()
        # Of a partition of which nothing was kept, the latest event time is at least the watermark plus the lateness.
        least = None if value_ms is None else value_ms + lateness_ms
        self._sources = None if chained else frozenset(origins := [*origins])
        self._latest: dict[Origin, int | None] = dict.fromkeys([*origins, *known], least)
        self._seen: dict[Origin, float] = dict.fromkeys(self._latest, started)
        self._untimed: set[Origin] = set()
        now_ms = wall_ms()
        for origin in self._latest.keys() & known.keys():
            self._latest[origin] = known[origin].latest_ms
            until_ms = known_at_ms if self._is_of_step(origin) else now_ms
            self._seen[origin] = started - max(0, until_ms - known[origin].since_ms) / 1000
        # The time in which no flow ran.
        self._down_s = max(0, now_ms - known_at_ms) / 1000
        self._looked = started
        self._has_looked = False
        self._arriving: frozenset[Origin] = frozenset()
        self._caught_up: Mapping[Any, float] = {}
        self._sources_caught_up = math.inf  # until when nothing is known to be behind the batch, in all sources

    def planned(self, arriving: Iterable[Origin], caught_up: Mapping[Any, float] = MappingProxyType({})) -> None:
        """Note which partitions have new records for the next batch, as Kafka said when the batch was planned.

        Records that arrive while a batch runs, however long that takes, are seen when the next one is planned. So the
        idle time of a partition is measured from plan to plan.

        Args:
            caught_up: until when it is known of a partition that there is nothing behind the batch, on the clock;
                ``-math.inf``: there is more, so it is not idle. What is not in it is known now.
        """
        self._looked, self._caught_up = self._clock(), caught_up
        self._arriving = frozenset(arriving)
        self._sources_caught_up = min(caught_up.values(), default=math.inf)
        if not self._has_looked and not self._arriving and self._sources_caught_up > -math.inf:
            for origin in filter(self._is_of_step, self._seen):
                self._seen[origin] -= self._down_s
        self._has_looked = True

    def after(self, latest_ms: Mapping[Origin, int], untimed: Collection[Origin] = _NOTHING) -> int | None:
        """The watermark after a batch with these latest event times. This call changes nothing.

        Args:
            untimed: partitions with records whose event time is not known.
        """
        return self._earliest(latest_ms, latest_ms.keys(), untimed)

    def _earliest(
        self, latest_ms: Mapping[Origin, int], active: Collection[Origin], untimed: Collection[Origin] = _NOTHING
    ) -> int | None:
        merged = {origin: self._merged(origin, latest_ms) for origin in {**self._latest, **latest_ms}}
        waiting = [
            latest
            for origin, latest in merged.items()
            if (origin in active or self._silence_s(origin) < self._idle_s)
            and not (latest is None and (origin in untimed or origin in self._untimed) and not self._has_more(origin))
        ]
        gone_ms = 0
        if not waiting:  # all are idle
            gone_ms = 0 if self._arriving else self._gone_ms(merged)  # what arrives may be of no step
            timed = {origin: latest for origin, latest in merged.items() if latest is not None}
            last = max((self._seen.get(origin, self._looked) for origin in timed), default=self._looked)
            waiting = [latest for origin, latest in timed.items() if self._seen.get(origin, self._looked) == last]
        if not waiting or any(latest is None for latest in waiting):
            return self.value_ms
        slowest = min(latest for latest in waiting if latest is not None) - self._lateness_ms
        if gone_ms:
            slowest = max(slowest, min(slowest + gone_ms, self._wall_ms() - self._lateness_ms))
        return slowest if self.value_ms is None else max(self.value_ms, slowest)

    def _gone_ms(self, origins: Iterable[Origin]) -> int:
        """How far event time has gone on by the clock, while no partition had records."""
        silent_s = min(map(self._silence_s, origins), default=-math.inf)
        return round(1000 * (silent_s - self._clock_s)) if silent_s > self._clock_s else 0

    def _has_more(self, origin: Origin) -> bool:
        """Whether it is known that the partition has records behind the batch."""
        return self._caught_up_until(origin) == -math.inf

    def _silence_s(self, origin: Origin) -> float:
        if not self._has_looked:  # records may have come since the run before: nobody is idle yet
            return -math.inf
        known = min(self._looked, self._caught_up_until(origin))
        return known - self._seen.get(origin, self._looked)

    def _caught_up_until(self, origin: Origin) -> float:
        """Until when it is known that nothing is behind the batch for the partition."""
        if self._is_of_step(origin):  # records of any source may become records of it
            return self._sources_caught_up
        return self._caught_up.get(origin, math.inf)

    def advance(self) -> int | None:
        """The watermark of the next batch. It may move, because partitions may have become idle. It never goes back."""
        arriving = self._arriving
        if arriving:
            arriving = arriving.union(filter(self._is_of_step, self._latest))
        self.value_ms = self._earliest({}, arriving)
        return self.value_ms

    def on_commit(
        self, latest_ms: Mapping[Origin, int], value_ms: int | None, untimed: Collection[Origin] = _NOTHING
    ) -> None:
        """Call this when the batch is committed. Arguments as of `after`."""
        self._untimed.update(untimed)
        for origin in latest_ms:
            self._latest[origin] = self._merged(origin, latest_ms)
            self._seen[origin] = self._looked
        self.value_ms = value_ms
        self._arriving = frozenset()

    def kept(self, latest_ms: Mapping[Origin, int]) -> tuple[dict[Origin, EventTime], int]:
        """What the next run has to know about partitions, after a batch with these latest event times, and as of when
        that is, epoch milliseconds."""
        now, now_ms = self._clock(), self._wall_ms()
        seen = {**self._seen, **dict.fromkeys(latest_ms, self._looked)}
        times = {
            origin: EventTime(self._merged(origin, latest_ms), now_ms - max(0, round((now - at) * 1000)))
            for origin, at in seen.items()
        }
        return times, now_ms

    def _merged(self, origin: Origin, latest_ms: Mapping[Origin, int]) -> int | None:
        known, new = self._latest.get(origin), latest_ms.get(origin)
        return new if known is None else known if new is None else max(known, new)

    def _is_of_step(self, origin: Origin) -> bool:
        """Whether records of any source may become records of it: it is the partition of another step, or of the step's
        own table, or was added to a source since the start."""
        return origin[0] is None or (self._sources is not None and origin not in self._sources)

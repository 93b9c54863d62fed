"""The watermark: event time over several partitions.

The watermark is the smallest of the latest event times of all active partitions, minus the allowed lateness. It never
goes back. A partition without records for ``idle_s`` seconds is idle, and the watermark ignores it. If all are idle, it
is that of the partition that had records last: as if they had become idle one after the other, however rarely somebody
looks. (Flink's StatusWatermarkValve does the same for the same reason, with the largest watermark of all. Spark's
watermark uses the *largest* event time, which makes records of slow partitions late.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

Origin: TypeAlias = tuple[str | None, int]
"""Where rows come from: a `TopicPartition` of a source. If the topic is None, they come from another step, and the
number is that of the table's partition."""


class Watermark:
    """The driver's view of event time.

    Args:
        origins: partitions that the watermark waits for from the start, until they are idle.
        lateness_ms: how far the event time of a record may be behind the latest one of its partition.
        idle_s: seconds without records after which a partition is idle.
        value_ms: the committed watermark; None: not known yet.
    """

    def __init__(
        self,
        origins: Iterable[Origin],
        *,
        lateness_ms: int,
        idle_s: float,
        value_ms: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lateness_ms = lateness_ms
        self._idle_s = idle_s
        self._clock = clock
        self.value_ms = value_ms
        # After a restart, the latest event time of a partition is at least the committed watermark plus the lateness.
        known = None if value_ms is None else value_ms + lateness_ms
        started = clock()
        self._latest: dict[Origin, int | None] = dict.fromkeys(origins, known)
        self._seen: dict[Origin, float] = dict.fromkeys(self._latest, started)
        self._looked = started
        self._arriving: frozenset[Origin] = frozenset()
        self._quiet: Mapping[Any, float] = {}

    def planned(self, arriving: Iterable[Origin], quiet: Mapping[Any, float] = MappingProxyType({})) -> None:
        """Note which partitions have new records for the next batch, as Kafka said when the batch was planned.

        Records that arrive while a batch runs, however long that takes, are seen when the next one is planned. So the
        idle time of a partition is measured from plan to plan.

        Args:
            quiet: until when it is known of a partition that there is nothing behind the batch, on the clock;
                ``-math.inf``: there is more, so it is not idle. What is not in it is known now.
        """
        self._looked, self._arriving, self._quiet = self._clock(), frozenset(arriving), quiet

    def after(self, latest_ms: Mapping[Origin, int]) -> int | None:
        """The watermark after a batch with these latest event times. This call changes nothing."""
        return self._earliest(latest_ms, latest_ms.keys())

    def _earliest(self, latest_ms: Mapping[Origin, int], active: Collection[Origin]) -> int | None:
        merged = {origin: self._merged(origin, latest_ms) for origin in {**self._latest, **latest_ms}}
        waiting = [
            latest for origin, latest in merged.items() if origin in active or self._silence_s(origin) < self._idle_s
        ]
        if not waiting:  # all are idle
            last = max((self._seen.get(origin, self._looked) for origin in merged), default=self._looked)
            waiting = [latest for origin, latest in merged.items() if self._seen.get(origin, self._looked) == last]
        if not waiting or any(latest is None for latest in waiting):
            return self.value_ms
        slowest = min(latest for latest in waiting if latest is not None) - self._lateness_ms
        return slowest if self.value_ms is None else max(self.value_ms, slowest)

    def _silence_s(self, origin: Origin) -> float:
        known = min(self._looked, self._quiet.get(origin, self._looked))
        return known - self._seen.get(origin, self._looked)

    def advance(self) -> int | None:
        """The watermark of the next batch. It may move, because partitions may have become idle. It never goes back."""
        self.value_ms = self._earliest({}, self._arriving)
        return self.value_ms

    def on_commit(self, latest_ms: Mapping[Origin, int], value_ms: int | None) -> None:
        """Call this when the batch is committed."""
        for origin in latest_ms:
            self._latest[origin] = self._merged(origin, latest_ms)
            self._seen[origin] = self._looked
        self.value_ms = value_ms
        self._arriving = frozenset()

    def _merged(self, origin: Origin, latest_ms: Mapping[Origin, int]) -> int | None:
        known, new = self._latest.get(origin), latest_ms.get(origin)
        return new if known is None else known if new is None else max(known, new)

"""Event time over several partitions: how far all of them have come.

The watermark is the least of the latest event times of all active partitions, minus the allowed lateness. It never
goes back. A partition that has brought nothing for ``idle_s`` seconds is not waited for. (As Flink and Spark define
it; Spark's own watermark is the *largest* event time, which makes records of slow partitions late.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

Origin: TypeAlias = tuple[str | None, int]
"""Where rows come from: a `TopicPartition` of a source. Without a topic they come from another step, and the number is
that of the table's partition."""


class Watermark:
    """What the driver knows of event time.

    Args:
        origins: partitions to wait for from the start, until they are idle.
        lateness_ms: how much later than others of its partition a record may be.
        idle_s: seconds without records after which a partition is not waited for.
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
        # After a restart a partition has come at least as far as the committed watermark, plus the lateness.
        known = None if value_ms is None else value_ms + lateness_ms
        started = clock()
        self._latest: dict[Origin, int | None] = dict.fromkeys(origins, known)
        self._seen: dict[Origin, float] = dict.fromkeys(self._latest, started)
        self._looked = started
        self._arriving: frozenset[Origin] = frozenset()

    def planned(self, arriving: Iterable[Origin]) -> None:
        """Kafka was asked what there is for the next batch: partitions with news are not silent.

        What arrives while a batch runs, however long that takes, is seen when the next one is planned. So silence is
        the time from one plan to another.
        """
        self._looked, self._arriving = self._clock(), frozenset(arriving)

    def after(self, latest_ms: Mapping[Origin, int]) -> int | None:
        """The watermark that follows a batch with these latest event times; nothing is remembered yet."""
        return self._earliest(latest_ms, latest_ms.keys())

    def _earliest(self, latest_ms: Mapping[Origin, int], active: Collection[Origin]) -> int | None:
        merged = {origin: self._merged(origin, latest_ms) for origin in {**self._latest, **latest_ms}}
        waiting = [
            latest
            for origin, latest in merged.items()
            if origin in active or self._looked - self._seen.get(origin, self._looked) < self._idle_s
        ]
        if not waiting or any(latest is None for latest in waiting):
            return self.value_ms
        slowest = min(latest for latest in waiting if latest is not None) - self._lateness_ms
        return slowest if self.value_ms is None else max(self.value_ms, slowest)

    def advance(self) -> int | None:
        """The watermark of the next batch: partitions may have gone idle since the last one. It stays this far."""
        self.value_ms = self._earliest({}, self._arriving)
        return self.value_ms

    def on_commit(self, latest_ms: Mapping[Origin, int], value_ms: int | None) -> None:
        """The batch is committed."""
        for origin in latest_ms:
            self._latest[origin] = self._merged(origin, latest_ms)
            self._seen[origin] = self._looked
        self.value_ms = value_ms
        self._arriving = frozenset()

    def _merged(self, origin: Origin, latest_ms: Mapping[Origin, int]) -> int | None:
        known, new = self._latest.get(origin), latest_ms.get(origin)
        return new if known is None else known if new is None else max(known, new)

"""How old the records of a batch are when it is committed: looked up after the batch, in a thread of its own.

The flow itself does nothing for it. Only a sample of the batches is looked at, so that the look-ups cost little.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("onceflow")

#: At most one batch of a flow is looked at in so many seconds, and so many of its partitions.
EVERY_S, PARTITIONS = 1.0, 4
_WAITING_MAX = 16
_IDLE_S = 60.0

OffsetRange = tuple[str, int, int, int]


class Times(Protocol):
    """What looks timestamps up (`onceflow.driver.batch.source_times.SourceTimes`)."""

    def first(self, ranges: Sequence[OffsetRange], limit: int) -> Sequence[int]:
        """Timestamps of the first records, in epoch milliseconds. Ranges: topic, partition, start and end offset."""
        ...

    def close(self) -> None:
        """Close its connections."""
        ...


@dataclass
class _Opened:
    """The look-ups of a query, who has opened them, and when they were used last."""

    opener: Callable[[], Times]
    times: Times
    used_s: float = 0.0


class LatencyMeter:
    """Measures a sample of the batches.

    Args:
        observe: called with the name of a flow and an age in seconds.
    """

    def __init__(self, observe: Callable[[str, float], None]) -> None:
        self._observe = observe
        self._begun: dict[str, Any] = {}  # the source range of the batch that runs, by flow
        self._next: dict[str, float] = {}
        self._warned: set[str] = set()
        self._asked: queue.SimpleQueue[tuple[str, Callable[[], Times], Sequence[OffsetRange], float] | None]
        self._asked = queue.SimpleQueue()
        threading.Thread(target=self._measure, daemon=True, name="onceflow-metrics-latency").start()

    def begun(self, flow: str, source: Any) -> None:
        """A batch begins. Source: its range, which has ``ranges()``."""
        self._begun[flow] = source

    def committed(self, flow: str, opener: Callable[[], Times], at_s: float) -> None:
        """The batch is committed.

        Args:
            opener: of the look-ups. It is called once for each query of a flow.
            at_s: when it was committed, in Unix time.
        """
        source, now = self._begun.pop(flow, None), time.monotonic()
        if source is None or now < self._next.get(flow, 0.0) or self._asked.qsize() >= _WAITING_MAX:
            return
        if ranges := source.ranges():
            self._next[flow] = now + EVERY_S
            self._asked.put((flow, opener, ranges, at_s))

    def close(self) -> None:
        """Stop measuring."""
        self._asked.put(None)

    def _measure(self) -> None:
        opened: dict[str, _Opened] = {}
        while True:
            try:
                asked = self._asked.get(timeout=_IDLE_S)
            except queue.Empty:
                _close(opened, opened)
                continue
            if asked is None:
                _close(opened, opened)
                return
            flow, opener, ranges, at_s = asked
            now = time.monotonic()
            _close(opened, (name for name, each in opened.items() if now - each.used_s > _IDLE_S))  # it may have ended
            try:
                if flow in opened and opened[flow].opener != opener:  # another query, which may have other settings
                    _close(opened, [flow])
                if flow not in opened:
                    opened[flow] = _Opened(opener, opener())
                opened[flow].used_s = now
                for stamp_ms in opened[flow].times.first(ranges, PARTITIONS):
                    self._observe(flow, max(0.0, at_s - stamp_ms / 1000))
            except Exception as error:  # the flow does not depend on it
                level = logging.DEBUG if flow in self._warned else logging.WARNING
                log.log(level, "flow %s: the age of its records could not be looked up: %s", flow, error)
                self._warned.add(flow)


def _close(opened: dict[str, _Opened], flows: Iterable[str]) -> None:
    for flow in list(flows):
        try:
            opened.pop(flow).times.close()
        except Exception as error:
            log.debug("connections of the metrics were not closed: %s", error)

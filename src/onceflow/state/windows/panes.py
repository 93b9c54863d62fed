"""``Panes``: the panes of a key, from which its windows are merged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES, Serde
from onceflow.state.format import rows
from onceflow.state.windows.kinds import Hopping, Sliding, Window

if TYPE_CHECKING:
    from onceflow.state.api.handle import State

MAP = "windows"
"""The map of a key with its accumulators: of panes, or of sessions."""
TIMER = "onceflow.windows"
"""The timer of a key. It is due at the end of the first window that has not been emitted."""
CLOSED_AT_ONCE = 1_000
"""Maximum number of windows that one timer closes. The others follow in the next batch: a transaction must end."""

# Eight bytes in the order of the times, those before 1970 as well.
_TIME = Serde(rows.time_bytes, rows.time_of, "time")


class Accumulation(Protocol):
    """What a processor with windows defines, as far as it is needed here. See `WindowProcessor`."""

    def initial(self) -> Any: ...

    def add(self, accumulator: Any, record: Record) -> Any: ...

    def merge(self, left: Any, right: Any) -> Any: ...


class Panes:
    """The panes of a key, for one call of ``process`` or ``on_timer``."""

    def __init__(self, processor: Accumulation, kind: Hopping | Sliding, state: State) -> None:
        self._processor, self._kind, self._state = processor, kind, state
        self._map = state.map(MAP, key=_TIME)
        self.replaced: Sequence[Window] = ()

    def add(self, records: Sequence[Record], times: Sequence[int]) -> Iterator[tuple[Window, Any]]:
        """Add records, and register the timer. The windows that have changed are merged when they are asked for."""
        panes: dict[int, Any] = {}
        processor, pane_of = self._processor, self._kind.pane
        for record, at_ms in zip(records, times, strict=True):
            pane = pane_of(at_ms)
            if pane in panes:
                panes[pane] = added(processor, panes[pane], record)
            else:
                known = self._map.get(pane)
                panes[pane] = added(processor, processor.initial() if known is None else known, record)
        for pane, accumulator in panes.items():
            self._map.put(pane, accumulator, ttl="never")
        first_end = self._kind.next_end([min(panes)])
        timers = self._state.timers
        timer = timers.get(TIMER)
        if timer is None or first_end < timer.at_ms:
            timers.register(TIMER, first_end)
        return self._changed(panes)

    def close(self, from_ms: int, until_ms: int) -> Iterator[Closed]:
        """The windows that end from ``from_ms`` to ``until_ms``. Afterwards, panes are deleted, and the timer moves."""
        panes = self._starts()
        windows = list(islice(self._kind.closed(panes, from_ms, until_ms), CLOSED_AT_ONCE))
        done_ms = until_ms if len(windows) < CLOSED_AT_ONCE else windows[-1].end_ms
        for window in windows:
            # The panes are decoded for every window, because merge() may change what it gets.
            yield Closed(window, [found for _, found in self._map.items(*window)], self._processor.merge)
        count = self._kind.forgotten(panes, done_ms)
        for pane in panes[:count]:
            self._map.delete(pane)
        if count < len(panes):
            timers, next_end = self._state.timers, self._kind.next_end(panes[count:], done_ms)
            (timers.register if done_ms == until_ms else timers.register_rest)(TIMER, next_end)

    def _changed(self, touched: dict[int, Any]) -> Iterator[tuple[Window, Any]]:
        reach_ms = self._kind.reach_ms
        panes = self._starts(min(touched) - reach_ms, max(touched) + reach_ms + 1)
        for window in self._kind.changed(panes, touched):
            yield window, self._merged(window)

    def _merged(self, window: Window) -> Any:
        # The panes are decoded for every window, because merge() may change what it gets.
        merged = None
        for _, accumulator in self._map.items(*window):
            merged = accumulator if merged is None else self._processor.merge(merged, accumulator)
        return merged

    def _starts(self, from_ms: int | None = None, until_ms: int | None = None) -> list[int]:
        return [pane for pane, _ in self._state.map(MAP, key=_TIME, value=BYTES).items(from_ms, until_ms)]


@dataclass(frozen=True)
class Closed:
    """A window that closes.

    Args:
        parts: the accumulators of its panes, or of the session.
        merge: makes one of two.
    """

    window: Window
    parts: list[Any]
    merge: Callable[[Any, Any], Any]

    def about(self) -> dict[str, Any]:
        """What a letter says of it. ``merge`` may change the parts, so it is asked for this before."""
        return {"window": self.window._asdict(), "accumulators": copy.deepcopy(self.parts)}

    def accumulator(self) -> Any:
        """The accumulator of all its records."""
        return reduce(self.merge, self.parts)


class NoAccumulatorError(ValueError):
    """add() has returned nothing. No record has caused this error."""


def added(processor: Accumulation, accumulator: Any, record: Record) -> Any:
    """The accumulator with one more record.

    Raises:
        NoAccumulatorError: add() has returned nothing.
    """
    found = processor.add(accumulator, record)
    if found is None:
        raise NoAccumulatorError(
            f"{type(processor).__name__}.add() has returned None: it has to return the accumulator"
        )
    return found

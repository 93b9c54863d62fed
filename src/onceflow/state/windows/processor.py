"""``WindowProcessor``: the base class of processors that compute results over windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from onceflow import user_code
from onceflow.errors import OptionError
from onceflow.protocol.timestamps import whole_ms
from onceflow.state.api.processor import Processor
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import JSON
from onceflow.state.windows.aggregates import Aggregate
from onceflow.state.windows.kinds import Kind, Session, Window
from onceflow.state.windows.panes import TIMER, Panes
from onceflow.state.windows.sessions import Sessions

if TYPE_CHECKING:
    from onceflow.state.api.handle import State
    from onceflow.state.api.timers import Timer

Emit = Literal["close", "update"]


class WindowProcessor(Processor):
    """Results over windows of event time, for each key.

    ::

        class PerMinute(windows.WindowProcessor):
            value = serdes.JSON
            window = windows.Tumbling("1 minute")
            allowed_lateness = "10 seconds"
            aggregates = {"count": windows.Count(), "amount": windows.Sum("amount")}

    Instead of ``aggregates``, a subclass may define ``initial``, ``add``, ``merge`` and ``result``. What they keep of
    a window is the accumulator: anything that the ``state`` serde can encode, except None.

    A record that belongs to a closed window is late, and goes to ``late_topic``. It is in no result. Every other record
    is in the results of all its windows. A record whose ``event_time`` is None, or before 1970, is one that cannot be
    processed.

    Class attributes:
        window: ``Tumbling``, ``Hopping``, ``Sliding`` or ``Session``. Another one needs another table.
        emit: ``close``: one result for each window, when the watermark has reached its end. ``update``: a result for
            each window that has changed, each time records of the key were processed, and none at the end.
        aggregates: names and aggregates; each name is a field of the result.
        allowed_lateness: as in `Processor`; it cannot be None.
        max_ahead: as in `Processor`.
        state, output: as in `Processor`, but `JSON` if nothing else is declared.
    """

    window: Kind
    emit: Emit = "close"
    aggregates: Mapping[str, Aggregate] = MappingProxyType({})
    allowed_lateness: str | float | None = 0
    state: Any = JSON
    output: Any = JSON

    # ---- what subclasses define ------------------------------------------------------------------------

    def initial(self) -> Any:
        """The accumulator of no records; a new object for each call, if it can be changed."""
        return [aggregate.initial() for aggregate in self.aggregates.values()] if self.aggregates else None

    def add(self, accumulator: Any, record: Record) -> Any:
        """The accumulator with one more record. It may be the same object, changed."""
        if not self.aggregates:
            raise NotImplementedError(f"{type(self).__name__} defines neither aggregates nor add()")
        parts = zip(self.aggregates.values(), accumulator, strict=True)
        return [aggregate.add(part, record) for aggregate, part in parts]

    def merge(self, left: Any, right: Any) -> Any:
        """One accumulator from two. It may be one of them, changed.

        Args:
            left: the accumulator of the earlier records, by their event times.
        """
        if not self.aggregates:
            raise NotImplementedError(f"{type(self).__name__} defines neither aggregates nor merge()")
        parts = zip(self.aggregates.values(), left, right, strict=True)
        return [aggregate.merge(*pair) for aggregate, *pair in parts]

    def result(self, key: Any, window: Window, accumulator: Any) -> Record | Iterable[Record] | None:
        """The records to write for a window. When the window closes, ``on_error`` of the step says what an error here
        does: the flow stops, or a dead letter names key, timer and window, and has the accumulators.

        Returns:
            By default, a record with the key and a dict: ``start_ms``, ``end_ms`` and the aggregates.
        """
        if not self.aggregates:
            raise NotImplementedError(f"{type(self).__name__} defines neither aggregates nor result()")
        parts = zip(self.aggregates.items(), accumulator, strict=True)
        return Record(key, {**window._asdict(), **{name: aggregate.result(part) for (name, aggregate), part in parts}})

    def replaced(self, key: Any, window: Window) -> Record | Iterable[Record] | None:
        """The records to write when a session has grown or was merged, so that its earlier result no longer holds.

        It is called only with ``emit = "update"``, before the results of the new session. By default it writes nothing.
        If results have the session's bounds in their keys, a tombstone is the record to write.

        Args:
            window: the session as it was.
        """
        return None

    # ---- the processor -----------------------------------------------------------------------------------

    def late_before_ms(self, watermark_ms: int) -> int:
        """Records with an earlier event time belong to a closed window. See `Processor.late_before_ms`."""
        return self.window.late_before_ms(watermark_ms)

    def process(self, key: Any, records: Sequence[Record], state: State) -> Iterator[Record]:
        """Add records to their windows. See `Processor.process`."""
        windows = self._windows(state)
        changed = windows.add(records, [self._time_of(record) for record in records])
        if self.emit == "update":
            for replaced in windows.replaced:
                yield from _listed(self.replaced(key, replaced))
            for window, accumulator in changed:
                yield from _listed(self.result(key, window, accumulator))

    def on_timer(self, key: Any, timer: Timer, state: State) -> Iterator[Record]:
        """Close the windows of a key. See `Processor.on_timer`.

        When this has failed and there are dead letters, the engine calls it once more. Then a window that cannot be
        closed is left out and noted, and the others are closed.
        """
        if timer.name != TIMER:
            raise state._scope.without_on_timer()
        watermark_ms = state.watermark_ms
        assert watermark_ms is not None, "timers of event time need a watermark"
        failures = state._scope.failures
        for closed in self._windows(state).close(timer.at_ms, watermark_ms):
            if self.emit != "close":
                continue
            if failures is None:
                yield from _listed(self.result(key, closed.window, closed.accumulator()))
                continue
            about = closed.about()
            try:
                records = [*_listed(self.result(key, closed.window, closed.accumulator()))]
                failures.check(key, state._key, records)
            except Exception as error:
                if state._scope.fatal is not None:
                    raise
                failures.add(error, about)
            else:
                yield from records

    def give_up(self, timer: Timer, state: State) -> list[dict[str, Any]]:
        """Close the windows of a key without results, because `on_timer` fails as a whole. Otherwise its later windows
        would not be closed either.

        Returns:
            What letters say of them.
        """
        assert state.watermark_ms is not None, "timers of event time need a watermark"
        return [closed.about() for closed in self._windows(state).close(timer.at_ms, state.watermark_ms)]

    def _windows(self, state: State) -> Panes | Sessions:
        kind = self.window
        return Sessions(self, kind, state) if isinstance(kind, Session) else Panes(self, kind, state)

    def check_initial(self) -> None:
        """Check what no record can be the cause of: `initial`, and that it fits the aggregates.

        Raises:
            ValueError: it does not. Besides this, whatever `initial` raises.
        """
        made = self.initial()
        if type(self).add is WindowProcessor.add and self.aggregates and len(made) != len(self.aggregates):
            raise ValueError(f"it gives {len(made)} parts, there are {len(self.aggregates)} aggregates")

    def _time_of(self, record: Record) -> int:
        at_ms = self.event_time(record)
        if at_ms is None or at_ms < 0:
            untimed = ValueError(
                "the record has no event time, so it belongs to no window: define event_time, or if it comes from "
                "another processor, yield it there with timestamp_ms"
            )
            user_code.of_hook(untimed, user_code.EVENT_TIME)
            raise untimed
        return whole_ms(at_ms)


def check_windows(processor: object, flow: str | None, *, late_topic: bool = True) -> None:
    """Check the declarations of a processor, if it is one with windows.

    Args:
        late_topic: whether the step has a topic for late records.

    Raises:
        OptionError: something is missing, or does not fit together.
    """
    if not isinstance(processor, WindowProcessor):
        return
    kind, lateness = getattr(processor, "window", None), processor.allowed_lateness
    if not isinstance(kind, Kind):
        raise _option(
            processor, f"window is {kind!r}", 'declare for example window = windows.Tumbling("1 minute")', flow
        )
    if processor.emit not in ("close", "update"):
        raise _option(processor, f"emit is {processor.emit!r}", 'declare "close" or "update"', flow)
    if lateness is None:
        raise _option(processor, "allowed_lateness is None", "declare one: without it no window is ever closed", flow)
    if not late_topic:
        raise _option(processor, "it has windows, but late_topic= is missing", "name a topic for late records", flow)
    aggregates: Mapping[Any, Any] = processor.aggregates
    for name, aggregate in aggregates.items():
        given = name in Window._fields and type(processor).result is WindowProcessor.result
        if given or not isinstance(name, str):
            why = "is a field of every result" if given else "is no text"
            raise _option(processor, f"aggregates: the name {name!r} {why}", "give it another name", flow)
        if not isinstance(aggregate, Aggregate):
            raise _option(processor, f"aggregates: {name!r} is {aggregate!r}", "give one like windows.Count()", flow)
    needed = ["add", "result", *(["merge"] if kind.merges else [])]
    missing = [each for each in needed if getattr(type(processor), each) is getattr(WindowProcessor, each)]
    if missing and not processor.aggregates:
        raise _option(processor, f"{', '.join(missing)} not defined", "define what is missing, or aggregates", flow)


def _option(processor: object, what: str, next_step: str, flow: str | None) -> OptionError:
    return OptionError(f"{type(processor).__name__}: {what}", next_step=next_step, flow=flow)


def _listed(records: Record | Iterable[Record] | None) -> Iterable[Record]:
    return () if records is None else (records,) if isinstance(records, Record) else records

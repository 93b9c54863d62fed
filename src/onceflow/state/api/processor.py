"""``Processor`` and ``ColumnProcessor``: the base classes of user code with state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from onceflow.errors import counted
from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES

if TYPE_CHECKING:
    import pyarrow as pa

    from onceflow.state.api.handle import State
    from onceflow.state.api.joined_table import JoinedTable
    from onceflow.state.api.timers import Timer


def overrides(method: Any, base: Any) -> bool:
    """Whether a method of an object is another one than that of the base class. It may be one of a subclass, or an
    attribute that the object was given."""
    return getattr(method, "__func__", method) is not base


MAX_AHEAD = "1 day"
"""How far event time may be ahead of the clock, unless a processor says otherwise. A clock in another time zone is
ahead by less."""


class Processor:
    """User code with state per key that processes record by record.

    ::

        class Balance(Processor):
            value = state = output = JSON

            def process(self, key, records, state):
                account = state.get({"balance": 0})
                for record in records:
                    account["balance"] += record.value["amount"]
                    yield Record(key, account)
                state.put(account)

    Source offsets, outputs and state of a batch are committed together, and a batch may run more than once before it
    is committed. So keep everything that matters in ``state``. Each partition has its own shallow copy of the processor
    in each batch: what ``open`` sets on ``self`` exists until ``close``, and is gone in the next batch.

    Class attributes:
        version: the version of the state's format. Rows of older versions pass through ``migrate`` when they are read.
            Rows of a newer version are refused.
        key, value: serdes of the input's key and value.
        state: serde of the state's values, and of the entries of maps and lists.
        output: serde of the yielded values that are not bytes.
        ttl: how long a state row lives after it was put, in processing time, for example ``"7 days"``; None: forever.
        allowed_lateness: how far the watermark stays behind the latest event, for example ``"10 seconds"``. Records
            older than the watermark go to the late topic. None: event time is not used, there is no watermark, and
            event-time timers do not fire.
        max_ahead: with ``allowed_lateness``, how far the event time of a record may be ahead of the clock. A record
            beyond that cannot be processed (``on_error``), and does not move the watermark. None: as far as it likes.

    A subclass may also define ``migrate(self, payload, from_version)``. It gets the bytes of a state row that an older
    version has written, and returns the value as the ``state`` serde of this version would decode it. If ``migrate``
    has a third parameter, it gets the name of the map or list that the row belongs to, or None for the key's own value.
    """

    version: int = 0
    key: Any = BYTES
    value: Any = BYTES
    state: Any = BYTES
    output: Any = BYTES
    ttl: str | float | None = None
    allowed_lateness: str | float | None = None
    max_ahead: str | float | None = MAX_AHEAD

    def open(self, partition: int) -> None:
        """Called for every partition, before anything else in a batch."""

    def close(self) -> None:
        """Called for every partition, at the end of its part of a batch."""

    def event_time(self, record: Record) -> int | None:
        """The event time of a record in epoch milliseconds. None, or a time before 1970: it is not known; such a record
        is never late, and does not move the watermark."""
        return record.timestamp_ms

    def late_before_ms(self, watermark_ms: int) -> int:
        """Records with an earlier event time are late. By default, that is the watermark.

        A processor that still has a use for older records, because nothing they belong to is finished, may return less.
        It is called once for each partition and batch.
        """
        return watermark_ms

    def process(self, key: Any, records: Sequence[Record], state: State) -> Iterable[Record] | None:
        """Handle records of one key. This may be a generator.

        It may be called more than once for a key in one batch.

        Args:
            key: the key, decoded.
            records: records of this key, in the order of their offsets.
            state: the state of this key.

        Returns:
            The records to write, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define process()")

    def on_timer(self, key: Any, timer: Timer, state: State) -> Iterable[Record] | None:
        """Handle a timer that is due. The timer is already deleted.

        ``on_error`` of the step says what an error does. ``fail``: the flow stops. ``dead-letter``: what this call has
        changed is undone, the timer is gone, and a dead letter names key and timer.

        Args:
            key: the key for which the timer was registered.
            timer: its ``name``, ``at_ms`` and ``clock``.
            state: the state of this key.

        Returns:
            The records to write, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} registers timers, but does not define on_timer()")


class Repacked(Processor):
    """Internal: a processor of the library itself, for whose records planning has made other values."""

    @property
    def kept(self) -> str:
        """What decides which rows are kept, as text. A start with another one than that of the table is refused."""
        raise NotImplementedError

    def as_read(self, record: Record) -> Record:
        """The record as it was read, for a dead letter. Key and value are bytes."""
        raise NotImplementedError

    def largest_row(self, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Row key and row of the largest row that a record makes, here or in a step behind this one. If it is too
        large, the record is refused here, where nothing has changed yet."""
        raise NotImplementedError


class BadRows(Exception):
    """Raise it in ``ColumnProcessor.process`` to name the records that cannot be processed.

    ::

        raise onceflow.BadRows({row: ValueError("amount is negative") for row in np.flatnonzero(amounts < 0).tolist()})

    ``on_error`` says what happens to these records, each with its own cause. The other records are processed again
    without them. For any other exception, onceflow has to search for the bad records: it processes halves of the
    records again and again.

    Args:
        causes: the cause for each bad row of ``records``; at least one.
    """

    def __init__(self, causes: Mapping[int, Exception]) -> None:
        self.causes = dict(causes)
        row = next(iter(self.causes), None)
        super().__init__(
            "no records" if row is None else f"{counted(len(self.causes), 'record')}; row {row}: {self.causes[row]}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRows, (self.causes,)


class ColumnContext(NamedTuple):
    """What a column processor gets besides records and states.

    Args:
        partition: the partition of the table.
        now_ms: processing time of the batch in epoch milliseconds, the same in every task.
        watermark_ms: the watermark in epoch milliseconds; older records are late. None: it is not known yet.
        tables: the tables that the flow joins with, by their names in ``tables=`` of `Flow.process`.
    """

    partition: int
    now_ms: int
    watermark_ms: int | None
    tables: Mapping[str, JoinedTable] = MappingProxyType({})


class ColumnProcessor:
    """User code with state per key that processes whole columns. It is several times faster than record by record.

    ::

        class Balance(ColumnProcessor):
            state_fields = {"balance": "int64"}

            def process(self, records, states, context):
                parsed = parse_json(records["value"], pa.schema([("amount", pa.int64())]))
                sums = np.zeros(states.num_rows, dtype=np.int64)
                np.add.at(sums, records["state"].to_numpy(), parsed["amount"].to_numpy())
                balance = pc.add(pc.fill_null(states["balance"], 0), pa.array(sums))
                new_states = pa.table({"key": states["key"], "balance": balance})
                outputs = pa.table({"key": states["key"], "value": format_json(new_states.select(["balance"]))})
                return outputs, new_states

    Class attributes:
        version, ttl, allowed_lateness, max_ahead: as in `Processor`. ``migrate(self, payload, from_version)`` returns a
            dict of the fields, or bytes if there are no ``state_fields``.
        state_fields: names and types of the state's fields, as in ``struct()``. None: one binary field ``value`` with
            the bytes of the state.
    """

    version: int = 0
    state_fields: dict[str, str] | None = None
    ttl: str | float | None = None
    allowed_lateness: str | float | None = None
    max_ahead: str | float | None = MAX_AHEAD

    def open(self, partition: int) -> None:
        """Called for every partition, before anything else in a batch."""

    def close(self) -> None:
        """Called for every partition, at the end of its part of a batch."""

    def event_time(self, records: pa.Table) -> Any:
        """The event times in epoch milliseconds: an integer array, with null where the time is not known. Times before
        1970 are not known, either."""
        return records["timestamp_ms"] if "timestamp_ms" in records.column_names else None

    def process(self, records: pa.Table, states: pa.Table, context: ColumnContext) -> tuple[Any, Any]:
        """Handle some records of one partition.

        The returned tables may be of pyarrow, pandas or Polars.

        Args:
            records: columns ``key``, ``value`` (binary), ``state`` (int32: the row of ``states`` that belongs to the
                key), and ``timestamp_ms``, ``topic``, ``partition``, ``offset``, ``headers`` if known. The rows are in
                the order of arrival, which for each key is the order of offsets.
            states: one row for every key in ``records``: ``key``, ``exists``, and the fields, which are null if the
                key has no state.
            context: ``partition``, ``now_ms``, ``watermark_ms``, ``tables``.

        Returns:
            Outputs (``key``, ``value``, optionally ``topic``, ``headers``, ``timestamp_ms``) and new states (``key``,
            the fields, optionally a boolean column ``deleted``). Either may be None. Keys without a new state keep
            their state.

        Raises:
            BadRows: to name the records that cannot be processed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define process()")

"""``Processor`` and ``ColumnProcessor``: what users derive from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from onceflow.state.api.record import Record
from onceflow.state.api.serdes import BYTES

if TYPE_CHECKING:
    import pyarrow as pa

    from onceflow.state.api.handle import State
    from onceflow.state.api.timers import Timer


class Processor:
    """Code with state per key, run record by record.

    ::

        class Balance(Processor):
            value = state = output = JSON

            def process(self, key, records, state):
                account = state.get({"balance": 0})
                for record in records:
                    account["balance"] += record.value["amount"]
                    yield Record(key, account)
                state.put(account)

    Input, output and state of a batch are committed together, and a batch may run more than once before it is. So keep
    everything that matters in ``state``. Every partition's part of a batch has its own shallow copy of the processor:
    what ``open`` puts on ``self`` is there until ``close``, and gone in the next batch.

    Class attributes:
        version: of the state's format. When it grows, rows of older versions pass through ``migrate`` as they are read.
            Rows of a newer version are refused.
        key, value: serdes of the input's key and value.
        state: serde of the state's values, also of map and list entries.
        output: serde of the yielded values that are not bytes.
        ttl: how long a state row lives after it was put, by processing time, for example ``"7 days"``; None: for ever.
        allowed_lateness: declares that event time is used, for example ``"10 seconds"``: the watermark stays this far
            behind the latest event, and records older than the watermark go to the late topic. Without it there is no
            watermark, and event-time timers do not fire.

    A subclass may also define ``migrate(self, payload, from_version)``: it gets the bytes of a state row that an older
    version wrote and returns the value as this version's ``state`` serde would decode it. With a third parameter it is
    also told the name of the map or list the row belongs to, None for the key's own value.
    """

    version: int = 0
    key: Any = BYTES
    value: Any = BYTES
    state: Any = BYTES
    output: Any = BYTES
    ttl: str | float | None = None
    allowed_lateness: str | float | None = None

    def open(self, partition: int) -> None:
        """Called before anything else of a batch, for every partition."""

    def close(self) -> None:
        """Called at the end of a partition's part of a batch."""

    def event_time(self, record: Record) -> int | None:
        """When the thing happened, in epoch milliseconds; None when it is not known: such a record is never late."""
        return record.timestamp_ms

    def process(self, key: Any, records: Sequence[Record], state: State) -> Iterable[Record] | None:
        """Handle records of one key.

        Called once or more for a key and batch. May be a generator.

        Args:
            key: the key, decoded.
            records: of this key, in the order of their offsets.
            state: of this key.

        Returns:
            records to write, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define process()")

    def on_timer(self, key: Any, timer: Timer, state: State) -> Iterable[Record] | None:
        """Handle a timer that is due; it is no longer registered. An error here fails the batch.

        Args:
            key: the key it was registered for.
            timer: ``name``, ``at_ms`` and ``clock``.
            state: of this key.

        Returns:
            records to write, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} registers timers, but does not define on_timer()")


class BadRows(Exception):
    """Raised by ``ColumnProcessor.process`` that knows which records it cannot process.

    ::

        raise onceflow.BadRows({row: ValueError("amount is negative") for row in np.flatnonzero(amounts < 0).tolist()})

    They are dealt with as ``on_error`` says, each with its own cause, and the others are processed again without them.
    Any other error leaves the search to the step, which processes halves of the records until it has found them.

    Args:
        causes: what is wrong, by row of ``records``; at least one.
    """

    def __init__(self, causes: Mapping[int, Exception]) -> None:
        self.causes = dict(causes)
        row = next(iter(self.causes), None)
        super().__init__("no records" if row is None else f"{len(self.causes)} records; row {row}: {self.causes[row]}")

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRows, (self.causes,)


class ColumnContext(NamedTuple):
    """What a column processor is told besides records and states.

    Args:
        partition: of the table.
        now_ms: processing time of the batch, the same in every task, epoch milliseconds.
        watermark_ms: no records older than this are expected; None while unknown.
    """

    partition: int
    now_ms: int
    watermark_ms: int | None


class ColumnProcessor:
    """Code with state per key, run over whole columns: several times faster than record by record.

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
        version, ttl, allowed_lateness: as of `Processor`. ``migrate(self, payload, from_version)`` returns a dict of
            the fields (without ``state_fields``: bytes).
        state_fields: names and types of the state's fields, as ``struct()`` takes them. None: one binary field
            ``value`` with the state's bytes.
    """

    version: int = 0
    state_fields: dict[str, str] | None = None
    ttl: str | float | None = None
    allowed_lateness: str | float | None = None

    def open(self, partition: int) -> None:
        """Called before anything else of a batch, for every partition."""

    def close(self) -> None:
        """Called at the end of a partition's part of a batch."""

    def event_time(self, records: pa.Table) -> Any:
        """When the things happened, in epoch milliseconds: an integer array, with null where it is not known."""
        return records["timestamp_ms"] if "timestamp_ms" in records.column_names else None

    def process(self, records: pa.Table, states: pa.Table, context: ColumnContext) -> tuple[Any, Any]:
        """Handle some records of one partition.

        Tables may be returned as pyarrow, pandas or Polars.

        Args:
            records: columns ``key``, ``value`` (binary), ``state`` (int32: the row of ``states`` that belongs to the
                key), and ``timestamp_ms``, ``topic``, ``partition``, ``offset``, ``headers`` when known; in the order
                in which they arrived, which for each key is the order of their offsets.
            states: one row for every key in ``records``: ``key``, ``exists``, and the fields, null where none exists.
            context: ``partition``, ``now_ms``, ``watermark_ms``.

        Returns:
            Outputs (``key``, ``value``, optionally ``topic``, ``headers``, ``timestamp_ms``) and new states (``key``,
            the fields, optionally a boolean column ``deleted``); either may be None. Keys without a new state keep
            what they have.

        Raises:
            BadRows: these cannot be processed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define process()")

"""One task's part of a batch of ``Flow.process``: open stores, run user code, write the changelog.

This module does not depend on Spark, and does not know where outputs are written. Changes are written to Kafka first:
to the topics, in the batch's transaction. In the local store they stay pending until the batch is known to be
committed; then they are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from onceflow.calls.runner import CallRunner
from onceflow.client.produce import Acknowledged
from onceflow.errors import located
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.output_limits import ANYTHING, OutputLimits, WriteLimits
from onceflow.protocol.partitioners import group_by_partition, key_partitions
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.engine.base import BatchTimes, EngineOptions
from onceflow.state.engine.choice import AnyEngine, engine_for, makes_calls
from onceflow.state.format import rows
from onceflow.state.joins.copies import JoinedCopies
from onceflow.state.local.catch_up import LOST, Source
from onceflow.state.local.opening import Opened, set_pending
from onceflow.state.prepare import Prepared, open_local
from onceflow.state.spec import ROW_KINDS, AttemptContext, ProcessSpec, StateReport

# Flags of rows that are only a payload for other readers.
_PLAIN = (0, rows.STAMPED)
_KIND_OF = {rows.VALUE: "value", rows.SEGMENT: "value", rows.MAP: "entry", rows.TIMER: "timer"}


class ChangelogWriter(Protocol):
    """Writes rows to one partition in the batch's transaction (``task.row_writer.RowWriter``)."""

    def write_to(self, topic: str, partition: int, batch: pa.RecordBatch) -> None: ...


@dataclass
class _Open:
    opened: Opened
    engine: AnyEngine
    changes: list[tuple[bytes, bytes | None]]
    local_changes: list[tuple[bytes, bytes | None]]


class StateRun:
    """The partitions of one table that one task works on in one attempt of a batch.

    Args:
        source: reads the changelog. join_source: reads the tables that the flow joins with.
        changelog: writes the changelog.
        emit: called with the records that user code yielded, and with their table partition.
        still_owner: returns False if a newer driver has fenced this one. It is called only when that is in doubt.
        opened: called with every partition whose store has been brought up to date.
        own_topics: topics that outputs must not be written to.
        limits: returns what a topic takes, see `WriteLimits`. It also knows those of the table.
        calls_s: how long the processor's calls of other services may take in all; None: as long as they like.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        moment: AttemptContext,
        *,
        source: Source,
        changelog: ChangelogWriter,
        emit: Callable[[pa.RecordBatch, int], None],
        opened: Callable[[int], None] | None = None,
        still_owner: Callable[[], bool] | None = None,
        own_topics: OwnTopics | None = None,
        limits: Callable[[str | None], OutputLimits | None] = ANYTHING.of,
        join_source: Source | None = None,
        calls_s: float | None = None,
    ) -> None:
        self._spec = spec
        self._options = EngineOptions(
            spec.flow,
            spec.table,
            default_ttl_ms=spec.default_ttl_ms,
            on_error=spec.on_error,
            dead_letter_topic=spec.dead_letter_topic,
            late_topic=spec.late_topic,
            source_topic=spec.source_topic,
            own_topics=own_topics or OwnTopics(),
            limits=WriteLimits(limits, self._row_limits(limits)),
            max_timers_per_batch=spec.max_timers_per_batch,
        )
        self._times = BatchTimes(moment.batch, moment.now_ms, moment.watermark_ms, moment.timers_until, moment.unfired)
        self._moment = moment
        self._source = source
        self._changelog = changelog
        self._emit = emit
        self._opened = opened
        self._still_owner = still_owner
        self._open: dict[int, _Open] = {}
        self._joined: JoinedCopies | None = None
        if spec.joins and join_source is not None:
            by_name = {join.name: join for join in spec.joins}
            self._joined = JoinedCopies(by_name, moment.joined, join_source, still_owner=still_owner)
        # One for all partitions: calls for their records are made side by side, too.
        self._calls = CallRunner(calls_s, spec.flow) if makes_calls(spec.processor) else None
        self._location = spec.location()
        #: Copies on disk that this run has brought up to date. They stay so, even if this attempt fails.
        self.brought_up: list[Prepared] = []

    def open(self, partitions: Iterable[int]) -> None:
        """Bring the stores of these partitions up to date, expire rows and fire timers there."""
        wanted = [*partitions]
        self._open_joined(wanted)
        for partition in wanted:
            self._engine(partition)

    def feed(self, batch: pa.RecordBatch, *, null_keys_to: int) -> None:
        """Process rows of any partitions, in the order of their arrival.

        Args:
            null_keys_to: the partition whose engine gets rows without a key, all of which are bad records.
        """
        count = self._spec.topics.partitions
        placed = key_partitions(batch.column("key"), count)
        if placed.size and int(placed.min()) < 0:
            placed = np.where(placed < 0, np.int32(null_keys_to), placed)
        self.feed_placed(batch, placed)

    def feed_placed(self, batch: pa.RecordBatch, placed: Any) -> None:
        """Process rows whose partitions are given."""
        if not batch.num_rows:
            return
        low, high = int(placed.min()), int(placed.max())
        if low == high:
            self._feed({low: batch})
            return
        parts = group_by_partition(placed, self._spec.topics.partitions)
        self._open_joined([partition for partition, _ in parts])
        if self._calls is None:
            for partition, indices in parts:
                self._feed({partition: batch.take(pa.array(indices))})
        else:
            self._feed({partition: batch.take(pa.array(indices)) for partition, indices in parts})

    def finish(self) -> None:
        """Write the changes of all partitions to the topics."""
        for partition, run in self._open.items():
            run.engine.finish()
            self._drain(partition, run.engine)
            run.changes, run.local_changes = run.engine.changes(), run.engine.local_changes()
            if run.changes and self._spec.topics.changelog:
                self._write(partition, run)

    def leave_pending(self, acknowledged: Mapping[tuple[str, int], Acknowledged]) -> list[StateReport]:
        """Leave the changes in the stores as pending, and report. Call this when all records are acknowledged."""
        return [self._left(partition, run, acknowledged) for partition, run in sorted(self._open.items())]

    @property
    def uses_clock(self) -> bool:
        """Whether the results may depend on processing time, as far as the engines notice it."""
        return any(run.engine.uses_clock for run in self._open.values())

    def close(self) -> None:
        """Close the stores. Call this after an error, too."""
        if self._calls is not None:
            self._calls.close()
        for run in self._open.values():
            run.opened.store.close()
        self._open = {}
        if self._joined is not None:
            self._joined.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _engine(self, partition: int) -> AnyEngine:
        known = self._open.get(partition)
        if known is not None:
            return known.engine
        spec, moment = self._spec, self._moment
        tables = self._tables(partition)  # before the store is open: nobody would close it after an error
        opened = open_local(spec, moment, partition, self._source, still_owner=self._still_owner)
        if (opened.records or opened.how == LOST) and spec.store.on_disk:
            self.brought_up.append(Prepared.of(opened, spec, moment, partition))
        engine = engine_for(spec.processor, self._calls)(opened.store, partition, self._times, self._options, tables)
        self._open[partition] = _Open(opened, engine, [], [])
        if self._opened is not None:
            self._opened(partition)
        engine.start()
        self._drain(partition, engine)
        return engine

    def _row_limits(self, limits_of: Callable[[str | None], OutputLimits | None]) -> OutputLimits | None:
        """What the topics of the table take. None: it has no topics."""
        found = [limits for topic in self._spec.topics.ids if (limits := limits_of(topic)) is not None]
        return min(found, key=lambda limits: limits.max_message_bytes, default=None)

    def _open_joined(self, partitions: list[int]) -> None:
        """Open the copies of joined tables for partitions, all in one call: those that are not exact are read in one
        attempt of the batch. This is before user code runs, so that a problem is not taken for an error of a record."""
        if self._joined is not None and any(partition not in self._open for partition in partitions):
            self._joined.open(partitions)

    def _tables(self, partition: int) -> dict[str, JoinedTable]:
        """The tables that user code may look up rows in, for one partition."""
        if self._joined is None:
            return {}
        self._open_joined([partition])
        return {name: self._joined.handle(name, self._moment.now_ms, partition) for name in self._joined.specs}

    def _feed(self, parts: Mapping[int, pa.RecordBatch]) -> None:
        for partition, batch in parts.items():
            self._engine(partition).feed(batch)
        for partition in parts:
            engine = self._engine(partition)
            engine.settle()
            self._drain(partition, engine)

    def _drain(self, partition: int, engine: AnyEngine) -> None:
        while (outputs := engine.outputs()) is not None:
            if outputs.num_rows:
                self._emit(outputs, partition)

    def _write(self, partition: int, run: _Open) -> None:
        topics = self._spec.topics
        with located(flow=self._spec.flow, batch=self._moment.batch):
            values = [change for change in run.changes if change[0][:1] == rows.VALUE]
            internal = [change for change in run.changes if rows.is_internal(change[0])]
            if values:
                self._changelog.write_to(topics.table, partition, table_batch(values))
            if internal:
                self._changelog.write_to(topics.internal, partition, _internal_batch(internal))

    def _left(self, partition: int, run: _Open, acknowledged: Mapping[tuple[str, int], Acknowledged]) -> StateReport:
        spec, moment = self._spec, self._moment
        table = acknowledged.get((spec.topics.table, partition))
        internal = acknowledged.get((spec.topics.internal, partition))
        table_end = None if table is None else table.end_offset
        internal_end = None if internal is None else internal.end_offset
        if run.local_changes:
            goal = moment.goal(spec, partition)
            if not spec.topics.changelog:
                table_end = moment.batch
            set_pending(
                run.opened.store,
                goal,
                moment.commit,
                run.local_changes,
                goal.table_end if table_end is None else table_end,
                goal.internal_end if internal_end is None else internal_end,
                lost=run.opened.how == LOST,
            )
        due = run.engine.next_due()
        return StateReport(
            table=spec.table,
            partition=partition,
            location=self._location,
            commit=moment.commit,
            how=run.opened.how,
            restored=run.opened.records,
            restore_seconds=run.opened.seconds,
            table_end=table_end,
            internal_end=internal_end,
            max_event_ms=dict(run.engine.max_event_ms),
            untimed=frozenset(run.engine.untimed),
            next_timer_ms=due.by_clock,
            processing_timers=due.processing is not None,
            counts=dict(run.engine.counts),
            timers_left=run.engine.timers_left,
            fired=frozenset(run.engine.fired),
            causes=dict(run.engine.causes),
            why=run.opened.why,
            rows=_row_counts(run),
            nbytes=run.opened.store.nbytes(),
        )


def _row_counts(run: _Open) -> dict[str, int]:
    """How many rows there are after the batch, by `ROW_KINDS`; empty: not known."""
    store = run.opened.store
    found, growth = store.rows_by_kind(), run.engine.growth(run.changes)
    if not found and store.row_count():
        return {}
    counts = dict.fromkeys(ROW_KINDS, 0)
    for letter, kind in _KIND_OF.items():
        counts[kind] += found.get(letter.decode(), 0) + growth.get(letter, 0)
    return counts


def table_batch(changes: list[tuple[bytes, bytes | None]]) -> pa.RecordBatch:
    """Rows as records that any reader understands: flags and their fields become headers."""
    keys = [key[1:] for key, _ in changes]
    if all(row is None or row[0] in _PLAIN for _, row in changes):
        values = [None if row is None else row[1:] for _, row in changes]
        return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    parts = [None if row is None else rows.unpack(row) for _, row in changes]
    headers = [None if part is None else rows.record_headers(part) for part in parts]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array([None if part is None else part.payload for part in parts], pa.binary()),
            "headers": pa.array(
                [None if h is None else [{"key": k, "value": v} for k, v in h] for h in headers], HEADERS
            ),
        }
    )


def _internal_batch(changes: list[tuple[bytes, bytes | None]]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([key for key, _ in changes], pa.binary()),
            "value": pa.array([row for _, row in changes], pa.binary()),
        }
    )

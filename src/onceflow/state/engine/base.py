"""What both engines share: input checks, event time, dead letters and late records, errors, and the results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow import user_code
from onceflow.errors import BadRecordError, EnvironmentUnusableError, OnceflowError, OptionError, ProcessorError
from onceflow.options.durations import duration_ms
from onceflow.protocol import timestamps
from onceflow.protocol.names import OwnTopics
from onceflow.protocol.output_limits import ANYTHING, WriteLimits
from onceflow.protocol.progress import Origin
from onceflow.protocol.timestamps import FarAheadRecord
from onceflow.protocol.versions import TimerId
from onceflow.state.api.joined_table import JoinedTable
from onceflow.state.api.processor import Repacked
from onceflow.state.api.record import Record
from onceflow.state.api.scope import Scope
from onceflow.state.api.user_errors import full_text_of, line_of, shown
from onceflow.state.engine import dead_letters, due, input_batch
from onceflow.state.engine.output_collector import NotRecordsError, OutputCollector
from onceflow.state.stores.base import Store, StoreCorruptError
from onceflow.state.stores.overlay import Overlay
from onceflow.state.windows.processor import check_windows

EXPIRED_PER_BATCH = 100_000
"""Maximum number of expired rows that one batch deletes."""

TIMERS_PER_BATCH = 1_000
"""Maximum number of timers that fire in one batch and partition, unless ``Flow.process`` says otherwise."""


NOT_OF_A_RECORD = (StoreCorruptError, EnvironmentUnusableError, MemoryError)
"""Errors that neither a record nor the processor has caused: the caller restores the store, or runs the batch again."""

ON_TIMER = "on_timer()"
_ROW_OVERHEAD = 200

COUNTS = ("records", "late", "dead_letters", "duplicates", "aside", "timers_fired", "expired")
"""What is counted in a partition's part of a batch. ``records`` counts all records that were fed, ``aside`` those that
went to the topics of late records, dead letters and duplicates."""


@dataclass(frozen=True)
class EngineOptions:
    """What a step says to the engines of all its partitions, in all its batches.

    Args:
        flow, table: for messages.
        default_ttl_ms: time to live of rows that are put without one; None: the processor's ``ttl``.
        on_error: what happens when a record cannot be processed. ``fail``: the batch fails. ``dead-letter``: the record
            becomes a dead letter.
        dead_letter_topic, late_topic: topics of dead letters and late records.
        source_topic: topic of records that have no topic column.
        own_topics: topics that outputs must not be written to.
        limits: what may be written.
        max_timers_per_batch: how many timers may fire, those with the earliest times first. The others wait for the
            next batch. None: all that are due.
        keeps_time: whether the processing time of batches is the time of day, so that event times can be compared with
            it.
    """

    flow: str
    table: str
    default_ttl_ms: int | None = None
    on_error: str = "fail"
    dead_letter_topic: str | None = None
    late_topic: str | None = None
    source_topic: str | None = None
    own_topics: OwnTopics = field(default_factory=OwnTopics)
    limits: WriteLimits = ANYTHING
    max_timers_per_batch: int | None = TIMERS_PER_BATCH
    keeps_time: bool = True

    def check(self, processor: Any, *, may_drop_late: bool) -> None:
        """Check that they go with a processor.

        Args:
            may_drop_late: whether late records are only counted if there is no topic for them.

        Raises:
            OptionError: the topic of dead letters or late records is missing, or ttl or allowed_lateness is not a
                duration.
        """
        if self.on_error not in ("fail", "dead-letter"):
            raise OptionError(
                f"on_error is {self.on_error!r}", next_step="use 'fail' or 'dead-letter'.", flow=self.flow
            )
        if self.on_error == "dead-letter" and self.dead_letter_topic is None:
            raise OptionError("on_error='dead-letter' needs a topic for dead letters", flow=self.flow)
        if processor.allowed_lateness is not None and self.late_topic is None and not may_drop_late:
            raise OptionError("a processor with allowed_lateness needs a topic for late records", flow=self.flow)
        check_windows(processor, self.flow)
        for name in ("ttl", "allowed_lateness", "max_ahead"):
            value = getattr(processor, name)
            try:
                if value is not None and duration_ms(value) <= 0 and name == "ttl":
                    raise ValueError("it must be positive")
            except ValueError as error:
                raise OptionError(f"{type(processor).__name__}.{name}: {error}", flow=self.flow) from None


@dataclass(frozen=True)
class BatchTimes:
    """A batch, and the times with which it begins. They are the same for all partitions.

    Args:
        now_ms: processing time in epoch milliseconds.
        watermark_ms: the watermark; None while it is not known.
        timers_until: by clock, the time up to which timers may fire; a clock without an entry fires none. None: all
            that are due may fire.
        unfired: timers before that time that may not fire either.
    """

    batch: int
    now_ms: int
    watermark_ms: int | None = None
    timers_until: Mapping[str, int] | None = None
    unfired: frozenset[TimerId] = frozenset()


class BaseEngine:
    """Runs a processor over one partition's part of a batch: start(), feed() and settle() for every Arrow
    batch, finish().

    It depends neither on Spark nor on Kafka, and writes nothing. The caller gets the results from outputs() and
    changes().

    Args:
        processor: user code.
        store: committed state of the partition. Nothing else may write to it while the engine is in use.
        partition: partition of the table.
        times, options: of the batch and of the step.
        tables: tables that the flow joins with, by name.

    Attributes:
        timers_left: whether more timers were due than one batch may fire, or one of them has not done all of its work.
        fired: by clock, the latest time of a timer that has fired.
        max_event_ms: the latest event time by topic and partition of the source (None and the table's partition if
            those are not known); only if the processor has ``allowed_lateness``.
        untimed: in the same form, the sources with records whose event time is not known. See `_note_times` for what
            rejected records mean for both.
        counts: what happened so far.
        causes: of dead letters, by class of the cause: their number, and a description of the first one.

    Raises:
        OptionError: see `EngineOptions.check`.
    """

    may_drop_late = False
    """Whether late records are only counted if there is no topic for them."""

    def __init__(
        self,
        processor: Any,
        store: Store,
        partition: int,
        times: BatchTimes,
        options: EngineOptions,
        tables: Mapping[str, JoinedTable] | None = None,
    ) -> None:
        options.check(processor, may_drop_late=self.may_drop_late)
        self.processor = copy.copy(processor)
        self.flow, self.table, self.partition, self.batch = options.flow, options.table, partition, times.batch
        self.now_ms, self.watermark_ms, self._late_before_ms = times.now_ms, times.watermark_ms, times.watermark_ms
        self.uses_event_time = processor.allowed_lateness is not None
        default_ttl_ms = options.default_ttl_ms
        if default_ttl_ms is None and processor.ttl is not None:
            default_ttl_ms = duration_ms(processor.ttl)
        self._dead_letter_topic = options.dead_letter_topic if options.on_error == "dead-letter" else None
        self._late_topic, self._source_topic = options.late_topic, options.source_topic
        self._timers_until, self._unfired = times.timers_until, due.Unfired(times.unfired)
        self.timers_left, self.fired, self._max_timers = False, set[str](), options.max_timers_per_batch
        self._limits, self._overlay = options.limits, Overlay(store, options.limits.small_row_bytes)
        self._tables = tables or {}
        self._scope = self._scope_over(self._overlay, default_ttl_ms)
        self._scope.check_rows = self._check_rows
        self._own_topics = options.own_topics
        self._collector = OutputCollector(own_topics=self._own_topics, limits=options.limits)
        self.max_event_ms, self.untimed = dict[Origin, int](), set[Origin]()
        self._max_ahead = processor.max_ahead if options.keeps_time else None
        self._last_ms = _last_ms(self.now_ms, self._max_ahead)
        self.counts, self.causes = dict.fromkeys(COUNTS, 0), dict[str, tuple[int, str]]()

    def _scope_over(self, overlay: Overlay, ttl_ms: int | None = None, kind: type[Scope] = Scope) -> Scope:
        """What handles of this batch share, over these rows."""
        scope = kind(
            self.processor,
            overlay,
            partition=self.partition,
            now_ms=self.now_ms,
            watermark_ms=self.watermark_ms,
            ttl_ms=ttl_ms,
        )
        scope.has_event_time = self.uses_event_time or self.watermark_ms is not None
        scope.tables = self._tables
        return scope

    # ---- what the caller calls -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the processor, and delete rows that have expired.

        Raises:
            ProcessorError: open() failed.
        """
        self._guarded("open", self.processor.open, self.partition)
        self.counts["expired"] += due.expire(self._overlay, self.now_ms, EXPIRED_PER_BATCH)

    def feed(self, rows: pa.RecordBatch) -> None:
        """Process records of this partition, in the order in which they arrived.

        Args:
            rows: columns key and value, and if they are known headers, topic, partition, offset, and timestamp (int64
                epoch milliseconds).

        Raises:
            ProcessorError: a record could not be processed, and on_error is ``fail``.
            SchemaError: no key or value column.
            StoreCorruptError: the store cannot be read.
        """
        self.counts["records"] += rows.num_rows
        batch = input_batch.normalised(rows)
        usable = input_batch.usable_keys(batch)
        if usable is not None:
            for record in self._raw(batch.filter(pa.array(~usable))):
                self._reject(record, ValueError(input_batch.NO_KEY))
            batch = batch.filter(pa.array(usable))
        if batch.num_rows:
            self._feed(batch)
        if self._scope.fatal is not None:
            raise self._located(self._scope.fatal)

    def settle(self) -> None:
        """Wait until all records that were fed are processed. To be called after `feed`, before `outputs`."""

    def finish(self) -> None:
        """Close the processor.

        Raises:
            ProcessorError: close() failed.
        """
        self._guarded("close", self.processor.close)

    def outputs(self) -> pa.RecordBatch | None:
        """The next records to write, with dead letters and late records. Call it until it returns None.

        Columns: key, value, topic (null: the default), headers, timestamp (int64 epoch milliseconds, null: the time of
        writing).
        """
        return self._collector.take()

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Row keys and rows (None: deleted) that differ from those in the store; without index rows."""
        return self._overlay.changes()

    def local_changes(self) -> list[tuple[bytes, bytes | None]]:
        """The same changes for the local store. It may know them in another form (``segments.py``)."""
        return self.changes()

    def growth(self, changes: Sequence[tuple[bytes, bytes | None]]) -> Mapping[bytes, int]:
        """How many more rows there are of each kind after these `changes`, without index rows."""
        return self._overlay.growth(changes)

    @property
    def uses_clock(self) -> bool:
        """Whether the results may depend on processing time, see `Scope`. A column processor that reads
        ``context.now_ms`` is not noticed."""
        return self._scope.uses_clock

    def next_due(self) -> due.Due:
        """What is due next after the changes."""
        return due.earliest(self._overlay)

    @property
    def next_timer_ms(self) -> dict[str, int | None]:
        """The earliest time at which something is due after the changes, for the clocks ``event`` and ``processing``.
        Expiry of rows belongs to ``processing``."""
        return self.next_due().by_clock

    # ---- for the engines -----------------------------------------------------------------------------

    def _feed(self, batch: pa.RecordBatch) -> None:
        raise NotImplementedError

    def _raw(self, batch: pa.RecordBatch) -> list[Record]:
        """Records of a normalised batch, with key and value in bytes."""
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        return list(map(Record, keys, values, *input_batch.metadata(batch, self._source_topic)))

    def _note_times(
        self, batch: pa.RecordBatch, times: Any, rejected: Collection[int] = (), unread: Collection[int] = ()
    ) -> None:
        """Note the event times of records, for the watermark.

        To be called when it is known which of them are rejected, for whatever reason: a bad record says nothing of
        event time. A record that is late, or a duplicate, counts. A partition that has only records without an event
        time is not waited for, whether they are processed or, as by windows, rejected for that.

        Args:
            batch: a normalised batch.
            times: int64 Arrow array, null where the time is not known.
            rejected: the positions of records that are rejected.
            unread: of these, the positions of those whose event time could not be asked for, or was refused itself.
        """
        taken, taken_times = batch, times
        if rejected:
            mask = _all_but(len(times), rejected)
            taken, taken_times = batch.filter(mask), times.filter(mask)
        for place, ms in input_batch.latest(taken, taken_times, self._source_topic, self.partition):
            self.max_event_ms[place] = max(ms, self.max_event_ms.get(place, ms))
        if times.null_count:
            unknown = times.is_null()
            self._note_untimed(batch.filter(pc.and_(unknown, _all_but(len(times), unread)) if unread else unknown))

    def _note_untimed(self, batch: pa.RecordBatch) -> None:
        """Note the sources of records that have no event time."""
        self.untimed.update(input_batch.places(batch, self._source_topic, self.partition))

    def _set_late_aside(self, batch: pa.RecordBatch, times: Any) -> npt.NDArray[np.bool_] | None:
        """Send late records to the late topic.

        Args:
            batch: a normalised batch.
            times: int64 Arrow array, null where the time is not known. None is too far ahead.

        Returns:
            Which records are not late; None: all of them.
        """
        if self.watermark_ms is None or self._late_before_ms is None:
            return None
        known = times.is_valid().to_numpy(zero_copy_only=False)
        late = known & (times.fill_null(0).to_numpy() < self._late_before_ms)
        if not late.any():
            return None
        if self._late_topic is not None:
            mask = pa.array(late)
            records = self._raw(batch.filter(mask))
            event_ms = times.filter(mask).to_pylist()
            topic, watermark_ms = self._late_topic, self.watermark_ms
            late_records = [
                dead_letters.late_record(record, topic, ms, watermark_ms)
                for record, ms in zip(records, event_ms, strict=True)
            ]
            self._write_aside(late_records)
            self.counts["aside"] += len(records)
        self.counts["late"] += int(late.sum())
        in_time: npt.NDArray[np.bool_] = ~late
        return in_time

    def _far_ahead(self, times: Any) -> npt.NDArray[np.bool_] | None:
        """Which of these event times are too far ahead of the clock; None: none of them."""
        highest = pc.max(times).as_py()
        if highest is None or highest <= self._last_ms:
            return None
        found: npt.NDArray[np.bool_] = pc.greater(times, self._last_ms).fill_null(False).to_numpy(zero_copy_only=False)
        return found

    def _ahead(self, at_ms: int) -> FarAheadRecord:
        """The error of a record with an event time that is too far ahead."""
        return FarAheadRecord(at_ms, self.now_ms, self._max_ahead)

    def _without_far_ahead(self, batch: pa.RecordBatch, times: Any) -> tuple[pa.RecordBatch, Any]:
        """Reject the records whose event times are too far ahead. Returns the others, with their times."""
        far = self._far_ahead(times)
        if far is None:
            return batch, times
        mask = pa.array(far)
        away = batch.filter(mask)
        for record, at_ms in zip(self._raw(away), times.filter(mask).to_pylist(), strict=True):
            self._reject(record, self._ahead(at_ms))
        mask = pa.array(~far)
        return batch.filter(mask), times.filter(mask)

    def _reject(self, record: Record, error: Exception) -> None:
        """Write a dead letter, or fail the batch.

        Args:
            record: the record, with key and value in bytes.
            error: what is wrong with it.
        """
        if isinstance(error, NOT_OF_A_RECORD):
            raise error
        if self._scope.fatal is not None:
            raise self._located(self._scope.fatal, record.key) from error
        if self._dead_letter_topic is None:
            where = f"offset {record.offset}, " if record.offset is not None else ""
            raise self._failed("a record could not be processed", error, record, f"{where}key {shown(record.key)}")
        if isinstance(self.processor, Repacked):
            record = self.processor.as_read(record)
        letter = dead_letters.dead_letter(record, self._dead_letter_topic, error, self.flow)
        self._add_letter(letter, error, dead_letters.described(record, error))

    def _write_aside(self, letters: Sequence[Record]) -> None:
        """Write dead letters, late records or duplicates. Those that their topic does not take are shortened."""
        fitted = [dead_letters.fitted(letter, self._limits.of(letter.topic)) for letter in letters]
        self._collector.extend(fitted, as_read=True)

    def _check_rows(self) -> None:
        """Check that the rows that were put since the savepoint can be written.

        Raises:
            BadRecordError: the topics of the table do not take one.
        """
        for row_key in self._overlay.large:
            self._check_row(row_key, self._overlay.get(row_key))

    def _too_large(
        self, batch: pa.RecordBatch, row_of: Callable[[bytes, bytes], tuple[bytes, bytes]]
    ) -> dict[int, BadRecordError]:
        """What is wrong with records, by their positions, of which the topics of the table do not take the row.

        Args:
            row_of: row key and row of a key and a value. They have at most twice the bytes of the key, three times
                those of the value, and `_ROW_OVERHEAD`.
        """
        keys, values = batch.column("key"), batch.column("value")
        lengths = [pc.binary_length(each).fill_null(0).to_numpy() for each in (keys, values)]
        doubtful = 2 * lengths[0] + 3 * lengths[1] + _ROW_OVERHEAD > self._limits.small_row_bytes
        found = {}
        for at in np.flatnonzero(doubtful).tolist():
            try:
                self._check_row(*row_of(keys[at].as_py(), values[at].as_py() or b""))
            except BadRecordError as error:
                found[at] = error
        return found

    def _check_row(self, row_key: bytes, row: bytes | None) -> None:
        limits = self._limits.rows
        # Its fields besides the payload become headers, of fewer bytes than this.
        why = "" if row is None or limits is None else limits.refusal(row_key, row, [("fields", bytes(100))])
        if why:
            raise BadRecordError(
                f"state of the key cannot be stored: {why}",
                next_step="keep less in one value, for example in a map, whose entries are rows of their own",
            )

    def _add_letter(self, letter: Record, error: Exception, described: str) -> None:
        """Write a dead letter, and count it.

        Args:
            described: what has failed, for the log.
        """
        self._write_aside([letter])
        self.counts["dead_letters"] += 1
        self.counts["aside"] += 1
        cause = user_code.cause_of(error)
        count, first = self.causes.get(cause, (0, ""))
        self.causes[cause] = count + 1, first or described

    def _failed(
        self, what: str, error: Exception, record: Record | None = None, detail: str = "", *, wrong: str = ""
    ) -> OnceflowError:
        """The error for a batch that fails. The caller raises it.

        Args:
            wrong: what has to be corrected; empty: the processor or the record.
        """
        place = None
        if record is not None and record.topic is not None:
            place = record.topic if record.partition is None else f"{record.topic}-{record.partition}"
        if isinstance(error, BadRecordError):  # a yielded record cannot be written, and the error says why
            known = filter(None, (error.detail, f"for a record of {place}" if place else "", detail))
            fields = {
                **error.fields(),
                "detail": ", ".join([*known, f"table {self.table}-{self.partition}", line_of(error)]),
            }
            return BadRecordError(error.what, **fields).locate(flow=self.flow, batch=self.batch)
        next_step = f"correct {wrong or 'the processor or the record'}"
        if isinstance(error, FarAheadRecord):
            next_step = "correct the clock that has written it, the unit of event_time(), or max_ahead of the processor"
        if self._dead_letter_topic is None and not isinstance(error, NotRecordsError):
            if not wrong:
                next_step += "; with on_error='dead-letter' and dead_letter_topic= such records go to a topic instead"
            elif wrong == ON_TIMER:
                next_step += (
                    "; with on_error='dead-letter' and dead_letter_topic= a letter of the timer goes to a topic"
                )
        failed = ProcessorError(
            f"{what}: {full_text_of(error)}",
            next_step=f"{next_step}.",
            flow=self.flow,
            topic=place,
            batch=self.batch,
            detail=", ".join(filter(None, (detail, f"table {self.table}-{self.partition}", line_of(error)))),
        )
        failed.__cause__ = error
        return failed

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            what = f"{type(self.processor).__name__}.{name}() failed"
            raise self._failed(what, error, wrong=f"{name}(); no record is at fault") from error

    def _located(self, error: OnceflowError, key: bytes | None = None) -> OnceflowError:
        """An error, with flow, batch and table.

        Args:
            key: the key whose records, timer or state were processed, if it is known.
        """
        table = f"table {self.table}-{self.partition}"
        if table not in error.detail:
            processed = "" if key is None else f"while key {shown(key)} was processed"
            error.detail = ", ".join(filter(None, (table, processed, error.detail)))
        return error.locate(flow=self.flow, batch=self.batch)


def _last_ms(now_ms: int, max_ahead: str | float | None) -> int:
    """The latest event time that a record may have."""
    if max_ahead is None:
        return timestamps.LATEST_MS
    return min(timestamps.LATEST_MS - 1, now_ms + duration_ms(max_ahead))


def _all_but(count: int, positions: Collection[int]) -> Any:
    """A boolean Arrow array that is false at these positions."""
    kept = np.ones(count, dtype=bool)
    kept[list(positions)] = False
    return pa.array(kept)

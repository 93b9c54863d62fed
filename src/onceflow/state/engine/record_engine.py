"""``Engine``: runs a ``Processor`` over one partition's part of a batch."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import index
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow import user_code
from onceflow.errors import ProcessorError
from onceflow.protocol.headers import Header, behind_header
from onceflow.protocol.timestamps import whole_ms
from onceflow.state.api import user_errors
from onceflow.state.api.handle import State
from onceflow.state.api.processor import Processor, Repacked, overrides
from onceflow.state.api.record import Record
from onceflow.state.api.scope import ABSENT, Failures, Scope
from onceflow.state.api.serdes import JSON
from onceflow.state.api.timers import Timer
from onceflow.state.api.user_errors import shown
from onceflow.state.engine import dead_letters, due, input_batch
from onceflow.state.engine.base import NOT_OF_A_RECORD, ON_TIMER, BaseEngine
from onceflow.state.engine.output_collector import NotRecordsError, OutputCollector
from onceflow.state.engine.retry import Retry
from onceflow.state.engine.shapes import SHAPE_ERRORS, lacks
from onceflow.state.format import exact_json, rows
from onceflow.state.stores.overlay import NoRows, Overlay
from onceflow.state.windows.panes import MAP as WINDOWS
from onceflow.state.windows.panes import TIMER as WINDOWS_TIMER
from onceflow.state.windows.panes import NoAccumulatorError
from onceflow.state.windows.processor import WindowProcessor

log = logging.getLogger("onceflow.state")

# So few that they are freed before the garbage collector promotes them to an older generation. With a whole Arrow batch
# at a time, full collections take a quarter of the time.
_RECORDS_AT_ONCE = 1000


class _Trial(Scope):
    """The scope of a trial. It notes how the values of each map are decoded, and the key's own value (None)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decoders: dict[str | None, Callable[[bytes], Any]] = {}

    def read(self, row: bytes, decode: Callable[[bytes], Any], name: str | None) -> Any:
        self.decoders[name] = decode
        return super().read(row, decode, name)


class Engine(BaseEngine):
    """See `BaseEngine`.

    A call of process() that fails is rolled back. Then its records are processed one by one, to find the bad ones.
    """

    processor: Processor

    def __init__(self, processor: Processor, *arguments: Any, **options: Any) -> None:
        super().__init__(processor, *arguments, **options)
        self._collector = self._new_collector()
        self._scope.refusal = self._refusal
        self._own_event_time = False

    def start(self) -> None:
        """Open the processor, delete rows that have expired, and fire timers that are due, up to the limit.

        Raises:
            ProcessorError: open() failed; or on_timer() failed, and on_error is ``fail``.
        """
        super().start()
        # Of the object, not of its class: __init__() or open() may have set it.
        self._own_event_time = overrides(self.processor.event_time, Processor.event_time)
        self._scope.handles_timers = overrides(self.processor.on_timer, Processor.on_timer)
        self._guarded("late_before_ms", self._decide_what_is_late)
        if isinstance(self.processor, WindowProcessor):
            self._guarded("initial", self.processor.check_initial)
        for raw_key, timer in due.due_timers(self._overlay, *self._fire_until()):
            if self._unfired.has(raw_key, timer):
                continue
            if self.counts["timers_fired"] == self._max_timers:
                self.timers_left = True
                break
            self._fire(raw_key, timer)
            self.counts["timers_fired"] += 1
            self.fired.add(timer.clock)
        self.timers_left = self.timers_left or self._scope.timers_left
        self._overlay.savepoint()

    def _fire(self, raw_key: bytes, timer: Timer) -> None:
        """Call on_timer(). If it fails and there are dead letters, one names the timer, which is gone then.

        A timer that closes windows is run once more after an error, to find those that cannot be closed.
        """
        error = self._run_timer(raw_key, timer)
        if error is None:
            return
        failures = Failures(self._can_be_written, (*NOT_OF_A_RECORD, NotRecordsError))
        if self._dead_letter_topic is not None and isinstance(self.processor, WindowProcessor):
            self._scope.failures = failures
            error = self._run_timer(raw_key, timer)
            self._scope.failures = None
        if error is not None and (self._dead_letter_topic is None or isinstance(error, NotRecordsError)):
            where = f"timer {timer.name!r} ({timer.clock} time {timer.at_ms}), key {shown(raw_key)}"
            raise self._failed("a timer could not be handled", error, detail=where, wrong=ON_TIMER) from error
        if error is not None:
            due.take(self._overlay, raw_key, timer)
            processor, lost = self.processor, list[dict[str, Any]]()
            if isinstance(processor, WindowProcessor) and timer.name == WINDOWS_TIMER:
                lost = processor.give_up(timer, State(self._scope, raw_key))
            failures.found = [(about, error) for about in lost or [{}]]
        for about, reason in failures.found:
            self._check_accumulators(raw_key, reason, about)
            self._reject_timer(raw_key, timer, reason, about)

    def _check_accumulators(self, raw_key: bytes, error: Exception, about: Mapping[str, Any]) -> None:
        """Raise a ProcessorError if windows cannot be closed because older code has stored their accumulators.

        Args:
            about: what the letter says of them.
        """
        processor = self.processor
        if not isinstance(processor, WindowProcessor) or not isinstance(error, SHAPE_ERRORS):
            return
        try:
            new = processor.initial()
        except Exception:  # of user code: nothing can be compared with it, and the letters are written as they are
            return
        if any(lacks(stored, new) for stored in about.get("accumulators", ())):
            raise self._located(self._of_older_code(raw_key, error, "closing its windows needs")) from error

    def _run_timer(self, raw_key: bytes, timer: Timer) -> Exception | None:
        """Call on_timer(). Returns what went wrong; then nothing has changed."""
        if not self._scope.handles_timers:
            raise self._located(self._scope.without_on_timer(), raw_key)
        on_timer, mark, records = self.processor.on_timer, self._collector.mark(), None
        self._overlay.savepoint()
        due.take(self._overlay, raw_key, timer)
        failed: Exception | None = None
        try:
            key = self._scope.key_of(raw_key, self.processor.key, "the key of a timer")
            records = on_timer(key, timer, State(self._scope, raw_key))
            if records is not None:
                self._collector.extend(records, key, raw_key)
            self._check_rows()
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            user_errors.handed_over(error, on_timer, records)
            end_generator(records)
            self._overlay.roll_back()
            self._collector.truncate(mark)
            failed = error
        if self._scope.fatal is not None:
            raise self._located(self._scope.fatal, raw_key) from failed
        return failed

    def _can_be_written(self, key: Any, raw_key: bytes, records: list[Record]) -> None:
        """Raise what writing these records of a timer would raise."""
        self._new_collector().extend(records, key, raw_key)

    def _refusal(self, record: Record) -> str:
        return self._collector.refusal(record.topic, record.key, record.value, record.headers, record.timestamp_ms)

    def _new_collector(self) -> OutputCollector:
        processor = self.processor
        letters = [processor.parked_topic] if isinstance(processor, Retry) else []
        return OutputCollector(
            processor.key, processor.output, self._own_topics, limits=self._limits, shortened_topics=letters
        )

    def _reject_timer(self, raw_key: bytes, timer: Timer, error: Exception, about: Mapping[str, Any]) -> None:
        """Write the dead letter of a timer."""
        assert self._dead_letter_topic is not None
        table = f"{self.table}-{self.partition}"
        letter = dead_letters.timer_letter(raw_key, timer, self._dead_letter_topic, table, error, about)
        what = f"timer {timer.name!r} ({timer.clock} time {timer.at_ms}) of {table}, key {shown(raw_key)}"
        self._add_letter(letter, error, dead_letters.described_as(what, error))

    def finish(self) -> None:
        """See `BaseEngine`. After a promotion, timers that this batch has registered may have fired already, too."""
        super().finish()
        if self._timers_until is not None:
            self.timers_left = due.are_left(self._overlay, *self._fire_until(), self._unfired)

    def _fire_until(self) -> tuple[int | None, int | None]:
        """Up to when timers fire, in processing time and in event time; None: none fires."""
        limits = self._timers_until
        if limits is None:
            return self.now_ms, self.watermark_ms
        now_ms = min(self.now_ms, limits["processing"]) if "processing" in limits else None
        known = self.watermark_ms is not None and "event" in limits
        return now_ms, min(self.watermark_ms or 0, limits["event"]) if known else None

    def _decide_what_is_late(self) -> None:
        if self.uses_event_time and self.watermark_ms is not None:
            self._late_before_ms = index(self.processor.late_before_ms(self.watermark_ms))

    def _feed(self, batch: pa.RecordBatch) -> None:
        if self.uses_event_time and not self._own_event_time:
            batch, times = self._without_far_ahead(batch, _timestamps(batch))
            in_time = self._set_late_aside(batch, times)
            if in_time is not None:
                late = pa.array(~in_time)
                self._note_times(batch.filter(late), times.filter(late))
                batch = batch.filter(pa.array(in_time))
        if not batch.num_rows:
            return
        raw_keys, ends, batch = input_batch.by_key(batch)
        # A serde whose values are much larger than their bytes says so: then one key after the other is in memory.
        large = getattr(self.processor.value, "decodes_large", None)
        at_once = 1 if large is not None and large(batch.column("value")) else _RECORDS_AT_ONCE
        first = 0  # index of the first key of the part
        while first < len(raw_keys):
            start = ends[first - 1] if first else 0
            last = bisect_left(ends, start + at_once, first, len(ends) - 1)
            part = batch.slice(start, ends[last] - start)
            self._feed_keys(part, raw_keys[first : last + 1], [end - start for end in ends[first : last + 1]])
            first = last + 1

    def _feed_keys(self, batch: pa.RecordBatch, raw_keys: list[bytes], ends: list[int]) -> None:
        """Process records key by key.

        Args:
            batch: a batch that is sorted by key.
            raw_keys: the keys.
            ends: the index at which the records of each key end.
        """
        keys, bad_keys = _decoded(raw_keys, self.processor.key, "key")
        metadata = input_batch.metadata(batch, self._source_topic)
        raws = _with_ids(batch.column("value").to_pylist(), metadata.headers, self.processor.value)
        values, bad = _decoded(raws, self.processor.value, "value")
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        of_records = chain.from_iterable(map(repeat, keys, counts))
        records = list(map(Record, of_records, values, *metadata))
        if len(records) != batch.num_rows:  # no record may go astray
            raise RuntimeError(f"{batch.num_rows} records became {len(records)}")
        if isinstance(self.processor, Repacked):
            bad.update(self._too_large(batch, self.processor.largest_row))
        for at, error in bad_keys.items():
            bad.update(dict.fromkeys(range(ends[at] - counts[at], ends[at]), error))
        times, in_time, unread = None, None, set[int]()
        if self.uses_event_time:
            times = _timestamps(batch)
            if self._own_event_time:
                times = self._event_times(records, bad)
                unread = set(bad)
                in_time = self._set_late_aside(batch, times)
        where: Sequence[int] = range(len(records))
        if bad or in_time is not None:
            for i, error in sorted(bad.items()):
                self._reject(self._raw(batch.slice(i, 1))[0], error)
            keep = np.ones(len(records), dtype=bool) if in_time is None else in_time
            keep[list(bad)] = False
            where = np.flatnonzero(keep).tolist()
            records = [records[i] for i in where]
            ends = np.cumsum(keep)[np.array(ends) - 1].tolist()
        rejected = set(bad)
        self._process(batch, keys, raw_keys, records, ends, where, rejected)
        if times is not None:
            self._note_processed(batch, times, rejected, unread)

    def _note_processed(self, batch: pa.RecordBatch, times: Any, rejected: set[int], unread: set[int]) -> None:
        """As `_note_times`, when records have been passed to `_process`."""
        self._note_times(batch, times, rejected, unread)

    def _process(
        self,
        batch: pa.RecordBatch,
        keys: Sequence[Any],
        raw_keys: Sequence[bytes],
        records: list[Record],
        ends: list[int],
        where: Sequence[int],
        rejected: set[int],
    ) -> None:
        """Call process() key by key.

        Args:
            records: the records in the order of the keys. Those of the key with index k end at ends[k].
            where: index of each record in the batch.
            rejected: the indexes of those that are rejected are added to it.
        """
        scope, overlay, collector = self._scope, self._overlay, self._collector
        process, savepoint, extend = self.processor.process, overlay.savepoint, collector.extend
        start = 0
        for key, raw_key, end in zip(keys, raw_keys, ends, strict=True):
            if end == start:
                continue
            savepoint()
            mark = collector.mark()
            result = None
            try:
                result = process(key, records[start:end], State(scope, raw_key))
                if result is not None:
                    extend(result, key, raw_key)
                if overlay.large:
                    self._check_rows()
            except Exception as error:
                user_errors.handed_over(error, process, result)
                end_generator(result)
                overlay.roll_back()
                collector.truncate(mark)
                rejected.update(self._find_culprit(batch, raw_key, list(where[start:end]), error))
            start = end

    def _find_culprit(self, batch: pa.RecordBatch, raw_key: bytes, where: list[int], first: Exception) -> list[int]:
        """Process the records of a failed call one by one, and reject each record that fails. Returns their indexes.

        Raises:
            ProcessorError: a record failed and on_error is ``fail``, or the state itself cannot be read.
        """
        if isinstance(first, NOT_OF_A_RECORD):
            raise first
        part = batch.take(pa.array(where))
        raw = self._raw(part)
        if len(raw) == 1 or self._scope.fatal is not None:
            self._reject_processed(raw[0], raw_key, first)
            return where[:1]
        overlay, collector, processor = self._overlay, self._collector, self.processor
        rejected = []
        for at, record in zip(where, raw, strict=True):
            overlay.savepoint()
            mark = collector.mark()
            result = None
            try:
                again = self._decoded_again(record, raw_key)
                result = processor.process(again.key, [again], State(self._scope, raw_key))
                if result is not None:
                    collector.extend(result, again.key, raw_key)
                self._check_rows()
            except Exception as error:
                user_errors.handed_over(error, processor.process, result)
                end_generator(result)
                overlay.roll_back()
                collector.truncate(mark)
                self._reject_processed(record, raw_key, error)
                rejected.append(at)
        if self._dead_letter_topic is None:
            offsets = [record.offset for record in raw if record.offset is not None]
            span = f"offsets {offsets[0]} to {offsets[-1]}, " if offsets else ""
            detail = f"{span}key {shown(raw_key)}; each record alone succeeds"
            raise self._failed("records of one key could not be processed together", first, raw[0], detail) from first
        return rejected

    def _decoded_again(self, record: Record, raw_key: bytes) -> Record:
        """The record as process() gets it, decoded again: the failed call may have changed the earlier object."""
        value = None if record.value is None else self.processor.value.decode(record.value)
        return Record(
            self.processor.key.decode(raw_key),
            value,
            record.topic,
            record.headers,
            record.timestamp_ms,
            record.partition,
            record.offset,
            record.topic,
        )

    def _reject_processed(self, record: Record, raw_key: bytes, error: Exception) -> None:
        """As `_reject`, for a record for which process() raised. If the record is not the cause, the batch fails."""
        if self._scope.fatal is None and isinstance(error, NotRecordsError):
            self._scope.fatal = ProcessorError(
                f"process() has to yield Records: {user_errors.text_of(error)}",
                next_step="yield Record(key, value); records are not at fault, so there are no dead letters of them.",
                detail=", ".join(filter(None, (f"table {self.table}-{self.partition}", user_errors.line_of(error)))),
            )
        if self._scope.fatal is None and isinstance(error, NoAccumulatorError):
            self._scope.fatal = ProcessorError(
                user_errors.text_of(error),
                next_step="return the accumulator from add(); no record is at fault, so there are no dead letters.",
            )
        if self._scope.fatal is None and self._is_fault_of_state(record, raw_key, error):
            self._scope.fatal = self._of_older_code(raw_key, error, "process() looks for")
        self._reject(record, error)

    def _of_older_code(self, raw_key: bytes, error: Exception, needed: str) -> ProcessorError:
        """The error for state that lacks fields, because another version of the code has stored it."""
        return ProcessorError(
            f"the stored state of key {shown(raw_key)} lacks fields that {needed}: {user_errors.full_text_of(error)}",
            detail=", ".join(filter(None, (f"table {self.table}-{self.partition}", user_errors.line_of(error)))),
            next_step="records are not at fault. Did the fields of the state change? Then raise `version` and "
            "define migrate(self, payload, from_version).",
        )

    def _is_fault_of_state(self, record: Record, raw_key: bytes, error: Exception) -> bool:
        """Whether a record fails only because another version of the code has stored the state of the key.

        This is the case if three things hold: the record succeeds with empty state, it succeeds once more with the
        resulting state, and that state has fields that the stored one lacks: the value of the key, or an entry of a
        map. The results of these trials are discarded.
        """
        if not isinstance(error, SHAPE_ERRORS) or isinstance(error, NotRecordsError):
            return False
        row_key, entries, store = rows.value_key(raw_key), rows.MAP + rows.escape(raw_key), self._overlay.store
        row = store.get(row_key)
        is_stored = row is not None and self._overlay.get(row_key) == row
        if not is_stored and not any(store.scan(entries, rows.after(entries))):
            return False  # all of it was written by this code, in this batch
        try:
            # A scope of its own, so that an error of the trial does not become a fatal error of the batch.
            made = Overlay(NoRows())
            trial = self._scope_over(made, kind=_Trial)
            assert isinstance(trial, _Trial)
            state = State(trial, raw_key)
            for _ in range(2):
                again = self._decoded_again(record, raw_key)
                outputs = self.processor.process(again.key, [again], state)
                if outputs is not None:  # check that they can be written
                    self._new_collector().extend(outputs, again.key, raw_key)
            return any(self._lacks(*change, trial) for change in made.changes())
        except NOT_OF_A_RECORD:
            raise
        except Exception:  # raised by user code: the record fails with empty state as well, so it is bad
            return False

    def _lacks(self, row_key: bytes, new: bytes | None, trial: _Trial) -> bool:
        """Whether the stored row lacks fields that the row of a trial has. False if this batch has written it.

        The windows of a key have other bounds in a trial, so any window is compared.
        """
        store, name = self._overlay.store, None
        stored: Iterable[tuple[bytes, bytes | None]] = [(row_key, store.get(row_key))]
        if row_key[:1] == rows.MAP:
            key, raw_name, _ = rows.map_parts(row_key)
            name = raw_name.decode(errors="replace")
            if name == WINDOWS and isinstance(self.processor, WindowProcessor):
                first = rows.map_key(key, raw_name)
                stored = store.scan(first, rows.after(first))
        decode = trial.decoders.get(name)
        # Rows of lists and timers have no decoder, and those that were not read.
        if new is None or row_key[:1] not in (rows.MAP, rows.VALUE) or decode is None:
            return False
        value = trial.read(new, decode, name)
        older = [row for place, row in stored if row is not None and self._overlay.get(place) == row]
        found = [trial.read(row, decode, name) for row in older]
        return value is not ABSENT and any(each is not ABSENT and lacks(each, value) for each in found)

    def _event_times(self, records: list[Record], bad: dict[int, Exception]) -> Any:
        """The event times by the processor's own event_time(), null where they are not known. Errors are added to
        ``bad``."""
        times: list[int | None] = []
        for i, record in enumerate(records):
            at_ms = None
            if i not in bad:
                try:
                    at_ms = self.processor.event_time(record)
                    at_ms = None if at_ms is None else whole_ms(at_ms)
                    at_ms = None if at_ms is not None and at_ms < 0 else at_ms
                    if at_ms is not None and at_ms > self._last_ms:
                        bad[i], at_ms = self._ahead(at_ms), None
                except Exception as error:
                    if at_ms is not None:
                        user_errors.explain(
                            error, f"event_time() gives milliseconds since 1970 or None, got {at_ms!r:.100}"
                        )
                        user_errors.returned_by(error, self.processor.event_time)
                    user_code.of_hook(error, user_code.EVENT_TIME)
                    bad[i], at_ms = error, None
            times.append(at_ms)
        return pa.array(times, pa.int64())


def _timestamps(batch: pa.RecordBatch) -> Any:
    """The timestamps of a normalised batch, null where they are not known."""
    return batch.column("timestamp") if "timestamp" in batch.schema.names else pa.nulls(batch.num_rows, pa.int64())


def end_generator(result: Any) -> None:
    """Close a generator that has not finished. Its clean-up runs now, so that it cannot change later results."""
    close = getattr(result, "close", None)
    if close is not None:
        try:
            close()
        except Exception:
            log.warning("clean-up of a processor's generator failed", exc_info=True)


def _with_ids(
    raws: Sequence[bytes | None], headers: Iterable[tuple[Header, ...]], serde: Any
) -> Sequence[bytes | None]:
    """The values of records, each behind what a header has that the serde names: the id of a schema."""
    name = getattr(serde, "id_header", None)
    if name is None or not isinstance(headers, list):  # else no record has headers
        return raws
    return [None if raw is None else behind_header(raw, pairs, name) for raw, pairs in zip(raws, headers, strict=True)]


def _decoded(raws: Sequence[bytes | None], serde: Any, what: str) -> tuple[list[Any], dict[int, Exception]]:
    """Decoded values, and errors by index for those that cannot be decoded. None stays None.

    Args:
        what: ``key`` or ``value``, for the errors.
    """
    decode: Callable[[bytes], Any] = exact_json.loader(raws) if serde == JSON else serde.decode
    try:
        if None in raws:
            return [None if raw is None else decode(raw) for raw in raws], {}
        found = list(map(decode, raws))  # type: ignore[arg-type]
        if len(found) == len(raws):  # a StopIteration of user code ends map() in silence
            return found, {}
    except Exception:
        pass
    values: list[Any] = []
    bad: dict[int, Exception] = {}
    for i, raw in enumerate(raws):
        value = None
        if raw is not None:
            try:
                value = decode(raw)
            except Exception as error:
                user_errors.not_decoded(error, f"the {what} of the record", raw, serde)
                bad[i] = error
        values.append(value)
    return values, bad

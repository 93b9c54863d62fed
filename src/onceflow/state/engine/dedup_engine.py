"""``DedupEngine``: passes on the first record of each id, and remembers the id for as long as it has to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.clock import clock_ms
from onceflow.errors import BadRecordError
from onceflow.protocol import timestamps
from onceflow.state.api.deduplication import EVENT_TIME, RECORD_KEY, SOURCE_COLUMNS, Deduplication
from onceflow.state.engine import dead_letters, input_batch
from onceflow.state.engine.base import BaseEngine
from onceflow.state.engine.dead_letters import ATTEMPT, ORIGIN_TOPIC, RETRY_TOPIC
from onceflow.state.engine.due import Due
from onceflow.state.engine.input_batch import binary
from onceflow.state.engine.output_collector import SCHEMA, OutputCollector
from onceflow.state.format import rows, stamps
from onceflow.state.format.segments import LOCATED, Segments

DELETED_PER_BATCH = 20_000
"""How many ids a batch may delete, if it does not have many records."""

_WITH_SOURCE = pa.schema([*SCHEMA, *zip(SOURCE_COLUMNS.values(), (pa.string(), pa.int32(), pa.int64()), strict=True)])
Flags = npt.NDArray[np.bool_]


class DedupEngine(BaseEngine):
    """See `BaseEngine`. The rows that it is fed have the id in the column ``key``.

    What is remembered does not change while a batch runs, except by the ids of the batch itself: ids with a smaller
    stamp than the *floor* are forgotten, whether they are deleted yet or not. The floor is the watermark, or follows
    from the number of ids at the beginning of the batch.
    """

    processor: Deduplication
    may_drop_late = True

    def start(self) -> None:
        """Find out which ids are forgotten."""
        self._collector = OutputCollector(own_topics=self._own_topics, schema=_WITH_SOURCE)
        self._new: dict[bytes, bytes] = {}
        self._kept: dict[bytes, bytes] = {}
        self._deleted: list[bytes] = []
        self._drained: dict[bytes, bytes | None] = {}
        self._replaced: list[bytes] = []  # keys of rows of forgotten ids that came again
        self._segments = Segments(self._overlay.store)
        self._next = 0
        self._floor = self.watermark_ms
        remembered = self.processor.records
        if remembered is not None:
            last = self._segments.greatest
            self._next = 0 if last is None else last + 1
            self._floor = self._next - remembered

    def feed(self, rows_: pa.RecordBatch) -> None:
        self.counts["records"] += rows_.num_rows
        batch = input_batch.normalised(rows_)
        ids = batch.column("key")
        if RECORD_KEY in rows_.schema.names:
            own = input_batch.binary(rows_.column(RECORD_KEY), RECORD_KEY)
            batch = batch.set_column(0, "key", pc.coalesce(own, ids) if self.processor.id_is_key else own)
        times = self._times(rows_, batch)
        bad = ids.is_null() if times is None else pc.or_(ids.is_null(), pc.less(times, 0))
        if (bad_rows := bad.to_numpy(zero_copy_only=False)).any():
            self._reject_all(batch.filter(bad), ids.filter(bad))
            if times is not None:
                self._note_untimed(batch.filter(pc.less(times, 0)))
            good = pa.array(~bad_rows)
            batch, ids = batch.filter(good), ids.filter(good)
            times = None if times is None else times.filter(good)
        if (back := returned(batch, self._own_topics.sources)) is not None:
            left = self._without_returned(batch, ids, times, back)
            batch, ids, times = batch.filter(left), ids.filter(left), None if times is None else times.filter(left)
        if times is not None:
            ids = ids if (far := self._far_ahead(times)) is None else ids.filter(pa.array(~far))
            batch, times = self._without_far_ahead(batch, times)
        if times is not None and (in_time := self._set_late_aside(batch, times)) is not None:
            mask, late = pa.array(in_time), pa.array(~in_time)
            self._note_times(batch.filter(late), times.filter(late))
            batch, ids, times = batch.filter(mask), ids.filter(mask), times.filter(mask)
        if batch.num_rows and (taken := self._taken(batch)) is not None:
            batch, ids, times = batch.filter(taken), ids.filter(taken), None if times is None else times.filter(taken)
        if times is not None:
            self._note_times(batch, times)
        if batch.num_rows:
            self._judge(batch, ids, None if times is None else times.to_numpy())

    def finish(self) -> None:
        """Delete ids that are forgotten, a limited number at a time.

        The limit is above the number of ids that a batch can bring, so that their number on disk does not grow.
        """
        if self._floor is None or self._floor <= 0:
            return
        lowest_kept = stamps.row_of(self._floor)
        left = max(DELETED_PER_BATCH, 2 * self.counts["records"])
        for segment in self._segments.due(self._floor):
            entries = self._segments.first_of(segment, left)
            # An id that came again is moved by its new row.
            forgotten = [id_ for id_, row in entries if row < lowest_kept and id_ not in self._new]
            self.counts["expired"] += len(forgotten)
            self._deleted += forgotten
            # The segment ends, so the others that are in it are written again, and thereby put into another one.
            self._kept.update((id_, row) for id_, row in entries if row >= lowest_kept and id_ not in self._new)
            ended = len(entries) < left
            self._drained[segment.filter_key] = None if ended else b""
            if entries:
                self._drained[segment.prefix + entries[-1][0]] = b""
            left -= len(entries)
            if not ended:
                break

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        return [*self._written(), *zip(map(rows.VALUE.__add__, self._deleted), repeat(None))]

    def local_changes(self) -> list[tuple[bytes, bytes | None]]:
        """See `segments.placed`."""
        gone: dict[bytes, bytes | None] = {**dict.fromkeys(self._replaced), **self._drained}
        changes = [*self._written(), *gone.items()]
        return [*changes, (LOCATED, b"")] if changes else []

    def growth(self, changes: Sequence[tuple[bytes, bytes | None]]) -> Mapping[bytes, int]:
        # A row that was written for an id whose older row is there replaces it.
        return {rows.VALUE: len(self._new) - len(self._replaced) - len(self._deleted)}

    def next_due(self) -> Due:
        """Nothing is ever due: ids are deleted when records come."""
        return Due()

    # ---- inside --------------------------------------------------------------------------------------

    def _written(self) -> Iterator[tuple[bytes, bytes]]:
        written = {**self._kept, **self._new}
        return zip(map(rows.VALUE.__add__, written), written.values(), strict=True)

    def _times(self, given: pa.RecordBatch, batch: pa.RecordBatch) -> Any:
        """Event times in milliseconds, -1 where there is none; None: they do not matter."""
        if self.processor.within_ms is None:
            return None
        times = given.column(EVENT_TIME) if EVENT_TIME in given.schema.names else batch.column("timestamp")
        return timestamps.known_times(input_batch.milliseconds(times)).fill_null(timestamps.NO_TIMESTAMP)

    def _taken(self, batch: pa.RecordBatch) -> Any:
        """Refuse records that the output topic does not take, before their ids count. Returns a mask of the others;
        None: all."""
        limits = self._limits.of(None)
        if limits is None:
            return None
        headers = batch.column("headers") if "headers" in batch.schema.names else pa.nulls(batch.num_rows)
        doubtful = limits.doubtful(batch.column("key"), batch.column("value"), headers)
        taken, now_ms = np.ones(batch.num_rows, dtype=bool), clock_ms()
        for at, record in zip(doubtful.tolist(), self._raw(batch.take(pa.array(doubtful))), strict=True):
            headers = limits.headers_as_written(record.headers, record.timestamp_ms, now_ms)
            why = limits.refusal(record.key, record.value, headers)
            if why:
                taken[at] = False
                self._reject(record, BadRecordError(f"the record cannot be passed on: {why}", topic=limits.topic))
        return None if taken.all() else pa.array(taken)

    def _reject_all(self, batch: pa.RecordBatch, ids: Any) -> None:
        for record, id_ in zip(self._raw(batch), ids.to_pylist(), strict=True):
            what = f"no id: column {self.processor.id_name!r} is null" if id_ is None else "no event time since 1970"
            self._reject(record, ValueError(f"the record has {what}"))

    def _without_returned(self, batch: pa.RecordBatch, ids: Any, times: Any, back: npt.NDArray[np.int64]) -> Any:
        """Refuse records that have come back and would be dropped here. Returns a mask of the others."""
        keys = ids.take(pa.array(back)).to_pylist()
        distinct = list(dict.fromkeys(keys))
        known = {id_ for id_, row in zip(distinct, self._found(distinct), strict=True) if row is not None}
        wrong = np.fromiter((id_ in known for id_ in keys), dtype=bool, count=len(keys))
        if times is not None and self.watermark_ms is not None:
            wrong |= times.to_numpy()[back] < self.watermark_ms
        for record in self._raw(batch.take(pa.array(back[wrong]))):
            self._reject(record, ReturnedRecordError())
        left = np.ones(batch.num_rows, dtype=bool)
        left[back[wrong]] = False
        return pa.array(left)

    def _judge(self, batch: pa.RecordBatch, ids: Any, times: npt.NDArray[np.int64] | None) -> None:
        encoded = ids.dictionary_encode()
        codes = encoded.indices.to_numpy()
        known = encoded.dictionary.to_pylist()
        first = np.empty(len(known), dtype=np.int64)
        first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last assignment to a place remains
        found = self._found(known, replaced=self._replaced)
        is_new = np.fromiter((row is None for row in found), dtype=bool, count=len(found))
        passed = np.zeros(len(codes), dtype=bool)
        passed[first[is_new]] = True
        if is_new.any():
            new = [key for key, row in zip(known, found, strict=True) if row is None]
            self._new.update(zip(new, self._stamped(first[is_new], times), strict=True))
        if passed.all():
            self._pass_on(batch)
            return
        duplicates = ~passed
        self.counts["duplicates"] += int(duplicates.sum())
        if self.processor.duplicates_topic is not None:
            self._set_aside(batch, ids, duplicates)
        self._pass_on(batch.filter(pa.array(passed)))

    def _found(self, ids: list[bytes], replaced: list[bytes] | None = None) -> list[bytes | None]:
        """The row of each id that is remembered.

        Args:
            replaced: the keys of the rows of ids that are there, but forgotten, are added to it.
        """
        found: list[bytes | None] = list(map(self._new.get, ids)) if self._new else [None] * len(ids)
        absent = [id_ for id_, row in zip(ids, found, strict=True) if row is None]
        committed = self._segments.find(absent)
        if not any(committed):
            return found
        lowest_kept = stamps.row_of(max(0, self._floor or 0))
        again = [id_ for id_, row in zip(absent, committed, strict=True) if row is not None and row < lowest_kept]
        if again and replaced is not None:
            self._segments.find(again, replaced)
        kept = {id_: row for id_, row in zip(absent, committed, strict=True) if row is not None and row >= lowest_kept}
        return [kept.get(id_) if row is None else row for id_, row in zip(ids, found, strict=True)]

    def _stamped(self, first: npt.NDArray[np.int64], times: npt.NDArray[np.int64] | None) -> Sequence[bytes]:
        """The rows of new ids. Args: the place of the first record of each."""
        if times is not None:
            return stamps.rows_of(times[first])
        numbers = np.arange(self._next, self._next + len(first), dtype=np.int64)
        self._next += len(first)
        return stamps.rows_of(numbers)

    def _pass_on(self, batch: pa.RecordBatch) -> None:
        count, columns = batch.num_rows, []
        for field in SCHEMA:
            if field.name == "topic" or field.name not in batch.schema.names:
                columns.append(pa.nulls(count, field.type))
                continue
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        columns += [self._source(batch, field) for field in list(_WITH_SOURCE)[len(columns) :]]
        self._collector.add_batch(pa.RecordBatch.from_arrays(columns, schema=_WITH_SOURCE))

    def _source(self, batch: pa.RecordBatch, field: pa.Field) -> Any:
        """A column that says where the records were read."""
        name = next(name for name, source in SOURCE_COLUMNS.items() if source == field.name)
        topic = self._source_topic if name == "topic" else None
        if name not in batch.schema.names:
            return pa.nulls(batch.num_rows, field.type) if topic is None else pa.repeat(topic, batch.num_rows)
        column = batch.column(name)
        return column if topic is None else pc.fill_null(column, topic)

    def _set_aside(self, batch: pa.RecordBatch, ids: Any, duplicates: Flags) -> None:
        """Write duplicates to their topic."""
        topic = self.processor.duplicates_topic
        assert topic is not None
        mask = pa.array(duplicates)
        records, own_ids = self._raw(batch.filter(mask)), ids.filter(mask).to_pylist()
        known = dict(zip(own_ids, map(self._new.get, own_ids), strict=True))
        unknown = [id_ for id_, row in known.items() if row is None]
        known.update(zip(unknown, self._segments.find(unknown), strict=True))
        seen = stamps.stamps_of([known[id_] for id_ in own_ids]).tolist()
        by_time = self.processor.within_ms is not None
        aside = [
            dead_letters.duplicate(record, topic, id_, stamp if by_time else None)
            for record, id_, stamp in zip(records, own_ids, seen, strict=True)
        ]
        self._write_aside(aside)
        self.counts["aside"] += len(records)


class ReturnedRecordError(ValueError):
    """A record comes back in front of the de-duplication that it has passed."""

    def __init__(self) -> None:
        super().__init__(
            "the record has failed behind Flow.deduplicate and comes back in front of it, where it is a duplicate of "
            "itself: read the retry topic behind the step (docs/deduplication.md, Retries)"
        )


def returned(batch: pa.RecordBatch, sources: Iterable[str]) -> npt.NDArray[np.int64] | None:
    """Which records of a normalised batch have been dead letters, and were read from one of these topics before.

    Other records may have such headers, too, if a flow has passed them on, see `dead_letters.has_come_back`.

    Args:
        sources: topics that the flow reads.

    Returns:
        Their positions; None: there are none, or the batch has no headers.
    """
    if "headers" not in batch.schema.names:
        return None
    column = batch.column("headers")
    flat = column.flatten()
    names = pc.struct_field(flat, 0)
    origins = pc.equal(names, ORIGIN_TOPIC)
    if not pc.any(origins).as_py():
        return None
    topics = pa.array([topic.encode() for topic in sources], pa.binary())
    own = pc.and_(origins, pc.is_in(binary(pc.struct_field(flat, 1), "headers"), value_set=topics))
    rows = pc.list_parent_indices(column)
    failed = rows.filter(pc.equal(names, ATTEMPT)).to_numpy()
    found = np.intersect1d(rows.filter(own).to_numpy(), failed).astype(np.int64)
    sent = pc.equal(names, RETRY_TOPIC)
    if "topic" in batch.schema.names and pc.any(sent).as_py():
        at, to = rows.filter(sent), binary(pc.struct_field(flat, 1), "headers").filter(sent)
        read = binary(batch.column("topic"), "topic").take(at)
        found = np.setdiff1d(found, at.filter(pc.not_equal(read, to)).to_numpy())
    return found if len(found) else None

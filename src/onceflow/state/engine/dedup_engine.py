"""``DedupEngine``: passes on the first record of each id, and remembers the id for as long as it has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state import dead_letters, rows, stamps
from onceflow.state.api.deduplication import EVENT_TIME, RECORD_KEY, Deduplication
from onceflow.state.engine import input_batch
from onceflow.state.engine.base import EXPIRED_PER_BATCH, BaseEngine
from onceflow.state.engine.output_collector import SCHEMA

_PREFIX = pa.scalar(rows.VALUE, pa.binary())
_NO_SEPARATOR = pa.scalar(b"", pa.binary())
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
        self._new: dict[bytes, bytes] = {}
        self._deleted: list[tuple[bytes, None]] = []
        self._next = 0
        self._floor = self.watermark_ms
        remembered = self.processor.records
        if remembered is not None:
            backwards = self._overlay.store.scan(rows.STAMP_INDEX, rows.after(rows.STAMP_INDEX), reverse=True)
            last = stamps.greatest(backwards)
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
            good = pa.array(~bad_rows)
            batch, ids = batch.filter(good), ids.filter(good)
            times = None if times is None else times.filter(good)
        if times is not None and (in_time := self._see_times(batch, times)) is not None:
            mask = pa.array(in_time)
            batch, ids, times = batch.filter(mask), ids.filter(mask), times.filter(mask)
        if batch.num_rows:
            self._judge(batch, ids, None if times is None else times.to_numpy())

    def finish(self) -> None:
        """Delete ids that are forgotten, a limited number at a time.

        The limit is above the number of ids that a batch can bring, so that their number on disk does not grow.
        """
        if self._floor is None or self._floor <= 0:
            return
        limit = max(EXPIRED_PER_BATCH, 2 * self.counts["records"])
        lowest_kept = stamps.row_of(self._floor)
        for chunk_key, chunk in self._overlay.store.scan(*stamps.before(self._floor)):
            keys = sorted(key for key in stamps.keys_of(chunk) if key not in self._new)
            found = self._overlay.store.get_many(keys)
            gone = [key for key, row in zip(keys, found, strict=True) if row is not None and row < lowest_kept]
            self.counts["expired"] += len(gone)
            self._deleted += [(key, None) for key in gone]
            self._deleted.append((chunk_key, None))
            if self.counts["expired"] >= limit:
                break

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """As `BaseEngine.changes`, and the index rows that were read: they belong to no topic."""
        return [*self._new.items(), *dict(self._deleted).items()]

    @property
    def next_timer_ms(self) -> dict[str, int | None]:
        """Nothing is ever due: ids are deleted when records come."""
        return {"event": None, "processing": None}

    # ---- inside --------------------------------------------------------------------------------------

    def _times(self, given: pa.RecordBatch, batch: pa.RecordBatch) -> Any:
        """Event times in milliseconds, -1 where there is none; None: they do not matter."""
        if self.processor.within_ms is None:
            return None
        times = given.column(EVENT_TIME) if EVENT_TIME in given.schema.names else batch.column("timestamp")
        return input_batch.milliseconds(times).fill_null(-1)

    def _reject_all(self, batch: pa.RecordBatch, ids: Any) -> None:
        for record, id_ in zip(self._raw(batch), ids.to_pylist(), strict=True):
            what = f"no id: column {self.processor.id_name!r} is null" if id_ is None else "no event time since 1970"
            self._reject(record, ValueError(f"the record has {what}"))

    def _judge(self, batch: pa.RecordBatch, ids: Any, times: npt.NDArray[np.int64] | None) -> None:
        encoded = ids.dictionary_encode()
        codes = encoded.indices.to_numpy()
        row_keys = pc.binary_join_element_wise(_PREFIX, encoded.dictionary, _NO_SEPARATOR).to_pylist()
        first = np.empty(len(row_keys), dtype=np.int64)
        first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last assignment to a place remains
        found = self._found(row_keys)
        is_new = np.fromiter((row is None for row in found), dtype=bool, count=len(found))
        passed = np.zeros(len(codes), dtype=bool)
        passed[first[is_new]] = True
        if is_new.any():
            new = [key for key, row in zip(row_keys, found, strict=True) if row is None]
            self._new.update(zip(new, self._stamped(first[is_new], times), strict=True))
        if passed.all():
            self._pass_on(batch)
            return
        duplicates = ~passed
        self.counts["duplicates"] += int(duplicates.sum())
        if self.processor.duplicates_topic is not None:
            self._set_aside(batch, ids, [row_keys[code] for code in codes[duplicates].tolist()], duplicates)
        self._pass_on(batch.filter(pa.array(passed)))

    def _found(self, row_keys: list[bytes]) -> list[bytes | None]:
        """The row of each id that is remembered."""
        found: list[bytes | None] = list(map(self._new.get, row_keys)) if self._new else [None] * len(row_keys)
        absent = sorted(key for key, row in zip(row_keys, found, strict=True) if row is None)
        committed = self._overlay.store.get_many(absent)
        if not any(committed):
            return found
        lowest_kept = stamps.row_of(max(0, self._floor or 0))
        kept = {key: row for key, row in zip(absent, committed, strict=True) if row is not None and row >= lowest_kept}
        return [kept.get(key) if row is None else row for key, row in zip(row_keys, found, strict=True)]

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
            if field.name == "timestamp" and count and (pc.min(column).as_py() or 0) < 0:
                # Some clients write negative timestamps, but brokers do not accept them from us.
                column = pc.if_else(pc.less(column, 0), pa.scalar(None, pa.int64()), column)
            columns.append(column if column.type == field.type else column.cast(field.type))
        self._collector.add_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))

    def _set_aside(self, batch: pa.RecordBatch, ids: Any, row_keys: list[bytes], duplicates: Flags) -> None:
        """Write duplicates to their topic."""
        topic = self.processor.duplicates_topic
        assert topic is not None
        mask = pa.array(duplicates)
        records, own_ids = self._raw(batch.filter(mask)), ids.filter(mask).to_pylist()
        committed = dict(zip(row_keys, map(self._new.get, row_keys), strict=True))
        unknown = sorted(key for key, row in committed.items() if row is None)
        committed.update(zip(unknown, self._overlay.store.get_many(unknown), strict=True))
        seen = stamps.stamps_of([committed[key] for key in row_keys]).tolist()
        by_time = self.processor.within_ms is not None
        aside = [
            dead_letters.duplicate(record, topic, id_, stamp if by_time else None)
            for record, id_, stamp in zip(records, own_ids, seen, strict=True)
        ]
        self._collector.extend(aside, as_read=True)
        self.counts["aside"] += len(records)

"""``TimeJoinEngine``: what joins by event time share. Records wait as rows of the table until no partner can come.

A batch is joined as a whole, column by column: the records of a partition are collected first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.api.time_joins import IS_RIGHT, JOINED_COLUMNS, TimeJoin
from onceflow.state.engine import input_batch
from onceflow.state.engine.base import BaseEngine
from onceflow.state.engine.due import Due
from onceflow.state.engine.output_collector import SCHEMA, OutputCollector
from onceflow.state.format import rows, waiting_rows
from onceflow.state.format.waiting_rows import Waiting

DUE_PER_BATCH = 50_000
"""How many rows that are due one batch handles. The others follow at once."""

# So many records are joined together. More of them would be in memory, less of them would be slower.
_JOINED_AT_ONCE, _JOINED_BYTES = 200_000, 128_000_000
_RESULT_BYTES = 256_000_000  # of one Arrow batch of results: far below the 2 GiB of its 32-bit offsets
_DUE_READ, _DUE_BYTES = 1_000, 64_000_000  # so many due rows are read together, and of about so many bytes in a batch

JOINED_SCHEMA = pa.schema(
    [*SCHEMA, *zip(JOINED_COLUMNS, (pa.binary(), pa.binary(), pa.int64(), pa.int64()), strict=True)]
)
Positions = npt.NDArray[np.int64]


class Records(NamedTuple):
    """Records of a batch, in the order of arrival.

    Args:
        keys: the distinct keys.
        codes: for each record the number of its key.
        times: event times in epoch milliseconds.
        right: which of them are of the right stream.
        values: their values, binary.
    """

    keys: list[bytes]
    codes: Positions
    times: Positions
    right: npt.NDArray[np.bool_]
    values: pa.Array


class TimeJoinEngine(BaseEngine):
    """See `BaseEngine`."""

    processor: TimeJoin

    def start(self) -> None:
        """Handle the rows that are due: those whose partners can no longer come."""
        self._collector = OutputCollector(own_topics=self._own_topics, schema=JOINED_SCHEMA)
        self._collected: list[pa.RecordBatch] = []
        self._joined = 0  # how many records of this batch are joined already
        self._handled = rows.DUE_INDEX  # the index row up to which due rows are handled
        self._soonest: int | None = None  # when the first of the rows that were put is due
        until_ms = self._fire_until()
        if until_ms is None:
            return
        first, end = rows.DUE_INDEX, rows.DUE_INDEX + rows.time_bytes(until_ms + 1)
        found = [key for key, _ in islice(self._overlay.store.scan(first, end), DUE_PER_BATCH + 1)]
        if not found:
            return
        row_keys, due = [key[9:] for key in found[:DUE_PER_BATCH]], list[tuple[bytes, bytes]]()
        read, size = 0, 0
        while read < len(row_keys) and size < _DUE_BYTES:
            part = row_keys[read : read + _DUE_READ]
            known = [pair for pair in zip(part, self._overlay.get_many(part), strict=True) if pair[1] is not None]
            due += known  # type: ignore[arg-type]  # there is no None
            read, size = read + len(part), size + sum(len(row or b"") for _, row in known)
        del row_keys[read:]
        self.timers_left = read < len(found)
        self._handled = found[read - 1] + b"\0"
        self._handle(due)
        self._overlay.put_many(row_keys, [None] * len(row_keys))
        self.counts["expired"] += len(row_keys)
        self.fired.add("event")

    def feed(self, rows_: pa.RecordBatch) -> None:
        self.counts["records"] += rows_.num_rows
        batch = input_batch.normalised(rows_)
        right = rows_.column(IS_RIGHT)
        bad = pc.or_(batch.column("key").is_null(), batch.column("timestamp").is_null())
        if pc.any(bad).as_py():
            self._reject_all(batch.filter(bad))
            good = pc.invert(bad)
            batch, right = batch.filter(good), right.filter(good)
        for choose in (self._near, self._in_time, self._small):
            kept = choose(batch) if batch.num_rows else None
            if kept is not None:
                batch, right = batch.filter(kept), right.filter(kept)
        if not batch.num_rows:
            return
        self._note_times(batch, batch.column("timestamp"))
        columns = [*map(batch.column, ("key", "value", "timestamp")), right]
        self._collected.append(pa.RecordBatch.from_arrays(columns, names=["key", "value", "timestamp", IS_RIGHT]))
        collected = sum(each.num_rows for each in self._collected)
        if collected >= _JOINED_AT_ONCE or sum(each.nbytes for each in self._collected) >= _JOINED_BYTES:
            self._join_collected()

    def finish(self) -> None:
        """Join the rest of the batch."""
        self._join_collected()

    def next_due(self) -> Due:
        """What is due next after the changes."""
        known = [ms for ms in (self._soonest, self._soonest_committed()) if ms is not None]
        return Due(event=min(known, default=None))

    # ---- what the kinds of joins define --------------------------------------------------------------

    def _handle(self, due: Sequence[tuple[bytes, bytes]]) -> None:
        """Write the results of rows that are due. They are deleted afterwards.

        Args:
            due: row keys and rows, in the order of the times.
        """
        raise NotImplementedError

    def _join(self, records: Records) -> None:
        """Write the results of records, and keep those that wait for others."""
        raise NotImplementedError

    # ---- for them ------------------------------------------------------------------------------------

    def _between(self, ranges: Iterable[tuple[int, bytes, bytes, bytes]]) -> Waiting:
        """The waiting rows in ranges of row keys.

        Args:
            ranges: the code of a key, what its row keys begin with, and bounds of the entries behind that.
        """
        wanted = list(ranges)
        numbers, keys, found = list[int](), list[bytes](), list[bytes]()
        for number, key, row in self._overlay.scan_many([(each[1] + each[2], each[1] + each[3]) for each in wanted]):
            numbers.append(number)
            keys.append(key)
            found.append(row)
        at = [len(each[1]) for each in wanted]  # where the entry begins
        entries = [key[at[number] : at[number] + 8] for number, key in zip(numbers, keys, strict=True)]
        codes = np.array([each[0] for each in wanted], np.int64)[np.array(numbers, np.int64)]
        return Waiting(codes, waiting_rows.times_of(entries), keys, found)

    def _put(self, keys: Sequence[bytes], new: Sequence[bytes], due_ms: Positions | None) -> None:
        """Keep rows.

        Args:
            due_ms: when they are due.
        """
        if not keys:
            return
        self._overlay.put_many(keys, new)
        if due_ms is not None and len(due_ms):
            first = int(due_ms.min())
            self._soonest = first if self._soonest is None else min(first, self._soonest)

    def _entries(self, times: Positions) -> list[bytes]:
        """Entry keys for records of this batch, each of which is used once."""
        made = waiting_rows.entries(times, self.now_ms, self.batch, self._joined)
        self._joined += len(times)
        return made

    def _row_keys(
        self, keys: Sequence[bytes], codes: Positions, entries: Sequence[bytes], *, right: bool
    ) -> list[bytes]:
        """Row keys of records of one side.

        Args:
            keys: distinct keys. codes: for each record the number of its key. entries: their entry keys.
        """
        prefixes = [waiting_rows.prefix(key, right=right) for key in keys]
        return [prefixes[code] + entry for code, entry in zip(codes.tolist(), entries, strict=True)]

    def _write(self, keys: pa.Array, left: Side, right: Side) -> None:
        """Write results.

        Args:
            keys: of each result. It may be of 64-bit offsets.
        """
        lengths = [pc.binary_length(keys).to_numpy(), left.lengths, right.lengths]
        ends = np.cumsum(np.sum(lengths, axis=0, dtype=np.int64))
        for at, end in parts_of(ends, _RESULT_BYTES):
            self._write_part(keys.slice(at, end - at).cast(pa.binary()), left.slice(at, end), right.slice(at, end))

    # ---- inside --------------------------------------------------------------------------------------

    def _write_part(self, keys: pa.Array, left: Side, right: Side) -> None:
        count = len(keys)
        left_values, left_times = left.columns()
        right_values, right_times = right.columns()
        columns = {
            "key": keys,
            "timestamp": pc.max_element_wise(left_times, right_times),
            "left_value": left_values,
            "right_value": right_values,
            "left_timestamp": left_times,
            "right_timestamp": right_times,
        }
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in JOINED_SCHEMA
        ]
        self._collector.add_batch(pa.RecordBatch.from_arrays(arrays, schema=JOINED_SCHEMA))

    def _fire_until(self) -> int | None:
        """Up to which event time rows are due; None: none is."""
        if self.watermark_ms is None or self._timers_until is None:
            return self.watermark_ms
        return min(self.watermark_ms, self._timers_until["event"]) if "event" in self._timers_until else None

    def _soonest_committed(self) -> int | None:
        end = rows.after(rows.DUE_INDEX)
        for index_key, _ in self._overlay.store.scan(self._handled, end):
            at_ms, row_key = rows.due_index_parts(index_key)
            row = self._overlay.get(row_key)
            if row is not None and rows.due_of(row) == at_ms:
                return at_ms
        return None

    def _reject_all(self, batch: pa.RecordBatch) -> None:
        self._note_untimed(batch.filter(batch.column("timestamp").is_null()))
        for record in self._raw(batch):
            what = input_batch.NO_KEY if record.key is None else "the record has no event time since 1970"
            self._reject(record, ValueError(what))

    def _near(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Reject records whose times are too far ahead. Returns a mask of the others; None: all."""
        times = batch.column("timestamp")
        far = self._far_ahead(times)
        if far is None:
            return None
        self._without_far_ahead(batch, times)
        return pa.array(~far)

    def _in_time(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Send late records to their topic. Returns as `_near`."""
        in_time = self._set_late_aside(batch, batch.column("timestamp"))
        if in_time is None:
            return None
        late = batch.filter(pa.array(~in_time))
        self._note_times(late, late.column("timestamp"))
        return pa.array(in_time)

    def _small(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Reject records that cannot wait as rows, because the topic of rows does not take them. Returns as `_near`."""

        def row_of(key: bytes, value: bytes) -> tuple[bytes, bytes]:
            return waiting_rows.prefix(key, right=True) + bytes(waiting_rows.ENTRY_BYTES), bytes(10) + value

        found = self._too_large(batch, row_of)
        if not found:
            return None
        for record, error in zip(self._raw(batch.take(pa.array([*found]))), found.values(), strict=True):
            self._reject(record, error)
        kept = np.ones(batch.num_rows, np.bool_)
        kept[[*found]] = False
        return pa.array(kept)

    def _join_collected(self) -> None:
        if not self._collected:
            return
        table = pa.Table.from_batches(self._collected).combine_chunks()
        self._collected = []
        columns = {name: _whole(table.column(name)) for name in table.column_names}
        encoded = columns["key"].dictionary_encode()
        self._join(
            Records(
                encoded.dictionary.to_pylist(),
                encoded.indices.to_numpy().astype(np.int64),
                columns["timestamp"].to_numpy(),
                columns[IS_RIGHT].to_numpy(zero_copy_only=False),
                columns["value"],
            )
        )


class Side(NamedTuple):
    """One side of results.

    Args:
        values: of records, with 64-bit offsets: they may have more than 2 GiB in all.
        times: event times of these records in epoch milliseconds.
        at: for each result which record it has; -1: none.
    """

    values: pa.LargeBinaryArray
    times: Positions
    at: Positions

    @property
    def lengths(self) -> Positions:
        """How many bytes the value of each result has."""
        known = np.append(pc.binary_length(self.values).fill_null(0).to_numpy(zero_copy_only=False), 0)
        lengths: Positions = known[self.at]  # -1 is the last one
        return lengths

    def slice(self, start: int, end: int) -> Side:
        return Side(self.values, self.times, self.at[start:end])

    def columns(self) -> tuple[pa.Array, pa.Array]:
        """Values and times of the results; null where there is no record."""
        at = pa.array(self.at, mask=self.at < 0)
        return self.values.take(at).cast(pa.binary()), pa.array(self.times, pa.int64()).take(at)

    @classmethod
    def nothing(cls, count: int) -> Side:
        """A side without records."""
        return cls(pa.nulls(0, pa.large_binary()), np.zeros(0, np.int64), np.full(count, -1))


def waiting_of(known: Iterable[tuple[bytes, bytes]], *, right: bool) -> Waiting:
    """The rows of one side. The codes are of no use there."""
    name = waiting_rows.RIGHT if right else waiting_rows.LEFT
    entries, keys, found = list[bytes](), list[bytes](), list[bytes]()
    for key, row in known:
        _, of_map, entry = rows.map_parts(key)
        if of_map == name:
            entries.append(entry)
            keys.append(key)
            found.append(row)
    return Waiting(np.zeros(len(keys), np.int64), waiting_rows.times_of(entries), keys, found)


def keys_of(waiting: Waiting) -> list[bytes]:
    """The users' keys of waiting rows."""
    return [rows.map_parts(key)[0] for key in waiting.keys]


def parts_of(ends: Positions, limit: int) -> Iterator[tuple[int, int]]:
    """Divides items into parts, of which each has one item, or as many as have this size together.

    Args:
        ends: the cumulated sizes of the items.
    """
    at = 0
    while at < len(ends):
        before = int(ends[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield at, end
        at = end


def ranges_around(codes: Positions, times: Positions, before: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of times that are at most so much before and after one of the records of a key, by its code. They do not
    overlap, and are sorted: between records that are far from each other, nothing is read."""
    if not len(codes):
        return
    order = np.lexsort((times, codes))
    codes, low, high = codes[order], times[order] - before, times[order] + after
    begins = np.ones(len(codes), np.bool_)
    begins[1:] = (codes[1:] != codes[:-1]) | (low[1:] > high[:-1] + 1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(codes)) - 1
    yield from zip(codes[first].tolist(), low[first].tolist(), high[last].tolist(), strict=True)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array."""
    with contextlib.suppress(IndexError):
        if column.num_chunks == 1:
            return column.chunk(0)
    return pa.concat_arrays(column.chunks)

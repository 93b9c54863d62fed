"""``IntervalEngine``: pairs of records of two streams whose event times are near each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.state.api.time_joins import IntervalJoin
from onceflow.state.engine.time_join_engine import (
    Positions,
    Records,
    Side,
    TimeJoinEngine,
    keys_of,
    parts_of,
    ranges_around,
    waiting_of,
)
from onceflow.state.format import rows, waiting_rows
from onceflow.state.format.waiting_rows import MATCHED, Waiting

# So many pairs are made at once. A key with many records has many more pairs than records.
_PAIRS_AT_ONCE = 200_000


class IntervalEngine(TimeJoinEngine):
    """See `BaseEngine`.

    A pair is found by the one of its records that arrives later. The other one waits until then, or is in the same
    batch.
    """

    processor: IntervalJoin

    def _handle(self, due: Sequence[tuple[bytes, bytes]]) -> None:
        """Write records that have found no partner."""
        for is_right in (False, True):
            if not self.processor.keeps_unmatched(right=is_right):
                continue
            waiting = waiting_of(due, right=is_right)
            alone = [at for at, row in enumerate(waiting.rows) if not waiting_rows.marks_of(row) & MATCHED]
            if not alone:
                continue
            chosen = waiting.take(alone)
            side = Side(pa.array(chosen.values, pa.large_binary()), chosen.times, np.arange(len(alone)))
            sides = (Side.nothing(len(alone)), side) if is_right else (side, Side.nothing(len(alone)))
            self._write(pa.array(keys_of(chosen), pa.large_binary()), *sides)

    def _join(self, records: Records) -> None:
        before, after = self.processor.before_ms, self.processor.after_ms
        left, right = np.flatnonzero(~records.right), np.flatnonzero(records.right)
        waiting_left = self._partners(records, right, after, before, right=False)
        waiting_right = self._partners(records, left, before, after, right=True)
        lefts = _Pool(records, left, waiting_left)
        rights = _Pool(records, right, waiting_right)
        new_left, new_right = np.arange(len(left)), np.arange(len(right))
        # Pairs of two records that have both been here before are in the results already.
        self._write_pairs(records, lefts, rights, new_left, np.arange(len(rights.times)))
        self._write_pairs(records, lefts, rights, np.arange(len(left), len(lefts.times)), new_right)
        for pool, is_right in ((lefts, False), (rights, True)):
            self._keep(records, pool, right=is_right)

    def _partners(self, records: Records, at: Positions, before: int, after: int, *, right: bool) -> Waiting:
        """The waiting rows of one side that may be partners of these records."""
        ranges = (
            (
                code,
                waiting_rows.prefix(records.keys[code], right=right),
                rows.time_bytes(low),
                rows.time_bytes(high + 1),
            )
            for code, low, high in ranges_around(records.codes[at], records.times[at], before, after)
        )
        return self._between(ranges)

    def _write_pairs(
        self, records: Records, lefts: _Pool, rights: _Pool, left_at: Positions, right_at: Positions
    ) -> None:
        """Write the pairs of these records, and mark them as matched."""
        if not len(left_at) or not len(right_at):
            return
        keys = pa.array(records.keys, pa.large_binary())
        order, low, high = _ranges(self.processor, lefts, rights, left_at, right_at)
        counts = high - low
        for at, end in parts_of(np.cumsum(counts), _PAIRS_AT_ONCE):
            of_left = np.repeat(np.arange(at, end), counts[at:end])
            # The number of each pair among those of its left record.
            within = np.arange(len(of_left)) - np.repeat(np.cumsum(counts[at:end]) - counts[at:end], counts[at:end])
            found_left, found_right = left_at[of_left], right_at[order[low[of_left] + within]]
            lefts.matched[found_left] = True
            rights.matched[found_right] = True
            found_keys = keys.take(pa.array(lefts.codes[found_left]))
            self._write(found_keys, lefts.side(found_left), rights.side(found_right))

    def _keep(self, records: Records, pool: _Pool, *, right: bool) -> None:
        """Keep the new records of one side, and mark those that have waited and are matched now."""
        marks = pool.matched & self.processor.keeps_unmatched(right=right)
        again = np.flatnonzero(marks[pool.new :]).tolist()
        again = [at for at in again if not waiting_rows.marks_of(pool.waiting.rows[at]) & MATCHED]
        found = [pool.waiting.rows[at] for at in again]
        self._put([pool.waiting.keys[at] for at in again], list(map(waiting_rows.matched, found)), None)
        times, codes = pool.times[: pool.new], pool.codes[: pool.new]
        keys = self._row_keys(records.keys, codes, self._entries(times), right=right)
        due_ms = times + self.processor.last_partner_ms(right=right) + 1
        values = pool.values.slice(0, pool.new).to_pylist()
        self._put(keys, waiting_rows.packed(due_ms, marks[: pool.new] * np.uint8(MATCHED), values), due_ms)


class _Pool:
    """The records of one side that may be in new pairs: those of the batch, and behind them those that have waited."""

    def __init__(self, records: Records, at: Positions, waiting: Waiting) -> None:
        self.new, self.waiting = len(at), waiting
        self.codes = np.concatenate([records.codes[at], waiting.codes])
        self.times = np.concatenate([records.times[at], waiting.times])
        new = records.values.take(pa.array(at)).cast(pa.large_binary())
        self.values = pa.concat_arrays([new, pa.array(waiting.values, pa.large_binary())])
        self.matched: npt.NDArray[np.bool_] = np.zeros(len(self.times), np.bool_)

    def side(self, at: Positions) -> Side:
        return Side(self.values, self.times, at)


def _ranges(
    join: IntervalJoin, lefts: _Pool, rights: _Pool, left_at: Positions, right_at: Positions
) -> tuple[Positions, Positions, Positions]:
    """An order of the right records, and for each left one the range of its partners in this order.

    Keys and times become one number, so that one search finds all bounds. In place of a time it has its rank among
    the times that occur, so that it fits into 64 bits.
    """
    times = np.unique(rights.times[right_at])
    width = len(times) + 1
    places = rights.codes[right_at] * width + np.searchsorted(times, rights.times[right_at])
    order = np.argsort(places, kind="stable")
    places = places[order]
    first = lefts.codes[left_at] * width
    earliest = lefts.times[left_at] - join.before_ms
    latest = lefts.times[left_at] + join.after_ms
    low = np.searchsorted(places, first + np.searchsorted(times, earliest), side="left")
    high = np.searchsorted(places, first + np.searchsorted(times, latest, side="right"), side="left")
    return order, low, high

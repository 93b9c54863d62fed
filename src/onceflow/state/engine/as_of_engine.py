"""``AsOfEngine``: each left record with the right one that held at its event time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.state.api.time_joins import AsOfJoin
from onceflow.state.engine.time_join_engine import (
    Positions,
    Records,
    Side,
    TimeJoinEngine,
    keys_of,
    ranges_around,
    waiting_of,
)
from onceflow.state.format import rows, waiting_rows
from onceflow.state.format.waiting_rows import Waiting

_NEVER = -1


class AsOfEngine(TimeJoinEngine):
    """See `BaseEngine`.

    A left record waits until the watermark is later than its time. Right records are *versions* of their key. A version
    is due when the watermark is later than that of the version behind it, or when it is out of every tolerance. So the
    last version of a key without a tolerance stays, unless it is a tombstone.
    """

    processor: AsOfJoin

    def _handle(self, due: Sequence[tuple[bytes, bytes]]) -> None:
        """Write the results of left records, in the order of their times. The versions are still there."""
        left = waiting_of(due, right=False)
        if not len(left.times):
            return
        names = keys_of(left)
        number = {key: code for code, key in enumerate(dict.fromkeys(names))}
        codes = np.array([number[key] for key in names], np.int64)
        versions = self._between(self._ranges(list(number), codes, left.times))
        found = _last_not_later(codes, left.times, versions)
        if self.processor.tolerance_ms is not None and len(versions.times):
            found = np.where(left.times - versions.times[found] > self.processor.tolerance_ms, -1, found)
        values = versions.values
        gone = [at for at, value in enumerate(values) if value is None]
        found = np.where(np.isin(found, gone), -1, found) if gone else found
        kept = np.arange(len(found)) if self.processor.keeps_unmatched(right=False) else np.flatnonzero(found >= 0)
        found = found[kept]
        of_left = Side(pa.array(left.values, pa.large_binary()), left.times, kept)
        of_right = Side(pa.array(values, pa.large_binary()), versions.times, found)
        self._write(pa.array(names, pa.large_binary()).take(pa.array(kept)), of_left, of_right)

    def _join(self, records: Records) -> None:
        left, right = np.flatnonzero(~records.right), np.flatnonzero(records.right)
        if len(left):
            times = records.times[left]
            keys = self._row_keys(records.keys, records.codes[left], self._entries(times), right=False)
            values = records.values.take(pa.array(left)).to_pylist()
            self._put(keys, waiting_rows.packed(times + 1, np.zeros(len(left), np.uint8), values), times + 1)
        if len(right):
            self._keep_versions(records, right)

    def _keep_versions(self, records: Records, right: Positions) -> None:
        codes, times = records.codes[right], records.times[right]
        # Of records with the same key and time, the last one is kept.
        order = np.lexsort((-np.arange(len(right)), times, codes))
        order = order[_first_of_place(codes[order], times[order])]
        codes, times, right = codes[order], times[order], right[order]
        values = records.values.take(pa.array(right)).to_pylist()
        keys = self._row_keys(records.keys, codes, waiting_rows.time_entries(times), right=True)
        if self.processor.tolerance_ms is None:
            due_ms = self._due_by_successor(records, codes, times, np.array([value is None for value in values]))
        else:
            due_ms = times + self.processor.tolerance_ms + 1
        ends = due_ms != _NEVER
        for chosen, due in ((ends, due_ms[ends]), (~ends, None)):
            at = np.flatnonzero(chosen).tolist()
            packed = waiting_rows.packed(due, np.zeros(len(at), np.uint8), [values[each] for each in at])
            self._put([keys[each] for each in at], packed, due)

    def _due_by_successor(
        self,
        records: Records,
        codes: Positions,
        times: Positions,
        tombstones: npt.NDArray[np.bool_],
    ) -> Positions:
        """When new versions are due. A version that was the last one of its key, and is no longer, becomes due, too.

        Args:
            codes, times: of the new versions, sorted, without equal ones.
        """
        present = np.unique(codes)
        prefixes = [waiting_rows.prefix(records.keys[code], right=True) for code in present.tolist()]
        known = self._between(
            (code, prefix, b"", b"\xff" * 9) for code, prefix in zip(present.tolist(), prefixes, strict=True)
        )
        count = len(codes)
        all_codes, all_times = np.concatenate([codes, known.codes]), np.concatenate([times, known.times])
        # A new version comes before an old one of its own time, which it replaces.
        order = np.lexsort((np.arange(len(all_codes)), all_times, all_codes))
        first = np.flatnonzero(_first_of_place(all_codes[order], all_times[order]))
        place_codes, place_times = all_codes[order[first]], all_times[order[first]]
        place_due = np.full(len(first), _NEVER)
        place_due[:-1] = np.where(place_codes[1:] == place_codes[:-1], place_times[1:] + 1, _NEVER)
        place = np.empty(len(all_codes), np.int64)
        place[order] = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
        due_ms = place_due[place]
        # A tombstone behind which nothing comes has nothing to hide when the versions before it are gone.
        ending = tombstones & (due_ms[:count] == _NEVER)
        due_ms[:count][ending] = times[ending] + 1
        is_replaced = order[first][place[count:]] < count
        again = np.flatnonzero((due_ms[count:] != _NEVER) & ~is_replaced).tolist()
        again = [at for at in again if rows.due_of(known.rows[at]) is None]
        new_due = due_ms[count:][again]
        changed = [waiting_rows.due_at(known.rows[at], due) for at, due in zip(again, new_due.tolist(), strict=True)]
        self._put([known.keys[at] for at in again], changed, new_due)
        return due_ms[:count]

    def _ranges(
        self, names: list[bytes], codes: Positions, times: Positions
    ) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        tolerance = self.processor.tolerance_ms
        if tolerance is None:  # the last one before the first record may be much older
            last = np.full(len(names), -1)
            np.maximum.at(last, codes, times)
            found = ((code, b"", high) for code, high in enumerate(last.tolist()))
        else:
            around = ranges_around(codes, times, tolerance, 0)
            found = ((code, rows.time_bytes(low), high) for code, low, high in around)
        for code, first, high in found:
            yield code, waiting_rows.prefix(names[code], right=True), first, rows.time_bytes(high + 1)


def _first_of_place(codes: Positions, times: Positions) -> npt.NDArray[np.bool_]:
    """Which of sorted records have another key or time than the one before."""
    found = np.ones(len(codes), np.bool_)
    found[1:] = (codes[1:] != codes[:-1]) | (times[1:] != times[:-1])
    return found


def _last_not_later(codes: Positions, times: Positions, versions: Waiting) -> Positions:
    """For each record the last version of its key that is not later; -1: there is none.

    Args:
        versions: sorted by key and time.
    """
    distinct = np.unique(versions.times)
    width = len(distinct) + 1
    places = versions.codes * width + np.searchsorted(distinct, versions.times)
    found = np.searchsorted(places, codes * width + np.searchsorted(distinct, times, side="right"), side="left") - 1
    there = found >= 0
    there[there] = versions.codes[found[there]] == codes[there]
    return np.where(there, found, -1)

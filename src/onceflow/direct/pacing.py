"""How much a batch of the direct engine takes when there is more than enough: as much as fits an interval.

If a batch costs much however few records it has (a function that calls a service or a model), it takes more than that:
small batches would do nearly nothing but pay that cost.
"""

from __future__ import annotations

import collections

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

#: A batch that has this part of what it may take counts as full.
FULL = 0.9
_FIRST_RECORDS = 5_000
_RECORDS_MIN, _RECORDS_MAX = 500, 500_000
#: So much of keys and values one batch takes, about: its records are in memory until it is committed.
BATCH_BYTES = 16_000_000
# In seconds: what a batch may take at least, even if the trigger is shorter, at most, and without a trigger.
_TARGET_MIN, _TARGET_MAX, _TARGET_DEFAULT = 0.05, 1.0, 0.25
# With a backlog, records wait much longer than an interval anyway. So a batch takes this part of the time that is
# needed for all of it, at most so many seconds: what a batch costs as such is shared by more records.
_BACKLOG_PART, _TARGET_BACKLOG = 0.25, 0.5
_CHANGE_MAX = 2.0  # from one batch to the next
_SMOOTHING = 0.5
# If the interval leaves less to the records than what a batch costs without them, they get as much time as that cost,
# but at most so many seconds.
_RECORDS_S_MAX = 5.0
_REMEMBERED = 12  # batches, from which costs are estimated
_SPREAD_MIN = 1.3  # between the smallest and the largest of them, to tell the cost of records from that of the batch
_PROBE = 1.5  # so much larger is the next batch if they do not differ enough


class BatchSize:
    """The size of the next batch.

    Args:
        trigger_s: the interval of the trigger; 0: there is none.
        first: records of the first batch. least, most: of any batch that has enough.

    Attributes:
        records: most offsets of the next batch.
    """

    def __init__(
        self, trigger_s: float, *, first: int = _FIRST_RECORDS, least: int = _RECORDS_MIN, most: int = _RECORDS_MAX
    ) -> None:
        self._least, self._most = least, most
        self._interval_s = min(_TARGET_MAX, max(_TARGET_MIN, trigger_s)) if trigger_s else _TARGET_DEFAULT
        self._target_s = self._interval_s
        self.records = first
        self._ran: collections.deque[tuple[int, float]] = collections.deque(maxlen=_REMEMBERED)
        self._record_s: float | None = None  # what one record more costs, once it is known
        self._per_s: float | None = None  # of the last full batch
        self._at_interval = first  # the size before there was a backlog

    def looked(self, left: int) -> None:
        """So many offsets are left to read."""
        if self._per_s is None:
            return
        target_s = max(self._interval_s, min(_TARGET_BACKLOG, _BACKLOG_PART * left / self._per_s))
        if target_s > self._target_s == self._interval_s:
            self._at_interval = self.records
        if target_s < self._target_s:
            less = max(self._at_interval, round(self.records * target_s / self._target_s))
            self.records = min(self.records, less)
        self._target_s = target_s

    def ran(self, offsets: int, seconds: float) -> bool:
        """A batch has run. Returns whether it took as much as it may.

        Args:
            offsets: how many it has taken. seconds: how long it took, with fetching.
        """
        full = offsets >= FULL * self.records
        if not offsets:
            return False
        self._ran.append((offsets, seconds))
        if full:
            self._per_s = offsets / max(seconds, 1e-4)
        if not (full or seconds > self._target_s):
            return False
        fitting = self._fitting() if seconds > self._target_s else offsets * self._target_s / max(seconds, 1e-4)
        wanted = self.records + _SMOOTHING * (fitting - self.records)
        if full and self._record_s is None and self.records / _PROBE < wanted < self.records * _PROBE:
            wanted = self.records * _PROBE
        wanted = min(self.records * _CHANGE_MAX, max(self.records / _CHANGE_MAX, wanted))
        self.records = round(min(self._most, max(self._least, wanted)))
        return full

    def _fitting(self) -> float:
        """How many records fit, after a batch that took too long: by what a record costs, and a batch as such."""
        records, seconds = np.array(self._ran).T
        slopes = _slopes(records, seconds)
        if len(slopes):
            self._record_s = float(np.median(slopes))
        batch_s = 0.0
        if self._record_s is not None:
            batch_s = min(max(0.0, np.median(seconds - self._record_s * records)), seconds.min())
        # As in the last batch: the first ones of a run are slower.
        record_s = max((seconds[-1] - batch_s) / records[-1], 1e-9)
        return float(max(self._target_s - batch_s, min(batch_s, _RECORDS_S_MAX)) / record_s)


def _slopes(records: Numbers, seconds: Numbers) -> Numbers:
    """Seconds for each record more, of all pairs of batches that differ enough.

    Their median (Theil-Sen estimator) does not follow a single slow batch, such as the first one.
    """
    less, more = np.nonzero(records[None, :] >= _SPREAD_MIN * records[:, None])
    return (seconds[more] - seconds[less]) / (records[more] - records[less])

"""How much a batch of the direct engine takes when there is more than enough: as much as fits an interval."""

from __future__ import annotations

_FIRST_RECORDS = 5_000
_RECORDS_MIN, _RECORDS_MAX = 500, 500_000
#: So much of keys and values one batch takes, about: its records are in memory until it is committed.
BATCH_BYTES = 16_000_000
# In seconds: what a batch may take at least, even if the trigger is shorter, at most, and without a trigger.
_TARGET_MIN, _TARGET_MAX, _TARGET_DEFAULT = 0.05, 1.0, 0.25
_CHANGE_MAX = 2.0  # from one batch to the next
_SMOOTHING = 0.5


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
        self._target_s = min(_TARGET_MAX, max(_TARGET_MIN, trigger_s)) if trigger_s else _TARGET_DEFAULT
        self.records = first

    def ran(self, offsets: int, seconds: float) -> bool:
        """A batch has run. Returns whether it took as much as it may.

        Args:
            offsets: how many it has taken. seconds: how long it took, with fetching.
        """
        full = offsets >= 0.9 * self.records
        if not offsets or not (full or seconds > self._target_s):
            return False
        fitting = offsets * self._target_s / max(seconds, 1e-4)
        wanted = self.records + _SMOOTHING * (fitting - self.records)
        wanted = min(self.records * _CHANGE_MAX, max(self.records / _CHANGE_MAX, wanted))
        self.records = round(min(self._most, max(self._least, wanted)))
        return full

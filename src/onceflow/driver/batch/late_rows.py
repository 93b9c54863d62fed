"""Rows that Spark drops as later than the watermark are counted and reported, or are an error with ``late="fail"``.

Spark's operators with state drop them silently. They count them in the metric ``numRowsDroppedByWatermark``
(Spark: StateStoreWriter, WatermarkSupport). After a partial aggregation, several rows of a group count as one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from onceflow.errors import LateRowsError
from onceflow.planning.options import FAIL

log = logging.getLogger("onceflow.sink")

_WARN_EVERY_S = 60.0


class LateRows:
    """The rows that one run of a query has dropped.

    Args:
        late: ``drop`` or ``fail``, as given to ``Flow.write``.
        dropped: returns how many rows the current batch has dropped, in all its attempts.
    """

    def __init__(self, flow: str, late: str, dropped: Callable[[], int]) -> None:
        self._flow = flow
        self._late = late
        self._dropped = dropped
        self._before = 0
        self._unreported = 0
        self._batch = 0  # the last batch that has dropped rows
        self._warned_at = float("-inf")

    def begin(self, *, again: bool) -> None:
        """An attempt begins. ``again``: the count contains rows of earlier attempts of the same batch."""
        self._before = self._dropped() if again else 0

    def check(self, batch: int) -> int:
        """How many rows the attempt has dropped.

        Raises:
            LateRowsError: it has dropped rows, and the option is ``fail``.
        """
        dropped = self._dropped() - self._before
        if dropped and self._late == FAIL:
            raise LateRowsError(
                f"Spark dropped at least {_rows(dropped)} later than the watermark",
                flow=self._flow,
                batch=batch,
                next_step="nothing of this batch is visible. Give withWatermark a longer delay, or sort the input by "
                'event time. To continue without such rows, leave late="fail" out',
            )
        return dropped

    def on_commit(self, batch: int, dropped: int) -> None:
        """The batch is committed. Dropped rows are logged as a warning, at most once a minute."""
        self._unreported += dropped
        self._batch = batch if dropped else self._batch
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self.warn()

    def warn(self) -> None:
        """Log what was not logged yet. Called when the query ends, too."""
        if self._unreported:
            log.warning(
                "flow %s: Spark dropped at least %s later than the watermark, up to batch %d. They are in no output. "
                'A longer delay of withWatermark keeps them, late="fail" stops the flow instead',
                self._flow,
                _rows(self._unreported),
                self._batch,
            )
            self._unreported, self._warned_at = 0, time.monotonic()


def _rows(count: int) -> str:
    return "1 row that was" if count == 1 else f"{count:,} rows that were"

"""Batches of the direct engine: the range of each is what was fetched, and the driver has its rows already."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from onceflow.driver.batch.batches import Batches, BatchSteps, timed
from onceflow.driver.batch.fetched_rows import FetchedRows
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.driver.record import handover
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import OnceflowError
from onceflow.logs import log_context
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.protocol.names import TopicPartition
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow.sink")


class DirectCommit(BatchSteps, Protocol):
    """The steps of a batch of the direct engine."""

    def is_idle(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        """Whether a batch would change nothing."""
        ...

    def held_back(self) -> Callable[[int], bool] | None:
        """Tells of each source partition whether the next batch leaves it out; None: it takes all."""
        ...

    def settle_copies(self) -> None:
        """Local copies that the driver has written to apply what the last batch has committed."""
        ...

    def plan_range(self, source: SourceRange, batch: int, caught_up: Mapping[TopicPartition, float]) -> None:
        """The source range of a batch is this. It must start where progress ends (I2).

        Args:
            caught_up: until when it is known that partitions have nothing behind it, see `Watermark.planned`.
        """
        ...


class DirectBatches(Batches):
    """Writes batches of the direct engine: the driver has fetched their rows, or tasks are going to read them.

    Attributes:
        summary: of the batch with the range of the last call, if it was committed, or lost (at-most-once).
        timers_s: how long batches took that only fired timers, in the last call.
    """

    def __init__(
        self, commit: DirectCommit, options: SinkOptions, *, tables: Callable[[], list[TableFacts]] = list
    ) -> None:
        super().__init__(commit, options, tables=tables)
        self._commit = commit
        self.summary: BatchSummary | None = None
        self.timers_s = 0.0

    def __call__(
        self,
        rows: FetchedRows | RangeRows,
        source: SourceRange,
        *,
        backlog: bool,
        caught_up: Mapping[TopicPartition, float] = MappingProxyType({}),
    ) -> None:
        """Run one batch, unless it would change nothing.

        Args:
            backlog: whether there was more to read than the batch takes. Then it is as large as fits the interval.
            caught_up: until when it is known that partitions have nothing behind its range, see `Watermark.planned`.

        Raises:
            OnceflowError: it has failed, and no attempt may follow. The query must end.
        """
        batch = self.progress.batch_id + 1
        with log_context.within(flow=self.flow, batch=batch):
            self._in_turn(rows, batch, lambda: self._run(rows, source, caught_up), paced=not backlog)

    def settle_copies(self) -> None:
        """Nothing is urgent: local copies may learn now that the last batch is committed, not in the next one."""
        if self.summary is not None:
            with timed(self.summary, "settle"):
                self._commit.settle_copies()

    def held_back(self) -> Callable[[int], bool] | None:
        """Tells of each source partition whether the next batch leaves it out; None: it takes all."""
        return self._commit.held_back()

    def wants_batch(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        """Whether a batch with this range would do anything: it has offsets, or timers are due.

        Args:
            caught_up: see `__call__`.
        """
        return handover.owes_timers(self.progress) or not self._commit.is_idle(source, caught_up)

    def failed(self, error: BaseException) -> None:
        """The engine has failed between two batches, and the query must end."""
        if isinstance(error, OnceflowError):
            error.locate(flow=self.flow)
            text = str(error)
        else:
            text = f"flow {self.flow} has failed: {type(error).__name__}: {error}"
        self._failed(error, self.progress.batch_id + 1)
        self._tell(text)

    def _run(
        self, rows: FetchedRows | RangeRows, source: SourceRange, caught_up: Mapping[TopicPartition, float]
    ) -> None:
        self.summary, self.timers_s = None, 0.0
        self._commit.settle()
        self._timed_timers(lambda: self._catch_up(rows))
        if self.stopping and handover.owes_timers(self.progress):
            return  # they come before the records
        if self._commit.is_idle(source, caught_up):
            self.idle = True
            return
        batch = self.progress.batch_id + 1
        summary = BatchSummary(batch, 0)
        with timed(summary, "plan"):
            self._commit.plan_range(source, batch, caught_up)
        self._run_planned(rows, batch, source, summary)
        self.summary = summary if self.progress.batch_id >= batch else None
        self._timed_timers(lambda: self._fire_left(rows, source))

    def _timed_timers(self, run: Callable[[], None]) -> None:
        started = time.monotonic()
        run()
        self.timers_s += time.monotonic() - started

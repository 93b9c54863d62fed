"""Batches of one query, one after the other, and what is known of them: the same for both engines.

Spark calls `BatchSink` (``sink.py``) with its micro-batches. The direct engine calls ``DirectBatches``
(``direct/batches.py``) with what it has fetched. The steps of a batch are in ``driver/kafka/commit.py``, its
attempts in ``retries.py``.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from pyspark.sql import DataFrame

from onceflow import hooks, user_code
from onceflow.driver.batch import errors as batch_errors
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.properties import described_jobs
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.driver.batch.retries import Retries, Steps
from onceflow.driver.record import handover
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import BatchAbortedError, FencedError, OnceflowError, located
from onceflow.logs import log_context
from onceflow.planning.options import EXACTLY_ONCE, BatchSummary, SinkOptions
from onceflow.protocol.progress import Progress
from onceflow.spark import jvm
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow.sink")

_WARN_OF_SLOW_EVERY_S = 60.0
_SHARE = 0.1  # warn when more than this share of the batches is slow
_TURN_S = 0.05  # how often a batch that may not begin yet checks whether the query is being stopped


class TimerSteps(Protocol):
    """What the steps of a query with timers also offer: batches that only fire timers."""

    def are_timers_left(self) -> bool:
        """Whether more timers were due than the last batch was allowed to fire."""
        ...

    def nothing(self) -> SourceRange:
        """A range without records, where progress is."""
        ...

    def plan_without_records(self, batch: int) -> None:
        """As the plan of other batches, for a batch that only fires timers."""
        ...


class BatchSteps(Steps, Protocol):
    """The steps of the batches of one query (``driver/kafka/commit.py``, ``driver/external/commit.py``)."""

    flow: str
    progress: Progress  # what is committed

    @property
    def timers(self) -> TimerSteps | None:
        """For batches that only fire timers; None: the query has none."""
        ...

    def settle(self) -> None:
        """The last batch is committed, and the engine has noted it."""
        ...

    def ended_batch(self, rows: Rows) -> None:
        """The call of the engine ends."""
        ...

    def ended(self) -> None:
        """The query is over."""
        ...


class Batches:
    """Runs the batches of one query. Called by its engine on one thread.

    Args:
        commit: the steps of a batch.
        options: what ``Flow.write`` was given.
        tables: returns what is known of the flow's tables now. It may be called in any thread.

    Attributes:
        failure: the error that has ended the query.
        taken_over: that a standby is active in place of this driver. A query that waits for records ends with it.
        stopping: whether the query is being stopped.
        over: whether the engine has ended it.
        awaited: how many callers wait for the query to end. They get its failure, so it is not logged.
        turn: a lock, held while a batch runs.
        held: set while no further batch may begin.
        history: the last 200 batches. drained: numbers of the batches that were committed before this run and were
            drained.
        idle: whether the engine has found nothing to do.
    """

    def __init__(
        self, commit: BatchSteps, options: SinkOptions, *, tables: Callable[[], list[TableFacts]] = list
    ) -> None:
        self._steps = commit
        self._options = options
        self.tables = tables
        self._retries = Retries(commit, options, commit.flow, is_stopped=self._is_stopped)
        self._pace = Pace(commit.flow, options.trigger_s)
        self.flow = commit.flow
        self.guarantee = options.guarantee
        self.transaction_timeout_s = options.transaction_timeout_s if options.guarantee == EXACTLY_ONCE else None
        self.failure: BaseException | None = None
        self.taken_over: FencedError | None = None
        self.stopping = False
        self.over = False
        self.awaited = 0
        self.turn = threading.Lock()
        self.held = threading.Event()
        self.history: collections.deque[BatchSummary] = collections.deque(maxlen=200)
        self.drained: list[int] = []
        self.idle = False

    @property
    def progress(self) -> Progress:
        """What is committed."""
        return self._steps.progress

    def ended(self) -> None:
        """The query is over."""
        self._steps.ended()

    def taken_over_by(self, error: FencedError) -> None:
        """A standby is active in place of this driver. It may be called in any thread."""
        self.taken_over = error

    def _in_turn(self, rows: Rows, batch: int, run: Callable[[], None], *, paced: bool = True) -> None:
        """Run a batch when it may begin. Its failure is kept, and logged unless somebody waits for it.

        Args:
            paced: whether it should take less time than the trigger's interval.
        """
        while self.held.is_set() or not self.turn.acquire(blocking=False):
            if self.stopping:
                raise batch_errors.stopped(self.flow, batch, None, on_purpose=True)
            time.sleep(_TURN_S)
        started = time.monotonic()
        try:
            run()
            if paced:
                self._pace.batch(time.monotonic() - started)
        # Spark parses the traceback with a regular expression, which overflows the stack when it is long (a cause
        # with a Java stack trace in its text). So causes are logged, not chained.
        except OnceflowError as error:
            log.debug("the batch failed here", exc_info=error)
            problem = error.locate(flow=self.flow, batch=batch).with_traceback(None)
            if not (self.stopping and isinstance(error, BatchAbortedError)):  # else the query has not failed
                self._failed(problem, batch)
            self._tell(problem)
            raise problem from None
        except SPARK_ERRORS as error:
            stopped = batch_errors.stopped(self.flow, batch, error, on_purpose=self._is_stopped(rows, error))
            log.debug("the batch failed here", exc_info=error)
            if not self.stopping:  # else the query has not failed
                self._failed(stopped, batch)
                self._tell(stopped)
            raise stopped from None
        except BaseException as error:
            self._failed(error, batch)
            self._tell(f"batch {batch} of flow {self.flow} has failed: {user_code.in_words(error)}")
            raise
        finally:
            self._steps.ended_batch(rows)
            self.turn.release()

    def _tell(self, problem: object) -> None:
        """Log why the query ends, unless somebody waits for it, who gets the error."""
        if not self.awaited and not self.stopping:
            log.error("%s", problem)

    def _failed(self, error: BaseException, batch: int) -> None:
        self.failure = error
        hooks.at(hooks.FAILED, where="driver", flow=self.flow, batch=batch, error=error)

    def _fire_left(self, rows: Rows, source: SourceRange) -> None:
        """Run batches without records, for due timers that exceeded the limit of the last batch.

        The next batch with records may only begin at the next trigger.
        """
        timers = self._steps.timers
        if timers is None or not timers.are_timers_left():
            return
        nothing = replace(source, start=source.end)
        until = time.monotonic() + self._options.timers_s
        while timers.are_timers_left() and not self.stopping and time.monotonic() < until:
            if not self._run_without_records(rows, nothing, timers):
                return  # not committed: the timers were only set again, and nothing has changed

    def _catch_up(self, rows: Rows) -> None:
        """After a promotion, the timers that the earlier version has fired come before the next records."""
        timers = self._steps.timers
        while timers is not None and handover.owes_timers(self.progress) and not self.stopping:
            if not self._run_without_records(rows, timers.nothing(), timers):
                return

    def _run_without_records(self, rows: Rows, nothing: SourceRange, timers: TimerSteps) -> bool:
        """A batch that only fires timers. Returns whether it was committed."""
        batch = self.progress.batch_id + 1
        self._steps.settle()
        timers.plan_without_records(batch)
        with located(flow=self.flow, batch=batch), log_context.within(batch=batch):
            self._run_planned(_no_rows(rows, nothing), batch, nothing, BatchSummary(batch, 0))
        return self.progress.batch_id == batch

    def _run_planned(self, rows: Rows, batch: int, source: SourceRange, summary: BatchSummary) -> None:
        summary.max_rows, summary.read = source.max_rows, source.by_topic()
        with described_jobs(rows, self.flow, batch):
            committed = self._retries.run(rows, batch, source, summary)
        if committed or summary.lost:
            self.history.append(summary)
        if committed:
            hooks.at("end", where="driver", flow=self.flow, batch=batch, summary=summary)
        elif summary.lost:
            hooks.at(hooks.LOST, where="driver", flow=self.flow, batch=batch, summary=summary)

    def _is_stopped(self, rows: Rows, problem: BaseException) -> bool:
        """Whether the batch has failed because somebody stops the query, its jobs or Spark."""
        return self.stopping or jvm.was_cancelled(problem) or jvm.is_being_stopped(rows.sparkSession)


def _no_rows(rows: Rows, nothing: SourceRange) -> Rows:
    """The same without records, for a batch that only fires timers."""
    if isinstance(rows, DataFrame):
        raise RuntimeError("a query with timers has no micro-batches")
    if isinstance(rows, RangeRows) and rows.source.all_batches:
        return replace(rows, range=nothing, read={})
    return FetchedRows(rows.sparkSession, (), rows.program)  # the driver fires timers itself, whoever reads the records


class Pace:
    """The pace of the batches of one run.

    Args:
        trigger_s: how often a batch is to begin; 0: as soon as the last one is done.
    """

    def __init__(self, flow: str, trigger_s: float) -> None:
        self._flow = flow
        self._trigger_s = trigger_s
        self._since = time.monotonic()
        self._batches = self._slow = 0
        self._worst_s = 0.0

    def batch(self, seconds: float) -> None:
        """To be called after each batch, with its duration."""
        self._batches += 1
        self._slow += 0 < self._trigger_s < seconds
        self._worst_s = max(self._worst_s, seconds)
        now = time.monotonic()
        if now - self._since < _WARN_OF_SLOW_EVERY_S:
            return
        if self._slow > _SHARE * self._batches:
            log.warning(
                "flow %s: %d of the last %d batches took longer than trigger=%g s, the slowest %.1f s. Nothing is "
                "lost: the next batch follows at once. If this continues, raise the trigger or add cores; "
                "query.batches shows how long each step takes",
                self._flow,
                self._slow,
                self._batches,
                self._trigger_s,
                self._worst_s,
            )
        self._since, self._batches, self._slow, self._worst_s = now, 0, 0, 0.0


@contextlib.contextmanager
def timed(summary: BatchSummary, step: str) -> Iterator[None]:
    """Adds the seconds of a step to the summary of its batch, and its name to log lines."""
    started = time.monotonic()
    try:
        with log_context.within(step=step):
            yield
    finally:
        summary.seconds[step] = summary.seconds.get(step, 0.0) + time.monotonic() - started

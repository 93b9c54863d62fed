"""What foreachBatch calls: it plans, runs and settles one micro-batch after the other.

``BatchSink`` also knows whether somebody waits for the query or stops it. The steps of a batch are in ``commit.py``,
its attempts in ``retries.py``.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pyspark.sql import DataFrame

from onceflow import hooks, log_context
from onceflow.driver import batch_errors, handover
from onceflow.driver.commit import timed
from onceflow.driver.offset_log import SourceRange
from onceflow.driver.pace import Pace
from onceflow.driver.retries import Retries, Steps
from onceflow.errors import BatchAbortedError, OnceflowError, located
from onceflow.planning.options import EXACTLY_ONCE, BatchSummary, SinkOptions
from onceflow.protocol.progress import Progress
from onceflow.spark import jvm
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.spark.queries import ADAPTIVE
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow.sink")

_TURN_S = 0.05  # how often a batch that may not begin yet checks whether the query is being stopped
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


class Commit(Steps, Protocol):
    """The steps of the batches of one query (``commit.py``, ``external_commit.py``)."""

    flow: str
    progress: Progress  # what is committed

    def plan(self, spark_batch_id: int, batch: int) -> tuple[SourceRange, bool]:
        """The source range of a batch, and whether it is committed."""
        ...

    def plan_without_records(self, batch: int) -> None:
        """As ``plan``, for a batch that only fires timers."""
        ...

    def settle(self) -> None:
        """Spark has logged the last batch."""
        ...

    def drain(self, df: DataFrame) -> None:
        """Run a committed batch for its state in Spark."""
        ...

    def is_idle(self, source: SourceRange) -> bool:
        """Whether a batch would change nothing."""
        ...

    def are_timers_left(self) -> bool:
        """Whether more timers were due than the last batch was allowed to fire."""
        ...

    def nothing(self) -> SourceRange:
        """A range without records, where progress is."""
        ...

    def ended_batch(self, df: DataFrame) -> None:
        """Spark's call of the sink ends."""
        ...

    def ended(self) -> None:
        """The query is over."""
        ...


class BatchSink:
    """Writes the batches of one query. Called by Spark on one thread.

    Args:
        commit: the steps of a batch.
        options: what ``Flow.write`` was given.
        before_first: called before the first batch begins; may raise.
        tables: returns what is known of the flow's tables now. It may be called in any thread.

    Attributes:
        failure: the error that has ended the query.
        stopping: whether the query is being stopped.
        over: whether Spark has ended it.
        awaited: how many callers wait for the query to end. They get its failure, so it is not logged.
        turn: a lock, held while a batch runs.
        held: set while no further batch may begin.
        history: the last 200 batches. drained: numbers of the batches that were committed before this run and were
            drained.
        idle: whether Spark has asked for a batch that had nothing to do.
    """

    def __init__(
        self,
        commit: Commit,
        options: SinkOptions,
        *,
        before_first: Callable[[], None] = lambda: None,
        tables: Callable[[], list[TableFacts]] = list,
    ) -> None:
        self._commit = commit
        self._options = options
        self._before_first = before_first
        self.tables = tables
        self._retries = Retries(commit, options, commit.flow, is_stopped=self._is_stopped)
        self._pace = Pace(commit.flow, options.trigger_s)
        self.flow = commit.flow
        self.guarantee = options.guarantee
        self.transaction_timeout_s = options.transaction_timeout_s if options.guarantee == EXACTLY_ONCE else None
        self.failure: BaseException | None = None
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
        return self._commit.progress

    def __call__(self, df: DataFrame, spark_batch_id: int) -> None:
        batch = self.progress.batch_id + 1
        with log_context.within(flow=self.flow, batch=batch):  # py4j uses the thread for other flows later
            self._call(df, spark_batch_id, batch)

    def _call(self, df: DataFrame, spark_batch_id: int, batch: int) -> None:
        while self.held.is_set() or not self.turn.acquire(blocking=False):
            if self.stopping:
                raise batch_errors.stopped(self.flow, batch, None, on_purpose=True)
            time.sleep(_TURN_S)
        started = time.monotonic()
        try:
            self._run(df, spark_batch_id)
            self._pace.batch(time.monotonic() - started)
        # Spark parses the traceback with a regular expression, which overflows the stack when it is long (a cause
        # with a Java stack trace in its text). So causes are logged, not chained.
        except OnceflowError as error:
            log.debug("the batch failed here", exc_info=error)
            problem = error.locate(flow=self.flow, batch=batch).with_traceback(None)
            if not (self.stopping and isinstance(error, BatchAbortedError)):  # else the query has not failed
                self._failed(problem, batch)
            if not self.awaited and not self.stopping:
                log.error("%s", problem)
            raise problem from None
        except SPARK_ERRORS as error:
            stopped = batch_errors.stopped(self.flow, batch, error, on_purpose=self._is_stopped(df, error))
            log.debug("the batch failed here", exc_info=error)
            if not self.stopping:  # else the query has not failed
                self._failed(stopped, batch)
            raise stopped from None
        except BaseException as error:
            self._failed(error, batch)
            raise
        finally:
            self._commit.ended_batch(df)
            self.turn.release()

    def ended(self) -> None:
        """The query is over."""
        self._commit.ended()

    def _failed(self, error: BaseException, batch: int) -> None:
        self.failure = error
        hooks.at(hooks.FAILED, where="driver", flow=self.flow, batch=batch, error=error)

    def _run(self, df: DataFrame, spark_batch_id: int) -> None:
        self._commit.settle()
        if not self.history:
            _set_session(df)
            self._before_first()
        self._catch_up(df)
        batch = self.progress.batch_id + 1
        summary = BatchSummary(batch, 0)
        with timed(summary, "plan"):
            source, is_committed = self._commit.plan(spark_batch_id, batch)
        if is_committed:
            log.warning(
                "flow %s: batch %d (%d in the checkpoint) is committed already: it is run again for its state only, "
                "nothing of it is written",
                self.flow,
                self.progress.batch_id,
                spark_batch_id,
            )
            self._commit.drain(df)
            self.drained.append(self.progress.batch_id)
            return
        if self._commit.is_idle(source):
            self.idle = True
            return
        self._run_planned(df, batch, source, summary)
        self._fire_left(df, source)

    def _fire_left(self, df: DataFrame, source: SourceRange) -> None:
        """Run batches without records, for due timers that exceeded the limit of the last batch.

        Spark itself would begin the next batch up to a second later, when a source has something new.
        """
        if not self._commit.are_timers_left():
            return
        if source.max_rows:
            df = _no_rows(df)
        nothing = replace(source, start=source.end)
        until = time.monotonic() + self._options.timers_s
        while self._commit.are_timers_left() and not self.stopping and time.monotonic() < until:
            if not self._run_without_records(df, nothing):
                return  # not committed: the timers were only set again, and nothing has changed

    def _catch_up(self, df: DataFrame) -> None:
        """After a promotion, the timers that the earlier version has fired come before the next records."""
        while handover.owes_timers(self.progress) and not self.stopping:
            if not self._run_without_records(_no_rows(df), self._commit.nothing()):
                return

    def _run_without_records(self, df: DataFrame, nothing: SourceRange) -> bool:
        """A batch that only fires timers. Returns whether it was committed."""
        batch = self.progress.batch_id + 1
        self._commit.settle()
        self._commit.plan_without_records(batch)
        with located(flow=self.flow, batch=batch), log_context.within(batch=batch):
            self._run_planned(df, batch, nothing, BatchSummary(batch, 0))
        return self.progress.batch_id == batch

    def _run_planned(self, df: DataFrame, batch: int, source: SourceRange, summary: BatchSummary) -> None:
        summary.max_rows, summary.read = source.max_rows, source.by_topic()
        committed = self._retries.run(df, batch, source, summary)
        if committed or summary.lost:
            self.history.append(summary)
        if committed:
            hooks.at("end", where="driver", flow=self.flow, batch=batch, summary=summary)
        elif summary.lost:
            hooks.at(hooks.LOST, where="driver", flow=self.flow, batch=batch, summary=summary)

    def _is_stopped(self, df: DataFrame, problem: BaseException) -> bool:
        """Whether the batch has failed because somebody stops the query, its jobs or Spark."""
        return self.stopping or jvm.was_cancelled(problem) or jvm.is_being_stopped(df.sparkSession)


def _no_rows(df: DataFrame) -> DataFrame:
    return df.sparkSession.createDataFrame(df.sparkSession.sparkContext.emptyRDD(), df.schema)


def _set_session(df: DataFrame) -> None:
    """Change settings in the query's own clone of the session.

    Adaptive execution is switched off, as it was when the query was started (`queries.without_adaptive_execution`). It
    runs every stage before a shuffle as a job of its own as soon as the RDD of a plan is requested, so rows would be
    read and shuffled twice. It also drops tasks without rows, but every task has something to report. A batch is one
    job, whose tasks are known before it runs.

    Arrow batches are limited to 4 MiB, so that workers need little memory even for large rows. This is not slower. A
    value that the user has set is kept.
    """
    conf = df.sparkSession.conf
    conf.set(ADAPTIVE, "false")
    if conf.get(_ARROW_BYTES, None) is None:
        conf.set(_ARROW_BYTES, str(4 * 1024 * 1024))

"""Attempts of a batch, until one is committed or none may follow.

Every attempt has an epoch of its own. A failed attempt is aborted before the next one begins. This module decides
whether another attempt may help; what an attempt does is in ``commit.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Protocol

from onceflow.driver.batch import errors as batch_errors
from onceflow.driver.batch.blame import alike_to
from onceflow.driver.batch.errors import WORTH_A_RERUN, in_short
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.range_rows import RangeRows
from onceflow.driver.record.offset_log import SourceRange
from onceflow.errors import (
    BatchAbortedError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
)
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.transaction import Transaction
from onceflow.spark import driver_jvm, jvm
from onceflow.spark.import_errors import cannot_import
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.task.row_writer import Companion

log = logging.getLogger("onceflow.sink")

_EXPECTED: tuple[type[Exception], ...] = (OnceflowError, *SPARK_ERRORS)
# A signal to the group of processes may end Spark's JVM before Python has seen its own: so long it is waited for.
_SIGNAL_S, _TURN_S = 0.5, 0.02


@dataclass
class Attempt:
    """One attempt of a batch.

    Args:
        producer: the producer id and epoch it writes under; none yet at first.
        without_outputs: whether its outputs are not written, see ``handover.py``.
        companion: what the driver sends beside the rows that it writes itself.
        begun_at: when its transaction had begun (monotonic seconds); None: it has not.
    """

    batch: int
    source: SourceRange
    summary: BatchSummary
    producer: ProducerIdAndEpoch = field(default_factory=lambda: ProducerIdAndEpoch(-1, -1))
    begun_at: float | None = None
    without_outputs: bool = False
    companion: Companion | None = None

    @property
    def open_s(self) -> float:
        """How long the transaction has been open, in seconds."""
        return 0.0 if self.begun_at is None else monotonic() - self.begun_at


class Steps(Protocol):
    """What ``Retries`` asks of a batch (``commit.py``)."""

    @property
    def machine(self) -> Transaction:
        """The state of the transaction."""
        ...

    def attempt(self, rows: Rows, attempt: Attempt) -> bool:
        """One transaction. False: there was nothing to commit."""
        ...

    def abort(self, problem: BaseException, batch: int) -> None:
        """Nothing of the attempt becomes visible."""
        ...

    def forget_attempt(self, rows: Rows) -> None:
        """Reset Spark's own state to what it was before the attempt."""
        ...

    def learn(self, problem: BaseException) -> bool:
        """Whether the attempt is not counted: it failed while it brought local copies up to date. That can happen on
        every host. The copies stay, so the next attempt has less to read."""
        ...

    def is_lost(self, rows: Rows | None, summary: BatchSummary, problem: BaseException) -> bool:
        """With at_most_once: whether progress has moved already. Then the batch is given up, and this is logged.

        Args:
            rows: None: the query ends anyway.
        """
        ...


class Retries:
    """Runs the attempts of the batches of one query.

    Args:
        is_stopped: whether an attempt has failed because somebody stops the query.
    """

    def __init__(
        self, steps: Steps, options: SinkOptions, flow: str, *, is_stopped: Callable[[Rows, BaseException], bool]
    ) -> None:
        self._steps = steps
        self._machine = steps.machine
        self._options = options
        self._flow = flow
        self._is_stopped = is_stopped

    def run(self, rows: Rows, batch: int, source: SourceRange, summary: BatchSummary) -> bool:
        """Attempts, until one is committed. False: there was nothing to commit, or the batch was given up.

        Raises:
            OnceflowError: no further attempt may follow.
        """
        try:
            return self._run(rows, batch, source, summary)
        except Exception as problem:
            self._steps.is_lost(None, summary, problem)
            raise

    def _run(self, rows: Rows, batch: int, source: SourceRange, summary: BatchSummary) -> bool:
        last: BaseException | None = None
        cause: BaseException | None = None  # of the last attempt that had begun
        failed = 0
        while failed < self._options.max_attempts:
            summary.attempts += 1
            attempt = Attempt(batch, source, summary)
            if last is not None:
                self._forget(rows, last)
            try:
                committed = self._steps.attempt(rows, attempt)
                if attempt.without_outputs:  # the earlier version has written these records, and counted them
                    summary.records = summary.dead_letters = summary.late = summary.duplicates = 0
                return committed
            except _EXPECTED as problem:
                last = self._aborted(rows, attempt, problem, cause)
                cause = cause if attempt.begun_at is None else last
                again, refused = self._learn(last)
                if self._steps.is_lost(rows, summary, last):
                    return False
                if refused is not None:
                    raise refused from None
                if again:
                    self._log_restored(batch, last)
                    continue
                failed += 1
                if failed < self._options.max_attempts:  # else the error says so
                    self._log_failed(batch, failed, last)
            except Exception as problem:  # neither onceflow's nor Spark's: no further attempt, but abort this one
                if self._machine.may_abort:
                    self._steps.abort(problem, batch)
                ended = self._of_jvm(rows, problem, batch)
                if ended is not None:
                    raise ended from None
                raise
        record = _culprit(rows, last) if last is not None and jvm.raised_by_function(last) else ""
        raise batch_errors.given_up(self._flow, batch, self._options.max_attempts, last, record)

    def _learn(self, last: BaseException) -> tuple[bool, OnceflowError | None]:
        """What `Steps.learn` returns, and what it raises."""
        try:
            return self._steps.learn(last), None
        except OnceflowError as error:
            return False, error

    def _forget(self, rows: Rows, last: BaseException) -> None:
        try:
            self._steps.forget_attempt(rows)
        except BatchAbortedError as problem:  # another attempt would meet it, too
            raise batch_errors.after(problem, last) from last

    def _aborted(
        self, rows: Rows, attempt: Attempt, problem: BaseException, cause: BaseException | None
    ) -> BaseException:
        """Abort a failed attempt. Returns its error when another attempt may follow, and raises it otherwise."""
        unknown = not self._machine.may_abort
        if unknown and not (self._machine.is_fenced and attempt.begun_at is None):
            raise problem  # only Kafka knows the outcome of the commit, or a newer driver owns the flow
        if cause is not None and attempt.begun_at is None and isinstance(problem, DeadlineExceededError):
            problem = batch_errors.after(problem, cause)  # it could not begin, because of the error before
        self._steps.abort(problem, attempt.batch)
        clear: OnceflowError | None = None
        if not isinstance(problem, OnceflowError):
            clear = cannot_import(problem) or batch_errors.of_task(problem)
            clear = clear or self._of_jvm(rows, problem, attempt.batch)
            of_function = cause is not None and jvm.of_wrong_code(problem)  # the first time it may be by chance
            repeats = of_function or jvm.will_repeat(problem)
            if clear is None and repeats and not self._is_stopped(rows, problem):
                record = _culprit(rows, problem)
                clear = batch_errors.not_computable(self._flow, attempt.batch, problem, record, of_function=of_function)
        if clear is not None:
            raise clear from None  # another attempt does not help
        if isinstance(problem, OnceflowError) and not isinstance(problem, WORTH_A_RERUN):
            raise problem
        if self._is_stopped(rows, problem):
            raise problem
        if isinstance(problem, FencedError):  # tasks found a newer epoch, but no other driver owns the id
            return batch_errors.timed_out(attempt.open_s, self._options.transaction_timeout_s)
        return problem

    def _of_jvm(self, rows: Rows, problem: BaseException, batch: int) -> OnceflowError | None:
        """The clear error, if an attempt has failed because Spark's JVM has ended: by itself, or with a stop."""
        ended = driver_jvm.ended(rows.sparkSession, problem)
        if ended is None:
            return None
        until = monotonic() + _SIGNAL_S
        while not (stops := self._is_stopped(rows, problem)) and monotonic() < until:
            sleep(_TURN_S)
        return batch_errors.stopped(self._flow, batch, problem, on_purpose=True) if stops else ended

    def _log_restored(self, batch: int, problem: BaseException) -> None:
        log.warning(
            "flow %s: batch %d aborted: its tasks had to bring local copies up to date first, or had none; it is run "
            "again: %s",
            self._flow,
            batch,
            in_short(problem),
        )

    def _log_failed(self, batch: int, failed: int, problem: BaseException) -> None:
        log.warning(
            "flow %s: batch %d aborted (attempt %d of %d): %s",
            self._flow,
            batch,
            failed,
            self._options.max_attempts,
            in_short(problem),
        )


def _culprit(rows: Rows, problem: BaseException) -> str:
    """The record for which the query fails by itself, as text; empty: it is not known."""
    return rows.culprit(alike=alike_to(problem)) if isinstance(rows, FetchedRows | RangeRows) else ""

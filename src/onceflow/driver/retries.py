"""Attempts of a batch, until one is committed or none may follow.

Every attempt has an epoch of its own. One that has failed is aborted before the next one begins. Whether a further one
may help is decided here; what an attempt does stands in ``commit.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from pyspark.sql import DataFrame

from onceflow.driver import batch_errors
from onceflow.driver.batch_errors import in_short
from onceflow.driver.offset_log import SourceRange
from onceflow.errors import (
    BatchAbortedError,
    BrokerUnreachableError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    TransactionTimeoutError,
)
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.transaction import Transaction
from onceflow.spark.import_errors import cannot_import
from onceflow.spark.jvm import SPARK_ERRORS

log = logging.getLogger("onceflow.sink")

# A rerun may help: the next attempt has a new epoch and a new clock.
_WORTH_A_RERUN = (
    BatchAbortedError,
    TransactionTimeoutError,
    DeadlineExceededError,
    BrokerUnreachableError,
    FencedError,  # as tasks see a timeout; the abort has found out that nobody else owns the id
)

_EXPECTED: tuple[type[Exception], ...] = (OnceflowError, *SPARK_ERRORS)


@dataclass
class Attempt:
    """One attempt of a batch.

    Args:
        producer: the producer id and epoch it writes under; none yet at first.
        begun_at: when its transaction had begun (monotonic seconds); None: it has not.
    """

    batch: int
    source: SourceRange
    summary: BatchSummary
    producer: ProducerIdAndEpoch = field(default_factory=lambda: ProducerIdAndEpoch(-1, -1))
    begun_at: float | None = None

    @property
    def open_s(self) -> float:
        """How long the transaction has been open, in seconds."""
        return 0.0 if self.begun_at is None else monotonic() - self.begun_at


class Steps(Protocol):
    """What ``Retries`` asks of a batch (``commit.py``)."""

    @property
    def machine(self) -> Transaction:
        """Where the transaction stands."""
        ...

    def attempt(self, df: DataFrame, attempt: Attempt) -> bool:
        """One transaction. False: there was nothing to commit."""
        ...

    def abort(self, problem: BaseException, batch: int) -> None:
        """Nothing of the attempt becomes visible."""
        ...

    def forget_attempt(self, df: DataFrame) -> None:
        """Spark's own state is to be as it was before the attempt."""
        ...

    def learn(self, problem: BaseException) -> bool:
        """Whether the attempt has restored local copies that the next one does not have to restore."""
        ...

    def is_lost(self, df: DataFrame, summary: BatchSummary, problem: BaseException) -> bool:
        """With at_most_once: whether progress has moved already. Then the batch is given up, and this says so."""
        ...


class Retries:
    """Runs the attempts of the batches of one query.

    Args:
        is_stopped: whether an attempt has failed because somebody stops the query.
    """

    def __init__(
        self, steps: Steps, options: SinkOptions, flow: str, *, is_stopped: Callable[[DataFrame, BaseException], bool]
    ) -> None:
        self._steps = steps
        self._machine = steps.machine
        self._options = options
        self._flow = flow
        self._is_stopped = is_stopped

    def run(self, df: DataFrame, batch: int, source: SourceRange, summary: BatchSummary) -> bool:
        """Attempts, until one is committed. False: there was nothing to commit, or the batch was given up.

        Raises:
            OnceflowError: no further attempt may follow.
        """
        last: BaseException | None = None
        cause: BaseException | None = None  # of the last attempt that had begun
        failed = 0
        while failed < self._options.max_attempts:
            summary.attempts += 1
            attempt = Attempt(batch, source, summary)
            if last is not None:
                self._forget(df, last)
            try:
                return self._steps.attempt(df, attempt)
            except _EXPECTED as problem:
                last = self._aborted(df, attempt, problem, cause)
                cause = cause if attempt.begun_at is None else last
                if self._steps.is_lost(df, summary, last):
                    return False
                if self._restored(last):
                    self._log_restored(batch, last)
                    continue
                failed += 1
                if failed < self._options.max_attempts:  # else the error says so
                    self._log_failed(batch, failed, last)
            except Exception as problem:  # not ours and not Spark's: no rerun, but no open transaction either
                if self._machine.may_abort:
                    self._steps.abort(problem, batch)
                raise
        raise batch_errors.given_up(self._flow, batch, self._options.max_attempts, last)

    def _forget(self, df: DataFrame, last: BaseException) -> None:
        try:
            self._steps.forget_attempt(df)
        except BatchAbortedError as problem:  # another attempt would meet it, too
            raise batch_errors.after(problem, last) from last

    def _aborted(
        self, df: DataFrame, attempt: Attempt, problem: BaseException, cause: BaseException | None
    ) -> BaseException:
        """Abort what has failed; returns why, when a further attempt may follow, and raises otherwise."""
        unknown = not self._machine.may_abort
        if unknown and not (self._machine.is_fenced and attempt.begun_at is None):
            raise problem  # how the commit has ended is known to Kafka alone, or the error says who owns the flow now
        if cause is not None and attempt.begun_at is None and isinstance(problem, DeadlineExceededError):
            problem = batch_errors.after(problem, cause)  # it could not begin, because of what the one before met
        self._steps.abort(problem, attempt.batch)
        missing = None if isinstance(problem, OnceflowError) else cannot_import(problem)
        if missing is not None:
            raise missing from None  # no rerun helps
        if isinstance(problem, OnceflowError) and not isinstance(problem, _WORTH_A_RERUN):
            raise problem
        if self._is_stopped(df, problem):
            raise problem
        if isinstance(problem, FencedError):  # tasks met a newer epoch, and nobody else owns the id
            return batch_errors.timed_out(attempt.open_s, self._options.transaction_timeout_s)
        return problem

    def _restored(self, problem: BaseException) -> bool:
        """Whether the attempt is not counted: a restore may take longer than a transaction may be open, on each host
        anew. What was restored stays, so the next attempt gets farther."""
        restored = self._steps.learn(problem)
        return restored and isinstance(problem, TransactionTimeoutError | DeadlineExceededError)

    def _log_restored(self, batch: int, problem: BaseException) -> None:
        log.warning(
            "flow %s: batch %d aborted, its tasks had local copies to bring up to date first; it begins again with "
            "them: %s",
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

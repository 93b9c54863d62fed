"""The steps of a batch that an external sink commits.

    plan -> begin -> write -> audit -> commit -> progress -> end    (init comes before, settle with the next batch)

``commit`` is one transaction of the external system, with the rows and the progress row. If its outcome is not known,
the flow is taken over once more (`ExternalSink.open`), which shows it. At ``progress`` and ``end`` Kafka's progress
follows, in a transaction of its own, with the dead letters of the batch. If the driver dies before that, the next start
does it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar
from uuid import uuid4

from onceflow import hooks, user_code
from onceflow.client.deadline import Deadline
from onceflow.clock import clock_ms
from onceflow.driver.batch import errors as batch_errors
from onceflow.driver.batch.audit import Part, audit_part, in_tasks
from onceflow.driver.batch.batches import timed
from onceflow.driver.batch.errors import in_short
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.range_rows import RangeRows, sent
from onceflow.driver.batch.retries import Attempt
from onceflow.driver.batch.source_watch import SourceWatch
from onceflow.driver.external.progress_commit import commit_progress
from onceflow.driver.external.refused_rows import LettersToWrite, RefusedRows
from onceflow.driver.external.waiting import when_reached
from onceflow.driver.record.offset_log import SourceRange, Sources, check_contiguous
from onceflow.driver.record.session import DriverSession
from onceflow.errors import (
    BatchAbortedError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    ProgressConflictError,
)
from onceflow.external.sink import BatchAttempt, ExternalSink, older_state
from onceflow.messages import DRIVER, REPORT_SPARK_SCHEMA, OutputTopic, from_rows
from onceflow.planning.options import BatchSummary
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import DriverProcess, Progress
from onceflow.protocol.transaction import GIVEN, Event, Mode, Phase, Transaction
from onceflow.spark import jvm
from onceflow.spark.arrow_maps import map_in_arrow
from onceflow.spark.jvm import SPARK_ERRORS
from onceflow.task.external_task import ExternalOrder, ExternalTask, write_external

log = logging.getLogger("onceflow.sink")

_T = TypeVar("_T")

_FIND_OUT_S = 120.0
_END_S = 60.0
_LOOK_S = 30.0


def new_commit() -> str:
    """A value of `Progress.external_commit`."""
    return uuid4().hex[:16]


@dataclass(frozen=True)
class Ownership:
    """What a start has found.

    Args:
        identity: of the flow, as the external system knows it.
        owner, generation: of this driver there, see `ProgressRow`.
        row: the text of the progress row; None: it has none yet.
        progress: where the flow is.
    """

    identity: str
    owner: str
    generation: int
    row: str | None
    progress: Progress


class ExternalCommit:
    """The steps of the batches of one query.

    Args:
        session: of this driver in Kafka. sources: the topics that are read.
        driver: this process, as progress says who has committed it.
        refused: what becomes of rows that the system does not take.
        targets: the topics of dead letters.
        cores: returns how many tasks Spark can run at once.

    Attributes:
        is_stopping: whether the query is being stopped.
    """

    def __init__(
        self,
        sink: ExternalSink,
        owned: Ownership,
        session: DriverSession,
        *,
        driver: DriverProcess | None,
        sources: Sources,
        refused: RefusedRows,
        targets: Mapping[str, OutputTopic],
        cores: Callable[[], int],
    ) -> None:
        self._sink = sink
        self._identity = owned.identity
        self._owner = owned.owner
        self._generation = owned.generation
        self._row = owned.row
        self.is_stopping: Callable[[], bool] = lambda: False
        self._session = session
        self._driver = driver
        self._sources = sources
        self._refused = refused
        self._targets = targets
        self._cores = cores
        self._at: BatchAttempt | None = None  # the last one
        self._watch = SourceWatch(session.cluster, session.names.flow)
        self.flow = session.names.flow
        self.timers = None  # a query with an external sink has no process steps
        self.progress = owned.progress
        self.machine = Transaction(Mode.EXTERNAL, GIVEN)

    # ---- what the loop asks -----------------------------------------------------------------

    def ended(self) -> None:
        """The query is over."""
        self._sink.close()

    def ended_batch(self, rows: Rows) -> None:
        """The call of the engine ends."""

    def is_idle(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        """Whether a batch would change nothing."""
        return not source.max_rows

    def held_back(self) -> None:
        """Batches take all partitions: there is no state."""

    def settle(self) -> None:
        """The last batch is committed."""
        if self.machine.phase is Phase.COMMITTED:
            hooks.at("settle", where="driver", flow=self.flow, batch=self.progress.batch_id)
            self.machine.on(Event.SETTLE)

    def settle_copies(self) -> None:
        """There are none."""

    def plan_range(self, source: SourceRange, batch: int, caught_up: Mapping[TopicPartition, float]) -> None:
        """The source range of the batch is this. It must start where progress ends (I2)."""
        known = {topic: dict(offsets) for topic, offsets in self.progress.offsets.items()}
        check_contiguous(source.start, known, self._sources.starts, flow=self.flow, batch=batch)
        self._watch.planned(source, self.progress, Deadline(_LOOK_S, "looking at the sources"))
        hooks.at("plan", where="driver", flow=self.flow, batch=batch)

    # ---- the steps -----------------------------------------------------------------------------------

    def attempt(self, rows: Rows, attempt: Attempt) -> bool:
        """One transaction of the external system, from its begin to its end."""
        batch, summary = attempt.batch, attempt.summary
        at = self._at = BatchAttempt(self._identity, self._owner, self._generation, batch, summary.attempts)
        with timed(summary, "begin"):
            self.machine.on(Event.BEGIN)
            self._guarded("begin", lambda: self._reached(lambda: self._sink.begin(at)))
        hooks.at("begin", where="driver", flow=self.flow, batch=batch, source=attempt.source)
        attempt.begun_at = time.monotonic()
        with timed(summary, "write"):
            part, receipts = self._write(rows, at, attempt.source, summary)
        hooks.at("write", where="driver", flow=self.flow, batch=batch)
        with timed(summary, "audit"):
            self._watch.was_read(attempt.source, Deadline(_LOOK_S, "looking at the sources again"))
            checked = audit_part(rows, part, flow=self.flow, batch=batch)
        self.machine.on(Event.ROWS_AUDITED)
        hooks.at("audit", where="driver", flow=self.flow, batch=batch)
        progress = replace(
            self.progress,
            batch_id=batch,
            offsets={**self.progress.offsets, **attempt.source.end},
            epochs=self._watch.epochs(attempt.source, self.progress.epochs),
            driver=self._driver,
            external_commit=new_commit(),
            external_before=self.progress.external_commit,
            time_ms=clock_ms(),
        )
        with timed(summary, "commit"):
            self._commit(at, receipts, progress, checked.records)
        self.progress = progress
        self._refused.committed()
        summary.dead_letters = self._refused.letters.num_rows
        summary.records = checked.records - summary.dead_letters
        summary.nbytes, summary.max_rss_kib = checked.nbytes, checked.max_rss_kib
        summary.written = {self._sink.target: (summary.records, checked.nbytes)}
        hooks.at("commit", where="driver", flow=self.flow, batch=batch)
        with timed(summary, "end"):
            self._end()
        return True

    def _write(
        self, rows: Rows, at: BatchAttempt, source: SourceRange, summary: BatchSummary
    ) -> tuple[Part, Sequence[bytes]]:
        """Bring all rows to the system. Returns the reports, and the receipts in the order of the tasks."""
        order = ExternalOrder(self._sink, self.flow, at, hooks.configured())
        if isinstance(rows, FetchedRows):
            with closing(rows.batches()) as batches:
                found = self._guarded("write", lambda: write_external(order, DRIVER, batches))
            summary.path = "driver"
            return Part(found.written, None, False), found.returned
        if not isinstance(rows, RangeRows):
            raise RuntimeError("a query with an external sink has no micro-batches")
        with sent(self.flow):
            df = rows.frame(max(1, min(self._cores(), sum(map(len, source.end.values())))))
            tasks = jvm.task_total(df)
            found = from_rows(map_in_arrow(df, ExternalTask(order), REPORT_SPARK_SCHEMA).collect())
        summary.path = in_tasks(tasks)
        return Part(found.written, tasks, jvm.has_shuffle(df)), found.returned

    def _commit(self, at: BatchAttempt, receipts: Sequence[bytes], progress: Progress, records: int) -> None:
        """The transaction of the external system decides the batch."""
        refused = self._refused
        text = refused.set(progress, [], records)
        self.machine.on(Event.COMMIT)
        try:
            if refused.topic is None:
                self._sink.commit(at, receipts, text)
            else:
                self._sink.commit_accepted(at, receipts, lambda rows: refused.set(progress, rows, records))
        except FencedError as error:
            self.machine.on(Event.FENCED)
            raise batch_errors.fenced(self.flow, f"before batch {at.batch} was committed", error.detail) from error
        except OnceflowError:
            self.machine.on(Event.COMMIT_REFUSED)
            raise
        except Exception as problem:
            log.warning(
                "flow %s: the outcome of batch %d in %s is not known yet: %s",
                self.flow,
                at.batch,
                self._sink.target,
                in_short(problem),
            )
            self._find_out(at, refused.text, problem)
        self._row = refused.text

    def _reached(self, call: Callable[[], _T]) -> _T:
        """The sink's answer. Waits while its system cannot be reached."""
        deadline = Deadline(_FIND_OUT_S, f"reaching {self._sink.target}")
        return when_reached(call, deadline, self._sink.target, self.flow, is_stopping=self.is_stopping)

    def _find_out(self, at: BatchAttempt, text: str, problem: Exception) -> None:
        """Returns if the transaction was committed.

        Raises:
            BatchAbortedError: it was not, and cannot be any more.
            FencedError: a newer driver has taken the flow over. The owner tells it from an earlier call of ``open``
                whose answer was lost.
            ProgressConflictError: the system has gone back to an older state.
            DeadlineExceededError: the system does not answer. The next start finds the outcome.
        """
        deadline = Deadline(_FIND_OUT_S, f"learning how batch {at.batch} ended in {self._sink.target}")
        tried = 0
        while True:
            try:
                opened = self._sink.open(self._identity, self._owner, at.generation)
                break
            except FencedError as error:
                self.machine.on(Event.FENCED)
                raise batch_errors.fenced(self.flow, f"while batch {at.batch} was committed", error.detail) from error
            except ProgressConflictError:
                self.machine.on(Event.COMMIT_REFUSED)
                raise
            except Exception as error:
                if self.is_stopping() or not deadline.wait(tried):
                    raise DeadlineExceededError(
                        f"The outcome of the commit is not known: {self._sink.target} does not answer",
                        detail=in_short(error),
                        next_step="start the flow again when it answers: it finds the outcome and continues there",
                    ) from None
                tried += 1
        self._generation = opened.generation
        if opened.progress not in (text, self._row):
            self.machine.on(Event.COMMIT_REFUSED)
            raise older_state(self._sink.target, self.flow, f"it is at progress {opened.progress}")
        if opened.progress != text:
            self.machine.on(Event.COMMIT_REFUSED)
            self._failed("commit", problem, f"The transaction of {self._sink.target} was not committed")

    def _end(self) -> None:
        """Kafka's progress and the consumer group follow. Until then no attempt may begin or be aborted.

        Raises:
            FencedError: a newer driver has started. It continues after this batch, which is committed.
            DeadlineExceededError, BrokerUnreachableError: brokers do not answer; the next start does it.
        """
        deadline = Deadline(_END_S, f"moving progress in Kafka to batch {self.progress.batch_id}")
        letters = LettersToWrite(self._session, self._refused.letters, self._targets, self.progress.batch_id)
        commit_progress(self._session, self.progress, self._sources.starts, deadline, letters)
        self.machine.on(Event.COMMIT_DONE)

    def _failed(self, step: str, problem: Exception, what: str) -> NoReturn:
        """The attempt has failed. It is repeated, unless the second one has failed in the same way."""
        if self._at is not None and self._at.attempt > 1 and user_code.repeats(problem):
            raise batch_errors.sink_failed(self._sink.target, step, problem) from problem
        raise BatchAbortedError(what, detail=in_short(problem), next_step="none: the batch is run again") from problem

    def _guarded(self, step: str, call: Callable[[], _T]) -> _T:
        """An attempt that fails for another reason than an error of onceflow's own may be repeated."""
        try:
            return call()
        except OnceflowError:
            raise
        except SPARK_ERRORS:  # an operator of Spark fails for a row
            raise
        except Exception as problem:
            self._failed(step, problem, f"{self._sink.target} has failed at the step {step}")

    # ---- when it goes wrong --------------------------------------------------------------------------

    def abort(self, problem: BaseException, batch: int) -> None:
        """The attempt will not be committed: its receipts are forgotten."""
        self.machine.on(Event.ABORT)
        if self._at is not None:
            try:
                self._sink.abort(self._at)
            except Exception as error:  # it is rid of at the next start
                log.warning("flow %s: %s: %s", self.flow, self._sink.target, in_short(error))
        hooks.at(hooks.ABORTED, where="driver", flow=self.flow, batch=batch, error=problem)

    def learn(self, problem: BaseException) -> bool:
        return False

    def forget_attempt(self, rows: Rows) -> None:
        """Nothing of an attempt is kept."""

    def is_lost(self, rows: Rows | None, summary: BatchSummary, problem: BaseException) -> bool:
        return False

"""One micro-batch is one Kafka transaction: the steps of a batch, in order.

    plan -> begin -> write -> audit -> progress -> end      (init comes before, settle with the next batch)

``BatchCommit.attempt`` runs these steps; ``driver/batch/sink.py`` is what Spark calls. If a step before ``end`` fails,
the attempt is aborted, and the batch runs again under a new epoch (``retries.py``). After ``end`` nothing can be
undone. Weaker guarantees use the same steps without a transaction, see ``delivery.py``. A table in
``protocol/transaction.py`` says which step may follow which.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

from pyspark.sql import DataFrame

from onceflow import hooks
from onceflow.client.deadline import Deadline
from onceflow.client.transactions import Outcome
from onceflow.clock import clock_ms
from onceflow.driver.batch import errors as batch_errors
from onceflow.driver.batch.audit import Audit, Part, audit_part, combined
from onceflow.driver.batch.batches import timed
from onceflow.driver.batch.errors import in_short
from onceflow.driver.batch.fetched_rows import FetchedRows, Rows
from onceflow.driver.batch.late_rows import LateRows
from onceflow.driver.batch.retries import Attempt
from onceflow.driver.batch.source_watch import SourceWatch
from onceflow.driver.kafka.delivery import Delivery
from onceflow.driver.kafka.output_writer import OutputWriter
from onceflow.driver.record import handover
from onceflow.driver.record.numbering import Numbering
from onceflow.driver.record.offset_log import SourceRange, Sources, TopicOffsets, check_contiguous
from onceflow.driver.record.session import DriverSession
from onceflow.driver.step.joins import Joins
from onceflow.driver.step.row_calls import RowCalls
from onceflow.driver.step.state_step import StateStep
from onceflow.errors import (
    AuthenticationFailedError,
    BrokerUnreachableError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    TransactionTimeoutError,
)
from onceflow.logs import log_context
from onceflow.messages import MisplacedError
from onceflow.planning import placement
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.progress import DriverProcess, Offsets, Progress
from onceflow.protocol.transaction import Event, Phase, Transaction
from onceflow.task.row_writer import Companion

log = logging.getLogger("onceflow.sink")

_END_SECONDS = 120.0
_QUICK = 0.1  # the part of the transaction timeout that a batch takes at most whose transaction may begin early


class BatchCommit:
    """The steps of the batches of one query.

    Args:
        session: the connection to Kafka, and the flow's names.
        driver: this process, as progress says who has committed it.
        progress: committed progress as read after ``init``; the sink keeps it current.
        sources: the topics that the query reads.
        writer: sends the rows.
        delivery: runs the steps as the guarantee requires.
        numbering: relates the batch numbers in Spark's checkpoint to progress; None: with the direct engine.
        state: the process steps of the query, if it has any.
        joins: the tables that it joins with.
        calls: its calls of other services row by row.
    """

    def __init__(
        self,
        session: DriverSession,
        driver: DriverProcess | None,
        progress: Progress,
        options: SinkOptions,
        *,
        sources: Sources,
        writer: OutputWriter,
        delivery: Delivery,
        numbering: Numbering | None,
        state: StateStep | None,
        joins: Joins,
        calls: RowCalls,
    ) -> None:
        names = session.names
        self._names, self._settings = names, session.cluster.settings
        self._driver = driver
        self._options = options
        self._sources = sources
        self._writer = writer
        self._delivery = delivery
        self._numbering = numbering
        self._state = state
        self._joins = joins
        self._calls = calls
        self._late_rows: LateRows | None = None
        if options.late is not None and numbering is not None:
            self._late_rows = LateRows(names.flow, options.late, numbering.rows_dropped)
        self._stores_open = False  # whether the driver has processed the last batch in this run
        self._is_quick = False  # and in little time
        self._watch = SourceWatch(session.cluster, names.flow)
        self._elsewhere = progress.elsewhere
        self.flow = names.flow
        self.progress = progress

    @property
    def machine(self) -> Transaction:
        """The state of the transaction."""
        return self._delivery.machine

    @property
    def timers(self) -> BatchCommit:
        return self

    def are_timers_left(self) -> bool:
        """Whether more timers were due than the last batch was allowed to fire."""
        return self._state is not None and self._state.are_timers_left()

    def nothing(self) -> SourceRange:
        """A range without records, where progress is."""
        return handover.nothing(self.progress, self._sources.starts)

    def ended(self) -> None:
        """The query is over."""
        if self._late_rows is not None:
            self._late_rows.warn()

    def ended_batch(self, rows: Rows) -> None:
        """Spark's call of the sink ends, with or without an error."""
        self._joins.withdraw(rows)

    def is_idle(self, source: SourceRange, caught_up: Mapping[TopicPartition, float]) -> bool:
        """Whether a batch of the direct engine would change nothing: neither outputs nor progress.

        Args:
            caught_up: see `plan_range`.
        """
        if self._state is not None:  # nothing is due
            self._state.planned(source, caught_up)  # event time may move, because partitions are silent
            return not source.max_rows and not self._state.due(clock_ms())
        return not source.max_rows

    def held_back(self) -> Callable[[int], bool] | None:
        """See `StateStep.held_back`. After a promotion, ranges are given, and nothing is left out."""
        return None if self.progress.handover is not None else self._writer.held_back()

    def attempt(self, rows: Rows, attempt: Attempt) -> bool:
        """One transaction, from its first epoch to its end. False: there was nothing to commit."""
        flow, batch, source, summary = self._names.flow, attempt.batch, attempt.source, attempt.summary
        attempt.without_outputs = self.progress.handover is not None
        with timed(summary, "begin"):
            attempt.producer = self._begin(rows, attempt)
        log_context.add(producer_id=attempt.producer.producer_id, producer_epoch=attempt.producer.producer_epoch)
        hooks.at("begin", where="driver", flow=flow, batch=batch, producer=attempt.producer, source=source)
        if self._late_rows is not None:
            self._late_rows.begin(again=summary.attempts > 1)
        attempt.begun_at = time.monotonic()
        progress: Progress | None = None
        if self._delivery.progress_first:
            self._joins.prepare(rows, self._writer.cores)
            progress = self.progress = self._move_progress(attempt, ())
        with timed(summary, "write"):
            attempt.companion = self._ahead(rows, attempt)
            parts = self._write(rows, attempt)
        hooks.at("write", where="driver", flow=flow, batch=batch)
        with timed(summary, "audit"):
            self._watch.was_read(source, self._writer.deadline("looking at the sources again"))
            checked = self._audit(rows, parts, batch)
            summary.dropped = 0 if self._late_rows is None else self._late_rows.check(batch)
        is_needed = source.max_rows or checked.partitions or attempt.without_outputs
        if self._state is not None and not (is_needed or self._state.changed()):
            self._state.on_noop()
            self.machine.on(Event.NOTHING_WRITTEN)
            return False  # only timers were checked; nothing was sent under this epoch
        self._delivery.written(report for part in parts for report in part.reports)
        hooks.at("audit", where="driver", flow=flow, batch=batch)
        if progress is None:
            progress = self._move_progress(attempt, self._outputs(checked))
        with timed(summary, "end"):
            self._end(progress, attempt, rows.meanwhile if isinstance(rows, FetchedRows) else None)
        self._on_commit(progress, checked, summary)
        return True

    # ---- the steps -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """The previous batch is committed: local stores may apply their pending changes."""
        if self.machine.phase is Phase.COMMITTED:
            hooks.at("settle", where="driver", flow=self._names.flow, batch=self.progress.batch_id)
            self.machine.on(Event.SETTLE)

    def settle_copies(self) -> None:
        """Apply the changes of the last batch to the local copies here, if the driver has processed it itself. If it
        does not, the next batch does."""
        if self._state is not None and self._stores_open:
            self._state.settle(changed=True)

    def plan(self, spark_batch_id: int, batch: int) -> tuple[SourceRange, bool]:
        """The source range of the batch; whether it is committed. If not, it must start where progress ends (I2)."""
        numbering = self._numbering
        if numbering is None:
            raise RuntimeError("without a checkpoint, the engine plans ranges")
        source = numbering.read_range(spark_batch_id, self._sources.partitions)
        if numbering.is_committed(spark_batch_id, source, self.progress):
            hooks.at("plan", where="driver", flow=self._names.flow, batch=self.progress.batch_id)
            return source, True
        source = numbering.bridged(source, self.progress)
        self._check_range(source, batch)
        self._look_at(source)
        numbering.planned(spark_batch_id, source)
        self._planned(source, batch, {})
        return source, False

    def plan_range(self, source: SourceRange, batch: int, caught_up: Mapping[TopicPartition, float]) -> None:
        """As `plan`, for a range that the direct engine has chosen. ``caught_up``: see `Watermark.planned`."""
        self._check_range(source, batch)
        self._look_at(source)
        self._planned(source, batch, caught_up)

    def _check_range(self, source: SourceRange, batch: int) -> None:
        check_contiguous(
            source.start, _plain(self.progress.offsets), self._sources.starts, flow=self._names.flow, batch=batch
        )
        handover.check_range(self.progress, source, flow=self._names.flow, batch=batch)

    def _look_at(self, source: SourceRange) -> None:
        self._watch.planned(source, self.progress, self._writer.deadline("looking at the sources"))

    def _planned(self, source: SourceRange, batch: int, caught_up: Mapping[TopicPartition, float]) -> None:
        self._writer.refresh_targets()
        self._believe(placement.believed(self._elsewhere, clock_ms()))
        self._joins.pin(self._writer.deadline)
        hooks.at("plan", where="driver", flow=self._names.flow, batch=batch)
        if self._state is not None:
            self._state.planned(source, caught_up)

    def _believe(self, elsewhere: Mapping[str, int]) -> None:
        """What attempts have found, also those of earlier drivers: see `Progress.elsewhere`."""
        self._elsewhere = elsewhere
        self._writer.believe(elsewhere)
        if self._state is not None:
            self._state.believe(elsewhere)

    def plan_without_records(self, batch: int) -> None:
        """As `plan`, for a batch that only fires timers: its range is empty."""
        self._joins.pin(self._writer.deadline)
        hooks.at("plan", where="driver", flow=self._names.flow, batch=batch)
        self._writer.refresh_targets()

    def drain(self, df: DataFrame) -> None:
        """Run a batch for its state and watermark only.

        It must run: Spark's next batch needs the state that this batch makes, and takes its watermark from the plan
        that was executed (Spark: MicroBatchExecution, WatermarkTracker).
        """
        self._joins.drain(df, self.progress)

    def _begin(self, rows: Rows, attempt: Attempt) -> ProducerIdAndEpoch:
        """Get a new epoch for this attempt (I3), and put it where the tasks of this thread's jobs can read it."""
        producer = self._delivery.begin(self._writer.deadline("beginning the transaction"))
        if not isinstance(rows, FetchedRows):
            described = {
                "batch": attempt.batch,
                "producer_id": producer.producer_id,
                "producer_epoch": producer.producer_epoch,
            }
            rows.sparkSession.sparkContext.setLocalProperty("onceflow.transaction", json.dumps(described))
        now_ms = clock_ms()
        self._joins.begin(rows, now_ms)
        self._calls.begin(rows, attempt, self._writer.limits)
        if self._state is not None:
            owner = self._names.transactional_id, producer
            self._state.prepare(rows, self._settings, owner, again=attempt.summary.attempts > 1)
            self._state.begin(attempt.batch, producer, now_ms, self._joins.ends, self.progress)
        return producer

    def _write(self, rows: Rows, attempt: Attempt) -> list[Part]:
        """Produce every row, and collect what was acknowledged."""
        placed = nullcontext() if self._state is None else self._state.placed()
        with self._calls.errors(), placed:
            return self._writer.write(rows, attempt)

    def _ahead(self, rows: Rows, attempt: Attempt) -> Companion | None:
        """What is sent of progress beside the rows. Only where the driver writes them, and has done so in little time
        in the last batch: while rows are computed for long, or state is restored, the transaction should not have begun
        yet, because its timeout would count."""
        source = attempt.source
        if not isinstance(rows, FetchedRows) or not source.max_rows or self._watch.looks_again(source):
            return None
        if not self._is_quick:
            return None
        if self._state is None:
            deadline = self._writer.deadline("writing progress")
            return self._delivery.ahead(
                lambda topics: self._progress_of(attempt, tuple(sorted(topics))), source.end, deadline
            )
        return self._delivery.ahead(None, source.end, self._writer.deadline("writing progress"))

    def _audit(self, rows: Rows, parts: list[Part], batch: int) -> Audit:
        """One writer per partition, one attempt of every task and stage, all rows acknowledged (I3, I4)."""
        checked = [audit_part(rows, part, flow=self._names.flow, batch=batch) for part in parts]
        if self._state is not None:
            self._state.audit()
        self._calls.check()
        return combined(checked, self._tables, flow=self._names.flow, batch=batch)

    def _outputs(self, checked: Audit) -> tuple[str, ...]:
        return tuple(sorted(checked.partitions.keys() - self._tables))

    @property
    def _tables(self) -> set[str]:
        """Topics that hold state: they are no outputs."""
        return set() if self._state is None else self._state.topics

    def _move_progress(self, attempt: Attempt, outputs: tuple[str, ...]) -> Progress:
        with timed(attempt.summary, "progress"):
            progress = self._progress(attempt, outputs)
        hooks.at("progress", where="driver", flow=self._names.flow, batch=attempt.batch)
        return progress

    def _progress(self, attempt: Attempt, outputs: tuple[str, ...]) -> Progress:
        """Progress record and source offsets, in the same transaction."""
        deadline = self._writer.deadline("writing progress")
        return self._delivery.write_progress(self._progress_of(attempt, outputs), attempt.source.end, deadline)

    def _progress_of(self, attempt: Attempt, outputs: tuple[str, ...]) -> Progress:
        end = attempt.source.end
        progress = replace(
            self.progress,
            batch_id=attempt.batch,
            offsets={**_plain(self.progress.offsets), **end},
            epochs=self._watch.epochs(attempt.source, self.progress.epochs),
            checkpoint=(
                None if self._numbering is None else self._numbering.current(has_run=not self._delivery.progress_first)
            ),
            outputs=outputs,
            producer_id=attempt.producer.producer_id,
            producer_epoch=attempt.producer.producer_epoch,
            driver=self._driver,
            elsewhere=self._elsewhere,
            time_ms=clock_ms(),
        )
        left = self._state is not None and self._state.leaves_timers()
        progress = replace(progress, handover=handover.after(self.progress, progress.offsets, timers_left=left))
        progress = self._joins.progress(progress)
        return progress if self._state is None else self._state.progress(progress)

    def _end(self, progress: Progress, attempt: Attempt, meanwhile: Callable[[], None] | None = None) -> None:
        """EndTxn decides the batch. If its outcome stays unknown, the flow ends, and the next start finds out."""
        try:
            deadline = Deadline(_END_SECONDS, f"learning how batch {progress.batch_id} ended")
            outcome = self._delivery.end(deadline, meanwhile)
        except (DeadlineExceededError, BrokerUnreachableError, AuthenticationFailedError) as error:
            raise DeadlineExceededError(
                "The outcome of the commit is not known: the coordinator does not answer",
                detail=f"{error.what}; {error.detail}",
                next_step="start the flow again when the brokers are back: it finds the outcome and continues there",
            ) from error
        if outcome is Outcome.ABORTED:
            raise batch_errors.timed_out(attempt.open_s, self._options.transaction_timeout_s)
        if outcome is Outcome.FENCED:
            raise self._fenced(f"while batch {progress.batch_id} was being committed")

    def _on_commit(self, progress: Progress, checked: Audit, summary: BatchSummary) -> None:
        self.progress = progress
        self._stores_open = summary.path == "driver"
        quick_s = _QUICK * self._options.transaction_timeout_s
        self._is_quick = self._stores_open and summary.seconds.get("write", math.inf) < quick_s
        summary.records, summary.nbytes, summary.written = checked.records, checked.nbytes, checked.written
        summary.max_rss_kib = checked.max_rss_kib
        if self._state is not None:
            self._state.on_commit(summary)
        self._calls.on_commit(summary)
        if self._late_rows is not None:
            self._late_rows.on_commit(summary.batch, summary.dropped)
        self._writer.on_commit(checked, summary)

    def abort(self, problem: BaseException, batch: int) -> None:
        """Nothing of the attempt becomes visible. Late writes of it are rejected, because there is a newer epoch.

        Raises:
            FencedError: it turns out that a newer driver owns the flow.
        """
        try:
            self._delivery.abort(self._writer.deadline(f"aborting batch {batch}"))
        except FencedError as error:
            raise self._fenced(f"while batch {batch} was being written", error.detail) from error
        except OnceflowError as error:
            log.warning("flow %s: abort of batch %d failed, too: %s", self._names.flow, batch, error.what)
            raise problem from error
        hooks.at(hooks.ABORTED, where="driver", flow=self._names.flow, batch=batch, error=problem)

    def learn(self, problem: BaseException) -> bool:
        """Learn from the failure for the next attempt. Returns whether the failed attempt is not counted: it had to
        bring local copies up to date, which stay, or ran where they are not."""
        self._believe({**self._elsewhere, **dict.fromkeys(placement.found_elsewhere(problem), clock_ms())})
        read = self._joins.failed(problem, self._writer.deadline)
        restored = self._state is not None and self._state.failed(problem)
        cheap = isinstance(problem, TransactionTimeoutError | DeadlineExceededError | MisplacedError)
        return read or (restored and cheap)

    def forget_attempt(self, rows: Rows) -> None:
        """Undo what the attempt did to Spark's own state."""
        self._joins.forget_attempt(rows)
        if self._numbering is not None and isinstance(rows, DataFrame):
            self._numbering.forget_attempt(rows)

    def is_lost(self, rows: Rows | None, summary: BatchSummary, problem: BaseException) -> bool:
        """With at_most_once: whether progress has moved already. Then rows that were not written are lost."""
        if not self._delivery.progress_first or self.progress.batch_id != summary.batch:
            return False
        summary.lost = True
        self._writer.on_lost()
        log.error(
            "flow %s: batch %d failed after its progress was written; some or all of its source records (at most %d) "
            "are lost, as at_most_once allows: %s",
            self._names.flow,
            summary.batch,
            summary.max_rows,
            in_short(problem),
        )
        if self._numbering is not None and isinstance(rows, DataFrame):
            # Spark's next batch needs the state of this one, which the failure may have left incomplete.
            self.forget_attempt(rows)
            self.drain(rows)
        return True

    def _fenced(self, when: str, detail: str = "") -> FencedError:
        return batch_errors.fenced(
            self._names.flow, when, detail or f"transactional id {self._delivery.transactional_id}"
        )


def _plain(offsets: Offsets) -> TopicOffsets:
    return {topic: dict(partitions) for topic, partitions in offsets.items()}

"""One micro-batch is one Kafka transaction: the steps of a batch, in order.

    plan -> begin -> write -> audit -> progress -> end      (init comes before, settle with the next batch)

``BatchSink`` is what foreachBatch calls. ``_attempt`` is the commit, written as its numbered steps; everything
before ``end`` can fail, is aborted and is run again under a new epoch; after ``end`` nothing can be undone. Weaker
guarantees take the same steps without the transaction, see ``delivery.py``.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import Outcome
from onceflow.driver import progress_log
from onceflow.driver.audit import Audit, audit, together
from onceflow.driver.delivery import Delivery
from onceflow.driver.late_rows import LateRows
from onceflow.driver.numbering import Numbering
from onceflow.driver.offset_log import SourceRange, check_contiguous, read_range
from onceflow.driver.pace import Pace
from onceflow.driver.state_step import Outgoing, Part, StateStep
from onceflow.driver.targets import load_targets
from onceflow.errors import (
    AuthenticationFailedError,
    BatchAbortedError,
    BrokerUnreachableError,
    DeadlineExceededError,
    FencedError,
    OnceflowError,
    TransactionTimeoutError,
)
from onceflow.planning.options import BatchSummary, SinkOptions
from onceflow.planning.ownership import Columns, prepare
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.names import Names, OwnTopics
from onceflow.protocol.progress import Progress
from onceflow.spark import jvm
from onceflow.spark.checkpoint_files import Folder
from onceflow.spark.collect import collect
from onceflow.spark.import_errors import cannot_import
from onceflow.task import reports
from onceflow.task.row_writer import (
    Routing,
    Target,
    TaskPlace,
    WriteOrder,
    WriteTask,
    write_rows,
)

log = logging.getLogger("onceflow.sink")

# A rerun may help: the next attempt has a new epoch and a new clock.
_WORTH_A_RERUN = (
    BatchAbortedError,
    TransactionTimeoutError,
    DeadlineExceededError,
    BrokerUnreachableError,
    FencedError,  # as tasks see a timeout; ``_abort`` has found out that nobody else owns the id
)
_METADATA_AGE_S_MAX = 30.0
_END_SECONDS = 120.0
# Connecting and finding a leader may take longer than a short transaction timeout; the broker enforces that one.
_MIN_PATIENCE_S = 30.0
_TURN_S = 0.05  # how often a batch that may not begin yet looks whether the query is stopped
_SMALL_BATCH_ROWS = 8_000
# Above this a batch is not written by the driver, however few its rows.
_DRIVER_BYTES_MAX = 8_000_000
_TASK_BYTES = 16_000_000
_GUESSED_ROW_BYTES = 1_000
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ADAPTIVE = "spark.sql.adaptive.enabled"
_NO_ROUTING = Routing("key", 1, False)  # of an order whose stages decide for themselves


class BatchSink:
    """Writes the batches of one query. Called by Spark on one thread.

    Args:
        progress: committed progress as read after ``init``; the sink keeps it current.
        columns: what the rows have, checked. cores: how many tasks Spark runs at once, now: asked for every batch,
            because executors come and go.
        delivery: what the guarantee makes of the steps.
        checkpoint: folder of the query's checkpoint (Spark's offset log is read from there).
        numbering: how Spark's batch numbers and progress go together, when the checkpoint is kept; None: it is
            scratch.
        source_starts: where partitions that progress does not know may start.
        state: the process steps of the query, if it has any.
        before_first: called before the first batch begins; may raise.
    """

    def __init__(
        self,
        *,
        names: Names,
        settings: ClientSettings,
        cluster: Cluster,
        delivery: Delivery,
        progress: Progress,
        options: SinkOptions,
        columns: Columns,
        cores: Callable[[], int],
        checkpoint: Folder,
        numbering: Numbering | None = None,
        source_starts: dict[str, dict[int, int]],
        source_partitions: dict[str, int],
        state: StateStep | None = None,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._names = names
        self._before_first = before_first
        self._state = state
        self._settings = settings
        self._cluster = cluster
        self._delivery = delivery
        self._numbering = numbering
        self._options = options
        self._checkpoint = checkpoint
        self._source_starts = source_starts
        self._source_partitions = source_partitions
        self._targets: dict[str, Target] = {}
        self._targets_at = float("-inf")
        self._all_targets: dict[str, Target] = {}  # of all topics, for rows that name theirs behind a process step
        self._all_targets_at = float("-inf")
        self._columns = columns
        self._cores = cores
        self._row_bytes: float | None = None  # of the last batches; unknown at first
        self._rows_out = 1.0  # rows written for one read, at most so far: a query may explode rows
        self._late_rows: LateRows | None = None
        if options.late is not None and numbering is not None:
            self._late_rows = LateRows(names.flow, options.late, numbering.rows_dropped)
        self._pace = Pace(names.flow, options.trigger_s)
        self._unsettled: int | None = None
        self._undecided = False
        self._begun_at = 0.0
        self._identity = ProducerIdAndEpoch(-1, -1)
        self.flow = names.flow
        self.guarantee = options.guarantee
        self.progress = progress
        self.failure: BaseException | None = None
        self.stopping = False
        self.over = False  # Spark has ended the query
        self.awaited = 0  # how many wait for the query to end: they will be told its failure
        self.turn = threading.Lock()  # of the batch under way
        self.held = threading.Event()  # no further batch begins
        self.history: collections.deque[BatchSummary] = collections.deque(maxlen=200)
        self.drained: list[int] = []  # batches that were committed before this run and had to be run again

    # ---- called by Spark -----------------------------------------------------------------------------

    def __call__(self, df: DataFrame, spark_batch_id: int) -> None:
        batch = self.progress.batch_id + 1
        while self.held.is_set() or not self.turn.acquire(blocking=False):
            if self.stopping:
                raise self._stopped(None, batch, stopped=True)
            time.sleep(_TURN_S)
        started = time.monotonic()
        try:
            self._run(df, spark_batch_id, batch)
            self._pace.batch(time.monotonic() - started)
        # The traceback goes to Spark, which parses it with a regular expression that overflows the stack on long
        # ones (a cause with a Java stack trace in its text): so causes are logged, not chained.
        except OnceflowError as error:
            log.debug("the batch failed here", exc_info=error)
            self.failure = error.locate(flow=self._names.flow, batch=batch).with_traceback(None)
            if not self.awaited and not self.stopping:
                log.error("%s", self.failure)
            raise self.failure from None
        except (PySparkException, Py4JError) as error:
            stopped = self._stopped(error, batch, stopped=self._is_stopped(df, error))
            log.debug("the batch failed here", exc_info=error)
            if not self.stopping:  # else the query has not failed
                self.failure = stopped
            raise stopped from None
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.turn.release()

    def ended(self) -> None:
        """The query is over."""
        if self._late_rows is not None:
            self._late_rows.tell()

    def _run(self, df: DataFrame, spark_batch_id: int, batch: int) -> None:
        self._settle()
        if not self.history:
            _set_session(df)
            self._before_first()
        summary = BatchSummary(batch, 0)
        with self._timed(summary, "plan"):
            source, is_committed = self._plan(spark_batch_id, batch)
        if is_committed:
            log.warning(
                "flow %s: batch %d (%d in the checkpoint) is committed already: it is run again for its state only, "
                "nothing of it is written",
                self._names.flow,
                self.progress.batch_id,
                spark_batch_id,
            )
            self._drain(df)
            self.drained.append(self.progress.batch_id)
            return
        if self._state is None and self._numbering is None and not source.max_rows:
            return  # Spark's first batch, with nothing to read: neither outputs nor progress would change
        if self._state is not None:
            self._state.planned(source)
            if not source.max_rows and not self._state.due(progress_log.now_ms()):
                return  # woken up by the clock, and nothing is due
        self._run_planned(df, batch, source, summary)
        self._fire_left(df, source)

    def _fire_left(self, df: DataFrame, source: SourceRange) -> None:
        """Batches without records, for timers that are due and that the batch was not allowed to fire.

        Spark would begin its next batch when a source has news, up to a second later.
        """
        state = self._state
        if state is None or not state.are_timers_left():
            return
        if source.max_rows:
            df = df.sparkSession.createDataFrame(df.sparkSession.sparkContext.emptyRDD(), df.schema)
        nothing = replace(source, start=source.end)
        until = time.monotonic() + self._options.timers_s
        while state.are_timers_left() and not self.stopping and time.monotonic() < until:
            batch = self.progress.batch_id + 1
            self._settle()
            hooks.at("plan", where="driver", flow=self._names.flow, batch=batch)
            self._refresh_targets()
            try:
                self._run_planned(df, batch, nothing, BatchSummary(batch, 0))
            except OnceflowError as error:
                error.locate(flow=self._names.flow, batch=batch)
                raise
            if self.progress.batch_id != batch:
                return  # the timers set themselves again: nothing has changed

    def _run_planned(self, df: DataFrame, batch: int, source: SourceRange, summary: BatchSummary) -> None:
        """Attempts, until one is committed."""
        summary.max_rows = source.max_rows
        last: BaseException | None = None
        cause: BaseException | None = None
        failed = 0
        while failed < self._options.max_attempts:
            summary.attempts += 1
            attempt_at = time.monotonic()
            try:
                if summary.attempts > 1 and self._numbering is not None:
                    self._numbering.forget_attempt(df)
                committed = self._attempt(df, batch, source, summary)
            except (OnceflowError, PySparkException, Py4JError) as problem:
                if self._undecided:
                    raise
                begun = self._begun_at >= attempt_at
                if cause is not None and not begun and isinstance(problem, DeadlineExceededError):
                    problem = _after(problem, cause)  # it could not begin, because of what the one before met
                self._abort(problem, batch)
                missing = None if isinstance(problem, OnceflowError) else cannot_import(problem)
                if missing is not None:
                    raise missing from None  # no rerun helps
                if isinstance(problem, OnceflowError) and not isinstance(problem, _WORTH_A_RERUN):
                    raise
                if self._is_stopped(df, problem):
                    raise
                if isinstance(problem, FencedError):  # tasks met a newer epoch, and nobody else owns the id
                    problem = self._timed_out(time.monotonic() - self._begun_at)
                last = problem
                cause = problem if begun else cause
                if self.progress.batch_id == batch:
                    self._lose(summary, problem)
                    if self._numbering is not None:
                        # Spark's next batch needs the state of this one, which the failure may have cut short.
                        self._numbering.forget_attempt(df)
                        self._drain(df)
                    return
                restored = self._state is not None and self._state.failed(problem)
                if restored and isinstance(problem, TransactionTimeoutError | DeadlineExceededError):
                    # Not counted: a restore may take longer than a transaction may be open, on each host anew. What
                    # was restored stays, so the next attempt gets farther.
                    log.warning(
                        "flow %s: batch %d aborted, its tasks had local copies to bring up to date first; it begins "
                        "again with them: %s",
                        self._names.flow,
                        batch,
                        _in_short(problem),
                    )
                    continue
                failed += 1
                if failed < self._options.max_attempts:  # else the error says so
                    log.warning(
                        "flow %s: batch %d aborted (attempt %d of %d): %s",
                        self._names.flow,
                        batch,
                        failed,
                        self._options.max_attempts,
                        _in_short(problem),
                    )
            except Exception as problem:  # not ours and not Spark's: no rerun, but no open transaction either
                if not self._undecided:
                    self._abort(problem, batch)
                raise
            else:
                if not committed:
                    return
                self.history.append(summary)
                hooks.at("end", where="driver", flow=self._names.flow, batch=batch)
                return
        raise self._given_up(last, batch)

    def _attempt(self, df: DataFrame, batch: int, source: SourceRange, summary: BatchSummary) -> bool:
        """One transaction, from its first epoch to its end. False: there was nothing to commit."""
        flow = self._names.flow
        with self._timed(summary, "begin"):
            identity = self._begin(df, batch, summary)
        hooks.at("begin", where="driver", flow=flow, batch=batch, identity=identity, source=source)
        if self._late_rows is not None:
            self._late_rows.begin(again=summary.attempts > 1)
        self._begun_at = time.monotonic()
        progress: Progress | None = None
        if self._delivery.progress_first:
            progress = self.progress = self._move_progress(batch, source, (), summary)
        with self._timed(summary, "write"):
            parts = self._write(df, batch, identity, source, summary)
        hooks.at("write", where="driver", flow=flow, batch=batch)
        with self._timed(summary, "audit"):
            checked = self._audit(df, parts, batch)
            self._delivery.written(report for part in parts for report in part.reports)
            summary.dropped = 0 if self._late_rows is None else self._late_rows.check(batch)
        if self._state is not None and not source.max_rows and not checked.partitions:
            self._state.on_noop()
            return False  # timers were looked at; nothing was sent under this epoch
        hooks.at("audit", where="driver", flow=flow, batch=batch)
        if progress is None:
            progress = self._move_progress(batch, source, self._outputs(checked), summary)
        with self._timed(summary, "end"):
            self._end(progress)
        self._adopt(progress, checked, summary)
        return True

    # ---- the steps -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The previous batch is committed, and Spark has logged it: whoever keeps local state may apply it."""
        if self._unsettled is not None:
            hooks.at("settle", where="driver", flow=self._names.flow, batch=self._unsettled)
            self._unsettled = None

    def _plan(self, spark_batch_id: int, batch: int) -> tuple[SourceRange, bool]:
        """The source range of the batch, which must start where progress ends (I2); or whether it is committed."""
        topics = None if self._numbering is None else self._source_partitions
        source = read_range(self._checkpoint, spark_batch_id, topics)
        if self._numbering is not None:
            if self._numbering.is_committed(spark_batch_id, source, self.progress):
                hooks.at("plan", where="driver", flow=self._names.flow, batch=self.progress.batch_id)
                return source, True
            source = self._numbering.bridged(source, self.progress)
        check_contiguous(
            source.start, _plain(self.progress.offsets), self._source_starts, flow=self._names.flow, batch=batch
        )
        if self._numbering is not None:
            self._numbering.planned(spark_batch_id, source)
        self._refresh_targets()
        hooks.at("plan", where="driver", flow=self._names.flow, batch=batch)
        return source, False

    def _drain(self, df: DataFrame) -> None:
        """Run a batch for its state and watermark only.

        It has to run: Spark's next batch needs the state this one makes, and takes its watermark from the plan that
        was executed (Spark: MicroBatchExecution, WatermarkTracker).
        """
        df.write.format("noop").mode("append").save()

    def _begin(self, df: DataFrame, batch: int, summary: BatchSummary) -> ProducerIdAndEpoch:
        """A fresh epoch for this attempt (I3), where the tasks of this thread's jobs can read it."""
        identity = self._delivery.begin(self._deadline("beginning the transaction"))
        self._identity = identity
        described = {"batch": batch, "producer_id": identity.producer_id, "producer_epoch": identity.producer_epoch}
        df.sparkSession.sparkContext.setLocalProperty("onceflow.transaction", json.dumps(described))
        if self._state is not None:
            owner = str(self._delivery.transactional_id), identity
            self._state.prepare(df, self._settings, owner, again=summary.attempts > 1)
            self._state.begin(batch, identity, progress_log.now_ms())
        return identity

    def _write(
        self, df: DataFrame, batch: int, identity: ProducerIdAndEpoch, source: SourceRange, summary: BatchSummary
    ) -> list[Part]:
        """Produce every row under the identity and collect what was acknowledged."""
        expected_rows = self._expected_rows(source)
        expected_bytes = expected_rows * (self._row_bytes or _GUESSED_ROW_BYTES)
        outgoing = Outgoing(df, self._columns, self._options.topic, "")
        if self._state is not None:
            order = self._order(batch, identity, outgoing.topic, self._targets)
            if self._state.fused:
                summary.path, parts = self._state.write(
                    df,
                    max_rows=source.max_rows,
                    order=order,
                    cluster=self._cluster,
                    on_driver=summary.attempts == 1 and expected_bytes <= 2 * _DRIVER_BYTES_MAX,
                    reads_little=self._options.reads_little,
                )
                return parts
            outgoing = self._state.outgoing(df, max_rows=source.max_rows, order=order)
        small = self._options.small_batch_rows
        on_driver = (
            expected_rows <= (_SMALL_BATCH_ROWS if small is None else small)
            and expected_bytes <= _DRIVER_BYTES_MAX
            and summary.attempts == 1
        )
        cores = 1 if on_driver else self._cores()
        if not math.isfinite(expected_rows):
            expected_rows, expected_bytes = 0.0, float(cores * _TASK_BYTES)  # not known: all cores
        targets = self._targets if outgoing.topic == self._options.topic else self._every_target()
        prepared = prepare(
            outgoing.df,
            outgoing.columns,
            partitioner=self._options.partitioner,
            topic=outgoing.topic,
            targets=targets,
            source=self._source_partitions,
            max_tasks=max(1, min(cores, round(expected_bytes / _TASK_BYTES + 0.5))),
            on_driver=on_driver,
            # One task for all partitions of Spark's state would be slow, however few rows come out of them.
            keep_tasks=self._state is not None or self._options.stateful,
        )
        order = self._order(batch, identity, outgoing.topic, targets, prepared.routing)
        if on_driver:
            rows = collect(prepared.df, interpreted=self._options.reads_little and not outgoing.tasks)
            parts = [Part(write_rows(order, TaskPlace("driver", -1, 0), rows, self._cluster), None, False)]
        else:
            collected = prepared.df.mapInArrow(WriteTask(order), reports.SPARK_SCHEMA).collect()
            parts = [Part(reports.from_rows(collected), prepared.routing.tasks, prepared.shuffled)]
        written_by = "driver" if on_driver else f"{prepared.routing.tasks} tasks"
        summary.path = f"{outgoing.tasks} + {written_by}" if outgoing.tasks else written_by
        return parts if self._state is None else parts + self._state.gather(order, self._cluster)

    def _order(
        self,
        batch: int,
        identity: ProducerIdAndEpoch,
        topic: str | None,
        targets: Mapping[str, Target],
        routing: Routing = _NO_ROUTING,
    ) -> WriteOrder:
        """What the tasks of a stage are told."""
        tables = set() if self._state is None else self._state.topics
        return WriteOrder(
            flow=self._names.flow,
            batch=batch,
            settings=self._settings,
            transactional_id=self._delivery.transactional_id,
            identity=identity,
            sequences=self._delivery.sequences,
            compression=self._options.compression,
            topic=topic,
            targets=targets,
            routing=routing,
            transaction_version=self._cluster.transaction_version,
            deadline_s=self._task_seconds,
            own_topics=OwnTopics(frozenset(self._source_partitions), frozenset(tables)),
            faults=hooks.configured(),
        )

    def _every_target(self) -> dict[str, Target]:
        """All topics there are, for rows that name theirs; as old as `_targets` at most."""
        if time.monotonic() - self._all_targets_at >= _METADATA_AGE_S_MAX:
            self._all_targets = load_targets(self._cluster, None, self._deadline("reading topic metadata"))
            self._all_targets_at = time.monotonic()
        return self._all_targets

    def _expected_rows(self, source: SourceRange) -> float:
        """At most so many rows will come out of a batch, as far as one can know; infinite: one cannot."""
        rows = source.max_rows * self._rows_out
        if self._numbering is None or not (self._options.stateful or source.others):
            return rows
        # Windows close, joined rows expire, other sources are not counted: the last batch is the only hint, and what
        # Spark keeps may come out at once.
        if not self.history:
            return math.inf
        return rows + self._numbering.rows_kept() + 2 * self.history[-1].records

    def _audit(self, df: DataFrame, parts: list[Part], batch: int) -> Audit:
        """One writer per partition, one attempt of every task and stage, all rows acknowledged (I3, I4)."""
        checked = [self._audit_part(df, part, batch) for part in parts]
        if self._state is not None:
            self._state.audit()
        tables = set() if self._state is None else self._state.topics
        return together(checked, tables, flow=self._names.flow, batch=batch)

    def _audit_part(self, df: DataFrame, part: Part, batch: int) -> Audit:
        written = part.reports
        stages = {report.stage for report in written}
        attempts = jvm.stage_attempts(df.sparkSession, stages) if part.shuffled else {}
        if part.tasks is not None and any(isinstance(report.error, BatchAbortedError) for report in written):
            # A second attempt refused to write. Why the first one failed is what the user has to know.
            why = jvm.failed_task_message(df.sparkSession, stages)
            written = [report.explained(why) for report in written]
        return audit(written, tasks=part.tasks, stage_attempts=attempts, flow=self._names.flow, batch=batch)

    def _outputs(self, checked: Audit) -> tuple[str, ...]:
        return tuple(sorted(checked.partitions.keys() - (set() if self._state is None else self._state.topics)))

    def _move_progress(
        self, batch: int, source: SourceRange, outputs: tuple[str, ...], summary: BatchSummary
    ) -> Progress:
        with self._timed(summary, "progress"):
            progress = self._progress(batch, source, outputs)
        hooks.at("progress", where="driver", flow=self._names.flow, batch=batch)
        return progress

    def _progress(self, batch: int, source: SourceRange, outputs: tuple[str, ...]) -> Progress:
        """Progress record and source offsets, in the same transaction."""
        deadline = self._deadline("writing progress")
        progress = replace(
            self.progress,
            batch_id=batch,
            offsets={**_plain(self.progress.offsets), **source.end},
            checkpoint=(
                None if self._numbering is None else self._numbering.current(has_run=not self._delivery.progress_first)
            ),
            outputs=outputs,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            time_ms=progress_log.now_ms(),
        )
        if self._state is not None:
            progress = self._state.progress(progress)
        self._delivery.write_progress(progress, source.end, deadline)
        return progress

    def _end(self, progress: Progress) -> None:
        """EndTxn decides the batch. Only a known outcome leads anywhere."""
        try:
            outcome = self._delivery.end(Deadline(_END_SECONDS, f"learning how batch {progress.batch_id} ended"))
        except (DeadlineExceededError, BrokerUnreachableError, AuthenticationFailedError) as error:
            self._undecided = True
            raise DeadlineExceededError(
                "The outcome of the commit is not known: the coordinator does not answer",
                detail=f"{error.what}; {error.detail}",
                next_step="start the flow again when the brokers are back: it finds out, and goes on exactly there",
            ) from error
        if outcome is Outcome.ABORTED:
            raise self._timed_out(time.monotonic() - self._begun_at)
        if outcome is Outcome.FENCED:
            self._undecided = True
            raise self._fenced(f"while batch {progress.batch_id} was being committed")

    def _adopt(self, progress: Progress, checked: Audit, summary: BatchSummary) -> None:
        self.progress = progress
        self._unsettled = progress.batch_id
        if self._state is not None:
            self._state.adopt()
        if self._late_rows is not None:
            self._late_rows.adopt(summary.batch, summary.dropped)
        summary.records, summary.nbytes = checked.records, checked.nbytes
        summary.max_rss_kib = checked.max_rss_kib
        if checked.records:
            self._row_bytes = checked.nbytes / checked.records
            self._rows_out = max(self._rows_out, checked.records / max(1, summary.max_rows))
        if self._state is not None:
            summary.dead_letters, summary.late = self._state.counted("dead_letters"), self._state.counted("late")
            summary.records -= summary.dead_letters + summary.late

    # ---- when it goes wrong --------------------------------------------------------------------------

    def _abort(self, problem: BaseException, batch: int) -> None:
        """Nothing of the attempt becomes visible; late writes of it meet a newer epoch.

        Raises:
            FencedError: it turns out that a newer driver owns the flow.
        """
        try:
            self._delivery.abort(self._deadline(f"aborting batch {batch}"))
        except FencedError as error:
            raise self._fenced(f"while batch {batch} was being written", error.detail) from error
        except OnceflowError as error:
            log.warning("flow %s: abort of batch %d failed, too: %s", self._names.flow, batch, error.what)
            raise problem from error
        hooks.at(hooks.ABORTED, where="driver", flow=self._names.flow, batch=batch)

    def _lose(self, summary: BatchSummary, problem: BaseException) -> None:
        """At most once: progress has moved, so what was not written stays unwritten."""
        self._unsettled = summary.batch
        summary.lost = True
        self.history.append(summary)
        log.error(
            "flow %s: batch %d failed after progress had moved; of its up to %d source records some or all are lost, "
            "as at_most_once allows: %s",
            self._names.flow,
            summary.batch,
            summary.max_rows,
            _in_short(problem),
        )

    def _fenced(self, when: str, detail: str = "") -> FencedError:
        return FencedError(
            f"A newer driver of flow {self._names.flow!r} has taken over, {when}",
            flow=self._names.flow,
            detail=detail or f"transactional id {self._delivery.transactional_id}",
            next_step="see who has started it twice: a flow has one driver; nothing was lost or doubled",
        )

    def _timed_out(self, open_s: float) -> TransactionTimeoutError:
        limit = self._options.transaction_timeout_s
        return TransactionTimeoutError(
            f"The broker had ended the transaction: it was open for {open_s:.1f} s, its timeout is {limit:g} s",
            next_step="nothing is lost, the batch runs again; if it repeats, lower max_records_per_batch of Flow.read "
            "or raise transaction_timeout of Flow.write (broker limit: transaction.max.timeout.ms)",
        )

    def _is_stopped(self, df: DataFrame, problem: BaseException) -> bool:
        """Whether the batch has failed because somebody stops the query, its jobs or Spark."""
        return self.stopping or jvm.was_cancelled(problem) or jvm.is_being_stopped(df.sparkSession)

    def _stopped(self, problem: BaseException | None, batch: int, *, stopped: bool) -> BatchAbortedError:
        what = "the query is being stopped" if stopped else "Spark failed"
        return BatchAbortedError(
            f"Batch {batch} was aborted: {what}; nothing of it is visible",
            flow=self._names.flow,
            batch=batch,
            detail="" if problem is None else jvm.first_line(problem),
            next_step="start the flow again: it continues at this batch",
        )

    def _given_up(self, last: BaseException | None, batch: int) -> OnceflowError:
        if isinstance(last, TransactionTimeoutError):
            return last
        return BatchAbortedError(
            f"Batch {batch} was aborted {self._options.max_attempts} times; nothing of it is visible",
            flow=self._names.flow,
            batch=batch,
            detail="" if last is None else _in_short(last),
            next_step="mend the cause and start the flow again: it continues at this batch",
        )

    # ---- helpers -------------------------------------------------------------------------------------

    def _deadline(self, what: str) -> Deadline:
        return Deadline(max(self._options.transaction_timeout_s, _MIN_PATIENCE_S), f"{what} (flow {self._names.flow})")

    def _refresh_targets(self) -> None:
        """Partition counts and size limits of the output topics; all tasks of a batch see the same."""
        if time.monotonic() - self._targets_at < _METADATA_AGE_S_MAX:
            return
        more = None if self._state is None else self._state.written_topics
        deadline = self._deadline("reading topic metadata")
        self._targets = load_targets(self._cluster, self._options.topic, deadline, more=more)
        self._targets_at = time.monotonic()

    @property
    def _task_seconds(self) -> float:
        """How long a task may take over its rows."""
        return max(self._options.transaction_timeout_s, _MIN_PATIENCE_S)

    @contextlib.contextmanager
    def _timed(self, summary: BatchSummary, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            summary.seconds[step] = summary.seconds.get(step, 0.0) + time.monotonic() - started


def _plain(offsets: Any) -> dict[str, dict[int, int]]:
    return {topic: dict(partitions) for topic, partitions in offsets.items()}


def _set_session(df: DataFrame) -> None:
    """Settings of the query's own clone of the session.

    Adaptive execution runs every stage in front of a shuffle as a job of its own, as soon as somebody asks for the RDD
    of a plan: rows were read and shuffled twice. And it leaves out tasks that have no rows, while every task has
    something to report. A batch is one job, whose tasks are known before it runs.

    Arrow batches are kept small, so that workers need little memory for large rows, too; 4 MiB is no slower. Here a
    value the user has set stays.
    """
    conf = df.sparkSession.conf
    conf.set(_ADAPTIVE, "false")
    if conf.get(_ARROW_BYTES, None) is None:
        conf.set(_ARROW_BYTES, str(4 * 1024 * 1024))


def _in_short(problem: BaseException) -> str:
    if isinstance(problem, OnceflowError):
        return f"{problem.what} ({problem.detail})" if problem.detail else problem.what
    return jvm.first_line(problem)


def _after(problem: OnceflowError, earlier: BaseException) -> OnceflowError:
    fields = problem.fields()
    fields["detail"] = f"{fields['detail']}; the attempt before failed: {_in_short(earlier)}"
    return type(problem)(problem.what, **fields)

"""Brings rows to an external sink, and reports: in a task, or in the driver for a batch that it has read."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from onceflow import hooks, user_code
from onceflow.errors import BatchAbortedError, EnvironmentUnusableError, OnceflowError, OptionError
from onceflow.external.sink import BatchAttempt, ExternalSink
from onceflow.logs import log_context
from onceflow.messages import Report, TaskInfo, TaskReport, report_row
from onceflow.state.api import user_errors
from onceflow.task import task_logs


@dataclass(frozen=True)
class ExternalOrder:
    """All that a task needs to write its rows.

    Args:
        flow: its name. The attempt has its identity.
        faults: rules of the driver's environment (tests only), see onceflow.hooks.
    """

    sink: ExternalSink
    flow: str
    attempt: BatchAttempt
    faults: str | None = None


class ExternalTask:
    """The function given to ``mapInArrow``."""

    def __init__(self, order: ExternalOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise RuntimeError("the code of a task was called outside a Spark task")
        order = self.order
        hooks.configure(order.faults)
        hooks.at("begin", where="task", flow=order.flow, batch=order.attempt.batch, task=context.partitionId())
        info = TaskInfo("task", context.partitionId(), context.attemptNumber(), context.stageId())
        task_logs.use_format()
        with log_context.within(flow=order.flow, batch=order.attempt.batch, task=info.task):
            report = write_external(order, info, batches)
        yield report_row(report)


def write_external(order: ExternalOrder, info: TaskInfo, batches: Iterable[pa.RecordBatch]) -> TaskReport:
    """Write rows and report. Errors of onceflow are reported, not raised: so the driver gets the original class."""
    started = time.monotonic()
    rows = _Rows(batches)
    receipt = b""
    error: OnceflowError | None = None
    attempt = order.attempt
    try:
        if info.attempt > 0:
            raise BatchAbortedError(
                "Spark ran a task twice in one attempt of the batch",
                flow=order.flow,
                batch=attempt.batch,
                detail=f"task {info.task} is at attempt {info.attempt}",
                next_step="none: the batch is run again",
            )
        # The stage too: after lost shuffle files Spark may run a task again in another one.
        receipt = _written(order, f"{info.stage}-{info.task}", rows)
        _check_receipt(receipt, order)
        if info.where == "task":  # the driver announces the step itself
            hooks.at("write", where="task", flow=order.flow, batch=attempt.batch, task=info.task)
    except OnceflowError as problem:
        error = problem
    except Exception as problem:
        if attempt.attempt < 2 or rows.failed is not None or not user_code.repeats(problem):
            raise
        error = EnvironmentUnusableError(
            f"{order.sink.target} has failed at the step write: {user_code.in_words(problem)}",
            flow=order.flow,
            batch=attempt.batch,
            detail=user_errors.line_of(problem),
            next_step="correct the sink, or what it writes to. Then start the flow again: it continues at this batch",
        )
    report = Report(
        task=info.task,
        attempt=info.attempt,
        stage=info.stage,
        topic=order.sink.target,
        partition=info.task,
        base_offset=-1,
        count=rows.count,
        nbytes=rows.nbytes,
        rows=rows.count,
        seconds=time.monotonic() - started,
        rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        error=error,
    )
    return TaskReport((report,), returned=(receipt,))


class _Rows:
    """Rows on their way to a sink.

    Attributes:
        count, nbytes: how many it has taken, and their size. failed: why the next one could not be made.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches
        self.count = self.nbytes = 0
        self.failed: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                self.count += batch.num_rows
                self.nbytes += batch.nbytes
                yield batch
        except Exception as problem:
            self.failed = problem
            raise


def _written(order: ExternalOrder, name: str, rows: _Rows) -> bytes:
    """The receipt of the sink. If a row cannot be made, that is the error, not what the sink makes of it."""
    try:
        return order.sink.write(order.attempt, name, iter(rows))
    except Exception as problem:
        if rows.failed is not None and problem is not rows.failed:
            raise rows.failed from problem
        raise


def _check_receipt(receipt: object, order: ExternalOrder) -> None:
    """Without a receipt, ``commit`` of a sink does not find the rows."""
    if not isinstance(receipt, bytes):
        raise OptionError(
            f"{type(order.sink).__name__}.write returned {type(receipt).__name__}, not bytes",
            flow=order.flow,
            batch=order.attempt.batch,
            next_step='return a receipt, with which commit finds the rows of this task; b"" if it needs none',
        )

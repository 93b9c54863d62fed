"""``Flow.process`` in tasks: state, user code, changelog, and in most flows also the outputs.

A batch runs in one of two ways. *Fused*: the task that processes a partition of the table also writes the outputs. This
requires that they belong to partitions that no other task writes (the same key, and a topic whose partitions can be
divided evenly among the tasks). *Two-stage*: the outputs are rows of a DataFrame again. After a shuffle, the tasks of a
second stage write them. In both cases, the task that processes the partition writes the changelog.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import AccumulatorParam

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged
from onceflow.errors import OnceflowError, OptionError
from onceflow.messages import NotCopartitionedError, StateOrder, TaskInfo, TaskReport, encoded, report_row
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.output_limits import OutputLimits
from onceflow.protocol.partitioners import key_partitions
from onceflow.spark import function_names
from onceflow.state.engine import input_batch
from onceflow.state.spec import StateReport
from onceflow.task import task_logs
from onceflow.task.preparing import is_owner
from onceflow.task.row_writer import Companion, RowWriter, extra_attempt, reports_of, task_info, worker_cluster
from onceflow.task.state_run import StateRun
from onceflow.task.step_outputs import TaskOutputs, output_rows, packed


class Collected(AccumulatorParam[list[bytes]]):
    """An accumulator for encoded `TaskReport`s of tasks whose rows are processed further by other tasks."""

    def zero(self, value: list[bytes]) -> list[bytes]:
        return []

    def addInPlace(self, value1: list[bytes], value2: list[bytes]) -> list[bytes]:
        return value1 + value2


class StepPlaceholder:
    """Stands for a process step in a query's plan. In a batch it is replaced by `RowsTask` or `FusedTask`."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.__name__ = function_names.step_name(table)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise OptionError(
            f"The process step of table {self.table} does not run outside its flow",
            next_step="write the DataFrame with Flow.write(...).start() of the flow that made it",
        )


class FusedTask:
    """The function given to ``mapInArrow`` in the fused case: the tasks of the process step write their outputs."""

    def __init__(self, order: StateOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        info = task_info(self.order.write)
        with task_logs.of_batch(self.order.write, info):
            report = run_fused(self.order, info, batches, worker_cluster(self.order.write.settings))
        yield report_row(report)


class RowsTask:
    """The function given to ``mapInArrow`` in the two-stage case: outputs are returned as rows.

    Args:
        collected: the accumulator for the task's report, see `Collected`.
    """

    def __init__(self, order: StateOrder, collected: Any) -> None:
        self.order = order
        self.collected = collected
        self.__name__ = function_names.step_name(order.spec.table)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        info = task_info(self.order.write)
        cluster = worker_cluster(self.order.write.settings)
        writer = RowWriter(self.order.write, info, cluster)
        with (
            contextlib.closing(StateWork(self.order, info, cluster, writer)) as work,
            task_logs.of_batch(self.order.write, info),
        ):
            yield from work.rows(batches)
            work.finish()
        self.collected.add([encoded(work.report())])


def run_fused(
    order: StateOrder,
    info: TaskInfo,
    batches: Iterable[pa.RecordBatch],
    cluster: Cluster,
    companion: Companion | None = None,
) -> TaskReport:
    """Process rows and write the outputs."""
    writer = RowWriter(order.write, info, cluster, companion)
    with contextlib.closing(StateWork(order, info, cluster, writer)) as work:
        for _ in work.rows(batches):
            raise RuntimeError("a task that writes its outputs itself has returned rows")
        work.finish()
    return work.report()


class StateWork:
    """A process step in a batch, or the part of it that one task has. Close it in the end.

    ``rows`` runs it, and yields the outputs that it does not write itself. ``finish`` waits until Kafka has what was
    written. Errors of onceflow are kept for the report, not raised, so that the driver gets the original class.

    Args:
        writer: of the task. Several steps that run in one task share it, because a partition has one writer (I4).
    """

    def __init__(self, order: StateOrder, info: TaskInfo, cluster: Cluster, writer: RowWriter) -> None:
        self._order = order
        self._info = info
        self._cluster = cluster
        self._started = time.monotonic()
        self._writer = writer
        self._outputs: TaskOutputs | None = None
        if order.writes != "nothing":
            self._outputs = TaskOutputs(self._writer, topic=order.topic, owners=order.owners, turn=order.write.batch)
        self._waiting: list[pa.RecordBatch] = []
        self._error: OnceflowError | None = None
        self._states: list[StateReport] = []
        self._acknowledged: Mapping[TopicPartition, Acknowledged] = {}
        self._known_limits: dict[str | None, OutputLimits | None] = {}
        self._run = self._new_run()

    def _new_run(self) -> StateRun:
        order = self._order
        everything = self._outputs is not None and order.writes == "everything"
        emit: Callable[[pa.RecordBatch, int], None]
        emit = self._outputs.emit if everything and self._outputs is not None else self._emit_rows
        reader = CommittedReader(self._cluster)
        return StateRun(
            order.spec,
            order.moment,
            source=reader,
            join_source=reader,
            changelog=self._writer,
            emit=emit,
            opened=self._opened,
            still_owner=self._still_owner,
            own_topics=order.write.own_topics,
            limits=self._limits,
            calls_s=order.write.calls_s,
        )

    @property
    def error(self) -> OnceflowError | None:
        """Why it has failed; None: it has not."""
        return self._error

    def close(self) -> None:
        """Close the stores."""
        self._run.close()

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process rows. If the step fails, there are no more outputs."""
        order, info, run = self._order, self._info, self._run
        try:
            if info.attempt > 0:
                raise extra_attempt(f"task {info.task} is at attempt {info.attempt}", order.write)
            if info.task >= 0:
                order.check_location(info.task, order.spec.location())
            run.open(order.due_in(info.task))
            yield from self._take()
            for batch in batches:
                self._feed(run, batch)
                yield from self._take()
            run.finish()
            yield from self._take()
        except OnceflowError as problem:
            self._fails(problem)

    def finish(self) -> None:
        """Wait until all is acknowledged, and `settle`. For a step whose writer is its own."""
        if self._error is not None:
            return
        write, info = self._order.write, self._info
        try:
            self.settle(self._writer.finish())
            if info.where == "task":  # the driver announces the step itself
                hooks.at("write", where="task", flow=write.flow, batch=write.batch, task=info.task)
        except OnceflowError as problem:
            self._fails(problem)

    def _fails(self, problem: OnceflowError) -> None:
        write = self._order.write
        problem = self._order.of_host(problem, self._info.task)
        self._error = problem.locate(flow=write.flow, batch=write.batch)

    def settle(self, acknowledged: Mapping[TopicPartition, Acknowledged]) -> None:
        """Leave the changes in the stores as pending: everything is acknowledged.

        Raises:
            OnceflowError: a store does not take them.
        """
        self._acknowledged = acknowledged
        self._states = self._run.leave_pending(acknowledged)

    def report(self) -> TaskReport:
        """The report of the task. Call this after ``finish`` or ``settle``."""
        failed = self._error is not None
        written = reports_of(
            self._info,
            {} if failed else self._acknowledged,
            rows=self._writer.rows,
            seconds=time.monotonic() - self._started,
            error=self._error,
        )
        returned = None if self._outputs is None or failed else self._outputs.returned()
        return TaskReport(
            written,
            states=tuple(self._states),
            prepared=tuple(self._run.brought_up),
            returned=() if returned is None else (packed(returned),),
        )

    def _limits(self, topic: str | None) -> OutputLimits | None:
        """What the topic takes of records that name it. None: they go on as rows, or it is not known."""
        if topic is None:
            topic = self._order.topic if self._order.as_is else None
        if topic not in self._known_limits:
            try:
                self._known_limits[topic] = None if topic is None else self._writer.limits(topic)
            except OnceflowError:  # no fault of the record: it is raised again when the record is written
                self._known_limits[topic] = None
        return self._known_limits[topic]

    def _still_owner(self) -> bool:
        """Whether the transactional id still has this attempt's epoch. If not, a newer driver has fenced this one."""
        write = self._order.write
        deadline = Deadline(write.deadline_s, f"looking up the owner of flow {write.flow}")
        return is_owner(self._cluster, self._order.owner, write.producer, deadline)

    def _opened(self, partition: int) -> None:
        write = self._order.write
        hooks.at("settle", where=self._info.where, flow=write.flow, batch=write.batch, task=self._info.task)

    def _emit_rows(self, batch: pa.RecordBatch, partition: int) -> None:
        """Keep outputs that are returned as rows: their topic is null. Side outputs keep their topic, or are written
        here."""
        topics = batch.column("topic")
        if topics.null_count < len(topics):
            if self._order.topic is not None:
                topics = pc.if_else(pc.equal(topics, self._order.topic), pa.scalar(None, pa.string()), topics)
                batch = batch.set_column(batch.schema.get_field_index("topic"), "topic", topics)
            if self._outputs is not None and topics.null_count < len(topics):
                named = topics.is_valid()
                self._outputs.emit(batch.filter(named), partition)
                batch = batch.filter(pc.invert(named))
        if batch.num_rows:
            self._waiting.append(batch)

    def _take(self) -> Iterator[pa.RecordBatch]:
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            yield output_rows(batch)

    def _own_partition(self) -> int:
        """A partition of this task, for rows without a key."""
        return max(0, self._order.owners.tasks.index(self._info.task)) if self._info.task >= 0 else 0

    def _feed(self, run: StateRun, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        rows = engine_rows(batch)
        if not self._order.unmoved:
            run.feed(rows, null_keys_to=self._own_partition())
            return
        placed = key_partitions(batch.column("key"), self._order.spec.topics.partitions)
        placed = np.where(placed < 0, np.int32(self._own_partition()), placed)  # rows without a key are bad records
        if (self._order.owners.tasks_of(placed) != self._info.task).any():
            raise NotCopartitionedError(
                f"Keys of the source are not where Kafka's default partitioner puts them for {self._order.spec.table}",
                next_step="none: the batch runs again, with a shuffle",
            )
        run.feed_placed(rows, placed)


def engine_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Spark's columns in the form that the engines expect: the timestamp is in milliseconds."""
    position = batch.schema.get_field_index("timestamp")
    if position < 0 or not pa.types.is_timestamp(batch.schema.field(position).type):
        return batch
    return batch.set_column(position, "timestamp", input_batch.milliseconds(batch.column(position)))

"""``Flow.process`` where the rows are: state, user code, changelog, and in most flows the outputs, too.

A batch runs in one of two ways. *Together*: the task that holds a partition of the table also writes what user
code yields, as long as it goes to partitions that are this task's alone (the same key, and a topic whose
partitions divide evenly). *Apart*: the outputs are rows of a DataFrame again, and the write stage brings them to
their owners. Both write the changelog in the task that holds the state.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.accumulators import AccumulatorParam

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.transactions import describe_transaction
from onceflow.errors import BatchAbortedError, OnceflowError, OptionError
from onceflow.protocol.partitioners import key_partitions
from onceflow.spark import queries
from onceflow.state.local.prepare import Prepared
from onceflow.state.run import StateRun
from onceflow.state.spec import Moment, ProcessSpec, StateReport
from onceflow.task import reports
from onceflow.task.row_writer import (
    RowWriter,
    TaskPlace,
    WriteOrder,
    extra_attempt,
    reports_of,
    worker_cluster,
)
from onceflow.task.step_outputs import (
    TaskOutputs,
    output_rows,
    packed,
    unpacked,
)

#: What a fused task sends back: reports, each with what belongs to the whole task in its first row.
FUSED_SPARK_SCHEMA = reports.SPARK_SCHEMA + ", states binary, returned binary"

#: What a state task writes of what its processor yields: everything; only *side outputs* (dead letters, late records,
#: records that name a topic of their own); nothing.
Writes = Literal["everything", "side outputs", "nothing"]


class NotCopartitionedError(BatchAbortedError):
    """Internal: keys are not where Kafka's partitioner puts them. The batch runs again, with a shuffle."""


@dataclass(frozen=True)
class StateOrder:
    """All a state task needs. ``write`` holds secrets: it travels with the task's code only.

    Args:
        writes: what the task writes itself; the rest are rows that it yields.
        topic: where outputs go that name no topic. A record that names this one is no side output.
        modulus: a partition belongs to the task (or to the table partition, see ``by_source``) whose number is
            its remainder by this.
        by_source: rows came straight from source partitions that are numbered as those of the table.
        due: partitions to open even if they have no rows: something is due there.
        taken: with ``by_source``, the source partitions that each task reads; empty where nothing is due.
    """

    spec: ProcessSpec
    moment: Moment
    write: WriteOrder
    writes: Writes
    topic: str | None
    modulus: int
    by_source: bool = False
    due: frozenset[int] = frozenset()
    taken: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def due_in(self, task: int) -> list[int]:
        """The due partitions that a task has to open; -1: the driver, which runs all of them."""
        if task < 0:
            return sorted(self.due)
        if self.by_source:
            return sorted(self.due & set(self.taken.get(task, ())))
        return sorted(p for p in self.due if p % self.modulus == task)


@dataclass
class Done:
    """What one task did, or all of a stage.

    Args:
        brought_up: see `StateRun`; also of a task that has failed.
    """

    reports: list[reports.Report]
    states: list[StateReport]
    returned: pa.Table | None = None
    brought_up: list[Prepared] = field(default_factory=list)


class Collected(AccumulatorParam[list[bytes]]):
    """What state tasks tell the driver when their rows go on to other tasks: an accumulator of pickled `Done`."""

    def zero(self, value: list[bytes]) -> list[bytes]:
        return []

    def addInPlace(self, value1: list[bytes], value2: list[bytes]) -> list[bytes]:
        return value1 + value2


class StepPlaceholder:
    """The place of a process step in a query's plan. In a batch it is replaced by `RowsTask` or `FusedTask`."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.__name__ = queries.step_name(table)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise OptionError(
            f"The process step of table {self.table} does not run outside its flow",
            next_step="write the DataFrame with Flow.write(...).start() of the flow that made it",
        )


class FusedTask:
    """The function given to ``mapInArrow`` when state tasks write their outputs themselves."""

    def __init__(self, order: StateOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        place = place_of_task(self.order.write)
        done = run_fused(self.order, place, batches, worker_cluster(self.order.write.settings))
        yield done_to_arrow(done)


class RowsTask:
    """The function given to ``mapInArrow`` when outputs go on as rows; what the task has done goes to ``collected``."""

    def __init__(self, order: StateOrder, collected: Any) -> None:
        self.order = order
        self.collected = collected
        self.__name__ = queries.step_name(order.spec.table)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        place = place_of_task(self.order.write)
        work = StateWork(self.order, place, worker_cluster(self.order.write.settings))
        yield from work.rows(batches)
        done = work.done()
        self.collected.add([pickle.dumps((done.reports, done.states, packed(done.returned), done.brought_up))])


def told(collected: Any) -> tuple[int, Done]:
    """What the tasks of a stage have told since the last call: how many there were, and all they did."""
    every: list[bytes] = collected.value
    collected.value = []
    done = Done([], [])
    returned: list[pa.Table] = []
    for raw in every:
        found, states, rows, brought_up = pickle.loads(raw)
        done.reports += found
        done.states += states
        done.brought_up += brought_up
        if rows is not None:
            returned.append(unpacked(rows))
    done.returned = pa.concat_tables(returned) if returned else None
    return len(every), done


def place_of_task(order: WriteOrder) -> TaskPlace:
    """Where this code runs; also announces the step ``begin``."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("a state task was called outside a Spark task")
    hooks.configure(order.faults)
    hooks.at("begin", where="task", flow=order.flow, batch=order.batch, task=context.partitionId())
    return TaskPlace("task", context.partitionId(), context.attemptNumber(), context.stageId())


def run_fused(order: StateOrder, place: TaskPlace, batches: Iterable[pa.RecordBatch], cluster: Cluster) -> Done:
    """Process rows and write what they yield."""
    work = StateWork(order, place, cluster)
    for _ in work.rows(batches):
        raise RuntimeError("rows came out of a task that writes them itself")
    return work.done()


class StateWork:
    """A task's part of a batch; ``rows`` runs it and yields outputs when they are written elsewhere.

    Errors of ours are kept for the reports, not raised, so that the driver gets them typed.
    """

    def __init__(self, order: StateOrder, place: TaskPlace, cluster: Cluster) -> None:
        self._order = order
        self._place = place
        self._cluster = cluster
        self._started = time.monotonic()
        self._writer = RowWriter(order.write, place, cluster)
        self._outputs: TaskOutputs | None = None
        if order.writes != "nothing":
            self._outputs = TaskOutputs(
                self._writer,
                topic=order.topic,
                modulus=order.modulus,
                by_source=order.by_source,
                turn=order.write.batch,
            )
        self._waiting: list[pa.RecordBatch] = []
        self._error: OnceflowError | None = None
        self._states: list[StateReport] = []
        self._brought_up: list[Prepared] = []
        self._acknowledged: Any = {}

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        order, place = self._order, self._place
        everything = self._outputs is not None and order.writes == "everything"
        emit: Callable[[pa.RecordBatch, int], None]
        emit = self._outputs.emit if everything and self._outputs is not None else self._emit_rows
        run = StateRun(
            order.spec,
            order.moment,
            source=CommittedReader(self._cluster),
            changelog=self._writer,
            emit=emit,
            opened=self._opened,
            still_owner=self._still_owner,
            own_topics=order.write.own_topics,
        )
        self._brought_up = run.brought_up
        with contextlib.closing(run):
            try:
                if place.attempt > 0:
                    raise extra_attempt(f"task {place.task} is at attempt {place.attempt}", order.write)
                run.open(order.due_in(place.task))
                yield from self._take()
                for batch in batches:
                    self._feed(run, batch)
                    yield from self._take()
                run.finish()
                yield from self._take()
                self._acknowledged = self._writer.finish()
                self._states = run.leave_pending(self._acknowledged)
                if place.where == "task":  # the driver announces the step itself
                    hooks.at("write", where="task", flow=order.write.flow, batch=order.write.batch, task=place.task)
            except OnceflowError as problem:
                self._error = problem.locate(flow=order.write.flow, batch=order.write.batch)

    def done(self) -> Done:
        """What to report, when ``rows`` has ended."""
        written = {} if self._error is not None else self._acknowledged
        found = reports_of(
            self._place,
            written,
            rows=self._writer.rows,
            seconds=time.monotonic() - self._started,
            error=self._error,
        )
        returned = None if self._outputs is None or self._error is not None else self._outputs.returned()
        return Done(found, self._states, returned, self._brought_up)

    def _still_owner(self) -> bool:
        """Whether the transactional id still has this attempt's epoch: else a newer driver was initialised."""
        write = self._order.write
        deadline = Deadline(write.deadline_s, f"looking up the owner of flow {write.flow}")
        if write.transactional_id is None:
            raise RuntimeError("a process step runs in transactions only")
        state = describe_transaction(self._cluster, write.transactional_id, deadline)
        return (state["producer_id"], state["producer_epoch"]) == (
            write.identity.producer_id,
            write.identity.producer_epoch,
        )

    def _opened(self, partition: int) -> None:
        write = self._order.write
        hooks.at("settle", where=self._place.where, flow=write.flow, batch=write.batch, task=self._place.task)

    def _emit_rows(self, batch: pa.RecordBatch, partition: int) -> None:
        """Outputs that go on as rows: their topic is null. Side outputs keep it, or are written here."""
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

    def _feed(self, run: StateRun, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        rows = engine_rows(batch)
        if not self._order.by_source:
            run.feed(rows, null_keys_to=max(0, self._place.task))
            return
        source = batch.column("partition").to_numpy(zero_copy_only=False)
        partitions = self._order.spec.topics.partitions
        placed = key_partitions(batch.column("key"), partitions)
        # A source partition that the table does not have was added while the flow runs.
        if ((placed >= 0) & (placed != source) | (source >= partitions)).any():
            raise NotCopartitionedError(
                f"Keys of the source are not where Kafka's default partitioner puts them for {self._order.spec.table}",
                next_step="none: the batch runs again, with a shuffle",
            )
        run.feed_placed(rows, source)


def engine_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Spark's columns as the engines take them: the timestamp in milliseconds."""
    position = batch.schema.get_field_index("timestamp")
    if position < 0 or not pa.types.is_timestamp(batch.schema.field(position).type):
        return batch
    millis = pc.divide(batch.column(position).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    return batch.set_column(position, "timestamp", millis)


def done_to_arrow(done: Done) -> pa.RecordBatch:
    """For the way back to the driver."""
    batch = reports.to_arrow(done.reports)
    returned = packed(done.returned)
    rest = [None] * (batch.num_rows - 1)
    states = pa.array([pickle.dumps((done.states, done.brought_up)), *rest], pa.binary())
    return batch.append_column("states", states).append_column("returned", pa.array([returned, *rest], pa.binary()))


def done_from_rows(collected: Iterable[Any]) -> Done:
    """From what ``DataFrame.collect`` returns: what all tasks of the stage did."""
    done = Done([], [])
    found, returned = [], []
    for row in collected:
        fields = row.asDict()
        if fields["states"] is not None:
            states, brought_up = pickle.loads(fields["states"])
            done.states += states
            done.brought_up += brought_up
        if fields["returned"] is not None:
            returned.append(unpacked(bytes(fields["returned"])))
        found.append({name: value for name, value in fields.items() if name not in ("states", "returned")})
    done.reports = reports.from_dicts(found)
    done.returned = pa.concat_tables(returned) if returned else None
    return done

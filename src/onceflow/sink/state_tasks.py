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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.transactions import describe_transaction
from onceflow.errors import BadRecordError, BatchAbortedError, OnceflowError
from onceflow.sink import reports
from onceflow.sink.tasks import RowWriter, TaskPlace, WriteOrder, extra_attempt, reports_of, worker_cluster
from onceflow.state.run import StateRun
from onceflow.state.spec import Moment, ProcessSpec, StateReport
from onceflow.wire.partitioners import group_by_partition, key_partitions

#: Rows that a task returns to the driver instead of writing them; more of them, and the batch runs apart.
RETURNED_ROWS_MAX = 20_000
# Of all tasks together: far below spark.driver.maxResultSize (1 GiB by default), beyond which Spark fails the job.
RETURNED_BYTES_MAX = 64_000_000

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
#: Rows that a process step yields: Spark's name of the schema, and Arrow's.
OUTPUT_SPARK_SCHEMA = (
    "key binary, value binary, topic string, headers array<struct<key: string, value: binary>>, timestamp timestamp"
)
OUTPUT_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", HEADERS_TYPE),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)
#: What a task that writes together sends back: reports, each with what belongs to the whole task in its first row.
TOGETHER_SPARK_SCHEMA = reports.SPARK_SCHEMA + ", states binary, returned binary"


class NotColocatedError(BatchAbortedError):
    """Internal: outputs belong to partitions of other tasks. The batch runs again, apart."""


class NotCopartitionedError(BatchAbortedError):
    """Internal: keys are not where Kafka's partitioner puts them. The batch runs again, with a shuffle."""


@dataclass(frozen=True)
class StateOrder:
    """All a state task needs. ``write`` holds secrets: it travels with the task's code only.

    Args:
        together: whether the task writes the outputs.
        topic: where outputs go that name no topic.
        modulus: a partition belongs to the task (or to the table partition, see ``by_source``) whose number is
            its remainder by this.
        by_source: rows came straight from source partitions that are numbered as those of the table.
        due: partitions to open even if they have no rows: something is due there.
    """

    spec: ProcessSpec
    moment: Moment
    write: WriteOrder
    together: bool
    topic: str | None
    modulus: int
    by_source: bool = False
    due: frozenset[int] = frozenset()


@dataclass
class Done:
    """What one task did."""

    reports: list[reports.Report]
    states: list[StateReport]
    returned: pa.Table | None = None


class TogetherTask:
    """The function given to ``mapInArrow`` when tasks write their outputs."""

    def __init__(self, order: StateOrder) -> None:
        self.order = order

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        place = place_of_task(self.order.write)
        done = run_together(self.order, place, batches, worker_cluster(self.order.write.settings))
        yield done_to_arrow(done)


def place_of_task(order: WriteOrder) -> TaskPlace:
    """Where this code runs; also announces the step ``begin``."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("a state task was called outside a Spark task")
    hooks.configure(order.faults)
    hooks.at("begin", where="task", flow=order.flow, batch=order.batch, task=context.partitionId())
    return TaskPlace("task", context.partitionId(), context.attemptNumber(), context.stageId())


def run_together(order: StateOrder, place: TaskPlace, batches: Iterable[pa.RecordBatch], cluster: Cluster) -> Done:
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
        self._outputs = _Outputs(order, self._writer) if order.together else None
        self._waiting: list[pa.RecordBatch] = []
        self._error: OnceflowError | None = None
        self._states: list[StateReport] = []
        self._acknowledged: Any = {}

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        order, place = self._order, self._place
        emit: Callable[[pa.RecordBatch, int], None]
        emit = self._outputs.emit if self._outputs is not None else lambda batch, _: self._waiting.append(batch)
        run = StateRun(
            order.spec,
            order.moment,
            source=CommittedReader(self._cluster),
            changelog=self._writer,
            emit=emit,
            opened=self._opened,
            still_owner=self._still_owner,
        )
        with contextlib.closing(run):
            try:
                if place.attempt > 0:
                    raise extra_attempt(f"task {place.task} is at attempt {place.attempt}", order.write)
                if not order.by_source:  # else the rows open them, in the task that reads their partition
                    run.open(sorted(p for p in order.due if p % order.modulus == max(0, place.task)))
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
                self._error = problem.located(flow=order.write.flow, batch=order.write.batch)

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
        return Done(found, self._states, returned)

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
        placed = key_partitions(batch.column("key"), self._order.spec.topics.partitions)
        if ((placed >= 0) & (placed != source)).any():
            raise NotCopartitionedError(
                f"Keys of the source are not where Kafka's default partitioner puts them for {self._order.spec.table}",
                next_step="none: the batch runs again, with a shuffle",
            )
        run.feed_placed(rows, source)


class _Outputs:
    """Writes what user code yields, to partitions that nobody else writes."""

    def __init__(self, order: StateOrder, writer: RowWriter) -> None:
        self._order = order
        self._writer = writer
        self._returned: list[pa.RecordBatch] = []
        self._returned_rows = 0
        self._returned_bytes = 0
        self._turn = order.write.batch

    def emit(self, batch: pa.RecordBatch, partition: int) -> None:
        """Rows that came from one partition of the table."""
        order = self._order
        residue = partition if order.by_source else partition % order.modulus
        for topic, rows in self._by_topic(batch):
            target = self._writer.target(topic)
            if target.partitions % order.modulus:
                self._return(topic, rows)
            else:
                self._write(topic, rows, target.partitions, residue)

    def returned(self) -> pa.Table | None:
        """Rows for topics that cannot be divided among the tasks: the driver writes them."""
        return pa.Table.from_batches(self._returned, OUTPUT_SCHEMA) if self._returned else None

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        column = batch.column("topic")
        rows = batch.drop_columns(["topic"])
        if column.null_count == len(column):
            yield self._default(), rows
            return
        if column.null_count:
            column = pc.fill_null(column, self._default())
        names = column.dictionary_encode()
        codes = names.indices.to_numpy(zero_copy_only=False)
        for code, indices in group_by_partition(codes, len(names.dictionary)):
            whole = len(indices) == batch.num_rows
            yield names.dictionary[code].as_py(), rows if whole else rows.take(pa.array(indices))

    def _default(self) -> str:
        if self._order.topic is None:
            raise BadRecordError(
                "The processor yielded a record without a topic",
                flow=self._order.write.flow,
                batch=self._order.write.batch,
                next_step="give Record(topic=...), or the topic= argument of Flow.write",
            )
        return self._order.topic

    def _write(self, topic: str, rows: pa.RecordBatch, count: int, residue: int) -> None:
        modulus = self._order.modulus
        partitions = key_partitions(rows.column("key"), count)
        if int(partitions.min()) < 0:  # no key: any partition of ours will do, another one each time
            self._turn += 1
            free = residue + modulus * (self._turn % (count // modulus))
            partitions = np.where(partitions < 0, np.int32(free), partitions)
        if modulus > 1 and (partitions % modulus != residue).any():
            raise NotColocatedError(
                f"Outputs for {topic} have other keys than the records they come from",
                next_step="none: the batch runs again, in two stages",
            )
        low, high = int(partitions.min()), int(partitions.max())
        if low == high:
            self._writer.write_to(topic, low, rows)
            return
        for partition, indices in group_by_partition(partitions, count):
            self._writer.write_to(topic, partition, rows.take(pa.array(indices)))

    def _return(self, topic: str, rows: pa.RecordBatch) -> None:
        self._returned_rows += rows.num_rows
        self._returned_bytes += rows.nbytes
        bytes_most = RETURNED_BYTES_MAX // max(1, self._order.modulus)
        if self._returned_rows > RETURNED_ROWS_MAX or self._returned_bytes > bytes_most:
            raise NotColocatedError(
                f"Many outputs go to {topic}, whose partitions cannot be divided among the tasks",
                next_step="none: the batch runs again, in two stages",
            )
        with_topic = rows.append_column("topic", pa.array([topic] * rows.num_rows, pa.string()))
        self._returned.append(output_rows(with_topic))


def engine_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Spark's columns as the engines take them: the timestamp in milliseconds."""
    position = batch.schema.get_field_index("timestamp")
    if position < 0 or not pa.types.is_timestamp(batch.schema.field(position).type):
        return batch
    millis = pc.divide(batch.column(position).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    return batch.set_column(position, "timestamp", millis)


def output_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What an engine yields as rows of ``OUTPUT_SCHEMA``."""
    millis = batch.column("timestamp")
    if not pa.types.is_timestamp(millis.type):
        millis = pc.multiply(millis, 1000).cast(pa.timestamp("us", tz="UTC"))
    columns = {name: batch.column(name) for name in ("key", "value", "topic", "headers")}
    return pa.record_batch([*columns.values(), millis], schema=OUTPUT_SCHEMA)


def done_to_arrow(done: Done) -> pa.RecordBatch:
    """For the way back to the driver."""
    batch = reports.to_arrow(done.reports)
    returned = None
    if done.returned is not None:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, OUTPUT_SCHEMA) as writer:
            writer.write_table(done.returned)
        returned = stream.getvalue().to_pybytes()
    rest = [None] * (batch.num_rows - 1)
    states = pa.array([pickle.dumps(done.states), *rest], pa.binary())
    return batch.append_column("states", states).append_column("returned", pa.array([returned, *rest], pa.binary()))


def done_from_rows(collected: Iterable[Any]) -> tuple[list[reports.Report], list[StateReport], list[pa.Table]]:
    """From what ``DataFrame.collect`` returns: reports of all tasks, their states, rows the driver is to write."""
    found, states, returned = [], [], []
    for row in collected:
        fields = row.asDict()
        if fields["states"] is not None:
            states += pickle.loads(fields["states"])
        if fields["returned"] is not None:
            returned.append(pa.ipc.open_stream(pa.py_buffer(bytes(fields["returned"]))).read_all())
        found.append({name: value for name, value in fields.items() if name not in ("states", "returned")})
    return reports.from_dicts(found), states, returned

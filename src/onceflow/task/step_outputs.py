"""Handles the records that user code yields in a task of a process step.

The task writes those that belong to its own partitions: every partition has exactly one writer (I4). It returns a
limited number of others to the driver. If there are more, the batch has to run again in two stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.errors import BadRecordError
from onceflow.messages import NotColocatedError, Owners
from onceflow.protocol.headers import HEADERS
from onceflow.protocol.partitioners import group_by_partition, key_partitions
from onceflow.state.api.deduplication import SOURCE_COLUMNS, Deduplication
from onceflow.state.api.time_joins import JOINED_COLUMNS, TimeJoin
from onceflow.task.row_writer import RowWriter

#: How many rows a task may return to the driver instead of writing them. With more, the batch runs in two stages.
RETURNED_ROWS_MAX = 20_000
# For all tasks together: far below spark.driver.maxResultSize (1 GiB by default), beyond which Spark fails the job.
RETURNED_BYTES_MAX = 64_000_000

#: The schema of the rows that a process step yields, for Spark and for Arrow.
OUTPUT_SPARK_SCHEMA = (
    "key binary, value binary, topic string, headers array<struct<key: string, value: binary>>, "
    "timestamp timestamp_ltz"  # whatever spark.sql.timestampType says
)
OUTPUT_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("headers", HEADERS),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)
_TIME = pa.timestamp("us", tz="UTC")
_SOURCE_TYPES = dict(zip(SOURCE_COLUMNS.values(), (pa.string(), pa.int32(), pa.int64()), strict=True))
_JOINED_TYPES = dict(zip(JOINED_COLUMNS, (pa.binary(), pa.binary(), _TIME, _TIME), strict=True))
_SPARK_TYPES = {pa.string(): "string", pa.int32(): "int", pa.int64(): "bigint", pa.binary(): "binary"}
FURTHER_COLUMNS = (*SOURCE_COLUMNS.values(), *JOINED_COLUMNS)
"""Columns that the rows of some steps have besides those of records."""
_WRITTEN = ["key", "value", "headers", "timestamp"]


def rows_schema(processor: object) -> str:
    """The schema of the rows that a step yields, for Spark. Only a de-duplication passes on the records themselves, so
    only its rows say where they were read."""
    further: dict[str, pa.DataType] = {}
    if isinstance(processor, Deduplication):
        further = _SOURCE_TYPES
    elif isinstance(processor, TimeJoin):
        further = _JOINED_TYPES
    columns = [f"{name} {_SPARK_TYPES.get(kind, 'timestamp_ltz')}" for name, kind in further.items()]
    return ", ".join([OUTPUT_SPARK_SCHEMA, *columns])


class TaskOutputs:
    """Writes the records that user code yields to partitions that no other task writes.

    Args:
        topic: topic of records that name none; None: such a record is refused.
        owners: which task has which partitions.
    """

    def __init__(self, writer: RowWriter, *, topic: str | None, owners: Owners, turn: int) -> None:
        self._writer = writer
        self._topic = topic
        self._owners = owners
        self._returned: list[pa.RecordBatch] = []
        self._returned_rows = self._returned_bytes = 0
        self._turn = turn

    def emit(self, batch: pa.RecordBatch, partition: int) -> None:
        """Write or keep records that one partition of the table has yielded.

        Raises:
            NotColocatedError: too many records belong to partitions of other tasks.
            BadRecordError: a record names no topic. (The engine has already refused records with a forbidden topic.)
        """
        for topic, rows in self._by_topic(batch):
            target = self._writer.target_of(topic, rows)
            if target.partitions % self._owners.groups:
                self._return(topic, rows)
            else:
                self._write(topic, rows, target.partitions, partition)

    def returned(self) -> pa.Table | None:
        """Rows for topics whose partitions cannot be divided among the tasks. The driver writes them."""
        return pa.Table.from_batches(self._returned, OUTPUT_SCHEMA) if self._returned else None

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        column = batch.column("topic")
        rows = batch.select(_WRITTEN)
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
        if self._topic is None:
            raise BadRecordError(
                "The processor yielded a record without a topic",
                next_step="give Record(topic=...), or the topic= argument of Flow.write",
            )
        return self._topic

    def _write(self, topic: str, rows: pa.RecordBatch, count: int, partition: int) -> None:
        """``count``: how many partitions the topic has. ``partition``: of the table."""
        groups = self._owners.groups
        partitions = key_partitions(rows.column("key"), count)
        if int(partitions.min()) < 0:  # no key: use any partition of this task, a different one each time
            self._turn += 1
            free = partition % groups + groups * (self._turn % (count // groups))
            partitions = np.where(partitions < 0, np.int32(free), partitions)
        if groups > 1 and (self._owners.tasks_of(partitions) != self._owners.task_of(partition)).any():
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
        max_bytes = RETURNED_BYTES_MAX // max(1, self._owners.count)
        if self._returned_rows > RETURNED_ROWS_MAX or self._returned_bytes > max_bytes:
            raise NotColocatedError(
                f"Many outputs go to {topic}, whose partitions cannot be divided among the tasks",
                next_step="none: the batch runs again, in two stages",
            )
        with_topic = rows.append_column("topic", pa.array([topic] * rows.num_rows, pa.string()))
        self._returned.append(output_rows(with_topic))


def output_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The outputs of an engine as rows of ``OUTPUT_SCHEMA``, with the further columns that are there."""
    further = {name: kind for name, kind in (_SOURCE_TYPES | _JOINED_TYPES).items() if name in batch.schema.names}
    schema = pa.schema([*OUTPUT_SCHEMA, *further.items()]) if further else OUTPUT_SCHEMA
    columns = [batch.column(field.name) for field in schema]
    return pa.record_batch(
        [_times(column) if field.type == _TIME else column for field, column in zip(schema, columns, strict=True)],
        schema=schema,
    )


def _times(column: pa.Array) -> pa.Array:
    """Epoch milliseconds as timestamps."""
    return column if pa.types.is_timestamp(column.type) else pc.multiply(column, 1000).cast(_TIME)


def written_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of ``OUTPUT_SCHEMA`` with the timestamp in milliseconds, as ``RowWriter`` expects them."""
    position = batch.schema.get_field_index("timestamp")
    return batch.set_column(position, "timestamp", batch.column(position).cast(pa.timestamp("ms")).cast(pa.int64()))


def packed(table: pa.Table) -> bytes:
    """Returned rows as bytes, to be sent to the driver."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, OUTPUT_SCHEMA) as writer:
        writer.write_table(table)
    raw: bytes = stream.getvalue().to_pybytes()
    return raw


def unpacked(raw: bytes) -> pa.Table:
    """The rows in bytes that `packed` returned."""
    return pa.ipc.open_stream(pa.py_buffer(raw)).read_all()

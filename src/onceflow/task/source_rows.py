"""From records of a source to the rows that the sink, or a process step, takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.errors import data_loss, located
from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.protocol.timestamps import LATEST_MS, NO_TIMESTAMP
from onceflow.task.row_operators import SOURCE_TYPES
from onceflow.task.sink_form import Form
from onceflow.task.task_program import TaskProgram

log = logging.getLogger("onceflow")

# Larger batches are not joined: the copy would cost more than it saves.
_JOINED_BYTES = 1_000_000


@dataclass(frozen=True)
class QueryRows:
    """What a query makes of the records of its sources.

    Args:
        program: its operators.
        form: of the sink; None: the rows go to a process step, or to Spark.
        costly: whether each call of an operator costs much, however few rows there are.
    """

    program: TaskProgram
    form: Form | None = None
    costly: bool = False

    def of(self, parts: Sequence[tuple[TopicPartition, RecordColumns]]) -> Iterator[pa.RecordBatch]:
        """The rows that become of records of one topic.

        Args:
            parts: records of different partitions. There is one part if rows stay in the partition of their source.

        Raises:
            OnceflowError: a function of ``Flow.map`` has failed.
            PySparkException: an operator of Spark fails for a row.
        """
        (topic, partition), _ = parts[0]
        needed = self.program.needed(topic)
        found = [source_columns(records, topic_partition, needed) for topic_partition, records in parts]
        columns = found[0]
        if len(found) > 1:
            columns = {name: pa.concat_arrays([each[name] for each in found]) for name in needed}
        with located(topic=f"{topic}-{partition}" if len(found) == 1 else topic):
            for made in self.program.rows(topic, columns, sum(len(records) for _, records in parts)):
                yield self.formed(made, partition)

    def formed(self, rows: pa.RecordBatch, partition: int = -1) -> pa.RecordBatch:
        """Rows of the program as the sink takes them."""
        return rows if self.form is None or not rows.num_rows else self.form.rows(rows, partition)

    @property
    def merges(self) -> bool:
        """Whether the records of a topic become rows all at once."""
        return self.costly and not (self.form is not None and self.form.by_source)


def source_columns(
    records: RecordColumns, topic_partition: TopicPartition, needed: Sequence[str]
) -> dict[str, pa.Array]:
    """Records as columns of Spark's Kafka source, see ``row_operators.SOURCE_TYPES``.

    Args:
        needed: names of the columns that are wanted.
    """
    made: dict[str, Callable[[], pa.Array]] = {
        "key": lambda: records.keys,
        "value": lambda: records.values,
        "topic": lambda: pa.repeat(pa.scalar(topic_partition[0], pa.string()), len(records)),
        "partition": lambda: pa.repeat(pa.scalar(topic_partition[1], pa.int32()), len(records)),
        "offset": lambda: pa.array(records.offsets),
        "timestamp": lambda: pa.array(_microseconds(records)).view(SOURCE_TYPES["timestamp"]),
        "timestampType": lambda: pa.array(records.timestamp_types),
        "headers": lambda: records.headers,
    }
    return {name: made[name]() for name in needed}


def _microseconds(records: RecordColumns) -> Any:
    # A time that cannot be expressed is the latest one that can, see timestamps.py; any time before 1970 is unknown.
    return np.clip(records.timestamps_ms, NO_TIMESTAMP, LATEST_MS) * 1000


def expired(topic_partition: TopicPartition, first: int, end: int, *, may_lose: bool, flow: str) -> None:
    """Records with offsets in ``[first, end)`` have expired before they were read.

    Args:
        may_lose: whether they are skipped, with a warning.

    Raises:
        DataLossError: they may not be skipped.
    """
    lost = f"offsets {first} to {end - 1} have expired before they were read"
    if not may_lose:
        raise data_loss(f"{topic_partition[0]}-{topic_partition[1]}", lost, flow)
    log.warning("flow %s: %s-%d: %s; skipped, because fail_on_data_loss=False", flow, *topic_partition, lost)


def joined(batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
    """The same rows in fewer, larger batches: what is written to a partition by one of them is one record batch of
    Kafka, or few. Batches without rows are left out."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        if waiting and (size + batch.nbytes > _JOINED_BYTES or batch.schema != waiting[0].schema):
            yield _one(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    one: pa.RecordBatch = batches[0]
    if len(batches) > 1:
        (one,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return one

"""Tasks that read their part of a batch by themselves, and then do with the rows what other tasks do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from onceflow.messages import StateOrder, TaskReport, WriteOrder, encoded
from onceflow.task import task_logs, worker_memory
from onceflow.task.range_reader import RangeReader, ReadOrder, reader_cluster
from onceflow.task.row_writer import task_info, worker_cluster, write_rows
from onceflow.task.state_tasks import run_fused


class RangeTask:
    """The function of the tasks that read, process and write. Given to ``RDD.mapPartitions``; the element of each
    partition is ignored. It yields the encoded report.

    Args:
        order: a process step, or only the sink. Rows may only belong to partitions with ``partition % tasks == task``.
    """

    def __init__(self, read: ReadOrder, order: WriteOrder | StateOrder) -> None:
        self.read = read
        self.order = order

    def __call__(self, numbers: Iterable[Any]) -> Iterator[bytes]:
        for _ in numbers:  # Spark ends a Python worker whose task has not read its input
            pass
        order = self.order
        write = order.write if isinstance(order, StateOrder) else order
        info = task_info(write)
        reader = RangeReader(self.read, info.task, reader_cluster(self.read.settings))
        cluster = worker_cluster(write.settings)
        with task_logs.of_batch(write, info):
            report: TaskReport
            if isinstance(order, StateOrder):
                report = run_fused(order, info, reader.rows(), cluster)
            else:
                report = write_rows(order, info, reader.rows(), cluster)
        yield encoded(replace(report, read=reader.records))


class ReadTask:
    """The function of tasks that only read: further tasks get the rows. Given to ``mapInArrow``.

    The input says which parts are read (the column ``id``). The number of the Spark task does not: Spark may merge
    several partitions of the input into one task (``coalesce``).
    """

    def __init__(self, read: ReadOrder) -> None:
        self.read = read

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        worker_memory.task_begins()
        cluster = reader_cluster(self.read.settings)
        for batch in batches:
            for part in batch.column("id").to_pylist():
                with task_logs.of_reading(self.read.flow, part):
                    yield from RangeReader(self.read, part, cluster).rows()

"""What the driver does itself: a process step for rows that it has fetched, and rows that tasks have returned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.driver.audit import Part
from onceflow.messages import DRIVER, Routing, StateOrder, TaskReport, WriteOrder
from onceflow.task.row_writer import Companion, write_rows
from onceflow.task.state_tasks import run_fused
from onceflow.task.step_outputs import unpacked, written_rows

#: For an order whose rows name their topic, and are placed by their key.
BY_KEY = Routing("key", 1, True)


def run(
    rows: Iterable[pa.RecordBatch], order: StateOrder, cluster: Cluster, companion: Companion | None = None
) -> tuple[TaskReport, Part]:
    """Process a batch, and write what comes out, with the code of a task.

    Args:
        companion: what is sent beside the rows.
    """
    report = run_fused(order, DRIVER, rows, cluster, companion)
    return report, Part(report.written, None, False)


def parts_of(report: TaskReport, tasks: int, order: WriteOrder, cluster: Cluster, *, shuffled: bool) -> list[Part]:
    """What is to be audited of tasks that write what comes out. The rows that they have returned are written here.

    Args:
        shuffled: see `Part`.
    """
    parts = [Part(report.written, tasks, shuffled)]
    if report.returned and not report.failed:
        parts.append(write_returned(report.returned, order, cluster))
    return parts


def write_returned(returned: Iterable[bytes], order: WriteOrder, cluster: Cluster) -> Part:
    """Write rows that tasks have returned, see `TaskReport`."""
    rows = [written_rows(batch) for stream in returned for batch in unpacked(stream).to_batches()]
    report = write_rows(replace(order, topic=None, routing=BY_KEY), DRIVER, rows, cluster)
    return Part(report.written, None, False)

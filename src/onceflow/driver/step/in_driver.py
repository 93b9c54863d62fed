"""Process steps in the driver: for rows that it has fetched, and for rows that tasks have returned."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.client.produce import Acknowledged
from onceflow.driver.batch.audit import Part
from onceflow.driver.batch.fetched_rows import FetchedRows
from onceflow.errors import OnceflowError
from onceflow.messages import DRIVER, Routing, StateOrder, TaskReport, WriteOrder
from onceflow.protocol.names import TopicPartition
from onceflow.task.row_writer import Companion, RowWriter, reports_of, write_rows
from onceflow.task.state_tasks import StateWork, run_fused
from onceflow.task.step_outputs import unpacked, written_rows

#: For an order whose rows name their topic, and are placed by their key.
BY_KEY = Routing("key", 1, True)


def run_step(
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


def run_chain(
    rows: FetchedRows,
    order_of: Callable[[str], StateOrder],
    order: WriteOrder,
    cluster: Cluster,
    companion: Companion | None = None,
) -> tuple[dict[str, TaskReport], Part]:
    """Process a batch of a query with operators behind its step, or with several steps, and write what comes out.

    Rows flow from one step to the next; nothing goes through a topic in between. The steps and the sink share one
    writer, because in a transaction a partition has one writer (I4). State is left as pending when Kafka has
    acknowledged everything.

    Args:
        order_of: that of the step of a table.
        order: of the sink. companion: what is sent beside the rows.

    Returns:
        The reports of the steps by their tables, and what was written in all.
    """
    started = time.monotonic()
    writer = RowWriter(order, DRIVER, cluster, companion)
    with contextlib.ExitStack() as open_steps:
        works: dict[str, StateWork] = {}

        def stepped(table: str, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            works[table] = open_steps.enter_context(
                contextlib.closing(StateWork(order_of(table), DRIVER, cluster, writer))
            )
            return works[table].rows(given)

        acknowledged: Mapping[TopicPartition, Acknowledged] = {}
        error: OnceflowError | None = None
        batches = open_steps.enter_context(contextlib.closing(rows.batches(stepped)))
        try:
            for made in batches:
                writer.write(made)
            error = next((work.error for work in works.values() if work.error is not None), None)
            if error is None:
                acknowledged = writer.finish()
                for work in works.values():
                    work.settle(acknowledged)
        except OnceflowError as problem:
            error = problem
    reports = {table: work.report() for table, work in works.items()}
    seconds = time.monotonic() - started
    written = reports_of(DRIVER, acknowledged, rows=writer.rows, seconds=seconds, error=error)
    return reports, Part(written, None, False)

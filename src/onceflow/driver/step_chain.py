"""A query with operators behind its process step, or with several steps, in a batch that the driver reads and runs.

Rows flow from one to the next; nothing goes through a topic in between. The steps and the sink share one writer,
because in a transaction a partition has one writer (I4). State is left as pending when Kafka has acknowledged
everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.client.produce import Acknowledged
from onceflow.driver.audit import Part
from onceflow.driver.fetched_rows import FetchedRows
from onceflow.errors import OnceflowError
from onceflow.messages import DRIVER, StateOrder, TaskReport, WriteOrder
from onceflow.protocol.names import TopicPartition
from onceflow.task.row_writer import Companion, RowWriter, reports_of
from onceflow.task.state_tasks import StateWork


def run(
    rows: FetchedRows,
    order_of: Callable[[str], StateOrder],
    order: WriteOrder,
    cluster: Cluster,
    companion: Companion | None = None,
) -> tuple[dict[str, TaskReport], Part]:
    """Process the batch, and write what comes out.

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

        def run_step(table: str, given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            works[table] = open_steps.enter_context(
                contextlib.closing(StateWork(order_of(table), DRIVER, cluster, writer))
            )
            return works[table].rows(given)

        acknowledged: Mapping[TopicPartition, Acknowledged] = {}
        error: OnceflowError | None = None
        batches = open_steps.enter_context(contextlib.closing(rows.batches(run_step)))
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

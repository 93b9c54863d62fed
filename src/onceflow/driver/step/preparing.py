"""Before a batch writes anything, large local copies are brought up to date with what is committed.

The timeout of a transaction starts with the first that is written, records or source offsets, so this cannot make it
time out. The work is done in tasks: they use all cores, and a damaged copy can only kill a Python worker. Small copies
are left to the batch, because they take it little time. All of this needs a local master: on a cluster it is not known
on which host a task will run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pyspark import SparkContext

from onceflow.driver.step.table_state import TableState
from onceflow.errors import OnceflowError
from onceflow.messages import PrepareOrder
from onceflow.state.local.opening import settle
from onceflow.state.prepare import Prepared, is_verified, lacks
from onceflow.task.preparing import PrepareTask

log = logging.getLogger("onceflow.state")

_MIN_RECORDS, _MIN_BYTES = 200_000, 64 << 20


def prepare(table: TableState, order: PrepareOrder, context: SparkContext, *, again: bool) -> None:
    """Bring the copies of a table on this machine up to date, and note that they are verified.

    Args:
        again: check all copies, not only those that this run has not checked yet, because an attempt has failed.

    Raises:
        OnceflowError: see `prepare_partition`.
    """
    spec, moment = order.spec, order.moment
    if not spec.store.on_disk:
        return  # the store is in the memory of one process, and it is not known which process will run the batch
    records, size = 0, 0
    wanted = []
    for partition in range(spec.topics.partitions):
        if again or not is_verified(spec, moment, partition):
            lacking = lacks(spec, moment, partition)
            size += _bytes_of(spec.folder(partition)) if lacking is None else 0
            records += lacking or 0
            if lacking != 0:
                wanted.append(partition)
    if records < _MIN_RECORDS and size < _MIN_BYTES:
        return
    log.info(
        "table %s: %d local copies are prepared: up to %d records to read, %d MiB to verify",
        spec.table,
        len(wanted),
        records,
        size >> 20,
    )
    found = context.parallelize(wanted, len(wanted)).map(PrepareTask(order)).collect()
    for problem in found:
        if isinstance(problem, OnceflowError):
            raise problem
    table.prepared([each for each in found if isinstance(each, Prepared)])


def settle_copies(table: TableState, partitions: Iterable[int] | None = None) -> None:
    """Settle the copies on this machine: apply the pending changes of the last batch.

    Args:
        partitions: None: all that are known.
    """
    spec = table.spec
    for partition in [*table.last] if partitions is None else partitions:
        commit = table.last[partition]
        try:
            settle(spec.folder(partition), spec.store, commit)
        except Exception as error:  # no harm: readers or the next run settle it
            log.warning("the local state of %s-%d was not settled: %s", spec.table, partition, error)


def _bytes_of(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # a reader or an engine may delete a file just now
        for file in folder.rglob("*"):
            size += file.stat().st_size
    return size

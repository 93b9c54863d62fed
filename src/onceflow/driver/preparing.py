"""Before a batch writes anything, large local copies are brought up to what is committed.

A transaction's clock starts with the first record that is written. So however long this takes, no transaction times
out. Tasks do it: all cores at once, and what is damaged kills a worker at most. Small copies are left to the batch: it
needs no time worth telling for them. Only with a local master: elsewhere nobody knows where the tasks of the batch run.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext

from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.settings import ClientSettings
from onceflow.client.transactions import describe_transaction
from onceflow.errors import OnceflowError
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.state.local.prepare import Prepared, is_verified, lacks, prepare_partition
from onceflow.state.spec import Moment, ProcessSpec
from onceflow.state.table_state import TableState
from onceflow.task.row_writer import worker_cluster

log = logging.getLogger("onceflow.state")

_MIN_RECORDS, _MIN_BYTES = 200_000, 64 << 20
_OWNER_SECONDS = 30.0


@dataclass(frozen=True)
class PrepareTask:
    """The function that prepares a partition. Holds secrets (``settings``): it travels with the task's code only."""

    spec: ProcessSpec
    moment: Moment
    settings: ClientSettings
    transactional_id: str
    identity: ProducerIdAndEpoch

    def __call__(self, partition: int) -> Prepared | OnceflowError:
        cluster = worker_cluster(self.settings)

        def still_owner() -> bool:
            deadline = Deadline(_OWNER_SECONDS, f"looking up the owner of flow {self.spec.flow}")
            state = describe_transaction(cluster, self.transactional_id, deadline)
            known = self.identity.producer_id, self.identity.producer_epoch
            return (state["producer_id"], state["producer_epoch"]) == known

        source = CommittedReader(cluster)
        try:
            return prepare_partition(self.spec, self.moment, partition, source, still_owner=still_owner)
        except OnceflowError as problem:  # returned, so that the driver gets it typed
            return problem


def prepare(table: TableState, task: PrepareTask, context: SparkContext, *, again: bool) -> None:
    """Bring the copies of a table on this machine up to date, and note that they are verified.

    Args:
        again: look at all of them, not only at those that this run has not seen: an attempt has failed.

    Raises:
        OnceflowError: see `prepare_partition`.
    """
    spec, moment = task.spec, task.moment
    if not spec.store.on_disk:
        return  # of one process, and nobody knows which one will run the batch
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
    found = context.parallelize(wanted, len(wanted)).map(task).collect()
    for problem in found:
        if isinstance(problem, OnceflowError):
            raise problem
    table.prepared([each for each in found if isinstance(each, Prepared)])


def _bytes_of(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # a reader or an engine may delete a file just now
        for file in folder.rglob("*"):
            size += file.stat().st_size
    return size

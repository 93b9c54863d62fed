"""Whether a command that was killed has left its transaction of a flow open in the progress topic.

The transaction is of the flow's transactional id, so any driver that had started since would have aborted it. Drivers
that had started before were fenced by the command. So no driver of the flow runs, and the transaction can be aborted
without harm to any.
"""

from __future__ import annotations

from collections.abc import Iterator

from onceflow.admin.transactions.open_transactions import ONGOING
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.producers import open_transactions
from onceflow.client.transaction_requests import describe_transaction
from onceflow.driver.record import progress_log
from onceflow.errors import located
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, Progress, decode


def left_by_command(cluster: Cluster, names: Names, deadline: Deadline) -> bool:
    """Whether an open transaction of this flow's transactional id is a command's. Progress records of drivers name
    the driver, those of commands do not.

    Raises:
        PermissionDeniedError: this principal may not look at it.
        DeadlineExceededError: Kafka does not answer.
    """
    described = describe_transaction(cluster, names.transactional_id, deadline)
    if described["state"] != ONGOING:
        return False
    numbers = {progress_log.partition_of(names.progress_key), *described["partitions"].get(PROGRESS_TOPIC, ())}
    producer_id = int(described["producer_id"])
    begun = open_transactions(cluster, [(PROGRESS_TOPIC, number) for number in sorted(numbers)], deadline)
    starts = {
        number: each.start_offset
        for (_, number), all_ in begun.items()
        for each in all_
        if each.producer_id == producer_id
    }
    drivers = [
        record.driver
        for number, start in starts.items()
        for record in _written(cluster, number, start, producer_id, names, deadline)
    ]
    return bool(starts) and not any(drivers)


def _written(
    cluster: Cluster, number: int, start: int, producer_id: int, names: Names, deadline: Deadline
) -> Iterator[Progress]:
    """The progress records of an open transaction in a partition. They may be those of two flows."""
    end = list_offsets(cluster, {PROGRESS_TOPIC: [number]}, LATEST, deadline, committed=False)[PROGRESS_TOPIC][number]
    for item in read_log(cluster, PROGRESS_TOPIC, number, start, end, deadline):
        if isinstance(item, LogRecord) and item.producer_id == producer_id and item.value is not None:
            with located(flow=names.flow):
                yield decode(item.key, item.value)

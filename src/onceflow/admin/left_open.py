"""Whether a command that was killed has left its transaction open in a flow's partition of the progress topic.

The transaction is of the flow's transactional id, so any driver that had started since would have aborted it. Drivers
that had started before were fenced by the command. So no driver of the flow runs, and the transaction can be aborted
without harm to any.
"""

from __future__ import annotations

from onceflow.admin.open_transactions import ONGOING
from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.log_reader import LogRecord, read_log
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.producers import open_transactions
from onceflow.client.transaction_requests import describe_transaction
from onceflow.driver import progress_log
from onceflow.errors import located
from onceflow.protocol.names import Names
from onceflow.protocol.progress import PROGRESS_TOPIC, decode


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
    place = progress_log.topic_partition_of(names.progress_key)
    found = open_transactions(cluster, [place], deadline)[place]
    mine = [each for each in found if each.producer_id == described["producer_id"]]
    if not mine:
        return False
    start = mine[0].start_offset
    end = list_offsets(cluster, {PROGRESS_TOPIC: [place[1]]}, LATEST, deadline, committed=False)[PROGRESS_TOPIC]
    for item in read_log(cluster, *place, start, end[place[1]], deadline):
        if not isinstance(item, LogRecord) or item.producer_id != mine[0].producer_id or item.value is None:
            continue
        with located(flow=names.flow):
            if decode(item.key, item.value).driver is not None:
                return False
    return True

"""A task that brings a local copy up to what is committed, before a batch begins (``driver/step/state_step.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onceflow import hooks
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.transaction_requests import describe_transaction
from onceflow.errors import OnceflowError
from onceflow.messages import PrepareOrder
from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.state.local.catch_up import Source
from onceflow.state.local.format import Columns
from onceflow.state.prepare import Prepared, prepare_partition
from onceflow.task.row_writer import worker_cluster

_OWNER_SECONDS = 30.0


class PrepareTask:
    """The function that prepares a partition.

    Args:
        is_over: returns whether to end now, and to keep what was read; None: it takes as long as it takes.
    """

    def __init__(self, order: PrepareOrder, is_over: Callable[[], bool] | None = None) -> None:
        self.order = order
        self._is_over = is_over

    def __call__(self, partition: int) -> Prepared | OnceflowError:
        order = self.order
        hooks.configure(order.faults)
        cluster = worker_cluster(order.settings)

        def still_owner() -> bool:
            deadline = Deadline(_OWNER_SECONDS, f"looking up the owner of flow {order.spec.flow}")
            return is_owner(cluster, order.transactional_id, order.producer, deadline)

        source = _Announced(CommittedReader(cluster), order.spec.flow)
        try:
            return prepare_partition(
                order.spec, order.moment, partition, source, still_owner=still_owner, is_over=self._is_over
            )
        except OnceflowError as problem:  # returned, not raised, so that the driver gets the original class
            return problem


class _Announced:
    """What a restore reads: a step is announced whenever records are there."""

    def __init__(self, source: Source, flow: str) -> None:
        self._source = source
        self._flow = flow

    def read_columns(self, topic: str, partition: int, start: int, end: int, *, headers: bool) -> Iterator[Columns]:
        for part in self._source.read_columns(topic, partition, start, end, headers=headers):
            hooks.at(hooks.RESTORE, where="task", flow=self._flow)
            yield part

    def end(self, topic: str, partition: int) -> int:
        return self._source.end(topic, partition)


def is_owner(cluster: Cluster, transactional_id: str, producer: ProducerIdAndEpoch, deadline: Deadline) -> bool:
    """Whether a transactional id still has this producer id and epoch. If not, a newer driver has fenced this one."""
    state = describe_transaction(cluster, transactional_id, deadline)
    return (state["producer_id"], state["producer_epoch"]) == (producer.producer_id, producer.producer_epoch)

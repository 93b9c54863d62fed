"""Transactional ids and consumer groups in memory, for `MemoryBroker`: what Kafka's coordinators keep of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.protocol.batches import ProducerIdAndEpoch
from onceflow.protocol.codes import Code
from onceflow.protocol.names import TopicPartition
from onceflow.testing.memory_log import MemoryTopic

Offsets = dict[TopicPartition, tuple[int, str]]
"""Committed offsets and their metadata."""

_EPOCH_MAX = 32_766


@dataclass
class TransactionalId:
    """What the coordinator knows of one.

    Args:
        partitions: of the open transaction, or of the last one.
        offsets: of the open transaction, by group.
    """

    producer: ProducerIdAndEpoch
    timeout_ms: int
    state: str = "Empty"
    started_ms: int = -1
    partitions: set[TopicPartition] = field(default_factory=set)
    offsets: dict[str, Offsets] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.state == "Ongoing"


class Transactions:
    """All transactional ids and groups. A transaction is decided in all its partitions at once.

    Args:
        topics: where markers are written.

    Attributes:
        groups: committed offsets, by group.
    """

    def __init__(self, topics: Mapping[str, MemoryTopic]) -> None:
        self._topics = topics
        self._producer_ids = itertools.count(1000)
        self.ids: dict[str, TransactionalId] = {}
        self.groups: dict[str, Offsets] = {}

    def init(
        self, name: str | None, producer: ProducerIdAndEpoch | None, timeout_ms: int, now_ms: int
    ) -> tuple[int, ProducerIdAndEpoch]:
        """InitProducerId: an error code, and producer id and epoch.

        Args:
            producer: of the caller, who asks for the next epoch (KIP-360); None: it takes the id over.
        """
        if name is None:
            return 0, ProducerIdAndEpoch(next(self._producer_ids), 0)
        known = self.ids.get(name)
        if known is None:
            known = self.ids[name] = TransactionalId(ProducerIdAndEpoch(next(self._producer_ids), 0), timeout_ms)
            return 0, known.producer
        if producer is not None and producer != known.producer:
            return Code.PRODUCER_FENCED, ProducerIdAndEpoch(-1, -1)
        if known.is_open:
            self._end(known, committed=False, now_ms=now_ms)
        known.producer, known.timeout_ms, known.state = self._next(known.producer), timeout_ms, "Empty"
        return 0, known.producer

    def enrol(self, name: str, producer: ProducerIdAndEpoch, now_ms: int) -> int | TransactionalId:
        """Add something to the transaction: its transactional id, or an error code."""
        known = self.ids.get(name)
        if known is None or known.producer.producer_id != producer.producer_id:
            return Code.INVALID_PRODUCER_ID_MAPPING
        if known.producer.producer_epoch != producer.producer_epoch:
            return Code.INVALID_PRODUCER_EPOCH
        if not known.is_open:
            known.state, known.started_ms = "Ongoing", now_ms
            known.partitions, known.offsets = set(), {}
        return known

    def end(
        self, name: str, producer: ProducerIdAndEpoch, *, committed: bool, now_ms: int
    ) -> tuple[int, ProducerIdAndEpoch]:
        """EndTxn: an error code, and producer id and epoch of the next transaction (KIP-890)."""
        known = self.ids.get(name)
        if known is None or known.producer.producer_id != producer.producer_id:
            return Code.INVALID_PRODUCER_ID_MAPPING, producer
        if known.producer.producer_epoch != producer.producer_epoch:
            return Code.PRODUCER_FENCED, producer
        if not known.is_open and committed:
            return Code.INVALID_TXN_STATE, producer
        self._end(known, committed=committed, now_ms=now_ms)
        known.producer = self._next(known.producer)
        return 0, known.producer

    def commit_offsets(self, group: str, offsets: Offsets) -> None:
        """OffsetCommit, outside of a transaction."""
        self.groups.setdefault(group, {}).update(offsets)

    def _end(self, known: TransactionalId, *, committed: bool, now_ms: int) -> None:
        marker = ProducerIdAndEpoch(known.producer.producer_id, known.producer.producer_epoch)
        for topic, partition in sorted(known.partitions):
            self._topics[topic].partitions[partition].end_transaction(marker, committed=committed, now_ms=now_ms)
        if committed:
            for group, offsets in known.offsets.items():
                self.commit_offsets(group, offsets)
        known.state = "CompleteCommit" if committed else "CompleteAbort"
        known.partitions, known.offsets = set(), {}

    def _next(self, producer: ProducerIdAndEpoch) -> ProducerIdAndEpoch:
        if producer.producer_epoch >= _EPOCH_MAX:
            return ProducerIdAndEpoch(next(self._producer_ids), 0)
        return ProducerIdAndEpoch(producer.producer_id, producer.producer_epoch + 1)

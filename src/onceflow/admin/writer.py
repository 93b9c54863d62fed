"""Writes rows of commands: to partitions that are given, in one transaction or without any."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged, Producer
from onceflow.client.transactions import Transactions
from onceflow.errors import OnceflowError
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches, next_sequence

log = logging.getLogger("onceflow")

_ABORT_S = 10.0
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Row(NamedTuple):
    """A record without its key; no value: deleted."""

    value: bytes | None
    timestamp_ms: int
    headers: list[tuple[str, bytes | None]] | None = None


class Writer:
    """Rows to partitions, in one transaction, or without any.

    Args:
        transactions: with one that has begun; or an idempotent identity.
        limits: ``max.message.bytes`` of the topics.
        deadline: bounds everything.
        sequences: where those of an idempotent identity go on, by partition; changed by what is written.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactions: Transactions | ProducerIdAndEpoch,
        limits: Mapping[str, int],
        deadline: Deadline,
        *,
        sequences: dict[tuple[str, int], int] | None = None,
    ) -> None:
        self._enrolling: Transactions | None = None
        transactional_id: str | None = None
        if isinstance(transactions, ProducerIdAndEpoch):
            self._identity = transactions
        else:
            self._identity, transactional_id = transactions.identity, transactions.transactional_id
            self._enrolling = None if transactions.version_2 else transactions
        self._limits = limits
        self._deadline = deadline
        self._producer = Producer(cluster, transactional_id=transactional_id, deadline=deadline)
        self._sequences: dict[tuple[str, int], int] = {} if sequences is None else sequences

    def write(self, topic: str, partition: int, found: Iterable[tuple[bytes | None, Row]]) -> None:
        """Write rows under these keys (those of a table are never null), with their headers and timestamps."""
        keys, values, stamps, headers = [], [], [], []
        for key, row in found:
            keys.append(key)
            values.append(row.value)
            stamps.append(row.timestamp_ms)
            headers.append(row.headers)
        times = np.array(stamps, dtype=np.int64)
        self._send(
            topic,
            partition,
            keys,
            pa.array(values, pa.large_binary()),
            pa.array(headers, _HEADERS) if any(headers) else None,
            pa.array(times, mask=times < 0),  # old producers gave none
        )

    def delete(self, topic: str, partition: int, keys: Iterable[bytes]) -> None:
        """Write tombstones."""
        self._send(topic, partition, list(keys), None, None, None)

    def finish(self) -> Mapping[tuple[str, int], Acknowledged]:
        """Wait for every acknowledgement; what is where."""
        return self._producer.flush()

    def _send(
        self, topic: str, partition: int, keys: Sequence[bytes | None], values: object, headers: object, stamps: object
    ) -> None:
        if (topic, partition) not in self._sequences and self._enrolling is not None:
            self._enrolling.add_partitions({topic: [partition]}, self._deadline)
        sequence = self._sequences.get((topic, partition), 0)
        for encoded in encode_batches(
            pa.array(keys, pa.large_binary()),
            values,
            headers,
            stamps,
            identity=self._identity,
            base_sequence=sequence,
            max_batch_bytes=self._limits[topic],
            default_timestamp_ms=now_ms(),
        ):
            self._producer.send(topic, partition, encoded)
            sequence = next_sequence(sequence, encoded.count)
        self._sequences[topic, partition] = sequence


def abort_anew(cluster: Cluster, transactions: Transactions) -> None:
    """Abort right away, and on a connection of its own: the one in use was left in the middle of something.

    When it fails, the next InitProducerId aborts it, or the transaction's timeout does.
    """
    another = Cluster(cluster.settings, refused_s=None)
    try:
        deadline = Deadline(_ABORT_S, "aborting")
        another.connect(deadline)
        transactions.over(another).end(deadline, commit=False)
    except OnceflowError as error:
        log.warning("the transaction could not be aborted now: %s", error.what)
    finally:
        another.close()


def now_ms() -> int:
    return time.time_ns() // 1_000_000

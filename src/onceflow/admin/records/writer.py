"""Writes records for commands, to given partitions, in one transaction or without one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from onceflow.client.cluster import Cluster
from onceflow.client.deadline import Deadline
from onceflow.client.produce import Acknowledged, Producer
from onceflow.client.topics import TopicLimits
from onceflow.client.transactions import Transactions
from onceflow.clock import clock_ms
from onceflow.errors import OnceflowError
from onceflow.protocol import timestamps
from onceflow.protocol.batches import ProducerIdAndEpoch, encode_batches, next_sequence
from onceflow.protocol.compression import CODECS
from onceflow.protocol.headers import HEADERS

log = logging.getLogger("onceflow")

_ABORT_S = 10.0


class Row(NamedTuple):
    """A record without its key. Without a value it is a tombstone."""

    value: bytes | None
    timestamp_ms: int
    headers: list[tuple[str, bytes | None]] | None = None


class Writer:
    """Writes records to partitions, in one transaction or without one.

    Args:
        transactions: with a transaction that has begun; or the producer id of an idempotent producer.
        limits: what the topics accept. A record with a timestamp that its topic refuses gets the time of writing.
        deadline: applies to everything this writer does.
        sequences: for an idempotent producer: the next sequence number of each partition. Updated by writes.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactions: Transactions | ProducerIdAndEpoch,
        limits: Mapping[str, TopicLimits],
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
        """Write rows with these keys, with their headers and timestamps. Keys of a table are never null."""
        keys, values, stamps, headers = [], [], [], []
        for key, row in found:
            keys.append(key)
            values.append(row.value)
            stamps.append(row.timestamp_ms)
            headers.append(row.headers)
        taken = timestamps.fitted(
            pa.array(stamps, pa.int64()),
            pa.array(headers, HEADERS) if any(headers) else None,
            self._limits[topic].times,
            clock_ms(),
        )
        if taken.refused:
            log.warning(
                "%s-%d: the topic does not accept the timestamps of %d records, for example %d (%s). They get the time "
                "of writing, and the header %s has their own",
                topic,
                partition,
                taken.refused,
                taken.example_ms,
                timestamps.in_utc(taken.example_ms),
                timestamps.ORIGINAL_TIMESTAMP,
            )
        self._send(topic, partition, keys, pa.array(values, pa.large_binary()), taken.headers, taken.times)

    def delete(self, topic: str, partition: int, keys: Iterable[bytes]) -> None:
        """Write tombstones."""
        self._send(topic, partition, list(keys), None, None, None)

    def finish(self) -> Mapping[tuple[str, int], Acknowledged]:
        """Wait until everything is acknowledged. Returns what was written to each partition."""
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
            max_batch_bytes=self._limits[topic].max_message_bytes,
            default_timestamp_ms=clock_ms(),
            stored=self._limits[topic].stored,
            large_with=CODECS,  # the flow may have compressed it
        ):
            self._producer.send(topic, partition, encoded)
            sequence = next_sequence(sequence, encoded.count)
        self._sequences[topic, partition] = sequence


def abort_anew(cluster: Cluster, transactions: Transactions) -> None:
    """Abort at once, on a new connection: the current one may be in the middle of a request.

    If that fails, the next InitProducerId or the transaction's timeout aborts the transaction.
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

"""When the first record of a range was written: from the headers of record batches, without decoding records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onceflow.client.cluster import Cluster
from onceflow.client.committed import Aborted
from onceflow.client.deadline import Deadline
from onceflow.client.fetching import READ_COMMITTED, PartitionFetch
from onceflow.protocol.decode import RawBatch

# One record batch is enough. It is returned as a whole, even if it is larger.
_FETCH_BYTES = 4 * 1024
_FETCHES_MAX = 16
_APPEND_TIME = 8  # an attribute of a batch: all of its records have its greatest timestamp


def first_timestamp(
    cluster: Cluster, topic: str, partition: int, start: int, end: int, deadline: Deadline
) -> int | None:
    """The timestamp, in epoch milliseconds, of the first committed record with an offset in ``[start, end)``.

    Returns:
        None: there is no such record, it has no timestamp, or it is far behind records of aborted transactions.

    Raises:
        OnceflowError: the leader does not answer before the deadline, or refuses the request.
    """
    reading = _FirstRecord(cluster, topic, partition, start, end, deadline, max_fetch_bytes=_FETCH_BYTES)
    for _ in range(_FETCHES_MAX):
        if reading.position >= end:
            break
        for stamp in reading.step():
            return stamp if stamp >= 0 else None
    return None


class _FirstRecord(PartitionFetch[int]):
    """Yields the timestamp of the first committed record of each batch."""

    isolation_level = READ_COMMITTED
    repeats_unknown_errors = True

    def _items(self, batches: Iterator[RawBatch], answer: Any) -> Iterator[int]:
        transactions = answer.aborted_transactions or ()
        aborted = Aborted((int(each.first_offset), int(each.producer_id)) for each in transactions)
        for raw in batches:
            if raw.base_offset >= self.end:
                self.position = self.end
                return
            if aborted.keeps(raw) and raw.last_offset >= self.position:
                yield raw.max_timestamp_ms if raw.attributes & _APPEND_TIME else raw.base_timestamp_ms
            self.position = max(self.position, raw.last_offset + 1)

    def _out_of_range(self, answer: Any) -> str:
        self.position = self.end
        return "the records are gone"

    def _stalled(self, *, empty: bool) -> None:
        self.position = self.end

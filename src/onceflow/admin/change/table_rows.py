"""Deletes all rows of a table, in a transaction of its flow: every key that has a row gets a tombstone.

Partitions are read one after the other, so memory is limited by the keys of one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from onceflow.admin.records.writer import Writer
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline

_SLICE = 20_000

Tell = Callable[[str, int, int], None]
"""Called with what is done, how many offsets are read, and of how many."""


def delete_rows(
    reader: CommittedReader,
    writer: Writer,
    ends: Mapping[str, Mapping[int, int]],
    deadline: Deadline,
    tell: Tell = lambda *_: None,
) -> int:
    """Write a tombstone for every row of these table topics. Returns how many rows that were.

    Args:
        ends: by topic and partition, where the committed records end.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    count, done, total = 0, 0, sum(sum(by_partition.values()) for by_partition in ends.values())
    for topic, by_partition in ends.items():
        for partition, end in by_partition.items():
            tell(f"deleting rows of {topic}", done, total)
            rows = _live(reader, topic, partition, end, deadline)
            for part in _slices(rows):
                writer.delete(topic, partition, part)
            writer.finish()  # no batch is in flight while the next partition is read
            count += len(rows)
            done += end
    return count


def _live(reader: CommittedReader, topic: str, partition: int, end: int, deadline: Deadline) -> list[bytes]:
    """Keys of the rows of a partition, in the order of their first records."""
    live: dict[bytes, None] = {}
    for chunk in reader.read(topic, partition, 0, end):
        if deadline.expired:
            raise deadline.error(f"{topic}-{partition} is read up to offset {chunk.next_offset} of {end}")
        for key, value in zip(chunk.keys, chunk.values, strict=True):
            if key is None:
                continue
            if value is None:
                live.pop(key, None)
            else:
                live[key] = None
    return [*live]


def _slices(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(keys)
    while part := list(islice(left, _SLICE)):
        yield part

"""Moves the rows of a table to the partitions that Kafka's default partitioner chooses among more partitions.

Old partitions are read one after the other. The rows that leave a partition are kept in memory until they are written,
so memory is limited by the rows of one partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.admin.records.writer import Row, Writer
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.clock import clock_ms
from onceflow.errors import ProgressConflictError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.partitioners import group_by_partition, murmur2
from onceflow.state.format import rows
from onceflow.state.local.move_marks import MARK_KEY, mark_headers

log = logging.getLogger("onceflow.state")

_SLICE_ROWS, _SLICE_BYTES = 20_000, 16_000_000

Ends = Mapping[int, int]
"""Partition -> offset up to which it is read."""


@dataclass(frozen=True)
class RepartitionProgress:
    """How far it is: the number of offsets read from the old partitions, their total, and the rows that have moved."""

    done: int
    total: int
    rows: int


class Repartitioner:
    """Finds the rows of a table that have to move, and moves them.

    Args:
        before, after: numbers of partitions. The rows are where the partitioner puts them with the first number.
        ends: the ends of all partitions, by topic.
        tell: called with the progress from time to time.
    """

    def __init__(
        self,
        reader: CommittedReader,
        table: str,
        *,
        before: int,
        after: int,
        ends: Mapping[str, Ends],
        tell: Callable[[RepartitionProgress], None],
    ) -> None:
        self._reader = reader
        self._table, self._internal = table, table + INTERNAL_SUFFIX
        self._before, self._after = before, after
        self._ends = ends
        self._tell = tell
        self._done = 0
        self._moved_ms = clock_ms()
        self._total = sum(by_partition[p] for by_partition in ends.values() for p in range(before))
        self.moved = {self._table: 0, self._internal: 0}
        self.records = self.ignored = 0

    def check_empty(self) -> None:
        """Check that the new partitions are empty: rows there would become state. Aborted rows of an earlier attempt
        are allowed.

        Raises:
            ProgressConflictError: another process has written there.
        """
        for topic, ends in self._ends.items():
            for partition in range(self._before, self._after):
                last: dict[bytes | None, bytes | None] = {}
                for chunk in self._reader.read(topic, partition, 0, ends[partition]):
                    last.update(zip(chunk.keys, chunk.values, strict=True))
                self._refuse(topic, partition, [key for key, value in last.items() if key and value is not None])

    def move(self, writer: Writer, deadline: Deadline) -> None:
        """Write every row that moves to its new partition, and a tombstone to the old one.

        Raises:
            ProgressConflictError: the table has records that no processor can have written.
            DeadlineExceededError: the deadline has passed.
        """
        self._mark(writer, ended=False)
        for topic, ends in self._ends.items():
            for partition in range(self._before):
                leaving = self._leaving(topic, partition, ends[partition], deadline)
                for target, by_key in leaving.items():
                    for part in _slices(by_key):
                        writer.write(topic, target, part)
                        writer.delete(topic, partition, [key for key, _ in part])
                        self.moved[topic] += len(part)
                writer.finish()  # no batch is in flight while the next partition is read
                self._advanced(0)
        self._mark(writer, ended=True)

    def _mark(self, writer: Writer, *, ended: bool) -> None:
        """Tell those who read the table, in each partition: rows move from here on, or until here (`move_marks`)."""
        mark = Row(None, self._moved_ms, mark_headers(self._after, self._moved_ms, ended=ended))
        for partition in range(self._after):
            writer.write(self._table, partition, [(MARK_KEY, mark)])

    # ---- rows ------------------------------------------------------------------------------------------

    def _leaving(self, topic: str, partition: int, end: int, deadline: Deadline) -> dict[int, dict[bytes, Row]]:
        """The last rows of the keys that leave a partition, by their new partition. Some may be tombstones."""
        leaving: dict[int, dict[bytes, Row]] = {}
        # Keys that belong to another partition already. After an earlier repartitioning these are deleted rows that
        # are not compacted yet.
        strays: dict[bytes, bytes | None] = {}
        for chunk in self._chunks(topic, partition, end, deadline):
            keys, values, headers = chunk.keys, chunk.values, chunk.headers
            stamps = chunk.timestamps_ms.tolist()
            homes, targets = self._places(_users(keys, internal=topic == self._internal))
            self.ignored += int(np.count_nonzero(homes < 0))
            leaves = np.flatnonzero((homes == partition) & (targets != partition))
            for target, found in group_by_partition(targets[leaves], self._after):
                leaving.setdefault(target, {}).update(
                    (keys[n], Row(values[n], stamps[n], headers.get(n))) for n in leaves[found].tolist()
                )
            for n in np.flatnonzero((homes >= 0) & (homes != partition)).tolist():
                strays[cast(bytes, keys[n])] = values[n]  # a key with a partition is not null
        self._refuse(topic, partition, [key for key, value in strays.items() if value is not None])
        return leaving

    def _places(self, users: Sequence[bytes | None]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The old and the new partition of each key, by Kafka's default partitioner; the old one is -1 for a null."""
        column = pa.array(users, pa.large_binary())
        hashes = murmur2(column) & np.int32(0x7FFF_FFFF)
        homes, targets = hashes % np.int32(self._before), hashes % np.int32(self._after)
        if column.null_count:
            homes[column.is_null().to_numpy(zero_copy_only=False)] = -1
        return homes, targets

    def _chunks(self, topic: str, partition: int, end: int, deadline: Deadline) -> Iterator[Chunk]:
        position = 0
        for chunk in self._reader.read(topic, partition, 0, end):
            if deadline.expired:
                raise deadline.error(f"{topic}-{partition} is read up to offset {position} of {end}")
            yield chunk
            self.records += len(chunk.keys)
            self._advanced(chunk.next_offset - position)
            position = chunk.next_offset

    def _advanced(self, offsets: int) -> None:
        self._done += offsets
        self._tell(RepartitionProgress(self._done, self._total, sum(self.moved.values())))

    # ---- checks ------------------------------------------------------------------------------------------

    def _refuse(self, topic: str, partition: int, strays: Sequence[bytes | None]) -> None:
        if strays:
            raise ProgressConflictError(
                f"Partition {partition} of {topic} holds rows whose keys belong to other partitions",
                topic=f"{topic}-{partition}",
                detail=f"{counted(len(strays), 'row')}, for example {(strays[0] or b'')[:100]!r}; they were not "
                f"placed by Kafka's default partitioner over {counted(self._before, 'partition')}, so the flow does "
                "not find them",
                next_step="find out who else writes to this topic, and delete those rows in that partition (a record "
                "with their key and no value)",
            )


def _users(keys: Sequence[bytes | None], *, internal: bool) -> Sequence[bytes | None]:
    """The user's key of each record. None for records that no processor has written; a restore ignores these, too."""
    if internal:
        return [None if key is None or not _is_internal(key) else rows.split(key[1:])[0] for key in keys]
    return keys


def _is_internal(key: bytes) -> bool:
    return key[:1] in (rows.MAP, rows.TIMER) and b"\0\0" in key


def _slices(by_key: Mapping[bytes, Row]) -> Iterator[list[tuple[bytes, Row]]]:
    """The rows without tombstones, in lists of limited size."""
    part: list[tuple[bytes, Row]] = []
    size = 0
    for key, row in by_key.items():
        if row.value is None:
            continue
        part.append((key, row))
        size += len(row.value)
        if len(part) >= _SLICE_ROWS or size >= _SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part

"""Copies the rows of a flow's tables while the flow runs, exactly as they are at one of its progress records.

A progress record names the ends of the table topics. The rows of the flow at that record are the last records of each
key before these ends. Compaction may already have removed such a record, because a newer one of its key follows, maybe
behind the ends. Then the key would be missing in a copy up to the ends. So a copy is made in this order:

1. Read everything up to the last stable offsets of the topics.
2. Note the last stable offsets again. Whatever was missing above has a newer record before these offsets.
3. Read the last progress record that is committed now. Each transaction of the flow has one, so its ends are behind
   all records of the flow before those offsets.
4. Read the rest, up to the ends that it names. If the log is whole there, and compaction has removed nothing from it,
   the newer records of step 2 are in it or were read before. The copy is exact. If not, repeat from step 2.

Tombstones are needed, too: they are kept for ``delete.retention.ms``. A copy must not take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from onceflow.admin.records.writer import Row, Writer
from onceflow.admin.versions.fork_plan import changed_meanwhile
from onceflow.client.committed import Chunk
from onceflow.client.deadline import Deadline
from onceflow.errors import ProgressConflictError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Offsets, Progress

_AT_END_S = 120.0  # how long a copy may be without one whole rest of the log

Tell = Callable[[str, int, int], None]
"""Called with what is done, how many offsets are read, and of how many."""


class Reader(Protocol):
    """Reads committed records, as `CommittedReader` does."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Chunk]:
        """Committed records with offsets in ``[start, end)``."""
        ...


class TableCopy:
    """One copy of all tables of a flow.

    Args:
        reader: reads the table topics.
        stable: returns the last stable offsets of all table topics.
        settled: returns the last committed progress of the flow (`SettledProgress.read`).
        topics: by topic, the topic that it is copied to.
        tombstone_ms: how long compaction keeps tombstones, at least, in milliseconds.
        clock: monotonic, in seconds.

    Attributes:
        records: how many records were copied.
        rounds: how often the rest of the log was read.
    """

    def __init__(
        self,
        reader: Reader,
        stable: Callable[[], Offsets],
        settled: Callable[[], Progress | None],
        names: Names,
        topics: Mapping[str, str],
        *,
        tombstone_ms: int,
        tell: Tell = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._stable, self._settled = stable, settled
        self._names = names
        self._topics = topics
        self._tombstone_ms = tombstone_ms
        self._tell = tell
        self._clock = clock
        self._position: dict[tuple[str, int], int] = {}
        self.records = self.rounds = 0

    def run(self, writer: Writer, before: Progress, deadline: Deadline) -> Progress:
        """Copy all rows. Returns the progress record that they belong to.

        Args:
            before: progress of the flow, as it was known when the copy was planned.

        Raises:
            ProgressConflictError: the flow has other tables than before, or another program writes to its tables;
                or tombstones may be gone before they were read.
            DeadlineExceededError: compaction removes records as fast as they are read, or the deadline has passed.
        """
        began = self._clock()
        self._copy(writer, self._stable(), deadline)
        rest = Deadline(deadline.capped(_AT_END_S), f"copying the tables of flow {self._names.flow}")
        while True:
            reached = self._stable()
            found = self._settled()
            if found is None or not _same_tables(before, found):
                raise changed_meanwhile(self._names)
            self._check_owner(found, reached)
            whole = self._copy(writer, found.changelogs, deadline)
            self.rounds += 1
            if whole:
                break
            rest.pause(self.rounds, "compaction has removed records that were not read yet")
        if (self._clock() - began) * 2000 >= self._tombstone_ms:
            raise ProgressConflictError(
                "The copy took so long that rows which were deleted meanwhile may be in it",
                flow=self._names.flow,
                detail=f"{self._clock() - began:.0f} s; tombstones are kept for {self._tombstone_ms / 1000:g} s",
                next_step=f"nothing was copied; give {', '.join(sorted(self._topics))} a longer delete.retention.ms "
                "(Kafka's default is a day), and run the command again",
            )
        return found

    def _copy(self, writer: Writer, ends: Offsets, deadline: Deadline) -> bool:
        """Copy up to these ends. Returns whether nothing was missing in the log."""
        whole = True
        total = sum(sum(by_partition.values()) for by_partition in ends.values())
        for topic, target in self._topics.items():
            for partition, end in ends[topic].items():
                start = self._position.get((topic, partition), 0)
                for chunk in self._reader.read(topic, partition, start, end):
                    if deadline.expired:
                        raise deadline.error(f"{topic}-{partition} is read up to {chunk.next_offset} of {end}")
                    self._write(writer, target, partition, chunk)
                    whole = whole and chunk.whole
                    self._position[topic, partition] = chunk.next_offset
                    self._tell(f"copying {topic}", sum(self._position.values()), total)
        return whole

    def _write(self, writer: Writer, target: str, partition: int, chunk: Chunk) -> None:
        """Write the last record of each key of a chunk, as it is."""
        stamps = chunk.timestamps_ms.tolist()
        last: dict[bytes | None, Row] = {
            key: Row(chunk.values[n], stamps[n], chunk.headers.get(n)) for n, key in enumerate(chunk.keys)
        }
        last.pop(None, None)  # compacted topics have no records without a key
        if last:
            writer.write(target, partition, last.items())
            writer.finish()  # no batch is in flight while the next chunk is read
            self.records += len(last)

    def _check_owner(self, found: Progress, reached: Offsets) -> None:
        """Every record before the offsets that were reached has to be before the ends of progress."""
        for topic in self._topics:
            for partition, end in found.changelogs[topic].items():
                chunks = self._reader.read(topic, partition, end, reached[topic][partition])
                if any(chunk.keys for chunk in chunks):
                    raise ProgressConflictError(
                        f"Another program has written to table topic {topic}",
                        flow=self._names.flow,
                        topic=f"{topic}-{partition}",
                        detail=f"records behind offset {end}, where the flow's progress ends",
                        next_step="find out who writes there; `onceflow verify` names such records. Once the flow has "
                        "changed its table again, they are a part of its state, and the command can be run again",
                    )


def _same_tables(before: Progress, found: Progress) -> bool:
    def known(progress: Progress) -> dict[str, tuple[str | None, list[int]]]:
        return {topic: (progress.topic_ids.get(topic), sorted(ends)) for topic, ends in progress.changelogs.items()}

    return known(before) == known(found)

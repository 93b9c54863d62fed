"""Checks the topics of a flow's tables without its code: where rows are, and whether a processor can have written them.

Of what a table should contain, nothing can be said without the processor: any row may be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.admin.verify.report import MISPLACED, STATE, Report, Tell
from onceflow.admin.verify.table_contents import key_of, what_of
from onceflow.admin.verify.tally import RecordOffset
from onceflow.client.cluster import Cluster
from onceflow.client.committed import Chunk, CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import EARLIEST, list_offsets
from onceflow.errors import counted
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.partitioners import key_partitions
from onceflow.protocol.progress import Progress, TableProgress
from onceflow.state.api.user_errors import shown
from onceflow.state.format import rows
from onceflow.state.local.format import is_internal_row

_CALL_S = 60.0


class TableAudit:
    """One audit of the tables of a flow. Memory grows with the number of keys in wrong partitions only.

    Args:
        report: findings are added to it.
        tell: is told what is read, how much of it is done, and of how much.
        check: called while something is waited for. It may raise, to end it.
    """

    def __init__(
        self, cluster: Cluster, report: Report, *, tell: Tell, check: Callable[[], None] = lambda: None
    ) -> None:
        self._cluster, self._report, self._tell = cluster, report, tell
        self._reader = CommittedReader(cluster, _CALL_S, check=check)

    def run(self, progress: Progress) -> None:
        """Check every table of the flow, up to the offsets that progress names.

        Raises:
            OnceflowError: a topic cannot be read.
        """
        for topic, ends in progress.changelogs.items():
            table = topic.removesuffix(INTERNAL_SUFFIX)
            known = progress.tables.get(table)
            internal = topic != table and known is not None
            span = {topic: sorted(ends)}
            first = list_offsets(self._cluster, span, EARLIEST, Deadline(_CALL_S, f"reading offsets of {topic}"))
            plain = 0
            for partition, end in sorted(ends.items()):
                part = _Partition(topic, partition, len(ends), internal, known or TableProgress())
                for chunk in self._reader.read(topic, partition, first[topic][partition], end):
                    for text, place in part.take(chunk):
                        self._report.add(STATE, text, [place])
                    plain += sum(last - start for start, last in chunk.plain)
                    self._tell(f"reading {topic}", chunk.next_offset, end)
                for text, place in part.misplaced():
                    self._report.add(MISPLACED, text, [place])
                self._report.checked["records of tables"] = (
                    self._report.checked.get("records of tables", 0) + part.records
                )
            if plain and not (known is not None and known.open_ended):
                self._report.notes.append(
                    f"{counted(plain, 'record')} of {topic} in no transaction: no processor wrote them"
                )


class _Partition:
    """What is read of a partition of a table's topic."""

    def __init__(self, topic: str, partition: int, count: int, internal: bool, known: TableProgress) -> None:
        self._topic, self._partition, self._count = topic, partition, count
        self._internal, self._known = internal, known
        self._elsewhere: dict[bytes, int | None] = {}
        """The offset of the last record of each key that belongs to another partition; None: a tombstone."""
        self.records = 0

    def take(self, chunk: Chunk) -> Iterator[tuple[str, RecordOffset]]:
        """Take records. Yields what is wrong with one, and where it is."""
        self.records += len(chunk.keys)
        offsets = chunk.offsets.tolist()
        usable: list[bytes | None] = []
        for row, (key, value) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            problem = self._problem(key, value, chunk.headers.get(row, ()))
            if problem:
                yield problem, RecordOffset(self._topic, self._partition, offsets[row])
            is_read = key is not None and not problem
            usable.append((key_of(key) if self._internal else key) if is_read and key is not None else None)
        placed = key_partitions(pa.array(usable, pa.large_binary()), self._count)
        wrong: Any = np.flatnonzero((placed >= 0) & (placed != self._partition))
        for at in wrong.tolist():
            found = chunk.keys[at]
            assert found is not None
            self._elsewhere[found] = None if chunk.values[at] is None else offsets[at]

    def misplaced(self) -> Iterator[tuple[str, RecordOffset]]:
        """Rows that are not in the partition of their key. They are not found by the processor."""
        for found, offset in self._elsewhere.items():
            if offset is not None:
                key, what = (key_of(found), what_of(found)) if self._internal else (found, "the value")
                right = int(key_partitions(pa.array([key], pa.binary()), self._count)[0])
                text = f"{what} of key {shown(key)} belongs to partition {right} of {self._count}"
                yield text, RecordOffset(self._topic, self._partition, offset)

    def _problem(self, key: bytes | None, value: bytes | None, headers: Any) -> str:
        """Why no processor can have written a record; empty: one can have."""
        if key is None:
            return "it has no key, so it is no row"
        if self._internal:
            return "" if is_internal_row(key, value) else "it is no row of a map, and no timer"
        for name, raw in headers:
            if name == rows.EXPIRES_HEADER and not _is_number(raw):
                return f"its header {name} is no number"
            if name == rows.VERSION_HEADER:
                if not _is_number(raw):
                    return f"its header {name} is no number"
                if int(raw) > self._known.version:
                    return f"it is of version {int(raw)} of the processor, the flow is at version {self._known.version}"
        return ""


def _is_number(raw: bytes | None) -> bool:
    try:
        int(raw or b"")
    except ValueError:
        return False
    return True

"""Refuses a start whose processor has a schema that cannot read the state which was kept.

Progress knows the ids of all schemas with which state was written. If one of them may be unreadable, by what the
schemas say, the rows of the table are looked through: the start is refused for a row that cannot be read, and never for
a schema alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.clock import clock_ms
from onceflow.errors import EnvironmentUnusableError, ProgressConflictError
from onceflow.protocol.progress import Progress, TableProgress
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.serdes import unreadable
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.format import rows
from onceflow.state.windows.processor import WindowProcessor

log = logging.getLogger("onceflow")

_NEXT_STEP = (
    "declare a schema that can read them, or raise the processor's `version` and define "
    "migrate(self, payload, from_version)"
)


def check_kept_schemas(
    cluster: Cluster, topics: TableTopics, processor: Processor | ColumnProcessor, progress: Progress
) -> None:
    """Read the rows of a table if some may be unreadable.

    Without a changelog, the rows are where tasks run: then a warning says what may be unreadable.

    Raises:
        ProgressConflictError: there is a row that cannot be read.
        EnvironmentUnusableError: the registry does not answer.
    """
    known = progress.tables.get(topics.table, TableProgress())
    serde = getattr(processor, "state", None)
    if known.version != processor.version or not known.schemas:
        return
    suspects = unreadable(serde, known.schemas)
    if not suspects:
        return
    table, changes = topics.table, "; ".join(suspects.values())
    if known.local is not None:
        log.warning("table %s may have rows that cannot be read, and then a batch fails: %s", table, changes)
        return
    log.info("table %s is searched for rows that cannot be read: %s", table, changes)
    look = _Look(processor, suspects)
    internal = (
        (topics.internal,) if isinstance(processor, WindowProcessor) else ()
    )  # other maps have serdes of their own
    for topic in (table, *internal):
        for partition, end in sorted(progress.changelogs[topic].items()):
            found = look.first_bad(_rows(CommittedReader(cluster), topic, partition, end, is_table=topic == table))
            if found is not None:
                raise ProgressConflictError(
                    f"Table {table} has state that the {getattr(serde, 'name', 'schema of the state')} cannot read",
                    topic=f"{topic}-{partition}",
                    detail=found,
                    next_step=_NEXT_STEP,
                )


class _Look:
    """Looks through the rows of partitions. Memory holds those of one partition that may be unreadable."""

    def __init__(self, processor: Any, suspects: Mapping[bytes, str]) -> None:
        self._decode: Callable[[bytes], Any] = processor.state.decode
        self._version = processor.version
        self._suspects = suspects
        self._length = {len(prefix) for prefix in suspects}.pop()
        self._now_ms = clock_ms()

    def first_bad(self, found: Iterator[tuple[bytes, rows.Row | None]]) -> str | None:
        """What is wrong with a row that cannot be read; None: all can be."""
        suspected: dict[bytes, bytes] = {}
        for key, row in found:
            if row is not None and self._is_suspect(row):
                suspected[key] = row.payload
            else:
                suspected.pop(key, None)
        for key, payload in suspected.items():
            try:
                self._decode(payload)
            except EnvironmentUnusableError:
                raise
            except Exception as error:
                changes = self._suspects[payload[: self._length]]
                return f"the row of {key!r:.100} has the {changes} ({error})"
        return None

    def _is_suspect(self, row: rows.Row) -> bool:
        is_live = row.expires_ms is None or row.expires_ms > self._now_ms
        return is_live and row.version == self._version and row.payload[: self._length] in self._suspects


def _rows(
    reader: CommittedReader, topic: str, partition: int, end: int, *, is_table: bool
) -> Iterator[tuple[bytes, rows.Row | None]]:
    """The rows of a partition in the order of the log, by their keys; None: it is deleted."""
    for chunk in reader.read(topic, partition, 0, end):
        for at, (key, value) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            if key is None or not (is_table or key[:1] == rows.MAP):
                continue
            if value is None:
                yield key, None
            else:
                yield key, rows.unpack(rows.from_record(value, chunk.headers.get(at, ())) if is_table else value)

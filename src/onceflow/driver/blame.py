"""Finds the record of which a query cannot make rows: Spark's error does not name it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.state.api.user_errors import shown
from onceflow.task.source_rows import QueryRows

_SECONDS = 5.0
"""How long it is looked for: the batch has failed already, and a part of it may take as long as the whole did."""


def culprit(
    queries: Iterable[QueryRows],
    sources: Iterable[tuple[TopicPartition, RecordColumns]],
    *,
    clock: Callable[[], float] = monotonic,
) -> str:
    """The place and the key of the first record that a query fails for by itself, as text.

    Empty: none does, or it was not found in time. The query runs over halves of the records again and again, and
    nothing of that is written.
    """
    until = clock() + _SECONDS
    listed = list(sources)
    for query in queries:
        for place, records in listed:
            found = _narrowed(partial(_fails, query, place), records, until, clock)
            if found is not None:
                topic, partition = place
                return f"{topic}-{partition}@{found.offsets[0]}, key {shown(found.keys[0].as_py())}"
    return ""


def _narrowed(
    fails: Callable[[RecordColumns], bool], records: RecordColumns, until: float, clock: Callable[[], float]
) -> RecordColumns | None:
    if not len(records) or clock() > until or not fails(records):
        return None
    while len(records) > 1:
        middle = len(records) // 2
        first, second = records.slice(0, middle), records.slice(middle, len(records))
        if clock() > until:
            return None
        if fails(first):
            records = first
        elif fails(second):
            records = second
        else:
            return None
    return records


def _fails(query: QueryRows, place: TopicPartition, records: RecordColumns) -> bool:
    try:
        for _ in query.of([(place, records)]):
            pass
    except Exception:  # of Spark, of Arrow, of a function of the user's: whatever has ended the batch
        return True
    return False

"""Finds the record that a batch fails for: of which a query cannot make rows, or whose rows a topic does not take.

Spark's error does not name it, and the rows of a query do not say of which record they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import monotonic

import pyarrow as pa

from onceflow.protocol.names import TopicPartition
from onceflow.protocol.record_columns import RecordColumns
from onceflow.spark import jvm
from onceflow.state.api.user_errors import shown
from onceflow.task.source_rows import QueryRows

_SECONDS = 15.0
"""How long it is looked for: the batch has failed already, and a part of it may take as long as the whole did."""

Alike = Callable[[Exception], bool]


def any_error(error: Exception) -> bool:
    """The `Alike` of a search in which every error counts."""
    return True


def alike_to(problem: BaseException) -> Alike:
    """Whether another error may have the cause of this one. If a user function has raised it, one of another class has
    not: a function that takes many rows at once may fail in another way for few of them."""
    raised = jvm.raised_by_function(problem)
    return lambda error: not raised or jvm.raised_by_function(error) == raised


def culprit(
    queries: Iterable[QueryRows],
    sources: Iterable[tuple[TopicPartition, RecordColumns]],
    *,
    refuses: Callable[[Iterator[pa.RecordBatch]], bool] | None = None,
    alike: Alike = any_error,
    clock: Callable[[], float] = monotonic,
) -> str:
    """The place and the key of the first record that a query fails for by itself, as text.

    Empty: none does, or it was not found in time. The query runs over halves of the records again and again, and
    nothing of that is written.

    Args:
        refuses: whether rows cannot be written. None: they are made, and no more.
        alike: whether an error counts, see `alike_to`.
    """
    until = clock() + _SECONDS
    listed = list(sources)
    for query in queries:
        for topic_partition, records in listed:
            found = _narrowed(partial(_fails, query, topic_partition, refuses or _made, alike), records, until, clock)
            if found is not None:
                topic, partition = topic_partition
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


def culprit_of_range(
    ranges: Iterable[tuple[str, int, int, int]],
    fails: Callable[[str, int, int, int], bool],
    *,
    clock: Callable[[], float] = monotonic,
) -> str:
    """As `culprit`, of records that tasks read: the place alone, or a range in which it is.

    Args:
        ranges: topic, partition, first offset, and the one behind the last.
        fails: runs the query over such a range in tasks.
    """
    until = clock() + _SECONDS
    for topic, partition, start, end in ranges:
        if clock() > until:
            break
        if not fails(topic, partition, start, end):
            continue
        seen = True
        while end - start > 1 and clock() < until:
            middle = (start + end) // 2
            seen = fails(topic, partition, start, middle)
            start, end = (start, middle) if seen else (middle, end)
        if not seen and not fails(topic, partition, start, end):  # it fails with other records only, or by chance
            return ""
        last = "" if end - start == 1 else f" to {end - 1}"  # one of them
        return f"{topic}-{partition}@{start}{last}"
    return ""


def _made(rows: Iterator[pa.RecordBatch]) -> bool:
    for _ in rows:
        pass
    return False


def _fails(
    query: QueryRows,
    topic_partition: TopicPartition,
    refuses: Callable[[Iterator[pa.RecordBatch]], bool],
    alike: Alike,
    records: RecordColumns,
) -> bool:
    try:
        return refuses(query.of([(topic_partition, records)]))
    except Exception as error:  # of Spark, of Arrow, of a function of the user's: whatever has ended the batch
        return alike(error)

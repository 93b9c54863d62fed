"""The progress records of a flow that the log still has, in order, and whether each continues the one before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onceflow.client.log_reader import LogRecord, Marker
from onceflow.protocol import progress as records
from onceflow.protocol.progress import Offsets, Progress


def committed_records(items: Iterable[LogRecord | Marker], key: bytes, stable: int) -> list[LogRecord]:
    """The committed records with this key, in order of their offsets.

    Args:
        items: records and markers of the partition, in order.
        stable: the last stable offset. Compaction may have removed the marker of a transaction below it; then it was
            committed, because an aborted one keeps its marker as long as its records.
    """
    open_: dict[int, list[LogRecord]] = {}
    found: list[LogRecord] = []
    for item in items:
        if isinstance(item, Marker):
            ended = open_.pop(item.producer_id, [])
            found += ended if item.committed else []
        elif item.key == key:
            if item.producer_id < 0:
                found.append(item)
            else:
                open_.setdefault(item.producer_id, []).append(item)
    found += [each for waiting in open_.values() for each in waiting if each.offset < stable]
    return sorted(found, key=lambda each: each.offset)


def breaks(history: Iterable[LogRecord]) -> Iterator[str]:
    """What is wrong between a batch and the next one.

    A reset, a move in time and an import begin anew. Compaction leaves gaps: there, nothing is said.
    """
    before: Progress | None = None
    for record in history:
        if record.value is None:
            before = None
            continue
        now = records.decode(record.key, record.value)
        if before is not None and now.batch_id == before.batch_id + 1:
            where = f"batch {now.batch_id} (offset {record.offset} of the progress topic)"
            for what, old, new in (
                ("source", before.offsets, now.offsets),
                ("table", before.changelogs, now.changelogs),
            ):
                for place, was, is_ in _backwards(old, new, before, now, source=what == "source"):
                    yield f"{where}: {what} {place} went back from {was} to {is_}"
            if now.producer_id == before.producer_id >= 0 and now.producer_epoch < before.producer_epoch:
                yield f"{where}: the producer epoch went back from {before.producer_epoch} to {now.producer_epoch}"
        before = now


def _backwards(
    old: Offsets, new: Offsets, before: Progress, now: Progress, *, source: bool
) -> Iterator[tuple[str, int, int]]:
    for topic, offsets in old.items():
        if source and before.topic_ids.get(topic) != now.topic_ids.get(topic):
            continue  # it was deleted and created again
        for partition, offset in offsets.items():
            later = new.get(topic, {}).get(partition)
            if later is not None and later < offset:
                yield f"{topic}-{partition}", offset, later

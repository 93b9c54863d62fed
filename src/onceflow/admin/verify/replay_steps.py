"""Divides the source range of a flow into steps for a replay: the batches that the progress records still show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onceflow.client.log_reader import LogRecord
from onceflow.driver.record.handover import owes_timers, timers_until, unfired
from onceflow.errors import OptionError
from onceflow.protocol import progress as records
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import Offsets, Progress, TimerId


@dataclass(frozen=True)
class Step:
    """A part of the source range.

    Args:
        start, end: offsets by topic and partition.
        watermark_ms: the watermark of the batch, if it is one; None: not known.
        watermark_after_ms: the watermark that the batch has committed.
        now_ms: about the processing time, epoch milliseconds.
        is_batch: whether the flow has committed exactly this part as one batch.
        without_outputs: whether an earlier version has written the outputs of this part, see
            ``driver/record/handover.py``.
        timers_until, unfired: see `AttemptContext`.
    """

    start: Offsets
    end: Offsets
    watermark_ms: int | None
    watermark_after_ms: int | None
    now_ms: int
    is_batch: bool
    without_outputs: bool = False
    timers_until: Mapping[str, int] | None = None
    unfired: frozenset[TimerId] = frozenset()


def lives(history: Sequence[LogRecord]) -> list[list[Progress]]:
    """The progress records between the resets that have deleted progress, the oldest first. The last life goes on."""
    found: list[list[Progress]] = [[]]
    for each in history:
        if each.value is None:
            found.append([])
        else:
            found[-1].append(records.decode(each.key, each.value))
    return found


def current_life(history: Sequence[LogRecord]) -> list[Progress]:
    """The progress records since the flow was reset last, the oldest first."""
    return lives(history)[-1]


def first_start(life: Sequence[Progress]) -> dict[str, dict[int, int]]:
    """Where the flow has begun to read each topic, as far as progress records still say so.

    A start commits where it begins to read, under the number of the batch before it. Compaction removes that record
    some time after the first batches.
    """
    found: dict[str, dict[int, int]] = {}
    known: Mapping[str, Mapping[int, int]] = {}
    batch = 0
    for each in life:
        if each.batch_id == batch:
            for topic in each.offsets.keys() - known.keys() - found.keys():
                found[topic] = dict(each.offsets[topic])
        batch, known = each.batch_id, each.offsets
    return found


def begun_at(life: Sequence[Progress], given: Offsets | None) -> dict[str, dict[int, int]]:
    """Where the flow has begun to read: as somebody says for single partitions, else as `first_start`."""
    found = first_start(life)
    for topic, offsets in (given or {}).items():
        found[topic] = {**found.get(topic, {}), **offsets}
    return found


def check_export(since: Progress, now: Progress, table: str, flow: str) -> None:
    """Refuse an export of progress whose positions are not those of the table as it is now.

    Raises:
        OptionError: it is of another flow, or the table was repartitioned or created again since then.
    """
    names = [name for name in (table, table + INTERNAL_SUFFIX) if name in now.changelogs]
    if since.flow != now.flow:
        why = f"it is of flow {since.flow}"
    elif not names or any(
        since.changelogs.get(name, {}).keys() != now.changelogs[name].keys()
        or since.topic_ids.get(name, now.topic_ids.get(name)) != now.topic_ids.get(name)
        for name in names
    ):
        why = f"table {table} was created or repartitioned since then, or has no changelog"
    else:
        return
    raise OptionError(
        f"A replay cannot begin at this export: {why}",
        flow=flow,
        next_step="give a newer export of this flow, or replay from the beginning",
    )


def went_back(life: Sequence[Progress]) -> bool:
    """Whether the flow was moved back in time, so that it has read some records again."""
    return any(
        later < offset
        for before, now in pairwise(life)
        for topic, offsets in before.offsets.items()
        for partition, offset in offsets.items()
        if (later := now.offsets.get(topic, {}).get(partition)) is not None
    )


def was_changed(life: Sequence[Progress], table: str) -> bool:
    """Whether a command has deleted the rows of a table, or written others, between two batches."""
    for before, now in pairwise(life):
        if now.batch_id != before.batch_id:
            continue
        for topic in (table, table + INTERNAL_SUFFIX):
            old, new = before.changelogs.get(topic, {}), now.changelogs.get(topic, {})
            same = before.topic_ids.get(topic) == now.topic_ids.get(topic) and old.keys() == new.keys()
            if same and old != new:
                return True
        locals_ = [each.tables[table].local for each in (before, now) if table in each.tables]
        if len({local.table_id for local in locals_ if local is not None}) > 1:
            return True
    return False


def steps(begin: Offsets, before: Progress | None, life: Sequence[Progress], table: str) -> Iterator[Step]:
    """The steps from a position to the last of some progress records.

    Args:
        begin: where each partition begins; one that is not named begins at 0.
        before: the progress at the beginning, if it is known.
        life: the progress records from there on.
        table: whose watermark counts.
    """
    position = {topic: dict(offsets) for topic, offsets in begin.items()}
    for now in life:
        if before is not None and now.batch_id == before.batch_id:
            for topic, offsets in now.offsets.items():  # a start, or a move in time: here reading goes on
                position[topic] = {**position.get(topic, {}), **offsets}
            before = now
            continue
        is_batch = before is not None and now.batch_id == before.batch_id + 1
        start = {topic: {p: position.get(topic, {}).get(p, 0) for p in each} for topic, each in now.offsets.items()}
        end = {
            topic: {p: max(offset, start[topic][p]) for p, offset in each.items()}
            for topic, each in now.offsets.items()
        }
        without_outputs = before is not None and before.handover is not None
        until = timers_until(before, table) if before is not None else None
        if is_batch and before is not None:
            at_ms, kept = _watermark(before, table), unfired(before, table)
            if until is not None and "event" in until and at_ms is not None and owes_timers(before):
                at_ms = max(at_ms, until["event"])  # see `TableState.not_before`
            yield Step(start, end, at_ms, _watermark(now, table), now.time_ms, True, without_outputs, until, kept)
        elif start != end:
            yield Step(start, end, None, None, now.time_ms, False, without_outputs, until)
        position.update(end)
        before = now


def _watermark(progress: Progress | None, table: str) -> int | None:
    known = None if progress is None else progress.tables.get(table)
    return None if known is None else known.watermark_ms

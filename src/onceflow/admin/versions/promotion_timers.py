"""The timers that a flow has not fired, although they are due before others that have fired.

A progress record says up to when timers have fired, and in which partitions such timers may be left
(`TableProgress.unfired`). In these, the rows of the table say which ones they are. Usually there are none, and nothing
is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onceflow.admin.versions.table_copy import Reader
from onceflow.client.deadline import Deadline
from onceflow.errors import ProgressConflictError, counted
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import Progress, TimerId
from onceflow.state.api.timers import timer_of
from onceflow.state.format import rows
from onceflow.state.windows.panes import TIMER as WINDOW_TIMER

TIMERS_MAX = 2000
"""So many are handed over: they are in the progress record, and in the orders of tasks."""

Unfired = Mapping[str, frozenset[TimerId]]
"""Timers by table."""


def unfired(
    reader: Reader, progress: Progress, tables: Iterable[str], deadline: Deadline
) -> dict[str, frozenset[TimerId]]:
    """Timers of these tables that are due before timers that have fired, and are left.

    Args:
        progress: of a flow that is fenced, so that its rows do not change.

    Raises:
        DeadlineExceededError: the rows cannot be read in time.
        DataLossError, ProtocolError, OnceflowError: they cannot be read.
    """
    found: dict[str, frozenset[TimerId]] = {}
    for table in tables:
        fired = progress.tables[table].fired
        ids = {
            each
            for partition in progress.tables[table].unfired
            for each in _timers(reader, progress, table, partition, deadline)
            if each.at_ms <= fired.get(each.clock, each.at_ms - 1)
        }
        if ids:
            found[table] = frozenset(ids)
    return found


def check_unfired(old: Unfired, new: Unfired, before: Progress, after: Progress, pairs: Mapping[str, str]) -> Unfired:
    """What is handed over: by table of the new flow, the timers whose outputs are not written.

    Args:
        old, new: timers that both flows have left. before, after: their progress.
        pairs: tables of the old flow, and their copies.

    Raises:
        ProgressConflictError: the new flow may have fired some of them, so that nobody would write their outputs; or
            there are too many; or some close windows, so it is not known which windows of their keys are closed.
    """
    for table, ids in old.items():
        fired = after.tables[pairs[table]].fired
        gone = [
            each
            for each in sorted(ids - new.get(pairs[table], frozenset()))
            if each.at_ms <= fired.get(each.clock, each.at_ms - 1)
        ]
        if gone:
            raise _not_yet(
                f"The new version may have fired {counted(len(gone), 'timer')} of table {pairs[table]} that flow "
                f"{before.flow!r} has not fired",
                before,
                f"{gone[0].name!r} of key {bytes.fromhex(gone[0].key)!r}, {gone[0].clock} time {gone[0].at_ms}",
            )
        if any(each.name == WINDOW_TIMER for each in ids):  # it closes all windows of its key up to the watermark
            raise _not_yet(
                f"Flow {before.flow!r} has not closed all windows that are due in table {table}",
                before,
                f"{len(ids):,} keys have such windows",
            )
    count = sum(map(len, old.values()))
    if count > TIMERS_MAX:
        raise _not_yet(
            f"Flow {before.flow!r} has {count:,} timers that are due and have not fired, which is too many for a "
            "promotion",
            before,
            f"at most {TIMERS_MAX:,}",
        )
    return {pairs[table]: ids for table, ids in old.items()}


def _not_yet(what: str, old: Progress, detail: str) -> ProgressConflictError:
    return ProgressConflictError(
        what,
        flow=old.flow,
        detail=detail,
        next_step="nothing has changed. Start the old version if it does not run, and let it fire them (`onceflow "
        "status` shows its timers); then run the command again",
    )


def _timers(reader: Reader, progress: Progress, table: str, partition: int, deadline: Deadline) -> set[TimerId]:
    """All timers of a partition."""
    internal = table + INTERNAL_SUFFIX
    left: dict[bytes, bytes] = {}
    for key, row in _records(reader, internal, partition, progress.changelogs[internal][partition], deadline):
        if key[:1] == rows.TIMER:
            if row is None:
                left.pop(key, None)
            else:
                left[key] = row
    return {_timer_id(key, row) for key, row in left.items()}


def _records(
    reader: Reader, topic: str, partition: int, end: int, deadline: Deadline
) -> Iterator[tuple[bytes, bytes | None]]:
    for chunk in reader.read(topic, partition, 0, end):
        if deadline.expired:
            raise deadline.error(f"{topic}-{partition} is read up to {chunk.next_offset} of {end}")
        for key, value in zip(chunk.keys, chunk.values, strict=True):
            if key is not None:
                yield key, value


def _timer_id(row_key: bytes, row: bytes) -> TimerId:
    key, name = rows.timer_parts(row_key)
    at_ms, clock = timer_of(row)
    return TimerId(key.hex(), name.decode(), clock, at_ms)

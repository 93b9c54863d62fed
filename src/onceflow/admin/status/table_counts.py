"""What a table has in Kafka: its topic and its companion topic are read, into scratch stores on disk."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.clock import clock_ms
from onceflow.state.format import rows
from onceflow.state.local.format import Goal
from onceflow.state.local.opening import open_partition
from onceflow.state.stores.base import Store
from onceflow.state.stores.lmdb_store import LmdbStore

_CLOCKS = {b"e": "event", b"p": "processing"}


@dataclass(frozen=True)
class TableCounts:
    """The rows of a table as they are committed. Rows that have expired count until the flow deletes them.

    Args:
        values, entries, timers: how many keys have a value; entries of maps and lists; timers that are registered.
        timers_due: those whose time has come: that of this machine, or the watermark of the flow.
        next_timer_ms: the earliest time per clock, ``event`` and ``processing``; None: there is no timer.
        records: how many records were read for it.
    """

    values: int
    entries: int
    timers: int
    timers_due: int
    next_timer_ms: Mapping[str, int | None]
    records: int


def count_rows(
    cluster: Cluster,
    table: str,
    ends: Mapping[int, int],
    internal_ends: Mapping[int, int],
    watermark_ms: int | None,
) -> TableCounts:
    """Read a table up to its committed ends. Memory does not grow with its size; the disk has one partition at a time.

    Args:
        ends, internal_ends: committed end offsets of the table topic and its companion topic, by partition.
        watermark_ms: of the flow, epoch milliseconds; None: it has none.

    Raises:
        OnceflowError: a topic cannot be read, or the folder for scratch files cannot be used.
    """
    reader, now_ms = CommittedReader(cluster), clock_ms()
    kinds: Counter[str] = Counter()
    due = records = 0
    soonest: dict[str, int | None] = dict.fromkeys(_CLOCKS.values())
    for partition, end in sorted(ends.items()):
        goal = Goal("", table, partition, "", "", end, internal_ends.get(partition, 0))
        with tempfile.TemporaryDirectory(prefix="onceflow-status-") as scratch:
            folder = Path(scratch)
            opened = open_partition(folder, LmdbStore, goal, reader, verify=False, now_ms=now_ms)
            with closing(opened.store) as store:
                kinds.update(store.rows_by_kind())
                records += opened.records
                for code, clock in _CLOCKS.items():
                    until_ms = now_ms if clock == "processing" else watermark_ms
                    first_ms, count = _timers(store, code, until_ms)
                    due += count
                    known_ms = soonest[clock]
                    if first_ms is not None and (known_ms is None or first_ms < known_ms):
                        soonest[clock] = first_ms
            LmdbStore.remove(folder)
    return TableCounts(kinds["v"], kinds["m"], kinds["t"], due, soonest, records)


def _timers(store: Store, code: bytes, until_ms: int | None) -> tuple[int | None, int]:
    """The time of the first timer on a clock, and how many are not after ``until_ms``."""
    first_ms, count = None, 0
    start = rows.TIMER_INDEX + code
    for key, _ in store.scan(start, rows.after(start)):
        _, at_ms, _, _ = rows.timer_index_parts(key)
        first_ms = at_ms if first_ms is None else first_ms
        if until_ms is None or at_ms > until_ms:
            break
        count += 1
    return first_ms, count

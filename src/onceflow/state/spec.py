"""What the driver sends to the tasks of a process step, and what they report.

`ProcessSpec` is the same for the whole query. `AttemptContext` is different for every attempt of a batch. Tasks
return a `StateReport` for every partition of the table that they have worked on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onceflow.host.identity import host_identity
from onceflow.protocol.versions import TimerId
from onceflow.state.api.deduplication import Deduplication
from onceflow.state.api.processor import ColumnProcessor, Processor
from onceflow.state.api.time_joins import TimeJoin
from onceflow.state.changelog.topics import TableTopics
from onceflow.state.joins.spec import Ends, JoinSpec
from onceflow.state.local.format import CommitId, Goal, default_state_dir, partition_folder
from onceflow.state.stores.base import Store


@dataclass(frozen=True)
class ProcessSpec:
    """One call of ``Flow.process``. It is sent to the tasks together with their code.

    Args:
        flow: the flow's name.
        flow_key: the flow's name with its prefix. Local folders are named after it.
        source_topic: the topic of rows that have no topic column; None if the flow reads several topics.
        default_ttl_ms: how long rows live that were put without a ttl; None: forever.
        max_timers_per_batch: how many timers may fire in one partition; None: all that are due.
        max_dead_letters: limit for one run; below 1: a share of its records; None: no limit.
        joins: tables that the step's user code looks up rows in.
        state_dir: folder of the local stores; None: `default_state_dir` of each host.
    """

    flow: str
    flow_key: str
    processor: Processor | ColumnProcessor
    topics: TableTopics
    store: type[Store]
    state_dir: Path | None = None
    on_error: str = "fail"
    dead_letter_topic: str | None = None
    late_topic: str | None = None
    default_ttl_ms: int | None = None
    source_topic: str | None = None
    max_timers_per_batch: int | None = None
    max_dead_letters: int | float | None = None
    joins: tuple[JoinSpec, ...] = ()

    @property
    def table(self) -> str:
        return self.topics.table

    def without_code(self) -> ProcessSpec:
        """The same for tasks that do not process records. They may lack a module that the user's code needs."""
        return self if isinstance(self.processor, Deduplication | TimeJoin) else replace(self, processor=Processor())

    @property
    def side_topics(self) -> dict[str, str]:
        """The topics of dead letters, late records and duplicates, each with the kind of its records."""
        named = {self.late_topic: "late", self.dead_letter_topic: "dead letter"}
        if isinstance(self.processor, Deduplication):
            named = {self.processor.duplicates_topic: "duplicate", **named}
        return {topic: role for topic, role in named.items() if topic is not None}

    def folder(self, partition: int) -> Path:
        """The folder of a partition's local store on this host."""
        return partition_folder(self._state_dir(), self.flow_key, self.table, partition)

    def location(self) -> str:
        """Identity of the host since its last start, and its state folder: executors of one host may have different
        folders."""
        return f"{host_identity()}:{os.path.realpath(self._state_dir())}"

    def _state_dir(self) -> Path:
        return default_state_dir() if self.state_dir is None else self.state_dir


@dataclass(frozen=True)
class AttemptContext:
    """The times and the committed offsets with which a batch begins. They are the same for all its tasks.

    Args:
        now_ms: processing time in epoch milliseconds.
        watermark_ms: the watermark; None if it is not known.
        table_ends, internal_ends: committed end offsets of the two topics, per partition. Without a changelog: the
            number of the batch that has changed the partition last, and 0.
        last: per partition, the transaction that last committed something to it, if it is known.
        verified: location (`ProcessSpec.location`) and partition of the local stores that were verified in this run.
            After a restart, a machine counts as another location.
        joined: at which offsets the batch sees the topics that the flow joins with, by topic and partition.
        open_ended: see `TableProgress`.
        timers_until: by clock, the time up to which timers may fire; a clock without an entry fires none. None: all
            that are due may fire.
        unfired: timers before that time that may not fire either.
    """

    batch: int
    commit: CommitId
    now_ms: int
    watermark_ms: int | None
    table_ends: Mapping[int, int]
    internal_ends: Mapping[int, int]
    last: Mapping[int, CommitId]
    verified: frozenset[tuple[str, int]] = frozenset()
    joined: Ends = field(default_factory=dict)
    open_ended: bool = False
    timers_until: Mapping[str, int] | None = None
    unfired: frozenset[TimerId] = frozenset()

    def limited(self, until: Mapping[str, int], unfired: frozenset[TimerId]) -> AttemptContext:
        """The same, but timers fire as they have in an earlier version, which may be behind in event time."""
        watermark_ms = self.watermark_ms
        if watermark_ms is not None and "event" in until:
            watermark_ms = min(watermark_ms, until["event"])
        return replace(self, watermark_ms=watermark_ms, timers_until=until, unfired=unfired)

    def goal(self, spec: ProcessSpec, partition: int) -> Goal:
        """What the local store of a partition must contain before anything is read from it."""
        return Goal(
            flow=spec.flow_key,
            table=spec.topics.table,
            partition=partition,
            table_id=spec.topics.table_id,
            internal_id=spec.topics.internal_id,
            table_end=self.table_ends[partition],
            internal_end=self.internal_ends[partition],
            last=self.last.get(partition),
            changelog=spec.topics.changelog,
            open_ended=self.open_ended,
        )

    def to_json(self) -> str:
        """The moment as text for a local property of Spark. It contains no secrets."""
        return json.dumps(
            {
                "batch": self.batch,
                "commit": self.commit,
                "now_ms": self.now_ms,
                "watermark_ms": self.watermark_ms,
                "table_ends": list(self.table_ends.items()),
                "internal_ends": list(self.internal_ends.items()),
                "last": list(self.last.items()),
                "verified": sorted(self.verified),
                "open_ended": self.open_ended,
                "unfired": sorted(self.unfired),
                "timers_until": None if self.timers_until is None else dict(self.timers_until),
                "joined": {topic: list(ends.items()) for topic, ends in self.joined.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> AttemptContext:
        fields = json.loads(text)
        return cls(
            batch=fields["batch"],
            commit=CommitId(*fields["commit"]),
            now_ms=fields["now_ms"],
            watermark_ms=fields["watermark_ms"],
            table_ends=dict(fields["table_ends"]),
            internal_ends=dict(fields["internal_ends"]),
            last={partition: CommitId(*commit) for partition, commit in fields["last"]},
            verified=frozenset((location, partition) for location, partition in fields["verified"]),
            joined={topic: dict(ends) for topic, ends in fields["joined"].items()},
            open_ended=fields["open_ended"],
            timers_until=fields["timers_until"],
            unfired=frozenset(TimerId(*each) for each in fields["unfired"]),
        )


#: The kinds of rows that are counted: values of keys, entries of maps and lists, and timers.
ROW_KINDS = ("value", "entry", "timer")


@dataclass(frozen=True)
class StateReport:
    """What happened to one partition of a table in one task.

    Args:
        location: the host since its last start, and its state folder (`ProcessSpec.location`).
        how, why: how the local store was brought up to date, and what was wrong with it, see `Opened`.
        restored: how many records were read for that.
        table_end, internal_end: end offsets of the topics after this batch; None: nothing was written to them.
            Without a changelog, ``table_end`` is the number of this batch if it has changed the partition.
        max_event_ms: latest event time per source topic and partition.
        untimed: source topics and partitions with records whose event time is not known.
        next_timer_ms: the earliest time at which something is due, per clock. Expiry of rows belongs to ``processing``.
        processing_timers: whether there are timers in processing time.
        counts: see ``engine.base.COUNTS``.
        timers_left: whether more timers were due than one batch may fire.
        fired: the clocks of which a timer has fired.
        causes: of dead letters, by class of the cause: their number, and a description of the first one.
        rows: how many rows the local store has after this batch, by `ROW_KINDS`; empty: not known.
        nbytes: its size on disk; None: it is not on disk.
    """

    table: str
    partition: int
    location: str
    commit: CommitId
    how: str
    restored: int
    restore_seconds: float
    table_end: int | None
    internal_end: int | None
    max_event_ms: Mapping[tuple[str | None, int], int] = field(default_factory=dict)
    next_timer_ms: Mapping[str, int | None] = field(default_factory=dict)
    processing_timers: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    timers_left: bool = False
    fired: frozenset[str] = frozenset()
    causes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    why: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    nbytes: int | None = None
    untimed: frozenset[tuple[str | None, int]] = frozenset()

    @property
    def changed(self) -> bool:
        """Whether the batch has changed the partition."""
        return self.table_end is not None or self.internal_end is not None

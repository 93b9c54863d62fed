"""The driver's view of a table: what is committed, and what the tasks of the next batch need to know."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from onceflow import hooks
from onceflow.errors import BatchAbortedError, ProgressConflictError
from onceflow.planning.dead_letter_limit import NO_LETTERS, DeadLetters, Letters, letters_of
from onceflow.protocol.progress import NO_TIMER, Progress, TableProgress
from onceflow.state.api.serdes import schema_id
from onceflow.state.engine.retry import Retry
from onceflow.state.engine.shapes import declared_fields
from onceflow.state.engine.watermark import Origin, Watermark
from onceflow.state.local.catch_up import BEHIND, CAUGHT_UP, LOST, RESTORED
from onceflow.state.local.format import CommitId
from onceflow.state.prepare import Prepared
from onceflow.state.spec import ROW_KINDS, AttemptContext, ProcessSpec, StateReport
from onceflow.state.table_facts import TableFacts

log = logging.getLogger("onceflow.state")

CLOCKS = ("event", "processing")

_Timers: TypeAlias = Mapping[int, Mapping[str, int | None]]
"""The earliest timer, by partition and clock."""


class TableState:
    """Driver's view of one table of a running flow.

    Args:
        progress: committed progress. It contains the table's topics, because ``Flow.process`` has added them.
        source_partitions: partitions of the topics that reach the step, for event time; none: it is behind another one.
        transactions: whether the run writes in transactions.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        progress: Progress,
        *,
        source_partitions: Iterable[Origin],
        lateness_ms: int | None,
        idle_s: float,
        clock_s: float | None = None,
        transactions: bool = True,
    ) -> None:
        self.spec = spec
        topics = spec.topics
        known = progress.tables.get(topics.table, TableProgress())
        self._local = known.local
        self.open_ended = known.local is None and (known.open_ended or not transactions)
        self._table_ends: dict[int, int]
        self._internal_ends: dict[int, int]
        # The transaction that wrote to a partition last. At a start, only that of the progress record is known.
        self.last: dict[int, CommitId]
        if known.local is None:
            self._table_ends = dict(progress.changelogs[topics.table])
            self._internal_ends = dict(progress.changelogs[topics.internal])
            last = _commit_of(progress)
            self.last = {} if last is None else dict.fromkeys(range(topics.partitions), last)
        else:
            self.last = {partition: CommitId(*commit) for partition, commit in known.local.last.items()}
            nothing = dict.fromkeys(range(topics.partitions), 0)
            self._table_ends = nothing | {partition: commit.batch for partition, commit in self.last.items()}
            self._internal_ends = nothing
        self._lost: set[int] = set()  # told, and not changed since
        self._lost_now = 0  # since the last committed batch
        self._verified: set[tuple[str, int]] = set()
        self._now_ms, self._lateness_ms = progress.time_ms, lateness_ms
        self.watermark = _watermark(source_partitions, known, lateness_ms or 0, idle_s, clock_s)
        # Earliest timer per partition and clock. A missing partition was not opened in this run yet.
        self._timers: dict[int, dict[str, int | None]] = {}
        self._left: set[int] = set()
        self._processing_timers = known.processing_timers
        # Rows by kind, and bytes, of the local copy of each partition as the last batch has left it.
        self._sizes: dict[int, tuple[Mapping[str, int], int | None]] = {}
        self._restored, self._restore_s = 0, 0.0
        self._fired = dict(known.fired)
        self._unfired = set(known.unfired)  # of partitions that were not opened in this run yet
        self._fields = declared_fields(spec.processor)
        self._schemas = _schemas(spec.processor, known)
        self.dead_letters = DeadLetters(spec.flow, spec.dead_letter_topic, spec.max_dead_letters, f"table {spec.table}")

    @property
    def partitions(self) -> int:
        return self.spec.topics.partitions

    def committed(self) -> dict[int, tuple[int, int]]:
        """The committed end offsets of the two topics, by partition; without a changelog see `AttemptContext`."""
        return {partition: (end, self._internal_ends[partition]) for partition, end in self._table_ends.items()}

    def is_verified(self, partition: int, location: str) -> bool:
        """Whether the copy at a location was verified in this run."""
        return (location, partition) in self._verified

    @property
    def timers_left(self) -> bool:
        """Whether timers that are due are left over, because the last batch has reached its limit of timers."""
        return bool(self._left)

    def planned(self, arriving: Iterable[Origin], caught_up: Mapping[Any, float]) -> None:
        """A batch was planned: these source partitions have new records. ``caught_up``: see `Watermark.planned`."""
        self.watermark.planned(arriving, caught_up)

    def moment(self, batch: int, commit: CommitId, now_ms: int) -> AttemptContext:
        """The `AttemptContext` of a batch. Processing time never goes back, even if the clock does."""
        return AttemptContext(
            batch=batch,
            commit=commit,
            now_ms=max(now_ms, self._now_ms),
            watermark_ms=self._watermark(),
            table_ends=dict(self._table_ends),
            internal_ends=dict(self._internal_ends),
            last=dict(self.last),
            verified=frozenset(self._verified),
            open_ended=self.open_ended,
        )

    def not_before(self, times: Mapping[str, int]) -> None:
        """Both clocks of the next batch show at least these times: timers of an earlier version have fired then."""
        self._now_ms = max(self._now_ms, times.get("processing", self._now_ms))
        if "event" in times and self._lateness_ms is not None:
            known = self.watermark.value_ms
            self.watermark.value_ms = times["event"] if known is None else max(known, times["event"])

    def due(self, now_ms: int) -> set[int]:
        """Partitions with a timer that is due, or that may have one."""
        found = set()
        watermark_ms = self._watermark()
        for partition in range(self.partitions):
            timers = self._timers.get(partition)
            if timers is None:
                found.add(partition)
                continue
            event, processing = timers.get("event"), timers.get("processing")
            if processing is not None and processing <= now_ms:
                found.add(partition)
            if event is not None and watermark_ms is not None and event <= watermark_ms:
                found.add(partition)
        return found

    # ---- a batch -------------------------------------------------------------------------------------

    def check(self, reports: Sequence[StateReport], moment: AttemptContext) -> None:
        """Check that all reports are of this attempt, each partition is reported once, and dead letters are in limits.

        Raises:
            BatchAbortedError: a report is of another attempt. The batch can be run again.
            ProgressConflictError: two tasks worked on one partition.
            DeadLetterLimitError: more dead letters than allowed.
        """
        seen: set[int] = set()
        for report in reports:
            if report.commit != moment.commit:
                raise BatchAbortedError(
                    f"A task of table {self.spec.table} belongs to another attempt",
                    topic=self.spec.table,
                    detail=f"{report.commit}, expected {moment.commit}",
                    next_step="none: the batch is run again under a new epoch",
                )
            if report.partition in seen:
                raise ProgressConflictError(
                    f"Two tasks held partition {report.partition} of table {self.spec.table} in one transaction",
                    topic=f"{self.spec.table}-{report.partition}",
                    next_step="nothing was committed; report this, with the query's plan (df.explain())",
                )
            seen.add(report.partition)
        self.dead_letters.check(_letters(reports, moment))

    def progress_after(
        self, reports: Sequence[StateReport], moment: AttemptContext
    ) -> tuple[dict[str, dict[int, int]], TableProgress]:
        """What the progress record contains when these reports are committed: end offsets of both topics, and more.
        Without a changelog there are no end offsets."""
        topics = self.spec.topics
        version, watermark_ms = self.spec.processor.version, self._watermark_after(reports)
        fired = self._fired_after(reports, moment)
        timers = self._timers_after(reports)
        times, times_ms = ({}, 0) if self._lateness_ms is None else self.watermark.kept(_latest(reports))
        known = TableProgress(
            version,
            watermark_ms,
            self._fields,
            open_ended=self.open_ended,
            fired=fired,
            soonest=self._soonest(timers, fired),
            unfired=self._unfired_in(timers, fired),
            processing_timers=self._processing_timers_after(reports),
            event_times=times,
            event_times_ms=times_ms,
            schemas=self._schemas,
        )
        if self._local is not None:
            changed = {report.partition: report.commit for report in reports if report.changed}
            return {}, replace(known, local=replace(self._local, last=self.last | changed))
        table_ends, internal_ends = self._ends_after(reports)
        return {topics.table: table_ends, topics.internal: internal_ends}, known

    def on_commit(self, reports: Sequence[StateReport], moment: AttemptContext) -> None:
        """Call this when the batch is committed."""
        self.on_noop(reports)
        watermark_ms = self._watermark_after(reports)
        self._table_ends, self._internal_ends = self._ends_after(reports)
        self._now_ms = moment.now_ms
        self._fired = self._fired_after(reports, moment)
        self.watermark.on_commit(_latest(reports), watermark_ms, _untimed(reports))
        self.dead_letters.on_commit(_letters(reports, moment))
        for report in reports:
            if report.changed:
                self.last[report.partition] = moment.commit
                self._lost.discard(report.partition)

    def prepared(self, found: Sequence[Prepared], *, beside: bool = False) -> bool:
        """Note local copies that are up to date, without a committed batch. Returns whether any of them is new.

        Args:
            beside: whether they were brought up beside batches. Standby copies are, every few seconds.
        """
        known = len(self._verified)
        for each in found:
            self._verified.add((each.location, each.partition))
            self._tell(each.partition, each.how, each.records, each.seconds, each.why, beside=beside)
        return len(self._verified) > known

    def on_noop(self, reports: Sequence[StateReport]) -> None:
        """Note that the stores were opened, and nothing was committed: the batch had no effect."""
        self._processing_timers = self._processing_timers_after(reports)
        for report in reports:
            self._verified.add((report.location, report.partition))
            self._tell(report.partition, report.how, report.restored, report.restore_seconds, report.why)
            self._timers[report.partition] = dict(report.next_timer_ms)
            self._sizes[report.partition] = report.rows, report.nbytes
            (self._left.add if report.timers_left else self._left.discard)(report.partition)

    def facts(self) -> TableFacts:
        """What is known of the table now. It may be called in any thread."""
        sizes, timers = list(dict(self._sizes).values()), list(dict(self._timers).values())
        rows, nbytes = [each for each, _ in sizes], [size for _, size in sizes if size is not None]
        soonest = {clock: [ms for each in timers if (ms := each.get(clock)) is not None] for clock in CLOCKS}
        return TableFacts(
            self.spec.table,
            self.partitions,
            len({partition for _, partition in tuple(self._verified)}),
            {kind: sum(each[kind] for each in rows) for kind in ROW_KINDS} if rows and all(rows) else {},
            sum(nbytes) if nbytes else None,
            {clock: min(found, default=None) for clock, found in soonest.items()},
            self._restored,
            self._restore_s,
            isinstance(self.spec.processor, Retry),
        )

    def take_lost(self) -> int:
        """How many partitions have begun empty since the last call, although state was committed (`LOST`)."""
        lost, self._lost_now = self._lost_now, 0
        return lost

    def _tell(self, partition: int, how: str, records: int, seconds: float, why: str, *, beside: bool = False) -> None:
        if how in (RESTORED, CAUGHT_UP):
            level = logging.DEBUG if beside and how == CAUGHT_UP else logging.INFO
            log.log(
                level, "table %s-%d: %s, %d records read in %.2f s", self.spec.table, partition, how, records, seconds
            )
        if how in (RESTORED, CAUGHT_UP, BEHIND) and records:  # a new table has nothing to restore
            self._restored, self._restore_s = self._restored + records, self._restore_s + seconds
            flow, table = self.spec.flow, self.spec.table
            hooks.at(hooks.RESTORED, where="driver", flow=flow, table=table, records=records, seconds=seconds)
        if how == LOST and partition not in self._lost:
            self._lost.add(partition)
            self._lost_now += 1
            log.warning(
                "flow %s: the state of table %s-%d is lost, and the partition begins empty: %s (batch %d has changed "
                "the partition last; the table has no changelog that it could be restored from)",
                self.spec.flow,
                self.spec.table,
                partition,
                why,
                self._table_ends[partition],
            )

    def _ends_after(self, reports: Sequence[StateReport]) -> tuple[dict[int, int], dict[int, int]]:
        table_ends, internal_ends = dict(self._table_ends), dict(self._internal_ends)
        for report in reports:
            if report.table_end is not None:
                table_ends[report.partition] = report.table_end
            if report.internal_end is not None:
                internal_ends[report.partition] = report.internal_end
        return table_ends, internal_ends

    def _fired_after(self, reports: Sequence[StateReport], moment: AttemptContext) -> dict[str, int]:
        """Up to when timers have fired. What is due in a partition fires in every batch, so it is the batch's time."""
        fired = dict(self._fired)
        for clock, ms in (("event", moment.watermark_ms), ("processing", moment.now_ms)):
            if ms is None or not (clock in fired or any(clock in report.fired for report in reports)):
                continue
            if moment.timers_until is not None:
                ms = min(ms, moment.timers_until.get(clock, ms))
            fired[clock] = max(ms, fired.get(clock, ms))
        return fired

    def _timers_after(self, reports: Sequence[StateReport]) -> _Timers:
        return {**self._timers, **{report.partition: report.next_timer_ms for report in reports}}

    def _processing_timers_after(self, reports: Sequence[StateReport]) -> bool | None:
        """See `TableProgress`. Partitions that were not opened in this run may have some, unless it is known."""
        if any(report.processing_timers or "processing" in report.fired for report in reports):
            return True
        if self._processing_timers is None and len(self._timers_after(reports)) == self.partitions:
            return False
        return self._processing_timers

    def _unfired_in(self, timers: _Timers, fired: Mapping[str, int]) -> tuple[int, ...]:
        """Partitions in which something is left that is due before `fired`, see `TableProgress`."""
        found = self._unfired - timers.keys()
        for partition, soonest in timers.items():
            if any(ms is not None and ms <= fired.get(clock, ms - 1) for clock, ms in soonest.items()):
                found.add(partition)
        return tuple(sorted(found))

    def _soonest(self, timers: _Timers, clocks: Iterable[str]) -> dict[str, int]:
        if len(timers) < self.partitions:
            return {}
        left = {clock: [ms for each in timers.values() if (ms := each.get(clock)) is not None] for clock in clocks}
        return {clock: min(times, default=NO_TIMER) for clock, times in left.items()}

    def _watermark(self) -> int | None:
        return None if self._lateness_ms is None else self.watermark.advance()

    def _watermark_after(self, reports: Sequence[StateReport]) -> int | None:
        if self._lateness_ms is None:
            return None
        return self.watermark.after(_latest(reports), _untimed(reports))


def _watermark(
    source_partitions: Iterable[Origin],
    known: TableProgress,
    lateness_ms: int,
    idle_s: float,
    clock_s: float | None = None,
) -> Watermark:
    """As progress knows it."""
    origins = list(source_partitions)
    return Watermark(
        origins,
        lateness_ms=lateness_ms,
        idle_s=idle_s,
        clock_s=clock_s,
        value_ms=known.watermark_ms,
        known=known.event_times,
        known_at_ms=known.event_times_ms,
        chained=not origins,
    )


def _schemas(processor: Any, known: TableProgress) -> tuple[int, ...]:
    """Ids of the schemas of rows that this version of a processor has written, or will. Others are migrated."""
    before = known.schemas if known.version == processor.version else ()
    own = schema_id(getattr(processor, "state", None))
    return before if own is None else tuple(sorted({*before, own}))


def _letters(reports: Sequence[StateReport], moment: AttemptContext) -> Letters:
    return NO_LETTERS if moment.timers_until is not None else letters_of(reports)


def _latest(reports: Sequence[StateReport]) -> dict[Origin, int]:
    latest: dict[Origin, int] = {}
    for report in reports:
        for origin, ms in report.max_event_ms.items():
            latest[origin] = max(ms, latest.get(origin, ms))
    return latest


def _untimed(reports: Sequence[StateReport]) -> frozenset[Origin]:
    return frozenset[Origin]().union(*(report.untimed for report in reports))


def _commit_of(progress: Progress) -> CommitId | None:
    if progress.producer_id < 0:
        return None
    return CommitId(progress.batch_id, progress.producer_id, progress.producer_epoch)

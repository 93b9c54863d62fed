"""Promoting a flow, as a pure decision: whether it can take the place of another one, and what that one becomes.

Afterwards the other flow has the new one's tables and source position. Its own position may be behind that: then the
earlier version has written the outputs of the records in between, and the hand-over in the progress record says so
(``driver/record/handover.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onceflow.admin.versions.promotion_timers import Unfired
from onceflow.errors import OptionError, ProgressConflictError
from onceflow.protocol.names import Names
from onceflow.protocol.progress import HandOver, Progress, Promotion, TableProgress


@dataclass(frozen=True)
class Position:
    """A partition that both flows read: the next offset of each; None: it does not know the partition."""

    topic: str
    partition: int
    old: int | None
    new: int

    @property
    def gap(self) -> int:
        """How many offsets the earlier version has read, and the new one has not."""
        return max(0, (self.old or 0) - self.new)

    @property
    def ahead(self) -> int:
        """How many offsets the new version has read, and the earlier one has not."""
        return max(0, self.new - (self.old or 0))


def was_promoted(old: Progress, new: Progress | None, names: Names) -> bool:
    """Whether the new flow has taken the old one's place already.

    Args:
        names: of the new flow.
    """
    if old.promoted is None or old.promoted.flow != names.progress_key:
        return False
    return new is None or new.became == old.flow


def check_can_promote(
    old: Progress,
    new: Progress,
    names: Names,
    other: Names,
    *,
    same_timers: bool = False,
    new_topics: bool = False,
) -> None:
    """Check what does not change while flows run.

    Args:
        old, names: the flow that is replaced. new, other: the flow that takes its place.
        same_timers: whether the times of timers in processing time are known to be the same in both.
        new_topics: whether the new flow may have read topics that the old one does not read.

    Raises:
        OptionError: both are the same. ProgressConflictError: it cannot take the other one's place.
    """
    if names.flow == other.flow:
        raise OptionError(
            f"Flow {names.flow!r} cannot replace itself", flow=names.flow, next_step="give the flow to replace"
        )
    for flow, progress in ((names.flow, old), (other.flow, new)):
        _check_exact(flow, progress)
    if new.tables and (new.forked is None or new.forked.flow != names.progress_key):
        raise ProgressConflictError(
            f"Flow {other.flow!r} has state, and is not a copy of {names.flow!r}",
            flow=other.flow,
            next_step=f"make one with `onceflow fork {names.flow} NEW`; its state can be built anew from the source "
            "with `onceflow reset NEW --to earliest --state delete`",
        )
    if old.tables and not new.tables:
        raise ProgressConflictError(
            f"Flow {names.flow!r} has state, and {other.flow!r} has none",
            flow=other.flow,
            detail=f"tables: {', '.join(sorted(old.tables))}",
            next_step=f"make a copy with `onceflow fork {names.flow} NEW`, and start the new version as NEW; it may "
            "leave its tables unused",
        )
    if not same_timers:
        _check_processing_time(old, new, names, other)
    _check_sources(old, new, names, other)
    if not new_topics:
        _check_new_topics(old, new, names, other)


def _check_exact(flow: str, progress: Progress) -> None:
    """Refuse a flow whose state is not in its table topics, or not exactly."""
    if progress.handover is not None:
        raise ProgressConflictError(
            f"Flow {flow!r} was promoted, and has not run since then",
            flow=flow,
            next_step="start it; when it has committed a batch, run the command again",
        )
    if progress.checkpoint is not None:
        raise ProgressConflictError(
            f"Flow {flow!r} keeps state in a Spark checkpoint, which cannot be handed over",
            flow=flow,
            next_step="stop the old version, and start the new one with outputs of its own",
        )
    weak = sorted(name for name, table in progress.tables.items() if table.local is not None or table.open_ended)
    if weak:
        raise ProgressConflictError(
            f"Table {weak[0]} of flow {flow!r} has no exact state in Kafka, so it cannot be handed over",
            flow=flow,
            detail="it has no changelog, or was written without transactions",
            next_step="stop the old version, and start the new one with outputs of its own",
        )


def _check_processing_time(old: Progress, new: Progress, names: Names, other: Names) -> None:
    """Refuse timers in processing time. Each flow sets them for times of its own, so it is not known which timers of
    one flow have fired in the other one."""
    for table, copy in sorted(pairs(old, new).items()):
        for flow, name, known in ((names.flow, table, old.tables[table]), (other.flow, copy, new.tables[copy])):
            if known.processing_timers is None:
                raise ProgressConflictError(
                    f"The progress of flow {flow!r} does not say whether table {name} has timers in processing time",
                    flow=flow,
                    detail="it is that of an earlier onceflow",
                    next_step="start the flow; when it has committed a batch, run the command again",
                )
            if known.processing_timers:
                raise ProgressConflictError(
                    f"Table {name} of flow {flow!r} has timers in processing time, or has had some",
                    flow=flow,
                    detail="each flow sets them for times of its own (`onceflow.Retry` does, too), so it is not known "
                    "which of them have fired in the other flow: outputs could be missing or doubled",
                    next_step=f"upgrade in place: stop both flows, and start the new version as {names.flow!r} with "
                    f"the tables of {names.flow!r}. If the times of all timers follow from records alone, give "
                    "--same-timers",
                )


def _check_sources(old: Progress, new: Progress, names: Names, other: Names) -> None:
    common = set(old.offsets) & set(new.offsets)
    if not common:
        raise ProgressConflictError(
            f"Flow {other.flow!r} reads none of the topics that {names.flow!r} reads",
            flow=other.flow,
            detail=f"it reads {', '.join(sorted(new.offsets)) or 'nothing yet'}",
            next_step="check the names; the new version has to have run at least once",
        )
    for topic in sorted(common):
        if old.topic_ids.get(topic) != new.topic_ids.get(topic):
            raise ProgressConflictError(
                f"Topic {topic} was deleted and created again: one of both flows has read the one of before",
                flow=other.flow,
                topic=topic,
                next_step="start both flows, so that both read the topic that is there now",
            )


def _check_new_topics(old: Progress, new: Progress, names: Names, other: Names) -> None:
    """Refuse topics that only the new flow has read: what it has made of their records is in its own outputs, and the
    old flow does not write it, however long it runs."""
    for topic in sorted(set(new.offsets) - set(old.offsets)):
        read = sum(new.offsets[topic].values())
        if read:
            raise ProgressConflictError(
                f"Flow {other.flow!r} has read {topic}, which {names.flow!r} does not read",
                flow=other.flow,
                topic=topic,
                detail=f"it has read at most {read:,} records of it; their outputs are in those of {other.flow!r} only",
                next_step=f"if the outputs of {names.flow!r} can do without them, give --new-topics: the flow goes on "
                f"behind them. Otherwise upgrade in place: stop both flows, and start the new version as "
                f"{names.flow!r} with the tables of {names.flow!r}",
            )


def positions(old: Progress, new: Progress) -> tuple[Position, ...]:
    """Where both flows are in the partitions that the new one reads of the old one's topics."""
    return tuple(
        Position(topic, partition, old.offsets[topic].get(partition), offset)
        for topic in sorted(set(old.offsets) & set(new.offsets))
        for partition, offset in sorted(new.offsets[topic].items())
    )


def missing(old: Progress, new: Progress, *, new_timers: bool) -> str:
    """What the old flow has not done yet, and the new one has; '' if there is nothing, so that nothing can be lost.

    Args:
        new_timers: whether the old flow is known to have no such timers, if none of a clock has fired.
    """
    if not new.tables:
        return ""
    for each in positions(old, new):
        if each.ahead:
            return f"{each.topic}-{each.partition}: it is at {each.old or 0}, the new one at {each.new}"
    common = pairs(old, new)
    for table in sorted(set(new.tables) - {*common.values()}):
        if new.tables[table].fired and not new_timers:
            return (
                f"timers of {table} have fired, a table that only the new one has, so their outputs are only in those "
                "of the new one; if they may be missing, give --new-timers"
            )
    for table, copy in common.items():
        before, after = old.tables[table].fired, new.tables[copy].fired
        for clock in sorted(after):
            if clock not in before and not new_timers:
                return f"no timer of {table} has fired, but some of {copy} have; if it has none, give --new-timers"
            if clock in before and _fired_until(old.tables[table], clock) < after[clock]:
                return f"timers of {table} have fired up to {before[clock]}, those of {copy} up to {after[clock]}"
    return ""


def _fired_until(table: TableProgress, clock: str) -> int:
    """Up to when no timer of a clock is left. If some are left before the time of the last batch: that time, and
    `promotion_timers.py` looks for them."""
    return max(table.fired[clock], table.soonest.get(clock, 0) - 1)


def has_unfired(old: Progress, new: Progress) -> bool:
    """Whether the old flow may have timers that are due before others that it has fired."""
    return any(old.tables[table].unfired for table in pairs(old, new))


def pairs(old: Progress, new: Progress) -> dict[str, str]:
    """The tables that both flows have, and their copies. If another copy has taken the old flow's place since this one
    was made, its tables are those of that other copy now."""
    made: Mapping[str, str] = {} if new.forked is None else new.forked.tables
    since = {} if old.promoted is None else old.promoted.tables
    now = {since.get(table, table): copy for table, copy in made.items()}
    return {table: copy for table, copy in now.items() if table in old.tables and copy in new.tables}


def promoted_progress(old: Progress, new: Progress, time_ms: int, unfired: Unfired | None = None) -> Progress:
    """What the progress record of the old flow becomes.

    Args:
        unfired: by table of the new flow, timers that are due and that the old one has not fired.
    """
    copies = pairs(old, new)
    before = {} if old.promoted is None else old.promoted.tables
    replaced = {
        table: copy for table, copy in {**before, **{t: copies.get(t, "") for t in old.tables}}.items()
        if table not in new.tables
    }  # fmt: skip
    now = {table: copies.get(copy, copy) for table, copy in replaced.items()}
    promotion = Promotion(new.flow, time_ms, now, old.batch_id, tuple(sorted(new.tables)))
    tables = set(old.changelogs)
    known = {**{t: i for t, i in old.topic_ids.items() if t not in tables}, **new.topic_ids}
    if not new.tables:
        offsets = {**new.offsets, **old.offsets}
        return replace(old, offsets=offsets, topic_ids=known, promoted=promotion, time_ms=time_ms)
    offsets = {
        topic: {**old.offsets.get(topic, {}), **new.offsets.get(topic, {})} for topic in {**old.offsets, **new.offsets}
    }
    timers = {copy: old.tables[table].fired for table, copy in copies.items() if old.tables[table].fired}
    return replace(
        new,
        flow=old.flow,
        batch_id=old.batch_id,
        offsets=offsets,
        topic_ids=known,
        outputs=old.outputs,
        side_topics=old.side_topics,
        external=old.external or new.external,
        external_commit=old.external_commit,
        external_before=old.external_before,
        forked=old.forked,
        promoted=promotion,
        handover=_handover(HandOver({**offsets, **old.offsets}, timers, unfired or {}), old, new),
        time_ms=time_ms,
    )


def ended_progress(new: Progress, became: str, time_ms: int) -> Progress:
    """What the progress record of the new flow becomes: it is not to be started under its own name any more.

    A tombstone would not do: the flow would begin anew, with the tables that are another flow's now.
    """
    return Progress(new.flow, new.batch_id, {}, {}, time_ms, became=became)


def _handover(handover: HandOver, old: Progress, new: Progress) -> HandOver | None:
    """What is left to do for the new version, if anything is."""
    level = all(
        new.tables[table].soonest.get(clock, ms) > ms
        for table, fired in handover.timers.items()
        for clock, ms in fired.items()
    )
    return None if level and not any(each.gap for each in positions(old, new)) else handover

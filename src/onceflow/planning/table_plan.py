"""Whether a flow may use a table as it is: its topics, and the state that is in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from uuid import uuid4

from onceflow.errors import ProgressConflictError, counted
from onceflow.planning.process import StepOptions
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import LocalTable, Progress, Promotion, TableProgress
from onceflow.state.api.processor import ColumnProcessor, Processor, Repacked
from onceflow.state.api.serdes import schema_ids
from onceflow.state.api.time_joins import TimeJoin, of_time_join
from onceflow.state.changelog.topics import TableTopics, check_known, without_topics
from onceflow.state.engine.shapes import declared_fields
from onceflow.state.windows.processor import WindowProcessor


def plan_table(
    options: StepOptions,
    processor: Processor | ColumnProcessor,
    topics: TableTopics,
    ends: Mapping[str, Mapping[int, int]],
    progress: Progress,
) -> Progress:
    """Check that the flow may use the table's topics as they are, and add them to its progress.

    Args:
        processor: its state has a version, and maybe declared fields.
        ends: last stable offsets of the topics, per partition.
        progress: the flow's, as committed.

    Returns:
        Progress that knows the table. It is the same object if it knew the table already. Otherwise it must be
        committed before anything is written to the topics.

    Raises:
        ProgressConflictError: the flow may not use them.
        EnvironmentUnusableError: a registry of schemas does not answer.
    """
    table = options.table
    if table in progress.changelogs:
        check_known(topics, progress.changelogs, progress.topic_ids, flow=progress.flow)
        _check_state(table, progress.tables.get(table, TableProgress()), processor)
        return progress
    holds_records = any(end for by_partition in ends.values() for end in by_partition.values())
    if options.partitions is not None and topics.partitions != options.partitions:
        empty = f"; or delete {topics.table} and {topics.internal}: they are empty, as after a start that has failed"
        raise ProgressConflictError(
            f"Table topic {table} has {counted(topics.partitions, 'partition')}, but partitions={options.partitions} "
            "was given",
            topic=table,
            next_step="leave partitions= out, or give the table another name" + ("" if holds_records else empty),
        )
    if holds_records and not options.adopt_existing:
        raise ProgressConflictError(
            f"Table topic {table} holds records already, but the flow's progress does not know the table",
            topic=table,
            detail="they may be the state of another flow, or of this one before it was reset",
            next_step=f"delete the topics {topics.table} and {topics.internal} to start empty. Or give "
            "adopt_existing=True to take the rows over: what the flow reads again, as after a reset, is then counted a "
            "second time",
        )
    added = TableProgress(
        processor.version,
        fields=declared_fields(processor),
        processing_timers=None if holds_records else False,
        # Nobody has noted with which ones the rows were written.
        schemas=schema_ids(getattr(processor, "state", None)) if holds_records else (),
    )
    return replace(
        progress,
        changelogs={**progress.changelogs, **ends},
        topic_ids={**progress.topic_ids, **topics.ids},
        tables={**progress.tables, table: added},
    )


def check_not_written(table: str, writer: Progress | None, progress: Progress) -> None:
    """Refuse the table of another flow: with two writers, neither would have the rows that it knows.

    Args:
        writer: progress of the flow that writes the table; None: no flow does. progress: that of this flow.

    Raises:
        ProgressConflictError: another flow writes it.
    """
    if writer is None or writer.flow == progress.flow or writer.became is not None:
        return
    raise ProgressConflictError(
        f"Table {table} belongs to flow {writer.flow}",
        topic=table,
        detail=f"that flow has written it last with batch {writer.batch_id}; only one flow may write a table",
        next_step=f"give this flow a table of another name. To take the rows over, stop {writer.flow} for good and let "
        f"it forget its progress (`onceflow reset {writer.flow}`); then give adopt_existing=True",
    )


def plan_local_table(
    options: StepOptions, processor: Processor | ColumnProcessor, partitions: int, progress: Progress
) -> tuple[TableTopics, Progress]:
    """As `plan_table`, for a table without a changelog.

    Args:
        partitions: how many a new table gets; a known one keeps its own.

    Returns:
        What takes the place of its topics, and progress that knows the table.
    """
    table = options.table
    known = progress.tables.get(table)
    if known is not None and known.local is not None:
        if options.partitions not in (None, known.local.partitions):
            raise ProgressConflictError(
                f"Table {table} has {counted(known.local.partitions, 'partition')}, but "
                f"partitions={options.partitions} was given",
                topic=table,
                next_step="leave partitions= out, or give the table another name: then its state begins empty",
            )
        _check_state(table, known, processor)
        return without_topics(table, known.local), progress
    local = LocalTable(uuid4().hex, partitions)
    fields = declared_fields(processor)
    added = TableProgress(processor.version, fields=fields, local=local, processing_timers=False)
    return without_topics(table, local), replace(progress, tables={**progress.tables, table: added})


def check_kind(options: StepOptions, progress: Progress) -> None:
    """Refuse to switch the changelog of a table on or off. Call this before topics are created.

    Raises:
        ProgressConflictError: the state is in topics or in local stores, and the step wants it in the other place.
    """
    table = options.table
    local = progress.tables.get(table, TableProgress()).local is not None
    if not options.changelog and table in progress.changelogs:
        what, given = "has a changelog", "changelog=True"
    elif options.changelog and local:
        what, given = "has no changelog: its rows are only in local stores", "changelog=False"
    else:
        return
    raise ProgressConflictError(
        f"Table {table} {what}, and its state cannot move",
        topic=table,
        next_step=f"give {given} as before, or give the table another name: then its state begins empty. "
        "`onceflow reset FLOW` makes the flow forget all of its progress",
    )


def check_not_replaced(table: str, progress: Progress) -> None:
    """Refuse a table of an earlier version of the flow. Call this before topics are created.

    Raises:
        ProgressConflictError: its rows are no longer the state of this flow.
    """
    promoted = progress.promoted
    if promoted is None or table not in promoted.tables or table in progress.tables:
        return
    new = promoted.tables[table]
    raise ProgressConflictError(
        f"Table {table} is not this flow's any more: {promoted.flow} was promoted, and its tables have replaced it",
        topic=table,
        detail=f"now the table is {new}" if new else "the new version has no table in its place",
        next_step="start the new version of the program"
        + (f", which processes into table={new!r}" if new else "")
        + "; the old version cannot go on with the state of before",
    )


def is_beside(options: StepOptions, found: Progress) -> bool:
    """Whether a step names a table that is none of the tables which the flow has got from another one, and does not say
    that it may be new. Arguments as of `check_inherited`."""
    inherited = _inherited(found)
    given = options.adopt_existing or not options.changelog
    return inherited is not None and options.table not in inherited[1] and not given


def check_inherited(found: Progress, used: Collection[str], beside: Collection[str], *, flow: str) -> None:
    """Refuse the first run of a copy, or of a flow after a promotion, whose program leaves a table of it unused, and
    would begin with an empty one.

    Args:
        found: progress, as the start has found it.
        used: the tables of all steps. beside: those of them for which `is_beside` is true.

    Raises:
        ProgressConflictError: it is one of both that the program has to name.
    """
    inherited = _inherited(found)
    if inherited is None or not beside:
        return
    how, tables = inherited
    unused = sorted(set(tables) - set(used))
    if not unused:
        return
    names = ", ".join(sorted(beside))
    raise ProgressConflictError(
        f"Flow {flow!r} {how}, and its program does not use table {unused[0]}: it names {names}, which would begin "
        "empty at the position of the flow",
        flow=flow,
        topic=unused[0],
        detail="its tables: "
        + ", ".join(f"{name} (a copy of {of})" if of else name for name, of in sorted(tables.items())),
        next_step=f"give table={unused[0]!r}. If {names} is meant to begin empty, give that step adopt_existing=True "
        "until the flow has committed its first batch",
    )


def _inherited(found: Progress) -> tuple[str, dict[str, str]] | None:
    """How a flow that has not run since then has got its tables, and what each is a copy of ('': not known)."""
    promoted = found.promoted
    if promoted is not None and promoted.batch_id is not None:
        # A start may have ended before its first batch. Progress has its driver then, and the tables it has named.
        if promoted.batch_id == found.batch_id:
            return _has_tables_of(promoted), dict.fromkeys(promoted.inherited, "")
    elif promoted is not None and found.driver is None:  # a command has written it
        return _has_tables_of(promoted), dict.fromkeys(found.tables, "")
    forked = found.forked
    if forked is not None and found.batch_id == 0:
        copies = {copy: table for table, copy in forked.tables.items() if copy in found.tables}
        return f"is a copy of {forked.flow!r}", copies
    return None


def _has_tables_of(promoted: Promotion) -> str:
    return f"has the tables of {promoted.flow!r}, which was promoted"


def without_tables(progress: Progress, tables: Collection[str]) -> Progress:
    """Progress that does not know these tables. No batch may have used them."""
    gone = {name for table in tables for name in (table, table + INTERNAL_SUFFIX)}
    return replace(
        progress,
        changelogs={name: ends for name, ends in progress.changelogs.items() if name not in gone},
        topic_ids={name: topic_id for name, topic_id in progress.topic_ids.items() if name not in gone},
        tables={name: table for name, table in progress.tables.items() if name not in gone},
    )


def check_migration(processor: Processor | ColumnProcessor, known: int, *, table: str, flow: str) -> None:
    """Refuse a processor that cannot read the state that an older version of it has written.

    Args:
        known: the version that has written the state.

    Raises:
        ProgressConflictError: it has no ``migrate``.
    """
    if processor.version > known and not callable(getattr(processor, "migrate", None)):
        raise ProgressConflictError(
            f"The state of table {table} has version {known}; the processor has version {processor.version} and no "
            "migrate()",
            flow=flow,
            topic=table,
            next_step="add `def migrate(self, payload, from_version)` to the processor, or keep its version",
        )


def _check_state(table: str, known: TableProgress, processor: Processor | ColumnProcessor) -> None:
    if processor.version < known.version:
        raise ProgressConflictError(
            f"The state of table {table} was written by version {known.version} of the processor, but this is version "
            f"{processor.version}",
            topic=table,
            next_step="run the newer processor; state is not migrated backwards",
        )
    fields = declared_fields(processor)
    if isinstance(processor, WindowProcessor) and known.fields and not known.fields.endswith(repr(processor.window)):
        raise ProgressConflictError(
            f"The state of table {table} is {known.fields}, but the processor declares {fields}",
            topic=table,
            next_step="give the table another name, or declare the windows as they were: what was added to other "
            "windows cannot be divided",
        )
    if (isinstance(processor, TimeJoin | Repacked) or of_time_join(known.fields)) and known.fields != fields:
        raise ProgressConflictError(
            f"Table {table} has the rows of {_described(known.fields)}, and this is {_described(fields)}",
            topic=table,
            next_step="give the table another name, or join as before: rows that other bounds would need may be gone",
        )
    # Earlier versions have not noted the aggregates of windows.
    same = known.fields in (None, fields, declared_fields(processor, aggregates=False))
    if processor.version == known.version and fields is not None and not same:
        raise ProgressConflictError(
            f"The state of table {table} has the fields {known.fields}, but the processor declares {fields}",
            topic=table,
            next_step="raise the processor's `version` and define migrate(self, payload, from_version), or declare the "
            "fields as they were",
        )


def _described(fields: str | None) -> str:
    """What the rows of a table belong to, for messages."""
    if not of_time_join(fields):
        return "another step"
    return f"an {fields}" if str(fields).startswith("inner") else f"a {fields}"

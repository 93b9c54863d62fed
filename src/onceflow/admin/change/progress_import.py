"""Restores a flow's progress from a file: where its sources are read, and its tables if these are as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onceflow.admin.change.move import Decision, Moved, carry_out, committed, sources_of
from onceflow.admin.change.move_plan import DELETE, Move, check_state, plan_move
from onceflow.admin.change.table_rows import Tell
from onceflow.admin.change.target import OFFSETS, OffsetSpec
from onceflow.client.cluster import Cluster
from onceflow.client.committed import CommittedReader
from onceflow.client.deadline import Deadline
from onceflow.client.offsets import LATEST, list_offsets
from onceflow.client.topics import find_topic
from onceflow.driver.record.handover import check_exists
from onceflow.errors import OptionError, ProgressConflictError
from onceflow.planning.source_starts import SourceTopic
from onceflow.protocol.names import Names
from onceflow.protocol.progress import Progress

_SECONDS = 60.0


@dataclass(frozen=True)
class TableTopic:
    """A table topic of the file, as it is now.

    Args:
        ends: last stable offsets.
        is_same: whether it is the topic of the file, with the same partitions and no committed records after those
            that the file knows of.
    """

    topic_id: str
    ends: Mapping[int, int]
    is_same: bool


def preview(cluster: Cluster, names: Names, file: Progress, state: str | None) -> Decision:
    """What `restore` would do now. Nothing is changed, and nobody is fenced. Errors as of `restore`."""
    deadline = Deadline(_SECONDS, f"looking at flow {names.flow}")
    return _decide(cluster, names, file, state, committed(cluster, names, deadline), deadline)


def restore(cluster: Cluster, names: Names, file: Progress, state: str | None, tell: Tell) -> Moved:
    """Commit the positions of a file as the progress of a flow. A running driver of the flow is fenced.

    Args:
        state: what becomes of the flow's state if it is not that of the file: ``keep`` or ``delete``.

    Raises:
        ProgressConflictError: a topic is missing or another one, or the file is that of another flow with state.
        OptionError: an offset is not in the log; the state is not that of the file, and ``state`` is missing.
        OnceflowError: see `mover.move`.
    """

    def decide(before: Progress | None, deadline: Deadline) -> Decision:
        return _decide(cluster, names, file, state, before, deadline)

    return carry_out(cluster, names, decide, tell)


def _decide(
    cluster: Cluster, names: Names, file: Progress, state: str | None, before: Progress | None, deadline: Deadline
) -> Decision:
    check_exists(before, flow=names.flow)
    topics = sources_of(cluster, file, deadline)
    tables = _tables(cluster, file, deadline)
    return plan_import(names, file, before, topics, tables, state)


def _tables(cluster: Cluster, file: Progress, deadline: Deadline) -> dict[str, TableTopic]:
    found: dict[str, TableTopic] = {}
    reader = CommittedReader(cluster)
    for name, ends in file.changelogs.items():
        info = find_topic(cluster, name, "READ", deadline)
        if info is None:
            continue
        now = list_offsets(cluster, {name: sorted(info.leaders)}, LATEST, deadline)[name]
        same = info.topic_id == file.topic_ids.get(name) and set(now) == set(ends)
        same = same and all(end <= now[p] and not _has_records(reader, name, p, end, now[p]) for p, end in ends.items())
        found[name] = TableTopic(info.topic_id, now, same)
    return found


def _has_records(reader: CommittedReader, topic: str, partition: int, start: int, end: int) -> bool:
    return any(chunk.keys for chunk in reader.read(topic, partition, start, end))


# ---- the decision ----------------------------------------------------------------------------------------


def plan_import(
    names: Names,
    file: Progress,
    before: Progress | None,
    topics: Mapping[str, SourceTopic],
    tables: Mapping[str, TableTopic],
    state: str | None,
) -> Decision:
    """Decide what to commit.

    Args:
        file: the progress of the file. before: what is committed; None: nothing.
        topics, tables: topics of the file that exist, as they are now.
    """
    _check_topics(file, topics)
    file = _as_own(file, names)
    base = file if before is None else before
    move = _moves(base, file, before, topics)
    if _fits(file, before, tables, move):
        after = replace(
            move.after(base),
            changelogs=file.changelogs,
            topic_ids={**base.topic_ids, **file.topic_ids},
            tables=file.tables,
            checkpoint=file.checkpoint,
            # Without it the outputs that an earlier version has written would be written again.
            handover=None if state == DELETE else file.handover,
        )
        return Decision(move, after, deletes=state == DELETE)
    if before is None:
        base = _with_tables_of_now(file, tables, state)
        move = replace(move, before=base)
    if state is None and base.tables:
        raise OptionError(
            f"The state of flow {names.flow!r} is not that of the file: its tables have changed since the export",
            flow=names.flow,
            detail=f"tables: {', '.join(sorted(base.tables))}",
            next_step="give --state keep (the state stays as it is now; records that are read again are applied to it "
            "again) or --state delete (its rows are deleted)",
        )
    choice = check_state(base, state)
    return Decision(move, move.after(base), deletes=choice == DELETE)


def _check_topics(file: Progress, topics: Mapping[str, SourceTopic]) -> None:
    for name, offsets in sorted(file.offsets.items()):
        topic = topics.get(name)
        if topic is None:
            raise ProgressConflictError(
                f"Source topic {name} of the file does not exist here",
                topic=name,
                next_step="check --bootstrap-servers, or remove the topic from the offsets in the file",
            )
        if file.topic_ids.get(name) not in (None, topic.topic_id):
            raise ProgressConflictError(
                f"Topic {name} is not the one of the file: its offsets now mean other records",
                topic=name,
                detail=f"topic id {topic.topic_id}, in the file {file.topic_ids[name]}",
                next_step="it was deleted and created again, or this is another cluster: give offsets that you know "
                f"with `onceflow reset --to offsets={name}:0=...`",
            )
        gone = sorted(set(offsets) - set(topic.earliest))
        if gone:
            raise ProgressConflictError(
                f"Topic {name} has no partition {gone[0]}, which the file names",
                topic=name,
                next_step="correct the file, or check --bootstrap-servers",
            )


def _as_own(file: Progress, names: Names) -> Progress:
    """The progress of the file, under the flow's name."""
    if file.flow == names.progress_key:
        return file
    if file.tables or file.checkpoint is not None:
        raise ProgressConflictError(
            f"The file is that of flow {file.flow!r}, which has state: another flow cannot have it",
            flow=names.flow,
            next_step=f"import it for flow {file.flow!r}, or start {names.flow!r} without state: "
            f"`onceflow reset {names.flow} --to offsets=...`",
        )
    return replace(file, flow=names.progress_key, batch_id=0, outputs=(), side_topics={})


def _moves(base: Progress, file: Progress, before: Progress | None, topics: Mapping[str, SourceTopic]) -> Move:
    """Where the sources of the file go. Partitions that it does not name begin at their first offset."""
    nothing = replace(base, offsets={}) if before is None else before
    wanted = {
        name: {p: offsets.get(p, topics[name].earliest[p]) for p in topics[name].earliest}
        for name, offsets in file.offsets.items()
    }
    return plan_move(nothing, topics, OffsetSpec(OFFSETS, offsets=wanted), {})


def _fits(file: Progress, before: Progress | None, tables: Mapping[str, TableTopic], move: Move) -> bool:
    """Whether the flow's state is that of the file."""
    if not all(name in tables and tables[name].is_same for name in file.changelogs):
        return False
    if before is None:
        return True
    if file.checkpoint is not None and any(each.before != each.after for each in move.moves):
        return False
    locals_ = {name: table.local for name, table in file.tables.items()}
    return before.checkpoint == file.checkpoint and locals_ == {n: table.local for n, table in before.tables.items()}


def _with_tables_of_now(file: Progress, tables: Mapping[str, TableTopic], state: str | None) -> Progress:
    """Progress of the file for a flow without progress, with its tables as they are now.

    Raises:
        ProgressConflictError: a table is gone, or another one, and its state is to be kept.
    """
    lost = sorted(n for n in file.changelogs if n not in tables or tables[n].topic_id != file.topic_ids.get(n))
    if not lost:
        known = {  # there may have been timers since
            name: replace(table, processing_timers=table.processing_timers or None)
            for name, table in file.tables.items()
        }
        return replace(file, changelogs={name: tables[name].ends for name in file.changelogs}, tables=known)
    raise ProgressConflictError(
        f"Table topic {lost[0]} is gone, or was created again: the state of the file is lost",
        topic=lost[0],
        next_step="delete what is left of the table topics, remove changelogs and tables from the file, and import "
        "it: the flow makes its tables anew",
    )

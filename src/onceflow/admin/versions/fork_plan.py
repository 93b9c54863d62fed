"""Forking a flow, as a pure decision: what a copy gets, under which names, and which flows cannot be copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from onceflow.errors import OnceflowError, OptionError, ProgressConflictError
from onceflow.protocol.names import INTERNAL_SUFFIX, Names
from onceflow.protocol.progress import ForkOrigin, Offsets, Progress

_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def plan_tables(progress: Progress, names: Names, new: Names, wanted: Mapping[str, str]) -> dict[str, str]:
    """The name that each table gets in the copy; by default see `_default_name`.

    Args:
        progress: of the flow that is copied.
        wanted: names that the user has chosen, by table.

    Raises:
        OptionError: a name cannot be used, or there is no such table.
        ProgressConflictError: the flow cannot be copied.
    """
    check_can_fork(progress, names)
    unknown = sorted(set(wanted) - set(progress.tables))
    if unknown:
        raise OptionError(
            f"Flow {names.flow!r} has no table {unknown[0]!r}",
            flow=names.flow,
            detail=f"its tables: {', '.join(sorted(progress.tables)) or 'none'}",
            next_step="check the name before the = of --table",
        )
    earlier = [names.flow]
    if progress.promoted is not None:
        earlier.append(progress.promoted.flow.removeprefix(names.transactional_id_prefix))
    tables = {table: wanted.get(table, _default_name(table, earlier, new)) for table in sorted(progress.tables)}
    taken = {*progress.changelogs, *progress.offsets, *progress.outputs, *progress.side_topics}
    for table, name in tables.items():
        reason = _refusal(name, taken)
        if reason:
            raise OptionError(
                f"The copy of table {table} cannot be named {name!r}: {reason}",
                flow=names.flow,
                next_step=f"give it another name: --table {table}=NAME",
            )
        taken |= {name, name + INTERNAL_SUFFIX}
    return tables


def _default_name(table: str, earlier: Iterable[str], new: Names) -> str:
    """The name of the new flow, ``-``, and the table's name without the names of earlier flows at its beginning. So the
    names do not grow with every version.

    Args:
        earlier: the flow that is copied, and the copy that was promoted to it.
    """
    rest = table
    longest_first = sorted(earlier, key=len, reverse=True)
    while found := next((flow for flow in longest_first if rest == flow or rest.startswith(f"{flow}-")), None):
        rest = rest[len(found) + 1 :]
    return f"{new.flow}-{rest}" if rest else new.flow


def _refusal(name: str, taken: set[str]) -> str:
    if not name or not _LEGAL.fullmatch(name + INTERNAL_SUFFIX):
        return "topic names have letters, digits, '.', '_' and '-', with its companion at most 249"
    if name.startswith("__"):
        return "names that begin with two underscores are those of internal topics"
    both = {name, name + INTERNAL_SUFFIX} & taken
    return f"topic {min(both)} is in use by this flow, or by another copy" if both else ""


def check_can_fork(progress: Progress, names: Names) -> None:
    """Refuse flows whose state is not in their table topics, or not exactly.

    Raises:
        ProgressConflictError: it cannot be copied.
    """
    flow = names.flow
    if progress.handover is not None:
        raise ProgressConflictError(
            f"Flow {flow!r} was promoted, and has not run since then",
            flow=flow,
            next_step="start it; when it has committed its first batch, it can be copied",
        )
    if progress.checkpoint is not None:
        raise ProgressConflictError(
            f"Flow {flow!r} keeps state in a Spark checkpoint, which cannot be copied",
            flow=flow,
            next_step="start the new version with a flow name and a checkpoint of its own: it builds its state from "
            "the source",
        )
    for name, table in sorted(progress.tables.items()):
        if table.local is not None:
            raise ProgressConflictError(
                f"Table {name} has no changelog: its rows are only in local stores, and cannot be copied",
                flow=flow,
                next_step="start the new version under another flow name: it builds its state from the source",
            )
        if table.open_ended:
            raise ProgressConflictError(
                f"Table {name} was written without transactions (a weaker guarantee): there is no position at which "
                "its rows and the flow's progress agree",
                flow=flow,
                topic=name,
                next_step="start the new version under another flow name: it builds its state from the source",
            )


def check_fresh(found: Progress | None, new: Names, origin: Names) -> ForkOrigin | None:
    """Check that the new flow does not exist yet.

    Returns:
        Where it comes from, if it is a copy of this flow that has not run yet; None: it does not exist (any more).

    Raises:
        OptionError, ProgressConflictError: it exists.
    """
    if new.flow == origin.flow:
        raise OptionError(
            f"Flow {new.flow!r} cannot be a copy of itself",
            flow=new.flow,
            next_step="give the new flow another name",
        )
    if found is None or found.became is not None:
        return None
    forked = found.forked
    if forked is not None and forked.flow == origin.progress_key and found.batch_id == 0:
        return forked
    raise ProgressConflictError(
        f"Flow {new.flow!r} exists: it has progress of its own",
        flow=new.flow,
        detail=f"it is at batch {found.batch_id}",
        next_step="give the new flow another name; or let it forget its progress with `onceflow reset`, and delete the "
        "topics of its tables",
    )


def topics_of(tables: Mapping[str, str]) -> dict[str, str]:
    """The topics that are copied, and those that they are copied to."""
    return {old + suffix: new + suffix for old, new in sorted(tables.items()) for suffix in ("", INTERNAL_SUFFIX)}


def forked_progress(
    origin: Progress,
    new: Names,
    tables: Mapping[str, str],
    *,
    ends: Offsets,
    topic_ids: Mapping[str, str],
    outputs: Offsets,
    time_ms: int,
    producer: tuple[int, int] = (-1, -1),
) -> Progress:
    """The progress record of the copy.

    Args:
        origin: the record that the copied rows belong to.
        tables: by table, the name of its copy.
        ends: the ends of the new table topics, behind the copied rows.
        topic_ids: of the new table topics.
        outputs: see `ForkOrigin`.
        producer: id and epoch of the transaction.
    """
    sources = {name: topic_id for name, topic_id in origin.topic_ids.items() if name not in origin.changelogs}
    return replace(
        origin,
        flow=new.progress_key,
        batch_id=0,
        topic_ids={**sources, **topic_ids},
        changelogs=ends,
        tables={tables[name]: table for name, table in origin.tables.items()},
        outputs=(),
        side_topics={},  # the new version has others
        external="",
        external_commit="",
        external_before=None,
        producer_id=-1,
        producer_epoch=-1,
        promoted=None,
        forked=ForkOrigin(origin.flow, origin.batch_id, time_ms, origin.offsets, tables, outputs, *producer),
        time_ms=time_ms,
    )


def changed_meanwhile(names: Names) -> OnceflowError:
    """The error for a flow that has other tables than at the beginning of the copy."""
    return ProgressConflictError(
        f"Flow {names.flow!r} has got other tables, or was reset, while it was copied",
        flow=names.flow,
        next_step="nothing was copied; run the command again",
    )

"""Where a replay begins: with which state, and at which offsets, by the progress records that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onceflow.admin.verify.replay_steps import begun_at, first_start
from onceflow.errors import OptionError
from onceflow.protocol.names import INTERNAL_SUFFIX
from onceflow.protocol.progress import Offsets, Progress


@dataclass(frozen=True)
class Beginning:
    """Where a replay begins.

    Args:
        offsets: of the sources. before: the progress there; None: the flow has written no outputs before.
        life: the progress records from there on.
        state: whose state it begins with; None: an empty one.
    """

    offsets: Offsets
    before: Progress | None
    life: Sequence[Progress]
    state: Progress | None


def from_progress(life: Sequence[Progress], table: str, given: Offsets | None) -> Beginning:
    """Where the step of a table has begun, by the progress records that are left.

    A start that adds a table commits that, with the end offsets of a topic whose rows the flow has adopted. The flow
    may have run without the table before.
    """
    first = next(at for at, each in enumerate(life) if table in each.tables)
    start, number = life[first], life[first - 1].batch_id if first else 0
    if start.batch_id != number and start.handover is None:
        origin = start.promoted or start.forked
        if origin is not None:
            command = "fork" if start.promoted is None else "promote"
            raise OptionError(
                f"The flow has got its state from {origin.flow} (onceflow {command}), and the state with which it "
                "began is not known any more",
                flow=start.flow,
                next_step="begin with the state of a later time: --since FILE, of `onceflow progress export`",
            )
        return Beginning(begun_at(life, given), None, life, None)  # that record is gone
    state = start if _has_rows(start, table) else None
    if start.batch_id or start.promoted is not None:
        return Beginning(start.offsets, start, life[first:], state)
    if given is None:
        return Beginning(first_start(life), None, life, state)
    return Beginning(begun_at(life, given), None, [each for each in life if each.batch_id], state)


def _has_rows(progress: Progress, table: str) -> bool:
    """Whether anything was written to the topics of a table. A processor may have maps and timers only."""
    return any(any(progress.changelogs.get(topic, {}).values()) for topic in (table, table + INTERNAL_SUFFIX))

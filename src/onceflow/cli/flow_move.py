"""A move of one flow to other positions, by `onceflow reset --to` or `onceflow progress import`, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.cli.moving import Options, Tell, Texts, carry_out
from onceflow.cli.text import in_columns
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.change.move import Moved
    from onceflow.admin.change.move_plan import Move
    from onceflow.client.cluster import Cluster
    from onceflow.client.settings import ClientSettings
    from onceflow.protocol.progress import Progress


@dataclass(frozen=True)
class FlowMove:
    """A move of a flow.

    Args:
        state: what becomes of its state. moved: what was committed; None: nothing yet.
    """

    flow: str
    move: Move
    state: str
    moved: Moved | None = None

    @property
    def progress(self) -> Progress | None:
        """What was committed. None: nothing yet."""
        return None if self.moved is None else self.moved.progress


def move_flow(
    settings: ClientSettings,
    options: Options,
    flow: str,
    state: str,
    preview: Callable[[Cluster], Move],
    act: Callable[[Cluster, Tell], Moved],
) -> None:
    """`carry_out` for a move.

    Args:
        state: what becomes of its state.
    """

    def moved(cluster: Cluster, tell: Tell) -> FlowMove:
        done = act(cluster, tell)
        return FlowMove(flow, done.move, state, done)

    texts = Texts(_plan, _question, _done, _content)
    carry_out(settings, options, texts, lambda cluster: FlowMove(flow, preview(cluster), state), moved)


def _plan(planned: FlowMove) -> list[str]:
    """A line for each partition, and what it means."""
    from onceflow.admin.change.move_plan import meaning

    move = planned.move
    rows = [
        [
            f"{each.topic}-{each.partition}",
            "-" if each.before is None else each.before,
            each.after,
            _what(each.again, each.skipped),
        ]
        for each in move.moves
    ]
    again, skipped = sum(each.again for each in move.moves), sum(each.skipped for each in move.moves)
    sums = (
        f"At most {counted(again)} will be read and written a second time, at most {counted(skipped)} will be skipped."
    )
    means = meaning(move.before, planned.state)
    return [
        *in_columns(["PARTITION", "FROM", "TO", "RECORDS"], rows),
        sums,
        "Transaction markers count, too. What is written stays.",
        *([means] if means else []),
        *(f"{topic} no longer exists; its offsets stay in progress." for topic in move.gone),
    ]


def _what(again: int, skipped: int) -> str:
    if again:
        return f"{again:,} again"
    return f"{skipped:,} skipped" if skipped else "-"


def _question(planned: FlowMove) -> str:
    return f"Stop a running driver of flow {planned.flow!r}, and move the flow?"


def _done(found: FlowMove) -> list[str]:
    rows = 0 if found.moved is None else found.moved.rows
    deleted = f" {counted(rows, 'row')} of its tables deleted." if rows else ""
    ends = ", ".join(f"{each.topic}-{each.partition} at {each.after}" for each in found.move.moves)
    return [f"Flow {found.flow} is moved: its next start reads {ends}.{deleted}"]


def _content(found: FlowMove) -> dict[str, Any]:
    move, now = found.move, found.progress or found.move.before
    return {
        "flow": found.flow,
        "dry_run": found.moved is None,
        "batch": now.batch_id,
        "state": found.state if move.before.tables or move.before.checkpoint is not None else None,
        "rows_deleted": 0 if found.moved is None else found.moved.rows,
        "epoch": now.producer_epoch,
        "written_twice_max": sum(each.again for each in move.moves),
        "skipped_max": sum(each.skipped for each in move.moves),
        "partitions": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "from": each.before,
                "to": each.after,
                "written_twice_max": each.again,
                "skipped_max": each.skipped,
            }
            for each in move.moves
        ],
        "gone": list(move.gone),
    }

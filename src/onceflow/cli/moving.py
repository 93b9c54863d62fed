"""What commands that move a flow in time say: `onceflow reset --to`, `onceflow progress import`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.text import counted, in_columns

if TYPE_CHECKING:
    from onceflow.admin.move import Move
    from onceflow.admin.mover import Moved


def lines(move: Move, state: str) -> list[str]:
    """A move, for people: a line for each partition, and what it means."""
    from onceflow.admin.move import meaning

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
    means = meaning(move.before, state)
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


def to_json(flow: str, move: Move, state: str, moved: Moved | None) -> str:
    """The result of such a command in one line.

    Args:
        moved: None: nothing was done, because it was a dry run.
    """
    content: dict[str, Any] = {
        "flow": flow,
        "dry_run": moved is None,
        "batch": move.before.batch_id if moved is None else moved.progress.batch_id,
        "state": state if move.before.tables or move.before.checkpoint is not None else None,
        "rows_deleted": 0 if moved is None else moved.rows,
        "epoch": move.before.producer_epoch if moved is None else moved.progress.producer_epoch,
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
    return json.dumps(content)


def confirmed(flow: str, move: Move, state: str, *, yes: bool, as_json: bool) -> None:
    """Show the move, and ask.

    Raises:
        click.Abort: it is not confirmed.
    """
    if not (yes and as_json):
        click.echo("\n".join(lines(move, state)), err=True)
    if not yes:
        click.confirm(f"Stop a running driver of flow {flow!r}, and move the flow?", abort=True, err=True)


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str, int, int], None]]:
    """Shows how far the deletion of rows is. Ctrl-C ends it: the transaction is aborted."""
    with progress_bar() as bar, interruptible() as check:

        def tell(text: str, done: int, total: int) -> None:
            check()
            bar(text, done, total)

        yield tell


def tell_done(flow: str, moved: Moved, state: str, *, as_json: bool) -> None:
    """Print the result."""
    if as_json:
        click.echo(to_json(flow, moved.move, state, moved))
        return
    deleted = f" {counted(moved.rows, 'row')} of its tables deleted." if moved.rows else ""
    ends = ", ".join(f"{each.topic}-{each.partition} at {each.after}" for each in moved.move.moves)
    click.echo(f"Flow {flow} is moved: its next start reads {ends}.{deleted}")

"""``onceflow reset``: let a flow start over, or move it to other offsets."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings
    from onceflow.protocol.names import Names


@examples(
    "onceflow reset validated-deposits --yes",
    "onceflow reset validated-deposits --to timestamp=2025-01-31T08:00:00Z --dry-run",
    "onceflow reset balances --to earliest --state delete",
)
@click.command()
@click.argument("flow")
@connection
@click.option(
    "--to",
    "position",
    metavar="POSITION",
    help="Move the flow instead: earliest, latest, beginning (offset 0), timestamp=ISO-or-epoch-ms, or "
    "offsets=TOPIC:PARTITION=OFFSET,... (or as JSON).",
)
@click.option(
    "--state",
    type=click.Choice(["keep", "delete"]),
    help="With --to, for a flow with state: keep its tables as they are, or delete their rows.",
)
@click.option("--dry-run", is_flag=True, help="With --to: only show what would be done. No driver is fenced.")
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def reset(
    flow: str,
    settings: ClientSettings,
    position: str | None,
    state: str | None,
    dry_run: bool,
    transactional_id_prefix: str,
    group_id_prefix: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the progress of FLOW: its next start reads from starting_offsets again. Or move it with --to.

    A running driver of the flow is fenced. What the flow has written stays, and is written a second time when
    the same records are read again. With --to, the new positions and what becomes of the state are committed in one
    transaction: whatever happens, all of it is done or nothing.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.protocol.names import Names

    names = Names(flow, transactional_id_prefix, group_id_prefix)
    if position is None and (state is not None or dry_run):
        raise click.UsageError("--state and --dry-run need --to: a reset without it forgets everything")
    if position is None:
        _forget(settings, names, yes=yes, as_json=as_json)
    else:
        _move(settings, names, position, state, dry_run=dry_run, yes=yes, as_json=as_json)


def _forget(settings: ClientSettings, names: Names, *, yes: bool, as_json: bool) -> None:
    from onceflow.admin import reset as resetting
    from onceflow.errors import OptionError

    flow = names.flow
    if not resetting.is_known(settings, names):
        raise OptionError(
            f"Flow {flow!r} is unknown here: Kafka has no progress, no offsets and no transactional id of it",
            next_step="check its name and its prefixes (--transactional-id-prefix, --group-id-prefix), and "
            "--bootstrap-servers",
        )
    if not yes:
        click.confirm(f"Forget the progress of flow {flow!r}? What it has written stays.", abort=True, err=True)
    before = resetting.reset(settings, names, [])
    if as_json:
        found = None if before is None else {"batch_id": before.batch_id, "offsets": before.offsets}
        click.echo(json.dumps({"flow": flow, "forgotten": found}))
    elif before is None:
        click.echo(f"Flow {flow} had no progress.")
    else:
        click.echo(f"Flow {flow} was at batch {before.batch_id}; its next start begins anew.")


def _move(
    settings: ClientSettings,
    names: Names,
    position: str,
    state: str | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from onceflow.admin import mover
    from onceflow.admin.move import KEEP
    from onceflow.admin.target import parse_target
    from onceflow.cli import moving
    from onceflow.client.cluster import Cluster

    target = parse_target(position)
    chosen = state or KEEP
    with contextlib.closing(Cluster(settings)) as cluster:
        planned = mover.preview(cluster, names, target, state)
        if dry_run:
            click.echo(
                moving.to_json(names.flow, planned, chosen, None)
                if as_json
                else "\n".join(moving.lines(planned, chosen))
            )
            return
        moving.confirmed(names.flow, planned, chosen, yes=yes, as_json=as_json)
        with moving.telling() as tell:
            moved = mover.move(cluster, names, target, state, tell)
    moving.tell_done(names.flow, moved, chosen, as_json=as_json)

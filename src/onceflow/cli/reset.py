"""``onceflow reset``: let a flow start over, or move it to other offsets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.flow_move import move_flow
from onceflow.cli.moving import Options, moving_options
from onceflow.cli.text import confirm
from onceflow.errors import OptionError

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
@moving_options(
    dry_run="With --to: only show what would be done. No driver is fenced.", prefixes="The same as in `Flow(...)`."
)
def reset(
    flow: str,
    settings: ClientSettings,
    position: str | None,
    state: str | None,
    options: Options,
) -> None:
    """Delete the progress of FLOW: its next start reads from starting_offsets again. Or move it with --to.

    A running driver of the flow is fenced. What the flow has written stays, and is written a second time when
    the same records are read again. With --to, the new positions and what becomes of the state are committed in one
    transaction: whatever happens, all of it is done or nothing.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    if position is None and (state is not None or options.dry_run):
        raise click.UsageError("--state and --dry-run need --to: a reset without it forgets everything")
    if position is None:
        _forget(settings, options.names(flow), options)
    else:
        _move(settings, options.names(flow), options, position, state)


def _forget(settings: ClientSettings, names: Names, options: Options) -> None:
    from contextlib import closing

    from onceflow.admin.change import reset as resetting
    from onceflow.admin.status.similar_flows import meant, named, similar_flows
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import INTERNAL_SUFFIX
    from onceflow.protocol.position import Position

    flow = names.flow
    if not resetting.is_known(settings, names):
        with closing(Cluster(settings)) as cluster:
            similar = similar_flows(cluster, names)
        raise OptionError(
            f"Flow {flow!r} is unknown here: Kafka has no progress, no offsets and no transactional id of it",
            detail=named(similar),
            next_step=meant(
                similar,
                "check its name and its prefixes (--transactional-id-prefix, --group-id-prefix), and "
                "--bootstrap-servers",
            ),
        )
    if not options.yes:
        what = f"the progress of flow {flow!r} at {settings.bootstrap_servers}"
        confirm(f"Forget {what}? What it has written stays, also the rows of its tables.")
    before = resetting.reset(settings, names, [])
    if options.as_json:
        found = None if before is None else {"batch_id": before.batch_id, "offsets": before.offsets}
        click.echo(json.dumps({"flow": flow, "forgotten": found}))
    elif before is None:
        click.echo(f"Flow {flow} had no progress.")
    else:
        click.echo(f"Flow {flow} was at batch {before.batch_id}, position {Position(before.offsets)}.")
        click.echo("Its next start begins with the first records of its sources, or at its starting_offsets.")
        if tables := sorted(name for name in before.changelogs if name + INTERNAL_SUFFIX in before.changelogs):
            topics = ", ".join(f"{table} and {table}{INTERNAL_SUFFIX}" for table in tables)
            click.echo(f"Rows of tables stay. To begin with empty ones, delete the topics {topics}.")


def _move(settings: ClientSettings, names: Names, options: Options, position: str, state: str | None) -> None:
    from onceflow.admin.change import move as mover
    from onceflow.admin.change.move_plan import KEEP
    from onceflow.admin.change.target import parse_target

    try:
        target = parse_target(position)
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    move_flow(
        settings,
        options,
        names.flow,
        state or KEEP,
        lambda cluster: mover.preview(cluster, names, target, state),
        lambda cluster, tell: mover.move(cluster, names, target, state, tell),
    )

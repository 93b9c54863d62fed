"""``onceflow reset``: let a flow start over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings


@examples("onceflow reset validated-deposits --yes")
@click.command()
@click.argument("flow")
@connection
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the deleted progress as JSON.")
def reset(
    flow: str,
    settings: ClientSettings,
    transactional_id_prefix: str,
    group_id_prefix: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the progress of FLOW. Its next start reads from starting_offsets again.

    A running driver of the flow is fenced. What the flow has written stays, and is written a second time when
    the same records are read again.
    """
    from onceflow.admin import reset as resetting
    from onceflow.errors import OptionError
    from onceflow.protocol.names import Names

    names = Names(flow, transactional_id_prefix, group_id_prefix)
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

"""``onceflow promote``: a new version takes the place of the running one."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.text import counted, in_columns

if TYPE_CHECKING:
    from onceflow.admin.promoter import Promoted
    from onceflow.client.settings import ClientSettings


@examples(
    "onceflow promote balances-v2 --replaces balances --dry-run",
    "onceflow promote balances-v2 --replaces balances --yes",
)
@click.command()
@click.argument("new")
@connection
@click.option("--replaces", "flow", required=True, metavar="FLOW", help="The flow whose place NEW takes.")
@click.option(
    "--max-gap",
    type=click.IntRange(min=0),
    default=100_000,
    show_default=True,
    help="How many records NEW may be behind.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long FLOW may take to get as far as NEW.",
)
@click.option("--new-timers", is_flag=True, help="FLOW has no timers; those of NEW that have fired are left out.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done. No driver is fenced.")
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`, of both flows.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`, of both flows.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def promote(
    new: str,
    settings: ClientSettings,
    flow: str,
    max_gap: int,
    wait_s: float,
    new_timers: bool,
    dry_run: bool,
    transactional_id_prefix: str,
    group_id_prefix: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Let NEW take the place of FLOW: its name, its group and its outputs, with the tables of NEW.

    Stop whatever restarts NEW before. FLOW runs until it has read as much as NEW; then both are fenced, and one
    transaction decides. Then start the program of NEW as FLOW, with FLOW's outputs and with NEW's tables. The outputs
    of FLOW go on as if one program had written them: no record is missing or doubled.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.admin import promoter
    from onceflow.cli import moving
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import Names

    limits = promoter.Limits(max_gap, wait_s, new_timers)
    names, other = (Names(each, transactional_id_prefix, group_id_prefix) for each in (flow, new))
    with contextlib.closing(Cluster(settings)) as cluster:
        planned = promoter.preview(cluster, names, other, limits)
        if planned.progress is None and not dry_run:
            _confirmed(planned, yes=yes, as_json=as_json)
            with moving.telling() as tell:
                done = promoter.promote(cluster, names, other, limits, tell)
            _print(done, as_json=as_json)
            return
    _print(planned, as_json=as_json)


def _confirmed(planned: Promoted, *, yes: bool, as_json: bool) -> None:
    if not (yes and as_json):
        click.echo("\n".join(_lines(planned)), err=True)
    if not yes:
        click.confirm(
            f"Stop running drivers of both flows, and let {planned.new!r} take the place of {planned.flow!r}?",
            abort=True,
            err=True,
        )


def _lines(planned: Promoted) -> list[str]:
    rows = [
        [f"{each.topic}-{each.partition}", "-" if each.old is None else each.old, each.new]
        for each in planned.positions
    ]
    lines = in_columns(["PARTITION", planned.flow, planned.new], rows)
    if not planned.stateful:
        return [*lines, f"{planned.new} has no state: it continues where {planned.flow} is."]
    behind = f"{planned.new} is at most {counted(planned.gap)} behind."
    return [*lines, f"{behind} Its first batch as {planned.flow} processes these without writing outputs."]


def _print(found: Promoted, *, as_json: bool) -> None:
    progress = found.progress
    tables = {} if progress is None or progress.promoted is None else dict(progress.promoted.tables)
    if as_json:
        content = {
            "flow": found.flow,
            "new": found.new,
            "dry_run": progress is None,
            "already": found.already,
            "batch": found.before.batch_id,
            "gap_max": found.gap,
            "tables": tables,
            "positions": [
                {"topic": each.topic, "partition": each.partition, "flow": each.old, "new": each.new}
                for each in found.positions
            ],
        }
        click.echo(json.dumps(content))
    elif progress is None:
        click.echo("\n".join(_lines(found)))
    elif found.already:
        click.echo(f"{found.new} has taken the place of {found.flow} already.")
    else:
        click.echo(f"{found.new} has taken the place of {found.flow} behind batch {found.before.batch_id}.")
        names = ", ".join(sorted(progress.tables))
        click.echo(f"Start its program as flow {found.flow}" + (f", with the tables {names}." if names else "."))
        if tables:
            click.echo(f"No flow uses these tables any more: {', '.join(sorted(tables))}.")

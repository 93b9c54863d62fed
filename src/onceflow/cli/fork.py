"""``onceflow fork``: copy a running flow, to try a new version beside it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection, pair
from onceflow.cli.examples import examples
from onceflow.cli.text import counted, in_columns

if TYPE_CHECKING:
    from onceflow.admin.forker import Forked
    from onceflow.client.settings import ClientSettings


@examples(
    "onceflow fork balances balances-v2 --dry-run",
    "onceflow fork balances balances-v2 --table balances=balances-next --yes",
)
@click.command()
@click.argument("flow")
@click.argument("new")
@connection
@click.option(
    "--table", "tables", multiple=True, metavar="OLD=NAME", help="Name of the copy of a table.  [default: NEW-OLD]"
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`, of both flows.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`, of both flows.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fork(
    flow: str,
    new: str,
    settings: ClientSettings,
    tables: tuple[str, ...],
    dry_run: bool,
    transactional_id_prefix: str,
    group_id_prefix: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Copy the tables and the position of FLOW to a new flow NEW. FLOW goes on undisturbed.

    The copy is exact, of one committed batch, and made in one transaction: NEW has all of it or nothing. Then start the
    new version under the name NEW, with the tables of the copy and with outputs of its own.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.admin import forker
    from onceflow.cli import moving
    from onceflow.client.cluster import Cluster
    from onceflow.protocol.names import Names

    names, copy = (Names(each, transactional_id_prefix, group_id_prefix) for each in (flow, new))
    wanted = dict(pair(each, "--table") for each in tables)
    with contextlib.closing(Cluster(settings)) as cluster:
        planned = forker.preview(cluster, names, copy, wanted)
        if planned.progress is None and not dry_run:
            _confirmed(planned, yes=yes, as_json=as_json)
            with moving.telling() as tell:
                _print(forker.fork(cluster, names, copy, wanted, tell), as_json=as_json)
            return
    _print(planned, as_json=as_json)


def _confirmed(planned: Forked, *, yes: bool, as_json: bool) -> None:
    if not (yes and as_json):
        click.echo("\n".join(_lines(planned)), err=True)
    if not yes:
        click.confirm(f"Copy flow {planned.flow!r} to {planned.new!r}?", abort=True, err=True)


def _lines(planned: Forked) -> list[str]:
    rows = [[table, name, len(planned.origin.changelogs[table])] for table, name in sorted(planned.tables.items())]
    read = ", ".join(sorted(planned.origin.offsets))
    return [
        f"Flow {planned.flow} is at batch {planned.origin.batch_id} and reads {read or 'no topic'}.",
        *(in_columns(["TABLE", "COPY", "PARTITIONS"], rows) if rows else ["It has no tables."]),
        *([f"At most {counted(planned.offsets, 'record')} of tables are copied."] if rows else []),
    ]


def _print(found: Forked, *, as_json: bool) -> None:
    progress = found.progress
    if as_json:
        content = {
            "flow": found.flow,
            "new": found.new,
            "dry_run": progress is None,
            "already": found.already,
            "batch": found.origin.batch_id,
            "tables": None if found.already else dict(found.tables),
            "offsets": found.origin.offsets,
            "records_copied": found.records,
            "rounds": found.rounds,
        }
        click.echo(json.dumps(content))
        return
    if progress is None:
        click.echo("\n".join(_lines(found)))
    elif found.already:
        click.echo(f"Flow {found.new} is a copy of {found.flow} at batch {found.origin.batch_id} already.")
    else:
        tables = ", ".join(f"{name} of {table}" for table, name in sorted(found.tables.items()))
        click.echo(
            f"Flow {found.new} is a copy of {found.flow} at batch {found.origin.batch_id}"
            + (f", with the tables {tables} ({counted(found.records, 'record')})." if tables else ".")
        )
        click.echo("Start the new version under this name, with these tables and with outputs of its own.")

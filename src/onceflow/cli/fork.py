"""``onceflow fork``: copy a running flow, to try a new version beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connection, pairs
from onceflow.cli.examples import examples
from onceflow.cli.moving import Options, Texts, carry_out, moving_options
from onceflow.cli.text import in_columns
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.versions.fork import Forked
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
    "--table",
    "tables",
    multiple=True,
    metavar="OLD=NAME",
    help="Name of the copy of a table.  [default: NEW-OLD, or OLD with NEW in place of FLOW at its beginning]",
)
@moving_options(dry_run="Only show what would be done.", prefixes="The same as in `Flow(...)`, of both flows.")
def fork(
    flow: str,
    new: str,
    settings: ClientSettings,
    tables: tuple[str, ...],
    options: Options,
) -> None:
    """Copy the tables and the position of FLOW to a new flow NEW. FLOW goes on undisturbed.

    The copy is exact, of one committed batch, and made in one transaction: NEW has all of it or nothing. Then start the
    new version under the name NEW, with the tables of the copy and with outputs of its own.

    Exit codes: 0 done; 1 refused, not confirmed, or an error; 2 wrong usage; 130 interrupted.
    """
    from onceflow.admin.versions import fork as forker

    names, copy = options.names(flow), options.names(new)
    wanted = pairs(tables, "--table")
    carry_out(
        settings,
        options,
        Texts(_plan, _question, _done, _content),
        lambda cluster: forker.preview(cluster, names, copy, wanted),
        lambda cluster, tell: forker.fork(cluster, names, copy, wanted, tell),
    )


def _plan(planned: Forked) -> list[str]:
    rows = [[table, name, len(planned.origin.changelogs[table])] for table, name in sorted(planned.tables.items())]
    read = ", ".join(sorted(planned.origin.offsets))
    return [
        f"Flow {planned.flow} is at batch {planned.origin.batch_id} and reads {read or 'no topic'}.",
        *(in_columns(["TABLE", "COPY", "PARTITIONS"], rows) if rows else ["It has no tables."]),
        *([f"At most {counted(planned.offsets, 'record')} of tables are copied."] if rows else []),
        f"Do not start the program of {planned.new} before that: it would begin anew, with empty tables.",
    ]


def _question(planned: Forked) -> str:
    return f"Copy flow {planned.flow!r} to {planned.new!r}?"


def _done(found: Forked) -> list[str]:
    copied = f"Flow {found.new} is a copy of {found.flow} at batch {found.origin.batch_id}"
    if found.already:
        return [f"{copied} already."]
    tables = ", ".join(f"{name} of {table}" for table, name in sorted(found.tables.items()))
    return [
        copied + (f", with the tables {tables} ({counted(found.records, 'record')})." if tables else "."),
        "Start the new version under this name, with these tables and with outputs of its own.",
    ]


def _content(found: Forked) -> dict[str, Any]:
    return {
        "flow": found.flow,
        "new": found.new,
        "dry_run": found.progress is None,
        "already": found.already,
        "batch": found.origin.batch_id,
        "tables": None if found.already else dict(found.tables),
        "offsets": found.origin.offsets,
        "records_copied": found.records,
        "rounds": found.rounds,
    }

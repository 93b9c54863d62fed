"""``onceflow table``: what is in tables; serving them; maintenance of the tables of flows."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from onceflow.cli import table_list, table_lookup
from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.progress import progress_bar
from onceflow.cli.table_serve import serve
from onceflow.cli.text import confirm
from onceflow.cli.text import timeout_ms as timeout_ms_of
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.change.repartition import Repartitioned
    from onceflow.client.settings import ClientSettings


@click.group()
def table() -> None:
    """Look into tables, serve them over HTTP, and maintain those of flows.

    A table is a compacted topic: the last record of each key is its row. A flow writes its own tables; any other
    compacted topic can be looked into, too.
    """


for each in (
    table_list.list_,
    table_list.describe,
    table_lookup.get,
    table_lookup.range_,
    table_lookup.prefix,
    table_lookup.count,
    table_lookup.tail,
    serve,
):
    table.add_command(each)


@examples("onceflow table repartition balances-flow balances --partitions 12")
@table.command()
@click.argument("flow")
@click.argument("table")
@click.option("--partitions", type=click.IntRange(min=1), required=True, help="The new number of partitions.")
@connection
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", help="The same as in `Flow(...)`.")
@click.option(
    "--transaction-timeout",
    metavar="DURATION",
    help="The timeout of the transaction that moves all rows.  "
    "[default: 15 minutes, or less if the brokers allow less]",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def repartition(
    flow: str,
    table: str,
    partitions: int,
    settings: ClientSettings,
    transactional_id_prefix: str,
    group_id_prefix: str | None,
    transaction_timeout: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Give the TABLE of a FLOW more partitions, and move its rows to them.

    A running driver of the flow is fenced. All rows move in one transaction with the flow's progress: whatever
    happens, they have moved or they have not. Run it again if it was interrupted. Then start the flow.
    """
    from onceflow.admin.change import repartition as repartitioning
    from onceflow.admin.change.row_moves import RepartitionProgress
    from onceflow.protocol.names import Names

    names = Names(flow, transactional_id_prefix, group_id_prefix)
    timeout_ms = None if transaction_timeout is None else timeout_ms_of(transaction_timeout, "--transaction-timeout")
    if not yes:
        wanted = counted(partitions, "partition")
        what = f"Stop flow {flow}, and give its table {table} {wanted} at {settings.bootstrap_servers}?"
        confirm(f"{what} They cannot be taken away again.")
    with progress_bar() as bar:

        def show(progress: RepartitionProgress) -> None:
            bar(f"reading {progress.rows:>12,} rows moved", progress.done, progress.total)

        done = repartitioning.repartition(settings, names, table, partitions, timeout_ms=timeout_ms, tell=show)
    click.echo(json.dumps(asdict(done)) if as_json else _in_words(done))


def _in_words(done: Repartitioned) -> str:
    if done.before == done.partitions:
        return f"Table {done.table} has its rows in {counted(done.partitions, 'partition')} already."
    more = f" (and {done.internal_rows:,} of {done.table}-internal)" if done.internal_rows else ""
    return (
        f"Table {done.table} went from {done.before} to {counted(done.partitions, 'partition')}: "
        f"{counted(done.rows, 'row')}{more} moved in {done.seconds:.1f} s."
    )

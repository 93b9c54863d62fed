"""``onceflow table``: maintenance of the tables of flows."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection

if TYPE_CHECKING:
    from onceflow.admin.repartition import Repartitioned
    from onceflow.client.settings import ClientSettings


@click.group()
def table() -> None:
    """Maintain the tables of flows."""


@table.command()
@click.argument("flow")
@click.argument("table")
@click.option("--partitions", type=click.IntRange(min=1), required=True, help="The new number of partitions.")
@connection
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option(
    "--transaction-timeout",
    metavar="DURATION",
    help="The timeout of the transaction that moves all rows.  "
    "[default: 15 minutes, or less if the brokers allow less]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def repartition(
    flow: str,
    table: str,
    partitions: int,
    settings: ClientSettings,
    transactional_id_prefix: str,
    group_id_prefix: str,
    transaction_timeout: str | None,
    as_json: bool,
) -> None:
    """Give the TABLE of a FLOW more partitions, and move its rows to them.

    A running driver of the flow is fenced. All rows move in one transaction with the flow's progress: whatever
    happens, they have moved or they have not. Run it again if it was interrupted. Then start the flow.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from onceflow.admin import repartition as repartitioning
    from onceflow.admin.repartitioner import RepartitionProgress
    from onceflow.protocol.names import Names

    names = Names(flow, transactional_id_prefix, group_id_prefix)
    timeout_ms = None if transaction_timeout is None else _timeout_ms(transaction_timeout)
    console = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("reading {task.fields[rows]:>12,} rows moved"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bars:
        bar = bars.add_task("", total=None, rows=0)

        def show(progress: RepartitionProgress) -> None:
            bars.update(bar, completed=progress.done, total=progress.total, rows=progress.rows)

        done = repartitioning.repartition(settings, names, table, partitions, timeout_ms=timeout_ms, tell=show)
    click.echo(json.dumps(asdict(done)) if as_json else _in_words(done))


def _in_words(done: Repartitioned) -> str:
    if done.before == done.partitions:
        return f"Table {done.table} has its rows in {done.partitions} partitions already."
    more = f" (and {done.internal_rows:,} of {done.table}-internal)" if done.internal_rows else ""
    return (
        f"Table {done.table} went from {done.before} to {done.partitions} partitions: "
        f"{done.rows:,} rows{more} moved in {done.seconds:.1f} s."
    )


def _timeout_ms(text: str) -> int:
    from onceflow.durations import duration_ms

    try:
        found = duration_ms(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise click.UsageError(f"--transaction-timeout: {error}") from error
    if found < 1000:
        raise click.UsageError("--transaction-timeout is shorter than a second")
    return found

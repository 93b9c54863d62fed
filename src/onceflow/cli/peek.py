"""``onceflow peek``: the newest committed records of a topic as lines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.consume import line_of, tell_held_back
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.registry import registry_options, with_schemas

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings
    from onceflow.schema_registry.json_view import JsonView


@examples("onceflow peek validated --last 20 --json")
@click.command()
@click.argument("topic")
@connection
@registry_options
@click.option(
    "--last",
    "count",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="How many records, of all partitions together.",
)
@click.option("--partition", type=click.IntRange(min=0), help="Read only this partition.  [default: all]")
@click.option("--headers", is_flag=True, help="Also show the headers.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each record, with all of its fields.")
def peek(
    topic: str,
    settings: ClientSettings,
    count: int,
    partition: int | None,
    headers: bool,
    as_json: bool,
    view: JsonView | None,
) -> None:
    """Show the last committed records of TOPIC, the newest at the end, and return.

    A line is that of `onceflow consume`. Within a partition, records are in the order of their offsets; timestamps
    decide between partitions. No consumer group is used and no flow is fenced.
    """
    from onceflow.admin.records.record_lines import to_json
    from onceflow.admin.records.topic_excerpt import Excerpt, take
    from onceflow.client.cluster import Cluster

    wanted = Excerpt(count, partitions=None if partition is None else [partition])
    with contextlib.closing(Cluster(settings)) as cluster, interruptible() as check:
        records = [with_schemas(view, record) for record in take(cluster, topic, wanted, check)]
        if records:
            click.echo("\n".join(to_json(record) if as_json else line_of(record, headers) for record in records))
        tell_held_back(cluster, topic, partition)
    if not records:
        click.echo(f"No committed records in {topic}.", err=True)

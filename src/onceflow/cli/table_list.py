"""``onceflow table list`` and ``describe``: which tables there are, and how far they go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connected, connection
from onceflow.cli.examples import examples
from onceflow.cli.text import print_columns
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.records.tables import TableTopic
    from onceflow.client.settings import ClientSettings


@examples("onceflow table list --json")
@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each table.")
@connection
def list_(as_json: bool, settings: ClientSettings) -> None:
    """List the topics that can be tables: those that are compacted.

    FLOW is the flow that writes the table: - if it is no flow's table, ? if the flow has no progress that can be read.
    RECORDS is an upper bound: compaction leaves the last record of each key. INTERNAL is the same for the companion
    topic TABLE-internal, with entries of maps and lists, and timers. Internal topics are left out.
    """
    from onceflow.admin.records.tables import find_tables

    with connected(settings, "listing tables") as (cluster, deadline):
        found = find_tables(cluster, deadline)
    if as_json:
        for table in found:
            click.echo(json.dumps(_summary(table)))
    elif found:
        rows = [
            [
                each.name,
                len(each.partitions),
                each.records_at_most,
                "-" if each.companion is None else each.companion_records,
                each.owner.flow if each.owner else _unowned(each),
            ]
            for each in found
        ]
        print_columns(["TABLE", "PARTITIONS", "RECORDS", "INTERNAL", "FLOW"], rows)
    else:
        click.echo(f"There are no compacted topics at {settings.bootstrap_servers}.", err=True)


@examples("onceflow table describe balances")
@click.command()
@click.argument("topic")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection
def describe(topic: str, as_json: bool, settings: ClientSettings) -> None:
    """Describe the table in TOPIC: its flow, its settings, and the offsets of its partitions.

    STABLE is the last stable offset: a table contains what is below it. COMMITTED is what the flow has committed, and
    "position" is the same as a text for `Table.wait_until_current`.
    """
    from onceflow.admin.records.tables import describe_table
    from onceflow.protocol.position import Position

    with connected(settings, f"describing table {topic}") as (cluster, deadline):
        table, given = describe_table(cluster, topic, deadline)
    owner = table.owner
    partitions: list[dict[str, Any]] = [
        {
            "partition": each.partition,
            "leader": each.leader,
            "first_offset": each.first,
            "stable_offset": each.stable,
            "end_offset": each.end,
            **({"committed_offset": owner.offsets.get(each.partition)} if owner else {}),
        }
        for each in table.partitions
    ]
    position = str(Position({topic: owner.offsets}, {topic: owner.topic_id})) if owner else None
    if as_json:
        more = {"batch": owner.batch if owner else None, "position": position, "settings": given}
        click.echo(json.dumps({**_summary(table), **more, "partitions": partitions}))
        return
    records = f"at most {counted(table.records_at_most)}"
    click.echo(f"{topic}: {_whose(table)}, {counted(len(partitions), 'partition')}, {records}")
    if table.companion:
        click.echo(
            f"companion topic {table.companion}: entries of maps and lists, and timers, at most "
            f"{counted(table.companion_records)}; they are not shown here"
        )
    if owner:
        click.echo(f"position {position}, committed by batch {owner.batch}")
    for name, value in given.items():
        click.echo(f"{name}={'(no permission to read it)' if value is None else value}")
    columns = ["PARTITION", "LEADER", "FIRST", "STABLE", "END", *(["COMMITTED"] if owner else [])]
    print_columns(columns, [["-" if value is None else value for value in each.values()] for each in partitions])


def _whose(table: TableTopic) -> str:
    if table.owner:
        return f"a table of flow {table.owner.flow}"
    return "a compacted topic" if table.companion is None else "a table of a flow that has no progress here"


def _unowned(table: TableTopic) -> str:
    return "-" if table.companion is None else "?"


def _summary(table: TableTopic) -> dict[str, Any]:
    return {
        "table": table.name,
        "partitions": len(table.partitions),
        "companion": table.companion,
        "flow": table.owner.flow if table.owner else None,
        "records_at_most": table.records_at_most,
        "companion_records_at_most": table.companion_records,
    }

"""``onceflow consume``: the committed records of a topic as lines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible, until_interrupted
from onceflow.cli.registry import registry_options, with_schemas
from onceflow.cli.text import in_words, shown
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster
    from onceflow.client.settings import ClientSettings
    from onceflow.schema_registry.json_view import JsonView
    from onceflow.state.api.record import Record


@examples("onceflow consume validated --from latest --follow")
@click.command()
@click.argument("topic")
@connection
@registry_options
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="PLACE",
    help="Where to begin: earliest, latest, or an offset.",
)
@click.option("--partition", type=click.IntRange(min=0), help="Read only this partition.  [default: all]")
@click.option("--max", "max_records", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--follow", is_flag=True, help="Wait for more records until Ctrl-C.")
@click.option("--headers", is_flag=True, help="Also show the headers.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each record, with all of its fields.")
def consume(
    topic: str,
    settings: ClientSettings,
    start: str,
    partition: int | None,
    max_records: int | None,
    follow: bool,
    headers: bool,
    as_json: bool,
    view: JsonView | None,
) -> None:
    """Show the committed records of TOPIC, a line each: key, tab, value.

    They are read as a read_committed consumer reads them: without records of transactions that were aborted, and up to
    the first one that is still open. It ends with what is committed when it starts, unless --follow is given. Records
    come partition by partition. No consumer group is used.

    Lines are for people: control characters are replaced, bytes that are no UTF-8 look like b'\\xff', null is null.
    --json loses nothing, and `onceflow produce --json` takes it. With --registry, values are documents in it: then
    produce needs --value-subject.
    """
    from onceflow.admin.records import topic_records
    from onceflow.admin.records.record_lines import to_json
    from onceflow.client.cluster import Cluster

    first = _start(start)
    count = 0
    ending = until_interrupted() if follow else contextlib.nullcontext()
    with contextlib.closing(Cluster(settings)) as cluster, ending, interruptible() as check:
        found = topic_records.read(cluster, topic, start=first, partition=partition, follow=follow, check=check)
        for records in found:
            wanted = records if max_records is None else records[: max_records - count]
            # One write for many lines.
            shown = (with_schemas(view, record) for record in wanted)
            click.echo("\n".join(to_json(r) if as_json else line_of(r, headers) for r in shown))
            count += len(wanted)
            if count == max_records:
                return
        tell_held_back(cluster, topic, partition)
    if not count:
        click.echo(f"No committed records in {topic}{'' if start == 'earliest' else f' from {start} on'}.", err=True)


def tell_held_back(cluster: Cluster, topic: str, partition: int | None) -> None:
    """Say on stderr how many offsets are not shown, because a transaction before them is open."""
    from onceflow.admin.records import topic_records
    from onceflow.client.deadline import Deadline

    stable = topic_records.stable_offsets(cluster, topic, partition, Deadline(30.0, f"reading {topic}"))
    for number, offsets in topic_records.held_back(cluster, topic, stable).items():
        click.echo(f"{topic}-{number}: {counted(offsets, 'offset')} not shown, behind an open transaction", err=True)


def _start(text: str) -> int:
    from onceflow.client.offsets import EARLIEST, LATEST

    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise click.UsageError(f"--from {text!r} is neither earliest nor latest nor an offset")
    return int(text)


def line_of(record: Record, with_headers: bool) -> str:
    """A record as a line for people."""
    parts = [in_words(record.key), in_words(record.value)]
    if with_headers:
        parts.append(", ".join(f"{shown(name)}={in_words(content)}" for name, content in record.headers))
    return "\t".join(parts)

"""``onceflow claim-check``: maintain the store of a claim check."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connection, pairs
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.text import confirm
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.records.claim_collector import Collector
    from onceflow.client.settings import ClientSettings

_LEAST_DAYS = 1


@click.group(name="claim-check")
def claim_check() -> None:
    """Maintain the store of large values (`onceflow.ClaimCheck`)."""


@examples("onceflow claim-check collect --store s3://bucket/claims --topic images --topic thumbnails --dry-run")
@claim_check.command()
@click.option("--store", required=True, metavar="URL", help="The same as in `ClaimCheck(...)`.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME",
    help="A topic with references to this store; give ALL of them, also tables and topics of dead letters.",
)
@click.option("--all-topics", is_flag=True, help="In place of --topic: all topics that you may see.")
@click.option(
    "--without-topic",
    "without",
    multiple=True,
    metavar="NAME",
    help="A topic without references to this store, though an earlier run has read it, or a flow writes it.",
)
@click.option(
    "--rows",
    multiple=True,
    nargs=2,
    metavar="FLOW COMMAND",
    help="For a flow that writes another system: a command of the shell that prints its rows, in any form.",
)
@click.option(
    "--without-rows",
    multiple=True,
    metavar="FLOW",
    help="A flow that keeps no references to this store outside of Kafka.",
)
@click.option(
    "--no-newer-format",
    is_flag=True,
    help="No onceflow that is newer than this one writes to this store: what looks like a reference in a newer format "
    "is none.",
)
@click.option(
    "--older-than", default="7 days", show_default=True, help="Objects that are younger are left alone; at least 1 day."
)
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the bucket, as in `ClaimCheck`; may be repeated. Leave credentials to the environment.",
)
@click.option("--dry-run", is_flag=True, help="List the objects, delete and remember nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON for each object, and a last one with the sums."
)
@connection
def collect(
    store: str,
    topics: tuple[str, ...],
    all_topics: bool,
    without: tuple[str, ...],
    rows: tuple[tuple[str, str], ...],
    without_rows: tuple[str, ...],
    no_newer_format: bool,
    older_than: str,
    storage_options: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Delete objects that no record refers to any more.

    These are objects of batches that were aborted, and objects whose records have expired or were compacted away. The
    given topics are read from beginning to end, and those to which flows write what they have read there. An object
    stays if something refers to it, or if it is younger than --older-than.

    A reference in a topic that is not read does not count: what it refers to is deleted. The store remembers the
    topics of each run that is no dry run, and a later run that leaves one of them out is refused, dry or not.

    If a flow that reads these topics writes another system, or has state that is not in Kafka, the command deletes
    nothing until --rows or --without-rows says where its references are.
    """
    from onceflow.admin.records.claim_collector import Collector
    from onceflow.claim_check.objects import ObjectStore
    from onceflow.clock import clock_ms

    if all_topics == bool(topics):
        raise click.UsageError("give either --topic, for each topic with references, or --all-topics")
    if len(dict(rows)) < len(rows):
        raise click.UsageError("give --rows once for a flow, with one command that prints all its rows: `a; b`")
    objects = ObjectStore(store, pairs(storage_options, "--storage-option"))
    with interruptible() as check, progress_bar() as show:
        collector = Collector(
            settings,
            objects,
            None if all_topics else topics,
            older_than_ms=_age_ms(older_than),
            now_ms=clock_ms(),
            without=without,
            rows=dict(rows),
            without_rows=without_rows,
            no_newer_format=no_newer_format,
            show=show,
            check=check,
        )
        with collector:
            collector.find()
            _print(collector, as_json=as_json, listed=dry_run or not yes)
            deleted = bool(collector.found.orphans) and not dry_run
            if deleted and not yes:
                _confirm(collector, objects.url)
            if deleted:
                collector.delete()
            elif not dry_run:
                collector.remember()
            _print_sums(collector, deleted=deleted, as_json=as_json)


def _age_ms(text: str) -> int:
    from onceflow.options.durations import duration_ms

    try:
        found = duration_ms(text)
    except ValueError as error:
        raise click.UsageError(f"--older-than: {error}") from error
    if found < _LEAST_DAYS * 86_400_000:
        raise click.UsageError("--older-than is shorter than a day: a batch that still runs may refer to such objects")
    return found


def _print(collector: Collector, *, as_json: bool, listed: bool) -> None:
    if not as_json and not listed:
        return
    for name, size in collector.orphans():
        click.echo(json.dumps({"name": name, "bytes": size}) if as_json else f"{name}  {size:,} bytes")


def _confirm(collector: Collector, url: str) -> None:
    from onceflow.options.sizes import size_text

    found = collector.found
    without = [topic for topic, count in found.references.items() if not count]
    if without:
        click.echo(f"No references at all are in {', '.join(without)}.", err=True)
    what = f"{counted(found.orphans, 'object')} ({size_text(found.orphan_bytes)})"
    confirm(f"Delete {what} at {url} for good? Nothing in {', '.join(found.references)} refers to them.")


def _print_sums(collector: Collector, *, deleted: bool, as_json: bool) -> None:
    from onceflow.options.sizes import size_text

    found = collector.found
    if as_json:
        sums: dict[str, Any] = {
            "orphans": found.orphans,
            "orphan_bytes": found.orphan_bytes,
            "deleted": deleted,
            "old_objects": found.objects,
            "references": found.references,
            "not_references": found.odd,
        }
        click.echo(json.dumps(sums))
        return
    for place in found.odd:
        click.echo(f"This begins like a reference, and is none: {place}.", err=True)
    references = ", ".join(f"{topic} {count:,}" for topic, count in found.references.items())
    click.echo(f"References: {references}.", err=True)
    if not any(collector.earlier):
        click.echo("The store knows of no earlier collection, so only you know whether a topic is missing.", err=True)
    what = f"{counted(found.orphans, 'object')} ({size_text(found.orphan_bytes)})"
    kept = f"{counted(found.objects - found.orphans, 'old object')} referred to"
    click.echo(f"{what} {'deleted' if deleted else 'without a reference, nothing deleted'}; {kept}.", err=True)

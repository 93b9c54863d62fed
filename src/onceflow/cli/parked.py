"""``onceflow parked``: look at parked records, retry or drop them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from onceflow.admin.record_lines import field, headers_as_json
from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.text import counted, in_words, shown
from onceflow.errors import OptionError
from onceflow.protocol.timestamps import in_utc

if TYPE_CHECKING:
    from onceflow.admin.parked import Parked
    from onceflow.client.settings import ClientSettings

_MESSAGE_CHARACTERS = 80


@click.group()
def parked() -> None:
    """List, show, retry and drop parked records.

    A flow that retries dead letters parks those that have failed for the last time. An ORIGIN is the place where a
    record was read first: topic/partition/offset. Records that were made of one record have the same one. It stands for
    all of them; a name, as `list` prints it then, stands for one.

    `list` and `show` also read an ordinary topic of dead letters. What is in it cannot be retried or dropped here.
    """


@examples("onceflow parked list orders-parked --json")
@parked.command(name="list")
@click.argument("topic")
@connection
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each record.")
def list_(topic: str, settings: ClientSettings, as_json: bool) -> None:
    """List the parked records in TOPIC with origin, attempts and cause.

    In an ordinary dead-letter topic, every dead letter is listed.
    """
    from onceflow.admin import parked as parking

    found = parking.read(settings, topic)
    if found and not any(record.cause for record in found):
        raise OptionError(
            f"None of the {counted(len(found))} of {topic} is a dead letter: they have no cause in their headers",
            topic=topic,
            next_step=f"give the topic of dead letters; `onceflow consume {topic}` shows any topic",
        )
    if as_json:
        for record in found:
            click.echo(json.dumps(_summary(record)))
        return
    if not found:
        click.echo(f"Nothing is parked in {topic}.", err=True)
        return
    often = {origin for origin, count in Counter(record.origin for record in found).items() if count > 1}
    names = [shown(record.name if record.origin in often else record.origin) for record in found]
    width = max(6, *map(len, names))
    whys = [shown(record.why) or "-" for record in found]
    wide = max(3, *map(len, whys))
    click.echo(f"{'ORIGIN':{width}}  ATTEMPTS  {'WHY':{wide}}  CAUSE")
    for name, why, record in zip(names, whys, found, strict=True):
        message = shown(record.message.partition("\n")[0])
        message = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}..."
        click.echo(f"{name:{width}}  {record.attempt:8}  {why:{wide}}  {shown(record.cause)}: {message}")
    dead_letters = sum(record.dead_letter for record in found)
    if dead_letters:
        click.echo(
            f"{counted(dead_letters, 'ordinary dead letter')}: they cannot be retried or dropped here.", err=True
        )


@examples("onceflow parked show orders-parked orders/0/17")
@parked.command()
@click.argument("topic")
@click.argument("origin")
@connection
@click.option("--json", "as_json", is_flag=True, help="Print JSON. Bytes that are not UTF-8 become base64.")
def show(topic: str, origin: str, settings: ClientSettings, as_json: bool) -> None:
    """Show key, value and headers of the record with this ORIGIN.

    When several records are parked that have it, all are shown. When a record has several dead letters, the last one is
    shown.
    """
    from onceflow.admin import parked as parking

    found = parking.read(settings, topic, [origin])
    parked_there = [record for record in found if not record.dead_letter]
    for number, record in enumerate(parked_there or found[-1:]):
        if number and not as_json:
            click.echo()
        _show(record, as_json)


def _show(record: Parked, as_json: bool) -> None:
    stamp_ms = None if record.timestamp_ms < 0 else record.timestamp_ms
    if as_json:
        whole = {**field("key", record.key), **field("value", record.value)}
        whole["headers"] = headers_as_json(record.headers)
        click.echo(json.dumps({**_summary(record), "timestamp_ms": stamp_ms, **whole}))
        return
    click.echo(f"origin     {shown(record.origin)}")
    if record.name != record.origin:
        click.echo(f"name       {shown(record.name)}")
    click.echo(f"timestamp  {'unknown' if stamp_ms is None else f'{stamp_ms} ms, {in_utc(stamp_ms)}'}")
    click.echo(f"key        {in_words(record.key, lines=True)}")
    for name, content in record.headers:
        click.echo(f"header     {shown(name)} = {in_words(content, lines=True)}")
    click.echo(f"value      {in_words(record.value, lines=True)}")


@examples(
    "onceflow parked retry orders-parked orders/0/17 orders/2/5",
    "onceflow parked retry orders-parked --all --to orders-retry",
)
@parked.command()
@click.argument("topic")
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All parked records, in place of ORIGIN...")
@click.option("--to", metavar="TOPIC", help="The retry topic.  [default: the one of the record's earlier retries]")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each retry topic.")
@connection
def retry(
    topic: str,
    origins: tuple[str, ...],
    everything: bool,
    to: str | None,
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Retry parked records.

    All of them or none are written to the retry topic and taken out of TOPIC, in one transaction. Their attempts are
    counted from the beginning.
    """
    from onceflow.admin import parked as parking

    chosen = _chosen(origins, everything)
    counts = parking.retry(settings, topic, chosen, to=to)
    for target, count in counts.items():
        if as_json:
            click.echo(json.dumps({"topic": topic, "retry_topic": target, "records": count}))
        else:
            click.echo(f"{counted(count)} went from {topic} to {target}.")
    if not counts and not as_json:
        click.echo(f"Nothing is parked in {topic}.")


@examples("onceflow parked drop orders-parked orders/0/17 --yes")
@parked.command()
@click.argument("topic")
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All parked records, in place of ORIGIN...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the number of deleted records as JSON.")
@connection
def drop(
    topic: str,
    origins: tuple[str, ...],
    everything: bool,
    yes: bool,
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Delete parked records for good. All of them or none are deleted."""
    from onceflow.admin import parked as parking

    chosen = _chosen(origins, everything)
    if not yes:
        what = "everything that is" if chosen is None else f"what has {counted(len(set(chosen)), 'origin')} and is"
        where = f"in {topic} at {settings.bootstrap_servers}"
        click.confirm(f"Drop {what} parked {where} for good?", abort=True, err=True)
    count = parking.drop(settings, topic, chosen)
    dropped = {"topic": topic, "records": count}
    click.echo(json.dumps(dropped) if as_json else f"{counted(count)} dropped from {topic}.")


def _chosen(origins: tuple[str, ...], everything: bool) -> tuple[str, ...] | None:
    if bool(origins) == everything:
        raise click.UsageError("give either ORIGIN... or --all")
    return None if everything else origins


def _summary(record: Parked) -> dict[str, Any]:
    return {
        "origin": record.origin,
        "name": record.name,
        "attempt": record.attempt,
        "why": record.why or None,
        "error": record.cause,
        "message": record.message,
        "retry_topic": record.retry_topic or None,
    }

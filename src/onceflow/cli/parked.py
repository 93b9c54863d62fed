"""``onceflow parked``: look at parked records, retry or drop them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from onceflow.admin.records.record_lines import field, headers_as_json
from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.progress import progress_bar
from onceflow.cli.text import confirm, in_words, output_width, shown
from onceflow.errors import OptionError, counted
from onceflow.protocol.timestamps import in_utc

if TYPE_CHECKING:
    from onceflow.admin.records.letter_replay import Replayed
    from onceflow.admin.records.parked import Parked
    from onceflow.client.settings import ClientSettings

_MESSAGE_CHARACTERS, _CAUSE_MIN = 80, 40


@click.group()
def parked() -> None:
    """List, show, retry and drop parked records, and replay dead letters.

    A flow that retries dead letters parks those that have failed for the last time. An ORIGIN is the place where a
    record was read first: topic/partition/offset. Records that were made of one record have the same one. It stands for
    all of them; a name, as `list` prints it then, stands for one.

    `list` and `show` also read an ordinary topic of dead letters. `replay` sends these back to their sources.
    """


@examples("onceflow parked list orders-parked --json")
@parked.command(name="list")
@click.argument("topic")
@connection
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each record.")
def list_(topic: str, settings: ClientSettings, as_json: bool) -> None:
    """List the parked records in TOPIC with origin, attempts and cause.

    In an ordinary dead-letter topic, every dead letter is listed; WHY says which of them were replayed.
    """
    from onceflow.admin.records import letter_replay as parking_replay
    from onceflow.admin.records import parked as parking

    found = parking.read(settings, topic)
    replayed = (
        parking_replay.replayed_positions(settings, topic) if any(record.dead_letter for record in found) else set()
    )
    if found and not any(record.cause for record in found):
        raise OptionError(
            f"None of the {counted(len(found))} of {topic} is a dead letter: they have no cause in their headers",
            topic=topic,
            next_step=f"give the topic of dead letters; `onceflow consume {topic}` shows any topic",
        )
    if as_json:
        for record in found:
            again = None if replayed is None else (record.partition, record.offset) in replayed
            click.echo(json.dumps({**_summary(record), **({"replayed": again} if record.dead_letter else {})}))
        return
    if not found:
        click.echo(f"Nothing is parked in {topic}.", err=True)
        return
    often = {origin for origin, count in Counter(record.origin for record in found).items() if count > 1}
    names = [shown(record.name if record.origin in often else record.origin) for record in found]
    width, most = max(6, *map(len, names)), output_width()
    there = replayed or ()
    whys = [
        shown(record.why) or ("replayed" if (record.partition, record.offset) in there else "-") for record in found
    ]
    wide = max(3, *map(len, whys))
    click.echo(f"{'ORIGIN':{width}}  ATTEMPTS  {'WHY':{wide}}  CAUSE")
    for name, why, record in zip(names, whys, found, strict=True):
        message = shown(record.message.partition("\n")[0])
        message = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}..."
        begin, cause = f"{name:{width}}  {record.attempt:8}  {why:{wide}}", f"{shown(record.cause)}: {message}"
        if most is None or len(begin) + _CAUSE_MIN <= most:
            line = f"{begin}  {cause}"
        else:  # on a line of its own
            click.echo(begin)
            line = f"  {cause}"
        click.echo(line if most is None or len(line) <= most else f"{line[: most - 3]}...")
    dead_letters = sum(
        record.dead_letter and (record.partition, record.offset) not in (replayed or ()) for record in found
    )
    if dead_letters:
        step = f"`onceflow parked replay {topic} --all --dry-run` says what a replay would do"
        click.echo(f"{counted(dead_letters, 'dead letter')} not replayed; {step}.", err=True)


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
    from onceflow.admin.records import parked as parking

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
    from onceflow.admin.records import parked as parking

    chosen = _chosen(origins, everything)
    counts = parking.retry(settings, topic, chosen, to=to)
    for target, count in counts.items():
        if as_json:
            click.echo(json.dumps({"topic": topic, "retry_topic": target, "records": count}))
        else:
            click.echo(f"{counted(count)} went from {topic} to {target}.")
    if not counts and not as_json:
        click.echo(f"Nothing is parked in {topic}.")


@examples(
    "onceflow parked replay orders-failed --all --dry-run",
    "onceflow parked replay orders-failed --cause KeyError --source orders",
)
@parked.command()
@click.argument("topic")
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead letters, in place of ORIGIN... and of the filters.")
@click.option("--cause", default="", metavar="CLASS", help="Those with this class of the error.")
@click.option("--message", default="", metavar="TEXT", help="Those whose error has this text in its message.")
@click.option("--source", default="", metavar="TOPIC", help="Those whose record was read from this topic.")
@click.option("--flow", default="", help="Those of records that have failed in this flow.")
@click.option("--to", default="", metavar="TOPIC", help="Where the records go.  [default: where each was read]")
@click.option("--dry-run", is_flag=True, help="Only say what would be replayed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@connection
def replay(
    topic: str,
    origins: tuple[str, ...],
    everything: bool,
    dry_run: bool,
    as_json: bool,
    settings: ClientSettings,
    **filters: str,
) -> None:
    """Send dead letters of TOPIC back to the topics that their records were read from, each once.

    For a fault that was mended: start the mended flow, then replay. Records go out as they were, to the partition where
    they were. Everybody who reads that topic gets them again; --to names a topic that only your flow reads. What was
    replayed is noted in TOPIC-replayed, in the same transactions, so no letter is replayed twice.
    """
    from onceflow.admin.records import letter_replay

    chosen = any((origins, *(filters[name] for name in ("cause", "message", "source", "flow"))))
    if chosen == everything:
        raise click.UsageError("give ORIGIN... or a filter (--cause, --message, --source, --flow), or --all")
    wanted = letter_replay.Wanted(origins, **filters)
    with progress_bar() as bar, interruptible() as check:

        def tell(read: int, total: int) -> None:
            check()
            bar("reading", read, total)

        done = letter_replay.replay(settings, topic, wanted, dry_run=dry_run, tell=tell)
    if as_json:
        records = [
            {"to": to, "error": cause or None, "records": count} for (to, cause), count in sorted(done.records.items())
        ]
        document = {"topic": topic, "dry_run": dry_run, "read": done.read, "replayed": records}
        more = {"replayed_before": done.before, "doubles": done.doubles, "not_replayed": dict(done.kept)}
        click.echo(json.dumps({**document, **more, "causes": dict(done.causes)}))
        return
    _say_replayed(topic, done, dry_run)


def _say_replayed(topic: str, done: Replayed, dry_run: bool) -> None:
    by_target: dict[str, list[str]] = {}
    for (to, cause), count in sorted(done.records.items()):
        by_target.setdefault(to, []).append(f"{shown(cause)}: {count:,}")
    for to, causes in by_target.items():
        count = sum(each for (target, _), each in done.records.items() if target == to)
        verb = "would go" if dry_run else "went"
        click.echo(f"{counted(count)} {verb} from {topic} to {to} ({', '.join(causes)}).")
    if not by_target:
        click.echo(f"Nothing to replay among {counted(done.read, 'letter')} of {topic}.")
        there = ", ".join(f"{shown(cause) or 'none'}: {count:,}" for cause, count in sorted(done.causes.items()))
        if there:
            click.echo(f"Their causes: {there}.", err=True)
    if done.doubles:
        click.echo(f"{counted(done.doubles, 'letter')} of the same records: not sent again.", err=True)
    if done.before:
        click.echo(f"{counted(done.before, 'letter')}: replayed before.", err=True)
    for why, count in done.kept.items():
        click.echo(f"{counted(count, 'letter')} not replayed: {why}.", err=True)


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
    from onceflow.admin.records import parked as parking

    chosen = _chosen(origins, everything)
    if not yes:
        what = "everything that is" if chosen is None else f"what has {counted(len(set(chosen)), 'origin')} and is"
        where = f"in {topic} at {settings.bootstrap_servers}"
        confirm(f"Drop {what} parked {where} for good?")
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

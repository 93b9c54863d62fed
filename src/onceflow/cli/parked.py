"""``onceflow parked``: look at parked records, retry or drop them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from onceflow.client.settings import ClientSettings
    from onceflow.parked import Parked

_MESSAGE_CHARACTERS = 80
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _connection(command: _Command) -> _Command:
    command = click.option(
        "--option", "options", multiple=True, metavar="NAME=VALUE", help="Connection option, by its Java name."
    )(command)
    return click.option("--bootstrap-servers", required=True, help="host:port, several separated by commas.")(command)


@click.group()
def parked() -> None:
    """Parked records: list, show, retry, drop.

    A flow that retries dead letters parks those that have failed for the last time. An ORIGIN is the place where a
    record was read first: topic/partition/offset.
    """


@parked.command(name="list")
@click.argument("topic")
@_connection
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each record.")
def list_(topic: str, bootstrap_servers: str, options: tuple[str, ...], as_json: bool) -> None:
    """List what is parked in TOPIC: origin, attempts, cause."""
    from onceflow import parked as parking

    found = parking.read(_settings(bootstrap_servers, options), topic)
    if as_json:
        for record in found:
            click.echo(json.dumps(_summary(record)))
        return
    if not found:
        click.echo(f"Nothing is parked in {topic}.", err=True)
        return
    width = max(6, *(len(_shown(record.origin)) for record in found))
    click.echo(f"{'ORIGIN':{width}}  ATTEMPTS  CAUSE")
    for record in found:
        message = _shown(record.message.partition("\n")[0])
        message = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}..."
        click.echo(f"{_shown(record.origin):{width}}  {record.attempt:8}  {_shown(record.cause)}: {message}")


@parked.command()
@click.argument("topic")
@click.argument("origin")
@_connection
@click.option("--json", "as_json", is_flag=True, help="As JSON; what is no UTF-8 as base64.")
def show(topic: str, origin: str, bootstrap_servers: str, options: tuple[str, ...], as_json: bool) -> None:
    """Show the parked record with this ORIGIN: key, value, headers."""
    from onceflow import parked as parking

    (record, *_) = parking.read(_settings(bootstrap_servers, options), topic, [origin])
    if as_json:
        headers = [{"name": name, **_as_json("value", content)} for name, content in record.headers]
        whole = {**_as_json("key", record.key), **_as_json("value", record.value), "headers": headers}
        click.echo(json.dumps({**_summary(record), "timestamp_ms": record.timestamp_ms, **whole}))
        return
    click.echo(f"origin     {_shown(record.origin)}")
    click.echo(f"timestamp  {record.timestamp_ms} ms")
    click.echo(f"key        {_in_words(record.key)}")
    for name, content in record.headers:
        click.echo(f"header     {_shown(name)} = {_in_words(content)}")
    click.echo(f"value      {_in_words(record.value)}")


@parked.command()
@click.argument("topic")
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that are parked, in place of ORIGIN...")
@click.option("--to", metavar="TOPIC", help="The retry topic.  [default: where the retries of a record went before]")
@_connection
def retry(
    topic: str,
    origins: tuple[str, ...],
    everything: bool,
    to: str | None,
    bootstrap_servers: str,
    options: tuple[str, ...],
) -> None:
    """Retry parked records: all of them, or none.

    They are written to the retry topic and taken out of TOPIC in one transaction. Their attempts are counted from the
    beginning.
    """
    from onceflow import parked as parking

    chosen = _chosen(origins, everything)
    counts = parking.retry(_settings(bootstrap_servers, options), topic, chosen, to=to)
    for target, count in counts.items():
        click.echo(f"{_records(count)} went from {topic} to {target}.")
    if not counts:
        click.echo(f"Nothing is parked in {topic}.")


@parked.command()
@click.argument("topic")
@click.argument("origins", metavar="[ORIGIN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that are parked, in place of ORIGIN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_connection
def drop(
    topic: str,
    origins: tuple[str, ...],
    everything: bool,
    yes: bool,
    bootstrap_servers: str,
    options: tuple[str, ...],
) -> None:
    """Drop parked records for good: all of them, or none."""
    from onceflow import parked as parking

    chosen = _chosen(origins, everything)
    settings = _settings(bootstrap_servers, options)
    if not yes:
        what = "everything that is" if chosen is None else f"{_records(len(set(chosen)))}"
        click.confirm(f"Drop {what} parked in {topic} for good?", abort=True, err=True)
    count = parking.drop(settings, topic, chosen)
    click.echo(f"{_records(count)} dropped from {topic}.")


def _chosen(origins: tuple[str, ...], everything: bool) -> tuple[str, ...] | None:
    if bool(origins) == everything:
        raise click.UsageError("give either ORIGIN... or --all")
    return None if everything else origins


def _settings(bootstrap_servers: str, options: tuple[str, ...]) -> ClientSettings:
    from onceflow.client.settings import ClientSettings

    return ClientSettings(bootstrap_servers, dict(_pair(option) for option in options))


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.UsageError(f"--option {text!r} is not of the form NAME=VALUE")
    return name, value


def _records(count: int) -> str:
    return f"{count} record" if count == 1 else f"{count:,} records"


def _summary(record: Parked) -> dict[str, Any]:
    return {
        "origin": record.origin,
        "attempt": record.attempt,
        "error": record.cause,
        "message": record.message,
        "retry_topic": record.retry_topic or None,
    }


def _as_json(name: str, content: bytes | None) -> dict[str, Any]:
    """A field with the text, or another one with base64."""
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode()}


def _in_words(content: bytes | None) -> str:
    if content is None:
        return "null"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"{content!r}"
    return _shown(text, lines=True)


def _shown(text: str, *, lines: bool = False) -> str:
    """Fit for a terminal: whoever writes a record must not write to the screen of who looks at it."""
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else "\N{REPLACEMENT CHARACTER}" for c in text)

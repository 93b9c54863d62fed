"""``onceflow produce``: lines of standard input become records of a topic."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from io import BufferedIOBase
from typing import TYPE_CHECKING, cast

import click

from onceflow.cli.connection import connection
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible
from onceflow.cli.registry import address_options, client_of, url_of
from onceflow.cli.text import standard_input
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.admin.records.record_lines import Encoder, Parser
    from onceflow.admin.records.topic_records import TopicWriter
    from onceflow.client.settings import ClientSettings
    from onceflow.state.api.record import Record

_READ_BYTES = 1_000_000
_SNIPPET_BYTES = 60


@examples(
    "echo 'ada:5' | onceflow produce deposits --key-separator :",
    "onceflow produce payments --registry http://localhost:8081 --value-subject payments-value < payments.jsonl",
)
@click.command()
@click.argument("topic")
@connection
@click.option("--key-separator", metavar="TEXT", help="Each line is a key, this separator, and a value.")
@click.option("--json", "as_json", is_flag=True, help="Each line is a JSON object, as described above.")
@address_options("The schema registry of --key-subject and --value-subject.")
@click.option("--value-subject", metavar="SUBJECT", help="Values are JSON, and are written with its newest schema.")
@click.option("--value-message", metavar="NAME", help="The Protobuf message of values.  [default: the first one]")
@click.option("--key-subject", metavar="SUBJECT", help="The same for keys.")
def produce(
    topic: str, settings: ClientSettings, key_separator: str | None, as_json: bool, **schemas: str | None
) -> None:
    """Write each line of standard input to TOPIC as a record.

    A line is a value without a key. With --key-separator : it is key:value. With --json it is an object such as

    \b
    {"key": "ada", "value": {"amount": 5}, "headers": {"trace": "x"}}

    Text is written as it is, null as null ("value": null is a tombstone), other values as JSON. Further fields are
    timestamp_ms, key_base64 and value_base64; topic, partition and offset are not used. So it takes what `onceflow
    consume --json` prints.

    Keys go to the partitions that the Java client, Kafka Streams and onceflow give them (murmur2). Clients that are
    built on librdkafka (kcat, confluent-kafka) put keys elsewhere by default; with partitioner=murmur2_random they do
    the same. Records without a key go to all partitions in turn.

    With --value-subject, a value is a JSON document, and becomes Avro, Protobuf or JSON with a schema: bytes are
    given in Base64, times as ISO 8601, as `onceflow consume --registry` prints them. Nothing is registered.

    A line that cannot be written ends the command: the lines before it are written, it and those after it are not.
    There is no transaction.
    """
    from onceflow.admin.records.topic_records import TopicWriter
    from onceflow.client.cluster import Cluster

    parser = _parser(key_separator, as_json, **_encoders(**schemas))
    source = cast(BufferedIOBase, standard_input().buffer)  # the type BinaryIO has no read1
    with contextlib.closing(Cluster(settings)) as cluster, interruptible() as check:
        writer = TopicWriter(cluster, topic)
        if source.isatty():
            click.echo("Each line is a record. Ctrl-D ends the input.", err=True)
        try:
            for lines in _lines(source):
                check()
                _write(writer, topic, lines, parser)
                check()  # before it waits for the next line, maybe for long
        except KeyboardInterrupt:
            more = f"; {_unconfirmed(writer)}" if writer.unconfirmed else ""
            click.echo(f"{counted(writer.written)} written to {topic}{more}.", err=True)
            raise
    click.echo(f"{counted(writer.written)} written to {topic}.")


def _parser(key_separator: str | None, as_json: bool, key: Encoder | None, value: Encoder | None) -> Parser:
    from onceflow.admin.records import record_lines

    if as_json and key_separator is not None:
        raise click.UsageError("give either --json or --key-separator")
    if key_separator == "":
        raise click.UsageError("--key-separator is empty")
    if as_json:
        return functools.partial(record_lines.json_object, key=key, value=value)
    if key_separator is not None:
        return record_lines.with_documents(record_lines.key_and_value(key_separator), key, value)
    if key is not None:
        raise click.UsageError("--key-subject needs --json or --key-separator: otherwise lines have no keys")
    return record_lines.value_only if value is None else record_lines.document_only(value)


def _encoders(
    registry: str | None,
    registry_config: str | None,
    key_subject: str | None,
    value_subject: str | None,
    value_message: str | None,
) -> dict[str, Encoder | None]:
    """What makes the bytes of keys and values that have schemas."""
    url = url_of(registry, registry_config)
    if value_message and not value_subject:
        raise click.UsageError("--value-message needs --value-subject")
    if not (key_subject or value_subject):
        if registry:
            raise click.UsageError("--registry needs --value-subject or --key-subject")
        return {"key": None, "value": None}
    if not url:
        raise click.UsageError("--value-subject and --key-subject need --registry")
    from onceflow.schema_registry.json_input import json_encoder

    client = client_of(url, registry_config)
    return {
        "key": json_encoder(client, key_subject) if key_subject else None,
        "value": json_encoder(client, value_subject, value_message or "") if value_subject else None,
    }


def _lines(source: BufferedIOBase) -> Iterator[list[tuple[int, bytes]]]:
    """Yields complete lines with their numbers, from 1, as soon as they arrive. It does not wait for a full buffer."""
    number, rest = 0, b""
    while data := source.read1(_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield [(number + n, line.removesuffix(b"\r")) for n, line in enumerate(lines, 1)]
        number += len(lines)
    if rest:
        yield [(number + 1, rest.removesuffix(b"\r"))]


def _write(writer: TopicWriter, topic: str, lines: list[tuple[int, bytes]], parser: Parser) -> None:
    """Write lines, up to the first one that cannot be written."""
    from onceflow.errors import BadRecordError, OnceflowError

    records: list[Record] = []
    problem: tuple[int, bytes, Exception] | None = None
    for number, line in lines:
        try:
            record = parser(line)
            if record is not None:
                writer.check(record)
                records.append(record)
        except (ValueError, BadRecordError) as error:
            problem = (number, line, error)
            break
    try:
        writer.write(records)
    except OnceflowError as error:
        already = f"{counted(writer.written)} written before; {_unconfirmed(writer)}"
        detail = "; ".join(filter(None, [error.detail, already]))
        raise type(error)(error.what, **{**error.fields(), "detail": detail}) from error
    if problem is not None:
        number, line, reason = problem
        raise BadRecordError(
            f"Line {number} cannot be written: {getattr(reason, 'what', reason)}",
            topic=topic,
            detail=f"the line is {line[:_SNIPPET_BYTES]!r}{'...' if len(line) > _SNIPPET_BYTES else ''}; "
            f"{counted(writer.written)} of the lines before it {'is' if writer.written == 1 else 'are'} written",
            next_step="correct the line, then pass it and all lines after it again",
        ) from reason


def _unconfirmed(writer: TopicWriter) -> str:
    return f"some of the next {writer.unconfirmed:,} may be written, too"

"""``onceflow topic``: create, list, describe and delete topics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connected, connection, pairs
from onceflow.cli.examples import examples
from onceflow.cli.text import confirm, print_columns
from onceflow.errors import counted

if TYPE_CHECKING:
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline
    from onceflow.client.settings import ClientSettings


@click.group()
def topic() -> None:
    """Create, list, describe and delete topics."""


@examples("onceflow topic create deposits validated --partitions 4 --config retention.ms=604800000")
@topic.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="Partitions of each topic.  [default: the broker's setting, mostly 1]",
)
@click.option(
    "--replication", type=click.IntRange(min=1), help="Replicas of each partition.  [default: the broker's setting]"
)
@connection  # above --config, so that it leaves this name to the settings of topics, as in kafka-topics.sh
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the topics, for example cleanup.policy=compact; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each topic.")
@click.option("--if-not-exists", is_flag=True, help="Leave topics that exist as they are.")
def create(
    names: tuple[str, ...],
    partitions: int | None,
    replication: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Create topics. When one of them exists, none is created."""
    from onceflow.client.topics import create_topic

    given = pairs(configs, "--config")
    with connected(settings, "creating topics") as (cluster, deadline):
        _check_not_internal(names)
        there = cluster.topics(None, deadline)
        if not if_not_exists:
            for name in names:
                if name in there:
                    raise _exists(name, there[name].partitions, "; no topic was created" if len(names) > 1 else "")
        for name in dict.fromkeys(names):
            created = create_topic(
                cluster,
                name,
                partitions=partitions or -1,
                replication=replication or -1,
                configs=given,
                deadline=deadline,
            )
            count = _partitions(cluster, name, deadline, made=created)
            # The topic did not exist before. If the partition count fits, this call created it, and the first response
            # of Kafka was lost.
            created = created or (name not in there and partitions in (None, count))
            if not created and not if_not_exists:
                raise _exists(name, count)
            if as_json:
                click.echo(json.dumps({"topic": name, "partitions": count, "created": created}))
            else:
                size = "" if count is None else f" with {counted(count, 'partition')}"
                click.echo(f"Topic {name} {'created' if created else 'exists already,'}{size}.")


@examples("onceflow topic list")
@topic.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Also list internal topics, whose names begin with __.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each topic.")
@connection
def list_(everything: bool, as_json: bool, settings: ClientSettings) -> None:
    """List the topics with their numbers of partitions."""
    with connected(settings, "listing topics") as (cluster, deadline):
        found = {
            name: info.partitions
            for name, info in sorted(cluster.topics(None, deadline).items())
            if everything or not (info.internal or name.startswith("__"))
        }
    if as_json:
        for name, count in found.items():
            click.echo(json.dumps({"topic": name, "partitions": count}))
    elif found:
        print_columns(["TOPIC", "PARTITIONS"], [[name, count] for name, count in found.items()])
    else:
        click.echo(f"There are no topics at {settings.bootstrap_servers}.", err=True)


@examples("onceflow topic describe deposits")
@topic.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection
def describe(name: str, as_json: bool, settings: ClientSettings) -> None:
    """Describe a topic: the leaders and offsets of its partitions, and its own settings.

    STABLE is the last stable offset: readers of committed records get so far. END is where the partition ends; in
    between is an open transaction.
    """
    from onceflow.client.offsets import EARLIEST, LATEST, list_offsets
    from onceflow.client.topics import copies, find_topics, own_settings

    with connected(settings, f"describing topic {name}") as (cluster, deadline):
        span = {name: sorted(find_topics(cluster, {name: ""}, deadline, needs="DESCRIBE")[name].leaders)}
        places = copies(cluster, name, deadline)
        given = own_settings(cluster, name, deadline)
        first = list_offsets(cluster, span, EARLIEST, deadline)[name]
        stable = list_offsets(cluster, span, LATEST, deadline)[name]
        end = list_offsets(cluster, span, LATEST, deadline, committed=False)[name]
    partitions = [
        {
            "partition": number,
            "leader": place.leader,
            "replicas": [*place.replicas],
            "in_sync": [*place.in_sync],
            "first_offset": first[number],
            "stable_offset": stable[number],
            "end_offset": end[number],
        }
        for number, place in places.items()
        if number in first
    ]
    if as_json:
        click.echo(json.dumps({"topic": name, "settings": given, "partitions": partitions}))
        return
    click.echo(f"{name}: {counted(len(partitions), 'partition')}")
    for setting, value in (given or {}).items():
        click.echo(f"{setting}={value}")
    if given is None:
        click.echo("its settings are not shown: that needs the permission DESCRIBE_CONFIGS", err=True)
    columns = ["PARTITION", "LEADER", "REPLICAS", "IN SYNC", "FIRST", "STABLE", "END"]
    print_columns(columns, [[_joined(value) for value in each.values()] for each in partitions])


@examples("onceflow topic delete deposits --yes")
@topic.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each topic.")
@connection
def delete(names: tuple[str, ...], yes: bool, as_json: bool, settings: ClientSettings) -> None:
    """Delete topics with all of their records. When one of them does not exist, none is deleted."""
    from onceflow.client.topics import delete_topic, find_topics
    from onceflow.errors import UnknownTopicError

    with connected(settings, "looking for topics") as (cluster, deadline):
        _check_not_internal(names)
        find_topics(cluster, dict.fromkeys(names, ""), deadline, needs="DELETE")
        if not yes:
            confirm(f"Delete {', '.join(names)} at {settings.bootstrap_servers} for good?")
    with connected(settings, "deleting topics") as (cluster, deadline):  # a new deadline: the user may answer late
        for name in dict.fromkeys(names):
            with contextlib.suppress(UnknownTopicError):  # it existed: Kafka's first response was lost
                delete_topic(cluster, name, deadline)
            click.echo(json.dumps({"topic": name, "deleted": True}) if as_json else f"Topic {name} deleted.")


def _check_not_internal(names: Sequence[str]) -> None:
    from onceflow.errors import OptionError
    from onceflow.protocol.names import OwnTopics

    for name in names:
        refusal = OwnTopics().refusal(name)
        if refusal:
            raise OptionError(f"{name} {refusal}", topic=name, next_step="Kafka and onceflow manage these themselves")


def _partitions(cluster: Cluster, name: str, deadline: Deadline, *, made: bool) -> int | None:
    """How many partitions a topic has; None: it was just made, and may not be described."""
    from onceflow.client.topics import await_topic
    from onceflow.errors import PermissionDeniedError

    try:
        return await_topic(cluster, name, deadline).partitions
    except PermissionDeniedError:
        if not made:
            raise
        return None


def _exists(name: str, partitions: int | None, more: str = "") -> Exception:
    from onceflow.errors import OptionError

    return OptionError(
        f"Topic {name} exists already, with {counted(partitions or 0, 'partition')}{more}",
        topic=name,
        next_step="take another name, or leave topics that exist as they are: --if-not-exists",
    )


def _joined(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)

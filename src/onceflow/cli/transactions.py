"""``onceflow transactions``: transactions that are open, and the end of those that stay open."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connected, connection
from onceflow.cli.examples import examples
from onceflow.cli.text import confirm, print_columns, shown
from onceflow.cli.text import timeout_ms as duration_ms_of
from onceflow.clock import clock_ms
from onceflow.errors import OptionError, PermissionDeniedError, counted
from onceflow.protocol.timestamps import in_utc

if TYPE_CHECKING:
    from onceflow.admin.transactions.open_transactions import OpenInPartition, Search
    from onceflow.admin.transactions.transaction_abort import AbortPlan, Producer
    from onceflow.client.settings import ClientSettings

_MOST_NAMED = 5
_PERHAPS_COMMITTED = " If they were committed and only their marker is missing, they are lost."

_topics = click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Look in this topic; may be repeated.  [default: all topics that are not internal, and the progress of flows]",
)
_producer_id = click.option("--producer-id", type=click.IntRange(min=0), help="Instead of TRANSACTIONAL_ID.")


@click.group()
def transactions() -> None:
    """List, describe and abort open transactions.

    A read_committed reader gets no record after the first one of an open transaction. A transaction ends by its
    producer, or by its timeout. One that hangs, which no coordinator knows as open, never ends by itself.
    """


@examples(
    "onceflow transactions list --min-age '5 minutes' --fail",
    "onceflow transactions list --hanging --min-age '5 minutes' --fail",
)
@transactions.command(name="list")
@_topics
@click.option(
    "--min-age", metavar="DURATION", help="Only those that are open for at least so long, such as '5 minutes'."
)
@click.option("--hanging", is_flag=True, help="Only those that no coordinator knows as open in the partition.")
@click.option("--fail", is_flag=True, help="Exit with 1 if any is listed, for monitoring.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each transaction and partition.")
@connection
def list_(
    topics: tuple[str, ...], min_age: str | None, hanging: bool, fail: bool, as_json: bool, settings: ClientSettings
) -> int:
    """List the open transactions, with the oldest first.

    FIRST is the offset of the first record, HELD BACK how many offsets read_committed readers of the partition cannot
    reach. STATE is that of the transactional id, or "hanging"; "hanging?" means that a coordinator may know it.
    """
    from onceflow.admin.transactions.open_transactions import find_open

    min_age_ms = 0 if min_age is None else duration_ms_of(min_age, "--min-age")
    with connected(settings, "listing open transactions") as (cluster, deadline):
        search = find_open(cluster, topics, deadline)
    now_ms = clock_ms()
    found = [
        each
        for each in sorted(search.found, key=lambda each: (each.since_ms, each.topic_partition))
        if _is_as_old(each.age_ms(now_ms), min_age_ms) and not (hanging and each.hanging is False)
    ]
    if as_json:
        for each in found:
            click.echo(json.dumps(_summary(each, now_ms)))
    elif found:
        _print(found, now_ms)
    else:
        # What was looked for is not there, or nothing is.
        more = counted(len(search.found), "open transaction")
        which = f"None of {more} is one of these" if search.found else "No transaction is open"
        where = f"{counted(search.partitions, 'partition')} at {settings.bootstrap_servers}"
        click.echo(f"{which}: looked in {where}.", err=True)
    _warn(search)
    return 1 if fail and found else 0


@examples("onceflow transactions describe onceflow.validated-deposits")
@transactions.command()
@click.argument("transactional_id", required=False)
@_producer_id
@_topics
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection
def describe(
    transactional_id: str | None,
    producer_id: int | None,
    topics: tuple[str, ...],
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Describe the transaction of TRANSACTIONAL_ID, or of a producer id: state, timeout, start, partitions."""
    from onceflow.admin.transactions import transaction_abort

    _check_one(transactional_id, producer_id)
    with connected(settings, "describing a transaction") as (cluster, deadline):
        found = transaction_abort.describe(cluster, transactional_id, producer_id, topics, deadline)
    now_ms = clock_ms()
    if as_json:
        click.echo(json.dumps(_description(found, now_ms)))
        return
    for line in _lines(found, now_ms):
        click.echo(line)
    if found.search.found:
        _print(found.search.found, now_ms)
    else:
        click.echo("No record of it is undecided.")
    _warn(found.search)


@examples("onceflow transactions abort --producer-id 4001 --topic orders --yes")
@transactions.command()
@click.argument("transactional_id", required=False)
@_producer_id
@_topics
@click.option(
    "--yes", is_flag=True, help="Do it without asking. Without a terminal, nothing is done unless this is given."
)
@click.option("--force", is_flag=True, help="Also when the command refuses. Read its reasons first.")
@click.option("--json", "as_json", is_flag=True, help="Print what was or would be done as JSON.")
@connection
def abort(
    transactional_id: str | None,
    producer_id: int | None,
    topics: tuple[str, ...],
    yes: bool,
    force: bool,
    as_json: bool,
    settings: ClientSettings,
) -> int:
    """Abort the open transaction of TRANSACTIONAL_ID, or of a producer id.

    Says what would be done, and asks. If its coordinator knows the transaction, the producer is fenced: the
    transactional id is taken over, and the coordinator aborts. Where the transaction hangs, an abort marker is written
    to the partition. No read_committed reader will ever see its records.

    Exit codes: 0 nothing of it is open any more; 1 not aborted: refused, not confirmed, or an error; 2 wrong usage; 130
    interrupted.
    """
    from onceflow.admin.transactions import transaction_abort as aborting

    _check_one(transactional_id, producer_id)
    with connected(settings, "planning an abort") as (cluster, deadline):
        producer = aborting.describe(cluster, transactional_id, producer_id, topics, deadline)
        try:
            ago_ms = aborting.flow_committed_ms(cluster, producer.transactional_id, deadline)
        except PermissionDeniedError:
            if not force:  # it cannot be seen whether the flow runs
                raise
            ago_ms = None
        plan = aborting.plan(producer, ago_ms)
    doing, is_flow = bool(plan.fence or plan.markers), ago_ms is not None
    refused = bool(plan.refusals) and not force and (yes or _terminal())
    if not as_json:
        _warn(producer.search)
        for line in _intentions(plan, is_flow=is_flow):
            click.echo(line)
        before = "In spite of this (--force)" if force else "Refused without --force"
        for reason in [] if refused else plan.refusals:
            click.echo(f"{before}: {reason}.")
    if refused:
        raise OptionError(
            "The transaction was not aborted",
            detail="; ".join(plan.refusals),
            next_step=(
                "if the flow does not run any more, start it: its start ends this transaction. " if is_flow else ""
            )
            + "Give --force if this must be done nevertheless",
        )
    open_ = doing
    if doing and not yes:
        doing = _terminal()
        if doing:
            confirm("Abort it?")
        elif not as_json:
            click.echo("Not confirmed, nothing was done. Without a terminal, give --yes to do it.", err=True)
    if doing:
        with connected(settings, "aborting a transaction") as (cluster, deadline):
            seen = aborting.abort(cluster, plan, deadline)
        if not as_json:
            where = f" in {_named(seen)}" if seen else ""
            click.echo(f"Aborted: nothing of it is open any more{where}.")
    if as_json:
        click.echo(json.dumps(_outcome(plan, done=doing)))
    return 0 if doing or not open_ else 1


# ---- words -----------------------------------------------------------------------------------------------


def _terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _check_one(transactional_id: str | None, producer_id: int | None) -> None:
    if (transactional_id is None) == (producer_id is None):
        raise click.UsageError("give either TRANSACTIONAL_ID or --producer-id")


def _print(found: Sequence[OpenInPartition], now_ms: int) -> None:
    columns = ["PARTITION", "FIRST", "HELD BACK", "AGE", "PRODUCER ID", "EPOCH", "STATE", "TRANSACTIONAL ID"]
    rows = [
        [
            f"{each.topic}-{each.partition}",
            each.transaction.start_offset,
            each.held_back,
            _age(each.age_ms(now_ms)),
            each.transaction.producer_id,
            each.transaction.producer_epoch,
            _state(each),
            shown(each.transaction.transactional_id or "-"),
        ]
        for each in found
    ]
    print_columns(columns, rows)


def _state(each: OpenInPartition) -> str:
    if each.hanging is None:
        return "hanging?"
    if each.hanging:
        return f"hanging ({each.transaction.state})" if each.transaction.state else "hanging"
    return each.transaction.state


def _warn(search: Search) -> None:
    for where, why in sorted(search.unseen.items())[:_MOST_NAMED]:
        click.echo(f"not looked at: {where}: {why}", err=True)
    if len(search.unseen) > _MOST_NAMED:
        click.echo(f"not looked at: {len(search.unseen) - _MOST_NAMED} more", err=True)
    if any(each.hanging is None for each in search.found):
        click.echo(f"whether a transaction hangs is not certain: {search.gap}", err=True)


def _lines(found: Producer, now_ms: int) -> list[str]:
    who = f"producer id {found.producer_id}, epoch {found.producer_epoch}"
    if found.transactional_id is None:
        return [f"{who}: no coordinator has returned a transactional id"]
    lines = [f"transactional id {shown(found.transactional_id)}, {who}: {found.state}"]
    if found.started_ms >= 0 and found.is_open:
        lines.append(
            f"begun {in_utc(found.started_ms)}, {_age(now_ms - found.started_ms)} ago; Kafka aborts it "
            f"{_age(found.timeout_ms)} after its begin"
        )
    else:
        lines.append(f"timeout {_age(found.timeout_ms)}")
    if found.partitions:
        lines.append(f"partitions in the transaction: {_named(found.partitions)}")
    return lines


def _intentions(plan: AbortPlan, *, is_flow: bool) -> list[str]:
    producer = plan.producer
    name = shown(producer.transactional_id or "")
    lines = []
    if plan.fence:
        then = "its next start continues after the last committed batch" if is_flow else "it has to be started again"
        lines.append(
            f"The coordinator of {name!r} aborts the transaction, begun {in_utc(producer.started_ms)}, in all "
            f"of its {counted(len(producer.partitions), 'partition')}. A running producer is fenced by that: it stops "
            f"with an error, and {then}."
        )
    for each in plan.markers:
        lines.append(
            f"An abort marker is written to {each.topic}-{each.partition}: the records of producer id "
            f"{producer.producer_id} from offset {each.transaction.start_offset} on are never seen by read_committed "
            f"readers.{'' if producer.state == 'CompleteAbort' else _PERHAPS_COMMITTED}"
        )
    if not lines:
        lines.append(f"Nothing of {name or producer.producer_id} is open: there is nothing to abort.")
    return lines


def _named(places: Sequence[tuple[str, int]]) -> str:
    named = [f"{topic}-{partition}" for topic, partition in places[:_MOST_NAMED]]
    return ", ".join(named) + (f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else "")


def _is_as_old(age_ms: int | None, least_ms: int) -> bool:
    """A transaction whose age nobody knows may be old."""
    return age_ms is None or age_ms >= least_ms


def _age(milliseconds: int | None) -> str:
    """``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    if milliseconds is None:
        return "?"
    seconds = max(0, milliseconds) // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


# ---- JSON ------------------------------------------------------------------------------------------------


def _summary(each: OpenInPartition, now_ms: int) -> dict[str, Any]:
    transaction, age_ms = each.transaction, each.age_ms(now_ms)
    return {
        "topic": each.topic,
        "partition": each.partition,
        "start_offset": transaction.start_offset,
        "held_back": each.held_back,
        "age_seconds": None if age_ms is None else age_ms / 1000,
        "last_write": in_utc(transaction.last_write_ms) if transaction.last_write_ms >= 0 else None,
        "producer_id": transaction.producer_id,
        "producer_epoch": transaction.producer_epoch,
        "transactional_id": transaction.transactional_id,
        "state": transaction.state or None,
        "timeout_seconds": transaction.timeout_ms / 1000 if transaction.timeout_ms >= 0 else None,
        "hanging": each.hanging,
    }


def _description(found: Producer, now_ms: int) -> dict[str, Any]:
    return {
        "transactional_id": found.transactional_id,
        "producer_id": found.producer_id,
        "producer_epoch": found.producer_epoch,
        "state": found.state if found.transactional_id else None,
        "started": in_utc(found.started_ms) if found.started_ms >= 0 and found.is_open else None,
        "timeout_seconds": found.timeout_ms / 1000 if found.timeout_ms >= 0 else None,
        "partitions": [_topic_partition(topic_partition) for topic_partition in found.partitions],
        "open": [_summary(each, now_ms) for each in found.search.found],
    }


def _outcome(plan: AbortPlan, *, done: bool) -> Mapping[str, Any]:
    return {
        "transactional_id": plan.producer.transactional_id,
        "producer_id": plan.producer.producer_id,
        "fence": plan.fence,
        "markers": [_topic_partition(each.topic_partition) for each in plan.markers],
        "refusals": plan.refusals,
        "done": done,
    }


def _topic_partition(topic_partition: tuple[str, int]) -> dict[str, Any]:
    return {"topic": topic_partition[0], "partition": topic_partition[1]}

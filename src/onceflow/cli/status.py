"""``onceflow status``: where flows are, and how far behind, from Kafka alone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.connection import connection_options, settings_of
from onceflow.cli.examples import examples
from onceflow.cli.interrupts import interruptible, until_interrupted
from onceflow.cli.status_text import details, overview
from onceflow.cli.text import shown, timeout_ms
from onceflow.errors import counted
from onceflow.protocol.timestamps import in_utc

if TYPE_CHECKING:
    from onceflow.admin.status.driver_status import DriverStatus
    from onceflow.admin.status.flow_status import FlowStatus

_CALL_S, _ENDPOINT_S = 60.0, 5.0
_EVERY_S = 2.0
_PAUSE_S = 0.1


@examples(
    "onceflow status",
    "onceflow status validated-deposits --max-lag 10000 --max-age '5 minutes'",
    "onceflow status validated-deposits --endpoint http://driver-host:9404",
)
@click.command()
@click.argument("flows", nargs=-1, metavar="[FLOW]...")
@click.option(
    "--watch", is_flag=False, flag_value=f"{_EVERY_S:g}", metavar="[SECONDS]", help="Repeat until Ctrl-C.  [every 2 s]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each flow, with everything.")
@click.option("--max-lag", type=click.IntRange(min=0), metavar="N", help="Exit code 1 if a flow is further behind.")
@click.option(
    "--max-age",
    metavar="DURATION",
    help="Exit code 1 if a flow with lag has not committed for longer, for example '5 minutes'.",
)
@click.option(
    "--tables", "with_tables", is_flag=True, help="Read tables and letters, and count rows, timers and letters."
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    envvar="ONCEFLOW_ENDPOINT",
    metavar="URL",
    help="The metrics port of a driver, which knows more; may be repeated.  [default: $ONCEFLOW_ENDPOINT]",
)
@click.option(
    "--timeout", default=f"{_CALL_S:g} seconds", show_default=True, metavar="DURATION", help="How long to ask brokers."
)
@click.option("--transactional-id-prefix", default="", help="The same as in `Flow(...)`.")
@click.option("--group-id-prefix", help="The same as in `Flow(...)`.")
@connection_options
def status(
    flows: tuple[str, ...],
    watch: str | None,
    as_json: bool,
    max_lag: int | None,
    max_age: str | None,
    with_tables: bool,
    endpoints: tuple[str, ...],
    timeout: str,
    transactional_id_prefix: str,
    group_id_prefix: str | None,
    bootstrap_servers: str | None,
    options: tuple[str, ...],
    config_file: str | None,
) -> int:
    """Show where flows are, and how far behind: all flows as a table, or each FLOW in detail.

    It reads Kafka, and with --endpoint asks drivers. It changes nothing: no flow is fenced, no consumer group is
    joined. LAG counts offsets up to the last stable offset of each partition, transaction markers too; TIME LAG is the
    age of the oldest record that is not committed. `?` means that it is not known. What could not be asked is named,
    and the rest is shown.
    """
    from onceflow.admin.status.driver_compared import attach, tell_answers, without_kafka
    from onceflow.admin.status.driver_status import checked_endpoint
    from onceflow.admin.status.flow_status import exceeded
    from onceflow.admin.status.flow_status_reader import StatusReader
    from onceflow.admin.status.letter_counts import count_letters
    from onceflow.admin.status.status_answers import count_tables
    from onceflow.client.cluster import Cluster
    from onceflow.client.deadline import Deadline
    from onceflow.client.first_connection import LOOK_REFUSED_S
    from onceflow.errors import BrokerUnreachableError, DeadlineExceededError

    settings = settings_of(bootstrap_servers, options, config_file, even_stopped=bool(endpoints))
    every_s, flows = _every(watch, flows)
    urls = [*dict.fromkeys(checked_endpoint(each) for each in endpoints)]
    strange: list[str] = []  # what is wrong with the endpoints
    timeout_s = timeout_ms(timeout, "--timeout") / 1000
    age_s = None if max_age is None else timeout_ms(max_age, "--max-age") / 1000
    if every_s is not None and (max_lag is not None or age_s is not None):
        raise click.UsageError("--max-lag and --max-age are for one look: call it without --watch")
    if every_s is not None and with_tables:
        raise click.UsageError("--tables reads whole topics: call it without --watch")
    with contextlib.closing(Cluster(settings, refused_s=LOOK_REFUSED_S)) as cluster:
        reader = StatusReader(cluster, transactional_id_prefix=transactional_id_prefix, group_id_prefix=group_id_prefix)

        def look() -> list[FlowStatus]:
            drivers, wrong = _drivers(urls, timeout_s)
            deadline = Deadline(timeout_s, "reading the status of flows")
            try:
                found = reader.read(flows, deadline)
                if not flows:  # drivers know flows whose progress could not be read
                    hidden = {each.flow for each in drivers if reader.is_hidden(each.flow)}
                    found += [reader.hidden(name, deadline) for name in sorted(hidden - {each.flow for each in found})]
            except (BrokerUnreachableError, DeadlineExceededError) as silent:
                if not drivers:
                    raise
                found = without_kafka(flows, drivers, silent)
            others = attach(found, drivers, transactional_id_prefix)
            if urls:
                tell_answers(found, served=len(wrong) < len(urls))
            for each in found if flows else ():  # whoever asks for a flow by name asks for its driver
                each.warnings += wrong + others if each.driver is None else []
            strange[:] = wrong + ([] if flows and any(each.driver for each in found) else others)
            return found

        def lines(found: list[FlowStatus]) -> list[str]:
            if as_json:
                return [json.dumps(to_json(each)) for each in found]
            shown_already = {text for each in found for text in each.warnings}
            remarks = [f"warning: {shown(text)}" for text in strange if text not in shown_already]
            return (details(found) if flows else overview(found)) + remarks

        if every_s is not None:
            _repeat(look, lines, every_s, live=not as_json)
        found = look()
        hidden = reader.unseen
        for each in found if with_tables else ():
            count_tables(cluster, each)
            count_letters(cluster, each)
    for line in lines(found):
        click.echo(line)
    for text in strange if as_json else []:
        click.echo(f"onceflow: {text}", err=True)
    if hidden and not flows:
        click.echo(f"onceflow: {_partly(hidden)}", err=True)
    elif not found:
        click.echo(f"No flow has committed anything at {settings.bootstrap_servers}.", err=True)
    over = [text for each in found for text in exceeded(each, max_lag, age_s)]
    for text in over:
        click.echo(f"onceflow: {text}", err=True)
    # Flows may be missing, or where one is could not be asked.
    partly = (hidden and not flows) or any(each.batch is None and each.unseen for each in found)
    return 1 if over or partly else 0


def _every(watch: str | None, flows: tuple[str, ...]) -> tuple[float | None, tuple[str, ...]]:
    """Seconds between two looks, and the flows: in ``--watch FLOW`` the word after the option is a flow."""
    if watch is None:
        return None, flows
    try:
        every_s = float(watch)
    except ValueError:
        return _EVERY_S, (watch, *flows)
    if not 0.1 <= every_s <= 86_400:
        raise click.UsageError(f"--watch {watch}: between 0.1 and 86,400 seconds")
    return every_s, flows


def _drivers(urls: Sequence[str], timeout_s: float) -> tuple[list[DriverStatus], list[str]]:
    """What the endpoints say, and what is wrong with them. They are asked at once."""
    from concurrent.futures import ThreadPoolExecutor

    from onceflow.admin.status.driver_status import ask_endpoint

    if not urls:
        return [], []
    with ThreadPoolExecutor(len(urls)) as pool:
        answers = list(pool.map(lambda url: ask_endpoint(url, min(_ENDPOINT_S, timeout_s)), urls))
    return [each for drivers, _ in answers for each in drivers], [problem for _, problem in answers if problem]


def _repeat(
    look: Callable[[], list[FlowStatus]], lines: Callable[[list[FlowStatus]], list[str]], every_s: float, *, live: bool
) -> None:
    """Look again and again. Ends with Ctrl-C, or if the first look fails. Later ones may: brokers come back."""
    from onceflow.errors import BrokerUnreachableError, DeadlineExceededError

    with until_interrupted(), interruptible() as check, _screen(live) as show:
        has_seen = False
        while True:
            try:
                show(lines(look()))
                has_seen = True
            except (BrokerUnreachableError, DeadlineExceededError) as silent:
                if not has_seen:
                    raise
                click.echo(f"onceflow: {in_utc(int(time.time() * 1000))}: {silent.what}", err=True)
            until = time.monotonic() + every_s
            while time.monotonic() < until:
                check()
                time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))


@contextlib.contextmanager
def _screen(live: bool) -> Iterator[Callable[[list[str]], None]]:
    """Shows lines: in place of those before on a terminal, else after them."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not (live and console.is_terminal):
        yield lambda lines: click.echo("\n".join(lines)) if lines else None
        return
    with Live(console=console, auto_refresh=False) as screen:
        yield lambda lines: screen.update(Text("\n".join(lines) or "no flow has committed anything"), refresh=True)


def _partly(hidden: Mapping[int, str]) -> str:
    """The warning that flows may be missing in the list of all."""
    from onceflow.protocol.progress import PROGRESS_TOPIC

    reasons = ", ".join(sorted({*hidden.values()}))
    return (
        f"{counted(len(hidden), 'partition')} of {PROGRESS_TOPIC} could not be asked, so flows may be missing here "
        f"({reasons})"
    )


def to_json(flow: FlowStatus) -> dict[str, Any]:
    """Everything about a flow."""
    from dataclasses import asdict

    summary = {"flow": flow.flow, "batch": flow.batch, "lag": flow.lag, "lag_seconds": flow.lag_seconds}
    return {**summary, **asdict(flow)}
